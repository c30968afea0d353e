"""The student in training: the packed network with gradients, and the loss that AD-TP trains it with."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, linear, mse_loss

from ..model.packed import Cut, PackedStudent, pack, rows_of
from ..model.retainer import Retainer
from ..model.student import AdtpBertForSequenceClassification, Attention
from .attribution import integrated_gradients, token_attribution, unit
from .losses import attribution_loss, logit_loss, ratio_label, ratio_loss, saliency_loss
from .settings import Settings

CONTROL_RATE, SMOOTHING = 0.01, 0.02


@dataclass
class Decision:
    """What a site decided about a packed batch of T tokens in B sequences.

    ratio_logits ``(B, C)``; saliency ``(T,)``; origin ``(T,) int64``, places in the flattened ``(B*S,)`` input; lengths and
    count ``(B,) int64``; rows ``(T',) int64`` and cu_seqlens ``(B+1,)`` of the survivors.
    """

    ratio_logits: Tensor
    saliency: Tensor
    origin: Tensor
    lengths: Tensor
    count: Tensor
    rows: Tensor = field(default_factory=lambda: torch.empty(0))
    cu_seqlens: Tensor = field(default_factory=lambda: torch.empty(0))


@dataclass
class Trace:
    """What one pass decides, and what decides for it where the retainers do not.

    guide: attribution ``(B, S)`` that orders the tokens instead of saliency. shares: per site, the share of it to keep,
    instead of the ratio predictor's choice. random: tokens are drawn. replay: the decisions of another pass to repeat.
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
        flat = values.new_zeros(self.shape.numel(), *values.shape[1:])
        return flat.index_copy(0, origin, values).unflatten(0, self.shape)

    def candidates(self, decision: Decision) -> Tensor:
        """Tokens that compete at a site, ``(B, S) bool``: alive there, without [CLS]."""
        alive = self.rectangle(torch.ones_like(decision.origin, dtype=torch.bool), decision.origin)
        alive[:, 0] = False
        return alive


class TracedCut(Cut):
    """A cut that writes down what it decides, or obeys the trace."""

    def __init__(self, retainer: Retainer) -> None:
        super().__init__(retainer)
        self.trace: Trace | None = None

    def forward(self, x: Tensor, cu_seqlens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        trace = self.trace
        assert trace is not None
        if trace.replay is not None:
            decision = trace.replay[len(trace.decisions)]
            trace.decisions.append(decision)
            return x.index_select(0, decision.rows), decision.cu_seqlens, decision.rows
        x, cu_seqlens, rows = super().forward(x, cu_seqlens)
        trace.decisions[-1].rows, trace.decisions[-1].cu_seqlens = rows, cu_seqlens
        trace.origin = trace.origin[rows]
        return x, cu_seqlens, rows

    def decide(self, x: Tensor, start: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        trace, retainer = self.trace, self.retainer
        assert trace is not None
        ratio_logits, saliency = retainer.ratio_logits(x.index_select(0, start)), retainer.saliency(x)
        count = retainer.count(ratio_logits, lengths)
        trace.decisions.append(decision := Decision(ratio_logits, saliency, trace.origin, lengths, count))
        if trace.random:
            return torch.rand_like(saliency), count
        if trace.guide is None:
            return saliency.detach(), count
        if trace.shares is not None:
            share = trace.shares[len(trace.decisions) - 1]
            label = ratio_label(trace.guide, trace.candidates(decision), retainer.permille, share)
            count = retainer.count(nn.functional.one_hot(label, len(retainer.permille)), lengths)
        return trace.guide.flatten()[trace.origin], count


class DifferentiableAttention(nn.Module):
    """Attention sublayer on packed states with gradients of any order, for L_IG is a loss on gradients."""

    def __init__(self, attention: Attention) -> None:
        super().__init__()
        self.inner = attention.self
        self.output = attention.output

    def forward(self, x: Tensor, cu_seqlens: Tensor, wanted: Tensor | None) -> Tensor:
        inner = self.inner
        projections = (inner.query, inner.key, inner.value)
        qkv = linear(x, torch.cat([p.weight for p in projections]), torch.cat([p.bias for p in projections]))
        lengths = cu_seqlens.diff()
        batch, longest = len(lengths), int(lengths.max())
        cells = pack(lengths, longest)[1]
        padded = qkv.new_zeros(batch * longest, qkv.shape[1]).index_copy(0, cells, qkv)
        q, k, v = padded.view(batch, longest, 3, inner.num_heads, -1).permute(2, 0, 3, 1, 4)
        dead = torch.arange(longest, device=x.device) >= lengths[:, None]
        scores = (q @ k.transpose(-1, -2) * inner.scale).masked_fill(dead[:, None, None, :], -torch.inf)
        context = (inner.dropout(scores.softmax(-1)) @ v).transpose(1, 2).reshape(batch * longest, -1)
        return self.output(rows_of(context.index_select(0, cells), wanted), rows_of(x, wanted))


class Distillation(nn.Module):
    """A student with its training loss; what Trainer trains and saves.

    Args:
        student: its weights are trained in place.
        settings: weights of the loss, ablations, wanted retention.
        shares: per site, the share of attribution that the tokens kept must hold, to begin with. While training it is
            moved so that the retention that the ratio predictor really gives meets the wanted one, which is a mean over
            the dev rows (`meet_on_dev`): training rows may be of other lengths.
    """

    share: Tensor
    kept: Tensor
    seen: Tensor
    surplus: Tensor

    def __init__(self, student: AdtpBertForSequenceClassification, settings: Settings, shares: list[float]) -> None:
        super().__init__()
        self.student, self.settings = student, settings
        self.weights = settings.weights
        self.alone = "teacher" in settings.left_out
        self.register_buffer("share", torch.tensor(shares, dtype=torch.float64))
        self.register_buffer("kept", torch.zeros_like(self.share))  # of training rows, lately
        self.register_buffer("seen", torch.zeros(()))  # training batches that the retainers cut
        self.register_buffer("surplus", torch.zeros_like(self.share))  # kept of training rows over kept of dev rows
        self.progress = 0.0  # of training, 0 to 1; the loop sets it before each step
        # The packed view shares the student's modules; in a tuple it is no submodule, so nothing is saved twice.
        self._packed = (PackedStudent(student, DifferentiableAttention, TracedCut),)
        if settings.ratio != "adaptive":
            fix_ratio(student, settings.wanted)

    @property
    def cuts(self) -> list[TracedCut]:
        return list(self._packed[0].cuts.values())

    def meet_on_dev(self, kept: list[float]) -> None:
        """Take note of the retention that each site gives on the dev rows, so that the next steps correct for it."""
        if self.seen > 0:
            self.surplus.copy_(self.kept - torch.tensor(kept).to(self.kept))

    def run(self, batch: dict[str, Tensor], trace: Trace) -> Tensor:
        """Return ``logits (B, C)`` and fill the trace."""
        for cut in self.cuts:
            cut.trace = trace
        logits: Tensor = self._packed[0](batch["input_ids"], batch["attention_mask"], batch["token_type_ids"])[0]
        return logits

    def begin(self, attention_mask: Tensor, guide: Tensor | None = None) -> Trace:
        """Return the trace of a new pass over right-padded ``(B, S)`` rows; `guide` is attribution to cut by."""
        origin = attention_mask.flatten().nonzero().squeeze(1)
        shares = self.share.tolist() if self.weights["arp"] > 0 else None
        return Trace(origin, attention_mask.shape, guide, shares, self.settings.ratio == "random")

    def attribute(
        self, batch: dict[str, Tensor], trace: Trace, classes: Tensor | None, create_graph: bool
    ) -> tuple[Tensor, Tensor]:
        """Return ``logits (B, C)`` and the student's attribution ``(B, S)``, for the cuts of the whole input."""
        origin = trace.origin  # of the whole input: the trace's own moves on with the cuts

        def forward() -> Tensor:
            first = not trace.decisions
            return self.run(batch, trace if first else Trace(origin, trace.shape, replay=trace.decisions))

        embeddings = self.student.bert.embeddings.word_embeddings
        steps = self.settings.ig_steps
        logits, attribution = integrated_gradients(forward, embeddings, steps, classes, self.training, create_graph)
        live = batch["attention_mask"].bool()
        return logits, token_attribution(trace.rectangle(attribution, origin), live)

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor,
        token_type_ids: Tensor,
        labels: Tensor,
        teacher_logits: Tensor,
        attribution: Tensor,
    ) -> dict[str, Tensor]:
        """Compute the loss of a right-padded batch.

        Args:
            input_ids, attention_mask, token_type_ids: ``(B, S) int64``.
            labels: ``(B,)`` class indices, or numbers in regression.
            teacher_logits: ``(B, C)``.
            attribution: ``(B, S)``, the teacher's, rows of length 1.

        Returns:
            ``loss``, and each term before its weight.
        """
        settings, weights = self.settings, self.weights
        batch = {"input_ids": input_ids, "attention_mask": attention_mask, "token_type_ids": token_type_ids}
        kappa = 1.0 if self.alone else settings.kappa * self.progress
        guided = self.training and not self.alone and weights["tsp"] > 0 and self.progress < settings.guided
        trace = self.begin(attention_mask, attribution if guided else None)
        aligned, supervised = weights["ig"] > 0, weights["arp"] > 0 or weights["tsp"] > 0
        target = attribution
        terms: dict[str, Tensor] = {}
        if aligned or (supervised and kappa > 0):
            classes = None if self.alone else teacher_logits.argmax(1)
            logits, own = self.attribute(batch, trace, classes, create_graph=aligned)
            target = unit((1 - kappa) * attribution + kappa * own.detach())
            terms["ig"] = attribution_loss(own, attribution)
        else:
            logits = self.run(batch, trace)
        terms["ce"] = (
            cross_entropy(logits, labels) if logits.shape[1] > 1 else mse_loss(logits[:, 0], labels.to(logits.dtype))
        )
        terms["logit"] = logit_loss(logits, teacher_logits, settings.temperature)
        for number, (decision, cut) in enumerate(zip(trace.decisions, self.cuts)):
            candidates, share = trace.candidates(decision), self.share[number].item()
            saliency = trace.rectangle(decision.saliency, decision.origin)
            arp = ratio_loss(decision.ratio_logits, target, candidates, cut.retainer.permille, share)
            terms["arp"] = terms.get("arp", 0) + arp
            terms["tsp"] = terms.get("tsp", 0) + saliency_loss(saliency, target, candidates)
            if self.training and not guided:
                kept = (decision.count.sum() / decision.lengths.sum()).item()
                wanted = settings.wanted[number] + self.surplus[number].item()
                self.kept[number] += max(SMOOTHING, 1 / (1 + self.seen.item())) * (kept - self.kept[number])
                self.share[number] = min(max(share + CONTROL_RATE * (wanted - kept), 0.01), 0.999)
        if self.training and not guided:
            self.seen += 1
        loss = torch.stack([weights[name] * value for name, value in terms.items() if weights[name] > 0]).sum()
        return {"loss": loss, **{name: value.detach() for name, value in terms.items()}}


def fix_ratio(student: AdtpBertForSequenceClassification, wanted: list[float]) -> None:
    """Make the ratio predictors say one ratio for every text, and leave them out of training."""
    with torch.no_grad():
        for retainer, ratio in zip(student.bert.encoder.retainers.values(), wanted):
            predictor = retainer.ratio_predictor
            predictor.weight.zero_()
            predictor.bias.copy_(torch.tensor([float(q == round(1000 * ratio)) for q in retainer.permille]))
            predictor.requires_grad_(False)
