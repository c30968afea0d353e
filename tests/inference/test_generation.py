"""A small LLaVA from its checkpoint to text: exported, verified, and run on ONNX Runtime alone."""

import json
import re
import shutil
from html import escape

import numpy as np
import pytest
import torch
from language_models import IMAGE, STAGES, save_llava
from PIL import Image
from testbed import made_once, replaced_during, run_cli
from tokenizers import Tokenizer

import adtp_export
from adtp_export.artifacts.records import Note
from adtp_export.cli import run
from adtp_export.cli.run_prompts import said
from adtp_export.contract import EMBED_MODEL, PREFILL_MODEL, STEP_MODEL, VISION_MODEL
from adtp_export.errors import InputError
from adtp_export.inference import generation
from adtp_export.inference.generation import Generator, Sampling, whole
from adtp_export.inference.pixels import find_settings, pixel_values, require_settings
from adtp_export.model.decoder import load_decoder
from adtp_export.pipeline.export import decoder as writing
from adtp_export.report.generated import left_out
from adtp_export.verify.prefill import Oracle, Prompt

PROMPTS = ["w1 w7 <image> w20 w9 w30", "w1 w44 <image> w5"]
SAID = {"role": "user", "content": "w1"}
TEMPLATE = "{% for part in messages[0].content %}{{ part.text if part.text else ' <image> ' }}{% endfor %} w20 w9 w30"


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    """A model and its export with Balanced Token Pruning."""

    def make(work):
        (work / "model").mkdir()
        save_llava(work / "model")
        (work / "model" / "chat_template.jinja").write_text(TEMPLATE)
        stages = [{**stage, "twice": False} if "spatial" in stage else stage for stage in STAGES["btp"]]
        (work / "btp.json").write_text(json.dumps({"method": "btp", "stages": stages}))
        adtp_export.export(work / "model", work / "out", pruning=work / "btp.json")

    return made_once(tmp_path_factory, "llava", make)


@pytest.fixture(scope="module")
def generator(folder):
    return Generator(folder / "out")


@pytest.fixture(scope="module")
def pictures():
    generator = np.random.default_rng(0)
    return [generator.integers(0, 256, shape, dtype=np.uint8) for shape in ((16, 16, 3), (40, 23, 3))]


@pytest.fixture(scope="module")
def readings(folder, pictures):
    """What the oracle makes in fp64 of each of `PROMPTS`, with 12 greedy tokens."""
    decoder = load_decoder(folder / "model", json.loads((folder / "btp.json").read_text()))
    settings = json.loads((folder / "model" / "preprocessor_config.json").read_text())
    pixels = torch.tensor(np.stack([pixel_values(picture, settings, 16) for picture in pictures]))
    oracle = Oracle(decoder, torch.float64)
    found = []
    with torch.no_grad():
        for text, features in zip(PROMPTS, decoder.vision()(pixels)):
            ids = [IMAGE if word == "<image>" else int(word[1:]) for word in text.split()]
            place = ids.index(IMAGE)
            before, behind = (decoder.embeddings(torch.tensor(part)) for part in (ids[:place], ids[place + 1 :]))
            image = torch.zeros(len(ids) - 1 + len(features), dtype=torch.bool)
            image[place : place + len(features)] = True
            found.append(oracle.read(Prompt(torch.cat([before, features, behind]), image), 11))
    return found


def test_text_is_that_of_the_oracle(folder, pictures, readings):
    manifest = json.loads((folder / "out" / "manifest.json").read_text())
    assert {VISION_MODEL, EMBED_MODEL, PREFILL_MODEL, STEP_MODEL, "report.md"} <= set(manifest["files"])
    assert {target["status"] for target in manifest["targets"].values()} == {"verified"}
    wanted = [[int(logits.argmax()) for logits in reading.logits] for reading in readings]
    found = adtp_export.generate(folder / "out", pictures, PROMPTS, max_new_tokens=12)
    assert found == [" ".join(f"w{token}" for token in row) for row in wanted]
    assert adtp_export.generate(folder / "out", iter(pictures), iter(PROMPTS), max_new_tokens=12) == found
    with pytest.raises(InputError, match="texts: got NoneType; accepted is a list"):
        adtp_export.generate(folder / "out", None, None)
    with pytest.raises(InputError, match="unknown option 'tokens'"):
        adtp_export.generate(folder / "out", None, ["w1"], tokens=1)


def test_a_target_that_is_not_there(folder):
    with pytest.raises(InputError, match="has onnxruntime-cpu-fp32; did you mean 'onnxruntime-cpu-fp32'"):
        Generator(folder / "out", target="onnxruntime-cpu-fp3")


def test_a_prompt_may_have_no_picture(generator, pictures):
    """Beside one that has: it goes on as alone."""
    (alone,) = whole(generator.stream(None, ["w1 w7 w20"], Sampling(max_new_tokens=3)), 1)
    mixed = whole(generator.stream([None, pictures[0]], ["w1 w7 w20", PROMPTS[1]], Sampling(max_new_tokens=3)), 2)
    assert len(alone.split()) == 3
    assert mixed[0] == alone


def test_messages_are_prompts(generator, pictures, monkeypatch):
    """Put into the template; and without one they are refused."""
    asked = [{"role": "user", "content": [{"type": "text", "text": "w1 w7"}, {"type": "image"}]}]
    with monkeypatch.context() as changed:
        changed.setattr(generator, "_chat", None)
        with pytest.raises(InputError, match="has no chat template; write prompts out as text, or put chat_template"):
            list(generator.stream(None, [asked]))
    found = whole(generator.stream(pictures[:1], [asked], Sampling(max_new_tokens=3)), 1)
    assert found == whole(generator.stream(pictures[:1], PROMPTS[:1], Sampling(max_new_tokens=3)), 1)
    with pytest.raises(InputError, match="has no <image>; accepted is an image for each"):
        list(generator.stream(pictures[:1], [said("w1", with_image=False)]))
    with pytest.raises(InputError, match="has <image>, and there is no image"):
        list(generator.stream(None, [said("w1", with_image=True)]))
    with pytest.raises(InputError, match="has 2 images; accepted is one image in a prompt"):
        list(generator.stream(pictures[:1], [said("w1 <image>", with_image=True)]))


def test_the_command_makes_messages(folder, generator, pictures, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(generation, "Generator", lambda out, threads, target: generator)  # it is loaded already
    Image.fromarray(pictures[0]).save(tmp_path / "photo.png")
    asked = ("--chat", "--image", str(tmp_path / "photo.png"), "--text", "w1", "--max-new-tokens", "3")
    assert run.command(run.make_parser().parse_args([str(folder / "out"), *asked])) == 0
    (wanted,) = whole(generator.stream(pictures[:1], ["<image> w1 w20 w9 w30"], Sampling(max_new_tokens=3)), 1)
    assert capsys.readouterr().out.strip() == wanted


def test_streams_draws_and_stops(generator, pictures, monkeypatch):
    pieces = list(generator.stream(pictures, PROMPTS, Sampling(max_new_tokens=6)))
    greedy = whole(pieces, 2)
    assert len(pieces) == 6
    assert all(piece for row in pieces for piece in row)

    def drawn(**options):
        asked = {"temperature": 2.0, **options}
        return whole(generator.stream(pictures, PROMPTS, Sampling(max_new_tokens=6, **asked)), 2)

    assert drawn(seed=1) == drawn(seed=1) != drawn(seed=2)
    asked = Sampling(max_new_tokens=6, temperature=2.0)
    together = whole(generator.stream(None, ["w1 w2"] * 3, asked), 3)
    assert len(set(together)) == 3  # equal prompts, drawn apart; in several calls, too
    assert together == [whole(generator.stream(None, ["w1 w2"], asked, first=i), 1)[0] for i in range(3)]
    assert drawn(top_p=1e-9) == drawn(temperature=5e-324) == greedy
    monkeypatch.setattr(generator, "stop", frozenset([int(greedy[0].split()[1][1:])]))
    ended = whole(generator.stream(pictures, PROMPTS, Sampling(max_new_tokens=6)), 2)
    assert ended[0].split() == greedy[0].split()[:1]


@pytest.mark.parametrize(
    ("images", "texts", "options", "told"),
    [
        (["square"], ["w1 w2"], {}, "has no <image>; accepted is an image for each prompt with <image>"),
        (None, ["w1 <image>"], {}, "has <image>, and there is no image"),
        (["square"], ["w1 <image> <image>"], {}, "has 2 images; accepted is one"),
        (["square"] * 2, ["w1 <image>"], {}, "got 2 images and 1 texts"),
        (None, [], {}, "accepted is at least one text"),
        (None, [""], {}, "has no tokens"),
        (None, ["w1 " * 40], {"max_new_tokens": 30}, "has 40 tokens, and 30 are to follow; the model reads 64"),
        (["video"], ["w1 <image>"], {}, "A video is several pictures"),
        (["missing.npy"], ["w1 <image>"], {}, "no picture that can be read"),
        (None, "w1", {}, "texts: got 'w1' alone; accepted is a list"),
        (None, SAID, {}, "texts: got .* alone; accepted is a list"),
        (None, [SAID], {}, "messages: got .*; accepted is a list such as"),
        (None, [7], {}, "messages: got 7"),
        (None, None, {}, "texts: got NoneType; accepted is a list"),
        (None, b"w1", {}, "texts: got bytes; accepted is a list"),
        (None, np.array([]), {}, "accepted is at least one text"),
        ("photo.npy", ["w1 <image>"], {}, "images: got 'photo.npy' alone; accepted is a list"),
        (None, ["w1"], {"temperature": -1}, "accepted are numbers from 0 to 100"),
        (None, ["w1"], {"temperature": "hot"}, "temperature: got 'hot'"),
        (None, ["w1"], {"top_p": 0}, "numbers above 0, to 1"),
    ],
)
def test_what_is_refused(generator, images, texts, options, told):
    known = {"square": np.zeros((16, 16, 3), np.uint8), "video": np.zeros((4, 16, 16, 3), np.uint8)}
    given = [known.get(name, name) for name in images] if isinstance(images, list) else images
    with pytest.raises(InputError, match=told):
        list(generator.stream(given, texts, Sampling(**options)))


@pytest.mark.parametrize(
    ("prompts", "features", "told"),
    [
        ([], [], "got no prompts"),
        ([[1, IMAGE]], [], "prompt 0 has a place for an image, and there is none"),
        ([[1, IMAGE]], [np.zeros((2, 16, 32))], r"features of prompt 0: got the shape \(2, 16, 32\); accepted is \(n, 32\)"),
        ([[IMAGE]], [np.zeros((0, 32))], r"got the shape \(0, 32\); .* not empty"),
        ([[IMAGE]], [[["x"] * 32]], "accepted are arrays of numbers"),
        ([[1]], [np.zeros((16, 32))], "more features than image tokens"),
    ],
)  # fmt: skip
def test_ids_that_are_refused(generator, prompts, features, told):
    with pytest.raises(InputError, match=told):
        list(generator.tokens(prompts, features))


def test_ids_and_features_of_any_type_that_holds_them(generator):
    features = np.random.default_rng(0).standard_normal((16, 32))
    asked, few = [1, IMAGE, 7], Sampling(max_new_tokens=4)
    expected = list(generator.tokens([asked], [features.astype(np.float32)], few))
    for prompts, given in (
        (iter([tuple(asked)]), iter([features])),
        (np.array([asked], np.uint8), [features.astype(np.float32).tolist()]),
    ):
        assert list(generator.tokens(prompts, given, few)) == expected


def test_text_that_ends_within_a_character_is_told(generator, monkeypatch):
    """What a tokenizer has no whole character for waits for the next token, and at the end there is none."""

    class Bytes:
        def decode(self, ids):
            return "".join(f"{i}." for i in ids[:-1]) + "\ufffd"

        def encode(self, text, add_special_tokens):
            return type("Encoded", (), {"ids": [1, 7]})

        def id_to_token(self, token):
            return "<image>"

    monkeypatch.setattr(generator, "_tokenizer", Bytes())
    (found,) = whole(generator.stream(None, ["w1 w7"], Sampling(max_new_tokens=3)), 1)
    assert found.count(".") == 2
    assert found.endswith("\ufffd")


@pytest.mark.parametrize(
    "files",
    [
        {"preprocessor_config.json": {"resample": 7}},
        {"processor_config.json": {"processor_class": "LlavaProcessor", "image_processor": {"resample": 7}}},
    ],
    ids=["of its own", "of the processor"],
)
def test_settings_are_found(files, tmp_path):
    for name, fields in files.items():
        (tmp_path / name).write_text(json.dumps(fields))
    assert find_settings(lambda name: tmp_path / name if name in files else None)["resample"] == 7
    with pytest.raises(InputError, match="has no preprocessor_config.json; put it beside the checkpoint"):
        require_settings(find_settings(lambda name: None), tmp_path)


def test_another_export_does_not_reach_what_is_open(folder, pictures, tmp_path):
    out = shutil.copytree(folder / "out", tmp_path / "out")
    opened = Generator(out)
    before = opened.pictures(pictures[:1])[0].tiles
    shutil.rmtree(out)
    np.testing.assert_array_equal(opened.pictures(pictures[:1])[0].tiles, before)


def test_a_directory_that_is_replaced_while_it_is_read_is_read_again(folder, tmp_path, monkeypatch):
    out = shutil.copytree(folder / "out", tmp_path / "out")
    calls = replaced_during(monkeypatch, generation, "read_json", out)
    assert Generator(out).manifest.notes == (Note("another export"),)
    assert len(calls) == 2


@pytest.mark.slow
def test_the_command(folder, generator, pictures, tmp_path):
    np.save(tmp_path / "photo.npy", pictures[0])
    asked = ("--image", tmp_path / "photo.npy", "--text", PROMPTS[0], "--max-new-tokens", 5)
    result = run_cli("adtp-run", folder / "out", *asked)
    assert result.returncode == 0, result.stderr
    assert [result.stdout.strip()] == whole(generator.stream(pictures[:1], PROMPTS[:1], Sampling(max_new_tokens=5)), 1)
    two = run_cli(
        "adtp-run", folder / "out", "--text", "w1 w2", "--text", "w3", "--max-new-tokens", 2, "--batch-size", 1
    )
    assert [json.loads(line)["text"] for line in two.stdout.splitlines()] == ["w1 w2", "w3"]


@pytest.mark.parametrize("more", [[], ["--batch-size", "1"]], ids=["at once", "one by one"])
def test_equal_prompts_are_drawn_apart_whatever_the_batches(folder, generator, more, capsys):
    asked = ["--temperature", "2", "--seed", "3", "--max-new-tokens", "6", *["--text", "w1 w2"] * 3]
    assert run.command(run.make_parser().parse_args([str(folder / "out"), *asked, *more])) == 0
    found = [json.loads(line)["generated"] for line in capsys.readouterr().out.splitlines()]
    sampling = Sampling(max_new_tokens=6, temperature=2.0, seed=3)
    assert found == whole(generator.stream(None, ["w1 w2"] * 3, sampling), 3)
    assert len(set(found)) == 3


def test_a_page_shows_which_patches_stayed(folder, pictures, readings, tmp_path, capsys):
    """Those that the oracle keeps; the rest is covered."""
    np.save(tmp_path / "photo.npy", pictures[0])
    asked = ["--image", str(tmp_path / "photo.npy"), "--text", PROMPTS[0], "--max-new-tokens", "3"]

    def page(name, *more):
        typed = [str(folder / "out"), *asked, *more, "--report", str(tmp_path / name)]
        return run.command(run.make_parser().parse_args(typed))

    assert page("run.html") == 0
    text = (tmp_path / "run.html").read_text()
    told = capsys.readouterr().out.strip()
    assert len(told.split()) == 3
    assert f"<div class=said>{escape(told)}</div>" in text
    assert f"<div class=said>{escape(PROMPTS[0])}</div>" in text
    stayed = [np.isin(np.arange(2, 18), rows).reshape(4, 4) for rows in readings[0].rows]
    assert [int(kept.sum()) for kept in stayed] == [16, 8, 4, 0]
    assert [path in text for path in map(left_out, stayed)] == [True] * 4
    assert re.findall(r"<td>Layer (\d)</td><td>(\d+)</td>", text) == [
        (str(i), str(len(rows))) for i, rows in enumerate(readings[0].rows)
    ]
    assert set(re.findall(r"(?:href|src)='([^,']*)", text)) == {"data:image/png;base64", "#tile0"}
    for wrong, said_then in (
        (("run.pdf",), "accepted is a file that ends in .html"),
        (("no/run.html",), "there is no directory"),
        (("run.html", "--text", "w1", "--image", "photo.npy"), "got 2 texts; accepted is one"),
    ):
        with pytest.raises(InputError, match=f"--report: .*{said_then}"):
            page(*wrong)


def test_other_models_are_told_apart(folder, exported):
    with pytest.raises(InputError, match="generates text; type: adtp_export.generate"):
        adtp_export.load(folder / "out")
    with pytest.raises(InputError, match="does not generate text; type: adtp_export.load"):
        adtp_export.generate(exported, None, ["a text"])
    refused = run_cli("adtp-run", exported, "--text", "a text", "--image", "photo.png")
    assert refused.returncode == 2
    assert "--image is for models that generate text" in refused.stderr


def test_options_about_other_models_are_refused(folder):
    typed = run.make_parser().parse_args([str(folder / "out"), "--text", "w1", "--kept"])
    with pytest.raises(InputError, match="--kept does not go with models that generate text"):
        run.command(typed)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (
            {"trt": True},
            "--trt: got True, which does not go with models that generate text: they are exported for ONNX",
        ),
        (
            {"precisions": "fp8", "trt": True, "calibration_data": "texts.txt"},
            "got fp8; accepted for models that generate text are fp32, fp16, bf16, int8",
        ),
        (
            {"pruning": "btq"},
            "got 'btq'; accepted are btp, btp-qwen, fastv, pyramiddrop, divprune, and JSON files .*mean 'btp'",
        ),
    ],
)
def test_options_that_are_refused(folder, tmp_path, options, told):
    with pytest.raises(InputError, match=told):
        adtp_export.export(folder / "model", tmp_path / "out", **options)


@pytest.mark.parametrize(
    ("kind", "told"),
    [
        ("qwen3_vl", "image tokens enter several of its layers"),
        ("mllama", "attends to images by cross-attention; accepted models"),
        ("video_llava", "it reads videos"),
        (
            "internvl",
            "model_type is 'internvl'; accepted models that read images and generate text are llava, llava_next,",
        ),
    ],
)
def test_models_with_images_that_are_refused(kind, told, tmp_path):
    config = {"model_type": kind, "architectures": ["SomeForConditionalGeneration"], "vision_config": {}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(InputError, match=told):
        adtp_export.export(tmp_path, tmp_path / "out")


def test_image_tokens_leave_inside_decoders_alone(small, tmp_path):
    with pytest.raises(InputError, match="--pruning: image tokens leave inside models that generate text"):
        adtp_export.export(small, tmp_path / "out", pruning="btp")


def test_added_tokens_beside_the_file_are_in_that_of_the_export(tmp_path):
    """`load` reads `tokenizer.json` alone."""
    model, work = tmp_path / "model", tmp_path / "work"
    save_llava(model)
    work.mkdir()
    decoder = load_decoder(model)
    writing.write_companions(decoder, work)
    before = Tokenizer.from_file(str(work / "tokenizer.json"))
    assert (work / "tokenizer.json").read_bytes() == (model / "tokenizer.json").read_bytes()
    beside = {str(before.get_vocab_size()): {"content": "<late>", "special": True}}
    (model / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": beside}))
    writing.write_companions(decoder, work)
    after = Tokenizer.from_file(str(work / "tokenizer.json"))
    assert after.encode("w1 <late>").ids[:2] == [before.token_to_id("w1"), before.get_vocab_size()]
    (model / "tokenizer.json").write_text("{}")
    with pytest.raises(InputError, match="the tokenizer cannot be loaded"):
        writing.write_companions(decoder, work)
