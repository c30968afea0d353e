"""The AD-TP retainer: which tokens a site keeps. The decision lives here, the cut does not.

A decision is scores and a count per sequence. Any pruning system that can say "keep the `count` best by
`score`" plugs in by returning the same pair; selection, packing and new `cu_seqlens` stay as they are.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .config import PERMILLE, AdtpBertConfig, ratios_in_permille


class Retainer(nn.Module):
    """Ratio predictor (ARP) and saliency predictor (TSP) of one prune site.

    Source: AD-TP, NeurIPS 2025: the ARP reads the [CLS] state, the TSP scores tokens. Rounding and [CLS]
    protection, which the paper leaves open, follow checkpoint format 1 (`docs/design.md`).
    """

    def __init__(self, config: AdtpBertConfig) -> None:
        super().__init__()
        hidden, saliency = config.hidden_size, config.saliency_hidden_size
        self.ratio_predictor = nn.Linear(hidden, len(config.retention_ratios))
        self.saliency_predictor = nn.Sequential(nn.Linear(hidden, saliency), nn.ReLU(), nn.Linear(saliency, 1))
        self.min_tokens = config.min_tokens
        self.permille = ratios_in_permille(config.retention_ratios)

    def ratio_logits(self, first: Tensor) -> Tensor:
        """Score the candidate ratios: ``(B, H)`` [CLS] states to ``(B, C)``."""
        return _in_fp32(self.ratio_predictor, first)

    def count(self, ratio_logits: Tensor, lengths: Tensor) -> Tensor:
        """Tokens to keep, ``(B,) int64``: ``min(n, max(min_tokens, ceil(n * q / 1000)))``, in integers throughout.

        Args:
            ratio_logits: ``(B, C)``; the lowest index wins a tie.
            lengths: ``(B,) int64``, live tokens n.
        """
        permille = torch.tensor(self.permille, device=lengths.device)
        return tokens_to_keep(lengths, permille.index_select(0, ratio_logits.argmax(1)), self.min_tokens)

    def saliency(self, x: Tensor) -> Tensor:
        """Score tokens: ``(..., H)`` to ``(...)``. [CLS] stays whatever its score: the cut sees to that."""
        return _in_fp32(self.saliency_predictor, x).squeeze(-1)


def tokens_to_keep(lengths: Tensor, permille: Tensor | int, min_tokens: int) -> Tensor:
    """``min(n, max(min_tokens, ceil(n * q / 1000)))`` in integers, for ``lengths (B,) int64`` and ratios q in permille.

    Source: checkpoint format 1, "exact semantics of a cut".
    """
    rounded_up = (lengths * permille + (PERMILLE - 1)) // PERMILLE
    return torch.minimum(lengths, rounded_up.clamp(min=min_tokens))


def _in_fp32(module: nn.Module, x: Tensor) -> Tensor:
    """Run a predictor in fp32 at least, whatever the precision of the rest: a flipped decision changes behaviour."""
    if x.dtype not in (torch.float16, torch.bfloat16):
        return module(x)
    weights = {name: weight.float() for name, weight in module.named_parameters()}
    return torch.func.functional_call(module, weights, (x.float(),))
