"""`train`: a pretrained encoder and labelled text become a student that `adtp-export` takes."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...artifacts.directory import alone_in, remove, writing
from ...contract import HEAD_EMBEDDING
from ...environment import processor, versions
from ...errors import InputError, ellipsize, flag_name, needs_extras, typed
from ...io import check_readable_name, json_text, telling_full_disk
from ...options import PathLike, takes
from ...training.method_table import ANSWERS, ATTRIBUTION
from ...training.settings import FULL_PRECISION, TrainOptions, convert, read_settings
from ..progress import Steps, telling_how_to_go_on
from .directory import (
    GO_ON,
    SETTINGS,
    STUDENT,
    TEACHER,
    TEACHER_DONE,
    VIEWS,
    WORK,
    begin,
    check_anew,
    check_inputs,
    check_unfinished,
    find_run,
    finish,
    go_on,
    moved_inputs,
)
from .options import RunOptions

if TYPE_CHECKING:
    from accelerate import PartialState
    from transformers import PreTrainedModel

    from ...training.judgement import Judgement
    from ...training.methods.base import Method
    from ...training.task import Task

SCHEMA = 1
TUNING = ("teacher_epochs", "teacher_learning_rate")
"""Settings of a teacher that is fine-tuned here."""


@takes(RunOptions, rest=TrainOptions)
@needs_extras("train", "train")
def train(run: RunOptions, **settings: Any) -> dict[str, Any]:
    """Fine-tune a teacher, attribute its answers to tokens, and distil a student that keeps the tokens that matter.

    `out` becomes a checkpoint for `adtp-export`, with `results.json` and the teacher beside it. Under `torchrun` all
    processes train, and the first one writes. The seed sets the random states of Python, numpy and torch.

    Where a setting is text with commas, a list is accepted as well; where it names a file, a path.

    Returns:
        What `results.json` holds: rows, figures of teacher and student, settings, durations in seconds, device, versions.

    Raises:
        InputError: bad data, settings or models, or a loss that is no number. Settings are named as options of `adtp-train`.
            What was trained so far stays in `out`, for `resume`.
        MissingDependencyError: a package for training is not installed; the message says how to install it.
    """
    place, views = Path(run.out), _cache(run.cache or Path(run.out, WORK, VIEWS))
    steps = run.steps or Steps()
    alone = os.environ.get("WORLD_SIZE", "1") == "1"
    with (steps if alone or os.environ.get("RANK") == "0" else Steps()).step(
        "import_s", "importing PyTorch and transformers"
    ):
        processes = _import()
    from ...training.task import read_task
    from ...training.trainer import quiet

    given = _given(run.config, settings)
    chosen = _choose(run, given)
    if not processes.is_main_process:
        steps = Steps()
    with quiet():
        with steps.step("data_s", "reading the data") as progress:
            task = read_task(chosen, progress)
        teacher = _known_teacher(task)
        with (
            _claimed(run, task.settings, steps, processes),
            telling_full_disk(place, GO_ON),
            telling_how_to_go_on(steps, f"type: adtp-train --out {typed(place)} --resume"),
            _telling_lost_process(processes),
        ):
            steps.note(str(task))
            idle = [flag_name(name) for name in TUNING if given.get(name) not in (None, getattr(TrainOptions, name))]
            if teacher and idle:
                steps.note(f"{' and '.join(idle)}: without effect, since the model of --teacher is taken as it is")
            teacher = teacher or _tuned_teacher(task, place, steps, processes)
            figures, task = _explain(teacher, task, views, steps, processes)
            model, judgement = _distil(teacher, task, place / WORK / STUDENT, steps)
            record = {
                **_results(task, figures, model, judgement),
                "durations_s": steps.durations_s,
                "resumed": run.resume,  # then the durations are those of the last part
                "device": _device(),
                "versions": versions(),
            }
            if processes.is_main_process:
                _write(place, task, model, record)
    return record


_LOST = re.compile("gloo|NCCL|connection (reset|closed) by peer", re.IGNORECASE)


@contextlib.contextmanager
def _telling_lost_process(processes: PartialState) -> Iterator[None]:
    """Turn what is left of a run when one of its processes has ended into one clear message; other errors pass."""
    try:
        yield
    except RuntimeError as error:
        if processes.num_processes == 1 or not _LOST.search(str(error)):
            raise
        raise InputError(
            f"another process of this run has ended, or does not answer ({ellipsize(str(error))}); see what it has printed, then start all "
            "of them again with --resume"
        ) from error


def _cache(place: PathLike) -> Path:
    if Path(place).is_file():
        raise InputError(f"--cache: {place} is a file; give a directory, which may be a new one")
    return Path(place)


def _import() -> PartialState:
    """Import what training needs, and say which of how many processes this one is."""
    import scipy  # noqa: F401

    from ...training import stages  # noqa: F401
    from ...training.trainer import this_process

    return this_process()


def _given(config: PathLike | None, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Join the settings of a file and those of the call, each of its field's type."""
    stored = {} if config is None else read_settings(Path(config))
    return stored | {name: convert(name, value, flag_name(name)) for name, value in settings.items()}


def _choose(run: RunOptions, given: dict[str, Any]) -> TrainOptions:
    """Return the settings of the run, and see that its directory is in a state to train in.

    Raises:
        InputError: the directory has a run already, or none to resume; or not one model is given to learn from.
    """
    settings = _resumed(Path(run.out), given) if run.resume else TrainOptions(**given)
    if (settings.base is None) == (settings.teacher is None):
        raise InputError(
            "models: give either --base MODEL to fine-tune a teacher from, or --teacher MODEL that knows the task"
        )
    check_readable_name(run.out)
    if not run.resume:
        files = (run.config, run.cache, settings.train, settings.dev, settings.test)
        models = (settings.data, settings.base, settings.teacher)  # paths, or names at the Hub
        needed = [Path(file) for file in files if file is not None]
        check_anew(
            Path(run.out), run.force, [*needed, *(Path(name) for name in models if name and Path(name).exists())]
        )
    return settings


def _resumed(out: Path, given: dict[str, Any]) -> TrainOptions:
    """Return the settings of the run in `out`.

    Raises:
        InputError: it has no run to go on with, or one of other settings.
    """
    find_run(out)
    stored = out / SETTINGS
    if not stored.is_file():
        raise InputError(f"--resume: {out} holds no run of adtp-train; leave --resume out to start one")
    check_unfinished(out)
    kept = {"mixed_precision": FULL_PRECISION} | read_settings(stored)  # which earlier versions did not write
    if missing := [field.name for field in dataclasses.fields(TrainOptions) if field.name not in kept]:
        raise InputError(
            f"--resume: {stored} has no {', '.join(missing)[:200]}: it is damaged, or of another version; "
            "write them into it, or use --force to start anew"
        )
    differing = {name: value for name, value in given.items() if value is not None and kept.get(name) != value}
    moved = moved_inputs(out, differing, kept)
    if changed := [name for name in differing if name not in moved]:
        raise InputError(
            f"--resume: the run in {out} was begun with other settings ({', '.join(changed)}); "
            "leave them out, or use --force to start anew"
        )
    settings = TrainOptions(**kept | moved)
    check_inputs(out, settings)
    return settings


@contextlib.contextmanager
def _claimed(run: RunOptions, settings: TrainOptions, steps: Steps, processes: PartialState) -> Iterator[None]:
    """Make `run.out` the directory of this run alone, in a block, once every process has read what it needs."""
    out = Path(run.out)
    processes.wait_for_everyone()
    with contextlib.ExitStack() as until_the_end:
        if processes.is_main_process:
            left = None if run.resume else begin(out, settings, run.force)
            if left is not None:
                steps.note(f"what is left of the earlier run cannot be removed; remove it yourself: {left}")
            until_the_end.enter_context(alone_in(out))
            if run.resume:
                check_unfinished(out)  # again: the run may have ended since
            go_on(out)
        processes.wait_for_everyone()
        yield


def _known_teacher(task: Task) -> PreTrainedModel | None:
    """Load the teacher that was given; None where one is to be fine-tuned."""
    given = task.settings.teacher
    return None if given is None else task.load_teacher(given, tuned=True)


def _tuned_teacher(task: Task, out: Path, steps: Steps, processes: PartialState) -> PreTrainedModel:
    """Fine-tune a teacher and write it into `out`; one that is there already is loaded, or mended from its checkpoints."""
    from ...training.checkpoints import seal
    from ...training.models import save_model
    from ...training.stages import train_teacher
    from ...training.trainer import Audience

    directory = out / TEACHER
    if directory.exists() and (teacher := _loaded_teacher(task, directory, steps)) is not None:
        return teacher
    processes.wait_for_everyone()
    with steps.step("teacher_s", f"fine-tuning {Path(task.source).name}") as progress:
        teacher = train_teacher(task, out / WORK / TEACHER, Audience(progress, steps.note))
        if processes.is_main_process:
            done = out / WORK / TEACHER_DONE
            for place in (done, directory):
                remove(place)
            save_model(teacher, task.tokenizer, done)
            seal(done)
            done.rename(directory)
        processes.wait_for_everyone()
    return teacher


def _loaded_teacher(task: Task, directory: Path, steps: Steps) -> PreTrainedModel | None:
    """Load the teacher that this run has fine-tuned; None where its files are damaged."""
    from ...training.checkpoints import broken_seal

    found = broken_seal(directory)
    if found is None:
        try:
            return task.load_teacher(str(directory), tuned=True)
        except InputError as error:
            found = str(error)
    steps.note(f"the teacher in {directory} is damaged ({found}) and is made anew from its checkpoints")
    return None


def _explain(
    teacher: PreTrainedModel, task: Task, cache: Path, steps: Steps, processes: PartialState
) -> tuple[dict[str, float], Task]:
    """Return the teacher's figures on the test rows, and the task with its answers and what it says of tokens."""
    from torch import nn

    from ...training.evaluate import ask, check_order
    from ...training.stages import explained
    from ...training.trainer import Audience

    nn.Module.to(teacher.eval().requires_grad_(False), processes.device)
    with steps.step("teacher_judged_s", "judging the teacher"):
        answers, _ = ask(teacher, task.parts["test"], task.objective)
    if task.settings.teacher is not None:
        check_order(answers, task.parts["test"], task.objective, task.labels, task.settings.teacher)
    if told := task.objective.one_answer(answers, task.parts["test"], task.labels.names):
        steps.note(
            f"the teacher answers {told}. A student learns little from it: train the teacher longer or otherwise"
        )
    parts, same = {}, task.parts["dev"] is task.parts["test"]
    for split in ("train", "test") if same else ("train", "dev", "test"):
        view = ANSWERS if split == "dev" else task.settings.view
        told = f"{'attributing' if view == ATTRIBUTION else 'asking for'} the teacher's answers, {split} rows"
        with (
            steps.step(f"{view}_{split}_s", told) as progress,
            processes.local_main_process_first(),
        ):  # machines may share no cache
            parts[split] = explained(teacher, task.parts[split], task, cache, Audience(progress, steps.note), view)
    parts.setdefault("dev", parts["test"])
    return task.objective.quality(answers, task.parts["test"]), dataclasses.replace(task, parts=parts)


def _distil(teacher: PreTrainedModel, task: Task, work: Path, steps: Steps) -> tuple[Method, Judgement]:
    """Train the student, and judge it on the test rows."""
    from transformers import set_seed

    from ...training.evaluate import judge
    from ...training.judgement import one_ratio
    from ...training.stages import train_student
    from ...training.trainer import Audience

    with steps.step("student_s", "distilling the student") as progress:
        model = train_student(teacher, task, work, Audience(progress, steps.note))
    with steps.step("judged_s", "judging the student"):
        set_seed(task.settings.seed)  # for tokens drawn at random
        judgement = judge(model, task.parts["test"], explained=True)
    for site, ratio in one_ratio(judgement.ratios).items():
        share = judgement.ratios[site][ratio]
        steps.note(
            f"{site} keeps the ratio {ratio} of {share:.0%} of the texts: this student is as good as --ratio static"
        )
    return model, judgement


def _results(task: Task, teacher: dict[str, float], model: Method, judgement: Judgement) -> dict[str, Any]:
    """Describe what was learned, as `results.json` does."""
    from ...model.flops import Shape
    from ...model.registry import fields

    settings, sites = task.settings, list(model.student.site_names)
    shape, whole = (Shape.of(fields(config)) for config in (model.student.config.encoder_config, task.encoder))
    assert settings.max_tokens is not None  # a task has resolved it
    return {
        "schema": SCHEMA,
        "task": task.kind,
        "rows": {split: len(table) for split, table in task.tables.items()},
        "judged_on": "dev" if task.dev_is_test else "test",
        "sources": {split: table.source for split, table in task.tables.items()},
        "teacher": teacher,
        "student": {
            **judgement.quality,
            "tokens": float(judgement.alive[0].mean()),
            "retention": dict(zip(sites, judgement.retention)),
            "ratios": judgement.ratios,
            "flops_reduction": judgement.flops_reduction(shape, sites, settings.max_tokens, whole),
            "saliency": judgement.ranks,
            **model.record(),
        },
        "settings": dataclasses.asdict(settings),
    }


def _device() -> str:
    import torch

    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    return f"{processor()}, {torch.get_num_threads()} threads of {os.cpu_count()} cores"


def _write(out: Path, task: Task, model: Method, record: dict[str, Any]) -> None:
    """Write student and record, and remove what only an interrupted run needs."""
    from ...imports.sentence_transformers import reading
    from ...training.checkpoints import HASHES
    from ...training.models import save_model

    # A student of vectors reads texts as its teacher does.
    read_with = reading(Path(task.source)).files if task.objective.head == HEAD_EMBEDDING else ()
    with writing(out):
        save_model(model.student.cpu(), task.tokenizer, out)
        for file in read_with:
            shutil.copyfile(file, out / file.name)
        (out / TEACHER / HASHES).unlink(missing_ok=True)
        finish(out, json_text(record))
