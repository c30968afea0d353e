"""`adtp-run --ray`: answer Parquet files on a Ray cluster, or on this machine where there is none."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING, Any

from ..errors import InputError, flag_name, printable
from .console import counting_rows, print_path
from .parsing import is_given

if TYPE_CHECKING:
    from ..integrations.ray import PartResult

WINDOWS = ("max_tokens", "stride", "max_answer_tokens")
ZERO_SHOT = ("labels", "hypothesis_template", "multi_label")
_NOT_WITH_RAY = ("text", "format", "text_pair", "kept", "explain", "json", "allow_pickle", "query")
_RAY_ALONE = ("workers", "gpus", "keep", "prefix", "rows_per_part")


def add_ray_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("Ray")
    group.add_argument(
        "--ray",
        action="store_true",
        help="process Parquet files on a Ray cluster: --file is a path, a quoted pattern, a directory or a URI such as "
        "'s3://bucket/*.parquet', and --out a directory or URI. Parts that exist in --out are skipped. Needs the extra ray",
    )
    group.add_argument(
        "--workers",
        metavar="N",
        type=int,
        help="maximum number of workers (default: as many as the cluster has room for)",
    )
    group.add_argument(
        "--gpus",
        metavar="N",
        type=float,
        help="number of GPUs per worker; fractions such as 0.5 share a GPU (default: 0)",
    )
    group.add_argument(
        "--keep", metavar="COLUMNS", help="input columns to copy to the output, separated by commas (default: all)"
    )
    group.add_argument("--prefix", metavar="P", help="prefix of the names of the output columns that hold answers")
    group.add_argument(
        "--rows-per-part", metavar="N", type=int, help="maximum number of rows per output file (default: 16384)"
    )


def check_ray_options(options: argparse.Namespace) -> None:
    """Raises InputError for options that do not go together."""
    if not options.ray:
        if given := [name for name in _RAY_ALONE if getattr(options, name) is not None]:
            raise InputError(f"{flag_name(given[0])} goes with --ray; add that, or leave it out")
        for typed, place in (("--file", options.file), ("--out", options.out_file)):
            if isinstance(place, str):
                raise InputError(f"{typed}: got {place}; URIs go with --ray")
        return
    if given := [name for name in _NOT_WITH_RAY if is_given(getattr(options, name))]:
        raise InputError(f"{flag_name(given[0])} does not go with --ray, which answers --file; leave one of them out")
    if options.out_file is None:
        raise InputError("--ray: say --out DIR, where the answers go")


def windows(options: argparse.Namespace) -> dict[str, int] | None:
    """Return what is to differ from the model's own windows; None where nothing is."""
    return {name: getattr(options, name) for name in WINDOWS if getattr(options, name) is not None} or None


def zero_shot(options: argparse.Namespace) -> dict[str, Any]:
    """Return what is asked of labels of the caller's own: arguments of `zero_shot`."""
    given = {name: getattr(options, name) for name in ZERO_SHOT}
    return {name: value for name, value in given.items() if is_given(value)}


def add_labels(parser: argparse.ArgumentParser) -> None:
    """Add the options of classification into labels of one's own."""
    answers = parser.add_argument_group("labels of your own")
    answers.add_argument(
        "--labels",
        metavar="LIST",
        help="classify the texts into these labels, separated by commas; for models of natural language inference",
    )
    answers.add_argument(
        "--hypothesis-template",
        metavar="TEXT",
        help="sentence about a label, which stands at {} (default: 'This example is {}.')",
    )
    answers.add_argument(
        "--multi-label",
        action="store_true",
        help="with --labels: judge each label alone, so that a text may have several",
    )


def check_labels(options: argparse.Namespace) -> None:
    """Raises InputError for what is said of labels where there are none."""
    if options.labels is None and (said := zero_shot(options)):
        raise InputError(f"{flag_name(next(iter(said)))} goes with --labels LIST; add that, or leave it out")


def command(options: argparse.Namespace) -> int:
    from ..integrations.ray import ScoringConfig, Workers, score

    check_labels(options)
    given = {name: getattr(options, name) for name in ("prefix", "top_k", "rows_per_part")}
    asked = ScoringConfig(
        columns=options.text_column,
        keep=None if options.keep is None else [name.strip() for name in options.keep.split(",")],
        target=options.target,
        prefer=options.prefer,
        prompt_name=options.prompt_name,
        prompt=options.prompt,
        truncate_dim=options.truncate_dim,
        max_active_dims=options.max_active_dims,
        **zero_shot(options),
        aggregation=options.aggregation,
        may_be_none=options.may_be_none,
        windows=windows(options),
        **{name: value for name, value in given.items() if value is not None},
    )
    workers = Workers(
        count=options.workers,
        threads=options.threads or 1,
        gpus=options.gpus or 0,
        batch_size=options.batch_size,
        check_hashes=not options.skip_hash_check,
    )
    with counting_rows(answers_elsewhere=True) as count:

        def progress(finished: PartResult) -> None:
            count(finished.rows)

        told = score(options.file, options.out, options.out_file, asked=asked, workers=workers, progress=progress)
    found = f", {told.found} of them found there" if told.found else ""
    print(
        printable(f"adtp-run: {told.rows:,} rows in {told.parts:,} part{'' if told.parts == 1 else 's'}{found}"),
        file=sys.stderr,
    )
    print_path(options.out_file)
    return 0
