"""LeaF on a causal student: gradient difference as target of a pruner, and as mask of confounding tokens of a prompt while distilling.

    python -m benchmarks.students.masking WORK --sst2 FILE [--seeds 3]      # writes records/masking.json

A prompt holds a review of SST-2, a distracting review by another reader, before or after it, and a question about the first.
A model of Qwen3's shape with random weights learns the answers and is the teacher. There are two kinds of students. Those with all
layers drop tokens, at 70% of its FLOPs, and differ in what their pruners learn; with "random" tokens are drawn. Those of `LAYERS`
layers drop none. They differ in the tokens that are removed from prompts on which the student is wrong and the teacher right.

Each student is compared with the first of its kind and the same seed, over the same held-out prompts: the mean difference in accuracy, the
95% interval over prompts of the mean over seeds, and the spread over seeds.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import time
from pathlib import Path
from typing import Any

import numpy as np

import adtp_export
from benchmarks.harness.records import RECORDS, claim, told, write
from benchmarks.students.causal import SHAPE, TEACHER, read, write_rows

SEED, LAYERS, MAX_TOKENS = 0, 2, 96
STUDENT: dict[str, Any] = {"train_rows": 3000, "epochs": 2, "learning_rate": 5e-4, "evaluations": 2}
DIFFERENCE = {"attribution": "gradient-difference"}
PRUNED = {"prune_sites": "1.attention", "flops": 0.7}
SHORT = {"method": "layers", "layers": LAYERS}
RUNS = {
    "pruner": {
        "integrated gradients": {"method": "adtp", **PRUNED},
        "gradient difference": {"method": "adtp", **PRUNED, **DIFFERENCE},
        "random": {"method": "random", **PRUNED},
    },
    "mask": {
        "none": SHORT,
        "gradient difference": {**SHORT, **DIFFERENCE, "mask": "attribution"},
        "integrated gradients": {**SHORT, "mask": "attribution"},
        "random": {**SHORT, "mask": "random"},
    },
}
"""By kind of student, names and settings; the first of each kind is what the others are compared with."""


def prompts(rows: list[dict[str, str]], seed: int) -> list[dict[str, str]]:
    """Make a prompt of each row: its review and a distracting one of another row, in either order, and the question."""
    rng = random.Random(seed)
    made = []
    for row in rows:
        parts = [f"Review : {row['sentence']} .", f"Another reader wrote : {rng.choice(rows)['sentence']} ."]
        rng.shuffle(parts)
        question = "Question : is the review positive or negative ? Answer :"
        made.append({"sentence": " ".join((*parts, question)), "label": row["label"]})
    return made


def make_teacher(work: Path, tokenizer: Path, data: dict[str, Any]) -> Path:
    """Train a causal classifier and return its directory."""
    import torch
    from transformers import AutoTokenizer, Qwen3Config, Qwen3ForSequenceClassification

    if not (work / "classifier" / "results.json").exists():
        own = AutoTokenizer.from_pretrained(tokenizer)
        torch.manual_seed(SEED)
        config = Qwen3Config(vocab_size=len(own), num_labels=2, **{**SHAPE, "max_position_embeddings": MAX_TOKENS})
        Qwen3ForSequenceClassification(config).save_pretrained(work / "base")
        own.save_pretrained(work / "base")
        adtp_export.train(work / "classifier", base=work / "base", force=True, **data, **TEACHER)
    return work / "classifier" / "teacher"


def train_student(work: Path, kind: str, name: str, seed: int, teacher: Path, data: dict[str, Any]) -> Path:
    """Train a student, unless that is done, and return its directory."""
    place = work / f"{kind}-{name.replace(' ', '-')}-{seed}"
    if not (place / "results.json").exists():
        chosen = {**STUDENT, **RUNS[kind][name], "seed": seed}
        adtp_export.train(place, teacher=teacher, force=True, cache=work / "views", **data, **chosen)
    return place


def right(model: Path, rows: list[dict[str, str]]) -> np.ndarray:
    """Say of each prompt whether a student answers it rightly, ``(rows,) bool``; in PyTorch, as it was trained: "random" draws tokens."""
    import torch

    from adtp_export.data.tokenize import encode
    from adtp_export.imports import open_checkpoint
    from adtp_export.training.data import Examples
    from adtp_export.training.evaluate import judge
    from adtp_export.training.methods import for_method
    from adtp_export.training.settings import TrainOptions, read_settings

    opened, settings = open_checkpoint(model), TrainOptions(**read_settings(model / "train.yaml"))
    shares = [] if settings.method == "layers" else [[1.0] * len(settings.sites)]  # only training has a use for them
    method = for_method(settings.method)(opened.student, settings, *shares)
    labels = [int(row["label"]) for row in rows]
    encoded = encode(opened.tokenizer, [row["sentence"] for row in rows], MAX_TOKENS)
    torch.manual_seed(SEED)
    answers = judge(
        method, Examples(encoded=encoded, labels=labels, pad_id=0, inputs=("input_ids", "attention_mask"))
    ).answers
    return np.asarray(torch.stack(answers).argmax(1).numpy() == np.array(labels))


def compare(own: np.ndarray, first: np.ndarray) -> dict[str, Any]:
    """Compare answers ``(seeds, rows) bool`` with those of other students, of the same seeds and rows."""
    apart = own.astype(np.float64) - first
    seeds = apart.mean(1)
    return {
        "accuracy": round(float(own.mean()), 4),
        "gain": round(float(apart.mean()), 4),
        "margin": round(1.96 * float(apart.mean(0).std(ddof=1)) / apart.shape[1] ** 0.5, 4),
        "by_seed": [round(float(seed), 4) for seed in seeds],
        "deviation": round(float(seeds.std(ddof=1)), 4) if len(seeds) > 1 else 0.0,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("work", metavar="WORK", type=Path)
    parser.add_argument("--sst2", metavar="FILE", type=Path, required=True)
    parser.add_argument("--tokenizer", metavar="DIR", type=Path, default=RECORDS.parents[1] / "demo" / "student")
    parser.add_argument("--seeds", metavar="N", type=int, default=3)
    parser.add_argument("--rows", metavar="N", type=int, default=8000)
    parser.add_argument("--out", metavar="FILE", type=Path, default=RECORDS / "masking.json")
    options = parser.parse_args()
    claim(options.out)
    work = options.work
    work.mkdir(parents=True, exist_ok=True)
    train, test = (prompts(rows, seed) for seed, rows in enumerate(read(options.sst2, options.rows)))
    files = {"train": write_rows(work / "train.tsv", train), "test": write_rows(work / "test.tsv", test)}
    data = {**files, "text_column": "sentence", "max_tokens": MAX_TOKENS}
    began = time.monotonic()
    teacher = make_teacher(work, options.tokenizer, data)
    judged = json.loads((work / "classifier" / "results.json").read_text(encoding="utf-8"))["teacher"]
    print("teacher", judged, round(time.monotonic() - began), flush=True)
    rows: list[dict[str, Any]] = []
    answers: dict[tuple[str, str], list[np.ndarray]] = {}
    said: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for seed in range(options.seeds):
        for kind, runs in RUNS.items():
            for name in runs:
                place = train_student(work, kind, name, seed, teacher, data)
                said.setdefault((kind, name), []).append(json.loads((place / "results.json").read_text())["student"])
                answers.setdefault((kind, name), []).append(right(place, test))
                print(kind, name, seed, answers[kind, name][-1].mean(), round(time.monotonic() - began), flush=True)
    for kind, name in answers:
        first = np.stack(answers[kind, next(iter(RUNS[kind]))])
        kept = {
            "flops_reduction": [round(run["flops_reduction"]["teacher"], 3) for run in said[kind, name]],
            "masked_texts": [run.get("masked_texts", 0) for run in said[kind, name]],
        }
        rows.append({"kind": kind, "name": name, **compare(np.stack(answers[kind, name]), first), **kept})
    record = {
        "rows": len(train),
        "test": len(test),
        "seeds": options.seeds,
        "layers": LAYERS,
        "epochs": STUDENT["epochs"],
    }
    record["student_rows"] = min(len(train), STUDENT["train_rows"])
    record |= {"teacher": judged["accuracy"], "results": rows}
    threads = int(os.environ.get("OMP_NUM_THREADS", 0))
    write(options.out, {**record, **told(threads)})


if __name__ == "__main__":
    main()
