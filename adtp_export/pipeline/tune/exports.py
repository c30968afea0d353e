"""The end of a run: the shortlist is exported and verified, timed in turns, and asked once about the confirmation rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ...artifacts.manifest import read_manifest
from ...artifacts.records import PLUGIN, VERIFIED, Manifest
from ...benchmarking.workloads import Workload
from ...environment import cpu, fingerprint
from ...errors import AdtpError, InputError
from ...inference.predictor import Predictor
from ...io import is_full
from ...targets.choice import candidates, runnable
from ..export.export import export
from ..progress import Steps
from . import directory, times
from .choice import Candidate, confirm
from .options import FP32, INT8, TuneOptions
from .race import Search
from .trials import answers_of

EXPORTS, TIMES = "exports", "times.json"
MODEL = "model"
"""Name of the model itself among the candidates."""
ANY_DROP = 100.0
"""Points that INT8 may lose in an export: what it really loses is found out on the confirmation rows."""
VERIFIED_ROWS = 128


@dataclass(frozen=True)
class Exported:
    """An output directory; by precision the fastest target in it, of those of that precision that are most trusted, and its status."""

    path: Path
    targets: Mapping[str, str]
    statuses: Mapping[str, str]

    @classmethod
    def of(cls, path: Path, manifest: Manifest) -> Exported:
        targets, fastest = manifest.targets, dict[str, str]()
        here = runnable(targets)
        for precision in {spec.precision for spec in here.values()}:
            trusted = candidates({name: targets[name] for name, spec in here.items() if spec.precision == precision})
            # An export times only what it verified; of others those with the operators are faster.
            fastest[precision] = min(
                trusted,
                key=lambda name: (targets[name].details.get("p50_ms", np.inf), targets[name].attention != PLUGIN),
            )
        return cls(path, fastest, {precision: targets[name].status for precision, name in fastest.items()})


def export_all(
    directories: Mapping[str, Path], chosen: TuneOptions, precisions: Sequence[str], work: Path, steps: Steps
) -> dict[str, Exported]:
    """Export models by name, what is there already excepted; one that a runtime refuses, or that is not equal, is left out with a note."""
    data = chosen.dev or chosen.train
    found = {}
    for name, source in directories.items():
        out = work / EXPORTS / name
        if not out.exists():
            with steps.step(f"export_{name}_s", f"exporting and verifying {name}"):
                try:
                    export(
                        source,
                        out,
                        precisions=tuple(dict.fromkeys((FP32, *precisions))),
                        verify_data=data,
                        verify_rows=VERIFIED_ROWS,
                        text_column=chosen.text_column,
                        max_accuracy_drop=ANY_DROP if INT8 in precisions else None,
                    )
                except AdtpError as error:
                    if name == MODEL or is_full(error.__cause__):
                        raise
                    steps.note(f"{name} is left out: {error}")
                    continue
        found[name] = Exported.of(out, read_manifest(out))
    return found


def pairs(
    exported: Mapping[str, Exported], precisions: Sequence[str], search: Search, steps: Steps
) -> list[tuple[str, str]]:
    """Return the candidates, each a name and a precision: of each student that which is fastest by the table among those that run, and
    the model in all but fp32."""
    found = []
    for name, made in exported.items():
        able = [each for each in precisions if each in made.targets]
        if left_out := [each for each in precisions if each not in able]:
            steps.note(
                f"{name}: {', '.join(left_out)} is left out, as no file of it runs here; see {made.path}/report.md"
            )
        for precision in able:
            if (status := made.statuses[precision]) != VERIFIED:
                steps.note(
                    f"{name}: {precision} is {status}, as rounding changes which tokens stay in most rows; its answers to dev rows decide"
                )
        if name == MODEL:
            found += [(name, each) for each in able if each != FP32]
        elif able:
            arm = search.students.done[name].arm
            found.append((name, max(able, key=lambda each: search.table.speedup(arm, each))))
    return found


@dataclass(frozen=True)
class Timed:
    """Times of candidates, by name and precision. device: where they were taken, as `environment.cpu` describes it."""

    device: Mapping[str, Any]
    times: Mapping[str, Mapping[str, float]]

    @classmethod
    def of(cls, document: Mapping[str, Any]) -> Timed:
        """Read what `dataclasses.asdict` makes of it."""
        device = {**document["device"]}
        figures = {
            name: {figure: float(each[figure]) for figure in ("ms", "speedup", "margin")}
            for name, each in document["times"].items()
        }
        return cls({**device, "model": str(device["model"]), "fingerprint": str(device["fingerprint"])}, figures)


def timed(
    exported: Mapping[str, Exported], chosen: Sequence[tuple[str, str]], rounds: Workload, work: Path, steps: Steps
) -> Timed:
    """Time candidates in turns with the model in fp32; what was timed together before is read."""
    entries = {
        f"{name} {precision}": (exported[name].path, exported[name].targets[precision]) for name, precision in chosen
    }
    key, path = " | ".join(sorted(entries)), work / TIMES
    try:
        known = directory.stored(path, _all_timed) if path.exists() else {}
    except InputError:
        steps.note(f"{path} is damaged, or of another version, so the candidates are timed anew")
        known = {}
    if key not in known:
        first = {f"{MODEL} {FP32}": (exported[MODEL].path, exported[MODEL].targets[FP32])}
        with steps.step("times_s", f"timing {len(entries)} candidates in turns with the model") as progress:
            known[key] = Timed(cpu(0), times.deployed({**first, **entries}, rounds, progress))
        directory.write(path, {name: asdict(each) for name, each in known.items()})
    elif known[key].device["fingerprint"] != fingerprint():
        steps.note(f"candidates were timed on another machine ({known[key].device['model']}); this one may differ")
    _note_margins(known[key].times, path, steps)
    return known[key]


def _all_timed(document: Mapping[str, Any]) -> dict[str, Timed]:
    return {key: Timed.of(each) for key, each in document.items()}


def _note_margins(measured: Mapping[str, Mapping[str, float]], path: Path, steps: Steps) -> None:
    """Say which speedups are known to less than `times.WITHIN`, as on a busy machine."""
    wide = {
        name: share for name, found in measured.items() if (share := found["margin"] / found["speedup"]) > times.WITHIN
    }
    if wide:
        told = ", ".join(f"{name} to {share:.0%}" for name, share in wide.items())
        steps.note(
            f"the machine was busy: speedups are known less well than to {times.WITHIN:.0%} ({told}); to time them again, remove "
            f"{path} and give the same command"
        )


def confirmed(
    exported: Mapping[str, Exported],
    chosen: Sequence[tuple[str, str]],
    measured: Mapping[str, Mapping[str, float]],
    search: Search,
    steps: Steps,
) -> list[Candidate]:
    """Ask candidates about the dev rows to choose on, in their own precision, and those to confirm on; bound what each loses there."""
    trials = search.trials
    lost: dict[str, list[np.ndarray]] = {"dev": [], "test": []}
    with steps.step("confirm_s", f"asking {len(chosen)} candidates about all dev rows") as progress:
        for done, (name, precision) in enumerate(chosen):
            predictor = Predictor(exported[name].path, exported[name].targets[precision])
            for part, drops in lost.items():
                examples = trials.asked.parts[part]
                score = trials.task.objective.row_scores(answers_of(predictor.run, examples), examples)
                drops.append(trials.asked.score[part] - score)
            progress(done + 1, len(chosen))
    bounds = confirm(lost["test"], trials.rows.groups["test"], search.most)
    return [
        Candidate(
            name=name,
            precision=precision,
            speedup=measured[f"{name} {precision}"]["speedup"],
            margin=measured[f"{name} {precision}"]["margin"],
            drop=100 * float(drop.mean()),
            confirmed=bound,
        )
        for (name, precision), drop, bound in zip(chosen, lost["dev"], bounds)
    ]
