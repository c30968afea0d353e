"""The verdict: it passes what is right, and names what is wrong and where."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from packed_engine import PackedEngine
from testbed import as_numpy, as_ties, make_batch, make_student

from adtp_export.verify.oracle import MULTIPLE, run_oracle
from adtp_export.verify.parity import compare, rows_wanted

SITES = ["0.ffn", "1.ffn"]


def turn(kept, row):
    """Let the second token of a row fall at the first site, or stay to the end where it falls there."""
    kept[row, 1] = 0 if kept[row, 1] else len(SITES)


@pytest.fixture(scope="module")
def student():
    return make_student(SITES)


@pytest.fixture(scope="module")
def oracle(student):
    return run_oracle(student, [as_numpy(make_batch([9, 20, 4], 21)), as_numpy(make_batch([30, 2], 30, seed=1))])


def test_what_is_right_passes(student, oracle):
    parity = compare(oracle, PackedEngine(student))
    assert parity.failure is None
    assert parity.rows == 5
    assert parity.max_abs_logit_diff <= parity.tolerance
    assert parity.kept_token_agreement == parity.prediction_agreement == 1


def test_tolerance_follows_the_oracles_own_error(oracle):
    assert oracle.output_errors["logits"] < 1e-4
    scale = max(np.abs(b.outputs["logits"]).max() for b in oracle.batches)
    assert oracle.output_errors["logits"] >= np.finfo(np.float32).eps * scale * 0.99


@pytest.mark.parametrize("side", [-1, 1])
def test_the_tolerance_is_the_edge(student, oracle, side):
    """The last fp32 number inside passes, and the next one fails."""
    one = replace(oracle, batches=oracle.batches[:1])
    assert one.tolerances["logits"] == MULTIPLE * oracle.output_errors["logits"]
    exact = one.batches[0].references["logits"][0, 1]
    inside = np.float32(exact + side * one.tolerances["logits"])
    while abs(inside - exact) > one.tolerances["logits"]:
        inside = np.nextafter(inside, np.float32(exact))
    outside = np.nextafter(inside, np.float32(side * np.inf))
    while abs(outside - exact) <= one.tolerances["logits"]:
        inside, outside = outside, np.nextafter(outside, np.float32(side * np.inf))
    assert 0 < abs(outside - inside) < one.tolerances["logits"] / 8

    def answered(value):
        def spoil(logits, kept):
            logits[0, 1] = value

        return compare(one, PackedEngine(student, spoil)).failure

    assert answered(inside) is None
    failure = answered(outside)
    assert "row 0" in failure
    assert "every site kept the same tokens" in failure


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_logit_that_is_no_number_fails(student, oracle, value):
    def spoil(logits, kept):
        logits[-1, 0] = value

    assert compare(oracle, PackedEngine(student, spoil)).failure is not None


@pytest.mark.parametrize(("site", "name"), enumerate(SITES))
def test_a_flip_with_a_clear_margin_names_its_site(student, oracle, site, name):
    def spoil(logits, kept):
        row, column = np.argwhere(kept == site)[0]
        kept[row, column] = len(SITES)  # a token that the site drops is kept

    parity = compare(oracle, PackedEngine(student, spoil))
    assert f"first at site {name}" in parity.failure
    assert parity.kept_token_agreement < 1


def test_the_first_site_is_named_when_several_differ(student, oracle):
    def spoil(logits, kept):
        kept[kept >= 0] = len(SITES)

    assert "first at site 0.ffn" in compare(oracle, PackedEngine(student, spoil)).failure


def test_a_flip_is_excused_and_listed_below_its_bound_alone(student, oracle):
    def spoil(logits, kept):
        row, column = np.argwhere(kept == 1)[0]
        kept[row, column] = 2
        logits[row] += 100  # whatever follows a different set of tokens is not compared

    batch = next(b for b in oracle.batches if (b.kept_site == 1).any())

    def judged(margin):
        tied = replace(oracle, batches=(replace(as_ties(batch), margins=np.full_like(batch.margins, margin)),))
        return compare(tied, PackedEngine(student, spoil))

    (flip,) = judged(0).excused_flips
    assert flip.site == "1.ffn"
    assert flip.bound > 0
    parity = judged(np.nextafter(flip.bound, 0))
    assert parity.failure is None
    assert [(f.site, f.bound) for f in parity.excused_flips] == [("1.ffn", flip.bound)]
    assert "first at site 1.ffn" in judged(flip.bound).failure


def test_scores_of_another_scale_do_not_excuse_flips():
    """Saliency scaled down keeps the same tokens; the rounding of the (large) ratio scores is no excuse for others."""
    student = make_student(["0.ffn"])
    last = student.pruners["0_ffn"].saliency_predictor[2]
    last.weight.mul_(1e-6)
    last.bias.mul_(1e-6)
    oracle = run_oracle(student, [as_numpy(make_batch([20, 15, 30], 30))])
    assert compare(oracle, PackedEngine(student)).failure is None

    def spoil(logits, kept):
        for row in range(3):  # as many tokens as before, but the last ones instead of the best
            n, k = int((kept[row] >= 0).sum()), int((kept[row] == 1).sum())
            kept[row, :n] = 0
            kept[row, 0] = 1
            kept[row, n - k + 1 : n] = 1

    assert "first at site 0.ffn" in compare(oracle, PackedEngine(student, spoil)).failure


def test_nothing_compared_is_no_proof(student, oracle):
    def spoil(logits, kept):
        for row in range(len(kept)):
            turn(kept, row)

    tied = [as_ties(b) for b in oracle.batches]
    parity = compare(replace(oracle, batches=tuple(tied)), PackedEngine(student, spoil))
    assert "no logits could be compared" in parity.failure


def test_padding_taken_for_a_token_fails(student, oracle):
    def spoil(logits, kept):
        kept[kept == -1] = 0

    assert "unpadding" in compare(oracle, PackedEngine(student, spoil)).failure


def test_debug_form_must_answer_like_the_file(student, oracle):
    def spoil(logits, kept):
        logits[0, 0] = np.nextafter(logits[0, 0], np.float32(np.inf))

    engine, debug = PackedEngine(student), PackedEngine(student, spoil)
    assert compare(oracle, engine, PackedEngine(student)).debug_diff == 0
    assert "debug outputs" in compare(oracle, engine, debug).failure
    parity = compare(oracle, engine, debug, exact_debug=False)
    assert parity.failure is None
    assert (
        0
        < parity.debug_diff
        <= np.finfo(np.float32).eps * max(np.abs(b.outputs["logits"]).max() for b in oracle.batches)
    )


def test_a_debug_form_that_computes_something_else_fails(student, oracle):
    def spoil(logits, kept):
        logits[0, 0] += 2 * oracle.tolerances["logits"]

    parity = compare(oracle, PackedEngine(student), PackedEngine(student, spoil), exact_debug=False)
    assert "logits: off by" in parity.failure


def test_rows_that_keep_other_tokens_are_not_counted(student, oracle):
    """Nor are those that the engine did not answer itself."""
    tied = [as_ties(b) for b in oracle.batches]

    def spoil(logits, kept):
        turn(kept, 0)

    def compared(spoil, own=None):
        parity = compare(replace(oracle, batches=tuple(tied)), PackedEngine(student, spoil), own=own)
        assert parity.failure is None
        return parity.rows, parity.rows_compared, len(parity.excused_flips)

    sizes = [len(batch.kept_site) for batch in oracle.batches]
    assert sizes == [3, 2]
    assert compared(lambda logits, kept: None) == (5, 5, 0)
    assert compared(spoil) == (5, 3, 2)  # the first row of each batch flips
    asked = iter([np.array([True, True, False]), np.array([True, False])])
    assert compared(spoil, lambda: next(asked)) == (5, 1, 2)


@pytest.mark.parametrize(
    ("rows", "own", "wanted"),
    [(18, 18, 9), (17, 17, 9), (1, 1, 1), (63, 63, 32), (64, 64, 32), (1024, 1024, 512), (18, 1, 9), (1024, 40, 32)],
)
def test_how_many_rows_a_verdict_takes(rows, own, wanted):
    """Half of those that a target answers; a file of fixed sizes, which answers fewer, half of all or 32."""
    assert rows_wanted(rows, own) == wanted


def test_margins_are_those_of_the_decision(student, oracle):
    """Recomputed in plain Python from the fp64 student's scores."""
    batch = oracle.batches[0]
    decision = student.double()(**{n: torch.from_numpy(a) for n, a in batch.batch.items()}).decisions[0]
    student.float()
    for row in range(3):
        n, k = int(decision.live[row].sum()), int(decision.count[row])
        ranked = sorted(decision.rule.order[row, 1:n].tolist(), reverse=True)
        ratio = sorted(decision.rule.choice[row].tolist(), reverse=True)
        saliency = ranked[k - 2] - ranked[k - 1] if 2 <= k < n else np.inf
        assert batch.margins[0, :, row].tolist() == pytest.approx([ratio[0] - ratio[1], saliency])


def test_kept_token_agreement_is_overlap_over_union(student, oracle):
    dropped = []

    def spoil(logits, kept):
        if not dropped:
            row, column = np.argwhere(kept == 2)[-1]
            kept[row, column] = 1
            dropped.append(1)

    assert any((b.kept_site == 2).any() for b in oracle.batches)
    union = sum(int((b.kept_site > i).sum()) for b in oracle.batches for i in range(2))
    parity = compare(oracle, PackedEngine(student, spoil))
    assert parity.kept_token_agreement == pytest.approx((union - 1) / union)


@pytest.mark.parametrize(("kind", "agrees"), [("regression", False), (None, True)])
def test_predictions_of_regression_are_values(kind, agrees):
    student = make_student(["0.ffn"], num_labels=1 if kind else 2, problem_type=kind)
    oracle = run_oracle(student, [as_numpy(make_batch([5], 5))])

    def spoil(logits, kept):
        logits += 0.02

    assert compare(oracle, PackedEngine(student, spoil)).prediction_agreement == float(agrees)
