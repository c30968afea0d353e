"""Models that generate text, exported in lower precisions: their files, and the types in them."""

import numpy as np
import onnx
import pytest
from language_models import SIDE
from test_generation import PROMPTS, folder, pictures  # noqa: F401

import adtp_export
from adtp_export.contract import (
    ATTENTION,
    BF16_PRODUCTS,
    PREFILL_MODEL,
    RECEIVED,
    STEP_MODEL,
    VISION_MODEL,
    in_precision,
)
from adtp_export.graph import program
from adtp_export.inference.generation import Generator, Sampling, whole
from adtp_export.runtimes.onnxruntime import OnnxRuntimeEngine


@pytest.mark.slow  # two exports in lower precisions; the types of a cache are tested below
@pytest.mark.parametrize(
    ("pruning", "precisions"),
    [("btp.json", "fp16,int8"), ("divprune", "fp16,bf16")],
    ids=["inside", "before"],
)
def test_lower_precisions(folder, pictures, tmp_path, pruning, precisions):  # noqa: F811
    """The export compares each with PyTorch. Here, that its files are its own, and that a picture has as many tokens as DivPrune leaves in
    the vision file of each precision."""
    given = folder / pruning if pruning == "btp.json" else pruning
    manifest = adtp_export.export(folder / "model", tmp_path / "out", pruning=given, precisions=precisions)
    assert {target.status for target in manifest.targets.values()} == {"verified"}
    for name in manifest.targets:
        precision = name.split("-")[2]
        found = Generator(tmp_path / "out", target=name)
        own = {f"{part}.onnx": in_precision(f"{part}.onnx", precision) for part in ("prefill", "step")}
        vision = in_precision(VISION_MODEL, precision if precision == "fp16" else "fp32")
        assert own.items() | {(VISION_MODEL, vision)} <= found._files.items()
        left = 2 if pruning == "divprune" else SIDE**2
        assert [each.shape for each in found.features(found.pictures(pictures))] == [(left, 32)] * 2
        texts = whole(found.stream(pictures, PROMPTS, Sampling(max_new_tokens=4)), 2)
        assert [len(text.split()) for text in texts] == [4, 4]


def test_caches_have_the_precision(folder, tmp_path):  # noqa: F811
    """Inputs and logits stay in fp32."""
    program.convert_precision(folder / "out" / PREFILL_MODEL, tmp_path / "half.onnx", "fp16")
    feed = {
        "inputs_embeds": np.zeros((3, 32), np.float32),
        "cu_seqlens": np.array([0, 3], np.int32),
        "image": np.zeros(3, bool),
    }
    for path, dtype in ((tmp_path / "half.onnx", np.float16), (folder / "out" / PREFILL_MODEL, np.float32)):
        answer = OnnxRuntimeEngine(path).run(feed)
        assert answer["present.3.key"].dtype == answer["present.0.value"].dtype == dtype
        assert answer["logits"].dtype == np.float32


@pytest.mark.parametrize("name", [PREFILL_MODEL, STEP_MODEL])
def test_attention_may_round_where_products_do(folder, tmp_path, name):  # noqa: F811
    """In steps, too, whose attention is called without the module that it is of."""
    program.lower_linear(folder / "out" / name, tmp_path / "lower.onnx")
    nodes = [node for node in onnx.load(tmp_path / "lower.onnx").graph.node if node.op_type.startswith(ATTENTION)]
    assert len(nodes) == 4
    for node in nodes:
        assert node.op_type.endswith(RECEIVED) != (BF16_PRODUCTS in {each.name for each in node.attribute})
