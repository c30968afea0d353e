"""The two stages: a teacher is fine-tuned and explained, and a student is distilled from it."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedModel, set_seed

from ..model.pruners.adtp import ratios_in_permille
from .checkpoints import reason
from .data import Examples
from .distillation import Distillation
from .evaluate import explain, judge, judge_teacher
from .losses import Ratios, share_for_retention
from .models import load_teacher, make_student
from .settings import INTEGRATED_GRADIENTS, Settings
from .task import Task
from .trainer import Audience, Stage, run_stage

SHARE_ROWS = 2000
SLACK = 1.05


def train_teacher(task: Task, work: Path, audience: Audience) -> PreTrainedModel:
    """Fine-tune the base of a task; checkpoints go into `work`."""
    settings = task.settings
    set_seed(settings.seed)
    objective = task.objective
    model = load_teacher(task.source, objective, task.labels, tuned=False)

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
    run_stage(stage, settings, audience)
    return model.eval()


def explained(teacher: PreTrainedModel, examples: Examples, task: Task, cache: Path, audience: Audience) -> Examples:
    """Add the teacher's answers and attribution to `examples`, computed once and kept in `cache`.

    They depend on the teacher alone, so reading them is faster than computing them from the second epoch on, and from the
    first epoch on in the next run with the same teacher.
    """
    settings, objective = task.settings, task.objective
    size = next(teacher.get_input_embeddings().parameters()).shape[1]
    dimensions = max(1, round(settings.teacher_dimensions * size))
    key = hashlib.sha256(f"{settings.ig_steps} {dimensions}".encode())
    if settings.attribution != INTEGRATED_GRADIENTS:
        key.update(settings.attribution.encode())
    key.update(str(getattr(teacher.config, "embedding", "")).encode())  # how vectors are made of states is in no weight
    _hash_tensors(key, *teacher.state_dict().values())
    for row in examples.encoded:
        key.update(str(row.input_ids).encode() + str(row.token_type_ids).encode())
    key.update(objective.explained_labels(examples))
    path = cache / f"{key.hexdigest()[:32]}.safetensors"
    if path.is_file():
        try:
            answers, attribution = _read_view(path, examples.lengths)
        except Exception as error:  # safetensors, JSON and shapes: many types
            audience.note(f"{path.name} in {cache.name} is damaged ({reason(error)}) and is computed anew")
        else:
            return examples.with_teacher(answers, attribution)
    steps, kind = settings.ig_steps, settings.attribution
    answers, rows = explain(teacher, examples, objective, steps, dimensions, kind, audience.progress)
    whole = torch.stack(answers) if answers[0].dim() == 1 else torch.cat(answers)
    view = {"logits": whole, "attribution": torch.cat(rows)}
    cache.mkdir(parents=True, exist_ok=True)
    save_file(view, path.with_suffix(".partial"), {"sha256": _hash_tensors(hashlib.sha256(), *view.values())})
    path.with_suffix(".partial").replace(path)
    return examples.with_teacher(answers, rows)


def _read_view(path: Path, lengths: list[int]) -> tuple[list[Tensor], list[Tensor]]:
    """Return answers and attribution of rows of these lengths; a file of an earlier version has no hash."""
    with safe_open(path, "pt") as stored:
        logits, attribution = stored.get_tensor("logits"), stored.get_tensor("attribution")
        known = (stored.metadata() or {}).get("sha256")
    if known not in (None, _hash_tensors(hashlib.sha256(), logits, attribution)):
        raise ValueError("it has changed since it was written")
    fits = logits.dim() == 2 and len(logits) in (len(lengths), sum(lengths))
    if not fits or attribution.shape != (sum(lengths),):
        raise ValueError(f"it holds logits {tuple(logits.shape)} and attribution {tuple(attribution.shape)}")
    single = len(logits) == len(lengths)
    return list(logits) if single else list(logits.split(lengths)), list(attribution.split(lengths))


def _hash_tensors(digest: Any, *tensors: Tensor) -> str:
    for tensor in tensors:
        digest.update(tensor.cpu().contiguous().numpy().tobytes())
    return str(digest.hexdigest())


def train_student(teacher: PreTrainedModel, task: Task, work: Path, audience: Audience) -> Distillation:
    """Distil a student from rows that hold the teacher's view (`explained`); checkpoints go into `work`."""
    settings = task.settings
    student = make_student(teacher, settings, task.objective.head)
    model = Distillation(student, settings, first_shares(task.parts["train"], settings))

    def judged() -> dict[str, float]:
        judgement = judge(model, task.parts["dev"])
        alive = [int(count.sum()) for count in judgement.alive]
        kept = [after / before for before, after in zip(alive, alive[1:])]
        model.meet_on_dev(kept)
        # Keeping more than was asked for is an easy way to be right, and no way to be the best checkpoint.
        excess = max((share / wanted - SLACK for share, wanted in zip(kept, settings.wanted)), default=0.0)
        told = {f"kept_{site}": share for site, share in zip(settings.sites, kept)}
        return {**judgement.quality, **told, "score": task.objective.main_score(judgement.quality) - max(0.0, excess)}

    stage = Stage(
        model=model,
        examples=task.parts["train"],
        judged=judged,
        epochs=settings.epochs,
        rate=settings.learning_rate,
        work=work,
        rates=dict.fromkeys(student.pruners.parameters(), settings.retainer_learning_rate),
    )
    run_stage(stage, settings, audience)
    return model.eval()


def first_shares(train: Examples, settings: Settings) -> list[float]:
    """Per site, the share of the teacher's attribution at which the wanted retention is met, as if each were the first."""
    assert train.attribution is not None
    rows = train.attribution[:: max(1, len(train) // SHARE_ROWS)]
    attribution = nn.utils.rnn.pad_sequence(list(rows), batch_first=True)
    competing = torch.arange(attribution.shape[1]) < torch.tensor([len(row) for row in rows])[:, None]
    competing[:, 0] = False
    shares = []
    for wanted in settings.wanted:
        candidates = settings.candidates if settings.ratio == "adaptive" else sorted({round(wanted, 3), 1.0})
        ratios = Ratios(ratios_in_permille(candidates), settings.min_tokens)
        shares.append(share_for_retention(attribution, competing, ratios, wanted))
    return shares
