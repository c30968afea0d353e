"""What `tokenizer_config.json` changes of the tokenizer beside it, as in transformers, and which of its settings are ignored."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import transformers
from tokenizers import Tokenizer
from tokenizers.models import BPE
from tokenizers.processors import TemplateProcessing
from transformers.models.auto.tokenization_auto import TOKENIZER_MAPPING_NAMES
from transformers.utils import logging as transformers_logging

from ..contract import INPUTS, TOKEN_TYPE_IDS
from ..data.truncate import parts, unset
from ..io import read_json
from .config import AdtpBertConfig, PrunedEncoderConfig

TOKENIZER = "tokenizer.json"
TOKENIZER_SETTINGS = "tokenizer_config.json"
WORD_PIECE = {"Bert", "DistilBert", "Electra", "ConvBert", "MobileBert", "SqueezeBert", "LayoutLM", "RetriBert"}
BYTE_LEVEL = {"Roberta", "Bart", "Longformer", "LED", "GPT2", "Qwen2"}
"""Kinds whose classes set `add_prefix_space` by themselves, whatever `tokenizer.json` says."""
_WORD_PIECE_MODELS, _BYTE_LEVEL_MODELS = {"bert", "distilbert", "electra"}, {"roberta", "qwen2"}
"""Model types whose tokenizers are of such a kind where none is named."""
ANY_KIND = ("PreTrainedTokenizerFast", "TokenizersBackend")
"""transformers' class that takes what a tokenizer's files say, by its two names."""


def settings_of(directory: Path, name: str = TOKENIZER_SETTINGS) -> dict[str, Any]:
    """Return the content of one of a tokenizer's files; an empty object where there is none."""
    path = directory / name
    settings: dict[str, Any] = read_json(path) if path.is_file() else {}
    return settings


def kind_of(named: object) -> str:
    """Return what transformers' class of a tokenizer is for: "Bert" of ``BertTokenizerFast``."""
    return str(named).removesuffix("Fast").removesuffix("Tokenizer")


def class_named(settings: Mapping[str, Any], config: Any) -> str | None:
    """Return the class of a tokenizer that `tokenizer_config.json` names, or else `config.json`, in the order of `AutoTokenizer`."""
    named = settings.get("tokenizer_class") or getattr(config, "tokenizer_class", None)
    return str(named) if named else None


def follow(tokenizer: Tokenizer, settings: Mapping[str, Any], config: Any) -> Tokenizer:
    """Return a tokenizer with the types of tokens and the space before a text that settings ask for.

    Args:
        settings: of `tokenizer_config.json`. config: of the encoder, in transformers' terms.
    """
    tokenizer = _with_prefix_space(tokenizer, settings, config)
    follow_inputs(tokenizer, _inputs(settings, config))
    return tokenizer


def _with_prefix_space(tokenizer: Tokenizer, settings: Mapping[str, Any], config: Any) -> Tokenizer:
    """Have a byte-level tokenizer read the first word of a text as one behind a space, or not, as its class in transformers does."""
    named = class_named(settings, config)
    of_such_a_class = kind_of(named) in BYTE_LEVEL if named else config.model_type in _BYTE_LEVEL_MODELS
    if not of_such_a_class or TOKENIZER_MAPPING_NAMES.get(config.model_type) in ANY_KIND:  # whatever is named
        return tokenizer
    spaced = bool(settings.get("add_prefix_space", False))
    if all(
        part["add_prefix_space"] == spaced for part in parts(tokenizer.pre_tokenizer) if part["type"] == "ByteLevel"
    ):
        return tokenizer
    spelled: dict[str, Any] = json.loads(tokenizer.to_str())
    steps = {name: _spaced(spelled[name], spaced) for name in ("pre_tokenizer", "post_processor")}
    return Tokenizer.from_str(json.dumps({**spelled, **steps}))


def _spaced(step: Any, spaced: bool) -> Any:
    """Return a step of `tokenizer.json` with another `add_prefix_space` wherever it has one."""
    if isinstance(step, list):
        return [_spaced(each, spaced) for each in step]
    if not isinstance(step, dict):
        return step
    return {name: spaced if name == "add_prefix_space" else _spaced(value, spaced) for name, value in step.items()}


def _inputs(settings: Mapping[str, Any], config: Any) -> list[str]:
    """Return the names of what a tokenizer gives: those of the settings, else of the class that is named, as it is in the transformers
    that is installed; a class that is not there is taken for a general one."""
    listed, named = settings.get("model_input_names"), class_named(settings, config)
    if listed or not named:
        return list(listed or INPUTS)
    try:
        return list(getattr(transformers, named).model_input_names)
    except (AttributeError, ImportError):
        return list(transformers.PreTrainedTokenizerFast.model_input_names)


def follow_inputs(tokenizer: Tokenizer, names: list[str]) -> None:
    """Have a tokenizer give the type 0 to all tokens of a pair where the names of what it gives have no token types."""
    if TOKEN_TYPE_IDS not in names and tokenizer.post_processor is not None:  # of models without it, none has types
        untyped = _untyped(json.loads(tokenizer.post_processor.__getstate__()))
        made = Tokenizer.from_str(json.dumps({**json.loads(Tokenizer(BPE()).to_str()), "post_processor": untyped}))
        tokenizer.post_processor = made.post_processor


def _untyped(state: dict[str, Any]) -> dict[str, Any]:
    """Return a post-processor as `tokenizer.json` has it, with the type 0 alone."""
    if state["type"] == "Sequence":
        return {**state, "processors": [_untyped(each) for each in state["processors"]]}
    if state["type"] == "TemplateProcessing":
        sides = {
            side: [{kind: {**piece, "type_id": 0} for kind, piece in each.items()} for each in state[side]]
            for side in ("single", "pair")
        }
        return {**state, **sides}
    if state["type"] != "BertProcessing":
        return state  # RoBERTa's has no types, and others have none to give
    (first, _), (last, _) = named = [tuple(state[name]) for name in ("cls", "sep")]
    pair = [first, "$A:0", last, "$B:0", f"{last}:0"]
    made = TemplateProcessing(single=[first, "$A", last], pair=pair, special_tokens=named)
    spelled: dict[str, Any] = json.loads(made.__getstate__())
    return spelled


_OF_NORMALIZER = {
    "do_lower_case": ("lowercase", "lower-cased"),
    "strip_accents": ("strip_accents", "stripped of accents"),
    "tokenize_chinese_chars": ("handle_chinese_chars", "split between Chinese characters"),
}
"""Settings of BERT's tokenizers: the field of the normalizer that decides here, and what it says of texts."""


def ignored_settings(
    home: Path, tokenizer: Tokenizer, config: Any, longest: int | None = None, edited: bool = False
) -> tuple[str, ...]:
    """Say which settings of `tokenizer_config.json` are ignored here, and followed by transformers, and which decide by being left out.

    Args:
        home: directory of the tokenizer. config: of the encoder, in transformers' terms. longest: tokens that the model reads of a text,
            or of a window of it; None where it is the setting's own. edited: the tokenizer differs from its files on purpose.
    """
    settings, told = settings_of(home), []
    stored = json.loads(path.read_bytes()) if (path := home / TOKENIZER).is_file() else {}
    cut = settings.get("truncation_side") or (stored.get("truncation") or {}).get("direction") or "right"
    if str(cut).lower() != "right":
        told.append("truncation_side is ignored: long texts are cut at the end")
    limit = settings.get("model_max_length")
    if longest is not None and isinstance(limit, int) and 0 < limit < longest:
        told.append(f"model_max_length, {limit}, is ignored: texts are read up to {longest} tokens")
    if settings.get("split_special_tokens"):
        told.append("split_special_tokens is ignored: special tokens that are typed in a text are read as such")
    named, normal = class_named(settings, config), []
    if kind_of(named) in WORD_PIECE if named else config.model_type in _WORD_PIECE_MODELS:
        normal = list(_otherwise_normalized(settings, parts(tokenizer.normalizer)))
        told += normal
    typed = getattr(config, "type_vocab_size", 0) > 1
    unnamed = typed and not settings.get("model_input_names")
    if unnamed and TOKEN_TYPE_IDS not in _inputs(settings, config) and _has_types(stored.get("post_processor")):
        told.append(
            f"model_input_names is missing: every token of a pair has the type 0, as in transformers {transformers.__version__}; "
            f"list token_type_ids there if the model was trained with the types of {TOKENIZER}, as before transformers 5"
        )
    otherwise = () if normal or edited else _read_otherwise(home, tokenizer, typed)
    return (*(f"{home.name}/{TOKENIZER_SETTINGS}: {each}" for each in told), *otherwise)


def _has_types(state: dict[str, Any] | None) -> bool:
    """Say whether a post-processor, as `tokenizer.json` has it, gives other types of tokens than 0."""
    return state is not None and _untyped(state) != state


_OURS = (AdtpBertConfig.model_type, PrunedEncoderConfig.model_type)
_HARD = (
    "The FOOD was good",
    "na\u00efve caf\u00e9",
    "food, (good) don't!",
    "  two  spaces ",
    "a line\r\nand\ta tab",
    "1234567 and 89.5",
    "a\u00a0space",
    "\u5317\u4eac is big",
    "wait\u2026 \u2460 \ufb01ne\u2122",
    "\uff26\uff35\uff2c\uff2c width",
    "a zero\u200bwidth",
)
"""Texts that tokenizers normalize and split differently: case, accents, punctuation, spaces, digits, compatibility forms."""
_SPECIAL = 8
"""Special tokens that are typed inside a text, at most: some tokenizers have hundreds."""

_QUIET = threading.Lock()
"""Held while transformers says nothing: its level is one for the whole process."""


def _read_otherwise(home: Path, tokenizer: Tokenizer, typed: bool) -> Iterator[str]:
    """Say of which text the transformers that is installed makes other tokens: since version 5 many of its classes take little more than
    the vocabulary from `tokenizer.json`, and have a normalizer and a template of their own. Students of ours are read here alone.

    Args:
        home: directory of the tokenizer. tokenizer: as it is read here. typed: whether the model reads types of tokens.
    """
    if settings_of(home, "config.json").get("model_type") in _OURS:
        return
    found = None
    with contextlib.suppress(Exception):  # what transformers cannot load, or not read with, is read here alone
        theirs = _of_transformers(home)
        found = _first_difference(tokenizer, theirs, typed)
    if found is not None:
        texts, what = found
        name = f"{type(theirs).__name__} of transformers {transformers.__version__}"
        yield (
            f"{home.name}: of {texts}, {name} makes tokens with other {what}, because it "
            f"does not follow the tokenizer's files as a whole, as is done here. If the model was trained with that class, "
            "save AutoTokenizer.from_pretrained(DIR) into DIR"
        )


def _of_transformers(home: Path) -> Any:
    with _QUIET:
        level = transformers_logging.get_verbosity()
        transformers_logging.set_verbosity_error()
        try:
            return transformers.AutoTokenizer.from_pretrained(home, local_files_only=True, trust_remote_code=False)
        finally:
            transformers_logging.set_verbosity(level)


def _first_difference(own: Tokenizer, theirs: Any, typed: bool) -> tuple[str, str] | None:
    """Return the first text or pair that two tokenizers read otherwise, and what of its tokens differs: ids, offsets or types.

    Args:
        theirs: one of transformers' classes. typed: whether types count.
    """
    other = theirs.backend_tokenizer
    unset(other)
    other.encode_special_tokens = False  # split_special_tokens has a note of its own
    follow_inputs(other, theirs.model_input_names)
    known = [token for token in theirs.all_special_tokens if own.token_to_id(token) is not None][:_SPECIAL]
    alone: list[tuple[str, str | None]] = [(text, None) for text in _HARD]
    special, pair = (" and ".join(("good", *known, "bad")), None), (_HARD[0], _HARD[1])
    for name, what, asked in (
        ("ids", "ids", [*alone, special, pair]),
        ("offsets", "offsets", [*alone, pair]),  # transformers' own mask takes in the space before it, in some versions
        ("type_ids", "types", [pair] if typed else []),
    ):
        for texts in asked:
            if getattr(own.encode(*texts), name) != getattr(other.encode(*texts), name):
                return " and ".join(ascii(text) for text in texts if text is not None), what
    return None


def _otherwise_normalized(settings: Mapping[str, Any], normalizers: list[Mapping[str, Any]]) -> Iterator[str]:
    """Say in what a normalizer of BERT's, alone or in a sequence, is not as settings, or their defaults, ask."""
    normalizer = next((each for each in normalizers if each["type"] == "BertNormalizer"), {})
    asked = {"do_lower_case": True, "tokenize_chinese_chars": True, **settings}
    does = dict(normalizer)
    for each, of_case in ((asked, "do_lower_case"), (does, "lowercase")):
        if each.get("strip_accents") is None:  # as the case
            each["strip_accents"] = each.get(of_case)
    as_case = asked["strip_accents"] == asked["do_lower_case"] and does["strip_accents"] == does.get("lowercase")
    if any(each["type"] == "Lowercase" for each in normalizers):
        does["lowercase"], as_case = True, False
    for name, (own, said) in _OF_NORMALIZER.items():
        if own in normalizer and asked[name] != does[own] and not (name == "strip_accents" and as_case):
            yield f"{name} is ignored: texts are {'' if does[own] else 'not '}{said}, as {TOKENIZER} says"
