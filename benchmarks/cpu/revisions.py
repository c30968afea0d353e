"""Is anything slower than at an earlier revision? Export encoders with its code and with today's, and time both files in turns:

    python -m benchmarks.cpu.revisions REVISION        # writes records/revisions.json

Encoders have 6 layers, random weights and fp32 (`MODELS`): dense BERT of MiniLM's width; a student of BERT-base's, 0.ffn, retention 0.29;
and three whose attention has another form: MPNet (a bias by distance), ModernBERT (windows and rotary positions) and PoWER-BERT (every
feed-forward is after a cut, by the attention received from others).

"before" is the revision's file in ONNX Runtime alone, "graph" today's likewise, and "operators" today's with the operators in the package,
which is what `load` takes. It needs git and a revision that still runs in today's environment.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.harness.forced import LAYERS, RETENTION, SITES
from benchmarks.harness.processes import beside_the_first
from benchmarks.harness.records import RECORDS, ROOT, claim, told, write

MINILM = {"hidden_size": 384, "intermediate_size": 1536, "num_attention_heads": 12, "num_hidden_layers": LAYERS}
BASE = {"hidden_size": 768, "intermediate_size": 3072, "num_attention_heads": 12, "num_hidden_layers": LAYERS}
TABLES = {"vocab_size": 30522, "max_position_embeddings": 512, "type_vocab_size": 2}
FROM_OTHERS = [0.8, 0.65, 0.55, 0.4, 0.3, 0.2]
"""The share of a text's tokens that stay after the attention of each layer."""
MODELS: dict[str, dict[str, Any]] = {
    "minilm": {"backbone": {"model_type": "bert", **MINILM, **TABLES}},
    "bert-base": {
        "backbone": {"model_type": "bert", **BASE, **TABLES},
        "pruning": {"method": "schedule", "sites": [*SITES], "ratios": [RETENTION]},
    },
    "mpnet": {"backbone": {"model_type": "mpnet", **BASE, "vocab_size": 30527, "max_position_embeddings": 514}},
    "modernbert": {"backbone": {"model_type": "modernbert", **BASE, "intermediate_size": 1152, "vocab_size": 50368}},
    "power-bert": {
        "backbone": {"model_type": "bert", **BASE, **TABLES},
        "pruning": {
            "method": "schedule",
            "sites": [f"{layer}.ffn" for layer in range(LAYERS)],
            "ratios": FROM_OTHERS,
            "order": "received-from-others",
        },
    },
}
"""Fields of `PrunedEncoderConfig`, by the names that the record has."""
GRID = ("1x32", "8x128", "32x64", "mixed-32", "one-long-32")
BEFORE, GRAPH, OPERATORS = "before", "graph", "operators"
PACKAGE = "adtp_export"
BESIDE = ("calibration", "plugins")
"""Folders of the repository that are rooms of the installed package."""
SECONDS = 20.0

EXPORT = """
import json
import sys
from pathlib import Path
import torch
import adtp_export.calibration
from adtp_export.graph import program
from adtp_export.model import PrunedEncoderConfig, PrunedEncoderForSequenceClassification
fields, path, code = sys.argv[1:]
assert not code or adtp_export.calibration.__file__.startswith(code), "another revision was imported"
torch.manual_seed(0)
model = PrunedEncoderForSequenceClassification(PrunedEncoderConfig(**json.loads(fields))).eval()
program.save(program.export_portable(model, {"version": "bench"}), Path(path))
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
    """Write one of `MODELS`, with today's code or with that in a folder, and return its file.

    Raises:
        SystemExit: that code does not run here.
    """
    folder.mkdir(parents=True)
    path = folder / "model.onnx"
    command = [sys.executable, "-c", EXPORT, json.dumps(MODELS[name]), str(path), str(code or "")]
    environment = os.environ | ({"PYTHONPATH": str(code), "PYTHONSAFEPATH": "1"} if code else {})
    if subprocess.run(command, env=environment, cwd=folder).returncode:
        raise SystemExit(f"{name}: the code of {code or 'today'} writes no such model here")
    return path


def compare(name: str, files: dict[str, Path], seconds: float) -> list[dict[str, Any]]:
    """Time the files of a model in turns, each in a process of its own; a speedup is over the first file."""
    from adtp_export.benchmarking.contenders import Architecture
    from adtp_export.benchmarking.processes import WITH_PLUGIN, Contender
    from adtp_export.model import PrunedEncoderConfig, registry

    engines = {OPERATORS: WITH_PLUGIN}
    contenders = [
        Contender(name=who, path=path, layers=LAYERS, padded=False, engine=engines.get(who, "onnxruntime"))
        for who, path in files.items()
    ]
    sizes = Architecture.of(registry.fields(PrunedEncoderConfig(**MODELS[name]).encoder_config))
    rows = []
    for row in beside_the_first(contenders, sizes, GRID, seconds):
        rows.append({"model": name, **row})
        print(rows[-1], file=sys.stderr)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("revision", metavar="REVISION", help="such as HEAD~5")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="for each workload, or what 10 rounds take")
    parser.add_argument("--out", metavar="FILE", type=Path, default=RECORDS / "revisions.json")
    options = parser.parse_args()
    claim(options.out)
    commit, rows = git("rev-parse", "--verify", f"{options.revision}^{{commit}}").decode().strip(), []
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        code = unpack(commit, folder / "code")
        files = {
            name: (export(name, folder / name / "before", code), export(name, folder / name / "now")) for name in MODELS
        }
        for name, (before, now) in files.items():
            rows += compare(name, {BEFORE: before, GRAPH: now, OPERATORS: now}, options.seconds)
    write(options.out, {"before": commit, "layers": LAYERS, "results": rows, **told()})


if __name__ == "__main__":
    main()
