"""What a run, a token and a cell of attention cost an exported student here: the constants of `adtp_export.inference.batches`.

    python -m benchmarks.cpu.batch_cost OUT [--seconds 60] [--target onnxruntime-cpu-fp32]     # prints them as JSON

Batches of texts of one length are timed in turns, and their times are explained by least squares of relative errors:
``run + token * texts * length + cell * texts * length ** 2``.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import numpy as np

from adtp_export import load
from benchmarks.harness.records import told

SHAPES = (
    (1, 8),
    (1, 64),
    (1, 256),
    (1, 512),
    (8, 8),
    (8, 64),
    (8, 256),
    (8, 512),
    (32, 13),
    (32, 64),
    (32, 128),
    (64, 13),
)
"""Texts and their length."""

MIN_ROUNDS = 5


def measure(out: Path, target: str, seconds: float) -> dict[str, object]:
    deployment, random = load(out, target), np.random.default_rng(0)
    shapes = [shape for shape in SHAPES if shape[1] <= deployment.max_tokens]
    batches, times = [], []
    for shape in shapes:
        ids = random.integers(0, deployment.tokenizer.get_vocab_size(), shape)
        batches.append({"input_ids": ids, "attention_mask": np.ones_like(ids), "token_type_ids": np.zeros_like(ids)})
    began = time.perf_counter()
    while len(times) < MIN_ROUNDS or time.perf_counter() - began < seconds:
        row = []
        for batch in batches:
            deployment.run(batch)
            before = time.perf_counter()
            deployment.run(batch)
            row.append(1e3 * (time.perf_counter() - before))
        times.append(row)
    ms = np.median(times, 0)
    terms = np.array([[1, texts * length, texts * length**2] for texts, length in shapes], float)
    run, token, cell = np.linalg.lstsq(terms / ms[:, None], np.ones(len(ms)), rcond=None)[0]
    return {
        "target": deployment.target,
        "run_ms": round(run, 3),
        "token_us": round(1e3 * token, 2),
        "cell_ns": round(1e6 * cell, 2),
        "run_tokens": round(run / token, 1),
        "cells_per_token": round(token / cell),
        "worst_ratio": round(float(np.max(np.abs(np.log(terms @ [run, token, cell] / ms)))), 3),
        "rounds": len(times),
        **told(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", metavar="OUT", type=Path)
    parser.add_argument("--target", metavar="NAME", default="onnxruntime-cpu-fp32")
    parser.add_argument("--seconds", metavar="S", type=float, default=60.0)
    options = parser.parse_args()
    print(json.dumps(measure(options.out, options.target, options.seconds), indent=2))


if __name__ == "__main__":
    main()
