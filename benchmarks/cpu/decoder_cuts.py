"""What becomes of the FLOPs that cuts save in a causal model: the realized fraction on the width of Qwen3-Embedding-0.6B.

    python -m benchmarks.cpu.decoder_cuts [--layers 4] [--keep 0.3] [--seconds 60]      # writes records/decoder-cuts.json

Weights are random: what a batch takes depends on sizes and on how many tokens stay, and not on which tokens these are. Each student is
compared with the same graph without cuts. A schedule says how many tokens stay; a saliency predictor or the attention that tokens
received says which. The vocabulary is small, because looking rows up takes no time. Layers are all alike, so four of them say what 28
would; with more of them the part before the cut weighs less.
"""

from __future__ import annotations

import argparse
import dataclasses
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch

from adtp_export.benchmarking.compare import relate
from adtp_export.benchmarking.interleaved_timing import measure
from adtp_export.benchmarking.processes import STUDENT, WITH_PLUGIN, Contender, Processes
from adtp_export.benchmarking.workloads import Workload, make_workloads
from adtp_export.graph import program
from adtp_export.model import PrunedEncoderConfig
from adtp_export.model.flops import Shape, encoder_flops
from adtp_export.model.heads.embedding import PrunedEncoderForEmbedding
from adtp_export.model.registry import fields
from adtp_export.model.selection import PERMILLE, kept_count
from benchmarks.cpu.decoders import SEED, SHAPE
from benchmarks.harness.records import RECORDS, claim, told, write

WORKLOADS = "8x128", "32x64"
VOCABULARY, LONGEST = 4096, 512
DENSE = "packed-dense"
ORDERS = "saliency", "received"
ENGINES = "onnxruntime", WITH_PLUGIN, "openvino"


def configuration(layers: int, pruning: dict[str, Any] | None) -> PrunedEncoderConfig:
    sizes = {"num_hidden_layers": layers, "vocab_size": VOCABULARY, "max_position_embeddings": LONGEST}
    return PrunedEncoderConfig(
        backbone={"model_type": "qwen3", **SHAPE, **sizes},
        pruning=pruning,
        head="embedding",
        embedding={"pooling": "last", "normalize": True},
    )


def exported(name: str, layers: int, pruning: dict[str, Any] | None, folder: Path, engine: str) -> Contender:
    path = folder / f"{name}.onnx"
    torch.manual_seed(SEED)
    student = PrunedEncoderForEmbedding(configuration(layers, pruning)).eval().requires_grad_(False)
    program.save(program.export_portable(student, {"version": "bench"}), path)
    sites = tuple(pruning["sites"]) if pruning else ()
    return Contender(name=name, path=path, layers=layers, padded=False, sites=sites, engine=engine)


def flops(shape: Shape, contender: Contender, keep: float, workload: Workload) -> np.ndarray:
    """Count those of each batch; two tokens of a text always stay."""
    counts = []
    for batch in workload.batches:
        n = torch.from_numpy(batch["attention_mask"].sum(1))
        alive = [n.numpy()]
        for _ in contender.sites:
            alive.append(kept_count(torch.from_numpy(alive[-1]), round(PERMILLE * keep), 2).numpy())
        counts.append(encoder_flops(shape, alive, contender.sites))
    return np.array(counts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", metavar="N", type=int, default=4)
    parser.add_argument(
        "--keep", metavar="R", type=float, default=0.3, help="share of tokens that stays (default: 0.3)"
    )
    parser.add_argument("--site", metavar="SITE", default="0.ffn")
    parser.add_argument("--seconds", metavar="S", type=float, default=60, help="for each workload (default: 60)")
    parser.add_argument("--workloads", nargs="+", default=WORKLOADS)
    parser.add_argument("--engine", choices=ENGINES, default=ENGINES[0])
    parser.add_argument("--out", metavar="FILE", type=Path, default=RECORDS / "decoder-cuts.json")
    options = parser.parse_args()
    claim(options.out)
    rows = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        everyone = [exported(DENSE, options.layers, None, folder, options.engine)]
        for order in ORDERS:
            pruning = {"method": "schedule", "sites": [options.site], "ratios": [options.keep], "order": order}
            everyone.append(exported(f"{STUDENT}-{order}", options.layers, pruning, folder, options.engine))
        shape = Shape.of(fields(configuration(options.layers, None).encoder_config))
        names = [contender.name for contender in everyone]
        with Processes(everyone) as processes:
            for workload in make_workloads(options.workloads, ("input_ids", "attention_mask"), VOCABULARY):
                times = measure(workload, names, processes.time_ms, options.seconds)
                counted = {c.name: flops(shape, c, options.keep, workload) for c in everyone}
                for row in relate(workload.name, times, counted, everyone, [DENSE]):
                    rows.append({**dataclasses.asdict(row), "rounds_ms": list(row.rounds_ms)})
                    print(row.workload, row.contender, row.p50_ms, row.vs.get(DENSE))
    found = {
        "layers": options.layers,
        "site": options.site,
        "keep": options.keep,
        "engine": options.engine,
        "results": rows,
    }
    write(options.out, {**found, **told()})


if __name__ == "__main__":
    main()
