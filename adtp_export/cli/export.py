"""`adtp-export`: a student checkpoint becomes a verified ONNX file and engines."""

from __future__ import annotations

import argparse
import dataclasses
import importlib.metadata
import json
import platform
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .. import __version__
from ..errors import InputError, MissingDependencyError, VerificationError
from ..records import BUILT_NOT_RUN, FAILED, UNVERIFIED, VERIFIED, Manifest, Profile, Target, file_entry
from .console import Console, run_command

if TYPE_CHECKING:
    from ..engines import Engine
    from ..engines.tensorrt import Flavor
    from ..model.checkpoint import Checkpoint
    from ..verify.oracle import OracleRun

MODEL = "model.onnx"
SHORTEST = 4


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
        "--precision", metavar="LIST", default="fp32", help="precisions to export; this version knows fp32"
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
        choices=("auto", "portable"),
        default="auto",
        help="what engines run attention with; this version knows the portable body, which auto chooses",
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
    verify = parser.add_argument_group("verification")
    verify.add_argument(
        "--verify-data", metavar="FILE", type=Path, help="text to verify on: .txt, .tsv, .csv, .jsonl, each also .gz"
    )
    verify.add_argument("--text-column", metavar="C", help="its text column, or two with a comma for sentence pairs")
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
        json.dump(manifest.to_json(), sys.stdout, indent=2, ensure_ascii=False)
        print()
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
    if options.text_column and not options.verify_data:
        raise InputError("--text-column names a column of --verify-data FILE, which is missing")
    if options.precision != "fp32":
        raise InputError(f"--precision: got {options.precision!r}; accepted in version {__version__} is fp32")
    for option in ("gpu", "per_gpu"):
        if getattr(options, option) and not options.trt:
            raise InputError(f"--{option.replace('_', '-')} says how to build engines; add --trt")
    with console.step("import_s", "importing PyTorch and transformers"):
        from ..engines import tensorrt
        from ..export.output import OutputDirectory, write_companions, write_manifest, writing
        from ..model.checkpoint import load_checkpoint
        from ..report import markdown
    flavor = tensorrt.choose_flavor(options.trt_flavor) if options.trt else None
    gpus = tensorrt.parse_gpus(options.gpu, flavor) if flavor else ()
    directory = OutputDirectory(out, options.force, options.update, protected=options.model_dir)
    with console.step("load_s", f"loading {options.model_dir.name}"):
        checkpoint = load_checkpoint(options.model_dir, options.allow_pickle)
    profile = {"batch": batch, "seq": _fit(seq, checkpoint.config.max_position_embeddings)}
    if flavor:
        tensorrt.check_profile(profile)
    previous = Manifest.read(out) if options.update else None
    if previous is not None and previous.checkpoint["sha256"] != checkpoint.sha256:
        raise InputError(f"--update: {out} was exported from another checkpoint; use --force to replace it")

    with directory, writing(out):
        work = directory.work
        if previous is not None:
            shutil.copytree(out, work, dirs_exist_ok=True)
            (work / "report.md").unlink(missing_ok=True)  # written anew, and so are its size and hash
        write_companions(checkpoint, work)
        job = _Job(checkpoint, work, profile, console)
        if not options.no_verify:
            job.run_oracle(options.verify_data, options.text_column)
        job.export_onnx(options.debug_outputs)
        job.add_onnx_targets(options.openvino)
        if flavor:
            for group in [(gpu,) for gpu in gpus] if options.per_gpu else [gpus]:
                job.add_engine(flavor, group)
        if job.debug.parent != work:
            shutil.rmtree(job.debug.parent)
        manifest = job.manifest(previous)
        manifest = write_manifest(manifest, work)  # once for the sizes that the report shows
        (work / "report.md").write_text(markdown.render(manifest), encoding="utf-8")
        manifest = write_manifest(manifest, work)
        directory.publish()
    return manifest


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


class _Job:
    """One run's targets as they come to be."""

    def __init__(self, checkpoint: Checkpoint, work: Path, profile: dict[str, Profile], console: Console) -> None:
        self.checkpoint, self.work, self.profile, self.console = checkpoint, work, profile, console
        self.debug = work / MODEL
        self.oracle: OracleRun | None = None
        self.verification: dict[str, Any] = {}
        self.targets: dict[str, Target] = {}
        self.notes: list[str] = []

    def run_oracle(self, file: Path | None, column: str | None) -> None:
        from ..export.program import input_names
        from ..text import read_texts
        from ..verify import samples
        from ..verify.oracle import run_oracle

        config = self.checkpoint.config
        if file is None:
            texts, total = samples.built_in_texts(config.type_vocab_size > 1), None
            source = "the built-in sentences"
        else:
            texts, total = samples.sample(read_texts(file, column))
            source = file.name
        batches = samples.make_batches(
            self.checkpoint.tokenizer,
            texts,
            input_names(config.type_vocab_size),
            config.pad_token_id or 0,
            self.profile["seq"].max,
            self.profile["batch"].max,
        )
        rows = sum(len(batch["input_ids"]) for batch in batches)
        if total is not None and rows < total:
            source += f" ({rows} of {total} rows, seed 0)"
        shape = f"{rows} rows in {len(batches)} batches"
        with self.console.step(
            "oracle_s", f"running the PyTorch student on {source}: {shape}, fp32 and fp64"
        ) as progress:
            self.oracle = run_oracle(self.checkpoint.student, batches, progress)
        self.verification = {"text": source, "rows": rows, "batches": len(batches)}

    def export_onnx(self, debug_outputs: bool) -> None:
        """Write `model.onnx`, and its debug form beside it in a folder of its own unless they are one file."""
        with self.console.step("export_s", "exporting to ONNX"):
            from ..export import program

            metadata = {
                "version": __version__,
                "precision": "fp32",
                "checkpoint_sha256": self.checkpoint.sha256,
                "prune_sites": list(self.checkpoint.config.prune_sites),
            }
            model = program.export_portable(self.checkpoint.student, metadata)
            if debug_outputs:
                program.add_debug_outputs(model)
            program.save(model, self.work / MODEL)
            if debug_outputs or self.oracle is None:
                return
            program.add_debug_outputs(model)
            self.debug = self.work / "debug" / MODEL
            self.debug.parent.mkdir()
            program.save(model, self.debug, inline_limit_bytes=0)  # weights apart: faster to write and to load

    def add_onnx_targets(self, openvino_too: bool) -> None:
        """Verify the ONNX file in ONNX Runtime; in OpenVINO on request, or where it is the only one installed.

        Raises:
            MissingDependencyError: there is nothing to verify in.
        """
        from ..engines import onnxruntime, openvino

        if onnxruntime.installed():
            self._add("onnxruntime-cpu-fp32", MODEL, "portable", onnxruntime.OnnxRuntimeEngine, True, {})
        elif not openvino.installed() and self.oracle is not None:
            raise MissingDependencyError(
                "verification needs a runtime, and none is installed; type: pip install 'adtp-export[cpu]', or add --no-verify"
            )
        if openvino_too or (openvino.installed() and not onnxruntime.installed()):
            self._add("openvino-cpu-fp32", MODEL, "portable", openvino.OpenVinoEngine, False, {})

    def add_engine(self, flavor: Flavor, gpus: tuple[str, ...]) -> None:
        from ..engines import tensorrt

        name = f"{flavor.short}-{'+'.join(gpus)}-fp32-portable"
        file = self.work / "engines" / f"{name}.engine"
        file.parent.mkdir(exist_ok=True)
        details = self._build(flavor, gpus, self.work / MODEL, file)
        if not tensorrt.runs_here(flavor, gpus):
            self.targets[name] = Target(f"engines/{file.name}", BUILT_NOT_RUN, "portable", None, details)
            return
        debug = file
        if self.oracle is not None and self.debug.parent != self.work:
            debug = self.debug.with_name(file.name)
            self._build(flavor, gpus, self.debug, debug)
        self._add(
            name,
            f"engines/{file.name}",
            "portable",
            lambda path: tensorrt.TensorRtEngine(path, flavor),
            False,
            details,
            debug,
        )

    def _build(self, flavor: Flavor, gpus: tuple[str, ...], model: Path, file: Path) -> dict[str, Any]:
        from ..engines import tensorrt

        with self.console.step(f"build_{file.stem}_s", f"building {file.name}") as progress:
            engine, details = tensorrt.build(
                flavor, model, self.profile, gpus, lambda phase, step, steps: progress(step, steps)
            )
            with file.open("wb") as stream:
                stream.write(engine)
        return {**details, "profile": {axis: str(p) for axis, p in self.profile.items()}}

    def _add(
        self,
        name: str,
        file: str,
        attention: str,
        load: Callable[[Path], Engine],
        exact_debug: bool,
        details: dict[str, Any],
        debug: Path | None = None,
    ) -> None:
        """Verify one target and record it.

        Raises:
            VerificationError: it does not equal the oracle.
        """
        from ..verify.parity import compare

        if self.oracle is None:
            self.targets[name] = Target(file, UNVERIFIED, attention, None, details)
            return
        with self.console.step(f"verify_{name}_s", f"verifying {name} on {self.oracle.rows} rows") as progress:
            debug = debug or self.debug
            engine = load(self.work / file)
            inspected = None if "kept_site" in engine.outputs else load(debug)
            parity = compare(self.oracle, engine, inspected, exact_debug, progress)
        self.targets[name] = Target(file, FAILED if parity.failure else VERIFIED, attention, parity, details)
        if parity.failure:
            raise VerificationError(
                f"{name} does not equal the PyTorch student: {parity.failure}. Nothing was published"
            )
        for flip in parity.excused_flips:
            self.notes.append(
                f"{name}: row {flip.row} keeps other tokens from site {flip.site} on; that decision has a margin of "
                f"{flip.margin:.2e}, below its rounding error of {flip.bound:.2e}"
            )

    def manifest(self, previous: Manifest | None) -> Manifest:
        config = self.checkpoint.config
        manifest = Manifest(
            versions=versions(),
            checkpoint={
                "name": self.checkpoint.directory.resolve().name,
                "sha256": self.checkpoint.sha256,
                "stored_dtype": self.checkpoint.stored_dtype,
                "prune_sites": list(config.prune_sites),
                "retention_ratios": list(config.retention_ratios),
            },
            profile=self.profile,
            retention=self.oracle.retention if self.oracle else {},
            targets=self.targets,
            verification=self.verification,
            notes=tuple(self.notes),
            durations_s=dict(self.console.durations_s),
        )
        if previous is None:
            return manifest
        known = {name: self._still_known(target, previous) for name, target in previous.targets.items()}
        return dataclasses.replace(
            manifest,
            profile=previous.profile,  # of what was there; the engines of this run carry their own
            targets={**known, **{name: self._better_known(name, t, previous) for name, t in self.targets.items()}},
            retention=manifest.retention or previous.retention,
            verification=manifest.verification or previous.verification,
            notes=tuple(dict.fromkeys((*previous.notes, *manifest.notes))),
        )

    def _still_known(self, target: Target, previous: Manifest) -> Target:
        """Forget what was found out about a file that this run has changed."""
        if previous.files[target.file]["sha256"] == file_entry(self.work / target.file)["sha256"]:
            return target
        return dataclasses.replace(target, status=UNVERIFIED, parity=None)

    def _better_known(self, name: str, target: Target, previous: Manifest) -> Target:
        """Keep what an earlier run found out about a file, where this run wrote the same one and did not look."""
        if target.status != UNVERIFIED or name not in previous.targets:
            return target
        same = previous.files[target.file]["sha256"] == file_entry(self.work / target.file)["sha256"]
        return previous.targets[name] if same else target


def versions() -> dict[str, str]:
    packages = (
        "torch",
        "transformers",
        "onnx",
        "onnxscript",
        "onnxruntime",
        "onnxruntime-gpu",
        "openvino",
        "tensorrt",
        "tensorrt-rtx",
    )
    versions = {
        "adtp-export": __version__,
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.machine()}",
    }
    for package in packages:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


def _summarize(manifest: Manifest, out: Path, console: Console) -> None:
    from rich.table import Table

    table = Table("target", "status", "max logit diff", "predictions", "kept tokens", "file")
    for name, target in manifest.targets.items():
        p = target.parity
        figures = (
            (f"{p.max_abs_logit_diff:.1e}", f"{p.prediction_agreement:.2%}", f"{p.kept_token_agreement:.2%}")
            if p
            else ("", "", "")
        )
        table.add_row(name, target.status, *figures, target.file)
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
