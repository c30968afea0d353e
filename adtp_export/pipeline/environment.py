"""What a record says of the machine and of the software."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

from .. import __version__
from ..machine import fingerprint, hardware, instructions, processor

PACKAGES = (
    "torch",
    "transformers",
    "onnx",
    "onnxscript",
    "onnxruntime",
    "onnxruntime-gpu",
    "openvino",
    "ctranslate2",
    "tensorrt",
    "tensorrt-rtx",
)


def cpu(threads: int) -> dict[str, Any]:
    """What a record of times on the CPU says of the machine; 0 threads are a runtime's default."""
    threads_told = threads or "one per core"
    return {
        "kind": "cpu",
        "model": processor(),
        "instructions": _instructions(),
        "cores": os.cpu_count(),
        "hardware": hardware(),
        "fingerprint": fingerprint(),
        "threads": threads_told,
    }


def _instructions() -> list[str]:
    """Return what the processor has of the instructions that matrix products are made of, as Linux names them."""
    known = instructions()
    return [name for name in ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_int8", "amx_bf16") if name in known]


def commit() -> str | None:
    """Return the commit of a source checkout, with ``-dirty`` where tracked files differ from it; None when installed."""
    root = Path(__file__).parents[2]
    if not (root / ".git").exists():
        return None

    def git(*arguments: str) -> str:
        done = subprocess.run(["git", "-C", root, *arguments], capture_output=True, text=True, check=False)
        return done.stdout.strip()

    head = git("rev-parse", "HEAD")
    return (f"{head}-dirty" if git("status", "--porcelain", "--untracked-files=no") else head) or None


def versions() -> dict[str, str]:
    """Return versions of this package, of Python, and of what is installed of `PACKAGES`."""
    found = {
        "adtp-export": __version__,
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.machine()}",
    }
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found
