"""Masks while distilling: a text that the student gets wrong and its teacher right is learned again without some of its tokens.

Source: Guo et al., Learning to Focus (LeaF, NeurIPS 2025), which masks confounding tokens: those of the lowest gradient difference.
Here the teacher's answer to the whole text, which is right, is the target with and without a mask, and no mask is tried out first.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from ...contract import ATTENTION_MASK
from ...errors import InputError
from ...model.selection import competing, ranks
from ..attribution import supervision
from ..data import Examples
from ..settings import GRADIENT_DIFFERENCE, MASK_NONE, MASK_RANDOM
from .base import Method

ENDS = 2
"""Tokens of a text that no mask removes: the first, and the last, which causal models answer from."""


def with_masks(
    method: Method, loss: Tensor, batch: Mapping[str, Tensor], answer: Tensor, teacher_logits: Tensor
) -> Tensor:
    """Add the loss of masked texts to that of a batch: of the texts that the student answers wrongly and its teacher rightly.

    Args:
        loss: of the whole texts.
        batch: inputs ``(B, S)``, right-padded, and `labels` ``(B,)``; the teacher's `attribution` ``(B, S)``, if ``--mask`` or the
            method asks for it.
        answer, teacher_logits: ``(B, C)``, to the whole texts.

    Returns:
        The loss, in which each masked text counts as one more row of the batch, times ``--mask-weight``.
    """
    if method.settings.mask == MASK_NONE or not method.training:
        return loss
    labels, lengths = batch["labels"], batch[ATTENTION_MASK].sum(1)
    differs = (answer.argmax(1) != labels) & (teacher_logits.argmax(1) == labels)
    chosen = (differs & (lengths > ENDS)).nonzero()[:, 0]
    if not len(chosen):
        return loss
    part = {name: values[chosen] for name, values in batch.items()}
    logits = teacher_logits[chosen]
    if method.settings.mask == MASK_RANDOM:
        worth = torch.rand(part[ATTENTION_MASK].shape, device=logits.device)
    else:
        worth = _worth(method, part, logits)
    left = without_lowest(part, worth, method.settings.mask_share)
    terms = method.task_terms(method.through_cuts(left)[0], left, logits)
    method.masked += len(chosen)
    return loss + method.settings.mask_weight * len(chosen) / len(labels) * method.weighted(terms)


def _worth(method: Method, batch: Mapping[str, Tensor], teacher_logits: Tensor) -> Tensor:
    """Return what tokens ``(B, S)`` are worth by ``--attribution``: the teacher's alone, or less the student's."""
    kind, attribution = method.settings.attribution, batch["attribution"]
    if kind != GRADIENT_DIFFERENCE:
        return attribution
    own = method.own_attribution(batch, teacher_logits)
    return supervision(kind, attribution, own, batch[ATTENTION_MASK].bool(), 0.0)


def without_lowest(batch: Mapping[str, Tensor], worth: Tensor, share: float) -> dict[str, Tensor]:
    """Remove `share` of the tokens of each text, at least one: those of the lowest `worth` ``(B, S)``. First and last stay.

    Args:
        batch: as `with_masks` has it; every text has more than two tokens.

    Returns:
        the same batch with the tokens that are left, right-padded.
    """
    live = batch[ATTENTION_MASK].bool()
    among = competing(live, live.sum(1) - 1)
    count = (share * among.sum(1)).round().clamp(min=1)
    stays = live & ~(among & (ranks(-worth, among) < count[:, None]))
    width = int(stays.sum(1).max())
    order = (~stays).long().argsort(dim=1, stable=True)[:, :width]
    mask = stays.long().gather(1, order)
    shaped = {name: values for name, values in batch.items() if values.shape == live.shape}
    return {**batch, **{name: values.gather(1, order) * mask for name, values in shaped.items()}, ATTENTION_MASK: mask}


def check_teacher(examples: Examples, mask: str) -> None:
    """See that a teacher answers at least one training row rightly.

    Raises:
        InputError: it answers none rightly, so no text would ever be masked.
    """
    assert examples.teacher_logits is not None
    answers = torch.stack(list(examples.teacher_logits)).argmax(1)
    if not (answers == torch.tensor(list(examples.labels))).any():
        raise InputError(
            f"--mask {mask}: the teacher answers none of the {len(examples)} training rows rightly; accepted is one that answers some. "
            "See that its classes are those of the data, or train it longer"
        )
