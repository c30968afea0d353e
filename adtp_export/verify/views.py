"""What people look at: which tokens of which sentences stayed, and how the share that stays is spread."""

from __future__ import annotations

import numpy as np
from tokenizers import Tokenizer

from ..answers.sequence import SINGLE_LABEL, answers
from ..records import TokenView, Views
from .oracle import OracleBatch, OracleRun

SENTENCES, LONGEST = 12, 96
BINS = 20


def make_views(oracle: OracleRun, tokenizer: Tokenizer, labels: dict[int, str]) -> Views:
    """Return token views of the first sentences that fit on a screen, and a histogram of retention per site.

    Args:
        labels: names of classes; empty for regression.
    """
    tokens = [
        _token_view(batch, row, tokenizer, oracle.sites, labels)
        for batch in oracle.batches
        for row in range(len(batch.outputs["logits"]))
        if 3 < batch.batch["attention_mask"][row].sum() <= LONGEST
    ]
    histograms, survivors = {}, 1.0
    for i, site in enumerate(oracle.sites):
        before = np.concatenate([(b.kept_site >= i).sum(1) for b in oracle.batches])
        after = np.concatenate([(b.kept_site > i).sum(1) for b in oracle.batches])
        histograms[site] = tuple(np.histogram(after / before, BINS, (0, 1))[0].tolist())
        if i + 1 == len(oracle.sites):
            all_tokens = np.concatenate([(b.kept_site >= 0).sum(1) for b in oracle.batches])
            survivors = float((after / all_tokens).mean())
    return Views(tuple(tokens[:SENTENCES]), histograms, survivors)


def _token_view(
    batch: OracleBatch, row: int, tokenizer: Tokenizer, sites: tuple[str, ...], labels: dict[int, str]
) -> TokenView:
    ids = batch.batch["input_ids"][row]
    n = int((batch.kept_site[row] >= 0).sum())
    scores = {
        site: tuple(
            round(float(s), 3) if live else None
            for s, live in zip(decision.rule.order[row, :n], decision.live[row, :n])
        )
        for site, decision in zip(sites, batch.exact.decisions)
    }
    return TokenView(
        tokens=tuple(tokenizer.id_to_token(int(i)) or "?" for i in ids[:n]),
        kept_site=tuple(batch.kept_site[row, :n].tolist()),
        scores=scores,
        answer=_told(batch.outputs["logits"][row], labels),
    )


def _told(logits: np.ndarray, labels: dict[int, str]) -> str:
    """Say an answer ``(num_labels,)`` in a word or two."""
    if len(logits) == 1:
        return f"{logits[0]:.3g}"
    (answer,) = answers(logits[None], [str(labels.get(i, i)) for i in range(len(logits))], SINGLE_LABEL)
    return f"{answer.label} {answer.score:.1%}"
