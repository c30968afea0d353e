"""Peers: dense BERT of 12 layers as others run it, and token pruning by LTP."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from ..errors import InputError, MissingDependencyError, did_you_mean, quoted
from ..runtimes import onnxruntime
from . import contenders
from .contenders import Architecture, dense_bert, export_torchscript
from .processes import STUDENT, WITH_PLUGIN, Contender

LTP = "ltp"
LLAMACPP = {"llamacpp-f32": "fp32", "llamacpp-bf16": "bf16", "llamacpp-q8_0": "q8_0"}
FROM_WEIGHTS = {
    "ctranslate2": {"ctranslate2": ("ctranslate2", "fp32"), "ctranslate2-int8": ("ctranslate2", "int8")},
    "ctranslate2-int8": {"ctranslate2-int8": ("ctranslate2", "int8")},
    **{name: {name: ("llamacpp", precision)} for name, precision in LLAMACPP.items()},
    "torch": {engine: (engine, "fp32") for engine in ("torch-eager", "torch-sdpa", "torch-compile")},
}
"""Peers that read transformers' own files: the names, engines and precisions that each stands for."""
PEERS = ("optimum", "openvino", "openvino-bf16", "ctranslate2", "ctranslate2-int8", *LLAMACPP, "torch", "sorted", LTP)
"""Dense BERT of 12 layers as others run it. optimum: exported and fused as optimum does, in ONNX Runtime; openvino, ctranslate2: in
all precisions; sorted: ONNX Runtime, each batch split by length into parts of `SORTED_ROWS`, and skewed batches in other ways, too
(`splits`). ltp: token pruning by LTP, of the student's depth and retention, exported as students are (`benchmarking.ltp_baseline`)."""

SORTED_ROWS = 8
COMPILERS = (os.environ.get("CXX") or "g++", "g++", "clang++")
"""What `torch.compile` compiles with; without any it is left out."""


def choose_peers(names: Sequence[str], forced: bool) -> list[str]:
    """Return the peers of these names; ``all`` stands for those that can run here.

    Args:
        forced: the student's retention is; LTP's thresholds would have to be learned otherwise.

    Raises:
        InputError: a name that is none of `PEERS`, or LTP without `forced`.
        MissingDependencyError: the runtime of a peer is not installed.
    """
    from ..runtimes import ctranslate2, llamacpp, openvino

    rooms = {"openvino": openvino, "ctranslate2": ctranslate2, "llamacpp": llamacpp}
    missing = {name for name in PEERS if (room := rooms.get(name.partition("-")[0])) and not room.installed()}
    bf16 = "openvino-bf16"
    if {bf16, "all"} & set(names) and bf16 not in missing and not openvino.has_bf16():
        if bf16 in names:
            raise InputError(f"--peers {bf16}: this processor has no instructions for bf16; leave it out")
        missing.add(bf16)
    if list(names) == ["all"]:
        return [name for name in PEERS if name not in missing and (forced or name != LTP)]
    for name in names:
        if name == "all":
            raise InputError(f"--peers: got {quoted(', '.join(names))}; accepted is either all, or names of peers")
        if name not in PEERS:
            raise InputError(
                f"--peers: got {quoted(name)}; accepted are all, {', '.join(PEERS)}{did_you_mean(name, PEERS)}"
            )
        if name in missing and name in LLAMACPP:
            raise MissingDependencyError(f"--peers {name}: {llamacpp.MISSING}")
        if name in missing:
            raise MissingDependencyError(
                f"--peers {name}: {name.partition('-')[0]} is not installed; type: pip install 'adtp-export[openvino,peers]'"
            )
        if name == LTP and not forced:
            raise InputError(
                "--peers ltp goes with --shape. For a checkpoint, LTP would have to learn its thresholds first; leave ltp out"
            )
    return list(dict.fromkeys(names))


def dense_peers(names: Sequence[str], student: Contender, architecture: Architecture, folder: Path) -> list[Contender]:
    """Make the named peers that are dense, and the student in OpenVINO where that is one.

    Args:
        architecture: the student's; peers have its width and 12 layers.
        folder: has what `dense_baselines` wrote.
    """
    from ..runtimes import openvino

    depth = contenders.FULL_DEPTH
    full = architecture.deep(depth)
    padded, plain, fused, weights = (
        folder / f"{name}-{depth}{suffix}"
        for name, suffix in (("padded", ".onnx"), ("optimum", ".onnx"), ("fused", ".onnx"), ("dense", ""))
    )
    made: list[Contender] = []

    def add(name: str, path: Path, engine: str = "onnxruntime", precision: str = "fp32", rows: int = 0) -> None:
        unpadded = engine in ("ctranslate2", "llamacpp")  # they get no padding, or remove it
        name = f"{name}-dense-{depth}"
        peer = Contender(name=name, path=path, layers=depth, padded=not unpadded, engine=engine)
        made.append(replace(peer, precision=precision, length_bucket_rows=rows))

    if "optimum" in names:
        export_torchscript(full, plain)
        onnxruntime.fuse_transformer(plain, fused, full.shape.heads, full.shape.hidden)
        add("optimum", plain)
        add("optimum-fused", fused)
    if "openvino" in names:
        made.append(replace(student, name=f"{STUDENT}-openvino", engine="openvino"))
        add("openvino", padded, "openvino")
    if any(name.startswith("openvino") for name in names) and openvino.has_bf16():
        add("openvino-bf16", padded, "openvino", "bf16")
    found = {name: how for peer, forms in FROM_WEIGHTS.items() if peer in names for name, how in forms.items()}
    if not any(map(shutil.which, COMPILERS)):
        found.pop("torch-compile", None)
    if found:
        dense_bert(full).save_pretrained(weights)
    for name, (engine, precision) in found.items():
        add(name, weights, engine, precision)
    if "sorted" in names:
        add("sorted", padded, rows=SORTED_ROWS)
        made[-1] = replace(made[-1], process=f"padded-dense-{depth}")
    return made


def with_plugin(models: Sequence[Contender], layers: int) -> list[Contender]:
    """Return the student and packed dense BERT of its depth with the attention operators for CPUs, where they are built here."""
    if onnxruntime.operators_obstacle() is not None:
        return []
    return [
        replace(model, name=f"{STUDENT}-plugin" if model.is_student else f"plugin-{model.name}", engine=WITH_PLUGIN)
        for model in models
        if model.name in (STUDENT, f"packed-dense-{layers}")
    ]


def splits(models: Sequence[Contender], layers: int) -> list[Contender]:
    """Return further ways to run the batches of a skewed workload, by the processes of contenders that are there.

    The student and packed dense BERT of its depth take them in sorted parts and one text at a time, padded dense BERT in sorted
    parts.

    Args:
        layers: the student's depth.
    """
    found = {c.name: c for c in models}
    ways = [
        (name, parts.format(name), rows)
        for name, prefix in ((STUDENT, "{}-%s"), (f"packed-dense-{layers}", "%s-{}"))
        for parts, rows in ((prefix % "sorted", SORTED_ROWS), (prefix % "one-by-one", 1))
    ]
    ways += [
        (f"padded-dense-{depth}", f"sorted-dense-{depth}", SORTED_ROWS)
        for depth in sorted({layers, contenders.FULL_DEPTH})
    ]
    return [
        replace(found[name], name=made, length_bucket_rows=rows, process=name)
        for name, made, rows in ways
        if name in found and made not in found
    ]
