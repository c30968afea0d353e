"""Time the students of `train.py` as they are exported: one seed of each, in ONNX Runtime on the CPU:

    python -m benchmarks.pruning.latency WORK [--seconds 25]      # writes records/systems-latency.jsonl

Batches of 32 test texts, as they come. The students of one budget run in turns with dense BERT of the same size, packed and padded.
"""

from __future__ import annotations

import argparse
import itertools
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from adtp_export.benchmarking.compare import count_flops, relate
from adtp_export.benchmarking.contenders import Architecture, dense_baselines
from adtp_export.benchmarking.interleaved_timing import measure
from adtp_export.benchmarking.processes import Contender, Processes
from adtp_export.benchmarking.workloads import Workload
from adtp_export.contract import KEPT_SITE
from adtp_export.data.readers import read_rows
from adtp_export.data.tokenize import encode, pad
from adtp_export.graph.debug import debug_form
from adtp_export.inference.config import Config
from adtp_export.io import read_json
from adtp_export.runtimes.onnxruntime import OnnxRuntimeEngine
from benchmarks.harness.records import RECORDS, claim, read_lines, told, update
from benchmarks.pruning.train import ALWAYS, DATA, EQUAL, EXPORTED, SEEDS, Run

BATCH, BATCHES = 32, 4


def texts(work: Path, dataset: str, exported: Path, names: Sequence[str]) -> Workload:
    """Return batches of the first test rows."""
    path = work / "rows" / dataset / f"test{DATA[dataset].suffix}"
    rows = [text for text, _ in itertools.islice(read_rows(path), BATCH * BATCHES)]
    encoded = encode(Tokenizer.from_file(str(exported / "tokenizer.json")), rows, ALWAYS["max_tokens"])
    batches = (pad(encoded[i : i + BATCH], 0, names) for i in range(0, len(encoded), BATCH))
    return Workload(f"{dataset}-{BATCH}", tuple(batches))


def name_of(run: Run) -> str:
    return run.method if run.sites == EQUAL else f"{run.method}-{run.sites}"


def contender(run: Run, exported: Path) -> Contender:
    fields = read_json(exported / "config.json")
    sites, layers = tuple(Config.of(fields).adtp.prune_sites), Architecture.of(fields).shape.layers
    return Contender(
        name=name_of(run),
        path=exported / "model.onnx",
        layers=layers,
        padded=False,
        sites=sites,
        cls_only_last_layer=True,
    )


def kept(student: Contender, workload: Workload) -> list[np.ndarray | None]:
    """Return what became of each token, ``(B, S)`` for each batch; None where nothing is dropped."""
    if not student.sites:
        return [None] * len(workload.batches)
    with debug_form(student.path) as path:
        engine = OnnxRuntimeEngine(path)
        return [engine.run(batch)[KEPT_SITE] for batch in workload.batches]


def timed(runs: Sequence[Run], dense: Sequence[Contender], work: Path, seconds: float) -> list[dict[str, Any]]:
    """Time students of one data set and one budget in turns with dense BERT; return a row for each."""
    places = [work / "exported" / run.folder for run in runs]
    students = [contender(run, place) for run, place in zip(runs, places)]
    first = places[0]
    architecture = Architecture.of(read_json(first / "config.json"))
    shape = architecture.shape
    workload = texts(work, runs[0].dataset, first, architecture.input_names)
    everyone = [*students, *dense]
    flops = {}
    for one in everyone:
        seen = kept(one, workload)
        flops[one.name] = np.array([count_flops(one, shape, *pair) for pair in zip(workload.batches, seen)])
    with Processes(everyone) as processes:
        times = measure(workload, [one.name for one in everyone], processes.time_ms, seconds)
    baselines = {name: f"{name}-dense-{dense[0].layers}" for name in ("packed", "padded")}
    rows = {row.contender: row for row in relate(workload.name, times, flops, everyone, list(baselines.values()))}
    return [
        {
            **run._asdict(),
            "workload": workload.name,
            "tokens": round(float(np.mean([batch["attention_mask"].sum(1).mean() for batch in workload.batches])), 1),
            "ms": rows[name_of(run)].p50_ms,
            "dense_ms": {name: rows[full].p50_ms for name, full in baselines.items()},
            "rounds": rows[name_of(run)].rounds,
            "vs": {name: vars(rows[name_of(run)].vs[full]) for name, full in baselines.items()},
        }
        for run in runs
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("work", type=Path)
    parser.add_argument("--seconds", type=float, default=25, help="for each data set and budget (default: 25)")
    parser.add_argument("--out", metavar="FILE", type=Path, default=RECORDS / "systems-latency.jsonl")
    options = parser.parse_args()
    claim(options.out)
    runs = [run for run in map(Run.of, read_lines(EXPORTED)) if run.seed == SEEDS[0] and "," not in run.method]
    if not runs:
        parser.error(f"{EXPORTED} has no exports; type: python -m benchmarks.pruning.train export SPLITS BASE WORK")
    with tempfile.TemporaryDirectory() as scratch:
        config = read_json(options.work / "exported" / runs[0].folder / "config.json")  # all have one base
        architecture = Architecture.of(config)
        dense = dense_baselines(architecture, Path(scratch), depths=(architecture.shape.layers,))
        for dataset, budget in dict.fromkeys((run.dataset, run.budget) for run in runs):
            chosen = [run for run in runs if (run.dataset, run.budget) == (dataset, budget)]
            rows = [row | told() for row in timed(chosen, dense, options.work, options.seconds)]
            update(options.out, rows, key=Run.of)


if __name__ == "__main__":
    main()
