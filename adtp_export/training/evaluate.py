"""Judge a model on labelled rows: how right it is, what it keeps, and how well saliency follows attribution."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Sequence
from typing import cast

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..contract import ATTENTION_MASK
from ..errors import InputError
from ..explain.gradients import integrated_gradients
from ..inference.answers.sequence import spearman
from ..model import registry
from .attribution import of_tokens, supervision
from .data import Examples, Labels, joined, split, to_device
from .judgement import Judgement
from .losses import saliency_target
from .methods.base import Method, Observed
from .methods.gated import last_received
from .objectives import Objective
from .settings import GRADIENT_DIFFERENCE, INTEGRATED_GRADIENTS

MIN_CANDIDATES = 4
"""Shorter texts say nothing about an order of tokens."""


def judge_teacher(model: nn.Module, examples: Examples, objective: Objective) -> dict[str, float]:
    """Score a teacher."""
    answers, _ = ask(model, examples, objective)
    return objective.quality(answers, examples)


def explain(
    model: PreTrainedModel,
    examples: Examples,
    objective: Objective,
    steps: int,
    dimensions: int | None,
    kind: str = INTEGRATED_GRADIENTS,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> tuple[list[Tensor], list[Tensor]]:
    """Ask a teacher, best one whose parameters need no gradient, for its answers and the attribution of tokens.

    Args:
        kind: of attribution.

    Returns:
        Per row its answer, and attribution ``(n,)`` as `attribution.of_tokens` has it.
    """
    model.eval()
    device = next(model.parameters()).device
    answers: list[Tensor] = [torch.empty(0)] * len(examples)
    attribution: list[Tensor] = [torch.empty(0)] * len(examples)
    done = 0
    for numbers, batch in examples.batches():
        moved = {name: values.to(device) for name, values in batch.items()}
        run = functools.partial(objective.ask, model, to_device(batch, device))
        score = functools.partial(objective.score, batch=moved)
        times_input = kind != GRADIENT_DIFFERENCE
        answer, gradients = integrated_gradients(
            run, model.get_input_embeddings(), steps, score, times_input=times_input
        )
        tokens = of_tokens(kind, gradients, moved[ATTENTION_MASK].bool(), dimensions).cpu()
        lengths = batch[ATTENTION_MASK].sum(1)
        for i, row, own, length in zip(numbers, tokens, split(answer.detach().cpu(), lengths), lengths.tolist()):
            attribution[i], answers[i] = row[:length].clone(), own
        done += len(numbers)
        progress(done, len(examples))
    return answers, attribution


def check_order(
    answers: Sequence[Tensor], examples: Examples, objective: Objective, labels: Labels, source: str
) -> None:
    """See that a teacher's classes are those of the data, in the same order: a model may have no names for them.

    Args:
        answers: the teacher's, of all `examples`. source: names the teacher.

    Raises:
        InputError: its answers are right in another order.
    """
    order = objective.classes_in_another_order(answers, examples, labels.names)
    if order is not None:
        raise InputError(
            f"{source}: the teacher's classes are not in the order of the data's, {', '.join(labels.names)}. By its answers they are "
            f'{", ".join(order.values())}; write that into its config.json: "id2label": {json.dumps(order)}'
        )


@torch.no_grad()
def ask(
    model: nn.Module,
    examples: Examples,
    objective: Objective,
    received: bool = False,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> tuple[list[Tensor], list[Tensor] | None]:
    """Ask a teacher for its answers, and what attention each token received in its last layer where that is wanted.

    Returns:
        Per row its answer, and attention ``(n,)``, summed over heads and queries.
    """
    model.eval()
    device = next(model.parameters()).device
    answers: list[Tensor] = [torch.empty(0)] * len(examples)
    tokens: list[Tensor] = [torch.empty(0)] * len(examples)
    done = 0
    for numbers, batch in examples.batches():
        inputs = to_device(batch, device)
        lengths = batch[ATTENTION_MASK].sum(1)
        for i, own in zip(numbers, split(objective.ask(model, inputs).float().cpu(), lengths)):
            answers[i] = own.clone()
        if received:
            encoder = cast(PreTrainedModel, getattr(model, "dense", model))
            attended = last_received(registry.backbone(encoder.config.model_type)(encoder), inputs).cpu()
            for i, row, length in zip(numbers, attended, lengths.tolist()):
                tokens[i] = row[:length].clone()
        done += len(numbers)
        progress(done, len(examples))
    return answers, tokens if received else None


def judge(model: Method, examples: Examples, explained: bool = False) -> Judgement:
    """Run a student on texts.

    Args:
        explained: where the method has both, compare saliency with attribution, too: the teacher's (which `examples` must hold), the
            student's own, and the two joined as at the end of training. Costs a backward pass.
    """
    model.eval()
    device = next(model.parameters()).device
    answers: list[Tensor] = []
    numbers: list[int] = []
    alive: list[np.ndarray] = []
    chosen: dict[str, list[np.ndarray]] = {}
    observed: list[tuple[Observed, Tensor]] = []
    for rows, batch in examples.batches():
        inputs = {name: values.to(device) for name, values in batch.items()}
        if explained:
            answer, counts, seen = model.observe(inputs)
            if seen is not None:
                observed.append((Observed(*(values.cpu() for values in seen)), batch["attribution"]))
        else:
            with torch.no_grad():
                answer, counts = model.through_cuts(inputs)
        answers += split(answer.detach().float().cpu(), batch[ATTENTION_MASK].sum(1))
        numbers += rows
        alive.append(np.stack([count.cpu().numpy() for count in counts]))
        for site, ratios in model.chosen_ratios().items():
            chosen.setdefault(site, []).append(ratios.numpy())
    kappa = 1.0 if model.alone else model.settings.kappa
    together = functools.partial(supervision, model.settings.attribution, kappa=kappa)
    ranks = _ranks(observed, together) if observed else {}
    order = np.argsort(numbers)
    in_order = [answers[i] for i in order]
    return Judgement(
        quality=model.objective.quality(in_order, examples),
        answers=in_order,
        alive=list(np.concatenate(alive, 1)[:, order]),
        chosen={site: np.concatenate(ratios)[order] for site, ratios in chosen.items()},
        ranks=ranks,
    )


@torch.no_grad()
def loss_against_teacher(
    answers: Sequence[Tensor], examples: Examples, objective: Objective, temperature: float
) -> float:
    """Return L_logit of answers to rows that hold the teacher's, mean over the rows.

    It tells checkpoints apart that are right equally often: it moves with each row, and accuracy only with those that change sides.
    """
    total = 0.0
    for numbers, batch in examples.batches():
        answer = joined([answers[i] for i in numbers])
        total += len(numbers) * objective.logit_loss(answer, batch["teacher_logits"], batch, temperature).item()
    return total / len(examples)


def _ranks(
    observed: list[tuple[Observed, Tensor]], together: Callable[..., Tensor]
) -> dict[str, dict[str, float | None]]:
    """Correlate saliency with attribution: batches of what was observed, and the teacher's attribution ``(B, S)``."""
    within: dict[str, list[float]] = {"teacher": [], "student": [], "joint": []}
    pooled: dict[str, list[np.ndarray]] = {name: [] for name in ("saliency", *within)}
    for (saliency, candidates, own), teacher in observed:
        views = {"teacher": teacher, "student": own, "joint": together(teacher, own, candidates)}
        targets = {name: saliency_target(view, candidates) for name, view in views.items()}
        pooled["saliency"].append(saliency[candidates].numpy())
        for name, view in views.items():
            pooled[name].append(targets[name][candidates].numpy())
            for row, chosen in enumerate(candidates):
                if chosen.sum() >= MIN_CANDIDATES:
                    within[name].append(spearman(*(t[row][chosen].numpy() for t in (saliency, view))))
    whole = {name: np.concatenate(values) for name, values in pooled.items()}
    said = whole["saliency"]
    return {
        name: {
            "spearman": float(np.mean(within[name])) if within[name] else None,
            "spearman_pooled": spearman(said, whole[name]) if said.size else None,
            "mse": float(np.square(said - whole[name]).mean()) if said.size else None,
        }
        for name in within
    }
