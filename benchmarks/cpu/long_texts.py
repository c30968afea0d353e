"""What long texts take: peak memory by their length, and one long text in a batch with 31 short ones.

    python -m benchmarks.cpu.long_texts [--models qwen3 deberta-v2 splade] [--layers 2] [--rounds 3]  # writes records/long-texts.json

Weights are random, and layers are all alike. Memory is what a run adds at its peak to what its process held before it, as Linux counts
it. Where attention keeps no rectangle of scores, it grows as the text does. A batch of unlike texts is run in turns with its long text
alone and its short ones alone: without padding it takes what both take together.
"""

from __future__ import annotations

import argparse
import re
import statistics
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch

from adtp_export.benchmarking.processes import WITH_PLUGIN, Contender, Processes
from adtp_export.graph import program
from adtp_export.model import PrunedEncoderConfig
from adtp_export.model.heads import head_class
from benchmarks.cpu.decoders import SEED
from benchmarks.cpu.decoders import SHAPE as QWEN3
from benchmarks.harness.records import RECORDS, claim, told, write

LENGTHS, SHORT, TEXTS = (2048, 4096, 8192), 32, 32
ENGINES = WITH_PLUGIN, "onnxruntime"
BASE = {"hidden_size": 768, "num_attention_heads": 12, "vocab_size": 4096, "max_position_embeddings": LENGTHS[-1]}
MODELS: dict[str, dict[str, Any]] = {
    "qwen3": {
        "backbone": {"model_type": "qwen3", **QWEN3, "vocab_size": 4096},
        "head": "embedding",
        "embedding": {"pooling": "last", "normalize": True},
    },
    "deberta-v2": {
        "backbone": {
            "model_type": "deberta-v2",
            **BASE,
            "intermediate_size": 3072,
            "relative_attention": True,
            "pos_att_type": ["p2c", "c2p"],
            "position_buckets": 256,
            "share_att_key": True,
            "norm_rel_ebd": "layer_norm",
            "position_biased_input": False,
            "type_vocab_size": 0,
        },
        "head": "sequence",
        "num_labels": 1,
    },
    "splade": {
        "backbone": {"model_type": "modernbert", **BASE, "intermediate_size": 1152, "vocab_size": 50_368},
        "head": "sparse",
    },
}
"""The widths of Qwen3-Embedding-0.6B, DeBERTa-v3-base, and ModernBERT-base with its whole vocabulary, which its head multiplies by."""


def exported(name: str, layers: int, folder: Path, engine: str) -> Contender:
    torch.manual_seed(SEED)
    fields = MODELS[name]
    config = PrunedEncoderConfig(**{**fields, "backbone": {**fields["backbone"], "num_hidden_layers": layers}})
    student = head_class(config.head)(config).eval().requires_grad_(False)
    path = folder / f"{name}.onnx"
    program.save(program.export_portable(student, {"version": "bench"}), path)
    return Contender(name=name, path=path, layers=layers, padded=False, engine=engine)


def batch_of(*lengths: int) -> dict[str, np.ndarray]:
    """Return random texts of so many tokens, padded."""
    mask = (np.arange(max(lengths)) < np.array(lengths)[:, None]).astype(np.int64)
    ids = np.random.default_rng(SEED).integers(5, 4096, mask.shape) * mask
    return {"input_ids": ids, "attention_mask": mask}


def measured(processes: Processes, name: str, rounds: int) -> dict[str, Any]:
    """Time a model, and see what memory it takes; the smallest texts come first, because a runtime keeps what it once took. What it held at
    most while it loaded the file does not count."""

    def run(*lengths: int) -> float:
        return processes.time_ms(name, batch_of(*lengths), warm=False)

    run(SHORT)
    before = held_mb(processes.pid(name), "VmRSS")
    memory = {}
    for length in LENGTHS:
        Path(f"/proc/{processes.pid(name)}/clear_refs").write_text("5")  # the most it held is what it holds now
        run(length)
        memory[str(length)] = round(held_mb(processes.pid(name), "VmHWM") - before)
    together, long, short = [], [], []
    short_ones = [SHORT] * (TEXTS - 1)
    for _ in range(rounds):
        together.append(run(LENGTHS[-1], *short_ones))
        long.append(run(LENGTHS[-1]))
        short.append(run(*short_ones))
    shares = [both / (a + b) for both, a, b in zip(together, long, short)]
    return {
        "model": name,
        "added_mb": memory,
        "together_s": round(statistics.median(together) / 1e3, 2),
        "long_s": round(statistics.median(long) / 1e3, 2),
        "short_s": round(statistics.median(short) / 1e3, 3),
        "of_the_sum": [round(share, 3) for share in sorted(shares)],
    }


def held_mb(pid: int, what: str) -> float:
    """Return what a process holds, "VmRSS", or what it held at most, "VmHWM"."""
    found = re.search(rf"{what}:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    assert found is not None
    return int(found[1]) / 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--layers", metavar="N", type=int, default=2)
    parser.add_argument("--rounds", metavar="N", type=int, default=3)
    parser.add_argument("--engine", choices=ENGINES, default=ENGINES[0])
    parser.add_argument("--out", metavar="FILE", type=Path, default=RECORDS / "long-texts.json")
    options = parser.parse_args()
    claim(options.out)
    rows = []
    for name in options.models:
        with tempfile.TemporaryDirectory() as folder:
            contender = exported(name, options.layers, Path(folder), options.engine)
            with Processes([contender]) as processes:
                rows.append(measured(processes, name, options.rounds))
        print(rows[-1], flush=True)
    write(options.out, {"layers": options.layers, "engine": options.engine, "results": rows, **told()})


if __name__ == "__main__":
    main()
