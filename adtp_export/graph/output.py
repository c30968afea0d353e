"""What an output directory holds beside models: tokenizer, config, manifest."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

from ..files import read_json
from ..model import backbones, registry
from ..model.checkpoint import Checkpoint
from ..model.config import AdtpBertConfig, PrunedEncoderConfig
from ..model.tokenizer import TOKENIZER_FILES
from ..records import MANIFEST_NAME, Manifest, file_entry


def write_companions(checkpoint: Checkpoint, work: Path) -> None:
    """Write tokenizer files and a plain transformers config with an `adtp` block, which other tools load without knowing us."""
    for name in TOKENIZER_FILES:
        if (source := checkpoint.directory / name).is_file():
            shutil.copyfile(source, work / name)
            if name == "tokenizer_config.json":
                _without_code(work / name)
    if not (work / "tokenizer.json").exists():
        checkpoint.tokenizer.save(str(work / "tokenizer.json"))
    student = checkpoint.student
    config, encoder = student.config, student.dense.config
    stored = config.backbone if isinstance(config, PrunedEncoderConfig) else checkpoint.raw_config
    left = (*AdtpBertConfig.OWN_FIELDS, "auto_map", "torch_dtype", "dtype")
    plain = {
        **{name: value for name, value in stored.items() if name not in left},
        "model_type": encoder.model_type,
        "architectures": [type(student.dense).__name__],
        "id2label": {str(i): label for i, label in (config.id2label or {}).items()},
        "label2id": config.label2id,
        **_encoder_fields(encoder),
        "problem_type": config.problem_type,
        "adtp": {
            "head": config.head,
            "max_tokens": student.max_tokens,
            "method": config.method,
            "prune_sites": list(student.site_names),
            **(dataclasses.asdict(config.settings) if config.settings else {}),
        },
    }
    (work / "config.json").write_text(json.dumps(plain, indent=2) + "\n", encoding="utf-8")


def _encoder_fields(config: Any) -> dict[str, Any]:
    """Return what describes an encoder, under BERT's names and the family's own.

    All are written, even where the checkpoint leaves them to their defaults: whoever loads the directory may have others.
    """
    family, fields = registry.backbone(config.model_type), backbones.fields(config)
    return {**fields, **{family.own_name(name): value for name, value in fields.items() if name not in family.fixed}}


def _without_code(path: Path) -> None:
    """Take out of a JSON file what names code for transformers to load."""
    fields = read_json(path)
    if isinstance(fields, dict) and fields.pop("auto_map", None) is not None:
        path.write_text(json.dumps(fields, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def write_manifest(manifest: Manifest, work: Path) -> Manifest:
    """Add size and hash of every file that has none yet to the manifest and write it, last of all; return it."""
    files = {
        name: manifest.files.get(name) or file_entry(path)
        for path in sorted(work.rglob("*"))
        if path.is_file() and (name := path.relative_to(work).as_posix()) != MANIFEST_NAME
    }
    manifest = dataclasses.replace(manifest, files=files)
    text = json.dumps(manifest.to_json(), indent=2, ensure_ascii=False) + "\n"
    (work / MANIFEST_NAME).write_text(text, encoding="utf-8")
    return manifest
