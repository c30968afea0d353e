"""`import_checkpoint`: a checkpoint of any system that is read becomes a student of format 2."""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..artifacts.directory import OutputDirectory, writing
from ..errors import InputError, needs_extras
from ..io import check_model_directory, json_text, read_json, share
from ..options import COUNT, PathLike, ReadOptions, about, option, options_of, takes
from .progress import Steps

if TYPE_CHECKING:
    from ..model.checkpoint import Checkpoint
    from ..model.encoder import PrunedEncoder

_STAGES, _ENCODERS = "stages of image tokens", "checkpoint"
"""Headings of the options of `calibrate_images`, and of those that do not go with it."""


@dataclass(frozen=True, kw_only=True)
class ImportOptions(ReadOptions):
    """Options of `import_checkpoint` and `adtp-import`."""

    model_dir: PathLike = field(
        kw_only=False,
        metadata=about(
            "checkpoint directory, as the other system's own code saved it, or any that adtp-export takes",
            metavar="MODEL_DIR",
        ),
    )
    out: PathLike = field(kw_only=False, metadata=about("directory to write the student to", metavar="OUT"))
    force: bool = option(False, "replace an existing student in OUT")
    calibrate_images: PathLike | None = option(
        None,
        "for vision-language models: choose the layers of Balanced Token Pruning's stages by the pictures of this folder, and write the "
        "model with these settings to OUT",
        _STAGES,
        metavar="DIR",
    )
    pruning: PathLike | None = option(
        None,
        "the stages whose layers are chosen: btp or btp-qwen as published, or a JSON file with method and stages (default: the field "
        "pruning of config.json, or btp)",
        _STAGES,
        metavar="NAME",
    )
    text: str = option(
        "Describe the image.",
        "what the user asks about each picture, in the model's chat template; or a whole prompt, with the image token in it",
        _STAGES,
    )
    max_images: int = option(
        64, "read at most this many pictures, spread evenly over their names", _STAGES, within=COUNT
    )
    steps: Steps | None = None

    def check(self) -> None:
        given = [known for known in options_of(type(self)) if getattr(self, known.name) != known.default]
        for known in given:
            if known.group == _STAGES and self.calibrate_images is None:
                raise InputError(f"{known.flag} goes with --calibrate-images; add that, or leave {known.flag} out")
            if known.group == _ENCODERS and self.calibrate_images is not None:
                raise InputError(
                    f"{known.flag} is for encoders, and --calibrate-images for vision-language models; leave one of them out"
                )


@takes(ImportOptions)
@needs_extras("import_checkpoint")
def import_checkpoint(options: ImportOptions) -> dict[str, Any]:
    """Write a checkpoint as format 2, which transformers' Auto classes and `export` load; its weights are the same to the bit.

    Returns:
        What was written: "out", "backbone", "head", "method" (None: a plain encoder), "sites", and "notes" on what `model_dir` was
        taken for and what differs from the original. With `calibrate_images` also "pruning", the settings, and "calibration", what
        they rest on.

    Raises:
        InputError: bad input, or a directory that may not be replaced; nothing is written.
        MissingDependencyError: the extra "export" is not installed.
    """
    steps, source = options.steps or Steps(), Path(options.model_dir)
    check_model_directory(source)
    if options.calibrate_images is not None:
        with steps.step("import_s", "importing PyTorch and transformers"):
            from .stage_layers import Request, calibrate
        request = Request(Path(options.calibrate_images), options.pruning, options.text, options.max_images)
        return calibrate(source, Path(options.out), options.force, request, steps)
    directory = StudentDirectory(Path(options.out), options.force, protected=source)
    with steps.step("import_s", "importing PyTorch and transformers"):
        from ..imports import open_checkpoint
        from ..model.checkpoint import read_config
        from ..model.vision import KINDS
    if (source / "config.json").is_file() and read_config(source).get("model_type") in KINDS:
        raise InputError(
            f"{source} holds a vision-language model, and adtp-export takes it as it is; to choose the layers at which its image tokens "
            "leave, type --calibrate-images DIR"
        )
    with steps.step("load_s", f"loading {source.name}"):
        checkpoint = open_checkpoint(source, options)
    with directory, writing(directory.path):
        student = _write(checkpoint, directory.work)
        directory.publish()
    config = student.config
    return {
        "out": str(options.out),
        "backbone": config.encoder_config.model_type,
        "head": config.head,
        "method": config.method,
        "sites": list(student.site_names),
        "notes": list(checkpoint.notes),
    }


WEIGHT_FILES = r"model(-\d{5}-of-\d{5})?\.safetensors"
"""Names that transformers gives to files of weights, as a regular expression."""


class StudentDirectory(OutputDirectory):
    """A directory of a student, which has no manifest: only files of a student's names are replaced."""

    ADVICE = "add --force to replace it"

    def _check_ours(self) -> None:
        from ..model.config import PrunedEncoderConfig
        from ..model.tokenizer import TOKENIZER_FILES
        from ..model.weights import INDEX

        path = self.path / "config.json"
        config = read_json(path) if path.is_file() else {}
        if not isinstance(config, dict) or config.get("model_type") != PrunedEncoderConfig.model_type:
            raise InputError(f"{self.path} is no student of format 2; remove it yourself or give another place")
        own = {path.name, INDEX, *TOKENIZER_FILES}
        others = sorted(
            place.name
            for place in self.path.iterdir()
            if place.name not in own and not re.fullmatch(WEIGHT_FILES, place.name)
        )
        if others:
            raise InputError(f"{self.path} holds more than a student, such as {others[0]}; move that elsewhere")


def _write(checkpoint: Checkpoint, work: Path) -> PrunedEncoder:
    """Write configuration, weights and tokenizer; return the student."""
    from ..model.text_settings import TEXTS
    from ..model.weights import no_bars
    from .companions import write_tokenizer

    student = _in_format_2(checkpoint.student)
    if checkpoint.settings:
        setattr(student.config, TEXTS, dict(checkpoint.settings))
    with no_bars():
        student.save_pretrained(work)
    share(*work.glob("*.safetensors"))
    write_tokenizer(checkpoint, work, checkpoint.max_tokens)
    _name_tokenizer(checkpoint, work)
    return student


def _in_format_2(student: PrunedEncoder) -> PrunedEncoder:
    """Return a student of format 1 with the same weights as one of format 2; others are that already."""
    from ..model.config import LABEL_FIELDS, AdtpBertConfig, PrunedEncoderConfig
    from ..model.heads import head_class

    config = student.config
    if not isinstance(config, AdtpBertConfig):
        return student
    sites = {"method": config.method, "sites": list(student.site_names)}
    labels = {name: getattr(config, name) for name in LABEL_FIELDS}
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
    from ..model.tokenizer_settings import TOKENIZER_SETTINGS

    path = work / TOKENIZER_SETTINGS
    fields = read_json(path) if path.is_file() else {}
    if not isinstance(fields, dict) or "tokenizer_class" in fields:
        return
    fields["tokenizer_class"] = "PreTrainedTokenizerFast"
    # By itself the class gives no types of tokens.
    fields.setdefault("model_input_names", list(checkpoint.student.input_names))
    pad = checkpoint.tokenizer.id_to_token(checkpoint.student.pad_id)
    fields.setdefault("pad_token", pad)
    path.write_text(json_text(fields), encoding="utf-8")
