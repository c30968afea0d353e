"""An emulated GPU for processes that look for a driver: the one of `tests/gpu/emulator`, or a folder that is named.

Kernels are executed on the CPU, with right answers and without meaningful times. TensorRT and PyTorch do not run on it.
"""

from __future__ import annotations

import importlib.util
import os
import sys

from benchmarks.harness.records import ROOT

BUILDER = ROOT / "tests" / "emulated_gpu.py"
FOLDER = "ADTP_EMULATOR"
"""Names the folder of a libcuda.so.1, where this tree cannot build one."""

NEWER = 100
"""A GPU that takes PTX, the quickest to execute."""


class MissingError(Exception):
    """There is no emulated GPU here; the text says why."""


def environment(capability: int = NEWER, processors: int = 28) -> dict[str, str]:
    """What to set so that a process finds the GPU: where its driver is, its compute capability, its processors.

    Raises:
        MissingError: it is neither named nor can be built.
    """
    own = {"ADTP_EMULATOR_SM": str(capability), "ADTP_EMULATOR_PROCESSORS": str(processors)}
    if folder := os.environ.get(FOLDER):
        return {**own, "LD_LIBRARY_PATH": folder}
    if not BUILDER.is_file():
        raise MissingError(f"the emulator is not built: no {BUILDER.name}, and ${FOLDER} is not set")
    spec = importlib.util.spec_from_file_location("emulated_gpu", BUILDER)
    assert spec is not None
    assert spec.loader is not None
    builder = sys.modules.setdefault(spec.name, importlib.util.module_from_spec(spec))
    if not hasattr(builder, "library"):
        spec.loader.exec_module(builder)
    try:
        library = builder.library()
    except builder.MissingError as error:
        raise MissingError(f"the emulator is not built: {error}") from error
    return {**builder.settings(capability), **own, "LD_LIBRARY_PATH": str(library.parent)}
