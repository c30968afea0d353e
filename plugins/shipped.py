"""Every compiled kernel that a plan may launch, by the name of its variant, in the words of `cpp/runner.h`."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from ..errors import InputError, did_you_mean
from . import binaries
from .ahead_of_time import ARGUMENTS, MULTIPLES_OF_16
from .encoder import binaries as encoder
from .library import array
from .variants import PTX_ARCHITECTURE, SYMBOLS

_WORDS = {"i32": "i", "i64": "l", "fp32": "f"}
OLDEST = int(PTX_ARCHITECTURE.removeprefix("sm_"))
"""The GPU that PTX is for, such as 80."""


@dataclass(frozen=True)
class Code:
    """Compiled code for one GPU. architecture: such as 86, or 0 for PTX. shared_bytes: of a program."""

    architecture: int
    data: bytes
    shared_bytes: int


@dataclass(frozen=True, kw_only=True)
class Kernel:
    """One variant of a kernel.

    symbol: its function in the code. types: Triton's of its arguments, by name, in order. arguments: a word for each, such as
    ``"p16 p i f"``. threads: of a program.
    """

    variant: str
    symbol: str
    types: Mapping[str, str]
    arguments: str
    threads: int
    codes: tuple[Code, ...]


def names() -> tuple[str, ...]:
    """The variants of all kernels: of attention, and of the encoder around it."""
    return (*_attention(), *_encoder())


@functools.cache
def kernel(name: str) -> Kernel:
    """Return a variant with its code for every GPU.

    Raises:
        InputError: there is none of this name.
    """
    archive: Any
    if name in _encoder():
        archive, entry = encoder, _encoder()[name]
        symbol, types, multiples = entry["kernel"], entry["arguments"], entry["multiples"]
    elif name in _attention():
        archive, entry = binaries, _attention()[name]
        symbol, types = SYMBOLS[entry["kernel"]], ARGUMENTS[entry["kernel"]]
        multiples = dict.fromkeys(MULTIPLES_OF_16, 16)
    else:
        raise InputError(f"the plan launches {name!r}, and there is no such kernel{did_you_mean(name, names())}")
    found = {code: archive.binary(name, code) for code in entry["binaries"]}
    return Kernel(
        variant=name,
        symbol=symbol,
        types=types,
        arguments=words(types, multiples),
        threads=entry["threads"],
        codes=tuple(Code(_architecture(code), one.data, one.shared_bytes) for code, one in found.items()),
    )


@functools.cache
def _attention() -> dict[str, dict[str, Any]]:
    return {entry["name"]: entry for entry in binaries.manifest()["variants"]}


@functools.cache
def _encoder() -> dict[str, dict[str, Any]]:
    return {entry["name"]: entry for entry in encoder.manifest()["variants"]}


def _architecture(code: str) -> int:
    return 0 if code == "ptx" else int(code.removeprefix("sm_"))


def words(types: Mapping[str, str], multiples: Mapping[str, int]) -> str:
    """Say what a kernel takes: a word for each argument.

    Args:
        types: Triton's, in order, such as ``"*fp16"`` or ``"i32"``.
        multiples: of what an argument is promised to be a multiple: bytes for pointers.
    """
    return " ".join(
        ("p" if kind.startswith("*") else _WORDS[kind]) + (str(multiples[name]) if name in multiples else "")
        for name, kind in types.items()
    )


def kernels_cpp(wanted: Iterable[str]) -> str:
    """The table of `cpp/embedded.h`, with these kernels and all their code."""
    arrays, rows = [], []
    for i, found in enumerate(map(kernel, wanted)):
        codes = []
        for code in found.codes:
            arrays.append(array(f"k{i}_{code.architecture}", code.data))
            codes.append(f"{{{code.architecture}, k{i}_{code.architecture}, {len(code.data)}, {code.shared_bytes}}}")
        arrays.append(f"adtp_binary const k{i}[] = {{{', '.join(codes)}}};")
        texts = f'"{found.variant}", "{found.symbol}", "{found.arguments}"'
        rows.append(f"    {{{texts}, {found.threads}, {OLDEST}, {len(codes)}, k{i}}},")
    lines = [
        '#include "embedded.h"',
        "namespace adtp {",
        "namespace {",
        *arrays,
        "}",
        "adtp_kernel const kKernels[] = {",
        *rows,
    ]
    return "\n".join([*lines, "};", f"int32_t const kNumKernels = {len(rows)};", "}", ""])
