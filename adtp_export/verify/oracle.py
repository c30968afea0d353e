"""The oracle's answers, and how far they can be trusted: the fp32 student beside itself in fp64.

The distance between the two is the rounding error of fp32 on exactly these rows and weights; for targets of lower precision, the
PyTorch student in that precision takes the place of fp32. `verify.rounding` has the formula, and what follows for a target.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..contract import (
    ATTENTION_MASK,
    INPUT_IDS,
    LAST_HIDDEN_STATE,
    LOGITS,
    MASK_LOGITS,
    OUTPUTS,
    SPARSE_EMBEDDING,
)
from ..contract import SEQUENCE as COLUMNS
from ..data.tokenize import Batch
from ..errors import VerificationError
from ..model.encoder import PrunedEncoder
from ..model.heads import pooled
from ..model.heads.masked import PrunedEncoderForMasked
from ..model.heads.sparse import PrunedEncoderForSparse
from ..model.positions import to_precision
from . import metrics, rounding
from .loss import Loss, lost
from .metrics import Outputs, TaskMetric
from .rounding import MULTIPLE, TYPED_MULTIPLE, Answer

TEXTS, RANDOM = "this text", "token ids drawn at random"
"""Where the rows of a part come from, as messages say it."""
DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}


def dtype_of(precision: str) -> torch.dtype:
    """Return what PyTorch computes a precision in: fp32 where products alone are rounded."""
    return DTYPES.get(precision, torch.float32)


@dataclass(frozen=True, kw_only=True)
class OracleBatch:
    """Answers for one batch of B rows, S wide.

    outputs: by name, as `contract.OUTPUTS` has them for the head, fp32: the answer. references: fp64 in rows that keep the same
    tokens, else fp32. kept_site ``(B, S)``. margins ``(sites, 2, B)``: how clear it is in fp64 how many tokens stay, and which,
    infinite where there was nothing to choose. exact: everything in fp64. rounded: what the head's answer is made of, from PyTorch
    in the precision that is judged.
    """

    batch: Batch
    outputs: Outputs
    references: Outputs
    kept_site: np.ndarray
    margins: np.ndarray
    exact: Answer
    rounded: Outputs


@dataclass(frozen=True, kw_only=True)
class OracleRun:
    """The oracle on all batches of texts. random: the same on batches of token ids drawn at random, which have no answers to judge; error
    bounds are its own, so that its long rows do not widen those of texts.

    metric: of the head's answers, with labels where they are known. output_errors: by output, the error of a value in the precision
    that is judged, absolute: e of `verify.rounding`. decision_errors ``(sites, 2)``: the same for the two decisions of each site,
    how many and which. multiple: how many times these a target may be off.
    """

    sites: tuple[str, ...]
    metric: TaskMetric
    batches: tuple[OracleBatch, ...]
    output_errors: Mapping[str, float]
    decision_errors: np.ndarray
    retention: dict[str, dict[str, float]]
    multiple: float = MULTIPLE
    random: OracleRun | None = None

    @property
    def tolerances(self) -> dict[str, float]:
        """By how much a value of each output may be off, absolute."""
        return {name: self.multiple * error for name, error in self.output_errors.items()}

    @property
    def parts(self) -> tuple[OracleRun, ...]:
        """The batches of texts, and the random ones if there are any; each part has error bounds of its own."""
        return (self,) if self.random is None else (self, self.random)

    @property
    def rows(self) -> int:
        return sum(len(batch.kept_site) for part in self.parts for batch in part.batches)

    @property
    def of_texts(self) -> OracleRun:
        """The same without the random batches."""
        return dataclasses.replace(self, random=None)

    @property
    def answers(self) -> list[Outputs]:
        """The fp32 student's answers to texts, row by row."""
        return [row for b in self.batches for row in self.metric.rows(b.outputs, b.kept_site)]

    @property
    def quality(self) -> dict[str, float]:
        """Measures of the fp32 student against labels; none where they are not known."""
        return self.metric.quality(self.answers)

    @property
    def loss(self) -> Loss:
        """What the precision that is judged costs the PyTorch student."""
        rounded = [row for b in self.batches for row in self.metric.rows(b.rounded, b.kept_site)]
        return lost(self.metric, self.answers, rounded)


def run_oracle(
    student: PrunedEncoder,
    batches: Sequence[Batch],
    progress: Callable[[int, int], None] = lambda done, total: None,
    metric: TaskMetric | None = None,
    random: Sequence[Batch] = (),
) -> OracleRun:
    """Run the student in fp32 and fp64 on right-padded batches.

    Args:
        student: weights in fp32, eval mode.
        batches: of texts: int64 arrays by input name.
        progress: called with (batches done, batches in all).
        metric: of the answers; by default one that knows no labels.
        random: further batches, which are no texts.
    """
    metric = metric or metrics.default(student.config.head, student.config.problem_type, student.config.id2label or {})
    double = copy.deepcopy(student).double()
    every = [(batch, rounding.draws_for(_rows(part))) for part in (batches, random) for batch in part]
    results: list[OracleBatch] = []
    errors: list[rounding.Errors] = []
    for done, (batch, draws) in enumerate(every, start=1):
        result, off = _run_batch(student, double, batch, draws, metric)
        results.append(result)
        errors.append(off)
        progress(done, len(every))
    texts = len(batches)
    of_texts = _part(student, metric, results[:texts], errors[:texts], TEXTS)
    of_random = _part(student, metric, results[texts:], errors[texts:], RANDOM) if random else None
    return dataclasses.replace(of_texts, random=of_random)


def _rows(batches: Sequence[Batch]) -> int:
    return sum(len(batch[INPUT_IDS]) for batch in batches)


def _run_batch(
    student: PrunedEncoder, double: PrunedEncoder, batch: Batch, draws: int, metric: TaskMetric
) -> tuple[OracleBatch, rounding.Errors]:
    exact = _run(double, batch)
    single, off = rounding.errors(functools.partial(_run, student, batch), student, exact, draws)
    same = torch.eq(single.kept_site, exact.kept_site).all(1).numpy()
    outputs = _arrays(single)
    margins = np.array([d.rule.margins(d.live).numpy() for d in exact.decisions])
    result = OracleBatch(
        batch=batch,
        outputs=outputs,
        references={name: _where(same, high, outputs[name]) for name, high in _arrays(exact).items()},
        kept_site=single.kept_site.numpy(),
        margins=margins.reshape(len(student.site_names), 2, len(same)),
        exact=exact,
        rounded={name: outputs[name] for name in metric.reads},
    )
    return result, off


def _part(
    student: PrunedEncoder,
    metric: TaskMetric,
    results: Sequence[OracleBatch],
    errors: Sequence[rounding.Errors],
    source: str,
) -> OracleRun:
    retention = {}
    for i, site in enumerate(student.site_names):
        n = np.concatenate([(r.kept_site >= i).sum(1) for r in results])
        k = np.concatenate([(r.kept_site > i).sum(1) for r in results])
        retention[site] = {"mean_ratio": float((k / n).mean()), "mean_kept_tokens": float(k.mean())}
    output_errors, decision_errors = _largest(errors, "fp32", source)
    return OracleRun(
        sites=student.site_names,
        metric=metric,
        batches=tuple(results),
        output_errors=output_errors,
        decision_errors=decision_errors,
        retention=retention,
    )


def typed(student: PrunedEncoder, precision: str) -> PrunedEncoder:
    """Return a copy of the student with weights and states in "fp16" or "bf16", and its pruners in fp32."""
    copied = copy.deepcopy(student)
    to_precision(copied, DTYPES[precision])
    for kept, original in zip(copied.pruners.values(), student.pruners.values()):
        kept.load_state_dict(original.state_dict(), assign=True)
    return copied


def for_precision(
    oracle: OracleRun,
    rounded: PrunedEncoder,
    precision: str,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> OracleRun:
    """Return the same answers with the error bounds of a lower precision: what PyTorch itself is off in it.

    Args:
        rounded: the student in that precision: `typed`, or simulated with quantized weights and activations.
        precision: its name, for messages.

    Raises:
        VerificationError: that student's answers are not finite.
    """
    done, parts = 0, []
    total = sum(len(part.batches) for part in oracle.parts)
    for part, source in zip(oracle.parts, (TEXTS, RANDOM)):
        errors, batches, draws = [], [], rounding.draws_for(_rows([each.batch for each in part.batches]))
        for expected in part.batches:
            run = functools.partial(_run, rounded, expected.batch)
            answer, off = rounding.errors(run, rounded, expected.exact, draws)
            errors.append(off)
            said = {name: answer.outputs[name].float().numpy() for name in oracle.metric.reads}
            batches.append(dataclasses.replace(expected, rounded=said))
            progress(done := done + 1, total)
        output_errors, decision_errors = _largest(errors, precision, source)
        parts.append(
            dataclasses.replace(
                part,
                batches=tuple(batches),
                output_errors=output_errors,
                decision_errors=decision_errors,
                multiple=TYPED_MULTIPLE,
            )
        )
    return dataclasses.replace(parts[0], random=parts[1] if len(parts) > 1 else None)


def _run(student: PrunedEncoder, batch: Batch) -> Answer:
    """Run a padded student. Without sites, transformers' own forward is the definition."""
    with torch.inference_mode():
        inputs = {name: torch.from_numpy(array) for name, array in batch.items()}
        if not student.site_names:
            live = inputs[ATTENTION_MASK].bool()
            if (further := student.expanded(inputs[INPUT_IDS], inputs[ATTENTION_MASK])) is not None:
                live |= further
            return Answer(_plain(student, inputs, live), torch.where(live, 0, -1).int(), ())
        said = student(**inputs)
        return Answer({name: said[name] for name in OUTPUTS[student.config.head]}, said.kept_site, said.decisions)


def _plain(student: PrunedEncoder, inputs: Mapping[str, Tensor], live: Tensor) -> dict[str, Tensor]:
    """Return the outputs of transformers' own forward. What it computes for padding means nothing, so that becomes zeros."""
    if (
        student.reads_last and student.dense.config.pad_token_id is None
    ):  # then transformers' classifiers take one text at a time
        states: Tensor = student.dense.base_model(**inputs).last_hidden_state
        return {LOGITS: student.backbone.classifier(pooled(states, live, "last"))}
    if isinstance(student, PrunedEncoderForMasked):
        states = student.dense.base_model(**inputs).last_hidden_state
        return {MASK_LOGITS: student.predict(states, live & (inputs[INPUT_IDS] == student.asked_id))}
    if isinstance(student, PrunedEncoderForSparse):  # all logits of long texts at once would take gigabytes
        return {SPARSE_EMBEDDING: student.weigh(student.dense.base_model(**inputs).last_hidden_state, live)}
    said: Any = student.dense(**inputs, return_dict=True)
    axes = OUTPUTS[student.config.head]
    outputs = {name: said[name] for name in axes if name in said}
    for name, values in outputs.items():
        if COLUMNS in axes[name]:
            outputs[name] = torch.where(live.view(*live.shape, *[1] * (values.ndim - 2)), values, 0)
    if LAST_HIDDEN_STATE in said:
        outputs |= student.of_states(torch.where(live[:, :, None], said[LAST_HIDDEN_STATE], 0), live)
    return {name: outputs[name] for name in axes}


def _arrays(answer: Answer) -> dict[str, np.ndarray]:
    return {name: values.numpy() for name, values in answer.outputs.items()}


def _largest(batches: Sequence[rounding.Errors], precision: str, source: str) -> tuple[dict[str, float], np.ndarray]:
    """Return the largest errors of several batches: of outputs by name, and of decisions ``(sites, 2)``.

    Raises:
        VerificationError: one is not finite, so that nothing would be too far off.
    """
    outputs = {name: max(each.outputs[name] for each in batches) for name in batches[0].outputs}
    decisions = np.max([each.decisions for each in batches], axis=0)
    if not np.isfinite([*outputs.values(), *decisions.flat]).all():
        instead = "" if precision == "fp32" else ". bf16 has fp32's range; type: --precision bf16"
        if source == RANDOM:
            instead += ". To compare files on texts alone, type: --verify-data FILE"
        raise VerificationError(
            f"the PyTorch model overflows in {precision} on {source}, so no file can be compared with it{instead}"
        )
    return outputs, decisions


def _where(same: np.ndarray, exact: np.ndarray, rounded: np.ndarray) -> np.ndarray:
    """Take rows ``(B, ...)`` of the first where ``same (B,) bool``, else of the second."""
    return exact if same.all() else np.where(same.reshape(-1, *[1] * (exact.ndim - 1)), exact, rounded)
