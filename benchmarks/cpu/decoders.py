"""Text to vector with a model of Qwen3-Embedding-0.6B's width and random weights, tokenization included, beside what others run.

    python -m benchmarks.cpu.decoders WORK --tokenizer DIR --sst2 FILE --news FILE --peers PYTHON [--layers 28]   # prepares WORK
    python -m benchmarks.cpu.decoders WORK --peers PYTHON --rounds 1      # again and again: writes records/decoders.json

The first call writes the model, exports it, and converts it for OpenVINO. Each further one adds rounds to WORK, so that it takes
minutes, and writes the record of all rounds so far. PYTHON's environment needs `pip install sentence-transformers
'optimum-intel[openvino]'`. All peers are sentence-transformers in fp32; each contender has a process of its own, and they take turns.

The stream is three sentences of SST-2 for each post of 20 Newsgroups. arrivals: batches of 32 texts as they arrive. single: one text at
a time. sorted: all at once, in batches of 8; everybody sorts by himself.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.harness.processes import Worker, in_turns, package_versions, serve, that_run
from benchmarks.harness.records import RECORDS, claim, told, write

OURS, OPENVINO = "adtp-export", "sentence-transformers-openvino"
EAGER, SDPA = "sentence-transformers-eager", "sentence-transformers-sdpa"
CONTENDERS = (OURS, SDPA, EAGER, OPENVINO)
HOW = {"arrivals": 32, "single": 1, "sorted": 8}
"""How texts come, and texts in a batch."""
MAX_TOKENS, SEED = 512, 0
EXPORT = "export.json"
"""Holds how much memory the export took at its peak."""
TOLERANCE = 1e-4
"""Between vectors of length 1, element by element."""
PACKAGES = ("sentence-transformers", "transformers", "optimum-intel", "openvino")
SHAPE = {
    "hidden_size": 1024,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 3072,
    "max_position_embeddings": 32768,
    "rope_theta": 1_000_000,
    "vocab_size": 151_669,
    "pad_token_id": 0,
    "bos_token_id": 2,
    "eos_token_id": 3,
}
"""Qwen3-Embedding-0.6B's, but for the special ids, which are those of BERT's tokenizers."""


def load_ours(folder: Path) -> Callable[[list[str], int], Any]:
    from adtp_export import load

    deployment = load(folder / "out")
    return lambda texts, size: deployment.encode(texts, batch_size=size)


def load_peer(name: str, folder: Path) -> Callable[[list[str], int], Any]:
    from sentence_transformers import SentenceTransformer

    if name == OPENVINO:
        options: dict[str, Any] = {"ov_config": {"INFERENCE_PRECISION_HINT": "f32"}}
        model = SentenceTransformer(str(folder / "openvino"), device="cpu", backend="openvino", model_kwargs=options)
    else:
        options = {"dtype": "float32", "attn_implementation": name.rpartition("-")[2]}
        model = SentenceTransformer(str(folder / "model"), device="cpu", model_kwargs=options)
    model.max_seq_length = MAX_TOKENS
    return lambda texts, size: model.encode(texts, batch_size=size, show_progress_bar=False)


def work(name: str, folder: Path) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Load a contender; return what answers the commands of `measure`."""
    import resource

    import numpy as np

    texts = json.loads((folder / "texts.json").read_text(encoding="utf-8"))
    encode = load_ours(folder) if name == OURS else load_peer(name, folder)

    def answer(asked: dict[str, Any]) -> dict[str, Any]:
        chosen, size = texts[: asked.get("texts")], HOW[asked["how"]]
        given = len(texts) if asked["how"] == "sorted" else size  # at once
        began = time.perf_counter()
        rows = [row for i in range(0, len(chosen), given) for row in encode(chosen[i : i + given], size)]
        took = time.perf_counter() - began
        if asked.get("save"):
            np.save(asked["save"], np.asarray(rows, np.float32))
        return {"seconds": took, "most_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024}

    return answer


def write_model(folder: Path, tokenizer: Path, layers: int) -> None:
    """Write a sentence-transformers directory in bf16."""
    import torch
    from transformers import AutoTokenizer, Qwen3Config, Qwen3Model

    torch.manual_seed(SEED)
    torch.set_default_dtype(torch.bfloat16)
    model = Qwen3Model(Qwen3Config(num_hidden_layers=layers, tie_word_embeddings=True, dtype="bfloat16", **SHAPE))
    model.save_pretrained(folder)
    own = AutoTokenizer.from_pretrained(tokenizer)
    own.model_max_length = MAX_TOKENS
    own.save_pretrained(folder)
    write_modules(folder, SHAPE["hidden_size"])


def write_modules(folder: Path, hidden_size: int) -> None:
    """Make a sentence-transformers directory of an encoder: the last token's state, of length 1."""
    kinds = {"": "Transformer", "1_Pooling": "Pooling", "2_Normalize": "Normalize"}
    modules = [
        {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for i, (path, kind) in enumerate(kinds.items())
    ]
    (folder / "modules.json").write_text(json.dumps(modules), encoding="utf-8")
    (folder / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": MAX_TOKENS}), encoding="utf-8")
    pooling: dict[str, Any] = {"word_embedding_dimension": hidden_size, "pooling_mode_lasttoken": True}
    pooling |= {"pooling_mode_mean_tokens": False, "pooling_mode_cls_token": False}
    for name, fields in {"1_Pooling": pooling, "2_Normalize": {}}.items():
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps(fields), encoding="utf-8")


def prepare(folder: Path, options: argparse.Namespace) -> None:
    """Write everything that rounds need."""
    import resource

    import adtp_export
    from adtp_export.data.readers import read_texts

    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    draw = random.Random(SEED)
    sentences, posts = ([str(text) for text in read_texts(path)] for path in (options.sst2, options.news))
    mixed = draw.sample(sentences, options.texts * 3 // 4) + draw.sample(posts, options.texts // 4)
    draw.shuffle(mixed)
    (folder / "texts.json").write_text(json.dumps(mixed), encoding="utf-8")
    write_model(folder / "model", options.tokenizer, options.layers)
    adtp_export.export(folder / "model", folder / "out", seq="1:16:16")
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
    (folder / EXPORT).write_text(json.dumps({"most_mb": most}), encoding="utf-8")
    code = (
        "import sys; from sentence_transformers import SentenceTransformer as M; "
        "M(sys.argv[1], backend='openvino', device='cpu', model_kwargs={'export': True}).save_pretrained(sys.argv[2])"
    )
    subprocess.run([options.peers, "-c", code, str(folder / "model"), str(folder / "openvino")], check=False)
    (folder / "rounds.jsonl").touch()


def started(folder: Path, python: str) -> tuple[list[Worker], dict[str, str]]:
    """Start every contender and compare its vectors of a few texts with ours."""
    import numpy as np

    def check(worker: Worker) -> None:
        worker.ask(how="arrivals", texts=4, save=str(folder / f"{worker.name}.npy"))
        ours, own = (np.load(folder / f"{who}.npy") for who in (OURS, worker.name))
        if not (off := float(np.abs(ours - own).max())) <= TOLERANCE:  # NaN, too
            raise RuntimeError(f"its vectors differ by {off:.2g}")

    module = "benchmarks.cpu.decoders"
    return that_run(
        (Worker(name, sys.executable if name == OURS else python, module, folder) for name in CONTENDERS), check
    )


def summary(rounds: list[dict[str, Any]], texts: int) -> list[dict[str, Any]]:
    """Return the median of each contender's rounds, and how many times as long as ours it takes: the median over whole rounds."""
    by_round: dict[tuple[str, int], dict[str, float]] = {}
    for row in rounds:
        by_round.setdefault((row["how"], row["round"]), {})[row["contender"]] = row["seconds"]
    rows = []
    for how in HOW:
        taken = [seconds for (kind, _), seconds in by_round.items() if kind == how]
        whole = max(map(len, taken), default=0)
        taken = [seconds for seconds in taken if len(seconds) == whole]  # a round that was stopped does not count
        for name in CONTENDERS:
            own = [seconds for seconds in taken if name in seconds and OURS in seconds]
            if own:
                times = [seconds[name] / seconds[OURS] for seconds in own]
                rows.append({
                    "how": how, "contender": name, "rounds": len(own),
                    "texts_per_s": round(texts / statistics.median(seconds[name] for seconds in own), 2),
                    "times_ours": round(statistics.median(times), 3),
                    "least": round(min(times), 3), "most": round(max(times), 3),
                    "most_mb": max(row["most_mb"] for row in rounds if row["contender"] == name),
                })  # fmt: skip
    return rows


def measure(folder: Path, options: argparse.Namespace) -> None:
    """Add rounds, and write the record of all."""
    from adtp_export.artifacts.manifest import read_manifest

    claim(options.out)
    path = folder / "rounds.jsonl"
    texts = json.loads((folder / "texts.json").read_text(encoding="utf-8"))
    done = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    workers, left_out = started(folder, options.peers)
    try:
        for how in options.how:
            first = 1 + max((row["round"] for row in done if row["how"] == how), default=-1)
            for i, worker in enumerate(in_turns(workers, options.rounds)):
                row = {"how": how, "round": first + i // len(workers), "contender": worker.name, **worker.ask(how=how)}
                done.append(row)
                with path.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(row) + "\n")
                print(row, file=sys.stderr)
    finally:
        for worker in workers:
            worker.close()
    fields = json.loads((folder / "model" / "config.json").read_text(encoding="utf-8"))
    found = {
        "layers": fields["num_hidden_layers"],
        "texts": len(texts),
        "export_most_mb": json.loads((folder / EXPORT).read_text(encoding="utf-8"))["most_mb"],
        "target": next(iter(read_manifest(folder / "out").targets)),
        "results": summary(done, len(texts)),
        "left_out": left_out,
    }
    write(options.out, {**found, **told(**package_versions(options.peers, PACKAGES))})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("work", metavar="WORK", type=Path)
    parser.add_argument("--tokenizer", metavar="DIR", type=Path, help="with a tokenizer of BERT's; this prepares WORK")
    parser.add_argument("--sst2", metavar="FILE", type=Path)
    parser.add_argument("--news", metavar="FILE", type=Path)
    parser.add_argument("--peers", metavar="PYTHON", default=sys.executable)
    parser.add_argument("--layers", metavar="N", type=int, default=28)
    parser.add_argument("--texts", metavar="N", type=int, default=32)
    parser.add_argument("--rounds", metavar="N", type=int, default=1)
    parser.add_argument("--how", metavar="HOW", choices=HOW, nargs="+", default=[*HOW])
    parser.add_argument("--out", metavar="FILE", type=Path, default=RECORDS / "decoders.json")
    options = parser.parse_args()
    if options.tokenizer:
        prepare(options.work, options)
    else:
        measure(options.work, options)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        serve(lambda: work(sys.argv[2], Path(sys.argv[3])))
    else:
        main()
