"""`import_checkpoint`: a checkpoint of any system that is read becomes a student of format 2."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict, Unpack

from ..artifacts.directory import OutputDirectory, writing
from ..errors import InputError, needs_extras
from ..io import read_json
from .options import PathLike, read_options
from .progress import Steps

if TYPE_CHECKING:
    from ..model.checkpoint import Checkpoint
    from ..model.encoder import PrunedEncoder


class ImportKeywords(TypedDict, total=False):
    """The fields of `imports.ReadOptions`, for type checkers."""

    allow_pickle: bool
    padded_length: int | None
    length_config: PathLike | Sequence[int] | None
    head: str | None


@needs_extras("import_checkpoint")
def import_checkpoint(
    model_dir: PathLike,
    out: PathLike,
    *,
    force: bool = False,
    steps: Steps | None = None,
    **options: Unpack[ImportKeywords],
) -> dict[str, Any]:
    """Write a checkpoint as format 2, which transformers' Auto classes and `export` load; its weights are the same to the bit.

    Args:
        model_dir: as for `export`: of this project, a plain encoder, or of a system in `imports/`.
        out: directory for the student.
        force: replace a student at `out`.
        steps: times the steps and is told how they go; by default nothing is shown.
        options: `allow_pickle`, `padded_length`, `length_config` and `head`, as for `export`.

    Returns:
        What was written: "out", "backbone", "head", "method" (None: a plain encoder), "sites", and "notes" on what `model_dir` was
        taken for and what differs from the original.

    Raises:
        InputError: bad input, or a directory that may not be replaced; nothing is written.
        MissingDependencyError: the extra "export" is not installed.
    """
    steps, source = steps or Steps(), Path(model_dir)
    with steps.step("import_s", "importing PyTorch and transformers"):
        from ..imports import ReadOptions, open_checkpoint
    read = read_options(ReadOptions, options)
    directory = StudentDirectory(Path(out), force, protected=source)
    with steps.step("load_s", f"loading {source.name}"):
        checkpoint = open_checkpoint(source, read)
    with directory, writing(directory.path):
        student = _write(checkpoint, directory.work)
        directory.publish()
    config = student.config
    return {
        "out": str(out),
        "backbone": config.encoder_config.model_type,
        "head": config.head,
        "method": config.method,
        "sites": list(student.site_names),
        "notes": list(checkpoint.notes),
    }


class StudentDirectory(OutputDirectory):
    """A directory of a student, which has no manifest: only files of a student's names are replaced."""

    ADVICE = "add --force to replace it"

    def _check_ours(self) -> None:
        from ..model.checkpoint import INDEX
        from ..model.config import PrunedEncoderConfig
        from ..model.tokenizer import TOKENIZER_FILES

        path = self.path / "config.json"
        config = read_json(path) if path.is_file() else {}
        if not isinstance(config, dict) or config.get("model_type") != PrunedEncoderConfig.model_type:
            raise InputError(f"{self.path} is no student of format 2; remove it yourself or give another place")
        own = {path.name, INDEX, *TOKENIZER_FILES}
        others = sorted(
            place.name
            for place in self.path.iterdir()
            if place.name not in own and not (place.name.startswith("model") and place.suffix == ".safetensors")
        )
        if others:
            raise InputError(f"{self.path} holds more than a student, such as {others[0]}; move that elsewhere")


def _write(checkpoint: Checkpoint, work: Path) -> PrunedEncoder:
    """Write configuration, weights and tokenizer; return the student."""
    from ..model.checkpoint import TEXTS
    from .companions import write_tokenizer

    student = _in_format_2(checkpoint.student)
    if checkpoint.settings:
        setattr(student.config, TEXTS, dict(checkpoint.settings))
    student.save_pretrained(work)
    write_tokenizer(checkpoint, work, checkpoint.max_tokens)
    _name_tokenizer(checkpoint, work)
    return student


def _in_format_2(student: PrunedEncoder) -> PrunedEncoder:
    """Return a student of format 1 with the same weights as one of format 2; others are that already."""
    from ..model.config import AdtpBertConfig, PrunedEncoderConfig
    from ..model.heads import head_class

    config = student.config
    if not isinstance(config, AdtpBertConfig):
        return student
    sites = {"method": config.method, "sites": list(student.site_names)}
    labels = {name: getattr(config, name) for name in ("id2label", "label2id", "problem_type")}
    encoder = config.encoder_config.to_dict()
    pruning = {**sites, **dataclasses.asdict(config.settings)}
    again = head_class(config.head)(
        PrunedEncoderConfig(
            backbone=encoder, pruning=pruning if student.site_names else None, head=config.head, **labels
        )
    )
    own = {f"pruners.{name}": weight for name, weight in student.pruners.state_dict().items()}
    inside = {id(weight) for weight in student.pruners.parameters()}
    dense = {name: weight for name, weight in student.named_parameters() if id(weight) not in inside}
    again.load_state_dict({**dense, **own})
    return again.eval()


def _name_tokenizer(checkpoint: Checkpoint, work: Path) -> None:
    """Say which class loads `tokenizer.json`, where nothing does: transformers goes by the family, and knows none of ours."""
    from ..model.tokenizer import TOKENIZER_SETTINGS

    path = work / TOKENIZER_SETTINGS
    fields = read_json(path) if path.is_file() else {}
    if not isinstance(fields, dict) or "tokenizer_class" in fields:
        return
    fields["tokenizer_class"] = "PreTrainedTokenizerFast"
    pad = checkpoint.tokenizer.id_to_token(checkpoint.student.pad_id)
    fields.setdefault("pad_token", pad)
    path.write_text(json.dumps(fields, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
