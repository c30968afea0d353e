"""Build the C++ host, `libadtp_plugins`, and find the one that was built."""

from __future__ import annotations

import hashlib
import os
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path

from ..errors import MissingDependencyError
from . import compiling, shipped
from .binaries import HERE, binary, manifest
from .compiling import array
from .encoder import binaries as encoder
from .encoder.variants import ALL, GROUPED, GROUPED_RECEIVED
from .variants import ATTENTION, LSE, PTX_ARCHITECTURE, RECEIVED, SYMBOLS

SOURCES = HERE / "cpp"
BUILT = HERE / "lib"
FILE = "adtp_plugins.dll" if platform.system() == "Windows" else "libadtp_plugins.so"
HARNESS = "adtp_plugin_harness"
_RECORD = "build.json"
_GROUPED_KINDS = {"grouped": "kATTENTION", "grouped_lse": "kLSE", "grouped_received": "kRECEIVED"}
_KINDS = {ATTENTION: "kATTENTION", LSE: "kLSE", RECEIVED: "kRECEIVED"}


def build(directory: Path = BUILT, environment: Mapping[str, str] = os.environ) -> Path:
    """Compile the library and its harness into `directory`; return the library's path.

    Needs CMake, a C++17 compiler and the NvInfer headers: in ``$TENSORRT_ROOT``, its ``include``, or the system's paths.

    Raises:
        MissingDependencyError: one of these is missing.
        EngineBuildError: the compiler refuses; the message has its words.
        InputError: `directory` cannot be written.
    """
    include = find_headers(environment)
    record = (_RECORD, lambda: {"sources": _sources_sha256(), "nvinfer": _version(include)})
    return compiling.build(
        SOURCES, {"NVINFER_INCLUDE": include}, (FILE, HARNESS), record, directory, environment, kernels_cpp
    )


def built() -> Path | None:
    """Return the library that `build` made, if it is of this version's kernels and sources."""
    return compiling.kept(BUILT, FILE, _RECORD, _sources_sha256())


def _sources_sha256() -> str:
    digest = hashlib.sha256(f"{manifest()['source_sha256']} {encoder.manifest()['source_sha256']}".encode())
    for path in sorted(SOURCES.rglob("*.*")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def find_headers(environment: Mapping[str, str] = os.environ) -> Path:
    """Return the directory of NvInferRuntime.h.

    Raises:
        MissingDependencyError: it is nowhere.
    """
    root = environment.get("TENSORRT_ROOT")
    places = [Path(root, "include"), Path(root)] if root else []
    places += [
        Path("/usr/include", f"{platform.machine()}-linux-gnu"),
        Path("/usr/include"),
        Path("/usr/local/include"),
    ]
    for place in places:
        if (place / "NvInferRuntime.h").is_file():
            return place.resolve()
    raise MissingDependencyError(
        f"the TensorRT headers are missing: no NvInferRuntime.h in {', '.join(map(str, places))}. They come with TensorRT and "
        "with https://github.com/NVIDIA/TensorRT (its folder include); type: TENSORRT_ROOT=DIR adtp-plugin build"
    )


def kernels_cpp() -> str:
    """The tables of `cpp/kernels.h` and `cpp/embedded.h`, with all code in it: each once."""
    arrays, variants = [], []
    for i, entry in enumerate(manifest()["variants"]):
        rows = []
        for code, found in entry["binaries"].items():
            data = binary(entry["name"], code).data
            architecture = shipped.architecture(code)
            words = shipped.array_name(entry["name"], architecture)
            arrays.append(array(words, data))
            rows.append(f"{{{architecture}, {words}, {len(data)}, {found['shared_bytes']}}}")
        arrays.append(f"Binary const v{i}[] = {{{', '.join(rows)}}};")
        sizes = (entry[name] for name in ("head_size", "block_m", "block_n", "threads"))
        fields = (*sizes, entry["mean_length_up_to"] or 0, f"v{i}")
        kind = f'Kind::{_KINDS[entry["kernel"]]}, "{SYMBOLS[entry["kernel"]]}"'
        variants.append(f'    {{"{entry["name"]}", {kind}, "{entry["dtype"]}", {", ".join(map(str, fields))}}},')
    attention = [entry["name"] for entry in manifest()["variants"]]
    names = shipped.names()
    return "\n".join(
        [
            '#include "kernels.h"',
            "namespace adtp {",
            "namespace {",
            *arrays,
            "}",
            "Variant const kVariants[] = {",
            *variants,
            "};",
            f"int32_t const kNumVariants = {len(variants)};",
            f"int32_t const kNumBinaries = {len(manifest()['variants'][0]['binaries'])};",
            f"int32_t const kOldestArchitecture = {PTX_ARCHITECTURE.removeprefix('sm_')};",
            f'char const* const kSource = "{manifest()["source_sha256"]}";',
            "}",
            shipped.kernels_cpp(names, there=attention),
            grouped_cpp(names),
        ]
    )


def grouped_cpp(names: Sequence[str]) -> str:
    """The table of `cpp/grouped.h`, whose code is in that of `cpp/embedded.h`, which has the kernels of these names."""
    rows = []
    for variant in (each for each in ALL if each.kernel in (GROUPED, GROUPED_RECEIVED) and each.name in names):
        kind = _GROUPED_KINDS[variant.name.split("-")[0]]
        sizes = ", ".join(str(variant.constants[name]) for name in ("HEAD_BLOCK", "BLOCK_M"))
        rows.append(
            f'    {{GroupedKernel::{kind}, "{variant.dtype}", {sizes}, &kKernels[{names.index(variant.name)}]}},'
        )
    head = ['#include "grouped.h"', "namespace adtp {", "GroupedVariant const kGroupedVariants[] = {"]
    return "\n".join([*head, *rows, "};", f"int32_t const kNumGroupedVariants = {len(rows)};", "}", ""])


def _version(include: Path) -> str:
    """The version in NvInferVersion.h, whose macros are numbers or names of numbers."""
    macros = {}
    for line in (include / "NvInferVersion.h").read_text(encoding="utf-8").splitlines():
        match line.split()[:3]:
            case ["#define", name, value]:
                macros[name] = value
    parts = [macros.get(f"NV_TENSORRT_{part}", "?") for part in ("MAJOR", "MINOR", "PATCH")]
    return ".".join(macros.get(part, part) for part in parts)
