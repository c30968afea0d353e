"""Where the time of a run goes: shares of operators, and each matrix product against what the machine can do."""

from __future__ import annotations

import math
import tempfile
import timeit
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import onnx_ir as ir

from ..environment import thread_count
from ..runtimes.onnxruntime import NodeTime, OnnxRuntimeEngine, profile
from .workloads import Workload

RUNS = 10
PRODUCTS = ("Gemm", "FusedGemm", "MatMul", "FusedMatMul")
BYTES = 4
SIDE, LONG = 2048, 2**26
"""Of the matrices, and numbers of the array, that peaks are measured on."""


@dataclass(frozen=True, kw_only=True)
class Product:
    """Matrix products of one shape: ``count`` times ``(batch, M, K) @ (batch, K, N)``.

    ms: of all of them. gflops: FLOPs per second / 1e9. intensity: FLOPs per byte of operands and result, each counted once.
    """

    name: str
    batch: int
    m: int
    n: int
    k: int
    count: int
    ms: float
    gflops: float
    intensity: float


@dataclass(frozen=True, kw_only=True)
class OperatorProfile:
    """One batch of a workload in ONNX Runtime's profiler.

    accounted: share of the run that its nodes account for. shares: of the run, by operator, largest first.
    weights_ms: how long the machine needs to read the weights of all products from memory once.
    """

    workload: str
    run_ms: float
    accounted: float
    product_share: float
    weights_ms: float
    shares: dict[str, float]
    products: tuple[Product, ...]


@dataclass(frozen=True)
class Peaks:
    """What this machine reaches: a large fp32 matrix product, GFLOP/s, and reading memory, GB/s. runtime: whose product that is."""

    gflops: float
    gigabytes_per_s: float
    runtime: str = "PyTorch"


def take(path: Path, workload: Workload, peaks: Peaks, threads: int = 0) -> OperatorProfile:
    """Profile an ONNX file on the first batch of a workload."""
    nodes, run_ms = profile(path, workload.batches[0], RUNS, thread_count(threads))
    shares: dict[str, float] = {}
    for node in nodes:
        shares[node.op_type] = shares.get(node.op_type, 0.0) + node.ms / run_ms
    products = [node for node in nodes if node.op_type in PRODUCTS]
    weights = sum(node.inputs[0][-1] * node.output[-1] for node in products if node.op_type.endswith("Gemm"))
    return OperatorProfile(
        workload=workload.name,
        run_ms=round(run_ms, 3),
        accounted=round(sum(shares.values()), 4),
        product_share=round(sum(node.ms for node in products) / run_ms, 4),
        weights_ms=round(BYTES * weights / peaks.gigabytes_per_s / 1e6, 3),
        shares={op: round(share, 4) for op, share in sorted(shares.items(), key=lambda item: -item[1])},
        products=_by_shape(products),
    )


def _by_shape(nodes: Sequence[NodeTime]) -> tuple[Product, ...]:
    """Join products of one shape, but for the smallest, which say nothing about the machine."""
    groups: dict[tuple[int, int, int, int], list[NodeTime]] = {}
    for node in nodes:
        *outer, m, n = node.output if len(node.output) > 1 else (1, *node.output)
        groups.setdefault((math.prod(outer), m, n, node.inputs[0][-1]), []).append(node)
    products = []
    for (batch, m, n, k), found in groups.items():
        flops, ms = 2.0 * batch * m * n * k * len(found), sum(node.ms for node in found)
        if not flops or ms == 0:  # of a group without texts, or shorter than the profiler's microsecond
            continue
        data = BYTES * batch * (m * k + k * n + m * n) * len(found)
        products.append(
            Product(
                name=found[0].name.split("/")[0],
                batch=batch,
                m=m,
                n=n,
                k=k,
                count=len(found),
                ms=round(ms, 4),
                gflops=_rounded(flops / ms / 1e6),
                intensity=_rounded(flops / data),
            )
        )
    whole = sum(product.ms for product in products)
    return tuple(p for p in sorted(products, key=lambda p: -p.ms) if p.ms > whole / 1000)


def _rounded(value: float) -> float:
    """Four digits, whatever the size: a tiny product that was interrupted is slow, but not 0 on a logarithmic axis."""
    return float(f"{value:.4g}")


def measure_peaks(threads: int = 0) -> Peaks:
    """Time a large matrix product, in PyTorch and in the runtime that is profiled, and reading an array that fits no cache.

    The faster product counts. Each library has processors that it knows better: on an AMD EPYC, ONNX Runtime's products reached twice what
    PyTorch's did, and a roof lies above all that stands below it.
    """
    import torch

    before, threads = torch.get_num_threads(), thread_count(threads)
    torch.set_num_threads(threads)
    square, long = torch.rand(SIDE, SIDE), torch.rand(LONG)
    reading_s = _least_s(long.sum)
    products_s = {"PyTorch": _least_s(lambda: square @ square)}
    torch.set_num_threads(before)
    products_s["ONNX Runtime"] = _least_s(_product(square.numpy(), threads))
    runtime = min(products_s, key=products_s.__getitem__)
    gflops = 2 * SIDE**3 / products_s[runtime] / 1e9
    return Peaks(round(gflops, 1), round(BYTES * LONG / reading_s / 1e9, 2), runtime)


def roof(peaks: Peaks, profiles: Sequence[OperatorProfile]) -> Peaks:
    """Return peaks of which no product of the profiles is above: what a model reached, the machine can do."""
    fastest = max((product.gflops for profile in profiles for product in profile.products), default=0.0)
    return peaks if fastest <= peaks.gflops else replace(peaks, gflops=fastest, runtime="ONNX Runtime, in the model")


def _least_s(function: Callable[[], object]) -> float:
    return min(timeit.repeat(function, number=1, repeat=8))


def _product(square: np.ndarray, threads: int) -> Callable[[], np.ndarray]:
    """Return a function that multiplies a square matrix with itself in ONNX Runtime, as models do: with constant weights."""
    shape, kind = ir.Shape(square.shape), ir.TensorType(ir.DataType.FLOAT)
    given = ir.Value(name="given", shape=shape, type=kind)
    weights = ir.Value(name="weights", shape=shape, type=kind, const_value=ir.tensor(square, name="weights"))
    node = ir.Node("", "MatMul", [given, weights], outputs=[ir.Value(name="found", shape=shape, type=kind)])
    graph = ir.Graph(
        [given], node.outputs, nodes=[node], initializers=[weights], opset_imports={"": 20}, name="product"
    )
    with tempfile.TemporaryDirectory(prefix="adtp-product-") as scratch:
        ir.save(ir.Model(graph, ir_version=10), path := Path(scratch) / "product.onnx")
        engine = OnnxRuntimeEngine(path, threads, stop_spinning=True)
    return lambda: engine.run({"given": square})["found"]
