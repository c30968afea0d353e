"""What is asked of many machines: the questions, the workers, and what is told of their work."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ...contract import DEFAULT_BATCH, MAX_THREADS
from ...errors import InputError, check_int, quoted
from ...inference.answers.zero_shot import checked

ROWS_PER_PART = 16_384
MIN_SHARE = 1e-4
"""Of a GPU, as Ray counts."""


@dataclass(frozen=True, kw_only=True)
class ScoringConfig:
    """What decides the answers. A directory holds the answers to one of these.

    columns: name of the text column, or two with a comma for pairs; default: as `adtp-run --file` chooses.
    keep: columns of the input that the output has, too; default: all.
    prefix: put before the names of the answer's columns, where the input has columns of such names.
    target, prefer: as of `load`. Without a target each worker takes the best that runs on its machine.
    prompt_name, prompt, truncate_dim: as of `encode`. max_active_dims: as of `encode_sparse`. labels, hypothesis_template, multi_label:
    as of `zero_shot`. aggregation, top_k, may_be_none, windows: as of a call of `load`'s result.
    rows_per_part: rows that are answered between two writes, and lost where a worker dies.
    """

    columns: str | None = None
    keep: Sequence[str] | None = None
    prefix: str = ""
    target: str | None = None
    prefer: str = "precision"
    prompt_name: str | None = None
    prompt: str | None = None
    truncate_dim: int | None = None
    max_active_dims: int | None = None
    labels: str | Sequence[str] | None = None
    hypothesis_template: str | None = None
    multi_label: bool = False
    aggregation: str | None = None
    top_k: int = 1
    may_be_none: bool = False
    windows: Mapping[str, int] | None = None
    rows_per_part: int = ROWS_PER_PART

    def __post_init__(self) -> None:
        check_int("rows_per_part", self.rows_per_part, 1)
        listed = isinstance(self.keep, Sequence) and not isinstance(self.keep, str)
        if self.keep is not None and not (listed and all(isinstance(name, str) for name in self.keep)):
            raise InputError(f"keep: got {quoted(self.keep)}; accepted is a list of names")
        if not isinstance(self.prefix, str):
            raise InputError(f"prefix: got {quoted(self.prefix)}; accepted is a string, such as 'adtp_'")
        if self.labels is None and (self.hypothesis_template is not None or self.multi_label):
            raise InputError(
                "hypothesis_template and multi_label say how texts are given labels, and labels are missing"
            )
        if self.labels is not None:
            object.__setattr__(self, "labels", checked(self.labels))
            for name in (
                "prompt_name",
                "prompt",
                "truncate_dim",
                "max_active_dims",
                "aggregation",
                "may_be_none",
                "windows",
            ):
                if (value := getattr(self, name)) is not None and value is not False:
                    raise InputError(f"labels, {name}: got both; texts are classified into labels without {name}")
            if self.top_k != 1:
                raise InputError("labels, top_k: got both; a text has the scores of all its labels")

    def to_json(self) -> dict[str, Any]:
        """Return the fields as JSON has them."""
        return {**asdict(self), "keep": None if self.keep is None else list(self.keep)}


@dataclass(frozen=True, kw_only=True)
class Workers:
    """How the work is done, which does not change the answers.

    count: workers, at most; default: as many as the cluster has processors for. threads: processors of each.
    gpus: of each, a whole number or a share such as 0.5. batch_size: texts run at once, at most.
    check_hashes: compare the hashes of OUT's files with its manifest.
    """

    count: int | None = None
    threads: int = 1
    gpus: float = 0
    batch_size: int = DEFAULT_BATCH
    check_hashes: bool = True

    def __post_init__(self) -> None:
        if self.count is not None:
            check_int("workers", self.count, 1)
        check_int("threads", self.threads, 1, MAX_THREADS)
        check_int("batch_size", self.batch_size, 1)
        number = isinstance(self.gpus, (int, float)) and 0 <= self.gpus <= MAX_THREADS
        if not number or (self.gpus != int(self.gpus) and not MIN_SHARE <= self.gpus < 1):
            raise InputError(
                f"gpus: got {quoted(self.gpus)}; accepted is a whole number from 0 on, or a share below 1 such as 0.5"
            )


@dataclass(frozen=True, kw_only=True)
class PartResult:
    """A part that was answered. began: seconds since 1970, of its last attempt. worker: its process, as host:pid.

    Of a part that was there before, `began` and `seconds` are 0, and `worker` is "".
    """

    file: str
    start: int
    rows: int
    began: float
    seconds: float
    worker: str


@dataclass(frozen=True)
class Summary:
    """Rows and parts there are now, and how many parts had been there before."""

    rows: int
    parts: int
    found: int
