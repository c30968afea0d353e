"""Launches, copies and waits of a file for ONNX Runtime's CUDA provider: counted on a small model, and on graphs that a hand can follow."""

import json

import onnx
import onnxruntime
import pytest
import torch
from onnx import TensorProto, helper
from testbed import ROOT, as_numpy, exported_graph, make_batch, make_student, one_thread, run_cli

from adtp_export.benchmarking.contenders import Architecture, random_encoder, scheduled_student
from adtp_export.graph import program
from adtp_export.model.flops import Shape
from adtp_export.runtimes.onnxruntime import cuda_provider
from benchmarks.gpu import launches
from benchmarks.gpu.cuda_provider import CPU, CUDA, Node, UnknownOperatorError, cost, place
from benchmarks.gpu.optimized import last_run, optimized, profiled
from benchmarks.harness.forced import LAYERS, RETENTION, SITES
from benchmarks.harness.records import RECORDS

RECORD = json.loads((RECORDS / "launches.json").read_text(encoding="utf-8"))


def for_cuda(folder, name, source, half):
    if half:
        program.convert_precision(source, folder / f"{name}.fp16.onnx", "fp16")
        source = folder / f"{name}.fp16.onnx"
    path = folder / f"{name}.ort-cuda.onnx"
    program.lower_to_ort_cuda(source, path)
    return path


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A student of three layers with two cuts, in fp32 and fp16."""
    folder = tmp_path_factory.mktemp("launches")
    student = make_student(["1.attention", "2.ffn"])
    for name, parameter in student.named_parameters():
        if name.endswith("bias"):  # born as zeros, which exporters leave out
            torch.nn.init.normal_(parameter, std=0.02)
    program.save(program.export_portable(student, {"version": "test"}), folder / "model.onnx")
    return {half: for_cuda(folder, f"model-{half}", folder / "model.onnx", half) for half in (False, True)}


def figures(counts):
    return {part: (c.nodes, c.on_cpu, c.launches, c.copies, c.waits) for part, c in counts.items()}


SMALL = {
    "inputs and answers": (0, 0, 0, 4, 1),
    "removing padding": (37, 3, 28, 12, 1),
    "token offsets 0": (25, 1, 20, 3, 1),
    "token offsets 1": (25, 1, 20, 3, 1),
    "cut 1.attention": (59, 1, 52, 17, 5),
    "cut 2.ffn": (59, 1, 52, 17, 5),
    "layer 0": (10, 0, 11, 0, 0),
    "layer 1": (10, 0, 11, 0, 0),
    "layer 2": (10, 0, 11, 0, 0),
    "head": (3, 0, 5, 0, 0),
}
"""Of the fp32 file. A layer is 9 nodes and 10 launches, and a Cast of cu_seqlens or a Gather of first rows comes to that."""


def test_no_part_of_a_small_student_grows(files):
    found = figures(launches.of_file(files[False]))
    assert found == SMALL, "has a part become smaller, lower its figures here; the record is written by --record"


def test_fp16_adds_casts_and_nothing_else(files):
    single, half = (launches.of_file(files[half]) for half in (False, True))
    casts = [sum(n.op_type == "Cast" for n in optimized(files[half]).nodes) for half in (False, True)]
    more = launches.total(half).launches - launches.total(single).launches
    assert more == casts[1] - casts[0] > 0
    assert launches.total(half).waits == launches.total(single).waits


def test_the_record_is_of_this_code_whatever_the_width(tmp_path):
    """The record's files are as wide as BERT-base. A narrow student of the same depth starts and waits as often."""
    narrow = Architecture(Shape(hidden=32, intermediate=64, heads=2, layers=LAYERS))
    sources = {f"student of {LAYERS} layers": scheduled_student(narrow, SITES, RETENTION, tmp_path)[0].path}
    dense = f"packed dense of {LAYERS} layers"
    sources[dense] = tmp_path / "dense.onnx"
    program.save(program.export_portable(random_encoder(narrow), {"version": "test"}), sources[dense])
    for name, source in sources.items():
        counts = launches.of_file(for_cuda(tmp_path, source.stem, source, half=True))
        columns = ("nodes", "on_cpu", "launches", "copies", "waits")
        recorded = {part: tuple(row[c] for c in columns) for part, row in RECORD["files"][name].items()}
        assert figures(counts) == recorded, "type: python -m benchmarks.gpu.launches --record STUDENT"


@pytest.mark.parametrize(("kind", "nodes", "launched"), [("timed", 11, 15), ("files", 9, 10)])
def test_the_record_has_what_the_plan_counted_by_hand(kind, nodes, launched):
    """A layer, as it was timed and as it is written now; 12 layers are 6 more of these; no path of a machine."""
    files = RECORD[kind]
    for parts in files.values():
        assert (parts["layer 4"]["nodes"], parts["layer 4"]["launches"]) == (nodes, launched)
    six, twelve = (
        {c: sum(part[c] for part in files[f"packed dense of {layers} layers"].values()) for c in launches.COLUMNS}
        for layers in (6, 12)
    )
    more = {"nodes": 6 * nodes, "on_cpu": 0, "launches": 6 * launched, "copies": 0, "waits": 0}
    assert {c: twelve[c] - six[c] for c in six} == more
    text = (RECORDS / "launches.json").read_text(encoding="utf-8")
    assert not any(root in text for root in ("/tmp/", "/home/", "/root/", "/work/"))


def test_no_file_starts_or_waits_more_than_when_it_was_timed():
    for name, parts in RECORD["files"].items():
        now, timed = (
            [sum(part[c] for part in counts.values()) for c in launches.COLUMNS[2:]]
            for counts in (parts, RECORD["timed"][name])
        )
        assert now[0] < timed[0]
        assert now[1] <= timed[1]
        assert now[2] == timed[2] - sum(part.startswith("cut ") for part in parts)


def test_optimizing_loses_and_fuses_nothing_that_cuda_would_not(files):
    """CPUs fuse a Gemm with the Relu after it, in a node that CUDA has not got."""
    kinds = [node.op_type for node in optimized(files[True]).nodes]
    assert kinds.count("Relu") == 2
    assert not {"FusedGemm", "com.microsoft.FusedGemm"} & set(kinds)
    assert kinds.count("com.microsoft.PackedMultiHeadAttention") == 3
    values = [name for node in optimized(files[True]).nodes for name in node.outputs if name]
    assert len(values) == len(set(values))


def saved(path, nodes, outputs, inputs=(("x", TensorProto.INT64, ["n"]),), constants=()):
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info(*value) for value in inputs],
        [helper.make_tensor_value_info(*value) for value in outputs],
        [helper.make_tensor(name, TensorProto.INT64, [len(values)], values) for name, values in constants],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10), path)
    return path


def test_what_has_no_kernel_is_copied_there_and_back(tmp_path):
    """Pad of int64 between two cumulative sums: one copy each way, and a wait for the first."""
    nodes = [
        helper.make_node("CumSum", ["x", "axis"], ["a"], name="before"),
        helper.make_node("Pad", ["a", "widths"], ["b"], name="pad"),
        helper.make_node("CumSum", ["b", "axis"], ["y"], name="after"),
    ]
    constants = (("axis", [0]), ("widths", [1, 0]))
    graph = optimized(saved(tmp_path / "pad.onnx", nodes, [("y", TensorProto.INT64, ["m"])], constants=constants))
    placed = place(graph.nodes, graph.inputs, graph.constants)
    order = [(node.op_type, side) for node, side in placed]
    assert order == [("CumSum", CUDA), ("MemcpyToHost", CUDA), ("Pad", CPU), ("MemcpyFromHost", CUDA), ("CumSum", CUDA)]
    assert [sum(column) for column in zip(*(cost(node) for node, side in placed if side == CUDA))] == [2, 2, 1]


def test_arithmetic_on_sizes_stays_on_the_host(tmp_path):
    """A size is on the host already: the Squeeze of it goes there, and Range reads it there."""
    nodes = [
        helper.make_node("Shape", ["x"], ["size"], name="size"),
        helper.make_node("Squeeze", ["size", "zero_axis"], ["count"], name="count"),
        helper.make_node("Range", ["zero", "count", "one"], ["places"], name="places"),
        helper.make_node("Add", ["places", "x"], ["y"], name="sum"),
    ]
    inputs = [(name, TensorProto.INT64, shape) for name, shape in (("x", ["n"]), ("zero", []), ("one", []))]
    constants = (("zero_axis", [0]),)
    outputs = [("y", TensorProto.INT64, ["n"])]
    graph = optimized(saved(tmp_path / "sizes.onnx", nodes, outputs, inputs, constants))
    sides = {node.op_type: side for node, side in place(graph.nodes, graph.inputs, graph.constants)}
    assert sides == {"Shape": CUDA, "Squeeze": CPU, "Range": CUDA, "Add": CUDA}


def of(op_type, *types):
    return Node(name="knot", op_type=op_type, types=types)


@pytest.mark.parametrize(
    ("node", "expected"),
    [
        (of("Gemm", "float16", "float16", "float16"), (2, 0, 0)),
        (of("Gemm", "float16", "float16"), (1, 0, 0)),
        (of("Gemm", "float16", "float16", ""), (1, 0, 0)),
        (of("ReduceMax", "int64"), (3, 1, 0)),
        (of("ReduceMax", "float"), (1, 0, 0)),
    ],
    ids=lambda value: value.op_type if isinstance(value, Node) else "",
)
def test_what_a_node_costs_depends_on_its_inputs(node, expected):
    assert cost(node) == expected


def test_an_operator_that_nobody_looked_up_is_named():
    with pytest.raises(UnknownOperatorError, match="knot: nothing is known of what Knot costs.*add it to KERNELS"):
        cost(of("Knot", "float"))


def test_a_profile_is_read_as_the_runtime_writes_it(tmp_path):
    """ONNX Runtime's own, of its CPU provider: all nodes of the last run, in order, all on the CPU."""
    (tmp_path / "model.onnx").write_bytes(exported_graph("1.attention"))
    options = one_thread()
    options.enable_profiling, options.profile_file_prefix = True, str(tmp_path / "profile")
    session = onnxruntime.InferenceSession(str(tmp_path / "model.onnx"), options, providers=["CPUExecutionProvider"])
    for lengths in ([4, 2], [9, 9]):
        session.run(None, as_numpy(make_batch(lengths, max(lengths))))
    found = last_run(json.loads(open(session.end_profiling(), encoding="utf-8").read()))
    assert {side for _, side in found} == {CPU}
    names = [node.name for node, _ in found]
    assert len(names) == len(set(names))
    assert names[-1].startswith("head.classifier") or names[-1] == "logits"
    assert sum(node.op_type == "LayerNormalization" for node, _ in found) == 7


def test_what_is_profiled_has_the_settings_of_load(monkeypatch, tmp_path):
    asked = []

    class Session:
        def __init__(self, path, options, providers):
            asked.extend(providers)

        def get_providers(self):
            return ["CPUExecutionProvider"]

    monkeypatch.setattr(onnxruntime, "InferenceSession", Session)
    with pytest.raises(SystemExit, match="CUDA provider cannot start here"):
        profiled(tmp_path / "model.onnx", "1x8")
    assert asked == [cuda_provider(exact=True), "CPUExecutionProvider"]


def test_a_driver_log_is_counted_inside_and_outside_of_graphs():
    """As the emulated driver writes it: what was done; and its older log, of launches alone."""
    calls = [
        {"did": "allocate", "bytes": 64},
        {"did": "wait", "call": "cuMemcpyHtoD"},
        {"did": "copy", "stream": 0, "graph": 0, "bytes": 64, "to": "device"},
        {"did": "parameters"},
        {"did": "graph", "stream": 1, "graph": 1, "nodes": 2},
        {"did": "kernel", "stream": 1, "graph": 1, "symbol": "probe", "programs": 1},
        {"did": "copy", "stream": 1, "graph": 1, "bytes": 64, "to": "host"},
        {"did": "kernel", "stream": 1, "graph": 0, "symbol": "probe", "programs": 1},
    ]
    found = launches.of_driver_log(map(json.dumps, calls))
    assert figures(found) == {"outside graphs": (2, 0, 1, 1, 1), "in graphs": (2, 0, 1, 1, 0)}
    older = launches.of_driver_log(['{"crc32": 1, "symbol": "attention", "failure": null}'])
    assert launches.total(older).launches == 1


@pytest.mark.parametrize("line", ["no JSON", "[]", '{"did": "sleep"}', "{}"])
def test_what_is_no_driver_log_is_told(tmp_path, line):
    with pytest.raises(ValueError, match="line 2 is none of an emulated driver's log"):
        launches.of_driver_log(['{"did": "wait"}', line])


def run(*arguments):
    return run_cli("benchmarks.gpu.launches", *arguments, cwd=ROOT)


def test_the_command_prints_a_table_and_json(files):
    table = run(files[True])
    assert table.returncode == 0, table.stderr
    assert [line.split()[-5:] for line in table.stdout.splitlines() if line.startswith("layer 0")] == [
        ["11", "0", "12", "0", "0"]
    ]
    (counts,) = json.loads(run(files[True], "--json").stdout).values()
    assert counts["head"]["launches"] == 6


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "nothing to count: name a FILE.onnx"),
        (("nowhere.onnx",), "nowhere.onnx"),
        (("README.md",), "README.md is no ONNX file; type a FILE.onnx"),
        (("--driver-log", "no.log"), "no.log"),
        (("--driver-log", "README.md"), "line 1 is none of an emulated driver's log"),
    ],
    ids=["nothing", "no file", "no graph", "no log", "another log"],
)
def test_bad_input_is_told_in_a_line(arguments, message):
    result = run(*arguments)
    assert result.returncode == 2
    assert message in result.stderr
    assert "Traceback" not in result.stderr
