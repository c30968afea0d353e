"""Pictures in tiles: cut and laid out as transformers does, and from a checkpoint to text."""

import json

import numpy as np
import pytest
import torch
from language_models import save_anyres, save_tiled
from picture_processors import processed, with_template
from PIL import Image
from testbed import run_cli
from transformers import PreTrainedTokenizerFast

import adtp_export
from adtp_export.errors import InputError
from adtp_export.inference.generation import Generator, Sampling
from adtp_export.inference.pixels import pixel_values, read_picture
from adtp_export.inference.tiles import prepared

SETTINGS = {"size": {"longest_edge": 32}, "max_image_size": {"longest_edge": 16}, "do_pad": True}
TILES = {"layout": "tiles"}
SQUARE = {"size": {"height": 16, "width": 16}}
PINPOINTS = {"layout": "anyres", "pinpoints": [[16, 32], [32, 16], [32, 32]], "most": None}


def picture(height, width):
    return np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8)


@pytest.mark.parametrize(
    ("size", "changes", "rows", "columns"),
    [
        ((40, 40), {}, 2, 2),
        ((10, 40), {}, 1, 2),
        ((40, 3), {}, 2, 1),
        ((16, 16), {"size": {"longest_edge": 16}}, 0, 0),
        ((33, 16), {"do_resize": False}, 3, 2),
        ((40, 40), {"do_image_splitting": False}, 0, 0),
    ],
)
def test_text_between_tiles(size, changes, rows, columns):
    """Rows and columns, the whole picture last; what is written is what Idefics3's processor writes."""
    found = prepared(picture(*size), {**SETTINGS, **changes}, TILES, 16, "<image>")
    assert found.tiles.shape == (rows * columns + 1, 3, 16, 16)
    assert np.abs(found.tiles).max() <= 1
    lines = [
        "".join(f"<fake_token_around_image><row_{row + 1}_col_{column + 1}><image>" for column in range(columns)) + "\n"
        for row in range(rows)
    ]
    end = "<fake_token_around_image><global-img><image><fake_token_around_image>"
    assert found.written == "".join(lines) + ("\n" if rows else "") + end


def test_tiles_are_parts_of_the_picture():
    """Nothing is resized here, so pixels are found again."""
    whole = picture(32, 48)
    found = prepared(whole, {**SETTINGS, "do_resize": False, "do_normalize": False, "do_rescale": False}, TILES, 16, "")
    for number, tile in enumerate(found.tiles[:-1]):
        y, x = 16 * (number // 3), 16 * (number % 3)
        assert np.array_equal(tile, whole[y : y + 16, x : x + 16].transpose(2, 0, 1))


@pytest.mark.parametrize(
    ("size", "grid"), [((20, 40), (1, 2)), ((90, 10), (2, 1)), ((30, 30), (2, 2)), ((7, 7), (1, 2))]
)
def test_the_best_of_the_pinpoints(size, grid):
    """It shows most of the picture, and of two that show as much it is the smaller one; borders are left out of the tokens."""
    settings = {"size": {"shortest_edge": 16}, "do_normalize": False}
    found = prepared(picture(*size), settings, PINPOINTS, 16, "<image>")
    assert len(found.tiles) == 1 + grid[0] * grid[1]
    features = np.arange(len(found.tiles) * 17, dtype=np.float32).reshape(-1, 17, 1)
    (tokens,) = found.arranged(features)
    kept = tokens[16:].reshape(-1)
    ends = (kept == 16).nonzero()[0]
    rows, columns = len(ends), ends[0]
    assert (np.diff(ends) == columns + 1).all()
    shown = min(grid[0] * 16 / size[0], grid[1] * 16 / size[1])
    assert abs(rows / 4 * 16 - size[0] * shown) <= 8
    assert abs(columns / 4 * 16 - size[1] * shown) <= 8


def test_settings_that_are_refused():
    for changes, layout, told in (
        (
            {"max_image_size": {"longest_edge": 8}},
            TILES,
            r"got max_image_size \{'longest_edge': 8\}; the model takes tiles of 16",
        ),
        ({"size": {"shortest_edge": 8}}, TILES, "accepted is longest_edge, or height and width"),
        ({"resample": 5}, TILES, "got resample 5; accepted are 3, bicubic, 2, bilinear, and 1, Lanczos"),
        ({"resample": 0}, PINPOINTS, "got resample 0"),
        ({"size": None}, PINPOINTS, "got size None; accepted are integers from 1 on"),
        (
            {"size": {"height": "16", "width": 16}},
            TILES,
            "accepted are integers from 1 on, such as {'longest_edge': 64}",
        ),
        (
            {"max_image_size": {"longest_edge": 0}},
            TILES,
            "got max_image_size {'longest_edge': 0}; accepted are integers",
        ),
        ({"image_mean": [0.5, 0.5]}, TILES, "got image_mean .* accepted is a number, or three"),
        ({"image_mean": 0.5, "image_std": 0, **SQUARE}, PINPOINTS, "got image_std 0; .* image_std is not 0"),
        ({"image_mean": 0.5, "image_std": 0.5, "rescale_factor": "x", **SQUARE}, PINPOINTS, "got rescale_factor 'x'"),
        ({"image_grid_pinpoints": [[32, 20]]}, PINPOINTS, "got .32, 20.; accepted are pairs .* multiples of 16"),
        ({"image_grid_pinpoints": 16}, PINPOINTS, "image_grid_pinpoints: got 16"),
        ({"image_grid_pinpoints": []}, {**PINPOINTS, "pinpoints": []}, "image_grid_pinpoints: got none"),
    ):
        with pytest.raises(InputError, match=told):
            prepared(picture(20, 20), {**SETTINGS, **changes}, layout, 16, "<image>")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["smolvlm", "idefics3", "llava_onevision", "llava_next"])
def test_from_a_checkpoint_to_text(kind, tmp_path, monkeypatch):
    """Exported without pruning, verified, and token for token what transformers generates behind the same prompt: with tiles of ours, and
    with its own processor behind a message and a file."""
    tiled = kind in ("smolvlm", "idefics3")
    model = (save_tiled if tiled else save_anyres)(tmp_path / "model", kind)
    with_template(tmp_path / "model")
    manifest = adtp_export.export(tmp_path / "model", tmp_path / "out")
    assert {target.status for target in manifest.targets.values()} == {"verified"}
    generator = Generator(tmp_path / "out")
    texts, pictures = ["w1 w7 <image> w20 w9", "w8 <image>"], [picture(40, 23), picture(16, 50)]
    ready = generator.pictures(pictures)
    parts = iter(generator.features(ready))
    prompts = [generator.prompt(text, own, generator.tokenizer) for text, own in zip(texts, ready)]
    found = adtp_export.generate(tmp_path / "out", pictures, texts, max_new_tokens=32)
    decode = PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "out" / "tokenizer.json")).decode
    for prompt, own, given, text in zip(prompts, ready, pictures, found):
        repeated = [i for i in prompt for _ in range(len(next(parts)) if i == generator.image_token else 1)]
        sizes = {} if tiled else {"image_sizes": torch.tensor([read_picture(given).shape[:2]])}
        tiles = torch.tensor(own.tiles)[None]
        whole = model.generate(
            torch.tensor([repeated]), pixel_values=tiles, max_new_tokens=32, do_sample=False, **sizes
        )
        assert text == decode(whole[0, len(repeated) :], skip_special_tokens=True)
    stream = list(generator.stream([None, pictures[0]], ["w1 w2", texts[0]], Sampling(max_new_tokens=2)))
    assert len(stream) == 2
    if kind != "smolvlm":
        photo = tmp_path / "photo.jpg"
        Image.fromarray(pictures[0]).save(photo)
        batch = processed(kind, tmp_path / "model", photo, "w1 w7", monkeypatch)
        whole = model.generate(**batch, max_new_tokens=32, do_sample=False)
        wanted = decode(whole[0, batch["input_ids"].shape[1] :], skip_special_tokens=True)
        asked = ("--chat", "--image", photo, "--text", "w1 w7", "--max-new-tokens", 32)
        result = run_cli("adtp-run", tmp_path / "out", *asked)
        assert (result.returncode, result.stdout.strip()) == (0, wanted), result.stderr


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["smolvlm", "llava_onevision"])
def test_pruned_files_are_verified(kind, tmp_path):
    (save_tiled if kind == "smolvlm" else save_anyres)(tmp_path / "model", kind)
    stages = [{"layer": 1, "divisor": 2, "attended": 0.5, "surplus": 2.0}, {"layer": 3, "divisor": 0}]
    (tmp_path / "btp.json").write_text(json.dumps({"method": "btp", "stages": stages}))
    manifest = adtp_export.export(tmp_path / "model", tmp_path / "out", pruning=tmp_path / "btp.json")
    assert {target.status for target in manifest.targets.values()} == {"verified"}
    assert adtp_export.generate(tmp_path / "out", [picture(40, 23)], ["w1 <image> w2"], max_new_tokens=3)


def test_an_empty_file_is_no_picture(tmp_path):
    (tmp_path / "empty.npy").touch()
    with pytest.raises(InputError, match=r"empty\.npy is no picture"):
        read_picture(tmp_path / "empty.npy")


def test_settings_of_pictures():
    """As transformers' processors have them."""
    colors = picture(16, 16)
    plain = {"do_resize": False}
    assert np.array_equal(
        pixel_values(colors, {**plain, "do_rescale": False, "do_normalize": False}, 16),
        colors.transpose(2, 0, 1).astype(np.float32),
    )
    for refused in (
        {"do_pad": True},
        {"size": {"longest_edge": 16}},
        {"size": {"shortest_edge": 16, "longest_edge": 24}},
        *({"resample": kernel} for kernel in (5, [2], 2.0, True, "bicubic", None)),
        {"crop_size": {"height": "16", "width": 16}},
    ):
        with pytest.raises(InputError, match=f"got {next(iter(refused)).replace('_', '.')}"):
            pixel_values(colors, refused, 16)
    for left_out in ({}, {"image_mean": 0.5}, {"image_std": [0.5] * 3}):
        with pytest.raises(InputError, match="has no image_mean and image_std, and processors have different ones"):
            pixel_values(colors, {**plain, **left_out}, 16)


def test_pictures_of_another_size_than_the_models():
    """No part of a picture is cut off that transformers' processor keeps."""
    cut = {"size": 20, "crop_size": 16, "resample": 2, "do_normalize": False}
    assert pixel_values(picture(30, 23), cut, 16).shape == (3, 16, 16)
    assert pixel_values(picture(30, 23), {**cut, "crop_size": None}, 16).shape == (3, 16, 16)
    for changes, made in (
        ({"crop_size": 20}, "20 x 20"),
        ({"crop_size": {"height": 16, "width": 18}}, "16 x 18"),
        ({"size": 12}, "12 x 15"),
        ({"do_center_crop": False}, "20 x 26"),
        ({"size": {"height": 20, "width": 20}, "crop_size": None}, "20 x 20"),
    ):
        with pytest.raises(InputError, match=f"makes pictures of {made}; the model takes 16 x 16"):
            pixel_values(picture(23, 30), {**cut, **changes}, 16)
