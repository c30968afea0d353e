"""Export the students of `equal_runs.py` in fp32 and INT8, verify them, ask them, and time each in turns with their teacher in fp32.

Called by `python -m benchmarks.pruning.equal_runs speed`. A row of the record is a student in one precision: accuracy and speed
are of the same seed. The teacher has all layers and no cut. It is deployed as the students are, because threads of deployed targets spin
from text to text: with a baseline whose threads sleep, 6 layers seemed 1.7 times as fast as themselves on one text at a time.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from adtp_export import export
from adtp_export.benchmarking.contenders import Architecture
from adtp_export.benchmarking.interleaved_timing import by_cycle, measure, speedup
from adtp_export.benchmarking.processes import DEPLOYED, Contender, Processes
from adtp_export.contract import HEAD_SEQUENCE
from adtp_export.inference.predictor import Predictor
from adtp_export.io import read_json
from adtp_export.pipeline.tune.trials import answers_of
from adtp_export.training.data import Examples
from benchmarks.harness import records
from benchmarks.harness.records import read_lines
from benchmarks.pruning.equal_data import FULL, HEAD, answered
from benchmarks.pruning.equal_runs import EXPORTED, TRAINED
from benchmarks.pruning.equal_time import BATCHES, FP32, INT8, LIMITS, TEXTS, workload
from benchmarks.pruning.equal_training import Place, Run
from benchmarks.pruning.train import classes

TARGETS = {FP32: "onnxruntime-cpu-fp32-plugin", INT8: "onnxruntime-cpu-int8-linear-plugin"}
DENSE = "dense"
ANY_DROP, VERIFIED = 100.0, 64
SECONDS = 8.0
"""For each student and size of batches."""


def exported(source: Path, out: Path, dev: Path) -> dict[str, Any]:
    """Export a model in both precisions, all products in INT8 whatever that costs; return its targets."""
    manifest = export(
        source,
        out,
        force=True,
        precisions=(FP32, INT8),
        max_accuracy_drop=ANY_DROP,
        verify_data=dev,
        verify_rows=VERIFIED,
    )
    return manifest.to_json()["targets"]


def answers(out: Path, target: str, examples: Examples) -> str:
    """Return a target's answers to the test rows, as `classes` writes them."""
    return classes(answered(answers_of(Predictor(out, target).run, examples), examples))


def timed(out: Path, run: Run, place: Place, dense: Contender) -> dict[str, dict[str, Any]]:
    """Time both precisions in turns with the dense teacher; return ms, speedup and margin by precision and size of batches."""
    made = [
        Contender(name=target, path=out, layers=run.depth, padded=False, engine=DEPLOYED) for target in TARGETS.values()
    ]
    names = tuple(Architecture.of(read_json(out / "config.json")).input_names)
    found: dict[str, dict[str, Any]] = {precision: {} for precision in TARGETS}
    with Processes([dense, *made]) as processes:
        for batch in (batch for batch in BATCHES if (run.dataset, batch) in TEXTS):
            rounds = workload(run.dataset, batch, place.splits, out / "tokenizer.json", names)
            who, limits = [DENSE, *TARGETS.values()], LIMITS.get(batch)
            times = measure(rounds, who, processes.time_ms, SECONDS, limits=limits)
            cycles = {name: by_cycle(ms, len(rounds.batches)) for name, ms in times.items()}
            for precision, target in TARGETS.items():
                faster, margin = speedup(cycles[DENSE], cycles[target])
                figures = {"ms": float(np.median(cycles[target])), "speedup": faster, "margin": margin}
                found[precision][str(batch)] = {name: round(value, 3) for name, value in figures.items()}
    return found


def rows(run: Run, place: Place, dense: Contender, test: Examples) -> Iterator[dict[str, Any]]:
    """Yield what a student's exports do, a row for each precision."""
    out = place.work / "exported" / run.folder
    targets = exported(place.work / run.folder, out, place.files(run.size, run.dataset)["dev"])
    speeds = timed(out, run, place, dense)
    for precision, target in TARGETS.items():
        told = targets[target]
        yield {
            **run._asdict(),
            "precision": precision,
            "target": target,
            "status": told["status"],
            "answers": answers(out, target, test),
            "speed": speeds[precision],
        }
    shutil.rmtree(out)


def key(row: dict[str, Any]) -> tuple[Run, str]:
    return Run.of(row), row["precision"]


def dense_teacher(dataset: str, out: Path) -> Contender:
    """Return the exported teacher of a data set, in fp32."""
    return Contender(
        name=DENSE,
        path=out,
        layers=FULL,
        padded=False,
        cls_only_last_layer=HEAD[dataset] == HEAD_SEQUENCE,
        engine=DEPLOYED,
        target=TARGETS[FP32],
    )


def time_all(size: str, datasets: Collection[str], seeds: Collection[int], place: Place) -> None:
    """Export and time what is trained and not recorded."""
    done = {key(row) for row in read_lines(EXPORTED)}
    runs = [
        run
        for run in map(Run.of, read_lines(TRAINED))
        if run.size == size and run.dataset in datasets and run.seed in seeds
    ]
    with tempfile.TemporaryDirectory() as scratch:
        teachers: dict[str, tuple[Contender, Examples]] = {}
        for run in runs:
            if all((run, precision) in done for precision in TARGETS):
                continue
            place.clock.check()
            if run.dataset not in teachers:
                source, out = place.teacher(size, run.dataset), Path(scratch) / run.dataset
                export(source, out, verify_rows=VERIFIED, verify_data=place.files(size, run.dataset)["dev"])
                dense = dense_teacher(run.dataset, out)
                teachers[run.dataset] = dense, place.rows(size, run.dataset).parts["test"]
            made = [row | records.told() for row in rows(run, place, *teachers[run.dataset])]
            print(run, *({name: row[name] for name in ("precision", "status", "speed")} for row in made), flush=True)
            records.update(EXPORTED, made, key=key)
