"""The search: shapes of one speed race each other on more and more rows, and the best get the retention that loses as much as it may."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain

from ..progress import Steps
from .choice import going_on, standard_error
from .plan import BISECTIONS, REFINED, Plan
from .shapes import RETENTIONS, Arm, Table
from .students import Trial
from .trials import Trials


class Search:
    """Trains what the plan says, and knows which student is the best so far.

    Args:
        drop: points that may be lost, or None; speedup: that is asked for, or None.
        precisions: of exports.
    """

    def __init__(
        self, trials: Trials, table: Table, precisions: Sequence[str], drop: float | None, speedup: float | None
    ) -> None:
        self.trials, self.students, self.table, self.precisions = trials, trials.students, table, precisions
        self.most, self.wanted = drop, speedup

    def run(self, plan: Plan, steps: Steps) -> None:
        """Race all arms, and bisect the retention of the best shapes."""
        finals = self._race(plan, steps)
        if plan.refined:
            for trial in self.to_refine(finals):
                self._bisect(trial, plan, steps)

    def _train(self, arm: Arm, rows: int, steps: Steps, start: Trial | None = None) -> Trial:
        text = f"training {arm}, on {rows:,} rows{', from ' + start.name if start else ''}"
        name = self.trials.name_of(arm, rows, start)
        if name in self.students.done:
            return self.students.done[name]
        with steps.step(f"trial_{name}_s", text, f"; best so far: {self.best_so_far()}") as progress:
            trial = self.trials.run(arm, rows, progress, start)
        steps.note(f"{trial.arm}: {self.told(trial)}")
        return trial

    def _race(self, plan: Plan, steps: Steps) -> list[Trial]:
        """Return the trials of the last rung that each level came to."""
        alive, ended = [list(level.arms) for level in plan.levels], list[Trial]()
        for rung, rows in enumerate(plan.rungs):
            found = [[self._train(arm, rows, steps) for arm in arms] for arms in alive]
            if rung:
                self._forget_fewer_rows(found, plan.rungs[rung - 1])
            if rung == len(plan.rungs) - 1:
                return [*ended, *chain.from_iterable(found)]
            ahead = [self._going_on(trials) for trials in found]
            first = self._first_needed(ahead) if rung else 0
            ended += chain.from_iterable(ahead[:first])
            alive = [[trial.arm for trial in trials] for trials in ahead[first:]]
        return ended

    def _forget_fewer_rows(self, found: Sequence[Sequence[Trial]], rows: int) -> None:
        """Forget the students of so many rows that have learned from more: they are no better, unless training has diverged since."""
        learned = (trial.arm for trial in chain.from_iterable(found) if not trial.diverged)
        self._forget(self.students.done[self.trials.name_of(arm, rows)] for arm in learned)

    def _going_on(self, trials: Sequence[Trial]) -> list[Trial]:
        """Return which trials of a level get more rows, and forget the others."""
        able = [trial for trial in trials if not trial.diverged]
        told, groups = [self.students.told(trial) for trial in able], self.trials.rows.groups["dev"]
        losses, scores = [each.loss for each in told], [each.score for each in told]
        chosen = going_on(losses, self.trials.asked.groups, scores, groups)
        self._forget(trial for number, trial in enumerate(able) if number not in chosen)
        return [able[number] for number in chosen]

    def _first_needed(self, levels: Sequence[Sequence[Trial]]) -> int:
        """Return the fastest level with a student that is good enough; slower ones need no more rows. 0 where there is none."""
        good = [number for number, trials in enumerate(levels) if any(map(self.good, trials))]
        return max(good, default=0) if self.most is not None else 0

    def _forget(self, trials: Iterable[Trial]) -> None:
        for trial in trials:
            self.students.forget(trial)

    def error(self, trial: Trial) -> float:
        """Return the standard error of a student's drop on dev, in points."""
        apart = self.trials.asked.score["dev"] - self.students.told(trial).score
        return 100 * standard_error(apart, self.trials.rows.groups["dev"])

    def good(self, trial: Trial) -> bool:
        """Say whether a student loses at most what it may, with one standard error to spare."""
        return self.most is not None and not trial.diverged and trial.drop <= self.most - self.error(trial)

    def to_refine(self, finals: Sequence[Trial]) -> list[Trial]:
        """Return the students, each of another depth, from whose retention to go on: the fastest that is good enough, then those that lose
        least among the others, which may keep more."""
        able = [
            trial
            for trial in finals
            if trial.arm.layers in self.table.cuts and (trial.arm.site or self.good(trial)) and not trial.diverged
        ]
        good = sorted(filter(self.good, able), key=lambda trial: (-self.speedup(trial), trial.name))
        others = sorted((trial for trial in able if trial not in good), key=lambda trial: (trial.drop, trial.name))
        found: dict[int, Trial] = {}
        for trial in (*good[:1], *others, *good[1:]):
            found.setdefault(trial.arm.layers, trial)
        return list(found.values())[:REFINED]

    def _bisect(self, trial: Trial, plan: Plan, steps: Steps) -> None:
        depth, good = trial.arm.layers, self.good(trial)
        low, high = (RETENTIONS[-1], trial.arm.retention) if good else (trial.arm.retention, 1.0)
        for _ in range(BISECTIONS):
            middle = round((low + high) / 2, 3)
            if middle in (low, high, 1.0):
                return
            found = self._train(Arm(depth, self.table.cuts[depth], middle), plan.refined, steps, trial)
            low, high = (low, middle) if self.good(found) else (middle, high)
            trial = trial if found.diverged else found

    def speedup(self, trial: Trial) -> float:
        """Return how fast the table says that a student is."""
        return self.table.fastest(trial.arm, self.precisions)

    def ranked(self) -> list[Trial]:
        """Return the students that can be exported, those first that promise most."""
        return sorted(self.students.can_be_chosen(), key=self._worth)

    def _worth(self, trial: Trial) -> tuple[bool, float, str]:
        if self.most is not None:
            good = self.good(trial)
            return not good, -self.speedup(trial) if good else trial.drop, trial.name
        assert self.wanted is not None
        fast = self.speedup(trial) >= self.wanted
        return not fast, trial.drop if fast else -self.speedup(trial), trial.name

    def best_so_far(self) -> str:
        """Name the best student so far."""
        found = self.ranked()
        return f"{found[0].arm}, {self.told(found[0])}" if found else "none"

    def told(self, trial: Trial) -> str:
        if trial.diverged:
            rate = self.trials.task.settings.learning_rate
            return f"its training diverged at --learning-rate {rate:g}, so it is left out; a lower rate may train it"
        return f"{self.speedup(trial):.2f}x, {trial.drop:.1f} ± {self.error(trial):.1f} points lost on dev"
