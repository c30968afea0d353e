"""Launches the encoder's kernels where there is no GPU: in Triton's interpreter, and compiled, in the emulator.

Both change the tensors that they are given, as a launch does. Around each there is no one's memory: the emulator faults where a
kernel goes there, the interpreter has bytes of 0xFF, which are NaN and -1 where they are read, and looks whether they are still there.
"""

from __future__ import annotations

import ctypes
import importlib
from collections.abc import Callable
from typing import Any

import torch
from emulated_gpu import Device

from adtp_export.plugins.encoder import binaries
from adtp_export.plugins.encoder.variants import (
    ABOVE,
    ADD_NORM,
    ADD_RMS,
    ANCHOR,
    CHOICE,
    EMBED,
    GATED,
    GROUPED,
    GROUPED_RECEIVED,
    LOOK_UP,
    NORMALIZE,
    POOL,
    PRODUCT,
    PUT_BACK,
    SCORES,
    SHARE,
    SKIM,
    SPREAD,
    TURN,
    UNPAD,
    VECTORS,
    Variant,
)

Launch = Callable[..., None]
"""``launch(variant, programs, **arguments)``: tensors, which it changes, and numbers, by the kernel's names."""

GUARD = 256
NUMBERS = {"i32": ctypes.c_int32, "fp32": ctypes.c_float}


WRITES: dict[str, tuple[str, ...]] = {
    PRODUCT: ("out",),
    ADD_NORM: ("out",),
    UNPAD: ("ends", "cu_seqlens", "texts"),
    EMBED: ("out", "origin"),
    SCORES: ("order", "count"),
    CHOICE: ("rows", "new_cu_seqlens"),
    ABOVE: ("rows", "new_cu_seqlens", "before"),
    SHARE: ("reaches",),
    NORMALIZE: ("out",),
    SKIM: ("order",),
    PUT_BACK: ("out",),
    SPREAD: ("out",),
    POOL: ("out",),
    VECTORS: ("out",),
    GROUPED: ("out", "lse"),
    GROUPED_RECEIVED: ("received",),
    LOOK_UP: ("states", "out", "positions"),
    ADD_RMS: ("states", "out"),
    TURN: ("qkv", "new_positions"),
    GATED: ("out",),
    ANCHOR: ("order", "count"),
}
"""The tensors that each kernel writes: its outputs, and memory that it works in."""


class StrayWriteError(Exception):
    """A kernel has written beside an argument, or into one that it only reads."""


def raw(t: torch.Tensor) -> torch.Tensor:
    """The bytes of a contiguous tensor, as a flat uint8 tensor that shares its memory."""
    assert t.is_contiguous()
    return t.view(-1).view(torch.uint8)


def unwritten(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    """Memory of bytes of 0xFF: NaN, or -1."""
    t = torch.empty(shape, dtype=dtype)
    raw(t).fill_(0xFF)
    return t


def is_unwritten(t: torch.Tensor) -> bool:
    return bool((raw(t.contiguous()) == 0xFF).all())


def take_over(variant: Variant, given: dict[str, Any], found: dict[str, torch.Tensor]) -> None:
    """Copy what a launch has left in its tensors to where they came from.

    Raises:
        StrayWriteError: it has changed one that the kernel only reads.
    """
    for name, t in found.items():
        if name in WRITES[variant.kernel]:
            raw(given[name]).copy_(raw(t))
        elif not torch.equal(raw(given[name]), raw(t)):
            raise StrayWriteError(f"{variant.name} changes {name}")


def interpret(variant: Variant, programs: int, **given: Any) -> None:
    """Run a kernel in Triton's interpreter."""
    kernel = getattr(importlib.import_module(f"adtp_export.plugins{variant.module}"), variant.symbol)
    assert set(given) == set(variant.arguments)
    guarded = {}
    for name, value in given.items():
        if isinstance(value, torch.Tensor):
            guarded[name] = unwritten(value.numel() + 2 * GUARD, dtype=value.dtype)
            guarded[name][GUARD:-GUARD] = value.view(-1)
    inner = {name: t[GUARD:-GUARD] for name, t in guarded.items()}
    kernel[(programs,)](**(given | inner), **variant.constants)
    for name, t in guarded.items():
        if not is_unwritten(t[:GUARD]) or not is_unwritten(t[-GUARD:]):
            raise StrayWriteError(f"{variant.name} writes beside {name}")
    take_over(variant, given, inner)


class Emulated:
    """Runs compiled kernels in the emulator.

    Args:
        code: an architecture, or ``"ptx"``. change: replaces a variant's binary by another.
    """

    def __init__(
        self, device: Device, code: str, change: Callable[[binaries.Binary], binaries.Binary] = lambda binary: binary
    ):
        self.device, self.code, self.change = device, code, change

    def __call__(self, variant: Variant, programs: int, **given: Any) -> None:
        binary = self.change(binaries.binary(variant.name, self.code))
        assert set(given) == set(variant.arguments)
        tensors = {name: raw(value).numpy() for name, value in given.items() if isinstance(value, torch.Tensor)}
        kernel = self.device.load(binary.data, binary.symbol, binary.shared_bytes)
        with self.device.memory(*tensors.values()) as addresses:
            places = dict(zip(tensors, addresses))
            values = [places.get(name, given[name]) for name in variant.arguments]
            types = [ctypes.c_uint64 if name in places else NUMBERS[kind] for name, kind in variant.arguments.items()]
            self.device.launch(
                kernel,
                programs,
                binary.threads,
                binary.shared_bytes,
                [*values, 0, 0],
                [*types, *(ctypes.c_uint64,) * 2],
            )
            found = {name: self.device.download(places[name], array) for name, array in tensors.items()}
        take_over(variant, given, {name: torch.from_numpy(array) for name, array in found.items()})
