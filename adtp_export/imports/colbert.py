"""Checkpoints of late interaction: Stanford's ColBERT, PyLate's, and `MultiVectorEncoder` of sentence-transformers. Head "vectors".

Sources: Khattab and Zaharia, ColBERT (SIGIR 2020); files as PyLate 1.6 and sentence-transformers 6 write them.
"""

from __future__ import annotations

import dataclasses
import json
import string
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from ..contract import HEAD_VECTORS
from ..data.sides import Sides
from ..errors import InputError, quoted
from ..model.checkpoint import Checkpoint, assemble, make_config, read_config
from ..model.config import PrunedEncoderConfig
from ..model.plain import FORMATS, architectures, as_format_2, check_encoder
from ..model.projections import NORMALIZE
from ..model.text_settings import check_sides
from ..model.tokenizer import load_tokenizer
from ..model.weights import read_weights, weight_files
from ..options import ReadOptions
from . import sentence_transformers
from .colbert_modules import MASK, Module, modules_of, projection_of
from .colbert_texts import SidesReader
from .limits import UNLIMITED, document, fields_of_limits, limit_files, stated_length
from .sentence_transformers import MODULES, SETTINGS, prompts_of

HF_COLBERT, METADATA, LINEAR = "HF_ColBERT", "artifact.metadata", "linear.weight"
_KINDS = ("ColBERT", "MultiVectorEncoder")
"""What `model_type` of config_sentence_transformers.json says."""


@dataclass(frozen=True, kw_only=True)
class Layout:
    """What a directory holds. home: folder of the encoder. modules: after it. said: how texts are read, by the names that fields have in
    PyLate. name: what wrote it."""

    home: Path
    modules: tuple[Module, ...]
    said: Mapping[str, Any]
    name: str


def recognise(directory: Path, config: Mapping[str, Any]) -> str | None:
    """Say what a directory is one of: "Stanford", "PyLate" or "sentence-transformers"; None: no model of late interaction.

    Args:
        config: its `config.json`, empty where it has none.
    """
    if not (directory / MODULES).is_file():
        return "Stanford" if HF_COLBERT in architectures(config) else None
    types = modules_of(directory, check=False)
    if any(kind == MASK for kind, _, _ in types):
        return "sentence-transformers"
    told = document(directory / SETTINGS).get("model_type") in _KINDS
    return "PyLate" if told or any(package == "pylate" for _, _, package in types) else None


def read(directory: Path, kind: str, options: ReadOptions) -> Checkpoint:
    """Read a model of late interaction; `kind` is what `recognise` says.

    Raises:
        InputError: modules that are not known, markers that the tokenizer lacks, expansion longer than the model reads, and all that plain
            directories are refused for.
    """
    if options.head not in (None, HEAD_VECTORS):
        raise InputError(
            f"--head: got {options.head}, and {directory} is a model with a vector for each token; leave --head out"
        )
    layout = _stanford(directory) if kind == "Stanford" else _modular(directory, kind)
    home, path = layout.home, layout.home / "config.json"
    raw = read_config(home)
    if raw.get("model_type") in FORMATS:
        raise InputError(f"{path}: model_type is {quoted(raw['model_type'])}; here it has to be a plain encoder")
    check_encoder(raw, path, pooled=True)
    limits = fields_of_limits(home)
    modality = limits.get("modality_config") or {}
    if not isinstance(modality, dict) or "message" in modality:
        raise InputError(
            f"{home}: texts go through a chat template; accepted here are models that read texts as they are"
        )
    own = weight_files(home, options.allow_pickle)
    weights = read_weights(own)
    projections, more, files = _projections(layout, weights, options)
    normalize = layout.name != "sentence-transformers" or projections[-1:] == [NORMALIZE]
    while projections[-1:] == [NORMALIZE]:
        projections.pop()
    fields = {"projections": projections, "normalize": normalize}
    plain = make_config(as_format_2(raw, HEAD_VECTORS, vectors=fields), path)
    assert isinstance(plain, PrunedEncoderConfig)
    tokenizer = load_tokenizer(home, plain.encoder_config)
    reader = SidesReader(tokenizer, home, directory)
    sides = reader.read(layout.said, _usual_length(home, limits))
    config = make_config(as_format_2(raw, HEAD_VECTORS, vectors={**fields, "expansion": sides.only_queries}), path)
    used = [directory / name for name in (MODULES, SETTINGS, METADATA)]
    used += [*limit_files(home), *(module.folder / "config.json" for module in layout.modules), *own, *files]
    found = assemble(home, raw, config, {**weights, **more}, [file for file in used if file.is_file()])
    check_sides(sides, found.student, directory)
    return _completed(found, directory, sides, _told(directory, layout, sides, found) + reader.notes)


def _usual_length(home: Path, limits: Mapping[str, Any]) -> int | None:
    """Return how long texts may be of which nothing else is said; None: as long as the model reads."""
    most = stated_length(home, limits.get("max_seq_length"), 1)
    for value in (most, document(home / "tokenizer_config.json").get("model_max_length")):
        if isinstance(value, int) and 0 < value < UNLIMITED:
            return value
    return None


def _stanford(directory: Path) -> Layout:
    """Stanford's ColBERT: the projection is in the file of the encoder's weights."""
    path = directory / METADATA
    try:
        fields = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    except ValueError as error:
        raise InputError(f"{path} is no JSON: {quoted(error)}") from error
    if not isinstance(fields, dict):
        raise InputError(f"{path} holds {type(fields).__name__}; accepted is a JSON object")
    said = {
        "query_prefix": fields.get("query_token_id") or "[unused0]",
        "document_prefix": fields.get("doc_token_id") or "[unused1]",
        "query_length": fields.get("query_maxlen") or 32,
        "document_length": fields.get("doc_maxlen") or 220,
        "attend_to_expansion_tokens": bool(fields.get("attend_to_mask_tokens")),
        "do_query_expansion": True,
        "skiplist_words": list(string.punctuation) if fields.get("mask_punctuation", True) else [],
    }
    return Layout(home=directory, modules=(), said=said, name="Stanford")


def _modular(directory: Path, kind: str) -> Layout:
    """PyLate's directories, and those of sentence-transformers' own class, whose fields lie elsewhere."""
    home, *modules = modules_of(directory)
    said = document(directory / SETTINGS)
    if kind == "PyLate":
        usual = {
            "query_prefix": "[Q] ",
            "document_prefix": "[D] ",
            "query_length": 32,
            "document_length": 180,
            "do_query_expansion": True,
            "attend_to_expansion_tokens": False,
            "skiplist_words": list(string.punctuation),
        }
        given = {name: said[name] for name in usual if said.get(name) is not None}
        return Layout(home=home.folder, modules=tuple(modules), said={**usual, **given}, name="PyLate")
    limits = fields_of_limits(home.folder)
    own: dict[str, Any] = {
        name: limits[name] for name in ("query_length", "document_length", "query_expansion") if name in limits
    }
    mask = next(document(module.folder / "config.json") for module in modules if module.kind == MASK)
    if mask.get("keep_only_token_ids"):
        raise InputError(f"{directory}: keep_only_token_ids is set, as for images; accepted are models of text")
    masked: dict[str, Any] = {
        name: mask[name] for name in ("skiplist_words", "skiplist_tasks") if mask.get(name) is not None
    }
    return Layout(
        home=home.folder,
        modules=tuple(modules),
        said={**_of_older_saves(said), **own, **masked},
        name="sentence-transformers",
    )


def _of_older_saves(said: Mapping[str, Any]) -> dict[str, Any]:
    """Return PyLate's fields of a directory that sentence-transformers wrote, where it has any. Its words to skip are in a module."""
    names = ("query_prefix", "document_prefix", "query_length", "document_length", "query_expansion")
    more = ("do_query_expansion", "attend_to_expansion_tokens")
    found = {name: said[name] for name in (*names, *more) if name in said}
    return {"do_query_expansion": True, **found} if found else {}


def _projections(
    layout: Layout, weights: dict[str, Tensor], options: ReadOptions
) -> tuple[list[Any], dict[str, Tensor], list[Path]]:
    """Return the projections, their weights by the names that they have in the student, and their files; `weights` loses them."""
    if layout.name == "Stanford":
        table = weights.pop(LINEAR, None)
        if table is None or table.ndim != 2:
            got = "missing" if table is None else str(tuple(table.shape))
            raise InputError(
                f"{layout.home}: {LINEAR} is {got}; accepted is the projection of {HF_COLBERT}, (D, hidden_size)"
            )
        return [[table.shape[1], table.shape[0], False, "none", False]], {"projections.0.linear.weight": table}, []
    projections: list[Any] = []
    more: dict[str, Tensor] = {}
    files: list[Path] = []
    for module in layout.modules:
        if module.kind == "Dense":
            own = weight_files(module.folder, options.allow_pickle)
            more |= {f"projections.{len(projections)}.{name}": tensor for name, tensor in read_weights(own).items()}
            files += own
        if (projection := projection_of(module)) is not None:
            projections.append(projection)
    return projections, more, files


def _told(directory: Path, layout: Layout, sides: Sides, found: Checkpoint) -> tuple[str, ...]:
    """Say in a sentence what was read."""
    fill = ""
    if sides.query.expand_to:
        token = found.tokenizer.id_to_token(sides.expansion or 0)
        fill = f"; queries are filled up to {sides.query.expand_to} tokens with {token}" + (
            "" if sides.attends else ", which are not attended to"
        )
    skipped = f"; {len(sides.skip)} tokens, such as punctuation, have no vector in documents" if sides.skip else ""
    return (
        f"{directory.name} was taken for a model of late interaction ({layout.name}): a vector for each token{fill}{skipped}",
    )


def _completed(checkpoint: Checkpoint, directory: Path, sides: Sides, notes: tuple[str, ...]) -> Checkpoint:
    """Add how texts are read."""
    home = checkpoint.directory
    settings = prompts_of(document(directory / SETTINGS), directory)
    lowered = bool(fields_of_limits(home).get("do_lower_case")) and sentence_transformers.put_in_lower_case(
        checkpoint.tokenizer
    )
    return dataclasses.replace(
        checkpoint,
        directory=directory,
        tokenizer_home=home,
        tokenizer_edited=lowered,
        notes=(*checkpoint.notes, *notes),
        settings={
            **settings,
            "max_tokens": sides.longest(checkpoint.student.max_tokens),
            "vectors": dataclasses.asdict(sides),
        },
    )
