"""What records of `run.sh` and of the scripts beside it look like: checked when they are tested and rendered."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import msgspec

Texts = dict[str, str]


class Record(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Fields that no one knows are refused: they are typing mistakes."""


class StepLine(Record):
    """One line of gpu-NAME-steps.jsonl. A step that never began has neither command nor output."""

    step: str
    status: Literal["ok", "failed", "skipped"]
    reason: str | None
    seconds: float
    limit_s: float
    started: str
    command: str = ""
    output_tail: list[str] = []


class Device(Record):
    """gpu-NAME-device.json."""

    written: str
    commit: str | None
    gpu: Texts
    processor: str
    cores: int
    versions: Texts
    nvcc: list[str] | None
    nvinfer_headers: str | None
    architecture: str | None
    obstacles: dict[str, str | None]


class Timed(Record):
    """Medians and 90th percentiles of one contender, in ms; null where the runtime lets no events in."""

    workload: str
    contender: str
    rounds: int
    wall_p50_ms: float
    wall_p90_ms: float
    device_p50_ms: float | None
    device_p90_ms: float | None
    wall_speedup_over: dict[str, float]


class Times(Record):
    """gpu-NAME-RUNTIME-PRECISION.json."""

    written: str
    commit: str | None
    command: str
    model: str
    runtime: str
    precision: str
    wall: str
    device: str
    cuda_graphs: str
    dense: str
    versions: Texts
    parity: dict[str, dict[str, Any]]
    failures: Texts
    results: list[Timed]


class ShapeRow(Record):
    """A contender of `benchmarking.compare`."""

    workload: str
    contender: str
    engine: str
    precision: str
    p50_ms: float
    p90_ms: float
    p99_ms: float
    flops: float
    rounds: int
    vs: dict[str, dict[str, float]]
    rounds_ms: list[float] = []


class Shape(Record):
    """gpu-NAME-SHAPE-LAYERS-RUNTIME-PRECISION.json."""

    written: str
    commit: str | None
    command: str
    shape: str
    layers: int
    sites: list[str]
    retention: float
    device: Texts
    versions: Texts
    results: list[ShapeRow]


class Peer(Record):
    """A contender of a `Cell`, in ms. student_speedup: of the student in the runner over it, with its margin; absent of the student
    itself, and where it has no time."""

    contender: str
    rounds: int
    share_of_allowed_error: float
    p50_ms: float
    p90_ms: float
    p99_ms: float
    student_speedup: float | None = None
    margin: float | None = None


class Cell(Record):
    """A workload of a `Table`. tokens: of the mean batch. flops_ratio: of packed dense BERT over the student. left_out: why others have
    no row. share_of_allowed_error_of_dense_answers: above 1, the check of the student would have noticed one that drops no tokens."""

    shape: str
    layers: int
    workload: str
    texts: int
    tokens: float
    flops_ratio: float
    share_of_allowed_error_of_dense_answers: float
    rows: list[Peer]
    left_out: Texts


class Table(Record):
    """gpu-NAME-table-PRECISION.json. contenders: what each is, in words."""

    command: str
    commit: str | None
    device: Texts
    versions: Texts
    precision: str
    sites: list[str]
    retention: float
    contenders: Texts
    cells: list[Cell]


class Launches(Record):
    """Of `Probes`."""

    empty_kernel_us: float
    graph_launch_and_wait_us: float
    kernel_and_mapped_word_us: float
    kernel_and_wait_us: float


class Way(Record):
    """A product in one tile and split. error: the largest, absolute."""

    variant: str
    parts: int
    us: float
    error: float


class Product(Record):
    shape: str
    product: str
    rows: int
    processors: int
    torch_us: float
    ours: list[Way]


class Profile(Record):
    contender: str
    workload: str
    kernels: int
    copies: int
    busy_us: float
    gaps_us: float
    wall_us: float


class Probes(Record):
    """gpu-NAME-probes.json."""

    command: str
    commit: str | None
    device: Texts
    versions: Texts
    dtype: str
    launches: Launches | None
    products: list[Product]
    profiles: list[Profile]
    failures: Texts


class AttentionDevice(Record):
    gpu: str
    architecture: str
    driver_and_clocks: str
    bytes_per_s: float
    flops_per_s: float


class Check(Record):
    """repeats: of kernels that say what tokens received, whether they gave the same bits again."""

    variant: str
    code: str
    share_of_allowed_error: float
    holds: bool
    repeats: bool | None = None


class AttentionRow(Record):
    workload: str
    dtype: Literal["fp16", "bf16", "fp32"]
    head_size: int
    contender: str
    device_us: float
    wall_us: float
    vs_flash: float | None
    bytes: int
    flops: int
    share_of_bound: float


class Attention(Record):
    """ragged-attention-NAME.json."""

    command: str
    device: AttentionDevice
    versions: Texts
    commit: str
    checks: list[Check]
    results: list[AttentionRow]


def kind_of(path: Path) -> type[Record] | None:
    """Which of these a file is by its name; None for others."""
    name = path.name
    if name.startswith("ragged-attention-"):
        return Attention
    if not name.startswith("gpu-"):
        return None
    if name.endswith("-steps.jsonl"):
        return StepLine
    if name.endswith("-device.json"):
        return Device
    if name.endswith("-probes.json"):
        return Probes
    if "-table-" in name:
        return Table
    return None if path.suffix == ".jsonl" else Shape if "-bert-" in name else Times


def read(path: Path) -> list[Record]:
    """Read a record: one value, or one for each line.

    Raises:
        msgspec.ValidationError: a field is missing, unknown or of another type; the text names it.
    """
    kind = kind_of(path)
    assert kind is not None, path.name
    text = path.read_text(encoding="utf-8")
    return [msgspec.json.decode(part, type=kind) for part in (text.splitlines() if path.suffix == ".jsonl" else [text])]
