"""Runs the shipped kernels on the emulated GPU and compares with the one reference, within what rounding allows."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from emulated_gpu import Device

from adtp_export.ops.ragged_attention import received_bound, rounding_bound
from adtp_export.plugins import binaries, driver
from adtp_export.plugins.variants import ATTENTION, LSE, RECEIVED, SYMBOLS

TYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}


@dataclass(frozen=True, kw_only=True)
class Case:
    """Lengths and how they lie.

    heads: N. packed: q, k and v are columns of one tensor. magnitude: factor on q, with which scores grow.
    """

    lengths: tuple[int, ...]
    heads: int = 2
    packed: bool = True
    seed: int = 0
    magnitude: int = 1


def small_cases(kernel: str, block_m: int) -> list[Case]:
    """Two launches that have it all: length 1, a tile and its neighbours, nothing, more sequences than one look."""
    heads = 5 if kernel == RECEIVED else 1  # what was received takes four heads at a time
    return [
        Case(lengths=(1, block_m - 1, 0, block_m, block_m + 1), heads=heads),
        Case(lengths=tuple(i % 3 for i in range(131)), heads=1, packed=False, seed=1),
    ]


def edge_cases(kernel: str, block_m: int) -> list[Case]:
    """Every kind of end: of a block's columns, as each register has them; of memory; and scores that would overflow."""
    ends = range(5, block_m, 16)
    return [
        Case(lengths=tuple(block_m + end for end in (4, 5, 12, 13, 20, 21, 28, 29)), heads=1, seed=4),
        *(Case(lengths=(3, block_m + end), heads=1, packed=False, seed=end) for end in ends),
        Case(lengths=(16, 0, 99, 2 * block_m + 5), packed=False, seed=5),
        Case(lengths=(block_m + 20, 40), heads=1, seed=6, magnitude=16),
    ]


def thorough_cases(kernel: str, block_m: int) -> list[Case]:
    """`small_cases`, `edge_cases`, and more tiles, more heads, neighbours of powers of two."""
    return [
        *small_cases(kernel, block_m),
        *edge_cases(kernel, block_m),
        Case(lengths=(1, 16, 17, 31, 0, 33, 64, 65, 2), heads=3, packed=False, seed=2),
        Case(lengths=(2 * block_m + 5, 129, 3, 0, 127), seed=3),
    ]


@dataclass(frozen=True, kw_only=True)
class Data:
    """Inputs of a case on the CPU: q, k, v ``(T, N*D)``, cu_seqlens ``(B+1,) int32``."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    cu_seqlens: torch.Tensor
    heads: int
    scale: float
    packed: bool


def make(case: Case, dtype: str, head_size: int) -> Data:
    hidden, generator = case.heads * head_size, torch.Generator().manual_seed(case.seed)
    q, k, v = torch.randn(sum(case.lengths), 3 * hidden, generator=generator).to(TYPES[dtype]).chunk(3, dim=1)
    q = q * case.magnitude
    bounds = torch.tensor([0, *np.cumsum(case.lengths)], dtype=torch.int32)
    return Data(q=q, k=k, v=v, cu_seqlens=bounds, heads=case.heads, scale=1 / math.sqrt(head_size), packed=case.packed)


def capability_of(code: str) -> int:
    """A GPU that runs this code: its own, or one that takes PTX."""
    return 100 if code == "ptx" else int(code.removeprefix("sm_"))


def raw_bytes(t: torch.Tensor) -> np.ndarray:
    return t.contiguous().view(torch.uint8).numpy()


class Runner:
    """Launches chosen binaries as the Python host does, on memory that holds nothing else."""

    def __init__(self, device: Device):
        self.device = device
        self._kernels = functools.cache(self._load)

    def run(
        self, data: Data, dtype: str, chosen: Sequence[binaries.Binary], tokens: int | None = None
    ) -> list[torch.Tensor]:
        """Launch binaries on one call, one after the other; return what each wrote, into memory full of NaN.

        tokens: T that kernels are told; by default the right one.
        """
        there, hidden = data.q.shape
        told = there if tokens is None else tokens
        whole = torch.cat([data.q, data.k, data.v], dim=1)
        inputs = [raw_bytes(whole)] if data.packed else [raw_bytes(t) for t in (data.q, data.k, data.v)]
        lse = np.full(there * data.heads, np.nan, np.float32)
        out = np.full(there * hidden * data.q.element_size(), 0xFF, np.uint8)
        sums = np.full(there, np.nan, np.float32)
        with self.device.memory(*inputs, data.cu_seqlens.numpy(), lse, out, sums) as addresses:
            *given, bounds, at_lse, at_out, at_sums = addresses
            step = hidden * data.q.element_size()
            q, k, v = [given[0] + i * step for i in range(3)] if data.packed else given
            call = driver.Call(
                q=q, k=k, v=v, cu_seqlens=bounds, out=at_out, row_stride=hidden * (3 if data.packed else 1), tokens=told,
                sequences=len(data.cu_seqlens) - 1, num_heads=data.heads, head_size=hidden // data.heads, dtype=dtype,
                scale=data.scale, received=at_sums,
            )  # fmt: skip
            written = []
            for binary in chosen:
                self._launch(binary, replace(call, out=at_out if binary.kernel == ATTENTION else at_lse))
                address, like = {ATTENTION: (at_out, out), LSE: (at_lse, lse), RECEIVED: (at_sums, sums)}[binary.kernel]
                written.append(torch.from_numpy(self.device.download(address, like)))
        return [
            t.view(TYPES[dtype]).view(there, hidden) if b.kernel == ATTENTION else t for b, t in zip(chosen, written)
        ]

    def _load(self, binary: binaries.Binary) -> Any:
        return self.device.load(binary.data, SYMBOLS[binary.kernel], binary.shared_bytes)

    def _launch(self, binary: binaries.Binary, call: driver.Call) -> None:
        values, types = driver.arguments(call, binary.kernel)
        if programs := binary.programs(call.tokens, call.sequences, call.num_heads):
            kernel = self._kernels(binary)
            self.device.launch(kernel, programs, binary.threads, binary.shared_bytes, values, types)


def reference(kernel: str, data: Data) -> tuple[torch.Tensor, torch.Tensor]:
    """What a kernel has to write, and what it may differ by: the bounds of the tests on a GPU."""
    if kernel == ATTENTION:
        return rounding_bound(data.q, data.k, data.v, data.cu_seqlens, data.heads, data.scale)
    bound = received_bound if kernel == RECEIVED else log_sum_exp_bound
    return bound(data.q, data.k, data.cu_seqlens, data.heads, data.scale)


def share_of_allowed(exact: torch.Tensor, allowed: torch.Tensor, written: torch.Tensor) -> float:
    """The largest error, divided by what is allowed there; NaN where nothing was written."""
    return float(((written.double().view_as(exact) - exact).abs() / allowed).max()) if len(exact) else 0.0


@functools.lru_cache(maxsize=64)
def _inputs_and_reference(
    kernel: str, case: Case, dtype: str, head_size: int
) -> tuple[Data, tuple[torch.Tensor, torch.Tensor]]:
    data = make(case, dtype, head_size)
    return data, reference(kernel, data)


def log_sum_exp_bound(q, k, cu_seqlens, heads: int, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    """log2 of the sums of `LSE` ``(N, T)``, and what they may differ by; the terms are those of `received_bound`.

    A score is off by at most d, and so is the logarithm of a sum of exponentials, in which n terms are rounded on top. The
    result is rounded; so are the largest score and the logarithm of the rest, each at most as large as the largest reach.
    """
    w = torch.finfo(torch.float32).eps / 2
    exact, allowed = torch.zeros(2, heads, len(q), dtype=torch.float64)
    size = q.shape[1] // heads
    for begin, end in zip(cu_seqlens.tolist(), cu_seqlens.tolist()[1:]):
        if end == begin:
            continue
        rows = [t[begin:end].double().unflatten(1, (heads, size)).transpose(0, 1) for t in (q, k)]
        scores = rows[0] @ rows[1].transpose(1, 2) * scale
        reach = (rows[0].abs() @ rows[1].abs().transpose(1, 2) * scale).amax(-1)
        exact[:, begin:end] = torch.logsumexp(scores, -1) / math.log(2)
        of_sum = (size + 6) * w * reach + (end - begin + 4) * w
        allowed[:, begin:end] = (of_sum + 3 * w * (reach + math.log(end - begin + 1))) / math.log(2)
    return exact, allowed


def check(runner: Runner, entry: dict, code: str, case: Case, lse: dict | None = None) -> float:
    """Run one variant's binary for `code` on a case; return the share of what is allowed that its error is.

    `lse` is the variant whose log-sum-exps a variant of what was received reads.
    """
    return check_and_keep(runner, entry, code, case, lse)[0]


def check_and_keep(runner: Runner, entry: dict, code: str, case: Case, lse: dict | None) -> tuple[float, bytes]:
    """Do as `check`; return what was written as well."""
    names = [lse["name"]] if lse else []
    chosen = [binaries.binary(name, code) for name in [*names, entry["name"]]]
    share, written = run_and_compare(runner, entry, case, chosen)
    return share, raw_bytes(written).tobytes()


def run_and_compare(
    runner: Runner, entry: dict, case: Case, chosen: Sequence[binaries.Binary]
) -> tuple[float, torch.Tensor]:
    """Launch binaries, of which the last is of the variant; return the share of what is allowed, and what it wrote."""
    data, wanted = _inputs_and_reference(entry["kernel"], case, entry["dtype"], entry["head_size"])
    *_, written = runner.run(data, entry["dtype"], chosen)
    return share_of_allowed(*wanted, written), written


def variants() -> list[dict]:
    return binaries.manifest()["variants"]


def lse_of(entry: dict) -> dict | None:
    """The variant whose log-sum-exps this one reads, if it does."""
    if entry["kernel"] != RECEIVED:
        return None
    same = ("dtype", "head_size")
    return next(e for e in variants() if e["kernel"] == LSE and all(e[key] == entry[key] for key in same))
