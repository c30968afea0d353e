"""Over the table of backbones: every head, ONNX Runtime's tables, INT8 and fp16, engines. The head "sequence" is in test_graph.py."""

import itertools

import numpy as np
import pytest
import torch
from testbed import HEAD_FIELDS, TINY_BACKBONES, as_numpy, make_batch, make_encoder

from adtp_export.artifacts.records import DECOMPOSED, ShapeRange
from adtp_export.calibration import recipes
from adtp_export.calibration.collect import collect
from adtp_export.calibration.plan import make_quantization_plan
from adtp_export.calibration.quantize import write_quantized
from adtp_export.calibration.simulate import simulate
from adtp_export.graph import program
from adtp_export.model.registry import fields
from adtp_export.runtimes import tensorrt
from adtp_export.runtimes.onnxruntime import OnnxRuntimeEngine
from adtp_export.runtimes.openvino import OpenVinoEngine
from adtp_export.verify.oracle import for_precision, run_oracle, typed
from adtp_export.verify.parity import compare

FAMILIES = [name for name in TINY_BACKBONES if name not in ("bert", "camembert", "xlm-roberta", "distilbert-pruned")]
"""BERT has tests of its own, and the others have the classes of those that are here."""
WITHOUT_TABLES = {"electra"}
"""Those with something between embeddings and the first layer."""
every_family = pytest.mark.parametrize("family", FAMILIES)


def batches_of(model, *lengths):
    """Batches without the padding id inside a text, which RoBERTa takes for padding."""
    config = fields(model.dense.config)
    batches = [make_batch(n, max(n), types=config["type_vocab_size"], seed=i) for i, n in enumerate(lengths)]
    for batch in batches:
        batch["input_ids"][(batch["input_ids"] == config["pad_token_id"]) & batch["attention_mask"].bool()] = 5
    return batches


def trained(model):
    """Draw what training moves away from 0 and 1: biases, and the scale of norms."""
    generator = np.random.default_rng(0)
    for name, parameter in model.named_parameters():
        if name.endswith("bias") or "norm" in name.lower():
            drawn = generator.normal(name.endswith("weight"), 0.3, parameter.shape)
            parameter.copy_(parameter.new_tensor(drawn))
    return model


FAST = [("distilbert", "embedding")]
"""PyTorch's packed form of all is compared in test_encoder.py, the graphs of BERT's heads in pipeline/test_export_heads.py, those of
ModernBERT with a pruner in test_graph.py, and with the head "spans" in test_fixed_sizes.py."""
OTHER_HEADS = [head for head in HEAD_FIELDS if head != "sequence"]


@pytest.mark.parametrize(
    ("family", "head"),
    [
        pytest.param(family, head, marks=[] if (family, head) in FAST else [pytest.mark.slow])
        for family in FAMILIES
        for head in OTHER_HEADS
    ],
)
@pytest.mark.usefixtures("has_openvino", "traced_once")
def test_every_head_equals_the_oracle(tmp_path, family, head):
    model = trained(make_encoder(family, "adtp", head=head, **HEAD_FIELDS[head]))
    path = tmp_path / "model.onnx"
    graph = program.export_portable(model, {"version": "test"})
    program.add_debug_outputs(graph)
    program.save(graph, path)
    oracle = run_oracle(model, [as_numpy(batch) for batch in batches_of(model, [9, 32, 1], [5] * 4)])
    for load in (OnnxRuntimeEngine, OpenVinoEngine):
        assert compare(oracle, load(path)).failure is None


@pytest.mark.parametrize(
    ("family", "head"),
    [
        pytest.param(family, head, marks=[] if family in ("distilbert", "modernbert", "mpnet") else [pytest.mark.slow])
        for family, head in zip(FAMILIES, itertools.cycle(HEAD_FIELDS))
    ],
)
@pytest.mark.usefixtures("traced_once")
def test_forms_and_precisions(tmp_path, family, head):
    """Tables in place of the first projections; INT8 and FP8 in every product of every layer, as PyTorch answers that rounds alike; fp16.

    The heads go round, so that all of them are rounded."""
    model = trained(make_encoder(family, "none", head=head, **HEAD_FIELDS[head]))
    batches = [as_numpy(batch) for batch in batches_of(model, [9, 32, 1], [5, 20] * 4)]
    source = tmp_path / "model.onnx"
    graph = program.export_portable(model, {"version": "test", "precision": "fp32"})
    program.add_debug_outputs(graph)
    program.save(graph, source)
    oracle = run_oracle(model, batches)

    def parity(name, judged=oracle):
        found = compare(judged, OnnxRuntimeEngine(tmp_path / f"{name}.onnx", disable_qdq_fusion=name == "fp8"))
        assert found.failure is None
        return found

    if obstacle := model.backbone.precompute_obstacle(model.dense.config):
        assert family in WITHOUT_TABLES, obstacle
    else:
        program.precompute_projections(source, tmp_path / "precomputed.onnx")
        parity("precomputed")
    seen, rounded = collect(model, batches), {"fp16": typed(model, "fp16")}
    program.convert_precision(source, tmp_path / "fp16.onnx", "fp16")
    for precision, target in (("int8", "ort-cpu"), ("fp8", "trt")):
        plan = make_quantization_plan(recipes.built_in(target, precision), model, seen)
        assert len(plan.scales) == 4 * model.backbone.num_layers
        write_quantized(source, tmp_path / f"{precision}.onnx", plan)
        rounded[precision] = simulate(model, plan)
    for precision, student in rounded.items():
        judged = for_precision(oracle, student, precision)
        assert parity(precision, judged).max_abs_logit_diff > 10 * next(iter(oracle.output_errors.values()))


def test_pruned_heads_are_those_whose_output_nobody_reads():
    """The definition, of a whole model: the columns that read a pruned head are 0, and so are those of a pruned unit."""
    config = TINY_BACKBONES["bert-pruned"]
    whole, pruned = make_encoder("bert", "none").double(), make_encoder("bert-pruned", "none").double()
    weights = whole.state_dict()
    for layer in range(3):
        gone = config["pruned_heads"].get(str(layer), [])
        left = torch.tensor([i for i in range(32) if i // 8 not in gone])
        width = config["intermediate_sizes"][layer]
        prefix = f"bert.encoder.layer.{layer}"
        whole.get_submodule(f"{prefix}.attention.output.dense").weight[:, [i for i in range(32) if i // 8 in gone]] = 0
        whole.get_submodule(f"{prefix}.output.dense").weight[:, width:] = 0
        for name in ("query", "key", "value"):
            for kind in ("weight", "bias"):
                key = f"{prefix}.attention.self.{name}.{kind}"
                weights[key] = weights[key][left]
        weights[f"{prefix}.attention.output.dense.weight"] = weights[f"{prefix}.attention.output.dense.weight"][:, left]
        for kind in ("weight", "bias"):
            weights[f"{prefix}.intermediate.dense.{kind}"] = weights[f"{prefix}.intermediate.dense.{kind}"][:width]
        weights[f"{prefix}.output.dense.weight"] = weights[f"{prefix}.output.dense.weight"][:, :width]
    pruned.load_state_dict(weights)
    (batch,) = batches_of(whole, [9, 20, 1])
    torch.testing.assert_close(pruned(**batch).logits, whole(**batch).logits, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(pruned.dense(**batch).logits, whole(**batch).logits, rtol=1e-12, atol=1e-12)


@pytest.mark.slow
@every_family
@pytest.mark.usefixtures("has_rtx")
def test_engines_are_built(tmp_path, family):
    path = tmp_path / "model.onnx"
    program.save(program.export_portable(make_encoder(family, "adtp"), {"version": "test"}), path)
    profile = {"batch": ShapeRange(1, 2, 4), "seq": ShapeRange(1, 8, 32)}
    engine, details = tensorrt.build(tensorrt.RTX, path, profile, ["sm_86", "sm_89", "sm_120"], DECOMPOSED)
    assert details["gpus"] == ["sm_86", "sm_89", "sm_120"]
    assert engine.nbytes > 0
