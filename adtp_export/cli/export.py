"""`adtp-export`: a student checkpoint becomes a verified ONNX file and engines."""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

from .. import __version__
from ..errors import InputError, did_you_mean, option
from ..records import BUILT_NOT_RUN, PLUGIN, Manifest, Profile
from .console import Console, print_json, run_command
from .job import Job, plugin_obstacle
from .quantization import calibrate, find_recipes, quantize

SHORTEST = 4
PRECISIONS = ("fp32", "fp16", "bf16", "int8", "fp8")
"""From the highest down."""
QUANTIZED = ("int8", "fp8")
REPORTS = ("report.md", "report.html")
MAX_ACCURACY_DROP = 1.0


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="adtp-export",
        description="Turn a trained AD-TP student into one ONNX file for every runtime and, with --trt, into TensorRT "
        "engines; prove that they equal the PyTorch student.",
        epilog="Exit codes: 0 built and verified; 1 verification failed; 2 bad input; 3 a dependency is missing; "
        "4 a runtime refused the model; 70 a bug. On 1 to 4 nothing is written to OUT.",
    )
    parser.add_argument(
        "model_dir", metavar="MODEL_DIR", type=Path, help="checkpoint: config.json, model.safetensors, tokenizer"
    )
    parser.add_argument(
        "--out", metavar="DIR", type=Path, help="output directory (default: ./<name of MODEL_DIR>-export)"
    )
    replace = parser.add_mutually_exclusive_group()
    replace.add_argument("--force", action="store_true", help="replace an existing output directory")
    replace.add_argument(
        "--update", action="store_true", help="add targets to an output directory of the same checkpoint"
    )
    engines = parser.add_argument_group("engines")
    parser.add_argument(
        "--precision",
        metavar="LIST",
        default="fp32",
        help="precisions to export and to build engines in: fp32, fp16, bf16, int8, fp8 (default: fp32). model.onnx, in fp32, "
        "is always written: the others are made of it",
    )
    engines.add_argument("--trt", action="store_true", help="build TensorRT engines as well")
    engines.add_argument(
        "--trt-flavor",
        choices=("auto", "tensorrt", "rtx"),
        default="auto",
        help="auto: TensorRT where it is installed beside a GPU, else TensorRT-RTX, which builds without one",
    )
    engines.add_argument(
        "--gpu", metavar="LIST", help="GPUs to build for, such as sm_86,sm_89,sm_120 (the default for RTX)"
    )
    engines.add_argument(
        "--attention",
        choices=("auto", "plugin", "portable"),
        help="what engines run attention with: plugin, kernels that never see padding; portable, standard layers; auto (the "
        "default), both, until the plugin's engine has been verified on this machine",
    )
    engines.add_argument(
        "--ort-cpu",
        action="store_true",
        help="write model.ort-cpu.fp32.onnx, which trades memory for time in ONNX Runtime on CPUs, as well: the first layer looks "
        "up per word what its projections would compute (12 bytes x vocabulary x hidden size more)",
    )
    engines.add_argument(
        "--ort-cuda",
        action="store_true",
        help="write model.ort-cuda.fp32.onnx, for ONNX Runtime's CUDA provider, as well",
    )
    engines.add_argument("--per-gpu", action="store_true", help="one engine per GPU instead of one for all")
    engines.add_argument(
        "--batch", metavar="MIN:OPT:MAX", default="1:8:32", help="batch sizes engines take (default: 1:8:32)"
    )
    engines.add_argument(
        "--seq",
        metavar="MIN:OPT:MAX",
        help="padded lengths engines take (default: 1:128:512, MAX at most the position table)",
    )
    quantization = parser.add_argument_group("quantization")
    quantization.add_argument(
        "--calibration-data",
        metavar="FILE",
        type=Path,
        help="text that int8 and fp8 take their ranges from (512 rows of it): .txt, .tsv, .csv, .jsonl, each also .gz",
    )
    quantization.add_argument(
        "--max-accuracy-drop",
        metavar="X",
        type=float,
        help="percentage points that a quantized target may lose: of accuracy with --label-column, else of predictions "
        f"that change (default: {MAX_ACCURACY_DROP:g}). The products that cost most stay unquantized until it holds",
    )
    quantization.add_argument(
        "--recipe",
        metavar="FILE",
        type=Path,
        action="append",
        default=[],
        help="a recipe of your own (TOML) in place of the one for its target and format; can be given again",
    )
    verify = parser.add_argument_group("verification")
    verify.add_argument(
        "--verify-data", metavar="FILE", type=Path, help="text to verify on: .txt, .tsv, .csv, .jsonl, each also .gz"
    )
    verify.add_argument(
        "--verify-rows", metavar="N", type=int, help="rows of it to take, by a fixed seed (default: up to 1,024)"
    )
    verify.add_argument(
        "--text-column",
        metavar="C",
        help="text column of --verify-data and --calibration-data, or two with a comma for sentence pairs",
    )
    verify.add_argument("--label-column", metavar="C", help="label column of --verify-data: report accuracy as well")
    verify.add_argument("--no-verify", action="store_true", help="do not compare with the PyTorch student")
    verify.add_argument("--openvino", action="store_true", help="verify in OpenVINO as well")
    parser.add_argument("--debug-outputs", action="store_true", help="keep the output kept_site in the ONNX file")
    parser.add_argument(
        "--allow-pickle", action="store_true", help="accept pytorch_model.bin where there are no safetensors"
    )
    parser.add_argument("--json", action="store_true", help="print the manifest on stdout")
    parser.add_argument("--version", action="version", version=f"adtp-export {__version__}")
    return parser


def main() -> None:
    options = make_parser().parse_args()
    run_command("adtp-export", lambda: command(options))


def command(options: argparse.Namespace) -> int:
    console = Console()
    out = options.out or Path(f"{options.model_dir.resolve().name}-export")
    manifest = export(options, out, console)
    if options.json:
        print_json(manifest.to_json())
    else:
        _summarize(manifest, out, console)
    return 0


def export(options: argparse.Namespace, out: Path, console: Console) -> Manifest:
    """Do everything the options ask for and publish it at `out`; return its manifest.

    Raises:
        AdtpError: with the exit code that says why nothing was published.
    """
    batch = Profile.parse(options.batch, "--batch")
    seq = Profile.parse(options.seq, "--seq") if options.seq else None
    if options.no_verify and options.verify_data:
        raise InputError("--verify-data and --no-verify contradict one another; leave one out")
    if options.label_column and not options.verify_data:
        raise InputError("--label-column names a column of --verify-data FILE, which is missing")
    if options.text_column and not (options.verify_data or options.calibration_data):
        raise InputError(
            "--text-column names a column of --verify-data FILE or --calibration-data FILE; both are missing"
        )
    if options.verify_rows is not None and (not options.verify_data or options.verify_rows < 1):
        raise InputError(f"--verify-rows: got {options.verify_rows}; accepted is at least 1, with --verify-data FILE")
    precisions = _parse_precisions(options.precision)
    for name in ("attention", "gpu", "per_gpu"):
        if getattr(options, name) and not options.trt:
            raise InputError(f"{option(name)} says how to build engines; add --trt")
    formats = [precision for precision in precisions if precision in QUANTIZED]
    _check_quantization(options, formats)
    with console.step("import_s", "importing PyTorch and transformers"):
        from ..engines import tensorrt
        from ..export.output import OutputDirectory, write_companions, write_manifest, writing
        from ..model.checkpoint import load_checkpoint
        from ..report import html, markdown
    flavor = tensorrt.choose_flavor(options.trt_flavor) if options.trt else None
    gpus = tensorrt.parse_gpus(options.gpu, flavor) if flavor else ()
    gpus_of = {p: tensorrt.gpus_for(p, gpus, chosen=options.gpu is not None) for p in precisions} if flavor else {}
    recipes = find_recipes(formats, ("ort-cpu", *(("trt", "rtx") if flavor else ())), options.recipe)
    directory = OutputDirectory(out, options.force, options.update, protected=options.model_dir)
    with console.step("load_s", f"loading {options.model_dir.name}"):
        checkpoint = load_checkpoint(options.model_dir, options.allow_pickle)
    profile = {"batch": batch, "seq": _fit(seq, checkpoint.config.max_position_embeddings)}
    if flavor:
        tensorrt.check_profile(profile)
    if options.label_column and checkpoint.config.problem_type not in (None, "single_label_classification"):
        raise InputError(
            f"--label-column: accuracy is for classes, and the student's task is {checkpoint.config.problem_type}"
        )
    previous = Manifest.read(out) if options.update else None
    if previous is not None and previous.checkpoint["sha256"] != checkpoint.sha256:
        raise InputError(f"--update: {out} was exported from another checkpoint; use --force to replace it")

    if options.attention == PLUGIN and (obstacle := plugin_obstacle(checkpoint, gpus)):
        raise InputError(f"--attention plugin: {obstacle}")

    with directory, writing(out):
        work = directory.work
        if previous is not None:
            shutil.copytree(out, work, dirs_exist_ok=True)
            for name in REPORTS:  # written anew, and so are their sizes and hashes
                (work / name).unlink(missing_ok=True)
        write_companions(checkpoint, work)
        job = Job(checkpoint, work, profile, console)
        calibration = calibrate(job, options.calibration_data, options.text_column) if recipes else None
        if not options.no_verify:
            job.run_oracle(options.verify_data, options.text_column, options.label_column, options.verify_rows)
        job.export_onnx(options.debug_outputs)
        if options.ort_cpu:
            job.lower_to_ort_cpu()
        for precision in precisions:
            if precision != "fp32" and precision not in QUANTIZED:
                job.convert(precision)
        if calibration is not None:
            job.points = MAX_ACCURACY_DROP if options.max_accuracy_drop is None else options.max_accuracy_drop
            for recipe in recipes:
                quantize(job, calibration, recipe, job.points)
        job.add_onnx_targets(options.openvino)
        job.time_variants()
        if options.ort_cuda:
            job.add_ort_cuda(precisions)
        if flavor:
            for precision in precisions:
                chosen = gpus_of[precision]
                if left := [gpu for gpu in gpus if gpu not in chosen]:
                    job.note(f"no {precision} engine for {', '.join(left)}: e4m3 products need sm_89 or newer")
                for group in [(gpu,) for gpu in chosen] if options.per_gpu else [chosen]:
                    job.add_engines(flavor, group, options.attention or "auto", precision)
            job.ship_plugin_library()
        shutil.rmtree(work / "debug", ignore_errors=True)
        manifest = job.manifest(previous)
        manifest = write_manifest(manifest, work)  # once for the sizes that the report shows
        for name, text in zip(REPORTS, (markdown.render(manifest), html.render(manifest, job.views()))):
            (work / name).write_text(text, encoding="utf-8")
        manifest = write_manifest(manifest, work)
        directory.publish()
    return manifest


def _check_quantization(options: argparse.Namespace, formats: list[str]) -> None:
    for name in ("calibration_data", "max_accuracy_drop", "recipe"):
        if getattr(options, name) not in (None, []) and not formats:
            raise InputError(f"{option(name)} is about quantized models; add --precision int8, or fp8 with --trt")
    if formats and not options.calibration_data:
        raise InputError(
            f"--precision {formats[0]} takes its ranges from text like yours; type: --calibration-data FILE (.txt, .tsv, "
            ".csv, .jsonl; 512 rows are enough)"
        )
    if "fp8" in formats and not options.trt:
        raise InputError(
            "--precision fp8 is for TensorRT engines; add --trt, or use int8, which ONNX Runtime takes too"
        )
    if (drop := options.max_accuracy_drop) is not None and not 0 <= drop <= 100:
        raise InputError(f"--max-accuracy-drop: got {drop:g}; accepted are 0 to 100 percentage points")


def _parse_precisions(text: str) -> tuple[str, ...]:
    names = [name.strip() for name in text.split(",")]
    for name in names:
        if name not in PRECISIONS:
            known = ", ".join(PRECISIONS)
            raise InputError(
                f"--precision: got {name!r}; accepted in version {__version__} are {known}{did_you_mean(name, PRECISIONS)}"
            )
    return tuple(precision for precision in PRECISIONS if precision in names)


def _fit(seq: Profile | None, positions: int) -> Profile:
    if seq is not None and seq.max < SHORTEST:
        raise InputError(
            f"--seq: got a MAX of {seq.max}; accepted is at least {SHORTEST}: [CLS], [SEP] twice, and a token"
        )
    if seq is None:
        return Profile(1, min(128, positions), min(512, positions))
    if seq.max > positions:
        raise InputError(
            f"--seq: got a MAX of {seq.max}; the model's position table ends at {positions}, "
            f"type --seq {min(seq.min, positions)}:{min(seq.opt, positions)}:{positions}"
        )
    return seq


def _summarize(manifest: Manifest, out: Path, console: Console) -> None:
    from rich.table import Table

    judged = manifest.verification.get("accuracy") is not None
    table = Table("target", "status", "max logit diff", "predictions", "kept tokens", *["accuracy"] * judged, "file")
    for name, target in manifest.targets.items():
        p = target.parity
        figures = (
            (f"{p.max_abs_logit_diff:.1e}", f"{p.prediction_agreement:.2%}", f"{p.kept_token_agreement:.2%}")
            if p
            else ("", "", "")
        )
        right = (f"{p.accuracy:.2%}" if p and p.accuracy is not None else "",) if judged else ()
        table.add_row(name, target.status, *figures, *right, target.file)
    console.print(table)
    for note in manifest.notes:
        console.note(note)
    if any(target.status == BUILT_NOT_RUN for target in manifest.targets.values()):
        console.note(
            "built-not-run: the engine is for a GPU that this machine does not have, so nothing here has run it"
        )
    total = sum(manifest.durations_s.values())
    console.print(
        f"{out}  {len(manifest.files)} files, {sum(f['bytes'] for f in manifest.files.values()) / 1e6:.1f} MB, {total:.1f} s"
    )
    print(out)
