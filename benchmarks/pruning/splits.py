"""Split SST-2, 20 Newsgroups, EWT's part-of-speech tags and SubjQA into train, dev and test files that share no text:

    python -m benchmarks.pruning.splits DATA_DIR OUT_DIR [--seed 0]

SST-2's training split is made of phrases of the same sentences, so rows cannot be split one by one. A sentence is a row that
no other row contains. Sentences that share a phrase of at least 4 words go to the same part, and phrases go with their
sentences; a shorter phrase that sentences of several parts contain is left for training. Test and dev keep the rows of at least
12 words. 20 Newsgroups is split row by row, without rows of equal text. Sentences of equal words, and questions about the same review,
go to the same part. Of SubjQA the questions about short reviews are taken. In `subjqa-0` to `subjqa-4` are all of its questions: each is
one of test in one of them.
"""

from __future__ import annotations

import argparse
import gzip
import json
import random
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path

from adtp_export.data.overlaps import SHARED_WORDS, Sentences

SST2_HELD_OUT = {"test": 1000, "dev": 250}  # sentences, or groups that share a phrase
TUNE_HELD_OUT = {"dev": 2500}  # the same, for adtp-tune, which divides the rows of dev itself
NEWS_HELD_OUT = {"test": 2000, "dev": 500}  # rows
TAGGED_HELD_OUT = {"test": 1254, "dev": 500}  # sentences
ASKED_HELD_OUT = {"test": 300, "dev": 100}  # questions
ASKED_WORDS = 100  # of a review, at most: longer ones would take hours on two cores
FOLDS = 5
FOLD_HELD_OUT = {"dev": 300}  # questions, beside a fifth of all, which are of test
MIN_WORDS = 12


def split_sst2(
    rows: list[tuple[str, str]], rng: random.Random, held_out: dict[str, int] = SST2_HELD_OUT
) -> dict[str, list[tuple[str, str]]]:
    """Split (label, phrase) rows by sentence."""
    rows = [(label, phrase) for label, text in rows if (phrase := " ".join(text.split()))]
    sentences, parents = Sentences(), {}
    for phrase in sorted({phrase for _, phrase in rows}, key=lambda p: (-len(p.split()), p)):
        parents[phrase] = sentences.containing(phrase) or [sentences.add(phrase)]
    group_of = list(range(len(sentences.texts)))
    for phrase, numbers in parents.items():
        if len(phrase.split()) >= SHARED_WORDS and len(groups := {group_of[i] for i in numbers}) > 1:
            group_of = [min(groups) if group in groups else group for group in group_of]
    groups = sorted(set(group_of))
    rng.shuffle(groups)
    part_of = dict.fromkeys(groups, "train")
    for part, count in held_out.items():
        part_of.update(dict.fromkeys((groups.pop() for _ in range(count)), part))
    parts: dict[str, list[tuple[str, str]]] = {"train": [], **{part: [] for part in held_out}}
    for label, phrase in rows:
        part = max(part_of[group_of[i]] for i in parents[phrase])  # "train" is the greatest
        if part == "train" or len(phrase.split()) >= MIN_WORDS:
            parts[part].append((label, phrase))
    return parts


def split_news(rows: list[dict], rng: random.Random) -> dict[str, list[dict]]:
    """Split 20 Newsgroups' rows at random; of equal texts the first stays."""
    rows = list({row["text"]: row for row in reversed(rows)}.values())
    rng.shuffle(rows)
    parts, taken = {}, 0
    for part, count in NEWS_HELD_OUT.items():
        parts[part] = rows[taken : taken + count]
        taken += count
    return parts | {"train": rows[taken:]}


def grouped(rows: list[dict], field: str) -> list[list[dict]]:
    """Return the rows of each value of `field`, in order of the first ones."""
    groups: defaultdict[str, list[dict]] = defaultdict(list)
    for row in rows:
        groups[json.dumps(row[field])].append(row)
    return list(groups.values())


def split_groups(rows: list[dict], field: str, held_out: dict[str, int], rng: random.Random) -> dict[str, list[dict]]:
    """Split rows at random, those of one value of `field` together; a part has at least as many rows as it should."""
    left = grouped(rows, field)
    rng.shuffle(left)
    parts: dict[str, list[dict]] = {}
    for part, count in held_out.items():
        parts[part] = []
        while len(parts[part]) < count:
            parts[part] += left.pop()
    return parts | {"train": [row for group in left for row in group]}


def folds(
    rows: list[dict], field: str, rng: random.Random, held_out: dict[str, int] = FOLD_HELD_OUT
) -> Iterator[dict[str, list[dict]]]:
    """Yield `FOLDS` splits, in which each row is of test once; rows of one value of `field`, a text, stay together.

    Args:
        held_out: what else is held out of the rows that are not of test, as `split_groups` takes it.
    """
    groups = sorted(grouped(rows, field), key=lambda group: group[0][field])
    rng.shuffle(groups)
    for fold in range(FOLDS):
        test = [row for group in groups[fold::FOLDS] for row in group]
        rest = [row for i, group in enumerate(groups) if i % FOLDS != fold for row in group]
        yield {"test": test} | split_groups(rest, field, held_out, rng)


def read(path: Path) -> list[dict]:
    """Read JSON lines, compressed."""
    with gzip.open(path, "rt", encoding="utf-8") as stream:
        return [json.loads(line) for line in stream]


def write(directory: Path, suffix: str, parts: dict[str, list], line_of: Callable, header: str = "") -> None:
    directory.mkdir(parents=True, exist_ok=True)
    for part, rows in parts.items():
        (directory / f"{part}{suffix}").write_text(header + "".join(map(line_of, rows)), encoding="utf-8")
        print(f"{directory / f'{part}{suffix}'}: {len(rows)} rows")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "data", type=Path, help="holds sst2/train.tsv.gz, and 20news, ewt-pos and subjqa with train.jsonl.gz"
    )
    parser.add_argument("out", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with gzip.open(options.data / "sst2" / "train.tsv.gz", "rt", encoding="utf-8", newline="\n") as stream:
        next(stream)
        phrases = [tuple(line.rstrip("\n").split("\t")) for line in stream]
    for name, held_out in (("sst2", SST2_HELD_OUT), ("sst2-tune", TUNE_HELD_OUT)):
        parts = split_sst2(phrases, random.Random(options.seed), held_out)
        write(options.out / name, ".tsv", parts, lambda row: f"{row[0]}\t{row[1]}\n", "label\tsentence\n")
    asked = read(options.data / "subjqa" / "train.jsonl.gz")
    short = [row for row in asked if len(row["context"].split()) <= ASKED_WORDS]
    parts = {
        "20news": split_news(read(options.data / "20news" / "train.jsonl.gz"), random.Random(options.seed)),
        "ewt-pos": split_groups(
            read(options.data / "ewt-pos" / "train.jsonl.gz"), "tokens", TAGGED_HELD_OUT, random.Random(options.seed)
        ),
        "subjqa": split_groups(short, "context", ASKED_HELD_OUT, random.Random(options.seed)),
    }
    parts |= {f"subjqa-{i}": fold for i, fold in enumerate(folds(asked, "context", random.Random(options.seed)))}
    for name, parts_of in parts.items():
        write(options.out / name, ".jsonl", parts_of, lambda row: json.dumps(row, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
