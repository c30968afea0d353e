"""BGE-M3 and what FlagEmbedding trained like it: two heads in pickles beside a model of vectors. Head "hybrid".

Source: Chen et al., BGE M3-Embedding (ACL Findings 2024); files as FlagEmbedding 1.4 writes them.
"""

from __future__ import annotations

import dataclasses
import hashlib
from pathlib import Path

import torch
from torch import Tensor

from ..contract import HEAD_EMBEDDING, HEAD_HYBRID
from ..data.sides import Sides
from ..errors import InputError, ellipsize
from ..io import sha256
from ..model.checkpoint import Checkpoint, Uninitialised, load_checkpoint
from ..model.config import PrunedEncoderConfig
from ..model.heads.hybrid import PrunedEncoderForHybrid
from ..options import ReadOptions
from . import sentence_transformers
from .colbert_texts import special_token

COLBERT, SPARSE = "colbert_linear.pt", "sparse_linear.pt"
_WITHOUT_WEIGHT = ("cls_token", "eos_token", "pad_token", "unk_token")
"""Special tokens that FlagEmbedding leaves out of a text's weights."""


def recognise(directory: Path, options: ReadOptions) -> bool:
    """Whether a directory has both heads, and they are asked for: `--head embedding` takes its vectors alone."""
    return all((directory / name).is_file() for name in (COLBERT, SPARSE)) and options.head != HEAD_EMBEDDING


def read(directory: Path, options: ReadOptions) -> Checkpoint:
    """Read the model of vectors, and both heads.

    Raises:
        InputError: no leave to read pickles, heads of other shapes, another head asked for; or as a model of vectors is refused.
    """
    _check(directory, options)
    modular = sentence_transformers.recognise(directory)
    dense = dataclasses.replace(options, head=None if modular else HEAD_EMBEDDING)
    if modular:
        found = sentence_transformers.read(directory, dense)
        embedding = dict(found.student.config.embedding)
    else:
        found = load_checkpoint(directory, dense.allow_pickle, dense.head)
        embedding = {"pooling": "first", "normalize": True}
    config = found.student.config
    assert isinstance(config, PrunedEncoderConfig)
    size = int(found.student.dense.config.hidden_size)
    vectors, weights = (_linear(directory / name, size) for name in (COLBERT, SPARSE))
    if len(weights["weight"]) != 1:
        raise InputError(
            f"{directory / SPARSE}: got {len(weights['weight'])} outputs; accepted is 1, the weight of a token"
        )
    width = len(vectors["weight"])
    config = PrunedEncoderConfig(
        backbone=config.backbone,
        head=HEAD_HYBRID,
        embedding=embedding,
        vectors={"projections": [[size, width, True, "none", False]]},
    )
    with Uninitialised():
        student = PrunedEncoderForHybrid(config)
    own = {
        **{f"token_projections.0.linear.{name}": tensor for name, tensor in vectors.items()},
        **{f"sparse_linear.{name}": tensor for name, tensor in weights.items()},
    }
    student.load_state_dict({**found.student.state_dict(), **own}, assign=True)
    sides = Sides(unweighted=_unweighted(found))
    files = sha256(directory / COLBERT, directory / SPARSE)
    told = (
        f"{directory.name} was taken for a model of FlagEmbedding with three answers: one vector, weights of tokens, and vectors of "
        f"{width} numbers of all tokens but the first"
    )
    return dataclasses.replace(
        found,
        student=student.eval().requires_grad_(False),
        sha256=hashlib.sha256(f"{found.sha256}{files}".encode()).hexdigest(),
        notes=(*(note for note in found.notes if "no modules.json" not in note), told),
        settings={**found.settings, "vectors": dataclasses.asdict(sides)},
    )


def _unweighted(found: Checkpoint) -> list[int]:
    """Return the ids of special tokens that have no weight."""
    home = found.tokenizer_home or found.directory
    special = (special_token(found.tokenizer, home, name) for name in _WITHOUT_WEIGHT)
    ids = {found.tokenizer.token_to_id(name) for name in special if name is not None}
    return sorted(i for i in ids if i is not None)


def _check(directory: Path, options: ReadOptions) -> None:
    """Raises InputError where another head is asked for, or there is no leave to read pickles."""
    if options.head not in (None, HEAD_HYBRID):
        raise InputError(
            f"--head: got {options.head}, and {directory} has {COLBERT} and {SPARSE}; accepted are {HEAD_HYBRID}, for all three answers, "
            f"and {HEAD_EMBEDDING}, for one vector of each text"
        )
    if not options.allow_pickle:
        raise InputError(
            f"{directory} has its heads in pickles ({COLBERT}, {SPARSE}), and unpickling can run code. Add --allow-pickle if you trust the "
            f"files, or --head {HEAD_EMBEDDING} to export one vector of each text without them"
        )


def _linear(path: Path, inputs: int) -> dict[str, Tensor]:
    """Read a dense layer of these inputs: its weight and its bias, in fp32."""
    try:
        stored = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # unpickling fails in many ways
        raise InputError(f"{path} cannot be read: {ellipsize(str(error))}") from error
    tensors = stored if isinstance(stored, dict) else {}
    shapes = {name: tuple(value.shape) for name, value in tensors.items() if isinstance(value, Tensor)}
    outputs = (shapes.get("weight") or (0,))[0]
    if shapes != {"weight": (outputs, inputs), "bias": (outputs,)} or not outputs:
        raise InputError(
            f"{path} holds {shapes or type(stored).__name__}; accepted are a weight (n, {inputs}) and a bias (n,)"
        )
    found = {name: tensor.to(torch.float32, copy=True) for name, tensor in tensors.items()}
    if not all(torch.isfinite(tensor).all() for tensor in found.values()):
        raise InputError(f"{path}: NaN or infinite weights")
    return found
