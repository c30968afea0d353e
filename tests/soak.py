"""Call deployments from many threads, with random texts in random numbers, and compare every answer with a serial one: a script.

    python tests/soak.py OUT [--target NAME ...] [--calls 200000] [--threads 8] [--seed 0]

Without --target all targets of OUT that run here are called, one after the other. Prints one JSON object for each: calls, wrong
answers, errors, and how memory (resident, MB) went in tenths of the run. `tests/inference/test_threads.py` calls the same, briefly.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import threading
import time
from pathlib import Path
from typing import Any

from adtp_export import Manifest, load
from adtp_export.targets.choice import runnable

REQUESTS = 400
"""Different ones, each answered serially first."""
WORDS = (
    "the",
    "film",
    "room",
    "soup",
    "was",
    "not",
    "very",
    "good",
    "bad",
    ",",
    ".",
    "wonderful",
    "\u00e9t\u00e9",
    "\u732b",
)


def targets_here(out: Path) -> list[str]:
    """Return the names of the targets of an output directory that this machine runs."""
    return list(runnable(Manifest.read(out).targets))


def draw_request(draw: random.Random) -> list[Any]:
    """One text to sixteen, singles and pairs, of nothing to more than the model reads."""

    def text() -> str:
        return " ".join(draw.choices(WORDS, k=int(draw.expovariate(1 / 20))))

    return [(text(), text()) if draw.random() < 0.2 else text() for _ in range(draw.choice([1, 1, 1, 2, 4, 16]))]


def resident_mb() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


def soak(
    out: Path, target: str, calls: int, threads: int = 8, seed: int = 0, requests: int = REQUESTS
) -> dict[str, Any]:
    """Make so many calls of one target, from so many threads at once."""
    deployment, draw = load(out, target, threads=1), random.Random(seed)
    asked = [draw_request(draw) for _ in range(requests)]
    expected = [deployment(request) for request in asked]
    wrong, errors, memory = [], [], []
    done, lock, started = 0, threading.Lock(), time.monotonic()

    def call(number: int) -> None:
        nonlocal done
        mine = random.Random(f"{seed} {number}")
        while True:
            with lock:
                if done >= calls:
                    return
                done += 1
                if done % max(1, calls // 10) == 0:
                    memory.append(round(resident_mb(), 1))
            i = mine.randrange(requests)
            try:
                if deployment(asked[i]) != expected[i]:
                    wrong.append(i)
            except Exception as error:
                errors.append(repr(error))

    workers = [threading.Thread(target=call, args=(number,)) for number in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    seconds = round(time.monotonic() - started, 1)
    found = {"wrong": len(wrong), "failed": len(errors), "errors": errors[:3]}
    return {"target": target, "calls": done, "seconds": seconds, **found, "memory_mb": memory}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--target", action="append", help="may be given several times")
    parser.add_argument("--calls", type=int, default=200_000, help="of each target")
    parser.add_argument("--threads", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    for name in options.target or targets_here(options.out):
        print(json.dumps(soak(options.out, name, options.calls, options.threads, options.seed)), flush=True)
