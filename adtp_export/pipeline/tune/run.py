"""One call of `tune`: its phases in order, each of which is read where it is done already."""

from __future__ import annotations

import dataclasses
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from ...environment import commit, cpu, fingerprint, versions
from ...io import written_whole
from ...report import tuned
from ...training.evaluate import ask, check_order
from ...training.models import load_teacher
from ...training.trainer import Audience, this_process
from ..progress import Steps
from . import directory, exports, times
from .choice import NEAREST, Candidate, choose, meets
from .options import INT8, TuneOptions
from .plan import SHORTLIST, Plan, make_plan, measure_rates
from .race import Search
from .rows import Rows, what_rows_show, what_was_cut
from .shapes import Table, fastest_of, levels
from .trials import Trials

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


class Run:
    """What a call needs throughout."""

    def __init__(self, chosen: TuneOptions, rows: Rows, steps: Steps) -> None:
        self.began = time.perf_counter()
        task = rows.task
        self.chosen, self.rows, self.steps, self.task, self.out = chosen, rows, steps, task, Path(chosen.out)
        self.teacher: PreTrainedModel = load_teacher(str(chosen.model), task.objective, task.labels, tuned=True)
        nn.Module.to(self.teacher.eval().requires_grad_(False), this_process().device)
        self._check_order()
        self.precisions, told = times.precisions_here(chosen.formats)
        self.rounds = times.workload(chosen.workload, task)
        self.shows = what_rows_show(rows.groups, chosen.drop, SHORTLIST + (INT8 in self.precisions))
        for note in (str(task), self.shows, told, what_was_cut(task)):
            if note:
                steps.note(note)

    def _check_order(self) -> None:
        """Raises InputError where the model's classes are in another order than the data's: before anything is written."""
        examples = self.task.parts["dev"]
        if self.task.labels.names:
            some = examples.some(range(min(ASKED, len(examples))))
            answers, _ = ask(self.teacher, some, self.task.objective)
            check_order(answers, some, self.task.objective, self.task.labels, self.task.source)

    def prepared(self, work: Path) -> Run:
        """Time shapes and make the plan, or read both."""
        path = work / directory.TABLE
        if not path.exists():
            timed, trace_s = self._time_shapes()
            of = {"workload": self.rounds.name, "device": cpu(0), "fingerprint": fingerprint()}
            directory.write(path, {"trace_s": trace_s, **of, "times": timed.to_json()})
        trace_s, self.device, where, self.table = directory.stored(path, _timed_shapes)
        if where != fingerprint():
            self.steps.note(
                f"shapes were timed on another machine ({self.device['model']}); times of this one may differ"
            )
        here, self.precisions = self.precisions, times.precisions_of(self.table, self.chosen.formats)
        if here != self.precisions:
            self.steps.note("INT8 is left out, as it was when shapes were timed; another --out would have it")
        if not self.possible:
            arm, most = fastest_of(self.table, self.precisions)
            self.plan = Plan(levels=(), rungs=(), refined=0, seconds={})
            self.steps.note(
                f"--speedup: got {self.chosen.speedup:g}; the fastest shape is {arm}, {most:.2f}x on {self.rounds.name}"
            )
            return self
        if not (work / directory.PLAN).exists():
            directory.write(work / directory.PLAN, self._make_plan(trace_s).to_json())
        self.plan = directory.stored(work / directory.PLAN, Plan.of)
        return self

    @property
    def possible(self) -> bool:
        """Whether some shape is as fast as asked."""
        wanted = self.chosen.speedup
        return wanted is None or fastest_of(self.table, self.precisions)[1] >= wanted

    def _time_shapes(self) -> tuple[Table, float]:
        with tempfile.TemporaryDirectory() as scratch:
            with self.steps.step("shapes_s", "exporting untrained students") as progress:
                made = times.contenders(self.task, self.teacher, self.precisions, Path(scratch), progress)
            trace_s = self.steps.durations_s["shapes_s"] / len({arm for arm, _ in made})
            with self.steps.step("table_s", f"timing them on {self.rounds.name}") as progress:
                return times.table(made, self.rounds, progress), trace_s

    def _make_plan(self, trace_s: float) -> Plan:
        chosen, parts = self.chosen, self.task.parts
        found = levels(self.table, chosen.speedup, self.precisions)
        arms = list(dict.fromkeys(arm for level in found for arm in level.arms))
        with self.steps.step("rates_s", "timing some training steps") as progress:
            rates = measure_rates(self.teacher, self.task, arms, trace_s, progress)
        left = chosen.hours - (time.perf_counter() - self.began) / 3600
        limits = (chosen.batch_size, chosen.epochs, chosen.speedup is None)
        return make_plan(found, rates, (len(parts["train"]), len(parts["dev"])), (chosen.hours, left), limits)

    def planned(self) -> dict[str, Any]:
        """Return the plan, in words and numbers."""
        dense = {each: round(self.table.speedup(self.table.dense, each), 3) for each in self.precisions}
        return {
            "schema": SCHEMA,
            "plan": self.plan.to_json(),
            "rows": {part: len(table) for part, table in self.task.tables.items()},
            "shows": self.shows,
            "workload": self.rounds.name,
            "dense": dense,
        }

    def search(self, finished: bool) -> dict[str, Any]:
        """Go through all phases; return the results. `finished`: it was all trained before."""
        work = self.out / directory.WORK
        self.prepared(work)
        trials = Trials(self.out, work, self.teacher, self.rows)
        self.search_of = search = Search(trials, self.table, self.precisions, self.chosen.drop, self.chosen.speedup)
        if not self.possible:
            return self._finish({}, [], self.device)
        if finished and self.plan.levels:
            trials.check_complete()
        model = {exports.MODEL: Path(self.chosen.model)}
        made = exports.export_all(model, self.chosen, self.precisions, work, self.steps)
        text = "asking the teacher" + ("" if finished else ", and attributing its answers to tokens")
        with self.steps.step("teacher_s", text) as progress:
            trials.ask(0 if finished else max(self.plan.rungs, default=1), Audience(progress, self.steps.note))
        if not finished:
            search.run(self.plan, self.steps)
        return self._end(search, made)

    def _end(self, search: Search, made: dict[str, exports.Exported]) -> dict[str, Any]:
        """Export, time and confirm. made: the export of the model itself."""
        work = self.out / directory.WORK
        for trial in search.ranked():  # one whose export fails makes room for the next
            if len(made) <= SHORTLIST:
                student = {trial.name: search.trials.sound(trial)}
                made |= exports.export_all(student, self.chosen, self.precisions, work, self.steps)
        pairs = exports.pairs(made, self.precisions, search, self.steps)
        if not pairs:
            return self._finish(made, [], self.device)
        timed = exports.timed(made, pairs, self.rounds, work, self.steps)
        candidates = exports.confirmed(made, pairs, timed.times, search, self.steps)
        return self._finish(made, candidates, timed.device)

    def _finish(
        self, made: dict[str, exports.Exported], candidates: list[Candidate], device: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Choose, publish, and write the results. device: that candidates were timed on."""
        search, chosen = self.search_of, self.chosen
        best, verdict = choose(candidates, search.most, search.wanted, chosen.strict)
        published = verdict != NEAREST
        if published:
            assert best is not None
            own = search.trials.done.get(best.name)
            directory.publish(self.out, search.trials.sound(own) if own else None, made[best.name].path)
        tried = search.trials.done.values() if self.possible else ()
        record = {
            **self.planned(),
            "goal": {"max_drop": search.most, "speedup": search.wanted, "strict": chosen.strict},
            "verdict": verdict,
            "published": published,
            "chosen": None if best is None else self._told(best, made),
            "candidates": [self._told(each, made) for each in candidates],
            "teacher": {part: float(score.mean()) for part, score in search.trials.teacher_score.items()},
            "table": self.table.to_json(),
            "trials": [
                {**each.to_json(), "told": str(each.arm), "speedup": search.speedup(each), "error": search.error(each)}
                for each in tried
            ],
            "durations_s": self.steps.durations_s,
            "device": dict(device),
            "shapes_timed_on": self.device,
            "versions": versions(),
            "commit": commit(),
        }
        if self.possible:  # else nothing was searched, and another goal begins with the times of shapes
            with written_whole(self.out / directory.PAGE) as partial:
                partial.write_text(tuned.render(record, Path(chosen.model).name), encoding="utf-8")
            directory.write(self.out / directory.RESULTS, record)
        return record

    def _told(self, each: Candidate, made: dict[str, exports.Exported]) -> dict[str, Any]:
        trial = self.search_of.trials.done.get(each.name)
        told = str(trial.arm) if trial else "the model itself"
        arm = dataclasses.asdict(trial.arm if trial else self.table.dense)
        sure = meets(each, self.search_of.most, self.search_of.wanted)
        more = {"meets": sure, "arm": arm, "told": told, "target": made[each.name].targets[each.precision]}
        return {**dataclasses.asdict(each), **more}
