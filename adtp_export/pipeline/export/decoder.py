"""Export of a model that generates text: its files, what they were found to be off, and what `generate` has to know."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ...artifacts.directory import OutputDirectory, writing
from ...artifacts.records import (
    DECOMPOSED,
    INCONCLUSIVE,
    PLUGIN,
    UNVERIFIED,
    VERIFIED,
    Manifest,
    Note,
    ShapeRange,
    Target,
)
from ...contract import (
    CHECKPOINT_SHA256,
    EMBED_MODEL,
    HEAD_TEXT,
    PRECISION,
    PREFILL_MODEL,
    STEP_MODEL,
    VERSION,
    VISION_MODEL,
    __version__,
)
from ...environment import versions
from ...errors import InputError, MissingDependencyError, VerificationError, quoted
from ...imports import sentence_transformers
from ...inference.chat import read_chat
from ...io import directory_name, json_text, sha256
from ...model.checkpoint import read_config
from ...model.decoder import Decoder, check_images, generates, load_decoder
from ...model.image_pruners import DIVPRUNE, read_method
from ...model.tokenizer import TOKENIZER_FILES, complete
from ...model.tokenizer_settings import TOKENIZER
from ...model.tower import CLASSES
from ...model.vision import KINDS
from ...model.weights import weight_files
from ...options import options_of
from ...runtimes import onnxruntime
from ...targets.specs import CPU, TargetSpec
from ...verify.flips import excused
from ...verify.prefill import Expected, compare, expect, for_precision
from ...verify.prompts import draw_prompts, failure_before_prefill
from ..progress import Steps
from .decoder_files import form_of, names_of, precisions_of, write_files, write_lower
from .options import ExportOptions
from .publish import publish_with_report

TAKEN = ("model_dir", "out", "force", "pruning", "precisions", "attention", "skip_parity_check", "allow_pickle")
"""Options that models which generate text have."""
COMPANIONS = (
    *TOKENIZER_FILES,
    "generation_config.json",
    "preprocessor_config.json",
    "processor_config.json",
    "chat_template.jinja",
    "chat_template.json",
)
STEPS = 4
"""Greedy tokens that a target is compared on behind each prompt."""


def is_decoder(options: ExportOptions) -> bool:
    """Whether the directory holds a model that is exported to generate text: none of vectors or answers is asked for.

    Raises:
        InputError: `--pruning` is given, and the model does not generate text; or it does, and reads images in a way that is not accepted.
    """
    directory = Path(options.model_dir)
    readable = (
        (directory / "config.json").is_file()
        and options.head is None
        and not sentence_transformers.recognise(directory)
    )
    raw = read_config(directory) if readable else {}
    found = readable and generates(raw)
    check_images(raw, directory / "config.json")
    if options.pruning is not None and not found:
        raise InputError(
            f"--pruning: image tokens leave inside models that generate text, and {directory} holds none; accepted are the model types "
            f"{', '.join([*KINDS, *CLASSES])}. Leave it out"
        )
    return found


def export_decoder(options: ExportOptions, steps: Steps) -> Manifest:
    """Export a model that generates text; errors are those of `export`."""
    precisions_of(options)
    check_taken(options, TAKEN, "models that generate text", ". For vectors of such a model, type: --head embedding")
    model_dir = Path(options.model_dir)
    out = options.directory
    directory = OutputDirectory(out, options.force, protected=model_dir)
    with steps.step("load_s", f"loading {model_dir.name}"):
        decoder = load_decoder(model_dir, read_pruning(options.pruning, model_dir), allow_pickle=options.allow_pickle)
    hashed = sha256(model_dir / "config.json", *weight_files(model_dir, options.allow_pickle))
    metadata = {VERSION: __version__, PRECISION: "fp32", CHECKPOINT_SHA256: hashed, "pruning": _stages(decoder)}
    with directory:
        with writing(out):
            write_companions(decoder, directory.work)
        write_files(decoder, directory.work, metadata, steps)
        targets, record = _targets(decoder, directory.work, options, steps)
        manifest = Manifest(
            versions=versions(),
            checkpoint=_described(decoder, model_dir, hashed),
            profile={
                "batch": ShapeRange(1, 1, 32),
                "seq": ShapeRange(1, min(128, decoder.max_tokens), decoder.max_tokens),
            },
            retention={},
            targets=targets,
            verification=record,
            notes=(*_notes(decoder), *_excused(targets)),
            durations_s=dict(steps.durations_s),
        )
        return publish_with_report(directory, manifest)


def check_taken(options: ExportOptions, taken: Sequence[str], what: str, hint: str) -> None:
    """Raises InputError for an option that is not for models of this kind, and MissingDependencyError where none can be verified."""
    if options.update:
        raise InputError(f"--update: {what} are exported whole; type --force to replace an earlier export")
    for known in options_of(ExportOptions):
        value = getattr(options, known.name)
        if known.name not in taken and value != known.default and value not in ((), []):
            raise InputError(
                f"{known.flag}: got {quoted(value)}, which does not go with {what}: they are exported for ONNX "
                f"Runtime on CPUs alone, with fewer options; leave it out{hint}"
            )
    if options.attention == PLUGIN and (obstacle := onnxruntime.operators_obstacle()):
        raise MissingDependencyError(f"--attention plugin: {obstacle}")
    if not options.skip_parity_check and onnxruntime.installed() is None:
        raise MissingDependencyError(
            "verification needs ONNX Runtime, which is not installed; type: pip install 'adtp-export[cpu]', or add --skip-parity-check"
        )


def read_pruning(given: Any, model_dir: Path) -> Mapping[str, Any] | None:
    """Return what `--pruning` names for a model; None: nothing was given."""
    return None if given is None else read_method(given, read_config(model_dir))


def _stages(decoder: Decoder) -> list[dict[str, Any]]:
    if decoder.kept_tokens:
        return [{"method": DIVPRUNE, "kept_tokens": decoder.kept_tokens}]
    return [dataclasses.asdict(stage) for stage in decoder.stages]


def _described(decoder: Decoder, model_dir: Path, hashed: str) -> dict[str, Any]:
    """Say in the manifest what was exported."""
    return {
        "name": directory_name(model_dir),
        "sha256": hashed,
        "stored_dtype": str(decoder.raw_config.get("dtype") or decoder.raw_config.get("torch_dtype") or "float32"),
        "backbone": decoder.backbone.config.model_type,
        "head": HEAD_TEXT,
        "prune_sites": [f"{stage.layer}.attention" for stage in decoder.stages],
        "pruning": _stages(decoder),
    }


def write_companions(decoder: Decoder, work: Path) -> None:
    """Write tokenizer and processor files, and the configuration with a block `adtp`."""
    for name in COMPANIONS:
        if (decoder.directory / name).is_file():
            shutil.copyfile(decoder.directory / name, work / name)
    if (work / TOKENIZER).is_file():
        complete(work / TOKENIZER, decoder.directory, decoder.backbone.config)
    block = {
        name: getattr(decoder, name)
        for name in (
            "image_token",
            "image_tokens",
            "image_size",
            "pictures",
            "max_tokens",
            "stop_tokens",
            "repetition_penalty",
        )
    }
    block["vocab_size"] = decoder.backbone.config.vocab_size
    plain = {name: value for name, value in decoder.raw_config.items() if name != "pruning"}
    fields = {**plain, "adtp": {"head": HEAD_TEXT, **block}}
    (work / "config.json").write_text(json_text(fields), encoding="utf-8")


def _targets(
    decoder: Decoder, work: Path, options: ExportOptions, steps: Steps
) -> tuple[dict[str, Target], dict[str, Any]]:
    """Write files of lower precisions, and compare all in ONNX Runtime: with its own nodes and with the operators of `plugins`, where these
    run here."""
    chosen = {DECOMPOSED: "", PLUGIN: onnxruntime.operators_obstacle() or ""}
    wanted = [name for name in chosen if options.attention in (None, "auto", name)]
    targets: dict[str, Target] = {}
    expected: Expected | None = None
    for precision in precisions_of(options):
        rounded = decoder if precision == "fp32" else write_lower(decoder, work, precision, steps)
        if not options.skip_parity_check:
            expected = _expected(decoder, rounded, precision, expected, steps)
            _check_before_prefill(decoder, work, precision)
        for attention in [name for name in wanted if not chosen[name]]:
            spec = TargetSpec(
                runtime="onnxruntime", device=CPU, precision=precision, form=form_of(precision), attention=attention
            )
            targets[str(spec)] = _target(decoder, work, spec, expected, steps)
    return targets, {"text": "random prompts", "rows": len(expected.prompts)} if expected else {}


def _target(decoder: Decoder, work: Path, spec: TargetSpec, expected: Expected | None, steps: Steps) -> Target:
    names, parity = names_of(decoder, spec.precision), None
    if expected is not None:
        with steps.step(f"verify_{spec}_s", f"comparing {spec} with PyTorch"):
            files = [
                onnxruntime.OnnxRuntimeEngine(work / names[name], plugin=spec.attention == PLUGIN)
                for name in (PREFILL_MODEL, STEP_MODEL)
            ]
            parity = compare(decoder, expected, files[0].run, files[1].run)
        if parity.failure:
            raise VerificationError(f"{spec}: {parity.failure}")
    return Target(
        file=names[PREFILL_MODEL],
        status=UNVERIFIED if parity is None else VERIFIED if parity.rows_compared else INCONCLUSIVE,
        attention=spec.attention,
        parity=parity,
        details={Path(name).stem: file for name, file in names.items() if name != PREFILL_MODEL},
        verification={"text": "random prompts", "rows": parity.rows} if parity else {},
    )


def _expected(decoder: Decoder, rounded: Decoder, precision: str, before: Expected | None, steps: Steps) -> Expected:
    """Return what PyTorch says of prompts; before: the same for another precision, whose answers in fp64 are kept."""
    if before is None:
        with steps.step("oracle_s", "running PyTorch in fp32 and fp64"):
            return expect(decoder, draw_prompts(decoder, STEPS), STEPS)
    with steps.step(f"oracle_{precision}_s", f"running PyTorch in {precision}"):
        return for_precision(before, rounded, precision)


def _check_before_prefill(decoder: Decoder, work: Path, precision: str) -> None:
    """Raises VerificationError where what prompts are made of is wrong already."""
    names = names_of(decoder, precision)
    if precision != "fp32" and names[EMBED_MODEL] == EMBED_MODEL:
        return  # seen already
    run = {
        name: onnxruntime.OnnxRuntimeEngine(work / names[name]).run
        for name in (EMBED_MODEL, VISION_MODEL)
        if name in names
    }
    if failure := failure_before_prefill(decoder, run[EMBED_MODEL], run.get(VISION_MODEL), precision):
        raise VerificationError(failure)


def chat_note(decoder: Decoder) -> tuple[Note, ...]:
    """Say why the chat template cannot be used, where there is one."""

    def find(name: str) -> Path | None:
        path = decoder.directory / name
        return path if path.is_file() else None

    try:
        with_images = decoder.image_token is not None
        if (chat := read_chat(find, parts=with_images)) is not None:
            image = [{"type": "image"}] if with_images else []
            chat.prompt([{"role": "user", "content": [*image, {"type": "text", "text": "a text"}]}])
    except MissingDependencyError:
        return ()
    except InputError as error:
        return (Note(f"adtp-run --chat and messages cannot be used: {error}"),)
    return ()


_IGNORED = (
    "num_beams",
    "no_repeat_ngram_size",
    "suppress_tokens",
    "begin_suppress_tokens",
    "bad_words_ids",
    "sequence_bias",
    "min_length",
    "min_new_tokens",
    "encoder_repetition_penalty",
    "encoder_no_repeat_ngram_size",
    "exponential_decay_length_penalty",
    "guidance_scale",
    "watermarking_config",
    "penalty_alpha",
    "dola_layers",
    "stop_strings",
    "max_time",
)
_IGNORED_TOKENS = ("forced_bos_token_id", "forced_eos_token_id")
"""Fields of `generation_config.json` that decide which token is the likeliest, or where a text ends, and are not followed here."""
_NEUTRAL = (("num_beams", 1), ("guidance_scale", 1), ("encoder_repetition_penalty", 1))
"""Beside 0, empty and null; but 0 is a token."""


def _excused(targets: Mapping[str, Target]) -> list[Note]:
    """Say of each target whose image tokens may be others than PyTorch's."""
    found = {name: target.parity for name, target in targets.items() if target.parity and target.parity.excused_flips}
    return [Note(f"{name}: {excused(parity, 'prompt')}", name) for name, parity in found.items()]


def _notes(decoder: Decoder) -> tuple[Note, ...]:
    found = {name: getattr(decoder.model.generation_config, name, None) for name in (*_IGNORED, *_IGNORED_TOKENS)}
    ignored = [name for name in _IGNORED if found[name] and (name, found[name]) not in _NEUTRAL]
    ignored += [name for name in _IGNORED_TOKENS if found[name] is not None]
    told = (
        (Note(f"generation_config.json: ignored, and followed by transformers: {', '.join(ignored)}"),)
        if ignored
        else ()
    )
    if not decoder.stages and not decoder.kept_tokens:
        return (*told, *chat_note(decoder))
    where = f"before the layers {', '.join(str(stage.layer) for stage in decoder.stages)}"
    if decoder.kept_tokens:
        where = f"before the language model, which reads {decoder.kept_tokens} of {decoder.image_tokens} of a picture"
    return (
        Note(
            f"image tokens leave {where}. Tasks that read text in pictures lose the most: measure yours on the pruned "
            "and the unpruned model"
        ),
        *told,
        *chat_note(decoder),
    )
