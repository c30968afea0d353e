"""`adtp_export.load`: what most users do next."""

import json
import shutil
import subprocess
import sys
import tempfile

import numpy as np
import onnx
import onnx_ir
import pandas
import pytest
import torch
from testbed import DEMO, relist
from transformers import AutoModelForSequenceClassification, AutoTokenizer

import adtp_export
from adtp_export.artifacts.records import SCHEMA
from adtp_export.contract import PRUNERS
from adtp_export.errors import InputError
from adtp_export.graph import program
from adtp_export.graph.debug import debug_form
from adtp_export.graph.passes import DEBUG_OUTPUTS, run_passes
from adtp_export.inference.config import Config
from adtp_export.runtimes import cuda, onnxruntime, openvino
from adtp_export.targets.specs import RUNTIMES, TargetSpec

TEXTS = [
    "a wonderful film",
    "the soup was terrible",
    "not bad at all , but the ending is dull and the sound is awful",
    "",
]


@pytest.fixture(scope="module")
def deployment(exported):
    return adtp_export.load(exported)


def test_answers_like_transformers(deployment, demo):
    model = AutoModelForSequenceClassification.from_pretrained(demo, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(demo)
    for text, answer in zip(TEXTS, deployment(TEXTS, return_kept=True)):
        with torch.no_grad():
            output = model(**tokenizer(text, return_tensors="pt"))
        scores = output.logits.softmax(1)[0]
        assert answer.label == model.config.id2label[int(scores.argmax())]
        assert answer.score == pytest.approx(float(scores.max()), abs=1e-5)
        assert list(answer.scores) == list(model.config.id2label.values())
        assert answer.kept == (output.kept_site[0] == len(model.config.prune_sites)).tolist()
        assert answer.tokens[0] == "[CLS]"
        assert answer.kept[0]
        names = [None if k == 2 else model.config.prune_sites[k] for k in output.kept_site[0].tolist()]
        assert answer.dropped_at == names


def test_order_and_batch_size_do_not_matter(deployment):
    texts = [" ".join(["fine"] * n) for n in (9, 1, 30, 2, 17)]
    together = [a.score for a in deployment(texts)]
    assert together == pytest.approx([deployment(text)[0].score for text in texts], abs=1e-5)
    assert together == pytest.approx([a.score for a in deployment(texts, batch_size=2)], abs=1e-5)


def test_pairs_and_truncation(deployment):
    (pair,) = deployment([("good film", "bad film")], return_kept=True)
    assert pair.tokens.count("[SEP]") == 2
    (long,) = deployment("good film " * 500, return_kept=True)
    assert long.truncated
    assert len(long.tokens) == deployment.max_tokens
    assert not deployment("short")[0].truncated
    assert deployment([]) == []


def test_a_table_is_no_list_of_texts(deployment):
    """It would give the names of its columns."""
    table = pandas.DataFrame({"text": ["good film"]})
    with pytest.raises(InputError, match="texts: got DataFrame"):
        deployment(table)
    assert deployment(table["text"]) == deployment(["good film"])


def test_bad_batches_are_refused_not_answered(deployment):
    ids = np.array([[2, 5, 6, 3]])
    ones = np.ones_like(ids)
    deployment.run({"input_ids": ids, "attention_mask": ones, "token_type_ids": ones * 0})
    for name, change in {
        "right padding": {"attention_mask": np.array([[0, 1, 1, 1]])},
        "no live token": {"attention_mask": ones * 0},
        "accepted are ids": {"input_ids": ids + 10**6},
    }.items():
        batch = {"input_ids": ids, "attention_mask": ones, "token_type_ids": ones * 0, **change}
        with pytest.raises(InputError, match=name):
            deployment.run(batch)
        with pytest.raises(InputError, match=name):
            deployment.kept_site(batch)
    with pytest.raises(InputError, match="token_type_ids missing"):
        deployment.run({"input_ids": ids, "attention_mask": ones})
    with pytest.raises(InputError, match="batch_size"):
        deployment("x", batch_size=0)


@pytest.fixture
def in_openvino(exported):
    if openvino.installed() is None:
        pytest.skip("OpenVINO is not installed")
    return adtp_export.load(exported, target="openvino-cpu-fp32")


def test_another_runtime_answers_alike(deployment, in_openvino):
    expected = deployment(TEXTS, return_kept=True)
    for found, answer in zip(in_openvino(TEXTS, return_kept=True), expected):
        assert (found.label, found.kept) == (answer.label, answer.kept)
        assert found.score == pytest.approx(answer.score, abs=1e-5)
    assert isinstance(in_openvino.inspector(), openvino.OpenVinoEngine)


@pytest.fixture(scope="module")
def contrary(exported, tmp_path_factory):
    """A directory whose fp16 file decides otherwise than model.onnx: its pruners have the opposite weights."""
    out = shutil.copytree(exported, tmp_path_factory.mktemp("contrary") / "out")
    program.convert_precision(out / "model.onnx", out / "model.fp16.onnx", "fp16")
    model = onnx.load(out / "model.fp16.onnx")
    weights = [tensor for tensor in model.graph.initializer if tensor.name.startswith(PRUNERS)]
    assert weights
    for tensor in weights:
        tensor.CopyFrom(onnx.numpy_helper.from_array(-onnx.numpy_helper.to_array(tensor), tensor.name))
    onnx.save(model, out / "model.fp16.onnx")
    plain = json.loads((out / "manifest.json").read_text())["targets"]["onnxruntime-cpu-fp32"]
    return relist(out, {"onnxruntime-cpu-fp16": {**plain, "file": "model.fp16.onnx"}})


def test_kept_is_what_the_chosen_target_kept(contrary, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    plain = adtp_export.load(contrary, target="onnxruntime-cpu-fp32")
    half = adtp_export.load(contrary, target="onnxruntime-cpu-fp16")
    kept = [[answer.kept for answer in deployment(TEXTS, return_kept=True)] for deployment in (plain, half)]
    assert kept[0] != kept[1]
    model = onnx_ir.load(contrary / "model.fp16.onnx")
    run_passes(model, DEBUG_OUTPUTS)
    onnx_ir.save(model, tmp_path / "expected.onnx")
    rows = [half.tokenizer.encode(text).ids for text in TEXTS]
    batch = pad_rows(rows)
    expected = onnxruntime.OnnxRuntimeEngine(tmp_path / "expected.onnx").run(batch)["kept_site"]
    np.testing.assert_array_equal(half.kept_site(batch), expected)
    assert [path.name for path in tmp_path.iterdir()] == ["expected.onnx"]  # nothing else is left


def pad_rows(rows):
    ids = np.zeros((len(rows), max(map(len, rows))), np.int64)
    mask = np.zeros_like(ids)
    for i, row in enumerate(rows):
        ids[i, : len(row)], mask[i, : len(row)] = row, 1
    return {"input_ids": ids, "attention_mask": mask, "token_type_ids": np.zeros_like(ids)}


def test_a_file_with_the_debug_output_needs_no_other(exported, tmp_path):
    out = shutil.copytree(exported, tmp_path / "out")
    with debug_form(exported / "model.onnx") as debug:
        shutil.copytree(debug.parent, out, dirs_exist_ok=True)
        scratch = debug.parent
    assert not scratch.exists()
    with debug_form(out / "model.onnx") as same:
        assert same == out / "model.onnx"
    relist(out)
    deployment = adtp_export.load(out, target="onnxruntime-cpu-fp32")
    assert deployment.inspector() is deployment._engine
    assert deployment(TEXTS[0], return_kept=True)[0].kept[0]


def test_a_debug_form_is_gone_after_an_error(exported):
    seen = []

    def fail():
        with debug_form(exported / "model.onnx") as path:
            seen.append(path)
            assert path.is_file()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert not seen[0].parent.exists()


def test_the_longest_row_may_be_told(exported, tmp_path):
    """Where positions do not start at 0, a model reads fewer tokens than its table of positions has rows."""
    out = shutil.copytree(exported, tmp_path / "out")
    config = json.loads((out / "config.json").read_text())
    config["adtp"]["max_tokens"] = 7
    (out / "config.json").write_text(json.dumps(config))
    relist(out)
    (answer,) = adtp_export.load(out)("a b c d e f g h", return_kept=True)
    assert answer.truncated
    assert len(answer.tokens) == 7


@pytest.mark.parametrize(
    ("head", "message"),
    [
        ("span", "head: got 'span'; accepted are sequence, tokens, spans, embedding, .*; did you mean 'spans'"),
        ("spans", "model.onnx gives logits, and not start_logits, end_logits"),
    ],
)
def test_a_head_that_cannot_be_is_named(exported, tmp_path, head, message):
    out = shutil.copytree(exported, tmp_path / "out")
    config = json.loads((out / "config.json").read_text())
    config["adtp"]["head"] = head
    (out / "config.json").write_text(json.dumps(config))
    relist(out)
    with pytest.raises(InputError, match=message):
        adtp_export.load(out, target="onnxruntime-cpu-fp32")


@pytest.fixture
def foreign_engine(exported):
    """The name of an engine that this machine cannot run."""
    targets = json.loads((exported / "manifest.json").read_text())["targets"]
    specs = {name: TargetSpec.parse(name) for name in targets}
    engines = [name for name, spec in specs.items() if spec.gpus]
    if not engines:
        pytest.skip("TensorRT-RTX is not installed: no engine was built")
    if RUNTIMES["rtx"].runs_here(specs[engines[0]]):
        pytest.skip(f"this machine has a {cuda.local_gpu()}, which the engine runs on")
    assert targets[engines[0]]["status"] in ("emulated", "built-not-run")
    return engines[0]


def test_an_engine_for_another_gpu_is_not_chosen(exported, foreign_engine):
    with pytest.raises(InputError, match="cannot run on this machine"):
        adtp_export.load(exported, target=foreign_engine)


def test_not_an_exported_directory(tmp_path, exported):
    for place, then in (
        (tmp_path, f"Make one with: adtp-export MODEL_DIR --out {tmp_path}"),
        (tmp_path / "my model", f"Make one with: adtp-export MODEL_DIR --out '{tmp_path}/my model'"),
        (exported.parent, "Make one with: adtp-export MODEL_DIR --out OUT"),
        (exported / "model.onnx", "Make one with: adtp-export MODEL_DIR --out OUT"),
        (DEMO, f"If it is a checkpoint, type: adtp-export {DEMO}"),
    ):
        with pytest.raises(InputError) as refused:
            adtp_export.load(place)
        assert str(refused.value).endswith(then)
    broken = shutil.copytree(exported, tmp_path / "broken")
    (broken / "manifest.json").write_text(json.dumps({"schema": SCHEMA}))
    with pytest.raises(InputError, match="damaged"):
        adtp_export.load(broken)
    (broken / "manifest.json").write_text((exported / "manifest.json").read_text())
    (broken / "tokenizer.json").write_text("{}")
    with pytest.raises(InputError, match="is damaged"):
        adtp_export.load(broken)
    (broken / "manifest.json").write_text('{"schema": 99}')
    with pytest.raises(InputError, match="schema 99"):
        adtp_export.load(broken)


def test_needs_neither_torch_nor_transformers(exported):
    code = (
        "import sys, adtp_export; print(adtp_export.load(sys.argv[1])('a good film', return_kept=True)[0].label, "
        "sorted({'torch', 'transformers'} & set(sys.modules)))"
    )
    out = subprocess.check_output([sys.executable, "-c", code, str(exported)], text=True)
    assert out.strip() == "positive []"


@pytest.mark.parametrize(
    ("fields", "kind"),
    [
        ({"problem_type": "single_label_classification"}, "multi_label_classification"),
        ({}, "multi_label_classification"),
        ({"problem_type": "regression"}, "regression"),
        (
            {"problem_type": "single_label_classification", "sentence_transformers": {"activation_fn": "Identity"}},
            "regression",
        ),
        ({"id2label": {"0": "a", "1": "b"}}, "single_label_classification"),
        (
            {"id2label": {"0": "a", "1": "b"}, "problem_type": "multi_label_classification"},
            "multi_label_classification",
        ),
    ],
)
def test_one_output_is_a_class_of_its_own(fields, kind):
    """As in transformers' pipeline: a softmax over one number would be 1 for every text."""
    sizes = {"vocab_size": 9, "type_vocab_size": 2, "max_position_embeddings": 9, "adtp": {"prune_sites": []}}
    assert Config.of({"id2label": {"0": "LABEL_0"}, **sizes, **fields}).kind == kind
