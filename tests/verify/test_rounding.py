"""The errors that tolerances are made of: they rest on many draws, and a lucky one is no bound."""

import copy
import dataclasses

import numpy as np
import pytest
import torch
from testbed import HEAD_FIELDS, TINY_BACKBONES, make_batch, make_encoder, make_student
from torch import nn

from adtp_export.verify.rounding import MULTIPLE, Answer, _distances, draws_for, errors, rounded_anew

EPS = 2.0**-23


def answer(logits):
    return Answer({"logits": logits}, torch.zeros(len(logits), 1, dtype=torch.int32), ())


def test_one_value_that_cancels_has_a_bound():
    """A sum of 64 terms that is nearly 0, 300 times. A kernel with eight partial sums is off by many times more than one run of
    PyTorch's in some cases, and never by more than the multiple of e."""
    torch.manual_seed(0)
    lucky = 0
    for _ in range(300):
        linear = nn.Linear(64, 1).requires_grad_(False)
        x = torch.randn(1, 64)
        linear.bias -= linear(x)[0]
        exact = copy.deepcopy(linear).double()(x.double())
        plain, found = errors(lambda: answer(linear(x)), linear, answer(exact), draws_for(1))  # noqa: B023 (called at once)
        expected = EPS / 3**0.5 * (linear.weight * x).norm()  # the deviation of a draw
        assert found.outputs["logits"] > expected / 5
        other = torch.zeros(8)
        for terms in (linear.weight * x).view(8, 8):
            other = other + terms
        off = (other.sum() + linear.bias - exact).abs()
        assert off <= MULTIPLE * found.outputs["logits"]
        lucky += bool(off > MULTIPLE * (plain.outputs["logits"] - exact).abs())
    assert lucky > 3


@pytest.mark.parametrize(("rows", "draws"), [(1, 8), (7, 8), (8, 7), (18, 3), (63, 1), (64, 0), (1024, 0)])
def test_few_rows_are_run_more_often(rows, draws):
    assert draws_for(rows) == draws


@pytest.mark.parametrize("backbone", TINY_BACKBONES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_each_draw_rounds_otherwise_and_leaves_the_student_as_it_was(backbone, dtype):
    """Also what a pruner computes in fp32, whatever the dtype."""
    model = make_encoder(backbone, "adtp", head="tokens", **HEAD_FIELDS["tokens"]).to(dtype)
    inputs = {"input_ids": make_batch([9, 4], 9)["input_ids"].clamp(min=5)}
    before, drawn = model(**inputs), []
    for seed in range(3):
        with rounded_anew(model, seed):
            drawn.append(model(**inputs))
    for read in (lambda said: said.logits, lambda said: said.decisions[0].rule.choice):
        values = [read(said) for said in (before, *drawn)]
        assert all(not torch.equal(a, b) for i, a in enumerate(values) for b in values[:i])
    assert torch.equal(model(**inputs).logits, before.logits)


def test_no_number_is_infinitely_far():
    exact = answer(torch.tensor([[1.0], [2.0]], dtype=torch.float64))
    _, found = errors(lambda: answer(torch.tensor([[1.0], [torch.nan]])), nn.Linear(1, 1), exact, draws=2)
    assert found.outputs == {"logits": np.inf}


def test_a_row_that_parts_says_nothing_about_what_follows():
    """Its scores at the site where it parts still count; those behind it, and its logits, are of another network."""
    student = make_student(["0.ffn", "1.ffn"])
    said = student(**make_batch([9, 20, 4], 21))
    exact = Answer({"logits": said.logits}, said.kept_site, said.decisions)
    decisions = tuple(
        dataclasses.replace(d, rule=dataclasses.replace(d.rule, order=d.rule.order + 0.5)) for d in exact.decisions
    )
    kept_site = exact.kept_site.clone()
    column = int(torch.nonzero(kept_site[0] == 2)[-1])
    kept_site[0, column] = 0  # row 0 parts at the first site
    logits = exact.outputs["logits"] + torch.tensor([[100.0], [0.25], [0.0]])
    plain = Answer({"logits": logits}, kept_site, decisions)
    _, found = errors(lambda: plain, student, exact, draws=0)
    assert found.decisions[:, 1] == pytest.approx(np.array([0.5, 0.5]))
    alone = _distances(plain, exact).decisions[:, 1, 0]
    assert alone[0] == pytest.approx(0.5)
    assert np.isnan(alone[1])
    assert found.outputs == pytest.approx({"logits": 0.25})
