"""A student's answer to one text, explained: what it rests on, what was kept, and what dropped tokens passed on before their cut.

Attribution and flow are those of the network with nothing dropped. With the cuts in place a dropped token contributes only before
its cut. Kept tokens would then hold most of the attribution, whatever chose them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor, nn

from ..contract import INPUT_IDS, TOKEN_TYPE_IDS
from ..data.tokenize import Batch
from ..inference.answers.sequence import spearman
from ..model.encoder import PrunedEncoder
from ..model.padded import Decision, run_padded
from .answer import explained
from .flow import capacities, flows
from .gradients import integrated_gradients, token_attribution
from .records import BY_CHANCE, FLOWED, HELD, ORDER, POSSIBLE, Explanation

STEPS = 8
"""Of integrated gradients; the attribution of 64 steps has a cosine of at least 0.994 to that of 8, on texts of 6 to 128 tokens."""
MIN_ORDERED = 4
"""Tokens; shorter texts say nothing about an order."""
SHORT = 128
"""Tokens of a text whose products are too small to be shared by threads. Where a core is busy, they would wait for one another."""


def explain(student: PrunedEncoder, row: Batch, asked: np.ndarray) -> Explanation:
    """Explain the student's answer to one text.

    Args:
        student: in eval mode, in fp32.
        row: inputs ``(1, n) int64`` by name, without padding.
        asked: ``(n,) bool``, as in `answer.explained`.
    """
    with _threads_for(len(asked)):
        return _explain(student, row, asked)


@contextlib.contextmanager
def _threads_for(tokens: int) -> Iterator[None]:
    """Have PyTorch use one thread for a short text."""
    before = torch.get_num_threads()
    if tokens <= SHORT:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _explain(student: PrunedEncoder, row: Batch, asked: np.ndarray) -> Explanation:
    inputs = {name: torch.from_numpy(np.ascontiguousarray(values)) for name, values in row.items()}
    with torch.no_grad():
        said = student(**inputs)
    what = explained(student, said, asked)
    gradients = integrated_gradients(
        lambda: what.score(student.dense(**inputs, return_dict=True)),
        student.get_input_embeddings(),
        STEPS,
        lambda answer, whole: answer,
    )[1]
    live = torch.ones_like(inputs[INPUT_IDS], dtype=torch.bool)
    lengths = token_attribution(gradients, live)[0].double().numpy()
    attribution, kept_site = lengths / max(lengths.sum(), 1e-24), said.kept_site[0].numpy()
    dropped = kept_site < len(said.decisions)
    anchors = [
        *([0] if student.keeps_first else ()),
        *(student.read_token(inputs[INPUT_IDS], live).tolist() if student.keeps_last else ()),
    ]
    figures = agreement(attribution, ~dropped, _order(kept_site, said.decisions), anchors)
    flow, flowed = _flows(student, inputs, kept_site, what.ends)
    if flowed:
        figures[FLOWED] = float(np.mean([*flowed.values()]))
    places = range(len(kept_site))
    return Explanation(
        kept_site=tuple(kept_site.tolist()),
        attribution=tuple(attribution.tolist()),
        flow=tuple(flow.get(i) for i in places),
        flowed=tuple(flowed.get(i) for i in places),
        figures=figures,
    )


def agreement(
    attribution: np.ndarray, kept: np.ndarray, order: np.ndarray, anchors: Sequence[int] = (0,)
) -> dict[str, float]:
    """Compare what was kept with the attribution of tokens; those that always stay are left out.

    Args:
        attribution: ``(n,)``, non-negative. kept: ``(n,) bool``. order: ``(n,)``, higher where a token is more wanted. anchors: the tokens
            that always stay.

    Returns:
        `HELD`: share of attribution that the kept tokens hold. `POSSIBLE`: the most that as many tokens could hold. `BY_CHANCE`: what
        tokens drawn at random hold on average. `ORDER`: Spearman's correlation of order and attribution. Empty where all tokens
        stay, or none; without `ORDER` where there are fewer than `MIN_ORDERED`.
    """
    values, stays, wanted = (np.delete(row, anchors) for row in (attribution, kept, order))
    count, total = int(stays.sum()), float(values.sum())
    if not 0 < count < len(values) or not total:
        return {}
    figures = {
        HELD: float(values[stays].sum() / total),
        POSSIBLE: float(np.sort(values)[-count:].sum() / total),
        BY_CHANCE: count / len(values),
    }
    if len(values) >= MIN_ORDERED:
        figures[ORDER] = spearman(wanted, values)
    return figures


def means(explanations: Sequence[Explanation]) -> dict[str, float]:
    """Return the mean of each figure over the texts that have it."""
    known: dict[str, list[float]] = {}
    for explanation in explanations:
        for name, value in explanation.figures.items():
            known.setdefault(name, []).append(value)
    return {name: float(np.mean(values)) for name, values in known.items()}


def _order(kept_site: np.ndarray, decisions: Sequence[Decision]) -> np.ndarray:
    """Return in which order tokens were kept, ``(n,)``: those dropped later are higher, then those of a higher score at their last site."""
    if not decisions:
        return kept_site
    orders = np.stack([decision.rule.order[0].double().numpy() for decision in decisions])
    last = np.minimum(kept_site, len(decisions) - 1)
    ranks = np.unique(orders[last, np.arange(len(last))], return_inverse=True)[1]
    return np.asarray(kept_site * len(ranks) + ranks)


def _flows(
    student: PrunedEncoder, inputs: Mapping[str, Tensor], kept_site: np.ndarray, ends: Sequence[int]
) -> tuple[dict[int, float], dict[int, float]]:
    """Return, by dropped token, the flow to the answer with nothing dropped, and the share of it that the cuts leave."""
    sites, layers = student.config.sites, student.backbone.num_layers
    dropped = np.flatnonzero(kept_site < len(sites)).tolist()
    if not dropped:
        return {}, {}
    ids, attentions = inputs[INPUT_IDS], list[Tensor]()
    types = inputs.get(TOKEN_TYPE_IDS, torch.zeros_like(ids))
    with torch.no_grad():
        run_padded(student.backbone, nn.ModuleDict(), ids, types, torch.ones_like(ids, dtype=torch.bool), attentions)
    graph = [capacities(weights[0].numpy()) for weights in attentions]
    last = np.array([*(site.layer + (site.sublayer == "ffn") for site in sites), layers])[kept_site]
    whole = flows(graph, np.full(len(last), layers), dropped, ends)
    left = flows(graph, last, dropped, ends)
    # Where nothing could pass, nothing was lost. A dropped token that the answer is read off answers from its cut, so more may reach it.
    share = np.minimum(np.divide(left, whole, out=np.ones_like(whole), where=whole > 0), 1)
    return dict(zip(dropped, whole.tolist())), dict(zip(dropped, share.tolist()))
