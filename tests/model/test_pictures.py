"""Vision-language models of several kinds, in tiles: they go on as in transformers, and pruned ones as the oracle says."""

import json
import re

import numpy as np
import pytest
import torch
from language_models import IMAGE, STAGES, TILED, save_anyres, save_tiled
from model.test_prefill import greedy, networks

from adtp_export.errors import InputError
from adtp_export.inference.tiles import prepared
from adtp_export.model.decoder import load_decoder
from adtp_export.verify.prefill import compare, expect
from adtp_export.verify.prompts import draw_prompts

NEW = 32
SAVE = {"smolvlm": save_tiled, "idefics3": save_tiled, "llava_onevision": save_anyres, "llava_next": save_anyres}
SHAPES = ((40, 23, 3), (16, 50, 3), (9, 9, 3))
AROUND = (("w1 w7 ", " w20 w9 w30"), ("", " w5"), ("w8 w2 w41 ", " w6 w6 w4"))


def pictures_of(decoder, directory):
    settings = json.loads((directory / "preprocessor_config.json").read_text())
    draw = np.random.default_rng(0)
    pictures = [draw.integers(0, 256, shape, dtype=np.uint8) for shape in SHAPES]
    return [prepared(picture, settings, decoder.pictures, decoder.image_size, "<image>") for picture in pictures]


def ids_of(before, behind, picture, parts):
    """Ids of a prompt, with an image token for each feature, as transformers takes them."""
    known = {**{f"w{i}": i for i in range(IMAGE)}, **TILED, "<image>": IMAGE}
    ids, given = [], iter(parts)
    for word in re.findall(r"<[^>]+>|\S+", before + picture.written.replace("\n", " ") + behind):
        ids += [IMAGE] * len(next(given)) if word == "<image>" else [known[word]]
    return ids


@pytest.mark.parametrize(
    "kind",
    [
        "smolvlm",
        "llava_onevision",
        *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("idefics3", "llava_next")),
    ],
)
def test_text_behind_pictures_goes_on_as_in_transformers(kind, tmp_path):
    """Token for token, in one batch of prompts with pictures of several sizes."""
    model = SAVE[kind](tmp_path, kind)
    decoder = load_decoder(tmp_path)
    states, images, wanted = [], [], []
    for (before, behind), picture, shape in zip(AROUND, pictures_of(decoder, tmp_path), SHAPES):
        tiles = torch.tensor(picture.tiles)
        with torch.no_grad():
            parts = picture.arranged(decoder.vision()(tiles).numpy())
        ids = torch.tensor(ids_of(before, behind, picture, parts))
        image = ids == IMAGE
        embedded = decoder.embeddings(ids).clone()
        embedded[image] = torch.tensor(np.concatenate(parts))
        states.append(embedded)
        images.append(image)
        sizes = {"image_sizes": torch.tensor([shape[:2]])} if SAVE[kind] is save_anyres else {}
        whole = model.generate(ids[None], pixel_values=tiles[None], max_new_tokens=NEW, do_sample=False, **sizes)
        wanted.append(whole[0, len(ids) :].tolist())
    assert len({len(image) for image in images}) == len(images)
    found, _, _ = greedy(decoder, states, images, NEW)
    assert found.tolist() == wanted
    assert len({tuple(row) for row in wanted}) == len(wanted)


@pytest.mark.parametrize(
    ("kind", "method"),
    [
        ("smolvlm", "btp"),
        ("llava_onevision", "btp-qwen"),
        *(
            pytest.param(*each, marks=pytest.mark.slow)
            for each in (("smolvlm", "pyramiddrop"), ("llava_onevision", "fastv"), ("llava_next", "fastv"))
        ),
    ],
)
def test_pruned_is_the_oracle(kind, method, tmp_path):
    """Text stands between the tiles of a prompt, and stays."""
    SAVE[kind](tmp_path, kind)
    decoder = load_decoder(tmp_path, {"method": method, "stages": STAGES[method]})
    prompts = draw_prompts(decoder, 3)
    last = prompts[-1].image.to(torch.int8).diff()
    assert (last == 1).sum() == (2 if kind == "smolvlm" else 1)
    found = compare(decoder, expect(decoder, prompts, 3), *networks(decoder))
    assert found.failure is None
    assert found.rows_compared == len(prompts)
    assert found.prediction_agreement == 1


@pytest.mark.parametrize(
    ("kind", "changes", "told"),
    [
        ("smolvlm", {"scale_factor": 3}, "got scale_factor 3 for 8 patches along a side"),
        ("smolvlm", {"image_token_id": 999}, "the image token is 999; accepted are those of the vocabulary, 0 to 109"),
        ("llava_next", {"vision_feature_layer": [-1, 3]}, "has 2 layers, and accepted are -3 to 2"),
        ("llava_onevision", {"vision_aspect_ratio": "pad"}, "vision_aspect_ratio is 'pad'; accepted are such as"),
        ("llava_onevision", {"vision_feature_select_strategy": "default"}, "accepted are 'default' with CLIP and 'full'"),
        ("llava_onevision", {"vision_config": {"model_type": "siglip2_vision_model"}}, "accepted are clip_vision_model"),
    ],
)  # fmt: skip
def test_configurations_that_are_refused(kind, changes, told, tmp_path):
    SAVE[kind](tmp_path, kind)
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    with pytest.raises(InputError, match=told):
        load_decoder(tmp_path)


def test_tokens_that_are_no_squares_are_not_spread(tmp_path):
    save_anyres(tmp_path, "llava_onevision")
    with pytest.raises(InputError, match="got spatial, and image tokens of a 'llava_onevision' model are no squares"):
        load_decoder(tmp_path, {"method": "btp", "stages": STAGES["btp"]})
