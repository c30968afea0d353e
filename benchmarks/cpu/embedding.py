"""Text to vector, tokenization included: an exported sentence-transformers model against what others run it with.

    python -m benchmarks.cpu.embedding MODEL_DIR --sst2 FILE --news FILE [--peers PYTHON]     # writes records/embedding.json

MODEL_DIR is a sentence-transformers directory; it is exported first. Peers run in the environment of PYTHON, which needs
`pip install 'sentence-transformers[onnx,openvino]' fastembed`; without it the present one. Those that cannot be loaded are left out and
named. Each contender has a process of its own, and they take turns.

arrivals: batches of 32 texts in order of arrival, one after the other, as a server gets them. sorted: all texts at once; each contender
sorts as it does by itself, with its own best batch size. Streams: sentences of SST-2, posts of 20 Newsgroups (512 tokens at
most), and a mix of both, 3 to 1.
"""

from __future__ import annotations

import argparse
import functools
import json
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.harness.processes import Worker, best_size, in_turns, package_versions, serve, that_run
from benchmarks.harness.records import RECORDS, claim, told, write

OURS = "adtp-export"
PEERS = (
    "sentence-transformers",
    "sentence-transformers-onnx",
    "sentence-transformers-openvino",
    "fastembed",
    "optimum",
)
COUNTS = {"sst2": 512, "20news": 32, "mix": 128}
"""Texts of each stream."""
ARRIVAL, SIZES = 32, (8, 32, 128)
"""Texts of a batch that arrives, and the batch sizes of which each contender has its best."""
ROUNDS, SEED, MAX_TOKENS = 10, 0, 512
TOLERANCE = 1e-4
"""Between vectors of length 1, element by element: contenders that differ by more compute something else."""

PACKAGES = ("sentence-transformers", "fastembed", "optimum", "optimum-onnx", "optimum-intel")
"""Whose versions in the environment of peers are recorded."""

Encode = Callable[[list[str], int], Any]


def load_ours(folder: Path) -> Encode:
    from adtp_export import load

    deployment = load(folder / "out")
    return lambda texts, size: deployment.encode(texts, batch_size=size)


def load_sentence_transformers(backend: str) -> Callable[[Path], Encode]:
    def load(folder: Path) -> Encode:
        from sentence_transformers import SentenceTransformer

        fp32 = {"INFERENCE_PRECISION_HINT": "f32"}  # OpenVINO takes bf16 by itself where the processor has it
        options = {
            "onnx": {"provider": "CPUExecutionProvider", "export": True},
            "openvino": {"export": True, "ov_config": fp32},
        }
        model = SentenceTransformer(
            str(folder / "model"), device="cpu", backend=backend, model_kwargs=options.get(backend, {})
        )
        return lambda texts, size: model.encode(texts, batch_size=size, show_progress_bar=False)

    return load


def load_optimum(folder: Path) -> Encode:
    import torch
    from optimum.onnxruntime import ORTModelForFeatureExtraction
    from transformers import AutoTokenizer

    model = ORTModelForFeatureExtraction.from_pretrained(folder / "model", export=True)
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")

    def encode(texts: list[str], size: int) -> Any:
        order = sorted(range(len(texts)), key=lambda i: len(texts[i]))
        vectors: list[Any] = [None] * len(texts)
        for begin in range(0, len(order), size):
            chosen = order[begin : begin + size]
            batch = tokenizer(
                [texts[i] for i in chosen], padding=True, truncation=True, max_length=MAX_TOKENS, return_tensors="pt"
            )
            states, mask = model(**batch).last_hidden_state, batch["attention_mask"][:, :, None]
            rows = torch.nn.functional.normalize((states * mask).sum(1) / mask.sum(1), dim=1).numpy()
            for i, row in zip(chosen, rows):
                vectors[i] = row
        return vectors

    return encode


def load_fastembed(folder: Path) -> Encode:
    from fastembed import TextEmbedding
    from fastembed.common.model_description import ModelSource, PoolingType

    TextEmbedding.add_custom_model(
        model="local/model",
        pooling=PoolingType.MEAN,
        normalization=True,
        sources=ModelSource(url="https://example.invalid/model"),
        dim=384,
        model_file="onnx/model.onnx",
    )
    model = TextEmbedding(model_name="local/model", specific_model_path=str(folder / "onnx"))
    return lambda texts, size: list(model.embed(texts, batch_size=size))


LOADERS: dict[str, Callable[[Path], Encode]] = {
    OURS: load_ours,
    "sentence-transformers": load_sentence_transformers("torch"),
    "sentence-transformers-onnx": load_sentence_transformers("onnx"),
    "sentence-transformers-openvino": load_sentence_transformers("openvino"),
    "fastembed": load_fastembed,
    "optimum": load_optimum,
}


def work(name: str, folder: Path) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Load a contender; return what answers the commands of `measure`."""
    import numpy as np

    streams = json.loads((folder / "streams.json").read_text(encoding="utf-8"))
    encode = LOADERS[name](folder)

    def answer(asked: dict[str, Any]) -> dict[str, Any]:
        texts = streams[asked["stream"]]
        began = time.perf_counter()
        if asked["how"] == "arrivals":
            rows = [row for i in range(0, len(texts), ARRIVAL) for row in encode(texts[i : i + ARRIVAL], ARRIVAL)]
        else:
            rows = list(encode(texts, asked["size"]))
        took = time.perf_counter() - began
        if asked.get("save"):
            np.save(asked["save"], np.asarray(rows, np.float32))
        return {"seconds": took}

    return answer


def make_streams(sst2: Path, news: Path) -> dict[str, list[str]]:
    """Draw the texts of each stream; a mix has three sentences for each post, shuffled."""
    from adtp_export.data.readers import read_texts

    draw = random.Random(SEED)
    sentences, posts = ([str(text) for text in read_texts(path)] for path in (sst2, news))
    for texts in (sentences, posts):
        draw.shuffle(texts)
    mixed = sentences[COUNTS["sst2"] :][: COUNTS["mix"] * 3 // 4] + posts[COUNTS["20news"] :][: COUNTS["mix"] // 4]
    draw.shuffle(mixed)
    return {"sst2": sentences[: COUNTS["sst2"]], "20news": posts[: COUNTS["20news"]], "mix": mixed}


def started(python: str, folder: Path, streams: list[str]) -> tuple[list[Worker], dict[str, str]]:
    """Start every contender and compare its vectors with ours; return those that run, and why others do not."""
    import numpy as np

    def check(worker: Worker) -> None:
        for stream in streams:
            worker.ask(stream=stream, how="arrivals", save=str(folder / f"{worker.name}-{stream}.npy"))
            ours, own = (np.load(folder / f"{who}-{stream}.npy") for who in (OURS, worker.name))
            if (off := float(np.abs(ours - own).max())) > TOLERANCE:
                raise RuntimeError(f"its vectors differ by {off:.2g}")

    return that_run(
        (
            Worker(name, sys.executable if name == OURS else python, "benchmarks.cpu.embedding", folder)
            for name in LOADERS
        ),
        check,
    )


def sorted_seconds(worker: Worker, stream: str, size: int) -> float:
    return float(worker.ask(stream=stream, how="sorted", size=size)["seconds"])


def measure(workers: list[Worker], streams: list[str]) -> list[dict[str, Any]]:
    import numpy as np

    from adtp_export.benchmarking.interleaved_timing import speedup

    rows = []
    for stream in streams:
        best = {worker.name: best_size(SIZES, functools.partial(sorted_seconds, worker, stream)) for worker in workers}
        for how in ("arrivals", "sorted"):
            times: dict[str, list[float]] = {worker.name: [] for worker in workers}
            for worker in in_turns(workers, ROUNDS):
                times[worker.name].append(worker.ask(stream=stream, how=how, size=best[worker.name])["seconds"])
            for name, seconds in ((name, np.array(values)) for name, values in times.items()):
                times_ours, margin = speedup(seconds, np.array(times[OURS]))
                rows.append(
                    {
                        "stream": stream,
                        "how": how,
                        "contender": name,
                        "batch": ARRIVAL if how == "arrivals" else best[name],
                        "texts_per_s": round(COUNTS[stream] / float(np.median(seconds)), 1),
                        "times_ours": round(times_ours, 3),
                        "margin": round(margin, 3),
                    }
                )
                print(rows[-1], file=sys.stderr)
    return rows


def export(model: Path, folder: Path, python: str) -> None:
    """Copy the model so that it reads `MAX_TOKENS`, and export it for us, and as optimum does for fastembed."""
    import adtp_export

    shutil.copytree(model, folder / "model")
    for name, change in {
        "sentence_bert_config.json": lambda fields: fields | {"max_seq_length": MAX_TOKENS},
        "tokenizer_config.json": lambda fields: fields | {"model_max_length": MAX_TOKENS, "max_length": MAX_TOKENS},
        "tokenizer.json": lambda fields: fields | {"truncation": None, "padding": None},
    }.items():
        path = folder / "model" / name
        path.write_text(json.dumps(change(json.loads(path.read_text(encoding="utf-8")))), encoding="utf-8")
    adtp_export.export(folder / "model", folder / "out")
    code = (
        "import sys; from optimum.onnxruntime import ORTModelForFeatureExtraction as M; "
        "M.from_pretrained(sys.argv[1], export=True).save_pretrained(sys.argv[2] + '/onnx')"
    )
    subprocess.run([python, "-c", code, str(folder / "model"), str(folder / "onnx")], check=False)
    for path in (folder / "model").iterdir():
        if path.suffix in (".json", ".txt") and (folder / "onnx").is_dir():
            (folder / "onnx" / path.name).write_bytes(path.read_bytes())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", metavar="MODEL_DIR", type=Path)
    parser.add_argument("--sst2", metavar="FILE", type=Path, required=True)
    parser.add_argument("--news", metavar="FILE", type=Path, required=True)
    parser.add_argument("--peers", metavar="PYTHON", default=sys.executable)
    parser.add_argument("--out", metavar="FILE", type=Path, default=RECORDS / "embedding.json")
    options = parser.parse_args()
    claim(options.out)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        export(options.model, folder, options.peers)
        (folder / "streams.json").write_text(json.dumps(make_streams(options.sst2, options.news)), encoding="utf-8")
        streams = list(COUNTS)
        workers, left_out = started(options.peers, folder, streams)
        try:
            rows = measure(workers, streams)
        finally:
            for worker in workers:
                worker.close()
    write(options.out, {"results": rows, "left_out": left_out, **told(**package_versions(options.peers, PACKAGES))})


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        serve(lambda: work(sys.argv[2], Path(sys.argv[3])))
    else:
        main()
