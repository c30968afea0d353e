"""Compile every variant for every architecture, without a GPU, into `kernels/kernels.zip` and its manifest.

Deterministic: the same sources and the same Triton give the same bytes. No line tables and no source paths go in.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import json
import os
import re
import subprocess
import tempfile
import zipfile
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from ..errors import MissingDependencyError
from .binaries import ARCHIVE, MANIFEST, SCHEMA, source_sha256
from .variants import ALL, ARCHITECTURES, ATTENTION, LSE, PTX_ARCHITECTURE, RECEIVED, SYMBOLS, Variant

_ALL = {**dict.fromkeys(("row_stride", "num_tokens", "num_sequences", "num_heads"), "i32"), "scale": "fp32"}
ARGUMENTS = {
    ATTENTION: {"q": "*T", "k": "*T", "v": "*T", "cu_seqlens": "*i32", "out": "*T", **_ALL},
    LSE: {"q": "*T", "k": "*T", "cu_seqlens": "*i32", "lse": "*fp32", **_ALL},
    RECEIVED: {"q": "*T", "k": "*T", "cu_seqlens": "*i32", "lse": "*fp32", "received": "*fp32", **_ALL},
}
"""Each kernel's arguments in order, with their types; T is the variant's dtype."""

GRIDS = {
    **dict.fromkeys((ATTENTION, LSE), "(T // block_m + B) * num_heads"),
    RECEIVED: "T // block_m + B",
}

MULTIPLES_OF_16 = ("q", "k", "v", "out", "row_stride")
"""What hosts promise: addresses in bytes, the stride in elements. It makes loads 16 bytes wide."""

PTX_VERSION = {"sm_120": 87}
"""Version of the PTX language, times ten: 8.0, which is CUDA 12.0's, where a GPU does not need a later one."""

Progress = Callable[[int, int], None]

EPOCH = (1980, 1, 1, 0, 0, 0)
"""Time stamp of all archive members: the oldest a zip file can say."""


def build(directory: Path, progress: Progress = lambda done, total: None) -> dict[str, Any]:
    """Compile the whole table into `directory`; return the manifest.

    Args:
        progress: called with binaries (done, total).

    Raises:
        MissingDependencyError: Triton is not installed.
    """
    compiled = compile_all([(variant, arch) for variant in ALL for arch in ARCHITECTURES], progress)
    files: dict[str, bytes] = {}
    entries = []
    for variant in ALL:
        binaries = {}
        for arch in ARCHITECTURES:
            code = compiled[variant, arch]
            binaries[arch] = _add(files, f"{arch}/{variant.name}.cubin", code.cubin) | code.figures
        code = compiled[variant, PTX_ARCHITECTURE]
        binaries["ptx"] = _add(files, f"ptx/{variant.name}.ptx", code.ptx) | {
            "shared_bytes": code.figures["shared_bytes"],  # registers and stack are up to the driver
            "tensor_core_instructions": code.figures["tensor_core_instructions"],
        }
        entries.append(
            {"name": variant.name, **asdict(variant), "threads": 32 * variant.num_warps, "binaries": binaries}
        )
    manifest = {
        "schema": SCHEMA,
        "kernels": {
            kernel: {"symbol": symbol, "arguments": list(ARGUMENTS[kernel]), "grid": GRIDS[kernel]}
            for kernel, symbol in SYMBOLS.items()
        },
        "triton": importlib.metadata.version("triton"),
        "source_sha256": source_sha256(),
        "bytes": sum(map(len, files.values())),
        "variants": entries,
    }
    directory.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(directory / ARCHIVE, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
        for name, data in sorted(files.items()):
            archive.writestr(zipfile.ZipInfo(name, EPOCH), data, zipfile.ZIP_DEFLATED)
    (directory / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")
    return manifest


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
) -> dict[tuple[Variant, str], Code]:
    """Compile variants for architectures such as ``"sm_86"``, on all cores.

    Raises:
        MissingDependencyError: Triton is not installed.
    """
    if importlib.util.find_spec("triton") is None:
        raise MissingDependencyError("compiling the kernel needs Triton; type: pip install 'adtp-export[kernels]'")
    compiled = {}
    # Spawned: Triton's compiler threads do not survive a fork, and its interpreter, once chosen, stays.
    with ProcessPoolExecutor(min(os.cpu_count() or 1, len(jobs)), get_context("spawn"), _compile_not_interpret) as pool:
        for job, code in zip(jobs, pool.map(_compile, jobs)):
            compiled[job] = code
            progress(len(compiled), len(jobs))
    return compiled


def _compile_not_interpret() -> None:
    os.environ["TRITON_INTERPRET"] = "0"


def _compile(job: tuple[Variant, str]) -> Code:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from . import kernel

    variant, architecture = job
    function = getattr(kernel, SYMBOLS[variant.kernel])
    types = ARGUMENTS[variant.kernel] | dict.fromkeys(variant.constants, "constexpr")
    signature = {name: types[name].replace("T", variant.dtype) for name in function.arg_names}
    by_16 = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(signature) if name in MULTIPLES_OF_16}
    knobs = triton.knobs
    with tempfile.TemporaryDirectory() as scratch, knobs.cache.scope(), knobs.compilation.scope(), knobs.nvidia.scope():
        knobs.cache.dir = scratch
        knobs.compilation.disable_line_info = True
        knobs.nvidia.ptxas_blackwell = knobs.nvidia.ptxas.path  # CUDA 12's, whose code older drivers load
        compiled = triton.compile(
            ASTSource(function, signature, variant.constants, by_16),
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
    assert scratch_bytes == 0, "the hosts pass no scratch memory"
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
