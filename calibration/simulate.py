"""The quantized student in PyTorch: what a runtime has to equal, and what each matrix product costs."""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from ..contract import ATTENTION_MASK, OUTPUTS, RESIDUALS, SEQUENCE, product
from ..data.tokenize import Batch
from ..model.backbones.base import Backbone
from ..model.decoder import Decoder
from ..model.encoder import PrunedEncoder
from ..model.packed import PackedStudent
from .plan import QuantizationPlan, plan_by_token
from .quantize import stored_weight
from .recipes import PER_TOKEN, Recipe


def simulate(student: PrunedEncoder, plan: QuantizationPlan) -> PrunedEncoder:
    """Return a copy of the padded student whose matrix products round their weights and inputs as the plan says.

    The rest is fp32 also where the recipe's base is fp16, whose rounding is small beside that to 8 bits (and slow on a CPU).
    """
    rounded = copy.deepcopy(student)
    _round_in_place(rounded, products_of(rounded.backbone), plan)
    return rounded


def products_of(backbone: Backbone) -> dict[str, tuple[nn.Linear, ...]]:
    """Return the matrix products of all layers by their names in the graph, each as the modules that have its rows."""
    places = [backbone.products(layer) for layer in range(backbone.num_layers)]
    return {product(i, place): parts for i, layer in enumerate(places) for place, parts in layer.items()}


def quantize_decoder(decoder: Decoder, recipe: Recipe) -> tuple[QuantizationPlan, Decoder]:
    """Plan INT8 products of a model that generates text, whose inputs are rounded token by token; return the plan, and a copy of the model
    that rounds as it says.
    """
    weights = {
        name: np.concatenate([part.weight.detach().numpy() for part in parts])
        for name, parts in products_of(decoder.backbone).items()
    }
    plan, rounded = plan_by_token(recipe, weights), decoder.copy()
    _round_in_place(rounded, products_of(rounded.backbone), plan)
    return plan, rounded


@dataclass(frozen=True)
class Cost:
    """What quantizing one matrix product alone does to the head's first output, logits or a vector: absolute differences to the
    student's own."""

    product: str
    mean_abs_logit_diff: float
    max_abs_logit_diff: float


def sensitivity(
    student: PrunedEncoder,
    plan: QuantizationPlan,
    batches: Sequence[Batch],
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> tuple[Cost, ...]:
    """Quantize the matrix products one at a time and compare the first output of the head; the costliest comes first.

    The student runs packed, because padding takes most of the time of texts of unequal length. Its matrix products are changed in place
    meanwhile, and are at the end what they were: a copy for each would take its memory again.
    """
    packed = PackedStudent(student)
    products = {name: (module,) for name, module in packed.products.items()}
    expected = _answers(student, packed, batches)
    costs = []
    for done, (name, scales) in enumerate(plan.scales.items(), start=1):
        with _round_in_place(student, products, QuantizationPlan(plan.recipe, {name: scales})):
            off = np.abs(_answers(student, packed, batches) - expected)
        costs.append(Cost(name, float(off.mean()), float(off.max())))
        progress(done, len(plan.scales))
    return tuple(sorted(costs, key=lambda cost: -cost.mean_abs_logit_diff))


def _answers(student: PrunedEncoder, packed: PackedStudent, batches: Sequence[Batch]) -> np.ndarray:
    """Return all values of the head's first output, ``(values,)``; those for padding, if any, are zeros in all runs and left out."""
    axes = next(iter(OUTPUTS[student.config.head].values()))
    answers = []
    with torch.inference_mode():
        for batch in batches:
            inputs = {k: torch.from_numpy(v) for k, v in batch.items()}
            said = packed(**inputs)[0][0].float()
            answers.append((said[inputs[ATTENTION_MASK].bool()] if SEQUENCE in axes else said).flatten())
    return torch.cat(answers).numpy()


def _round_in_place(
    student: PrunedEncoder | Decoder, products: Mapping[str, Sequence[nn.Linear]], plan: QuantizationPlan
) -> contextlib.ExitStack:
    """Round the matrix products of a student, or of its packed form; closing what is returned takes that back.

    Args:
        products: each as the modules that have its rows, one after the other.
    """
    with contextlib.ExitStack() as undo:  # closed at once where this fails
        for name in plan.scales:
            _round_product(student, name, products[name], plan, undo)
        return undo.pop_all()


def _round_product(
    student: PrunedEncoder | Decoder,
    name: str,
    parts: Sequence[nn.Linear],
    plan: QuantizationPlan,
    undo: contextlib.ExitStack,
) -> None:
    scales = plan.scales[name]
    whole = np.concatenate([part.weight.detach().numpy() for part in parts])
    by_token = plan.recipe.activations == PER_TOKEN
    real = stored_weight(whole, scales, plan).astype(np.float32) * scales.weight[:, None]
    if not by_token:
        real /= scales.smooth
    for part, weight in zip(parts, np.split(real, np.cumsum([len(part.weight) for part in parts])[:-1])):
        undo.callback(setattr, part, "weight", part.weight)
        part.weight = nn.Parameter(torch.from_numpy(weight.copy()).to(part.weight.dtype), requires_grad=False)
        if by_token:
            rounding = functools.partial(_round_tokens, factors=torch.from_numpy(1 / scales.smooth))
            undo.callback(part.register_forward_pre_hook(rounding).remove)
        if scales.activation is not None:
            scale = torch.from_numpy(np.float32(scales.activation) * scales.smooth)
            hook = functools.partial(_round, scale=scale, plan=plan, which=0)
            undo.callback(part.register_forward_pre_hook(hook).remove)
    if scales.residual is not None:
        layer, place = name.split(".", 2)[1:]
        sums = {
            "attention.output": student.backbone.attention(int(layer)).output,
            "ffn.output": student.backbone.feed_forward(int(layer)).output,
        }
        hook = functools.partial(_round, scale=torch.tensor(scales.residual), plan=plan, which=1)
        undo.callback(sums[RESIDUALS[place]].register_forward_pre_hook(hook).remove)


def _round_tokens(module: nn.Module, inputs: tuple[Tensor, ...], factors: Tensor) -> tuple[Tensor, ...]:
    """Multiply the input of a product by factors, which its weights make up for, and round it as `ops.onnx_linear.QuantizeRows` does: 256
    numbers for each token, 0 among them.
    """
    x = inputs[0] * factors
    least, largest = x.amin(-1, keepdim=True).clamp(max=0), x.amax(-1, keepdim=True).clamp(min=0)
    scale = (largest / 255 - least / 255).clamp(min=torch.finfo(torch.float32).tiny)
    zero = (-least / scale).round()
    return (((x / scale).round() + zero).clamp(0, 255).sub(zero) * scale, *inputs[1:])


def _round(
    module: nn.Module, inputs: tuple[Tensor, ...], scale: Tensor, plan: QuantizationPlan, which: int
) -> tuple[Tensor, ...]:
    """Round one input of a module, with one scale or one per channel."""
    x, most = inputs[which], plan.recipe.largest
    scaled = (x / scale).clamp(-most, most)
    stored = scaled.round() if plan.recipe.format == "int8" else scaled.to(torch.float8_e4m3fn).to(x.dtype)
    return (*inputs[:which], stored * scale, *inputs[which + 1 :])
