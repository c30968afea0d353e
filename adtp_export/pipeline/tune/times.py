"""How long shapes take, by untrained exports that run in turns, and how long the shortlist takes as it is deployed."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from transformers import PreTrainedModel

from ...benchmarking.interleaved_timing import by_cycle, measure, speedup
from ...benchmarking.processes import DEPLOYED, WITH_PLUGIN, Contender, Processes
from ...benchmarking.sweep import settings as kept_at
from ...benchmarking.workloads import BATCH, SHAPES, Workload, is_shape, make_workloads, shape_of
from ...calibration import recipes
from ...calibration.plan import make_quantization_plan
from ...calibration.quantize import write_quantized
from ...data.rows import TextSource, read, tokenize
from ...data.tokenize import Batch, TokenizedText, pad
from ...data.windows import Windows
from ...errors import InputError, quoted
from ...graph import program
from ...graph.passes import MEASURED, run_passes
from ...model.selection import PERMILLE
from ...options import PathLike
from ...runtimes import onnxruntime
from ...training.data import told
from ...training.models import make_student
from ...training.task import Task
from ...training.trainer import Progress
from .options import FP32, INT8
from .shapes import RETENTIONS, Arm, Table, Time, depths, site_of

BATCHES = 4
"""Of a file, or of the dev rows, that are run."""
TABLE_SECONDS, FINAL_SECONDS = 30.0, 30.0
WITHIN = 0.05
"""Margin of the last speedups, as a share of them; for it the last timing may take ten times as long."""


def workload(chosen: PathLike | None, task: Task) -> Workload:
    """Return the batches that speed is measured on.

    Raises:
        InputError: a file that cannot be read, or a shape that the model does not read.
    """
    examples, longest = task.parts["dev"], task.settings.max_tokens
    assert longest is not None  # a task has resolved it
    if chosen is not None and not Path(chosen).is_file():
        if not is_shape(str(chosen)):
            raise InputError(f"--workload: got {quoted(str(chosen))}; accepted are a file of texts, and {SHAPES}")
        if shape_of(str(chosen))[1] > longest:
            raise InputError(f"--workload: got {chosen}; texts have at most {longest} tokens (--max-tokens)")
        tokenizer, texts = task.tokenizer.backend_tokenizer, [" ".join(map(told, task.tables["dev"].texts[:64]))]
        return make_workloads([str(chosen)], examples.inputs, len(task.tokenizer), tokenizer, texts, longest)[0]
    rows: Sequence[TokenizedText]
    if chosen is None:
        drawn = np.random.default_rng(task.settings.seed).permutation(len(examples))  # a file may be sorted
        rows, name = [examples.encoded[i] for i in drawn[: BATCHES * BATCH]], "dev"
    else:
        found = read(task.objective.head, TextSource(Path(chosen), task.settings.text_column))
        windows = Windows(longest, task.settings.stride or 0, task.settings.max_answer_tokens)
        texts = [row for row, _ in itertools.islice(found, BATCHES * BATCH)]
        rows = tokenize(task.objective.head, task.tokenizer.backend_tokenizer, texts, longest, windows).rows
        name = Path(chosen).name
    parts = [rows[i : i + BATCH] for i in range(0, len(rows), BATCH)]
    whole = [part for part in parts if len(part) == BATCH] or parts  # the last one would be another workload
    batches = tuple(pad(part, examples.pad_id, examples.inputs) for part in whole[:BATCHES])
    return Workload(f"{name}-{len(whole[0])}", batches)


def precisions_here(wanted: Sequence[str]) -> tuple[tuple[str, ...], str]:
    """Return the precisions of `wanted` that can be timed here, and why others cannot.

    Raises:
        InputError: none can.
    """
    obstacle = onnxruntime.operators_obstacle()
    found = tuple(each for each in wanted if each == FP32 or obstacle is None)
    if not found:
        raise InputError(f"--precision: INT8 of CPUs needs the library of operators: {obstacle}. Give fp32")
    return found, "" if found == tuple(wanted) else f"INT8 is left out: {obstacle}"


def precisions_of(known: Table, wanted: Sequence[str]) -> tuple[str, ...]:
    """Return the precisions of `wanted` that a table has. What cannot run here any more, or can only now, would change what is chosen.

    Raises:
        InputError: one that was timed cannot run here.
    """
    timed = {time.precision for time in known.times}
    found = tuple(each for each in wanted if each in timed)
    if (obstacle := onnxruntime.operators_obstacle()) is not None and any(each != FP32 for each in found):
        raise InputError(f"--out: the run there has times in INT8, which cannot run here now: {obstacle}")
    return found


def contenders(
    task: Task, teacher: PreTrainedModel, precisions: Sequence[str], folder: Path, progress: Progress
) -> dict[tuple[Arm, str], Contender]:
    """Export untrained students of all depths, whole and with a cut whose retention is set from outside.

    Returns:
        By shape and precision; shapes with a cut have the retention 0.5 here.
    """
    known, head = depths(task.encoder.num_hidden_layers), task.objective.head
    shapes = [*map(Arm, known), *(Arm(depth, site_of(head, depth), 0.5) for depth in known if depth > 1)]
    engine = "onnxruntime" if onnxruntime.operators_obstacle() else WITH_PLUGIN
    made = {}
    for done, arm in enumerate(shapes):
        settings, path = (
            dataclasses.replace(task.settings, **arm.settings),
            folder / f"{arm.layers}-{arm.site or 'whole'}.onnx",
        )
        student = make_student(teacher, settings, head).eval().requires_grad_(False)
        model = program.export_portable(student, {"version": "tune"})
        run_passes(model, MEASURED)
        program.save(model, path)
        for precision in dict.fromkeys((FP32, *precisions)):
            own = path
            if precision == INT8:
                own = path.with_suffix(".int8.onnx")
                write_quantized(path, own, make_quantization_plan(recipes.built_in("linear", INT8), student, {}))
            made[arm, precision] = Contender(
                name=f"{path.stem}-{precision}",
                path=own,
                layers=arm.layers,
                padded=False,
                sites=(arm.site,) if arm.site else (),
                engine=engine,
            )
        progress(done + 1, len(shapes))
    return made


def table(
    made: Mapping[tuple[Arm, str], Contender], rounds: Workload, progress: Progress, seconds: float = TABLE_SECONDS
) -> Table:
    """Time untrained exports in turns, those with a cut at each of `RETENTIONS`."""
    entries: dict[str, tuple[Time, str, dict[str, np.ndarray]]] = {}
    for (arm, precision), contender in made.items():
        for retention in RETENTIONS if arm.site else (1.0,):
            shape = dataclasses.replace(arm, retention=retention)
            forced = kept_at(contender.sites, round(PERMILLE * retention)) if arm.site else {}
            entries[f"{contender.name} at {retention:g}"] = Time(shape, precision, 0.0), contender.name, forced
    with Processes(list(made.values())) as processes:

        def time_ms(name: str, batch: Batch) -> float:
            _, contender, forced = entries[name]
            return processes.time_ms(contender, {**batch, **forced})

        times = measure(rounds, list(entries), time_ms, seconds, progress)
    return Table(
        dataclasses.replace(entries[name][0], ms=round(float(np.median(by_cycle(ms, len(rounds.batches)))), 4))
        for name, ms in times.items()
    )


def deployed(
    exports: Mapping[str, tuple[Path, str]], rounds: Workload, progress: Progress
) -> dict[str, dict[str, float]]:
    """Time targets of output directories in turns with the first one, until the margins of speedups are narrow.

    Args:
        exports: by name the directory, and the target in it.

    Returns:
        By name "ms", "speedup" over the first, and its "margin".
    """
    made = [
        Contender(name=name, path=path, target=target, layers=0, padded=False, engine=DEPLOYED)
        for name, (path, target) in exports.items()
    ]
    with Processes(made) as processes:
        times = measure(rounds, list(exports), processes.time_ms, FINAL_SECONDS, progress, WITHIN)
    cycles = {name: by_cycle(ms, len(rounds.batches)) for name, ms in times.items()}
    first, found = cycles[next(iter(exports))], {}
    for name, own in cycles.items():
        faster, margin = speedup(first, own)
        found[name] = {"ms": float(np.median(own)), "speedup": faster, "margin": margin}
    return found
