"""A student as the encoder's kernels take it: its weights by role, its cuts with their rules, or one sentence why not."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from .. import contract
from ..contract import TOKEN_TYPE_IDS
from ..errors import InputError, quoted
from ..model.backbones.base import RmsNorm
from ..model.backbones.bert import PooledClassifier
from ..model.backbones.distilbert import FirstTokenClassifier
from ..model.backbones.roberta import TwoLayerClassifier
from ..model.encoder import PrunedEncoder
from ..model.heads.embedding import Projection, PrunedEncoderForEmbedding
from ..model.pruners import Pruner
from ..model.pruners.adtp import AdtpPruner
from ..model.pruners.ltp import ABSOLUTE, TOPK, LtpPruner
from ..model.pruners.schedule import SchedulePruner
from ..model.pruners.top import TopPruner
from ..model.pruners.transkimmer import TranskimmerPruner
from ..model.selection import kept_count
from ..plugins.encoder import description as of

BACKBONES = ("bert", "roberta", "xlm-roberta", "camembert", "distilbert", "electra")
"""Post-norm layers with absolute positions."""

GATED_BACKBONES = ("llama", "mistral", "qwen2", "qwen3")
"""Layers with RMS norms before their sublayers, rotary positions and gated feed-forwards."""


def describe(student: PrunedEncoder) -> of.Encoder:
    """Describe a student.

    Raises:
        InputError: there are no kernels for its backbone, its head, its activation or one of its cuts.
    """
    config, backbone = student.dense.config, student.backbone
    kind, activation = config.model_type, backbone.fields(config)["hidden_act"]
    known, is_gated = (*BACKBONES, *GATED_BACKBONES), kind in GATED_BACKBONES
    _require(kind in known, f"the backbone {quoted(kind)}", ", ".join(known))
    wanted = "silu" if is_gated else "gelu"
    _require(activation == wanted, f"{backbone.own_name('hidden_act')} {quoted(activation)}", quoted(wanted))
    _require(
        not (is_gated and student.reads_last), "a classifier of the last token", "one vector of a text, and taggers"
    )
    names = tuple(zip(student.pruners, student.site_names))
    cuts = {site: _rule(site, cast(Pruner, student.pruners[key]), student.max_tokens) for key, site in names}
    embeddings = (
        of.Words(_array(cast(Any, backbone.embeddings).word_embeddings.weight))
        if is_gated
        else _embeddings(backbone.embeddings, TOKEN_TYPE_IDS in student.input_names)
    )
    return of.Encoder(
        embeddings=embeddings,
        layers=_gated_layers(student) if is_gated else tuple(_layer(backbone, i) for i in range(backbone.num_layers)),
        cuts=cuts,
        head=_head(student),
        longest=student.max_tokens,
        finish=_rms(backbone.finish) if is_gated else None,
        keeps_last=student.keeps_last,
        restores_entered=frozenset(site for key, site in names if cast(Pruner, student.pruners[key]).restores_entered),
    )


def _require(holds: bool, got: str, accepted: str) -> None:
    if not holds:
        raise InputError(f"encoder on a GPU: got {got}; accepted: {accepted}")


def _array(t: Tensor) -> np.ndarray:
    return t.detach().float().cpu().numpy()


def _dense(*linears: nn.Linear) -> of.Dense:
    """Describe a product, or several on the same rows as one."""
    biases: list[Tensor] = [
        torch.zeros(linear.out_features) if linear.bias is None else linear.bias for linear in linears
    ]
    return of.Dense(_array(torch.cat([linear.weight.detach() for linear in linears])), _array(torch.cat(biases)))


def _norm(norm: nn.LayerNorm) -> of.Norm:
    return of.Norm(_array(norm.weight), _array(norm.bias), norm.eps)


def _gated_layers(student: PrunedEncoder) -> tuple[of.GatedLayer, ...]:
    """Describe layers of `GATED_BACKBONES`; those that turn alike share their tables."""
    turns: dict[int, of.Turns] = {}
    layers = range(student.backbone.num_layers)
    for rotary in (student.attention(i).rotate for i in layers):
        assert rotary is not None
        if id(rotary) not in turns:
            turns[id(rotary)] = of.Turns(_array(rotary.cos), _array(rotary.sin))
    return tuple(_gated_layer(student, i, turns) for i in layers)


def _gated_layer(student: PrunedEncoder, i: int, turns: Mapping[int, of.Turns]) -> of.GatedLayer:
    """turns: by the module that turns."""
    attention, ffn = student.attention(i), student.backbone.feed_forward(i)
    assert isinstance(ffn.intermediate_dense, tuple)
    return of.GatedLayer(
        norm=_rms(attention.before),
        qkv=_dense(*attention.projections),
        heads=attention.heads,
        kv_heads=attention.key_heads,
        scale=attention.scale,
        head_norms=None if attention.norms is None else (_rms(attention.norms[0]), _rms(attention.norms[1])),
        turns=turns[id(attention.rotate)],
        reach=attention.reach,
        output=_dense(attention.dense),
        ffn_norm=_rms(ffn.before),
        inner=_dense(*ffn.intermediate_dense),
        ffn_output=_dense(ffn.output_dense),
    )


def _rms(norm: nn.Module) -> of.RmsNorm:
    assert isinstance(norm, RmsNorm)
    return of.RmsNorm(_array(norm.weight), norm.rms.eps)


def _embeddings(module: Any, typed: bool) -> of.Embeddings:
    own = getattr(module, "own", module)  # inside a projection
    words, places = (_array(table.weight) for table in (own.word_embeddings, own.position_embeddings))
    types = getattr(own, "token_type_embeddings", None)
    return of.Embeddings(
        words=words,
        types=np.zeros_like(words[:1]) if types is None else _array(types.weight),
        places=places,
        norm=_norm(own.LayerNorm),
        first_place=getattr(own, "first_position", 0),
        typed=typed,
        projection=None if own is module else _dense(module.embeddings_project),
    )


def _layer(backbone: Any, i: int) -> of.Layer:
    attention, ffn = backbone.attention(i), backbone.feed_forward(i)
    return of.Layer(
        qkv=_dense(*attention.projections),
        heads=attention.heads,
        scale=attention.scale,
        output=_dense(attention.dense),
        attention_norm=_norm(attention.output.LayerNorm),
        inner=_dense(ffn.intermediate_dense),
        ffn_output=_dense(ffn.output_dense),
        ffn_norm=_norm(ffn.output.LayerNorm),
    )


_HEADS = "one vector of a text, classifiers, taggers and spans"


def _head(student: PrunedEncoder) -> of.Head:
    match student.config.head:
        case contract.HEAD_TOKENS:
            return of.Tokens(_last(student.backbone.token_classifier))
        case contract.HEAD_SPANS:
            return of.Spans(_last(student.backbone.span_classifier))
        case contract.HEAD_EMBEDDING:
            return _embedding(cast(PrunedEncoderForEmbedding, student))
        case contract.HEAD_SPARSE:
            _require(False, "sparse vectors", _HEADS)
        case contract.HEAD_MASKED:
            _require(False, "masked tokens, which are found by their ids", _HEADS)
        case contract.HEAD_VECTORS | contract.HEAD_HYBRID:
            _require(False, "vectors of tokens", _HEADS)
    _require(student.reads_first, "a classifier of the mean of all tokens", "one of the first token")
    return _classifier(student.backbone.classifier)


def _last(module: nn.Module) -> of.Dense:
    """Describe a product, behind dropout where there is some."""
    linear = module[-1] if isinstance(module, nn.Sequential) else module
    return _dense(cast(nn.Linear, linear))


def _embedding(student: PrunedEncoderForEmbedding) -> of.Embedding:
    projections = [module for module in student.projections if isinstance(module, Projection)]
    _require(
        len(projections) == len(student.projections), "vectors that get length 1 before a projection", "that at the end"
    )
    return of.Embedding(
        pooling=student.settings.pooling,
        projections=tuple((_dense(each.linear), _activation(each.activation)) for each in projections),
        normalize=student.settings.normalize,
    )


def _activation(module: nn.Module) -> str:
    known = {nn.Tanh: of.TANH, nn.Identity: of.NONE}
    _require(type(module) in known, f"a projection with {type(module).__name__}", "Tanh and Identity")
    return known[type(module)]


def _classifier(module: nn.Module) -> of.Classifier:
    if isinstance(module, PooledClassifier):
        dense, activation, output = module.pooler.dense, of.TANH, module.classifier
    elif isinstance(module, FirstTokenClassifier):
        dense, activation, output = module.pre_classifier, of.RELU, module.classifier
    else:
        assert isinstance(module, TwoLayerClassifier)
        activation = of.TANH if module.activation is torch.tanh else of.GELU
        dense, output = module.dense, module.out_proj
    return of.Classifier(dense=_dense(dense), activation=activation, output=_dense(output))


def _rule(site: str, pruner: Pruner, longest: int) -> of.Rule:
    lengths = torch.arange(longest + 1)
    match pruner:
        case AdtpPruner():
            ratios, saliency = pruner.predictors
            permille = np.array(pruner.permille)
            number = of.Ratio(predictor=_dense(ratios), permille=permille, min_tokens=pruner.min_tokens)
            return of.Best(order=_saliency(saliency), number=number)
        case SchedulePruner() if not pruner.from_others:
            order = of.Received() if pruner.reads_received else _saliency(pruner.saliency_predictor)
            if pruner.length is None:
                kept = kept_count(lengths, pruner.permille, pruner.min_tokens)
            else:
                kept = lengths.clamp(max=max(pruner.length, pruner.min_tokens))
            return of.Best(order=order, number=of.Counts(kept=kept.numpy()), keep_first=pruner.keeps_first)
        case LtpPruner() if pruner.mode == TOPK:
            kept = pruner.counts[: longest + 1]
            return of.Best(order=of.Received(), number=of.Counts(kept=kept.numpy(), of_input=True))
        case LtpPruner() if pruner.mode == ABSOLUTE:
            return of.Above(of.Received(), least_with_quotient(float(pruner.threshold), pruner.queries))
        case LtpPruner():
            return of.AboveShare(of.Received(), float(pruner.threshold))
        case TopPruner():
            return _ranks(pruner, longest)
        case TranskimmerPruner():
            return of.Above(_skim(pruner.predictor), float(torch.finfo(torch.float32).tiny))
    kind = type(pruner).__name__.removesuffix("Pruner").lower()
    raise InputError(
        f"encoder on a GPU: got a cut at {site} by {kind}{' by received-from-others' if pruner.from_others else ''}; accepted: adtp, "
        "schedule by saliency or received, ltp, top, transkimmer"
    )


def _saliency(predictor: nn.Sequential) -> of.Saliency:
    return of.Saliency(_dense(cast(nn.Linear, predictor[0])), _dense(cast(nn.Linear, predictor[2])))


def _skim(predictor: nn.Sequential) -> of.Skim:
    norm, hidden, inner_norm, _, gains = predictor
    return of.Skim(
        norm=_norm(cast(nn.LayerNorm, norm)),
        hidden=_dense(cast(nn.Linear, hidden)),
        inner_norm=_norm(cast(nn.LayerNorm, inner_norm)),
        gains=_dense(cast(nn.Linear, gains)),
    )


def _ranks(pruner: TopPruner, longest: int) -> of.Ranks:
    kept = [0, 1]
    for others in range(1, longest):
        stays = pruner.keeps(torch.tensor([[others]]), torch.arange(others)[None])
        kept.append(1 + int(stays.sum()))
    return of.Ranks(of.Received(), pruner.table.to(torch.int8).numpy(), len(pruner.bins), np.array(kept))


def least_with_quotient(threshold: float, divisor: int) -> float:
    """Return the least number of fp32, not below 0, whose quotient is at least a threshold in fp32; the largest where there is none."""
    wanted = np.float32(threshold)
    return _least(lambda x: np.float32(x / np.float32(divisor)) >= wanted)


def _least(holds: Callable[[np.float32], np.bool_]) -> float:
    """Find where a rising condition begins to hold: among numbers of fp32 from 0 on, which sort like their bits."""
    low, high = 0, int(np.array(np.finfo(np.float32).max).view(np.int32))
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(np.int32(middle).view(np.float32)) else (middle + 1, high)
    return float(np.int32(low).view(np.float32))
