"""Small random models that generate text, with pictures or without, as transformers saves them."""

import json

import numpy as np
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
    "btp-qwen": [
        {"layer": 1, "divisor": 2, "attended": 0.3, "surplus": 1.5, "all_candidates": True},
        {"layer": 2, "divisor": 2, "attended": 0.4},
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


TILED = {"w97": 97, "<fake_token_around_image>": 98, "<global-img>": 99}
TILED |= {f"<row_{row}_col_{column}>": 98 + 2 * row + column - 1 for row in (1, 2) for column in (1, 2)}
SIGLIP = {**VISION, "model_type": "siglip_vision_model", "vision_use_head": False}


def save_tiled(directory, kind, **fields):
    """An Idefics3 or a SmolVLM with 16 image tokens a tile and pictures of up to 2 by 2 tiles; returns transformers' own."""
    tower = {name: value for name, value in VISION.items() if name not in ("model_type", "projection_dim")}
    return _save_with_tiles(
        directory,
        CONFIG_MAPPING[kind](
            text_config={"model_type": "llama", **TEXT, **MORE, **fields},
            vision_config={**tower, "patch_size": 2, "initializer_range": 0.2},
            image_token_id=IMAGE,
            scale_factor=2,
        ),
        {"size": {"longest_edge": 32}, "max_image_size": {"longest_edge": 16}, "do_pad": True, "resample": 1},
    )


def save_anyres(directory, kind, **fields):
    """A LLaVA-NeXT or a LLaVA-OneVision with 16 patches a tile; returns transformers' own."""
    one = kind == "llava_onevision"
    return _save_with_tiles(
        directory,
        CONFIG_MAPPING[kind](
            text_config={"model_type": "qwen2" if one else "mistral", **TEXT, **MORE, **fields},
            vision_config=SIGLIP if one else VISION,
            image_token_index=IMAGE,
            image_grid_pinpoints=[[16, 16], [16, 32], [32, 16], [32, 32], [48, 32]],
            **({"vision_aspect_ratio": "anyres_max_2"} if one else {}),
        ),
        {"size": {"height": 16, "width": 16} if one else {"shortest_edge": 16}, "do_pad": True, "do_center_crop": None},
    )


def save_grid(directory, kind, **fields):
    """A Qwen2-VL or a Qwen2.5-VL with patches of 4 pixels, of which 2 by 2 become a token; returns transformers' own."""
    tower = {"depth": 3, "num_heads": 2, "patch_size": 4, "initializer_range": 0.2}
    if kind == "qwen2_vl":
        tower |= {"embed_dim": 16, "hidden_size": 32, "mlp_ratio": 2}
    else:
        tower |= {"hidden_size": 16, "out_hidden_size": 32, "intermediate_size": 24, "window_size": 16}
        tower |= {"fullatt_block_indexes": [1]}
    rotation = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 2, 1]}
    text = {"model_type": f"{kind}_text", **TEXT, **MORE, "rope_parameters": rotation, **fields}
    tokens = {"image_token_id": IMAGE, "video_token_id": 97, "vision_start_token_id": 98, "vision_end_token_id": 99}
    config = CONFIG_MAPPING[kind](text_config=text, vision_config=tower, **tokens)
    settings = {"min_pixels": 64, "max_pixels": 2048, "patch_size": 4, "temporal_patch_size": 2, "merge_size": 2}
    return _save_with_tiles(directory, config, settings)


MORE = {"vocab_size": 110, "num_hidden_layers": 4, "max_position_embeddings": 200}


def _save_with_tiles(directory, config, settings):
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(config).eval()
    model.generation_config.eos_token_id = None
    model.save_pretrained(directory)
    words = {f"w{i}": i for i in range(IMAGE)} | {"<image>": IMAGE, **TILED}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w3"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens([word for word in words if word.startswith("<")])
    tokenizer.save(str(directory / "tokenizer.json"))
    settings |= {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    (directory / "preprocessor_config.json").write_text(json.dumps(settings))
    return model


def networks(decoder):
    """`Prefill` and `Step` as files: arrays by name in and out."""
    from adtp_export.contract import CU_SEQLENS, INPUT_IDS, LOGITS, PAST, POSITIONS, PRESENT, ROWS
    from adtp_export.graph.decoder import names_cached, names_entered
    from adtp_export.model.prefill import Step, prefill_of

    prefill, step = prefill_of(decoder), Step(decoder)
    given = ["inputs_embeds", CU_SEQLENS, *([POSITIONS] if decoder.backbone.axes > 1 else []), "image"]
    inputs = [*names_entered(decoder, CU_SEQLENS, POSITIONS), *names_cached(decoder, PAST)]

    @torch.no_grad()
    def read(feed):
        found = prefill(*(torch.as_tensor(feed[name]) for name in given))
        names = [LOGITS, *names_entered(decoder, CU_SEQLENS, POSITIONS, ROWS), *names_cached(decoder, PRESENT)]
        return {name: value.numpy() for name, value in zip(names, found, strict=True)}

    @torch.no_grad()
    def go_on(feed):
        found = step(torch.as_tensor(feed[INPUT_IDS]), [torch.as_tensor(feed[name]) for name in inputs])
        names = [
            LOGITS,
            *(f"{PRESENT}.{n}" for n in names_entered(decoder, CU_SEQLENS, POSITIONS)),
            *names_cached(decoder, PRESENT),
        ]
        return {name: value.numpy() for name, value in zip(names, found, strict=True)}

    return read, go_on


def with_rows(decoder, layer, change):
    """A prefill that says that other rows enter a layer. change: of a prompt's number, and its rows from its first on."""
    read, go_on = networks(decoder)

    def changed(feed):
        answer, starts = dict(read(feed)), feed["cu_seqlens"]
        name, bounds = f"rows.{layer}", answer[f"cu_seqlens.{layer}"]
        parts = [
            change(n, answer[name][bounds[n] : bounds[n + 1]] - starts[n]) + starts[n] for n in range(len(starts) - 1)
        ]
        return {**answer, name: np.concatenate(parts)}

    return changed, go_on
