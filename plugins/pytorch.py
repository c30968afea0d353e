"""The kernels on PyTorch's CUDA tensors. Importing this module makes `adtp::ragged_attention` use them there, and its forms with
received attention and with grouped queries."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..errors import InputError
from ..ops.grouped_attention import check_grouped, ragged_attention_grouped, ragged_attention_grouped_received
from ..ops.ragged_attention import ragged_attention, ragged_attention_received, rises
from . import grouped
from .binaries import Binary, check
from .driver import Call, launch

NAMES = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32"}


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    num_heads: int,
    scale: float,
    *,
    check_values: bool = True,
    binary: Binary | None = None,
) -> Tensor:
    """Bidirectional attention within packed sequences, as `adtp_export.ops.ragged_attention.ragged_attention` defines it.

    Args:
        q, k, v: ``(T, H)`` fp16, bf16 or fp32 on one CUDA device, one row stride; columns of one ``(T, 3H)`` tensor will
            do: ``q, k, v = qkv.chunk(3, dim=1)``. Head size H / num_heads of 32, 64 or 128.
        cu_seqlens: ``(B+1,) int32`` on the same device, from 0 to T, non-decreasing.
        num_heads: N, a divisor of H.
        scale: factor on ``q @ k.T`` before the softmax.
        check_values: read `cu_seqlens` back and check it, which waits for the GPU. Without the check wrong values give
            wrong results, but touch no other memory.
        binary: the variant to run; by default it is chosen by T / B.

    Returns:
        ``(T, H)``, contiguous, in the dtype of `q`.

    Raises:
        InputError: anything of the above does not hold, or there is no kernel for the GPU.
    """
    _check(q, k, v, cu_seqlens, num_heads, check_values)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    _launch(_call(q, k, v, cu_seqlens, out, num_heads, scale), q.device, () if binary is None else (binary,))
    return out


def attend_received(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    num_heads: int,
    scale: float,
    *,
    check_values: bool = True,
    binaries: Sequence[Binary] = (),
) -> tuple[Tensor, Tensor]:
    """Attend as `attend` does, and say what each token received, as `ragged_attention_received` defines it.

    Args: those of `attend`, and
        binaries: the variants to run, of log-sum-exps, of what was received, and of attention.

    Returns:
        output: ``(T, H)``, that of `attend`. received: ``(T,) fp32``.

    Raises:
        InputError: as `attend`.
    """
    _check(q, k, v, cu_seqlens, num_heads, check_values)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    received = torch.empty(len(q), dtype=torch.float32, device=q.device)
    call = _call(q, k, v, cu_seqlens, out, num_heads, scale)
    _launch(replace(call, received=received.data_ptr()), q.device, binaries)
    return out, received


def _call(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, out: Tensor, num_heads: int, scale: float) -> Call:
    return Call(
        q=q.data_ptr(),
        k=k.data_ptr(),
        v=v.data_ptr(),
        cu_seqlens=cu_seqlens.data_ptr(),
        out=out.data_ptr(),
        row_stride=_stride(q),
        tokens=q.shape[0],
        sequences=len(cu_seqlens) - 1,
        num_heads=num_heads,
        head_size=q.shape[1] // num_heads,
        dtype=NAMES[q.dtype],
        scale=scale,
    )


def _launch(call: Call, device: torch.device, binaries: Sequence[Binary]) -> None:
    with torch.cuda.device(device):
        launch(call, torch.cuda.current_stream().cuda_stream, binaries, device.index)


@ragged_attention.register_kernel("cuda")
def _(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, num_heads: int, scale: float) -> Tensor:
    return attend(*_aligned(q, k, v), cu_seqlens, num_heads, scale, check_values=False)


@ragged_attention_received.register_kernel("cuda")
def _(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, num_heads: int, scale: float) -> tuple[Tensor, Tensor]:
    return attend_received(*_aligned(q, k, v), cu_seqlens, num_heads, scale, check_values=False)


def _grouped(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bounds: tuple[Tensor, ...],
    numbers: tuple[int, int, float, int, int],
    received: Tensor | None = None,
) -> Tensor:
    """Launch `adtp::ragged_attention_grouped`, and what keys receive where there is room for it; lengths and positions are not checked.

    Args:
        bounds: cu_q, cu_k, positions_q, positions_k. numbers: num_heads, kv_heads, scale, window_back, window_ahead.

    Raises:
        ValueError: shapes or dtypes break the operator's contract.
        InputError: no kernel for the dtype, the head size or the GPU, or tensors of several devices.
    """
    num_heads, kv_heads, scale, window_back, window_ahead = numbers
    cu_q, cu_k, *positions = bounds
    check_grouped(q, k, v, cu_q, cu_k, *positions, *numbers)  # type: ignore[arg-type]
    grouped.check(NAMES.get(q.dtype, str(q.dtype)), q.shape[1] // num_heads)
    if not q.is_cuda or any(t.device != q.device for t in (k, v, *bounds)):
        devices = sorted({str(t.device) for t in (q, k, v, *bounds)})
        raise InputError(f"grouped attention: got tensors on {', '.join(devices)}; accepted is one CUDA device")
    q, k, v = (_dense(t, t.data_ptr() % 16 or t.stride(0) % 8) for t in (q, k, v))
    if k.stride(0) != v.stride(0):
        k, v = (_dense(t, True) for t in (k, v))
    addresses = [t.contiguous() for t in bounds]
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    names = ("cu_q", "cu_k", "positions_q", "positions_k")
    call = grouped.Call(
        q=q.data_ptr(), k=k.data_ptr(), v=v.data_ptr(), out=out.data_ptr(), **{n: t.data_ptr() for n, t in zip(names, addresses)},
        q_stride=_stride(q), kv_stride=_stride(k), queries=len(q), keys=len(k), texts=len(bounds[0]) - 1, num_heads=num_heads,
        kv_heads=kv_heads, head_size=q.shape[1] // num_heads, dtype=NAMES[q.dtype], scale=scale, window_back=window_back,
        window_ahead=window_ahead, received=0 if received is None else received.data_ptr(),
    )  # fmt: skip
    with torch.cuda.device(q.device):
        grouped.launch(call, torch.cuda.current_stream().cuda_stream, q.device.index)
    return out


def _dense(t: Tensor, is_wanted: object) -> Tensor:
    return t.clone(memory_format=torch.contiguous_format) if is_wanted or t.stride(1) != 1 else t


def _stride(t: Tensor) -> int:
    return t.stride(0) if len(t) > 1 else t.shape[1]  # of a single row torch may say anything


@ragged_attention_grouped.register_kernel("cuda")
def _(q: Tensor, k: Tensor, v: Tensor, *others: Any) -> Tensor:
    return _grouped(q, k, v, others[:4], others[4:])


@ragged_attention_grouped_received.register_kernel("cuda")
def _(q: Tensor, k: Tensor, v: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
    received = torch.empty(len(k), dtype=torch.float32, device=k.device)
    return _grouped(q, k, v, others[:4], others[4:], received), received


def _aligned(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    if any(t.stride() != q.stride() or t.stride(1) != 1 or t.stride(0) % 16 or t.data_ptr() % 16 for t in (q, k, v)):
        return tuple(t.clone(memory_format=torch.contiguous_format) for t in (q, k, v))  # type: ignore[return-value]
    return q, k, v


def _check(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, num_heads: int, check_values: bool) -> None:
    """Raises InputError where shapes, dtypes, strides or devices are not those of `attend`."""
    if q.dim() != 2 or not q.shape == k.shape == v.shape:
        raise InputError(f"q, k, v: got shapes {_each(q, k, v, 'shape')}; accepted is one shape (T, H)")
    if not q.dtype == k.dtype == v.dtype:
        raise InputError(f"q, k, v: got dtypes {_each(q, k, v, 'dtype')}; accepted is one dtype")
    if num_heads < 1 or q.shape[1] % num_heads:
        raise InputError(f"num_heads: got {num_heads}; accepted are divisors of H = {q.shape[1]}")
    check(NAMES.get(q.dtype, str(q.dtype)), q.shape[1] // num_heads)
    if (
        cu_seqlens.dtype != torch.int32
        or cu_seqlens.dim() != 1
        or len(cu_seqlens) < 1
        or not cu_seqlens.is_contiguous()
    ):
        raise InputError(
            f"cu_seqlens: got {tuple(cu_seqlens.shape)} {cu_seqlens.dtype}; accepted is (B+1,) int32, contiguous"
        )
    if check_values:
        bounds = cu_seqlens.tolist()
        if not rises(bounds, q.shape[0]):
            raise InputError(f"cu_seqlens: got {bounds}; accepted are values rising from 0 to T = {q.shape[0]}")
    strides = {t.stride(0) for t in (q, k, v)}
    if (len(strides) > 1 and len(q) > 1) or any(t.stride(1) != 1 for t in (q, k, v)):
        raise InputError(
            f"q, k, v: got strides {[t.stride() for t in (q, k, v)]}; accepted is one row stride, columns dense"
        )
    if not (q.is_cuda and q.device == k.device == v.device == cu_seqlens.device):
        devices = sorted({str(t.device) for t in (q, k, v, cu_seqlens)})
        raise InputError(f"q, k, v, cu_seqlens: got tensors on {', '.join(devices)}; accepted is one CUDA device")


def _each(q: Tensor, k: Tensor, v: Tensor, what: str) -> str:
    return ", ".join(str(tuple(value) if what == "shape" else value) for value in (getattr(t, what) for t in (q, k, v)))
