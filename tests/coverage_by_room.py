"""Print line coverage per room, and fail where a room is below its floor: `make coverage` runs it.

    make coverage RAISE=--raise
    python tests/coverage_by_room.py build/coverage.json [--raise]

Lines that run only in processes of their own are not counted, as most of `cli`. `--raise` sets the floors to what was found,
rounded down, where that is more. A floor never falls. That of `imports` is low, for most of its tests want material that not every
clone has.
"""

import argparse
import json
import math
import sys
from collections import Counter
from pathlib import Path, PurePosixPath

FLOORS = Path(__file__).with_name("coverage_floors.json")


def room(path: str) -> str | None:
    """Return the room of a file, by its path from the root; None for what is no room."""
    parts = PurePosixPath(path.replace("\\", "/")).parts
    if parts[0] == "adtp_export" and parts[1] != "__init__.py":
        return parts[1].removesuffix(".py")
    return parts[0] if parts[0] in ("calibration", "plugins") else None


def percentages(report: dict) -> dict[str, float]:
    """Return the share of lines that ran in each room, in percent, from coverage's JSON report."""
    lines: Counter[str] = Counter()
    ran: Counter[str] = Counter()
    for path, found in report["files"].items():
        if (name := room(path)) is not None and found["summary"]["num_statements"]:
            lines[name] += found["summary"]["num_statements"]
            ran[name] += found["summary"]["covered_lines"]
    return {name: 100 * ran[name] / lines[name] for name in sorted(lines)}


def main(arguments: list[str], floors: Path = FLOORS) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("report", type=Path)
    parser.add_argument("--raise", dest="higher", action="store_true")
    chosen = parser.parse_args(arguments)
    found = percentages(json.loads(chosen.report.read_text(encoding="utf-8")))
    known = json.loads(floors.read_text(encoding="utf-8"))
    if chosen.higher:
        known |= {name: max(math.floor(percent), known.get(name, 0)) for name, percent in found.items()}
        floors.write_text(json.dumps(dict(sorted(known.items())), indent=2) + "\n", encoding="utf-8")
    wrong = []
    for name in sorted(found.keys() | known.keys()):
        percent, floor = found.get(name, 0.0), known.get(name)
        print(f"{name:12} {percent:5.1f}%  floor {floor if floor is not None else 'missing'}")
        if not floor:
            wrong.append(f"{name} has no floor above 0, so nothing holds it; type: make coverage RAISE=--raise")
        elif percent < floor:
            wrong.append(f"{name} has {percent:.1f}% of its lines covered, its floor is {floor}%")
    print(*wrong, sep="\n", end="\n" if wrong else "")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
