"""`AdtpRaggedAttentionGrouped`, its form with a window and the one that says what keys received, as plugins of TensorRT in Python."""

from __future__ import annotations

from ..contract import (
    ATTENTION_GROUPED,
    ATTENTION_GROUPED_RECEIVED,
    ATTENTION_GROUPED_WINDOW,
    KV_HEADS,
    NUM_HEADS,
    WINDOW_AHEAD,
    WINDOW_BACK,
)
from .grouped import Call, check, launch, prepare
from .tensorrt_host import STATES, Operator, Run

POINTERS = ("q", "k", "v", "cu_q", "cu_k", "positions_q", "positions_k")


def _launch(run: Run) -> None:
    (queries, width), (keys, of_keys) = run.shapes[:2]
    call = Call(
        **dict(zip(POINTERS, run.inputs)),
        **run.integers,
        out=run.out,
        q_stride=width,
        kv_stride=of_keys,
        queries=queries,
        keys=keys,
        texts=run.shapes[STATES][0] - 1,
        head_size=width // run.integers[NUM_HEADS],
        dtype=run.dtype,
        scale=run.scale,
        received=run.received,
    )
    launch(call, run.stream)


GROUPED = Operator(
    names=(ATTENTION_GROUPED, ATTENTION_GROUPED_WINDOW, ATTENTION_GROUPED_RECEIVED),
    received=ATTENTION_GROUPED_RECEIVED,
    integers=(NUM_HEADS, KV_HEADS, WINDOW_BACK, WINDOW_AHEAD),
    grouped=True,
    check=check,
    prepare=prepare,
    launch=_launch,
)
