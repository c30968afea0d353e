"""AD-TP: retainers learn from attribution which tokens to keep and how many, while the student answers through its own cuts.

The same loss without what retainers learn from, and with tokens drawn, is the method "random".

Source: AD-TP, NeurIPS 2025; docs/decisions.md says what the paper leaves open.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn

from ...contract import ATTENTION_MASK, INPUT_IDS, TOKEN_TYPE_IDS
from ...explain.gradients import integrated_gradients, unit
from ...model.encoder import PrunedEncoder
from ...model.packed import Cut
from ...model.pruners import Pruner, Seen
from ...model.pruners.adtp import AdtpPruner, ratios_in_permille
from ...model.selection import PERMILLE, KeepBest, competing
from ...model.sequences import Packed, pack, restore
from ..attribution import of_tokens, supervision
from ..data import Examples
from ..judgement import Judgement
from ..losses import Ratios, attribution_loss, ratio_label, ratio_loss, saliency_loss, share_for_retention
from ..settings import GRADIENT_DIFFERENCE, TrainOptions
from .base import Method, Observed
from .masking import with_masks

SHARE_ROWS = 2000
CONTROL_RATE, SMOOTHING = 0.01, 0.02


@dataclass(kw_only=True)
class Decision:
    """What a pruner said about a packed batch of T tokens in B sequences, and what was done.

    rule: the pruner's own scores and counts, with gradients. origin ``(T,) int64``: places in the flattened ``(B*S,)`` input.
    lengths ``(B,) int64``. also ``(B,) int64``: places of tokens that stay beside the first; None: no others do. rows ``(T',) int64``
    and cu_seqlens ``(B+1,) int64``: the survivors.
    """

    rule: KeepBest
    origin: Tensor
    lengths: Tensor
    also: Tensor | None = None
    rows: Tensor = field(default_factory=lambda: torch.empty(0))
    cu_seqlens: Tensor = field(default_factory=lambda: torch.empty(0))


@dataclass(kw_only=True)
class Trace:
    """What one pass decides, and what decides for it where the pruners do not.

    origin ``(T,) int64``: places of the tokens before the first cut in the flattened ``(B*S,)`` input; shape: B and S. guide:
    attribution ``(B, S)`` that orders the tokens instead of the pruner's scores. shares: per site, the share of it to keep,
    instead of the pruner's count. random: tokens are drawn. spared: share of what a cut would drop that stays. replay: the
    decisions of another pass to repeat.
    """

    origin: Tensor
    shape: torch.Size
    guide: Tensor | None = None
    shares: list[float] | None = None
    random: bool = False
    spared: float = 0.0
    replay: list[Decision] | None = None
    decisions: list[Decision] = field(default_factory=list)

    def rectangle(self, values: Tensor, origin: Tensor) -> Tensor:
        """Spread packed values ``(T, ...)`` over ``(B, S, ...)``, zeros elsewhere."""
        return restore(values, origin, self.shape)

    def eased(self, count: Tensor, lengths: Tensor) -> Tensor:
        """Return the tokens to keep ``(B,)`` where a cut that keeps `count` of `lengths` is not yet as tight as it will be."""
        return count if self.spared == 0 else count + ((lengths - count) * self.spared).round().to(count.dtype)

    def candidates(self, decision: Decision) -> Tensor:
        """Tokens that compete at a site, ``(B, S) bool``: alive there, without those that always stay."""
        alive = self.rectangle(torch.ones_like(decision.origin, dtype=torch.bool), decision.origin)
        return competing(alive, None if decision.also is None else decision.also % self.shape[1])


class TracedCut(Cut):
    """A cut that writes down what it decides, or obeys the trace."""

    def __init__(self, pruner: Pruner) -> None:
        super().__init__(pruner)
        self.trace: Trace | None = None

    def forward(self, tokens: Packed, at_input: Tensor, received: Tensor | None) -> tuple[Tensor, Tensor]:
        trace = self.trace
        assert trace is not None
        if trace.replay is not None:
            decision = trace.replay[len(trace.decisions)]
            trace.decisions.append(decision)
            return decision.rows, decision.cu_seqlens
        rows, cu_seqlens = super().forward(tokens, at_input, received)
        trace.decisions[-1].rows, trace.decisions[-1].cu_seqlens = rows, cu_seqlens
        return rows, cu_seqlens

    def decide(self, seen: Seen, tokens: Packed) -> KeepBest:
        trace, rule = self.trace, super().decide(seen, tokens)
        assert trace is not None
        assert isinstance(rule, KeepBest), "the loss knows counts and an order of tokens"
        also = None if tokens.read is None else tokens.origin.index_select(0, tokens.read)
        decision = Decision(rule=rule, origin=tokens.origin, lengths=seen.lengths, also=also)
        trace.decisions.append(decision)
        if trace.random:
            drawn = torch.rand_like(rule.order)
            return dataclasses.replace(rule, order=drawn, count=trace.eased(rule.count, seen.lengths))
        if trace.guide is None:
            return dataclasses.replace(rule, order=rule.order.detach(), count=trace.eased(rule.count, seen.lengths))
        count = rule.count
        if trace.shares is not None:
            share = trace.shares[len(trace.decisions) - 1]
            ratios = Ratios.of(self.pruner, seen.lengths.clamp(max=1 if also is None else 2))
            label = ratio_label(trace.guide, trace.candidates(decision), ratios, share)
            assert isinstance(self.pruner, AdtpPruner), "only its students are taught a ratio"
            count = self.pruner.count(label, seen.lengths)
        guided = dataclasses.replace(
            rule, order=trace.guide.flatten()[tokens.origin], count=trace.eased(count, seen.lengths)
        )
        return cast(KeepBest, guided.keeping(tokens.read, tokens.start))


class Distillation(Method):
    """A student with AD-TP's loss.

    Args:
        student: its weights are trained in place.
        settings: weights of the loss, ablations, wanted retention.
        shares: per site, the share of attribution that the tokens kept must hold, to begin with. While training it is
            moved so that the retention that the pruners really give meets the wanted one, which is a mean over the dev
            rows (`meet_on_dev`): training rows may be of other lengths.
    """

    cut = TracedCut

    share: Tensor
    kept: Tensor
    seen: Tensor
    surplus: Tensor

    def __init__(self, student: PrunedEncoder, settings: TrainOptions, shares: list[float]) -> None:
        super().__init__(student, settings)
        self.register_buffer("share", torch.tensor(shares, dtype=torch.float64))
        self.register_buffer("kept", torch.zeros_like(self.share))  # of training rows, lately
        self.register_buffer("seen", torch.zeros(()))  # training batches that the pruners cut
        self.register_buffer("surplus", torch.zeros_like(self.share))  # kept of training rows over kept of dev rows

    @staticmethod
    def pruning(settings: TrainOptions) -> dict[str, Any]:
        sizes = {"saliency_hidden_size": settings.saliency_hidden_size, "min_tokens": settings.min_tokens}
        if settings.adaptive:
            return {"method": "adtp", "retention_ratios": settings.candidates, **sizes}
        ratios = [round(ratio, 3) for ratio in settings.target_retention]
        return {"method": "schedule", "ratios": ratios, "order": "saliency", **sizes}

    @classmethod
    def of(cls, student: PrunedEncoder, settings: TrainOptions, parts: Mapping[str, Examples]) -> Distillation:
        return cls(student, settings, first_shares(parts["train"], settings, student.keeps_last))

    @property
    def cuts(self) -> list[TracedCut]:
        return cast("list[TracedCut]", list(self._packed[0].cuts.values()))  # torch knows no module of one kind

    def meet(self, judgement: Judgement) -> tuple[dict[str, float], float]:
        self.meet_on_dev(judgement.kept)
        return super().meet(judgement)

    def record(self) -> dict[str, Any]:
        return {**super().record(), "share_of_attribution": dict(zip(self.student.site_names, self.share.tolist()))}

    def meet_on_dev(self, kept: list[float]) -> None:
        """Take note of the retention that each site gives on the dev rows, so that the next steps correct for it."""
        if self.seen > 0:
            self.surplus.copy_(self.kept - torch.tensor(kept).to(self.kept))

    def run(self, batch: Mapping[str, Tensor], trace: Trace) -> Tensor:
        """Return the answer, such as ``logits (B, C)``, and fill the trace."""
        for cut in self.cuts:
            cut.trace = trace
        outputs = self._packed[0](batch[INPUT_IDS], batch[ATTENTION_MASK], batch.get(TOKEN_TYPE_IDS))[0]
        return self.objective.answer(outputs)

    @property
    def guided(self) -> bool:
        """Whether the teacher's attribution decides what is cut, as it does in the first steps of training."""
        early = self.training and self.progress < self.settings.teacher_forced_share
        return early and not self.alone and self.weights["tsp"] > 0

    def through_cuts(self, batch: Mapping[str, Tensor]) -> tuple[Tensor, list[Tensor]]:
        trace = self.begin(batch[ATTENTION_MASK], batch["attribution"] if self.guided else None)
        return self.run(batch, trace), self.counts(batch, trace)

    def observe(self, batch: Mapping[str, Tensor]) -> tuple[Tensor, list[Tensor], Observed | None]:
        trace = self.begin(batch[ATTENTION_MASK])
        answer, own = self.attribute(batch, trace, batch["teacher_logits"], False)
        seen = None
        for first in trace.decisions[:1]:
            saliency = trace.rectangle(first.rule.order.detach(), first.origin)
            seen = Observed(saliency, trace.candidates(first), own)
        return answer, self.counts(batch, trace), seen

    def own_attribution(self, batch: Mapping[str, Tensor], explained: Tensor) -> Tensor:
        trace = self.begin(batch[ATTENTION_MASK], batch["attribution"] if self.guided else None)
        return self.attribute(batch, trace, explained, create_graph=False)[1]

    def chosen_ratios(self) -> dict[str, Tensor]:
        found = {}
        for number, (site, cut) in enumerate(zip(self.student.site_names, self.cuts)):
            choice = cast(Trace, cut.trace).decisions[number].rule.choice
            if choice is not None:
                permille = torch.tensor(cast(AdtpPruner, cut.pruner).permille, dtype=torch.float64)
                found[site] = permille[choice.argmax(1).cpu()] / PERMILLE
        return found

    def counts(self, batch: Mapping[str, Tensor], trace: Trace) -> list[Tensor]:
        """Return the tokens ``(B,)`` before and after each site."""
        return [batch[ATTENTION_MASK].sum(1), *(decision.cu_seqlens.diff() for decision in trace.decisions)]

    def begin(self, attention_mask: Tensor, guide: Tensor | None = None) -> Trace:
        """Return the trace of a new pass over right-padded ``(B, S)`` rows; `guide` is attribution to cut by."""
        origin = pack(attention_mask.sum(1).clamp(min=1), attention_mask.shape[1])[1]
        shares = self.share.tolist() if self.weights["arp"] > 0 else None
        drawn = self.settings.method == "random"
        warmup = self.settings.cut_warmup
        spared = max(0.0, 1 - self.progress / warmup) if self.training and warmup else 0.0
        return Trace(origin=origin, shape=attention_mask.shape, guide=guide, shares=shares, random=drawn, spared=spared)

    def attribute(
        self, batch: Mapping[str, Tensor], trace: Trace, explained: Tensor | None, create_graph: bool
    ) -> tuple[Tensor, Tensor]:
        """Return the answer and the student's attribution ``(B, S)``, for the cuts of the whole input.

        Args:
            batch: inputs, and labels where F depends on them.
            explained: the answer that is explained; by default the student's own.
        """

        def forward() -> Tensor:
            again = Trace(origin=trace.origin, shape=trace.shape, replay=trace.decisions)
            return self.run(batch, again if trace.decisions else trace)

        def score(answer: Tensor, own: Tensor) -> Tensor:
            return self.objective.score(answer, own if explained is None else explained, batch)

        embeddings, kind = self.student.get_input_embeddings(), self.settings.attribution
        keep = {"keep_graph": self.training, "create_graph": create_graph, "times_input": kind != GRADIENT_DIFFERENCE}
        answer, attribution = integrated_gradients(forward, embeddings, self.settings.ig_steps, score, **keep)
        live = batch[ATTENTION_MASK].bool()
        return answer, of_tokens(kind, trace.rectangle(attribution, trace.origin), live)

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor,
        teacher_logits: Tensor,
        attribution: Tensor,
        token_type_ids: Tensor | None = None,
        **labels: Tensor,
    ) -> dict[str, Tensor]:
        """Compute the loss of a right-padded batch.

        Args:
            input_ids, attention_mask, token_type_ids: ``(B, S) int64``.
            teacher_logits: the teacher's answers, ``(B, ...)``.
            attribution: ``(B, S)``, the teacher's, rows of length 1.
            labels: as the objective's examples collate them, such as `labels`, ``(B,)`` class indices.

        Returns:
            ``loss``, and each term before its weight.
        """
        settings, weights = self.settings, self.weights
        batch = {INPUT_IDS: input_ids, ATTENTION_MASK: attention_mask, **labels}
        if token_type_ids is not None:
            batch[TOKEN_TYPE_IDS] = token_type_ids
        kappa = 1.0 if self.alone else settings.kappa * self.progress
        trace = self.begin(attention_mask, attribution if self.guided else None)
        aligned, supervised = weights["ig"] > 0, weights["arp"] > 0 or weights["tsp"] > 0
        differs = settings.attribution == GRADIENT_DIFFERENCE
        target = attribution
        terms: dict[str, Tensor] = {}
        if aligned or (supervised and (differs or kappa > 0)):
            explained = None if self.alone else teacher_logits
            answer, own = self.attribute(batch, trace, explained, create_graph=aligned)
            target = supervision(settings.attribution, attribution, own.detach(), attention_mask.bool(), kappa)
            sides = (unit(own), unit(attribution)) if differs else (own, attribution)
            terms["ig"] = attribution_loss(*sides)
        else:
            answer = self.run(batch, trace)
        terms |= self.task_terms(answer, batch, teacher_logits)
        terms |= self._supervision(trace, target)
        if self.training and not self.guided:
            self._control(trace)
        loss = with_masks(self, self.weighted(terms), {**batch, "attribution": attribution}, answer, teacher_logits)
        return {"loss": loss, **{name: value.detach() for name, value in terms.items()}}

    def _supervision(self, trace: Trace, target: Tensor) -> dict[str, Tensor]:
        """Return L_ARP, where the pruners choose between ratios, and L_TSP for attribution ``(B, S)``; sums over sites."""
        terms: dict[str, Tensor] = {}
        for number, (decision, cut) in enumerate(zip(trace.decisions, self.cuts)):
            rule, candidates, share = decision.rule, trace.candidates(decision), self.share[number].item()
            if rule.choice is not None:
                ratios = Ratios.of(cut.pruner, decision.lengths.clamp(max=2 if self.student.keeps_last else 1))
                arp = ratio_loss(rule.choice, target, candidates, ratios, share)
                terms["arp"] = terms.get("arp", 0) + arp
            tsp = saliency_loss(trace.rectangle(rule.order, decision.origin), target, candidates)
            terms["tsp"] = terms.get("tsp", 0) + tsp
        return terms

    def _control(self, trace: Trace) -> None:
        """Move each site's share towards the wanted retention, by what this batch kept."""
        for number, decision in enumerate(trace.decisions):
            kept = (decision.rule.count.sum() / decision.lengths.sum()).item()
            wanted = self.settings.target_retention[number] + self.surplus[number].item()
            self.kept[number] += max(SMOOTHING, 1 / (1 + self.seen.item())) * (kept - self.kept[number])
            self.share[number] = min(max(self.share[number].item() + CONTROL_RATE * (wanted - kept), 0.01), 0.999)
        self.seen += 1


def first_shares(train: Examples, settings: TrainOptions, keeps_last: bool = False) -> list[float]:
    """Per site, the share of the teacher's attribution at which the wanted retention is met, as if each were the first.

    Args:
        keeps_last: the last token of a text stays, too.
    """
    assert train.attribution is not None
    rows = train.attribution[:: max(1, len(train) // SHARE_ROWS)]
    attribution = nn.utils.rnn.pad_sequence(list(rows), batch_first=True)
    lengths = torch.tensor([len(row) for row in rows])
    others = competing(torch.arange(attribution.shape[1]) < lengths[:, None], lengths - 1 if keeps_last else None)
    shares = []
    for wanted in settings.target_retention:
        candidates = settings.candidates if settings.adaptive else sorted({round(wanted, 3), 1.0})
        anchors = lengths.clamp(max=2 if keeps_last else 1)
        ratios = Ratios(ratios_in_permille(candidates), settings.min_tokens, anchors)
        shares.append(share_for_retention(attribution, others, ratios, wanted))
    return shares
