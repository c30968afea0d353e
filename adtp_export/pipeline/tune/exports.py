"""The end of a run: the shortlist is exported and verified, timed in turns, and asked once about the confirmation rows."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ...artifacts.manifest import read_manifest
from ...artifacts.records import Manifest
from ...benchmarking.workloads import Workload
from ...errors import AdtpError
from ...inference.predictor import Predictor
from ...io import read_json, written_whole
from ...targets.choice import candidates as runnable
from ..export.export import export
from ..progress import Steps
from . import times
from .choice import Candidate, confirm
from .options import FP32, INT8, TuneOptions
from .race import Search
from .trials import Trials, answers_of

EXPORTS, TIMES = "exports", "times.json"
MODEL = "model"
"""Name of the model itself among the candidates."""
ANY_DROP = 100.0
"""Points that INT8 may lose in an export: what it really loses is found out on the confirmation rows."""
VERIFIED_ROWS = 128


@dataclass(frozen=True)
class Exported:
    """An output directory and, by precision, the fastest target in it."""

    path: Path
    targets: Mapping[str, str]

    @classmethod
    def of(cls, path: Path, manifest: Manifest) -> Exported:
        fastest: dict[str, str] = {}
        ms = {name: target.details.get("p50_ms", np.inf) for name, target in manifest.targets.items()}
        for name, spec in sorted(runnable(manifest.targets).items(), key=lambda item: ms[item[0]]):
            fastest.setdefault(spec.precision, name)
        return cls(path, fastest)


def export_all(
    directories: Mapping[str, Path], chosen: TuneOptions, precisions: Sequence[str], work: Path, steps: Steps
) -> dict[str, Exported]:
    """Export models by name, what is there already excepted; one that a runtime refuses, or that is not equal, is left out with a note."""
    data = chosen.dev or chosen.train
    found = {}
    for name, directory in directories.items():
        out = work / EXPORTS / name
        if not out.exists():
            with steps.step(f"export_{name}_s", f"exporting and verifying {name}"):
                try:
                    export(
                        directory,
                        out,
                        precisions=tuple(dict.fromkeys((FP32, *precisions))),
                        verify_data=data,
                        verify_rows=VERIFIED_ROWS,
                        text_column=chosen.text_column,
                        max_accuracy_drop=ANY_DROP if INT8 in precisions else None,
                    )
                except AdtpError as error:
                    if name == MODEL:
                        raise
                    steps.note(f"{name} is left out: {error}")
                    continue
        found[name] = Exported.of(out, read_manifest(out))
    return found


def pairs(exported: Mapping[str, Exported], precisions: Sequence[str], search: Search) -> list[tuple[str, str]]:
    """Return the candidates, each a name and a precision: of each student the precision that is fastest by the table, and the model in
    all but fp32."""
    found = [(MODEL, precision) for precision in precisions if precision != FP32]
    for name in exported:
        if name != MODEL:
            arm = search.trials.done[name].arm
            found.append((name, max(precisions, key=lambda precision: search.table.speedup(arm, precision))))
    return [(name, precision) for name, precision in found if precision in exported[name].targets]


def timed(
    exported: Mapping[str, Exported], chosen: Sequence[tuple[str, str]], rounds: Workload, work: Path, steps: Steps
) -> dict[str, dict[str, float]]:
    """Time candidates in turns with the model in fp32; what was timed together before is read."""
    entries = {
        f"{name} {precision}": (exported[name].path, exported[name].targets[precision]) for name, precision in chosen
    }
    key, path = " | ".join(sorted(entries)), work / TIMES
    known = read_json(path) if path.exists() else {}
    if key not in known:
        first = {f"{MODEL} {FP32}": (exported[MODEL].path, exported[MODEL].targets[FP32])}
        with steps.step("times_s", f"timing {len(entries)} candidates in turns with the model") as progress:
            known[key] = times.deployed({**first, **entries}, rounds, progress)
        with written_whole(path) as partial:
            partial.write_text(json.dumps(known, indent=2), encoding="utf-8")
    return dict(known[key])


def confirmed(
    exported: Mapping[str, Exported],
    chosen: Sequence[tuple[str, str]],
    measured: Mapping[str, Mapping[str, float]],
    search: Search,
    steps: Steps,
) -> list[Candidate]:
    """Ask candidates about the confirmation rows, and bound what each loses."""
    trials: Trials = search.trials
    objective, examples, groups = trials.task.objective, trials.parts["test"], trials.rows.groups["test"]
    drops = []
    with steps.step("confirm_s", f"asking {len(chosen)} candidates about {len(groups)} rows to confirm on") as progress:
        for done, (name, precision) in enumerate(chosen):
            found = exported[name]
            predictor = Predictor(found.path, found.targets[precision])
            score = objective.row_scores(answers_of(predictor.run, examples), examples)
            drops.append(trials.teacher_score["test"] - score)
            progress(done + 1, len(chosen))
    bounds = confirm(drops, groups, search.most if search.most is not None else ANY_DROP) if chosen else []
    return [
        Candidate(
            name=name,
            precision=precision,
            speedup=measured[f"{name} {precision}"]["speedup"],
            margin=measured[f"{name} {precision}"]["margin"],
            drop=0.0 if name == MODEL else trials.done[name].drop,
            confirmed=bound,
        )
        for (name, precision), bound in zip(chosen, bounds)
    ]
