"""A head's launches: tokens that fell come back, and answers go to the outputs."""

from __future__ import annotations

from ..plan import LENGTH, OUTPUT, TEXTS, Pointer
from . import grids
from .cuts import Bounds
from .description import FIRST, LAST, MAX, MEAN, Classifier, Embedding, Encoder, Spans
from .launches import FP32, Launches, Rows, States
from .variants import BY_NAME

ANY = "any"
"""The kind of product whose number of columns may be any; it writes fp32."""

_WAYS = {FIRST: 0, MEAN: 1, MAX: 2, LAST: 3}


def outputs(encoder: Encoder, tokens: int, texts: int) -> tuple[int, ...]:
    """Return the most bytes of each output; all are fp32."""
    head, hidden = encoder.head, len(encoder.layers[0].ffn_output.weight)
    if isinstance(head, Embedding):
        columns = len(head.projections[-1][0].weight) if head.projections else hidden
        sizes = [texts * columns, tokens * hidden]
    elif isinstance(head, Spans):
        sizes = [tokens, tokens]
    else:
        rows = texts if isinstance(head, Classifier) else tokens
        sizes = [rows * len(head.output.weight)]
    return tuple(FP32.itemsize * size for size in sizes)


def put_back(launches: Launches, hidden: int, states: States, before: States, survivors: States) -> States:
    """Put states into those from before a cut, at the rows of its survivors; return these, all of them."""
    assert survivors.index is not None
    rows = survivors.rows
    launches.launch(
        f"put_back-{launches.dtype}", grids.of_rows(rows.most, launches.processors), "head put-back", states=states.at,
        rows=survivors.index, out=before.at, live=rows.live, num_rows=rows.most, out_rows=before.size, hidden=hidden,
    )  # fmt: skip
    launches.give(states)
    return before


def answer(launches: Launches, encoder: Encoder, states: States, bounds: Bounds) -> None:
    """Write what a head answers.

    Args:
        states: of first tokens for a `Classifier`, of all at the input for others.
    """
    head, hidden = encoder.head, len(encoder.layers[0].ffn_output.weight)
    if isinstance(head, Classifier):
        dense = launches.product(states, head.dense, head.activation, "head dense")
        inner = States(at=dense, size=states.rows.most, rows=states.rows)
        launches.product(inner, head.output, ANY, "head logits", out=Pointer(OUTPUT))
    elif isinstance(head, Embedding):
        _vectors(launches, head, hidden, states, bounds)
        _spread(launches, f"spread-{launches.dtype}", states.at, bounds, Pointer(OUTPUT, 0, 1), (0, hidden, hidden))
    else:
        labels = len(head.output.weight)
        logits = launches.take(states.rows.most, labels, dtype=FP32)
        launches.product(states, head.output, ANY, "head logits", out=logits)
        parts = [(i, 1, labels) for i in range(labels)] if isinstance(head, Spans) else [(0, labels, labels)]
        for i, columns in enumerate(parts):
            _spread(launches, "spread-fp32", logits, bounds, Pointer(OUTPUT, 0, i), columns)


def _spread(
    launches: Launches, variant: str, values: Pointer, bounds: Bounds, out: Pointer, columns: tuple[int, int, int]
) -> None:
    """Write an output for each place of the input. columns: the first one, how many, and how many values have."""
    first, number, stride = columns
    block = BY_NAME[variant].constants["BLOCK"]
    programs = grids.of_rows(-(-launches.tokens * number // block), launches.processors)
    launches.launch(
        variant, programs, "head spread", values=values, cu_seqlens=bounds.at_input, out=out, batch=TEXTS, padded=LENGTH,
        num_rows=launches.tokens, first=first, columns=number, stride=stride,
    )  # fmt: skip


def _vectors(launches: Launches, head: Embedding, hidden: int, states: States, bounds: Bounds) -> None:
    """Pool the states of each text, project and normalize; where neither follows, what is pooled is the answer."""
    texts, out = launches.texts, Pointer(OUTPUT)
    is_whole = not head.projections  # which keep to the type of states
    variant = f"pool-{launches.dtype}{'-fp32' if is_whole and launches.dtype != 'fp32' else ''}"
    ends = is_whole and not head.normalize
    vectors = out if ends else launches.take(texts, hidden, dtype=FP32 if is_whole else None)
    blocks = -(-hidden // BY_NAME[variant].constants["BLOCK_H"])
    launches.launch(
        variant, grids.of_rows(texts * blocks, launches.processors), "head pool", x=states.at, cu_seqlens=bounds.at_input,
        texts=bounds.texts, out=vectors, num_rows=launches.tokens, num_texts=texts, hidden=hidden, way=_WAYS[head.pooling],
    )  # fmt: skip
    rows, width = Rows(texts, bounds.texts, min(texts, launches.usual_texts)), hidden
    for projection, activation in head.projections:
        at = launches.product(States(at=vectors, size=texts, rows=rows), projection, activation, "head projection")
        launches.arena.give(vectors)
        vectors, width = at, len(projection.weight)
    if not ends:
        launches.launch(
            f"vectors-{'fp32' if is_whole else launches.dtype}", grids.of_rows(texts, launches.processors), "head vectors", x=vectors,
            texts=bounds.texts, out=out, num_texts=texts, width=width, normalize=int(head.normalize),
        )  # fmt: skip
