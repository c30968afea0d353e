"""Relate time saved to FLOPs saved.

Realized fraction: ``eta = latency speedup / FLOPs reduction`` against one baseline; 1.0 means that every saved
FLOP became saved time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ..data.tokenize import Batch
from ..model.flops import Shape, alive_tokens, encoder_flops
from .interleaved_timing import CYCLES, PERCENTILES, cycles_of, speedup, speedup_of_sums
from .processes import Contender, sorted_parts


@dataclass(frozen=True)
class Versus:
    """One contender against one baseline: the quotient of their times (`Latency.p50_ms`), that of their FLOPs, and the quotient of both.

    margin: of the speedup, for a confidence of 95% (`interleaved_timing.speedup`).
    """

    speedup: float
    flops_ratio: float
    realized_fraction: float
    margin: float


@dataclass(frozen=True, kw_only=True)
class Latency:
    """One contender on one workload; FLOPs of the mean batch.

    p50_ms, p90_ms, p99_ms: percentiles over cycles (`by_cycle`) of the mean ms of a batch; rounds_ms: all times that they are of.
    """

    workload: str
    contender: str
    engine: str
    precision: str
    p50_ms: float
    p90_ms: float
    p99_ms: float
    flops: float
    rounds: int
    rounds_ms: tuple[float, ...]
    vs: Mapping[str, Versus]


def relate(
    workload: str,
    times: Mapping[str, np.ndarray],
    flops: Mapping[str, np.ndarray],
    contenders: Sequence[Contender],
    baselines: Sequence[str],
) -> list[Latency]:
    """Turn paired times and per-batch FLOPs into one row per contender.

    Args:
        times: ms by contender, ``(rounds,)``; fewer where it ran a few batches once.
        flops: FLOPs by contender, one value per batch of the workload, ``(batches,)``.
        baselines: names of contenders that others are related to.
    """
    rows = []
    rounds = max(map(len, times.values()))
    batches = len(next(iter(flops.values())))
    cycles = {name: cycles_of(name, times, batches) for name in times}
    flops = {name: np.resize(values, rounds) for name, values in flops.items()}  # of the batch that each round ran
    for contender in contenders:
        name, ms, vs = contender.name, times[contender.name], {}
        for baseline in baselines:
            if baseline != name:
                both = min(len(ms), len(times[baseline]))  # rounds that both ran
                if len(ms) == len(times[baseline]) and (batches == 1 or both > CYCLES):
                    found, margin = speedup(cycles[baseline], cycles[name])
                else:
                    found, margin = speedup_of_sums(times[baseline][:both], ms[:both])
                saved = float(flops[baseline][:both].sum() / flops[name][:both].sum())
                vs[baseline] = Versus(round(found, 3), round(saved, 3), round(found / saved, 3), round(margin, 3))
        p50, p90, p99 = (round(float(np.percentile(cycles[name], p)), 3) for p in PERCENTILES)
        mean = float(flops[name].mean())
        rows.append(
            Latency(
                workload=workload,
                contender=name,
                engine=contender.engine,
                precision=contender.precision,
                p50_ms=p50,
                p90_ms=p90,
                p99_ms=p99,
                flops=mean,
                rounds=len(ms),
                rounds_ms=tuple(round(float(value), 3) for value in ms),
                vs=vs,
            )
        )
    return rows


def count_flops(contender: Contender, shape: Shape, batch: Batch, kept_site: np.ndarray | None = None) -> float:
    """Count the FLOPs of a contender on a batch.

    Args:
        shape: the student's; the depth is the contender's own, and all but the student have BERT's layers.
        kept_site: ``(B, S)``, what became of each token (`contract.KEPT_SITE`); needed where it prunes.
    """
    shape = shape if contender.is_student and contender.layers == shape.layers else shape.whole(contender.layers)
    lengths = batch["attention_mask"].sum(1)
    if contender.padded:
        parts = sorted_parts(lengths, contender.length_bucket_rows or len(lengths))
        alive = [np.concatenate([np.full(len(rows), longest) for rows, longest in parts])]
    elif contender.sites:
        assert kept_site is not None
        alive = alive_tokens(kept_site, len(contender.sites))
    else:
        alive = [lengths]
    return encoder_flops(
        shape, alive, contender.sites, contender.cls_only_last_layer, contender.precomputed_first_layer
    )
