"""Records of measurements: JSON documents, or JSON lines, of which each says the machine, the versions and the commit it is of.

A record belongs to a commit, so nothing is written into `RECORDS` from a tree with changes; records themselves do not count as such.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Hashable, Iterable
from pathlib import Path
from typing import Any

import numpy as np

from adtp_export.io import holding, written_whole

ROOT = Path(__file__).resolve().parents[2]
RECORDS = ROOT / "benchmarks" / "records"

Row = dict[str, Any]

EARLIER_NAMES = {
    "--ort-cpu": "--precompute-embedding-projections",
    "student-lookup": "student-precomputed",
    "-lookup-plugin": "-precomputed-plugin",
}
"""What records of earlier versions call it, and what it is called now. Records that are not written again stay as they were."""


def claim(path: Path) -> Path:
    """Return `path`, to which a script will write when it has measured; call it first.

    Raises:
        SystemExit: the record would be of no commit, or what lies there cannot be read, or there is no such folder.
    """
    from adtp_export.environment import commit

    if path.resolve().parent == RECORDS and (commit() or "").endswith("-dirty"):
        raise SystemExit(
            f"{path.name}: the tree has changes, so the record would be of no commit. Commit, or write elsewhere"
        )
    if not path.resolve().parent.is_dir():
        raise SystemExit(f"{path}: there is no folder {path.parent}")
    try:
        read_lines(path) if path.suffix == ".jsonl" else read_document(path)
    except ValueError as error:
        raise SystemExit(f"{path} is no record ({error}); remove it first") from error
    return path


def told(threads: int = 0, **packages: str) -> Row:
    """Return what each record says of where it was made.

    Args:
        threads: of each runtime; 0: one for each core that may be used.
        packages: versions of what `adtp_export.environment.versions` does not know.
    """
    from adtp_export.environment import commit, cpu, versions

    return {"device": cpu(threads), "versions": versions() | packages, "commit": commit()}


def read_document(path: Path) -> Row:
    """Return a record; an empty one where there is none."""
    return dict(json.loads(_text(path))) if path.exists() else {}


def read_lines(path: Path) -> list[Row]:
    """Return the rows of a record of JSON lines; none where there is none."""
    return [json.loads(line) for line in _text(path).splitlines()] if path.exists() else []


def right_answers(answers: str, labels: str) -> np.ndarray:
    """Return 1 where an answer is right, ``(rows,)``; one character each."""
    return np.array([answer == label for answer, label in zip(answers, labels, strict=True)], dtype=np.float64)


def _text(path: Path) -> str:
    text = path.read_text(encoding="utf-8")
    for earlier, now in EARLIER_NAMES.items():
        text = text.replace(earlier, now)
    return text


def write(path: Path, record: Row) -> None:
    """Write a document."""
    path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    print(f"wrote {path}")


def update(path: Path, rows: Iterable[Row], key: Callable[[Row], Hashable]) -> None:
    """Put rows into a record of JSON lines in place of those with the same keys, at the end of the others.

    Several processes may add to one record at a time: they take turns, by a lock on its folder.
    """
    rows = list(rows)
    new = {key(row) for row in rows}
    path = path.resolve()  # a link stays one
    with holding(path.parent), written_whole(path) as partial:
        kept = [row for row in read_lines(path) if key(row) not in new]
        partial.write_text("".join(json.dumps(row) + "\n" for row in [*kept, *rows]), encoding="utf-8")
