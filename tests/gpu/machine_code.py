"""Small PTX programs as machine code: ptxas compiles what `probes` writes, and the emulator executes that."""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import emulation
import numpy as np
import probes
import pytest
from emulated_gpu import BUILT, Device

from adtp_export.plugins.variants import ARCHITECTURES

DIFFERENT = ("sm_80", "sm_120")
"""Those that differ most. Each program costs a start of ptxas and one of nvdisasm; the other architectures are slow."""

ALL = [pytest.param(a, marks=() if a in DIFFERENT else pytest.mark.slow) for a in ARCHITECTURES]


def compiled(text: bytes, architecture: str) -> bytes:
    """Compile PTX for an architecture such as ``"sm_86"``; what was compiled once is kept."""
    import triton

    ptxas = triton.knobs.nvidia.ptxas
    target = f"{architecture}a" if architecture == "sm_90" else architecture  # with wgmma, as Triton has it
    name = hashlib.sha256(f"{ptxas.version} {target} ".encode() + text).hexdigest()[:32]
    kept = BUILT / "compiled" / f"{name}.cubin"
    if not kept.is_file():
        kept.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=kept.parent) as scratch:
            source, made = Path(scratch, "probe.ptx"), Path(scratch, "probe.cubin")
            source.write_bytes(text.rstrip(b"\0"))
            done = subprocess.run([ptxas.path, f"-arch={target}", source, "-o", made], capture_output=True, text=True)
            assert done.returncode == 0, done.stdout + done.stderr
            os.replace(made, kept)
    return kept.read_bytes()


class MachineCode:
    """Runs programs on an emulated GPU of one architecture, compiled for it."""

    def __init__(self, device: Device, architecture: str, log: Path):
        self.device, self.architecture, self.log = device, architecture, log
        self.set({})

    def set(self, on: Mapping[str, bool], most: int | None = None) -> None:
        self.device.set(emulation.capability_of(self.architecture), log=self.log, on=on, most=most)

    def image(self, body: str, inputs: int, outputs: int = 1, threads: int = probes.LANES) -> bytes:
        """A program of `probes.program`, compiled."""
        target = {"sm_90": "sm_90a", "sm_120": "sm_120"}.get(self.architecture, "sm_80")
        return compiled(probes.program(body, inputs, outputs, threads, "8.7", target), self.architecture)

    def run(
        self, body: str, inputs: Sequence[np.ndarray], outputs: int = 1, threads: int = probes.LANES, shared: int = 0
    ) -> np.ndarray:
        """As `probes.run`: outputs ``(outputs, threads) uint32``."""
        words = np.concatenate([*(np.ascontiguousarray(a).view(np.uint32) for a in inputs), np.zeros(0, np.uint32)])
        wanted = np.zeros((outputs, threads), np.uint32)
        kernel = self.device.load(self.image(body, len(inputs), outputs, threads), "probe", shared)
        with self.device.memory(words, wanted) as addresses:
            self.device.launch(kernel, 1, threads, shared, addresses, (ctypes.c_uint64, ctypes.c_uint64))
            return self.device.download(addresses[1], wanted)

    def executed(self) -> set[str]:
        """Names of the instructions that were executed so far, with their modifiers."""
        return {name for line in self.log.read_text().splitlines() for name in json.loads(line)["by_name"]}
