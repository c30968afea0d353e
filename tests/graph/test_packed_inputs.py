"""The form with packed inputs: the contract of its file, and the same answers as the oracle on every kind of model."""

import itertools

import numpy as np
import onnx
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from known_graphs import known_graph
from test_family_graphs import batches_of
from testbed import HEAD_FIELDS, PRUNINGS, TINY_BACKBONES, as_numpy, make_encoder
from tolerances import assert_within_oracle, oracle_on

from adtp_export import contract
from adtp_export.graph import program
from adtp_export.model.sequences import rising
from adtp_export.ops.ragged_attention import rises
from adtp_export.runtimes.onnxruntime import OnnxRuntimeEngine
from adtp_export.runtimes.openvino import OpenVinoEngine
from adtp_export.runtimes.packed import PackedEngine
from adtp_export.verify.oracle import for_precision, run_oracle, typed
from adtp_export.verify.parity import compare

LEAN = [("bert", "adtp", "sequence"), ("roberta", "ltp", "tokens")]
"""Outputs of texts, and of tokens; `model/` compares the packed form of each rule with its padded one."""
ALL = [*zip(TINY_BACKBONES, itertools.cycle(PRUNINGS), itertools.cycle(HEAD_FIELDS))]
LENGTHS = ([1], [1, 1, 1], [5, 30, 2, 17], [64, 1, 33], [7] * 11)


class Gaps:
    """For an engine of packed inputs: an empty text before all others, in their middle and behind them, answered with zeros.

    head: says which outputs have a row for each text.
    """

    head = "sequence"

    def run_packed(self, arrays, lengths, wanted=None):
        more = np.insert(lengths, sorted({0, len(lengths) // 2, len(lengths)}), 0)
        found = super().run_packed(arrays, more, wanted)
        for name in OF_TEXTS[self.head] & found.keys():
            assert not found[name][more == 0].any()
            found[name] = found[name][more > 0]
        return found


OF_TEXTS = {name: {"logits"} if name == "sequence" else set() for name in HEAD_FIELDS}
OF_TEXTS |= {"embedding": {"sentence_embedding"}, "sparse": {"sparse_embedding"}}


def with_gaps(engine, head):
    """Make an engine such a one."""
    engine.__class__ = type("WithGaps", (Gaps, type(engine)), {"head": head})
    return engine


def export(model, path):
    program.save(known_graph(model, form=program.packed_form), path)
    return path


def with_kept(path):
    from adtp_export.graph.debug import debug_form

    return debug_form(path)


@pytest.mark.parametrize(
    ("backbone", "pruning", "head"),
    [*LEAN, *(pytest.param(*row, marks=pytest.mark.slow) for row in ALL)],
)
@pytest.mark.usefixtures("has_openvino", "traced_once")
def test_equals_the_oracle(tmp_path, backbone, pruning, head):
    model = make_encoder(backbone, pruning, head=head, **HEAD_FIELDS[head])
    path = export(model, tmp_path / "model.packed.onnx")
    oracle = run_oracle(model, [as_numpy(batch) for batch in batches_of(model, *LENGTHS)])
    with with_kept(path) as debug:
        for load, exact in ((OnnxRuntimeEngine, True), (OpenVinoEngine, False)):
            pair = PackedEngine(load(path)), PackedEngine(load(debug))
            for engines in (pair, [with_gaps(engine, head) for engine in pair]):
                parity = compare(oracle, *engines, exact_debug=exact)
                assert parity.failure is None
                assert parity.prediction_agreement == parity.kept_token_agreement == 1


@pytest.mark.slow
@pytest.mark.parametrize("pooling", ["max", "first"])
def test_other_poolings(tmp_path, pooling):
    fields = {"pooling": pooling, "normalize": False, "projections": []}
    model = make_encoder("distilbert", "schedule", head="embedding", embedding=fields)
    path = export(model, tmp_path / "model.packed.onnx")
    oracle = run_oracle(model, [as_numpy(batch) for batch in batches_of(model, *LENGTHS)])
    with with_kept(path) as debug:
        assert (
            compare(oracle, PackedEngine(OnnxRuntimeEngine(path)), PackedEngine(OnnxRuntimeEngine(debug))).failure
            is None
        )


@pytest.fixture(scope="module")
def embedding(tmp_path_factory):
    """A model with outputs for texts and for tokens, and its file."""
    model = make_encoder("bert", "schedule", head="embedding", **HEAD_FIELDS["embedding"])
    return model, export(model, tmp_path_factory.mktemp("packed") / "model.packed.onnx")


@pytest.fixture(scope="module")
def engine(embedding):
    return PackedEngine(OnnxRuntimeEngine(embedding[1]))


def test_inputs_and_outputs(embedding):
    graph = onnx.load(embedding[1]).graph

    def describe(values):
        shapes = ([d.dim_param or d.dim_value for d in v.type.tensor_type.shape.dim] for v in values)
        return {v.name: (v.type.tensor_type.elem_type, shape) for v, shape in zip(values, shapes)}

    expected = {name: (onnx.TensorProto.INT64, [*axes]) for name, axes in contract.PACKED_INPUTS.items()}
    expected[contract.CU_SEQLENS] = (onnx.TensorProto.INT32, [*contract.PACKED_INPUTS[contract.CU_SEQLENS]])
    assert describe(graph.input) == expected
    outputs = {name: shape for name, (_, shape) in describe(graph.output).items()}
    assert outputs == {"sentence_embedding": ["batch", 16], "last_hidden_state": ["tokens", 32]}


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_empty_texts_are_answered_with_zeros_and_change_no_other(embedding, tmp_path, precision):
    model, path = embedding
    oracle = run_oracle(model, [as_numpy(batch) for batch in batches_of(model, *LENGTHS)])
    if precision != "fp32":
        program.convert_precision(path, path := tmp_path / "typed.onnx", precision)
        oracle = for_precision(oracle, typed(model, precision), precision)
    with with_kept(path) as debug:
        pair = (with_gaps(PackedEngine(OnnxRuntimeEngine(file)), "embedding") for file in (path, debug))
        assert compare(oracle, *pair).failure is None


BOUNDS = st.lists(st.integers(-3, 15) | st.integers(-(2**31), 2**31 - 1), min_size=2, max_size=7)


def check_bounds(engine, given, tokens):
    """Any bounds are answered as those that they stand for: these rise from 0 to T at most, and good ones stand for themselves."""
    given = np.array(given, np.int32)
    meant = rising(torch.from_numpy(given), tokens).numpy()
    assert meant[0] == 0
    assert (np.diff(meant) >= 0).all()
    assert meant[-1] <= tokens
    if rises(given.tolist(), tokens):
        np.testing.assert_array_equal(meant, given)
    ids = 1 + np.arange(tokens) % 96
    answers = [
        engine.run({"input_ids": ids, "token_type_ids": ids * 0, contract.CU_SEQLENS: cu.astype(np.int32)})
        for cu in (given, meant)
    ]
    for name, found in answers[0].items():
        np.testing.assert_array_equal(found, answers[1][name])
        assert np.isfinite(found).all()
    return meant, answers[0]


@given(BOUNDS, st.integers(0, 12))
@settings(max_examples=60, deadline=None)
@example([0, 2**31 - 1], 9)
@example([0, 0, 0], 0)
@example([0, 5, 5, 9], 9)
def test_any_bounds_are_answered_within_the_input(engine, given, tokens):
    meant, found = check_bounds(engine.engine, given, tokens)
    assert found["sentence_embedding"].shape == (len(meant) - 1, 16)
    assert found["last_hidden_state"].shape == (tokens, 32)
    np.testing.assert_array_equal(found["sentence_embedding"].any(1), np.diff(meant) > 0)
    np.testing.assert_array_equal(found["last_hidden_state"].any(1), np.arange(tokens) < meant[-1])


def test_what_stands_in_the_padding_is_never_read(engine):
    batch = {
        "input_ids": np.array([[5, 6, 7, 8], [9, 10, 96, 96]]),
        "attention_mask": np.array([[1, 1, 1, 1], [1, 1, 0, 0]]),
        "token_type_ids": np.zeros((2, 4), np.int64),
    }
    seen = engine.run(batch)["sentence_embedding"]
    batch["input_ids"][1, 2:] = -7  # no embedding has such a row
    np.testing.assert_array_equal(engine.run(batch)["sentence_embedding"], seen)


def test_a_text_does_not_see_its_neighbours(embedding, engine):
    ids, alone = np.arange(1, 13), []
    for begin, end in ((0, 4), (4, 5), (5, 12)):
        arrays = {"input_ids": ids[begin:end], "token_type_ids": np.zeros(end - begin, np.int64)}
        alone.append(engine.run_packed(arrays, np.array([end - begin]))["sentence_embedding"])
    together = engine.run_packed({"input_ids": ids, "token_type_ids": np.zeros(12, np.int64)}, np.array([4, 1, 7]))
    padded = {"input_ids": torch.zeros(3, 7, dtype=torch.int64), "attention_mask": torch.zeros(3, 7, dtype=torch.int64)}
    padded["token_type_ids"] = torch.zeros(3, 7, dtype=torch.int64)
    for row, (begin, end) in enumerate(((0, 4), (4, 5), (5, 12))):
        padded["input_ids"][row, : end - begin] = torch.from_numpy(ids[begin:end])
        padded["attention_mask"][row, : end - begin] = 1
    oracle = oracle_on(embedding[0], padded)
    for found in (together["sentence_embedding"], np.concatenate(alone)):
        assert_within_oracle(oracle, {"sentence_embedding": found})


def test_outputs_of_texts_and_of_tokens_are_told_apart_where_all_texts_are_one_token(tmp_path):
    shapes = {}
    for backbone, pruning, head in LEAN:
        model = make_encoder(backbone, pruning, head=head, **HEAD_FIELDS[head])
        engine = PackedEngine(OnnxRuntimeEngine(export(model, tmp_path / f"{head}.onnx")))
        ids = np.array([[5, 0], [6, 0]])
        batch = {"input_ids": ids, "attention_mask": np.array([[1, 0], [1, 0]]), "token_type_ids": ids * 0}
        shapes[head] = engine.run({name: batch[name] for name in model.input_names})["logits"].shape
    assert shapes == {"sequence": (2, 3), "tokens": (2, 2, 5)}
