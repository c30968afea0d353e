"""The padded AD-TP student: plain, slow on purpose, and the oracle that every export is compared with.

Pruned tokens stay in the rectangle and are masked out of attention from their cut on, so each line can be
read against the definition. `adtp_export.model.packed` is the same network without the padding.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import AutoModelForSequenceClassification, PreTrainedModel
from transformers.activations import ACT2FN
from transformers.modeling_outputs import SequenceClassifierOutput

from .config import AdtpBertConfig
from .retainer import Retainer


@dataclass(frozen=True)
class SiteDecision:
    """What one site saw and decided, for B sequences of padded length S.

    ratio_logits ``(B, C)``, saliency ``(B, S)``, live ``(B, S) bool`` before the cut, count ``(B,) int64`` kept.
    """

    ratio_logits: Tensor
    saliency: Tensor
    live: Tensor
    count: Tensor


@dataclass
class AdtpSequenceClassifierOutput(SequenceClassifierOutput):
    """`SequenceClassifierOutput` plus what was kept.

    kept_site ``(B, S) int32``: index in `prune_sites` of the site that dropped the token, ``len(prune_sites)`` if it
    stayed, -1 for padding. decisions: one `SiteDecision` per site.
    """

    kept_site: Tensor | None = None
    decisions: tuple[SiteDecision, ...] | None = None


class SelfAttention(nn.Module):
    def __init__(self, config: AdtpBertConfig) -> None:
        super().__init__()
        self.num_heads = config.num_attention_heads
        self.query = nn.Linear(config.hidden_size, config.hidden_size)
        self.key = nn.Linear(config.hidden_size, config.hidden_size)
        self.value = nn.Linear(config.hidden_size, config.hidden_size)
        self.dropout = nn.Dropout(config.attention_probs_dropout_prob)

    @property
    def scale(self) -> float:
        """``D ** -0.5``."""
        return float((self.query.out_features // self.num_heads) ** -0.5)

    def forward(self, x: Tensor, live: Tensor) -> Tensor:
        q, k, v = (
            projection(x).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
            for projection in (self.query, self.key, self.value)
        )
        scores = q @ k.transpose(-1, -2) * self.scale
        scores = scores.masked_fill(~live[:, None, None, :], -torch.inf)
        context = self.dropout(scores.softmax(-1)) @ v
        return context.transpose(1, 2).flatten(2)


class SublayerOutput(nn.Module):
    """Projection, dropout, residual, LayerNorm: the end of both sublayers."""

    def __init__(self, config: AdtpBertConfig, in_features: int) -> None:
        super().__init__()
        self.dense = nn.Linear(in_features, config.hidden_size)
        self.LayerNorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)

    def forward(self, x: Tensor, residual: Tensor) -> Tensor:
        return self.LayerNorm(self.dropout(self.dense(x)) + residual)


class Attention(nn.Module):
    def __init__(self, config: AdtpBertConfig) -> None:
        super().__init__()
        self.self = SelfAttention(config)
        self.output = SublayerOutput(config, config.hidden_size)

    def forward(self, x: Tensor, live: Tensor) -> Tensor:
        return self.output(self.self(x, live), x)


class Intermediate(nn.Module):
    def __init__(self, config: AdtpBertConfig) -> None:
        super().__init__()
        self.dense = nn.Linear(config.hidden_size, config.intermediate_size)
        self.activation = ACT2FN[config.hidden_act]

    def forward(self, x: Tensor) -> Tensor:
        return self.activation(self.dense(x))


class Layer(nn.Module):
    def __init__(self, config: AdtpBertConfig) -> None:
        super().__init__()
        self.attention = Attention(config)
        self.intermediate = Intermediate(config)
        self.output = SublayerOutput(config, config.intermediate_size)


class Encoder(nn.Module):
    def __init__(self, config: AdtpBertConfig) -> None:
        super().__init__()
        self.layer = nn.ModuleList(Layer(config) for _ in range(config.num_hidden_layers))
        self.retainers = nn.ModuleDict({site.key: Retainer(config) for site in config.sites})

    def forward(self, x: Tensor, live: Tensor) -> tuple[Tensor, Tensor, tuple[SiteDecision, ...]]:
        """Run all layers on ``x (B, S, H)``, ``live (B, S)``; return states, kept_site and decisions."""
        kept_site = torch.where(live, 0, -1)
        decisions: list[SiteDecision] = []

        def cut(key: str, x: Tensor, live: Tensor) -> Tensor:
            nonlocal kept_site
            if key not in self.retainers:
                return live
            retainer = self.retainers[key]
            ratio_logits, saliency = retainer.ratio_logits(x[:, 0]), retainer.saliency(x)
            decisions.append(SiteDecision(ratio_logits, saliency, live, retainer.count(ratio_logits, live.sum(1))))
            live = select(saliency, live, decisions[-1].count)
            kept_site = kept_site + live
            return live

        for i, layer in enumerate(self.layer):
            live = cut(f"{i}_attention", x, live)
            x = layer.attention(x, live)
            live = cut(f"{i}_ffn", x, live)
            x = layer.output(layer.intermediate(x), x)
        return x, kept_site.int(), tuple(decisions)


def select(saliency: Tensor, live: Tensor, count: Tensor) -> Tensor:
    """Return the survivors ``(B, S) bool``: [CLS] and the ``count - 1`` other live tokens of highest saliency.

    Ties go to the lower position (a stable sort). Source: checkpoint format 1, step 4.
    """
    score = saliency.masked_fill(~live, -torch.inf)
    score[:, 0] = torch.inf
    order = score.sort(dim=1, descending=True, stable=True).indices
    rank = order.argsort(dim=1)
    return live & (rank < count[:, None])


class Embeddings(nn.Module):
    def __init__(self, config: AdtpBertConfig) -> None:
        super().__init__()
        self.word_embeddings = nn.Embedding(config.vocab_size, config.hidden_size, padding_idx=config.pad_token_id)
        self.position_embeddings = nn.Embedding(config.max_position_embeddings, config.hidden_size)
        self.token_type_embeddings = nn.Embedding(config.type_vocab_size, config.hidden_size)
        self.LayerNorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)

    def forward(self, input_ids: Tensor, token_type_ids: Tensor, position_ids: Tensor) -> Tensor:
        x = self.word_embeddings(input_ids) + self.token_type_embeddings(token_type_ids)
        return self.dropout(self.LayerNorm(x + self.position_embeddings(position_ids)))


class Pooler(nn.Module):
    def __init__(self, config: AdtpBertConfig) -> None:
        super().__init__()
        self.dense = nn.Linear(config.hidden_size, config.hidden_size)

    def forward(self, first: Tensor) -> Tensor:
        return torch.tanh(self.dense(first))


class AdtpBertPreTrainedModel(PreTrainedModel):
    config_class = AdtpBertConfig
    base_model_prefix = "bert"

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, (nn.Linear, nn.Embedding)):
            module.weight.data.normal_(mean=0.0, std=self.config.initializer_range)
            if getattr(module, "bias", None) is not None:
                module.bias.data.zero_()
            if getattr(module, "padding_idx", None) is not None:
                module.weight.data[module.padding_idx].zero_()
        elif isinstance(module, nn.LayerNorm):
            module.weight.data.fill_(1.0)
            module.bias.data.zero_()


class AdtpBertModel(AdtpBertPreTrainedModel):
    """Embeddings, pruned encoder, pooler."""

    def __init__(self, config: AdtpBertConfig) -> None:
        super().__init__(config)
        self.embeddings = Embeddings(config)
        self.encoder = Encoder(config)
        self.pooler = Pooler(config)
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.embeddings.word_embeddings

    def set_input_embeddings(self, value: nn.Module) -> None:
        self.embeddings.word_embeddings = value


class AdtpBertForSequenceClassification(AdtpBertPreTrainedModel):
    """The padded student, a `transformers` model: `from_pretrained`, `save_pretrained` and `pipeline` work.

    Forward takes int64 ``(B, S)`` `input_ids`, `attention_mask` (right padding; all ones when absent),
    `token_type_ids` (zeros when absent) and `labels`; it returns `AdtpSequenceClassifierOutput` with
    ``logits (B, num_labels)``. A row without live tokens counts as one token.

    Raises:
        ValueError: the mask is not right padding.
    """

    def __init__(self, config: AdtpBertConfig) -> None:
        super().__init__(config)
        self.num_labels = config.num_labels
        self.bert = AdtpBertModel(config)
        dropout = config.classifier_dropout
        self.dropout = nn.Dropout(config.hidden_dropout_prob if dropout is None else dropout)
        self.classifier = nn.Linear(config.hidden_size, config.num_labels)
        self.post_init()

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        labels: Tensor | None = None,
        return_dict: bool | None = None,
    ) -> AdtpSequenceClassifierOutput | tuple:
        position_ids = torch.arange(input_ids.shape[1], device=input_ids.device)
        if attention_mask is None:
            attention_mask = torch.ones_like(input_ids)
        if token_type_ids is None:
            token_type_ids = torch.zeros_like(input_ids)
        lengths = attention_mask.sum(1).clamp(min=1)
        live = position_ids < lengths[:, None]
        if not torch.equal(live[:, 1:], attention_mask[:, 1:].bool()):
            raise ValueError(
                "attention_mask must be right padding: ones, then zeros. Tokenize with padding_side='right'"
            )

        x = self.bert.embeddings(input_ids, token_type_ids, position_ids)
        x, kept_site, decisions = self.bert.encoder(x, live)
        logits = self.classifier(self.dropout(self.bert.pooler(x[:, 0])))
        loss = None if labels is None else self._loss(logits, labels)
        output = AdtpSequenceClassifierOutput(loss=loss, logits=logits, kept_site=kept_site, decisions=decisions)
        return output.to_tuple() if return_dict is False else output

    def _loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        kind = self.config.problem_type
        if kind is None:
            integral = not labels.is_floating_point()
            kind = "regression" if self.num_labels == 1 else f"{'single' if integral else 'multi'}_label_classification"
        if kind == "regression":
            return nn.functional.mse_loss(logits.squeeze(-1), labels.to(logits.dtype).view(logits.squeeze(-1).shape))
        if kind == "single_label_classification":
            return nn.functional.cross_entropy(logits, labels.view(-1))
        return nn.functional.binary_cross_entropy_with_logits(logits, labels.to(logits.dtype))


AutoModelForSequenceClassification.register(AdtpBertConfig, AdtpBertForSequenceClassification)
