"""Dropout of attention probabilities on a CPU: its rate, its gradients, and that teachers learn with it."""

import pytest
import torch
from testbed import TINY_BERT, make_batch
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    ModernBertConfig,
    ModernBertForSequenceClassification,
)

from adtp_export.training import dropout as room
from adtp_export.training.dropout import LEVELS, dropped_product


@pytest.mark.parametrize("rate", [0.0, 1e-7, 0.1, 0.5, 0.99, 1.0])
def test_attention_drops_probabilities_at_their_rate_and_its_gradients_are_those_of_what_is_left(rate):
    torch.manual_seed(0)
    probabilities = torch.rand(3, 4, 37, 37, dtype=torch.float64).requires_grad_()
    v = torch.eye(37, dtype=torch.float64).expand(3, 4, 37, 37)
    left = dropped_product(probabilities, v, rate)  # what is left of the probabilities, scaled
    kept = left.detach() != 0
    count, deviation = probabilities.numel(), (probabilities.numel() * rate * (1 - rate)) ** 0.5
    assert abs(kept.sum().item() - count * (1 - rate)) <= 5 * deviation + count / LEVELS
    scale = left.detach()[kept] / probabilities.detach()[kept]
    if len(scale):
        rounded = 1 / (2 * LEVELS * (1 - rate))  # of the rate, to one of so many
        torch.testing.assert_close(scale, torch.full_like(scale, 1 / (1 - rate)), rtol=1.01 * rounded, atol=0)
    torch.testing.assert_close(
        torch.autograd.grad(left.sum(), probabilities)[0], left.detach() / probabilities.detach()
    )
    if 0.1 <= rate < 1:
        off = kept.flatten().double() - (1 - rate)
        for apart in (1, 2, 3, 4, 37):  # four come of one random number, and rows have 37
            together = (off[apart:] * off[:-apart]).mean().item()
            assert abs(together) <= 5 * rate * (1 - rate) / count**0.5
        assert not torch.equal(kept, dropped_product(probabilities, v, rate) != 0)
    torch.manual_seed(0)
    torch.rand(3, 4, 37, 37, dtype=torch.float64)
    assert torch.equal(dropped_product(probabilities, v, rate), left)
    assert torch.equal(dropped_product(probabilities, v, 0.0), probabilities)


@pytest.fixture
def teacher():
    """A classifier whose attention alone drops anything."""
    torch.manual_seed(0)
    fields = {**TINY_BERT, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.5}
    return BertForSequenceClassification(BertConfig(**fields)).double().train()


@pytest.mark.parametrize("lengths", [[9, 4, 6], [9, 9, 9]], ids=["padded", "of one length"])
def test_a_teacher_attends_as_usual_to_what_is_left(teacher, monkeypatch, lengths):
    batch, calls = make_batch(lengths, max(lengths)), []

    def nothing_dropped(probabilities, v, rate):
        calls.append(rate)
        return probabilities @ v

    with monkeypatch.context() as patch, room.quick_dropout(teacher):
        patch.setattr(room, "dropped_product", nothing_dropped)
        found = teacher(**batch).logits
    assert calls == [0.5] * teacher.config.num_hidden_layers
    torch.testing.assert_close(found, teacher.eval()(**batch).logits)


def test_padding_that_sees_no_text_becomes_no_nan():
    """A padded query farther from the text than the window."""
    torch.manual_seed(0)
    size = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = ModernBertConfig(
        vocab_size=97, pad_token_id=0, attention_dropout=0.1, local_attention=8, global_attn_every_n_layers=3, **size
    )
    model = ModernBertForSequenceClassification(config).train()
    batch = make_batch([40, 6], 40, types=1)
    with room.quick_dropout(model):
        loss = model(**batch, labels=torch.tensor([0, 1])).loss
    loss.backward()
    assert loss.isfinite()
    assert all(weight.grad.isfinite().all() for weight in model.parameters() if weight.grad is not None)


def test_a_teacher_drops_in_training_alone_and_is_left_as_it_was(teacher):
    batch = make_batch([9, 4, 6], 9)
    expected = teacher.eval()(**batch).logits
    with room.quick_dropout(teacher):
        assert torch.equal(teacher(**batch).logits, expected)
        first, second = (teacher.train()(**batch).logits for _ in range(2))
        assert not torch.equal(first, second)
        first.sum().backward()
    assert teacher.config._attn_implementation == room.SDPA
    assert all(weight.grad is not None for name, weight in teacher.named_parameters() if "attention" in name)
    assert torch.equal(teacher.eval()(**batch).logits, expected)


def test_what_is_no_plain_attention_is_left_to_transformers(monkeypatch):
    """Causal attention without a mask, fewer heads of keys than of queries, and whatever has a bias by position."""
    asked = []
    monkeypatch.setattr(room, "sdpa_attention_forward", lambda *given, **more: asked.append(more))
    states = torch.rand(2, 4, 5, 8)
    module = torch.nn.Module()
    room.attend(module, states, states, states, None, dropout=0.1)
    room.attend(module, states, states[:, :2], states[:, :2], torch.ones(2, 1, 5, 5, dtype=torch.bool), dropout=0.1)
    room.attend(module, states, states, states, None, dropout=0.1, is_causal=False, position_bias=states)
    assert len(asked) == 3
    module.is_causal = False
    assert room.attend(module, states, states, states, None, dropout=0.1)[0].shape == (2, 5, 4, 8)
    assert len(asked) == 3
