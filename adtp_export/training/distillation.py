"""The student in training: the packed network with gradients, and the loss that AD-TP trains it with."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from ..contract import ATTENTION_MASK, INPUT_IDS, TOKEN_TYPE_IDS
from ..explain.gradients import integrated_gradients, unit
from ..model.backbones import AttentionParts
from ..model.encoder import PrunedEncoder
from ..model.packed import Cut, PackedStudent
from ..model.padded import attention_received, scores
from ..model.pruners import Pruner, Seen
from ..model.pruners.adtp import AdtpPruner
from ..model.selection import KeepBest
from ..model.sequences import Packed, pack, restore, rows_of
from .attribution import of_tokens, supervision
from .losses import Ratios, attribution_loss, ratio_label, ratio_loss, saliency_loss
from .objectives import for_head
from .settings import GRADIENT_DIFFERENCE, Settings

CONTROL_RATE, SMOOTHING = 0.01, 0.02


@dataclass(kw_only=True)
class Decision:
    """What a pruner said about a packed batch of T tokens in B sequences, and what was done.

    rule: the pruner's own scores and counts, with gradients. origin ``(T,) int64``: places in the flattened ``(B*S,)`` input.
    lengths ``(B,) int64``. rows ``(T',) int64`` and cu_seqlens ``(B+1,) int64``: the survivors.
    """

    rule: KeepBest
    origin: Tensor
    lengths: Tensor
    rows: Tensor = field(default_factory=lambda: torch.empty(0))
    cu_seqlens: Tensor = field(default_factory=lambda: torch.empty(0))


@dataclass(kw_only=True)
class Trace:
    """What one pass decides, and what decides for it where the pruners do not.

    origin ``(T,) int64``: places of the tokens before the first cut in the flattened ``(B*S,)`` input; shape: B and S. guide:
    attribution ``(B, S)`` that orders the tokens instead of the pruner's scores. shares: per site, the share of it to keep,
    instead of the pruner's count. random: tokens are drawn. replay: the decisions of another pass to repeat.
    """

    origin: Tensor
    shape: torch.Size
    guide: Tensor | None = None
    shares: list[float] | None = None
    random: bool = False
    replay: list[Decision] | None = None
    decisions: list[Decision] = field(default_factory=list)

    def rectangle(self, values: Tensor, origin: Tensor) -> Tensor:
        """Spread packed values ``(T, ...)`` over ``(B, S, ...)``, zeros elsewhere."""
        return restore(values, origin, self.shape)

    def candidates(self, decision: Decision) -> Tensor:
        """Tokens that compete at a site, ``(B, S) bool``: alive there, without [CLS]."""
        alive = self.rectangle(torch.ones_like(decision.origin, dtype=torch.bool), decision.origin)
        alive[:, 0] = False
        return alive


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
        trace.decisions.append(decision := Decision(rule=rule, origin=tokens.origin, lengths=seen.lengths))
        if trace.random:
            return KeepBest(torch.rand_like(rule.order), rule.count)
        if trace.guide is None:
            return dataclasses.replace(rule, order=rule.order.detach())
        count = rule.count
        if trace.shares is not None:
            share = trace.shares[len(trace.decisions) - 1]
            label = ratio_label(trace.guide, trace.candidates(decision), Ratios.of(self.pruner), share)
            assert isinstance(self.pruner, AdtpPruner), "only its students are taught a ratio"
            count = self.pruner.count(label, seen.lengths)
        return KeepBest(trace.guide.flatten()[tokens.origin], count)


class DifferentiableAttention(nn.Module):
    """Attention sublayer on packed states with gradients of any order, for L_IG is a loss on gradients.

    Args:
        wanted: also say what attention each token received, ``(T,)`` in fp32 at least, as the packed model does.
    """

    def __init__(self, parts: AttentionParts, wanted: str | None) -> None:
        super().__init__()
        self.parts, self.wanted = parts, wanted

    def forward(self, tokens: Packed, wanted: Tensor | None) -> tuple[Tensor, Tensor | None]:
        parts, x = self.parts, tokens.states
        weights, biases = ([getattr(p, name) for p in parts.projections] for name in ("weight", "bias"))
        qkv = linear(parts.before(x), torch.cat(weights), None if biases[0] is None else torch.cat(biases))
        lengths = tokens.cu_seqlens.diff()
        batch, longest = len(lengths), int(lengths.max())
        cells = pack(lengths, longest)[1]
        padded = qkv.new_zeros(batch * longest, qkv.shape[1]).index_copy(0, cells, qkv)
        positions = cells.new_zeros(batch * longest).index_copy(0, cells, tokens.positions).view(batch, longest)
        q, k, v = padded.view(batch, longest, 3, parts.heads, -1).unbind(2)
        if parts.rotate is not None:
            q, k = parts.rotate(q, positions), parts.rotate(k, positions)
        q, k, v = (heads.transpose(1, 2) for heads in (q, k, v))
        live = torch.arange(longest, device=x.device) < lengths[:, None]
        probabilities = scores(parts, q, k, live, positions).softmax(-1)
        context = (parts.dropout(probabilities) @ v).transpose(1, 2).reshape(batch * longest, -1)
        states = parts.output(rows_of(context.index_select(0, cells), wanted), rows_of(x, wanted))
        if self.wanted is None:
            return states, None
        return states, attention_received(probabilities, live, self.wanted).flatten().index_select(0, cells)


class Distillation(nn.Module):
    """A student with its training loss; what Trainer trains and saves.

    Args:
        student: its weights are trained in place.
        settings: weights of the loss, ablations, wanted retention.
        shares: per site, the share of attribution that the tokens kept must hold, to begin with. While training it is
            moved so that the retention that the pruners really give meets the wanted one, which is a mean over the dev
            rows (`meet_on_dev`): training rows may be of other lengths.
    """

    share: Tensor
    kept: Tensor
    seen: Tensor
    surplus: Tensor

    def __init__(self, student: PrunedEncoder, settings: Settings, shares: list[float]) -> None:
        super().__init__()
        self.student, self.settings = student, settings
        self.objective = for_head(student.config.head)
        self.weights = dict(settings.weights)
        if not self.objective.labelled:
            labels = self.weights.pop("ce")
            self.weights["logit"] += 0.0 if "logit" in settings.left_out else labels
        self.alone = "teacher" in settings.left_out
        self.register_buffer("share", torch.tensor(shares, dtype=torch.float64))
        self.register_buffer("kept", torch.zeros_like(self.share))  # of training rows, lately
        self.register_buffer("seen", torch.zeros(()))  # training batches that the pruners cut
        self.register_buffer("surplus", torch.zeros_like(self.share))  # kept of training rows over kept of dev rows
        self.progress = 0.0  # of training, 0 to 1; the loop sets it before each step
        # The packed view shares the student's modules; in a tuple it is no submodule, so nothing is saved twice.
        self._packed = (self.objective.prepare(PackedStudent(student, DifferentiableAttention, TracedCut)),)

    @property
    def cuts(self) -> list[TracedCut]:
        return cast("list[TracedCut]", list(self._packed[0].cuts.values()))  # torch knows no module of one kind

    @property
    def leaves_weights_out(self) -> bool:
        """Whether the loss reaches not all weights: a term is left out, or a pooler is there that vectors have no use for."""
        return 0 in self.weights.values() or not self.objective.labelled

    def meet_on_dev(self, kept: list[float]) -> None:
        """Take note of the retention that each site gives on the dev rows, so that the next steps correct for it."""
        if self.seen > 0:
            self.surplus.copy_(self.kept - torch.tensor(kept).to(self.kept))

    def run(self, batch: dict[str, Tensor], trace: Trace) -> Tensor:
        """Return the answer, such as ``logits (B, C)``, and fill the trace."""
        for cut in self.cuts:
            cut.trace = trace
        outputs = self._packed[0](batch[INPUT_IDS], batch[ATTENTION_MASK], batch.get(TOKEN_TYPE_IDS))[0]
        return self.objective.answer(outputs)

    def begin(self, attention_mask: Tensor, guide: Tensor | None = None) -> Trace:
        """Return the trace of a new pass over right-padded ``(B, S)`` rows; `guide` is attribution to cut by."""
        origin = pack(attention_mask.sum(1).clamp(min=1), attention_mask.shape[1])[1]
        shares = self.share.tolist() if self.weights["arp"] > 0 else None
        drawn = self.settings.ratio == "random"
        return Trace(origin=origin, shape=attention_mask.shape, guide=guide, shares=shares, random=drawn)

    def attribute(
        self, batch: dict[str, Tensor], trace: Trace, explained: Tensor | None, create_graph: bool
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
        guided = self.training and not self.alone and weights["tsp"] > 0 and self.progress < settings.guided
        trace = self.begin(attention_mask, attribution if guided else None)
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
        if (against_labels := self.objective.label_loss(answer, batch)) is not None:
            terms["ce"] = against_labels
        terms["logit"] = self.objective.logit_loss(answer, teacher_logits, batch, settings.temperature)
        terms |= self._supervision(trace, target)
        if self.training and not guided:
            self._control(trace)
        loss = torch.stack([weights[name] * value for name, value in terms.items() if weights[name] > 0]).sum()
        return {"loss": loss, **{name: value.detach() for name, value in terms.items()}}

    def _supervision(self, trace: Trace, target: Tensor) -> dict[str, Tensor]:
        """Return L_ARP, where the pruners choose between ratios, and L_TSP for attribution ``(B, S)``; sums over sites."""
        terms: dict[str, Tensor] = {}
        for number, (decision, cut) in enumerate(zip(trace.decisions, self.cuts)):
            rule, candidates, share = decision.rule, trace.candidates(decision), self.share[number].item()
            if rule.choice is not None:
                arp = ratio_loss(rule.choice, target, candidates, Ratios.of(cut.pruner), share)
                terms["arp"] = terms.get("arp", 0) + arp
            tsp = saliency_loss(trace.rectangle(rule.order, decision.origin), target, candidates)
            terms["tsp"] = terms.get("tsp", 0) + tsp
        return terms

    def _control(self, trace: Trace) -> None:
        """Move each site's share towards the wanted retention, by what this batch kept."""
        for number, decision in enumerate(trace.decisions):
            kept = (decision.rule.count.sum() / decision.lengths.sum()).item()
            wanted = self.settings.wanted[number] + self.surplus[number].item()
            self.kept[number] += max(SMOOTHING, 1 / (1 + self.seen.item())) * (kept - self.kept[number])
            self.share[number] = min(max(self.share[number].item() + CONTROL_RATE * (wanted - kept), 0.01), 0.999)
        self.seen += 1
