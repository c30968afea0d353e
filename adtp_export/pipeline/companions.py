"""What an output directory holds beside models: tokenizer, config, manifest."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from tokenizers import Tokenizer

from ..contract import (
    HEAD_EMBEDDING,
    HEAD_HYBRID,
    HEAD_MASKED,
    HEAD_SEQUENCE,
    HEAD_SPANS,
    HEAD_SPARSE,
    HEAD_TOKENS,
    HEAD_VECTORS,
)
from ..data.windows import Windows
from ..imports import chat_template
from ..imports.limits import limit_files
from ..io import read_json, share
from ..model import registry
from ..model.checkpoint import Checkpoint
from ..model.config import LABEL_FIELDS, AdtpBertConfig, EmbeddingSettings, PrunedEncoderConfig
from ..model.encoder import PrunedEncoder
from ..model.heads.embedding import MODULES, PrunedEncoderForEmbedding
from ..model.tokenizer import TOKEN_NAMES, TOKENIZER_FILES, with_rows
from ..model.tokenizer_settings import TOKENIZER, TOKENIZER_SETTINGS
from ..model.vectors import VectorSettings

POOLING_MODES = {"mean": "mean_tokens", "first": "cls_token", "last": "lasttoken", "max": "max_tokens"}
"""What sentence-transformers calls our poolings."""
LEFT_OUT = ("auto_map", "max_length", "stride", "truncation_strategy", "pad_to_multiple_of")
"""Of a tokenizer's settings: code to load, and arguments of a call that transformers saved with them. fastembed reads `max_length`."""
_OF_VECTORS = (HEAD_EMBEDDING, HEAD_VECTORS, HEAD_HYBRID)
PROMPTS = "config_sentence_transformers.json"
"""Where sentence-transformers keeps what is put before texts."""
_PROMPT_FIELDS = {"prompts": "prompts", "prompt": "default_prompt_name", "truncate_dim": "truncate_dim"}
"""Our settings, and what they are called there."""


def write_companions(checkpoint: Checkpoint, work: Path, windows: Windows | None = None) -> None:
    """Write tokenizer files and a plain transformers config with an `adtp` block, which other tools load without knowing us.

    Args:
        windows: how contexts are read, for the head "spans"; default: as in transformers.
    """
    student = checkpoint.student
    config, encoder = student.config, student.dense.config
    windows = (windows or Windows()).within(checkpoint.max_tokens)
    write_tokenizer(checkpoint, work, windows.max_tokens if config.head == HEAD_SPANS else checkpoint.max_tokens)
    if checkpoint.tokenizer_home is not None and (prompts := checkpoint.directory / PROMPTS).is_file():
        shutil.copyfile(prompts, work / PROMPTS)
    stored = config.backbone if isinstance(config, PrunedEncoderConfig) else checkpoint.raw_config
    left = (*AdtpBertConfig.OWN_FIELDS, "auto_map", "torch_dtype", "dtype", *LABEL_FIELDS)  # which `_labels` gives
    plain = {
        **{name: value for name, value in stored.items() if name not in left},
        "model_type": encoder.model_type,
        "architectures": [type(student.dense).__name__],
        **_labels(student),
        **_encoder_fields(encoder),
        "adtp": {
            "head": config.head,
            "max_tokens": checkpoint.max_tokens,
            "method": config.method,
            "prune_sites": list(student.site_names),
            **(dataclasses.asdict(config.settings) if config.settings else {}),
            **({"dimension": _dimension(student)} if config.head in _OF_VECTORS else {}),
            **({"mask_token_id": config.mask_token_id} if config.head == HEAD_MASKED else {}),
            **({"dimension": encoder.vocab_size} if config.head == HEAD_SPARSE else {}),
            **({"windows": dataclasses.asdict(windows)} if config.head == HEAD_SPANS else {}),
            **checkpoint.settings,
        },
    }
    _write_json(work / "config.json", plain)
    if config.head == HEAD_EMBEDDING:
        _write_pipeline(checkpoint, work)


def reads_alike(checkpoint: Checkpoint, out: Path) -> bool:
    """Say whether an output directory's `tokenizer.json` reads texts as the checkpoint's tokenizer does, but for where it cuts them."""
    there = (out / TOKENIZER).read_text(encoding="utf-8")
    return _uncut(there) == _uncut(json.dumps(_spelled(checkpoint)))


def _uncut(spelled: str) -> dict[str, Any]:
    """Return the content of a `tokenizer.json` as today's `tokenizers` spells it, without its truncation and padding."""
    return {**json.loads(Tokenizer.from_str(spelled).to_str()), "truncation": None, "padding": None}


def _spelled(checkpoint: Checkpoint) -> dict[str, Any]:
    """Return the content of `tokenizer.json` for an output directory: that of the checkpoint's own file, if it reads texts as the tokenizer
    does. Tokens may stand beside that file, and options may change what it says.
    """
    rows = checkpoint.student.dense.config.vocab_size
    made = with_rows(json.loads(checkpoint.tokenizer.to_str()), rows)
    file = (checkpoint.tokenizer_home or checkpoint.directory) / TOKENIZER
    own = with_rows(json.loads(file.read_text(encoding="utf-8")), rows) if file.is_file() else made
    return own if _uncut(json.dumps(own)) == _uncut(json.dumps(made)) else made


def write_tokenizer(checkpoint: Checkpoint, work: Path, longest: int) -> None:
    """Write the files of a tokenizer. They say for every client what `load` does by itself: texts are cut at `longest` tokens on their
    right, and nothing is padded.

    `tokenizers` cuts and pads as `tokenizer.json` says; transformers, transformers.js and fastembed go by `tokenizer_config.json`. Other
    content of the files stays, so that those who read the checkpoint read OUT as well.
    """
    home = checkpoint.tokenizer_home or checkpoint.directory
    for source in (home / name for name in TOKENIZER_FILES):
        if source.is_file():
            shutil.copyfile(source, work / source.name)
    stored, settings = work / TOKENIZER, work / TOKENIZER_SETTINGS
    whole = json.loads(stored.read_text(encoding="utf-8")) if stored.exists() else {}
    cut = {"direction": "Right", "max_length": longest, "strategy": "LongestFirst", "stride": 0}
    rows = checkpoint.student.dense.config.vocab_size
    _write_json(stored, {**_spelled(checkpoint), "truncation": cut, "padding": None}, escaped=False)
    gone = [token["content"] for token in whole.get("added_tokens", []) if token["id"] >= rows]
    for path in (work / name for name in TOKEN_NAMES):
        if gone and path.is_file():
            _write_json(path, _without(gone, read_json(path)), escaped=False)
    fields = read_json(settings) if settings.is_file() else {}
    if isinstance(fields, dict):
        _write_json(settings, _settled(_without(gone, fields), checkpoint, longest))


def _without(tokens: list[str], document: Any) -> Any:
    """Return the content of a tokenizer's other files without some tokens, which transformers would add to it again."""

    def stays(value: Any) -> bool:
        return value not in tokens and not (isinstance(value, dict) and value.get("content") in tokens)

    if isinstance(document, dict):
        return {k: _without(tokens, value) for k, value in document.items() if k not in tokens and stays(value)}
    return [_without(tokens, value) for value in document if stays(value)] if isinstance(document, list) else document


def _write_json(path: Path, document: Any, escaped: bool = True) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(document, indent=2, ensure_ascii=escaped) + "\n", encoding="utf-8")


def _write_pipeline(checkpoint: Checkpoint, work: Path) -> None:
    """Write what makes the directory a pipeline of sentence-transformers, which takes `last_hidden_state` and pools by itself."""
    student = checkpoint.student
    assert isinstance(student, PrunedEncoderForEmbedding)
    pooling, normalize, projections = student.settings
    width = student.dense.config.hidden_size
    modes = {f"pooling_mode_{mode}": mode == POOLING_MODES[pooling] for mode in POOLING_MODES.values()}
    folders = [("Transformer", ""), ("Pooling", "1_Pooling")]
    _write_json(work / "1_Pooling" / "config.json", {"word_embedding_dimension": width, **modes})
    for i, projection in enumerate(projections):
        if isinstance(projection, str):
            folders.append(("Normalize", f"{i + 2}_Normalize"))
            continue
        inputs, outputs, bias, activation = projection
        folders.append(("Dense", f"{i + 2}_Dense"))
        made = {"in_features": inputs, "out_features": outputs, "bias": bias}
        kind = MODULES[activation]
        named = {"activation_function": f"{kind.__module__}.{kind.__qualname__}"}
        _write_json(work / folders[-1][1] / "config.json", {**made, **named})
        weights = work / folders[-1][1] / "model.safetensors"
        save_file(student.projections[i].state_dict(), weights)
        share(weights)
    if normalize:
        folders.append(("Normalize", f"{len(folders)}_Normalize"))
    listed = [
        {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{name}"}
        for i, (name, path) in enumerate(folders)
    ]
    _write_json(work / "modules.json", listed)
    read = {"max_seq_length": checkpoint.max_tokens, "do_lower_case": checkpoint.tokenizer_edited}
    _write_json(work / "sentence_bert_config.json", {**_templating(checkpoint, work), **read})
    said = {_PROMPT_FIELDS[name]: value for name, value in checkpoint.settings.items() if name in _PROMPT_FIELDS}
    if said and not (work / PROMPTS).exists():  # of students that adtp-import wrote
        _write_json(work / PROMPTS, said)


def _templating(checkpoint: Checkpoint, work: Path) -> dict[str, Any]:
    """Return what tells sentence-transformers to put texts into their chat template, and copy that."""
    home = checkpoint.tokenizer_home
    if checkpoint.template is None or home is None:
        return {}
    if (file := home / chat_template.FILE).is_file():
        shutil.copyfile(file, work / chat_template.FILE)
    fields: dict[str, Any] = next(map(read_json, limit_files(home)), {})
    kept = ("transformer_task", "modality_config", "module_output_name", "processing_kwargs")
    return {name: fields[name] for name in kept if name in fields}


def _encoder_fields(config: Any) -> dict[str, Any]:
    """Return what describes an encoder, under BERT's names and the family's own.

    All are written, even where the checkpoint leaves them to their defaults: whoever loads the directory may have others.
    """
    family, fields = registry.backbone(config.model_type), registry.fields(config)
    return {**fields, **{family.own_name(name): value for name, value in fields.items() if name not in family.fixed}}


def _labels(student: PrunedEncoder) -> dict[str, Any]:
    """Return the labels of a classifier; other heads have none."""
    config = student.config
    if config.head not in (HEAD_SEQUENCE, HEAD_TOKENS):
        return {}
    names = {str(i): label for i, label in (config.id2label or {}).items()}
    return {"id2label": names, "label2id": config.label2id, "problem_type": config.problem_type}


def _dimension(student: PrunedEncoder) -> int:
    """Return the length of a model's vectors."""
    if student.config.head == HEAD_VECTORS:
        return VectorSettings.read(student.config.vectors).dimension(int(student.dense.config.hidden_size))
    return EmbeddingSettings.read(student.config.embedding).dimension(int(student.dense.config.hidden_size))


def _settled(fields: Mapping[str, Any], checkpoint: Checkpoint, longest: int) -> dict[str, Any]:
    """Return a tokenizer's settings with how texts are read, and without what names code for transformers to load."""
    settled = {name: value for name, value in fields.items() if name not in LEFT_OUT}
    settled |= {name: "right" for name in ("padding_side", "truncation_side") if name in fields}
    pad = checkpoint.tokenizer.get_added_tokens_decoder().get(checkpoint.student.pad_id)
    if pad is not None and settled.get("pad_token") is None:
        settled["pad_token"] = pad.content  # fastembed and transformers.js cannot pad without its name
    return {**settled, **({"do_lower_case": True} if checkpoint.tokenizer_edited else {}), "model_max_length": longest}
