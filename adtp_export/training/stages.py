"""The two stages: a teacher is fine-tuned and explained, and a student is distilled from it."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel, set_seed

from ..io import share, written_whole
from .checkpoints import reason
from .data import Examples
from .dropout import quick_dropout
from .evaluate import ask, explain, judge, judge_teacher, loss_against_teacher
from .method_table import ANSWERS, ATTRIBUTION, RECEIVED
from .methods import for_method
from .methods.base import Method
from .methods.masking import check_teacher
from .models import make_student
from .settings import INTEGRATED_GRADIENTS, LOSS_OF_TEACHER, MASK_NONE
from .task import Task
from .trainer import Audience, Stage, run_stage

COST_OF_EXCESS = 10.0
"""A checkpoint that keeps a tenth more than was asked for, beyond the slack, counts as one of twice its loss."""


def train_teacher(task: Task, work: Path, audience: Audience) -> PreTrainedModel:
    """Fine-tune the base of a task; checkpoints go into `work`."""
    settings = task.settings
    set_seed(settings.seed)
    objective = task.objective
    model = task.load_teacher(task.source, tuned=False)

    def judged() -> dict[str, float]:
        figures = judge_teacher(model, task.parts["dev"], objective)
        return {**figures, "score": objective.main_score(figures)}

    stage = Stage(
        model=model,
        examples=task.parts["train"],
        judged=judged,
        epochs=settings.teacher_epochs,
        rate=settings.teacher_learning_rate,
        work=work,
    )
    with quick_dropout(model):
        run_stage(stage, settings, audience)
    return model.eval()


def explained(
    teacher: PreTrainedModel,
    examples: Examples,
    task: Task,
    cache: Path,
    audience: Audience,
    view: str | None = None,
) -> Examples:
    """Add the teacher's answers, and what it says of tokens where the method asks that, computed once and kept in `cache`.

    They depend on the teacher alone, so reading them is faster than computing them from the second epoch on, and from the
    first epoch on in the next run with the same teacher.

    Args:
        view: `ANSWERS` leaves tokens out, which rows for the choice of a checkpoint do not need.
    """
    settings, objective, view = task.settings, task.objective, view or task.settings.view
    size = next(teacher.get_input_embeddings().parameters()).shape[1]
    dimensions = max(1, round(settings.teacher_dimensions * size))
    key = hashlib.sha256((f"{settings.ig_steps} {dimensions}" if view == ATTRIBUTION else view).encode())
    if view == ATTRIBUTION and settings.attribution != INTEGRATED_GRADIENTS:
        key.update(settings.attribution.encode())
    key.update(str(getattr(teacher.config, "embedding", "")).encode())  # how vectors are made of states is in no weight
    _hash_tensors(key, *teacher.state_dict().values())
    for row in examples.encoded:
        key.update(str(row.input_ids).encode() + str(row.token_type_ids).encode())
    key.update(objective.explained_labels(examples))
    path = cache / f"{key.hexdigest()[:32]}.safetensors"
    if path.is_file():
        try:
            answers, rows = _read_view(path, examples.lengths, view != ANSWERS)
        except Exception as error:  # safetensors, JSON and shapes: many types
            audience.note(f"{path.name} in {cache.name} is damaged ({reason(error)}) and is computed anew")
        else:
            return examples.with_teacher(answers, rows)
    if view == ATTRIBUTION:
        steps, kind = settings.ig_steps, settings.attribution
        answers, rows = explain(teacher, examples, objective, steps, dimensions, kind, audience.progress)
    else:
        answers, rows = ask(teacher, examples, objective, view == RECEIVED, audience.progress)
    whole = torch.stack(answers) if answers[0].dim() == 1 else torch.cat(answers)
    kept = {"logits": whole} | ({} if rows is None else {"attribution": torch.cat(rows)})
    cache.mkdir(parents=True, exist_ok=True)
    with written_whole(path) as partial:  # of a name of its own: another run may compute the same at the same time
        save_file(kept, partial, {"sha256": _hash_tensors(hashlib.sha256(), *kept.values())})
        share(partial)
    return examples.with_teacher(answers, rows)


def _read_view(path: Path, lengths: list[int], tokens: bool) -> tuple[list[Tensor], list[Tensor] | None]:
    """Return answers to rows of these lengths, and what is said of their tokens; a file of an earlier version has no hash."""
    with safe_open(path, "pt") as stored:
        views = [stored.get_tensor(name) for name in ("logits", *(["attribution"] if tokens else []))]
        known = (stored.metadata() or {}).get("sha256")
    if known not in (None, _hash_tensors(hashlib.sha256(), *views)):
        raise ValueError("it has changed since it was written")
    logits = views[0]
    fits = logits.dim() == 2 and len(logits) in (len(lengths), sum(lengths))
    if not fits or any(said.shape != (sum(lengths),) for said in views[1:]):
        raise ValueError(f"it holds {' and '.join(str(tuple(view.shape)) for view in views)}")
    answers = list(logits) if len(logits) == len(lengths) else list(logits.split(lengths))
    return answers, list(views[1].split(lengths)) if tokens else None


def _hash_tensors(digest: Any, *tensors: Tensor) -> str:
    for tensor in tensors:
        digest.update(tensor.cpu().contiguous().numpy().tobytes())
    return str(digest.hexdigest())


def train_student(
    teacher: PreTrainedModel, task: Task, work: Path, audience: Audience, start: Mapping[str, Tensor] | None = None
) -> Method:
    """Distil a student from rows that hold the teacher's view (`explained`); checkpoints go into `work`.

    Args:
        start: weights of another student of as many layers to start from, in place of the teacher's.
    """
    settings = task.settings
    if settings.mask != MASK_NONE:
        check_teacher(task.parts["train"], settings.mask)
    student = make_student(teacher, settings, task.objective.head)
    if start is not None:
        student.load_state_dict(start, strict=False)  # one of the two may have a pruner
    model = for_method(settings.method).of(student, settings, task.parts)
    dev, by_loss = task.parts["dev"], settings.best_by == LOSS_OF_TEACHER and not model.alone

    def judged() -> dict[str, float]:
        model.prepare(dev)
        judgement = model.judged = judge(model, dev)
        told, excess = model.meet(judgement)
        if not by_loss:
            return {**judgement.quality, **told, "score": task.objective.main_score(judgement.quality) - excess}
        loss = loss_against_teacher(judgement.answers, dev, task.objective, settings.temperature)
        return {**judgement.quality, **told, "teacher_loss": loss, "score": -loss * (1 + COST_OF_EXCESS * excess)}

    stage = Stage(
        model=model,
        examples=task.parts["train"],
        judged=judged,
        epochs=settings.epochs,
        rate=settings.learning_rate,
        work=work,
        rates=model.rates(),
        best="loss against the teacher" if by_loss else "quality",
        final_from=model.final_from,
    )
    if not run_stage(stage, settings, audience):
        model.judged = None
    model.finish()
    if settings.mask != MASK_NONE and not model.masked:
        audience.note(
            f"--mask {settings.mask} masked no text. Up to the checkpoint that was kept, the student was right wherever its teacher was, "
            "or the text had no token between its first and its last. There was nothing to learn from masks: leave --mask out"
        )
    return model.eval()
