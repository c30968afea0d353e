"""The tokenizer of a checkpoint directory, without asking the directory which class to import."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import BertWordPieceTokenizer, ByteLevelBPETokenizer, Tokenizer
from tokenizers.processors import RobertaProcessing

from ..errors import InputError

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.txt",
    "vocab.json",
    "merges.txt",
)


def load_tokenizer(directory: Path, vocab_size: int) -> Tokenizer:
    """Load `tokenizer.json`, or make a tokenizer of a family's own files.

    Raises:
        InputError: there is none, it cannot be loaded, or it gives ids that the model does not know.
    """
    makers = {"tokenizer.json": _whole, "vocab.txt": _word_piece, "merges.txt": _byte_level}
    found = next((name for name in makers if (directory / name).is_file()), None)
    if found is None:
        raise InputError(
            f"{directory} has no tokenizer; accepted are tokenizer.json, vocab.txt, or vocab.json with merges.txt, beside the "
            "weights"
        )
    try:
        tokenizer = makers[found](directory)
    except Exception as error:  # tokenizers raises bare Exception
        raise InputError(f"{directory}: the tokenizer cannot be loaded: {error}") from error
    if (last := max(tokenizer.get_vocab().values(), default=0)) >= vocab_size:
        raise InputError(
            f"{directory}: the tokenizer gives ids up to {last}, the model knows {vocab_size}; they do not match"
        )
    return tokenizer


def _whole(directory: Path) -> Tokenizer:
    return Tokenizer.from_file(str(directory / "tokenizer.json"))


def _settings(directory: Path) -> dict[str, Any]:
    path = directory / "tokenizer_config.json"
    settings: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    return settings


def _word_piece(directory: Path) -> Tokenizer:
    """BERT's WordPiece from `vocab.txt`."""
    settings = _settings(directory)
    return BertWordPieceTokenizer(
        str(directory / "vocab.txt"),
        lowercase=settings.get("do_lower_case", True),
        strip_accents=settings.get("strip_accents"),
        handle_chinese_chars=settings.get("tokenize_chinese_chars", True),
    )._tokenizer


def _byte_level(directory: Path) -> Tokenizer:
    """RoBERTa's byte-level BPE from `vocab.json` and `merges.txt`."""
    spaced = bool(_settings(directory).get("add_prefix_space", False))
    files = (str(directory / name) for name in ("vocab.json", "merges.txt"))
    tokenizer = ByteLevelBPETokenizer(*files, add_prefix_space=spaced)._tokenizer
    special = [str(token) for token in ("<s>", "</s>", "<pad>", "<unk>", "<mask>")]
    tokenizer.add_special_tokens([token for token in special if tokenizer.token_to_id(token) is not None])
    first, last = (tokenizer.token_to_id(token) for token in special[:2])
    tokenizer.post_processor = RobertaProcessing((special[1], last), (special[0], first), add_prefix_space=spaced)
    return tokenizer
