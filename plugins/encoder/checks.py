"""What the kernels do not do is refused here, in one sentence that names the part. What they do not take as it is gets zeros."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np

from ...errors import InputError
from ..variants import DTYPES, HEAD_SIZES
from .cuts import LONGEST
from .description import (
    GELU,
    NONE,
    RELU,
    TANH,
    Best,
    Classifier,
    Dense,
    Embedding,
    Embeddings,
    Encoder,
    GatedLayer,
    Layer,
    Ranks,
    Ratio,
    Rule,
    Saliency,
    Skim,
    reads_received,
)
from .variants import HEAD_BLOCKS, WIDTHS

MULTIPLE = 8
"""Of the columns that a product takes and gives."""

MOST_CANDIDATES = 16

ANCHORS = 2
"""The first token of a text and the last."""

MOST_NUMBERS = 2**30
"""Of all states of the longest text: kernels that write answers count numbers in 32 bits, and take steps beyond the last one."""


def checked(encoder: Encoder, dtype: str) -> Encoder:
    """Return an encoder as its launches take it: without cuts that decide nothing, with room for the tokens that always stay, and with
    feed-forwards of a width that products take.

    Raises:
        InputError: there is no kernel for a part of it.
    """
    _require(dtype in DTYPES, f"dtype {dtype}", ", ".join(DTYPES))
    own = encoder.embeddings
    most = max(WIDTHS) if isinstance(own, Embeddings) else None  # rows of gated layers are walked in blocks
    for name, columns in (("embeddings", own.words.shape[1]), ("layers", encoder.layers[0].qkv.weight.shape[1])):
        fits = columns % MULTIPLE == 0 and (most is None or columns <= most)
        _require(fits, f"{name} of width {columns}", f"multiples of {MULTIPLE}{f' up to {most}' if most else ''}")
        is_countable = columns << (encoder.longest - 1).bit_length() <= MOST_NUMBERS  # rows are a power of two
        _require(
            is_countable,
            f"texts of {encoder.longest} tokens with {name} of width {columns}",
            f"up to {MOST_NUMBERS:,} numbers of a text",
        )
    for i, layer in enumerate(encoder.layers):
        size = layer.output.weight.shape[1] // max(layer.heads, 1)
        if isinstance(layer, Layer):
            fits, sizes = size in HEAD_SIZES, f"sizes {', '.join(map(str, HEAD_SIZES))}"
        else:
            largest = HEAD_BLOCKS[dtype][-1]
            fits, sizes = (
                size % MULTIPLE == 0 and size <= largest,
                f"multiples of {MULTIPLE} up to {largest} in {dtype}",
            )
        _require(fits, f"layer {i} with {layer.heads} heads of size {size}", sizes)
    _check_head(encoder)
    cuts = {site: _anchored(rule) for site, rule in encoder.cuts.items()} if encoder.keeps_last else dict(encoder.cuts)
    if isinstance(encoder.head, Classifier):  # which reads only first rows, and these stay
        cuts.pop(f"{len(encoder.layers) - 1}.ffn", None)
    encoder = dataclasses.replace(encoder, cuts=cuts, layers=tuple(map(_even, encoder.layers)))
    _check_cuts(encoder)
    if dtype == "fp16":
        _check_range(encoder)
    return encoder


def _check_head(encoder: Encoder) -> None:
    head = encoder.head
    if isinstance(head, Classifier):
        _require(
            head.activation in (TANH, GELU, RELU), f"a classifier with {head.activation}", f"{TANH}, {GELU} and {RELU}"
        )
    if isinstance(head, Embedding):
        for projection, activation in head.projections:
            size = len(projection.weight)
            _require(size % MULTIPLE == 0, f"a projection to {size} numbers", f"multiples of {MULTIPLE}")
            _require(activation in (NONE, TANH), f"a projection with {activation}", f"{NONE} and {TANH}")


def _check_cuts(encoder: Encoder) -> None:
    for site, rule in encoder.cuts.items():
        name = f"cut {site}"
        if isinstance(rule, Best) and isinstance(rule.number, Ratio):
            candidates = len(rule.number.permille)
            _require(
                isinstance(rule.order, Saliency),
                f"{name}: a ratio with what tokens received",
                "a ratio with a predictor",
            )
            _require(candidates <= MOST_CANDIDATES, f"{name} with {candidates} ratios", f"at most {MOST_CANDIDATES}")
        _require(
            encoder.longest <= max(LONGEST),
            f"{name} of texts of {encoder.longest} tokens",
            f"at most {max(LONGEST)}; if no text is longer, set max_position_embeddings in config.json to that",
        )
        hidden = encoder.layers[0].qkv.weight.shape[1]
        is_narrow = not isinstance(rule.order, Skim) or hidden <= max(WIDTHS)
        _require(is_narrow, f"{name} by transkimmer of states of {hidden} numbers", f"at most {max(WIDTHS)}")
        is_ranked = encoder.keeps_last and isinstance(rule, Ranks)
        _require(not is_ranked, f"{name} by top where last tokens stay, too", "adtp, schedule, ltp and transkimmer")
    for i in range(len(encoder.layers)):
        before, after = encoder.cuts.get(f"{i}.ffn"), encoder.cuts.get(f"{i + 1}.attention")
        _require(
            before is None or not reads_received(after),
            f"cuts at {i}.ffn and {i + 1}.attention, and the second one reads what tokens received before the first one",
            "one of the two",
        )
        is_gated = isinstance(encoder.layers[i], GatedLayer)
        _require(
            not is_gated or before is None or after is None,
            f"cuts at {i}.ffn and {i + 1}.attention of layers that turn heads by position",
            "one of the two",
        )
        both = f"{i}.attention" in encoder.cuts and before is not None and f"{i}.ffn" in encoder.restores_entered
        _require(
            isinstance(encoder.head, Classifier) or not both,
            f"cuts at {i}.attention and {i}.ffn, and the second one restores what entered the layer",
            "one of the two",
        )
    _require(
        not reads_received(encoder.cuts.get("0.attention")),
        "cut 0.attention by what tokens received",
        "0.ffn and later ones",
    )


def _anchored(rule: Rule) -> Rule:
    """Let a text keep its first token and its last one, if it has so many. What is changed here is one array in all buckets of a plan."""
    if not isinstance(rule, Best):
        return rule
    number = rule.number
    if isinstance(number, Ratio):
        return dataclasses.replace(rule, number=dataclasses.replace(number, min_tokens=max(number.min_tokens, ANCHORS)))
    if not rule.keep_first:
        return rule
    return dataclasses.replace(rule, number=dataclasses.replace(number, kept=np.maximum(number.kept, ANCHORS)))


def _even(layer: Layer | GatedLayer) -> Layer | GatedLayer:
    """Give a feed-forward more units, which give 0: GELU and SiLU have it at 0, and their weights afterwards are 0, too."""
    units = layer.ffn_output.weight.shape[1]
    more = -units % MULTIPLE
    if not more:
        return layer
    own = (-1, units, layer.inner.weight.shape[1])  # gates and values have these each
    weight = np.pad(layer.inner.weight.reshape(own), ((0, 0), (0, more), (0, 0))).reshape(-1, own[2])
    inner = Dense(weight, np.pad(layer.inner.bias.reshape(own[:2]), ((0, 0), (0, more))).reshape(-1))
    output = Dense(np.pad(layer.ffn_output.weight, ((0, 0), (0, more))), layer.ffn_output.bias)
    return dataclasses.replace(layer, inner=inner, ffn_output=output)


def _check_range(encoder: Encoder) -> None:
    """Refuse weights that fp16 has no number for; cuts keep theirs in fp32."""
    parts: list[tuple[str, object]] = [("embeddings", encoder.embeddings), ("head", encoder.head)]
    parts += [(f"layer {i}", layer) for i, layer in enumerate(encoder.layers)]
    most = float(np.finfo(np.float16).max)
    for name, part in parts:
        largest = max((float(np.abs(array).max(initial=0)) for array in _arrays(part)), default=0.0)
        _require(
            largest <= most,
            f"{name} with a weight of {largest:.3g} in fp16",
            f"up to {most:.3g}; bf16 has fp32's range",
        )


def _arrays(part: object) -> list[np.ndarray]:
    if isinstance(part, np.ndarray):
        return [part]
    if isinstance(part, tuple):
        return list(itertools.chain.from_iterable(map(_arrays, part)))
    if not dataclasses.is_dataclass(part):
        return []
    inner = (getattr(part, field.name) for field in dataclasses.fields(part))
    return list(itertools.chain.from_iterable(map(_arrays, inner)))


def _require(holds: bool, got: str, accepted: str) -> None:
    if not holds:
        raise InputError(f"encoder on a GPU: got {got}; accepted: {accepted}")
