"""Vision towers in PyTorch: transformers' own vectors, the tokens that stay, and what is refused."""

import dataclasses
import json

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import nn
from vision_towers import pooled, save_tower

import adtp_export
from adtp_export.contract import IMAGE_FEATURES, IMAGE_KEPT
from adtp_export.errors import InputError
from adtp_export.model.image_choice import FarthestTokens
from adtp_export.model.tower import load_tower
from adtp_export.model.vision import selected
from adtp_export.verify.pictures import compare_tower, draw_pictures, failure_of_features, unevenness
from adtp_export.verify.plain_choice import far

DIVPRUNE = {"method": "divprune", "keep": 0.3}
SHAPES = [
    ("CLIPModel", {"hidden_act": "gelu"}, {}),
    ("CLIPModel", {"num_attention_heads": 8, "patch_size": 5, "projection_dim": 7}, {"vision_feature_layer": [1, -1]}),
    ("CLIPVisionModelWithProjection", {"image_size": 23, "projection_dim": 12}, {"vision_feature_layer": 0}),
    ("CLIPVisionModel", {"num_attention_heads": 1}, {"vision_feature_select_strategy": "full"}),
    ("SiglipModel", {"hidden_act": "quick_gelu", "image_size": 16}, {"vision_feature_layer": -2}),
    ("SiglipVisionModel", {"num_hidden_layers": 1, "patch_size": 3}, {}),
]


@pytest.mark.parametrize(
    ("name", "fields", "chosen"), SHAPES, ids=[f"{i}-{name}" for i, (name, *_) in enumerate(SHAPES)]
)
@torch.no_grad()
def test_vectors_and_states_are_those_of_transformers(name, fields, chosen, tmp_path):
    """Vectors, with tokens beside them or not; tokens are hidden states as LLaVA takes them, without the class token unless told."""
    saved = save_tower(tmp_path, name, **fields).state_dict()
    tower = load_tower(tmp_path, {**DIVPRUNE, **chosen})
    model = tower.model
    assert all(torch.equal(weight, saved.pop(key)) for key, weight in model.state_dict().items())
    assert not saved
    pixels = torch.randn(2, 3, tower.config.image_size, tower.config.image_size)
    vectors = pooled(model, pixels)
    assert vectors.shape == (2, tower.size)
    assert torch.equal(dataclasses.replace(tower, kept_tokens=0).network()(pixels), vectors)
    found, features, kept = tower.network()(pixels)
    assert torch.equal(found, vectors)
    clip = name.startswith("CLIP")
    layers = chosen.get("vision_feature_layer", -2 if clip else -1)
    without_first = clip and chosen.get("vision_feature_select_strategy") != "full"
    states = getattr(model, "vision_model", model)(pixels, output_hidden_states=True).hidden_states
    every = torch.cat([states[i] for i in (layers if isinstance(layers, list) else [layers])], -1)[
        :, int(without_first) :
    ]
    tokens = (tower.config.image_size // tower.config.patch_size) ** 2 + (clip and not without_first)
    assert every.shape[1] == tokens
    assert kept.shape == (2, round(0.3 * tokens))
    assert torch.equal(features, torch.stack([own[places] for own, places in zip(every, kept)]))


def test_a_planted_mistake_is_noticed(tmp_path):
    """In a vector, in which tokens stay, in their features; and nothing is said where there is none."""
    save_tower(tmp_path, "CLIPModel")
    tower = load_tower(tmp_path, DIVPRUNE)
    network = tower.network()

    def parity(**changes):
        @torch.no_grad()
        def run(feed):
            names = ("image_embeds", "image_features", "image_kept")
            found = dict(zip(names, (each.numpy() for each in network(torch.tensor(feed["pixel_values"])))))
            return {name: changes.get(name, lambda value: value)(value) for name, value in found.items()}

        return compare_tower(tower, run)

    right = parity()
    assert right.failure is None
    assert right.kept_token_agreement == 1

    def nudged(values):
        changed = values.copy()
        changed[1, 2] += 2 * right.tolerance
        return changed

    assert parity(image_embeds=nudged).failure.startswith("vectors of pictures differ by")
    assert parity(image_embeds=lambda values: values * np.nan).failure.startswith("vectors of pictures differ by nan")
    others = parity(image_kept=lambda kept: np.tile(np.arange(kept.shape[1]), (len(kept), 1)))
    assert others.failure.startswith("picture 0 keeps other image tokens")
    assert others.kept_token_agreement < 1
    assert parity(image_features=lambda values: values[:, ::-1]).failure.startswith("features of pictures differ by")
    for disordered in (lambda kept: kept[:, ::-1], lambda kept: np.zeros_like(kept), lambda kept: kept[:, 1:]):
        assert parity(image_kept=disordered).failure.startswith(
            "image tokens that stay are not 5 of each picture, in order"
        )


@torch.no_grad()
def test_a_near_tie_excuses_no_other_tokens():
    """Of 144 tokens some pick is always within rounding in fp16."""
    torch.manual_seed(0)
    features = nn.Sequential(nn.Flatten(), nn.Linear(48, 144 * 8), nn.Unflatten(1, (144, 8)))
    pictures = draw_pictures(4, 2)
    unit = nn.functional.normalize(features(pictures).double(), dim=-1)
    right = np.array([sorted(far([], 14, own)[0]) for own in (1 - unit @ unit.transpose(1, 2)).numpy()])

    def failure(kept, precision):
        chosen = np.take_along_axis(features(pictures).numpy(), kept[:, :, None], 1)
        return failure_of_features(features, {IMAGE_KEPT: kept, IMAGE_FEATURES: chosen}, pictures, precision, 14)

    first = np.tile(np.arange(14), (2, 1))
    for precision, told in (("fp32", "that choice is clear"), ("fp16", "that no rounding explains")):
        assert failure(right, precision) is None
        assert told in failure(first, precision)


@given(st.integers(3, 40), st.integers(1, 12), st.floats(0, 0.3), st.integers(0, 2**16))
@settings(deadline=None)
def test_tokens_that_rounding_turns_are_as_even_as_it_lets_them(n, count, most, seed):
    """Distances that are off by so much make choices that are uneven by twice that at most, and their own are even."""
    generator = np.random.default_rng(seed)
    unit = generator.standard_normal((n, 5))
    unit /= np.linalg.norm(unit, axis=1, keepdims=True)
    distances, off = 1 - unit @ unit.T, most * generator.uniform(-1, 1, (n, n))
    count = min(count, n - 1)
    for own, bound in ((distances, 0), (distances + (off + off.T) / 2, 2 * most)):
        kept = np.array(sorted(far([], count, own)[0]))
        assert unevenness(distances, kept) <= bound + 1e-12


def test_unevenness_by_hand():
    """On a line the point at 10 is picked first, because its nearest is farthest, and then that at 0."""
    places = np.array([0.0, 1, 4, 5.5, 10])
    distances = np.abs(places[:, None] - places)
    assert unevenness(distances, np.array([0, 4])) == 0
    assert unevenness(distances, np.array([0, 1])) == 9 - 1  # 10 is 9 from both
    assert unevenness(distances, np.array([2, 3])) == 4.5 - 1.5  # so is 10 from 5.5, and these are 1.5 from one another


@pytest.mark.parametrize(
    ("changes", "options", "told"),
    [
        ({"model_type": "clip_text_model"}, {}, "it reads texts; accepted is the directory that has the vision tower"),
        ({"model_type": "siglip_text_model"}, {}, "it reads texts"),
        ({"model_type": "siglip2"}, {}, "lists of patches .NaFlex.; accepted are those of a fixed resolution"),
        ({"model_type": "siglip2_vision_model"}, {}, "NaFlex"),
        ({"model_type": "xclip"}, {"pruning": "divprune"}, "it reads videos; accepted are clip, "),
        ({"architectures": ["CLIPForImageClassification"]}, {}, "accepted for 'clip_vision_model' is CLIPVisionModelWith"),
        ({"architectures": None}, {}, "architectures is .*; accepted for"),
        ({"num_channels": 1}, {}, "num_channels is 1; accepted are pictures of 3 colors"),
        ({"hidden_size": 48}, {}, "the weights"),
        ({"image_size": [18, 16]}, {}, "image_size"),
        ({"pruning": "divprune"}, {}, "pruning is 'divprune'; accepted is an object"),
        ({"pruning": {**DIVPRUNE, "keep": 1.5}}, {}, "pruning.keep: got 1.5; accepted are numbers from 0 to 1"),
        ({"pruning": {**DIVPRUNE, "keep": 0.01}}, {}, "none of 16 image tokens"),
        ({"pruning": {**DIVPRUNE, "kept": 4}}, {}, "got the field 'kept'; accepted .*; did you mean 'keep'"),
        ({"pruning": {**DIVPRUNE, "vision_feature_layer": 4}}, {}, "is 4; the vision tower has 3 layers, and accepted are -4"),
        ({"pruning": {**DIVPRUNE, "vision_feature_layer": []}}, {}, r"vision_feature_layer is \[\]"),
        ({"pruning": {**DIVPRUNE, "vision_feature_select_strategy": "x"}}, {}, "got 'x'; accepted is default or full"),
        ({}, {"pruning": "btp"}, "got 'btp'; accepted for a vision tower alone is divprune"),
        ({}, {"precisions": "int8"}, "got int8; accepted for vision towers are fp32, fp16"),
        ({}, {"openvino": True}, "--openvino: got True, which does not go with vision towers: they are exported for ONNX"),
        ({}, {"head": "embedding"}, "--head: got 'embedding'"),
        ({}, {"update": True}, "--update: vision towers are exported whole; type --force to replace an earlier export"),
    ],
)  # fmt: skip
def test_what_is_refused(tmp_path, changes, options, told):
    model = tmp_path / "model"
    save_tower(model, "CLIPVisionModel")
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, **changes}))
    with pytest.raises(InputError, match=told):
        adtp_export.export(model, tmp_path / "out", **options)
    assert not (tmp_path / "out").exists()


def test_what_is_refused_of_siglip(tmp_path):
    """It has no class token; and without a head, it has no vector of a picture."""
    save_tower(tmp_path, "SiglipVisionModel")
    with pytest.raises(InputError, match="has no class token that default would leave out"):
        load_tower(tmp_path, {**DIVPRUNE, "vision_feature_select_strategy": "default"})
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "vision_use_head": False}))
    with pytest.raises(InputError, match="vision_use_head is false, so there is no vector"):
        load_tower(tmp_path)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 3), st.integers(1, 12), st.integers(1, 9), st.data())
def test_tokens_far_from_one_another_stay(images, tokens, size, data):
    """As plain NumPy loops choose, where the choice is clear: a distance is 1 minus a sum of products whose sizes add up to 1 at most."""
    keep, seed = data.draw(st.integers(1, tokens)), data.draw(st.integers(0, 2**32 - 1))
    features = np.random.default_rng(seed).standard_normal((images, tokens, size)).astype(np.float32)
    found = FarthestTokens(keep)(torch.tensor(features))
    for own, places in zip(features.astype(np.float64), found):
        unit = own / np.linalg.norm(own, axis=1, keepdims=True)
        chosen, margin = far([], keep, 1 - unit @ unit.T)
        assume(margin > 2 * (size + 8) * np.finfo(np.float32).eps)  # a norm and a division round, too
        assert places.tolist() == sorted(chosen)


def test_layers_stand_side_by_side():
    states = [torch.full((1, 3, 2), float(layer)) for layer in range(4)]
    assert selected(states, [-1, 0], True).tolist() == [[[3, 3, 0, 0]] * 2]
