"""A cut's launches: scores, where the tokens' states decide; then which rows stay."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ..plan import Pointer
from . import grids
from .description import NONE, Above, AboveShare, Best, Counts, Ranks, Ratio, Rule, Saliency, Skim
from .launches import FP32, INT32, NOTHING, Launches, Rows, States, width

INT8 = np.dtype(np.int8)
LONGEST = (512, 8192)
"""Tokens of the longest text for each variant of the choice."""

TILES = (16, 64)
"""Rows of a program that scores."""


@dataclass(frozen=True)
class Bounds:
    """texts: where B is. now, at_input: where `cu_seqlens` are, of the rows now, and of those before the first cut."""

    texts: Pointer
    now: Pointer
    at_input: Pointer


def cut(
    launches: Launches, name: str, rule: Rule, states: States, bounds: Bounds, received: Pointer | None, keeps_last: bool = False
) -> tuple[States, Bounds]:  # fmt: skip
    """Choose rows; return the same states by index, and the new bounds.

    Args:
        received: what each token received, where the rule goes by that. keeps_last: last rows of texts stay, too.
    """
    assert states.index is None
    count = None
    if isinstance(rule.order, Saliency):
        order, count = _score(launches, f"{name} scores", rule, states, bounds, keeps_last)
    elif isinstance(rule.order, Skim):
        order = _skim(launches, name, rule.order, states)
    else:
        assert received is not None
        order = received
    rows, now = launches.take(launches.tokens, dtype=INT32), launches.bounds()
    given: dict[str, Any] = {
        "order": order,
        "cu_seqlens": bounds.now,
        "texts": bounds.texts,
        "rows": rows,
        "new_cu_seqlens": now,
    }
    if isinstance(rule, AboveShare):
        given["order"] = order = _share(launches, f"{name} share", order, rule.share, bounds)
    if keeps_last:
        _anchor(launches, f"{name} anchors", rule, states, bounds, (order, count))
    if isinstance(rule, Above | AboveShare):
        before = launches.take(launches.tokens + 1, dtype=INT32)
        sizes = {"num_rows": launches.tokens, "num_texts": launches.texts}
        threshold = rule.threshold if isinstance(rule, Above) else 0.5
        launches.launch("above", 1, f"{name} choice", before=before, threshold=threshold, **sizes, **given)
        launches.arena.give(before)
    else:
        _choose(launches, f"{name} choice", rule, bounds, given if count is None else given | {"count": count})
    if order is not received:
        launches.arena.give(order)
    if count is not None:
        launches.arena.give(count)
    alive = Rows(states.rows.most, launches.live(now), states.rows.usual)
    return replace(states, index=rows, rows=alive), Bounds(bounds.texts, now, bounds.at_input)


def share_of(threshold: float) -> tuple[float, bool]:
    """Return what `share` takes of a threshold of fp32: by how much it is above the middle between it and the number before, and whether
    a quotient there is rounded to it."""
    number = np.float32(threshold)
    if number <= 0:
        return 0.0, True
    before = np.nextafter(number, np.float32(0))
    return (float(number) - float(before)) / 2, int(number.view(np.int32)) % 2 == 0


def _share(launches: Launches, note: str, order: Pointer, threshold: float, bounds: Bounds) -> Pointer:
    """Mark scores that are at least a share of the largest of their text."""
    reaches, (slack, ties) = launches.take(launches.tokens, dtype=FP32), share_of(threshold)
    launches.launch(
        "share", 0, note, 1, order=order, cu_seqlens=bounds.now, texts=bounds.texts, reaches=reaches, num_rows=launches.tokens,
        num_texts=launches.texts, wanted=threshold, slack=slack, ties=int(ties),
    )  # fmt: skip
    return reaches


def _skim(launches: Launches, name: str, order: Skim, states: States) -> Pointer:
    """Score tokens by a predictor of Transkimmer: a norm, a product, and what follows in one."""
    hidden = len(order.hidden.weight)
    programs = grids.of_rows(launches.tokens, launches.processors)
    sizes: dict[str, Any] = {"live": states.rows.live, "num_rows": launches.tokens, "hidden": hidden}

    def weights(weight: np.ndarray, bias: np.ndarray) -> tuple[Pointer, Pointer]:
        return launches.weights(weight, FP32), launches.weights(bias, FP32)

    normed = launches.take(launches.tokens, hidden, dtype=FP32)
    weight, bias = weights(order.norm.weight, order.norm.bias)
    launches.launch(
        f"normalize-{launches.dtype}-{width(hidden)}", programs, f"{name} norm", x=states.at, weight=weight, bias=bias, out=normed,
        eps=order.norm.eps, **sizes,
    )  # fmt: skip
    inner = launches.product(replace(states, at=normed, dtype="fp32"), order.hidden, NONE, f"{name} hidden")
    launches.arena.give(normed)
    weight, bias = weights(order.inner_norm.weight, order.inner_norm.bias)
    gains, gain_biases = weights(order.gains.weight, order.gains.bias)
    scores = launches.take(launches.tokens, dtype=FP32)
    launches.launch(
        f"skim-{width(hidden)}", programs, f"{name} scores", x=inner, weight=weight, bias=bias, gains=gains, gain_biases=gain_biases,
        order=scores, eps=order.inner_norm.eps, **sizes,
    )  # fmt: skip
    launches.arena.give(inner)
    return scores


def _anchor(
    launches: Launches, note: str, rule: Rule, states: States, bounds: Bounds, written: tuple[Pointer, Pointer | None]
) -> None:
    """Let last rows stay, and choose from them how many do, where a ratio decides. written: the order, and the counts."""
    ratio, (order, count) = _ratio_of(rule), written
    launches.launch(
        f"anchor-{launches.dtype}", grids.of_rows(launches.texts, launches.processors), note, x=states.at, order=order,
        cu_seqlens=bounds.now, texts=bounds.texts, ratio_weight=launches.weights(ratio.predictor.weight, FP32) if ratio else NOTHING,
        ratio_bias=launches.weights(ratio.predictor.bias, FP32) if ratio else NOTHING,
        permille=launches.weights(ratio.permille, INT32) if ratio else NOTHING, count=count or NOTHING, num_rows=launches.tokens,
        num_texts=launches.texts, hidden=ratio.predictor.weight.shape[1] if ratio else 8,
        candidates=len(ratio.permille) if ratio else 0, min_tokens=ratio.min_tokens if ratio else 1,
    )  # fmt: skip


def _ratio_of(rule: Rule) -> Ratio | None:
    number = rule.number if isinstance(rule, Best) else None
    return number if isinstance(number, Ratio) else None


def _score(
    launches: Launches, note: str, rule: Rule, states: States, bounds: Bounds, keeps_last: bool
) -> tuple[Pointer, Pointer | None]:
    """Score tokens, and where a ratio decides, say how many of each text stay, unless the last rows have to be asked."""
    assert isinstance(rule.order, Saliency)
    ratio = _ratio_of(rule)
    first, last, tokens = rule.order.first, rule.order.last, launches.tokens
    order = launches.take(tokens, dtype=FP32)
    count = launches.take(launches.texts, dtype=INT32) if ratio else None
    ratio = None if keeps_last else ratio

    def weight(array: np.ndarray) -> Pointer:
        return launches.weights(array, FP32)

    tile = TILES[tokens >= TILES[1] * launches.processors]
    launches.launch(
        f"scores-{launches.dtype}-{tile}", -(-tokens // tile), note, int(ratio is not None), x=states.at, cu_seqlens=bounds.now,
        texts=bounds.texts, first_weight=weight(first.weight), first_bias=weight(first.bias), last_weight=weight(last.weight),
        last_bias=weight(last.bias), ratio_weight=weight(ratio.predictor.weight) if ratio else NOTHING,
        ratio_bias=weight(ratio.predictor.bias) if ratio else NOTHING,
        permille=launches.weights(ratio.permille, INT32) if ratio else NOTHING, order=order, count=count or NOTHING,
        num_rows=tokens, num_texts=launches.texts, hidden=first.weight.shape[1], width=len(first.weight),
        candidates=len(ratio.permille) if ratio else 1, min_tokens=ratio.min_tokens if ratio else 1,
    )  # fmt: skip
    return order, count


def _choose(launches: Launches, note: str, rule: Best | Ranks, bounds: Bounds, given: dict[str, Any]) -> None:
    """Choose by what `given` has as its count, or by a table of lengths."""
    block = next(block for block in LONGEST if min(launches.tokens, launches.longest) <= block)
    numbers = {"num_rows": launches.tokens, "num_texts": launches.texts}
    kind, table, lengths = "given", None, bounds.now
    if isinstance(rule, Ranks):
        kind, table = "ranks", rule.kept
        given = given | {"keeps": launches.weights(rule.keeps, INT8)}
        numbers["bins"] = rule.bins
    elif isinstance(rule.number, Counts):
        kind, table = "table", rule.number.kept
        lengths = bounds.at_input if rule.number.of_input else bounds.now
    if table is not None:
        given = given | {"lengths_from": lengths, "table": launches.weights(table, INT32)}
        numbers["table_size"] = len(table)
    keep_first = rule.keep_first if isinstance(rule, Best) else True
    launches.launch(f"choice-{kind}-{block}", 0, note, 1, keep_first=int(keep_first), **numbers, **given)
