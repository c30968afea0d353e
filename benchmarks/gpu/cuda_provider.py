"""What ONNX Runtime's CUDA provider does with a graph: which nodes it runs, what is copied between them, and what each costs.

There is no kernel here and no GPU. Facts are those of ONNX Runtime's sources, and each entry of `KERNELS` says in which file they are;
paths without a folder lie below ``onnxruntime/core/providers/cuda``. Files were read one by one, at commits of 2024 to 2026 that differ
from file to file: of 1.17 to 1.31. They are those of no single release, and nobody compared them with 1.31.1, which ran on the H100. From
1.28 on cuDNN can be left out, so reductions may start other kernels than are counted here.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

CUDA, CPU = "cuda", "cpu"
FROM_HOST, TO_HOST = "MemcpyFromHost", "MemcpyToHost"
SMALL_INITIALIZER = 100
"""Elements of a constant that does not keep a node off the CPU: ``core/framework/fallback_cpu_capability.cc``."""
MAY_BE_FLOATING = ("float16", "bfloat16")
"""Types of inputs that keep a node on the GPU; same source."""


class UnknownOperatorError(Exception):
    """Nothing is known of an operator's kernel; the text says which, and where it belongs."""


@dataclass(frozen=True, kw_only=True)
class Kernel:
    """What a node costs. launches: of kernels. copies: and fills beside them, each enqueued like a launch. waits: of the host.

    on_host: its inputs that are read on the host. gives_host: its output lies on the host. lacks: types of its first input that it does
    not take, so that such a node runs on the CPU; "*": all. source: the file that says so.
    """

    source: str
    launches: int = 1
    copies: int = 0
    waits: int = 0
    on_host: tuple[int, ...] = ()
    gives_host: bool = False
    lacks: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Node:
    """A node as it runs. op_type: with its domain, where that is another than ONNX's. types: of inputs, "" for one that is not there.
    inputs, outputs: names of values; empty where only a profile is known."""

    name: str
    op_type: str
    types: tuple[str, ...]
    inputs: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()


def _each(names: str, **kernel: object) -> dict[str, Kernel]:
    return {name: Kernel(**kernel) for name in names.split()}  # type: ignore[arg-type]


KERNELS: dict[str, Kernel] = {
    **_each("Gemm MatMul com.microsoft.FusedMatMul", source="math/gemm.cc, math/matmul.cc"),
    **_each(
        "Add Sub Mul Div Mod Pow Equal Less Greater LessOrEqual GreaterOrEqual And Or Xor",
        source="math/binary_elementwise_ops.cc",
    ),
    **_each("Min Max Sum", source="math/variadic_elementwise_ops.cc, of two inputs"),
    **_each("Abs Neg Exp Log Sqrt Erf Not Floor Ceil Reciprocal Cos Sin", source="math/unary_elementwise_ops.cc"),
    **_each("Relu Tanh Sigmoid", source="activation/activations.cc"),
    **_each("Gelu com.microsoft.Gelu com.microsoft.FastGelu", source="tensor/gelu.cc"),
    "com.microsoft.BiasGelu": Kernel(source="contrib_ops/cuda/math/bias_gelu.cc"),
    "com.microsoft.SkipLayerNormalization": Kernel(source="contrib_ops/cuda/bert/skip_layer_norm.cc"),
    "com.microsoft.PackedMultiHeadAttention": Kernel(
        source="contrib_ops/cuda/bert/packed_multihead_attention_impl.cu: q, k and v apart, no bias"
    ),
    "LayerNormalization": Kernel(source="nn/layer_norm.cc"),
    "Softmax": Kernel(source="math/softmax.cc"),
    "Clip": Kernel(source="math/clip.cc", on_host=(1, 2)),
    "Where": Kernel(source="tensor/where.cc"),
    "Cast": Kernel(source="tensor/cast_op.cc"),
    "Transpose": Kernel(source="tensor/transpose.cc"),
    "Gather": Kernel(source="tensor/gather.cc"),
    "GatherElements": Kernel(source="tensor/gather_elements.cc"),
    "GatherND": Kernel(source="tensor/gather_nd.cc: copies its strides from the stack", launches=2, copies=1),
    "ScatterElements": Kernel(source="tensor/scatter_elements_impl.cu", copies=1),
    "Concat": Kernel(source="tensor/concat.cc: four tables of sizes and places, where sizes differ", copies=4),
    "Split": Kernel(source="tensor/split.cc: of equal parts", on_host=(1,)),
    "Slice": Kernel(source="tensor/slice.cc", on_host=(1, 2, 3, 4)),
    "Expand": Kernel(source="tensor/expand.cc", on_host=(1,)),
    "Tile": Kernel(source="tensor/tile.cc", on_host=(1,)),
    "Range": Kernel(source="generator/range.cc", on_host=(0, 1, 2)),
    "ConstantOfShape": Kernel(source="generator/constant_of_shape.cc", on_host=(0,)),
    "CumSum": Kernel(source="math/cumsum_impl.cu", on_host=(1,)),
    "TopK": Kernel(source="math/topk_impl.cuh: of at most 4,096 sorted values a row", on_host=(1,)),
    **_each(
        "ReduceMax ReduceMin ReduceSum ReduceMean ReduceL2",
        source="reduction/reduction_ops.cc: integers are cast to float and back, after a fill",
        on_host=(1,),
    ),
    **_each("ArgMax ArgMin", source="reduction/reduction_ops.cc: none from opset 12 on", lacks=("*",)),
    "Pad": Kernel(
        source="docs/OperatorKernels.md: bool and floating types alone", on_host=(1, 2, 3), lacks=("int64", "int32")
    ),
    **_each("Reshape Squeeze Unsqueeze", source="tensor/reshape.cc: Alias(0, 0)", launches=0, on_host=(1,)),
    **_each("Flatten Identity", source="tensor/flatten.cc: Alias(0, 0)", launches=0),
    **_each("Shape Size", source="tensor/shape_op.cc", launches=0, gives_host=True),
    "NonZero": Kernel(source="tensor/nonzero_op.cc: its count goes to pageable memory", launches=3, copies=1, waits=1),
    FROM_HOST: Kernel(source="gpu_data_transfer.cc", launches=0, copies=1, on_host=(0,)),
    TO_HOST: Kernel(source="gpu_data_transfer.cc", launches=0, copies=1, waits=1, gives_host=True),
}


def kernel_of(node: Node) -> Kernel:
    """Return what is known of a node's kernel.

    Raises:
        UnknownOperatorError: nothing.
    """
    if node.op_type not in KERNELS:
        raise UnknownOperatorError(
            f"{node.name}: nothing is known of what {node.op_type} costs in ONNX Runtime's CUDA provider. "
            "Look it up in ONNX Runtime's sources, and add it to KERNELS in benchmarks/gpu/cuda_provider.py"
        )
    return KERNELS[node.op_type]


def cost(node: Node) -> tuple[int, int, int]:
    """Return the launches, copies and waits of a node that runs on the GPU."""
    kernel = kernel_of(node)
    launches, copies = kernel.launches, kernel.copies
    if node.op_type == "Gemm" and len(node.types) > 2 and node.types[2]:
        launches = 2  # the bias first, by a product with ones
    if node.op_type.startswith("Reduce") and node.types[0].startswith("int"):
        launches, copies = 3, 1
    return launches, copies, kernel.waits


def place(nodes: Sequence[Node], inputs: Collection[str], constants: Mapping[str, int]) -> list[tuple[Node, str]]:
    """Say where each node of a graph runs, in its order, with the copies that are put between.

    What has no CUDA kernel runs on the CPU, and so does what reads nothing but sizes that are there already
    (``core/framework/fallback_cpu_capability.cc``). A value that is made on one side and read on the other is copied once
    (``core/optimizer/transformer_memcpy.cc``). A copy to the GPU stands before its first reader, one from it behind its maker.

    Args:
        inputs: of the graph.
        constants: names of initializers, and how many elements each has.
    """
    on_gpu = {i for i, node in enumerate(nodes) if _has_kernel(node)}
    on_gpu -= _left_to_the_cpu(nodes, on_gpu, inputs, constants)
    makers = {name: i for i, node in enumerate(nodes) for name in node.outputs}
    made: dict[str, set[str]] = {CUDA: set(), CPU: set()}
    first_reader: dict[str, dict[str, int]] = {CUDA: {}, CPU: {}}
    for i, node in enumerate(nodes):
        kernel = KERNELS[node.op_type] if i in on_gpu else None
        made[CUDA if kernel and not kernel.gives_host else CPU].update(node.outputs)
        for number, name in enumerate(node.inputs):
            side = CUDA if kernel and number not in kernel.on_host else CPU
            first_reader[side].setdefault(name, i)
    before: dict[int, list[Node]] = {}
    after: dict[int, list[Node]] = {}
    for name, i in first_reader[CUDA].items():
        if name in made[CPU] or (name in inputs and name in first_reader[CPU]):
            before.setdefault(i, []).append(_copy(FROM_HOST, name))
    for name in made[CUDA] & first_reader[CPU].keys():
        after.setdefault(makers[name], []).append(_copy(TO_HOST, name))
    placed = []
    for i, node in enumerate(nodes):
        placed += [(copy, CUDA) for copy in before.get(i, ())]
        placed.append((node, CUDA if i in on_gpu else CPU))
        placed += [(copy, CUDA) for copy in after.get(i, ())]
    return placed


def _copy(op_type: str, name: str) -> Node:
    return Node(name=f"{op_type}/{name}", op_type=op_type, types=("",), inputs=(name,))


def _has_kernel(node: Node) -> bool:
    lacks = kernel_of(node).lacks
    return "*" not in lacks and not (node.types and node.types[0] in lacks)


def _left_to_the_cpu(
    nodes: Sequence[Node], on_gpu: Collection[int], inputs: Collection[str], constants: Mapping[str, int]
) -> set[int]:
    """Return those of the nodes that have a kernel which run on the CPU nevertheless, because what they read is there."""
    readers: dict[str, list[int]] = {}
    for i, node in enumerate(nodes):
        for name in node.inputs:
            readers.setdefault(name, []).append(i)
    on_host = {name for i in on_gpu if kernel_of(nodes[i]).gives_host for name in nodes[i].outputs}
    waiting = [i for name in on_host for i in readers.get(name, ())]
    heapq.heapify(waiting)
    seen: set[int] = set()
    left: set[int] = set()
    while waiting:
        i = heapq.heappop(waiting)
        if i in seen:
            continue
        seen.add(i)
        if i in on_gpu:
            if not _reads_the_host_alone(nodes[i], on_host, inputs, constants):
                continue
            left.add(i)
        on_host.update(nodes[i].outputs)
        for name in nodes[i].outputs:
            for reader in readers.get(name, ()):
                heapq.heappush(waiting, reader)
    return left


def _reads_the_host_alone(
    node: Node, on_host: Collection[str], inputs: Collection[str], constants: Mapping[str, int]
) -> bool:
    """Say so of a node, where its kernel does not read them there anyway."""
    kernel = kernel_of(node)
    for number, name in enumerate(node.inputs):
        if node.types[number] in MAY_BE_FLOATING:
            return False
        if constants.get(name, SMALL_INITIALIZER + 1) <= SMALL_INITIALIZER or name in inputs:
            continue
        if name not in on_host or number in kernel.on_host:
            return False
    return True
