"""What pruning costs a causal model of vectors: a small model of Qwen3's shape, and students of it that drop tokens.

    python -m benchmarks.students.causal WORK --sst2 FILE [--methods adtp schedule] [--seeds 3]      # writes records/causal.json

A model with random weights learns the labels of SST-2. Without its last product it is the teacher: its vectors are the last token's
state. Students learn these vectors from texts alone, at a share of its FLOPs. All are exported and verified, and what is judged is what
`load` answers.

Quality is the share of held-out texts whose label most of their `NEIGHBOURS` nearest training texts have. The loss is that of the teacher
less that of a student, with the 95% interval of the paired difference over texts, and the mean and the spread over seeds. Figures of so
small a model say that training works and what noise is; they do not say what a public model would lose.
"""

from __future__ import annotations

import argparse
import csv
import json
import random
import statistics
from pathlib import Path
from typing import Any

import numpy as np

import adtp_export
from benchmarks.cpu.decoders import write_modules
from benchmarks.harness.records import RECORDS, claim, told, write

SEED, TEST, NEIGHBOURS, MAX_TOKENS = 0, 2000, 15, 64
SHAPE = {
    "hidden_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "intermediate_size": 192,
    "max_position_embeddings": MAX_TOKENS,
    "pad_token_id": 0,
}
METHODS = {
    "adtp": {"prune_sites": "1.attention"},
    "schedule": {"prune_sites": "1.attention"},
    "ltp": {"prune_sites": "0.ffn,1.ffn"},
    "top": {"prune_sites": "1.attention,2.attention"},
    "transkimmer": {"prune_sites": "1.attention,2.attention"},
}
TEACHER = {"method": "layers", "teacher_epochs": 4, "epochs": 0.02, "teacher_learning_rate": 1e-3, "evaluations": 1}
STUDENT = {"task": "embedding", "flops": 0.6, "epochs": 3, "learning_rate": 5e-4, "evaluations": 3}


def read(path: Path, rows: int) -> tuple[list[dict[str, str]], list[dict[str, str]]]:
    """Return training rows and held-out rows, drawn with a fixed seed."""
    from adtp_export.data.readers import read_rows

    every = [{"sentence": str(text), "label": str(label)} for text, label in read_rows(path, "sentence", "label")]
    random.Random(SEED).shuffle(every)
    return every[TEST : TEST + rows], every[:TEST]


def write_rows(path: Path, rows: list[dict[str, str]]) -> Path:
    with path.open("w", encoding="utf-8", newline="") as stream:
        writer = csv.DictWriter(stream, ["sentence", "label"], delimiter="\t", quoting=csv.QUOTE_NONE, quotechar=None)
        writer.writeheader()
        writer.writerows(rows)
    return path


def make_teacher(work: Path, tokenizer: Path, files: dict[str, Path]) -> Path:
    """Train a classifier and write its encoder as a sentence-transformers directory."""
    import torch
    from transformers import AutoTokenizer, Qwen3Config, Qwen3ForSequenceClassification, Qwen3Model

    home = work / "teacher"
    if (home / "modules.json").exists():
        return home
    own = AutoTokenizer.from_pretrained(tokenizer)
    torch.manual_seed(SEED)
    config = Qwen3Config(vocab_size=len(own), num_labels=2, **SHAPE)
    Qwen3ForSequenceClassification(config).save_pretrained(work / "base")
    own.save_pretrained(work / "base")
    settings = {**TEACHER, "text_column": "sentence", "max_tokens": MAX_TOKENS}
    adtp_export.train(work / "classifier", base=work / "base", force=True, **files, **settings)
    Qwen3Model.from_pretrained(work / "classifier" / "teacher").save_pretrained(home)
    own.save_pretrained(home)
    write_modules(home, SHAPE["hidden_size"])
    return home


def vectors(model: Path, out: Path, texts: list[str]) -> tuple[np.ndarray, dict[str, Any]]:
    """Export a model and return its vectors of texts, and what its manifest says of the target that made them."""
    manifest = adtp_export.export(model, out, force=True)
    name, target = next(iter(manifest.targets.items()))
    encode = adtp_export.load(out, target=name)
    return np.asarray(encode.encode(texts), np.float32), {"target": name, "status": target.status}


def right(found: np.ndarray, labels: np.ndarray, train: int) -> np.ndarray:
    """Say of each held-out text whether its nearest training texts have its label, ``(texts,) bool``; the first `train` rows are those."""
    unit = found / np.linalg.norm(found, axis=1, keepdims=True)
    nearest = np.argsort(-(unit[train:] @ unit[:train].T), axis=1)[:, :NEIGHBOURS]
    return np.asarray((labels[nearest].mean(1) > 0.5) == labels[train:])


def judge(name: str, own: np.ndarray, teachers: np.ndarray) -> dict[str, Any]:
    apart = teachers.astype(np.float64) - own
    return {
        "name": name,
        "accuracy": round(float(own.mean()), 4),
        "loss": round(float(apart.mean()), 4),
        "margin": round(1.96 * float(apart.std(ddof=1)) / len(apart) ** 0.5, 4),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("work", metavar="WORK", type=Path)
    parser.add_argument("--sst2", metavar="FILE", type=Path, required=True)
    parser.add_argument("--tokenizer", metavar="DIR", type=Path, default=RECORDS.parents[1] / "demo" / "student")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--seeds", metavar="N", type=int, default=3)
    parser.add_argument("--rows", metavar="N", type=int, default=8000)
    parser.add_argument("--out", metavar="FILE", type=Path, default=RECORDS / "causal.json")
    options = parser.parse_args()
    claim(options.out)
    work = options.work
    work.mkdir(parents=True, exist_ok=True)
    train, test = read(options.sst2, options.rows)
    files = {"train": write_rows(work / "train.tsv", train), "test": write_rows(work / "test.tsv", test)}
    texts = [row["sentence"] for row in (*train, *test)]
    labels = np.array([row["label"] == "1" for row in (*train, *test)])
    teacher = make_teacher(work, options.tokenizer, files)
    found, target = vectors(teacher, work / "out", texts)
    expected = right(found, labels, len(train))
    rows = [{**judge("teacher", expected, expected), **target}]
    for method in options.methods:
        for seed in range(options.seeds):
            place = work / f"{method}-{seed}"
            if not (place / "results.json").exists():
                settings = {**STUDENT, **METHODS[method], "text_column": "sentence", "max_tokens": MAX_TOKENS}
                chosen = {**settings, "method": method, "seed": seed}
                adtp_export.train(place, teacher=teacher, force=True, cache=work / "views", **files, **chosen)
            said = json.loads((place / "results.json").read_text(encoding="utf-8"))["student"]
            found, target = vectors(place, work / "out", texts)
            own = judge(f"{method}, seed {seed}", right(found, labels, len(train)), expected)
            kept = {name: said[name] for name in ("retention", "flops_reduction", "spearman", "cosine")}
            rows.append({**own, **target, **kept})
            print(rows[-1], flush=True)
    losses = {name: [row["loss"] for row in rows if row["name"].startswith(f"{name},")] for name in options.methods}
    spread = {
        name: {
            "mean": round(statistics.fmean(own), 4),
            "deviation": round(statistics.pstdev(own), 4),
            "seeds": len(own),
        }
        for name, own in losses.items()
    }
    record = {"rows": len(train), "test": len(test), "neighbours": NEIGHBOURS, "results": rows, "losses": spread}
    write(options.out, {**record, **told()})


if __name__ == "__main__":
    main()
