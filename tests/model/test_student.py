"""The oracle against the written definition of a cut, and the packed student against the oracle."""

import math

import numpy as np
import pytest
import torch
from conftest import SITE_SETS, flat_kept, make_batch, make_student
from hypothesis import given, settings
from hypothesis import strategies as st

from adtp_export.model.packed import PackedStudent, pack, survivors
from adtp_export.model.student import select


def definition(saliency, permille, min_tokens):
    """Steps 1 to 4 of checkpoint format 1 for one sequence, in plain Python."""
    n = len(saliency)
    k = min(n, max(min_tokens, (n * permille + 999) // 1000))
    others = sorted(range(1, n), key=lambda i: (-saliency[i], i))[: k - 1]
    return sorted([0, *others])


# Few distinct values, so that ties are common.
scores = st.lists(st.integers(-3, 3).map(float), min_size=1, max_size=24)


@given(st.lists(st.tuples(scores, st.integers(1, 1000), st.integers(1, 4)), min_size=1, max_size=6))
@settings(max_examples=200, deadline=None)
def test_padded_and_packed_selection_follow_the_definition(rows):
    expected = [definition(*row) for row in rows]
    counts = torch.tensor([len(kept) for kept in expected])
    lengths = torch.tensor([len(row[0]) for row in rows])
    padded = torch.full((len(rows), int(lengths.max())), 99.0)
    for i, row in enumerate(rows):
        padded[i, : len(row[0])] = torch.tensor(row[0])
    live = torch.arange(padded.shape[1]) < lengths[:, None]

    kept = select(padded, live, counts)
    assert [np.flatnonzero(row).tolist() for row in kept.numpy()] == expected

    start = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))[:-1]
    packed_rows, cu_seqlens = survivors(padded[live], counts, start, lengths)
    assert cu_seqlens.tolist() == [0, *np.cumsum([len(e) for e in expected])]
    assert packed_rows.tolist() == [int(s) + i for s, e in zip(start, expected) for i in e]


@given(st.lists(st.integers(1, 30), min_size=1, max_size=10), st.integers(0, 7))
def test_pack_indexes_the_live_elements(lengths, slack):
    size = max(lengths) + slack
    cu_seqlens, cells = pack(torch.tensor(lengths), size)
    assert cu_seqlens.tolist() == [0, *np.cumsum(lengths)]
    assert cells.tolist() == [b * size + j for b, n in enumerate(lengths) for j in range(n)]


@given(st.integers(1, 5000), st.integers(1, 1000), st.integers(1, 8))
def test_count_is_the_integer_ceiling(n, permille, min_tokens):
    student = make_student(retention_ratios=[permille / 1000, 1.0] if permille < 1000 else [1.0], min_tokens=min_tokens)
    retainer = student.bert.encoder.retainers["0_ffn"]
    logits = torch.zeros(1, len(student.config.retention_ratios))  # a tie: the lowest index wins
    expected = min(n, max(min_tokens, math.ceil(n * permille / 1000 - 1e-9)))
    assert retainer.count(logits, torch.tensor([n])).item() == expected


@pytest.mark.parametrize("sites", SITE_SETS, ids=str)
@pytest.mark.parametrize("lengths", [[7], [1], [1, 9, 4, 9], [20, 3, 1, 1, 11]], ids=str)
def test_packed_equals_padded(sites, lengths):
    student = make_student(sites)
    batch = make_batch(lengths, max(lengths) + 2)
    expected = student(**batch)
    logits, rows = PackedStudent(student)(**batch)
    exact = student.double()(**batch)
    rounding = torch.finfo(torch.float32).eps * exact.logits.abs().max()  # one draw of the error may be near zero
    assert (logits - exact.logits).abs().max() <= 8 * max((expected.logits - exact.logits).abs().max(), rounding)
    assert np.array_equal(flat_kept(rows, batch["input_ids"].shape, len(sites)), expected.kept_site)


def test_retention_differs_between_sequences():
    """The random students of these tests do exercise an adaptive ratio."""
    batch = make_batch([20] * 16, 20)
    counts = make_student(["1.attention"])(**batch).decisions[0].count
    assert len(set(counts.tolist())) > 2


def test_a_row_without_live_tokens_counts_as_one():
    student = make_student()
    batch = make_batch([4, 1], 5)
    empty = {**batch, "attention_mask": batch["attention_mask"].clone()}
    empty["attention_mask"][1] = 0
    assert torch.equal(student(**batch).logits, student(**empty).logits)
    assert torch.equal(PackedStudent(student)(**batch)[0], PackedStudent(student)(**empty)[0])


def test_left_padding_is_refused():
    batch = make_batch([3], 5)
    batch["attention_mask"] = batch["attention_mask"].flip(1)
    with pytest.raises(ValueError, match="right padding"):
        make_student()(**batch)


def test_pruned_tokens_are_gone_for_good():
    """Changing a dropped token changes nothing behind its cut; changing a kept one does."""
    student = make_student(["0.ffn"], retention_ratios=[0.3, 1.0])
    retainer = student.bert.encoder.retainers["0_ffn"]
    retainer.ratio_predictor.bias.copy_(torch.tensor([100.0, 0.0]))
    x = torch.randn(1, 12, 32)
    live = torch.ones(1, 12, dtype=torch.bool)
    encoder = student.bert.encoder
    states, kept_site, _ = encoder(x, live)
    dropped = np.flatnonzero(kept_site[0] == 0)
    assert len(dropped) == 12 - 4
    layer = encoder.layer[1]
    survivors_mask = kept_site == 1
    moved = states.clone()
    moved[0, dropped] += 10
    before, after = layer.attention(states, survivors_mask), layer.attention(moved, survivors_mask)
    assert torch.equal(before[survivors_mask], after[survivors_mask])


@pytest.mark.parametrize(
    ("problem", "num_labels", "labels"),
    [
        (None, 3, torch.tensor([0, 2])),
        ("regression", 1, torch.tensor([0.5, -1.0])),
        ("multi_label_classification", 3, torch.tensor([[1.0, 0, 1], [0, 0, 1]])),
    ],
)
def test_every_kind_of_label_trains(problem, num_labels, labels):
    student = make_student(problem_type=problem, num_labels=num_labels).requires_grad_(True)
    output = student(**make_batch([5, 3], 5), labels=labels)
    output.loss.backward()
    assert torch.isfinite(student.classifier.weight.grad).all()
    assert student.classifier.weight.grad.abs().sum() > 0
