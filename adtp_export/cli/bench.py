"""`adtp-bench`: latency of an exported student against dense BERT of the same width."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import shlex
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import InputError
from .console import Console, print_json, rich_console, run_command
from .job import commit, cpu, versions

if TYPE_CHECKING:
    import numpy as np

    from ..engines import Engine
    from ..latency.compare import Latency
    from ..latency.processes import Contender
    from ..latency.profile import Peaks, Profile
    from ..latency.sweep import Sweep
    from ..latency.workloads import Workload
    from ..model.flops import Shape


SWEPT = tuple(i / 10 for i in range(1, 11))


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="adtp-bench",
        description="Time an exported student against dense BERT of the same width, padded and packed, at its own depth "
        "and at 12 layers, in ONNX Runtime on this machine. Realized fraction = speedup / FLOPs reduction.",
    )
    parser.add_argument("out", metavar="OUT", type=Path, nargs="?", help="output directory of adtp-export")
    parser.add_argument(
        "--shape", metavar="NAME", help="without a checkpoint: bert-base, bert-large, minilm, ... with random weights"
    )
    parser.add_argument("--layers", metavar="L", type=int, help="depth of --shape (default: the shape's own)")
    parser.add_argument("--prune-sites", metavar="S", help="sites of --shape, with commas (default: 0.ffn)")
    parser.add_argument(
        "--retention", metavar="R", type=float, help="share of tokens that --shape keeps at its first site, forced"
    )
    parser.add_argument(
        "--data",
        metavar="FILE",
        type=Path,
        help="text whose real lengths are timed as well (.txt, .tsv, .csv, .jsonl, .gz)",
    )
    parser.add_argument("--text-column", metavar="C", help="its text column, or two with a comma")
    parser.add_argument(
        "--ort-cpu",
        action="store_true",
        help="also time the student as adtp-export --ort-cpu writes it, with tables in place of the first projections",
    )
    parser.add_argument(
        "--peers",
        metavar="LIST",
        help="also time dense BERT of 12 layers as others run it: all (that is installed), or some of optimum, openvino, "
        "ctranslate2, torch, sorted, ltp",
    )
    parser.add_argument(
        "--sweep-retention",
        action="store_true",
        help="also time the student at each of its candidate ratios (--shape: 0.1 to 1.0), and find where pruning breaks even",
    )
    parser.add_argument("--workload", metavar="LIST", help="part of the grid, such as 32x64,1x128 (default: all of it)")
    parser.add_argument(
        "--threads", metavar="N", type=int, default=0, help="threads of each runtime (default: one per core)"
    )
    parser.add_argument(
        "--seconds", metavar="S", type=float, default=20.0, help="time per workload (default: 20; at least 10 rounds)"
    )
    parser.add_argument("--json", action="store_true", help="print the records on stdout")
    return parser


def main() -> None:
    options = make_parser().parse_args()
    run_command("adtp-bench", lambda: command(options))


@dataclass
class _Subject:
    """What is timed: the student, an engine that tells which tokens it kept, and text for its batches."""

    student: Contender
    shape: Shape
    inspector: Engine
    tables: dict[str, int]
    tokenizer: Any
    texts: Sequence[Any]
    ratios: list[float]
    min_tokens: int
    retention: str
    forced_retention: float | None = None


def command(options: argparse.Namespace) -> int:
    if (options.out is None) == (options.shape is None):
        raise InputError(
            "give either OUT or --shape; type: adtp-bench OUT, or adtp-bench --shape bert-base --layers 6 --retention 0.29"
        )
    if not options.seconds >= 0 or options.threads < 0:
        raise InputError(f"--seconds and --threads: got {options.seconds} and {options.threads}; accepted is 0 or more")
    if options.out is not None and any(o is not None for o in (options.layers, options.prune_sites, options.retention)):
        raise InputError("--layers, --prune-sites and --retention go with --shape; a checkpoint has its own")
    if options.data is not None and options.shape is not None:
        raise InputError("--data goes with OUT: a shape without a checkpoint has no tokenizer")
    console = Console()
    from ..latency import workloads
    from ..latency.contenders import choose_peers, dense_baselines, lowered_to_ort_cpu, peers

    wanted = choose_peers(options.peers, forced=bool(options.shape)) if options.peers else []
    with tempfile.TemporaryDirectory(prefix="adtp-bench-") as scratch:
        folder = Path(scratch)
        subject = _forced(options, folder, console) if options.shape else _exported(options)
        names = subject.inspector.inputs
        shapes = _grid(options.workload, subject.tables["max_position_embeddings"], console)
        timed = workloads.grid(shapes, names, subject.tables["vocab_size"], subject.tokenizer, subject.texts)
        if options.data is not None:
            timed += workloads.real_lengths(
                subject.tokenizer, subject.texts, names, subject.tables["max_position_embeddings"]
            )
        with console.step("baselines_s", "exporting dense baselines") as progress:
            contenders = [subject.student, *dense_baselines(subject.shape, folder, progress, subject.tables)]
        if options.ort_cpu:
            with console.step("ort_cpu_s", "tabulating the first layer's projections"):
                contenders.append(lowered_to_ort_cpu(subject.student, folder))
        if wanted:
            with console.step("peers_s", f"making peers: {', '.join(wanted)}"):
                contenders += peers(
                    wanted, subject.student, subject.shape, folder, subject.tables, subject.forced_retention
                )
        results = _run(contenders, subject, timed, options, console)
        profiles, peaks = _profile(subject, timed, options, console)
        swept = _sweep(contenders, subject, timed, folder, options, console) if options.sweep_retention else []
    document = {
        "command": shlex.join(["adtp-bench", *sys.argv[1:]]),
        "commit": commit(),
        "device": cpu(options.threads),
        "versions": versions(),
        "subject": options.shape or str(options.out.name),
        "retention": subject.retention,
        "results": [dataclasses.asdict(row) for row in results],
        "peaks": dataclasses.asdict(peaks),
        "profiles": [dataclasses.asdict(profile) for profile in profiles],
        "sweeps": [dataclasses.asdict(sweep) for sweep in swept],
    }
    if options.out:
        _add_to_report(options.out, document, console)
    if options.json:
        print_json(document)
    else:
        _show(document, results, subject)
        _show_profiles(profiles, peaks, swept)
    return 0


def _add_to_report(out: Path, document: dict[str, Any], console: Console) -> None:
    """Show the latencies in the directory's `report.html`; one that cannot be written stays as it is."""
    from ..export.output import replace_file
    from ..report import html

    try:
        replace_file(out, "report.html", html.with_bench((out / "report.html").read_text(encoding="utf-8"), document))
    except (OSError, ValueError) as error:
        console.note(f"{out / 'report.html'} does not show these latencies ({error})")
    else:
        console.note(f"{out / 'report.html'} shows these latencies")


def _exported(options: argparse.Namespace) -> _Subject:
    from ..engines.deployment import load
    from ..latency.contenders import TABLES
    from ..latency.processes import Contender
    from ..model.flops import Shape
    from ..text import read_texts
    from ..verify.samples import built_in_texts

    deployment = load(options.out, threads=options.threads)
    config = json.loads((options.out / "config.json").read_text(encoding="utf-8"))
    shape = Shape.of(config)
    pruning = config["adtp"]
    source = "built-in sentences"
    texts: list[Any] = list(built_in_texts(pairs=False))
    if options.data is not None:
        texts, source = list(read_texts(options.data, options.text_column)), options.data.name
    student = Contender(
        "student", options.out / "model.onnx", shape.layers, False, tuple(deployment.sites), narrow=True
    )
    return _Subject(
        student,
        shape,
        deployment.inspector(),
        {name: config[name] for name in TABLES},
        deployment.tokenizer,
        texts,
        pruning["retention_ratios"],
        pruning["min_tokens"],
        f"learned, on {source}",
    )


def _forced(options: argparse.Namespace, folder: Path, console: Console) -> _Subject:
    from ..engines.onnxruntime import OnnxRuntimeEngine
    from ..latency.contenders import TABLES, forced_student, named_shape

    shape = named_shape(options.shape, options.layers)
    retention = 0.3 if options.retention is None else options.retention
    sites = (options.prune_sites or "0.ffn").split(",")
    with console.step(
        "export_s", f"exporting a student of shape {options.shape}, {shape.layers} layers, random weights"
    ):
        ratios = SWEPT if options.sweep_retention else ()
        student, debug, bert = forced_student(shape, sites, retention, folder, ratios)
    inspector = OnnxRuntimeEngine(debug, options.threads, release_cores=True)
    return _Subject(
        student,
        shape,
        inspector,
        dict(zip(TABLES, (30522, 512, 2))),
        None,
        (),
        list(bert.config.retention_ratios),
        bert.config.min_tokens,
        f"forced to {retention:g}, random weights and ids",
        retention,
    )


def _grid(text: str | None, max_tokens: int, console: Console) -> list[tuple[int, int]]:
    from ..latency.workloads import GRID

    known = {f"{batch}x{padded}": (batch, padded) for batch, padded in GRID}
    names = list(known) if text is None else text.split(",")
    for name in names:
        if name not in known:
            raise InputError(f"--workload: got {name!r}; accepted are {', '.join(known)}")
    short = [name for name in names if known[name][1] <= max_tokens]
    if len(short) < len(names):
        console.note(
            f"left out {', '.join(n for n in names if n not in short)}: the model reads at most {max_tokens} tokens"
        )
    if not short:
        raise InputError(f"--workload: nothing is left to time; the model reads at most {max_tokens} tokens")
    return [known[name] for name in short]


def _run(
    contenders: Sequence[Contender],
    subject: _Subject,
    timed: Sequence[Workload],
    options: argparse.Namespace,
    console: Console,
) -> list[Latency]:
    from ..latency.compare import measure, relate
    from ..latency.contenders import FULL_DEPTH
    from ..latency.processes import Processes, load

    depth, names = subject.shape.layers, [c.name for c in contenders]
    baselines = list(dict.fromkeys((f"padded-dense-{FULL_DEPTH}", f"padded-dense-{depth}", f"packed-dense-{depth}")))
    baselines += [c.name for c in contenders[1:] if c.name not in baselines and not c.sites and not c.narrow]
    inspectors = {c.name: load(c) for c in contenders if c.engine == "ltp"}
    inspectors |= {c.name: subject.inspector for c in contenders if c.sites}
    results: list[Latency] = []
    with contextlib.ExitStack() as stack:
        with console.step("load_s", f"loading {len(contenders)} contenders, each in a process of its own"):
            processes = stack.enter_context(Processes(contenders, options.threads))
        for workload in timed:
            with console.step(f"{workload.name}_s", f"timing {workload.name}") as progress:
                flops = {c.name: _flops(c, subject.shape, inspectors.get(c.name), workload) for c in contenders}
                times = measure(workload, names, processes.time_ms, options.seconds, progress)
                results += relate(workload.name, times, flops, contenders, baselines)
    return results


def _profile(
    subject: _Subject, timed: Sequence[Workload], options: argparse.Namespace, console: Console
) -> tuple[list[Profile], Peaks]:
    from ..latency.profile import measure_peaks, take

    with console.step("profile_s", "profiling the student") as progress:
        peaks, profiles = measure_peaks(options.threads), []
        for done, workload in enumerate(timed):
            profiles.append(take(subject.student.path, workload, peaks, options.threads))
            progress(done + 1, len(timed))
    return profiles, peaks


def _sweep(
    contenders: Sequence[Contender],
    subject: _Subject,
    timed: Sequence[Workload],
    folder: Path,
    options: argparse.Namespace,
    console: Console,
) -> list[Sweep]:
    from ..latency.sweep import sweep

    if not subject.student.sites:
        console.note("--sweep-retention: this student has no prune site, so it has no retention")
        return []
    packed = next(c for c in contenders if c.name == f"packed-dense-{subject.shape.layers}")
    grid = [workload for workload in timed if len(workload.batches) == 1]
    with console.step("sweep_s", "timing the student by retention") as progress:
        return sweep(
            subject.student,
            packed,
            subject.shape,
            subject.ratios,
            subject.min_tokens,
            grid,
            folder,
            options.seconds,
            options.threads,
            progress,
        )


def _flops(contender: Contender, shape: Shape, inspector: Engine | None, workload: Workload) -> np.ndarray:
    """Count FLOPs of each batch; `inspector` tells which tokens a contender that prunes has kept."""
    import numpy as np

    from ..latency.ltp import LtpEngine, ltp_flops
    from ..latency.processes import sorted_parts
    from ..model.flops import alive_tokens, encoder_flops

    shape = dataclasses.replace(shape, layers=contender.layers)
    counts = []
    for batch in workload.batches:
        if isinstance(inspector, LtpEngine):
            inspector.run(batch)
            counts.append(ltp_flops(shape, inspector.kept))
            continue
        if contender.padded:
            parts = sorted_parts(batch["attention_mask"].sum(1), contender.sorted_by or len(batch["input_ids"]))
            alive = [np.concatenate([np.full(len(rows), longest) for rows, longest in parts])]
        elif inspector is not None:
            alive = alive_tokens(inspector.run(batch)["kept_site"], len(contender.sites))
        else:
            alive = [batch["attention_mask"].sum(1)]
        counts.append(encoder_flops(shape, alive, contender.sites, contender.narrow, contender.looked_up))
    return np.array(counts)


def _show(document: dict[str, Any], results: Sequence[Latency], subject: _Subject) -> None:
    from rich.table import Table

    out = rich_console()
    same = f"packed-dense-{subject.shape.layers}"
    table = Table(title=f"{document['subject']}: retention {subject.retention}")
    for column in (
        "workload",
        "contender",
        "p50 ms",
        "p90 ms",
        "p99 ms",
        "GFLOPs",
        "speedup",
        "FLOPs ratio",
        "realized",
        "student is faster by",
    ):
        table.add_column(column, justify="left" if column in ("workload", "contender") else "right")
    students = {row.workload: row for row in results if row.contender == "student"}
    previous = None
    for row in results:
        if previous not in (None, row.workload):
            table.add_section()
        versus = row.vs.get(same)
        ratios = (
            (f"{versus.speedup:.2f}", f"{versus.flops_ratio:.2f}", f"{versus.realized_fraction:.2f}")
            if versus
            else ("", "", "")
        )
        times = (f"{ms:.2f}" for ms in (row.p50_ms, row.p90_ms, row.p99_ms))
        name = row.workload if row.workload != previous else ""
        ahead = students[row.workload].vs.get(row.contender)
        told = f"{ahead.speedup:.2f}x" if ahead else ""
        table.add_row(name, row.contender, *times, f"{row.flops / 1e9:.2f}", *ratios, told)
        previous = row.workload
    out.print(table)
    device = document["device"]
    out.print(
        f"speedup, FLOPs ratio and realized fraction are against {same}; --json has the other baselines. "
        f"ONNX Runtime {document['versions']['onnxruntime']}, {device['model']}, {device['cores']} cores, "
        f"threads: {device['threads']}."
    )


def _show_profiles(profiles: Sequence[Profile], peaks: Peaks, sweeps: Sequence[Sweep]) -> None:
    from rich.table import Table

    from ..latency.profile import PRODUCTS

    out = rich_console()
    table = Table(title="Where the student's time goes")
    for column in ("workload", "accounted", "matrix products", "other operators, largest first", "weights alone, ms"):
        table.add_column(column, justify="left" if column.startswith(("work", "other")) else "right")
    for profile in profiles:
        others = [f"{op} {share:.1%}" for op, share in profile.shares.items() if op not in PRODUCTS]
        shares = f"{profile.accounted:.1%}", f"{profile.product_share:.1%}"
        table.add_row(profile.workload, *shares, ", ".join(others[:5]), f"{profile.weights_ms:.2f}")
    out.print(table)
    out.print(
        f"This machine: {peaks.gflops:.0f} GFLOP/s in a large fp32 matrix product, {peaks.gigabytes_per_s:.0f} GB/s from memory; "
        "reading the weights once is the floor of small batches."
    )
    for sweep in sweeps:
        points = ", ".join(f"{r:g}: {p.vs[sweep.baseline].speedup:.2f}x" for r, p in zip(sweep.retention, sweep.points))
        told = "none found" if sweep.break_even is None else f"{sweep.break_even:.0%}"
        out.print(f"{sweep.workload}, speedup over {sweep.baseline} by retention: {points}; break-even: {told}")
