"""Compile every variant of the encoder's kernels for every architecture into `kernels/encoder.zip`, with a manifest beside it.

Deterministic, like the build of attention, whose compiler settings these are.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import json
import os
import re
import tempfile
import zipfile
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from ...errors import MissingDependencyError
from ..ahead_of_time import (
    EPOCH,
    PTX_VERSION,
    Code,
    Progress,
    _add,
    _compile_not_interpret,
    _resources,
    _without_comments,
)
from ..variants import ARCHITECTURES, PTX_ARCHITECTURE
from .binaries import ARCHIVE, MANIFEST, SCHEMA, source_sha256
from .variants import ALL, MODULES, Variant


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
            code = compiled[variant.name, arch]
            binaries[arch] = _add(files, f"{arch}/{variant.name}.cubin", code.cubin) | code.figures
        code = compiled[variant.name, PTX_ARCHITECTURE]
        binaries["ptx"] = _add(files, f"ptx/{variant.name}.ptx", code.ptx) | {
            key: code.figures[key] for key in ("shared_bytes", "tensor_core_instructions")
        }
        entries.append(
            {
                "name": variant.name,
                "kernel": variant.kernel,
                "dtype": variant.dtype,
                "arguments": variant.arguments,
                "multiples": variant.multiples,
                "constants": {name: value for name, value in variant.constants.items() if value is not None},
                "threads": 32 * variant.num_warps,
                "binaries": binaries,
            }
        )
    manifest = {
        "schema": SCHEMA,
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
    with ProcessPoolExecutor(min(os.cpu_count() or 1, len(jobs)), get_context("spawn"), _compile_not_interpret) as pool:
        given = [(variant.name, architecture) for variant, architecture in jobs]
        for job, code in zip(given, pool.map(_compile, given)):
            compiled[job] = code
            progress(len(compiled), len(jobs))
    return compiled


def _compile(job: tuple[str, str]) -> Code:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    name, architecture = job
    variant = next(variant for variant in ALL if variant.name == name)
    function = getattr(importlib.import_module(f"{__package__}.{MODULES[variant.kernel]}"), variant.kernel)
    types = variant.arguments | dict.fromkeys(variant.constants, "constexpr")
    signature = {argument: types[argument] for argument in function.arg_names}
    promised = {
        (function.arg_names.index(argument),): [["tt.divisibility", multiple]]
        for argument, multiple in variant.multiples.items()
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
