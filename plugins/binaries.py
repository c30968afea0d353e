"""The compiled kernels of `kernels/`, and which one to launch. Needs no Triton and no GPU."""

from __future__ import annotations

import functools
import hashlib
import io
import json
import zipfile
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ..errors import InputError, MissingDependencyError
from . import choice
from .ahead_of_time import Table
from .variants import (
    ALL,
    ARCHITECTURES,
    ARGUMENTS,
    ATTENTION,
    DTYPES,
    GRIDS,
    HEAD_SIZES,
    LSE,
    PTX_ARCHITECTURE,
    RECEIVED,
    SYMBOLS,
    Variant,
)

HERE = Path(__file__).parent
DIRECTORY = HERE / "kernels"
ARCHIVE, MANIFEST, EMULATED = "kernels.zip.xz", "manifest.json", "emulated.json"
SCHEMA = 2


def source_sha256() -> str:
    """Hash of what decides the binaries, so that a change without a new build is noticed."""
    digest = hashlib.sha256()
    for name in ("kernel.py", "variants.py", "ahead_of_time.py"):
        digest.update((HERE / name).read_bytes())
    return digest.hexdigest()


def table() -> Table[Variant]:
    """What `ahead_of_time.build` makes `ARCHIVE` and `MANIFEST` of."""
    kernels = {
        kernel: {"symbol": symbol, "arguments": list(ARGUMENTS[kernel]), "grid": GRIDS[kernel]}
        for kernel, symbol in SYMBOLS.items()
    }
    head = {"schema": SCHEMA, "kernels": kernels, "source_sha256": source_sha256()}
    return Table(archive=ARCHIVE, manifest=MANIFEST, variants=ALL, head=head, entry=asdict)


@functools.cache
def manifest() -> dict[str, Any]:
    """The manifest of `kernels/`; `table` and `ahead_of_time.build` say what is in it."""
    return json.loads((DIRECTORY / MANIFEST).read_text(encoding="utf-8"))


@functools.cache
def executed() -> frozenset[str]:
    """SHA-256 of the binaries that computed right answers in an emulator: `kernels/emulated.json`, which ships with them.

    The file is ``{"command": ..., "sha256": [...]}``, where "command" says what recorded it. Recording writes the hash of a binary
    after its launches kept within what rounding allows, and nothing else does. A binary that is compiled anew has another hash, so
    what was said of the old one does not hold for it. Without the file nothing was executed.
    """
    path = DIRECTORY / EMULATED
    return frozenset(json.loads(path.read_text(encoding="utf-8"))["sha256"]) if path.is_file() else frozenset()


def told(layers: Sequence[Kind | None], gpus: Iterable[str]) -> dict[str, Any]:
    """What a manifest says of an engine's plugin layers: kernels, and whether `emulated` holds. None: another host's layer."""
    if not layers:
        return {}
    kinds = {kind for kind in layers if kind is not None}
    return {"kernels": sorted(map(str, kinds)), "kernels_emulated": None not in layers and emulated(kinds, gpus)}


def emulated(kinds: Iterable[Kind], gpus: Iterable[str]) -> bool:
    """Whether every binary that an engine can launch was executed in an emulator. It says nothing about the engine.

    Args:
        kinds: what its plugin layers launch.
        gpus: architectures that it is built for, such as ``"sm_86"``.
    """
    kinds = list(kinds)
    if any(kind.grouped for kind in kinds):
        return False  # no record has all of these kernels' binaries
    codes = {code_for(gpu) for gpu in gpus}
    wanted = {
        entry["binaries"][code]["sha256"]
        for entry in manifest()["variants"]
        for kind in kinds
        if entry["kernel"] in kind.kernels and (entry["dtype"], entry["head_size"]) == (kind.dtype, kind.head_size)
        for code in codes
    }
    return bool(wanted) and wanted <= executed()


@dataclass(frozen=True, order=True)
class Kind:
    """What a plugin layer launches: any variant, because lengths choose. received: whether it says what tokens received. grouped:
    whether it launches the kernels of `grouped`."""

    dtype: str
    head_size: int
    received: bool = False
    grouped: bool = False

    @property
    def kernels(self) -> tuple[str, ...]:
        """In the order of their launches."""
        return (LSE, RECEIVED, ATTENTION) if self.received else (ATTENTION,)

    def __str__(self) -> str:
        return f"{'grouped-' * self.grouped}{self.dtype}-d{self.head_size}{'-received' * self.received}"


@dataclass(frozen=True, kw_only=True)
class Binary:
    """Code of one variant for one GPU. data: an ELF file, or PTX with a terminating zero."""

    name: str
    kernel: str
    data: bytes
    block_m: int
    block_n: int
    mean_length_up_to: int | None
    threads: int
    shared_bytes: int

    @property
    def symbol(self) -> str:
        """Its function in the code."""
        return SYMBOLS[self.kernel]

    def programs(self, tokens: int, sequences: int, num_heads: int) -> int:
        """Programs to launch for T tokens of B sequences: as many as any lengths can need."""
        return (tokens // self.block_m + sequences) * (1 if self.kernel == RECEIVED else num_heads)


def check(dtype: str, head_size: int) -> None:
    """Raises InputError for what the kernel does not do."""
    if dtype not in DTYPES:
        raise InputError(f"ragged attention: got dtype {dtype}; accepted are {', '.join(DTYPES)}")
    if head_size not in HEAD_SIZES:
        sizes = ", ".join(map(str, HEAD_SIZES))
        raise InputError(f"ragged attention: got head size {head_size}; accepted are {sizes}")


def code_for(architecture: str) -> str:
    """Which of the manifest's binaries a GPU such as ``"sm_86"`` runs: its own, or ``"ptx"`` for others from sm_80 on.

    Raises:
        InputError: the GPU is older.
    """
    if architecture in ARCHITECTURES:
        return architecture
    if int(architecture.removeprefix("sm_")) > int(PTX_ARCHITECTURE.removeprefix("sm_")):
        return "ptx"
    raise InputError(
        f"ragged attention: no kernel for {architecture}; accepted are {', '.join(ARCHITECTURES)} and newer GPUs. Older "
        "ones lack bf16 and asynchronous copies: use --attention decomposed"
    )


@dataclass(frozen=True)
class Gpu:
    """architecture: such as ``"sm_86"``. processors: streaming multiprocessors."""

    architecture: str
    processors: int


def choose(gpu: Gpu, kind: Kind, tokens: int, sequences: int, num_heads: int, kernel: str = ATTENTION) -> Binary:
    """Return the variant of one of a kind's kernels for T tokens of B sequences on a GPU.

    Raises:
        InputError: the kernel has no such dtype or head size, or nothing for the GPU.
    """
    found = of_kernel(gpu.architecture, kind.dtype, kind.head_size, kernel)
    return found[choice.choose(found, tokens, sequences, num_heads, gpu.processors)]


@functools.cache  # a launch from Python takes some microseconds, and looking through all of the manifest took as long
def of_kernel(architecture: str, dtype: str, head_size: int, kernel: str) -> tuple[Binary, ...]:
    """All variants of a kernel, those for short sequences first."""
    check(dtype, head_size)
    wanted = (kernel, dtype, head_size)
    entries = [e for e in manifest()["variants"] if (e["kernel"], e["dtype"], e["head_size"]) == wanted]
    return tuple(binary(e["name"], code_for(architecture)) for e in entries)


@functools.cache
def read_archive(path: Path) -> zipfile.ZipFile:
    """Open an archive of `ahead_of_time.packed` once: unpacking the larger one takes a tenth of a second, and 17 MB of memory.

    Raises:
        MissingDependencyError: this Python was built without lzma.
    """
    try:
        import lzma
    except ImportError as error:
        raise MissingDependencyError(
            "reading the compiled kernels needs Python's module lzma, without which this Python was built; install liblzma "
            "(Debian: apt install liblzma-dev) and build Python again, or take another one"
        ) from error
    return zipfile.ZipFile(io.BytesIO(lzma.decompress(path.read_bytes())))


@functools.cache
def binary(name: str, code: str) -> Binary:
    """Read a variant's binary by its name, for an architecture of `ARCHITECTURES` or ``"ptx"``."""
    entry = next(entry for entry in manifest()["variants"] if entry["name"] == name)
    found = entry["binaries"][code]
    data = read_archive(DIRECTORY / ARCHIVE).read(found["file"])
    return Binary(
        name=name,
        kernel=entry["kernel"],
        data=data,
        block_m=entry["block_m"],
        block_n=entry["block_n"],
        mean_length_up_to=entry["mean_length_up_to"],
        threads=entry["threads"],
        shared_bytes=found["shared_bytes"],
    )
