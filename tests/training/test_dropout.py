"""Dropout of attention probabilities on a CPU: its rate, its gradients, and that teachers learn with it."""

import pytest
import torch

from adtp_export.training.dropout import LEVELS, weighted


@pytest.mark.parametrize("rate", [0.0, 1e-7, 0.1, 0.5, 0.99, 1.0])
def test_attention_drops_probabilities_at_their_rate_and_its_gradients_are_those_of_what_is_left(rate):
    torch.manual_seed(0)
    probabilities = torch.rand(3, 4, 37, 37, dtype=torch.float64).requires_grad_()
    v = torch.eye(37, dtype=torch.float64).expand(3, 4, 37, 37)
    left = weighted(probabilities, v, rate)  # what is left of the probabilities, scaled
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
        assert not torch.equal(kept, weighted(probabilities, v, rate) != 0)
    torch.manual_seed(0)
    torch.rand(3, 4, 37, 37, dtype=torch.float64)
    assert torch.equal(weighted(probabilities, v, rate), left)
    assert torch.equal(weighted(probabilities, v, 0.0), probabilities)
