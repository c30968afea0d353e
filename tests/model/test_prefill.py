"""Prefill and step in PyTorch: unpruned they are transformers, and pruned they are the oracle and Balanced Token Pruning's own code."""

import dataclasses
import json

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from language_models import IMAGE, SIDE, STAGES, TEXT, networks, save_causal, save_llava, with_rows
from testbed import shared_or_skip

from adtp_export.errors import InputError
from adtp_export.model.decoder import load_decoder
from adtp_export.model.image_choice import Diverse
from adtp_export.model.image_pruners import BtpStage, SeenImage
from adtp_export.model.image_tokens import ImageTokens, repeated, spread_over
from adtp_export.verify.plain_choice import choose, far
from adtp_export.verify.prefill import compare, expect
from adtp_export.verify.prompts import draw_prompts, failure_before_prefill
from adtp_export.verify.rounding import MULTIPLE

NEW = 32
FAMILIES = {
    "llama": {"model_type": "llama"},
    "qwen2": {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
    "qwen3": {"model_type": "qwen3", "head_dim": 16, "tie_word_embeddings": True},
}


def greedy(decoder, states, images, steps):
    """Greedy tokens behind prompts, ``(B, steps)``, with the logits that gave each and what the prefill answered."""
    from adtp_export.inference.generation import after_prefill, after_step

    read, go_on = networks(decoder)
    bounds = np.cumsum([0, *map(len, states)]).astype(np.int32)
    answer = first = read({"inputs_embeds": torch.cat(states), "cu_seqlens": bounds, "image": torch.cat(images)})
    past, logits = after_prefill(answer), [answer["logits"]]
    for _ in range(steps - 1):
        answer = go_on({**past, "input_ids": logits[-1].argmax(1)})
        past = after_step(answer)
        logits.append(answer["logits"])
    return np.stack([each.argmax(1) for each in logits], 1), np.stack(logits, 1), first


@pytest.mark.parametrize("kind", FAMILIES)
def test_text_goes_on_as_in_transformers(kind, tmp_path):
    """Token for token, also behind prompts of unequal lengths in one batch."""
    fields = dict(FAMILIES[kind])
    model = save_causal(tmp_path, fields.pop("model_type"), **fields)
    decoder = load_decoder(tmp_path)
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(97, (n,), generator=generator) for n in (1, 9, 30, 4)]
    wanted = [model.generate(p[None], max_new_tokens=NEW, do_sample=False)[0, len(p) :].tolist() for p in prompts]
    images = [torch.zeros(len(p), dtype=torch.bool) for p in prompts]
    found, _, _ = greedy(decoder, [decoder.embeddings(p) for p in prompts], images, NEW)
    assert found.tolist() == wanted


@torch.no_grad()
def test_logits_of_gemma_stay_within_their_cap(tmp_path):
    """Which changes no likeliest token, but what is drawn, or chosen with a penalty."""
    model = save_causal(tmp_path, "gemma3_text", head_dim=8, final_logit_softcapping=0.5)
    prompt = torch.tensor([5, 17, 20, 31])
    decoder = load_decoder(tmp_path)
    _, found, _ = greedy(decoder, [decoder.embeddings(prompt)], [torch.zeros(4, dtype=torch.bool)], 3)
    wanted = model.generate(
        prompt[None], max_new_tokens=3, do_sample=False, output_logits=True, return_dict_in_generate=True
    )
    np.testing.assert_allclose(found[0], torch.cat(wanted.logits).numpy(), atol=1e-5)
    assert 0.4 < np.abs(found).max() < 0.5


@torch.no_grad()
def test_logits_of_others_have_no_cap(tmp_path):
    """transformers reads the field in Gemma alone."""
    model = save_causal(tmp_path, "llama", final_logit_softcapping=0.01)
    prompt = torch.tensor([5, 17, 20, 31])
    decoder = load_decoder(tmp_path)
    _, found, _ = greedy(decoder, [decoder.embeddings(prompt)], [torch.zeros(4, dtype=torch.bool)], 1)
    np.testing.assert_allclose(found[0, 0], model(prompt[None]).logits[0, -1].numpy(), atol=1e-5)
    assert np.abs(found).max() > 0.01


@pytest.mark.parametrize("method", STAGES)
def test_pruned_is_the_oracle(method, tmp_path):
    """Two prompts at once, and one without a picture among them."""
    save_llava(tmp_path)
    decoder = load_decoder(tmp_path, {"method": method, "stages": STAGES[method]})
    prompts = draw_prompts(decoder, 3)
    text = dataclasses.replace(prompts[1], image=torch.zeros_like(prompts[1].image))
    expected = expect(decoder, [prompts[0], text, prompts[1]], 3)
    found = compare(decoder, expected, *networks(decoder))
    assert found.failure is None
    assert found.rows_compared == 3
    assert found.prediction_agreement == 1
    kept = [len(reading.rows[-1]) for reading in expected.exact]
    left = {"btp": 0, "btp-qwen": 4, "fastv": 8, "pyramiddrop": 3}[method]
    assert kept == [len(prompts[0].states) - SIDE**2 + left, len(text.states), len(prompts[1].states) - SIDE**2 + left]


@pytest.mark.parametrize("method", STAGES)
@pytest.mark.parametrize("before", [0, 3])
def test_the_last_token_stays_where_a_prompt_ends_with_a_picture(method, before, tmp_path):
    """Or is nothing else, and beside another prompt. The answer goes on at the unpruned length, unless positions are numbered anew."""
    save_llava(tmp_path)
    decoder = load_decoder(tmp_path, {"method": method, "stages": STAGES[method]})
    whole = draw_prompts(decoder, 2)[1]
    first = int(whole.image.nonzero()[0]) - before
    part = slice(first, int(whole.image.nonzero()[-1]) + 1)
    prompt = dataclasses.replace(whole, states=whole.states[part], image=whole.image[part])
    for prompts in ([prompt], [prompt, whole], [whole, prompt]):
        expected = expect(decoder, prompts, 2)
        assert compare(decoder, expected, *networks(decoder)).failure is None
        reading = next(read for read, each in zip(expected.exact, prompts, strict=True) if each is prompt)
        assert all(rows[-1] == len(prompt.states) - 1 for rows in reading.rows)
        ends = {int(positions[-1]) for positions in reading.positions}
        assert (ends == {len(prompt.states) + 1}) == (method != "pyramiddrop")


@pytest.mark.parametrize("method", ["none", "btp"])
def test_small_errors_show_and_rounding_does_not(method, tmp_path):
    """In random models of small, middling and large weights. One weight that is off by a thousandth of it shows in each, and so does a
    token that is thought to stand one place later."""
    save_llava(tmp_path)
    decoder = load_decoder(tmp_path, {"method": method, "stages": STAGES[method]} if method != "none" else None)
    generator = torch.Generator().manual_seed(0)
    for spread in (0.05, 0.2, 0.5):
        for weight in decoder.model.parameters():
            drawn = torch.randn(weight.shape, generator=generator)
            weight.copy_(1 + 0.3 * drawn if weight.ndim == 1 else spread * drawn)
        expected = expect(decoder, draw_prompts(decoder, 1), 1)
        assert compare(decoder, expected, *networks(decoder)).failure is None
        read, go_on = networks(decoder)

        def shifted(feed, go_on=go_on):
            return go_on({name: array + name.startswith("positions") for name, array in feed.items()})

        assert compare(decoder, expected, read, shifted).failure.startswith("logits differ")
        weight = decoder.backbone.attention(0).projections[2].weight
        weight[0] *= 1.001
        assert compare(decoder, expected, *networks(decoder)).failure.startswith("logits differ")


@torch.no_grad()
def test_small_errors_before_the_prefill_show(tmp_path):
    """A weight of the vision tower that is off by a thousandth; the same features rounded otherwise do not. Nothing is compared with
    features that overflow."""
    save_llava(tmp_path)
    decoder, other = load_decoder(tmp_path), load_decoder(tmp_path)

    def failure(vision, dtype=torch.float32, precision="fp32"):
        def embed(ids):
            return decoder.embeddings(ids).to(dtype).float()

        files = ((embed, "input_ids", "inputs_embeds"), (vision, "pixel_values", "image_features"))
        return failure_before_prefill(
            decoder,
            *(lambda feed, f=f, i=i, o=o: {o: f(torch.tensor(feed[i])).numpy()} for f, i, o in files),
            precision=precision,
        )

    assert failure(decoder.vision()) is None
    assert failure(lambda pixels: decoder.vision()(pixels.repeat(9, 1, 1, 1))[: len(pixels)]) is None
    other.model.model.vision_tower.encoder.layers[0].mlp.fc1.weight[0] *= 1.001
    assert "features of pictures differ" in failure(other.vision())
    decoder.model.model.multi_modal_projector.linear_2.weight *= 1e6
    infinite = failure(lambda pixels: decoder.vision()(pixels) * torch.inf, torch.float16, "fp16")
    assert infinite.startswith("PyTorch overflows in fp16")


@torch.no_grad()
def test_patches_far_from_one_another_stay(tmp_path):
    """Those of plain loops, with their features; another choice shows."""
    save_llava(tmp_path)
    decoder = load_decoder(tmp_path, {"method": "divprune", "keep": 0.4})
    vision, pixels = Diverse(decoder_vision := decoder.vision(), decoder.kept_tokens), torch.randn(3, 3, 16, 16)
    features, kept = vision(pixels)
    every = decoder_vision(pixels)
    for found, places, whole in zip(features, kept, every):
        unit = torch.nn.functional.normalize(whole.double()).numpy()
        assert sorted(far([], 6, 1 - unit @ unit.T)[0]) == places.tolist()
        assert torch.equal(found, whole[places])

    def failure(choice):
        def run(feed):
            found, kept = vision(torch.tensor(feed["pixel_values"]))
            return {"image_features": choice(found).numpy(), "image_kept": choice(kept).numpy()}

        embed = decoder.embeddings
        return failure_before_prefill(
            decoder, lambda feed: {"inputs_embeds": embed(torch.tensor(feed["input_ids"])).numpy()}, run
        )

    assert failure(lambda kept: kept) is None
    assert failure(lambda kept: kept[:, [0, *range(5)]]).startswith("image tokens that stay are not 6 of each picture")


def test_a_wrong_choice_shows(tmp_path):
    save_llava(tmp_path)
    decoder = load_decoder(tmp_path, {"method": "fastv", "stages": STAGES["fastv"]})
    expected = expect(decoder, prompts := draw_prompts(decoder, 1), 1)

    def first(number, rows):
        image = prompts[number].image.numpy()
        text = rows[~image[rows]]
        return np.sort([*text, *np.flatnonzero(image)[: len(rows) - len(text)]])

    other = with_rows(decoder, 2, first)
    assert "other tokens from layer 2" in compare(decoder, expected, *other).failure
    excused = dataclasses.replace(expected, choice_errors=[1e9 for _ in expected.choice_errors])
    none = compare(decoder, excused, *other)
    assert (none.rows_compared, none.failure) == (
        0,
        "of no prompt the same tokens were kept, so no answer could be compared",
    )


@pytest.mark.parametrize("method", ["none", "fastv"])
def test_rows_that_no_choice_leaves_are_not_excused(method, tmp_path):
    """Before the first layer, and behind a stage, however close its choices are: too few, disordered, or without some of the text."""
    save_llava(tmp_path)
    decoder = load_decoder(tmp_path, {"method": method, "stages": STAGES[method]} if method != "none" else None)
    expected = expect(decoder, draw_prompts(decoder, 1), 1)
    close = dataclasses.replace(expected, choice_errors=[1e9 for _ in expected.choice_errors])
    changes = (
        lambda rows: rows[::-1],
        lambda rows: np.full_like(rows, rows[-1]),
        lambda rows: rows + 1,
        lambda rows: rows[1:],
    )
    for layer in decoder.first_layers:
        for change in changes:
            found = compare(decoder, close, *with_rows(decoder, layer, lambda number, rows, own=change: own(rows)))
            assert found.failure.endswith(f"enters layer {layer} with rows that no choice of image tokens leaves")


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_choices_in_rectangles_are_those_of_loops(data):
    """Of prompts of different sizes at once; where two lie within rounding of one another, either is right."""
    sizes = data.draw(st.lists(st.integers(0, 30), min_size=1, max_size=3))
    stage = BtpStage(
        layer=1,
        divisor=data.draw(st.integers(1, 3)),
        attended=data.draw(st.sampled_from([0, 0.1, 0.3, 0.5, 1.0])),
        surplus=data.draw(st.sampled_from([1, 1.2, 3.7])),
        diverse=(diverse := data.draw(st.sampled_from([0, 0.1, 0.3]))),
        spatial=data.draw(st.integers(0, 9)) if diverse else 0,
        twice=data.draw(st.booleans()),
        all_candidates=data.draw(st.booleans()),
    )
    stage = dataclasses.replace(stage, diverse=0) if stage.attended == 1 else stage
    if stage.attended * stage.surplus + stage.diverse > 1:
        stage = dataclasses.replace(stage, all_candidates=False)
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 10**6)))
    widest = max(*sizes, 1)
    asked, states = (
        torch.randn(len(sizes), widest, generator=generator),
        torch.randn(len(sizes), widest, 4, generator=generator),
    )
    counts, spread = torch.tensor(sizes), spread_over(6)
    live = torch.arange(widest) < counts[:, None]
    seen = SeenImage(asked.double(), states.double(), live, counts, counts, spread[:widest])
    for row, copies in enumerate(stage.copies(seen).numpy()):
        n = sizes[row]
        plain = choose(stage, asked[row, :n], states[row, :n], n, spread)
        assert not copies[n:].any()
        assert copies.sum() == n // stage.divisor
        if plain.margin > MULTIPLE * torch.finfo(torch.float64).eps:
            assert copies[:n].tolist() == plain.copies.tolist()


@given(st.lists(st.lists(st.tuples(st.booleans(), st.integers(0, 2)), min_size=1, max_size=9), min_size=1, max_size=4))
def test_rows_follow_as_often_as_they_should(texts):
    """Image tokens as often as their prompt's choice says, all others once."""
    flat = [token for text in texts for token in text]
    bounds = torch.tensor([0, *map(len, texts)]).cumsum(0)
    image = torch.tensor([is_image for is_image, _ in flat])
    found = ImageTokens.of(image, bounds)
    copies = torch.zeros(found.live.shape, dtype=torch.int64)
    copies[found.live] = torch.tensor([times for is_image, times in flat if is_image], dtype=torch.int64)
    often = [times if is_image else 1 for is_image, times in flat]
    if sum(often):
        rows, kept = repeated(found.copied(copies, len(flat)), bounds)
        assert rows.tolist() == [row for row, times in enumerate(often) for _ in range(times)]
        assert kept.tolist() == [sum(often[:end]) for end in bounds.tolist()]


class TestBalancedTokenPruning:
    """Against what its authors' file answered."""

    @pytest.fixture(scope="class")
    def golden(self):
        folder = shared_or_skip("originals/btp")
        return (
            folder / "checkpoint",
            json.loads((folder / "golden.json").read_text()),
            dict(np.load(folder / "golden.npz")),
        )

    @pytest.mark.parametrize("which", ["orig", "unique"])
    def test_tokens_and_logits(self, golden, which):
        """With tokens that are there twice, and without."""
        directory, told, arrays = golden
        stages = [{n: v for n, v in stage.items() if which == "orig" or n != "twice"} for stage in told["stages"]]
        decoder = load_decoder(directory, {"method": "btp", "stages": stages})
        lengths = arrays["attention_mask"].sum(1)
        states = [torch.tensor(arrays["inputs_embeds"][row, :n]) for row, n in enumerate(lengths)]
        images = [torch.tensor(arrays["input_ids"][row, :n] == 318) for row, n in enumerate(lengths)]
        steps = arrays["orig_tokens"].shape[1]
        tokens, logits, first = greedy(decoder, states, images, steps if which == "orig" else 1)
        if which == "orig":
            assert tokens.tolist() == arrays["orig_tokens"].tolist()
        reference = arrays["ref_step_logits" if which == "orig" else "unique_step_logits"][:, : logits.shape[1]]
        # The reference rounds nothing, and the original in fp32 is one draw for each of 36 rows of logits.
        own_error = np.abs(arrays["orig_step_logits"] - arrays["ref_step_logits"]).max()
        assert np.abs(logits - reference).max() <= MULTIPLE * own_error
        for row in range(len(lengths)):
            for layer in range(decoder.backbone.num_layers):
                entered = max(at for at in decoder.first_layers if at <= layer)
                bounds, wanted = first[f"cu_seqlens.{entered}"], arrays[f"{which}_positions"][row, layer]
                found = first[f"positions.{entered}"][bounds[row] : bounds[row + 1]]
                assert found.tolist() == wanted[wanted >= 0].tolist()

    def test_pictures(self, golden):
        directory, _, arrays = golden
        vision = load_decoder(directory).vision()
        pixels = torch.tensor(arrays["images"] / 127.5 - 1, dtype=torch.float32)
        with torch.no_grad():
            found, exact = vision(pixels), vision.double()(pixels.double())
        wanted = arrays["inputs_embeds"][arrays["input_ids"] == 318].reshape(found.shape)
        assert np.abs(found.numpy() - wanted).max() <= MULTIPLE * (found - exact).abs().max()


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"text_config": {"model_type": "bert"}}, "text_config.model_type is 'bert'; accepted are decoders"),
        ({"pruning": "divprune"}, "pruning is 'divprune'; accepted is an object with method"),
        ({"vision_config": {"image_size": 2, "patch_size": 4}}, "accepted are integers"),
        ({"vision_config": {"image_size": 32, "patch_size": 4}}, "an image has 64 tokens, and the model reads 64"),
        (
            {"text_config": {"model_type": "llama", **TEXT, "num_hidden_layers": 5}},
            "missing_keys model.language_model.layers.4",
        ),
    ],
)
def test_models_that_are_refused(changes, told, tmp_path):
    save_llava(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    with pytest.raises(InputError, match=told):
        load_decoder(tmp_path)


def test_text_alone_has_no_image_tokens(tmp_path):
    save_causal(tmp_path, "llama")
    with pytest.raises(InputError, match="a 'llama' model reads text alone; leave it out"):
        load_decoder(tmp_path, {"method": "fastv"})


def test_the_image_token_is_that_of_the_configuration(tmp_path):
    save_llava(tmp_path)
    decoder = load_decoder(tmp_path)
    assert (decoder.image_token, decoder.image_tokens, decoder.first_layers) == (IMAGE, SIDE**2, (0,))


def test_a_language_model_without_a_name_is_the_default(tmp_path):
    save_llava(tmp_path)
    path = tmp_path / "config.json"
    fields = json.loads(path.read_text())
    assert fields["text_config"].pop("model_type") == "llama"
    path.write_text(json.dumps(fields))
    assert load_decoder(tmp_path).backbone.config.model_type == "llama"


def test_what_a_configuration_leaves_out_is_its_default(tmp_path):
    """Newer versions of transformers do not write fields that have their default."""
    save_llava(tmp_path)
    path = tmp_path / "config.json"
    fields = json.loads(path.read_text())
    (tmp_path / "generation_config.json").unlink(missing_ok=True)
    for inner in (fields, fields["text_config"]):
        inner.pop("eos_token_id", None)
    path.write_text(json.dumps(fields))
    assert load_decoder(tmp_path).stop_tokens == (2,)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [5, 7]}')
    decoder = load_decoder(tmp_path)
    assert (decoder.stop_tokens, decoder.image_size) == ((5, 7), 16)
