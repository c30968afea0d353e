"""Small random models of the families that follow Llama."""

import torch
from tiny_models import PRUNINGS
from transformers import CONFIG_MAPPING

from adtp_export.model import PrunedEncoderConfig
from adtp_export.model.heads import head_class

SHAPE = {
    "vocab_size": 97,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 24,
    "initializer_range": 0.2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "mask_token_id": 3,
}
LOCAL = {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 6}
LLAMA3 = {**YARN, "rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
GEMMA = {
    "model_type": "gemma3_text",
    "layer_types": ["sliding_attention", "full_attention"],
    "sliding_window": 9,
    "head_dim": 12,
    "query_pre_attn_scalar": 7,
}
DECODERS = {
    "qwen3": {"model_type": "qwen3", "head_dim": 16},
    "qwen3-bidirectional": {"model_type": "qwen3", "head_dim": 16, "is_causal": False},
    "qwen2-bidirectional": {"model_type": "qwen2", **LOCAL, "is_causal": False, "attention_dropout": 0.2},
    "qwen2-local": {"model_type": "qwen2", **LOCAL, "rope_parameters": YARN},
    "llama": {"model_type": "llama", "attention_bias": True, "mlp_bias": True, "rope_parameters": LLAMA3},
    "llama-ungrouped": {"model_type": "llama", "num_key_value_heads": 4, "is_causal": False},
    "llama-one-group": {
        "model_type": "llama",
        "num_key_value_heads": 1,
        "rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0},
    },
    "mistral": {"model_type": "mistral", "sliding_window": 5, "head_dim": 8},
    "mistral-bidirectional": {"model_type": "mistral", "sliding_window": 5, "head_dim": 8, "is_causal": False},
    "mistral-ungrouped": {
        "model_type": "mistral",
        "sliding_window": 5,
        "head_dim": 8,
        "is_causal": False,
        "num_key_value_heads": 4,
    },
    "gemma": {**GEMMA, "rope_parameters": {"full_attention": YARN, "sliding_attention": {"rope_theta": 50.0}}},
    "gemma-bidirectional": {**GEMMA, "use_bidirectional_attention": True, "attn_logit_softcapping": 1.0},
    "gemma-ungrouped": {**GEMMA, "is_causal": False, "num_key_value_heads": 4, "attention_dropout": None},
    "eurobert": {"model_type": "eurobert"},
    "eurobert-mean": {"model_type": "eurobert", "classifier_pooling": "mean"},
    "eurobert-bos": {"model_type": "eurobert", "classifier_pooling": "bos"},
}
"""Fields beside `SHAPE`."""
FAMILIES = sorted({fields["model_type"] for fields in DECODERS.values()})
HEADS = {"sequence": {"num_labels": 3}, "tokens": {"num_labels": 5}, "embedding": {"embedding": {"pooling": "last"}}}


def make_decoder(name, head="sequence", pruning="none", **changes):
    """A random model; one that drops tokens has three layers, and scores such that some tokens fall at each site, and some stay."""
    torch.manual_seed(0)
    backbone = {**SHAPE, **DECODERS[name], **changes}
    if pruning != "none":
        kinds = {"layer_types": [*backbone["layer_types"], "full_attention"]} if "layer_types" in backbone else {}
        backbone |= {"num_hidden_layers": 3, **kinds}
    config = PrunedEncoderConfig(backbone=backbone, pruning=PRUNINGS[pruning], head=head, **HEADS[head])
    model = head_class(head)(config).eval().requires_grad_(False)
    for i, pruner in enumerate(model.pruners.values()):
        if pruning == "ltp":  # scores of causal models are means over the queries that see a token, and others sums
            part = (2 if "sliding_window" in backbone else 8) if model.backbone.causal(model.dense.config) else 1
            pruner.threshold.fill_((0.02 + 0.01 * i) / part)
        if pruning == "transkimmer":
            pruner.predictor[4].bias[1] += 1.5
    for parameter_name, parameter in model.named_parameters():
        if "norm" in parameter_name:  # what training moves away from 1, or from 0
            parameter.add_(0.3 * torch.randn_like(parameter))
    return model


def has_head(name, head):
    """Whether transformers has such a model."""
    return (
        head_class(head).auto_class._model_mapping.get(CONFIG_MAPPING[DECODERS[name]["model_type"]], None) is not None
    )


def batch_of(lengths, pad=0):
    """Ids with the padding id inside a text and at its end, and their mask."""
    torch.manual_seed(1)
    mask = (
        torch.arange(min(max(lengths) + 1, SHAPE["max_position_embeddings"])) < torch.tensor(lengths)[:, None]
    ).long()
    ids = torch.randint(4, 97, mask.shape) * mask
    for row, n in enumerate(lengths):
        if n > 3:
            ids[row, [1, n - 1]] = pad
    return {"input_ids": ids, "attention_mask": mask}
