"""Encoders whose layers differ in size, as structured pruning leaves them: fewer heads, narrower feed-forwards.

`pruned_heads` is transformers' field: layer -> numbers of the heads that are gone. transformers 4 makes such models, transformers 5
ignores the field. `intermediate_sizes` is ours: the width of each feed-forward. Where a plain checkpoint has no such field, sizes are
read from the shapes of its weights, as CoFi does (Xia et al., Structured Pruning Learns Compact and Accurate Models, ACL 2022).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from ..errors import InputError, check_int, quoted

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor, nn

PRUNED_HEADS, INTERMEDIATE_SIZES = "pruned_heads", "intermediate_sizes"
_QUERY = re.compile(r"(?:^|\.)layer\.(\d{1,9})\.attention\.(?:self\.query|q_lin)\.weight$")
_INTERMEDIATE = re.compile(r"(?:^|\.)layer\.(\d{1,9})\.(?:intermediate\.dense|ffn\.lin1)\.weight$")


class LayerSize(NamedTuple):
    """Heads and intermediate size of one layer."""

    heads: int
    intermediate: int


def layer_sizes(fields: Mapping[str, Any]) -> tuple[LayerSize, ...]:
    """Return the size of each layer; nothing where all layers are whole.

    Args:
        fields: BERT's names, with `pruned_heads` and `intermediate_sizes` where a model has them.

    Raises:
        InputError: they name layers or heads that are not there, or leave a layer without any.
    """
    layers, heads = fields["num_hidden_layers"], fields["num_attention_heads"]
    gone = pruned_heads(fields.get(PRUNED_HEADS))
    widths = fields.get(INTERMEDIATE_SIZES)
    if not gone and widths is None:
        return ()
    for layer, numbers in gone.items():
        if not 0 <= layer < layers:
            raise InputError(f"{PRUNED_HEADS}: got layer {layer}; accepted are 0 to {layers - 1}")
        if wrong := [number for number in numbers if not 0 <= number < heads]:
            raise InputError(f"{PRUNED_HEADS}: got head {wrong[0]} in layer {layer}; accepted are 0 to {heads - 1}")
        if len(numbers) == heads:
            raise InputError(
                f"{PRUNED_HEADS}: layer {layer} has none of its {heads} heads left; accepted is at least one in each layer"
            )
    widths = [fields["intermediate_size"]] * layers if widths is None else widths
    if not isinstance(widths, (list, tuple)) or len(widths) != layers:
        raise InputError(
            f"{INTERMEDIATE_SIZES}: got {quoted(widths)}; accepted is a list of {layers} sizes, one per layer"
        )
    for width in widths:
        check_int(INTERMEDIATE_SIZES, width, 1)
    return tuple(LayerSize(heads - len(gone.get(i, ())), width) for i, width in enumerate(widths))


def pruned_heads(field: Any) -> dict[int, set[int]]:
    """Read `pruned_heads`, whose layers are strings in JSON; raises InputError for what is no such object."""
    try:
        if not isinstance(field or {}, Mapping):
            raise TypeError
        return {int(layer): {int(number) for number in numbers} for layer, numbers in (field or {}).items() if numbers}
    except (TypeError, ValueError):
        raise InputError(
            f'{PRUNED_HEADS}: got {quoted(field)}; accepted is an object of layers and heads, such as {{"0": [2, 5]}}'
        ) from None


def shrink(linear: nn.Linear, axis: int, size: int) -> None:
    """Leave the first `size` rows of a Linear (axis 0: its outputs) or columns (1: its inputs); which ones is in the weights."""
    from torch import nn

    if linear.weight.shape[axis] == size:
        return
    for name in ("weight", "bias") if axis == 0 else ("weight",):
        if (old := getattr(linear, name)) is not None:
            left = old.detach().narrow(axis, 0, size).clone()
            setattr(linear, name, nn.Parameter(left, requires_grad=old.requires_grad))
    setattr(linear, "in_features" if axis else "out_features", size)


def read_sizes(fields: Mapping[str, Any], stored: Mapping[str, Tensor], directory: Path) -> dict[str, Any]:
    """Return `pruned_heads` and `intermediate_sizes` where the configuration does not say them and layers differ in their weights.

    Args:
        fields: BERT's names.

    Raises:
        InputError: a layer has lost its attention or its feed-forward as a whole.
    """
    found: dict[str, Any] = {}
    layers, heads = fields["num_hidden_layers"], fields["num_attention_heads"]
    size = fields["hidden_size"] // heads
    for name, pattern, what in (
        (PRUNED_HEADS, _QUERY, "attention"),
        (INTERMEDIATE_SIZES, _INTERMEDIATE, "feed-forward"),
    ):
        rows = {int(match[1]): len(t) for key, t in stored.items() if (match := pattern.search(key)) and t.dim() == 2}
        gone = next((i for i in range(layers) if not rows.get(i)), None)
        if rows and gone is not None:
            raise InputError(
                f"{directory}: layer {gone} has no {what}, as CoFi leaves it where it removes one whole; accepted are layers with at "
                "least one head and one unit of the feed-forward"
            )
        if fields.get(name) or len(set(rows.values())) < 2:
            continue
        if what == "feed-forward":
            found[name] = [rows[i] for i in range(layers)]
        else:
            found[name] = {i: [*range(rows[i] // size, heads)] for i in range(layers) if rows[i] < heads * size}
    return found
