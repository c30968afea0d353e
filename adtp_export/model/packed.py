"""The packed loop over layers and sites: the same weights without padding. This is the network that is exported.

Token states are ``(T, H)`` with ``cu_seqlens (B+1,)`` from before layer 0, so even the layers before the first cut pay for
real tokens only. A cut gathers the surviving rows once; scores and indices alone are ever re-padded. After its attention
and all cuts the last layer works for the one token of each text alone that the head reads, where it reads no others.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import cast

import torch
from torch import Tensor, nn

from ..contract import FROM_OTHERS, OUTPUTS, PRODUCTS, RECEIVED, SEQUENCE, product
from ..ops.disentangled_attention import ragged_attention_disentangled
from ..ops.grouped_attention import ragged_attention_grouped, ragged_attention_grouped_received
from ..ops.ragged_attention import (
    ragged_attention,
    ragged_attention_from_others,
    ragged_attention_received,
    ragged_attention_relative,
    ragged_attention_window,
)
from .backbones.base import AttentionParts, FeedForwardParts
from .encoder import PrunedEncoder
from .joined import PackedFeedForward, joined
from .padded import SUBLAYERS, layers_read
from .positions import DistanceTable, at
from .pruners import Pruner, Seen
from .selection import Rule
from .sequences import Keys, Packed, pack, places, rightmost, rising, rows_of, strung


class PackedStudent(nn.Module):
    """Packed form of a student; shares its weights (those of query, key and value become one matrix) and its mode.

    Args:
        attention: makes a packed attention sublayer of its parts; training passes one with gradients.
        cut: makes a cut of a pruner; training passes one that remembers what was decided.
    """

    def __init__(
        self,
        student: PrunedEncoder,
        attention: Callable[[AttentionParts, str | None], nn.Module] | None = None,
        cut: Callable[[Pruner], Cut] | None = None,
    ) -> None:
        super().__init__()
        backbone, attention, cut = student.backbone, attention or PackedAttention, cut or Cut
        self.unpad = Unpad(backbone.embeddings, student.expansion)
        self.cuts = nn.ModuleDict({site: cut(cast(Pruner, pruner)) for site, pruner in student.pruners.items()})
        read = layers_read(student.pruners)
        self.layers = nn.ModuleList(
            PackedLayer(attention(student.attention(i), read.get(i)), backbone.feed_forward(i))
            for i in range(backbone.num_layers)
        )
        # Layers that share a bias share its table, so that a graph has it once.
        tables: dict[nn.Module | None, DistanceTable] = {}
        for i, layer in enumerate(cast("Iterable[PackedLayer]", self.layers)):
            if isinstance(layer.attention, PackedAttention) and layer.attention.bias is not None:
                layer.attention.bias = tables.setdefault(backbone.attention(i).bias, layer.attention.bias)
        self.finish, self.head, self.reads_first = backbone.finish, student.packed_head(), student.reads_first
        self.reads_last, self.pad = student.reads_last, student.dense.config.pad_token_id
        self.keeps_last = student.keeps_last and len(self.cuts) > 0
        self.asked = student.asked_id
        self.restores_dropped = student.restores_dropped
        self.training = student.training  # its modules are the student's, which stay in the mode they are in

    @property
    def reads_one(self) -> bool:
        """Whether the head reads one token of each text."""
        return self.reads_first or self.reads_last

    @property
    def products(self) -> dict[str, nn.Linear]:
        """The matrix products of all layers, by the names they have in the graph."""
        names = [product(i, place) for i in range(len(self.layers)) for place in PRODUCTS]
        return {name: cast(nn.Linear, self.get_submodule(name)) for name in names}

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor, token_type_ids: Tensor | None = None
    ) -> tuple[tuple[Tensor, ...], list[Tensor]]:
        """Answer a right-padded batch of int64 ``(B, S)`` inputs; a row without live tokens counts as one token.

        Returns:
            The outputs of the head (`contract.OUTPUTS`) and which rows lived on: first the ``(T,) int64`` rows of the flattened
            ``(B*S,)`` input, then for each site the ``(T',) int64`` rows of the packed states before its cut.
        """
        tokens = self.unpad(input_ids, attention_mask, token_type_ids)
        if self.reads_last or self.keeps_last or self.asked is not None:
            tokens = self.find_read(tokens, input_ids.flatten().index_select(0, tokens.origin))
        return self.run(tokens, input_ids.shape)

    def find_read(self, tokens: Packed, ids: Tensor) -> Packed:
        """Find the token of each text that the head reads, or that stays, where that is not the first; and those that it answers for, where
        these are not all. ``ids (T,) int64`` are packed.
        """
        if self.asked is not None:
            return tokens._replace(asked=ids == self.asked)
        if not (self.reads_last or self.keeps_last):
            return tokens
        if tokens.keys is not None:  # no head that reads one token has these
            return tokens._replace(read=tokens.keys.rows.index_select(0, tokens.keys.cu_seqlens[1:] - 1))
        real = ids != self.pad if self.reads_last and self.pad is not None else None
        return tokens._replace(read=rightmost(tokens, real))

    def run(
        self, tokens: Packed, shape: torch.Size | None, ends: list[Tensor] | None = None
    ) -> tuple[tuple[Tensor, ...], list[Tensor]]:
        """Answer embedded tokens, as `forward` does.

        Args:
            shape: of the input, as `restore` takes it.
            ends: takes the last of `cu_seqlens` after each cut, ``(1,) int64``: how many tokens stay.
        """
        whole, kept, at_input = tokens, [tokens.origin], tokens.attended.lengths
        reached: list[Tensor] = []  # the states that came to each cut, or entered its layer
        entered = tokens.states
        received: Tensor | None = None
        end = len(self.layers) - 1
        narrow = (end, "ffn" if f"{end}_ffn" in self.cuts else "attention") if self.reads_one else None
        for i, layer in enumerate(cast("Iterable[PackedLayer]", self.layers)):
            for sublayer in SUBLAYERS:
                if (site := f"{i}_{sublayer}") in self.cuts:
                    rows, cu_seqlens = self.cuts[site](tokens.attended, at_input, received)
                    received = received if received is None else received.index_select(0, rows)
                    restores_entered = sublayer == "ffn" and cast(Cut, self.cuts[site]).pruner.restores_entered
                    reached.append(entered if restores_entered else tokens.states)
                    if tokens.keys is None:
                        tokens = tokens.gather(rows, cu_seqlens)
                    else:
                        tokens, rows = tokens.gather_keys(rows, cu_seqlens)
                    kept.append(rows)
                    if ends is not None:
                        ends.append(cu_seqlens[-1:])
                wanted = (tokens.start if tokens.read is None else tokens.read) if (i, sublayer) == narrow else None
                if sublayer == "attention":
                    entered = tokens.states
                    x, received = layer.attention(tokens, wanted)
                else:
                    x = layer.ffn(tokens.states, wanted)
                tokens = tokens._replace(states=x)
        if self.reads_one:
            return (self.head(self.finish(tokens.states)),), kept
        if not self.restores_dropped:
            return self.head(tokens._replace(states=self.finish(tokens.states)), shape), kept
        states = tokens.states
        for before, rows in zip(reversed(reached), reversed(kept[1:])):
            states = self.put_back(before, rows, states)
        return self.head(whole._replace(states=self.finish(states)), shape), kept

    def put_back(self, before: Tensor, rows: Tensor, states: Tensor) -> Tensor:
        """Put the states of survivors into those from before their cut."""
        return before.index_copy(0, rows, states)


class PackedInputs(PackedStudent):
    """The same network for texts that come packed: nobody builds a rectangle, and outputs for each token are packed, too."""

    def __init__(self, student: PrunedEncoder, cut: Callable[[Pruner], Cut] | None = None) -> None:
        super().__init__(student, cut=cut)
        self.of_texts = [SEQUENCE not in axes for axes in OUTPUTS[student.config.head].values()]

    def forward(
        self, input_ids: Tensor, cu_seqlens: Tensor, token_type_ids: Tensor | None = None
    ) -> tuple[tuple[Tensor, ...], list[Tensor]]:
        """Answer ids and types ``(T,) int64``, one text after the other, and their bounds ``(B+1,) int32``, as `rising` reads them.

        Returns:
            As of `PackedStudent`: the outputs have zeros for texts without tokens, and for tokens without a text. The first rows
            are those of the input itself, and T for each text without tokens.
        """
        bounds = rising(cu_seqlens, input_ids.shape[0])
        lengths = bounds[1:] - bounds[:-1]
        # A text without tokens has one of its own in here, so that nothing further in has to know of such texts.
        first = torch.where(lengths > 0, bounds[:-1], input_ids.shape[0])
        own = lengths.clamp(min=1)
        cu_seqlens = nn.functional.pad(own.cumsum(0), (1, 0))
        rows = strung(first, own, cu_seqlens)
        ids, types = (
            torch.zeros_like(rows) if t is None else torch.cat([t, t.new_zeros(1)]).index_select(0, rows)
            for t in (input_ids, token_type_ids)
        )
        positions = places(cu_seqlens, rows.shape[0])
        states = self.unpad.embeddings(ids, types, positions)
        answers, kept = self.run(self.find_read(Packed(states, cu_seqlens, positions, rows), ids), input_ids.shape)
        return self.blank(answers, lengths), kept

    def blank(self, answers: tuple[Tensor, ...], lengths: Tensor) -> tuple[Tensor, ...]:
        """Put zeros into what is answered for texts of no tokens: ``lengths (B,)``."""
        some = lengths > 0
        return tuple(
            torch.where(some.view(-1, *[1] * (x.ndim - 1)), x, 0) if of_texts else x
            for x, of_texts in zip(answers, self.of_texts)
        )


@contextlib.contextmanager
def in_eval_mode(student: nn.Module) -> Iterator[None]:
    """Switch dropout off for the time of a block; each module gets its own mode back."""
    modes = [(module, module.training) for module in student.modules()]
    student.eval()
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode


class Unpad(nn.Module):
    """Drop the padding and embed what is left: ``(B, S)`` ids to packed states."""

    def __init__(self, embeddings: nn.Module, expansion: int | None) -> None:
        super().__init__()
        self.embeddings, self.expansion = embeddings, expansion

    def forward(self, input_ids: Tensor, attention_mask: Tensor, token_type_ids: Tensor | None) -> Packed:
        batch, padded = input_ids.shape
        lengths = whole = attention_mask.sum(1).clamp(min=1)
        if self.expansion is not None:
            further = ((input_ids == self.expansion) & (attention_mask == 0)).sum(1)
            whole = torch.maximum(attention_mask.sum(1) + further, lengths)
        cu_seqlens, rows = pack(whole, padded)
        keys = None if self.expansion is None else Keys.first(lengths, cu_seqlens)
        places = torch.arange(padded, device=rows.device).expand(batch, padded)
        ids, positions = (t.flatten().index_select(0, rows) for t in (input_ids, places))
        types = torch.zeros_like(rows) if token_type_ids is None else token_type_ids.flatten().index_select(0, rows)
        return Packed(self.embeddings(ids, types, positions), cu_seqlens, positions, rows, keys=keys)


class PackedAttention(nn.Module):
    """Attention sublayer on packed states, with query, key and value as one matrix product.

    All tokens are attended to; of the result the rows `wanted (B,)` are worked on, or all where it is None.

    Args:
        received: also say what attention each token received: `RECEIVED` from all, or `FROM_OTHERS`.
    """

    def __init__(self, parts: AttentionParts, received: str | None) -> None:
        super().__init__()
        self.num_heads, self.scale, self.received = parts.heads, parts.scale, received
        self.before, self.output, self.reach = parts.before, parts.output, parts.reach
        self.kv_heads, self.grouped = parts.key_heads, parts.grouped
        self.norms = None if parts.norms is None else nn.ModuleList(parts.norms)
        self.rotate, self.bias = (
            parts.rotate,
            None if parts.bias is None else DistanceTable(parts.bias.table().detach()),
        )
        self.distances = None if parts.distances is None else parts.distances.constant()
        self.qkv = nn.Linear(1, 1, device="meta")  # a shell: its weights are the three projections, joined
        for name in ("weight", "bias"):
            setattr(self.qkv, name, joined(parts.projections, name))

    def forward(self, tokens: Packed, wanted: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Return the states after the sublayer, and what each token received; None unless that is asked for."""
        x = tokens.states
        qkv = self.qkv(self.before(x))
        if self.grouped:
            context, received = self.attend_grouped(qkv, tokens, wanted)
            return self.output(context, rows_of(x, wanted)), received
        if self.norms is not None:
            q, k, v = self.split(qkv, tokens.positions, None, None)
        elif self.rotate is not None:
            heads, v = qkv.split([qkv.shape[1] // 3 * 2, qkv.shape[1] // 3], dim=1)
            turned = self.rotate(heads.unflatten(1, (2 * self.num_heads, -1)), tokens.positions)
            q, k = turned.flatten(1).chunk(2, dim=1)
        else:
            q, k, v = qkv.chunk(3, dim=1)
        context, received = self.attend((q, k, v, tokens.cu_seqlens.to(torch.int32)), tokens.positions)
        return self.output(rows_of(context, wanted), rows_of(x, wanted)), received if self.received else None

    def attend_grouped(self, qkv: Tensor, tokens: Packed, wanted: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Attend from the rows `wanted`, one of each text, or from all; also return what each token received, if that is asked for."""
        cu_q, positions_q = tokens.cu_seqlens.to(torch.int32), tokens.positions.to(torch.int32)
        seen = None if tokens.keys is None else tokens.keys.rows
        cu_k = cu_q if tokens.keys is None else tokens.keys.cu_seqlens.to(torch.int32)
        positions_k = rows_of(positions_q, seen)
        if wanted is not None:
            cu_q = torch.arange(wanted.shape[0] + 1, dtype=torch.int32, device=wanted.device)
            positions_q = rows_of(positions_q, wanted)
        q, k, v = self.split(qkv, tokens.positions, wanted, seen)
        groups = (self.num_heads, self.kv_heads, self.scale, *self.reach)
        arguments = (q, k, v, cu_q, cu_k, positions_q, positions_k)
        if self.received:
            return ragged_attention_grouped_received(*arguments, *groups)
        return ragged_attention_grouped(*arguments, *groups), None

    def split(
        self, qkv: Tensor, positions: Tensor, wanted: Tensor | None, seen: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries ``(T, N*D)``, of the rows `wanted` alone, keys and values ``(T, kv_heads*D)``, of the rows `seen` alone, as
        `AttentionParts.heads_of` does.
        """
        size = qkv.shape[1] // (self.num_heads + 2 * self.kv_heads)
        q, k, v = qkv.split([self.num_heads * size, self.kv_heads * size, self.kv_heads * size], dim=1)
        q, k = (
            rows_of(x, rows).unflatten(1, (heads, size))
            for x, rows, heads in ((q, wanted, self.num_heads), (k, seen, self.kv_heads))
        )
        if self.norms is not None:
            q, k = self.norms[0](q), self.norms[1](k)
        if self.rotate is not None:
            q, k = self.rotate(q, rows_of(positions, wanted)), self.rotate(k, rows_of(positions, seen))
        return q.flatten(1), k.flatten(1), rows_of(v, seen)

    def attend(
        self, arguments: tuple[Tensor, Tensor, Tensor, Tensor], positions: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """Call the operator that this sublayer needs, with ``q, k, v`` and ``cu_seqlens (B+1,) int32``."""
        heads = (self.num_heads, self.scale)
        if self.bias is not None:
            table = at(self.bias(), arguments[0].device, arguments[0].dtype)
            return ragged_attention_relative(*arguments, positions.to(torch.int32), table, *heads)
        if self.distances is not None:
            tables = self.distances(arguments[0])
            return ragged_attention_disentangled(*arguments, positions.to(torch.int32), *tables, *heads)
        if self.reach != (-1, -1):
            return ragged_attention_window(*arguments, positions.to(torch.int32), *heads, self.reach[0])
        if self.received == FROM_OTHERS:
            return ragged_attention_from_others(*arguments, *heads)
        if self.received == RECEIVED:
            return ragged_attention_received(*arguments, *heads)
        return ragged_attention(*arguments, *heads), None


class PackedLayer(nn.Module):
    """Both sublayers, under the names that their matrix products have in the graph."""

    def __init__(self, attention: nn.Module, ffn: FeedForwardParts) -> None:
        super().__init__()
        self.attention = attention
        self.ffn = PackedFeedForward(ffn)


class Cut(nn.Module):
    """One site on packed states: the pruner decides, its rule selects."""

    def __init__(self, pruner: Pruner) -> None:
        super().__init__()
        self.pruner = pruner

    def forward(self, tokens: Packed, at_input: Tensor, received: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the ``(T',) int64`` rows that stay and their ``(B+1,) int64`` cu_seqlens.

        Args:
            at_input: ``(B,) int64``, tokens before the first site.
            received: ``(T,)``, attention received in the layer before; None where the pruner does not read it.
        """
        return self.select(self.decide(self.see(tokens, at_input, received), tokens), tokens)

    def see(self, tokens: Packed, at_input: Tensor, received: Tensor | None) -> Seen:
        """Return what the pruner may look at."""
        lengths = tokens.lengths
        read = tokens.states.index_select(0, tokens.start if tokens.read is None else tokens.read)
        return Seen(tokens.states, read, lengths, at_input, received)

    def select(self, rule: Rule, tokens: Packed) -> tuple[Tensor, Tensor]:
        """Return what stays by a rule, as `forward` does."""
        return rule.packed(tokens.cu_seqlens)

    def decide(self, seen: Seen, tokens: Packed) -> Rule:
        """Return what the pruner says; training writes it down, or puts something else in its place."""
        rule: Rule = self.pruner(seen)
        return rule.keeping(tokens.read, tokens.start)
