"""`SparseEncoder` of sentence-transformers: a model of masked language, and `SpladePooling` after it.

Source: files as sentence-transformers 5 and 6 write them.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..errors import InputError, check_int, quoted
from ..io import read_json
from ..model.predictions import ACTIVATIONS, MAX, POOLINGS, SparseSettings

POOLING, OLD_TRANSFORMER = "SpladePooling", "MLMTransformer"
_WIDTHS = ("embedding_dimension", "word_embedding_dimension")
"""What newer versions write, and older ones."""
TOLD = {MAX: "the maximum", "sum": "the sum"}
REFUSED = {
    "Router": "texts go different ways as queries and as documents; accepted is one way, saved in Python: "
    'SparseEncoder(modules=[*SparseEncoder(DIR)[0].sub_modules["document"]]).save_pretrained("DOCUMENTS"). '
    "Queries of inference-free models are a look-up of each token's weight, which needs no export",
    "SparseStaticEmbedding": "a look-up of each token's weight, which needs no export",
    "SparseAutoEncoder": f"vectors of a dense model, made sparse; accepted are models of masked language with {POOLING}",
}
"""Other modules of sparse vectors, and why not."""


def read(folder: Path, raw: Mapping[str, Any], home: Path) -> dict[str, str]:
    """Return the fields of `SparseSettings` that a module says.

    Args:
        folder: of the module. raw: configuration of the model. home: its folder.

    Raises:
        InputError: the file is missing, or says what `SpladePooling` or this model does not have.
    """
    path = folder / "config.json"
    if not path.is_file():
        raise InputError(f"{path} is missing, which says how vectors are pooled; is the directory whole?")
    fields = read_json(path)
    if not isinstance(fields, dict):
        raise InputError(f"{path} holds {type(fields).__name__}; accepted is a JSON object")
    found = {}
    for name, own, accepted in (
        ("pooling_strategy", "pooling", POOLINGS),
        ("activation_function", "activation", tuple(ACTIVATIONS)),
    ):
        found[own] = fields.get(name, accepted[0])
        if found[own] not in accepted:
            raise InputError(f"{path}: {name} is {quoted(found[own])}; accepted are {', '.join(accepted)}")
    width = next((fields[name] for name in _WIDTHS if fields.get(name) is not None), None)
    if width not in (None, raw.get("vocab_size")):
        raise InputError(
            f"{path}: vectors have {quoted(width)} numbers, and the vocabulary of {home / 'config.json'} {quoted(raw.get('vocab_size'))} "
            "tokens; accepted is one number for each"
        )
    return found


def most_active(settings: Mapping[str, Any], path: Path) -> dict[str, int]:
    """Return how many numbers of a vector stay, at most, where that is said; `path` is the file's."""
    most = settings.get("max_active_dims")
    if most is not None:
        check_int(f"{path}: max_active_dims", most, 1)
    return {} if most is None else {"max_active_dims": most}


def told(name: str, settings: SparseSettings) -> str:
    """Say what a directory was taken for."""
    logs = "log(1 + log(1 + relu))" if ACTIVATIONS[settings.activation] > 1 else "log(1 + relu)"
    return f"{name} was taken for a model of sparse vectors: {TOLD[settings.pooling]} over all tokens of {logs} of the logits"
