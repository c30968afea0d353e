"""What a recipe and calibration data come to for one student: the scales of every matrix product."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

import numpy as np
from torch import nn

from ..contract import INTERMEDIATE, QKV, RESIDUALS, product
from ..model.backbones.base import AttentionParts, FeedForwardParts
from ..model.encoder import PrunedEncoder
from ..model.packed import PackedStudent
from .collect import collect_random
from .observers import Histogram, observer
from .recipes import PER_TOKEN, Recipe

BIAS_RANGE = 2**30
"""Units of a product that a bias may have: half of what 32 bits hold, which leaves as much for the product."""
MAX_SMOOTHING = 4096.0
"""Larger factors, and their inverses, would leave fp16 for channels that are all but dead."""
BEHIND_NORMS = (QKV, INTERMEDIATE)
"""Products that are smoothed where each token has a range of its own: a norm's channels differ most. With the others too, the smallest
cosine between vectors of all-MiniLM-L6-v2 in INT8 and in fp32 was 0.9938 instead of 0.9965."""


@dataclass(frozen=True)
class Scales:
    """Scales of one matrix product: real value = scale * stored value. All are above 0.

    weight: ``(N,) float32``, one per output channel, or ``(1,)``. activation: of its input; None where that stays as it is.
    smooth: ``(K,) float32``, by which input channels are divided and weights multiplied before either is rounded; or ``(1,)`` of 1.
    residual: of the same input where it is a residual; None where that stays as it is, or it is none.
    """

    weight: np.ndarray
    activation: float | None
    smooth: np.ndarray
    residual: float | None


@dataclass(frozen=True)
class QuantizationPlan:
    """Which matrix products are quantized, by their names in the graph, and how."""

    recipe: Recipe
    scales: Mapping[str, Scales]

    def without(self, products: Collection[str]) -> QuantizationPlan:
        """Return the plan with some products left in the base precision."""
        return QuantizationPlan(self.recipe, {name: s for name, s in self.scales.items() if name not in products})


def make_quantization_plan(recipe: Recipe, student: PrunedEncoder, seen: Mapping[str, Histogram]) -> QuantizationPlan:
    """Choose the scales of all matrix products of the encoder that the recipe does not exclude.

    Args:
        student: weights in fp32.
        seen: what `collect` returned; not read where the recipe quantizes weights alone. It may be empty for activations "per-token", of
            which random tokens tell enough.
    """
    observe, levels, static = observer(recipe.observer), recipe.levels, recipe.activations == "static"
    if recipe.smooth and recipe.activations == PER_TOKEN and not seen:
        seen = collect_random(student)

    def scale(end: float) -> float:
        return float(_representable(end / recipe.largest, recipe))

    scales, residuals = {}, _residuals(student)
    weights, biases = products(student), _biases(student) if recipe.bias == "int32" else {}
    for name in recipe.quantized(weights):
        weight = weights[name]
        smooth = np.ones(1, np.float32)
        activation = residual = None
        if static:
            activation = scale(observe(seen[name], levels))
            residual = activation if recipe.residual and name in residuals else None
        if recipe.smooth and (static or name.endswith(BEHIND_NORMS)):
            smooth = _smooth(seen[name].channels, np.abs(weight).max(0), recipe.smooth)
            activation = scale(float((seen[name].channels / smooth).max())) if static else None
        least = _largest(weight * smooth, recipe) / recipe.largest
        if activation is not None and name in biases:
            least = np.maximum(least, _least_for_bias(biases[name], activation, len(least)))
        scales[name] = Scales(_representable(least, recipe), activation, smooth, residual)
    return QuantizationPlan(recipe, scales)


def plan_by_token(recipe: Recipe, weights: Mapping[str, np.ndarray]) -> QuantizationPlan:
    """Choose the scales of products ``(N, K)`` whose inputs are rounded token by token: those of weights alone, without smoothing."""
    scales = {
        name: Scales(
            _representable(_largest(weights[name], recipe) / recipe.largest, recipe), None, np.ones(1, np.float32), None
        )
        for name in recipe.quantized(weights)
    }
    return QuantizationPlan(recipe, scales)


def _residuals(student: PrunedEncoder) -> set[str]:
    """Names of the products whose input is also the residual of their sublayer: there is no norm between them."""
    backbone = student.backbone
    parts: dict[str, Callable[[int], AttentionParts | FeedForwardParts]] = {
        QKV: backbone.attention,
        INTERMEDIATE: backbone.feed_forward,
    }
    layers = range(backbone.num_layers)
    return {product(i, place) for place in RESIDUALS for i in layers if isinstance(parts[place](i).before, nn.Identity)}


def _biases(student: PrunedEncoder) -> dict[str, np.ndarray]:
    """Return the biases ``(N,)`` of the products that have one, by their names in the graph."""
    found = {name: module.bias for name, module in PackedStudent(student).products.items()}
    return {name: bias.detach().numpy() for name, bias in found.items() if bias is not None}


def _least_for_bias(bias: np.ndarray, activation: float, rows: int) -> np.ndarray:
    """Return the least scales of weights, one for each row or one for all, with which 32 bits hold a bias in units of the product.

    Of rows whose weights are all nearly zero, the scale that these would have leaves no room for it.
    """
    needed = np.abs(bias.astype(np.float64)) / (activation * BIAS_RANGE)
    return needed if rows > 1 else needed.max(keepdims=True)


def _largest(weight: np.ndarray, recipe: Recipe) -> np.ndarray:
    """Return what each row of ``(N, K)`` weights has to hold, ``(N,)``, or all of them together, ``(1,)``."""
    largest = np.abs(weight).max(1)
    if recipe.pairs_fit_16_bits:  # 255 (127 + 1) < 2**15, the 1 for rounding; of opposite signs no two overflow
        even = np.pad(weight, ((0, 0), (0, weight.shape[1] % 2)))
        pairs = even.reshape(len(weight), -1, 2)
        alike = np.abs(pairs.sum(2)) * (pairs.prod(2) > 0)
        largest = np.maximum(largest, alike.max(1))
    return largest if recipe.per_channel else largest.max(keepdims=True)


def _smooth(inputs: np.ndarray, weights: np.ndarray, alpha: float) -> np.ndarray:
    """Divide the largest magnitudes of K channels between inputs and weights.

    Source: Xiao et al., SmoothQuant (ICML 2023), equation 4.
    """
    floor = np.finfo(np.float32).tiny
    factors = np.maximum(inputs, floor) ** alpha / np.maximum(weights, floor) ** (1 - alpha)
    factors = np.where((inputs > 0) & (weights > 0), factors, 1)
    factors = np.clip(factors / np.exp(np.log(factors).mean()), 1 / MAX_SMOOTHING, MAX_SMOOTHING)
    return factors.astype(np.float16).astype(np.float32)


def products(student: PrunedEncoder) -> dict[str, np.ndarray]:
    """Return the weights ``(N, K) float32`` of the encoder's matrix products, by their names in the graph."""
    return {name: module.weight.detach().numpy() for name, module in PackedStudent(student).products.items()}


def _representable(scale: np.ndarray | float, recipe: Recipe) -> np.ndarray:
    """Round scales up to what the base precision stores exactly, at least its smallest normal number."""
    dtype = np.float16 if recipe.base == "fp16" else np.float32
    exact = np.asarray(scale)
    rounded = exact.astype(np.float32).astype(dtype)
    rounded = np.where(rounded < exact, np.nextafter(rounded, dtype(np.inf)), rounded)
    return np.maximum(rounded, np.finfo(dtype).tiny).astype(np.float32)
