"""Calls of the runner through its Python door, and what the emulated driver wrote down of them."""

from __future__ import annotations

import json

import numpy as np
from runner_plans import HIDDEN, PLAN

from adtp_export.plugins.runner import Runner


def make(built, plan=PLAN, weights=()):
    return Runner(plan, weights, library=built[0])


def outputs_of(call):
    return np.full((call.tokens, HIDDEN), 0xFFFF, np.uint16), np.full(call.tokens, np.nan, np.float32)


def ran(runner, call):
    """What a runner for host memory writes for a call."""
    outputs = outputs_of(call)
    runner.run(call.data(), outputs, texts=len(call.lengths), tokens=call.tokens)
    return [output.tobytes() for output in outputs]


def did(log):
    return [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []


def counted(log, what):
    return sum(line["did"] == what for line in did(log))
