"""`adtp-export --triton`: which models stand in a repository, and what stays as it was."""

import json
import re
import shutil
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import onnx
import pytest
from testbed import ROOT, command_module, listing, relist

import adtp_export
from adtp_export.artifacts.records import Manifest
from adtp_export.errors import InputError
from adtp_export.integrations.triton import repository as triton


@pytest.fixture
def repository(packed_export, tmp_path):
    """Somebody's repository, with a model of theirs and ours."""
    place = tmp_path / "models"
    (place / "theirs").mkdir(parents=True)
    (place / "theirs" / "config.pbtxt").write_text('name: "theirs"\n')
    (place / "odd" / "config.pbtxt").mkdir(parents=True)  # which nobody can read
    triton.write(packed_export / "out", place, "small")
    return place


def test_an_export_writes_models_that_need_nothing_else(packed_export):
    repository, out = packed_export / "repository", packed_export / "out"
    assert sorted(path.name for path in repository.iterdir()) == ["small", "small-ids", "small-ids-fp16"]
    model = repository / "small" / "1"
    assert (model / "model.py").read_bytes() == (ROOT / "adtp_export/integrations/triton/model.py").read_bytes()
    assert listing(model / "export") == listing(out)
    assert (repository / "small" / "labels.txt").read_text() == "negative\npositive\n"
    assert (repository / "small-ids" / "1" / "model.packed.onnx").samefile(out / "model.packed.onnx")  # no second copy
    assert adtp_export.load(model / "export")(["fine"])[0].label in ("negative", "positive")


@pytest.mark.parametrize(
    ("model", "file"), [("small-ids", "model.packed.onnx"), ("small-ids-fp16", "model.packed.fp16.onnx")]
)
def test_tensors_in_a_configuration_are_those_of_the_graph(packed_export, model, file):
    config = (packed_export / "repository" / model / "config.pbtxt").read_text()
    graph = onnx.load(packed_export / "out" / file).graph
    types = {onnx.TensorProto.INT64: "INT64", onnx.TensorProto.INT32: "INT32", onnx.TensorProto.FLOAT: "FP32"}

    def told(value):
        kind = value.type.tensor_type
        sizes = [dim.dim_value or -1 for dim in kind.shape.dim]
        return value.name, types[kind.elem_type], sizes

    for name, kind, sizes in map(told, graph.input):
        assert sizes == [-1]  # what Triton makes of a ragged input, and of its counts
        if name == "cu_seqlens":
            assert f'WITH_ZERO, target_name: "{name}", data_type: TYPE_{kind}, source_input: "input_ids"' in config
        else:
            assert (
                f'input {{ name: "{name}", data_type: TYPE_{kind}, dims: [ -1 ], allow_ragged_batch: true }}' in config
            )
    ((name, kind, (_, labels)),) = map(told, graph.output)
    assert f'output {{ name: "{name}", data_type: TYPE_{kind}, dims: [ {labels} ] }}' in config
    assert f'default_model_filename: "{file}"' in config


def test_packed_engines_of_tensorrt_become_models_and_others_do_not(packed_export, tmp_path):
    out = shutil.copytree(packed_export / "out", tmp_path / "out")
    shutil.copyfile(out / "model.packed.onnx", out / "packed.engine")  # nobody opens it here
    targets = Manifest.read(out).to_json()["targets"]
    engine = {
        **targets["onnxruntime-cpu-fp32"],
        "file": "packed.engine",
        "profile": {"batch": "1:8:16", "seq": "1:128:512"},
    }
    names = [f"{runtime}-sm_90-fp32-plugin{form}" for runtime in ("trt", "rtx") for form in ("", "-packed")]
    relist(out, {**targets, **{name: {**engine, "attention": "plugin"} for name in names}})
    models = triton.write(out, tmp_path / "models", "m")
    assert models == ["m", "m-ids", "m-ids-fp16", "m-trt-sm_90-plugin"]
    config = (tmp_path / "models" / models[-1] / "config.pbtxt").read_text()
    assert 'backend: "tensorrt"\nmax_batch_size: 16\n' in config
    assert (tmp_path / "models" / models[-1] / "1" / "packed.engine").is_file()


@pytest.mark.parametrize("name", ["", "two words", "a/b", "..", ".hidden", "caf\u00e9", "x" * 101])
def test_names_that_no_address_holds_are_refused_before_any_work(small, tmp_path, name):
    with pytest.raises(InputError, match="--triton-name: got .* accepted are up to 100 letters"):
        adtp_export.export(small, tmp_path / "out", triton=tmp_path / "models", triton_name=name)
    assert [*tmp_path.iterdir()] == []


def test_options_that_cannot_be_met_are_refused_before_any_work(small, tmp_path):
    (tmp_path / "file").write_text("")
    for place in ("file", "file/models"):
        with pytest.raises(InputError, match=r"--triton: .*file is a file; give a model repository"):
            adtp_export.export(small, tmp_path / "out", triton=tmp_path / place)
    with pytest.raises(InputError, match="--triton-name names the models of --triton REPO, which is missing"):
        adtp_export.export(small, tmp_path / "out", triton_name="m")
    for out in ("models/m", "models/m/1/out", "models/other", "out"):
        repository = tmp_path / ("out/models" if out == "out" else "models")
        with pytest.raises(InputError, match="would lie in one another; give another place"):
            adtp_export.export(small, tmp_path / out, triton=repository, triton_name="m")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_models_that_are_there_stay(packed_export, repository, small, tmp_path):
    before = listing(repository)
    with pytest.raises(InputError, match="has a model small; add --force to replace it, or type --triton-name NAME"):
        adtp_export.export(small, tmp_path / "out", triton=repository, triton_name="small")
    with pytest.raises(InputError, match="has another model theirs, which is not replaced"):
        triton.write(packed_export / "out", repository, "theirs", replace=True)
    shutil.rmtree(tmp_path / "models" / "small-ids")
    (repository / "small-ids").mkdir()
    with pytest.raises(InputError, match="has another model small-ids, which is not replaced"):
        triton.write(packed_export / "out", repository, "small", replace=True)
    kept = {name: data for name, data in before.items() if not name.startswith("small-ids/")}
    assert listing(repository) == kept
    assert sorted(path.name for path in tmp_path.iterdir()) == ["models"]  # nothing half done beside it


def test_replacing_takes_away_what_is_not_written_any_more(packed_export, repository, tmp_path):
    out = shutil.copytree(packed_export / "out", tmp_path / "out")
    document = json.loads((out / "manifest.json").read_text())
    document["targets"] = {name: target for name, target in document["targets"].items() if "fp16" not in name}
    (out / "manifest.json").write_text(json.dumps(document))
    shutil.copytree(repository / "small", repository / "copy")  # a user's own
    cache = repository / "small" / "1" / "__pycache__"  # the server's
    cache.mkdir()
    (cache / "model.cpython-312.pyc").write_text("")
    triton.write(packed_export / "out", repository, "small-er")  # another name of ours
    assert triton.write(out, repository, "small", replace=True) == ["small", "small-ids"]
    found = sorted(path.name for path in repository.iterdir())
    assert found == ["copy", "odd", "small", "small-er", "small-er-ids", "small-er-ids-fp16", "small-ids", "theirs"]
    manifest = json.loads((repository / "small" / "1" / "export" / "manifest.json").read_text())
    assert manifest["targets"].keys() == {"onnxruntime-cpu-fp32", "onnxruntime-cpu-fp32-packed"}


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("1/rules.json", "mine"),
        ("2/", None),
        ("1/export/notes/", None),
        ("1/model.py", "import mine"),
        ("config.pbtxt", "max_batch_size: 8"),
        ("labels.txt", "down\nup\n"),
        ("1/export/config.json", "{}"),
        ("1/export/model.onnx", "mine"),
    ],
)
def test_what_users_put_into_a_model_or_changed_is_not_lost(packed_export, repository, small, tmp_path, name, text):
    path = repository / "small" / name
    if text is None:
        path.mkdir(parents=True)
    else:
        path.unlink(missing_ok=True)
        path.write_text(text)
    before = listing(repository)
    message = (
        rf"/small holds what .* would lose that: {name.rstrip('/')}; move small out of .*models, or type --triton-name"
    )
    with pytest.raises(InputError, match=message):
        triton.write(packed_export / "out", repository, "small", replace=True)
    with pytest.raises(InputError, match=message):  # before any work
        adtp_export.export(small, tmp_path / "out", triton=repository, triton_name="small", force=True)
    assert listing(repository) == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["models"]
    (repository / "small").rename(tmp_path / "moved")
    assert "small" in triton.write(packed_export / "out", repository, "small", replace=True)


def test_what_people_edit_in_a_model_is_no_file_of_the_export(packed_export, repository):
    """Links would carry their changes into the output directory, whose hashes would then be wrong."""
    out, model = packed_export / "out", repository / "small" / "1" / "export"
    shared = {name for name in listing(out) if (model / name).samefile(out / name)}
    assert shared == {name for name in listing(out) if name.endswith((".onnx", ".data"))}
    assert {"config.json", "tokenizer.json", "manifest.json"} <= listing(out).keys() - shared


def unverified(out, *names):
    """Have targets of an export be what `--skip-parity-check` makes of them."""
    manifest = Manifest.read(out).to_json()["targets"]
    return relist(out, {name: {**manifest[name], "status": "unverified"} for name in names or manifest})


def test_only_verified_targets_become_models_of_tokens(packed_export, tmp_path):
    out, notes = shutil.copytree(packed_export / "out", tmp_path / "out"), []
    triton.write(out, tmp_path / "models", "m")
    unverified(out, "onnxruntime-cpu-fp16-packed")
    assert triton.write(out, tmp_path / "models", "m", replace=True, note=notes.append) == ["m", "m-ids"]
    (note,) = notes
    assert note.startswith(
        "the model m-ids-fp16 is left out, as onnxruntime-cpu-fp16-packed is unverified; export without"
    )
    assert not (tmp_path / "models" / "m-ids-fp16").exists()
    notes.clear()
    assert triton.write(unverified(out), tmp_path / "others", "m", note=notes.append) == ["m"]
    assert [note.split(";")[0] for note in notes] == [
        "the model m answers with a target that is not verified",
        "the model m-ids is left out, as onnxruntime-cpu-fp32-packed is unverified",
        "the model m-ids-fp16 is left out, as onnxruntime-cpu-fp16-packed is unverified",
    ]


KILLS = ROOT / "tests" / "integrations" / "triton" / "kill_triton.py"


@pytest.mark.parametrize("mode", ["exchange", pytest.param("two-steps", marks=pytest.mark.slow)])
def test_killed_at_every_call_to_the_file_system(tmp_path, mode):
    """Each model of a repository is old or new, and whole; the next run clears the rest."""
    found = json.loads(subprocess.check_output([sys.executable, KILLS, tmp_path, mode], text=True))
    assert found["wrong"] == []
    assert found["kills"] > 100
    assert found["results"] == ["new", "new old", "old"]


@pytest.mark.parametrize("name", ["model.packed.onnx", "model.onnx", "tokenizer.json", "report.md"])
def test_a_damaged_export_writes_nothing(packed_export, tmp_path, name):
    out = shutil.copytree(packed_export / "out", tmp_path / "out")
    content = bytearray((out / name).read_bytes())
    content[len(content) // 2] ^= 1
    (out / name).write_bytes(content)
    with pytest.raises(InputError, match=f"{re.escape(name)} is damaged"):
        triton.write(out, tmp_path / "models", "m")
    assert not (tmp_path / "models").exists()


def test_the_command_says_what_it_is_asked():
    module = command_module("adtp-export")
    _, asked = module.read(module.make_parser(), ["MODEL", "--triton", "models", "--triton-name", "m"])
    assert (str(asked["triton"]), asked["triton_name"]) == ("models", "m")


def test_the_benchmark_counts_what_is_missing_and_what_differs():
    from benchmarks.serving.triton_throughput import wrong

    class Answer:
        def __init__(self, label, *scores):
            self.fields = {"label": np.array([[label.encode()]], object), "scores": np.array([scores])}

        def as_numpy(self, name):
            return self.fields[name]

    expected = [SimpleNamespace(label="good", scores={"bad": 0.25, "good": 0.75})] * 5
    answers = [Answer("good", 0.2501, 0.7499), Answer("good", 0.26, 0.74), Answer("bad", 0.25, 0.75), None, OSError()]
    assert wrong(answers, expected, 0.001) == (2, 2)


def test_vectors_are_as_long_as_load_gives_them(embedder, tmp_path):
    """Texts get the first numbers where the model says so."""
    out = shutil.copytree(embedder[1], tmp_path / "out")
    fields = json.loads((out / "config.json").read_text())
    (out / "config.json").write_text(json.dumps({**fields, "adtp": {**fields["adtp"], "truncate_dim": 4}}))
    relist(out)
    triton.write(out, tmp_path / "models", "vectors")
    assert (
        'name: "sentence_embedding", data_type: TYPE_FP32, dims: [ 4 ]'
        in (tmp_path / "models" / "vectors" / "config.pbtxt").read_text()
    )
    assert adtp_export.load(out).encode(["fine"]).shape == (1, 4)
