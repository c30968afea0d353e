"""`adtp_export.load`: what most users do next."""

import json
import shutil
import subprocess
import sys

import numpy as np
import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

import adtp_export
from adtp_export.engines import openvino
from adtp_export.errors import InputError

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
    with pytest.raises(InputError, match="accepted are strings"):
        deployment([3])
    with pytest.raises(InputError, match="batch_size"):
        deployment("x", batch_size=0)


def test_choice_of_target(exported, deployment):
    assert deployment.target == "onnxruntime-cpu-fp32"
    with pytest.raises(InputError, match="did you mean 'onnxruntime-cpu-fp32'"):
        adtp_export.load(exported, target="onnxruntime-cpu-fp3")
    if openvino.installed():
        other = adtp_export.load(exported, target="openvino-cpu-fp32")
        expected = [a.score for a in deployment(TEXTS, return_kept=True)]
        assert [a.score for a in other(TEXTS, return_kept=True)] == pytest.approx(expected, abs=1e-5)


def test_an_engine_for_another_gpu_is_not_chosen(exported):
    from adtp_export.engines import cuda, tensorrt

    targets = json.loads((exported / "manifest.json").read_text())["targets"]
    engines = [name for name in targets if name.startswith("rtx")]
    if not engines:
        pytest.skip("TensorRT-RTX is not installed: no engine was built")
    if tensorrt.runs_here(tensorrt.RTX, targets[engines[0]]["gpus"]):
        pytest.skip(f"this machine has a {cuda.local_gpu()}, which the engine runs on")
    assert targets[engines[0]]["status"] == "built-not-run"
    with pytest.raises(InputError, match="cannot run on this machine"):
        adtp_export.load(exported, target=engines[0])


def test_not_an_exported_directory(tmp_path, exported):
    with pytest.raises(InputError, match="adtp-export MODEL_DIR"):
        adtp_export.load(tmp_path)
    broken = shutil.copytree(exported, tmp_path / "broken")
    (broken / "manifest.json").write_text('{"schema": 1}')
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
