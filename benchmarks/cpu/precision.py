"""What INT8 gains on this machine's CPU, and what every precision costs a real student:

    python -m benchmarks.cpu.precision speed SHAPE                  # bert-base or minilm, in records/precision-speed.json
    python -m benchmarks.cpu.precision fidelity STUDENT TEXT_FILE   # writes records/precision-fidelity.json
    python -m benchmarks.cpu.precision vectors OUT --sst2 FILE --news FILE            # in records/precision-vectors.json

speed: each kind of processor has a part of the record.
speed bert-base: a student of BERT-base's width, 6 layers, random weights, 0.ffn, retention forced to 0.29. Products in bf16 and in INT8
per token run as portable bodies and as operators. Peers: the dynamic recipe of onnxruntime.quantization on the same graph, and dense
BERT-base of 12 layers in CTranslate2 (INT8), OpenVINO (bf16, where the processor has it) and llama.cpp (bf16 and q8_0): type
pip install 'adtp-export[openvino,peers]' and make llamacpp.
speed minilm: the same with MiniLM's width, every token kept, and peers of as many layers; without calibrated and portable forms.
fidelity: `adtp-export` in all precisions on 5,000 rows; INT8 is calibrated, and per token it is not.
vectors: cosines between the vectors of a model of sentence-transformers in fp32, and in bf16 and INT8 per token without calibration,
of sentences of SST-2 and posts of 20 Newsgroups, 3 to 1. OUT is what `adtp-export MODEL_DIR --precision bf16,int8` writes.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.harness.forced import FULL, LAYERS, RETENTION, SHAPE, SITES
from benchmarks.harness.processes import beside_the_first
from benchmarks.harness.records import RECORDS, claim, read_document, told, write

if TYPE_CHECKING:
    from adtp_export.benchmarking.contenders import Architecture
    from adtp_export.benchmarking.processes import Contender

LINEAR_FILES = ("bf16 linear", "int8 per token")
GRID = ("1x32", "1x128", "8x128", "32x64", "mixed-32")
UNPRUNED = "minilm"
ROWS, CALIBRATION = 5000, "8x64"
PRECISIONS = ("fp32", "fp16", "bf16", "int8")
VECTORS = 384
"""Texts whose cosines are taken."""
OPERATORS = " with operators"


def speed(shape: str, grid: Sequence[str], seconds: float) -> dict[str, Any]:
    """Time fp32, lower precisions and peers' in turns, each in a process of its own.

    Args:
        grid: names of workloads. seconds: for each of them.

    Raises:
        SystemExit: nothing is compiled for this machine.
        MissingDependencyError: a peer is not installed.
    """
    from adtp_export.benchmarking.contenders import Architecture, named_shape
    from adtp_export.benchmarking.processes import WITH_PLUGIN, Contender
    from adtp_export.runtimes import llamacpp, onnxruntime

    sizes, unpruned = Architecture(named_shape(shape, LAYERS)), shape == UNPRUNED
    if obstacle := onnxruntime.operators_obstacle():
        raise SystemExit(obstacle)
    with tempfile.TemporaryDirectory() as scratch:
        folder, results = Path(scratch), []
        files = write_files(sizes, 1.0 if unpruned else RETENTION, folder)
        contenders = [
            Contender(name=name, path=path, layers=sizes.shape.layers, padded=False) for name, path in files.items()
        ]
        contenders += [
            replace(contender, name=f"{contender.name}{OPERATORS}", engine=WITH_PLUGIN)
            for contender in contenders
            if contender.name in ("fp32", *LINEAR_FILES)
        ]
        if unpruned:
            contenders = [one for one in contenders if one.name == "fp32" or one.engine == WITH_PLUGIN]
        full = LAYERS if unpruned else FULL
        contenders += dense_in_lower_precision(sizes.deep(full), folder)
        for row in beside_the_first(contenders, sizes, grid, seconds):
            results.append({"precision": row.pop("contender"), **row})
    return {"layers": {"ours": LAYERS, "dense": full}, "results": results, **told(**{"llama.cpp": llamacpp.VERSION})}


def dense_in_lower_precision(sizes: Architecture, folder: Path) -> list[Contender]:
    """Write a dense BERT with random weights; return it in the lower precisions of other runtimes.

    Raises:
        MissingDependencyError: a runtime is not installed.
    """
    from adtp_export.benchmarking.contenders import dense_baselines, dense_bert
    from adtp_export.benchmarking.peers import choose_peers
    from adtp_export.runtimes import openvino

    choose_peers(["ctranslate2-int8", "openvino", "llamacpp-bf16"], forced=True)
    weights = folder / "dense"
    dense_bert(sizes).save_pretrained(weights)
    (padded,) = dense_baselines(sizes, folder, depths=[sizes.shape.layers], plain=True)
    unpadded = replace(padded, path=weights, padded=False)
    found = [replace(unpadded, name="CTranslate2 dense int8", engine="ctranslate2", precision="int8")]
    if openvino.has_bf16():
        found.append(replace(padded, name="OpenVINO dense bf16", engine="openvino", precision="bf16"))
    for precision in ("bf16", "q8_0"):
        found.append(replace(unpadded, name=f"llama.cpp dense {precision}", engine="llamacpp", precision=precision))
    return found


def write_files(sizes: Architecture, retention: float, folder: Path) -> dict[str, Path]:
    """Export a student, quantize it as `adtp-export` does, and by the dynamic recipe of onnxruntime.quantization."""
    import onnx
    import onnx.inliner
    from onnxruntime.quantization import quantize_dynamic

    from adtp_export.benchmarking.contenders import scheduled_student
    from adtp_export.benchmarking.workloads import make_workloads
    from adtp_export.calibration import recipes
    from adtp_export.calibration.collect import collect
    from adtp_export.calibration.plan import make_quantization_plan
    from adtp_export.calibration.quantize import write_quantized
    from adtp_export.graph import program

    contender, student = scheduled_student(sizes, SITES, retention, folder)
    batches = make_workloads([CALIBRATION], sizes.input_names, sizes.tables["vocab_size"])[0].batches
    plan = make_quantization_plan(recipes.built_in("ort-cpu", "int8"), student, collect(student, batches))
    write_quantized(contender.path, folder / "int8.onnx", plan)
    per_token = make_quantization_plan(recipes.built_in("linear", "int8"), student, {})
    write_quantized(contender.path, folder / "linear.int8.onnx", per_token)
    program.lower_linear(contender.path, folder / "linear.bf16.onnx")
    model = onnx.load(contender.path)
    del model.graph.value_info[:]  # of weights, which the peer transposes
    onnx.save(onnx.inliner.inline_local_functions(model), folder / "inlined.onnx")
    others = [n.name for n in model.graph.node if n.op_type == "Gemm" and not n.name.startswith("layers.")]
    quantize_dynamic(
        folder / "inlined.onnx", folder / "dynamic.onnx", ["MatMul", "Gemm"], True, nodes_to_exclude=others
    )
    linear = dict(zip(LINEAR_FILES, (folder / "linear.bf16.onnx", folder / "linear.int8.onnx")))
    return {"fp32": contender.path, "int8": folder / "int8.onnx", "dynamic int8": folder / "dynamic.onnx", **linear}


def fidelity(student: Path, text: Path) -> dict[str, Any]:
    """Export a student in all precisions, and in INT8 without calibration; judged, and calibrated, on one file.

    Raises:
        SystemExit: nothing is compiled for this machine.
    """
    from adtp_export import export
    from adtp_export.cli.console import Console
    from adtp_export.runtimes import onnxruntime

    if obstacle := onnxruntime.operators_obstacle():
        raise SystemExit(obstacle)
    judged: dict[str, Any] = {"verify_data": text, "verify_rows": ROWS, "label_column": "label", "steps": Console()}
    with tempfile.TemporaryDirectory() as scratch:
        calibrated, alone = (
            export(student, Path(scratch) / name, precisions=precisions, calibration_data=data, **judged).to_json()
            for name, precisions, data in (("calibrated", PRECISIONS, text), ("alone", ("int8",), None))
        )
    figures = ("rows", "prediction_agreement", "kept_token_agreement", "max_abs_logit_diff", "accuracy")
    targets = {
        name: {figure: target.get(figure) for figure in figures} | {"flips": len(target["excused_flips"])}
        for name, target in (calibrated["targets"] | alone["targets"]).items()
    }
    kept = {key: calibrated[key] for key in ("verification", "durations_s")}
    kept["calibration"] = calibrated["targets"]["onnxruntime-cpu-int8"]["calibration"]
    return {"student": calibrated["checkpoint"]["name"], "targets": targets, **kept, **told()}


def vectors(out: Path, sst2: Path, news: Path) -> tuple[str, dict[str, Any]]:
    """Compare the vectors of a model that was exported in bf16 and INT8 per token with those of its fp32 file.

    Returns:
        The model's name, and its part of the record.

    Raises:
        SystemExit: nothing is compiled for this machine.
    """
    from adtp_export import load
    from adtp_export.runtimes import onnxruntime
    from benchmarks.cpu.mixed_stream import mixed

    if obstacle := onnxruntime.operators_obstacle():
        raise SystemExit(obstacle)
    texts = mixed(sst2, news, VECTORS)
    fp32 = load(out, target="onnxruntime-cpu-fp32")
    exact, rows = fp32.encode(texts), []
    for precision in ("bf16", "int8"):
        found = load(out, target=f"onnxruntime-cpu-{precision}-linear-plugin").encode(texts)
        cosines = (found * exact).sum(1) / np.linalg.norm(found, axis=1) / np.linalg.norm(exact, axis=1)
        rows.append({"precision": precision, "smallest": float(cosines.min()), "mean": float(cosines.mean())})
    name = read_document(out / "manifest.json")["checkpoint"]["name"]
    return name, {"texts": len(texts), "results": rows, **told()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    timed = commands.add_parser("speed")
    timed.add_argument("shape", choices=(SHAPE, UNPRUNED))
    timed.add_argument(
        "--workload",
        metavar="NAMES",
        type=lambda names: names.split(","),
        default=GRID,
        help="all others stay as recorded",
    )
    timed.add_argument("--seconds", type=float, default=40, help="for each workload, or what 10 rounds take")
    judged = commands.add_parser("fidelity")
    judged.add_argument("student", type=Path)
    judged.add_argument("text", type=Path, help="with the column label")
    compared = commands.add_parser("vectors")
    compared.add_argument("exported", metavar="OUT", type=Path, help="of adtp-export MODEL_DIR --precision bf16,int8")
    compared.add_argument("--sst2", metavar="FILE", type=Path, required=True)
    compared.add_argument("--news", metavar="FILE", type=Path, required=True)
    for command in commands.choices.values():
        command.add_argument("--out", metavar="FILE", type=Path)
    options = parser.parse_args()
    out = claim(options.out or RECORDS / f"precision-{options.command}.json")
    if options.command == "speed":
        record, part = read_document(out), speed(options.shape, options.workload, options.seconds)
        shapes = record.setdefault(part["device"]["fingerprint"], {})
        part["results"] += [
            row for row in shapes.get(options.shape, {}).get("results", []) if row["workload"] not in options.workload
        ]
        part["results"].sort(key=lambda row: GRID.index(row["workload"]))
        shapes[options.shape] = part
        write(out, record)
    elif options.command == "vectors":
        name, part = vectors(options.exported, options.sst2, options.news)
        write(out, read_document(out) | {name: part})
    else:
        write(out, fidelity(options.student, options.text))


if __name__ == "__main__":
    main()
