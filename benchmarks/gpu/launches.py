"""How often an exported file makes a GPU start, copy, and the host wait: counted, for each part of the model.

    python -m benchmarks.gpu.launches FILE.onnx ... [--json]     # of files for ONNX Runtime's CUDA provider, or for our kernels; no GPU
    python -m benchmarks.gpu.launches FILE.onnx --profile 8x128  # of ONNX Runtime's own profile, on a GPU
    python -m benchmarks.gpu.launches --driver-log LOG           # of what an emulated driver wrote to $ADTP_EMULATOR_CALLS
    python -m benchmarks.gpu.launches --record STUDENT           # exports and writes records/launches.json; no GPU

Without a GPU, the graph is the one that `optimized` gets, `cuda_provider` places it and knows what a node costs. Counts are of batches of
several texts: for a single one some reductions and tables of sizes are left out. `STUDENT` is a checkpoint.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from adtp_export.errors import InputError
from adtp_export.plugins import runner
from adtp_export.plugins.encoder.planner import launches_by_part
from adtp_export.plugins.plan import Plan
from adtp_export.runtimes import encoder_file
from benchmarks.gpu import emulated
from benchmarks.gpu.cuda_provider import CPU, CUDA, FROM_HOST, TO_HOST, Node, UnknownOperatorError, cost, place
from benchmarks.gpu.optimized import Graph, NotCountableError, optimized, profiled
from benchmarks.harness.forced import FULL, LAYERS, RETENTION, SHAPE, SITES, architecture
from benchmarks.harness.records import RECORDS, ROOT, claim, told, write

PRECISION = "fp16"

INPUTS, UNPADDING, OFFSETS, REPADDING, HEAD = (
    "inputs and answers",
    "removing padding",
    "token offsets",
    "putting padding back",
    "head",
)
"""Parts beside layers and cuts. Token offsets are what packed attention wants to know of lengths, once before any cut and after each."""
COPIES, OTHERS, EVERYTHING = "copies between CPU and GPU", "others", "everything"
"""Parts of a profile whose nodes the optimized graph does not have, and the row of sums."""
OUTSIDE, IN_GRAPHS = "outside graphs", "in graphs"
"""Parts of an emulated driver's log."""
TOKENS, TEXTS = "tokens", "texts"
"""Rows of values before any cut, and those of one for each text. Those after a cut are named after its site."""
COLUMNS = ("nodes", "on_cpu", "launches", "copies", "waits")


@dataclass(kw_only=True)
class Count:
    """Of a part. nodes: that run, copies between providers included. on_cpu: how many of them do so on the CPU. weight_bytes: of weights
    read. row_bytes: that are written and read for each row of floating states, by what rows there are."""

    nodes: int = 0
    on_cpu: int = 0
    launches: int = 0
    copies: int = 0
    waits: int = 0
    weight_bytes: int = 0
    row_bytes: dict[str, int] = field(default_factory=dict)


def of_file(path: Path) -> dict[str, Count]:
    """Count the parts of a file as ONNX Runtime's CUDA provider would run it; of one for our own kernels, as the runner does."""
    with contextlib.suppress(InputError):
        return of_plan(encoder_file.read(path).plan)
    graph = optimized(path)
    placed = place(graph.nodes, graph.inputs, graph.constants)
    found = {INPUTS: _of_inputs(graph)}
    for part, (node, side) in zip(parts([node for node, _ in placed]), placed):
        count = found.setdefault(part, Count())
        _add(count, node, side)
        if side == CUDA:
            _add_traffic(count, node, graph)
    return {part: found[part] for part in sorted(found, key=_order)}


def of_profile(path: Path, workload: str) -> dict[str, Count]:
    """Count the parts of a file in what ONNX Runtime's profiler says of one run on the GPU that is here.

    Args:
        workload: such as ``8x128``.
    """
    graph = optimized(path)
    by_name = {node.name: part for node, part in zip(graph.nodes, parts(graph.nodes))}
    found: dict[str, Count] = {}
    for node, side in profiled(path, workload):
        part = by_name.get(node.name, COPIES if node.op_type in (FROM_HOST, TO_HOST) else OTHERS)
        _add(found.setdefault(part, Count()), node, side)
    return {part: found[part] for part in sorted(found, key=_order)}


def _order(part: str) -> tuple[int, int, str]:
    """Order parts: what comes once before layers, layers and cuts by number, what comes after."""
    kind, _, number = part.rpartition(" ")
    place = number.partition(".")[0]
    groups = [INPUTS, UNPADDING, OFFSETS, "cut", "layer", REPADDING, HEAD, COPIES, OTHERS]
    group = next(i for i, name in enumerate(groups) if name in (part, kind))
    return group, int(place) if place.isdigit() else 0, part


def of_driver_log(lines: Iterable[str]) -> dict[str, Count]:
    """Count what the emulated driver wrote down, in CUDA graphs and outside.

    Args:
        lines: of ``$ADTP_EMULATOR_CALLS``, where ``did`` says what was done; or of ``$ADTP_EMULATOR_LOG``, which has launches alone.

    Raises:
        ValueError: a line is of neither; the text says which.
    """
    found = {OUTSIDE: Count(), IN_GRAPHS: Count()}
    for number, line in enumerate(lines, 1):
        try:
            call = json.loads(line)
            did = call.get("did") or ("kernel" if "symbol" in call else "")
        except (ValueError, AttributeError):
            did = ""
        if did not in ("kernel", "copy", "wait", "graph", "parameters", "allocate"):
            raise ValueError(f"line {number} is none of an emulated driver's log: {line[:80]!r}")
        count = found[IN_GRAPHS if call.get("graph") else OUTSIDE]
        count.nodes += did in ("kernel", "copy")
        count.launches += did == "kernel"
        count.copies += did == "copy"
        count.waits += did == "wait"
    return found


def parts(nodes: Sequence[Node]) -> list[str]:
    """Name the part of the model that each node belongs to: by its name, or else that of the first node that reads what it makes.

    What nobody reads belongs to its maker: the answers, and copies to the host.
    """
    found = [""] * len(nodes)
    reader: dict[str, int] = {}
    for i, node in reversed(list(enumerate(nodes))):
        readers = [reader[name] for name in node.outputs if name in reader]
        if node.op_type == FROM_HOST:
            readers = [i + 1]
        found[i] = _named(node) or (found[min(readers)] if readers else "")
        if node.op_type != TO_HOST:
            reader.update(dict.fromkeys(node.inputs, i))
    makers = {name: i for i, node in enumerate(nodes) for name in node.outputs}
    for i, node in enumerate(nodes):
        if not found[i]:
            found[i] = next((found[makers[name]] for name in node.inputs if name in makers), UNPADDING)
    return found


NAMES: tuple[tuple[str, str], ...] = (
    (r"(unpad[./]|kept_rows/unpad)", UNPADDING),
    (r"layers\.(?P<number>\d+)\.", "layer"),
    (r"cuts\.(?P<number>\d+)_(?P<sublayer>\w+)[./]", "cut"),
    (r"kept_rows/(?P<number>\d+)\.(?P<sublayer>\w+)", "cut"),
    (r"token_offset_(?P<number>\d+)", OFFSETS),
    (r"head\.", HEAD),
    (r"(Shape|Squeeze)(_\d+)?$", UNPADDING),
)
"""What names of nodes and their outputs begin with, and the parts that these belong to. Sizes of the inputs have no scope."""


def _named(node: Node) -> str | None:
    """Return the part that a node's names tell; None where they tell none."""
    kept = [name for name in (*node.inputs, *node.outputs) if name.startswith("kept_rows/")]
    if kept and node.op_type.startswith("Scatter") and not node.name.startswith(("unpad", "cuts.")):
        return REPADDING
    follows = kept if node.op_type == "Gather" else []  # states of those that stay
    for name in (node.name, *node.outputs, *follows):
        for pattern, part in NAMES:
            if (match := re.match(pattern, name)) is not None:
                found = match.groupdict()
                number = ".".join(filter(None, (found.get("number"), found.get("sublayer"))))
                return f"{part} {number}".strip()
    return None


def _add(count: Count, node: Node, side: str) -> None:
    count.nodes += 1
    if side == CPU:
        count.on_cpu += 1
        return
    launches, copies, waits = cost(node)
    count.launches += launches
    count.copies += copies
    count.waits += waits


def of_plan(plan: Plan) -> dict[str, Count]:
    """Count the parts of a plan's largest bucket. The runner copies all inputs in one piece, all outputs in another, and waits once."""
    found = {INPUTS: Count(copies=2, waits=1)}
    for part, count in launches_by_part(plan.buckets[-1]).items():
        kind = part.partition(" ")[0]
        place = {"unpad": UNPADDING, "embed": UNPADDING, "head": HEAD}.get(kind, part)
        found.setdefault(place, Count()).launches += count
    return found


def _of_inputs(graph: Graph) -> Count:
    """A run copies each input to the GPU and each output back, and ends with a wait: ``core/framework/utils.cc``."""
    return Count(copies=len(graph.inputs) + len(graph.outputs), waits=1)


def _add_traffic(count: Count, node: Node, graph: Graph) -> None:
    """Add the floating weights that a node reads whole, and the rows of states that it reads and writes."""
    if node.op_type in ("Reshape", "Squeeze", "Unsqueeze", "Flatten", "Identity", FROM_HOST, TO_HOST, "Shape"):
        return
    rows = _rows(graph)
    floating = [name for name, kind in zip(node.inputs, node.types) if kind in ("float", "float16", "bfloat16")]
    if node.op_type != "Gather":
        count.weight_bytes += sum(graph.item_bytes * graph.constants.get(name, 0) for name in floating)
    written = [name for name in node.outputs if floating]
    twice = 2 if node.op_type == "Gemm" and len(node.inputs) > 2 else 0  # the bias is written there before, and read
    for name, times in [*((name, 1) for name in floating), *((name, 1 + twice) for name in written)]:
        shape = graph.shapes.get(name, ())
        if len(shape) == 2 and isinstance(shape[1], int) and shape[0] in rows and name not in graph.constants:
            of = rows[shape[0]]
            count.row_bytes[of] = count.row_bytes.get(of, 0) + times * shape[1] * graph.item_bytes


def _rows(graph: Graph) -> dict[int | str, str]:
    """Say what the free axes of a graph count."""
    found: dict[int | str, str] = {"batch": TEXTS}
    for name, shape in graph.shapes.items():
        if name.startswith("kept_rows/"):
            what = name.removeprefix("kept_rows/")
            found[shape[0]] = TOKENS if what == "unpad" else what
    return found


def total(counts: dict[str, Count]) -> Count:
    """Add up all parts."""
    result = Count()
    for count in counts.values():
        for column in (*COLUMNS, "weight_bytes"):
            setattr(result, column, getattr(result, column) + getattr(count, column))
        for rows, size in count.row_bytes.items():
            result.row_bytes[rows] = result.row_bytes.get(rows, 0) + size
    return result


def exported(folder: Path, student: Path) -> dict[str, tuple[Path, Path]]:
    """Export what the record counts, in fp16 for ONNX Runtime's CUDA provider; return two files by name: as timed, and as exported now.

    Raises:
        InputError: `student` is no checkpoint.
    """
    import onnx_ir as ir

    from adtp_export.benchmarking.contenders import random_encoder, scheduled_student
    from adtp_export.graph import passes, program
    from adtp_export.model.checkpoint import load_checkpoint

    made = {f"student of {LAYERS} layers": scheduled_student(architecture(LAYERS), SITES, RETENTION, folder)[0].path}
    for layers in (LAYERS, FULL):
        made[f"packed dense of {layers} layers"] = folder / f"packed-{layers}.onnx"
        graph = program.export_portable(random_encoder(architecture(layers)), {"version": "bench"})
        program.save(graph, made[f"packed dense of {layers} layers"])
    made["MiniLM student"] = folder / "minilm.onnx"
    graph = program.export_portable(load_checkpoint(student).student, {"version": "bench"})
    program.save(graph, made["MiniLM student"])
    files = {}
    for name, path in made.items():
        half, timed, now = (path.with_suffix(f".{form}.onnx") for form in ("fp16", "timed", "now"))
        program.convert_precision(path, half, PRECISION)
        model = ir.load(half)
        passes.run_passes(model, passes.ORT_CUDA[:TIMED])
        program.save(model, timed)
        program.lower_to_ort_cuda(half, now)
        files[name] = (timed, now)
    return files


def of_runner(library: Path, environment: Mapping[str, str], kind: str = "student") -> dict[str, Count]:
    """Count the parts of a model of the record's depth in the runner, each launch as the emulated driver wrote it down.

    Args:
        library: the runner's. environment: of a process in which that finds an emulated GPU. kind: of `narrow`'s models.

    Raises:
        RuntimeError: the driver has done something else than the plan says.
    """
    from benchmarks.gpu import narrow  # which takes PyTorch

    with tempfile.TemporaryDirectory() as scratch:
        log = Path(scratch) / "calls"
        code = "from benchmarks.gpu import narrow; import sys; narrow.replay(*sys.argv[1:])"
        command = [sys.executable, "-c", code, kind, PRECISION, str(library), str(log)]
        subprocess.run(command, check=True, cwd=ROOT, env={**os.environ, **environment})
        did = total(of_driver_log(log.read_text(encoding="utf-8").splitlines()))
    counts = of_plan(narrow.planned(kind, PRECISION).plan)
    said = total(counts)
    if (did.launches, did.copies, did.waits) != (said.launches, said.copies, said.waits):
        raise RuntimeError(f"the plan says {said}, and the driver did {did}")
    return counts


RUNS = {"runner": "student", "runner_decoder": "vectors", "runner_decoder_student": "vectors-student"}
"""What the record has of the runner, by its names, and which of `narrow`'s models each is."""

TIMED = 2
"""How many of the passes for this provider there were when the H100 was timed."""


def as_table(counts: dict[str, Count]) -> str:
    """Return counts as lines of text."""
    rows = [*counts.items(), (EVERYTHING, total(counts))]
    lines = [f"{'part':22}" + "".join(f"{column:>10}" for column in COLUMNS)]
    return "\n".join(lines + [f"{part:22}" + "".join(f"{getattr(c, k):>10}" for k in COLUMNS) for part, c in rows])


def record(student: Path) -> None:
    out = claim(RECORDS / "launches.json")
    counts: dict[str, Any] = {"timed": {}, "files": {}}
    with tempfile.TemporaryDirectory() as scratch:
        for name, paths in exported(Path(scratch), student).items():
            for kind, path in zip(("timed", "files"), paths):
                counts[kind][name] = {part: asdict(count) for part, count in of_file(path).items()}
        emulated_gpu = emulated.environment()
        library = runner.built() or runner.build(Path(scratch))
        for name, kind in RUNS.items():
            found = of_runner(library, emulated_gpu, kind)
            counts[name] = {part: asdict(count) for part, count in found.items()}
    document: dict[str, Any] = {
        "command": "python -m benchmarks.gpu.launches --record STUDENT",
        "label": "counted, not measured: by the graph that ONNX Runtime optimizes, and by its sources; in the runner by an emulated driver",
        "shape": SHAPE,
        "precision": PRECISION,
        **counts,
    }
    where = told()
    write(out, {**document, "versions": where["versions"], "commit": where["commit"]})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", type=Path, metavar="FILE.onnx")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--profile", metavar="BxS")
    parser.add_argument("--driver-log", type=Path, metavar="LOG")
    parser.add_argument("--record", type=Path, metavar="STUDENT")
    options = parser.parse_args()
    if options.record:
        record(options.record)
        return
    counts: dict[str, dict[str, Count]] = {}
    try:
        for path in options.files:
            counts[str(path)] = of_profile(path, options.profile) if options.profile else of_file(path)
        if options.driver_log:
            lines = options.driver_log.read_text(encoding="utf-8").splitlines()
            counts[str(options.driver_log)] = of_driver_log(lines)
    except (UnknownOperatorError, NotCountableError, OSError, ValueError) as error:
        parser.error(str(error))
    if not counts:
        parser.error("nothing to count: name a FILE.onnx, --driver-log LOG, or --record STUDENT")
    if options.json:
        print(json.dumps({name: {part: asdict(c) for part, c in found.items()} for name, found in counts.items()}))
        return
    for name, found in counts.items():
        print(f"{name}\n{as_table(found)}")


if __name__ == "__main__":
    main()
