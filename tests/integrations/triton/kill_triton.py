"""Kill a writer of models of Triton at calls to the file system, and look at what is left: a script that imports no torch.

    python tests/integrations/triton/kill_triton.py FOLDER MODE         # MODE as of tests/kill_points.py

Prints the kills, and what was wrong after any: one JSON object. Without an exchange, a model that SIGKILL hit between two steps
comes back with the next run.
"""

import json
import os
import signal
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
from kill_points import kill_once

from adtp_export.artifacts import directory as room
from adtp_export.artifacts.records import Manifest, ShapeRange, Target, file_entry
from adtp_export.integrations.triton import repository as triton

MODELS = ("m", "m-ids")
SIZES = {"vocab_size": 8, "type_vocab_size": 1, "max_position_embeddings": 8, "hidden_size": 8}
CONFIG = {**SIZES, "adtp": {"head": "embedding", "dimension": 8, "prune_sites": []}}


def make_export(out: Path, text: str) -> Path:
    """Make an output directory whose files hold a text, as far as models of Triton are made from it."""
    out.mkdir()
    (out / "config.json").write_text(json.dumps({**CONFIG, "text": text}))
    for name in ("model.onnx", "model.packed.onnx"):
        (out / name).write_text(text)
    manifest = Manifest(
        versions={"adtp-export": text},
        checkpoint={"name": "x", "sha256": "0", "stored_dtype": "float32", "prune_sites": []},
        profile={"batch": ShapeRange(1, 1, 1), "seq": ShapeRange(1, 1, 1)},
        retention={},
        targets={
            f"onnxruntime-cpu-fp32{form}": Target(file=file, status="verified", attention="decomposed")
            for form, file in (("", "model.onnx"), ("-packed", "model.packed.onnx"))
        },
        durations_s={},
        files={path.name: file_entry(path) for path in out.iterdir()},
    )
    (out / "manifest.json").write_text(json.dumps(manifest.to_json()))
    return out


def read(repository: Path) -> str:
    """Return the texts of models that are all whole."""
    whole, packed = repository / "m" / "1" / "export", repository / "m-ids" / "1" / "model.packed.onnx"
    texts = {json.loads((whole / "config.json").read_text())["text"], (whole / "model.onnx").read_text()}
    (text,) = texts | {Manifest.read(whole).versions["adtp-export"]}
    for model in MODELS:
        record = json.loads((repository / model / "adtp-export.json").read_text())
        assert all(file_entry(repository / model / name) == entry for name, entry in record["files"].items())
    return " ".join(sorted({text, packed.read_text()}))


def main(folder: Path, mode: str) -> dict:
    os.fsync = lambda file: None  # a kill loses nothing of what the system holds
    signals = [signal.SIGKILL]
    if mode == "two-steps":
        room.exchange = lambda *_: False
        signals.append(signal.SIGTERM)
    repository, kills, wrong, results = folder / "models", 0, [], set()
    old, new = make_export(folder / "old", "old"), make_export(folder / "new", "new")
    expected = {repository, old, new}
    for signum in signals:
        for point in range(1, 2000):
            triton.write(old, repository, "m", replace=True)
            if left := [path.name for path in folder.iterdir() if path not in expected]:
                wrong.append(f"{signum.name} before {point} left {left}")
            if kill_once(lambda: triton.write(new, repository, "m", replace=True), point, signum) == 0:
                break  # it made fewer calls
            kills += 1
            if (mode, signum) == ("two-steps", signal.SIGKILL):
                triton.settle(repository)
            try:
                results.add(read(repository))
            except Exception as error:
                wrong.append(f"{signum.name} at {point}: {error!r}")
    return {"kills": kills, "wrong": wrong, "results": sorted(results)}


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]), sys.argv[2])))
