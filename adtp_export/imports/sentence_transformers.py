"""Directories of sentence-transformers: a list of modules, each with a folder. They become the heads "embedding" and "sparse", rerankers
"sequence".

Source: Reimers and Gurevych, Sentence-BERT (EMNLP 2019); files as sentence-transformers 2 to 6 writes them.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import Tokenizer, normalizers
from torch import Tensor

from ..contract import HEAD_EMBEDDING, HEAD_SEQUENCE, HEAD_SPARSE
from ..data.template import ChatTemplate
from ..errors import InputError, check_int, quoted
from ..io import read_json
from ..model.checkpoint import Checkpoint, assemble, make_config, read_config
from ..model.heads.embedding import MODULES as ACTIVATIONS
from ..model.plain import FORMATS, as_format_2, check_encoder, head_of, with_format
from ..model.predictions import SparseSettings
from ..model.projections import NORMALIZE
from ..model.weights import read_weights, weight_files
from ..options import ReadOptions
from . import chat_template, logit_score, splade
from .limits import document, fields_of_limits, limit_files, stated_length

MODULES, SETTINGS = "modules.json", "config_sentence_transformers.json"
_LOGIT_SCORE = "LogitScore"
_AFTER_POOLING = ("Dense", "Normalize", "Dropout")
_KNOWN = ("Transformer", "Pooling", *_AFTER_POOLING, _LOGIT_SCORE, splade.POOLING)
_POOLINGS = {"mean": "mean", "cls": "first", "lasttoken": "last", "max": "max"}
_TOLD = {
    "mean": "the mean of all tokens",
    "first": "the first token",
    "last": "the last token",
    "max": "the maximum of all tokens",
}
_OLD_POOLINGS = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
"""Switches that older versions write, and the names that newer ones have."""
_ACTIVATIONS = {kind.__name__: name for name, kind in ACTIVATIONS.items()}


def recognise(directory: Path) -> bool:
    """Whether a directory is one of sentence-transformers."""
    return os.path.isfile(directory / MODULES)


def read(directory: Path, options: ReadOptions) -> Checkpoint:
    """Read a model of vectors, of sparse ones, or a reranker.

    Raises:
        InputError: modules that are not known, in another order, or with settings that the graph does not have; and all that plain
            directories are refused for.
    """
    modules = _modules(directory)
    home = modules[0][1]
    raw = read_config(home)
    path = home / "config.json"
    if raw.get("model_type") in FORMATS and len(modules) > 1:
        raise InputError(
            f"{path}: model_type is {quoted(raw['model_type'])}; beside {MODULES} it has to be a plain encoder"
        )
    if len(modules) == 1 or modules[1][0] == _LOGIT_SCORE:
        return _reranker(directory, home, raw, options, dict(modules).get(_LOGIT_SCORE))
    if modules[1][0] == splade.POOLING:
        return _sparse(directory, home, raw, options, modules[1][1])
    if options.head not in (None, HEAD_EMBEDDING):
        raise InputError(
            f"--head: got {options.head}, and {directory / MODULES} says that the model gives vectors; leave --head out"
        )
    check_encoder(raw, path, pooled=True)
    processing = chat_template.read(home, fields_of_limits(home), "last_hidden_state")
    pooling, after, normalized = _pipeline(modules)
    projections, weights, files = _projections(after, options)
    embedding = {"pooling": pooling, "normalize": normalized, "projections": projections}
    config = make_config(as_format_2(raw, HEAD_EMBEDDING, embedding=embedding), path)
    settings = _of_vectors(directory)
    told = (
        f"{directory.name} was taken for a model of sentence-transformers: {_TOLD[pooling]}"
        + (f", {dense} dense after it" if (dense := sum(not isinstance(each, str) for each in projections)) else "")
        + (", vectors of length 1" if normalized else "")
        + (f", of which the first {settings['truncate_dim']} numbers are taken" if "truncate_dim" in settings else ""),
    )
    own = weight_files(home, options.allow_pickle)
    used = [directory / MODULES, *(place / "config.json" for _, place in modules[1:]), *limit_files(home), *own, *files]
    files = [file for file in (*used, *_template_files(home, processing)) if file.is_file()]
    weights = {**read_weights(own), **weights}
    checkpoint = assemble(home, raw, config, weights, files, told, templated=processing.template is not None)
    return _completed(checkpoint, directory, settings, processing)


class Reading(NamedTuple):
    """How texts are read. home: folder of the encoder and its tokenizer. prompt: what is put before each text. lower: whether in lower
    case first. files: that say so.
    """

    home: Path
    prompt: str
    lower: bool
    files: tuple[Path, ...]


def reading(directory: Path) -> Reading:
    """Say how a model of vectors reads texts: a directory of sentence-transformers, or a student that was made of one.

    Raises:
        InputError: modules that are not known, or malformed prompts.
    """
    home = _modules(directory)[0][1] if recognise(directory) else directory
    stored, limits = directory / SETTINGS, limit_files(home)
    modalities = fields_of_limits(home).get("modality_config")
    if isinstance(modalities, dict) and "message" in modalities:
        raise InputError(
            f"{home}: texts go through a chat template (modality_config names 'message'); accepted as a teacher are models that read texts "
            "as they are"
        )
    said = prompts_of(document(stored), directory)
    lower = any(document(path).get("do_lower_case") for path in limits)
    prompt = said.get("prompts", {}).get(said.get("prompt"), "")
    return Reading(home, prompt, lower, tuple(path for path in (stored, *limits) if path.is_file()))


def as_its_teacher(checkpoint: Checkpoint) -> Checkpoint:
    """Have a student of vectors read texts as the model did that it was made of."""
    directory = checkpoint.directory
    return _completed(checkpoint, directory, _of_vectors(directory), chat_template.Processing(None, None))


def _reranker(
    directory: Path, home: Path, raw: Mapping[str, Any], options: ReadOptions, score: Path | None
) -> Checkpoint:
    """Read a `CrossEncoder` of version 6: a Transformer alone, or one that generates text and the folder of its LogitScore."""
    path, limits = home / "config.json", fields_of_limits(home)
    if score is None and head_of(raw, path, options.head) != HEAD_SEQUENCE:
        raise InputError(f"{directory / MODULES}: got Transformer alone; a model of vectors needs Pooling after it")
    if options.head not in (None, HEAD_SEQUENCE):
        raise InputError(
            f"--head: got {options.head}, and {directory / MODULES} says that the model ranks; leave --head out"
        )
    settings = document(directory / SETTINGS)
    activation = settings.get("activation_fn")
    said = {"activation": activation} if isinstance(activation, str) else {}
    processing = chat_template.read(home, limits, "logits")
    files = weight_files(home, options.allow_pickle)
    if score is None:
        config, weights = make_config(with_format(raw, path, options.head), path), read_weights(files)
        decides, tokens = [*files, *limit_files(home)], None
    else:
        tokens = logit_score.read(score, limits, raw, path)
        config, said = logit_score.config_of(raw, path), {**logit_score.activation(raw), **said}
        weights = logit_score.with_score(read_weights(files), tokens, config, home)
        decides = [directory / MODULES, score / "config.json", *files, *limit_files(home)]
    decides += _template_files(home, processing)
    checkpoint = assemble(home, raw, config, weights, decides, templated=processing.template is not None)
    if tokens is not None:
        told = logit_score.told(directory.name, tokens, checkpoint.tokenizer)
        checkpoint = dataclasses.replace(checkpoint, notes=(*checkpoint.notes, told))
    return _completed(checkpoint, directory, {**prompts_of(settings, directory), **said}, processing)


def _sparse(directory: Path, home: Path, raw: Mapping[str, Any], options: ReadOptions, pooling: Path) -> Checkpoint:
    """Read a `SparseEncoder`: a model of masked language, and the folder of its SpladePooling."""
    if options.head not in (None, HEAD_SPARSE):
        raise InputError(
            f"--head: got {options.head}, and {directory / MODULES} says that the model gives sparse vectors; leave --head out"
        )
    path = home / "config.json"
    check_encoder(raw, path)
    processing = chat_template.read(home, fields_of_limits(home), "logits")
    config = make_config(as_format_2(raw, HEAD_SPARSE, sparse=splade.read(pooling, raw, home)), path)
    files = weight_files(home, options.allow_pickle)
    used = [
        directory / MODULES,
        pooling / "config.json",
        *limit_files(home),
        *files,
        *_template_files(home, processing),
    ]
    told = (splade.told(directory.name, SparseSettings.read(config.sparse)),)
    checkpoint = assemble(home, raw, config, read_weights(files), used, told, templated=processing.template is not None)
    settings = document(directory / SETTINGS)
    said = {**prompts_of(settings, directory), **splade.most_active(settings, directory / SETTINGS)}
    return _completed(checkpoint, directory, said, processing)


def _completed(
    checkpoint: Checkpoint, directory: Path, settings: Mapping[str, Any], processing: chat_template.Processing
) -> Checkpoint:
    """Add how texts are read: how long they may be, whether in lower case, and what is put before and around them."""
    home = checkpoint.directory
    limits = fields_of_limits(home)
    longest = processing.max_tokens or limits.get("max_seq_length")
    longest = longest or document(home / "tokenizer_config.json").get("model_max_length")
    if (most := stated_length(home, longest, 4)) is not None:
        settings = {**settings, "max_tokens": min(most, checkpoint.student.max_tokens)}
    notes = list(checkpoint.notes)
    lowered = bool(limits.get("do_lower_case")) and put_in_lower_case(checkpoint.tokenizer)
    prompts = settings.get("prompts", {})
    if any(prompts.values()):
        default = f"{settings['prompt']!r} is put before texts" if "prompt" in settings else "none is put before texts"
        methods = {HEAD_EMBEDDING: "encode(texts", HEAD_SPARSE: "encode_sparse(texts"}
        method = methods.get(checkpoint.student.config.head, "rank(query, documents")
        notes.append(
            f"{directory.name} has the prompts {', '.join(prompts)}, which are kept in {SETTINGS}: {default} unless "
            f"{method}, prompt_name=NAME) says another one"
        )
    if (template := processing.template) is not None:
        _check_prompts(template, prompts, home)
        settings = {**settings, "template": dataclasses.asdict(template)}
        notes.append(f"{directory.name} puts texts into a chat template, which was rendered once and is kept in pieces")
    return dataclasses.replace(
        checkpoint,
        directory=directory,
        tokenizer_home=home,
        tokenizer_edited=lowered,
        notes=tuple(notes),
        settings=settings,
    )


def _check_prompts(template: ChatTemplate, prompts: Mapping[str, str], home: Path) -> None:
    """Raises InputError where a model has prompts, and its chat template no place for them."""
    pairs = bool(template.pair)
    if any(prompts.values()) and not (template.prompted_pair if pairs else template.prompted_text):
        raise InputError(
            f"{home}: the chat template cannot be rendered with the model's prompts ({', '.join(prompts)}); accepted is one with a place "
            f"for the role 'system', saved as {chat_template.FILE} beside the tokenizer"
        )


def _modules(directory: Path) -> list[tuple[str, Path]]:
    """Return the name of each module and its folder; `Transformer` is the first.

    Raises:
        InputError: a module that is not known, one that lies elsewhere, or another order.
    """
    path = directory / MODULES
    listed = read_json(path)
    if not isinstance(listed, list) or not all(isinstance(module, dict) for module in listed):
        raise InputError(f"{path} is no list of modules; accepted is what sentence-transformers writes")
    found = []
    for module in listed:
        kind, folder = module.get("type"), module.get("path")
        package, _, name = str(kind).rpartition(".")
        name = "Transformer" if name == splade.OLD_TRANSFORMER else name
        if name in splade.REFUSED:
            raise InputError(f"{path}: got the module {name}: {splade.REFUSED[name]}")
        if name not in _KNOWN or package.partition(".")[0] != "sentence_transformers":
            raise InputError(
                f"{path}: got the module {quoted(kind)}; accepted are {', '.join(_KNOWN)} of sentence-transformers"
            )
        if not isinstance(folder, str) or Path(folder).name != folder or folder == "..":
            raise InputError(f"{path}: {name} lies in {quoted(folder)}; accepted are folders of the same directory")
        found.append((name, directory / folder))
    names = [name for name, _ in found]
    heads = (["Transformer", _LOGIT_SCORE], ["Transformer", splade.POOLING])
    if len(names) > 1 and "Pooling" not in names and names not in heads:
        raise InputError(f"{path}: Pooling is missing; a model of vectors needs it after Transformer")
    pools = names[:2] == ["Transformer", "Pooling"] and all(name in _AFTER_POOLING for name in names[2:])
    if not pools and names not in (["Transformer"], *heads):
        raise InputError(
            f"{path}: got {', '.join(names) or 'no module'}; accepted are Transformer and Pooling, then any number of Dense and Normalize; "
            f"for rerankers Transformer alone, or Transformer and {_LOGIT_SCORE}; for sparse vectors Transformer and {splade.POOLING}"
        )
    return found


def _pipeline(modules: Sequence[tuple[str, Path]]) -> tuple[str, list[tuple[str, Path]], bool]:
    """Return the pooling, the modules that follow with their folders, and whether vectors are normalized at the end."""
    after = [(name, folder) for name, folder in modules[2:] if name != "Dropout"]  # which does nothing but in training
    for _, folder in after:
        _check_names(folder)
    end = len(after)
    while end and after[end - 1][0] == "Normalize":
        end -= 1
    return _pooling(modules[1][1] / "config.json"), after[:end], end < len(after)


def _pooling(path: Path) -> str:
    if not path.is_file():
        raise InputError(f"{path} is missing, which says how vectors are pooled; is the directory whole?")
    fields = document(path)
    modes = fields.get("pooling_mode", [name for field, name in _OLD_POOLINGS.items() if fields.get(field)] or "mean")
    modes = [modes] if isinstance(modes, str) else modes
    if not isinstance(modes, list) or len(modes) != 1 or not isinstance(modes[0], str) or modes[0] not in _POOLINGS:
        raise InputError(f"{path}: pooling is {quoted(modes)}; accepted is one of {', '.join(_POOLINGS)}")
    if fields.get("include_prompt") is False:
        raise InputError(f"{path}: include_prompt is false; accepted are models that pool the prompt's tokens, too")
    return _POOLINGS[modes[0]]


def _projections(
    modules: Sequence[tuple[str, Path]], options: ReadOptions
) -> tuple[list[list[Any] | str], dict[str, Tensor], list[Path]]:
    """Read Dense modules, and Normalize between them: their settings, their weights by the names that they have in the student, and the
    files.
    """
    projections: list[list[Any] | str] = []
    weights: dict[str, Tensor] = {}
    files: list[Path] = []
    for i, (kind, folder) in enumerate(modules):
        if kind == "Normalize":
            projections.append(NORMALIZE)
            continue
        fields, path = document(folder / "config.json"), folder / "config.json"
        named = str(fields.get("activation_function", "torch.nn.modules.activation.Tanh"))
        package, _, name = named.rpartition(".")
        if name not in _ACTIVATIONS or package.partition(".")[0] != "torch":
            raise InputError(
                f"{path}: activation_function is {quoted(named)}; accepted are torch's {', '.join(_ACTIVATIONS)}"
            )
        if fields.get("use_residual"):
            raise InputError(f"{path}: use_residual is true; accepted are Dense modules without a residual")
        sizes = [fields.get(size) for size in ("in_features", "out_features")]
        projections.append([*sizes, fields.get("bias", True), _ACTIVATIONS[name]])
        own = weight_files(folder, options.allow_pickle)
        weights |= {f"projections.{i}.{name}": tensor for name, tensor in read_weights(own).items()}
        files += own
    return projections, weights, files


def _check_names(folder: Path) -> None:
    """See that a module works on the vector of a text."""
    fields = document(folder / "config.json")
    for name in ("module_input_name", "module_output_name"):
        if fields.get(name) not in (None, "sentence_embedding"):
            raise InputError(
                f"{folder}: {name} is {quoted(fields[name])}; accepted are modules that work on 'sentence_embedding'"
            )


def _of_vectors(directory: Path) -> dict[str, Any]:
    """Return prompts, and how many numbers of a vector are taken where not all are."""
    settings = document(directory / SETTINGS)
    taken = settings.get("truncate_dim")
    if taken is not None:
        check_int(f"{directory / SETTINGS}: truncate_dim", taken, 1)
    return {**prompts_of(settings, directory), **({} if taken is None else {"truncate_dim": taken})}


def prompts_of(settings: Mapping[str, Any], directory: Path) -> dict[str, Any]:
    """Return the prompts that are not empty, and the one that is put before texts where nothing is said."""
    prompts, default = settings.get("prompts") or {}, settings.get("default_prompt_name")
    strings = isinstance(prompts, dict) and all(isinstance(prompt, (str, type(None))) for prompt in prompts.values())
    if not strings or not (default is None or (isinstance(default, str) and default in prompts)):
        raise InputError(
            f"{directory / SETTINGS}: prompts are {quoted(prompts)}, the default {quoted(default)}; accepted is an object of texts, and a "
            "name of it"
        )
    known = {name: prompt for name, prompt in prompts.items() if prompt is not None}
    return {**({"prompts": known} if known else {}), **({"prompt": default} if default in known else {})}


def put_in_lower_case(tokenizer: Tokenizer) -> bool:
    """Put texts in lower case before all else, as sentence-transformers does where the tokenizer does not; say whether that was so."""
    own = tokenizer.normalizer
    spelled = "" if own is None else own.__getstate__().decode()
    if '"lowercase":true' in spelled or '"Lowercase"' in spelled:
        return False
    tokenizer.normalizer = normalizers.Sequence([normalizers.Lowercase(), *([own] if own is not None else [])])
    return True


def _template_files(home: Path, processing: chat_template.Processing) -> list[Path]:
    """Return the files that a chat template may be in."""
    named = (chat_template.FILE, "tokenizer_config.json") if processing.template is not None else ()
    return [home / name for name in named if (home / name).is_file()]
