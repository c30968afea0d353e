"""Has the student become slower? Time it anew and compare its speedups with a record's:

    python -m benchmarks.cpu.regression [RECORD ...] [--seconds S]      # default: cpu-bert-base-6.json and cpu-fastest.json

Speedups over dense BERT, and over the peers that a record has, are compared, not times, so that a slower or busier machine
matters less. Peers are left out where the record is of another machine, or has no fingerprint to tell: their speed depends on
its instructions and caches. A speedup has regressed where it is below the record's by more than both 95% margins and 3%. Exit
codes: 0 none has; 1 some have; 2 no record of adtp-bench, or none that can be repeated here.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from pathlib import Path
from typing import Any

from benchmarks.harness.records import RECORDS, read_document

BY_DEFAULT = tuple(RECORDS / name for name in ("cpu-bert-base-6.json", "cpu-fastest.json"))
OWN = ("packed-dense-", "padded-dense-")
"""Dense baselines, which run in the student's runtime."""
STUDENTS = ("student", "student-plugin", "student-precomputed")
SLACK = 0.03
LEFT_OUT = ("seconds", "workloads", "sweep_retention", "budget")
"""Options of a record's command that are not repeated."""


def again(command: str) -> dict[str, Any]:
    """Return what a recorded command timed, as keywords of `adtp_export.bench`."""
    from adtp_export.cli.bench import make_parser, read

    _, options = read(make_parser(), shlex.split(command)[1:])
    return {name: value for name, value in options.items() if name not in LEFT_OUT}


def is_of_here(record: dict[str, Any], now: dict[str, Any]) -> bool:
    """Say whether both documents are of one machine, with so many threads; names of processors are not enough."""
    device = record.get("device", {})
    return "fingerprint" in device and device == now.get("device")


def compare(record: dict[str, Any], now: dict[str, Any]) -> list[dict[str, Any]]:
    """Return a row for each workload and baseline that both documents have."""
    before = {
        (row["workload"], row["contender"]): row["vs"] for row in record["results"] if row["contender"] in STUDENTS
    }
    here = is_of_here(record, now)
    rows = []
    for row in now["results"]:
        if (who := (row["workload"], row["contender"])) not in before:
            continue
        for baseline, versus in row["vs"].items():
            if (old := before[who].get(baseline)) is None or not (here or baseline.startswith(OWN)):
                continue
            band = old.get("margin", 0.0) + versus["margin"] + SLACK * old["speedup"]
            rows.append(
                {
                    "workload": row["workload"],
                    "contender": row["contender"],
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
    parser.add_argument("records", metavar="RECORD", type=Path, nargs="*", default=BY_DEFAULT)
    parser.add_argument("--seconds", type=float, default=20.0, help="for each workload")
    parser.add_argument("--workload", default="1x128,8x128,32x64,mixed-32")
    options = parser.parse_args()
    regressed = [check(parser, path, options) for path in options.records]
    return int(any(regressed))


def check(parser: argparse.ArgumentParser, path: Path, options: argparse.Namespace) -> bool:
    """Repeat one record, print what was compared, and say whether anything has regressed."""
    from adtp_export import bench
    from adtp_export.cli.console import Console
    from adtp_export.errors import AdtpError

    try:
        record = read_document(path)
        asked = again(record["command"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        parser.error(f"{path}: accepted is what adtp-bench --json printed ({error!r})")
    try:
        now = bench(**asked, workloads=options.workload, seconds=options.seconds, budget=0, steps=Console())
    except AdtpError as error:
        parser.error(str(error))
    if not is_of_here(record, now):
        print(
            f"note: {path.name} is of {record['device']}, this is {now['device']}; peers are left out", file=sys.stderr
        )
    rows = compare(record, now)
    print(f"{'workload':10}{'contender':16}{'baseline':26}{'before':>10}{'now':>10}{'band':>8}")
    for row in rows:
        names = f"{row['workload']:10}{row['contender']:16}{row['baseline']:26}"
        told = "  REGRESSED" if row["regressed"] else ""
        print(f"{names}{row['before']:9.2f}x{row['now']:9.2f}x{row['band']:8.2f}{told}")
    return any(row["regressed"] for row in rows)


if __name__ == "__main__":
    sys.exit(main())
