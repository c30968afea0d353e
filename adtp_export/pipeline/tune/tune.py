"""`tune`: from a fine-tuned model to the fastest student of it that is good enough, or to the best one that is fast enough."""

from __future__ import annotations

import dataclasses
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...environment import machine, versions
from ...errors import InputError, needs_extras
from ...io import read_json, written_whole
from ...options import takes
from ...report import tuned
from ..progress import Steps
from . import directory
from .options import TuneOptions

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from ...benchmarking.workloads import Workload
    from .choice import Candidate
    from .exports import Exported
    from .plan import Plan
    from .race import Search
    from .rows import Rows
    from .shapes import Table

SCHEMA = 1
TABLE, PLAN = "table.json", "plan.json"


@takes(TuneOptions)
@needs_extras("tune", "train")
def tune(chosen: TuneOptions) -> dict[str, Any]:
    """Find the fastest student of a model that loses no more than it may, or the one that loses least at a speed, and prove it.

    Where `out` holds a finished run of the same settings, another goal is met from what is trained there already.

    Returns:
        What `results.json` holds: the verdict, what was chosen, all candidates, plan, rows. With `plan`, the plan alone. "published" says
        whether `out` has an export and a student now.

    Raises:
        InputError: bad data or settings, too few rows or too little time, or a directory of something else.
        MissingDependencyError: a package for training is not installed; the message says how to install it.
    """
    steps = chosen.steps or Steps()
    if not Path(chosen.model, "config.json").is_file():
        raise InputError(
            f"MODEL: {chosen.model} has no config.json; give the directory of a fine-tuned transformers model"
        )
    with steps.step("import_s", "importing PyTorch and transformers"):
        from ...training import stages  # noqa: F401
        from ...training.trainer import quiet
        from .rows import read
    with quiet():
        with steps.step("data_s", "reading the data"):
            rows = read(chosen)
        run = _Run(chosen, rows, steps)
        if chosen.plan:
            with tempfile.TemporaryDirectory() as scratch:
                run.prepare(Path(scratch))
                return run.planned()
        out = Path(chosen.out)
        finished = directory.claim(chosen)
        with directory.held(out):
            return run.search(out, finished)


class _Run:
    """One call of `tune`."""

    def __init__(self, chosen: TuneOptions, rows: Rows, steps: Steps) -> None:
        import torch
        from accelerate import PartialState
        from torch import nn

        from ...training.models import load_teacher
        from .rows import what_rows_show
        from .times import precisions_here, workload

        task = rows.task
        self.chosen, self.rows, self.steps, self.task = chosen, rows, steps, task
        self.teacher: PreTrainedModel = load_teacher(str(chosen.model), task.objective, task.labels, tuned=True)
        nn.Module.to(self.teacher.eval().requires_grad_(False), PartialState(cpu=not torch.cuda.is_available()).device)
        self.precisions, told = precisions_here(chosen.formats)
        self.rounds: Workload = workload(chosen.workload, task)
        self.shows = what_rows_show(len(task.tables["dev"]), len(task.tables["test"]), chosen.drop)
        self.began = time.perf_counter()
        for note in (str(task), self.shows, told):
            if note:
                steps.note(note)

    def prepare(self, work: Path) -> None:
        """Time shapes and make the plan, or read both."""
        from .plan import Plan
        from .shapes import Table

        stored = work / TABLE
        if not stored.exists():
            timed, trace_s = self._time_shapes()
            directory.write(stored, {"trace_s": trace_s, "workload": self.rounds.name, "times": timed.to_json()})
        document = read_json(stored)
        self.table: Table = Table.of(document["times"])
        if not (work / PLAN).exists():
            directory.write(work / PLAN, self._make_plan(document["trace_s"]).to_json())
        self.plan: Plan = Plan.of(read_json(work / PLAN))

    def _time_shapes(self) -> tuple[Table, float]:
        from . import times

        with tempfile.TemporaryDirectory() as scratch:
            with self.steps.step("shapes_s", "exporting untrained students") as progress:
                made = times.contenders(self.task, self.teacher, self.precisions, Path(scratch), progress)
            trace_s = self.steps.durations_s["shapes_s"] / len({arm for arm, _ in made})
            with self.steps.step("table_s", f"timing them on {self.rounds.name}") as progress:
                return times.table(made, self.rounds, progress), trace_s

    def _make_plan(self, trace_s: float) -> Plan:
        from .plan import make_plan, measure_rates
        from .shapes import levels

        chosen, parts = self.chosen, self.task.parts
        found = levels(self.table, chosen.speedup, self.precisions)
        arms = list(dict.fromkeys(arm for level in found for arm in level.arms))
        with self.steps.step("rates_s", "timing some training steps") as progress:
            rates = measure_rates(self.teacher, self.task, arms, trace_s, progress)
        left = chosen.hours - (time.perf_counter() - self.began) / 3600
        limits = (chosen.batch_size, chosen.epochs, chosen.speedup is None)
        return make_plan(found, rates, (len(parts["train"]), len(parts["dev"])), left, limits)

    def planned(self) -> dict[str, Any]:
        """Return the plan, in words and numbers."""
        return {
            "schema": SCHEMA,
            "plan": self.plan.to_json(),
            "rows": {part: len(table) for part, table in self.task.tables.items()},
            "shows": self.shows,
            "workload": self.rounds.name,
            "dense": {
                precision: round(self.table.speedup(self.table.dense, precision), 3) for precision in self.precisions
            },
        }

    def search(self, out: Path, finished: bool) -> dict[str, Any]:
        """Go through all phases, those excepted that are done; return the results."""
        from .race import Search
        from .trials import Trials

        work = out / directory.WORK
        self.prepare(work)
        trials = Trials(out, work, self.teacher, self.rows)
        with self.steps.step("teacher_s", "asking the teacher, and attributing its answers to tokens") as progress:
            from ...training.trainer import Audience

            trials.ask(max(self.plan.rungs, default=1), Audience(progress, self.steps.note))
        search = Search(trials, self.table, self.precisions, self.chosen.drop, self.chosen.speedup)
        if self._is_too_fast():
            return self._finish(out, search, {}, [], None, "nearest")
        if not finished:
            search.run(self.plan, self.steps)
        return self._end(out, search)

    def _is_too_fast(self) -> bool:
        """Say whether no shape reaches the speed that is asked for, so that nothing need be trained."""
        from .shapes import fastest_of

        wanted = self.chosen.speedup
        if wanted is None or fastest_of(self.table, self.precisions)[1] >= wanted:
            return False
        arm, most = fastest_of(self.table, self.precisions)
        self.steps.note(f"--speedup: got {wanted:g}; the fastest shape is {arm}, {most:.2f}x on {self.rounds.name}")
        return True

    def _end(self, out: Path, search: Search) -> dict[str, Any]:
        """Export, time, confirm and choose."""
        from . import exports
        from .choice import choose

        work, chosen = out / directory.WORK, self.chosen
        listed = {trial.name: search.trials.student(trial) for trial in search.shortlist()}
        directories = {exports.MODEL: Path(chosen.model), **listed}
        made = exports.export_all(directories, chosen, self.precisions, work, self.steps)
        pairs = exports.pairs(made, self.precisions, search)
        measured = exports.timed(made, pairs, self.rounds, work, self.steps) if pairs else {}
        candidates = exports.confirmed(made, pairs, measured, search, self.steps)
        best, verdict = choose(candidates, search.most, search.wanted, chosen.strict)
        return self._finish(out, search, made, candidates, best, verdict)

    def _finish(
        self,
        out: Path,
        search: Search,
        made: dict[str, Exported],
        candidates: list[Candidate],
        best: Candidate | None,
        verdict: str,
    ) -> dict[str, Any]:
        """Publish what was chosen, and write the results."""
        from .choice import NEAREST
        from .exports import MODEL

        published = best is not None and verdict != NEAREST
        if published and best is not None:
            student = None if best.name == MODEL else search.trials.student(search.trials.done[best.name])
            directory.publish(out, student, made[best.name].path)
        record = {
            **self.planned(),
            "goal": {"max_drop": search.most, "speedup": search.wanted, "strict": self.chosen.strict},
            "verdict": verdict,
            "published": published,
            "chosen": None if best is None else self._told(best, search, made),
            "candidates": [self._told(each, search, made) for each in candidates],
            "teacher": {part: float(score.mean()) for part, score in search.trials.teacher_score.items()},
            "table": self.table.to_json(),
            "trials": [
                {
                    **trial.to_json(),
                    "told": str(trial.arm),
                    "speedup": search.speedup(trial),
                    "error": search.error(trial),
                }
                for trial in search.trials.done.values()
            ],
            "durations_s": self.steps.durations_s,
            "machine": machine(),
            "versions": versions(),
        }
        with written_whole(out / directory.PAGE) as partial:
            partial.write_text(tuned.render(record, Path(self.chosen.model).name), encoding="utf-8")
        directory.write(out / directory.RESULTS, record)
        return record

    def _told(self, each: Candidate, search: Search, made: dict[str, Exported]) -> dict[str, Any]:
        from .exports import MODEL

        arm = search.table.dense if each.name == MODEL else search.trials.done[each.name].arm
        target = made[each.name].targets[each.precision]
        return {**dataclasses.asdict(each), "arm": dataclasses.asdict(arm), "told": str(arm), "target": target}
