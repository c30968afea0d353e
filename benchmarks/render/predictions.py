"""Render what was predicted of the comparison at equal measured time, and what became of it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from benchmarks.harness.records import ROOT, read_lines
from benchmarks.pruning.splits import FOLDS
from benchmarks.render.equal_spans import ASKED, read_students
from benchmarks.render.equal_time import FP32, PLAN, SMALL, Row, Students, points
from benchmarks.render.pruning import DATASETS
from benchmarks.render.tables import table

PREDICTIONS = ROOT / "benchmarks" / "pruning" / "predictions.json"
SEEDS = 3
"""As many settle a prediction, or all folds where there are folds."""


def scored(folder: Path) -> str:
    """Return the predictions and what became of them; runs that are smaller than planned, or have fewer seeds or folds, settle none."""
    from benchmarks.pruning.equal_data import SITE

    lines = []
    for prediction in json.loads(PREDICTIONS.read_text(encoding="utf-8")):
        cells = ["not run", "", ""]
        for size in (PLAN, SMALL):
            verdicts = list(_verdicts(folder, prediction, size))
            if verdicts:
                worst = next((v for v in ("wrong", "open", "right") if v in {verdict for verdict, _ in verdicts}), "")
                figures = "; ".join(f"{one} ({low}), {trained}" for _, (one, low, trained) in verdicts)
                cells = [worst if size == PLAN else f"not scored; small runs: {worst}", figures, size]
                break
        else:
            if _out_of_reach(folder, prediction):
                cells[1] = "no retention is fast enough"
        dataset, says = prediction["dataset"], prediction["says"]
        if (site := SITE.get(dataset)) and site not in says and "attention" in says:
            says = f"{says} (cut at {site})"
        lines.append([prediction["id"], DATASETS[dataset], says, *cells])
    return table(["", "texts", "predicted", "outcome", "differences in points", "size of the runs"], lines, texts=6)


def _out_of_reach(folder: Path, prediction: Row) -> bool:
    """Say whether no student that keeps all layers can be as fast as those with fewer."""
    from benchmarks.pruning.equal_time import FULL, Timing, retention_for

    wanted = Timing(prediction["dataset"], prediction["batch"], FP32)
    timed = [row for row in read_lines(folder / "equal-time-table.jsonl") if Timing.of(row) == wanted]
    fast = (retention_for(row, FULL, at) for row in timed for at in prediction["at"])
    return prediction["first"] == "adtp" and bool(timed) and not any(fast)


def _students(folder: Path, dataset: str, size: str) -> Students:
    """Raises KeyError where none is recorded."""
    if (dataset, size) == (ASKED, PLAN):
        return read_students(folder / "equal-time-spans.jsonl")
    return Students.read(folder, dataset, size)


def _verdicts(folder: Path, prediction: Row, size: str) -> Iterator[tuple[str, tuple[str, str, str]]]:
    try:
        students = _students(folder, prediction["dataset"], size)
    except KeyError:
        return
    for at in prediction["at"]:
        pair = []
        for side in ("first", "second"):
            arm, _, precision = prediction[side].partition(" ")
            pair.append(students.find(arm, prediction.get(f"{side}_at", at), prediction["batch"], precision or FP32))
        if (found := students.compare(*pair)) is not None:
            low, high = prediction["low"] / 100, prediction["high"] / 100
            outside = found.high < low or found.low > high
            verdict = "wrong" if outside else "right" if low <= found.low and found.high <= high else "open"
            mean, interval = points(found)
            often, enough, told = (students.folds, FOLDS, "folds") if students.folds else (found.seeds, SEEDS, "seeds")
            yield (verdict if often >= enough or size != PLAN else "open"), (mean, interval, f"{told}: {often}")
