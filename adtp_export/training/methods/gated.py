"""Training through gates: what LTP, ToP and Transkimmer have in common. A gate between 0 and 1 says how much of a token there is.

A key's attention probability is multiplied by its gate, and a token's new state is mixed with the one that it had. So a gate of 0 is
true removal, a gate of 1 is none, and both have gradients.

One controller presses what decides towards a budget of FLOPs. A term of the loss says how open the gates are. Its weight grows while the
student, as it would be exported, takes more than its budget. It shrinks, and may fall below zero, while it takes less. Before each
evaluation, and before the first step through true cuts, the bars that tokens have to reach are moved, so that students are judged,
exported, and trained to their end, at their budget.
"""

from __future__ import annotations

import functools
import math
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar, NamedTuple, cast

import torch
from torch import Tensor

from ...contract import ATTENTION_MASK, INPUT_IDS, RECEIVED, TOKEN_TYPE_IDS
from ...model.backbones.base import AttentionParts, Backbone
from ...model.encoder import PrunedEncoder
from ...model.flops import Shape
from ...model.padded import SUBLAYERS, attention_received, layers_read, near, projected, scores
from ...model.pruners import Pruner, Seen
from ...model.registry import fields
from ...model.selection import competing
from ...model.sequences import Packed, outside_autocast, pack
from ..budget import flops_share
from ..data import Examples, to_device
from ..judgement import Judgement
from ..settings import TrainOptions
from .base import SLACK, Method

RAMP = 0.4
"""Share of the steps in which the budget goes down from all FLOPs to what is wanted."""
SOFT = 0.75
"""Share of the steps after which decisions are final, where a method has two stages."""
RATE, GAIN = 0.01, 5.0
"""Of the controller: how fast its weight grows per step, and what it adds for the present difference."""
SAMPLE, TOGETHER = 256, 32
"""Rows that bars are moved on, and how many at a time."""
ROUNDS, NEAR, CLOSED = 8, 0.98, 0.01
"""How often bars are moved at most, the share of the target that is near enough below it, and how closed or open no site counts as."""
MAX_LEAD = 2.0


class Opened(NamedTuple):
    """What a site did to ``(B, S)`` tokens.

    gate: how much of each token there is after it. came: tokens that true cuts would have left before it, less those that always stay;
    kept: those that they would have left after it. received: the attention that each had received before; None unless the pruner reads it.
    """

    gate: Tensor
    came: Tensor
    kept: Tensor
    received: Tensor | None


Decide = Callable[[Seen, Tensor], tuple[Tensor, Tensor]]
"""Takes what a pruner sees, padded, and the tokens ``(B, S) bool`` that compete: those that true cuts would have left so far, less
those that always stay. Says of each token how far its gate is open, and whether it stays."""


class Passed(NamedTuple):
    """Finished states ``(B, S, H)``, what each site did, and the attention received in the last layer that was asked for it."""

    states: Tensor
    sites: list[Opened]
    received: Tensor | None


def run_gated(
    backbone: Backbone,
    gates: Mapping[str, Decide],
    read: Mapping[int, str],
    batch: Mapping[str, Tensor],
    also: Tensor | None = None,
) -> Passed:
    """Run embeddings and all layers, with gates in place of cuts; `model.padded.run_padded` is the same with hard ones.

    Args:
        gates: by `PruneSite.key`.
        read: layers whose attention is followed by a site that reads what tokens received, and from whom (`layers_read`).
        batch: right-padded int64 inputs ``(B, S)``.
        also: ``(B,) int64``, columns of tokens that stay beside the first ones, as `run_padded` takes them.
    """
    ids, mask = batch[INPUT_IDS], batch[ATTENTION_MASK]
    types = batch.get(TOKEN_TYPE_IDS)
    positions = torch.arange(ids.shape[1], device=ids.device)
    at_input = mask.sum(1).clamp(min=1)
    live = positions < at_input[:, None]
    anchors = live & ~competing(live, also)
    column = torch.zeros_like(at_input) if also is None else also
    x = backbone.embeddings(ids, torch.zeros_like(ids) if types is None else types, positions)
    gate, kept = live.to(x.dtype), live
    received: Tensor | None = None
    sites: list[Opened] = []
    for i in range(backbone.num_layers):
        for sublayer in SUBLAYERS:
            if (decide := gates.get(f"{i}_{sublayer}")) is not None:
                state, came = x[torch.arange(len(x), device=x.device), column], kept & ~anchors
                own, stays = decide(Seen(x, state, kept.sum(1), at_input, received), came)
                gate, kept = gate * torch.where(anchors, 1, own), kept & (stays | anchors)
                sites.append(Opened(gate, came, kept, received))
            if sublayer == "attention":
                parts = backbone.attention(i)
                context, weights = attend_gated(parts, x, live, gate, positions)
                received = attention_received(weights, gate, read[i], near(parts, positions)) if i in read else None
                new = parts.output(context, x)
            else:
                ffn = backbone.feed_forward(i)
                new = ffn.output(ffn.intermediate(ffn.before(x)), x)
            x = gate[:, :, None] * new + (1 - gate[:, :, None]) * x
    return Passed(backbone.finish(x), sites, received)


def attend_gated(
    parts: AttentionParts, x: Tensor, live: Tensor, gate: Tensor, positions: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the context ``(B, S, H)`` of attention whose keys count as much as their gates ``(B, S)`` say, and its probabilities."""
    q, k, v = projected(parts, x, positions)
    weights = gated_softmax(scores(parts, q, k, live, positions), gate[:, None, None, :])
    return (parts.dropout(weights) @ v).transpose(1, 2).flatten(2), weights


def gated_softmax(scores: Tensor, gate: Tensor) -> Tensor:
    """Softmax over the last axis, each term times its gate, a number from 0 to 1; zeros where all gates are 0.

    The largest score of an open gate is the reference, so that what is closed cannot push the rest to zero. The gradient of a closed
    gate is bounded: what it would let in counts as `MAX_LEAD` more than the reference at most.
    """
    largest = scores.masked_fill(gate == 0, -torch.inf).amax(-1, keepdim=True).clamp(min=torch.finfo(scores.dtype).min)
    terms = (scores - largest.detach()).clamp(max=MAX_LEAD).exp() * gate
    return terms / terms.sum(-1, keepdim=True).clamp(min=torch.finfo(scores.dtype).tiny)


def last_received(backbone: Backbone, batch: Mapping[str, Tensor]) -> Tensor:
    """Return the attention ``(B, S)`` that each token received in the last layer of an encoder without cuts."""
    received = run_gated(backbone, {}, {backbone.num_layers - 1: RECEIVED}, batch).received
    assert received is not None
    return received


class Gated(Method):
    """A student that learns through gates how many tokens leave at each site, within a budget of FLOPs.

    Where `settles`, decisions are final after `SOFT` of the steps: the rest trains through true cuts, as AD-TP does throughout.
    """

    settles: ClassVar[bool] = True
    final_from: ClassVar[float] = SOFT

    multiplier: Tensor
    settled: Tensor

    def __init__(self, student: PrunedEncoder, settings: TrainOptions) -> None:
        super().__init__(student, settings)
        assert settings.flops is not None  # a task has resolved it
        self.budget = settings.flops
        self.shape = Shape.of(fields(student.config.encoder_config))
        self.register_buffer("multiplier", torch.zeros((), dtype=torch.float64))
        self.register_buffer("settled", torch.zeros((), dtype=torch.bool))
        self.dev: Examples | None = None

    @classmethod
    def of(cls, student: PrunedEncoder, settings: TrainOptions, parts: Mapping[str, Examples]) -> Gated:
        model = cls(student, settings)
        model.dev = parts["dev"]
        return model

    @property
    def anchors(self) -> int:
        """Tokens of a text that always stay."""
        return 2 if self.student.keeps_last else 1

    def others(self, alive: Tensor) -> Tensor:
        """Return how many tokens besides these there are in texts of ``alive (B,)`` tokens."""
        return (alive - self.anchors).clamp(min=0)

    def also(self, batch: Mapping[str, Tensor]) -> Tensor | None:
        """Return the columns ``(B,) int64`` of tokens that stay beside the first ones; None where no others do."""
        if not self.student.keeps_last:
            return None
        live = torch.arange(batch[INPUT_IDS].shape[1], device=batch[INPUT_IDS].device)
        return self.student.read_token(batch[INPUT_IDS], live < batch[ATTENTION_MASK].sum(1).clamp(min=1)[:, None])

    @abstractmethod
    def open(self, number: int, pruner: Pruner, seen: Seen, others: Tensor) -> tuple[Tensor, Tensor]:
        """Say how far the gates ``(B, S)`` of site `number` are open, and which tokens ``(B, S) bool`` a true cut would keep.

        Args:
            others: ``(B, S) bool``, tokens that compete.
        """

    @abstractmethod
    def margins(self, pruner: Pruner, seen: Seen) -> Tensor:
        """Return by how much the score of each token ``(B, S)`` exceeds the bar of a site; a token that is below it leaves."""

    @abstractmethod
    def raise_bar(self, pruner: Pruner, amount: float) -> None:
        """Lower the margins of a site by an amount, which may be negative."""

    @property
    def leaves_weights_out(self) -> bool:
        return True

    @property
    def soft(self) -> bool:
        """Whether gates decide now, and not true cuts."""
        return self.training and not (self.settles and self.progress >= SOFT)

    def forward(self, teacher_logits: Tensor, attribution: Tensor | None = None, **batch: Tensor) -> dict[str, Tensor]:
        """Compute the loss of a right-padded batch; see `Method`.

        Args:
            attribution: ``(B, S)``, what the teacher says of the tokens, where the method asks that.
        """
        if not self.soft:
            if self.training and self.dev is not None and not self.settled:
                with outside_autocast(teacher_logits):  # as it is judged
                    self.prepare(self.dev)
                self.settled.fill_(True)
            answer, _ = self.through_cuts(batch)
            terms = self.task_terms(answer, batch, teacher_logits)
            return {"loss": self.weighted(terms), **{name: value.detach() for name, value in terms.items()}}
        answer, sites = self.through_gates(batch)
        terms = self.task_terms(answer, batch, teacher_logits) | self.own_terms(sites, attribution)
        lengths = batch[ATTENTION_MASK].sum(1)
        share, openness = self.flops_left(sites, lengths), self.openness(sites, lengths)
        loss = self.weighted(terms) + self.press(share.item()) * openness
        return {"loss": loss, "open": openness.detach(), **{name: value.detach() for name, value in terms.items()}}

    def through_gates(self, batch: Mapping[str, Tensor]) -> tuple[Tensor, list[Opened]]:
        """Return the answer of the student with gates, and what they did."""
        student, packed = self.student, self._packed[0]
        gates: dict[str, Decide] = {}
        for number, (key, pruner) in enumerate(student.pruners.items()):
            gates[key] = lambda seen, others, n=number, p=pruner: self.open(n, cast(Pruner, p), seen, others)  # type: ignore[misc]
        also = self.also(batch)
        passed = run_gated(student.backbone, gates, layers_read(student.pruners), batch, also)
        if packed.reads_one:
            rows = torch.arange(len(passed.states), device=passed.states.device)
            read = passed.states[:, 0] if also is None else passed.states[rows, also]
            return self.objective.answer((packed.head(read),)), passed.sites
        shape = batch[INPUT_IDS].shape
        cu_seqlens, origin = pack(batch[ATTENTION_MASK].sum(1).clamp(min=1), shape[1])
        states = passed.states.flatten(0, 1).index_select(0, origin)
        outputs = packed.head(Packed(states, cu_seqlens, origin % shape[1], origin), shape)
        return self.objective.answer(outputs), passed.sites

    def own_terms(self, sites: Sequence[Opened], attribution: Tensor | None) -> dict[str, Tensor]:
        """Return terms of the loss that the method has beside those of the task."""
        return {}

    def openness(self, sites: Sequence[Opened], lengths: Tensor) -> Tensor:
        """Return what the controller presses down: the mean gate of the texts' tokens over all sites."""
        return torch.stack([site.gate.sum() for site in sites]).mean() / lengths.sum()

    def flops_left(self, sites: Sequence[Opened], lengths: Tensor) -> Tensor:
        """Return the share of FLOPs that true cuts would leave."""
        return self.share([lengths, *(site.kept.sum(1) for site in sites)])

    def share(self, alive: Sequence[Tensor]) -> Tensor:
        """Return the FLOPs with ``alive (B,)`` tokens before the first and after each site, over those without cuts."""
        share: Tensor = flops_share(self.shape, [count.double() for count in alive], self.student.site_names)
        return share

    @property
    def target(self) -> float:
        """Share of FLOPs that is aimed at now."""
        return 1 - (1 - self.budget) * min(1.0, self.progress / RAMP)

    def press(self, share: float) -> float:
        """Return the weight of `openness` for a batch of which true cuts leave a share of FLOPs, and learn from it."""
        over = share - self.target
        self.multiplier += RATE * over
        return self.multiplier.item() + GAIN * over

    @torch.no_grad()
    def prepare(self, examples: Examples) -> None:
        """Move the bars of all sites until a sample of the rows meets the present target.

        The share of tokens that each site was found to keep is raised to one power for all, so sites stay as unequal as they were
        learned. One amount of score for all would empty those whose scores lie close together.
        """
        numbers = range(0, len(examples), -(-len(examples) // SAMPLE))
        batches = [examples.collate(numbers[i : i + TOGETHER]) for i in range(0, len(numbers), TOGETHER)]
        device = next(self.parameters()).device
        inputs = [to_device(batch, device) for batch in batches]
        training = self.training
        self.eval()
        alive = self._alive(inputs)
        others = [self.others(count).sum().item() for count in alive]
        learned = [after / max(before, 1) for before, after in zip(others, others[1:])]
        aim, left = self.target, self.share(alive).item()
        for _ in range(ROUNDS):
            if NEAR * self.target <= left <= self.target:
                break
            for number, kept in enumerate(self._kept_for(aim, learned, alive[0])):
                self._keep(number, kept, inputs)
            left = self.share(self._alive(inputs)).item()
            aim = min(1.0, aim * (1 + NEAR) / 2 * self.target / left)
        self.train(training)

    def _alive(self, inputs: Sequence[dict[str, Tensor]]) -> list[Tensor]:
        """Return the tokens ``(rows,)`` of all batches, before and after each site."""
        return [torch.cat(counts) for counts in zip(*(self.through_cuts(batch)[1] for batch in inputs))]

    def _kept_for(self, flops: float, learned: Sequence[float], lengths: Tensor) -> list[float]:
        """Return the share of tokens to keep at each site for a share of FLOPs: those that were learned, to one power."""
        shares = [min(max(share, CLOSED), 1 - CLOSED) for share in learned]
        low, high = -10.0, 10.0  # logarithms of the power
        for _ in range(40):
            middle = (low + high) / 2
            alive = [lengths.double()]
            for share in shares:
                others = self.others(alive[-1])
                alive.append(alive[-1] - others + others * share ** math.exp(middle))
            low, high = (low, middle) if self.share(alive).item() <= flops else (middle, high)
        return [1.0 if flops >= 1 else share ** math.exp(high) for share in shares]

    def _keep(self, number: int, kept: float, inputs: Sequence[dict[str, Tensor]]) -> None:
        """Move the bar of a site so that it keeps a share of the tokens that come to it and compete."""
        pruners = {key: cast(Pruner, pruner) for key, pruner in self.student.pruners.items()}
        found: list[Tensor] = []

        def decide(key: str, seen: Seen, came: Tensor) -> tuple[Tensor, Tensor]:
            margins = self.margins(pruners[key], seen)
            if key == list(pruners)[number]:
                found.append(margins[came])
            stays = came & (margins > 0)
            return stays.to(seen.states.dtype), stays

        gates = {key: functools.partial(decide, key) for key in pruners}
        for batch in inputs:
            run_gated(self.student.backbone, gates, layers_read(self.student.pruners), batch, self.also(batch))
        margins = torch.cat(found).sort(descending=True).values
        if not len(margins):
            return
        apart = (margins[0] - margins[-1]).item() / len(margins)
        ends = [
            margins[0].item() + apart,
            *margins.tolist(),
            min(0.0, margins[-1].item() - apart),
        ]  # an open site stays as it is
        stay = round(kept * len(margins))
        self.raise_bar(
            list(pruners.values())[number], ends[-1] if stay == len(margins) else (ends[stay] + ends[stay + 1]) / 2
        )

    def meet(self, judgement: Judgement) -> tuple[dict[str, float], float]:
        left = self.share([torch.from_numpy(count) for count in judgement.alive]).item()
        return {"flops": left}, max(0.0, left / self.budget - SLACK)
