"""Compile every variant of a table for every architecture, without a GPU, into an archive and its manifest.

Deterministic: the same sources and the same Triton give the same bytes. No line tables and no source paths go in.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.metadata
import importlib.util
import io
import json
import os
import re
import subprocess
import tempfile
import zipfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from ..errors import MissingDependencyError

PTX_VERSION = {"sm_120": 87}
"""Version of the PTX language, times ten: 8.0, which is CUDA 12.0's, where a GPU does not need a later one."""

Progress = Callable[[int, int], None]

EPOCH = (1980, 1, 1, 0, 0, 0)
"""Time stamp of all archive members: the oldest a zip file can say."""


class Variant(Protocol):
    """What is compiled.

    module: of this package, with the function `symbol`. arguments: names and Triton's types of what a launch passes, in order.
    constants: what the compiler is told instead. multiples: what launches promise of arguments: of addresses, so many bytes.
    architectures: GPUs that get machine code; PTX is the first one's, and serves later GPUs that are not among them.
    """

    @property
    def name(self) -> str: ...
    @property
    def module(self) -> str: ...
    @property
    def symbol(self) -> str: ...
    @property
    def arguments(self) -> Mapping[str, str]: ...
    @property
    def constants(self) -> Mapping[str, Any]: ...
    @property
    def multiples(self) -> Mapping[str, int]: ...
    @property
    def num_warps(self) -> int: ...
    @property
    def num_stages(self) -> int: ...
    @property
    def architectures(self) -> tuple[str, ...]: ...


V = TypeVar("V", bound=Variant)


@dataclass(frozen=True, kw_only=True)
class Table(Generic[V]):
    """What becomes one archive. head: of the manifest. entry: what the manifest says of a variant beside its name and binaries."""

    archive: str
    manifest: str
    variants: tuple[V, ...]
    head: Mapping[str, Any]
    entry: Callable[[V], dict[str, Any]]


def build(directory: Path, table: Table[V], progress: Progress = lambda done, total: None) -> dict[str, Any]:
    """Compile a whole table into `directory`; return the manifest.

    Args:
        progress: called with binaries (done, total).

    Raises:
        MissingDependencyError: Triton is not installed.
    """
    compiled = compile_all([(v, arch) for v in table.variants for arch in v.architectures], progress)
    files: dict[str, bytes] = {}
    entries = []
    for variant in table.variants:
        binaries = {}
        for arch in variant.architectures:
            code = compiled[variant.name, arch]
            binaries[arch] = _add(files, f"{arch}/{variant.name}.cubin", code.cubin) | code.figures
        code = compiled[variant.name, variant.architectures[0]]
        binaries["ptx"] = _add(files, f"ptx/{variant.name}.ptx", code.ptx) | {
            "shared_bytes": code.figures["shared_bytes"],  # registers and stack are up to the driver
            "tensor_core_instructions": code.figures["tensor_core_instructions"],
        }
        further = {"threads": 32 * variant.num_warps, "binaries": binaries}
        entries.append({"name": variant.name, **table.entry(variant), **further})
    manifest = {
        **table.head,
        "triton": importlib.metadata.version("triton"),
        "bytes": sum(map(len, files.values())),
        "variants": entries,
    }
    directory.mkdir(parents=True, exist_ok=True)
    (directory / table.archive).write_bytes(packed(files))
    (directory / table.manifest).write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")
    return manifest


def packed(files: Mapping[str, bytes]) -> bytes:
    """Return a zip file without compression, compressed as a whole: binaries of one kernel are much alike."""
    import lzma  # some builds of Python have none

    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w") as members:
        for name, data in sorted(files.items()):
            members.writestr(zipfile.ZipInfo(name, EPOCH), data)
    return lzma.compress(archive.getvalue(), preset=9)


@dataclass(frozen=True)
class Code:
    """One variant for one GPU: machine code (an ELF file), PTX with a terminating zero, and figures.

    figures: registers of a thread, shared_bytes of a program, stack_bytes of a thread (where spilled registers would
    lie), tensor_core_instructions in the PTX.
    """

    cubin: bytes
    ptx: bytes
    figures: dict[str, int]


def compile_all(
    jobs: Sequence[tuple[Variant, str]], progress: Progress = lambda done, total: None
) -> dict[tuple[str, str], Code]:
    """Compile variants for architectures such as ``"sm_86"``, on all cores; return code by variant's name and architecture.

    Raises:
        MissingDependencyError: Triton is not installed.
    """
    if importlib.util.find_spec("triton") is None:
        raise MissingDependencyError("compiling the kernels needs Triton; type: pip install 'adtp-export[kernels]'")
    compiled = {}
    # Spawned: Triton's compiler threads do not survive a fork, and its interpreter, once chosen, stays.
    with ProcessPoolExecutor(min(os.cpu_count() or 1, len(jobs)), get_context("spawn"), _compile_not_interpret) as pool:
        for (variant, architecture), code in zip(jobs, pool.map(_compile, jobs)):
            compiled[variant.name, architecture] = code
            progress(len(compiled), len(jobs))
    return compiled


def _compile_not_interpret() -> None:
    os.environ["TRITON_INTERPRET"] = "0"


def _compile(job: tuple[Variant, str]) -> Code:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    variant, architecture = job
    function = getattr(importlib.import_module(variant.module, __package__), variant.symbol)
    types = {**variant.arguments, **dict.fromkeys(variant.constants, "constexpr")}
    signature = {name: types[name] for name in function.arg_names}
    promised = {
        (function.arg_names.index(name),): [["tt.divisibility", multiple]]
        for name, multiple in variant.multiples.items()
    }
    knobs = triton.knobs
    with tempfile.TemporaryDirectory() as scratch, knobs.cache.scope(), knobs.compilation.scope(), knobs.nvidia.scope():
        knobs.cache.dir = scratch
        knobs.compilation.disable_line_info = True
        knobs.nvidia.ptxas_blackwell = knobs.nvidia.ptxas.path  # CUDA 12's, whose code older drivers load
        compiled = triton.compile(
            ASTSource(function, signature, dict(variant.constants), promised),
            target=GPUTarget("cuda", int(architecture.removeprefix("sm_")), 32),
            options={
                "num_warps": variant.num_warps,
                "num_stages": variant.num_stages,
                "enable_fp_fusion": True,
                "ptx_version": PTX_VERSION.get(architecture, 80),
            },
        )
        path = Path(scratch) / "kernel.cubin"
        path.write_bytes(compiled.asm["cubin"])
        registers, stack = _resources(path)
    ptx = _without_comments(compiled.asm["ptx"])
    scratch_bytes = compiled.metadata.global_scratch_size + compiled.metadata.profile_scratch_size
    assert scratch_bytes == 0, "whoever launches passes no scratch memory"
    figures = {
        "registers": registers,
        "shared_bytes": compiled.metadata.shared,
        "stack_bytes": stack,
        "tensor_core_instructions": len(re.findall(r"\b(?:mma\.sync|wgmma\.mma_async)", ptx)),
    }
    return Code(compiled.asm["cubin"], ptx.encode() + b"\0", figures)


def _resources(cubin: Path) -> tuple[int, int]:
    import triton

    said = subprocess.run(
        [triton.knobs.nvidia.cuobjdump.path, "-res-usage", cubin], capture_output=True, text=True, check=True
    ).stdout
    registers, stack = re.search(r"REG:(\d+) STACK:(\d+)", said).groups()  # type: ignore[union-attr]
    return int(registers), int(stack)


def _without_comments(ptx: str) -> str:
    lines = (re.sub(r"\s*//.*", "", line) for line in ptx.splitlines())
    return "\n".join(line for line in lines if line.strip()) + "\n"


def _add(files: dict[str, bytes], name: str, data: bytes) -> dict[str, Any]:
    files[name] = data
    return {"file": name, "bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
