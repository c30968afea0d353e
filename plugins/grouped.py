"""Grouped attention through the CUDA driver: which compiled kernels a call launches, and with what. Kernels are `encoder.grouped`'s."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

from ..errors import InputError
from .binaries import Kind, code_for
from .driver import bring_in, device_of_context, gpu, has_context, launch_binary
from .encoder import binaries
from .encoder.variants import BY_NAME, HEAD_BLOCKS

ATTENTION, LSE, RECEIVED = "grouped", "grouped_lse", "grouped_received"
"""What is launched, by the beginnings of the variants' names."""

_TYPES = {"i32": ctypes.c_int32, "fp32": ctypes.c_float}
_FARTHEST = 2**30
"""A window as wide as the kernels add to positions, which lie below it. Wider ones see no more."""
_SCRATCH = 2
"""Pointers to Triton's scratch memory, which these kernels have none of."""


@dataclass(frozen=True, kw_only=True)
class Call:
    """One call of an operator.

    q, k, v: device addresses of row 0, multiples of 16; rows lie `q_stride` and `kv_stride` elements apart, multiples of 8.
    cu_q, cu_k: addresses of ``(B+1,) int32``. positions_q, positions_k: of ``(T,)`` and ``(T',) int32`` below 2**30. out: address of
    ``(T, N*D)``, contiguous. queries, keys, texts: T, T', B. received: address of ``(T',) fp32``, or 0 where it is not wanted. If it
    is, log-sum-exps lie in the memory of `out` at first, as in `driver.Call`.
    """

    q: int
    k: int
    v: int
    cu_q: int
    cu_k: int
    positions_q: int
    positions_k: int
    out: int
    q_stride: int
    kv_stride: int
    queries: int
    keys: int
    texts: int
    num_heads: int
    kv_heads: int
    head_size: int
    dtype: str
    scale: float
    window_back: int
    window_ahead: int
    received: int = 0

    @property
    def kind(self) -> Kind:
        return Kind(self.dtype, self.head_size, bool(self.received), grouped=True)


def check(dtype: str, head_size: int) -> None:
    """Raises InputError for what the kernels do not do."""
    if dtype not in HEAD_BLOCKS:
        raise InputError(f"grouped attention: got dtype {dtype}; accepted are {', '.join(HEAD_BLOCKS)}")
    most = HEAD_BLOCKS[dtype][-1]
    if head_size < 1 or head_size % 8 or head_size > most:
        raise InputError(
            f"grouped attention: got head size {head_size}; accepted in {dtype} are multiples of 8 up to {most}"
        )


def variants_of(kind: Kind) -> tuple[str, ...]:
    """Return the variants that a kind's calls launch, in order.

    Raises:
        InputError: there is none for the dtype or the head size.
    """
    check(kind.dtype, kind.head_size)
    block = next(block for block in HEAD_BLOCKS[kind.dtype] if kind.head_size <= block)
    kernels = (LSE, RECEIVED, ATTENTION) if kind.received else (ATTENTION,)
    return tuple(f"{kernel}-{kind.dtype}-d{block}" for kernel in kernels)


def programs(variant: str, call: Call) -> int:
    """Programs of a launch: as many as any lengths can need."""
    rows, per_tile = (call.keys, 1) if variant.startswith(RECEIVED) else (call.queries, call.num_heads)
    return (rows // BY_NAME[variant].constants["BLOCK_M"] + call.texts) * per_tile


def arguments(variant: str, call: Call) -> tuple[tuple[float, ...], tuple[Any, ...]]:
    """A launch's arguments with their C types, as cuda-python takes them."""
    given = vars(call) | {"lse": call.out, "num_queries": call.queries, "num_keys": call.keys, "num_texts": call.texts}
    given |= {name: min(given[name], _FARTHEST) for name in ("window_back", "window_ahead")}
    kinds = binaries.entry(variant)["arguments"]
    types = [_TYPES.get(kind, ctypes.c_void_p) for kind in kinds.values()]
    return (*(given[name] for name in kinds), *(0,) * _SCRATCH), (*types, *(ctypes.c_void_p,) * _SCRATCH)


def launch(call: Call, stream: int, device: int = 0) -> None:
    """Enqueue a call's kernels on a stream of the current CUDA context; return at once.

    Args:
        device: whose primary context to take where the thread has none.

    Raises:
        InputError: no kernel for the dtype, the head size or the GPU; an address or a stride is no multiple of what it has to be.
        CudaError: the driver refuses.
    """
    if (call.q | call.k | call.v | call.out) % 16 or call.q_stride % 8 or call.kv_stride % 8:
        raise InputError(
            "grouped attention: addresses (in bytes) must be multiples of 16 and row strides (in elements) of 8; got "
            f"q {call.q:#x}, k {call.k:#x}, v {call.v:#x}, out {call.out:#x}, strides {call.q_stride} and {call.kv_stride}"
        )
    names = variants_of(call.kind)
    device = device_of_context(device)
    for name in names:
        if count := programs(name, call):
            binary = binaries.binary(name, code_for(gpu(device).architecture))
            launch_binary(binary, device, count, stream, arguments(name, call))


def prepare(kind: Kind) -> None:
    """Load all that calls of a kind may launch into the current CUDA context, as `driver.prepare` does.

    Raises:
        InputError: no kernel for the dtype, the head size or the GPU.
        CudaError: the driver refuses.
    """
    if has_context():
        device = device_of_context(0)
        for name in variants_of(kind):
            bring_in(binaries.binary(name, code_for(gpu(device).architecture)), device)
