"""Text to answer, tokenization included: `load` with a pruned student against what others run dense BERT with.

    python -m benchmarks.cpu.end_to_end TOKENIZER_DIR --sst2 FILE --news FILE [--peers PYTHON]      # writes records/end-to-end.json

The student has BERT-base's width, 6 layers, random weights, and keeps 0.29 of the tokens at `0.ffn`. Dense BERT has 12 layers, or
6. TOKENIZER_DIR has the tokenizer files of a BERT: lengths of texts are real. The question is what of the speedup that the model
alone has is left from text to answer. So each contender also runs its own batches, tokenized before, in turns with its texts.

Each contender has a process of its own, and they take turns. It has the batch size of `SIZES` with which it is fastest from text
to answer; of dense BERT the smaller one is tried for both. `load` sorts texts by length itself. For all others we sort them: by
tokens where we tokenize, else by characters. Requests are single texts, one after the other. optimum runs in the environment of
PYTHON, for it takes an older transformers: `pip install 'optimum-onnx[onnxruntime]'`. What cannot be loaded is left out and named.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.cpu.contenders import LOADERS, OURS, SIZES, work
from benchmarks.harness.forced import FULL, LAYERS, RETENTION, SHAPE, SITES
from benchmarks.harness.processes import Worker, best_size, in_turns, package_versions, serve, that_run
from benchmarks.harness.records import RECORDS, claim, told, write

STREAMS = ("sst2", "20news")
SEED = 0
TOLERANCE = 1e-3
"""Between probabilities of contenders of one depth: those that differ by more compute something else."""
TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "vocab.txt")
PACKAGES = ("transformers", "optimum", "optimum-onnx", "onnxruntime", "torch")
"""Whose versions in the environment of optimum are recorded."""


def make_streams(sst2: Path, news: Path, counts: Sequence[int]) -> dict[str, list[str]]:
    """Draw so many texts of each file."""
    from adtp_export.data.readers import read_texts

    draw, streams = random.Random(SEED), {}
    for name, path, count in zip(STREAMS, (sst2, news), counts):
        texts = [str(text) for text in read_texts(path)]
        draw.shuffle(texts)
        streams[name] = texts[:count]
    return streams


def prepare(options: argparse.Namespace, folder: Path) -> list[str]:
    """Make the student's export and dense BERT in both depths; return the names of the peers."""
    import adtp_export
    from adtp_export.benchmarking.contenders import (
        Architecture,
        dense_bert,
        named_shape,
        padded_dense,
        random_encoder,
        schedule,
    )

    architecture = Architecture(named_shape(options.shape, options.layers))
    student = random_encoder(architecture, schedule(SITES, [RETENTION]))
    depths = list(dict.fromkeys((options.full, options.layers)))
    padded = padded_dense(architecture)
    models = {"student": student, **{f"dense-{depth}": dense_bert(architecture.deep(depth)) for depth in depths}}
    for name, model in models.items():
        model.save_pretrained(folder / name)
        for file in TOKENIZER:
            if (options.tokenizer / file).is_file():
                shutil.copy(options.tokenizer / file, folder / name)
    for depth in depths:
        graph = padded.graph(depth)
        graph.optimize()
        graph.save(folder / f"padded-{depth}.onnx")
    adtp_export.export(folder / "student", folder / "out", precompute_embedding_projections=True)
    return [f"{kind}-{depth}" for kind in LOADERS for depth in depths]


def started(names: Sequence[str], python: str, folder: Path) -> tuple[list[Worker], dict[str, str], dict[str, str]]:
    """Start every contender and compare those of one depth; return those that run, why others do not, and what ours runs."""
    import numpy as np

    about: dict[str, str] = {}
    expected: dict[tuple[str, str], Any] = {}

    def check(worker: Worker) -> None:
        depth = worker.name.rpartition("-")[2]
        for stream in STREAMS:
            found = worker.ask(what="answer", stream=stream, show=True)
            if worker.name == OURS:
                about.update({field: found[field] for field in ("target", "reason")})
                continue
            values = np.array(found["probabilities"])
            off = float(np.abs(values - expected.setdefault((depth, stream), values)).max())
            if off > TOLERANCE:
                raise RuntimeError(f"its probabilities differ by {off:.2g}")

    def start(name: str) -> Worker:
        return Worker(
            name, python if name.startswith("optimum-") else sys.executable, "benchmarks.cpu.end_to_end", folder
        )

    return *that_run(map(start, (OURS, *names)), check), about


def measure(
    workers: Sequence[Worker], stream: str, rounds: int, requests: int, seconds: float
) -> dict[str, dict[str, Any]]:
    """Return of each contender its batch size, and by round its seconds and CPU seconds from text to answer and of the model alone;
    and the ms of all its requests."""
    best: dict[str, int] = {}
    for worker in reversed(workers):  # the smaller one of a kind comes last, and tries the sizes for both
        if (kind := worker.name.rpartition("-")[0]) not in best:
            best[kind] = best_size(
                SIZES, lambda size, who=worker: who.ask(what="answer", stream=stream, size=size)["seconds"]
            )
        worker.ask(what="model", stream=stream, size=best[kind])
    sizes = {worker.name: best[worker.name.rpartition("-")[0]] for worker in workers}
    found: dict[str, dict[str, Any]] = {
        name: {"batch": size, "answer": [], "model": [], "ms": []} for name, size in sizes.items()
    }
    for worker in in_turns(workers, rounds):
        mine = found[worker.name]
        for what, took in turn(worker, stream, mine["batch"], seconds).items():
            mine[what].append(took)
        mine["ms"] += worker.ask(what="requests", stream=stream, begin=len(mine["ms"]), count=requests)["ms"]
    return found


def turn(worker: Worker, stream: str, size: int, seconds: float) -> dict[str, dict[str, float]]:
    """Run a contender from text to answer and its model alone, again and again for so long; return the mean seconds of both.

    A run of each that does not count wakes it. Each of the two then comes first as often as second: what was just waiting is slower.
    """
    runs: dict[str, list[dict[str, float]]] = {"answer": [], "model": []}
    for what in runs:
        worker.ask(what=what, stream=stream, size=size)
    while not runs["model"] or sum(run["seconds"] for taken in runs.values() for run in taken) < seconds:
        for what in ("answer", "model", "model", "answer"):
            runs[what].append(worker.ask(what=what, stream=stream, size=size))
    return {
        what: {field: sum(run[field] for run in taken) / len(taken) for field in ("seconds", "cpu_seconds")}
        for what, taken in runs.items()
    }


def rows(stream: str, found: dict[str, dict[str, Any]], texts: int) -> list[dict[str, Any]]:
    """Say what of the speedup of the model alone is left from text to answer, paired by round."""
    import numpy as np

    from adtp_export.benchmarking.interleaved_timing import interval, speedup

    def taken(name: str, what: str, field: str = "seconds") -> Any:
        return np.array([each[field] for each in found[name][what]])

    made = []
    for name, mine in found.items():
        times_ours, model_times_ours = (speedup(taken(name, what), taken(OURS, what)) for what in ("answer", "model"))
        left = taken(name, "answer") / taken(OURS, "answer") * taken(OURS, "model") / taken(name, "model")
        low, high = interval(left)
        made.append(
            {
                "stream": stream,
                "contender": name,
                "batch": mine["batch"],
                "texts_per_s": round(texts / float(np.median(taken(name, "answer"))), 2),
                "texts_per_cpu_s": round(texts / float(np.median(taken(name, "answer", "cpu_seconds"))), 2),
                "model_texts_per_s": round(texts / float(np.median(taken(name, "model"))), 2),
                "model_texts_per_cpu_s": round(texts / float(np.median(taken(name, "model", "cpu_seconds"))), 2),
                "p50_ms": round(float(np.percentile(mine["ms"], 50)), 2),
                "p99_ms": round(float(np.percentile(mine["ms"], 99)), 2),
                "requests": len(mine["ms"]),
                "times_ours": round(times_ours[0], 3),
                "times_ours_margin": round(times_ours[1], 3),
                "model_times_ours": round(model_times_ours[0], 3),
                "model_times_ours_margin": round(model_times_ours[1], 3),
                "left": round(float(np.median(left)), 3),
                "left_low": round(low, 3),
                "left_high": round(high, 3),
            }
        )
        print(made[-1], file=sys.stderr)
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tokenizer", metavar="TOKENIZER_DIR", type=Path)
    parser.add_argument("--sst2", metavar="FILE", type=Path, required=True)
    parser.add_argument("--news", metavar="FILE", type=Path, required=True)
    parser.add_argument("--peers", metavar="PYTHON", default=sys.executable)
    parser.add_argument("--shape", default=SHAPE)
    parser.add_argument(
        "--layers", type=int, default=LAYERS, help="of the student, and of the smaller dense BERT (default: 6)"
    )
    parser.add_argument("--full", type=int, default=FULL, help="layers of the larger dense BERT (default: 12)")
    parser.add_argument("--rounds", type=int, default=10, help="at least 6: margins are of 95%% (default: 10)")
    parser.add_argument("--texts", type=int, nargs=2, default=(160, 12), help="of each stream (default: 160 12)")
    parser.add_argument("--requests", type=int, nargs=2, default=(40, 6), help="in each round (default: 40 6)")
    parser.add_argument("--seconds", type=float, default=2.0, help="a contender runs in a round, at least (default: 2)")
    parser.add_argument("--out", metavar="FILE", type=Path, default=RECORDS / "end-to-end.json")
    options = parser.parse_args()
    if options.rounds < 6:
        parser.error(f"--rounds: got {options.rounds}; accepted is at least 6")
    claim(options.out)
    began, results = time.perf_counter(), []
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        streams = make_streams(options.sst2, options.news, options.texts)
        (folder / "streams.json").write_text(json.dumps(streams), encoding="utf-8")
        workers, left_out, about = started(prepare(options, folder), options.peers, folder)
        print(f"ready after {time.perf_counter() - began:.0f} s", file=sys.stderr)
        try:
            for (stream, texts), requests in zip(streams.items(), options.requests):
                found = measure(workers, stream, options.rounds, requests, options.seconds)
                results += rows(stream, found, len(texts))
                print(f"{stream} after {time.perf_counter() - began:.0f} s", file=sys.stderr)
        finally:
            for worker in workers:
                worker.close()
    record = {
        "results": results,
        "left_out": left_out,
        "student": {"shape": options.shape, "layers": options.layers, "sites": SITES, "retention": RETENTION, **about},
        "texts": {stream: len(texts) for stream, texts in streams.items()},
        "rounds": options.rounds,
        "optimum": package_versions(options.peers, PACKAGES),
        **told(),
    }
    write(options.out, record)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        serve(lambda: work(sys.argv[2], Path(sys.argv[3])))
    else:
        main()
