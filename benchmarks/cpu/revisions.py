"""Is anything slower than at an earlier revision? Export students with its code and with today's, and time both files in turns:

    python -m benchmarks.cpu.revisions REVISION        # writes records/revisions.json

The files are those of `benchmarks.cpu.precision`: MiniLM's width, every token kept, and BERT-base's, 0.ffn, retention 0.29; 6 layers,
random weights, fp32. "before" is the revision's file in ONNX Runtime alone, "graph" today's likewise, and "operators" today's with the
operators in the package, which is what `load` takes. It needs git and a revision that still runs in today's environment.
"""

from __future__ import annotations

import argparse
import io
import os
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.cpu.precision import UNPRUNED
from benchmarks.harness.forced import LAYERS, RETENTION, SHAPE, SITES
from benchmarks.harness.processes import beside_the_first
from benchmarks.harness.records import RECORDS, ROOT, claim, told, write

KEPT = {UNPRUNED: 1.0, SHAPE: RETENTION}
"""The share of the tokens that stay, by the name of a shape."""
GRID = ("1x32", "8x128", "32x64", "mixed-32", "one-long-32")
BEFORE, GRAPH, OPERATORS = "before", "graph", "operators"
PACKAGE = "adtp_export"
BESIDE = ("calibration", "plugins")
"""Folders of the repository that are rooms of the installed package."""
SECONDS = 20.0

EXPORT = """
import sys
from pathlib import Path
import adtp_export.calibration
from adtp_export.benchmarking.contenders import Architecture, named_shape, scheduled_student
name, layers, sites, retention, folder, code = sys.argv[1:]
assert not code or adtp_export.calibration.__file__.startswith(code), "another revision was imported"
scheduled_student(Architecture(named_shape(name, int(layers))), sites.split(","), float(retention), Path(folder))
"""


def git(*arguments: str) -> bytes:
    """Raises SystemExit with what git says where it refuses."""
    found = subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True)
    if found.returncode:
        raise SystemExit(found.stderr.decode().strip())
    return found.stdout


def unpack(commit: str, folder: Path) -> Path:
    """Lay the code of a commit out as it is installed; return the folder that Python finds it in.

    Raises:
        SystemExit: it lacks one of the rooms.
    """
    with tarfile.open(fileobj=io.BytesIO(git("archive", commit, PACKAGE, *BESIDE))) as files:
        files.extractall(folder, filter="data")
    for room in BESIDE:
        (folder / room).rename(folder / PACKAGE / room)
    return folder


def export(name: str, folder: Path, code: Path | None = None) -> Path:
    """Write the student of a shape, with today's code or with that in a folder, and return its file.

    Raises:
        SystemExit: that code does not run here.
    """
    folder.mkdir(parents=True)
    asked = (name, LAYERS, ",".join(SITES), KEPT[name], folder, code or "")
    command = [sys.executable, "-c", EXPORT, *map(str, asked)]
    environment = os.environ | ({"PYTHONPATH": str(code), "PYTHONSAFEPATH": "1"} if code else {})
    if subprocess.run(command, env=environment, cwd=folder).returncode:
        raise SystemExit(f"{name}: the code of {code or 'today'} writes no student here")
    return folder / "student.onnx"


def compare(name: str, files: dict[str, Path], seconds: float) -> list[dict[str, Any]]:
    """Time the files of a shape in turns, each in a process of its own; a speedup is over the first file."""
    from adtp_export.benchmarking.contenders import Architecture, named_shape
    from adtp_export.benchmarking.processes import WITH_PLUGIN, Contender

    engines = {OPERATORS: WITH_PLUGIN}
    contenders = [
        Contender(name=who, path=path, layers=LAYERS, padded=False, engine=engines.get(who, "onnxruntime"))
        for who, path in files.items()
    ]
    rows = []
    for row in beside_the_first(contenders, Architecture(named_shape(name, LAYERS)), GRID, seconds):
        rows.append({"shape": name, **row})
        print(rows[-1], file=sys.stderr)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("revision", metavar="REVISION", help="such as HEAD~5")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="for each workload")
    parser.add_argument("--out", metavar="FILE", type=Path, default=RECORDS / "revisions.json")
    options = parser.parse_args()
    claim(options.out)
    commit, rows = git("rev-parse", "--verify", f"{options.revision}^{{commit}}").decode().strip(), []
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        code = unpack(commit, folder / "code")
        for name in KEPT:
            before, now = export(name, folder / name / "before", code), export(name, folder / name / "now")
            rows += compare(name, {BEFORE: before, GRAPH: now, OPERATORS: now}, options.seconds)
    write(options.out, {"before": commit, "layers": LAYERS, "results": rows, **told()})


if __name__ == "__main__":
    main()
