"""Export a model that generates text: prefill and step, the embeddings, and what turns pictures into image tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import onnx_ir as ir
import torch
from torch import Tensor, nn

from ..contract import (
    BATCH,
    CU_SEQLENS,
    EMBED_MODEL,
    IMAGE,
    IMAGE_EMBEDS,
    IMAGE_FEATURES,
    IMAGE_KEPT,
    INPUT_IDS,
    INPUTS_EMBEDS,
    KEY,
    LOGITS,
    PAST,
    PIXEL_VALUES,
    POSITIONS,
    PREFILL_MODEL,
    PRESENT,
    ROWS,
    STEP_MODEL,
    TOKENS,
    VALUE,
    VISION_MODEL,
    cached,
    entered,
)
from ..model.decoder import Decoder
from ..model.image_choice import Diverse
from ..model.prefill import Prefill, Step
from ..model.tower import Tower
from .passes import DECODER
from .program import finish, trace_network

PROMPTS = (7, 5, 9)
"""Tokens of the prompts of an example."""


class Embed(nn.Module):
    """Ids ``(T,)`` to states ``(T, H)``."""

    def __init__(self, decoder: Decoder) -> None:
        super().__init__()
        self.embeddings = decoder.embeddings

    def forward(self, input_ids: Tensor) -> Tensor:
        result: Tensor = self.embeddings(input_ids)
        return result


def names_entered(decoder: Decoder, *what: str) -> list[str]:
    """Name what belongs to each set of tokens, set by set."""
    return [entered(name, layer) for layer in decoder.first_layers for name in what]


def names_cached(decoder: Decoder, when: str) -> list[str]:
    """Name keys and values, layer by layer."""
    return [cached(when, i, what) for i in range(decoder.backbone.num_layers) for what in (KEY, VALUE)]


def export_vision(decoder: Decoder, metadata: Mapping[str, Any]) -> ir.Model:
    """Export ``pixel_values (tiles, 3, side, side)`` to ``image_features (tiles, tokens, H)``; with DivPrune, the kept ones and their
    places."""
    side = decoder.model.config.vision_config.image_size
    if kept := decoder.kept_tokens:
        outputs = [IMAGE_FEATURES, IMAGE_KEPT]
        return _export_pictures(lambda: Diverse(decoder.vision(), kept), side, outputs, metadata)
    return _export_pictures(decoder.vision, side, [IMAGE_FEATURES], metadata)


def export_tower(tower: Tower, metadata: Mapping[str, Any]) -> ir.Model:
    """Export ``pixel_values (tiles, 3, side, side)`` to ``image_embeds (tiles, D)``; with DivPrune also to what `export_vision` has."""
    outputs = [IMAGE_EMBEDS, *([IMAGE_FEATURES, IMAGE_KEPT] if tower.kept_tokens else [])]
    return _export_pictures(tower.network, tower.config.image_size, outputs, metadata)


def _export_pictures(
    network: Callable[[], nn.Module], side: int, outputs: Sequence[str], metadata: Mapping[str, Any]
) -> ir.Model:
    example = {PIXEL_VALUES: torch.zeros(2, 3, side, side)}
    return _export(network, example, ({0: torch.export.Dim("tiles")},), outputs, metadata)


def export_embed(decoder: Decoder, metadata: Mapping[str, Any]) -> ir.Model:
    """Export ``input_ids (tokens,) int64`` to ``inputs_embeds (tokens, H)``."""
    example = {INPUT_IDS: torch.ones(sum(PROMPTS), dtype=torch.int64)}
    return _export(lambda: Embed(decoder), example, ({0: torch.export.Dim(TOKENS)},), [INPUTS_EMBEDS], metadata)


def export_prefill(decoder: Decoder, metadata: Mapping[str, Any]) -> ir.Model:
    """Export `Prefill`; see docs/design.md."""
    batch, tokens = torch.export.Dim(BATCH), torch.export.Dim(TOKENS)
    example = _prompts(decoder)
    dims = [{0: batch + 1} if name == CU_SEQLENS else {0: tokens} for name in example]
    outputs = [LOGITS, *names_entered(decoder, CU_SEQLENS, POSITIONS, ROWS), *names_cached(decoder, PRESENT)]
    return _export(lambda: Prefill(decoder), example, tuple(dims), outputs, metadata)


def export_step(decoder: Decoder, metadata: Mapping[str, Any]) -> ir.Model:
    """Export `Step`; see docs/design.md."""
    batch = torch.export.Dim(BATCH)
    own = {layer: torch.export.Dim(f"{TOKENS}_{layer}") for layer in decoder.first_layers}
    example = {INPUT_IDS: torch.ones(len(PROMPTS), dtype=torch.int64)}
    with torch.no_grad():
        read = Prefill(decoder)(*_prompts(decoder).values())
    kept = dict(zip([LOGITS, *names_entered(decoder, CU_SEQLENS, POSITIONS, ROWS), *names_cached(decoder, PAST)], read))
    past, dims, first = [], [], 0
    for name in names_entered(decoder, CU_SEQLENS, POSITIONS):
        layer = int(name.rsplit(".", 1)[1])
        dims.append({0: batch + 1} if name.startswith(CU_SEQLENS) else {0: own[layer]})
    for i in range(decoder.backbone.num_layers):
        first = i if i in own else first
        dims += [{0: own[first]}] * 2
    inputs = [*names_entered(decoder, CU_SEQLENS, POSITIONS), *names_cached(decoder, PAST)]
    past = [kept[name].clone() for name in inputs]
    outputs = [
        LOGITS,
        *(f"{PRESENT}.{name}" for name in names_entered(decoder, CU_SEQLENS, POSITIONS)),
        *names_cached(decoder, PRESENT),
    ]
    return _export(lambda: Step(decoder), {**example, PAST: past}, ({0: batch}, dims), outputs, metadata, inputs)


def _prompts(decoder: Decoder) -> dict[str, Tensor]:
    """Return packed prompts to trace with."""
    bounds = torch.tensor([0, *PROMPTS]).cumsum(0).to(torch.int32)
    states = torch.linspace(-1, 1, sum(PROMPTS) * decoder.hidden_size).view(sum(PROMPTS), -1)
    image = {IMAGE: torch.arange(sum(PROMPTS)) % 5 < 3} if decoder.stages else {}
    return {INPUTS_EMBEDS: states, CU_SEQLENS: bounds, **image}


def _export(
    network: Callable[[], nn.Module],
    example: Mapping[str, Any],
    dims: Any,
    outputs: Sequence[str],
    metadata: Mapping[str, Any],
    listed: Sequence[str] = (),
) -> ir.Model:
    """Trace a network and run the passes; listed: names of the inputs that are in the list at the end."""
    names = [*(name for name in example if not listed or name != PAST), *listed]
    model = finish(trace_network(network, tuple(example.values()), dims, names, list(outputs)), metadata, DECODER)
    model.graph.name = "adtp_decoder"
    return model


EXPORTS: dict[str, Callable[[Decoder, Mapping[str, Any]], ir.Model]] = {
    VISION_MODEL: export_vision,
    EMBED_MODEL: export_embed,
    PREFILL_MODEL: export_prefill,
    STEP_MODEL: export_step,
}
"""What makes each file."""
