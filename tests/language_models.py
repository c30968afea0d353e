"""Small random models that generate text, with pictures or without, as transformers saves them."""

import json

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, AutoModelForImageTextToText

TEXT = {
    "vocab_size": 97,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,  # at 0.02 the two best logits lie close to one another
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
VISION = {
    "model_type": "clip_vision_model",
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "image_size": 16,
    "patch_size": 4,
    "projection_dim": 16,
}
IMAGE, SIDE = 96, 4
"""The id of the image token, and patches along a picture's side."""
STAGES = {
    "btp": [
        {"layer": 1, "divisor": 2, "attended": 0.3, "surplus": 3.0, "diverse": 0.3, "spatial": 4, "twice": True},
        {"layer": 2, "divisor": 2, "attended": 1.0, "surplus": 1.5},
        {"layer": 3, "divisor": 0},
    ],
    "fastv": [{"layer": 2, "keep": 0.5}],
    "pyramiddrop": [{"layer": 1, "keep": 0.5}, {"layer": 3, "keep": 0.2}],
}


def save_causal(directory, kind, **fields):
    """A model that reads text alone; returns transformers' own."""
    torch.manual_seed(0)
    config = CONFIG_MAPPING[kind](**{**TEXT, **fields})
    model = AutoModelForCausalLM.from_config(config).eval()
    model.save_pretrained(directory)
    return model


def save_llava(directory, **fields):
    """A LLaVA with 16 image tokens and four layers, its tokenizer and its processor's settings; returns transformers' own."""
    torch.manual_seed(0)
    config = CONFIG_MAPPING["llava"](
        text_config={"model_type": "llama", **TEXT, "num_hidden_layers": 4, **fields},
        vision_config=VISION,
        image_token_index=IMAGE,
        image_seq_length=SIDE**2,
    )
    model = AutoModelForImageTextToText.from_config(config).eval()
    model.save_pretrained(directory)
    words = {f"w{i}": i for i in range(IMAGE)} | {"<image>": IMAGE}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w3"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.enable_padding(length=40)  # as it may have been saved in training; prompts are neither padded nor cut
    tokenizer.enable_truncation(2)
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {"size": {"shortest_edge": 16}, "image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    (directory / "preprocessor_config.json").write_text(json.dumps(settings))
    return model
