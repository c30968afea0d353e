"""Pictures that stay whole, and positions of three axes: as in transformers, token for token."""

import dataclasses
import json

import numpy as np
import pytest
import torch
from language_models import IMAGE, STAGES, networks, save_grid

from adtp_export.errors import InputError
from adtp_export.inference.generation import after_prefill, after_step
from adtp_export.inference.grids import patch_places, patches_of, positions_of
from adtp_export.model.decoder import load_decoder
from adtp_export.verify.prefill import compare, expect
from adtp_export.verify.prompts import draw_prompts, failure_before_prefill

KINDS = ("qwen2_vl", "qwen2_5_vl")
NEW = 32
SIZES = {(16, 16): 4, (40, 24): 15, (9, 70): 9, (70, 9): 9, (150, 151): 25}
"""Heights and widths, and tokens."""
DIVPRUNE = {"method": "divprune", "keep": 0.5}
SPREAD = {"method": "btp", "stages": STAGES["btp"]}


def picture(height, width):
    return np.random.default_rng(height).integers(0, 256, (height, width, 3), dtype=np.uint8)


def changed(fields, changes):
    """Fields within fields, some of them changed."""
    return fields | {
        name: changed(fields.get(name, {}), new) if isinstance(new, dict) else new for name, new in changes.items()
    }


@pytest.mark.parametrize("kind", KINDS)
def test_goes_on_as_in_transformers(kind, tmp_path):
    """Behind pictures of several sizes and behind text, in one batch."""
    model = save_grid(tmp_path, kind)
    decoder = load_decoder(tmp_path)
    settings = json.loads((tmp_path / "preprocessor_config.json").read_text())
    wanted, states, images, positions = [], [], [], []
    vision = decoder.vision()
    for number, (size, tokens) in enumerate([*SIZES.items(), (None, 0)]):
        before, behind = torch.tensor([1, 7, 5][: 1 + number % 3]), torch.tensor([20, 9, 8, 30][: 1 + number % 4])
        ids, parts, more = torch.cat([before, torch.full((tokens,), IMAGE), behind]), [len(before), len(behind)], {}
        own = model.get_input_embeddings()(ids)
        if size:
            patches, grid = patches_of(picture(*size), settings, decoder.pictures)
            kinds = (ids == IMAGE).int()[None]
            more = {"image_grid_thw": torch.tensor([[1, *grid]]), "mm_token_type_ids": kinds}
            more["pixel_values"] = torch.from_numpy(patches)
            parts.insert(1, (grid[0] // 2, grid[1] // 2))
            with torch.no_grad():
                found = vision(more["pixel_values"], torch.from_numpy(patch_places(*grid, 2)))
            own[ids == IMAGE] = found
        wanted.append(model.generate(ids[None], **more, max_new_tokens=NEW, do_sample=False)[0, len(ids) :].tolist())
        states.append(own)
        images.append(ids == IMAGE)
        positions.append(positions_of(parts))
    read, go_on = networks(decoder)
    feed = {"inputs_embeds": torch.cat(states), "cu_seqlens": np.cumsum([0, *map(len, states)]).astype(np.int32)}

    def greedy(positions):
        answer = read({**feed, "positions": np.concatenate(positions).T, "image": torch.cat(images)})
        past, tokens = after_prefill(answer), [answer["logits"].argmax(1)]
        for _ in range(NEW - 1):
            answer = go_on({**past, "input_ids": tokens[-1]})
            past = after_step(answer)
            tokens.append(answer["logits"].argmax(1))
        return np.stack(tokens, 1).tolist()

    assert greedy(positions) == wanted
    # Swapped axes show in pictures that are no squares.
    assert [a == b for a, b in zip(greedy([p[:, [0, 2, 1]] for p in positions]), wanted)][1:4] != [True] * 3


@pytest.mark.parametrize("method", ["btp-qwen", "fastv", "pyramiddrop"])
def test_pruned_is_the_oracle(method, tmp_path):
    """Tokens that stay keep their positions, and text goes on where it would without pruning. A step that goes on one place later shows."""
    save_grid(tmp_path, "qwen2_vl")
    decoder = load_decoder(tmp_path, {"method": method, "stages": STAGES[method]})
    prompts = draw_prompts(decoder, 3)
    text = dataclasses.replace(prompts[1], image=torch.zeros_like(prompts[1].image))
    expected = expect(decoder, [prompts[0], text, prompts[1]], 3)
    read, go_on = networks(decoder)
    found = compare(decoder, expected, read, go_on)
    assert found.failure is None
    assert found.rows_compared == 3
    assert len(expected.exact[0].rows[-1]) < len(prompts[0].states)

    def later(feed):
        moved = {name: value + 1 for name, value in feed.items() if name.startswith("positions.")}
        return go_on({**feed, **moved})

    assert "logits differ" in compare(decoder, expected, read, later).failure


def test_towers_of_unequal_grids(tmp_path):
    """As transformers' own for each; places that are swapped show."""
    model = save_grid(tmp_path, "qwen2_5_vl")
    decoder = load_decoder(tmp_path)
    vision = decoder.vision()

    def embed(feed):
        return {"inputs_embeds": decoder.embeddings(torch.as_tensor(feed["input_ids"])).numpy()}

    @torch.no_grad()
    def run(feed):
        rows, columns = (int(each) + 1 for each in feed["patch_places"].max(0))
        grid = torch.tensor([[1, rows, columns]])
        return {
            "image_features": model.model.visual(torch.from_numpy(feed["pixel_values"]), grid).pooler_output.numpy()
        }

    @torch.no_grad()
    def swapped(feed):
        places = torch.from_numpy(feed["patch_places"]).flip(1)
        return {"image_features": vision(torch.from_numpy(feed["pixel_values"]), places).numpy()}

    assert failure_before_prefill(decoder, embed, run) is None
    assert "features of pictures differ" in failure_before_prefill(decoder, embed, swapped)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"text_config": {"rope_parameters": {"mrope_section": [1, 2]}}}, "accepted are three integers"),
        (
            {"text_config": {"rope_parameters": {"mrope_section": [1, 2, 2]}}},
            "adds up to 5; accepted is half of a head, 4",
        ),
        (
            {"pruning": DIVPRUNE},
            "pictures of a 'qwen2_vl' model have any size; accepted are stages, such as those of btp-qwen",
        ),
        (
            {"pruning": SPREAD},
            "got spatial, and image tokens of a 'qwen2_vl' model are no squares; accepted is spatial 0",
        ),
        ({"vision_config": {"num_heads": 0}}, "vision_config.num_heads is 0; accepted are integers from 1 on"),
    ],
)
def test_configurations_that_are_refused(changes, told, tmp_path):
    save_grid(tmp_path, "qwen2_vl")
    path = tmp_path / "config.json"
    raw = json.loads(path.read_text())
    path.write_text(json.dumps(changed(raw, changes)))
    with pytest.raises(InputError, match=told):
        load_decoder(tmp_path)


def test_older_configurations_are_flat(tmp_path):
    """Qwen2-VL was published with the fields of its language model beside the others, and its sections in `rope_scaling`."""
    save_grid(tmp_path, "qwen2_vl")
    nested, path = load_decoder(tmp_path), tmp_path / "config.json"
    raw = json.loads(path.read_text())
    text = raw.pop("text_config")
    rotation = text.pop("rope_parameters")
    scaling = {"type": "mrope", "mrope_section": rotation["mrope_section"]}
    path.write_text(json.dumps({**text, **raw, "rope_theta": rotation["rope_theta"], "rope_scaling": scaling}))
    flat, prompts = load_decoder(tmp_path), draw_prompts(nested, 1)
    feed = {"inputs_embeds": prompts[1].states, "cu_seqlens": [0, len(prompts[1].states)], "image": prompts[1].image}
    feed["positions"] = prompts[1].positions.T
    answers = [networks(each)[0](feed)["logits"] for each in (nested, flat)]
    assert np.array_equal(*answers)
    assert flat.pictures == nested.pictures
