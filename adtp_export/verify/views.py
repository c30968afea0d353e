"""What people look at: which tokens of which sentences stayed, what was answered, and how the share that stays is spread."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from ..contract import (
    HEAD_EMBEDDING,
    HEAD_HYBRID,
    HEAD_MASKED,
    HEAD_SEQUENCE,
    HEAD_SPANS,
    HEAD_SPARSE,
    HEAD_TOKENS,
    HEAD_VECTORS,
    INPUT_IDS,
    LOGITS,
    MASK_LOGITS,
    SENTENCE_EMBEDDING,
    SPARSE_EMBEDDING,
    TOKEN_EMBEDDINGS,
)
from ..data.tokenize import Batch, readable
from ..errors import ellipsize
from ..explain.records import Explanation, TokenView, Views
from ..inference.answers import embedding, masked, sparse, tokens
from ..inference.answers.sequence import MULTI_LABEL, REGRESSION, SINGLE_LABEL, answers
from .metrics import SpansMetric
from .oracle import OracleBatch, OracleRun

SENTENCES, MAX_TOKENS = 12, 96
BINS = 20
NEAREST = 3
HEAVIEST = 8


@dataclass(frozen=True)
class Labels:
    """What answers are called. names: of classes or tags, by number. kind: of a classifier's problem, as `load` takes it."""

    names: Mapping[int, str]
    kind: str = SINGLE_LABEL

    def name(self, number: int) -> str:
        return str(self.names.get(number, number))


Explain = Callable[[Batch, np.ndarray], Explanation]
"""Explains the answer to one text: its inputs ``(1, n)`` by name, and ``(n,) bool``, tokens that may answer."""


def make_views(oracle: OracleRun, tokenizer: Tokenizer, labels: Labels, explain: Explain | None = None) -> Views:
    """Return token views of the first sentences that fit on a screen, and a histogram of retention per site.

    Args:
        labels: what answers are called.
        explain: says what the answer to each of these sentences rests on.
    """
    answered = _ANSWERED[oracle.metric.head](oracle, tokenizer, labels)
    places = [(batch, row) for batch in oracle.batches for row in range(len(batch.kept_site))]
    fit = [
        (number, place)
        for number, place in enumerate(places)
        if 3 < (place[0].kept_site[place[1]] >= 0).sum() <= MAX_TOKENS
    ]
    views = []
    for number, (batch, row) in fit[:SENTENCES]:
        view = _token_view(batch, row, tokenizer, oracle.sites, answered(number))
        if explain is not None:
            inputs = {name: values[row : row + 1, : len(view.tokens)] for name, values in batch.batch.items()}
            view = dataclasses.replace(view, explained=explain(inputs, _asked(oracle, tokenizer, number, inputs)))
        views.append(view)
    histograms, survivors = {}, 1.0
    for i, site in enumerate(oracle.sites):
        before = np.concatenate([(b.kept_site >= i).sum(1) for b in oracle.batches])
        after = np.concatenate([(b.kept_site > i).sum(1) for b in oracle.batches])
        histograms[site] = tuple(np.histogram(after / before, BINS, (0, 1))[0].tolist())
        if i + 1 == len(oracle.sites):
            all_tokens = np.concatenate([(b.kept_site >= 0).sum(1) for b in oracle.batches])
            survivors = float((after / all_tokens).mean())
    return Views(tuple(views), histograms, survivors)


Answered = Callable[[int], Mapping[str, Any]]
"""Says what was answered to a row, by its number, as fields of `TokenView`."""


def _token_view(
    batch: OracleBatch, row: int, tokenizer: Tokenizer, sites: tuple[str, ...], answered: Mapping[str, Any]
) -> TokenView:
    ids = batch.batch["input_ids"][row]
    n = int((batch.kept_site[row] >= 0).sum())
    scores = {
        site: tuple(
            round(float(s), 3) if competes else None
            for s, competes in zip(decision.rule.order[row, :n], decision.rule.competing(decision.live)[row, :n])
        )
        for site, decision in zip(sites, batch.exact.decisions)
    }
    return TokenView(
        tokens=tuple(readable(tokenizer, ids[:n])),
        kept_site=tuple(batch.kept_site[row, :n].tolist()),
        scores=scores,
        **answered,
    )


def _asked(oracle: OracleRun, tokenizer: Tokenizer, number: int, inputs: Batch) -> np.ndarray:
    """Return which tokens of a row may answer, ``(n,) bool``: those of the context, or all but special ones."""
    if isinstance(oracle.metric, SpansMetric):
        return oracle.metric.context(number, oracle.answers[number])
    return ~np.isin(inputs[INPUT_IDS][0], [*_special(tokenizer)])


def _special(tokenizer: Tokenizer) -> set[int]:
    return {number for number, token in tokenizer.get_added_tokens_decoder().items() if token.special}


def _ids(oracle: OracleRun) -> list[list[int]]:
    """Return the tokens of each row, without padding."""
    return [
        ids[:n].tolist()
        for batch in oracle.batches
        for ids, n in zip(batch.batch["input_ids"], (batch.kept_site >= 0).sum(1))
    ]


def _classes(oracle: OracleRun, tokenizer: Tokenizer, labels: Labels) -> Answered:
    rows = oracle.answers

    def answered(number: int) -> Mapping[str, Any]:
        logits = rows[number][LOGITS]
        (answer,) = answers(logits[None], [labels.name(i) for i in range(len(logits))], labels.kind)
        if len(logits) == 1:
            return {"answer": f"{answer.score:.3g}"}
        if labels.kind == REGRESSION:
            return {"answer": ", ".join(f"{label} {value:.3g}" for label, value in answer.scores.items())}
        told = {answer.label: answer.score}
        if labels.kind == MULTI_LABEL:
            told = {label: score for label, score in answer.scores.items() if score > 0.5} or told
        return {"answer": ", ".join(f"{label} {score:.1%}" for label, score in told.items())}

    return answered


def _tags(oracle: OracleRun, tokenizer: Tokenizer, labels: Labels) -> Answered:
    rows, ids = oracle.answers, _ids(oracle)
    special = _special(tokenizer)

    def answered(number: int) -> Mapping[str, Any]:
        best = rows[number][LOGITS].argmax(1)
        outside = [i in special for i in ids[number]]
        tags = [tokens.OUTSIDE if out else labels.name(int(tag)) for tag, out in zip(best, outside)]
        told = ""
        if tokens.marks_entities([*labels.names.values()]):
            found = [f"{tokenizer.decode(ids[number][e.start : e.end])} ({e.label})" for e in tokens.entities(tags)]
            told = ", ".join(found) or "no entity"
        return {"answer": told, "tags": tuple("" if tag == tokens.OUTSIDE else tag for tag in tags)}

    return answered


def _found(oracle: OracleRun, tokenizer: Tokenizer, labels: Labels) -> Answered:
    rows, ids, metric = oracle.answers, _ids(oracle), oracle.metric
    assert isinstance(metric, SpansMetric)

    def answered(number: int) -> Mapping[str, Any]:
        span = metric.span(number, rows[number])
        if span is None:
            return {"answer": "no answer"}
        text = tokenizer.decode(ids[number][span[0] : span[1] + 1])
        return {"answer": f"answer: {text}", "span": span}

    return answered


def _nearest(oracle: OracleRun, tokenizer: Tokenizer, labels: Labels) -> Answered:
    vectors, ids = np.stack([row[SENTENCE_EMBEDDING] for row in oracle.answers]), _ids(oracle)

    def answered(number: int) -> Mapping[str, Any]:
        cosines = embedding.cosines(np.broadcast_to(vectors[number], vectors.shape), vectors)
        order = [int(i) for i in np.argsort(-cosines, kind="stable") if i != number][:NEAREST]
        near = tuple((ellipsize(tokenizer.decode(ids[i])), float(cosines[i])) for i in order)
        return {"answer": "", "near": near}

    return answered


def _weighed(oracle: OracleRun, tokenizer: Tokenizer, labels: Labels) -> Answered:
    def answered(number: int) -> Mapping[str, Any]:
        found = sparse.answer(oracle.answers[number][SPARSE_EMBEDDING], HEAVIEST).tokens(tokenizer)
        return {"answer": ", ".join(f"{token} {weight:.2f}" for token, weight in found.items())}

    return answered


def _filled(oracle: OracleRun, tokenizer: Tokenizer, labels: Labels) -> Answered:
    rows = oracle.answers

    def answered(number: int) -> Mapping[str, Any]:
        logits = masked.filled_rows(rows[number][MASK_LOGITS])
        return {"answer": ", ".join(tokenizer.decode([int(i)]).strip() for i in logits.argmax(1))}

    return answered


def _vectors(oracle: OracleRun, tokenizer: Tokenizer, labels: Labels) -> Answered:
    counts = [int(row[TOKEN_EMBEDDINGS].any(1).sum()) for row in oracle.answers]
    return lambda number: {"answer": f"{counts[number]} vectors"}


_ANSWERED: dict[str, Callable[[OracleRun, Tokenizer, Labels], Answered]] = {
    HEAD_SEQUENCE: _classes,
    HEAD_TOKENS: _tags,
    HEAD_SPANS: _found,
    HEAD_EMBEDDING: _nearest,
    HEAD_MASKED: _filled,
    HEAD_SPARSE: _weighed,
    HEAD_VECTORS: _vectors,
    HEAD_HYBRID: _nearest,
}
