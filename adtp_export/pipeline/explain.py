"""Answers of an output directory, explained with the checkpoint that it was made from."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..artifacts.records import Manifest
from ..contract import HEAD_SPANS
from ..data.tokenize import pad
from ..errors import InputError, needs_extras, typed
from ..explain.records import Explanation
from ..io import sha256

if TYPE_CHECKING:
    from ..data.windows import TextWithOffsets


@needs_extras("explaining answers (--explain)")
def explainer(
    model_dir: Path, out: Path, manifest: Manifest, allow_pickle: bool
) -> Callable[[TextWithOffsets], Explanation]:
    """Return a function that explains the PyTorch student's answer to a tokenized text.

    Args:
        model_dir: the checkpoint that `out` was exported from.
        manifest: of `out`.
        allow_pickle: accept `pytorch_model.bin` where there are no safetensors.

    Raises:
        InputError: it is another checkpoint, or none.
        MissingDependencyError: the extra "export" is not installed.
    """
    from ..explain.student import explain
    from ..imports import open_checkpoint, options_for

    try:
        checkpoint = open_checkpoint(model_dir, options_for(model_dir, manifest.checkpoint, allow_pickle))
    except InputError as error:
        raise InputError(
            f"--explain: {model_dir} cannot be read as the checkpoint that {out} was exported from: {error}"
        ) from error
    _check_same(checkpoint.sha256, model_dir, out, manifest)
    student = checkpoint.student
    if list(student.site_names) != manifest.checkpoint["prune_sites"]:
        raise InputError(
            f"--explain: {model_dir} drops tokens at other places than {out}, whose manifest is of an older version; export again"
        )
    head, pad_id = student.config.head, student.pad_id

    def explained(text: TextWithOffsets) -> Explanation:
        asked = [side == 1 if head == HEAD_SPANS else side is not None for side in text.sides]
        return explain(student, pad([text.row], pad_id, student.input_names), np.array(asked))

    return explained


@needs_extras("explaining answers (--explain)")
def prompt_explainer(
    model_dir: Path, out: Path, manifest: Manifest, allow_pickle: bool = False, **how: Any
) -> Callable[[Sequence[int]], np.ndarray]:
    """Return a function that takes the ids of a text, and gives the flow from each to the last, ``(n,)`` in fp64.

    Args and errors: as of `explainer`, for a model that generates text. how: `merge_layers` and `watch` of `prompt_flow`.
    """
    from ..explain.prompt import prompt_flow
    from ..model.decoder import load_decoder
    from ..model.weights import weight_files

    decoder = load_decoder(model_dir, allow_pickle=allow_pickle)
    hashed = sha256(model_dir / "config.json", *weight_files(model_dir, allow_pickle))
    _check_same(hashed, model_dir, out, manifest)
    return lambda ids: prompt_flow(decoder, ids, **how)


def _check_same(hashed: str, model_dir: Path, out: Path, manifest: Manifest) -> None:
    if hashed != manifest.checkpoint["sha256"]:
        raise InputError(
            f"--explain: {model_dir} is not the checkpoint that {out} was exported from; give that one, or export this one with "
            f"adtp-export {typed(model_dir)} --out {typed(out)} --force"
        )
