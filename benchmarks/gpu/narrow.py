"""Models of the record's depth whose launches an emulated driver counts: narrow ones, because there kernels run on the CPU.

Launches are as many whatever the width.
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np

from adtp_export.benchmarking.contenders import Architecture, Shape, random_encoder, schedule
from adtp_export.model import PrunedEncoderConfig
from adtp_export.model.encoder import PrunedEncoder
from adtp_export.model.heads import head_class
from adtp_export.plugins.encoder import planner
from adtp_export.plugins.encoder.launches import Sizes
from adtp_export.plugins.encoder.planner import Planned
from adtp_export.plugins.runner import Runner
from adtp_export.runtimes.described import describe
from benchmarks.harness.forced import LAYERS, RETENTION, SITES

STUDENT, VECTORS, VECTORS_STUDENT = "student", "vectors", "vectors-student"
"""BERT with a cut and a classifier; Qwen3 with vectors of last tokens; the same with a cut."""

TEXTS, LENGTH = 2, 16


def planned(kind: str, precision: str) -> Planned:
    """Plan one of them, for calls of a few tokens."""
    pruning = schedule(SITES, [RETENTION])
    if kind == STUDENT:
        shape = Shape(hidden=64, intermediate=128, heads=2, layers=LAYERS)
        student: PrunedEncoder = random_encoder(Architecture(shape), pruning)
    else:
        backbone = {
            "model_type": "qwen3", "vocab_size": 96, "hidden_size": 64, "num_hidden_layers": LAYERS, "num_attention_heads": 4,
            "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 128, "max_position_embeddings": 32, "pad_token_id": 0,
        }  # fmt: skip
        config = PrunedEncoderConfig(
            backbone=backbone,
            pruning=pruning if kind == VECTORS_STUDENT else None,
            head="embedding",
            embedding={"pooling": "last", "normalize": True},
        )
        student = head_class("embedding")(config).eval()
    return planner.make(describe(student), precision, Sizes(max_tokens=TEXTS * LENGTH))


def replay(kind: str, precision: str, library: str, log: str) -> None:
    """Run two texts in the runner, and have the emulated driver write down what that takes, once everything is made."""
    made = planned(kind, precision)
    ids, bucket = np.ones((TEXTS, LENGTH), np.int64), made.plan.buckets[0]
    given, answers = [ids] * len(bucket.inputs), [np.empty(size // 4, np.float32) for size in bucket.outputs]
    with Runner(made.plan, made.weights, library=Path(library)) as runner:
        os.environ["ADTP_EMULATOR_CALLS"] = log
        runner.run(given, answers, texts=TEXTS, tokens=TEXTS * LENGTH, length=LENGTH)
        os.environ["ADTP_EMULATOR_CALLS"] = ""
