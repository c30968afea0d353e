"""The oracle of models that generate text, and the verdict on their files.

It reads one prompt at a time, with whole matrices of scores and choices in plain loops, in fp64, and in fp32 beside that. A target may
be off by what `verify.rounding` says: its formula holds here, with a row for each token that logits are given of. Every draw follows
fp64 in the tokens that stay, so each says something. A prompt whose tokens differ is excused where the closest choice of that stage is
within rounding, and its tokens are those that rounding may leave.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from ..artifacts.records import ExcusedFlip, Parity
from ..contract import (
    CU_SEQLENS,
    IMAGE,
    INPUT_IDS,
    INPUTS_EMBEDS,
    LOGITS,
    POSITIONS,
    ROWS,
    entered,
)
from ..errors import VerificationError
from ..inference.generation import after_prefill, after_step
from ..model.backbones.base import AttentionParts
from ..model.decoder import Decoder
from ..model.sequences import at_least_fp32
from .oracle import dtype_of
from .plain_choice import Choice, Settled, choose, settled
from .rounding import draws_for, joined, multiple_of, rounded_anew

Run = Callable[[dict[str, np.ndarray]], Mapping[str, np.ndarray]]
"""A file: arrays by name in and out."""


@dataclass(frozen=True)
class Prompt:
    """A prompt of n tokens: states ``(n, H) fp32``, and which are of an image ``(n,) bool``.

    positions: ``(n, axes) int64`` where these have several axes; None: a token's place.
    """

    states: Tensor
    image: Tensor
    positions: Tensor | None = None

    @property
    def may_leave(self) -> Tensor:
        """Which tokens are of an image ``(n,) bool``, but for the last: the answer begins there."""
        return self.image & (torch.arange(len(self.image)) < len(self.image) - 1)


@dataclass(kw_only=True)
class Reading:
    """What the oracle made of a prompt: ``logits (steps + 1, V)``, the rows that entered at each stage, and how it chose."""

    rows: list[np.ndarray] = field(default_factory=list)
    choices: list[Choice] = field(default_factory=list)
    cache: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    positions: list[Tensor] = field(default_factory=list)
    logits: list[Tensor] = field(default_factory=list)


class Oracle:
    """A decoder of a precision, one prompt at a time."""

    def __init__(self, decoder: Decoder, dtype: torch.dtype) -> None:
        self.decoder, self.dtype = decoder.copy(dtype), dtype
        self.model = self.decoder.model
        self.stages = {stage.layer: stage for stage in decoder.stages}

    @torch.no_grad()
    def read(self, prompt: Prompt, steps: int = 0, like: Reading | None = None) -> Reading:
        """Read a prompt and so many greedy tokens; like: another reading, whose image tokens stay and whose tokens follow."""
        backbone, told = self.decoder.backbone, Reading()
        x, image = prompt.states.to(self.dtype), prompt.may_leave
        may_leave = int(image.sum())
        rows = torch.arange(len(x))
        positions = rows if prompt.positions is None else prompt.positions
        told.rows.append(rows.numpy())
        asked: Tensor | None = None
        for i in range(backbone.num_layers):
            parts = backbone.attention(i)
            if (stage := self.stages.get(i)) is not None:
                asked = self._asked(parts, x, positions, True) if stage.own_layer else asked
                assert asked is not None
                choice = choose(stage, asked[image], x[image], may_leave, self.decoder.spread)
                copies = torch.ones(len(x), dtype=torch.int64)
                follows = choice if like is None else like.choices[len(told.choices)]
                copies[image] = torch.tensor(follows.copies)
                x, positions, image, rows = (t.repeat_interleave(copies, 0) for t in (x, positions, image, rows))
                if stage.renumbers and prompt.positions is None:
                    positions = torch.arange(len(x))
                told.rows.append(rows.numpy())
                told.choices.append(choice)
            asks = self.stages.get(i + 1)
            asked = self._asked(parts, x, positions, asks.softmax) if asks and not asks.own_layer else None
            x = self._layer(i, x, positions, told)
            told.positions.append(positions)
        told.logits.append(self._logits(x))
        for number in range(steps):
            token = int((told if like is None else like).logits[number].argmax())
            told.logits.append(self._step(token, told))
        return told

    def _qkv(self, parts: AttentionParts, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        normed = parts.before(x)
        q, k, v = parts.heads_of(torch.cat([projection(normed) for projection in parts.projections], -1), positions)
        times = parts.heads // parts.key_heads
        return q, k.repeat_interleave(times, 1), v.repeat_interleave(times, 1)

    def _asked(self, parts: AttentionParts, x: Tensor, positions: Tensor, softmax: bool) -> Tensor:
        q, k, _ = self._qkv(parts, x, positions)
        scores = torch.einsum("nd,tnd->nt", at_least_fp32(q[-1]), at_least_fp32(k)) * parts.scale
        return (scores.softmax(-1) if softmax else scores).mean(0)

    def _layer(self, i: int, x: Tensor, positions: Tensor, told: Reading) -> Tensor:
        """Run layer i on the last tokens of a text, behind those of its cache: states ``(n, H)``."""
        parts, ffn = self.decoder.backbone.attention(i), self.decoder.backbone.feed_forward(i)
        q, k, v = self._qkv(parts, x, positions)
        before = torch.arange(0)
        if i < len(told.cache):
            k, v = (torch.cat([old, new]) for old, new in zip(told.cache[i], (k, v)))
            told.cache[i], before = (k, v), told.positions[i]
        else:
            told.cache.append((k, v))
        place = torch.arange(len(k))[-len(x) :]
        hidden = torch.arange(len(k)) > place[:, None]
        if parts.reach[0] >= 0:
            seen = torch.cat([before, positions])
            hidden = hidden | (positions[:, None] - seen > parts.reach[0])
        scores = (torch.einsum("qnd,knd->nqk", q, k) * parts.scale).masked_fill(hidden, -torch.inf)
        context = torch.einsum("nqk,knd->qnd", scores.softmax(-1), v).flatten(1)
        x = parts.output(context, x)
        result: Tensor = ffn.output(ffn.intermediate(ffn.before(x)), x)
        return result

    def _step(self, token: int, told: Reading) -> Tensor:
        x = self.decoder.embeddings(torch.tensor([token])).to(self.dtype)
        for i in range(len(told.cache)):
            last = told.positions[i][-1:]
            here = torch.full_like(last, int(last.max()) + 1)
            x = self._layer(i, x, here, told)
            told.positions[i] = torch.cat([told.positions[i], here])
        return self._logits(x)

    def _logits(self, x: Tensor) -> Tensor:
        result: Tensor = self.decoder.head(self.decoder.backbone.finish(x[-1:]))[0]
        return result


@dataclass(frozen=True, kw_only=True)
class Expected:
    """What the oracle says of prompts. exact: fp64. error: e of logits; choice_errors: e of what each stage goes by. precision: that these
    are of. multiple: how many times these a target may be off.
    """

    prompts: Sequence[Prompt]
    exact: Sequence[Reading]
    error: float
    choice_errors: np.ndarray
    precision: str
    multiple: float


def expect(decoder: Decoder, prompts: Sequence[Prompt], steps: int) -> Expected:
    """Read prompts in fp64 with greedy steps, and say how far fp32 is off where it reads the same tokens."""
    oracle = Oracle(decoder, torch.float64)
    exact = [oracle.read(prompt, steps) for prompt in prompts]
    return _bounded(prompts, exact, Oracle(decoder, torch.float32), "fp32")


def for_precision(expected: Expected, rounded: Decoder, precision: str) -> Expected:
    """Return the same answers with the error bounds of a lower precision.

    Args:
        rounded: the decoder in fp32, or with products that round as INT8 ones do. precision: a name; fp16 and bf16 are computed in.

    Raises:
        VerificationError: its logits are not finite.
    """
    found = _bounded(expected.prompts, expected.exact, Oracle(rounded, dtype_of(precision)), precision)
    if not np.isfinite([found.error, *found.choice_errors]).all():
        raise VerificationError(overflow(precision))
    return found


def overflow(precision: str) -> str:
    """Say that PyTorch has no finite answer in a precision."""
    return (
        f"PyTorch overflows in {precision} on random prompts, so no file can be compared with it. bf16 has fp32's range; "
        "type: --precision bf16"
    )


def _bounded(prompts: Sequence[Prompt], exact: Sequence[Reading], rounded: Oracle, precision: str) -> Expected:
    runs = [_off(rounded, prompts, exact)]
    for seed in range(draws_for(len(prompts) * len(exact[0].logits))):
        with rounded_anew(rounded.model, seed):
            runs.append(_off(rounded, prompts, exact))
    unit = torch.finfo(rounded.dtype).eps
    logits, choices = (joined(first, further) for first, *further in zip(*runs))
    largest = max(float(each.abs().max()) for reading in exact for each in reading.logits)
    # What decides is computed in fp32 at least.
    floor = torch.finfo(torch.float32).eps
    sizes = np.array([[floor * choice.size for choice in reading.choices] for reading in exact])
    return Expected(
        prompts=prompts,
        exact=exact,
        error=max(float(logits.max()), unit * largest),
        choice_errors=np.maximum(choices, sizes).max(0),
        precision=precision,
        multiple=multiple_of(precision),
    )


def _off(rounded: Oracle, prompts: Sequence[Prompt], exact: Sequence[Reading]) -> tuple[np.ndarray, np.ndarray]:
    """Return how far one run is from fp64: of logits, ``(prompts, steps + 1)``, and of what each stage goes by, ``(prompts, stages)``."""
    logits, choices = [], []
    for prompt, reading in zip(prompts, exact):
        found = rounded.read(prompt, len(reading.logits) - 1, like=reading)
        logits.append([float((a - b).abs().max()) for a, b in zip(reading.logits, found.logits)])
        choices.append([own.error_of(other) for own, other in zip(reading.choices, found.choices)])
    # An overflow is a NaN behind the next norm; `joined` would take that for a row that a run says nothing of.
    return np.nan_to_num(logits, nan=np.inf), np.nan_to_num(choices, nan=np.inf)


def first_difference(rows: Sequence[np.ndarray], others: Sequence[np.ndarray]) -> int:
    """Return the first stage at which two readings have other tokens, or the number of stages and 1."""
    return next((i for i, (a, b) in enumerate(zip(rows, others)) if not np.array_equal(a, b)), len(rows))


def may_follow(prompt: Prompt, own: Sequence[np.ndarray], found: np.ndarray) -> bool:
    """Say whether ``found (m,)`` may be rows behind a stage: in order, as many as the oracle's, all of the text, and of the image tokens
    some that were there before, none more than twice as often.

    Args:
        own: the oracle's rows before the stage and behind it.
    """
    before, behind = own
    n = len(prompt.image)
    if len(found) != len(behind) or found.min(initial=0) < 0 or found.max(initial=0) >= n or (np.diff(found) < 0).any():
        return False
    image = prompt.may_leave.numpy()
    there, times = (np.bincount(rows, minlength=n) for rows in (before, found))
    return bool((times[~image] == there[~image]).all() and (times <= 2 * there).all())


def keeps_settled(prompt: Prompt, before: np.ndarray, found: np.ndarray, choice: Settled) -> bool:
    """Say whether the rows ``found (m,)`` behind a stage have all image tokens that follow whatever the rounding, and others that may.

    Args:
        before: the rows in front of it ``(n,)``.
    """
    image = before[prompt.may_leave.numpy()[before]]
    n = len(prompt.image)
    sure, possible, times = (
        np.bincount(rows, minlength=n) for rows in (image[choice.sure], image[choice.possible], found)
    )
    return bool((times >= sure).all() and (times <= choice.copies * possible)[image].all())


def _flip(
    decoder: Decoder, expected: Expected, number: int, parted: int, found: np.ndarray
) -> tuple[ExcusedFlip, str | None]:
    """Return what is said of a prompt that enters a stage with other rows; and what is wrong with it, None where rounding explains it.

    Args:
        parted: of the first layers, the first that differs. found: its rows.
    """
    prompt, reading, layer = expected.prompts[number], expected.exact[number], decoder.first_layers[parted]
    if not parted or not may_follow(prompt, reading.rows[parted - 1 : parted + 1], found):
        wrong = f"prompt {number} enters layer {layer} with rows that no choice of image tokens leaves"
        return ExcusedFlip(number, f"{layer}.attention", np.inf, 0.0), wrong
    choice, bound = reading.choices[parted - 1], expected.multiple * expected.choice_errors[parted - 1]
    flip = ExcusedFlip(number, f"{layer}.attention", choice.margin, bound)
    if not choice.margin < bound:
        return (
            flip,
            f"prompt {number} has other tokens from layer {layer} on, and that choice is clear ({choice.margin:.2e})",
        )
    left = settled(decoder.stages[parted - 1], choice.scores, int(prompt.may_leave.sum()), bound)
    if not keeps_settled(prompt, reading.rows[parted - 1], found, left):
        return (
            flip,
            f"prompt {number} enters layer {layer} with image tokens that no rounding explains (scores are off by up to {bound:.2e})",
        )
    return flip, None


def compare(decoder: Decoder, expected: Expected, prefill: Run, step: Run) -> Parity:
    """Compare the files of a target with the oracle on all prompts at once."""
    prompts, layers = expected.prompts, decoder.first_layers
    bounds = np.cumsum([0, *(len(prompt.states) for prompt in prompts)]).astype(np.int32)
    feed = {INPUTS_EMBEDS: torch.cat([p.states for p in prompts]).numpy(), CU_SEQLENS: bounds}
    if placed := [p.positions for p in prompts if p.positions is not None]:
        feed[POSITIONS] = torch.cat(placed).T.numpy()
    answers = [prefill({**feed, IMAGE: torch.cat([p.image for p in prompts]).numpy()})]
    past = after_prefill(answers[0])
    for number in range(len(expected.exact[0].logits) - 1):
        tokens = np.array([int(reading.logits[number].argmax()) for reading in expected.exact])
        answers.append(step({**past, INPUT_IDS: tokens}))
        past = after_step(answers[-1])
    diffs, agreed, kept, flips, wrong = [], [], [], [], None
    for number, reading in enumerate(expected.exact):
        found = [rows_of(answers[0], layer, number) - bounds[number] for layer in layers]
        parted = first_difference(reading.rows, found)
        kept.append(np.mean([np.array_equal(a, b) for a, b in zip(reading.rows, found)]))
        if parted < len(layers):
            flip, failed = _flip(decoder, expected, number, parted, found[parted])
            flips.append(flip)
            wrong = failed or wrong
            continue
        for answer, logits in zip(answers, reading.logits):
            row = answer[LOGITS][number]
            diffs.append(np.abs(row - logits.numpy()))
            agreed.append(int(row.argmax()) == int(logits.argmax()))
    tolerance = expected.multiple * expected.error
    most = float(np.max(diffs)) if diffs else 0.0
    if wrong is None and not diffs:
        wrong = "of no prompt the same tokens were kept, so no answer could be compared"
    if wrong is None and not most <= tolerance:
        wrong = f"logits differ by {most:.2e}, and {expected.precision} by {expected.error:.2e}"
    return Parity(
        rows=len(prompts),
        rows_compared=len(prompts) - len(flips),
        max_abs_logit_diff=most,
        mean_abs_logit_diff=float(np.mean(diffs)) if diffs else 0.0,
        prediction_agreement=float(np.mean(agreed)) if agreed else 0.0,
        kept_token_agreement=float(np.mean(kept)),
        tolerance=tolerance,
        excused_flips=() if wrong else tuple(flips),
        failure=wrong,
    )


def rows_of(answer: Mapping[str, np.ndarray], layer: int, number: int) -> np.ndarray:
    """Return the rows of a prompt that entered at a layer."""
    bounds = answer[entered(CU_SEQLENS, layer)]
    rows: np.ndarray = answer[entered(ROWS, layer)][bounds[number] : bounds[number + 1]]
    return rows
