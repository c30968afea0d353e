"""`bench`: latency of a student against dense BERT of the same width, as a function of Python."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...environment import commit, cpu, versions
from ...errors import InputError, needs_extras
from ...io import telling_full_disk
from ...options import listed, takes
from ..progress import Steps
from .options import BenchOptions

if TYPE_CHECKING:
    import numpy as np
    from tokenizers import Tokenizer

    from ...benchmarking.budget import Budget, LeftOut
    from ...benchmarking.compare import Latency
    from ...benchmarking.contenders import Architecture
    from ...benchmarking.ltp_baseline import LtpPeer
    from ...benchmarking.processes import Contender
    from ...benchmarking.profile import OperatorProfile, Peaks
    from ...benchmarking.sweep import Sweep, Swept
    from ...benchmarking.workloads import Workload
    from ...data.readers import Text
    from ...data.tokenize import Batch
    from ...runtimes import Engine

RETENTION, SITES = 0.3, ("0.ffn",)
"""Of `shape`, where nothing else is asked for."""
RATIOS = tuple(i / 10 for i in range(1, 11))
"""What a sweep times where the student has no candidates of its own."""


@takes(BenchOptions)
@needs_extras("bench")
def bench(chosen: BenchOptions) -> dict[str, Any]:
    """Time an exported directory, or a student of a given shape, against dense BERT of the same width in ONNX Runtime.

    Every contender runs in a process of its own, in turns. `out` gets the latencies in its `report.html`. With `write` it is the
    targets of `out` that are timed, against one another, and `load` chooses by these times on this machine.

    Returns:
        What ``adtp-bench --json`` prints, ready for `json`: "command", "commit", "device", "versions", "subject", "retention"
        and "results" (a row for each workload and contender: times of a batch in ms, FLOPs, and under "vs" the speedup,
        FLOPs ratio and realized fraction against each baseline); "left_out", what `budget` had no time for; "peaks", "profiles" and
        "sweeps". With `write`, "results" has a row for each workload and target, and "load" says by preference which target `load`
        takes now, and why.

    Raises:
        InputError: an option that is not accepted, or a directory that `export` did not write.
        MissingDependencyError: the extra "export", or a peer's runtime, is not installed.
        EngineBuildError: a runtime refuses its model.
    """
    directory, steps = chosen.directory, chosen.steps or Steps()
    if directory is None or not chosen.write:
        return _compare(directory, chosen, steps)
    from .targets import time_and_write

    return time_and_write(directory, chosen, steps)


@telling_full_disk()
def _compare(directory: Path | None, chosen: BenchOptions, steps: Steps) -> dict[str, Any]:
    """Time a student against dense BERT and peers."""
    from ...benchmarking import ltp_baseline, peers
    from ...benchmarking.budget import Budget
    from ...runtimes import llamacpp
    from .workloads import names_of

    budget = Budget(chosen.budget)
    wanted = peers.choose_peers(listed(chosen.peers), forced=directory is None)
    names_of(chosen)  # a name that is wrong ends it before an export
    with tempfile.TemporaryDirectory(prefix="adtp-bench-") as scratch:
        folder = Path(scratch)
        subject = _forced(chosen, folder, steps) if directory is None else _exported(directory, chosen)
        for difference in subject.architecture.unlike:
            steps.note(f"dense BERT differs from this model: {difference}")
        timed = _workloads(subject, chosen, steps)
        contenders = _make_contenders(subject, chosen.precompute_embedding_projections, wanted, folder, steps)
        ltp: LtpPeer | None = None
        if peers.LTP in wanted:
            with steps.step("ltp_s", "exporting LTP"):
                longest = max(batch["input_ids"].shape[1] for workload in timed for batch in workload.batches)
                ltp = ltp_baseline.ltp_peer(subject.architecture, longest, folder)
        results, left_out = _time(contenders, ltp, subject, timed, chosen, budget, steps)
        peaks, profiles = _profile(subject, timed, chosen.threads, steps)
        swept = _sweep(contenders, subject, timed, folder, chosen, budget, steps) if chosen.sweep_retention else []
    document = {
        "command": chosen.command,
        "commit": commit(),
        "device": cpu(chosen.threads),
        "versions": versions() | ({"llama.cpp": llamacpp.VERSION} if llamacpp.installed() else {}),
        "subject": chosen.shape or subject.name,
        "retention": subject.retention,
        "results": [dataclasses.asdict(row) for row in results],
        "left_out": [dataclasses.asdict(each) for each in left_out],
        "peaks": dataclasses.asdict(peaks),
        "profiles": [dataclasses.asdict(profile) for profile in profiles],
        "sweeps": [dataclasses.asdict(sweep) for sweep in swept],
    }
    if directory is not None:
        _add_to_report(directory, document, steps)
    return document


@dataclass(frozen=True, kw_only=True)
class _Subject:
    """What is timed. retention: what a report says of it; forced: its share, where it is. swept: None without sites.
    packed: its file with packed inputs, where there is one. tokenizer, texts: what batches are made of; random ids without."""

    name: str
    student: Contender
    architecture: Architecture
    max_tokens: int
    retention: str
    swept: Swept | None
    forced: float | None = None
    packed: Path | None = None
    tokenizer: Tokenizer | None = None
    texts: Sequence[Text] = ()


def _exported(out: Path, chosen: BenchOptions) -> _Subject:
    """Read an output directory of adtp-export.

    Raises:
        InputError: it is none, or damaged; or the text file cannot be read.
    """
    from ...artifacts.checks import check_reads_texts, checked_file, checked_model
    from ...artifacts.manifest import read_manifest
    from ...benchmarking.contenders import Architecture
    from ...benchmarking.processes import STUDENT, Contender
    from ...benchmarking.sweep import Swept
    from ...contract import HEAD_SEQUENCE, MODEL, PACKED_MODEL, layout_of, layout_path
    from ...inference.config import read_config
    from ...io import read_json
    from .workloads import texts_for

    manifest = read_manifest(out)
    check_reads_texts(out, manifest)
    config, tokenizer = read_config(out, functools.partial(checked_file, out, manifest))
    model, packed = (layout_path(name, layout_of(manifest.files)) for name in (MODEL, PACKED_MODEL))
    fields = read_json(out / "config.json")
    try:
        architecture = Architecture.of(fields)
    except (KeyError, TypeError, ValueError) as error:
        raise InputError(f"{out} is damaged ({error!r}); export again with --force") from error
    source, texts = texts_for(config.adtp.head, chosen)
    sites, ratios = tuple(config.adtp.prune_sites), tuple(config.adtp.retention_ratios or RATIOS)
    first_alone = config.adtp.head == HEAD_SEQUENCE and fields.get("classifier_pooling") != "mean"
    architecture = dataclasses.replace(architecture, every_token=not first_alone)
    whole = architecture.deep(architecture.shape.layers)
    return _Subject(
        name=str(out.name),
        student=Contender(
            name=STUDENT,
            path=checked_model(out, manifest, model),
            layers=architecture.shape.layers,
            padded=False,
            sites=sites,
            cls_only_last_layer=first_alone,
        ),
        architecture=architecture,
        max_tokens=config.max_tokens,
        retention=f"{'learned' if sites else '1, for it has no prune site'}, on {source}",
        swept=Swept(whole, sites, ratios, config.adtp.min_tokens) if sites else None,
        packed=checked_model(out, manifest, packed) if packed in manifest.files else None,
        tokenizer=tokenizer,
        texts=texts,
    )


def _forced(chosen: BenchOptions, folder: Path, steps: Steps) -> _Subject:
    from ...benchmarking.contenders import Architecture, named_shape, scheduled_student
    from ...benchmarking.sweep import Swept
    from ...model.config import parse_sites

    assert chosen.shape is not None
    architecture = Architecture(named_shape(chosen.shape, chosen.layers))
    retention = RETENTION if chosen.retention is None else chosen.retention
    sites = listed(chosen.prune_sites) or SITES
    parse_sites(sites, architecture.shape.layers, field="--prune-sites")
    text = f"exporting a student of shape {chosen.shape}, {architecture.shape.layers} layers, random weights"
    with steps.step("export_s", text):
        student, _ = scheduled_student(architecture, sites, retention, folder)
    return _Subject(
        name=chosen.shape,
        student=student,
        architecture=architecture,
        max_tokens=architecture.tables["max_position_embeddings"],
        retention=f"forced to {retention:g}, random weights and ids",
        swept=Swept(architecture, sites, RATIOS),
        forced=retention,
    )


def _workloads(subject: _Subject, chosen: BenchOptions, steps: Steps) -> list[Workload]:
    from .workloads import Read, workloads

    read = Read(
        inputs=subject.architecture.input_names,
        vocabulary=subject.architecture.tables["vocab_size"],
        max_tokens=subject.max_tokens,
        tokenizer=subject.tokenizer,
        texts=subject.texts,
    )
    return workloads(read, chosen, steps)


def _make_contenders(
    subject: _Subject, precompute_embedding_projections: bool, wanted: Sequence[str], folder: Path, steps: Steps
) -> list[Contender]:
    """Return the student, the dense baselines, and what else was asked for but LTP."""
    from ...benchmarking.contenders import dense_baselines, with_precomputed_projections
    from ...benchmarking.peers import dense_peers, with_plugin

    student, architecture = subject.student, subject.architecture
    other_forms = (
        [dataclasses.replace(student, name=f"{student.name}-packed", path=subject.packed)] if subject.packed else []
    )
    if precompute_embedding_projections:
        with steps.step("precompute_s", "precomputing the first layer's projections"):
            other_forms.append(with_precomputed_projections(student, folder))
    itself = not student.sites and not architecture.unlike  # packed dense BERT
    with steps.step("baselines_s", "exporting dense baselines") as progress:
        contenders = [student, *dense_baselines(architecture, folder, progress, plain=itself)]
    contenders += [*with_plugin(contenders, architecture.shape.layers), *other_forms]
    if wanted:
        with steps.step("peers_s", f"making peers: {', '.join(wanted)}"):
            contenders += dense_peers(wanted, student, architecture, folder)
    return contenders


def _time(
    contenders: Sequence[Contender],
    ltp: LtpPeer | None,
    subject: _Subject,
    timed: Sequence[Workload],
    chosen: BenchOptions,
    budget: Budget,
    steps: Steps,
) -> tuple[list[Latency], list[LeftOut]]:
    """Time all contenders on all workloads as far as the budget goes, and count their FLOPs; say what was left out."""
    import numpy as np

    from ...benchmarking.compare import count_flops, relate
    from ...benchmarking.peers import splits
    from ...benchmarking.processes import Processes
    from .rounds import in_time

    shape = subject.architecture.shape
    always = [*contenders, *([ltp.contender] if ltp else [])]
    in_parts = any(c.length_bucket_rows for c in contenders)
    everyone = [*always, *(splits(contenders, shape.layers) if in_parts and any(w.skewed for w in timed) else [])]
    baselines = _baselines(subject, everyone)
    inspectors = {c.name: _inspector(c, chosen.threads) for c in everyone if c.sites and not c.is_student}
    if subject.student.sites:
        inspectors |= dict.fromkeys(
            (c.name for c in everyone if c.is_student), _inspector(subject.student, chosen.threads)
        )
    given: dict[str, dict[str, dict[str, np.ndarray]]] = {}
    if ltp is not None:
        assert subject.forced is not None
        for workload in timed:
            with steps.step(f"ltp_{workload.name}_s", f"finding LTP's thresholds for {workload.name}"):
                given[workload.name] = {ltp.contender.name: ltp.settings(workload.batches[0], subject.forced)}
    results: list[Latency] = []
    with contextlib.ExitStack() as stack:
        with steps.step("load_s", f"loading {len(always)} contenders, each in a process of its own"):
            processes = stack.enter_context(Processes(everyone, chosen.threads))

        def time_ms(workload: Workload, name: str, batch: Batch, warm: bool) -> float:
            return processes.time_ms(name, {**batch, **given.get(workload.name, {}).get(name, {})}, warm)

        ranked = sorted(everyone, key=lambda c: _rank(c, shape.layers))
        entries = {w.name: [c.name for c in ranked if w.skewed or c in always] for w in timed}
        found, left_out = in_time(entries, timed, time_ms, chosen, budget, steps)
    for workload in timed:
        if (times := found.get(workload.name)) is None:
            continue
        now = [c for c in everyone if c.name in times]
        flops: dict[str, np.ndarray] = {}
        kept: dict[Engine | None, list[np.ndarray | None]] = {}  # all forms of the student keep the same
        for c in now:
            if (seen := inspectors.get(c.name)) not in kept:
                kept[seen] = _kept_sites(seen, workload, given.get(workload.name, {}).get(c.name, {}))
            flops[c.name] = np.array([count_flops(c, shape, *pair) for pair in zip(workload.batches, kept[seen])])
        results += relate(workload.name, times, flops, now, [name for name in baselines if name in times])
    return results, left_out


def _rank(contender: Contender, layers: int) -> int:
    """Return where a contender stands among those that there may be no time for, the most informative first: the student, in the graph
    and with the operators; dense BERT of its depth, packed; padded dense BERT of 12 layers, as users have it; others; batches in parts."""
    from ...benchmarking.contenders import FULL_DEPTH
    from ...benchmarking.processes import STUDENT

    dense = f"packed-dense-{layers}", f"padded-dense-{FULL_DEPTH}", f"padded-dense-{layers}"
    order = [STUDENT, f"{STUDENT}-plugin", *dense]
    return order.index(contender.name) if contender.name in order else len(order) + bool(contender.process)


def _baselines(subject: _Subject, contenders: Sequence[Contender]) -> list[str]:
    """Name what others are related to: dense BERT of 12 layers padded, that of the student's depth, peers, the student in parts."""
    from ...benchmarking.contenders import FULL_DEPTH

    depth = subject.architecture.shape.layers
    dense = [f"padded-dense-{FULL_DEPTH}", f"padded-dense-{depth}", f"packed-dense-{depth}"]
    names = [c.name for c in contenders if not c.is_student or c.length_bucket_rows]
    peers = [name for name in names if not name.startswith(("padded-dense-", "packed-dense-"))]
    return [name for name in dict.fromkeys([*dense, *peers]) if name in names]


def _inspector(contender: Contender, threads: int) -> Engine:
    """Return an engine that tells which tokens a contender has kept."""
    from ...graph.debug import debug_form
    from ...runtimes.onnxruntime import OnnxRuntimeEngine

    with debug_form(contender.path) as path:
        return OnnxRuntimeEngine(path, threads, stop_spinning=True)


def _kept_sites(
    inspector: Engine | None, workload: Workload, given: Mapping[str, np.ndarray]
) -> list[np.ndarray | None]:
    """Return ``kept_site (B, S)`` of each batch; None where nothing is dropped."""
    from ...contract import KEPT_SITE

    return [None if inspector is None else inspector.run({**b, **given})[KEPT_SITE] for b in workload.batches]


def _profile(
    subject: _Subject, timed: Sequence[Workload], threads: int, steps: Steps
) -> tuple[Peaks, list[OperatorProfile]]:
    """Measure what the machine can do, and say where the student's time goes on each workload."""
    from ...benchmarking.profile import measure_peaks, roof, take

    profiles = []
    with steps.step("profile_s", "profiling the student") as progress:
        peaks = measure_peaks(threads)
        for done, workload in enumerate(timed, start=1):
            profiles.append(take(subject.student.path, workload, peaks, threads))
            progress(done, len(timed))
    return roof(peaks, profiles), profiles


def _sweep(
    contenders: Sequence[Contender],
    subject: _Subject,
    timed: Sequence[Workload],
    folder: Path,
    chosen: BenchOptions,
    budget: Budget,
    steps: Steps,
) -> list[Sweep]:
    """Time a student of the same size and sites, random weights, by retention; nothing where there is no site."""
    from ...benchmarking.sweep import sweep

    grid = [workload for workload in timed if len(workload.batches) == 1 and not workload.skewed]
    if subject.swept is None or not grid:
        lacking = "--workload has no BxS" if subject.swept else "no prune site, so it has no retention to vary"
        steps.note(f"--sweep-retention: {lacking}")
        return []
    packed = next(c for c in contenders if c.name == f"packed-dense-{subject.architecture.shape.layers}")
    with steps.step("sweep_s", "timing a student of this size, random weights, by retention") as progress:
        seconds = functools.partial(budget.for_next, chosen.seconds)
        found = sweep(subject.swept, packed, grid, folder, seconds, chosen.threads, progress)
    if len(found) < len(grid):
        steps.note(f"--sweep-retention: no time was left for {grid[len(found)].name} and after; give a longer --budget")
    return found


def _add_to_report(out: Path, document: Mapping[str, Any], steps: Steps) -> None:
    """Show the latencies in the directory's `report.html`; one that cannot be written stays as it is."""
    from ...artifacts.checks import checked_file
    from ...artifacts.manifest import add_file, read_manifest
    from ...report import html

    report = out / "report.html"
    try:
        manifest = read_manifest(out)
        text = html.with_bench(checked_file(out, manifest, report.name).read_text(encoding="utf-8"), document)
        add_file(out, manifest, report.name, text)
    except (OSError, ValueError) as error:
        steps.note(f"{report} does not show these latencies ({error})")
    else:
        steps.note(f"{report} shows these latencies")
