"""Judge a classifier on labelled text: how right it is, what it keeps, and how well saliency follows attribution."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from scipy.stats import rankdata
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..answers.sequence import quality
from ..contract import ATTENTION_MASK
from ..model.flops import Shape, encoder_flops
from .attribution import integrated_gradients, token_attribution, unit
from .data import Examples, to_device
from .distillation import Distillation
from .losses import saliency_target

EVAL_BATCH = 64
NEARLY_ALL = 0.95
"""Share of rows from which on one answer is worth a note."""
LEAST_CANDIDATES = 4
"""Shorter texts say nothing about an order of tokens."""


def main_score(figures: dict[str, float]) -> float:
    """The one figure that a best checkpoint is chosen by."""
    return figures["accuracy"] if "accuracy" in figures else figures["spearman"]


def judge_teacher(model: nn.Module, examples: Examples) -> dict[str, float]:
    """Score a transformers classifier."""
    return quality(*answers_and_labels(model, examples))


@torch.no_grad()
def answers_and_labels(model: nn.Module, examples: Examples) -> tuple[np.ndarray, np.ndarray]:
    """Return a transformers classifier's logits ``(rows, C)``, and the labels ``(rows,)`` in the same order."""
    model.eval()
    device = next(model.parameters()).device
    logits, labels = [], []
    for _, batch in examples.batches(EVAL_BATCH):
        logits.append(model(**to_device(batch, device)).logits.float().cpu().numpy())
        labels.append(batch["labels"].numpy())
    return np.concatenate(logits), np.concatenate(labels)


def one_answer(logits: np.ndarray, labels: np.ndarray, names: Sequence[str]) -> str | None:
    """Say which class a classifier answers for nearly every row, more often than it is true; None where there is none.

    Args:
        logits: ``(rows, C)``. labels: ``(rows,)``, true classes. names: of the C classes; none in regression.
    """
    if not names:
        return None
    answered = logits.argmax(1)
    most = int(np.bincount(answered).argmax())
    share, true = float((answered == most).mean()), float((labels == most).mean())
    if share < NEARLY_ALL or share <= true:
        return None
    return f"{names[most]!r} for {share:.1%} of the rows; {true:.1%} of them have that label"


def explain(
    model: PreTrainedModel,
    examples: Examples,
    steps: int,
    dimensions: int | None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> tuple[Tensor, list[Tensor]]:
    """Ask a transformers classifier, best one whose parameters need no gradient, for its answers and the attribution of tokens.

    Returns:
        logits ``(rows, C)`` and, per row, attribution ``(n,)`` of length 1.
    """
    model.eval()
    device = next(model.parameters()).device
    logits: list[Tensor] = [torch.empty(0)] * len(examples)
    attribution: list[Tensor] = [torch.empty(0)] * len(examples)
    done = 0
    for numbers, batch in examples.batches(EVAL_BATCH):
        inputs = to_device(batch, device)
        run = functools.partial(_answer, model, inputs)
        answer, gradients = integrated_gradients(run, model.get_input_embeddings(), steps)
        tokens = token_attribution(gradients, inputs[ATTENTION_MASK].bool(), dimensions).cpu()
        for i, row, line, length in zip(numbers, tokens, answer.detach().cpu(), batch[ATTENTION_MASK].sum(1).tolist()):
            attribution[i], logits[i] = row[:length].clone(), line
        done += len(numbers)
        progress(done, len(examples))
    return torch.stack(logits), attribution


def _answer(model: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
    logits: Tensor = model(**inputs).logits
    return logits


@dataclass
class Judgement:
    """What a student does on a set of texts.

    quality: as `answers.sequence.quality` gives it. alive: per site boundary ``(rows,)`` tokens, first the whole texts. ranks:
    per supervision ("teacher", "student", "joint") Spearman correlation within each text, mean over texts, and pooled over all
    tokens; mse: of saliency against its target.
    """

    quality: dict[str, float]
    alive: list[np.ndarray]
    ranks: dict[str, dict[str, float | None]]

    @property
    def retention(self) -> list[float]:
        """Per site, tokens left of all tokens of the texts."""
        return [float(kept.sum() / self.alive[0].sum()) for kept in self.alive[1:]]

    def flops_reduction(self, shape: Shape, sites: list[str], padded: int) -> dict[str, float]:
        """FLOPs of the same encoder without cuts, padded to `padded` and packed, over those of the student."""
        whole, student = self.alive[0], encoder_flops(shape, self.alive, sites)
        return {
            "padded": encoder_flops(shape, [np.maximum(whole, padded)]) / student,
            "packed": encoder_flops(shape, [whole]) / student,
        }


def judge(model: Distillation, examples: Examples, explained: bool = False) -> Judgement:
    """Run a student on texts.

    Args:
        explained: compare saliency with attribution, too: the teacher's (which `examples` must hold), the student's own, and
            the two joined as at the end of training. Costs a backward pass.
    """
    model.eval()
    device = next(model.parameters()).device
    logits, labels, alive, observed = [], [], [], []
    for _, batch in examples.batches(EVAL_BATCH):
        inputs = to_device(batch, device)
        trace = model.begin(inputs[ATTENTION_MASK])
        if explained:
            answer, own = model.attribute(inputs, trace, batch["teacher_logits"].to(device).argmax(1), False)
            for first in trace.decisions[:1]:
                saliency = trace.rectangle(first.rule.order.detach(), first.origin).cpu()
                observed.append((saliency, trace.candidates(first).cpu(), own.cpu(), batch["attribution"]))
        else:
            with torch.no_grad():
                answer = model.run(inputs, trace)
        logits.append(answer.detach().float().cpu().numpy())
        labels.append(batch["labels"].numpy())
        counts = [batch[ATTENTION_MASK].sum(1), *(decision.cu_seqlens.diff() for decision in trace.decisions)]
        alive.append(np.stack([count.cpu().numpy() for count in counts]))
    kappa = 1.0 if model.alone else model.settings.kappa
    ranks = _ranks(observed, kappa) if observed else {}
    return Judgement(quality(np.concatenate(logits), np.concatenate(labels)), list(np.concatenate(alive, 1)), ranks)


def _ranks(observed: list[tuple[Tensor, Tensor, Tensor, Tensor]], kappa: float) -> dict[str, dict[str, float | None]]:
    """Correlate saliency with attribution: batches of saliency, candidates, the student's and the teacher's ``(B, S)``."""
    within: dict[str, list[float]] = {"teacher": [], "student": [], "joint": []}
    pooled: dict[str, list[np.ndarray]] = {name: [] for name in ("saliency", *within)}
    for saliency, candidates, own, teacher in observed:
        views = {"teacher": teacher, "student": own, "joint": unit((1 - kappa) * teacher + kappa * own)}
        targets = {name: saliency_target(view, candidates) for name, view in views.items()}
        pooled["saliency"].append(saliency[candidates].numpy())
        for name, view in views.items():
            pooled[name].append(targets[name][candidates].numpy())
            for row, chosen in enumerate(candidates):
                if chosen.sum() >= LEAST_CANDIDATES:
                    pair = (rankdata(t[row][chosen].numpy()) for t in (saliency, view))
                    within[name].append(_correlation(*pair))
    whole = {name: np.concatenate(values) for name, values in pooled.items()}
    said = whole["saliency"]
    return {
        name: {
            "spearman": float(np.mean(within[name])) if within[name] else None,
            "spearman_pooled": _correlation(rankdata(said), rankdata(whole[name])) if said.size else None,
            "mse": float(np.square(said - whole[name]).mean()) if said.size else None,
        }
        for name in within
    }


def _correlation(a: np.ndarray, b: np.ndarray) -> float:
    a, b = a - a.mean(), b - b.mean()
    return float((a * b).sum() / max(np.sqrt((a**2).sum() * (b**2).sum()), 1e-12))
