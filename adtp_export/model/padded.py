"""The padded loop over layers and sites: plain, slow on purpose, and what every export is compared with.

Dropped tokens stay in the rectangle with the states that they had, masked out of attention from their cut on, so each line
can be read against the definition. `model.packed` is the same network without the padding.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ..contract import FROM_OTHERS, RECEIVED
from .backbones.base import AttentionParts, Backbone
from .pruners import Seen
from .selection import Rule
from .sequences import outside_autocast

SUBLAYERS = ("attention", "ffn")


@dataclass(frozen=True)
class Decision:
    """What one site decided, for B sequences of padded length S: the rule, and tokens ``(B, S) bool`` before and after."""

    rule: Rule
    live: Tensor
    kept: Tensor

    @property
    def count(self) -> Tensor:
        """Tokens that stayed, ``(B,) int64``."""
        return self.kept.sum(1)


class Marked(NamedTuple):
    """also: ``(B,) int64``, columns of tokens that stay beside the first ones, and that pruners read; None: no others do. expanded:
    ``(B, S) bool``, further tokens, after those that live: they attend to these, are never attended to, and stay; None: there are none.
    """

    also: Tensor | None = None
    expanded: Tensor | None = None


def run_padded(
    backbone: Backbone,
    pruners: nn.ModuleDict,
    ids: Tensor,
    types: Tensor,
    live: Tensor,
    attentions: list[Tensor] | None = None,
    marked: Marked | None = None,
) -> tuple[Tensor, Tensor, tuple[Decision, ...]]:
    """Run embeddings and all layers.

    Args:
        pruners: by `PruneSite.key`.
        ids, types: ``(B, S) int64``.
        live: ``(B, S) bool``, tokens first in each row.
        attentions: gets the attention probabilities of each layer, ``(B, N, S, S)`` by query and key.
        marked: tokens that are not as others; None: there are none.

    Returns:
        States ``(B, S, H)``, where a dropped token has the one that reached its cut (or that entered the layer, where the pruner
        `restores_entered`), finished; kept_site ``(B, S) int32``: index of the site that dropped the token, the number of sites if it
        stayed, -1 for padding; one decision per site.
    """
    positions = torch.arange(ids.shape[1], device=ids.device)
    x = backbone.embeddings(ids, types, positions)
    also, expanded = marked or Marked()
    further = torch.zeros_like(live) if expanded is None else expanded & ~live
    kept_site, at_input = torch.where(live | further, 0, -1), live.sum(1)
    received: Tensor | None = None
    entered, wanted = x, layers_read(pruners)
    decisions: list[Decision] = []
    for i in range(backbone.num_layers):
        for sublayer in SUBLAYERS:
            if (key := f"{i}_{sublayer}") in pruners:
                first = live.int().argmax(1)
                read = x[torch.arange(len(x)), first if also is None else also]
                rule = pruners[key](Seen(x, read, live.sum(1), at_input, received)).keeping(also, first)
                decisions.append(Decision(rule, live, rule.padded(live)))
                live = decisions[-1].kept
                kept_site = kept_site + (live | further)
                if sublayer == "ffn" and pruners[key].restores_entered:
                    x = torch.where((live | further)[:, :, None], x, entered)
            if sublayer == "attention":
                entered, parts = x, backbone.attention(i)
                context, received = attend(parts, x, live, positions, wanted.get(i), attentions, further)
                new = parts.output(context, x)
            else:
                ffn = backbone.feed_forward(i)
                new = ffn.output(ffn.intermediate(ffn.before(x)), x)
            x = torch.where((live | further)[:, :, None], new, x)
    return backbone.finish(x), kept_site.int(), tuple(decisions)


def layers_read(pruners: nn.ModuleDict) -> dict[int, str]:
    """Number the layers whose attention is followed by a site that reads what tokens received in it: from all, or `FROM_OTHERS`."""
    places = {key.partition("_"): pruner for key, pruner in pruners.items() if pruner.reads_received}
    return {
        int(layer) - (sublayer == "attention"): FROM_OTHERS if pruner.from_others else RECEIVED
        for (layer, _, sublayer), pruner in places.items()
    }


def attend(
    parts: AttentionParts,
    x: Tensor,
    live: Tensor,
    positions: Tensor,
    wanted: str | None,
    attentions: list[Tensor] | None = None,
    further: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Return the context ``(B, S, H)`` of multi-head attention among live tokens, and on request what each token received.

    Args:
        wanted: as of `attention_received`; None: nothing.
        attentions: gets the probabilities.
        further: ``(B, S) bool``, tokens that query beside the live ones.
    """
    q, k, v = projected(parts, x, positions)
    weights = scores(parts, q, k, live, positions, further).softmax(-1)
    if attentions is not None:
        attentions.append(weights)
    context = (parts.dropout(weights) @ v).transpose(1, 2).flatten(2)
    queries = live if further is None else live | further
    return context, None if wanted is None else attention_received(weights, queries, wanted, near(parts, positions))


def attention_received(weights: Tensor, live: Tensor, wanted: str, near: Tensor | None) -> Tensor:
    """Sum attention probabilities ``(B, N, S, S)`` over heads and the queries ``live (B, S)``: ``(B, S)``, in fp32 at least.

    Args:
        live: a query counts as much as it says, 0 to 1, or bool.
        wanted: `RECEIVED`, from all; or `FROM_OTHERS`, without what a token gives itself.
        near: ``(S, S)`` or ``(B, S, S) bool`` of causal attention, which queries see which keys: the sum is divided by their number.
            None where attention is not causal.
    """
    weights = weights.to(torch.promote_types(weights.dtype, torch.float32))
    queries = live.to(weights.dtype)
    with outside_autocast(weights):
        total = torch.einsum("bnqk,bq->bk", weights, queries)
    if near is not None:
        total = total / (near * queries[:, :, None]).sum(1).clamp(min=1)
    return total if wanted == RECEIVED else total - weights.diagonal(dim1=2, dim2=3).sum(1)


def projected(parts: AttentionParts, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries, keys and values ``(B, N, S, D)`` of states ``(B, S, H)``; keys and values of groups are repeated."""
    inner = parts.before(x)
    joined = torch.cat([projection(inner) for projection in parts.projections], dim=-1)
    return by_head(parts, joined, positions)


def by_head(parts: AttentionParts, joined: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries, keys and values ``(B, N, S, D)`` of joined projections ``(B, S, .)``."""
    q, k, v = (heads.transpose(1, 2) for heads in parts.heads_of(joined, positions))
    if (group := parts.heads // parts.key_heads) > 1:
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    return q, k, v


def scores(
    parts: AttentionParts, q: Tensor, k: Tensor, live: Tensor, positions: Tensor, further: Tensor | None = None
) -> Tensor:
    """Return the scores ``(B, N, S, S)`` of queries and keys ``(B, N, S, D)``, -inf for keys that a query does not see.

    Args:
        live: ``(B, S) bool``. positions: ``(B, S)`` or ``(S,) int64``. further: as of `attend`; these do not see themselves either.
    """
    result, visible = q @ k.transpose(-1, -2) * parts.scale, live[:, None, None, :]
    if parts.bias is not None:
        result = result + parts.bias(_distances(positions))
    if parts.distances is not None:
        result = result + parts.distances(q, k, _distances(positions)) * parts.scale
    if parts.reach != (-1, -1):
        itself = torch.eye(
            live.shape[1], dtype=torch.bool, device=live.device
        )  # or dead queries would see nothing: NaN
        itself = itself if further is None else (itself & ~further[:, :, None])[:, None]
        visible = visible & within(parts, positions).unsqueeze(-3) | itself
    return result.masked_fill(~visible, -torch.inf)


def near(parts: AttentionParts, positions: Tensor) -> Tensor | None:
    """Return `within` of causal attention, and None of other, as `attention_received` takes it."""
    return within(parts, positions) if parts.causal else None


def within(parts: AttentionParts, positions: Tensor) -> Tensor:
    """Say which keys are in the reach of each query, ``(..., S, S) bool`` by query and key, for ``positions (..., S) int64``."""
    distances = _distances(positions)
    back, ahead = parts.reach
    far = torch.zeros_like(distances, dtype=torch.bool)
    far = far if back < 0 else far | (distances < -back)
    return ~(far if ahead < 0 else far | (distances > ahead))


def _distances(positions: Tensor) -> Tensor:
    return positions[..., None, :] - positions[..., :, None]
