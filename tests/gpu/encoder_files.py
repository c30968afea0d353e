"""Files of small students as `adtp-export --cuda` writes them, and their engines on the emulated GPU."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import encoder_runs
import onnx_ir as ir
import runner_builds
from known_graphs import known_graph

from adtp_export.graph import program
from adtp_export.graph.encoder_function import enclosed
from adtp_export.model.encoder import PrunedEncoder
from adtp_export.plugins import plan as plans
from adtp_export.plugins import runner
from adtp_export.plugins.encoder import planner
from adtp_export.plugins.encoder.launches import Sizes
from adtp_export.runtimes.described import describe
from adtp_export.runtimes.encoder import EncoderEngine

SIZES = dataclasses.replace(encoder_runs.SIZES, max_tokens=64)
"""With two buckets, of 32 and of 64 tokens."""


def write(student: PrunedEncoder, folder: Path, precision: str = "fp32", sizes: Sizes = SIZES) -> tuple[Path, Path]:
    """Write the ordinary file, and the one for our own kernels."""
    plain, typed, made = (
        folder / "model.onnx",
        folder / f"model.{precision}.onnx",
        folder / f"model.cuda.{precision}.onnx",
    )
    program.save(known_graph(student, {"version": "0", "precision": "fp32"}), plain)
    if precision != "fp32":
        program.convert_precision(plain, typed, precision)
    else:
        typed = plain
    found = planned(student, precision, sizes)
    program.save(enclosed(ir.load(typed), plans.write(found.plan), found.weights), made)
    return typed, made


def planned(student: PrunedEncoder, precision: str = "fp32", sizes: Sizes = SIZES) -> planner.Planned:
    return planner.make(describe(student), precision, sizes)


def use_emulated_gpu(monkeypatch) -> None:
    """Let the runner find its library, and behind it a GPU that is emulated."""
    built = runner_builds.for_this_process()
    runner_builds.driver_of(built, monkeypatch)
    monkeypatch.setattr(runner, "built", lambda: built[0])


def opened(path: Path) -> EncoderEngine:
    return EncoderEngine(path).opened()
