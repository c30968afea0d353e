"""Rounding explains tokens that changed places at a border, whatever the rule, and no others."""

import dataclasses
import types

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
from adtp_export.verify.flips import apart, lead
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


def off_by(decision, kept):
    return apart(decision, 0, decision.live[0].numpy(), kept)


@pytest.mark.parametrize("name", RULES)
@given(
    scores=SCORES,
    off=arrays.arrays(np.float64, (1, N), elements=st.floats(-1, 1)),
    most=st.sampled_from([1e-6, 0.1, 1]),
)
@settings(deadline=None)
def test_what_errors_turn_they_explain(name, scores, off, most):
    exact, rounded = (decided(RULES[name](torch.from_numpy(order))) for order in (scores, scores + most * off))
    assert off_by(exact, exact.kept[0].numpy()) == 0
    assert off_by(exact, rounded.kept[0].numpy()) <= most + 1e-12


@given(SCORES, st.floats(0.5, 1), arrays.arrays(np.float64, (1, N), elements=st.floats(-1e-3, 1e-3)))
@settings(deadline=None)
def test_shares_are_of_the_largest(scores, share, off):
    exact, rounded = (
        decided(KeepAboveShare(torch.from_numpy(order), torch.tensor(share))) for order in (scores, scores + off)
    )
    largest = scores[0, :LIVE].max()
    assert off_by(exact, rounded.kept[0].numpy()) <= 2e-3 / (largest - 1e-3) + 1e-12


@pytest.mark.parametrize(
    ("name", "kept", "far"),
    [
        ("best", [0, 1, 2, 3, 5], 0.001),
        ("best", [0, 1, 2, 3, 9], 0.5),
        ("best", [0, 6, 7, 8, 9], 0.899),
        ("best", [1, 2, 3, 4, 5], np.inf),
        ("best and the last", [0, 1, 2, 3, 4], np.inf),
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
    off = far if name == "above" else far / 2  # of two scores each may be off
    assert off_by(decided(RULES[name](order)), stays) == pytest.approx(off)


@pytest.mark.parametrize(("stayed", "behind"), [(2, 0), (5, 0.001), (8, 0.7), (6, np.inf)])
def test_a_near_tie_of_ratios_excuses_no_other_number(stayed, behind):
    """The first and the last always stay, which are more than one."""
    choice, counts = torch.tensor([[0.3, 1, 0.999, 0.2]], dtype=torch.float64), torch.tensor([[8, 1, 5, 5]])
    rule = KeepBest(torch.zeros(1, N, dtype=torch.float64), counts[:, 1], choice, counts)
    rule = rule.keeping(torch.tensor([LIVE - 1]), torch.tensor([0]))
    assert lead(decided(rule), 0, np.arange(N) < stayed) == pytest.approx(behind)


def as_close(oracle):
    """Of one batch: as if the borders of all its decisions had been near-ties."""
    (batch,) = oracle.batches
    return dataclasses.replace(oracle, batches=(dataclasses.replace(batch, margins=np.zeros_like(batch.margins)),))


@pytest.mark.parametrize("pruning", ["adtp", "schedule", "ltp", "top"])
def test_a_near_tie_excuses_no_tokens_but_those(pruning):
    """Where all decisions look close, tokens that are far apart still must not change places."""
    student = make_student(["0.ffn"]) if pruning == "adtp" else make_encoder("bert", pruning)
    oracle = run_oracle(student, [as_numpy(make_batch([20, 15, 30, 9], 30))])
    (batch,) = oracle.batches

    def spoil(logits, kept):
        order = batch.exact.decisions[0].rule.order[0].numpy()
        fell, stayed = np.flatnonzero(kept[0] == 0), np.flatnonzero(kept[0] > 0)[1:]  # the first competes nowhere
        kept[0, fell[order[fell].argmin()]] = len(oracle.sites)
        kept[0, stayed[order[stayed].argmax()]] = 0
        logits[0] += 100

    assert (
        f"kept tokens differ first at site {oracle.sites[0]}"
        in compare(as_close(oracle), PackedEngine(student, spoil)).failure
    )


def test_another_number_of_tokens_is_one_that_a_ratio_gives():
    """One more than stayed: the best of those that fell."""
    student = make_student(["0.ffn"])
    oracle = run_oracle(student, [as_numpy(make_batch([20, 15, 30, 9], 30))])
    (batch,) = oracle.batches
    decision = batch.exact.decisions[0]
    assert decision.count[0] + 1 not in decision.rule.counts[0]
    assert [int(counts[scores.argmax()]) for counts, scores in zip(decision.rule.counts, decision.rule.choice)] == (
        decision.count.tolist()
    )

    def spoil(logits, kept):
        fell = np.flatnonzero(kept[0] == 0)
        kept[0, fell[decision.rule.order[0].numpy()[fell].argmax()]] = len(oracle.sites)

    told = compare(as_close(oracle), PackedEngine(student, spoil)).failure
    assert f"kept tokens differ first at site {oracle.sites[0]}" in told


def test_tokens_that_only_ask_always_stay():
    """Those that a query is filled up with; here token 3, where the mask is 0."""
    student = make_encoder("bert", "adtp", head="vectors", vectors={"expansion": 3})
    inputs = as_numpy(make_batch([12, 9], 14))
    inputs["input_ids"][:, -2:] = 3
    oracle = run_oracle(student, [inputs])
    (batch,) = oracle.batches
    kept = batch.kept_site.copy()
    assert (kept[:, -1] == len(oracle.sites)).all()
    kept[0, -1] = 0
    engine = types.SimpleNamespace(run=lambda inputs: {**batch.outputs, "kept_site": kept})
    assert "kept tokens differ" in compare(as_close(oracle), engine).failure


def test_where_fp64_has_parted_before_its_scores_say_nothing():
    """There only the margin of its own decision counts."""
    student = make_student(["0.ffn", "1.ffn"])
    oracle = run_oracle(student, [as_numpy(make_batch([20, 15], 20))])
    (batch,) = as_close(oracle).batches
    other = batch.exact.kept_site.clone()
    fell, stayed = (int((other[0] == site).nonzero()[-1]) for site in (0, 2))
    other[0, fell], other[0, stayed] = 2, 0

    def failure(exact):
        tied = dataclasses.replace(batch, exact=dataclasses.replace(batch.exact, kept_site=exact))
        return compare(dataclasses.replace(oracle, batches=(tied,)), PackedEngine(student, spoil)).failure

    def spoil(logits, kept):
        worst, best = np.flatnonzero(kept[0] == 1), np.flatnonzero(kept[0] == 2)
        kept[0, worst[-1]], kept[0, best[-1]] = 2, 1

    assert "kept tokens differ first at site 1.ffn" in failure(batch.exact.kept_site)
    assert failure(other) is None
