"""`adtp-import --calibrate-images`: where stages should stand, measured on files of pictures."""

import json
import os
import shutil

import numpy as np
import pytest
import torch
from language_models import IMAGE, save_anyres, save_causal, save_llava, save_tiled
from picture_processors import CLASSES, processed, with_template
from PIL import Image
from testbed import command_module, listing

import adtp_export
from adtp_export.errors import InputError
from adtp_export.inference.pixels import MOST_PIXELS
from adtp_export.model.checkpoint import read_config
from adtp_export.model.decoder import load_decoder
from adtp_export.model.image_pruners import PRESETS, read_method
from adtp_export.model.stage_layers import Drop, deepest, drops, image_cosines, most_drops
from adtp_export.pipeline.stage_layers import RECORD, Prompts, chosen_pictures

STAGES = [{"divisor": 2, "attended": 0.5, "surplus": 2.0}, {"divisor": 0}]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A LLaVA of ten layers, with two stages in a file and a chat template."""
    work = tmp_path_factory.mktemp("deep")
    (work / "model").mkdir()
    save_llava(work / "model", num_hidden_layers=10)
    with_template(work / "model")
    (work / "btp.json").write_text(json.dumps({"method": "btp", "stages": STAGES}))
    return work / "model"


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    folder = tmp_path_factory.mktemp("photos")
    for number, suffix in enumerate((".png", ".jpg", ".webp", ".JPG")):
        colors = np.random.default_rng(number).integers(0, 256, (20, 24 + number, 3), dtype=np.uint8)
        Image.fromarray(colors).save(folder / f"{number}{suffix}")
    (folder / "notes.txt").write_text("no picture")
    (folder / "more.png").mkdir()
    return folder


@pytest.mark.parametrize(
    ("cosines", "found"),
    [
        ([0.5, 0.875, 0.625, 0.75, 0.5, 0.875], [(3, 0.25), (5, 0.25)]),
        ([0.875, 0.75, 0.625, 0.5, 0.875], [(4, 0.375)]),  # of a fall over several layers the lowest one
        ([0.875, 0.5, 0.5, 0.875], [(2, 0.375)]),
        ([0.875, 0.75, 0.9375, 0.5, 0.875], [(2, 0.125), (4, 0.4375)]),
        ([0.125, 0.25, 0.375, 0.5], []),  # it only rises
        ([0.875, 0.25], []),
        ([], []),
    ],
)
def test_what_counts_as_a_drop(cosines, found):
    assert drops(cosines) == found
    assert len(found) <= most_drops(len(cosines) + 1)


def test_the_deepest_drops_have_the_stages():
    found = [Drop(2, 0.1), Drop(4, 0.3), Drop(6, 0.3), Drop(8, 0.2)]
    assert [deepest(found, count) for count in (1, 2, 3)] == [[4], [4, 6], [4, 6, 8]]
    alternating = [0.9, 0.1] * 15
    assert [len(drops(alternating[:count])) for count in range(31)] == [most_drops(count + 1) for count in range(31)]


@pytest.mark.parametrize("kind", [kind for kind in CLASSES if kind != "qwen2_vl"])
def test_states_are_those_of_transformers(kind, tmp_path, monkeypatch):
    """To the bit: transformers' processor reads the file and the message, and its model the rest. Nothing is interpolated."""
    photo = tmp_path / "photo.jpg"
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (16, 30, 3), dtype=np.uint8)).save(photo)
    folder = tmp_path / "model"
    folder.mkdir()
    save_llava(folder) if kind == "llava" else (save_tiled if kind == "idefics3" else save_anyres)(folder, kind)
    decoder = load_decoder(with_template(folder))
    states, image = Prompts(decoder, "w1 w7").states(photo)
    batch = processed(kind, folder, photo, "w1 w7", monkeypatch)
    assert image.tolist() == (batch["input_ids"][0] == IMAGE).tolist()
    with torch.no_grad():
        found = decoder.model(**batch, output_hidden_states=True).hidden_states
    rows = [each[0, image].double() for each in found[:-1]]
    wanted = [torch.cosine_similarity(a, b, dim=-1).mean() for a, b in zip(rows, rows[1:])]
    assert torch.equal(image_cosines(decoder, states, image), torch.stack(wanted))


def test_the_command_writes_what_export_reads(model, photos, tmp_path, capsys):
    command, out = command_module("adtp-import"), tmp_path / "out"
    words = [str(model), str(out), "--calibrate-images", str(photos), "--pruning", str(model.parent / "btp.json")]
    assert command.command(*command.read(command.make_parser(), [*words, "--text", "w1 w7", "--json"])) == 0
    record = json.loads(capsys.readouterr().out)
    layers = [stage["layer"] for stage in record["pruning"]["stages"]]
    measured = record["calibration"]
    assert layers == deepest(drops(measured["cosines"]), 2)
    assert measured["pictures"] == ["0.png", "1.jpg", "2.webp", "3.JPG"]
    decoder, whole = load_decoder(out), load_decoder(model)
    assert [stage.layer for stage in decoder.stages] == layers
    assert read_method("btp", read_config(out)) == record["pruning"] != read_method("btp", read_config(model))
    cosines = [
        image_cosines(whole, *Prompts(whole, "<image> w1 w7 w20 w9 w30").states(p)) for p in chosen_pictures(photos, 9)
    ]
    assert torch.stack(cosines).mean(0).tolist() == measured["cosines"]
    stored = json.loads((out / RECORD).read_text())
    assert stored == {name: record[name] for name in ("pruning", "calibration")}
    weights = decoder.model.state_dict()
    assert all(torch.equal(weight, weights[name]) for name, weight in whole.model.state_dict().items())
    assert command.command(*command.read(command.make_parser(), [*words, "--max-images", "2", "--force"])) == 0
    assert json.loads((out / RECORD).read_text())["calibration"]["pictures"] == ["0.png", "2.webp"]
    shown = capsys.readouterr().err
    assert all(f"before layer {stage.layer}" in shown for stage in load_decoder(out).stages)


def test_what_is_refused(model, photos, tmp_path):
    """In one message, and nothing is written."""
    text = tmp_path / "text"
    save_causal(text, "llama")
    empty, broken, whole = tmp_path / "empty", tmp_path / "broken", tmp_path / "whole"
    for folder in (empty, broken, whole):
        folder.mkdir()
    (whole / "config.json").write_text('{"model_type": "qwen2_vl"}')
    (broken / "1.png").write_text("no picture")
    three = tmp_path / "three.json"
    three.write_text(json.dumps({"method": "btp", "stages": [*STAGES[:1] * 4, STAGES[1]]}))
    two = model.parent / "btp.json"
    line = tmp_path / "line"
    line.mkdir()
    Image.new("RGB", (1, MOST_PIXELS // 16**2 + 1)).save(line / "line.png")
    listed, kinds = (tmp_path / name for name in ("listed", "kinds"))
    for folder, field, value in ((listed, "text_config", ["llama"]), (kinds, "model_type", ["llava"])):
        shutil.copytree(model, folder)
        fields = read_config(model) | {field: value}
        (folder / "config.json").write_text(json.dumps(fields))
    before = listing(tmp_path)
    for source, folder, options, told in (
        (model, tmp_path / "none", {}, "none is no folder; accepted is one with pictures in it"),
        (model, empty, {}, "empty has no pictures; accepted are files whose names end in .bmp, .gif"),
        (model, broken, {"pruning": two}, "1.png is no picture that can be read"),
        (text, photos, {}, "holds a 'llama' model, which reads no images; accepted are the model types llava"),
        (whole, photos, {}, "a 'qwen2_vl' model, which keeps pictures whole .*; accepted are .* smolvlm$"),
        (model, photos, {"pruning": three}, "got 5 stages for a model of 10 layers, in which the cosine can drop 4"),
        (model, photos, {"pruning": "fastv"}, "chooses layers for btp and btp-qwen; got the method 'fastv'"),
        (model, photos, {"pruning": "bpt"}, "--pruning: got 'bpt'; accepted are btp, .* did you mean 'btp'"),
        (listed, photos, {}, "listed.config.json does not describe a model"),
        (kinds, photos, {}, r"model_type is \['llava'\]; accepted is the name of one"),
        (kinds, None, {}, r"model_type is \['llava'\]; accepted is the name of one"),
        (model, line, {"pruning": two}, "line.png: a picture of .* Cut off a part of its longer side"),
        (model, photos, {"text": "\udce9", "pruning": two}, "not valid Unicode"),
        (model, photos, {"text": "<image> <image>", "pruning": two}, "has <image> 2 times; accepted is once"),
        (model, photos, {"text": "w1 " * 60, "pruning": two}, "the prompt has .* tokens, and the model reads 64"),
        (model, photos, {"max_images": 0}, "--max-images: got 0; accepted is at least 1"),
        (model, photos, {"head": "tokens"}, "--head is for encoders, and --calibrate-images for vision-language"),
        (model, None, {}, "adtp-export takes it as it is; to choose .* type --calibrate-images DIR"),
        (model, None, {"text": "w1"}, "--text goes with --calibrate-images; add that, or leave --text out"),
        (model, photos, {"out": model}, "is or holds the model directory"),
        (model, photos, {"out": photos, "force": True}, "is no model that --calibrate-images wrote"),
    ):
        more = {"out": tmp_path / "out", **options}
        with pytest.raises(InputError, match=told):
            adtp_export.import_checkpoint(source, calibrate_images=folder, **more)
        assert listing(tmp_path) == before


def test_too_few_drops_are_told(model, photos, tmp_path, monkeypatch):
    monkeypatch.setattr("adtp_export.pipeline.stage_layers.image_cosines", lambda *given: torch.arange(9.0))
    with pytest.raises(
        InputError, match="the cosine drops nowhere, and there are 2 stages.* from 0 on: 0.0000, .* 8.0000"
    ):
        adtp_export.import_checkpoint(
            model, tmp_path / "out", calibrate_images=photos, pruning=model.parent / "btp.json"
        )
    assert not list(tmp_path.iterdir())


def test_names_that_are_no_unicode(model, photos, tmp_path, monkeypatch):
    """As of files that an older system wrote."""
    monkeypatch.setattr("adtp_export.pipeline.stage_layers.image_cosines", lambda *given: torch.tensor([0.5, 0.25] * 4))
    (tmp_path / "photos").mkdir()
    name = os.fsdecode(b"caf\xe9.png")
    shutil.copyfile(photos / "0.png", tmp_path / "photos" / name)
    adtp_export.import_checkpoint(
        model, tmp_path / "out", calibrate_images=tmp_path / "photos", pruning=model.parent / "btp.json"
    )
    assert json.loads((tmp_path / "out" / RECORD).read_text())["calibration"]["pictures"] == [name]


def test_pictures_are_spread_over_their_names(photos):
    assert [path.name for path in chosen_pictures(photos, 3)] == ["0.png", "1.jpg", "2.webp"]
    assert len(PRESETS["btp"]) <= most_drops(10)
