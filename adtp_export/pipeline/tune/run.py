"""One call of `tune`: its phases in order, each of which is read where it is done already."""

from __future__ import annotations

import dataclasses
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from ...environment import commit, cpu, fingerprint, versions
from ...io import written_whole
from ...report import tuned
from ...training.evaluate import ask, check_order
from ...training.trainer import Audience, this_process
from ..progress import Steps
from . import directory, exports, times
from .choice import NEAREST, Candidate, choose, meets
from .options import INT8, TuneOptions
from .plan import SHORTLIST, Plan, make_plan, measure_rates
from .race import Search
from .rows import Rows, what_rows_show, what_was_cut
from .shapes import Table, fastest_of, levels
from .students import Students
from .trials import Trials, ask_teacher

SCHEMA = 1
ASKED = 400
"""Dev rows that show whether the model's classes are in the order of the data's."""


def _timed_shapes(document: Any) -> tuple[float, dict[str, Any], str, Table]:
    """Return how long a trace took, where shapes were timed, and their times; earlier versions did not say where."""
    device = {**document.get("device", cpu(0))}
    return (
        float(document["trace_s"]),
        {**device, "model": str(device["model"])},
        str(document.get("fingerprint", fingerprint())),
        Table.of(document["times"]),
    )


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """What is known before any student is trained.

    device: that shapes were timed on. precisions: of candidates. possible: whether some shape is as fast as asked; else nothing is planned.
    """

    device: Mapping[str, Any]
    table: Table
    precisions: Sequence[str]
    possible: bool
    plan: Plan


class Run:
    """What a call is given, and what its rows can show."""

    def __init__(self, chosen: TuneOptions, rows: Rows, steps: Steps) -> None:
        self.began = time.perf_counter()
        task = rows.task
        self.chosen, self.rows, self.steps, self.task, self.out = chosen, rows, steps, task, Path(chosen.out)
        self.teacher: PreTrainedModel = task.load_teacher(str(chosen.model), tuned=True)
        nn.Module.to(self.teacher.eval().requires_grad_(False), this_process().device)
        self._check_order()
        self.precisions, told = times.precisions_here(chosen.formats)
        self.rounds = times.workload(chosen.workload, task)
        self.shows = what_rows_show(rows.groups, rows.variance, chosen.drop, SHORTLIST + (INT8 in self.precisions))
        for note in (rows.left_out, str(task), self.shows, told, what_was_cut(task)):
            if note:
                steps.note(note)

    def _check_order(self) -> None:
        """Raises InputError where the model's classes are in another order than the data's: before anything is written."""
        examples = self.task.parts["dev"]
        if self.task.labels.names:
            some = examples.some(range(min(ASKED, len(examples))))
            answers, _ = ask(self.teacher, some, self.task.objective)
            check_order(answers, some, self.task.objective, self.task.labels, self.task.source)

    def prepared(self, work: Path) -> Prepared:
        """Time shapes and make the plan, or read both."""
        path = work / directory.TABLE
        if not path.exists():
            timed, trace_s = self._time_shapes()
            of = {"workload": self.rounds.name, "device": cpu(0), "fingerprint": fingerprint()}
            directory.write(path, {"trace_s": trace_s, **of, "times": timed.to_json()})
        trace_s, device, where, table = directory.stored(path, _timed_shapes)
        if where != fingerprint():
            self.steps.note(f"shapes were timed on another machine ({device['model']}); times of this one may differ")
        precisions = times.precisions_of(table, self.chosen.formats)
        if precisions != self.precisions:
            self.steps.note("INT8 is left out, as it was when shapes were timed; another --out would have it")
        arm, most = fastest_of(table, precisions)
        possible = self.chosen.speedup is None or most >= self.chosen.speedup
        if possible:
            plan = self._planned(work / directory.PLAN, table, precisions, trace_s)
        else:
            plan = Plan(levels=(), rungs=(), refined=0, seconds={})
            self.steps.note(
                f"--speedup: got {self.chosen.speedup:g}; the fastest shape is {arm}, {most:.2f}x on {self.rounds.name}"
            )
        return Prepared(device=device, table=table, precisions=precisions, possible=possible, plan=plan)

    def _planned(self, path: Path, table: Table, precisions: Sequence[str], trace_s: float) -> Plan:
        if not path.exists():
            directory.write(path, self._make_plan(table, precisions, trace_s).to_json())
        return directory.stored(path, Plan.of)

    def _time_shapes(self) -> tuple[Table, float]:
        with tempfile.TemporaryDirectory() as scratch:
            with self.steps.step("shapes_s", "exporting untrained students") as progress:
                made = times.contenders(self.task, self.teacher, self.precisions, Path(scratch), progress)
            trace_s = self.steps.durations_s["shapes_s"] / len({arm for arm, _ in made})
            with self.steps.step("table_s", f"timing them on {self.rounds.name}") as progress:
                return times.table(made, self.rounds, progress), trace_s

    def _make_plan(self, table: Table, precisions: Sequence[str], trace_s: float) -> Plan:
        chosen, parts = self.chosen, self.task.parts
        found = levels(table, chosen.speedup, precisions)
        arms = list(dict.fromkeys(arm for level in found for arm in level.arms))
        with self.steps.step("rates_s", "timing some training steps") as progress:
            rates = measure_rates(self.teacher, self.task, arms, trace_s, progress)
        left = chosen.hours - (time.perf_counter() - self.began) / 3600
        limits = (chosen.batch_size, chosen.epochs, chosen.speedup is None)
        return make_plan(found, rates, (len(parts["train"]), len(parts["dev"])), (chosen.hours, left), limits)

    def planned(self, ready: Prepared) -> dict[str, Any]:
        """Return the plan, in words and numbers."""
        dense = {each: round(ready.table.speedup(ready.table.dense, each), 3) for each in ready.precisions}
        return {
            "schema": SCHEMA,
            "plan": ready.plan.to_json(),
            "rows": {part: len(table) for part, table in self.task.tables.items()},
            "left_out": self.rows.left_out,
            "shows": self.shows,
            "workload": self.rounds.name,
            "dense": dense,
        }

    def search(self, finished: bool) -> dict[str, Any]:
        """Go through all phases; return the results. `finished`: it was all trained before."""
        work = self.out / directory.WORK
        ready = self.prepared(work)
        if not ready.possible:
            return self._nothing(ready)
        students = Students(self.out, work, len(self.rows.groups["dev"]))
        if finished and ready.plan.levels:
            students.check_complete()
        model = {exports.MODEL: Path(self.chosen.model)}
        made = exports.export_all(model, self.chosen, ready.precisions, work, self.steps)
        text = "asking the teacher" + ("" if finished else ", and attributing its answers to tokens")
        with self.steps.step("teacher_s", text) as progress:
            rows, audience = 0 if finished else max(ready.plan.rungs, default=1), Audience(progress, self.steps.note)
            asked = ask_teacher(self.teacher, self.rows, rows, work, audience)
        trials = Trials(students, self.teacher, self.rows, asked)
        search = Search(trials, ready.table, ready.precisions, self.chosen.drop, self.chosen.speedup)
        if not finished:
            search.run(ready.plan, self.steps)
        return self._end(ready, search, self._shortlist(ready, search, made))

    def _shortlist(
        self, ready: Prepared, search: Search, made: Mapping[str, exports.Exported]
    ) -> dict[str, exports.Exported]:
        """Export the best students, beside what is made: the model itself. One whose export fails makes room for the next."""
        found = {**made}
        for trial in search.ranked():
            if len(found) <= SHORTLIST:
                student = {trial.name: search.students.sound(trial)}
                found |= exports.export_all(
                    student, self.chosen, ready.precisions, self.out / directory.WORK, self.steps
                )
        return found

    def _end(self, ready: Prepared, search: Search, made: Mapping[str, exports.Exported]) -> dict[str, Any]:
        """Time candidates and confirm. made: their exports."""
        pairs, device, candidates = exports.pairs(made, ready.precisions, search, self.steps), ready.device, []
        if pairs:
            timed = exports.timed(made, pairs, self.rounds, self.out / directory.WORK, self.steps)
            device = timed.device
            candidates = exports.confirmed(made, pairs, timed.times, search, self.steps)
        return self._finish(ready, search, made, candidates, device)

    def _finish(
        self,
        ready: Prepared,
        search: Search,
        made: Mapping[str, exports.Exported],
        candidates: Sequence[Candidate],
        device: Mapping[str, Any],
    ) -> dict[str, Any]:
        """Choose, publish, and write the results. device: that candidates were timed on."""
        best, verdict = choose(candidates, search.most, search.wanted, self.chosen.strict)
        published = verdict != NEAREST
        told = [_told(each, search, made[each.name]) for each in candidates]
        if published:
            assert best is not None
            own = search.students.done.get(best.name)
            directory.publish(self.out, search.students.sound(own) if own else None, made[best.name].path)
        found = {
            "verdict": verdict,
            "published": published,
            "chosen": None if best is None else told[candidates.index(best)],
            "candidates": told,
            "teacher": {part: float(score.mean()) for part, score in search.trials.asked.score.items()},
            "trials": [
                {**each.to_json(), "told": str(each.arm), "speedup": search.speedup(each), "error": search.error(each)}
                for each in search.students.done.values()
            ],
        }
        record = self._results(ready, found, device)
        with written_whole(self.out / directory.PAGE) as partial:
            partial.write_text(tuned.render(record, Path(self.chosen.model).name), encoding="utf-8")
        directory.write(self.out / directory.RESULTS, record)
        return record

    def _nothing(self, ready: Prepared) -> dict[str, Any]:
        """Return the results where no shape is fast enough. They are not written: another goal begins with the times of shapes."""
        none: dict[str, Any] = {"chosen": None, "candidates": [], "teacher": {}, "trials": []}
        return self._results(ready, {"verdict": NEAREST, "published": False, **none}, ready.device)

    def _results(self, ready: Prepared, found: Mapping[str, Any], device: Mapping[str, Any]) -> dict[str, Any]:
        chosen = self.chosen
        return {
            **self.planned(ready),
            "goal": {"max_drop": chosen.drop, "speedup": chosen.speedup, "strict": chosen.strict},
            **found,
            "table": ready.table.to_json(),
            "durations_s": self.steps.durations_s,
            "device": dict(device),
            "shapes_timed_on": dict(ready.device),
            "versions": versions(),
            "commit": commit(),
        }


def _told(each: Candidate, search: Search, made: exports.Exported) -> dict[str, Any]:
    """Return what the results say of a candidate."""
    trial = search.students.done.get(each.name)
    more = {
        "meets": meets(each, search.most, search.wanted),
        "arm": dataclasses.asdict(trial.arm if trial else search.table.dense),
        "told": str(trial.arm) if trial else "the model itself",
        "target": made.targets[each.precision],
    }
    return {**dataclasses.asdict(each), **more}
