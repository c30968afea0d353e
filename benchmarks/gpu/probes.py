"""What the design of the runner rests on, measured on this machine's NVIDIA GPU; `benchmarks/gpu/run.sh probes` is the command:

    benchmarks/gpu/run.sh probes [--records DIR]
    benchmarks/gpu/run.sh probes --dry-run --records DIR      # on an emulated GPU: does everything work?

1. Kernels that do nothing in a CUDA graph, what launching a graph takes, and how late the host reads a word that a kernel writes.
2. The products of a layer by this project's kernels, each tile and each split, beside PyTorch's (cuBLASLt), as CUDA graphs.
3. Launches, copies and gaps of ONNX Runtime's CUDA provider, by CUPTI, of the student and of packed dense BERT.

Times are by the host's clock: of many kernels less that of few, divided by how many more these are. What launching and waiting
take is in both, so it is in neither result. Written: gpu-NAME-probes.json. A part that fails leaves its reason, and the others go on.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import functools
import itertools
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from adtp_export.environment import commit, versions
from adtp_export.plugins.encoder import variants
from adtp_export.plugins.encoder.launches import NUMPY
from adtp_export.plugins.plan import OUTPUT, WEIGHT, WORKSPACE, Bucket, Launch, Number, Plan, Pointer
from adtp_export.plugins.runner import Runner
from adtp_export.plugins.shipped import kernel
from benchmarks.gpu.profiles import profiles
from benchmarks.gpu.suite import gpu_of, in_file_names, parse_further
from benchmarks.gpu.table import library
from benchmarks.harness.records import Row, claim, write

PTX = b"""
.version 8.0
.target sm_80
.address_size 64
.visible .entry nothing(
\t.param .u32 nothing_param_0
)
.reqntid 32
{
	ret;
}
.visible .entry tell(
	.param .u64 tell_param_0,
	.param .u32 tell_param_1
)
.reqntid 32
{
	.reg .b32 	%r<2>;
	.reg .b64 	%rd<2>;
	ld.param.b64 	%rd1, [tell_param_0];
	ld.param.b32 	%r1, [tell_param_1];
	st.global.b32 	[%rd1+0], %r1;
	ret;
}
"""
WARP = 32
"""Threads of both."""

PATIENCE_S = 1.0
DTYPE = "fp16"
ROWS = (32, 128, 512, 2048, 9216)
WIDTHS = {"minilm": (384, 1536), "bert-base": (768, 3072)}
PARTS = (1, 2, 4, 8)


@dataclass(frozen=True)
class Effort:
    """rounds: of each time. few, many: kernels of the two graphs whose times are subtracted."""

    rounds: int = 30
    few: int = 4
    many: int = 54

    def each_us(self, graph: Callable[[int], Callable[[], object]]) -> tuple[float, float]:
        """Return the us of one kernel, and those of launching and waiting; `graph` returns what runs so many."""
        few, many = (median_us(graph(count), self.rounds) for count in (self.few, self.many))
        each = (many - few) / (self.many - self.few)
        return each, few - self.few * each


def median_us(call: Callable[[], object], rounds: int) -> float:
    """Return the median time of a call, after three that do not count."""
    times = []
    for _ in range(3 + rounds):
        began = time.perf_counter()
        call()
        times.append((time.perf_counter() - began) * 1e6)
    return statistics.median(times[3:])


class Graphs:
    """CUDA graphs of kernels that do nothing, and a kernel that writes a word of the host's memory."""

    def __init__(self) -> None:
        from cuda.bindings import driver

        self._driver = driver
        self._call(driver.cuInit, 0)
        self._call(driver.cuCtxSetCurrent, self._call(driver.cuDevicePrimaryCtxRetain, 0))
        self._code = self._call(driver.cuLibraryLoadData, PTX + b"\0", [], [], 0, [], [], 0)
        self._stream = self._call(driver.cuStreamCreate, 1)

    def _call(self, function: Callable[..., tuple[Any, ...]], *arguments: Any) -> Any:
        status, *values = function(*arguments)
        if int(status):
            raise RuntimeError(f"{function.__name__}: {status.name}")
        return values[0] if values else None

    def _function(self, name: bytes) -> Any:
        return self._call(
            self._driver.cuKernelGetFunction, self._call(self._driver.cuLibraryGetKernel, self._code, name)
        )

    def empty(self, kernels: int) -> Callable[[], None]:
        """Return what launches a graph of so many kernels, one after the other, and waits for it."""
        driver, graph, before = self._driver, self._call(self._driver.cuGraphCreate, 0), []
        node = driver.CUDA_KERNEL_NODE_PARAMS()
        node.func = self._function(b"nothing")
        node.gridDimX = node.gridDimY = node.gridDimZ = node.blockDimY = node.blockDimZ = 1
        node.blockDimX = WARP
        node.kernelParams = ((0,), (ctypes.c_int32,))
        for _ in range(kernels):
            before = [self._call(driver.cuGraphAddKernelNode, graph, before, len(before), node)]
        made = self._call(driver.cuGraphInstantiate, graph, 0)

        def launch() -> None:
            self._call(driver.cuGraphLaunch, made, self._stream)
            self._call(driver.cuStreamSynchronize, self._stream)

        return launch

    def word(self) -> tuple[Callable[[], None], Callable[[], None]]:
        """Return what has a kernel write a word and reads it as soon as it is there, and what waits for the stream instead."""
        driver, tell = self._driver, self._function(b"tell")
        host = int(self._call(driver.cuMemHostAlloc, 4, 2))
        there = int(self._call(driver.cuMemHostGetDevicePointer, host, 0))
        word, said = ctypes.c_int32.from_address(host), [0]

        def launch() -> None:
            said[0] += 1
            given = ((there, said[0]), (ctypes.c_void_p, ctypes.c_int32))
            self._call(driver.cuLaunchKernel, tell, 1, 1, 1, WARP, 1, 1, 0, self._stream, given, 0)

        def read() -> None:
            launch()
            deadline = time.perf_counter() + PATIENCE_S
            while word.value != said[0]:
                driver.cuStreamQuery(self._stream)  # where launches are queued, this sends them off; it does not wait
                if time.perf_counter() > deadline:
                    raise RuntimeError(f"the host does not see the word within {PATIENCE_S:g} s")

        def wait() -> None:
            launch()
            self._call(driver.cuStreamSynchronize, self._stream)

        return read, wait


def launches(effort: Effort) -> Row:
    """Measure what kernels that do nothing cost in a graph, and waits."""
    graphs = Graphs()
    each, ends = effort.each_us(graphs.empty)
    read, wait = (median_us(call, effort.rounds) for call in graphs.word())
    return {
        "empty_kernel_us": round(each, 3),
        "graph_launch_and_wait_us": round(ends, 2),
        "kernel_and_mapped_word_us": round(read, 2),
        "kernel_and_wait_us": round(wait, 2),
    }


def product_plan(
    variant: variants.Variant, shape: tuple[int, int, int], parts: int, processors: int, count: int
) -> Plan:
    """Plan the same product `count` times; a, live and weight are weights, and the last one's result is the output.

    Args:
        shape: (M, N, K).
    """
    m, n, k = shape
    tiles = -(-m // variant.constants["BLOCK_M"]) * -(-n // variant.constants["BLOCK_N"]) * parts
    types = kernel(variant.name).types
    item = 4 if types["out"] == "*fp32" else NUMPY[DTYPE].itemsize
    numbers = {
        "source_rows": m,
        "num_rows": m,
        "n": n,
        "k": k,
        "a_stride": k,
        "out_stride": n,
        "parts": parts,
        "indexed": 0,
    }
    places = {
        "a": Pointer(WEIGHT),
        "weight": Pointer(WEIGHT, 0, 1),
        "bias": Pointer(WEIGHT, 0, 2),
        "live": Pointer(WEIGHT, 0, 3),
    }
    places |= {"index": Pointer("null")}

    def launch(out: Pointer) -> Launch:
        given = {**places, "out": out, **{name: Number("i32", value) for name, value in numbers.items()}}
        return Launch(
            variant=variant.name, programs=min(tiles, 4 * processors), arguments=tuple(given[name] for name in types)
        )

    size = parts * m * n * item
    sizes = (m * k * NUMPY[DTYPE].itemsize, n * k * NUMPY[DTYPE].itemsize, n * NUMPY[DTYPE].itemsize, 16)
    done = (*[launch(Pointer(WORKSPACE))] * (count - 1), launch(Pointer(OUTPUT)))
    return Plan(sizes, (Bucket(tokens=m, texts=1, workspace=size, inputs=(), outputs=(size,), launches=done),))


def time_product(
    variant: variants.Variant,
    parts: int,
    arrays: Sequence[np.ndarray],
    processors: int,
    effort: Effort,
    file: Path | None,
) -> tuple[float, np.ndarray]:
    """Return the us of a product, and its result ``(M, N)``; parts are summed.

    Args:
        arrays: a ``(M, K)``, weight ``(N, K)``, bias ``(N,)``, and M.
    """
    (m, k), n = arrays[0].shape, len(arrays[1])
    is_fp32 = kernel(variant.name).types["out"] == "*fp32"
    out = np.empty((parts, m, n), np.float32 if is_fp32 else NUMPY[DTYPE])

    with contextlib.ExitStack() as opened:

        def graph(count: int) -> Callable[[], None]:
            plan = product_plan(variant, (m, n, k), parts, processors, count)
            runner = opened.enter_context(Runner(plan, arrays, library=file))
            runner.run([], [out], texts=1, tokens=m)
            return functools.partial(runner.run, [], [np.empty(1, out.dtype)], texts=1, tokens=m)

        us, _ = effort.each_us(graph)
    return us, out.astype(np.float32).sum(0)


def of_torch(arrays: Sequence[np.ndarray], gelu: bool, effort: Effort) -> tuple[float, np.ndarray]:
    """Return the us of the same product by PyTorch, with its bias, and its result in fp32; GELU is a kernel more."""
    import torch

    from benchmarks.gpu.torch_peers import DEVICE, Captured

    def product(*operands: torch.Tensor) -> torch.Tensor:
        out = torch.nn.functional.linear(*operands)
        return torch.nn.functional.gelu(out) if gelu else out

    given = [torch.from_numpy(array) for array in arrays[:3]]
    there = [tensor.to(DEVICE) for tensor in given]

    def graph(count: int) -> Callable[[], None]:
        captured = Captured(lambda: [product(*there) for _ in range(count)][-1])

        def call() -> None:
            captured(())
            if DEVICE == "cuda":
                torch.cuda.synchronize()

        return call

    with torch.inference_mode():
        us, _ = effort.each_us(graph)
        return us, product(*(tensor.to(DEVICE).float() for tensor in given)).cpu().numpy()


def shapes(hidden: int, inner: int) -> dict[str, tuple[int, int]]:
    """Return N and K of the products of a layer."""
    return {
        "qkv": (3 * hidden, hidden),
        "output": (hidden, hidden),
        "inner": (inner, hidden),
        "ffn_output": (hidden, inner),
    }


def products(
    rows: Sequence[int], widths: dict[str, tuple[int, int]], processors: int, effort: Effort, file: Path | None
) -> Iterator[Row]:
    """Time the four products of a layer in every way that there is."""
    drawn = np.random.default_rng(0)
    for (name, (hidden, inner)), m in itertools.product(widths.items(), rows):
        for what, (n, k) in shapes(hidden, inner).items():
            a, weight, bias = (drawn.standard_normal(shape, dtype=np.float32) for shape in ((m, k), (n, k), (n,)))
            weight /= k**0.5
            arrays = [*(array.astype(NUMPY[DTYPE]) for array in (a, weight, bias)), np.array([m, 0, 0, 0], np.int32)]
            us, exact = of_torch(arrays, what == "inner", effort)
            row: Row = {"shape": name, "product": what, "rows": m, "processors": processors, "torch_us": round(us, 2)}
            yield {**row, "ours": list(ways(arrays, exact, what == "inner", processors, effort, file))}


def ways(
    arrays: Sequence[np.ndarray], exact: np.ndarray, gelu: bool, processors: int, effort: Effort, file: Path | None
) -> Iterator[Row]:
    """Time each tile and each split of a product. error: the largest, absolute.

    Args:
        exact: in fp32, with the bias, and with GELU where it is wanted.
    """
    for variant in variants.ALL:
        kind = variant.name.rpartition("-")[2]
        wanted = ("gelu",) if gelu else ("none", "parts")
        if variant.kernel != variants.PRODUCT or variant.dtype != DTYPE or kind not in wanted:
            continue
        steps = -(-arrays[0].shape[1] // variant.constants["BLOCK_K"])
        for parts in [p for p in PARTS if p <= steps] if kind == "parts" else [1]:
            us, got = time_product(variant, parts, arrays, processors, effort, file)
            if kind == "parts":  # the norm that follows adds the bias
                got += arrays[2].astype(np.float32)
            row: Row = {"variant": variant.name, "parts": parts, "us": round(us, 2)}
            yield {**row, "error": round(float(np.abs(got - exact).max()), 4)}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="benchmarks/gpu/run.sh probes", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options = parse_further(parser, arguments)
    dry = options.dry_run
    if (gpu := gpu_of("probes", options)) is None:
        return 2
    out = claim(options.records / f"gpu-{in_file_names(gpu['name'])}-probes.json")
    document: Row = {
        "command": "benchmarks/gpu/run.sh probes",
        "commit": commit(),
        "device": gpu,
        "versions": versions(),
    }
    document |= {"dtype": DTYPE, "launches": None, "products": [], "profiles": [], "failures": {}}
    effort = Effort(1, 1, 3) if dry else Effort()
    with tempfile.TemporaryDirectory(prefix="adtp-probes-") as scratch:
        file = options.library or library(Path(scratch))
        rows, widths = ((5,), {"dry": (64, 128)}) if dry else (ROWS, WIDTHS)

        def processors() -> int:
            import torch

            return 3 if dry else int(torch.cuda.get_device_properties(0).multi_processor_count)

        parts: dict[str, Callable[[], Iterator[Row]]] = {
            "launches": lambda: iter([launches(effort)]),
            "products": lambda: products(rows, widths, processors(), effort, file),
            "profiles": lambda: profiles(DTYPE, dry, Path(scratch)),
        }
        for name, part in parts.items():
            try:
                for row in part():
                    document[name] = row if name == "launches" else [*document[name], row]
                    write(out, document)  # after each: nothing is lost
                    print(row, flush=True)
            except Exception as error:  # the next part may work
                document["failures"][name] = f"{type(error).__name__}: {error}"
                print(f"{name}: {document['failures'][name]}", file=sys.stderr)
        write(out, document)
    return int(bool(document["failures"]))


if __name__ == "__main__":
    sys.exit(main())
