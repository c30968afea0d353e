"""Has the student become slower? Time it anew and compare its speedups with a record's:

    python benchmarks/check_regression.py [RECORD] [--seconds S]      # default: records/cpu-bert-base-6.json

Speedups over dense BERT are compared, not times, so that a slower or busier machine matters less. A speedup has regressed where
it is below the record's by more than both 95% margins and 3%. Exit codes: 0 none has; 1 some have; 2 no record of adtp-bench.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

RECORD = Path(__file__).parent / "records" / "cpu-bert-base-6.json"
SLACK = 0.03
LEFT_OUT = {"--peers": 2, "--seconds": 2, "--workload": 2, "--sweep-retention": 1, "--ort-cpu": 1, "--json": 1}
"""Options of a record's command that are not repeated, with how many words each has."""


def again(command: str) -> list[str]:
    """Return the options of a recorded command that say what is timed."""
    words, kept = shlex.split(command)[1:], []
    while words:
        count = LEFT_OUT.get(words[0], 0)
        if not count:
            kept.append(words[0])
        words = words[max(count, 1) :]
    return kept


def compare(record: dict[str, Any], now: dict[str, Any]) -> list[dict[str, Any]]:
    """Return a row for each workload and baseline that both documents have."""
    before = {row["workload"]: row["vs"] for row in record["results"] if row["contender"] == "student"}
    rows = []
    for row in now["results"]:
        if row["contender"] != "student" or row["workload"] not in before:
            continue
        for baseline, versus in row["vs"].items():
            if (old := before[row["workload"]].get(baseline)) is None:
                continue
            band = old.get("margin", 0.0) + versus["margin"] + SLACK * old["speedup"]
            rows.append(
                {
                    "workload": row["workload"],
                    "baseline": baseline,
                    "before": old["speedup"],
                    "now": versus["speedup"],
                    "band": round(band, 3),
                    "regressed": versus["speedup"] < old["speedup"] - band,
                }
            )
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("record", type=Path, nargs="?", default=RECORD)
    parser.add_argument("--seconds", default="20", help="for each workload")
    parser.add_argument("--workload", default="1x128,8x128,32x64")
    options = parser.parse_args()
    try:
        record = json.loads(options.record.read_text(encoding="utf-8"))
        command = again(record["command"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        parser.error(f"{options.record}: accepted is what adtp-bench --json printed ({error!r})")
    program = [sys.executable, "-c", "from adtp_export.cli.bench import main; main()", *command]
    asked = ["--workload", options.workload, "--seconds", options.seconds, "--json"]
    now = json.loads(subprocess.run([*program, *asked], stdout=subprocess.PIPE, check=True).stdout)
    if now["device"] != record["device"]:
        print(f"note: the record is of {record['device']}, this is {now['device']}", file=sys.stderr)
    rows = compare(record, now)
    print(f"{'workload':10}{'baseline':20}{'before':>10}{'now':>10}{'band':>8}")
    for row in rows:
        told = "  REGRESSED" if row["regressed"] else ""
        print(
            f"{row['workload']:10}{row['baseline']:20}{row['before']:9.2f}x{row['now']:9.2f}x{row['band']:8.2f}{told}"
        )
    return int(any(row["regressed"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
