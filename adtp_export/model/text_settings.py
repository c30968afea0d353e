"""How texts are read, as checkpoint format 2 says it: the block `adtp`, and what of it the model has to agree with."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..artifacts.records import convert
from ..data.sides import SIDES, Sides
from ..data.template import ChatTemplate
from ..errors import InputError, check_int, ellipsize, quoted
from .config import PrunedEncoderConfig
from .encoder import PrunedEncoder

TEXTS, TEXT_SETTINGS = (
    "adtp",
    ("max_tokens", "prompts", "prompt", "activation", "truncate_dim", "template", "max_active_dims", "vectors"),
)
RECORDS = {"template": ChatTemplate, "vectors": Sides}


def text_settings(raw: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """Return the block "adtp" of format 2, which says how texts are read; raises InputError for what cannot be."""
    block = raw.get(TEXTS, {}) if raw.get("model_type") == PrunedEncoderConfig.model_type else {}
    if not isinstance(block, dict) or set(block) - set(TEXT_SETTINGS):
        raise InputError(f"{path}: {TEXTS} is {quoted(block)}; accepted is an object of {', '.join(TEXT_SETTINGS)}")
    longest, prompts = block.get("max_tokens", 4), block.get("prompts", {})
    check_int(f"{path}: {TEXTS}.max_tokens", longest, 4)
    for name in ("truncate_dim", "max_active_dims"):
        check_int(f"{path}: {TEXTS}.{name}", block.get(name, 1), 1)
    for name, kind in RECORDS.items():
        try:
            convert(block.get(name, {}), kind)
        except ValueError as error:
            raise InputError(
                f"{path}: {TEXTS}.{name} is none ({ellipsize(str(error))}); accepted is what adtp-import writes"
            ) from error
    names = [block[name] for name in ("prompt", "activation") if name in block]
    if not isinstance(prompts, dict) or not all(isinstance(text, str) for text in (*prompts.values(), *names)):
        raise InputError(f"{path}: {TEXTS} is {quoted(block)}; accepted are texts, and prompts by their names")
    if block.get("prompt", "") not in {"", *prompts}:
        raise InputError(
            f"{path}: {TEXTS}.prompt is {quoted(block['prompt'])}; accepted are {', '.join(prompts) or 'none'}"
        )
    return block


def check_sides(sides: Sides | None, student: PrunedEncoder, path: Path) -> None:
    """Raises InputError where a model cannot read queries or documents as they say."""
    if sides is None:
        return
    only = sides.only_queries
    if only != student.expansion:
        raise InputError(
            f"{path}: the expansion that is not attended to is {quoted(only)} in {TEXTS}.vectors, and {quoted(student.expansion)} in "
            "vectors; accepted is the same id in both, or null"
        )
    config = student.dense.config
    for side in map(sides.side, SIDES):
        if side.expand_to > student.max_tokens:
            raise InputError(
                f"{path}: texts are filled up to {side.expand_to} tokens, and the model reads {student.max_tokens}; give a smaller length"
            )
    ids = [sides.query.marker, sides.document.marker, sides.expansion, *sides.skip, *sides.unweighted]
    if (largest := max((i for i in ids if i is not None), default=0)) >= config.vocab_size:
        raise InputError(f"{path}: got the token id {largest}; the model knows {config.vocab_size}")
    layers = range(student.backbone.num_layers)
    back = min((far for i in layers if (far := student.attention(i).reach[0]) >= 0), default=None)
    longest = max(sides.query.expand_to, sides.document.expand_to)
    if only is not None and back is not None and longest - 1 > back:
        raise InputError(
            f"{path}: queries are filled up to {longest} tokens that are not attended to, and layers with a window see {back} back, so the "
            f"last ones would see nothing; accepted are at most {back + 1}, expansion that is attended to, or none"
        )
