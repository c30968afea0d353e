"""Times on GPUs from counted launches, waits, FLOPs and bytes: modelled, not measured. First of what is recorded, then of what is planned.

    python -m benchmarks.gpu.modelled_times      # writes records/modelled-times.json; no GPU, seconds

A run of ONNX Runtime's CUDA provider takes a fixed time, one for each launch and each copy, one for each wait of the host, and that of its
FLOPs and bytes. Launches are those of `launches`, FLOPs those of the record, and bytes pass at the data sheet's rate. The other four costs
are fitted to the record of an H100. A row is left out of the fit where the same contender took less for a larger batch: the GPU was cold.

The fit cannot test the counts. Its 18 rows are of three files, so they have three pairs of launches and waits, and three costs (of a run, a
launch and a wait) fit any three pairs. Only rows that were not fitted can: those of another record, `unseen`. They are four, of two files.

The runner is planned: 7 launches a layer, 2 a cut, no wait. What a launch costs under a CUDA graph is assumed, a little below what
NVIDIA's fused BERT gives if it has 7 launches a layer, too.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from benchmarks.harness.records import RECORDS, claim, read_document, told, write

MEASURED = RECORDS / "gpu-nvidia-h100-80gb-hbm3-bert-base-6-ort-cuda-fp16.json"
UNSEEN = RECORDS / "gpu-nvidia-h100-80gb-hbm3-ort-cuda-fp16.json"
COUNTED = RECORDS / "launches.json"
FILES = {
    "student": "student of 6 layers",
    "packed-dense-6": "packed dense of 6 layers",
    "packed-dense-12": "packed dense of 12 layers",
}
UNSEEN_FILES = {"onnxruntime-cuda-fp16": "MiniLM student", "packed-dense-ort-packed": "packed dense of 6 layers"}
"""Of the other record: a MiniLM, whose FLOPs are too few to count there. Launches do not depend on the width."""
COLD = 1.1
"""How many times as long as a larger batch a cold one takes, at least."""
HIDDEN, LAYERS, HALF = 768, 6, 2
BYTES_PER_S = {"H100": 3350e9, "RTX 4090": 1008e9}
LAUNCHES = {"unpad and embed": 2, "layer": 7, "cut": 2, "head": 2}
"""Of the planned runner, in kernels of its own."""
ROW_WIDTHS = {"attention": 4 + 4, "output": 2 + 3, "ffn": 5 + 5 + 3}
"""Widths that a layer of the runner reads and writes for a token: QKV and attention, projection and add-norm, the feed-forward."""
PUBLISHED = {"A100": (640.0, 3860.0), "L40S": (480.0, 3970.0)}
"""NVIDIA's fused BERT-base, 12 layers, fp16, 1x128 and 32x128 in microseconds: TensorRT, ``demo/BERT/README.md``."""
PLANNED: dict[str, dict[str, Any]] = {
    "H100": {"gpu": "H100", "launch_us": 4.2, "tflops": 450.0, "bytes": False},
    "H100, at fitted rates": {"gpu": "H100", "launch_us": 4.2, "tflops": None, "bytes": True},
    "RTX 4090": {"gpu": "RTX 4090", "launch_us": 4.2, "tflops": 145.0, "bytes": False},
}
"""Assumed. launch_us: below what `published_costs` gives for an L40S. tflops: of products with all their traffic, 45% of an H100's peak and
88% of an RTX 4090's with sums in fp32; None: no faster than what is fitted, and traffic comes on top."""


@dataclass(frozen=True, kw_only=True)
class Costs:
    """Of a runtime on a GPU. tflops: of matrix products, bytes apart."""

    fixed_us: float
    launch_us: float
    wait_us: float
    tflops: float


@dataclass(frozen=True, kw_only=True)
class Work:
    """What a contender has to do for a workload. launches: copies included. measured_us: None where nobody timed it."""

    workload: str
    contender: str
    launches: int
    waits: int
    flops: float
    bytes: float
    measured_us: float | None = None

    def us(self, costs: Costs, bytes_per_s: float) -> float:
        """Return the modelled time in microseconds."""
        on_host = costs.fixed_us + costs.launch_us * self.launches + costs.wait_us * self.waits
        return on_host + self.flops / costs.tflops / 1e6 + self.bytes / bytes_per_s * 1e6


def rows_kept(workload: str, permille: int) -> dict[str, int]:
    """Return how many texts and tokens a workload of the grid has, and how many tokens stay at the site."""
    from adtp_export.benchmarking.workloads import grid_lengths, shape_of

    lengths = grid_lengths(*shape_of(workload))
    kept = (lengths * permille + 999) // 1000
    return {"texts": len(lengths), "tokens": int(lengths.sum()), "kept": int(kept.sum())}


def recorded(measured: Mapping[str, Any], files: Mapping[str, Any]) -> list[Work]:
    """Return what ONNX Runtime has to do in each row of the record with files so counted, and how long it took."""
    found = []
    (site,) = measured["sites"]
    for row in measured["results"]:
        if row["contender"] not in FILES:
            continue
        parts = files[FILES[row["contender"]]].values()
        launches, waits = starts_and_waits(parts)
        many = rows_kept(row["workload"], round(1000 * measured["retention"]))
        many[site] = many.pop("kept")
        traffic = sum(part["weight_bytes"] for part in parts)
        traffic += sum(many[rows] * size for part in parts for rows, size in part["row_bytes"].items())
        found.append(
            Work(
                workload=row["workload"],
                contender=row["contender"],
                launches=launches,
                waits=waits,
                flops=row["flops"],
                bytes=traffic,
                measured_us=1e3 * row["p50_ms"],
            )
        )
    return found


def unseen(times: Mapping[str, Any], files: Mapping[str, Any]) -> list[Work]:
    """Return the rows of the other record by launches and waits alone; tokens stand for FLOPs, to order batches."""
    found = []
    for row in times["results"]:
        if row["contender"] in UNSEEN_FILES:
            launches, waits = starts_and_waits(files[UNSEEN_FILES[row["contender"]]].values())
            found.append(
                Work(
                    workload=row["workload"],
                    contender=row["contender"],
                    launches=launches,
                    waits=waits,
                    flops=rows_kept(row["workload"], 1000)["tokens"],
                    bytes=0,
                    measured_us=1e3 * row["wall_p50_ms"],
                )
            )
    return found


def starts_and_waits(parts: Iterable[Mapping[str, int]]) -> tuple[int, int]:
    """Return launches and copies of all parts, and their waits."""
    parts = list(parts)
    return sum(part["launches"] + part["copies"] for part in parts), sum(part["waits"] for part in parts)


def cold(rows: Iterable[Work]) -> set[tuple[str, str]]:
    """Return the workloads and contenders that took longer than the same contender with more to do."""
    rows = list(rows)
    return {
        (row.workload, row.contender)
        for row in rows
        for other in rows
        if other.contender == row.contender and other.flops > row.flops
        if (row.measured_us or 0) > COLD * (other.measured_us or 0)
    }


def fit(rows: Sequence[Work], bytes_per_s: float) -> Costs:
    """Return the costs with the least squares of relative errors."""
    measured = np.array([row.measured_us for row in rows])
    moved = np.array([row.bytes / bytes_per_s * 1e6 for row in rows])
    known = np.array([[1, row.launches, row.waits, row.flops / 1e6] for row in rows])
    (fixed, launch, wait, per_megaflop), *_ = np.linalg.lstsq(
        known / measured[:, None], 1 - moved / measured, rcond=None
    )
    return Costs(fixed_us=float(fixed), launch_us=float(launch), wait_us=float(wait), tflops=float(1 / per_megaflop))


def published_costs() -> dict[str, dict[str, float]]:
    """Return what a launch and a FLOP cost in NVIDIA's engines, if they have 7 launches a layer: 12 layers, 128 tokens and 4,096."""
    layers, few, many = 12, 128, 32 * 128
    flops = 24 * HIDDEN**2 + 4 * 128 * HIDDEN  # of a token and layer: four products, and attention to 128 tokens
    found = {}
    for gpu, (short, long) in PUBLISHED.items():
        per_token = (long - short) / (many - few) / layers
        launch = (short / layers - few * per_token) / LAUNCHES["layer"]
        found[gpu] = {"launch_us": round(launch, 2), "tflops": round(flops / per_token / 1e6, 1)}
    return found


def planned(row: Work, many: Mapping[str, int], weight_bytes: float) -> Work:
    """Return what the runner would have to do for a row of the record, of 6 layers."""
    pruned = row.contender == "student"
    own = {"unpad and embed": 1, "layer": LAYERS, "cut": int(pruned), "head": 1}
    after = many["kept"] if pruned else many["tokens"]
    widths = ROW_WIDTHS["attention"] * (many["tokens"] + (LAYERS - 1) * after)
    widths += ROW_WIDTHS["output"] * (many["tokens"] + (LAYERS - 2) * after)
    widths += ROW_WIDTHS["ffn"] * (LAYERS - 1) * after
    return Work(
        workload=row.workload,
        contender=row.contender,
        launches=sum(times * LAUNCHES[what] for what, times in own.items()),
        waits=0,
        flops=row.flops,
        bytes=weight_bytes + HIDDEN * HALF * widths,
    )


def predict(
    rows: Sequence[Work], measured: Mapping[str, Any], weight_bytes: float, fitted: Costs
) -> list[dict[str, Any]]:
    """Return the runner's modelled times: dense and student of 6 layers, and the realized fraction."""
    found = []
    by_name = {(row.workload, row.contender): row for row in rows}
    for name, plan in PLANNED.items():
        costs = Costs(fixed_us=0, launch_us=plan["launch_us"], wait_us=0, tflops=plan["tflops"] or fitted.tflops)
        rate = BYTES_PER_S[plan["gpu"]] if plan["bytes"] else float("inf")
        for workload in dict.fromkeys(row.workload for row in rows):
            many = rows_kept(workload, round(1000 * measured["retention"]))
            dense, student = (
                planned(by_name[workload, contender], many, weight_bytes) for contender in ("packed-dense-6", "student")
            )
            us = [work.us(costs, rate) for work in (dense, student)]
            found.append(
                {
                    "gpu": name,
                    "workload": workload,
                    "dense_us": round(us[0]),
                    "student_us": round(us[1]),
                    "realized_fraction": round(float(us[0] / us[1] / (dense.flops / student.flops)), 2),
                }
            )
    return found


def compared(rows: Sequence[Work], costs: Costs) -> list[dict[str, Any]]:
    """Return each row as it was measured and as it is modelled."""
    left_out, found = cold(rows), []
    for row in rows:
        us = row.us(costs, BYTES_PER_S["H100"])
        found.append(
            {
                "workload": row.workload,
                "contender": row.contender,
                "measured_us": round(row.measured_us or 0),
                "modelled_us": round(us),
                "error": round(float(us / (row.measured_us or 1) - 1), 3),
                "cold": (row.workload, row.contender) in left_out,
            }
        )
    return found


def rewritten(timed: Sequence[Work], now: Sequence[Work], costs: Costs) -> list[dict[str, Any]]:
    """Return the modelled times of the files that were timed, and of those that are written now."""
    rate = BYTES_PER_S["H100"]
    return [
        {
            "workload": before.workload,
            "contender": before.contender,
            "timed_us": round(before.us(costs, rate)),
            "now_us": round(after.us(costs, rate)),
        }
        for before, after in zip(timed, now)
    ]


def model(measured: Mapping[str, Any], times: Mapping[str, Any], counted: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fit, its error in each row of both records, and what it predicts."""
    rows, now = (recorded(measured, counted[kind]) for kind in ("timed", "files"))
    left_out = cold(rows)
    costs = fit([row for row in rows if (row.workload, row.contender) not in left_out], BYTES_PER_S["H100"])
    weights = sum(part["weight_bytes"] for part in counted["files"][FILES["packed-dense-6"]].values())
    return {
        "costs": {name: round(float(value), 2) for name, value in asdict(costs).items()},
        "results": compared(rows, costs),
        "unseen": compared(unseen(times, counted["timed"]), costs),
        "rewritten": rewritten(rows, now, costs),
        "published": published_costs(),
        "runner": {"launches": LAUNCHES, "plans": PLANNED},
        "predictions": predict(rows, measured, weights, costs),
    }


def main() -> None:
    out = claim(RECORDS / "modelled-times.json")
    document = {
        "command": "python -m benchmarks.gpu.modelled_times",
        "label": "modelled, not measured",
        "measured": [MEASURED.name, UNSEEN.name],
        "counted": COUNTED.name,
        **model(*map(read_document, (MEASURED, UNSEEN, COUNTED))),
    }
    write(out, {**document, "commit": told()["commit"]})


if __name__ == "__main__":
    main()
