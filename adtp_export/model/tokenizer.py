"""The tokenizer of a checkpoint directory, without asking the directory which class to import."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import transformers
from tokenizers import AddedToken, BertWordPieceTokenizer, ByteLevelBPETokenizer, Tokenizer
from tokenizers.processors import RobertaProcessing
from transformers.models.auto.tokenization_auto import TOKENIZER_MAPPING_NAMES

from ..data.tokenize import reading_texts, taken, tokenized
from ..data.truncate import draw_nothing, prepared
from ..errors import InputError, MissingDependencyError, ellipsize, quoted
from ..io import check_regular
from .registry import backbone, fields
from .tokenizer_settings import (
    ANY_KIND,
    TOKENIZER,
    TOKENIZER_SETTINGS,
    WORD_PIECE,
    class_named,
    follow,
    kind_of,
    settings_of,
)

TOKEN_NAMES = ("special_tokens_map.json", "added_tokens.json")
TOKENIZER_FILES = (
    TOKENIZER,
    TOKENIZER_SETTINGS,
    *TOKEN_NAMES,
    "vocab.txt",
    "vocab.json",
    "merges.txt",
)
SENTENCE_PIECE = ("sentencepiece.bpe.model", "spm.model")
_CLASSES = {
    "xlm-roberta": "XLMRobertaTokenizerFast",
    "camembert": "CamembertTokenizerFast",
    "deberta-v2": "DebertaV2TokenizerFast",
}
"""`model_type` -> transformers' class that converts a SentencePiece model."""


ROLES = ("bos_token", "eos_token", "cls_token", "sep_token", "pad_token", "unk_token", "mask_token")
"""What special tokens are for, as a tokenizer's files name them."""
_USUAL = {
    "mask_token": ("[MASK]", "<mask>"),
    "eos_token": ("</s>", "<|endoftext|>"),
    "unk_token": ("[UNK]", "<unk>"),
    "cls_token": ("[CLS]", "<s>"),
    "pad_token": ("[PAD]", "<pad>"),
}
"""What special tokens are mostly called, for tokenizers that do not say."""


def special_token(tokenizer: Tokenizer, home: Path, name: str) -> str | None:
    """Return what a special token, such as "mask_token", is called: as a tokenizer's files say, else one of the usual names it knows."""
    if name in (named := _named(home)):
        return str(named[name]["content"])
    return next((each for each in _USUAL[name] if tokenizer.token_to_id(each) is not None), None)


def _named(home: Path) -> dict[str, dict[str, Any]]:
    """Return the fields, "content" among them, of the special tokens that a tokenizer's files name, by "mask_token" and the like."""
    found: dict[str, dict[str, Any]] = {}
    for stored in (settings_of(home, file) for file in (TOKENIZER_SETTINGS, TOKEN_NAMES[0])):
        for name in ROLES if isinstance(stored, dict) else ():
            fields = value if isinstance(value := stored.get(name), dict) else {"content": value}
            if isinstance(fields.get("content"), str):
                found.setdefault(name, fields)
    return found


@contextlib.contextmanager
def _loading(directory: Path) -> Iterator[None]:
    """Turn what a directory's tokenizer raises while it is loaded into one clear message."""
    try:
        with reading_texts():
            yield
    except MissingDependencyError:
        raise
    except InputError as error:
        raise InputError(
            f"{directory}: the tokenizer cannot be loaded: {ellipsize(str(error.__cause__ or error))}"
        ) from error


def load_tokenizer(directory: Path, config: Any, templated: bool = False) -> Tokenizer:
    """Load `tokenizer.json`, or make a tokenizer of a family's own files, and try it on a few texts.

    Args:
        config: of the encoder, in transformers' terms.
        templated: it reads texts that stand in a template, which are never empty. Otherwise it has to give a token for an empty text,
            unless the model is of a family that generates.

    Raises:
        InputError: there is none, it cannot be loaded or cannot read every text, or it gives ids that the model does not know.
    """
    makers: dict[str, Callable[[Path], Tokenizer]] = {
        TOKENIZER: _whole,
        "vocab.txt": _word_piece,
        "merges.txt": _byte_level,
        **dict.fromkeys(SENTENCE_PIECE, functools.partial(_sentence_piece, config=config)),
    }
    found = next((name for name in makers if (directory / name).is_file()), None)
    if found is None:
        raise InputError(
            f"{directory} has no tokenizer; accepted are tokenizer.json, vocab.txt, vocab.json with merges.txt, or "
            f"{' or '.join(SENTENCE_PIECE)}, beside the weights"
        )
    for name in (*TOKENIZER_FILES, *SENTENCE_PIECE):
        check_regular(directory / name)
    with _loading(directory):
        _check_kind(directory, found, config)
        tokenizer = prepared(_with_rows(_with_added(makers[found](directory), directory), config.vocab_size))
        tokenizer = follow(tokenizer, settings_of(directory), config)
    if (last := max(tokenizer.get_vocab().values(), default=0)) >= config.vocab_size:
        raise InputError(
            f"{directory}: the tokenizer gives ids up to {last}, the model knows {config.vocab_size}; they do not match"
        )
    _try(tokenizer, directory, config, templated)
    return tokenizer


_OWN_FILES = {"vocab.txt": WORD_PIECE, "merges.txt": {"Roberta", "Bart", "Longformer"}}
"""Files of a tokenizer, and the kinds that are made of them here, as transformers calls their classes."""


def _check_kind(directory: Path, found: str, config: Any) -> None:
    """Raises InputError where the file that was found is of a kind of tokenizer that this would read otherwise than transformers."""
    settings = settings_of(directory)
    own = settings.get("auto_map")
    if isinstance(own, dict) and own.get("AutoTokenizer"):
        raise InputError("it has code of its own, which is not run; save it as tokenizer.json, and leave auto_map out")
    if (kinds := _OWN_FILES.get(found)) is None:
        return
    named = class_named(settings, config)
    if named is None and (found == "merges.txt" or config.model_type == "mpnet"):  # Qwen's have merges, too
        named = TOKENIZER_MAPPING_NAMES.get(config.model_type)
    if named and kind_of(named) not in kinds and named not in ANY_KIND:
        raise InputError(
            f"{found} is of {named}; made of it here are those of {', '.join(sorted(kinds))}. Save a tokenizer.json, "
            "as AutoTokenizer.from_pretrained(DIR).save_pretrained(DIR) does"
        )


def _with_added(tokenizer: Tokenizer, directory: Path) -> Tokenizer:
    """Add the tokens that stand beside a tokenizer's file and not in it, and have those of it take spaces as it is said beside it.

    Raises:
        InputError: one has an id that is not the next one.
    """
    listed = settings_of(directory).get("added_tokens_decoder") or {}
    tokens = {
        int(number): fields for number, fields in listed.items() if isinstance(fields, dict) and number.isdecimal()
    }
    tokens |= {
        number: {"content": token}
        for token, number in settings_of(directory, TOKEN_NAMES[1]).items()
        if number not in tokens
    }
    flags = ("lstrip", "rstrip", "single_word", "normalized", "special")
    for number, told in sorted(tokens.items()):
        content = told.get("content")
        at = tokenizer.token_to_id(content) if isinstance(content, str) else None
        if not isinstance(content, str) or (at is not None and (at != number or len(told) == 1)):
            continue
        if at is None and number != tokenizer.get_vocab_size():
            raise InputError(
                f"the token {quoted(content)} has the id {number}, and the next free one is {tokenizer.get_vocab_size()}"
            )
        token = AddedToken(content, **{name: bool(told[name]) for name in flags if name in told})
        (tokenizer.add_special_tokens if token.special else tokenizer.add_tokens)([token])
    known = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
    for named in _only_named(directory, tokenizer):  # those that are no words get the next ids
        if (content := named.get("content")) not in known and isinstance(content, str):
            flagged = {name: bool(named[name]) for name in flags if name in named}
            tokenizer.add_special_tokens([AddedToken(content, **{"normalized": False, **flagged, "special": True})])
            known.add(content)
    return tokenizer


def _only_named(directory: Path, tokenizer: Tokenizer) -> Iterator[Mapping[str, Any]]:
    """Yield the fields of special tokens that a tokenizer's files name: the usual ones where it knows them, and all others."""
    yield from (named for named in _named(directory).values() if tokenizer.token_to_id(named["content"]) is not None)
    for file in (TOKENIZER_SETTINGS, TOKEN_NAMES[0]):
        for name in ("additional_special_tokens", "extra_special_tokens"):
            named = settings_of(directory, file).get(name)
            for each in named.values() if isinstance(named, dict) else named if isinstance(named, list) else ():
                yield each if isinstance(each, dict) else {"content": each}


def complete(file: Path, directory: Path, config: Any) -> None:
    """Write into a copy of a directory's `tokenizer.json` what stands beside that one, for those who read the file alone.

    Raises:
        InputError: the file is damaged, or as `load_tokenizer`.
    """
    with _loading(directory):
        tokenizer = Tokenizer.from_buffer(file.read_bytes())
        own = tokenizer.to_str()
        draw_nothing(tokenizer)
        tokenizer = follow(_with_added(tokenizer, directory), settings_of(directory), config)
        if tokenizer.to_str() != own:
            tokenizer.save(str(file))


def _with_rows(tokenizer: Tokenizer, rows: int) -> Tokenizer:
    """Return a tokenizer without the special tokens that a model of so many rows does not know, such as Gemma's for images."""
    beyond = [token for i, token in tokenizer.get_added_tokens_decoder().items() if i >= rows]
    if not beyond or not all(token.special for token in beyond):
        return tokenizer
    return Tokenizer.from_str(json.dumps(with_rows(json.loads(tokenizer.to_str()), rows)))


def with_rows(spelled: dict[str, Any], rows: int) -> dict[str, Any]:
    """Return the same of the content of a `tokenizer.json`."""
    return {**spelled, "added_tokens": [token for token in spelled.get("added_tokens", []) if token["id"] < rows]}


WORDS, UNKNOWN = "a film, and 2 good words", "\u0533\u10e5\u1251"
"""Ordinary words, and one of letters from three scripts, which no vocabulary has whole."""


def _try(tokenizer: Tokenizer, directory: Path, config: Any, templated: bool) -> None:
    """Read texts and pairs, so that a tokenizer that does not fit is found before any work starts."""
    adds_none = templated or backbone(config.model_type).generates  # Qwen's adds no token to a text
    texts = (WORDS, UNKNOWN, *(() if adds_none else ("",)), (WORDS, WORDS), (UNKNOWN, ""))
    try:
        rows = [taken(*found) for found in tokenized(tokenizer, texts, config.max_position_embeddings, offsets=False)]
    except InputError as error:
        raise InputError(
            f"{directory}: {error}. It is tried on words that it may not know, and on pairs; give the model's own tokenizer"
        ) from error
    empty = next((text for text, row in zip(texts, rows) if not row.input_ids), None)
    if empty is not None or not tokenizer.encode(WORDS, add_special_tokens=False).ids:
        raise InputError(
            f"{directory}: the tokenizer gives no token for {quoted(WORDS if empty is None else empty)}; accepted is one that adds a "
            "first token, such as [CLS], to every text and has words, or a token for unknown ones"
        )
    counting = getattr(backbone(config.model_type), "first_position", None)
    pad = config.pad_token_id
    if counting is not None and counting(config) and any(pad in row.input_ids for row in rows):
        raise InputError(
            f"{directory}: the tokenizer gives texts the token {quoted(tokenizer.id_to_token(pad))}, which pad_token_id, {pad}, says is "
            f"padding; models of the type {config.model_type} count no position there, so answers would differ. Give "
            "the model's own tokenizer, or correct it in config.json"
        )
    types = fields(config)["type_vocab_size"]
    limits = {"ids": config.vocab_size, **({"token types": types} if types > 1 else {})}
    for row in rows:
        for (name, limit), values in zip(limits.items(), (row.input_ids, row.token_type_ids)):
            if max(values) >= limit:
                raise InputError(
                    f"{directory}: the tokenizer gives the {name} {max(values)}, the model knows {limit}; they do not match"
                )


def _whole(directory: Path) -> Tokenizer:
    return Tokenizer.from_buffer((directory / TOKENIZER).read_bytes())


def _word_piece(directory: Path) -> Tokenizer:
    """BERT's WordPiece from `vocab.txt`."""
    settings = settings_of(directory)
    named = {name: fields["content"] for name, fields in _named(directory).items() if name in ROLES[2:]}
    return BertWordPieceTokenizer(
        str(directory / "vocab.txt"),
        **named,
        lowercase=settings.get("do_lower_case", True),
        strip_accents=settings.get("strip_accents"),
        handle_chinese_chars=settings.get("tokenize_chinese_chars", True),
    )._tokenizer


def _byte_level(directory: Path) -> Tokenizer:
    """RoBERTa's byte-level BPE from `vocab.json` and `merges.txt`."""
    spaced = bool(settings_of(directory).get("add_prefix_space", False))
    files = (str(directory / name) for name in ("vocab.json", "merges.txt"))
    tokenizer = ByteLevelBPETokenizer(*files, add_prefix_space=spaced)._tokenizer
    special = dict(zip(ROLES, ("<s>", "</s>", "<s>", "</s>", "<pad>", "<unk>", "<mask>")))
    special |= {name: fields["content"] for name, fields in _named(directory).items()}
    said = _described(directory)
    known = [token for token in special.values() if tokenizer.token_to_id(token) is not None]
    tokenizer.add_special_tokens([AddedToken(token, special=True, **said.get(token, {})) for token in known])
    if missing := [special[name] for name in ("cls_token", "sep_token") if special[name] not in known]:
        raise InputError(f"its vocabulary has no {' and no '.join(missing)}")
    first, last = ((special[name], tokenizer.token_to_id(special[name])) for name in ("cls_token", "sep_token"))
    tokenizer.post_processor = RobertaProcessing(last, first, add_prefix_space=spaced)
    return tokenizer


def _described(directory: Path) -> dict[str, dict[str, bool]]:
    """Return what a tokenizer's files say of special tokens: with "lstrip", a mask takes the space before it."""
    stored = [settings_of(directory, name) for name in (TOKEN_NAMES[0], TOKENIZER_SETTINGS)]
    values = [value for each in stored for value in (*each.values(), *each.get("added_tokens_decoder", {}).values())]
    flags = ("lstrip", "rstrip", "single_word", "normalized")
    tokens = [value for value in values if isinstance(value, dict) and isinstance(value.get("content"), str)]
    return {token["content"]: {name: bool(token[name]) for name in flags if name in token} for token in tokens}


def _sentence_piece(directory: Path, config: Any) -> Tokenizer:
    """SentencePiece's model, converted by transformers' own class: of those that there are, the one that is named, or the family's.

    Raises:
        InputError: a family whose conversion is not known. MissingDependencyError: what reads the file is not installed.
    """
    named = (class_named(settings_of(directory), config) or "").removesuffix("Fast") + "Fast"
    family = named if named in _CLASSES.values() else _CLASSES.get(config.model_type)
    if family is None:
        raise InputError(
            f"a SentencePiece model of {quoted(config.model_type)}; converted are those of {', '.join(_CLASSES)}. Save a tokenizer.json "
            "beside the weights"
        )
    lacking = [name for name in ("sentencepiece", "google.protobuf") if not _installed(name)]
    if lacking:
        raise MissingDependencyError(
            f"{directory} has its tokenizer as a SentencePiece model, and converting that needs packages that are not installed; type: "
            f"pip install {' '.join(name.removeprefix('google.') for name in lacking)}"
        )
    make = getattr(transformers, family)
    tokenizer: Tokenizer = make.from_pretrained(str(directory), local_files_only=True).backend_tokenizer
    return tokenizer


def _installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # its package is missing
        return False
