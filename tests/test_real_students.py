"""Real students on real text, where the material beside the repository is at hand."""

import itertools
import json
import random

import numpy as np
import onnxruntime
import pytest
import torch
from testbed import one_thread, run_cli, shared_or_skip
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from adtp_export.data.readers import read_texts

ROWS = 300
ENGINE = ("--trt", "--gpu", "sm_86", "--attention", "decomposed")


@pytest.fixture
def directory(request):
    return shared_or_skip(f"models/{request.param}")


@pytest.fixture
def texts():
    return list(itertools.islice(read_texts(shared_or_skip("data/sst2/train.tsv.gz")), 40_000, 40_000 + ROWS))


@pytest.mark.usefixtures("has_rtx")
@pytest.mark.parametrize(
    ("directory", "rows", "engine"),
    [
        ("adtp-minilm6-sst2", 100, ()),
        pytest.param("adtp-minilm6-sst2", ROWS, ENGINE, marks=pytest.mark.slow),
        pytest.param("adtp-minilm6-sst2-early", ROWS, ENGINE, marks=pytest.mark.slow),
    ],
    indirect=["directory"],
    ids=["100 rows", "an engine", "an engine of an early cut"],
)
def test_real_sentences(tmp_path, directory, texts, rows, engine):
    """`model.onnx` in plain ONNX Runtime against plain transformers: logits, predictions and kept tokens."""
    out = tmp_path / "out"
    result = run_cli("adtp-export", directory, "--out", out, "--debug-outputs", "--json", *engine)
    assert result.returncode == 0, result.stderr
    manifest = json.loads(result.stdout)
    assert manifest["targets"]["onnxruntime-cpu-fp32"]["status"] == "verified"
    engines = [target for name, target in manifest["targets"].items() if name == "rtx-sm_86-fp32-decomposed"]
    assert len(engines) == bool(engine)
    for target in engines:
        assert manifest["files"][target["file"]]["bytes"] > (directory / "model.safetensors").stat().st_size

    oracle = AutoModelForSequenceClassification.from_pretrained(directory, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(directory)
    session = onnxruntime.InferenceSession(out / "model.onnx", one_thread(), providers=["CPUExecutionProvider"])
    sizes = random.Random(0)
    done, worst, decisions = 0, 0.0, 0
    while done < rows:
        chosen = texts[done : done + sizes.choice([1, 3, 8, 16, 32])]
        batch = tokenizer(chosen, padding=True, return_tensors="pt")
        with torch.inference_mode():
            expected = oracle(**batch)
        logits, kept_site = session.run(["logits", "kept_site"], {n: batch[n].numpy() for n in batch})
        worst = max(worst, float(np.abs(logits - expected.logits.numpy()).max()))
        assert np.array_equal(logits.argmax(1), expected.logits.argmax(1))
        assert np.array_equal(kept_site, expected.kept_site)
        decisions += int((kept_site >= 0).sum())
        done += len(chosen)
    assert decisions > 5 * rows
    assert worst <= 2 * manifest["targets"]["onnxruntime-cpu-fp32"]["tolerance"]  # of each of the two from fp64
