"""Every compiled kernel that a plan may launch, by the name of its variant, in the words of `cpp/runner.h`."""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from ..errors import InputError, did_you_mean
from . import binaries
from .compiling import array
from .encoder import binaries as encoder
from .variants import ARGUMENTS, MULTIPLES_OF_16, PTX_ARCHITECTURE, SYMBOLS

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
        codes=tuple(Code(architecture(code), one.data, one.shared_bytes) for code, one in found.items()),
    )


@functools.cache
def _attention() -> dict[str, dict[str, Any]]:
    return {entry["name"]: entry for entry in binaries.manifest()["variants"]}


@functools.cache
def _encoder() -> dict[str, dict[str, Any]]:
    return {entry["name"]: entry for entry in encoder.manifest()["variants"]}


def architecture(code: str) -> int:
    """Return 86 for ``"sm_86"``, 0 for PTX."""
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


def array_name(variant: str, architecture: int) -> str:
    """Name the array in C++ that has a variant's code."""
    return f"code_{variant}_{architecture}".replace("-", "_")


def kernels_cpp(wanted: Iterable[str], there: Collection[str] = ()) -> str:
    """The table of `cpp/embedded.h`, with these kernels and all their code. there: kernels whose code is in the file already."""
    arrays, rows = [], []
    for i, found in enumerate(map(kernel, wanted)):
        codes = []
        for code in found.codes:
            name = array_name(found.variant, code.architecture)
            if found.variant not in there:
                arrays.append(array(name, code.data))
            codes.append(f"{{{code.architecture}, {name}, {len(code.data)}, {code.shared_bytes}}}")
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
