"""From a description of an encoder to a plan: launches for each size of a call, from padded ids to answers, nothing read back.

A layer is seven launches: a product, attention, a product and the norm that adds its parts and the residual; then a product with
GELU, a product and a norm. `prenorms` has layers with norms before their sublayers, of eight. A cut is two, scores and choice; where
scores are what tokens received, it is one, and two more in the layer before; where last tokens stay, too, it is one more. Nobody gathers
rows after a cut: the next product and the next residual read them by their index.

A classifier reads first rows alone, and so does the last layer after its attention. So a cut there decides nothing, and is not
launched. Other heads read all tokens: states that came to a cut stay where they are, and at the end one launch for each cut, the last
one first, puts those of survivors back among them.

How many rows are alive is known on the device alone, at the end of the `cu_seqlens` of the time, which have a place for each text of
the bucket. Buckets are powers of two of tokens, padding included.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace

import numpy as np

from ..plan import INPUT, LENGTH, TEXTS, Bucket, Plan, Pointer
from . import grids, heads, prenorms
from .checks import checked
from .cuts import Bounds, cut
from .description import GELU, NONE, Classifier, Embeddings, Encoder, GatedLayer, Layer, RmsNorm, reads_received
from .launches import INT32, NOTHING, Launches, Rows, Sizes, States, Weights, width

USUAL = Sizes()


@dataclass(frozen=True)
class Planned:
    """weights: what the runner of the plan takes.

    Inputs are input_ids, attention_mask and, where the model tells them apart, token_type_ids: ``(B, S) int64``, padded on the right.
    Outputs are those of the head, as `contract.OUTPUTS` has them.
    """

    plan: Plan
    weights: tuple[np.ndarray, ...]


def make(encoder: Encoder, dtype: str, sizes: Sizes = USUAL) -> Planned:
    """Plan an encoder.

    Args:
        dtype: "fp16", "bf16" or "fp32", of weights and states. What decides about tokens stays in fp32.

    Raises:
        InputError: there is no kernel for a part of it, which the message names.
    """
    encoder, weights = checked(encoder, dtype), Weights(dtype)
    buckets = []
    for tokens in sizes.buckets:
        launches = Launches(dtype, weights, tokens, encoder.longest, sizes)
        network = _Network if isinstance(encoder.embeddings, Embeddings) else _GatedNetwork
        buckets.append(network(encoder, launches).bucket())
    arrays = tuple(weights.arrays)
    return Planned(Plan(tuple(array.nbytes for array in arrays), tuple(buckets)), arrays)


def launches_by_part(bucket: Bucket) -> dict[str, int]:
    """Count launches of each part: the first two words of a note, such as "layer 3" or "cut 0.ffn"."""
    return dict(Counter(" ".join(launch.note.split(" ")[:2]) for launch in bucket.launches))


class _Network:
    """Writes one bucket's launches. `bounds` and `received`, what tokens received last, are those of the time; `reached` are the states
    that are to be put back among, and after each the survivors."""

    def __init__(self, encoder: Encoder, launches: Launches) -> None:
        self.encoder, self.launches = encoder, launches
        self.tokens = launches.tokens
        at_input = launches.bounds()
        self.bounds = Bounds(launches.take(1, dtype=INT32), at_input, at_input)
        self.received: Pointer | None = None
        self.reads_first = isinstance(encoder.head, Classifier)
        self.reached: list[tuple[States, States]] = []

    def bucket(self) -> Bucket:
        self.unpad()
        states = self.states()
        heads.answer(self.launches, self.encoder, states, self.bounds)
        return Bucket(
            tokens=self.tokens,
            texts=self.launches.texts,
            workspace=self.launches.arena.nbytes,
            inputs=(8 * self.tokens,) * (3 if self.encoder.embeddings.typed else 2),
            outputs=heads.outputs(self.encoder, self.tokens, self.launches.texts),
            launches=tuple(self.launches.done),
        )

    def states(self) -> States:
        """Return what the head reads."""
        states = self.embed()
        for i, layer in enumerate(self.encoder.layers):
            assert isinstance(layer, Layer)
            states = self.layer(i, layer, states)
        return self.put_back(states)

    def put_back(self, states: States) -> States:
        """Put the states of survivors back among those that came to their cuts."""
        for before, survivors in reversed(self.reached):
            hidden = self.encoder.layers[0].qkv.weight.shape[1]
            states = heads.put_back(self.launches, hidden, states, before, survivors)
        return states

    def unpad(self) -> None:
        ends = self.launches.take(self.launches.texts, dtype=INT32)
        self.launches.launch(
            "unpad", 1, "unpad", attention_mask=Pointer(INPUT, 0, 1), ends=ends, cu_seqlens=self.bounds.now, texts=self.bounds.texts,
            batch=TEXTS, padded=LENGTH, num_rows=self.tokens, num_texts=self.launches.texts,
        )  # fmt: skip
        self.launches.arena.give(ends)

    def embed(self) -> States:
        own, launches, weights = self.encoder.embeddings, self.launches, self.launches.weights
        assert isinstance(own, Embeddings)
        hidden = own.words.shape[1]
        out, origin = launches.take(self.tokens, hidden), launches.take(self.tokens, dtype=INT32)
        launches.launch(
            f"embed-{launches.dtype}-{width(hidden)}", grids.of_rows(self.tokens, launches.processors), "embed",
            input_ids=Pointer(INPUT), token_type_ids=Pointer(INPUT, 0, 2) if own.typed else NOTHING, cu_seqlens=self.bounds.now,
            words=weights(own.words), types=weights(own.types), places=weights(own.places), weight=weights(own.norm.weight),
            norm_bias=weights(own.norm.bias), out=out, origin=origin, batch=TEXTS, padded=LENGTH, num_rows=self.tokens, hidden=hidden,
            num_words=len(own.words), num_types=len(own.types), num_places=len(own.places), first_place=own.first_place,
            typed=int(own.typed), eps=own.norm.eps,
        )  # fmt: skip
        launches.arena.give(origin)  # nobody asks where rows come from: texts begin where `cu_seqlens` says
        states = States(at=out, size=self.tokens, rows=Rows(self.tokens, launches.live(self.bounds.now), self.tokens))
        if own.projection is None:
            return states
        projected = launches.product(states, own.projection, NONE, "embed projection")
        launches.give(states)
        return replace(states, at=projected)

    def layer(self, i: int, layer: Layer, states: States) -> States:
        launches, name, entered = self.launches, f"layer {i}", self.bounds.now
        states = self.cut(f"{i}.attention", states)
        at_entry = states
        if self.restores_entered(i):
            launches.kept.add(states.at)
        bounds = self.bounds.now
        qkv = launches.product(states, layer.qkv, NONE, f"{name} qkv")
        if self.tells_received(i):
            self.received = launches.received(qkv, layer, bounds, f"{name} attention")
        attended = launches.attention(qkv, layer, bounds, f"{name} attention")
        context = States(at=attended, size=self.tokens, rows=states.rows)
        launches.arena.give(qkv)
        if i == len(self.encoder.layers) - 1 and self.reads_first:
            first = Rows(launches.texts, self.bounds.texts, min(launches.texts, launches.usual_texts))
            context = replace(context, index=bounds, rows=first)
            states = replace(states, index=entered, rows=first)  # a text's first row has stayed its first one
        states = launches.end(context, layer.output, layer.attention_norm, states, f"{name} attention")
        states = self.cut(f"{i}.ffn", states, at_entry if self.restores_entered(i) else None)
        inner = launches.product(states, layer.inner, GELU, f"{name} ffn inner")
        inner_rows = States(at=inner, size=states.rows.most, rows=states.rows)
        return launches.end(inner_rows, layer.ffn_output, layer.ffn_norm, states, f"{name} ffn")

    def tells_received(self, i: int) -> bool:
        """Say whether a cut reads what tokens received in a layer."""
        return any(reads_received(self.encoder.cuts.get(site)) for site in (f"{i}.ffn", f"{i + 1}.attention"))

    def restores_entered(self, i: int) -> bool:
        """Say whether tokens that a cut within a layer drops have the states that entered the layer."""
        site = f"{i}.ffn"
        return not self.reads_first and site in self.encoder.cuts and site in self.encoder.restores_entered

    def cut(self, site: str, states: States, restored: States | None = None) -> States:
        """Choose rows, where there is a cut; the next launches read them by their index.

        Args:
            restored: the states that dropped tokens have, where these are not those of now.
        """
        rule = self.encoder.cuts.get(site)
        if rule is None:
            return states
        before = states
        states, self.bounds = cut(
            self.launches, f"cut {site}", rule, states, self.bounds, self.received, self.encoder.keeps_last
        )
        if not self.reads_first:
            before = restored or before
            self.reached.append((before, states))
            self.launches.kept.add(before.at)
        if self.received is not None:
            self.launches.arena.give(self.received)
            self.received = None
        return states


class _GatedNetwork(_Network):
    """Of layers with norms before their sublayers. The head reads all tokens."""

    def states(self) -> States:
        own, launches, finish = self.encoder, self.launches, self.encoder.finish
        layers = [layer for layer in own.layers if isinstance(layer, GatedLayer)]
        assert finish is not None
        norms = [norm for layer in layers for norm in (layer.norm, layer.ffn_norm)]
        stream = prenorms.embed(launches, own.embeddings.words, norms[0], self.bounds.now)
        for i, layer in enumerate(layers):
            following = (*norms, finish)[2 * i + 1 :]
            stream = self.gated_layer(i, layer, stream, (following[0], following[1]))
        if not self.reached:
            return stream.normed_states
        launches.arena.give(stream.normed)
        whole = self.put_back(stream.states)
        launches.kept.clear()  # nobody reads these states again
        return replace(whole, at=prenorms.add(launches, whole, finish, (NOTHING, 0, NOTHING), "head norm")[1])

    def gated_layer(
        self, i: int, layer: GatedLayer, stream: prenorms.Stream, following: tuple[RmsNorm, RmsNorm]
    ) -> prenorms.Stream:
        """following: the norms that read what attention, and what the feed-forward, adds to."""
        launches, name = self.launches, f"layer {i}"
        stream = self.cut_stream(f"{i}.attention", stream)
        entered = stream.states
        if self.restores_entered(i):
            launches.kept.add(entered.at)
        bounds = self.bounds.now
        qkv, stream = prenorms.project(launches, layer, stream, name)
        if self.tells_received(i):
            self.received = prenorms.received(launches, qkv, layer, stream, bounds, f"{name} attention")
        context = prenorms.attention(launches, qkv, layer, stream, bounds, f"{name} attention")
        launches.arena.give(qkv)
        stream = prenorms.end(launches, context, layer.output, following[0], stream, f"{name} attention")
        stream = self.cut_stream(f"{i}.ffn", stream, entered if self.restores_entered(i) else None)
        inner = prenorms.gated(launches, layer, stream, f"{name} ffn")
        return prenorms.end(launches, inner, layer.ffn_output, following[1], stream, f"{name} ffn")

    def cut_stream(self, site: str, stream: prenorms.Stream, restored: States | None = None) -> prenorms.Stream:
        states = self.cut(site, stream.states, restored)
        return stream if states is stream.states else stream.chosen(states)
