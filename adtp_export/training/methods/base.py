"""What all methods have: a student, its objective, the terms against labels and teacher, and answers through true cuts."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from ...contract import ATTENTION_MASK, INPUT_IDS, TOKEN_TYPE_IDS
from ...explain.gradients import integrated_gradients
from ...model.encoder import PrunedEncoder
from ...model.packed import Cut, PackedStudent
from ...model.sequences import pack, restore
from ..attribution import of_tokens
from ..data import Examples
from ..differentiable import DifferentiableAttention
from ..judgement import Judgement
from ..objectives import for_head
from ..settings import GRADIENT_DIFFERENCE, MASK_NONE, TrainOptions

SLACK = 1.05
"""Keeping more than was asked for is an easy way to be right, and no way to be the best checkpoint."""


class Observed(NamedTuple):
    """What the first site of a student saw of a batch, ``(B, S)`` each: its scores, the tokens that competed, and the student's own
    attribution."""

    saliency: Tensor
    candidates: Tensor
    attribution: Tensor


class Method(nn.Module, ABC):
    """A student with the loss of its method; what Trainer trains and saves.

    Its forward takes the teacher's answers, a right-padded batch of inputs ``(B, S)``, and labels as the objective collates them. It
    returns ``loss``, and each term before its weight.

    Args:
        student: its weights are trained in place.
        settings: of the run.
    """

    cut: ClassVar[type[Cut]] = Cut
    final_from: ClassVar[float] = 0.0
    """Share of the steps after which evaluations say whether more training helps."""

    @staticmethod
    @abstractmethod
    def pruning(settings: TrainOptions) -> dict[str, Any]:
        """The field `pruning` of a student that is to be trained, without its sites."""

    def __init__(self, student: PrunedEncoder, settings: TrainOptions) -> None:
        super().__init__()
        self.student, self.settings = student, settings
        self.objective = for_head(student.config.head)
        self.weights = dict(settings.weights)
        if not self.objective.labelled:
            labels = self.weights.pop("ce")
            self.weights["logit"] += 0.0 if "logit" in settings.left_out else labels
        self.alone = "teacher" in settings.left_out
        self.judged: Judgement | None = None  # on dev, with these weights; None: not known
        self.masked: Tensor
        if settings.mask != MASK_NONE:  # other checkpoints have no such entry
            self.register_buffer("masked", torch.zeros((), dtype=torch.int64))
        self.progress = 0.0  # of training, 0 to 1; the loop sets it before each step
        # The packed view shares the student's modules; in a tuple it is no submodule, so nothing is saved twice.
        self._packed = (self.objective.prepare(PackedStudent(student, DifferentiableAttention, self.cut)),)

    @classmethod
    def of(cls, student: PrunedEncoder, settings: TrainOptions, parts: Mapping[str, Examples]) -> Method:
        """Make one for the settings and the rows of a task, by split."""
        return cls(student, settings)

    @property
    def leaves_weights_out(self) -> bool:
        """Whether the loss reaches not all weights: a term is left out, or a pooler is there that vectors have no use for."""
        return 0 in self.weights.values() or not self.objective.labelled

    def rates(self) -> dict[nn.Parameter, float]:
        """Peak rates of parameters that do not have the encoder's."""
        return dict.fromkeys(self.student.pruners.parameters(), self.settings.retainer_learning_rate)

    def prepare(self, examples: Examples) -> None:
        """Make the student what is to be judged on these rows."""

    def meet(self, judgement: Judgement) -> tuple[dict[str, float], float]:
        """Take note of what the student kept of the dev rows; return what is told of it, and how far it is above what was asked for."""
        sites, kept = self.student.site_names, judgement.kept
        excess = max(
            (share / wanted - SLACK for share, wanted in zip(kept, self.settings.target_retention)), default=0.0
        )
        return {f"kept_{site}": share for site, share in zip(sites, kept)}, max(0.0, excess)

    def finish(self) -> None:
        """Make the student what is to be written, once it is trained."""

    def record(self) -> dict[str, Any]:
        """What `results.json` says of the student beside what it says of all."""
        return {} if self.settings.mask == MASK_NONE else {"masked_texts": int(self.masked)}

    def through_cuts(self, batch: Mapping[str, Tensor]) -> tuple[Tensor, list[Tensor]]:
        """Return the answer of the student as it is exported, with gradients, and the tokens ``(B,)`` before and after each site."""
        mask = batch[ATTENTION_MASK]
        outputs, kept = self._packed[0](batch[INPUT_IDS], mask, batch.get(TOKEN_TYPE_IDS))
        text = kept[0] // mask.shape[1]
        alive = [torch.bincount(text, minlength=len(mask))]
        for rows in kept[1:]:
            text = text.index_select(0, rows)
            alive.append(torch.bincount(text, minlength=len(mask)))
        return self.objective.answer(outputs), alive

    def chosen_ratios(self) -> dict[str, Tensor]:
        """Return the ratios ``(B,) float64``, on the CPU, that were chosen in the last pass, by site; none where pruners choose none."""
        return {}

    def observe(self, batch: Mapping[str, Tensor]) -> tuple[Tensor, list[Tensor], Observed | None]:
        """Return what `through_cuts` does, without gradients, and what the first site saw; None where the method has no attribution."""
        with torch.no_grad():
            return *self.through_cuts(batch), None

    def own_attribution(self, batch: Mapping[str, Tensor], explained: Tensor) -> Tensor:
        """Return the student's attribution ``(B, S)`` of the answer `explained`; of a student that drops no tokens."""
        kind, mask = self.settings.attribution, batch[ATTENTION_MASK]
        gradients = integrated_gradients(
            lambda: self.through_cuts(batch)[0],
            self.student.get_input_embeddings(),
            self.settings.ig_steps,
            lambda answer, whole: self.objective.score(answer, explained, batch),
            times_input=kind != GRADIENT_DIFFERENCE,
        )[1]
        origin = pack(mask.sum(1), mask.shape[1])[1]
        return of_tokens(kind, restore(gradients, origin, mask.shape), mask.bool())

    def task_terms(self, answer: Tensor, batch: Mapping[str, Tensor], teacher_logits: Tensor) -> dict[str, Tensor]:
        """Return the losses against the labels, where there are any, and against the teacher's answers."""
        terms = {}
        if (against_labels := self.objective.label_loss(answer, batch)) is not None:
            terms["ce"] = against_labels
        terms["logit"] = self.objective.logit_loss(answer, teacher_logits, batch, self.settings.temperature)
        return terms

    def weighted(self, terms: Mapping[str, Tensor]) -> Tensor:
        """Add terms up, by their weights."""
        return torch.stack([self.weights[n] * value for n, value in terms.items() if self.weights[n] > 0]).sum()
