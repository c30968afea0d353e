"""Integrated gradients: how much each token of a text contributed to the model's answer."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn


def answer_score(logits: Tensor, classes: Tensor) -> Tensor:
    """Return F, ``(B,)``: the scalar whose gradients are integrated.

    Classification: log odds of the class against all others together, which for two classes is the margin of their logits
    and, unlike the probability, does not saturate. Regression: the output itself.

    Args:
        logits: ``(B, C)``; C = 1 is regression.
        classes: ``(B,) int64``, the class that is explained; ignored in regression.
    """
    if logits.shape[1] == 1:
        return logits[:, 0]
    chosen = nn.functional.one_hot(classes, logits.shape[1]).bool()
    return logits[chosen] - logits.masked_fill(chosen, -torch.inf).logsumexp(1)


def integrated_gradients(
    forward: Callable[[], Tensor],
    embeddings: nn.Module,
    steps: int,
    score: Callable[[Tensor, Tensor], Tensor],
    keep_graph: bool = False,
    create_graph: bool = False,
    times_input: bool = True,
) -> tuple[Tensor, Tensor]:
    """Attribute a model's answers to its word embeddings E, against a baseline of zeros.

    ``IG = E * (1/m) * sum over k of dF(k/m E)/dE``, k = 1..m. With m = 1 that is gradient times input at the point itself.

    Args:
        forward: runs the model and returns its answer, ``(B, ...)``; first with the embeddings as they are, then m - 1 times with
            smaller ones.
        embeddings: the module whose output, ``(..., H)``, is attributed.
        steps: m, at least 1.
        score: gives F, ``(B,)``, of an answer and of the answer to the whole input.
        keep_graph: a loss on the answer will be differentiated.
        create_graph: a loss on the attribution will be, too; implies `keep_graph`.
        times_input: multiply by E; else the mean gradient is returned.

    Returns:
        the answer at the point itself, and IG ``(..., H)``.

    Source: Sundararajan et al. 2017, eq. 3; AD-TP, NeurIPS 2025, for its use on embeddings and m = 1.
    """
    keep_graph |= create_graph
    factor = 1.0
    seen: list[Tensor] = []

    def replace(module: nn.Module, arguments: tuple, output: Tensor) -> Tensor:
        scaled = output if keep_graph else output.detach().requires_grad_()
        seen.append(scaled if factor == 1.0 else scaled * factor)
        return seen[-1]

    handle = embeddings.register_forward_hook(replace)
    try:
        with torch.enable_grad():
            whole = answer = forward()
            total = torch.zeros_like(seen[0])
            for k in range(steps, 0, -1):
                if k < steps:
                    factor = k / steps
                    answer = forward()
                value = score(answer, whole).sum()
                total = (
                    total + torch.autograd.grad(value, seen[-1], retain_graph=keep_graph, create_graph=create_graph)[0]
                )
    finally:
        handle.remove()
    attribution = seen[0] * total / steps if times_input else total / steps
    return whole, attribution if create_graph else attribution.detach()


def token_attribution(attribution: Tensor, live: Tensor, dimensions: int | None = None) -> Tensor:
    """Reduce IG ``(B, S, H)`` to tokens ``(B, S)``: L2 norm over dimensions, then over the sequence ("dual normalisation").

    Args:
        live: ``(B, S) bool``; the rest becomes 0.
        dimensions: keep only this many dimensions of largest absolute value per token; the others are taken for noise.

    Returns:
        Non-negative rows of Euclidean length 1 (0 where nothing contributed).

    Source: AD-TP, NeurIPS 2025; top-K dimensions of the teacher as in AD-KD, ACL 2023, section 3.
    """
    if dimensions is not None and dimensions < attribution.shape[-1]:
        attribution = attribution.abs().topk(dimensions, dim=-1).values
    return unit(attribution.square().sum(-1).clamp(min=1e-24).sqrt() * live)


def unit(rows: Tensor) -> Tensor:
    """Scale each row to Euclidean length 1; rows of zeros stay."""
    return rows / rows.square().sum(1, keepdim=True).clamp(min=1e-24).sqrt()
