"""Texts of very unequal length in order of arrival: in ONNX Runtime without and with the operators, in lower precisions, and in `load`.

    python -m benchmarks.cpu.mixed_stream OUT PRECOMPUTED --sst2 FILE --news FILE         # in records/mixed-stream.json

OUT is what `adtp-export MODEL_DIR --precision bf16,int8` writes, PRECOMPUTED what `adtp-export MODEL_DIR
--precompute-embedding-projections` does; each model has a part of the record. The stream has three sentences of SST-2 for each post of
20 Newsgroups, in batches of 32 in order of arrival. ONNX Runtime gets tokens, each batch as it arrived or split by length into parts.
`load` gets all texts at once, and tokenizes and sorts them. Contenders have processes of their own and take turns.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.harness.processes import Worker, in_turns, serve
from benchmarks.harness.records import RECORDS, claim, read_document, told, write

TEXTS, ARRIVAL, SPLITS = 192, 32, (32, 16, 8, 4, 1)
"""Texts of the stream, of a batch that arrives, and of its parts."""
ROUNDS, SEED = 9, 0
GRAPH, OPERATORS = "graph", "operators"
LOWER = {name: f"onnxruntime-cpu-{name}-linear-plugin" for name in ("bf16", "int8")}
LOADS = {
    "load-graph": (0, "onnxruntime-cpu-fp32"),
    "load": (0, None),
    "load-precomputed": (1, None),
    **{f"load-{name}": (0, target) for name, target in LOWER.items()},
}
"""Which directory `load` is given, and which target; None: it chooses."""


def mixed(sst2: Path, news: Path, count: int) -> list[str]:
    """Draw so many texts, three sentences for each post, shuffled."""
    from adtp_export.data.readers import read_texts

    draw = random.Random(SEED)
    parts = []
    for path, share in ((sst2, count * 3 // 4), (news, count - count * 3 // 4)):
        texts = [str(text) for text in read_texts(path)]
        draw.shuffle(texts)
        parts += texts[:share]
    draw.shuffle(parts)
    return parts


def work(name: str, folder: Path) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Load a contender; return what answers the commands of `measure`."""
    given = json.loads((folder / "given.json").read_text(encoding="utf-8"))
    run = through_load(name, given) if name in LOADS else through_onnxruntime(name, given)

    def answer(asked: dict[str, Any]) -> dict[str, Any]:
        run(asked["split"])  # not timed
        began = time.perf_counter()
        run(asked["split"])
        return {"seconds": time.perf_counter() - began}

    return answer


def through_load(name: str, given: dict[str, Any]) -> Callable[[int], object]:
    from adtp_export import load
    from adtp_export.contract import HEAD_EMBEDDING

    which, target = LOADS[name]
    predictor = load(given["outs"][which], target=target)
    answer = predictor.encode if predictor.head == HEAD_EMBEDDING else predictor
    return lambda split: answer(given["texts"])


def through_onnxruntime(name: str, given: dict[str, Any]) -> Callable[[int], object]:
    """Open a file of OUT as an application does; its tokens are made beforehand."""
    import onnxruntime  # noqa: TID251 # as an application that has nothing of ours

    from adtp_export import load
    from adtp_export.data.tokenize import encode, pad
    from adtp_export.plugins import operators

    predictor, options = load(given["outs"][0], target="onnxruntime-cpu-fp32"), onnxruntime.SessionOptions()
    if name != GRAPH:
        options.register_custom_ops_library(str(operators.library()))
    out = Path(given["outs"][0])
    targets = read_document(out / "manifest.json")["targets"]
    file = targets[LOWER.get(name, "onnxruntime-cpu-fp32")]["file"]
    session = onnxruntime.InferenceSession(out / file, options, providers=["CPUExecutionProvider"])
    names = [entry.name for entry in session.get_inputs()]
    rows = encode(predictor.tokenizer, given["texts"], predictor.max_tokens)
    feeds = {}
    for split in SPLITS:
        parts = []
        for begin in range(0, len(rows), ARRIVAL):
            arrived = rows[begin : begin + ARRIVAL]
            if split < ARRIVAL:
                arrived = sorted(arrived, key=lambda row: len(row.input_ids))
            parts += [pad(arrived[i : i + split], predictor.pad_id, names) for i in range(0, len(arrived), split)]
        feeds[split] = parts
    return lambda split: [session.run(None, feed) for feed in feeds[split]]


def measure(workers: list[Worker]) -> list[dict[str, Any]]:
    """Time every contender in every way in turns; a way's ratio is to the best of its contender."""
    import numpy as np

    from adtp_export.benchmarking.interleaved_timing import speedup

    times: dict[tuple[str, int], list[float]] = {}
    for worker in in_turns(workers, ROUNDS):
        for split in SPLITS[:1] if worker.name in LOADS else SPLITS:
            times.setdefault((worker.name, split), []).append(worker.ask(split=split)["seconds"])
    rows = []
    for (name, split), seconds in times.items():
        ways = {way: values for (who, way), values in times.items() if who == name}
        best = min(ways, key=lambda way: np.median(ways[way])) if len(ways) > 1 else split
        against = times["load-precomputed", ARRIVAL] if name in LOADS else ways[best]
        ratio, margin = speedup(np.array(seconds), np.array(against))
        rows.append({"contender": name, "split": split, "s": round(float(np.median(seconds)), 4)})
        rows[-1] |= {"ratio": round(ratio, 3), "margin": round(margin, 3)}
        print(rows[-1], file=sys.stderr)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("outs", metavar="DIR", nargs=2, type=Path, help="OUT and PRECOMPUTED")
    parser.add_argument("--sst2", metavar="FILE", type=Path, required=True)
    parser.add_argument("--news", metavar="FILE", type=Path, required=True)
    parser.add_argument("--out", metavar="FILE", type=Path, default=RECORDS / "mixed-stream.json")
    options = parser.parse_args()
    claim(options.out)
    outs = [str(path.resolve()) for path in options.outs]
    manifest = read_document(options.outs[0] / "manifest.json")
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        given = {"outs": outs, "texts": mixed(options.sst2, options.news, TEXTS)}
        (folder / "given.json").write_text(json.dumps(given), encoding="utf-8")
        workers = []
        try:
            for name in (GRAPH, OPERATORS, *LOWER, *LOADS):
                workers.append(Worker(name, sys.executable, "benchmarks.cpu.mixed_stream", folder))
            rows = measure(workers)
        finally:
            for worker in workers:
                worker.close()
    part = {"texts": TEXTS, "batch": ARRIVAL, "rounds": ROUNDS, "results": rows, **told()}
    write(options.out, read_document(options.out) | {manifest["checkpoint"]["name"]: part})


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        serve(lambda: work(sys.argv[2], Path(sys.argv[3])))
    else:
        main()
