"""Small random vision towers, as transformers saves them."""

import json

import torch
import transformers

VISION = {
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 40,
    "image_size": 18,
    "patch_size": 4,
    "initializer_range": 0.2,
}
TEXT = {
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 20,
    "vocab_size": 50,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def save_tower(directory, name, **fields):
    """Save a model of one of transformers' classes with the settings of its processor; return it.

    A model of texts and pictures takes `projection_dim` itself, and all other fields are those of its tower.
    """
    torch.manual_seed(0)
    kind = getattr(transformers, name)
    own = {**VISION, **fields}
    if name.endswith("Model") and not name.endswith("VisionModel"):
        both = {"projection_dim": own.pop("projection_dim", 24)}
        own = {"vision_config": own, "text_config": TEXT, **(both if name.startswith("CLIP") else {})}
    model = kind(kind.config_class(**own)).eval()
    model.save_pretrained(directory)
    side = (own.get("vision_config") or own)["image_size"]
    settings = {"size": {"height": side, "width": side}, "image_mean": [0.4, 0.5, 0.6], "image_std": [0.3, 0.2, 0.25]}
    (directory / "preprocessor_config.json").write_text(json.dumps(settings))
    return model


def pooled(model, pixels):
    """What transformers gives as a picture's vector."""
    if hasattr(model, "get_image_features"):
        return model.get_image_features(pixels).pooler_output
    found = model(pixels)
    return found.image_embeds if hasattr(found, "image_embeds") else found.pooler_output
