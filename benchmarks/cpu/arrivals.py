"""A server under load: requests arrive at random, wait, and are answered in batches of at most so many tokens.

    python -m benchmarks.cpu.arrivals [--stream sst2|20news|mix]  # writes records/arrivals.jsonl, a line per contender and load

Lengths are those of real texts (records/kept-lengths.json), times between arrivals exponential, ids random. A free server takes
what waits, oldest first, up to its budget of tokens, padding included where a contender computes on it. Service times are
measured: every batch is really run, and none is warmed up, for a server pays for the first run of a shape, too. The clock in
between is the simulation's. All contenders get the same requests, and take turns. Retention of the student is forced to 0.29.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from adtp_export.benchmarking.contenders import dense_baselines, scheduled_student
from adtp_export.benchmarking.processes import Contender, Processes
from adtp_export.data.tokenize import Batch, TokenizedText, pad
from benchmarks.harness.forced import RETENTION, SITES, architecture
from benchmarks.harness.records import RECORDS, claim, read_document, told, update

STREAMS = {
    "sst2": {"budget_tokens": 1024, "requests": 400},
    "20news": {"budget_tokens": 4096, "requests": 80},
    "mix": {"budget_tokens": 4096, "requests": 200},
}
MIX = {"sst2": 0.75, "20news": 0.25}
"""Shares of the requests in the stream "mix"."""

LOADS = (0.5, 0.8, 1.6, 3.2, 6.4)
"""Arrival rates, as multiples of what padded dense BERT of 12 layers serves when it never waits."""
MAX_TOKENS, VOCABULARY = 512, 30522
INPUTS = ("input_ids", "attention_mask", "token_type_ids")


def draw_lengths(stream: str, count: int, rng: np.random.Generator) -> np.ndarray:
    """Draw lengths of real texts, ``(count,)``, at most what BERT reads; those of a mix come in random order."""
    if stream == "mix":
        drawn = np.stack([draw_lengths(name, count, rng) for name in MIX])
        return drawn[rng.choice(len(MIX), count, p=list(MIX.values())), np.arange(count)]
    counted = read_document(RECORDS / "kept-lengths.json")[stream]["whole"]
    lengths, weights = np.array([int(n) for n in counted]), np.array(list(counted.values()), float)
    return np.minimum(rng.choice(lengths, count, p=weights / weights.sum()), MAX_TOKENS)


def serve(
    arrivals_ms: np.ndarray, lengths: np.ndarray, budget: int, padded: bool, run_ms: Callable[[np.ndarray], float]
) -> tuple[np.ndarray, list[int]]:
    """Simulate one server; return how long each request took from arrival to answer, in ms, and the batches' sizes.

    Args:
        arrivals_ms: ``(R,)`` ascending.
        lengths: ``(R,)`` tokens of each request.
        budget: tokens of a batch; a longer request goes alone.
        padded: padding counts as tokens.
        run_ms: runs the requests of the given indices and returns its ms.
    """
    took, sizes, now, first = np.zeros(len(lengths)), [], 0.0, 0
    while first < len(lengths):
        now = max(now, float(arrivals_ms[first]))
        last = first + 1
        while last < len(lengths) and arrivals_ms[last] <= now:
            taken = lengths[first : last + 1]
            if (taken.max() * len(taken) if padded else taken.sum()) > budget:
                break
            last += 1
        chosen = np.arange(first, last)
        now += run_ms(chosen)
        took[chosen] = now - arrivals_ms[chosen]
        sizes.append(len(chosen))
        first = last
    return took, sizes


def timer(contender: Contender, processes: Processes, lengths: np.ndarray) -> Callable[[np.ndarray], float]:
    def batch(chosen: np.ndarray) -> Batch:
        ids = np.random.default_rng(int(chosen[0]))
        rows = [ids.integers(1000, VOCABULARY, n).tolist() for n in lengths[chosen]]
        return pad([TokenizedText(row, [0] * len(row), False) for row in rows], 0, INPUTS)

    return lambda chosen: processes.time_ms(contender.name, batch(chosen), warm=False)


def measure(stream: str, folder: Path) -> list[dict[str, Any]]:
    settings = STREAMS[stream]
    budget, count, rng = settings["budget_tokens"], settings["requests"], np.random.default_rng(0)
    student, _ = scheduled_student(architecture(), SITES, RETENTION, folder)
    contenders = [student, *dense_baselines(architecture(), folder)]
    lengths, rows = draw_lengths(stream, count, rng), []
    at_once, gaps = np.zeros(count), rng.exponential(1.0, count).cumsum()
    with Processes(contenders) as processes:
        run = {c.name: timer(c, processes, lengths) for c in contenders}
        capacity = {}
        for c in contenders:
            serve(at_once[:50], lengths[:50], budget, c.padded, run[c.name])  # to warm up
            took, _ = serve(at_once, lengths, budget, c.padded, run[c.name])
            capacity[c.name] = 1e3 * count / took.max()
        base = capacity["padded-dense-12"]
        for load in LOADS:
            arrivals_ms = gaps * 1e3 / (load * base)
            for c in contenders:
                if load * base > 1.5 * capacity[c.name]:
                    continue  # the queue only grows: its latencies say how long one waited to look
                took, sizes = serve(arrivals_ms, lengths, budget, c.padded, run[c.name])
                p50, p99 = (round(float(np.percentile(took, p)), 1) for p in (50, 99))
                rows.append(
                    {
                        "load": load,
                        "requests_per_s": round(load * base, 1),
                        "contender": c.name,
                        "p50_ms": p50,
                        "p99_ms": p99,
                    }
                    | {"texts_per_batch": round(float(np.mean(sizes)), 1)}
                )
                print(stream, rows[-1], flush=True)
    same = {"stream": stream, **settings, "tokens": round(float(lengths.mean()), 1), "retention": RETENTION}
    same |= {"capacity_per_s": {name: round(value, 1) for name, value in capacity.items()}}
    return [{**same, **row, **told()} for row in rows]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stream", choices=STREAMS, nargs="+", default=list(STREAMS))
    parser.add_argument("--out", metavar="FILE", type=Path, default=RECORDS / "arrivals.jsonl")
    options = parser.parse_args()
    claim(options.out)
    for stream in options.stream:
        with tempfile.TemporaryDirectory() as scratch:
            update(options.out, measure(stream, Path(scratch)), key=lambda row: row["stream"])


if __name__ == "__main__":
    main()
