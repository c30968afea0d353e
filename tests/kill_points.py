"""Kill a writer of an output directory at every call to the file system, and look at what is left: a script that imports no torch.

    python tests/kill_points.py FOLDER MODE         # MODE: exchange, or two-steps, as where the system has no exchange

Prints the kills, and what was wrong after any: one JSON object.
"""

import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

from adtp_export.artifacts import directory as room
from adtp_export.artifacts.checks import checked_file
from adtp_export.artifacts.directory import OutputDirectory
from adtp_export.artifacts.manifest import read_manifest
from adtp_export.artifacts.records import Manifest, ShapeRange, Target, file_entry

SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT)
NAMES = ("model.onnx", "config.json", "engines/a.engine")


def write(out: Path, text: str) -> None:
    """Publish a directory with three files of that text."""
    with OutputDirectory(out, force=True) as directory:
        (directory.work / "engines").mkdir()
        for name in NAMES:
            (directory.work / name).write_text(text)
        files = {name: file_entry(directory.work / name) for name in NAMES}
        manifest = Manifest(
            versions={"adtp-export": text},
            checkpoint={"name": "x", "sha256": "0", "stored_dtype": "float32", "prune_sites": []},
            profile={"batch": ShapeRange(1, 1, 1), "seq": ShapeRange(1, 1, 1)},
            retention={},
            targets={"onnxruntime-cpu-fp32": Target(file=NAMES[0], status="verified", attention="decomposed")},
            durations_s={},
            files=files,
        )
        (directory.work / "manifest.json").write_text(json.dumps(manifest.to_json()))
        directory.publish()


def read(out: Path) -> str:
    """Return the text of a directory that is whole."""
    manifest = read_manifest(out)
    (text,) = {checked_file(out, manifest, name).read_text() for name in manifest.files}
    assert manifest.versions["adtp-export"] == text
    return text


def die_at(point: int, signum: int) -> None:
    """Send this process a signal at its `point`-th call to the file system; leave with code 0 where it makes fewer."""
    seen = 0

    def hook(event: str, arguments: tuple) -> None:
        nonlocal seen
        if event.startswith(("os.", "open", "shutil.", "fcntl.", "ctypes.")) and event != "os.kill":
            seen += 1
            if seen == point:
                os.kill(os.getpid(), signum)

    sys.addaudithook(hook)


def kill_once(work: Callable[[], object], point: int, signum: int) -> int:
    """Return how a process ended that did some work and got the signal at that point."""
    child = os.fork()
    if child == 0:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        code = 1
        try:
            signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # as the commands do
            signal.signal(signal.SIGINT, signal.default_int_handler)
            die_at(point, signum)
            work()
            code = 0
        finally:
            os._exit(code)
    return os.waitpid(child, 0)[1]


def main(folder: Path, mode: str) -> dict:
    os.fsync = lambda file: (
        None
    )  # a kill loses nothing of what the system holds: waiting for the disk would show nothing
    if mode == "two-steps":
        room.exchange = lambda *_: False
    out, kills, wrong, results = folder / "out", 0, [], set()
    for signum in SIGNALS:
        for point in range(1, 1000):
            write(out, "old")
            if kill_once(lambda: write(out, "new"), point, signum) == 0:
                break  # it made fewer calls
            kills += 1
            try:
                results.add(read(out))
            except Exception as error:
                wrong.append(f"{signum.name} at {point}: {error!r}")
                continue
            write(out, "old")
            if left := [path.name for path in folder.iterdir() if path != out]:
                wrong.append(f"{signum.name} at {point} left {left}")
    return {"kills": kills, "wrong": wrong, "results": sorted(results)}


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]), sys.argv[2])))
