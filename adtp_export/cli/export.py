"""`adtp-export`: a student checkpoint becomes a verified ONNX file and engines."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from ..artifacts.records import Manifest
from ..contract import LAYOUTS, PRECOMPUTED_MODEL, TRT_FLAVORS, __version__
from ..pipeline.export.options import ATTENTIONS, MAX_ACCURACY_DROP
from ..pipeline.export.plan import default_out
from ..report.names import statuses
from ..report.targets import ALLOWED, SIZE, groups
from .console import Console, Parser, print_json, print_path, run_command
from .reading import add_reading_options


def make_parser() -> Parser:
    parser = Parser(
        prog="adtp-export",
        description="Turn a transformers encoder, token-pruned or plain, into a portable ONNX file that drops padding first. --trt "
        "adds TensorRT engines. Each file that runs on this machine is compared with the PyTorch model.",
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
        help="what to export and to build engines in: fp32, fp16, bf16, int8, fp8 (default: fp32). model.onnx, in fp32, is "
        "always written",
    )
    engines.add_argument("--trt", action="store_true", help="also build TensorRT engines")
    engines.add_argument(
        "--trt-flavor",
        choices=TRT_FLAVORS,
        default="auto",
        help="auto (the default): TensorRT where it is installed beside a GPU, else TensorRT-RTX, which builds without a GPU",
    )
    engines.add_argument(
        "--gpu", metavar="LIST", help="GPUs to build for, such as sm_86,sm_89,sm_120 (the default for RTX)"
    )
    engines.add_argument(
        "--attention",
        choices=ATTENTIONS,
        help="attention in engines, and in ONNX Runtime with --ort-cpu. plugin: kernels that never see padding. portable: standard "
        "layers. auto (the default): both; or the plugin alone, where this machine can verify an engine with it",
    )
    engines.add_argument(
        "--precompute-embedding-projections",
        action="store_true",
        help=f"also write {PRECOMPUTED_MODEL}, for ONNX Runtime on CPUs. It is some 10%% faster, and larger by 12 bytes x "
        "vocabulary x hidden size. Use the operators of adtp-plugin build --cpu where they are built",
    )
    engines.add_argument(
        "--ort-cuda",
        action="store_true",
        help="also write model.ort-cuda.fp32.onnx, for ONNX Runtime's CUDA provider",
    )
    engines.add_argument(
        "--packed-inputs",
        action="store_true",
        help="also write model.packed.onnx, which takes texts one after the other and where they begin, without padding",
    )
    engines.add_argument(
        "--static-tokens",
        metavar="T[,T...]",
        help="also write files and engines of fixed sizes, which GPUs replay: tokens of a whole batch of up to --batch MAX texts. With "
        "bounds after cuts: 512:256:128",
    )
    engines.add_argument("--per-gpu", action="store_true", help="one engine per GPU instead of one for all")
    engines.add_argument(
        "--batch", metavar="MIN:OPT:MAX", default="1:8:32", help="batch sizes engines take (default: 1:8:32)"
    )
    engines.add_argument(
        "--seq",
        metavar="MIN:OPT:MAX",
        help="padded lengths engines take (default: 1:128:512; MAX is at most what the model reads)",
    )
    quantization = parser.add_argument_group("quantization")
    quantization.add_argument(
        "--calibration-data",
        metavar="FILE",
        type=Path,
        help="text that int8 and fp8 take their ranges from; 512 rows are used: .txt, .tsv, .csv, .jsonl, each also .gz",
    )
    quantization.add_argument(
        "--max-accuracy-drop",
        metavar="X",
        type=float,
        help=f"percentage points that a quantized target may lose (default: {MAX_ACCURACY_DROP:g}): of accuracy with "
        "--label-column, else of predictions that change. The costliest products stay unquantized until texts no longer show more",
    )
    quantization.add_argument(
        "--recipe",
        metavar="FILE",
        type=Path,
        action="append",
        default=[],
        help="your own recipe (TOML) in place of the built-in one for its target and format; may be given several times",
    )
    verify = parser.add_argument_group("verification")
    verify.add_argument(
        "--verify-data",
        metavar="FILE",
        type=Path,
        help="text to verify on: .txt, .tsv, .csv, .jsonl, SQuAD's .json, each also .gz (default: --calibration-data, else built-in "
        "sentences, and random token ids with either)",
    )
    verify.add_argument(
        "--verify-rows", metavar="N", type=int, help="rows of --verify-data to use (default: up to 1,024)"
    )
    verify.add_argument(
        "--text-column",
        metavar="C",
        help="text column of --verify-data and --calibration-data, or two with a comma for sentence pairs",
    )
    verify.add_argument(
        "--label-column", metavar="C", help="label column of --verify-data: also report how good the answers are"
    )
    verify.add_argument(
        "--skip-parity-check",
        action="store_true",
        help="do not compare with the PyTorch student; what is written is marked unverified",
    )
    verify.add_argument("--openvino", action="store_true", help="also verify in OpenVINO")
    parser.add_argument(
        "--inline",
        action="store_true",
        help="also write model.inline.onnx, the same model without functions of its own, for tools that drop them",
    )
    parser.add_argument(
        "--layout",
        choices=LAYOUTS,
        help="names of files in OUT. hub: those that transformers.js, optimum and sentence-transformers look for, and a model card "
        "(default: plain; hub with --push-to-hub)",
    )
    parser.add_argument(
        "--push-to-hub",
        metavar="REPO",
        help="also upload OUT to this repository of the Hugging Face Hub, such as user/my-model; a new one is private",
    )
    parser.add_argument(
        "--with-tokenizer",
        action="store_true",
        help="also write model.strings.onnx, which takes texts: for applications without a tokenizer library. It has operators of "
        "onnxruntime-extensions",
    )
    parser.add_argument(
        "--triton",
        metavar="REPO",
        type=Path,
        help="also write models of Triton Inference Server to this model repository, beside those that are there: texts in for the Python "
        "backend, tokens in for ONNX Runtime and TensorRT",
    )
    parser.add_argument(
        "--triton-name", metavar="NAME", help="what these models are called (default: the name of MODEL_DIR)"
    )
    parser.add_argument("--debug-outputs", action="store_true", help="keep the output kept_site in the ONNX file")
    add_reading_options(parser)
    parser.add_argument("--json", action="store_true", help="print the manifest on stdout")
    parser.add_argument("--version", action="version", version=f"adtp-export {__version__}")
    return parser


def main() -> None:
    options = make_parser().parse_args()
    run_command("adtp-export", lambda: command(options))


def command(options: argparse.Namespace) -> int:
    from ..pipeline.export.export import export

    console, asked = Console(), keywords(options)
    manifest = export(**asked, steps=console)
    if options.json:
        print_json(manifest.to_json())
    else:
        _summarize(manifest, asked["out"], console)
    return 0


def keywords(options: argparse.Namespace) -> dict[str, Any]:
    """What was typed, as the arguments of `export`."""
    names = {"precision": "precisions", "recipe": "recipes"}
    given = {names.get(name, name): value for name, value in vars(options).items() if name not in ("json", "no_verify")}
    return {**given, "out": options.out or default_out(options.model_dir), "verify": not options.no_verify}


def _summarize(manifest: Manifest, out: Path, console: Console) -> None:
    from rich.table import Table

    divided = groups(manifest)
    for group in divided:
        rows = [{t: cell for t, cell in row.items() if t not in (ALLOWED, SIZE)} for row in group.columns(manifest)]
        table = Table(*rows[0], title=group.told if len(divided) > 1 else None)
        for row in rows:
            table.add_row(*row.values())
        console.print(table)
    for note in manifest.notes:
        console.note(note.text)
    for status, meaning in statuses(manifest).items():
        console.note(f"{status}: {meaning}")
    total = sum(manifest.durations_s.values())
    console.print(
        f"{out}  {len(manifest.files)} files, {sum(f['bytes'] for f in manifest.files.values()) / 1e6:.1f} MB, {total:.1f} s"
    )
    print_path(out)
