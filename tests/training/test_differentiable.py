"""Attention of the packed student in training: what tokens received, what drops out, and gradients."""

import pytest
import torch
from conftest import flat_kept, make_batch, make_encoder
from decoder_models import make_decoder

from adtp_export.model.packed import PackedStudent
from adtp_export.training.differentiable import LEVELS, DifferentiableAttention, weighted

LENGTHS, PADDED = [9, 1, 14, 6], 14


@pytest.mark.parametrize(
    ("backbone", "pruning"),
    [
        *(("bert", pruning) for pruning in ("adtp", "ltp", "schedule", "from-others", "top", "transkimmer")),
        *(("qwen3", pruning) for pruning in ("adtp", "ltp", "top")),
    ],
)
def test_attention_with_gradients_says_what_each_token_received(backbone, pruning):
    student = (
        make_encoder(pruning=pruning) if backbone == "bert" else make_decoder(backbone, pruning=pruning)
    ).double()
    batch = make_batch(LENGTHS, PADDED, types=2 if "token_type_ids" in student.input_names else 1)
    expected = student(**batch)
    (logits,), rows = PackedStudent(student, DifferentiableAttention)(**batch)
    torch.testing.assert_close(logits, expected.logits)
    kept = flat_kept(rows, tuple(batch["input_ids"].shape), len(student.site_names))
    assert kept.tolist() == expected.kept_site.tolist()
    assert (kept < len(student.site_names)).any()


@pytest.mark.parametrize("rate", [0.0, 1e-7, 0.1, 0.5, 0.99, 1.0])
def test_attention_drops_probabilities_at_their_rate_and_its_gradients_are_those_of_what_is_left(rate):
    torch.manual_seed(0)
    dropout = torch.nn.Dropout(rate)
    probabilities = torch.rand(3, 4, 37, 37, dtype=torch.float64).requires_grad_()
    v = torch.eye(37, dtype=torch.float64).expand(3, 4, 37, 37)
    left = weighted(dropout, probabilities, v)  # what is left of the probabilities, scaled
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
        assert not torch.equal(kept, weighted(dropout, probabilities, v) != 0)
    torch.manual_seed(0)
    torch.rand(3, 4, 37, 37, dtype=torch.float64)
    assert torch.equal(weighted(dropout, probabilities, v), left)
    assert torch.equal(weighted(dropout.eval(), probabilities, v), probabilities)
