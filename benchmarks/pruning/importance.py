"""What a teacher still answers when tokens are taken away, as in Figure 1 of AD-TP's paper; nothing is trained here:

    python -m benchmarks.pruning.importance SPLITS BASE WORK      # adds to records/systems-importance.jsonl

The teachers are those of `train.py`. A text keeps [CLS] and so many of its other tokens, each at its own position, and the
teacher never sees the rest. They are chosen by chance, by the attention that they receive in the first or in the last layer from all
tokens of the whole text, or by how large the gradient of the answer is with respect to their embedding (Euclidean norm).
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from adtp_export.contract import RECEIVED
from adtp_export.explain.gradients import integrated_gradients
from adtp_export.model import registry
from adtp_export.model.pruners import Seen
from adtp_export.model.selection import PERMILLE, kept_count
from adtp_export.training.methods.gated import run_gated
from adtp_export.training.task import Task
from benchmarks.harness.records import RECORDS, claim, read_lines, told, update
from benchmarks.pruning.train import DATA, SEEDS, Place

RETENTION = tuple(i / 10 for i in range(11))
ROWS = {"sst2": 400, "20news": 150}
BATCH = 32


def batches(task: Task, count: int) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
    """Yield inputs and labels of so many test rows, by length."""
    rows = task.parts["test"]
    numbers = sorted(range(min(count, len(rows))), key=lambda i: rows.lengths[i])
    for begin in range(0, len(numbers), BATCH):
        batch = rows.collate(numbers[begin : begin + BATCH])
        labels = batch.pop("labels")
        yield batch, labels


def importance(teacher: nn.Module, task: Task, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return what each token is worth, ``(B, S)``, by kind."""
    objective = task.objective
    score = functools.partial(objective.score, batch=batch)
    run = functools.partial(objective.ask, teacher, batch)
    _, gradients = integrated_gradients(run, teacher.get_input_embeddings(), 1, score, times_input=False)  # type: ignore[operator]
    backbone = registry.backbone(teacher.config.model_type)(teacher)  # type: ignore[union-attr]
    seen: list[Tensor | None] = []

    def look(now: Seen, kept: Tensor) -> tuple[Tensor, Tensor]:
        """Note what was received in the first layer, and drop nothing."""
        seen.append(now.received)
        return torch.ones(()), kept

    with torch.no_grad():
        layers = {0: RECEIVED, backbone.num_layers - 1: RECEIVED}
        seen.append(run_gated(backbone, {"0_ffn": look}, layers, batch).received)
    worth = {"gradient": gradients.norm(dim=-1)}
    for name, received in zip(("first", "last"), seen):
        assert received is not None
        worth[f"attention, {name} layer"] = received
    for seed in SEEDS:
        drawn = torch.Generator().manual_seed(seed * 10_007 + int(batch["input_ids"].sum()))
        worth[f"random, seed {seed}"] = torch.rand(batch["input_ids"].shape, generator=drawn)
    return worth


@torch.no_grad()
def right(teacher: nn.Module, batch: dict[str, Tensor], labels: Tensor, worth: Tensor, retention: float) -> int:
    """Count right answers to texts of which [CLS] and the tokens of most worth are left."""
    live = batch["attention_mask"].bool()
    worth = worth.masked_fill(~live, -torch.inf)
    worth[:, 0] = torch.inf
    lengths = live.sum(1)
    counts = kept_count(lengths, round(PERMILLE * retention), 1)
    longest = int(counts.max())
    chosen = worth.topk(longest, dim=1).indices
    there = torch.arange(longest) < counts[:, None]
    inputs = {name: values.gather(1, chosen) for name, values in batch.items() if name != "attention_mask"}
    answer = teacher(**inputs, attention_mask=there.long(), position_ids=chosen).logits
    return int((answer.argmax(1) == labels).sum())


def curves(dataset: str, place: Place) -> list[dict[str, Any]]:
    """Return a row for each way to choose tokens: the accuracy at each retention."""
    source = place.teacher(dataset)
    task = place.task(dataset, {"teacher": str(source)})
    teacher = task.load_teacher(str(source), tuned=True).eval().requires_grad_(False)
    found: dict[str, list[int]] = {}
    rows = 0
    for batch, labels in batches(task, ROWS[dataset]):
        rows += len(labels)
        for kind, worth in importance(teacher, task, batch).items():
            hits = found.setdefault(kind, [0] * len(RETENTION))
            for i, retention in enumerate(RETENTION):
                hits[i] += right(teacher, batch, labels, worth, retention)
    same = {"rows": rows, **told(torch.get_num_threads())}
    return [
        {
            "dataset": dataset,
            "kind": kind,
            "retention": RETENTION,
            "accuracy": [round(n / rows, 4) for n in hits],
            **same,
        }
        for kind, hits in found.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("splits", "base", "work"):
        parser.add_argument(name, type=Path)
    parser.add_argument("--out", metavar="FILE", type=Path, default=RECORDS / "systems-importance.jsonl")
    options = parser.parse_args()
    claim(options.out)
    torch.set_num_threads(1)
    place = Place(options.splits, options.base, options.work)
    for dataset in sorted(set(DATA) - {row["dataset"] for row in read_lines(options.out)}, reverse=True):
        update(options.out, curves(dataset, place), key=lambda row: row["dataset"])


if __name__ == "__main__":
    main()
