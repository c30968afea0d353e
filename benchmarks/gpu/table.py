"""A student beside dense BERT of its weights as others run it, on this machine's NVIDIA GPU; `benchmarks/gpu/run.sh table` is the command:

    benchmarks/gpu/run.sh table [--texts sst2=FILE --texts 20news=FILE] [--records DIR]
    benchmarks/gpu/run.sh table --dry-run     # tiny models on the CPU and on an emulated GPU: does everything work?

Each contender of `peers.py` has a process of its own and is loaded once for a width and a depth. On each workload its logits are
compared with PyTorch's in fp32; then those that are right take turns. What cannot run, or is wrong, is left out, and the record says
why. Times are ms by the host's clock from padded ids on the host to logits on the host.

A run lasts ten minutes at most and keeps what it has; the same command goes on where it ended. Written: gpu-NAME-table-PRECISION.json.
Exit codes: 0 everything that was tried is in the record; 1 an answer of the runner was wrong; 2 no GPU, or wrong use.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from adtp_export.benchmarking.compare import count_flops
from adtp_export.benchmarking.contenders import BERT_TABLES, SHAPES
from adtp_export.benchmarking.interleaved_timing import PERCENTILES, by_cycle, measure, speedup
from adtp_export.benchmarking.processes import Contender
from adtp_export.benchmarking.workloads import (
    BATCH,
    DATA_ROWS,
    MAX_TOKENS,
    MIXED,
    Workload,
    make_workloads,
    real_lengths,
)
from adtp_export.environment import commit, versions
from adtp_export.errors import AdtpError
from adtp_export.plugins import runner
from benchmarks.gpu.peers import DENSE, PEERS, REFERENCE, STUDENT, Setting, write_setting
from benchmarks.gpu.suite import gpu_of, in_file_names, parse_further
from benchmarks.harness.forced import RETENTION, SITES
from benchmarks.harness.processes import Worker
from benchmarks.harness.records import ROOT, Row, claim, read_document, write

WORKLOADS = ("1x32", "1x128", "8x128", "32x64", "32x128", "64x256", MIXED)
LAYERS = (6, 12)
WIDTHS = ("minilm", "bert-base")
INPUTS = ("input_ids", "attention_mask", "token_type_ids")
SECONDS, MINUTES = 2.0, 9.5
LOADING_S, ANSWER_S = 240.0, 120.0
"""How long a contender may take to be loaded, and to answer; the first batch of a shape compiles or captures."""

DRY_SIZES, DRY_TABLES = (
    {"hidden": 64, "intermediate": 128, "heads": 2},
    {"vocab_size": 97, "max_position_embeddings": 64, "type_vocab_size": 2, "initializer_range": 0.3},
)
DRY_WORKLOADS = ("1x8", "3x12")
PROBE, DRY_PROBE = "32x64", "8x12"
"""The workload that says by how much answers may be off."""


class Asked(Worker):
    """A contender's process that has so long to answer, and no pause after that: a GPU has no threads that spin."""

    def ask(self, limit_s: float = ANSWER_S, **asked: Any) -> dict[str, Any]:
        """Return the answer to a command.

        Raises:
            RuntimeError: the process has ended, or does not answer in time; it says why, in a line.
        """
        try:
            self.child.connection.send(asked)
            if not self.child.connection.poll(limit_s):
                self.child.process.kill()
                raise RuntimeError(f"no answer within {limit_s:g} s")
            return dict(self.child.connection.recv())
        except (EOFError, OSError) as error:
            self.log.seek(0)
            told = [text.strip() for text in self.log.read().splitlines() if text.strip()]
            raise RuntimeError(told[-1] if told else "the process ended") from error


class ContenderError(RuntimeError):
    """A contender failed. name: which."""

    def __init__(self, name: str, why: str) -> None:
        super().__init__(why)
        self.name = name


class Team:
    """The contenders of a width and a depth, each in its process. unable: why others cannot be loaded, by name."""

    def __init__(self, setting: Setting, names: Sequence[str], folder: Path) -> None:
        self.setting, self.names, self._folder = setting, names, folder
        self.unable: dict[str, str] = {}
        self._workers: dict[str, Asked] = {}
        folder.mkdir()
        write_setting(setting, folder)
        for name in (REFERENCE, *names):  # all load at once
            self._start(name)
        for name in (REFERENCE, *names):
            try:
                self.ask(name, LOADING_S)
            except RuntimeError as error:
                if name == REFERENCE:
                    self.close()
                    raise
                self.unable[name] = str(error)
            print(f"  {name}: {self.unable.get(name, 'is loaded')}", flush=True)

    def _start(self, name: str) -> None:
        self._workers[name] = Asked(name, sys.executable, "benchmarks.gpu.peers", self._folder)

    def ask(self, name: str, limit_s: float = ANSWER_S, **asked: Any) -> dict[str, Any]:
        """Ask a contender; one that failed is started anew when it is asked again.

        Raises:
            ContenderError: it fails.
        """
        if name not in self._workers:
            self._start(name)
            limit_s += LOADING_S
        try:
            return self._workers[name].ask(limit_s, **asked)
        except RuntimeError as error:
            self._workers.pop(name).close()
            raise ContenderError(name, str(error)) from error

    def close(self) -> None:
        for worker in self._workers.values():
            worker.close()
        self._workers.clear()


WRONG = "its answers are wrong"


def check(
    team: Team, workload: Workload, allowed: Mapping[str, float]
) -> tuple[dict[str, float], dict[str, str], list[dict[str, Any]]]:
    """Compare all answers to a workload's batches with the reference's.

    Returns:
        The largest error of those that are right, as a share of what is allowed; why others are left out; and the reference's answers.
    """
    expected = [team.ask(REFERENCE, do="answer", batch=batch) for batch in workload.batches]
    shares: dict[str, float] = {}
    left_out = dict(team.unable)
    for name in (name for name in team.names if name not in team.unable):
        like = STUDENT if name == STUDENT else DENSE
        try:
            found = [team.ask(name, do="answer", batch=batch)["logits"] for batch in workload.batches]
        except RuntimeError as error:
            left_out[name] = str(error)
            continue
        errors = [float(np.abs(logits - each[like]).max()) for logits, each in zip(found, expected)]
        share = float(np.max(errors)) / allowed[like]
        if share <= 1:  # which NaN is not
            shares[name] = round(share, 3)
        else:
            left_out[name] = f"{WRONG}: off by {share:.1f} times what is allowed"
    return shares, left_out, expected


def time_cell(team: Team, workload: Workload, allowed: Mapping[str, float], seconds: float) -> Row:
    """Check all contenders on a workload and time those that are right; return the table's cell."""
    shares, left_out, expected = check(team, workload, allowed)
    setting, times = team.setting, {}

    def time_ms(name: str, batch: Mapping[str, np.ndarray]) -> float:
        return float(team.ask(name, do="time", batch=batch)["ms"])

    while shares and not times:
        try:
            measure(workload, list(shares), time_ms, 0)  # clocks rise with load
            times = measure(workload, list(shares), time_ms, seconds)
        except ContenderError as error:
            left_out[error.name] = str(error)
            del shares[error.name]
    flops = count(setting, workload, [each["kept_site"] for each in expected])
    noticed = max(float(np.abs(each[DENSE] - each[STUDENT]).max()) for each in expected) / allowed[STUDENT]
    cycles = {name: by_cycle(ms, len(workload.batches)) for name, ms in times.items()}
    rows = []
    for name, ms in cycles.items():
        row: Row = {"contender": name, "rounds": len(times[name]), "share_of_allowed_error": shares[name]}
        row |= {f"p{p}_ms": round(float(np.percentile(ms, p)), 4) for p in PERCENTILES}
        if STUDENT in cycles and name != STUDENT:
            row["student_speedup"], row["margin"] = (round(v, 3) for v in speedup(ms, cycles[STUDENT]))
        rows.append(row)
    return {
        "shape": setting.shape,
        "layers": setting.layers,
        "workload": workload.name,
        "texts": len(workload.batches[0]["input_ids"]),
        "tokens": round(float(np.mean([batch["attention_mask"].sum() for batch in workload.batches])), 1),
        "flops_ratio": round(flops[DENSE] / flops[STUDENT], 3),
        "share_of_allowed_error_of_dense_answers": round(noticed, 3),
        "rows": rows,
        "left_out": left_out,
    }


def count(setting: Setting, workload: Workload, kept: Sequence[np.ndarray]) -> dict[str, float]:
    """Count the FLOPs of dense BERT and of the student in the runner."""
    usual: dict[str, Any] = {"path": Path(), "layers": setting.layers, "padded": False, "cls_only_last_layer": True}
    models = {DENSE: Contender(name="dense", **usual), STUDENT: Contender(name="student", sites=setting.sites, **usual)}
    shape = setting.architecture.shape
    return {
        name: sum(count_flops(model, shape, batch, site) for batch, site in zip(workload.batches, kept))
        for name, model in models.items()
    }


def streams(files: Mapping[str, Path], tokenizer: Path) -> list[Workload]:
    """Read texts in order of arrival, 32 at a time."""
    from tokenizers import Tokenizer

    from adtp_export.data.readers import read_texts

    found = []
    for name, path in files.items():
        texts = list(itertools.islice(read_texts(path), DATA_ROWS))
        batched = real_lengths(Tokenizer.from_file(str(tokenizer)), texts, INPUTS, MAX_TOKENS)[-1]
        found.append(dataclasses.replace(batched, name=f"{name}-{BATCH}"))
    return found


def place_of(cell: Row) -> tuple[str, int, str]:
    return cell["shape"], cell["layers"], cell["workload"]


def fill(out: Path, document: Row, settings: Sequence[Setting], options: argparse.Namespace) -> bool:
    """Measure the cells that a record lacks, as many as there is time for; say whether none is missing now."""
    began, longest_load, longest_cell = time.monotonic(), 0.0, 0.0
    done = {place_of(cell) for cell in document["cells"]}

    def left_s() -> float:
        return 60 * options.minutes - (time.monotonic() - began)

    for setting in settings:
        missing = [w for w in options.made if (setting.shape, setting.layers, w.name) not in done]
        if not missing:
            continue
        if left_s() < longest_load + longest_cell:
            return False
        print(f"{setting.shape}, {setting.layers} layers, {setting.precision}", flush=True)
        with tempfile.TemporaryDirectory(prefix="adtp-table-") as scratch:
            loading = time.monotonic()
            team = Team(setting, options.contenders, Path(scratch) / "team")
            try:
                (probe,) = make_workloads([DRY_PROBE if setting.dry else PROBE], INPUTS, setting.tables["vocab_size"])
                allowed = team.ask(REFERENCE, do="allowed", batch=probe.batches[0])
                longest_load = max(longest_load, time.monotonic() - loading)
                for workload in missing:
                    if left_s() < longest_cell:
                        return False
                    begun = time.monotonic()
                    document["cells"].append(time_cell(team, workload, allowed, options.seconds))
                    longest_cell = max(longest_cell, time.monotonic() - begun)
                    write(out, document)  # after each: nothing is lost
                    tell(document["cells"][-1])
            finally:
                team.close()
    return True


def tell(cell: Row) -> None:
    for row in cell["rows"]:
        faster = f"{row['student_speedup']:.2f}x" if "student_speedup" in row else ""
        print(f"  {cell['workload']:9} {row['contender']:21} {row['p50_ms']:9.3f} ms  {faster}", flush=True)
    for name, why in cell["left_out"].items():
        print(f"  {cell['workload']:9} {name:21} left out: {why}", flush=True)


def settings_of(options: argparse.Namespace) -> list[Setting]:
    """Return the models to time, narrow and shallow ones first."""
    usual: dict[str, Any] = {"precision": options.precision, "sites": SITES, "retention": RETENTION}
    usual |= {"library": str(options.library.resolve()) if options.library else "", "dry": options.dry_run}
    if options.dry_run:
        return [Setting(shape="dry", sizes=DRY_SIZES, tables=DRY_TABLES, layers=2, **usual)]
    made = []
    for shape, layers in itertools.product(options.shapes, options.layers):
        sizes = {name: getattr(SHAPES[shape], name) for name in ("hidden", "intermediate", "heads")}
        made.append(Setting(shape=shape, sizes=sizes, tables=BERT_TABLES, layers=layers, **usual))
    return made


def library(folder: Path) -> Path | None:
    """Return the runner's library, built here if it is nowhere; None where that cannot be: then the runner says so."""
    try:
        return runner.built() or runner.build(folder)
    except AdtpError as error:
        print(f"libadtp_cuda: {error}", file=sys.stderr)
        return None


def begun(out: Path, gpu: Mapping[str, str], options: argparse.Namespace) -> Row:
    """Return the record to go on with.

    Raises:
        SystemExit: what is there is of another GPU, driver or version.
    """
    identity = {
        "device": {
            name: gpu[name] for name in ("name", "driver_version", "compute_cap", "memory.total", "power.limit")
        },
        "versions": versions(),
        "precision": options.precision,
        "sites": list(SITES),
        "retention": RETENTION,
    }
    found = read_document(out)
    for name, value in identity.items():
        if found and found[name] != value:
            raise SystemExit(
                f"{out.name}: it is of {name} {found[name]}, and here is {value}; use another --records DIR"
            )
    written = {"command": "benchmarks/gpu/run.sh table", "commit": commit(), **identity}
    return {**written, "contenders": {name: peer.what for name, peer in PEERS.items()}, "cells": found.get("cells", [])}


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="benchmarks/gpu/run.sh table", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )

    def several(accepted: Sequence[Any], kind: type = str) -> Any:
        def read(text: str) -> list[Any]:
            found = [kind(part) for part in text.split(",")]
            if unknown := [part for part in found if accepted and part not in accepted]:
                raise argparse.ArgumentTypeError(f"got {unknown[0]!r}; accepted are {', '.join(map(str, accepted))}")
            return found

        return read

    def named(text: str) -> tuple[str, Path]:
        name, _, path = text.partition("=")
        if not name or not Path(path).is_file():
            raise argparse.ArgumentTypeError(f"got {text!r}; accepted is NAME=FILE, such as sst2=train.tsv")
        return name, Path(path)

    parser.add_argument("--contenders", type=several(list(PEERS)), default=list(PEERS), metavar="NAME,...")
    parser.add_argument("--shapes", type=several(list(SHAPES)), default=list(WIDTHS), metavar="NAME,...")
    parser.add_argument("--layers", type=several((), int), default=list(LAYERS), metavar="N,...")
    parser.add_argument("--workloads", type=several(()), metavar="BxS,...", help=f"default: {','.join(WORKLOADS)}")
    parser.add_argument(
        "--texts", type=named, action="append", default=[], metavar="NAME=FILE", help="a stream of texts"
    )
    parser.add_argument("--tokenizer", type=Path, default=ROOT / "demo" / "student" / "tokenizer.json", metavar="FILE")
    parser.add_argument("--precision", choices=("fp16", "bf16", "fp32"), default="fp16")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="of timing for each workload (default: 2)")
    parser.add_argument("--minutes", type=float, default=MINUTES, help="that this run may last (default: 9.5)")
    return parse_further(parser, arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    if (gpu := gpu_of("table", options)) is None:
        return 2
    out = claim(options.records / f"gpu-{in_file_names(gpu['name'])}-table-{options.precision}.json")
    document = begun(out, gpu, options)
    with tempfile.TemporaryDirectory(prefix="adtp-table-") as scratch:
        options.library = options.library or library(Path(scratch))
        settings = settings_of(options)
        usual = DRY_WORKLOADS if options.dry_run else WORKLOADS
        options.made = make_workloads(options.workloads or usual, INPUTS, settings[0].tables["vocab_size"])
        options.made += streams(dict(options.texts), options.tokenizer)
        complete = fill(out, document, settings, options)
    print("complete" if complete else "time is up; the same command goes on from here")
    wrong = [
        cell
        for cell in document["cells"]
        if any(cell["left_out"].get(n, "").startswith(WRONG) for n in (STUDENT, DENSE))
    ]
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
