"""What `bench` is asked for: every option is checked here, before any work."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ...contract import MAX_THREADS
from ...errors import InputError, flag_name
from ...options import NOT_NEGATIVE, Options, PathLike, Range, about, listed, option, options_of
from ..progress import Steps

_OF_SHAPE = ("layers", "prune_sites", "retention")
_COMPARED = ("peers", "precompute_embedding_projections", "sweep_retention")


@dataclass(frozen=True, kw_only=True)
class BenchOptions(Options):
    """Options of `bench` and `adtp-bench`. Lists may also be text with commas."""

    # An option is one paragraph, which a formatter would take apart.
    # fmt: off
    out: PathLike | None = field(default=None, kw_only=False, metadata=about(
        "output directory of adtp-export", metavar="OUT"))
    shape: str | None = option(None,
        "instead of OUT, time a student of this size with random weights: bert-base, bert-large, minilm, bert-small or bert-mini",
        "random weights", metavar="NAME")
    layers: int | None = option(None, "number of layers of --shape (default: its own)", "random weights", metavar="L")
    prune_sites: str | Sequence[str] | None = option(None,
        "where the student of --shape drops tokens, such as 0.ffn,4.attention (default: 0.ffn)",
        "random weights", metavar="LIST")
    retention: float | None = option(None,
        "share of tokens that it keeps at its first prune site, a multiple of 0.001; later sites keep all (default: 0.3)",
        "random weights", metavar="R")
    peers: str | Sequence[str] = option((),
        "also time 12-layer dense BERT in other runtimes, length-sorted batches, and LTP: some of optimum, openvino, "
        "openvino-bf16, ctranslate2, ctranslate2-int8, llamacpp-f32, llamacpp-bf16, llamacpp-q8_0, torch, sorted and ltp, or all that are "
        "installed (all); openvino and ctranslate2 include their lower precisions",
        "contenders", metavar="LIST")
    precompute_embedding_projections: bool = option(False,
        "also time the file of adtp-export --precompute-embedding-projections, in which tables replace the projections of the first "
        "layer", "contenders")
    sweep_retention: bool = option(False,
        "also time a student of this size and these prune sites, with random weights, at each of its candidate ratios (with --shape "
        "0.1 to 1.0), to find where pruning breaks even", "contenders")
    write: bool = option(False,
        "time only the targets of OUT against one another, and write the medians beside its manifest: load and adtp-run then choose "
        "the fastest on this machine", "contenders")
    workloads: str | Sequence[str] | None = option(None,
        "shapes, as batch size x tokens, and the skewed batches mixed-32 and one-long-32 (default: both of these and 1x32, 1x128, 1x384, "
        "8x128, 32x64)", "workloads", metavar="LIST", flag="--workload")
    data: PathLike | None = option(None,
        "text whose real lengths are timed as well: .txt, .tsv, .csv or .jsonl, each also .gz",
        "workloads", metavar="FILE")
    text_column: str | None = option(None,
        "text column of --data, or two separated by a comma for sentence pairs", "workloads", metavar="C")
    threads: int = option(0,
        "threads of each runtime; 0 uses one for each core that may be used",
        "measurement", metavar="N", within=Range(0, MAX_THREADS, f"an integer from 0 to {MAX_THREADS}"))
    seconds: float = option(20.0,
        "time per workload; at least 10 rounds are run", "measurement", metavar="S", within=NOT_NEGATIVE)
    budget: float = option(300.0,
        "seconds for the whole run; 0 sets no limit. What takes long runs a few batches once, and what there is no time for is "
        "left out by name, the least informative contenders first",
        "measurement", metavar="S", within=NOT_NEGATIVE)
    margin: float | None = option(None,
        "keep timing, for up to ten times --seconds, until the 95% interval of each speedup of the student is within this share of "
        "it, such as 0.05",
        "measurement", metavar="M", within=Range(1e-12, 1 - 1e-12, "a share between 0 and 1, such as 0.05"))
    # fmt: on
    steps: Steps | None = None

    def check(self) -> None:
        if (self.out is None) == (self.shape is None):
            raise InputError(
                "give either OUT or --shape; type: adtp-bench OUT, or adtp-bench --shape bert-base --layers 6 --retention 0.29"
            )
        given = [flag_name(name) for name in _OF_SHAPE if getattr(self, name) is not None]
        if self.out is not None and given:
            raise InputError(f"{', '.join(given)}: only with --shape; a checkpoint has its own")
        self._check_write()
        if self.data is not None and self.out is None:
            raise InputError("--data goes with OUT: a shape without a checkpoint has no tokenizer")
        if self.text_column is not None and self.data is None:
            raise InputError("--text-column names a column of --data FILE, which is missing")
        if self.prune_sites is not None and not any(listed(self.prune_sites)):
            raise InputError("--prune-sites: got an empty list; accepted is at least one site, such as 0.ffn")
        if self.precompute_embedding_projections and "0.attention" in listed(self.prune_sites):
            raise InputError(
                "--precompute-embedding-projections: the first layer's projections cannot be precomputed after a cut at '0.attention'"
            )
        if (share := self.retention) is not None and not (
            0 < share <= 1 and abs(1000 * share - round(1000 * share)) < 1e-6
        ):
            raise InputError(f"--retention: got {share:g}; accepted are multiples of 0.001 above 0, up to 1")

    def _check_write(self) -> None:
        if self.write and self.out is None:
            raise InputError("--write goes with OUT, beside whose manifest it writes; a shape has none")
        if self.write and (others := [name for name in _COMPARED if getattr(self, name)]):
            raise InputError(
                f"{flag_name(others[0])}: --write times the targets of OUT and nothing else; leave one of them out"
            )

    @property
    def directory(self) -> Path | None:
        return None if self.out is None else Path(self.out)

    @property
    def command(self) -> str:
        """What to type for these options."""
        words = ["adtp-bench", *([] if self.out is None else [str(self.out)])]
        for known in options_of(type(self)):
            value = getattr(self, known.name)
            if known.positional or value == known.default or (isinstance(value, Sequence) and not value):
                continue
            words.append(known.flag)
            if isinstance(value, float):
                words.append(f"{value:.12g}")
            elif value is not True:
                words.append(",".join(value) if isinstance(value, (list, tuple)) else str(value))
        return shlex.join([*words, "--json"])
