"""What Triton Inference Server adds to `load`: texts per second under clients that wait for their answers, against `load` itself.

    make triton-server
    python -m benchmarks.serving.triton_throughput OUT --data FILE --text-column NAME     # writes records/triton.json

OUT is an export on this machine. Requests have one text each. Rounds of the server and of `load` take turns. `load` gets the same
texts, once in batches of the sizes that the server made of them in that round, once in batches of 32. Every answer of the server is
compared with that of `load`. The clients run on the same cores as the server, and count against it.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import itertools
import json
import re
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

import adtp_export
from adtp_export.data.readers import read_texts
from adtp_export.integrations.triton import repository as triton
from benchmarks.harness.records import RECORDS, claim, told, write
from benchmarks.serving import triton_server

MODEL, BATCH, WARM_UP = "served", 32, 256


def answer(load: Any, texts: list[str], sizes: list[int]) -> tuple[list[Any], float]:
    """Answer texts in batches of these sizes; return the answers and the seconds."""
    found, began = [], time.perf_counter()
    for size in sizes:
        found += load(texts[len(found) : len(found) + size], batch_size=size)
    return found, time.perf_counter() - began


def wrong(answers: list[Any], expected: list[Any], tolerance: float) -> tuple[int, int]:
    """Count answers that are missing or errors, and those that differ from what is expected by more than rounding."""
    missing = differing = 0
    for found, wanted in zip(answers, expected, strict=True):
        if found is None or isinstance(found, Exception):
            missing += 1
            continue
        scores = found.as_numpy("scores").ravel()
        off = np.abs(scores - [*wanted.scores.values()]).max() > tolerance
        differing += bool(off or found.as_numpy("label").item().decode() != (wanted.label or ""))
    return missing, differing


def one_round(server: triton_server.Server, load: Any, texts: list[str], clients: int) -> dict[str, Any]:
    """Have the server answer texts, then `load` in the same batches and in large ones."""
    requests = [triton_server.inputs({"text": [text]}) for text in texts]
    before, used = triton_server.statistics(server.url, MODEL), server.cpu_s()
    began = time.perf_counter()
    answered = triton_server.ask(server.url, MODEL, requests, clients)
    seconds = time.perf_counter() - began
    after, used = triton_server.statistics(server.url, MODEL), server.cpu_s() - used
    counts = {size: count - before["sizes"].get(size, 0) for size, count in after["sizes"].items()}
    sizes = [size for size, count in counts.items() for _ in range(count)]
    sizes += [1] * (len(texts) - sum(sizes))  # of requests that were never run
    np.random.default_rng(0).shuffle(sizes)
    expected, same_s = answer(load, texts, sizes)
    _, large_s = answer(load, texts, [BATCH] * -(-len(texts) // BATCH))
    tolerance = load.manifest.targets[load.target].parity.tolerance + 2.0**-24  # as in tests/integrations/triton
    missing, differing = wrong([found for found, _ in answered], expected, tolerance)
    return {
        "requests": len(texts),
        "seconds": seconds,
        "load_seconds": same_s,
        "load_of_32_seconds": large_s,
        "server_cpu_seconds": used,
        "executions": after["executions"] - before["executions"],
        "missing": missing,
        "differing": differing,
        "ms": [1e3 * each for _, each in answered],
    }


def summary(rounds: list[dict[str, Any]]) -> dict[str, Any]:
    """Return what the rounds say together; ratios are medians over rounds."""

    def total(name: str) -> Any:
        return sum(each[name] for each in rounds)

    ms = np.concatenate([each.pop("ms") for each in rounds])
    ratios = {
        name: float(np.median([each[f"{name}_seconds"] / each["seconds"] for each in rounds]))
        for name in ("load", "load_of_32")
    }
    return {
        "requests": total("requests"),
        "missing": total("missing"),
        "differing": total("differing"),
        "texts_per_second": total("requests") / total("seconds"),
        "load_texts_per_second": total("requests") / total("load_seconds"),
        "load_of_32_texts_per_second": total("requests") / total("load_of_32_seconds"),
        "throughput_of_load": ratios["load"],
        "throughput_of_load_of_32": ratios["load_of_32"],
        "texts_per_execution": total("requests") / total("executions"),
        "server_cpu_ms_per_text": 1e3 * total("server_cpu_seconds") / total("requests"),
        "p50_ms": float(np.percentile(ms, 50)),
        "p99_ms": float(np.percentile(ms, 99)),
        "rounds": rounds,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, metavar="OUT")
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--text-column")
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--record", type=Path, default=RECORDS / "triton.json")
    options = parser.parse_args()
    claim(options.record)
    if (why := triton_server.obstacle()) is not None:
        sys.exit(why)
    rows = list(itertools.islice(read_texts(options.data, options.text_column), 200_000))
    chosen = np.random.default_rng(0).choice(len(rows), options.requests, replace=len(rows) < options.requests)
    texts = [str(rows[i]) for i in chosen]
    load = adtp_export.load(options.out)
    load(texts[:WARM_UP])
    with tempfile.TemporaryDirectory(dir=options.out.resolve().parent) as scratch:
        triton.write(options.out, Path(scratch), MODEL)
        with triton_server.Server(Path(scratch)) as server:
            warm = [triton_server.inputs({"text": [text]}) for text in texts[:WARM_UP]]
            triton_server.ask(server.url, MODEL, warm, options.clients)
            parts = np.array_split(np.arange(len(texts)), options.rounds)
            rounds = [one_round(server, load, [texts[i] for i in part], options.clients) for part in parts]
            version = re.search(r"server_version\s*\|\s*([0-9.]+)", server.log)
        config = (Path(scratch) / MODEL / "config.pbtxt").read_text(encoding="utf-8")
    record = {
        "command": f"python -m benchmarks.serving.triton_throughput OUT --data {options.data.name} --text-column {options.text_column} "
        f"--requests {options.requests}",
        **told(tritonserver=version[1] if version else "?", tritonclient=importlib.metadata.version("tritonclient")),
        "model": dict(load.manifest.checkpoint),
        "target": load.target,
        "clients": options.clients,
        "config": config.splitlines()[1:],
        **summary(rounds),
    }
    write(options.record, record)
    print(json.dumps({name: value for name, value in record.items() if not isinstance(value, (dict, list))}, indent=2))


if __name__ == "__main__":
    main()
