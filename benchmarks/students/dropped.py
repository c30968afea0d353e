"""What attention flow and integrated gradients say of the tokens that a trained pruner drops, beside those that it keeps.

    python -m benchmarks.students.dropped WORK [--texts 200] [--seeds 3]      # writes records/dropped.json

WORK is where `benchmarks.students.masking` trained its students: classifiers of Qwen3's shape, which read the answer off the last token.
Both measures are of the student with nothing dropped: the flow from each token to the last, and the attribution of the student's answer.
The first token and the last stay always and are left out.

For each text: the share of a measure that the dropped tokens have, over their share of the tokens; and the AUC, the probability that a
kept token has more than a dropped one. A random choice drops as many. What is said is the mean over texts of the mean over seeds, with
its 95% interval over texts.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

import numpy as np
from scipy.stats import rankdata

from adtp_export.data.tokenize import encode, pad
from adtp_export.explain.flow import flows
from adtp_export.explain.prompt import attended
from adtp_export.explain.student import explain
from adtp_export.imports import open_checkpoint
from benchmarks.harness.records import RECORDS, claim, told, write
from benchmarks.students.masking import MAX_TOKENS, RUNS

LEARNED = tuple(name for name in RUNS["pruner"] if name != "random")


def auc(values: np.ndarray, dropped: np.ndarray) -> float:
    """Return the probability that a kept token has a larger value than a dropped one; ties count half."""
    kept, gone = int((~dropped).sum()), int(dropped.sum())
    return float((rankdata(values)[~dropped].sum() - kept * (kept + 1) / 2) / (kept * gone))


def share(values: np.ndarray, dropped: np.ndarray) -> float:
    """Return the share of the values that dropped tokens have, over their share of the tokens."""
    return float(values[dropped].mean() / values.mean())


def judge(model: Path, texts: list[str], seed: int) -> np.ndarray:
    """Return ``(texts, 2, 2, 2)``: flow and attribution; the student's own choice and a random one; `share` and `auc`. NaN where the
    student drops nothing of a text, or everything."""
    opened, random = open_checkpoint(model), np.random.default_rng(seed)
    student = opened.student
    found = np.full((len(texts), 2, 2, 2), np.nan)
    for number, row in enumerate(encode(opened.tokenizer, texts, MAX_TOKENS)):
        tokens = len(row.input_ids)
        explained = explain(student, pad([row], 0, student.input_names), np.ones(tokens, bool))
        layers = attended(student.backbone, row.input_ids)
        flow = flows(layers, np.full(tokens, len(layers)), range(tokens), [tokens - 1])[1:-1]
        own = np.array(explained.kept_site)[1:-1] < len(student.config.sites)
        if not 0 < own.sum() < len(own):
            continue
        for i, values in enumerate((flow, np.array(explained.attribution)[1:-1])):
            for j, dropped in enumerate((own, random.permutation(own))):
                found[number, i, j] = share(values, dropped), auc(values, dropped)
    return found


def summary(by_seed: np.ndarray) -> list[dict[str, float]]:
    """Return mean and margin over texts of figures ``(seeds, texts, 2)``, `share` and `auc`."""
    texts = np.nanmean(by_seed[:, ~np.isnan(by_seed).all((0, 2))], 0)
    margins = 1.96 * texts.std(0, ddof=1) / len(texts) ** 0.5
    return [{"mean": round(float(m), 4), "margin": round(float(x), 4)} for m, x in zip(texts.mean(0), margins)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("work", metavar="WORK", type=Path)
    parser.add_argument("--texts", metavar="N", type=int, default=200)
    parser.add_argument("--seeds", metavar="N", type=int, default=3)
    parser.add_argument("--out", metavar="FILE", type=Path, default=RECORDS / "dropped.json")
    options = parser.parse_args()
    claim(options.out)
    texts = [line.split("\t")[0] for line in (options.work / "test.tsv").read_text(encoding="utf-8").splitlines()[1:]]
    texts, rows = texts[: options.texts], list[dict[str, Any]]()
    for name in LEARNED:
        places = [options.work / f"pruner-{name.replace(' ', '-')}-{seed}" for seed in range(options.seeds)]
        found = np.stack([judge(place, texts, seed) for seed, place in enumerate(places)])
        for i, measure in enumerate(("flow", "integrated gradients")):
            for j, choice in enumerate(("own", "random")):
                shares, aucs = summary(found[:, :, i, j])
                rows.append({"pruner": name, "measure": measure, "choice": choice, "share": shares, "auc": aucs})
                print(rows[-1], flush=True)
    record = {"texts": len(texts), "seeds": options.seeds, "results": rows}
    write(options.out, {**record, **told(int(os.environ.get("OMP_NUM_THREADS", 0)))})


if __name__ == "__main__":
    main()
