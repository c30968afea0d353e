"""The quantized files of an export: calibration data, recipes, and products that stay behind for accuracy."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...data.rows import TextSource
from ...errors import InputError, VerificationError
from .context import ExportContext, ModelFile

if TYPE_CHECKING:
    from ...calibration.observers import Histogram
    from ...calibration.plan import QuantizationPlan
    from ...calibration.recipes import Recipe
    from ...calibration.simulate import Cost
    from ...data.tokenize import Batch
    from ...verify.loss import Loss
    from ...verify.oracle import OracleRun

CALIBRATION_ROWS = 512
SENSITIVITY_ROWS = 32
FALLBACK_SHARE = 0.125
"""Of the products, how many more leave the quantized form each time the accuracy does not hold."""


def find_recipes(formats: Sequence[str], targets: Sequence[str], files: Sequence[Path]) -> list[Recipe]:
    """Return one recipe for each target and format: a user's file, else the one that comes with adtp-export.

    Raises:
        InputError: a file that is no recipe, is for something that this run does not make, or for the same as another.
    """
    from ...calibration import recipes

    wanted = [(t, f) for f in formats for t in targets if (recipes.DIRECTORY / f"{t}.{f}.toml").exists()]
    given: dict[tuple[str, str], Recipe] = {}
    for file in files:
        recipe = recipes.read(file)
        key = recipe.target, recipe.format
        if key not in wanted:
            made = ", ".join(f"{f} for {t}" for t, f in wanted) or "nothing in 8 bits"
            raise InputError(f"--recipe {file}: it is {key[1]} for {key[0]}, and this run makes {made}")
        if key in given:
            raise InputError(f"--recipe {file}: {given[key].name} is {key[1]} for {key[0]} already; give one of them")
        given[key] = recipe
    return [given.get(key) or recipes.built_in(*key) for key in wanted]


@dataclass(frozen=True)
class Calibration:
    """Batches of calibration data, what the student's products were given on them, and the record of the manifest."""

    batches: Sequence[Batch]
    seen: Mapping[str, Histogram]
    record: Mapping[str, Any]


def calibrate(run: ExportContext, text: TextSource) -> Calibration:
    """Run a fixed sample of a file's texts through the packed student.

    Raises:
        InputError: no texts, or activations without a range.
    """
    from ...calibration.collect import collect
    from ...data.rows import read
    from ...verify import samples

    with run.steps.step("calibration_s", f"calibrating on {text.file.name}") as progress:
        rows, total = samples.sample(read(run.checkpoint.student.config.head, text), CALIBRATION_ROWS)
        texts = [row for row, _ in rows]
        batches = run.batches(run.tokenize(texts).rows)
        seen = collect(run.checkpoint.student, batches, progress)
    record = {
        "text": text.file.name,
        "rows": sum(len(batch["input_ids"]) for batch in batches),
        "of_rows": total,
        "tokens": sum(int(batch["attention_mask"].sum()) for batch in batches),
        "sha256": hashlib.sha256("\n".join(map(str, texts)).encode()).hexdigest(),
    }
    return Calibration(batches, seen, record)


def quantize(
    run: ExportContext, portable: ModelFile, calibration: Calibration, recipe: Recipe, limit: float
) -> tuple[ModelFile, tuple[str, ...]]:
    """Write `model.<target>.<format>.onnx`. Products whose quantization costs most stay in the recipe's base precision until
    the simulated student loses no more than `limit` points.

    Raises:
        VerificationError: it loses more as long as anything is quantized.
    """
    from ...calibration.plan import make_quantization_plan
    from ...calibration.quantize import write_quantized
    from ...calibration.simulate import sensitivity

    key, student = f"{recipe.target}.{recipe.format}", run.checkpoint.student
    plan = make_quantization_plan(recipe, student, calibration.seen)
    with run.steps.step(f"sensitivity_{key}_s", f"quantizing one product at a time ({recipe.name})") as progress:
        costs = sensitivity(student, plan, _first(calibration.batches, SENSITIVITY_ROWS), progress)
    oracle = portable.oracle and portable.oracle.of_texts  # other tokens may lie far outside the calibrated ranges
    if oracle is not None:
        plan, oracle = _hold_accuracy(run, oracle, plan, costs, limit)
    left_out = [cost.product for cost in costs if cost.product not in plan.scales]
    notes: tuple[str, ...] = ()
    if left_out:
        notes = (
            f"{key}: {len(left_out)} of {len(costs)} matrix products stay in {recipe.base}, to lose at most {limit:g} points: "
            f"{', '.join(left_out)}",
        )
    file = run.place(f"model.{key}.onnx")
    with run.steps.step(f"quantize_{key}_s", f"writing {file.name}"), run.writing():
        write_quantized(portable.file, file, plan)
    ends = {name: round(s.activation * recipe.largest, 6) for name, s in plan.scales.items() if s.activation}
    details = {
        "recipe": recipe.name,
        "left_in_base": left_out,
        "ranges": ends,
        "sensitivity": [dataclasses.asdict(cost) for cost in costs],
    }
    variant = ModelFile(
        file=file, precision=recipe.format, made_for=recipe.target, oracle=oracle, details=details, points=limit
    )
    return variant, notes


def _hold_accuracy(
    run: ExportContext, oracle: OracleRun, plan: QuantizationPlan, costs: Sequence[Cost], limit: float
) -> tuple[QuantizationPlan, OracleRun]:
    """Return the plan that leaves out as little as holds the limit, and the oracle of its precision."""
    from ...calibration.simulate import simulate
    from ...verify.oracle import for_precision

    format = plan.recipe.format
    if not costs:
        raise InputError(
            f"recipe {plan.recipe.name}: it excludes every matrix product, so nothing is quantized; leave some in"
        )
    for left_out in range(0, len(costs), max(1, int(len(costs) * FALLBACK_SHARE))):
        tried = plan.without([cost.product for cost in costs[:left_out]])
        text = f"simulating {plan.recipe.name} in PyTorch, {len(tried.scales)} of {len(costs)} products quantized"
        name = f"oracle_{plan.recipe.name}_{left_out}_s" if left_out else f"oracle_{plan.recipe.name}_s"
        with run.steps.step(name, text) as progress:
            rounded = for_precision(oracle, simulate(run.checkpoint.student, tried), format, progress)
        if not (loss := rounded.loss).exceeds(limit):
            return tried, rounded
    raise VerificationError(
        f"--max-accuracy-drop {limit:g}: {format} loses {loss.points:.2f} +/- {loss.margin:.2f} points on {loss.texts} texts, with "
        f"{len(tried.scales)} of {len(costs)} products quantized; allow more, or leave out {format}"
    )


def check_loss(name: str, loss: Loss, oracle: OracleRun, limit: float) -> tuple[str, ...]:
    """Return a note where the texts are too few to show that a target loses no more than `limit` points.

    Raises:
        VerificationError: they show that it loses more.
    """
    from ...verify.loss import texts_for

    measure = oracle.metric.main if oracle.metric.main in oracle.quality else "agreement with the PyTorch student"
    said = f"{name} loses {loss.points:.2f} +/- {loss.margin:.2f} points of {measure} on {loss.texts} texts"
    if loss.exceeds(limit):
        raise VerificationError(
            f"{said}; at most {limit:g} are allowed. PyTorch that rounds alike loses {oracle.loss.points:.2f}. To accept this, type: "
            f"--max-accuracy-drop {loss.points - loss.margin + 0.005:.2f}. Nothing was published"
        )
    if loss.holds(limit):
        return ()
    least = texts_for(limit)
    needed = (
        f"that takes {least} texts or more, by --verify-data FILE" if least else "no number of texts could show that"
    )
    return (f"{said}. They do not show that it is at most {limit:g}: {needed}",)


def _first(batches: Sequence[Batch], rows: int) -> list[Batch]:
    """Return the first batches, the last one cut, that have so many rows together; all where there are fewer."""
    taken: list[Batch] = []
    for batch in batches:
        if rows <= 0:
            break
        taken.append({name: array[:rows] for name, array in batch.items()})
        rows -= len(batch["input_ids"])
    return taken
