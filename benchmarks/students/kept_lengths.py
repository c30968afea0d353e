"""Count how many tokens a student keeps of real texts, for benchmarks on machines that have neither:

    python -m benchmarks.students.kept_lengths NAME OUT FILE [--text-column C]     # adds NAME to records/kept-lengths.json

OUT is an output directory of adtp-export. Counts of lengths are all that is recorded of the texts.
"""

from __future__ import annotations

import argparse
from collections import Counter
from pathlib import Path

import adtp_export
from adtp_export.data.readers import read_texts
from adtp_export.verify.samples import sample
from benchmarks.harness.records import RECORDS, claim, read_document, told, write


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name")
    parser.add_argument("out", type=Path)
    parser.add_argument("file", type=Path)
    parser.add_argument("--text-column")
    options = parser.parse_args()
    path = claim(RECORDS / "kept-lengths.json")
    texts, total = sample(read_texts(options.file, options.text_column))
    student = adtp_export.load(options.out)
    answers = student(texts, return_kept=True)
    counted = {
        "student": student.manifest.checkpoint["name"],
        "sites": list(student.sites),
        "rows": f"{len(texts)} of {total}",
        "whole": dict(sorted(Counter(len(answer.tokens) for answer in answers).items())),
        "kept": dict(sorted(Counter(sum(answer.kept) for answer in answers).items())),
        "commit": told()["commit"],
    }
    write(path, read_document(path) | {options.name: counted})


if __name__ == "__main__":
    main()
