"""What `bench` is asked for: every option is checked here, before any work."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypedDict

from ...contract import MAX_THREADS
from ...errors import InputError, check_int, flag_name
from ..options import PathLike

_OF_SHAPE = ("layers", "prune_sites", "retention")
_COMPARED = ("peers", "precompute_embedding_projections", "sweep_retention")
_LISTS = ("prune_sites", "peers", "workloads")


@dataclass(frozen=True, kw_only=True)
class BenchOptions:
    """Options of `bench`, named as those of `adtp-bench`. Lists may also be text with commas.

    shape: instead of an exported directory, a student of this size with random weights: "bert-base", "bert-large", "minilm",
        "bert-small" or "bert-mini".
    layers: depth of `shape`; by default its own.
    prune_sites: where a student of `shape` drops tokens; by default at "0.ffn".
    retention: share of tokens that it keeps at its first site, a multiple of 0.001; later sites keep all. By default 0.3.
    data: text file whose real lengths are timed as well (.txt, .tsv, .csv, .jsonl, each also .gz).
    text_column: its text column, or two with a comma.
    precompute_embedding_projections: also time the file that ``adtp-export --precompute-embedding-projections`` writes.
    peers: also time dense BERT of 12 layers as others run it: some of "optimum", "openvino", "ctranslate2", "torch",
        "sorted" and "ltp", or "all" that are installed.
    sweep_retention: also time by retention a student of the same size and sites, with random weights.
    workloads: some of "1x32", "1x128", "1x384", "8x128", "32x64", and of skewed batches "mixed-32" and "one-long-32"; by default
        all.
    threads: of each runtime; 0: one per core.
    seconds: time for each workload; at least 10 rounds are run.
    margin: time on, ten times as long at most, until each speedup of the student is known within this share of it (95%).
    write: time the targets of an exported directory against one another, and nothing else, and write the medians beside its
        manifest: `load` then takes what is fastest on this machine.
    """

    shape: str | None = None
    layers: int | None = None
    prune_sites: str | Sequence[str] | None = None
    retention: float | None = None
    data: PathLike | None = None
    text_column: str | None = None
    precompute_embedding_projections: bool = False
    peers: str | Sequence[str] = ()
    sweep_retention: bool = False
    workloads: str | Sequence[str] | None = None
    threads: int = 0
    seconds: float = 20.0
    margin: float | None = None
    write: bool = False

    def check(self, out: Path | None) -> None:
        """Raises InputError where options contradict one another or are out of range."""
        if (out is None) == (self.shape is None):
            raise InputError(
                "give either OUT or --shape; type: adtp-bench OUT, or adtp-bench --shape bert-base --layers 6 --retention 0.29"
            )
        if not self.seconds >= 0:
            raise InputError(f"--seconds: got {self.seconds}; accepted is 0 or more")
        if self.margin is not None and not 0 < self.margin < 1:
            raise InputError(f"--margin: got {self.margin}; accepted is a share between 0 and 1, such as 0.05")
        check_int("--threads", self.threads, 0, MAX_THREADS)
        if out is not None and any(getattr(self, name) is not None for name in _OF_SHAPE):
            raise InputError("--layers, --prune-sites and --retention go with --shape; a checkpoint has its own")
        self._check_write(out)
        if self.data is not None and out is None:
            raise InputError("--data goes with OUT: a shape without a checkpoint has no tokenizer")
        if self.text_column is not None and self.data is None:
            raise InputError("--text-column names a column of --data FILE, which is missing")
        if self.names("prune_sites") == ():
            raise InputError("--prune-sites: got an empty list; accepted is at least one site, such as 0.ffn")
        if self.precompute_embedding_projections and "0.attention" in (self.names("prune_sites") or ()):
            raise InputError(
                "--precompute-embedding-projections: the first layer's projections cannot be precomputed after a cut at '0.attention'"
            )
        if (share := self.retention) is not None and not (
            0 < share <= 1 and abs(1000 * share - round(1000 * share)) < 1e-6
        ):
            raise InputError(f"--retention: got {share:g}; accepted are multiples of 0.001 above 0, up to 1")

    def _check_write(self, out: Path | None) -> None:
        if self.write and out is None:
            raise InputError("--write goes with OUT, beside whose manifest it writes; a shape has none")
        if self.write and (others := [name for name in _COMPARED if getattr(self, name)]):
            raise InputError(
                f"{flag_name(others[0])}: --write times the targets of OUT and nothing else; leave one of them out"
            )

    def names(self, field: str) -> tuple[str, ...] | None:
        """Return what a list holds, however it was given; None where nothing was."""
        value = getattr(self, field)
        return (
            None
            if value is None
            else tuple(name.strip() for name in (value.split(",") if isinstance(value, str) else value))
        )

    def command(self, out: Path | None) -> str:
        """What to type for these options."""
        words = ["adtp-bench", *([] if out is None else [str(out)])]
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if value == field.default or (field.name in _LISTS and not self.names(field.name)):
                continue
            words.append("--workload" if field.name == "workloads" else flag_name(field.name))
            if field.name in _LISTS:
                words.append(",".join(self.names(field.name) or ()))
            elif value is not True:
                words.append(f"{value:g}" if isinstance(value, float) else str(value))
        return shlex.join([*words, "--json"])


class BenchKeywords(TypedDict, total=False):
    """The fields of `BenchOptions`, for type checkers."""

    shape: str | None
    layers: int | None
    prune_sites: str | Sequence[str] | None
    retention: float | None
    data: PathLike | None
    text_column: str | None
    precompute_embedding_projections: bool
    peers: str | Sequence[str]
    sweep_retention: bool
    workloads: str | Sequence[str] | None
    threads: int
    seconds: float
    margin: float | None
    write: bool
