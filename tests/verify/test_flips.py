"""Rounding explains tokens that changed places at a border, whatever the rule, and no others."""

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from packed_engine import PackedEngine
from testbed import as_numpy, make_batch, make_encoder, make_student

from adtp_export.model.padded import Decision
from adtp_export.model.selection import KeepAbove, KeepAboveShare, KeepBest, KeepRanks
from adtp_export.verify.flips import apart
from adtp_export.verify.oracle import run_oracle
from adtp_export.verify.parity import compare

N, LIVE = 12, 10
SCORES = arrays.arrays(np.float64, (1, N), elements=st.floats(0.1, 1))
RULES = {
    "best": lambda order: KeepBest(order, torch.tensor([5])),
    "best of all": lambda order: KeepBest(order, torch.tensor([5]), keep_first=False),
    "best and the last": lambda order: KeepBest(order, torch.tensor([5]), also=torch.tensor([LIVE - 1])),
    "above": lambda order: KeepAbove(order, torch.tensor(0.5, dtype=order.dtype)),
    "ranks": lambda order: KeepRanks(order, lambda others, rank: rank % 3 == 0),
}


def decided(rule):
    live = torch.arange(N)[None] < LIVE
    return Decision(rule, live, rule.padded(live))


@pytest.mark.parametrize("name", RULES)
@given(
    scores=SCORES,
    off=arrays.arrays(np.float64, (1, N), elements=st.floats(-1, 1)),
    most=st.sampled_from([1e-6, 0.1, 1]),
)
@settings(deadline=None)
def test_what_errors_turn_is_no_farther_apart_than_both(name, scores, off, most):
    """Two scores that change places are at most twice the error apart."""
    exact, rounded = (decided(RULES[name](torch.from_numpy(order))) for order in (scores, scores + most * off))
    assert apart(exact, 0, exact.kept[0].numpy()) == 0
    assert apart(exact, 0, rounded.kept[0].numpy()) <= 2 * most + 1e-12


@given(SCORES, st.floats(0.5, 1), arrays.arrays(np.float64, (1, N), elements=st.floats(-1e-3, 1e-3)))
@settings(deadline=None)
def test_shares_are_of_the_largest(scores, share, off):
    exact, rounded = (
        decided(KeepAboveShare(torch.from_numpy(order), torch.tensor(share))) for order in (scores, scores + off)
    )
    largest = scores[0, :LIVE].max()
    assert apart(exact, 0, rounded.kept[0].numpy()) <= 2e-3 / (largest - 1e-3) + 1e-12


@pytest.mark.parametrize(
    ("name", "kept", "far"),
    [
        ("best", [0, 1, 2, 3, 5], 0.001),
        ("best", [0, 1, 2, 3, 9], 0.5),
        ("best", [0, 6, 7, 8, 9], 0.899),
        ("best", [1, 2, 3, 4, 5], np.inf),
        ("best of all", [1, 2, 3, 4, 5], 0.4),
        ("above", [0, 1, 2, 3, 4, 8], 0.399),
        ("ranks", [0, 1, 4, 5, 8], 0.199),
        ("ranks", [0, 1, 5, 7], 0.001),
    ],
)
def test_by_hand(name, kept, far):
    """The border is a near-tie of tokens 4 and 5."""
    order = torch.tensor([[0.9, 0.9, 0.8, 0.7, 0.501, 0.5, 0.4, 0.3, 0.101, 0.001, 0, 0]], dtype=torch.float64)
    stays = np.isin(np.arange(N), kept)
    assert apart(decided(RULES[name](order)), 0, stays) == pytest.approx(far, abs=0.002)


@pytest.mark.parametrize("pruning", ["adtp", "schedule", "ltp", "top"])
def test_a_near_tie_excuses_no_tokens_but_those(pruning):
    """Where all decisions look close, tokens that are far apart still must not change places."""
    student = make_student(["0.ffn"]) if pruning == "adtp" else make_encoder("bert", pruning)
    oracle = run_oracle(student, [as_numpy(make_batch([20, 15, 30, 9], 30))])
    (batch,) = oracle.batches
    close = dataclasses.replace(oracle, batches=(dataclasses.replace(batch, margins=np.zeros_like(batch.margins)),))

    def spoil(logits, kept):
        order = batch.exact.decisions[0].rule.order[0].numpy()
        fell, stayed = np.flatnonzero(kept[0] == 0), np.flatnonzero(kept[0] > 0)[1:]  # the first competes nowhere
        kept[0, fell[order[fell].argmin()]] = len(oracle.sites)
        kept[0, stayed[order[stayed].argmax()]] = 0
        logits[0] += 100

    assert f"kept tokens differ first at site {oracle.sites[0]}" in compare(close, PackedEngine(student, spoil)).failure
