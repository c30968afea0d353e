"""Pictures that stay whole: cut as transformers does, and from a checkpoint to text."""

import json

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from language_models import IMAGE, save_grid
from picture_processors import processed, with_template
from PIL import Image

import adtp_export
from adtp_export.cli import run
from adtp_export.errors import InputError
from adtp_export.inference.generation import Generator
from adtp_export.inference.grids import fitting, patch_places, patches_of, positions_of

LAYOUT = {"layout": "grid", "patch": 4, "merge": 2, "temporal": 2}
PLAIN = {"do_resize": False, "do_rescale": False, "do_normalize": False}


def picture(height, width):
    return np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8)


@pytest.mark.parametrize(
    ("size", "fits"),
    [
        ((333, 500), (336, 504)),
        ((1, 199), (28, 812)),
        ((2000, 3000), (812, 1204)),
        ((30, 30), (56, 56)),
        ((70, 42), (56, 56)),  # halves go to the even multiple
    ],
)
def test_sizes(size, fits):
    """Those of Qwen2-VL's processor in transformers."""
    assert fitting(*size, 28, 3136, 1003520) == fits


@given(rows=st.integers(1, 4), columns=st.integers(1, 4))
@settings(max_examples=10)
def test_patches_are_parts_of_the_picture(rows, columns):
    """Where `patch_places` says, twice in time; those of a token follow one another."""
    whole = picture(8 * rows, 8 * columns)
    patches, grid = patches_of(whole, PLAIN, LAYOUT)
    places = patch_places(*grid, 2)
    assert grid == (2 * rows, 2 * columns)
    assert sorted(map(tuple, places.tolist())) == [(y, x) for y in range(grid[0]) for x in range(grid[1])]
    for (y, x), values in zip(places, patches.reshape(-1, 3, 2, 4, 4)):
        for frame in (0, 1):
            assert np.array_equal(values[:, frame], whole[4 * y : 4 * y + 4, 4 * x : 4 * x + 4].transpose(2, 0, 1))
    tokens = places.reshape(-1, 4, 2) // 2
    assert (tokens == tokens[:, :1]).all()
    assert tokens[:, 0].tolist() == [[y, x] for y in range(rows) for x in range(columns)]


@given(before=st.integers(0, 5), grid=st.tuples(st.integers(1, 5), st.integers(1, 5)), behind=st.integers(0, 5))
def test_positions(before, grid, behind):
    """Time stands still in a picture; text goes on behind its longer side."""
    found = positions_of([before, grid, behind])
    wanted = [(i, i, i) for i in range(before)]
    wanted += [(before, before + y, before + x) for y in range(grid[0]) for x in range(grid[1])]
    wanted += [(i, i, i) for i in range(before + max(grid), before + max(grid) + behind)]
    assert list(map(tuple, found.tolist())) == wanted


def test_what_is_refused():
    for size, changes, told in (
        ((8, 8), {"patch_size": 14}, "got patch_size 14; the model has 4"),
        ((8, 8), {"merge_size": 3}, "got merge_size 3; the model has 2"),
        ((8, 12), PLAIN, "makes a picture of 8 x 12; the model takes multiples of 8"),
        ((1, 201), {}, "got a picture of 1 x 201; accepted are sides that differ by up to 200 times"),
        ((8, 8), {"max_pixels": 0}, "got max_pixels 0; accepted are integers"),
        ((8, 8), {"size": {"shortest_edge": "1"}}, "got min_pixels '1'"),
        ((8, 8), {"size": 224}, "got size 224; accepted are shortest_edge and longest_edge"),
        ((8, 8), {"size": {"height": 8, "width": 8}}, "got size .*; accepted are shortest_edge and longest_edge"),
    ):
        with pytest.raises(InputError, match=told):
            patches_of(picture(*size), changes, LAYOUT)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["qwen2_vl", "qwen2_5_vl"])
def test_from_a_checkpoint_to_text(kind, tmp_path, monkeypatch):
    """Exported, verified, and token for token what transformers generates, also beside text alone, and of files and messages."""
    model = save_grid(tmp_path / "model", kind)
    with_template(tmp_path / "model")
    manifest = adtp_export.export(tmp_path / "model", tmp_path / "out")
    assert {target.status for target in manifest.targets.values()} == {"verified"}
    generator = Generator(tmp_path / "out")
    texts, pictures = ["w1 w7 <image> w20 w9", "<image> w8", "w2 w3"], [picture(40, 23), picture(16, 50), None]
    ready = [generator.pictures([each])[0] if each is not None else None for each in pictures]
    found = adtp_export.generate(tmp_path / "out", pictures, texts, max_new_tokens=32)
    for text, own, told in zip(texts, ready, found):
        tokens = 0 if own is None else len(own.places) // 4
        ids = generator.prompt(text, own, generator.tokenizer)
        ids = torch.tensor([[i for i in ids for _ in range(tokens if i == IMAGE else 1)]])
        more = {}
        if own is not None:
            more = {"pixel_values": torch.from_numpy(own.tiles), "mm_token_type_ids": (ids == IMAGE).int()}
            more["image_grid_thw"] = torch.tensor([[1, *(own.places.max(0) + 1)]])
        whole = model.generate(ids, **more, max_new_tokens=32, do_sample=False)[0, ids.shape[1] :]
        assert told == generator.tokenizer.decode(whole.tolist())
    photo = tmp_path / "photo.jpg"
    Image.fromarray(pictures[0]).save(photo)
    batch = processed("qwen2_vl", tmp_path / "model", photo, "w1 w7", monkeypatch)
    whole = model.generate(**batch, max_new_tokens=32, do_sample=False)[0, batch["input_ids"].shape[1] :]
    message = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "w1 w7"}]}]
    found = adtp_export.generate(tmp_path / "out", [photo], [message], max_new_tokens=32)
    assert found == [generator.tokenizer.decode(whole.tolist())]
    with pytest.raises(InputError, match="prompt 0 has a place for a video; accepted are pictures"):
        list(generator.tokens([[1, 97, 2]]))
    with pytest.raises(InputError, match="has 2 images; accepted is one image in a prompt"):
        adtp_export.generate(tmp_path / "out", pictures[:1], ["<image> w1 <image>"])


@pytest.mark.slow
def test_pruned_files_are_verified(tmp_path):
    """In lower precisions, too; and the page of a run has the tokens of each stage."""
    save_grid(tmp_path / "model", "qwen2_5_vl")
    stages = [{"layer": 1, "divisor": 2, "attended": 0.4, "surplus": 1.2}, {"layer": 3, "divisor": 2, "attended": 1.0}]
    (tmp_path / "btp.json").write_text(json.dumps({"method": "btp-qwen", "stages": stages}))
    options = {"pruning": tmp_path / "btp.json", "precisions": "fp16,int8"}
    manifest = adtp_export.export(tmp_path / "model", tmp_path / "out", **options)
    assert {target.status for target in manifest.targets.values()} == {"verified"}
    np.save(tmp_path / "photo.npy", picture(40, 24))
    typed = [str(tmp_path / "out"), "--image", str(tmp_path / "photo.npy"), "--text", "w1 <image> w2"]
    page = tmp_path / "run.html"
    assert run.command(run.make_parser().parse_args([*typed, "--max-new-tokens", "3", "--report", str(page)])) == 0
    text = page.read_text()
    assert [f"<td>{1 + left + 1}</td>" in text for left in (15, 7, 3)] == [True] * 3
