"""Rerankers that generate: the last token's logit of "yes", less that of "no". They become the head "sequence" with one output.

Source: `LogitScore` of sentence-transformers 6; Qwen3-Reranker (arXiv 2506.05176).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from tokenizers import Tokenizer
from torch import Tensor

from ..contract import HEAD_SEQUENCE
from ..errors import InputError, check_int, quoted
from ..io import read_json
from ..model import registry
from ..model.checkpoint import make_config
from ..model.config import AdtpBertConfig, PrunedEncoderConfig
from ..model.decoder import CAP
from ..model.plain import as_format_2, check_encoder

TASK, LOGITS = "text-generation", "causal_logits"
HEAD, SCORE, EMBEDDINGS = "lm_head.weight", "score.weight", "embed_tokens.weight"
_SIGMOID = "torch.nn.modules.activation.Sigmoid"


class Tokens(NamedTuple):
    """Numbers of the tokens whose logits make the score. no: None where that of "yes" is the score."""

    yes: int
    no: int | None


def read(folder: Path, limits: Mapping[str, Any], raw: Mapping[str, Any], path: Path) -> Tokens:
    """Read a LogitScore module.

    Args:
        limits: what the directory says of its Transformer.
        raw, path: the model's configuration, and where it is.

    Raises:
        InputError: a module or a Transformer of another kind, or a model that scores are not read of in this way.
    """
    fields = read_json(folder / "config.json") if (folder / "config.json").is_file() else None
    if not isinstance(fields, dict) or fields.get("module_input_name", LOGITS) != LOGITS:
        raise InputError(
            f"{folder / 'config.json'} is {quoted(fields)}; accepted is an object with true_token_id, false_token_id, and {LOGITS!r} as "
            "its module_input_name"
        )
    kind, task = raw.get("model_type"), limits.get("transformer_task")
    known = [name for name in registry.BACKBONES if registry.backbone(name).generates]
    if task != TASK or kind not in known or raw.get(CAP) is not None:
        got = (
            f"{CAP} {quoted(raw[CAP])}"
            if raw.get(CAP) is not None
            else f"model_type {quoted(kind)}, transformer_task {quoted(task)}"
        )
        raise InputError(
            f"{path}: got {got}; accepted before LogitScore is the transformer_task {TASK!r} with one of {', '.join(known)}, and logits "
            "without a cap"
        )
    yes, no = fields.get("true_token_id"), fields.get("false_token_id")
    most = raw.get("vocab_size")
    most = most - 1 if isinstance(most, int) and most > 0 else 2**31 - 1
    for name, value in (("true_token_id", yes), *([("false_token_id", no)] if no is not None else [])):
        check_int(f"{folder / 'config.json'}: {name}", value, 0, most)
    assert isinstance(yes, int)
    return Tokens(yes, no)


def config_of(raw: Mapping[str, Any], path: Path) -> PrunedEncoderConfig | AdtpBertConfig:
    """Return the configuration of a classifier with one output.

    It has no padding token: LogitScore reads a text's last token, whichever that is, where transformers' classifiers look for the last one
    that is no padding.

    Raises:
        InputError: no model that generates text, or one with fields that a graph does not have.
    """
    check_encoder(raw, path, pooled=True)
    own = {name: value for name, value in raw.items() if name not in ("id2label", "label2id", "problem_type")}
    return make_config(as_format_2({**own, "pad_token_id": None, "num_labels": 1}, HEAD_SEQUENCE), path)


def activation(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return what scores go through, as older versions of sentence-transformers say it in `config.json`; else the logistic function."""
    block = raw.get("sentence_transformers")
    named = block.get("activation_fn") if isinstance(block, dict) else raw.get("sbert_ce_default_activation_function")
    return {"activation": named if isinstance(named, str) else _SIGMOID}


def with_score(
    weights: dict[str, Tensor], tokens: Tokens, config: PrunedEncoderConfig | AdtpBertConfig, home: Path
) -> dict[str, Tensor]:
    """Put two rows of the last product, subtracted in fp32, in place of all: the score is one number of the last state.

    Raises:
        InputError: the product is missing, or has no such rows.
    """
    table = weights.pop(HEAD, None)
    if table is None and getattr(config.encoder_config, "tie_word_embeddings", False):
        table = next((tensor for name, tensor in weights.items() if name.endswith(EMBEDDINGS)), None)
    if table is None:
        raise InputError(
            f"{home}: {HEAD} is missing, and tie_word_embeddings does not say that it is the table of embeddings; accepted are models with "
            "the product that they generate text by"
        )
    if table.ndim != 2 or max(tokens.yes, tokens.no or 0) >= len(table) or not table.is_floating_point():
        raise InputError(
            f"{home}: {HEAD} is {tuple(table.shape)} of {table.dtype}; accepted are rows of fp32, fp16 or bf16 for the tokens {tokens}"
        )
    score = table[tokens.yes].to(torch.float32, copy=True)
    if tokens.no is not None:
        score -= table[tokens.no].to(torch.float32)
    return {**weights, SCORE: score[None]}


def told(name: str, tokens: Tokens, tokenizer: Tokenizer) -> str:
    """Say in a sentence what the score is."""
    words = [repr(tokenizer.id_to_token(i)) for i in tokens if i is not None]
    less = f" less that of {words[1]}" if len(words) > 1 else ""
    return f"{name} was taken for a reranker of sentence-transformers: its score is the last token's logit of {words[0]}{less}"
