"""The graph that ONNX Runtime's CUDA provider would run, from a machine without a GPU; and what it ran, from one with a GPU.

ONNX Runtime optimizes in the same order for all providers (``core/optimizer/graph_transformer_utils.cc``). The CPU provider is asked
here, and three things keep its answer that of the CUDA provider:

- Fusions for CPUs alone are switched off. No layouts are chosen: that level is for convolutions. Two fusions are for CUDA alone, and look
  for dropout and for rotary embeddings, of which exported files have none.
- Nodes that the CPU provider has no kernel for are taken out before and put back after. None of ONNX Runtime's patterns has them.
- A file in fp16 is optimized in fp32, because the CPU provider would put casts around each node. Casts between the two are taken out like
  those nodes, so none is lost.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
from google.protobuf.message import DecodeError
from onnx_ir.passes.common import ShapeInferencePass

from adtp_export.graph.inlined import inlined
from adtp_export.runtimes.onnxruntime import cuda_provider
from benchmarks.gpu.cuda_provider import CPU, CUDA, Node


class NotCountableError(Exception):
    """A file is not one whose graph can be had; the text says why."""


FOR_CPUS_ALONE = [
    "GemmActivationFusion",
    "MatMulIntegerToFloatFusion",
    "DynamicQuantizeMatMulFusion",
    "ConvActivationFusion",
    "MatMulNBitsFusion",
]
WITHOUT_CPU_KERNEL = ("com.microsoft.PackedMultiHeadAttention",)
HALF, SINGLE = ir.DataType.FLOAT16, ir.DataType.FLOAT
STRING_TYPES = {number: name.lower() for name, number in onnx.TensorProto.DataType.items()}


@dataclass(frozen=True, kw_only=True)
class Graph:
    """What runs. shapes: of values, where they are known; axes that are free are texts. constants: elements of initializers."""

    nodes: tuple[Node, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    constants: dict[str, int]
    shapes: dict[str, tuple[int | str, ...]]
    item_bytes: int


def optimized(path: Path) -> Graph:
    """Return the graph of an exported file as ONNX Runtime's CUDA provider gets it to run.

    Raises:
        NotCountableError: it is no ONNX file, or ONNX Runtime refuses it.
        OSError: it cannot be read.
    """
    import onnxruntime

    try:
        model = inlined(path)
    except DecodeError as error:
        raise NotCountableError(
            f"{path} is no ONNX file; type a FILE.onnx that adtp-export --ort-cuda wrote"
        ) from error
    ShapeInferencePass()(model)
    names = [value.name or "" for value in model.graph.inputs], [value.name or "" for value in model.graph.outputs]
    known = _values(model.graph)
    types = {value.name: value.dtype.name.lower() for value in known if value.dtype}
    shapes = {value.name: _shape(value.shape) for value in known if value.shape is not None}
    taken_out = _take_out(model.graph)
    half = _widen(model.graph)
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
    options.log_severity_level = 3
    with tempfile.TemporaryDirectory() as scratch:
        source, target = Path(scratch) / "source.onnx", Path(scratch) / "optimized.onnx"
        ir.save(model, source)
        options.optimized_model_filepath = str(target)
        try:
            onnxruntime.InferenceSession(
                str(source), options, providers=["CPUExecutionProvider"], disabled_optimizers=FOR_CPUS_ALONE
            )
        except Exception as error:  # its exceptions share no public base
            raise NotCountableError(f"{path}: ONNX Runtime refuses it: {error}") from error
        graph = onnx.load(target).graph
    constants = {tensor.name: int(np.prod(tensor.dims)) for tensor in graph.initializer}
    types |= {tensor.name: STRING_TYPES[tensor.data_type] for tensor in graph.initializer if tensor.name not in types}
    left = [_node(node, types) for node in graph.node if node.op_type != "Constant"]
    return Graph(
        nodes=tuple(_in_order([*left, *taken_out], [*names[0], *constants, ""])),
        inputs=tuple(names[0]),
        outputs=tuple(names[1]),
        constants=constants,
        shapes=shapes,
        item_bytes=2 if half else 4,
    )


def _values(graph: ir.Graph) -> list[ir.Value]:
    made = [value for node in graph for value in node.outputs]
    return [*graph.inputs, *graph.initializers.values(), *made]


def _shape(shape: ir.Shape) -> tuple[int | str, ...]:
    return tuple(axis if isinstance(axis, int) else str(axis) for axis in shape)


def _take_out(graph: ir.Graph) -> list[Node]:
    """Take nodes out of a graph, whose inputs become its outputs, and the other way round."""
    taken = []
    for node in list(graph):
        op_type = f"{node.domain}.{node.op_type}" if node.domain else node.op_type
        is_cast = node.op_type == "Cast" and HALF in (node.inputs[0].dtype, node.outputs[0].dtype)  # type: ignore[union-attr]
        if not is_cast and op_type not in WITHOUT_CPU_KERNEL:
            continue
        types = tuple(value.dtype.name.lower() if value is not None and value.dtype else "" for value in node.inputs)
        inputs = tuple((value.name or "") if value is not None else "" for value in node.inputs)
        outputs = tuple(value.name or "" for value in node.outputs)
        taken.append(Node(name=node.name or "", op_type=op_type, types=types, inputs=inputs, outputs=outputs))
        for value in dict.fromkeys(node.inputs):
            if value is not None and value.producer() is not None and not value.is_graph_output():
                graph.outputs.append(value)
        for value in node.outputs:
            if value.is_graph_output():
                graph.outputs.remove(value)
            stand_in = ir.Value(name=value.name, shape=value.shape, type=value.type)
            value.name = f"{value.name}/taken out"
            ir.convenience.replace_all_uses_with(value, stand_in)
            graph.inputs.append(stand_in)
        graph.remove(node, safe=True)
    made = {name for node in taken for name in node.outputs}
    for value in [value for value in graph.outputs if value.name in made]:  # between two that were taken out
        graph.outputs.remove(value)
    return taken


def _widen(graph: ir.Graph) -> bool:
    """Type what is fp16 in fp32; say whether there was any."""
    values = [*_values(graph), *graph.outputs]
    half = [value for value in dict.fromkeys(values) if value.dtype == HALF]
    for value in half:
        value.dtype = SINGLE
        if value.const_value is not None:
            value.const_value = ir.tensor(value.const_value.numpy().astype(np.float32), name=value.name)
    for node in graph:
        for attribute in node.attributes.values():
            if attribute.type == ir.AttributeType.TENSOR and attribute.as_tensor().dtype == HALF:
                wide = ir.tensor(attribute.as_tensor().numpy().astype(np.float32))
                node.attributes[attribute.name] = ir.AttrTensor(attribute.name, wide)
    return bool(half)


def _node(node: onnx.NodeProto, types: dict[str | None, str]) -> Node:
    op_type = f"{node.domain}.{node.op_type}" if node.domain not in ("", "ai.onnx") else node.op_type
    kinds = tuple(types.get(name, "") for name in node.input)
    return Node(name=node.name, op_type=op_type, types=kinds, inputs=tuple(node.input), outputs=tuple(node.output))


def _in_order(nodes: Iterable[Node], there: Iterable[str]) -> list[Node]:
    """Order nodes so that each comes after those whose values it reads, and otherwise as they are."""
    ordered, there, waiting = [], set(there), list(nodes)
    while waiting:
        ready = [node for node in waiting if there.issuperset(node.inputs)]
        if not ready:
            raise ValueError(f"nothing makes what {waiting[0].name} reads: {set(waiting[0].inputs) - there}")
        chosen = ready[0]
        waiting.remove(chosen)
        ordered.append(chosen)
        there.update(chosen.outputs)
    return ordered


def profiled(path: Path, workload: str) -> list[tuple[Node, str]]:
    """Return the nodes of one run on the GPU that is here, with the settings of `load`, in order, and which provider ran each."""
    import onnxruntime

    from adtp_export.benchmarking.workloads import make_workloads

    options = onnxruntime.SessionOptions()
    options.enable_profiling, options.log_severity_level = True, 3
    with tempfile.TemporaryDirectory() as scratch:
        options.profile_file_prefix = f"{scratch}/profile"
        session = onnxruntime.InferenceSession(
            str(path), options, providers=[cuda_provider(exact=True), "CPUExecutionProvider"]
        )
        if "CUDAExecutionProvider" not in session.get_providers():
            raise SystemExit(
                "--profile: ONNX Runtime's CUDA provider cannot start here; leave --profile out to count without a GPU"
            )
        names = [value.name for value in session.get_inputs()]
        (batch,) = make_workloads([workload], names, vocab_size=1000)[0].batches
        for _ in range(2):
            session.run(None, {name: batch[name] for name in names})
        events = json.loads(Path(session.end_profiling()).read_text(encoding="utf-8"))
    return last_run(events)


def last_run(events: Sequence[dict[str, Any]]) -> list[tuple[Node, str]]:
    """Return the nodes of the last run in a profile."""
    begins = max(event["ts"] for event in events if event["name"] == "model_run")
    ends = begins + max(event["dur"] for event in events if event["name"] == "model_run" and event["ts"] == begins)
    found = []
    for event in sorted(events, key=lambda event: event["ts"]):
        if (
            event.get("cat") != "Node"
            or not event["name"].endswith("_kernel_time")
            or not begins <= event["ts"] <= ends
        ):
            continue
        args = event["args"]
        types = tuple(kind for entry in args["input_type_shape"] for kind in entry)
        op_type = args["op_name"] if args["op_name"] not in OF_MICROSOFT else f"com.microsoft.{args['op_name']}"
        side = CUDA if args["provider"] == "CUDAExecutionProvider" else CPU
        found.append((Node(name=event["name"].removesuffix("_kernel_time"), op_type=op_type, types=types), side))
    return found


OF_MICROSOFT = ("PackedMultiHeadAttention", "SkipLayerNormalization", "BiasGelu", "FastGelu", "FusedMatMul")
"""Operators that a profile names without their domain."""
