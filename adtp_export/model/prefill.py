"""A decoder as two networks: `Prefill` reads packed prompts, whose image tokens leave on the way, and `Step` adds a token to each.

Every layer's keys and values have the length of what entered it. Layers between two stages share their bounds and positions, which are
named after the first of them. The cache of a text goes on where its last token is.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn

from ..ops.grouped_attention import ragged_attention_grouped
from .backbones.base import AttentionParts, FeedForwardParts
from .decoder import Decoder
from .image_pruners import SeenImage, Stage
from .image_tokens import ImageTokens, repeated
from .packed import PackedAttention, PackedFeedForward
from .sequences import Packed, at_least_fp32, places, rising, rows_of


class Entered(NamedTuple):
    """Tokens that enter the layers from one stage on. cu_seqlens: ``(B+1,) int64``. positions, rows: ``(T',) int64``, which turn queries
    and keys, and where the tokens are in the prompts. Positions of several axes are ``(T', axes)``.
    """

    cu_seqlens: Tensor
    positions: Tensor
    rows: Tensor


class Asked(nn.Module):
    """What last tokens ask of the keys of their texts. A module, so that its nodes are called `contract.ASKED` and stay in fp32."""

    def __init__(self, heads: int, kv_heads: int, scale: float) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.scale = heads, kv_heads, scale

    def forward(self, last: Tensor, k: Tensor, cu_seqlens: Tensor, softmax: bool) -> Tensor:
        """Return what the queries ``last (B, N*D)`` give the keys ``k (T, kv_heads*D)`` of their texts, mean over heads: ``(T,) fp32``."""
        queries, keys = at_least_fp32(last), at_least_fp32(k)
        size = self.heads // self.kv_heads
        by_head = queries.unflatten(1, (self.kv_heads, size, -1)).permute(1, 0, 2, 3)  # (KV, B, G, D)
        scores = by_head.flatten(1, 2) @ keys.unflatten(1, (self.kv_heads, -1)).permute(1, 2, 0) * self.scale
        scores = scores.unflatten(1, (-1, size))  # (KV, B, G, T)
        row = torch.arange(k.shape[0], device=k.device)
        inside = (row >= cu_seqlens[:-1, None]) & (row < cu_seqlens[1:, None])
        if softmax:
            scores = scores.masked_fill(~inside[:, None], torch.finfo(scores.dtype).min).softmax(-1)
        return scores.mean((0, 2)).masked_fill(~inside, 0).sum(0)


class CachedAttention(PackedAttention):
    """Attention sublayer that also returns keys and values, and what the last token asks of the keys.

    Args:
        asks: the stage after this layer that wants to know; None: none does.
    """

    def __init__(self, parts: AttentionParts, asks: Stage | None = None) -> None:
        super().__init__(parts, None)
        self.asks = asks
        self.asked = Asked(self.num_heads, self.kv_heads, self.scale)

    def forward(  # type: ignore[override]
        self, tokens: Packed, wanted: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Return the states of the rows `wanted` after the sublayer, keys and values ``(T, kv_heads*D)``, and what was asked, ``(T,)``."""
        q, k, v = self.projected(tokens, wanted)
        cu_k, cu_q = tokens.cu_seqlens.to(torch.int32), tokens.cu_seqlens.to(torch.int32)
        # Without a window, order decides what is seen: of two copies of a token, the second sees the first. With a window, positions
        # decide, so each copy sees the other.
        seen = tokens.positions if self.reach[0] >= 0 else places(tokens.cu_seqlens, tokens.states.shape[0])
        positions_k = seen.to(torch.int32)
        if wanted is not None:
            cu_q = torch.arange(wanted.shape[0] + 1, dtype=torch.int32, device=wanted.device)
        groups = (self.num_heads, self.kv_heads, self.scale, *self.reach)
        context = ragged_attention_grouped(q, k, v, cu_q, cu_k, rows_of(positions_k, wanted), positions_k, *groups)
        asked = self.asked(rows_of(q, tokens.last), k, tokens.cu_seqlens, self.asks.softmax) if self.asks else None
        return self.output(context, rows_of(tokens.states, wanted)), k, v, asked

    def projected(self, tokens: Packed, wanted: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries of the rows `wanted`, or of all, and keys and values."""
        qkv = self.qkv(self.before(tokens.states))
        return self.split(qkv, tokens.positions, wanted, None)

    def step(
        self, x: Tensor, entered: Entered, past: tuple[Tensor, Tensor], order: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Add one token ``x (B, H)`` to each text; return its states, and all keys and values ``(T+B, kv_heads*D)``.

        Args:
            entered: with the new tokens. past: keys and values without them. order: rows of these, and then of the new ones, in place.
        """
        new = entered.cu_seqlens[1:] - 1
        positions = entered.positions.index_select(0, new)
        q, k, v = self.split(self.qkv(self.before(x)), positions, None, None)
        k, v = (torch.cat([before, now]).index_select(0, order) for before, now in zip(past, (k, v)))
        cu_q = torch.arange(x.shape[0] + 1, dtype=torch.int32, device=x.device)
        # The first axis never falls, and so it says what comes before what.
        first = entered.positions if entered.positions.dim() == 1 else entered.positions[:, 0]
        cu_k, positions_k = entered.cu_seqlens.to(torch.int32), first.to(torch.int32)
        groups = (self.num_heads, self.kv_heads, self.scale, *self.reach)
        context = ragged_attention_grouped(q, k, v, cu_q, cu_k, positions_k.index_select(0, new), positions_k, *groups)
        return self.output(context, x), k, v


class CachedLayer(nn.Module):
    """Both sublayers, under the names that their matrix products have in the graph."""

    def __init__(self, attention: AttentionParts, ffn: FeedForwardParts, asks: Stage | None = None) -> None:
        super().__init__()
        self.attention = CachedAttention(attention, asks)
        self.ffn = PackedFeedForward(ffn)


class ImageCut(nn.Module):
    """A stage on packed states."""

    spread: Tensor

    def __init__(self, stage: Stage, spread: Tensor) -> None:
        super().__init__()
        self.stage = stage
        self.register_buffer("spread", spread, persistent=False)

    def forward(
        self, tokens: Packed, image: Tensor, asked: Tensor, at_input: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the ``(T',) int64`` rows that follow, their ``(B+1,) int64`` bounds, and the image tokens before the first stage.

        Args:
            image: ``(T,) bool``. asked: ``(T,)``. at_input: ``(B,) int64``; None at the first stage.
        """
        found = ImageTokens.of(image, tokens.cu_seqlens)
        at_input = found.counts if at_input is None else at_input
        place = torch.arange(found.live.shape[1], device=image.device) % len(self.spread)
        states, spread = found.of_rows(tokens.states), self.spread.index_select(0, place)
        seen = SeenImage(found.of_rows(asked), states, found.live, found.counts, at_input, spread)
        rows, cu_seqlens = repeated(found.copied(self.stage.copies(seen), image.shape[0]), tokens.cu_seqlens)
        return rows, cu_seqlens, at_input


class Prefill(nn.Module):
    """A decoder on packed prompts; it shares the weights of `Decoder`."""

    def __init__(self, decoder: Decoder) -> None:
        super().__init__()
        backbone = decoder.backbone
        before = {stage.layer - 1: stage for stage in decoder.stages if not stage.own_layer}
        self.layers = nn.ModuleList(
            CachedLayer(backbone.attention(i), backbone.feed_forward(i), before.get(i))
            for i in range(backbone.num_layers)
        )
        self.image_cuts = nn.ModuleDict({str(stage.layer): ImageCut(stage, decoder.spread) for stage in decoder.stages})
        self.finish, self.head = backbone.finish, decoder.head

    def forward(self, inputs_embeds: Tensor, cu_seqlens: Tensor, image: Tensor | None = None) -> tuple[Tensor, ...]:
        """Read prompts ``inputs_embeds (T, H)`` with bounds ``(B+1,) int32``; image ``(T,) bool`` says which tokens may leave.

        The last token of a prompt stays. A position is a token's place in its prompt.

        Returns:
            Logits ``(B, V)`` of the token after each prompt; the three of `Entered` at layer 0 and at each stage; keys and values
            ``(T_i, kv_heads, D)`` of each layer.
        """
        bounds = rising(cu_seqlens, inputs_embeds.shape[0])
        return self.read(inputs_embeds, bounds, places(bounds, inputs_embeds.shape[0]), image)

    def read(
        self, inputs_embeds: Tensor, bounds: Tensor, positions: Tensor, image: Tensor | None
    ) -> tuple[Tensor, ...]:
        """Read prompts with bounds ``(B+1,) int64`` and positions ``(T,)``, or ``(T, axes)``, ``int64``."""
        rows = torch.arange(inputs_embeds.shape[0], device=inputs_embeds.device)
        tokens, entered, cache = Packed(inputs_embeds, bounds, positions, rows), [Entered(bounds, positions, rows)], []
        if self.image_cuts:  # the answer begins at the last token, so it stays
            assert image is not None
            image = image.scatter(0, tokens.last, torch.zeros_like(tokens.last, dtype=torch.bool))
        asked = at_input = None
        for i, layer in enumerate(cast("Iterable[CachedLayer]", self.layers)):
            if str(i) in self.image_cuts:
                assert image is not None
                cut = cast(ImageCut, self.image_cuts[str(i)])
                asked = self.ask(layer.attention, tokens) if cut.stage.own_layer else asked
                assert asked is not None
                rows, bounds, at_input = cut(tokens, image, asked, at_input)
                tokens, image = tokens.gather(rows, bounds), image.index_select(0, rows)
                if cut.stage.renumbers and positions.dim() == 1:
                    tokens = tokens._replace(positions=places(bounds, rows.shape[0]))
                entered.append(Entered(bounds, tokens.positions, tokens.origin))
            wanted = tokens.last if i == len(self.layers) - 1 else None
            x, k, v, asked = layer.attention(tokens, wanted)
            cache += [t.unflatten(1, (layer.attention.kv_heads, -1)) for t in (k, v)]
            tokens = tokens._replace(states=layer.ffn(x, None))
        logits = self.head(self.finish(tokens.states))
        return logits, *(each for group in entered for each in group), *cache

    def ask(self, attention: CachedAttention, tokens: Packed) -> Tensor:
        """Return what the last tokens ask of the keys that this sublayer would make of all tokens."""
        q, k, _ = attention.projected(tokens, None)
        result: Tensor = attention.asked(rows_of(q, tokens.last), k, tokens.cu_seqlens, softmax=True)
        return result


class PlacedPrefill(Prefill):
    """The same for positions of several axes. They depend on the sizes of pictures, so they are an input; no stage numbers them anew."""

    def forward(  # type: ignore[override]
        self, inputs_embeds: Tensor, cu_seqlens: Tensor, positions: Tensor, image: Tensor | None = None
    ) -> tuple[Tensor, ...]:
        """Read prompts as `Prefill` does, with ``positions (axes, T) int64``."""
        return self.read(inputs_embeds, rising(cu_seqlens, inputs_embeds.shape[0]), positions.transpose(0, 1), image)


def prefill_of(decoder: Decoder) -> Prefill:
    """Return what reads prompts."""
    return PlacedPrefill(decoder) if decoder.backbone.axes > 1 else Prefill(decoder)


class Step(nn.Module):
    """A decoder that adds one token to each text.

    Args:
        decoder: shares its weights.
    """

    def __init__(self, decoder: Decoder) -> None:
        super().__init__()
        backbone = decoder.backbone
        self.embeddings = decoder.embeddings
        self.layers = nn.ModuleList(
            CachedLayer(backbone.attention(i), backbone.feed_forward(i)) for i in range(backbone.num_layers)
        )
        self.first_layers = decoder.first_layers
        self.finish, self.head = backbone.finish, decoder.head

    def forward(self, input_ids: Tensor, past: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Read ``input_ids (B,) int64`` behind what was read before.

        Args:
            past: cu_seqlens and positions at layer 0 and at each stage; then keys and values of each layer.

        Returns:
            Logits ``(B, V)``, and `past` with these tokens.
        """
        groups, cache = past[: 2 * len(self.first_layers)], past[2 * len(self.first_layers) :]
        longer = [self.longer(*groups[i : i + 2]) for i in range(0, len(groups), 2)]
        x, result = self.embeddings(input_ids), []
        group = -1
        for i, layer in enumerate(cast("Iterable[CachedLayer]", self.layers)):
            group += i in self.first_layers
            before = (cache[2 * i].flatten(1), cache[2 * i + 1].flatten(1))
            x, k, v = layer.attention.step(x, longer[group][0], before, longer[group][1])
            result += [t.unflatten(1, (layer.attention.kv_heads, -1)) for t in (k, v)]
            x = layer.ffn(x, None)
        bounds = [each for entered, _ in longer for each in (entered.cu_seqlens, entered.positions)]
        return self.head(self.finish(x)), *bounds, *result

    def longer(self, cu_seqlens: Tensor, positions: Tensor) -> tuple[Entered, Tensor]:
        """Add a token to each text; also return which rows of the old tokens, and then of the new ones, come where: ``(T+B,) int64``."""
        tokens, texts = positions.shape[0], cu_seqlens.shape[0] - 1
        row, text = (torch.arange(n, device=positions.device) for n in (tokens, texts))
        own_text = (row[:, None] >= cu_seqlens[1:]).sum(1)
        new = cu_seqlens[1:] + text
        place = torch.cat([row + own_text, new])
        order = torch.zeros_like(place).scatter(0, place, torch.arange(tokens + texts, device=positions.device))
        following = positions.index_select(0, (cu_seqlens[1:] - 1).clamp(min=0)) + 1
        if positions.dim() == 2:  # text goes on behind the farthest axis
            following = following.amax(1, keepdim=True).expand_as(following)
        bounds = cu_seqlens + torch.arange(texts + 1, device=positions.device)
        return Entered(bounds, torch.cat([positions, following]).index_select(0, order), order), order
