"""Small random models for every line of the tables of backbones, pruners and heads."""

import torch
from safetensors.torch import load_file, save_file

from adtp_export.model import AdtpBertConfig, AdtpBertForSequenceClassification, PrunedEncoderConfig
from adtp_export.model.encoder import PrunedEncoder
from adtp_export.model.heads import head_class

SITE_SETS = (["0.ffn"], ["1.attention", "2.ffn"], ["0.ffn", "1.attention", "2.attention"], [])


TINY_BERT = {
    "vocab_size": 97,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
    "initializer_range": 0.5,  # far from zero, so that decisions are not all near ties
}


def make_student(sites=("0.ffn",), seed=0, **overrides) -> AdtpBertForSequenceClassification:
    """A random student whose retainers really differ between sequences."""
    torch.manual_seed(seed)
    config = AdtpBertConfig(prune_sites=list(sites), **{**TINY_BERT, "saliency_hidden_size": 8, **overrides})
    return AdtpBertForSequenceClassification(config).eval().requires_grad_(False)


PRUNINGS = {
    "none": None,
    "adtp": {"method": "adtp", "sites": ["1.attention", "2.ffn"], "retention_ratios": [0.2, 0.5, 1.0]},
    "ltp": {"method": "ltp", "sites": ["0.ffn", "1.ffn", "2.ffn"], "padded_length": 16},
    "schedule": {"method": "schedule", "sites": ["0.ffn", "2.attention"], "ratios": [0.5, 0.9]},
    "received-twice": {
        "method": "schedule",
        "sites": ["0.ffn", "1.attention", "2.ffn"],
        "lengths": [12, 8, 4],
        "order": "received",
    },
    "top": {"method": "top", "sites": ["1.attention", "2.attention"], "bins": ["11011", "1011010"]},
    "transkimmer": {"method": "transkimmer", "sites": ["0.attention", "1.attention", "2.attention"]},
    "from-others": {
        "method": "schedule",
        "sites": ["0.ffn", "1.ffn"],
        "lengths": [9, 4],
        "order": "received-from-others",
        "restore": "layer",
    },
}
"""A `pruning` field for every line of the table of pruners."""

TINY_ROBERTA = {**TINY_BERT, "pad_token_id": 1, "type_vocab_size": 1, "max_position_embeddings": 66}
TINY_BACKBONES = {
    "bert": {**TINY_BERT, "model_type": "bert"},
    "roberta": {**TINY_ROBERTA, "model_type": "roberta"},
    "xlm-roberta": {**TINY_ROBERTA, "model_type": "xlm-roberta"},
    "camembert": {**TINY_ROBERTA, "model_type": "camembert"},
    "distilbert": {
        "model_type": "distilbert",
        "vocab_size": 97,
        "dim": 32,
        "n_layers": 3,
        "n_heads": 4,
        "hidden_dim": 48,
        "max_position_embeddings": 64,
        "initializer_range": 0.5,
    },
    "electra": {**TINY_BERT, "model_type": "electra", "embedding_size": 16},
    "bert-pruned": {
        **TINY_BERT,
        "model_type": "bert",
        "pruned_heads": {"0": [1], "2": [0, 1, 3]},
        "intermediate_sizes": [48, 17, 5],
    },
    "distilbert-pruned": {
        "model_type": "distilbert",
        "vocab_size": 97,
        "dim": 32,
        "n_layers": 3,
        "n_heads": 4,
        "hidden_dim": 48,
        "pruned_heads": {"1": [0, 3]},
    },
    "mpnet": {**TINY_BERT, "model_type": "mpnet", "pad_token_id": 1, "max_position_embeddings": 66},
    "modernbert": {
        **TINY_BERT,
        "model_type": "modernbert",
        "global_attn_every_n_layers": 2,
        "local_attention": 6,
        "norm_bias": True,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "cls_token_id": 1,
        "sep_token_id": 2,
    },
    "jina_embeddings_v3": {**TINY_BERT, "model_type": "jina_embeddings_v3", "pad_token_id": 1},
    "deberta-v2": {
        **TINY_BERT,
        "model_type": "deberta-v2",
        "type_vocab_size": 0,
        "position_biased_input": False,
        "relative_attention": True,
        "pos_att_type": "p2c|c2p",
        "share_att_key": True,
        "norm_rel_ebd": "layer_norm",
        "position_buckets": 8,
        "max_relative_positions": 24,
    },
}
"""A small configuration for every line of the table of backbones, and of such whose heads and feed-forwards were pruned."""

GATED_BACKBONES = {
    "gte": {**TINY_BERT, "model_type": "gte", "head_dim": 10, "pad_token_id": 1},
    "gte-without-types": {**TINY_BERT, "model_type": "gte", "type_vocab_size": 0, "hidden_act": "silu"},
    "nomic_bert": {**TINY_BERT, "model_type": "nomic_bert", "pad_token_id": 0},
}
"""Families with jina's layers and gated feed-forwards, of which transformers has two heads."""


HEAD_FIELDS = {
    "sequence": {"num_labels": 3},
    "tokens": {"num_labels": 5},
    "spans": {},
    "embedding": {"embedding": {"pooling": "mean", "normalize": True, "projections": [[32, 16, True, "tanh"]]}},
    "sparse": {"sparse": {"pooling": "max", "activation": "log1p_relu"}},
    "vectors": {"vectors": {"projections": [[32, 24, True, "tanh", True], [24, 8, False, "none", False]]}},
    "hybrid": {
        "embedding": {"pooling": "first", "normalize": True},
        "vectors": {"projections": [[32, 8, True, "none", False]]},
    },
}
"""Fields of the configuration for every line of the table of heads."""


def make_encoder(backbone="bert", pruning="adtp", seed=0, head="sequence", **fields) -> PrunedEncoder:
    """A random model of format 2; LTP's thresholds and Transkimmer's biases are such that some tokens fall at each site, and some stay."""
    torch.manual_seed(seed)
    config = PrunedEncoderConfig(
        backbone={**TINY_BACKBONES, **GATED_BACKBONES}[backbone], pruning=PRUNINGS[pruning], head=head, **fields
    )
    model = head_class(head)(config).eval().requires_grad_(False)
    if pruning == "ltp":
        for i, pruner in enumerate(model.pruners.values()):
            pruner.threshold.fill_(0.02 + 0.01 * i)
    if head == "hybrid":  # else no token of a random model has a weight
        model.sparse_linear.bias.fill_(4.0)
    if pruning == "transkimmer":
        for pruner in model.pruners.values():
            pruner.predictor[4].bias[1] += 1.5
    return model


def edit_weights(directory, change):
    """Change the stored weights of a checkpoint in place."""
    path = directory / "model.safetensors"
    weights = load_file(path)
    change(weights)
    save_file(weights, path, metadata={"format": "pt"})
