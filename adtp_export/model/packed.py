"""The packed AD-TP student: the same weights without padding. This is the network that is exported.

Token states are ``(T, H)`` with ``cu_seqlens (B+1,)`` from before layer 0, so even the layers before the
first cut pay for real tokens only. A cut gathers the surviving rows once; scores and indices alone are ever
re-padded. Behind its attention and all cuts the last layer works for [CLS] alone: nobody reads its other rows.

The code is written in operations that export to dynamic-shape ONNX: no boolean indexing (NonZero), TopK per row, and
sizes that depend on data are read once per cut.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from ..ops.ragged_attention import ragged_attention
from .retainer import Retainer
from .student import AdtpBertForSequenceClassification, Attention, Embeddings, Layer


class PackedStudent(nn.Module):
    """Packed form of a student, in eval mode; shares its weights (query, key and value are copied into one matrix).

    Args:
        attention: makes a packed attention sublayer from a padded one; training passes one with gradients.
        cut: makes a cut from a retainer; training passes one that remembers what was decided.
    """

    def __init__(
        self,
        student: AdtpBertForSequenceClassification,
        attention: Callable[[Attention], nn.Module] | None = None,
        cut: Callable[[Retainer], Cut] | None = None,
    ) -> None:
        super().__init__()
        attention, cut, bert = attention or PackedAttention, cut or Cut, student.bert
        self.unpad = Unpad(bert.embeddings)
        self.cuts = nn.ModuleDict({site: cut(retainer) for site, retainer in bert.encoder.retainers.items()})
        self.layers = nn.ModuleList(PackedLayer(attention(layer.attention), layer) for layer in bert.encoder.layer)
        self.pooler = bert.pooler
        self.dropout = student.dropout
        self.classifier = student.classifier
        self.eval()

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor, token_type_ids: Tensor | None = None
    ) -> tuple[Tensor, list[Tensor]]:
        """Classify a right-padded batch of int64 ``(B, S)`` inputs; a row without live tokens counts as one token.

        Returns:
            ``logits (B, num_labels)`` and which rows lived on: first the ``(T,) int64`` rows of the flattened
            ``(B*S,)`` input, then for each site the ``(T',) int64`` rows of the packed states before its cut.
        """
        x, cu_seqlens, rows = self.unpad(input_ids, attention_mask, token_type_ids)
        kept = [rows]
        end = len(self.layers) - 1
        narrow = (end, "ffn" if f"{end}_ffn" in self.cuts else "attention")
        for i, layer in enumerate(self.layers):
            for sublayer in ("attention", "ffn"):
                if (site := f"{i}_{sublayer}") in self.cuts:
                    x, cu_seqlens, rows = self.cuts[site](x, cu_seqlens)
                    kept.append(rows)
                wanted = cu_seqlens[:-1] if (i, sublayer) == narrow else None
                x = getattr(layer, sublayer)(x, cu_seqlens, wanted)
        return self.classifier(self.dropout(self.pooler(x))), kept


class Unpad(nn.Module):
    """Drop the padding and embed what is left: ``(B, S)`` ids to ``(T, H)`` states, cu_seqlens and rows."""

    def __init__(self, embeddings: Embeddings) -> None:
        super().__init__()
        self.embeddings = embeddings

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor, token_type_ids: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        batch, padded = input_ids.shape
        cu_seqlens, rows = pack(attention_mask.sum(1).clamp(min=1), padded)
        positions = torch.arange(padded, device=rows.device).expand(batch, padded)
        ids, position_ids = (t.flatten().index_select(0, rows) for t in (input_ids, positions))
        types = torch.zeros_like(rows) if token_type_ids is None else token_type_ids.flatten().index_select(0, rows)
        return self.embeddings(ids, types, position_ids), cu_seqlens, rows


class PackedAttention(nn.Module):
    """Attention sublayer on packed states, with query, key and value as one matrix product.

    All tokens are attended to; of the result the rows `wanted (B,)` are worked on, or all where it is None.
    """

    def __init__(self, attention: Attention) -> None:
        super().__init__()
        inner = attention.self
        projections = (inner.query, inner.key, inner.value)
        self.num_heads, self.scale = inner.num_heads, inner.scale
        self.qkv = nn.Linear(1, 1, device="meta")  # a shell: its weights are the three projections, joined
        self.qkv.weight = nn.Parameter(torch.cat([p.weight.detach() for p in projections]))
        self.qkv.bias = nn.Parameter(torch.cat([p.bias.detach() for p in projections]))
        self.output = attention.output

    def forward(self, x: Tensor, cu_seqlens: Tensor, wanted: Tensor | None) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, dim=1)
        context = ragged_attention(q, k, v, cu_seqlens.to(torch.int32), self.num_heads, self.scale)
        return self.output(rows_of(context, wanted), rows_of(x, wanted))


class PackedFeedForward(nn.Module):
    def __init__(self, layer: Layer) -> None:
        super().__init__()
        self.intermediate = layer.intermediate
        self.output = layer.output

    def forward(self, x: Tensor, cu_seqlens: Tensor, wanted: Tensor | None) -> Tensor:
        x = rows_of(x, wanted)
        return self.output(self.intermediate(x), x)


class PackedLayer(nn.Module):
    def __init__(self, attention: nn.Module, layer: Layer) -> None:
        super().__init__()
        self.attention = attention
        self.ffn = PackedFeedForward(layer)


class Cut(nn.Module):
    """One site on packed states. The retainer decides; selection, packing and new cu_seqlens are the same for all."""

    def __init__(self, retainer: Retainer) -> None:
        super().__init__()
        self.retainer = retainer

    def forward(self, x: Tensor, cu_seqlens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Cut ``x (T, H)`` with ``cu_seqlens (B+1,) int64``; return states ``(T', H)``, cu_seqlens and rows of x."""
        start = cu_seqlens[:-1]
        lengths = cu_seqlens[1:] - start
        saliency, count = self.decide(x, start, lengths)
        rows, cu_seqlens = survivors(saliency, count, start, lengths)
        return x.index_select(0, rows), cu_seqlens, rows

    def decide(self, x: Tensor, start: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """Return ``saliency (T,)`` and how many tokens each sequence keeps, ``(B,) int64``."""
        count = self.retainer.count(self.retainer.ratio_logits(x.index_select(0, start)), lengths)
        return self.retainer.saliency(x), count


def survivors(saliency: Tensor, count: Tensor, start: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
    """Select [CLS] and the ``count - 1`` other tokens of highest saliency of each packed sequence.

    Args:
        saliency: ``(T,)`` floating; ties go to the lower position, which is TopK's own rule in ONNX.
        count: ``(B,) int64``, from 1 to `lengths`.
        start: ``(B,) int64`` first row of each sequence.
        lengths: ``(B,) int64``.

    Returns:
        ``(T',) int64`` surviving rows in ascending order, and their ``(B+1,) int64`` cu_seqlens.

    Source: checkpoint format 1, "exact semantics of a cut".
    """
    longest, kept_longest = data_size(lengths.max()), data_size(count.max())
    torch._check(kept_longest <= longest)

    column = torch.arange(longest, device=start.device)
    token = start[:, None] + torch.minimum(column, lengths[:, None] - 1)
    score = saliency.index_select(0, token.flatten()).view(token.shape)
    limits = torch.finfo(score.dtype)
    score = score.masked_fill(column >= lengths[:, None], limits.min).masked_fill(column == 0, limits.max)
    best = top_k(score, kept_longest, largest=True)[1]
    surplus = torch.arange(kept_longest, device=start.device) >= count[:, None]
    ascending = top_k(best.masked_fill(surplus, longest), kept_longest, largest=False)[0]

    cu_seqlens, cells = pack(count, kept_longest)
    return (start[:, None] + ascending).flatten().index_select(0, cells), cu_seqlens


def pack(lengths: Tensor, row_size: int) -> tuple[Tensor, Tensor]:
    """Index the live elements of a ``(B, row_size)`` rectangle whose row b holds ``lengths[b] >= 1`` of them first.

    Returns:
        ``(B+1,) int64`` cu_seqlens, and the ``(T,) int64`` flat positions of the live elements. Those grow by 1
        inside a row and jump at each start, so they are a cumulative sum of ones with the jumps scattered in.
    """
    cu_seqlens = nn.functional.pad(lengths.cumsum(0), (1, 0))
    first = torch.arange(lengths.shape[0], device=lengths.device) * row_size
    last = nn.functional.pad(first + lengths - 1, (1, 0))
    steps = torch.ones(data_size(cu_seqlens[-1]), dtype=torch.int64, device=lengths.device)
    return cu_seqlens, steps.scatter(0, cu_seqlens[:-1], first - last[:-1]).cumsum(0)


def rows_of(x: Tensor, wanted: Tensor | None) -> Tensor:
    """Select rows of packed states by ``wanted (n,) int64``; None selects all."""
    return x if wanted is None else x.index_select(0, wanted)


def data_size(value: Tensor) -> int:
    """Read a size that depends on data; sizes here are at least 1, since [CLS] always stays."""
    size: int = value.item()  # not int(): that would fix the size while exporting
    torch._check(size >= 1)
    return size


def top_k(x: Tensor, k: int, largest: bool) -> tuple[Tensor, Tensor]:
    """Sorted TopK of each row whose ties go to the lower index, as ONNX defines it and torch does not."""
    if torch.compiler.is_exporting():
        return x.topk(k, dim=1, largest=largest, sorted=True)
    values, indices = x.sort(dim=1, descending=largest, stable=True)
    return values[:, :k], indices[:, :k]
