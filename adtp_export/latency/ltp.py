"""Learned Token Pruning (LTP), a peer: tokens that get too little attention are dropped, layer by layer.

In layer l a token's score is the attention that it receives, averaged over heads and live queries. Tokens with a score
below the threshold of the layer leave between its attention and its feed-forward; [CLS] never does.

Source: Kim et al., Learned Token Pruning for Transformers, KDD 2022 (arXiv 2107.00910). Their code
(github.com/kssteven418/LTP) differs in three points:

- It masks pruned tokens out of later attention, and computes on them all the same. Here they are removed; the rows
  that stay are the same, since a feed-forward sees one token at a time.
- It divides a score by the padded length, 128 by default, not by the number of live tokens: with `length` it is done
  so here, and thresholds learned there mean the same.
- It lets [CLS] fall below a threshold: masked as a key, its state goes on and is read in the end. Here [CLS] stays.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from ..model.flops import Shape, encoder_flops
from ..text import Batch

if TYPE_CHECKING:
    from transformers import BertForSequenceClassification

TOLERANCE, MAX_STEPS = 0.02, 40


class LtpBert(nn.Module):
    """BERT with LTP's hard cuts, in eval mode; shares the model's weights.

    The scores are made of attention probabilities, which fused kernels (SDPA, flash) never write down: the model must
    have ``attn_implementation="eager"``, and that cost is LTP's own. After a cut the batch is padded to its longest
    row of survivors, so a batch saves no more than that row does.

    Args:
        thresholds: one per layer; 0 keeps all.
        length: what sums over queries are divided by; default: the live tokens of each sequence.

    Attributes:
        kept: tokens alive in the last run: before layer 0, then after each layer's cut; L + 1 times ``(B,) int64``.

    Raises:
        ValueError: the model's attention is not eager, or there is not one threshold per layer.
    """

    def __init__(
        self, model: BertForSequenceClassification, thresholds: Sequence[float], length: int | None = None
    ) -> None:
        super().__init__()
        if model.config._attn_implementation != "eager":
            raise ValueError('LTP needs attention probabilities: load BERT with attn_implementation="eager"')
        if len(thresholds) != model.config.num_hidden_layers:
            raise ValueError(f"got {len(thresholds)} thresholds for {model.config.num_hidden_layers} layers")
        self.embeddings = model.bert.embeddings
        self.layers: Any = model.bert.encoder.layer  # torch types what is inside as Tensor | Module
        self.pooler: Any = model.bert.pooler
        self.classifier = model.classifier
        self.thresholds = tuple(thresholds)
        self.length = length
        self.kept: list[Tensor] = []
        self.eval()

    def forward(self, input_ids: Tensor, attention_mask: Tensor, token_type_ids: Tensor | None = None) -> Tensor:
        """Classify int64 ``(B, S)`` inputs, [CLS] first; return ``logits (B, num_labels)`` fp32.

        A row without live tokens counts as one token.
        """
        x = self.embeddings(input_ids=input_ids, token_type_ids=token_type_ids)
        live = with_cls(attention_mask.bool())
        self.kept = [live.sum(1)]
        for layer, threshold in zip(self.layers, self.thresholds):
            x, probabilities = layer.attention(x, additive_mask(live, x.dtype))[:2]
            keep = with_cls(live & (scores(probabilities, live, self.length) >= threshold))
            x, live = remove(x, keep)
            x = layer.output(layer.intermediate(x), x)
            self.kept.append(live.sum(1))
        return self.classifier(self.pooler(x)).float()


class LtpEngine:
    """LTP on random weights, to be timed: each shape of batch gets thresholds of its own when it is first run.

    Args:
        path: a folder of transformers' BERT.
        retention: share of tokens alive, on average over layers.
    """

    inputs: tuple[str, ...] = ("input_ids", "attention_mask", "token_type_ids")
    outputs: tuple[str, ...] = ("logits",)

    def __init__(self, path: Path, threads: int = 0, retention: float = 1.0) -> None:
        from transformers import BertForSequenceClassification

        if threads:
            torch.set_num_threads(threads)
        self._model = BertForSequenceClassification.from_pretrained(path, attn_implementation="eager").eval()
        self._retention, self._peers = retention, dict[tuple[int, ...], LtpBert]()
        self.kept: list[Tensor] = []

    def run(self, batch: Batch) -> dict[str, np.ndarray]:
        tensors = {name: torch.from_numpy(batch[name]) for name in self.inputs if name in batch}
        shape = batch["input_ids"].shape
        with torch.inference_mode():
            if shape not in self._peers:
                thresholds = thresholds_for(self._model, tensors, self._retention, length=shape[1])
                self._peers[shape] = LtpBert(self._model, thresholds, length=shape[1])
            logits = self._peers[shape](**tensors)
        self.kept = self._peers[shape].kept
        return {"logits": logits.numpy()}


def scores(probabilities: Tensor, live: Tensor, length: int | None = None) -> Tensor:
    """Return the attention ``(B, S)`` that each token receives, averaged over heads and live queries.

    Args:
        probabilities: ``(B, N, S, S)``, queries before keys.
        live: ``(B, S) bool``.
        length: divide sums over queries by this, not by the number of live tokens.

    Source: Kim et al.; with `length` as in their code, `AbsoluteThresholdTokenPruner`.
    """
    received = torch.einsum("bnqk,bq->bk", probabilities, live.to(probabilities.dtype))
    return received / (probabilities.shape[1] * (live.sum(1, keepdim=True) if length is None else length))


def remove(x: Tensor, keep: Tensor) -> tuple[Tensor, Tensor]:
    """Drop what is not in ``keep (B, S) bool`` from ``x (B, S, H)``, in order, down to the longest row of survivors.

    Returns:
        States ``(B, S', H)`` and which of them are live, ``(B, S') bool``. Where the longest row has not become
        shorter nothing is moved, and the survivors of other rows stay where they are.
    """
    longest = int(keep.sum(1).max())
    if longest == keep.shape[1]:
        return x, keep
    rows = keep.byte().argsort(dim=1, descending=True, stable=True)[:, :longest]
    return x.gather(1, rows[..., None].expand(-1, -1, x.shape[-1])), keep.gather(1, rows)


def with_cls(live: Tensor) -> Tensor:
    """Return a copy of ``live (B, S) bool`` in which position 0 is always live."""
    live = live.clone()
    live[:, 0] = True
    return live


def additive_mask(live: Tensor, dtype: torch.dtype) -> Tensor | None:
    """Return the ``(B, 1, 1, S)`` that eager attention adds to its scores; None where all tokens are live."""
    if live.all():
        return None
    return torch.zeros_like(live, dtype=dtype).masked_fill(~live, torch.finfo(dtype).min)[:, None, None]


def thresholds_for(
    model: BertForSequenceClassification, batch: Mapping[str, Tensor], retention: float, length: int | None = None
) -> list[float]:
    """Find thresholds that keep about the share `retention` of the batch's tokens, on average over layers.

    They stand in for learned ones where weights are random: ``theta_l = theta_L (l + 1) / L``, the linear rise that LTP
    starts its training from (its code with l for l + 1), theta_L found by bisection. It takes about 12 runs of the batch.

    Args:
        batch: arguments of `LtpBert.forward` by name.
        length: as in `LtpBert`.

    Raises:
        ValueError: no thresholds of this form come within 0.02, such as where [CLS] alone is more than `retention`.
    """
    # With random weights all scores are near 1/n, so a layer drops almost nothing until its threshold reaches that, and
    # then almost everything. A wanted mean is met by the depth at which this happens, and by how many tokens that one
    # layer drops; thresholds chosen as quantiles of scores are not needed for it. Without `length` long sequences, whose
    # scores are lower, go first and entirely.
    peer = LtpBert(model, [0.0] * model.config.num_hidden_layers, length)
    depth = len(peer.thresholds)
    low, high = 1e-6, float(depth)  # at `high` layer 0 has threshold 1, which no score is above
    best, error = peer.thresholds, 1 - retention
    for _ in range(MAX_STEPS):
        if abs(error) < TOLERANCE / 4:
            break
        final = (low * high) ** 0.5
        peer.thresholds = tuple(final * (layer + 1) / depth for layer in range(depth))
        with torch.no_grad():
            peer(**batch)
        share = mean_retention(peer.kept)
        if abs(share - retention) < abs(error):
            best, error = peer.thresholds, share - retention
        low, high = (final, high) if share > retention else (low, final)
    if abs(error) > TOLERANCE:
        raise ValueError(f"retention {retention}: the nearest that rising thresholds reach is {retention + error:.3f}")
    return list(best)


def mean_retention(kept: Sequence[Tensor]) -> float:
    """Return the share of the batch's tokens alive after a layer's cut, averaged over layers; `kept` as in `LtpBert`."""
    tokens = torch.stack(list(kept)).sum(1)
    return float(tokens[1:].double().mean() / tokens[0])


def ltp_flops(shape: Shape, kept: Sequence[Tensor]) -> float:
    """Count the FLOPs of a run on live tokens: attention with those before a layer's cut, feed-forward after it.

    Args:
        kept: as in `LtpBert`, L + 1 times ``(B,)``.

    Source: conventions of `adtp_export.model.flops`; the averaging of scores is not counted.
    """
    sites = [f"{layer}.ffn" for layer in range(shape.layers)]
    return encoder_flops(shape, [n.cpu().numpy() for n in kept], sites)
