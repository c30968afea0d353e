"""What is quantized: calibration data, scales by recipes, and products that stay behind for accuracy."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...calibration.collect import collect
from ...calibration.observers import Histogram
from ...calibration.plan import QuantizationPlan, make_quantization_plan
from ...calibration.recipes import Recipe
from ...calibration.simulate import Cost, sensitivity, simulate
from ...contract import ATTENTION_MASK
from ...data.rows import TextSource, read, tokenize
from ...data.tokenize import Batch
from ...errors import InputError, VerificationError, printable
from ...verify import samples
from ...verify.oracle import OracleRun, for_precision
from .context import ExportContext

CALIBRATION_ROWS = 512
SENSITIVITY_ROWS = 32
SENSITIVITY_FLOPS = 4e12
"""Of all runs together, one for each product, so that rows of a large model are fewer: 20 s at 200 GFLOP/s."""
FALLBACK_SHARE = 0.125
"""Of the products, how many more leave the quantized form each time the accuracy does not hold."""


@dataclass(frozen=True, kw_only=True)
class Quantized:
    """How products are quantized. oracle: the student that rounds alike; details: of the file in the manifest; notes: for the user."""

    plan: QuantizationPlan
    oracle: OracleRun | None
    details: Mapping[str, Any]
    notes: tuple[str, ...]


@dataclass(frozen=True)
class Calibration:
    """Batches of calibration data, what the student's products were given on them, and the record of the manifest."""

    batches: Sequence[Batch]
    seen: Mapping[str, Histogram]
    record: Mapping[str, Any]


def uncalibrated(oracle: OracleRun | None) -> Calibration:
    """What a recipe needs that has no use for ranges: texts to find out on what each product costs, those of the verification."""
    return Calibration([each.batch for each in oracle.batches] if oracle else [], {}, {})


def calibrate(run: ExportContext, text: TextSource) -> Calibration:
    """Run a fixed sample of a file's texts through the packed student.

    Raises:
        InputError: no texts, or activations without a range.
    """
    with run.steps.step("calibration_s", f"calibrating on {text.file.name}") as progress:
        student = run.checkpoint.student
        rows, total = samples.sample(read(student.config.head, text), CALIBRATION_ROWS)
        texts, longest = [row for row, _ in rows], run.profile["seq"].max
        around = run.checkpoint.template or run.checkpoint.sides
        tokenized = tokenize(student.config.head, run.checkpoint.tokenizer, texts, longest, run.windows, around)
        batches = samples.make_batches(tokenized.rows, student.input_names, student.pad_id, run.profile["batch"].max)
        seen = collect(student, batches, progress)
    record = {
        "text": printable(text.file.name),
        "rows": sum(len(batch["input_ids"]) for batch in batches),
        "of_rows": total,
        "tokens": sum(int(batch["attention_mask"].sum()) for batch in batches),
        "sha256": hashlib.sha256("\n".join(map(str, texts)).encode()).hexdigest(),
    }
    return Calibration(batches, seen, record)


def quantize(
    run: ExportContext, calibration: Calibration, recipe: Recipe, oracle: OracleRun | None, limit: float
) -> Quantized:
    """Choose the scales of a recipe. Products whose quantization costs most stay in its base precision until the simulated student
    loses no more than `limit` points.

    Args:
        oracle: that it loses them against; without one all that the recipe says are quantized.

    Raises:
        InputError: the recipe leaves nothing to quantize.
        VerificationError: it loses more as long as anything is quantized.
    """
    key, student = f"{recipe.target}.{recipe.format}", run.checkpoint.student
    with run.steps.step(f"plan_{key}_s", f"choosing scales ({recipe.name})"):
        plan = make_quantization_plan(recipe, student, calibration.seen)
    if not plan.scales:
        raise InputError(
            f"recipe {recipe.name}: it excludes every matrix product, so nothing is quantized; leave some in"
        )
    costs: Sequence[Cost] = ()
    if calibration.batches:
        with run.steps.step(f"sensitivity_{key}_s", f"quantizing one product at a time ({recipe.name})") as progress:
            batches = _first(calibration.batches, SENSITIVITY_ROWS, SENSITIVITY_FLOPS / len(plan.scales), student.flops)
            costs = sensitivity(student, plan, batches, progress)
    oracle = oracle and oracle.of_texts  # other tokens may lie far outside the calibrated ranges
    if oracle is not None:
        plan, oracle = _hold_accuracy(run, oracle, plan, costs, limit)
    left_out = [cost.product for cost in costs if cost.product not in plan.scales]
    notes: tuple[str, ...] = ()
    if left_out:
        notes = (
            f"{key}: {len(left_out)} of {len(costs)} matrix products stay in {recipe.base}, to lose at most {limit:g} points: "
            f"{', '.join(left_out)}",
        )
    ends = {name: round(s.activation * recipe.largest, 6) for name, s in plan.scales.items() if s.activation}
    details = {
        "recipe": recipe.name,
        "left_in_base": left_out,
        "ranges": ends,
        "sensitivity": [dataclasses.asdict(cost) for cost in costs],
    }
    return Quantized(plan=plan, oracle=oracle, details=details, notes=notes)


def _hold_accuracy(
    run: ExportContext, oracle: OracleRun, plan: QuantizationPlan, costs: Sequence[Cost], limit: float
) -> tuple[QuantizationPlan, OracleRun]:
    """Return the plan that leaves out as little as holds the limit, and the oracle of its precision."""
    format = plan.recipe.format
    step = max(1, int(len(costs) * FALLBACK_SHARE))
    for left_out in sorted({*range(0, len(costs), step), max(len(costs) - 1, 0)}):
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


def _first(batches: Sequence[Batch], rows: int, flops: float, cost: Callable[[np.ndarray], np.ndarray]) -> list[Batch]:
    """Return the first batches, the last one cut, of at most so many rows and FLOPs together, and one row at least.

    Args:
        cost: FLOPs of texts by their tokens, ``(rows,)`` both.
    """
    taken: list[Batch] = []
    for batch in batches:
        spent = cost(batch[ATTENTION_MASK].sum(1)).cumsum()
        fit = min(rows, max(int(np.searchsorted(spent, flops, "right")), 0 if taken else 1))
        if fit <= 0:
            break
        taken.append({name: array[:fit] for name, array in batch.items()})
        rows, flops = rows - fit, flops - float(spent[fit - 1])
    return taken
