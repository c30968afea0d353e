"""Published token-pruning systems on one substrate: what of their saved FLOPs becomes saved time.

    python -m benchmarks.pruning.flops_to_time [--seconds 30] [--only NAME ...]      # adds to records/systems-speed.jsonl

Each system is a student of BERT-base's width and 6 layers with random weights, exported as its checkpoints are. Its own scores
decide which tokens stay. How many is forced, layer by layer: shares fall by one factor from site to site, so that the
student needs as many times fewer FLOPs than packed dense BERT as the system's paper reports (`SYSTEMS`). Linear layers that score tokens
count, too.

Some papers compare with dense BERT that computes padding. Packed dense BERT does not, so that part is divided out. Those systems are
also forced to the whole figure, which is more than their papers claim.

Trained students are compared by `train.py`.

Beside each student that reads received attention runs its twin, which keeps as many tokens by a column of the states: the
difference is what the sums of attention cost. LTP also runs in our reference loop: padded, with masks, in PyTorch. That is how its authors'
code works, which is not timed here.

Of the student and of dense BERT the time is recorded that the machine takes to read their weights once. It must do that however few
tokens are left.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from adtp_export.benchmarking.compare import count_flops, relate
from adtp_export.benchmarking.contenders import dense_baselines, random_encoder
from adtp_export.benchmarking.interleaved_timing import measure, speedup
from adtp_export.benchmarking.processes import PAUSE_S, Contender, Processes
from adtp_export.benchmarking.profile import Peaks, measure_peaks, take
from adtp_export.benchmarking.workloads import Workload, make_workloads
from adtp_export.data.tokenize import Batch
from adtp_export.environment import thread_count
from adtp_export.graph import program
from adtp_export.model.encoder import PrunedEncoder
from adtp_export.model.flops import alive_tokens, encoder_flops
from adtp_export.model.pruners import Pruner, Seen
from adtp_export.model.selection import PERMILLE, KeepAbove, KeepBest, KeepRanks, Rule, kept_count
from benchmarks.harness.forced import LAYERS, architecture
from benchmarks.harness.records import RECORDS, claim, told, update

WORKLOADS = "8x128", "32x64"
DENSE, MASKED = f"packed-dense-{LAYERS}", "ltp, padded and masked, PyTorch"


@dataclass(frozen=True, kw_only=True)
class System:
    """name: in the table. reduction: from the abstract of its paper. padding: the part of it that leaving out padding gives. pruning: of a
    configuration, without its sites. sublayer, first: its sites are before this sublayer of each layer from `first` on."""

    name: str
    reduction: float
    padding: float = 1.0
    pruning: dict[str, Any]
    sublayer: str = "ffn"
    first: int = 0

    @property
    def sites(self) -> list[str]:
        return [f"{i}.{self.sublayer}" for i in range(self.first, LAYERS)]


LENGTHS = {"cola": 11, "rte": 64, "qqp": 30, "mrpc": 53, "sst2": 25, "mnli": 39, "qnli": 51, "stsb": 31}
PADDED = {"cola": 64, "rte": 256, "qqp": 128, "mrpc": 128, "sst2": 64, "mnli": 128, "qnli": 128, "stsb": 64}
"""Tokens of a text of GLUE in the mean, and as PoWER-BERT pads them, and after it Transkimmer and ToP.

Source: ``ToP/models/l0_module.py`` of github.com/microsoft/Moonlit and ``task_config.json`` of github.com/IBM/PoWER-BERT. They explain what
ToP's README reports: on SST-2 4.66 times fewer FLOPs, with 40% of the tokens dropped that are no padding.
"""
GLUE = float(np.mean([PADDED[task] / LENGTHS[task] for task in LENGTHS]))

SYSTEMS = (
    System(name="ltp", reduction=2.1, pruning={"method": "ltp", "padded_length": 128}),
    System(
        name="top",
        reduction=8.1,
        padding=GLUE,
        pruning={"method": "top", "bins": ["1"] * (LAYERS - 1)},
        sublayer="attention",
        first=1,
    ),
    System(name="transkimmer", reduction=10.97, padding=GLUE, pruning={"method": "transkimmer"}, sublayer="attention"),
    System(name="lat", reduction=2.2, pruning={"method": "schedule", "order": "received"}),
    System(  # 4.5x is inference time, on QQP
        name="power",
        reduction=4.5,
        padding=PADDED["qqp"] / LENGTHS["qqp"],
        pruning={"method": "schedule", "order": "received-from-others"},
    ),
)


def score_flops(student: PrunedEncoder, alive: Sequence[np.ndarray]) -> float:
    """Count the FLOPs of the pruners' linear layers; alive: as in `encoder_flops`."""
    return sum(
        2.0 * layer.weight.numel() * float(tokens.sum())
        for pruner, tokens in zip(student.pruners.values(), alive)
        for layer in pruner.modules()
        if isinstance(layer, torch.nn.Linear)
    )


def shares(student: PrunedEncoder, sites: Sequence[str], reduction: float, lengths: np.ndarray) -> list[float]:
    """Return the share of tokens that stays at each site: powers of one factor, found by bisection.

    Args:
        sites: the names that the student's pruners have.
        reduction: FLOPs of packed dense BERT per FLOP of the student. It is not reached where all sites together save too little.
        lengths: ``(B,)`` tokens of each text.
    """
    shape = architecture().shape
    whole, low, high = encoder_flops(shape, [lengths], [], True), 0.01, 1.0
    for _ in range(40):
        factor = (low + high) / 2
        alive = [lengths, *(np.maximum(1, np.round(lengths * factor ** (i + 1))) for i in range(len(sites)))]
        flops = encoder_flops(shape, alive, sites, True) + score_flops(student, alive)
        low, high = (low, factor) if whole / flops < reduction else (factor, high)
    return [factor ** (i + 1) for i in range(len(sites))]


class Forced(Pruner):
    """A pruner's own scores, or a column of the states in their place, with a share of the tokens that is given.

    threshold: of rules that keep what reaches one; found by `force`.
    """

    def __init__(self, pruner: Pruner, share: float, column: bool) -> None:
        super().__init__()
        self.pruner, self.share, self.column = pruner, share, column
        self.reads_received, self.from_others = pruner.reads_received and not column, pruner.from_others
        self.kind: type[Rule] = KeepBest
        self.threshold = torch.nn.Buffer(torch.zeros(()), persistent=False)
        self.permille = torch.nn.Buffer(torch.tensor(max(1, round(PERMILLE * share))), persistent=False)

    def forward(self, seen: Seen) -> Rule:
        if self.column:
            order = seen.states[..., 0].float()
        else:
            rule = self.pruner(seen)
            order, self.kind = rule.order, type(rule)
        if self.kind is KeepAbove:
            return KeepAbove(order, self.threshold)
        if self.kind is KeepRanks:
            return KeepRanks(order, lambda others, rank: rank * PERMILLE < others * self.permille)
        return KeepBest(order, torch.minimum(seen.lengths, kept_count(seen.at_input, self.permille, 1)))


def forced_student(system: System, reduction: float, batch: Batch, column: bool) -> PrunedEncoder:
    """Return the system's student with random weights whose sites keep their shares of this batch's tokens."""
    lengths = batch["attention_mask"].sum(1)
    inputs = {name: torch.from_numpy(array) for name, array in batch.items()}
    pruning = {**system.pruning, "sites": system.sites}
    if pruning["method"] == "schedule":
        pruning["ratios"] = [1.0] * len(system.sites)
    student: PrunedEncoder = random_encoder(architecture(), pruning)
    chosen = shares(student, system.sites, reduction, lengths)
    for number, (site, share) in enumerate(zip(list(student.pruners), chosen)):
        own = Forced(student.pruners[site], share, column=False)
        student.pruners[site] = own
        with torch.no_grad():
            decision = student(**inputs).decisions[number]
        if column:
            own = Forced(own.pruner, share, column=True)
            own.kind = type(decision.rule)
            student.pruners[site] = own
            with torch.no_grad():
                decision = student(**inputs).decisions[number]
        if isinstance(decision.rule, KeepAbove):
            count = int(np.maximum(1, np.round(lengths * share)).sum())
            own.threshold.fill_(threshold_for(decision.rule.order, decision.live, count))
    return student


def threshold_for(order: torch.Tensor, live: torch.Tensor, count: int) -> float:
    """Return what lies between the scores of the last token that stays and of the next, of all texts ``(B, S)`` together.

    Args:
        count: tokens that stay, the first of each text among them.
    """
    others = live.clone()
    others[:, 0] = False
    ranked = order[others].double().sort(descending=True).values
    place = min(max(count - len(order), 0), len(ranked))
    if not len(ranked):
        return 0.0
    above = ranked[place - 1] if place else ranked[0] + 2
    below = ranked[place] if place < len(ranked) else ranked[-1] - 2
    return float(above + below) / 2


def contender(name: str, student: PrunedEncoder, system: System, folder: Path) -> Contender:
    path = folder / f"{name.replace(' ', '-').replace(',', '')}.onnx"
    program.save(program.export_portable(student, {"version": "bench"}), path)
    return Contender(
        name=name, path=path, layers=LAYERS, padded=False, sites=tuple(system.sites), cls_only_last_layer=True
    )


def kept_sites(student: PrunedEncoder, batch: Batch) -> np.ndarray:
    with torch.no_grad():
        found = student(**{name: torch.from_numpy(array) for name, array in batch.items()})
    return np.asarray(found.kept_site)


def counted(
    system: System, reduction: float, student: PrunedEncoder, dense: Contender, batch: Batch
) -> tuple[list[Contender], dict[str, np.ndarray], list[np.ndarray]]:
    """Export a student, and its twin where it reads received attention. Return them before dense BERT, the FLOPs of each, and the tokens
    of the student, as in `encoder_flops`."""
    folder, shape = dense.path.parent, architecture().shape
    everyone = [contender(system.name, student, system, folder), dense]
    kept = {system.name: kept_sites(student, batch)}
    if any(pruner.reads_received for pruner in student.pruners.values()):
        twin = f"{system.name}, by a column"
        by_column = forced_student(system, reduction, batch, column=True)
        everyone.append(contender(twin, by_column, system, folder))
        kept[twin] = kept_sites(by_column, batch)
    flops = {c.name: np.array([count_flops(c, shape, batch, kept.get(c.name))]) for c in everyone}
    alive = alive_tokens(kept[system.name], len(system.sites))
    flops[system.name] += score_flops(student, alive)
    return everyone, flops, alive


def speed(
    system: System, reduction: float, workload: Workload, dense: Contender, seconds: float, peaks: Peaks
) -> dict[str, Any]:
    """Time one system on one workload of one batch.

    Args:
        reduction: FLOPs of dense BERT per FLOP of the student.
        seconds: for all runs of all contenders.
        peaks: of this machine.
    """
    batch = workload.batches[0]
    student = forced_student(system, reduction, batch, column=False)
    everyone, flops, alive = counted(system, reduction, student, dense, batch)
    names = [c.name for c in everyone]
    inputs = {name: torch.from_numpy(array) for name, array in batch.items()}
    with Processes(everyone) as processes:

        def time_ms(name: str, now: Batch) -> float:
            if name != MASKED:
                return processes.time_ms(name, now)
            time.sleep(PAUSE_S)
            with torch.no_grad():
                student(**inputs)
                began = time.perf_counter()
                student(**inputs)
            return (time.perf_counter() - began) * 1e3

        if system.name == "ltp":
            names.append(MASKED)
        times = measure(workload, names, time_ms, seconds)
    exported = {c.name: times[c.name] for c in everyone}
    row = next(r for r in relate(workload.name, exported, flops, everyone, [dense.name]) if r.contender == system.name)
    against, own = row.vs[dense.name], times[system.name]
    record = {
        "system": system.name,
        "workload": workload.name,
        "paper_reduction": system.reduction,
        "padding": round(system.padding, 2),
        "forced": round(reduction, 2),
        "kept": [round(float(now.sum() / alive[0].sum()), 3) for now in alive[1:]],
        "ms": row.p50_ms,
        "dense_ms": round(float(np.median(times[dense.name])), 3),
        "speedup": against.speedup,
        "margin": against.margin,
        "flops_ratio": against.flops_ratio,
        "realized_fraction": against.realized_fraction,
        "rounds": row.rounds,
        "weights_ms": take(everyone[0].path, workload, peaks).weights_ms,
    }
    for name, field in ((f"{system.name}, by a column", "without_sums"), (MASKED, "masked")):
        if name in times:
            found, margin = speedup(times[name], own)
            record |= {field: round(found, 3), f"{field}_margin": round(margin, 3)}
    return record


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=30, help="for each system and workload (default: 30)")
    parser.add_argument("--only", nargs="+", choices=[system.name for system in SYSTEMS], help="systems (default: all)")
    parser.add_argument("--out", metavar="FILE", type=Path, default=RECORDS / "systems-speed.jsonl")
    options = parser.parse_args()
    claim(options.out)
    torch.set_num_threads(thread_count(0))
    peaks = measure_peaks()
    chosen = [
        (system, reduction)
        for system in SYSTEMS
        if options.only is None or system.name in options.only
        for reduction in dict.fromkeys((system.reduction / system.padding, system.reduction))
    ]
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        dense = next(c for c in dense_baselines(architecture(), folder, depths=(LAYERS,)) if c.name == DENSE)
        workloads = make_workloads(WORKLOADS, architecture().input_names, architecture().tables["vocab_size"])
        of_dense = take(dense.path, workloads[0], peaks).weights_ms
        for workload in workloads:
            for system, reduction in chosen:
                row = speed(system, reduction, workload, dense, options.seconds, peaks)
                print(row, flush=True)
                row |= {"dense_weights_ms": of_dense} | told()
                update(options.out, [row], key=lambda row: (row["system"], row["workload"], row["forced"]))


if __name__ == "__main__":
    main()
