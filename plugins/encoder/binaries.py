"""The encoder's compiled kernels, in `kernels/encoder.zip.xz`. Needs no Triton and no GPU."""

from __future__ import annotations

import functools
import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...errors import InputError
from ..ahead_of_time import Table
from ..binaries import DIRECTORY, HERE, read_archive
from .variants import ALL, Variant

ARCHIVE, MANIFEST = "encoder.zip.xz", "encoder.json"
SCHEMA = 1


def source_sha256() -> str:
    """Hash of what decides the binaries, so that a change without a new build is noticed."""
    mine = (
        "product.py",
        "norm.py",
        "ids.py",
        "cut.py",
        "head.py",
        "grouped.py",
        "prenorm.py",
        "anchor.py",
        "variants.py",
    )
    digest = hashlib.sha256()
    for path in (*(Path(__file__).parent / name for name in mine), HERE / "ahead_of_time.py"):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def table() -> Table[Variant]:
    """What `ahead_of_time.build` makes `ARCHIVE` and `MANIFEST` of."""
    head = {"schema": SCHEMA, "source_sha256": source_sha256()}
    return Table(archive=ARCHIVE, manifest=MANIFEST, variants=ALL, head=head, entry=_entry)


def _entry(variant: Variant) -> dict[str, Any]:
    return {
        "kernel": variant.kernel,
        "dtype": variant.dtype,
        "arguments": variant.arguments,
        "multiples": variant.multiples,
        "constants": {name: value for name, value in variant.constants.items() if value is not None},
    }


@functools.cache
def manifest() -> dict[str, Any]:
    """What is in the archive.

    Each of ``variants`` has ``name``, ``kernel`` (also the symbol), ``dtype``, ``arguments`` (names and types in order; behind them a
    launch passes two null pointers, Triton's scratch memory), ``multiples`` (what it promises of them), ``constants``, ``threads``
    of a program, and ``binaries`` by architecture or ``"ptx"``: ``file``, ``bytes``, ``sha256``, ``shared_bytes``,
    ``registers`` and more.

    Raises:
        InputError: the file has another schema than this version reads.
    """
    found: dict[str, Any] = json.loads((DIRECTORY / MANIFEST).read_text(encoding="utf-8"))
    if found["schema"] != SCHEMA:
        raise InputError(
            f"{DIRECTORY / MANIFEST}: got schema {found['schema']}; accepted is {SCHEMA}; type: adtp-plugin build --kernels"
        )
    return found


@dataclass(frozen=True, kw_only=True)
class Binary:
    """Code of one variant for one GPU. data: an ELF file, or PTX with a terminating zero. symbol: its function in there."""

    name: str
    symbol: str
    data: bytes
    threads: int
    shared_bytes: int


@functools.cache
def entry(name: str) -> dict[str, Any]:
    """What the manifest says of a variant.

    Raises:
        InputError: there is none of this name.
    """
    entries = {found["name"]: found for found in manifest()["variants"]}
    if name not in entries:
        raise InputError(f"kernels of a whole encoder: got variant {name!r}; accepted are {', '.join(sorted(entries))}")
    return entries[name]


@functools.cache
def binary(name: str, code: str) -> Binary:
    """Read a variant's binary by its name, for an architecture or ``"ptx"``: what `plugins.binaries.code_for` says of a GPU."""
    said = entry(name)
    found = said["binaries"][code]
    data = read_archive(DIRECTORY / ARCHIVE).read(found["file"])
    return Binary(
        name=name, symbol=said["kernel"], data=data, threads=said["threads"], shared_bytes=found["shared_bytes"]
    )
