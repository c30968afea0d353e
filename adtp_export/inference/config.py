"""What an output directory's ``config.json`` says to those who run it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from tokenizers import Tokenizer

from ..artifacts.records import convert
from ..contract import HEAD_SEQUENCE, HEAD_TOKENS
from ..data.sides import Sides, padding_id
from ..data.template import ChatTemplate
from ..data.truncate import read_tokenizer
from ..data.windows import Windows
from ..errors import InputError, ellipsize
from ..io import read_json


@dataclass(frozen=True, kw_only=True)
class Config:
    """Labels, sites, and the ids that the model takes.

    sentence_transformers, sbert_ce_default_activation_function: what a reranker's scores go through, as sentence-transformers writes it.

    Raises:
        ValueError: the labels of a classifier are not numbered from 0 on, two share a name, or there are none.
    """

    id2label: dict[int, str] = field(default_factory=dict)
    vocab_size: int
    type_vocab_size: int
    max_position_embeddings: int
    adtp: Pruned
    pad_token_id: int | None = None
    problem_type: Literal["regression", "single_label_classification", "multi_label_classification"] | None = None
    sentence_transformers: dict[str, Any] | None = None
    sbert_ce_default_activation_function: str | None = None

    def __post_init__(self) -> None:
        if self.adtp.head not in (HEAD_SEQUENCE, HEAD_TOKENS):
            return
        if not self.id2label or sorted(self.id2label) != list(range(len(self.id2label))):
            raise ValueError(f"id2label has the ids {str(sorted(self.id2label))[:200]}; accepted are 0, 1, ...")
        if len(set(self.id2label.values())) < len(self.id2label):
            raise ValueError("two labels of id2label share a name")

    @classmethod
    def of(cls, fields: Mapping[str, Any]) -> Config:
        """Take it from the fields of a ``config.json``; raises ValueError where one is missing or of another type."""
        return convert(fields, cls)

    @property
    def labels(self) -> list[str]:
        return [self.id2label[i] for i in range(len(self.id2label))]

    @property
    def kind(self) -> str:
        """The kind of problem, as transformers' pipeline sees it: one output is a class of its own, also where the field says that texts
        have one of several. A reranker whose scores are its logits gives them."""
        if len(self.id2label) > 1 or self.problem_type in ("regression", "multi_label_classification"):
            return self.problem_type or "single_label_classification"
        return "regression" if self.activation == "Identity" else "multi_label_classification"

    @property
    def pad_id(self) -> int:
        """The id to pad with."""
        return padding_id(self.pad_token_id, self.adtp.vectors.only_queries if self.adtp.vectors else None)

    @property
    def max_tokens(self) -> int:
        return self.adtp.max_tokens or self.max_position_embeddings

    @property
    def dimension(self) -> int:
        """Length of the vectors that are given, where nothing else is asked for."""
        return min(self.adtp.truncate_dim or self.adtp.dimension, self.adtp.dimension)

    @property
    def activation(self) -> str | None:
        """What a reranker's scores go through: the last word of torch's name for it; None where nothing is said."""
        named = self.adtp.activation or (self.sentence_transformers or {}).get("activation_fn")
        named = named or self.sbert_ce_default_activation_function
        return str(named).rpartition(".")[2] if named else None


@dataclass(frozen=True, kw_only=True)
class Pruned:
    """The block ``adtp`` of ``config.json``. max_tokens: None in those of older versions. dimension, prompts, prompt: of vectors, the
    text put before others by its name, and the name where none is said. truncate_dim: how many numbers of a vector are taken where not all
    are. max_active_dims: how many weights of a sparse vector stay, at most. mask_token_id: of
    the head "masked". template: what stands around texts. activation: of a
    reranker's scores. windows: of contexts. vectors: how queries and documents are read that have vectors of tokens."""

    prune_sites: list[str]
    head: str = HEAD_SEQUENCE
    max_tokens: int | None = None
    retention_ratios: list[float] | None = None
    min_tokens: int = 1
    dimension: int = 0
    prompts: dict[str, str] = field(default_factory=dict)
    prompt: str | None = None
    truncate_dim: int | None = None
    max_active_dims: int | None = None
    mask_token_id: int | None = None
    template: ChatTemplate | None = None
    windows: Windows = field(default_factory=Windows)
    activation: str | None = None
    vectors: Sides | None = None


def read_config(directory: Path, file: Callable[[str], Path]) -> tuple[Config, Tokenizer]:
    """Read what an output directory says of its model, and its tokenizer; file: checks a file of the manifest and returns its path.

    Raises:
        InputError: one of them is damaged; or as `file` says.
    """
    config_file, tokenizer_file = file("config.json"), file("tokenizer.json")
    tokenizer = read_tokenizer(tokenizer_file, "export again with --force")
    try:
        return Config.of(read_json(config_file)), tokenizer
    except (ValueError, InputError) as error:
        raise InputError(f"{directory} is damaged ({ellipsize(str(error))}); export again with --force") from error
