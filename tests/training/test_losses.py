"""The supervision of the retainer, against brute force."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from adtp_export.training.losses import (
    Ratios,
    attribution_loss,
    logit_loss,
    ratio_label,
    retention,
    saliency_loss,
    saliency_target,
    share_for_retention,
)

PERMILLE = [100 * i for i in range(1, 11)]


def rows(lengths, seed=0):
    """Random attribution ``(B, S)`` and who competes: all but [CLS] and padding."""
    size = max(lengths)
    candidates = torch.arange(size) < torch.tensor(lengths)[:, None]
    candidates[:, 0] = False
    return torch.rand(len(lengths), size, generator=torch.Generator().manual_seed(seed)), candidates


@given(
    st.lists(st.integers(1, 40), min_size=1, max_size=5),
    st.floats(0.05, 0.99),
    st.integers(0, 1000),
    st.sampled_from([PERMILLE, [500, 1000], [50 * i for i in range(1, 21)]]),
    st.sampled_from([1, 2, 5, 100]),
)
def test_the_label_is_the_smallest_ratio_that_holds_the_share(lengths, share, seed, permille, min_tokens):
    attribution, candidates = rows(lengths, seed)
    labels = ratio_label(attribution, candidates, Ratios(permille, min_tokens), share)
    for row, label, n in zip(attribution, labels.tolist(), lengths):
        held = row[1:n].sort(descending=True).values

        def share_kept(index, n=n, held=held):
            count = min(n, max(min_tokens, -(-n * permille[index] // 1000)))
            return (held[: count - 1].sum() / held.sum().clamp(min=1e-12)).item()

        if n == 1:
            assert label == 0
            continue
        assert share_kept(label) >= share - 1e-5
        assert label == 0 or share_kept(label - 1) < share + 1e-5


def test_a_text_of_one_token_has_one_that_always_stays():
    """Its first token is its last one, too: the smallest ratio keeps all of it."""
    lengths = torch.tensor([1, 2, 4])
    attribution, candidates = rows(lengths.tolist())
    candidates[torch.arange(3), lengths - 1] = False
    ratios = Ratios((200, 500, 1000), 1, lengths.clamp(max=2))
    labels = ratio_label(attribution, candidates, ratios, 1.0)
    assert labels.tolist() == [0, 2, 2]
    assert retention(labels, candidates, ratios) == 1


@given(st.lists(st.integers(1, 40), min_size=1, max_size=5), st.sampled_from([1, 2, 5, 100]), st.data())
def test_retention_counts_what_a_cut_keeps(lengths, min_tokens, data):
    _, candidates = rows(lengths)
    labels = data.draw(st.lists(st.integers(0, 9), min_size=len(lengths), max_size=len(lengths)))
    kept = sum(min(n, max(min_tokens, -(-n * PERMILLE[i] // 1000))) for n, i in zip(lengths, labels))
    found = retention(torch.tensor(labels), candidates, Ratios(PERMILLE, min_tokens))
    assert found == pytest.approx(kept / sum(lengths))


@pytest.mark.parametrize(("wanted", "min_tokens"), [(0.25, 1), (0.4, 1), (0.7, 1), (0.4, 10), (0.7, 10)])
def test_the_share_is_found_for_a_wanted_retention(wanted, min_tokens):
    attribution, candidates = rows(list(range(3, 60)))
    ratios = Ratios(PERMILLE, min_tokens)
    share = share_for_retention(attribution.square(), candidates, ratios, wanted)
    labels = ratio_label(attribution.square(), candidates, ratios, share).tolist()
    lengths = range(3, 60)
    kept = sum(min(n, max(min_tokens, -(-n * PERMILLE[i] // 1000))) for n, i in zip(lengths, labels))
    assert kept / sum(lengths) == pytest.approx(wanted, abs=0.02)
    assert retention(torch.tensor(labels), candidates, ratios) == pytest.approx(kept / sum(lengths))


def test_saliency_targets_keep_the_order_at_any_length_and_scale():
    attribution, candidates = rows([9, 5])
    target = saliency_target(attribution, candidates)
    torch.testing.assert_close(target, saliency_target(attribution * 100, candidates))
    assert torch.equal(target[0, 1:9].argsort(), attribution[0, 1:9].argsort())
    assert saliency_loss(target, attribution, candidates) == 0


def test_saliency_of_single_tokens_costs_nothing_and_has_a_gradient():
    saliency = torch.zeros(2, 1, requires_grad=True)
    loss = saliency_loss(saliency, torch.ones(2, 1), torch.zeros(2, 1, dtype=torch.bool))
    loss.backward()
    assert loss == 0
    assert (saliency.grad == 0).all()


def test_losses_vanish_where_student_and_teacher_agree():
    logits, attribution = torch.randn(4, 3), torch.nn.functional.normalize(torch.rand(4, 6))
    assert logit_loss(logits, logits, 2.0) == pytest.approx(0, abs=1e-6)
    assert logit_loss(logits + 1, logits, 2.0) == pytest.approx(0, abs=1e-6)
    assert logit_loss(logits[:, :1] + 1, logits[:, :1], 2.0) == pytest.approx(1)
    assert attribution_loss(attribution, attribution) == 0


def test_softened_answers_count_by_the_square_of_the_temperature():
    student, teacher = torch.randn(4, 3).double(), torch.randn(4, 3).double()
    p, q = ((logits / 2).softmax(1) for logits in (teacher, student))
    expected = 4 * (p * (p / q).log()).sum(1).mean()
    torch.testing.assert_close(logit_loss(student, teacher, 2.0), expected)


def test_saliency_targets_have_a_floor_of_one_percent_of_the_mean():
    attribution = torch.tensor([[5.0, 1.0, 0.0, 2.0]])
    candidates = torch.tensor([[False, True, True, True]])
    target = saliency_target(attribution, candidates)
    torch.testing.assert_close(target[0, 1:], torch.tensor([1.0, 0.01, 2.0]).log())
