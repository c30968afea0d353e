"""Texts on Ray: two workers against one process, and a million texts with a worker killed in between.

    python -m benchmarks.ray.throughput throughput --model MODEL_DIR --texts FILE [--rows N] [--rounds N]
    python -m benchmarks.ray.throughput kill --model MODEL_DIR --texts FILE [--rows N]

Each writes its part of records/distributed.json. MODEL_DIR is exported first.

throughput: one process with two threads against two workers of one thread each, on texts as they are. Both read the same Parquet
files and write theirs with the same code, in the same blocks; the one process has no Ray. They take turns. A rate counts from the
first part's begin to the last one's end. With start is all that a user waits for.

kill: N rows with running numbers, of the first words of texts. All workers that are at work are killed once, half-way, while one
writes. Then each number has to be there once, and a sample of answers has to be `load`'s.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness import records
from benchmarks.harness.records import RECORDS, claim, read_document, told
from benchmarks.ray import workers as ray_workers

TARGET = "onnxruntime-cpu-fp32"
ROWS_PER_PART = {"throughput": 2048, "kill": 16_384}
SHORT = 4
"""Words of a short text."""
SAMPLE, TOLERANCE = 2000, 1e-4
"""Answers that are compared, and how far scores of fp32 may be apart in other batches."""


def read(path: Path, rows: int, short: bool) -> list[str]:
    """Return so many texts of a file, from its beginning again where it has fewer; short ones are their first words."""
    from adtp_export.data.readers import read_texts

    texts = [text if isinstance(text, str) else text[0] for text in read_texts(path)]
    chosen = itertools.islice(itertools.cycle(texts), rows)
    return [" ".join(text.split()[:SHORT]) if short else text for text in chosen]


def write(texts: list[str], folder: Path, files: int) -> str:
    """Write texts with running numbers to Parquet files; return the pattern that matches these."""
    import pyarrow
    from pyarrow import parquet

    folder.mkdir()
    for n, ids in enumerate(np.array_split(np.arange(len(texts)), files)):
        table = pyarrow.table({"id": ids, "text": [texts[i] for i in ids]})
        parquet.write_table(table, folder / f"texts-{n:03}.parquet")
    return f"{folder}/*.parquet"


def asked(kind: str) -> Any:
    from adtp_export.integrations.ray import ScoringConfig

    return ScoringConfig(target=TARGET, rows_per_part=ROWS_PER_PART[kind])


def on_ray(pattern: str, out: Path, to: Path) -> dict[str, float]:
    """Score files with two workers of one thread; return seconds of work, seconds with all else, and rows."""
    from adtp_export.integrations.ray import Workers, score

    told: list[Any] = []
    began = time.perf_counter()
    score(pattern, out, to, asked=asked("throughput"), workers=Workers(count=2), progress=told.append)
    whole = time.perf_counter() - began
    work = max(part.began + part.seconds for part in told) - min(part.began for part in told)
    return {"seconds": work, "seconds_with_start": whole, "rows": rows_in(to)}


def in_one_process(pattern: str, out: Path, to: Path) -> dict[str, float]:
    """Score the same files with two threads in this process, without Ray; the numbers of `on_ray`."""
    began = time.perf_counter()
    from adtp_export.integrations.ray import Workers, parts, storage
    from adtp_export.integrations.ray.answering import Answering
    from adtp_export.integrations.ray.worker import Job, Model, write_answers

    model = Model(out=out, digest=None, asked=asked("throughput"), workers=Workers(threads=2))
    answering = Answering(model.open(), model.asked, model.workers.batch_size, False)
    planned = parts.plan(storage.find([pattern]), model.asked, answering.names())
    place = storage.directory(to)
    place.write_json("begun.json", {})
    job = Job(model=model, columns=planned.columns, stores=planned.stores, to=place, attempts=None)
    work = time.perf_counter()
    for part in planned.parts:
        write_answers(job, part, answering)
    ended = time.perf_counter()
    return {"seconds": ended - work, "seconds_with_start": ended - began, "rows": rows_in(to)}


def rows_in(folder: Path) -> int:
    """Count the rows of the Parquet files in a folder."""
    from pyarrow import parquet

    return sum(parquet.read_metadata(path).num_rows for path in folder.glob("part-*"))


CONTENDERS = {"ray": on_ray, "process": in_one_process}


def throughput(options: argparse.Namespace, folder: Path, out: Path) -> dict[str, Any]:
    pattern = write(read(options.texts, options.rows, short=False), folder / "texts", 4)
    rounds: dict[str, list[dict[str, float]]] = {name: [] for name in CONTENDERS}
    for number in range(options.rounds):
        names = list(CONTENDERS)
        for name in names if number % 2 == 0 else reversed(names):
            to = folder / f"{name}-{number}"
            command = [sys.executable, "-m", "benchmarks.ray.throughput", "--worker", name, pattern, str(out), str(to)]
            said = subprocess.run(command, check=True, capture_output=True, text=True).stdout
            rounds[name].append(json.loads(said.splitlines()[-1]))
            print(name, rounds[name][-1], file=sys.stderr)
    if any(found["rows"] != options.rows for told in rounds.values() for found in told):
        raise SystemExit("rows were lost")

    def rate(name: str, field: str) -> list[float]:
        return [found["rows"] / found[field] for found in rounds[name]]

    results = {
        f"{name}{suffix}": round(statistics.median(rate(name, f"seconds{suffix}")), 1)
        for name in CONTENDERS
        for suffix in ("", "_with_start")
    }
    ratios = [ray / process for ray, process in zip(rate("ray", "seconds"), rate("process", "seconds"))]
    return {
        "model": options.model.name,
        "texts": options.texts.name,
        "rows": options.rows,
        "rows_per_part": ROWS_PER_PART["throughput"],
        "rounds": options.rounds,
        "texts_per_s": results,
        "ray_of_process": round(statistics.median(ratios), 3),
        "ray_of_process_rounds": [round(ratio, 3) for ratio in ratios],
    }


def kill(options: argparse.Namespace, folder: Path, out: Path) -> dict[str, Any]:
    from adtp_export.integrations.ray import Workers, score

    texts = read(options.texts, options.rows, short=True)
    pattern, to = write(texts, folder / "texts", 4), folder / "answers"
    half = options.rows // ROWS_PER_PART["kill"] // 2
    told: list[Any] = []
    began = time.perf_counter()
    with ray_workers.killing(to, half) as killed:
        summary = score(pattern, out, to, asked=asked("kill"), workers=Workers(count=2), progress=told.append)
    seconds = time.perf_counter() - began
    began = time.perf_counter()
    again = score(pattern, out, to, asked=asked("kill"))
    return {
        "model": options.model.name,
        "rows": options.rows,
        "words_of_a_text": SHORT,
        "rows_per_part": ROWS_PER_PART["kill"],
        "parts": summary.parts,
        "workers_killed": len(killed.workers),
        "processes_that_finished_parts": len({part.worker for part in told}),
        "seconds": round(seconds, 1),
        "texts_per_s": round(options.rows / seconds, 1),
        **compared(to, texts, out),
        "parts_found_by_a_second_run": again.found,
        "seconds_of_a_second_run": round(time.perf_counter() - began, 1),
    }


def compared(to: Path, texts: list[str], out: Path) -> dict[str, int]:
    """Count how often each number is there, and compare texts, and a sample of answers."""
    from pyarrow import parquet

    from adtp_export import load

    table = parquet.read_table(to, columns=["id", "text", "label", "score"])
    ids = table.column("id").to_numpy()
    counts = np.bincount(ids, minlength=len(texts))
    wrong = sum(texts[i] != text for i, text in zip(ids, table.column("text").to_pylist()))
    chosen = np.random.default_rng(0).permutation(table.num_rows)[:SAMPLE]
    expected = load(out, TARGET)([texts[ids[i]] for i in chosen])
    labels, scores = table.column("label"), table.column("score")
    answers = sum(
        labels[int(i)].as_py() != answer.label or abs(scores[int(i)].as_py() - answer.score) > TOLERANCE
        for i, answer in zip(chosen, expected)
    )
    return {
        "numbers_once": int((counts == 1).sum()),
        "numbers_lost": int((counts == 0).sum()),
        "numbers_doubled": int((counts > 1).sum()),
        "other_texts": int(wrong),
        "answers_compared": len(chosen),
        "other_answers": int(answers),
    }


KINDS = {"throughput": throughput, "kill": kill}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=tuple(KINDS))
    parser.add_argument("--model", metavar="MODEL_DIR", type=Path, required=True)
    parser.add_argument("--texts", metavar="FILE", type=Path, required=True)
    parser.add_argument(
        "--rows", metavar="N", type=int, help="texts (default: 60,000 for throughput, 1,000,000 for kill)"
    )
    parser.add_argument("--rounds", metavar="N", type=int, default=3)
    parser.add_argument("--record", metavar="FILE", type=Path, default=RECORDS / "distributed.json")
    options = parser.parse_args()
    options.rows = options.rows or {"throughput": 60_000, "kill": 1_000_000}[options.kind]
    claim(options.record)
    from importlib.metadata import version

    import adtp_export

    with tempfile.TemporaryDirectory() as scratch:
        out = Path(scratch) / "out"
        adtp_export.export(options.model, out)
        found = KINDS[options.kind](options, Path(scratch), out)
    found |= told(2, **{name: version(name) for name in ("ray", "pyarrow")})
    records.write(options.record, read_document(options.record) | {options.kind: found})
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    if sys.argv[1:2] == ["--worker"]:
        contender, where, model, place = sys.argv[2:]
        print(json.dumps(CONTENDERS[contender](where, Path(model), Path(place))))
    else:
        main()
