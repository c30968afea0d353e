"""A model of more than 2 GB: what an export of it takes, and that its files are open one at a time."""

import gc
import os
import shutil
import subprocess
import sys
import weakref

import numpy as np
import pytest
from decoder_models import make_decoder
from plain_models import add_tokenizer
from testbed import ROOT

import adtp_export
from adtp_export.pipeline.export import context, timing
from adtp_export.targets.specs import OnnxRuntime

LARGE = {
    "vocab_size": 300_000,
    "hidden_size": 1024,
    "num_hidden_layers": 16,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 3072,
    "initializer_range": 0.02,
}
"""Layers as Qwen3-Embedding-0.6B's, fewer of them; a larger vocabulary makes up for it at no cost in time."""
WRITE = "from test_large_export import write; import sys; write(sys.argv[1])"


def write(directory):
    """Save it in bf16, as such models are; in a process of its own, whose memory does not count."""
    import torch

    torch.set_default_dtype(torch.bfloat16)
    make_decoder("qwen3", "embedding", **LARGE).save_pretrained(directory)


def measured(*command):
    """Run a command; return its most memory in bytes, and what it says."""
    paths = os.pathsep.join([str(ROOT / "tests"), str(ROOT / "tests" / "pipeline")])
    code = (
        "import resource, subprocess, sys; done = subprocess.run(sys.argv[1:], check=True, stdout=sys.stderr); "
        "print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, command)],
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return int(done.stdout) * 1024, done.stderr


@pytest.mark.slow
def test_memory_is_bounded(tmp_path):
    """The fp32 and the fp64 oracle are three times the weights. Beside them there is room for runtimes and states, and no second copy."""
    model, out = tmp_path / "model", tmp_path / "out"
    measured(sys.executable, "-c", WRITE, model)
    add_tokenizer(model)
    scripts = os.path.dirname(sys.executable)
    most, told = measured(f"{scripts}/adtp-export", model, "--out", out, "--seq", "1:16:16")
    weights = (out / "model.onnx.data").stat().st_size
    assert weights > 2**31
    print(f"export: {most / 2**30:.2f} GiB for {weights / 2**30:.2f} GiB of weights")
    assert most < 3.3 * weights + 2**30, told
    vectors = tmp_path / "vectors.npy"
    most, _ = measured(f"{scripts}/adtp-run", out, "a text", "another", "--out", vectors)
    print(f"run: {most / 2**30:.2f} GiB")
    assert most < weights + 2**30
    assert np.isfinite(found := np.load(vectors)).all()
    assert found.shape == (2, LARGE["hidden_size"])
    for directory in (model, out):  # pytest would keep several of them
        shutil.rmtree(directory)


@pytest.mark.usefixtures("known_graphs")
@pytest.mark.parametrize(("limit", "most"), [pytest.param(1000, 2, marks=pytest.mark.slow), (10**9, 3)])
@pytest.mark.slow
def test_large_files_are_open_one_at_a_time(tmp_path, monkeypatch, limit, most):
    """With their debug form at most; sessions of small ones wait for their timing, for which opening them again takes longer."""
    for module in (context, timing):
        monkeypatch.setattr(module, "LARGE_BYTES", limit)
    opened, alive = weakref.WeakSet(), []
    open_engine = OnnxRuntime.open

    def count(self, *arguments, **options):
        gc.collect()
        engine = open_engine(self, *arguments, **options)
        opened.add(engine)
        alive.append(len(opened))
        return engine

    monkeypatch.setattr(OnnxRuntime, "open", count)
    make_decoder("qwen3", "embedding", vocab_size=1238).save_pretrained(tmp_path / "model")
    manifest = adtp_export.export(add_tokenizer(tmp_path / "model"), tmp_path / "out", precisions="fp16")
    timed = [name for name, target in manifest.targets.items() if "p50_ms" in target.details]
    assert timed == ["onnxruntime-cpu-fp32", "onnxruntime-cpu-fp16"]
    assert max(alive) == most
