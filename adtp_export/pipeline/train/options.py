"""What `train` is asked for, for type checkers; `training.settings` says what each field means and accepts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypedDict

from ..options import PathLike


class TrainKeywords(TypedDict, total=False):
    """The fields of `TrainOptions`, for type checkers."""

    data: PathLike | None
    train: PathLike | None
    dev: PathLike | None
    test: PathLike | None
    text_column: str | Sequence[str] | None
    label_column: str
    task: str
    dev_share: float
    train_rows: int | None
    max_tokens: int | None
    stride: int | None
    max_answer_tokens: int
    base: PathLike | None
    teacher: PathLike | None
    layers: int | None
    method: str
    prune_sites: str | Sequence[str] | None
    retention_ratios: str | Sequence[float]
    saliency_hidden_size: int
    min_tokens: int
    ratio: str
    retention: str | float | Sequence[float] | None
    flops: float | None
    guided: float
    alpha: float
    beta: float
    gamma: float
    kappa: float
    temperature: float
    attribution: str
    ig_steps: int
    teacher_dimensions: float
    without: str | Sequence[str]
    teacher_epochs: float
    epochs: float
    teacher_learning_rate: float
    learning_rate: float
    retainer_learning_rate: float
    weight_decay: float
    warmup: float
    batch_size: int
    evaluations: int
    seed: int
