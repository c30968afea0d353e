"""Vision towers from their checkpoint to vectors: exported, verified, and run on ONNX Runtime alone."""

import json
import shutil

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from testbed import made_once, replaced_during, run_cli
from vision_towers import pooled, save_tower

import adtp_export
from adtp_export.artifacts.records import Note
from adtp_export.cli import run
from adtp_export.errors import InputError
from adtp_export.inference import images
from adtp_export.inference.generation import Generator
from adtp_export.inference.images import ImageEncoder
from adtp_export.inference.pixels import pixel_values
from adtp_export.model.tower import Embedded, Tokens, load_tower
from adtp_export.runtimes.onnxruntime import OnnxRuntimeEngine
from adtp_export.verify.plain_choice import far
from adtp_export.verify.rounding import MULTIPLE, errors_of_network

KEEP = {"method": "divprune", "keep": 0.3, "vision_feature_layer": [-2, 1]}


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    """A CLIP and its export with DivPrune."""

    def make(work):
        save_tower(work / "model", "CLIPModel")
        (work / "keep.json").write_text(json.dumps(KEEP))
        adtp_export.export(work / "model", work / "out", pruning=work / "keep.json")

    return made_once(tmp_path_factory, "tower", make)


@pytest.fixture(scope="session")
def encoder(folder):
    return ImageEncoder(folder / "out")


@pytest.fixture(scope="session")
def pictures():
    """Of several sizes."""
    random = np.random.default_rng(0)
    return [random.integers(0, 256, (*size, 3), dtype=np.uint8) for size in ((30, 23), (18, 18), (9, 50))]


def prepared(folder, pictures):
    settings = json.loads((folder / "model" / "preprocessor_config.json").read_text())
    return torch.tensor(np.stack([pixel_values(picture, settings, 18) for picture in pictures]))


def assert_vectors(folder, found, pictures):
    """They are those of transformers, as far as rounding goes."""
    tower, pixels = load_tower(folder / "model"), prepared(folder, pictures)
    exact, error = errors_of_network(Embedded(tower), pixels)
    with torch.no_grad():
        own = pooled(tower.model.double(), pixels.double()).numpy()
    assert np.array_equal(own, exact)
    assert found.dtype == np.float32
    assert np.abs(found - own).max() <= MULTIPLE * error


def test_vectors_of_pictures(folder, encoder, pictures):
    """However they are divided into batches; by default their length is 1."""
    plain = encoder.encode_images(pictures, normalize=False, batch_size=2)
    assert_vectors(folder, plain, pictures)
    vectors = adtp_export.encode_images(folder / "out", pictures)
    assert vectors.dtype == np.float32
    lengths = np.linalg.norm(plain, axis=1, keepdims=True)
    eps = np.finfo(np.float32).eps
    assert np.abs(vectors * lengths - plain).max() <= 2 * MULTIPLE * eps * lengths.max()
    assert encoder.encode_images([]).shape == (0, 24)
    stacked = np.stack([pictures[1]] * 2)
    assert np.array_equal(encoder.encode_images(stacked)[:1], encoder.encode_images(stacked[:1]))


def test_tokens_that_stay(folder, encoder, pictures):
    """As plain loops choose in fp64, and their features, as transformers has them."""
    found = encoder.encode_tokens(pictures, batch_size=2)
    tower = load_tower(folder / "model", KEEP)
    exact, error = errors_of_network(Tokens(tower), prepared(folder, pictures))
    assert found.features.shape == (3, 5, 64)
    for features, places, every in zip(found.features, found.places, exact):
        unit = every / np.linalg.norm(every, axis=1, keepdims=True)
        assert places.tolist() == sorted(far([], 5, 1 - unit @ unit.T)[0])
        assert np.abs(features - every[places]).max() <= MULTIPLE * error


@pytest.mark.parametrize(("name", "layers"), [("SiglipVisionModel", 1)], ids=["siglip"])
def test_a_vector_alone(tmp_path, pictures, name, layers):
    """SigLIP's head pools by attention. Nothing was asked to stay, so there are no tokens."""
    save_tower(tmp_path / "model", name, num_hidden_layers=layers)
    manifest = adtp_export.export(tmp_path / "model", tmp_path / "out")
    assert {name: target.status for name, target in manifest.targets.items()} == {"onnxruntime-cpu-fp32": "verified"}
    encoder = ImageEncoder(tmp_path / "out")
    assert_vectors(tmp_path, encoder.encode_images(pictures, normalize=False), pictures)
    with pytest.raises(InputError, match="for tokens export again with --pruning divprune"):
        encoder.encode_tokens(pictures)
    assert "Shapes: pictures of 18 x 18." in (tmp_path / "out" / "report.md").read_text()
    (tmp_path / "model" / "preprocessor_config.json").unlink()
    torch.save(load_file(tmp_path / "model" / "model.safetensors"), tmp_path / "model" / "pytorch_model.bin")
    (tmp_path / "model" / "model.safetensors").unlink()
    options = {"skip_parity_check": True, "force": True}
    with pytest.raises(InputError, match="or add --allow-pickle if you trust the file"):
        adtp_export.export(tmp_path / "model", tmp_path / "out", **options)
    manifest = adtp_export.export(tmp_path / "model", tmp_path / "out", allow_pickle=True, **options)
    assert {target.status for target in manifest.targets.values()} == {"unverified"}
    assert "pictures cannot be prepared" in manifest.notes[0].text
    with pytest.raises(InputError, match="has no preprocessor_config.json; put it beside"):
        ImageEncoder(tmp_path / "out").encode_images(pictures)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["CLIPVisionModelWithProjection", "CLIPVisionModel", "SiglipModel"])
@pytest.mark.parametrize("pruning", [None, "divprune"])
def test_all_classes_in_fp16(tmp_path, pictures, name, pruning):
    save_tower(tmp_path / "model", name, hidden_act="gelu", num_attention_heads=2, image_size=23)
    manifest = adtp_export.export(tmp_path / "model", tmp_path / "out", pruning=pruning, precisions="fp16")
    assert [target.status for target in manifest.targets.values()] == ["verified"] * 2
    vectors = [ImageEncoder(tmp_path / "out", target=target).encode_images(pictures) for target in manifest.targets]
    assert not np.array_equal(*vectors)
    errors = [manifest.targets[target].parity.tolerance for target in manifest.targets]
    lengths = ImageEncoder(tmp_path / "out").encode_images(pictures, normalize=False)
    assert np.abs(vectors[0] - vectors[1]).max() <= 2 * sum(errors) / np.linalg.norm(lengths, axis=1).min()


def asked(*typed):
    return run.command(run.make_parser().parse_args(typed))


def test_pictures_on_the_command_line(folder, encoder, pictures, tmp_path, monkeypatch, capsys):
    """By --image or as they stand; one line each, or a file."""
    paths = []
    for number, picture in enumerate(pictures):
        np.save(tmp_path / f"{number}.npy", picture)
        paths.append(str(tmp_path / f"{number}.npy"))
    out = str(folder / "out")
    found = run_cli("adtp-run", out, "--image", paths[0], *paths[1:], "--kept", "--json", "--batch-size", "2")
    assert found.returncode == 0
    lines = [json.loads(line) for line in found.stdout.splitlines()]
    assert [line["image"] for line in lines] == paths
    assert np.array_equal(np.float32([line["vector"] for line in lines]), encoder.encode_images(pictures))
    assert [line["kept"] for line in lines] == encoder.encode_tokens(pictures).places.tolist()
    read, seen = images.read_picture, []
    with monkeypatch.context() as counted:
        counted.setattr(images, "read_picture", lambda path: (seen.append(path), read(path))[1])
        assert asked(out, *paths, "--kept", "--batch-size", "1") == 0
    assert seen == paths
    capsys.readouterr()
    sizes, runs = [], OnnxRuntimeEngine.run
    with monkeypatch.context() as counted:
        counted.setattr(OnnxRuntimeEngine, "run", lambda *a: (sizes.append(len(a[1]["pixel_values"])), runs(*a))[1])
        assert asked(out, *paths * 3) == 0
    assert sizes == [8, 1]
    assert [json.loads(line).keys() for line in capsys.readouterr().out.splitlines()] == [{"image", "vector"}] * 9
    assert asked(out, *paths, "--out", str(tmp_path / "vectors.npy")) == 0
    assert np.array_equal(np.load(tmp_path / "vectors.npy"), encoder.encode_images(pictures))
    for typed, told in (
        ([], "there is no picture; type: adtp-run"),
        ([paths[0], "--top-k", "2"], "--top-k does not go with vision towers"),
        ([paths[0], "--text", "a cat"], "--text does not go with vision towers"),
        ([paths[0], "--kept", "--out", "v.npy"], "--kept prints tokens"),
        ([paths[0], "--out", str(tmp_path / "no" / "v.npy")], "there is no directory"),
        ([paths[0], "--out", "v.csv"], "got v.csv; accepted is a file that ends in .npy"),
        ([paths[0], "--threads", "-1"], "threads: got .*; accepted is an integer from 0"),
        ([str(tmp_path / "none.npy")], "none.npy is no picture that can be read"),
    ):
        with pytest.raises(InputError, match=told):
            asked(out, *typed)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ("photo.png", "images: got str alone; accepted is a list of pictures"),
        (np.zeros((4, 4, 3), np.uint8), "images: got ndarray alone"),
        (np.array("photo.png"), "images: got ndarray alone"),
        (np.array(["none.png", "photo.png"]), "none.png is no picture that can be read"),
        ([np.zeros((4, 4), np.uint8)], r"shape \(4, 4\) .*; accepted are arrays \(height, width, 3\) of uint8"),
        ([np.zeros((4, 4, 4), np.uint8)], r"shape \(4, 4, 4\)"),
        ([np.zeros((9, 4, 4, 3), np.uint8)], "A video is several pictures; give one of them"),
        ([np.zeros((4, 4, 3))], "type float64; accepted are arrays"),
        (["test_images.npy"], "test_images.npy is no picture that can be read"),
        (torch.zeros(3, 4, 4), "images: got Tensor alone"),
        (iter([]), "images: got list_iterator; accepted is a list of pictures"),
        (None, "images: got NoneType; accepted"),
        ({"a": "photo.png"}, "images: got dict; accepted"),
    ],
    ids=[
        "path",
        "alone",
        "path alone",
        "paths",
        "gray",
        "transparent",
        "video",
        "floats",
        "missing",
        "tensor",
        "iterator",
        "none",
        "dict",
    ],
)
def test_pictures_that_are_refused(encoder, given, told):
    with pytest.raises(InputError, match=told):
        encoder.encode_images(given)


@pytest.mark.parametrize("opened", [ImageEncoder, Generator])
def test_arguments_that_are_refused(folder, opened):
    for arguments, told in (
        ((folder / "out", "2"), "threads: got .*; accepted is an integer from 0"),
        ((folder / "out", 0, ["fp32"]), "target: got list; accepted is a target's name, or None"),
        ((None,), "directory: got NoneType; accepted is a path"),
    ):
        with pytest.raises(InputError, match=told):
            opened(*arguments)


def test_another_export_does_not_reach_what_is_open(folder, pictures, tmp_path, monkeypatch):
    """Nor does it mix with what is being opened."""
    out = shutil.copytree(folder / "out", tmp_path / "out")
    calls = replaced_during(monkeypatch, images, "read_json", out)
    opened = ImageEncoder(out)
    assert (len(calls), opened.manifest.notes) == (2, (Note("another export"),))
    shutil.rmtree(out)
    assert len(opened.encode_images(pictures)) == len(pictures)


def test_other_doors_say_where_to_go(folder, exported):
    with pytest.raises(InputError, match=r"holds a vision tower; type: adtp_export\.encode_images"):
        adtp_export.load(folder / "out")
    with pytest.raises(InputError, match="holds a vision tower; accepted are exports of encoders of texts"):
        adtp_export.bench(folder / "out")
    with pytest.raises(InputError, match=r"does not generate text; type: adtp_export\.encode_images\("):
        Generator(folder / "out")
    with pytest.raises(InputError, match=r"holds no vision tower; type: adtp_export\.load"):
        ImageEncoder(exported)
    with pytest.raises(InputError, match="has onnxruntime-cpu-fp32; did you mean"):
        ImageEncoder(folder / "out", target="onnxruntime-cpu-fp3")
