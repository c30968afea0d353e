"""`encode_sparse`: what `SparseEncoder` gives, in the form of its definition; and what adtp-run, Ray and Triton make of it."""

import json

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from plain_models import TEXTS
from transformers import AutoModelForMaskedLM, AutoTokenizer

import adtp_export
from adtp_export.cli.run import command, make_parser
from adtp_export.contract import OUTPUTS
from adtp_export.errors import InputError
from adtp_export.inference.answers import sparse
from adtp_export.integrations.ray.config import ScoringConfig
from adtp_export.integrations.triton import repository as triton


@pytest.fixture(scope="module")
def encode(splade):
    return adtp_export.load(splade[1])


@pytest.fixture(scope="module")
def weights_of(splade):
    """The definition of sentence-transformers, written down: at most 20 tokens, all weights ``(1238,)``."""
    model = AutoModelForMaskedLM.from_pretrained(splade[0]).eval()
    tokenizer = AutoTokenizer.from_pretrained(splade[0])

    def weights(text):
        with torch.no_grad():
            logits = model(**tokenizer(text, return_tensors="pt", truncation=True, max_length=20)).logits[0]
        return logits.relu().log1p().log1p().amax(0).numpy()

    return weights


def dense(vector, width=1238):
    found = np.zeros(width, np.float32)
    found[vector.indices] = vector.values
    return found


def test_weights_are_those_of_transformers(encode, weights_of):
    texts = [*TEXTS, "", "good film " * 30]
    for text, vector in zip(texts, encode.encode_sparse(texts, max_active_dims=1238), strict=True):
        assert (vector.indices.dtype, vector.values.dtype) == (np.int32, np.float32)
        assert (np.diff(vector.indices) > 0).all()
        assert (vector.values > 0).all()
        np.testing.assert_allclose(dense(vector), weights_of(text), atol=1e-5)


def test_the_largest_weights_stay(encode, weights_of):
    """The model's own default is 200 of them."""
    for most in (None, 7):
        (vector,) = encode.encode_sparse(TEXTS[0], max_active_dims=most)
        whole = weights_of(TEXTS[0])
        assert set(vector.indices) == set(np.argsort(-whole)[: most or 200])


def test_of_equal_weights_the_first_stay():
    vector = sparse.answer(np.array([0, 2, 1, 2, 3, 2, -1.0]), 3)
    assert vector.to_json() == {"indices": [1, 3, 4], "values": [2, 2, 3]}
    assert sparse.answer(np.zeros(4)).to_json() == {"indices": [], "values": []}


def test_weights_have_their_tokens(encode):
    (vector,) = encode.encode_sparse(TEXTS[0], max_active_dims=3)
    told = vector.tokens(encode.tokenizer)
    assert list(told.values()) == sorted(vector.values.tolist(), reverse=True)
    assert [encode.tokenizer.token_to_id(token) for token in told] == vector.indices[
        np.argsort(-vector.values)
    ].tolist()


def test_tokens_that_the_tokenizer_does_not_know_stay_apart(encode):
    vector = sparse.SparseEmbedding(np.array([6, 1238, 1239], np.int32), np.array([1, 3, 2], np.float32))
    assert vector.tokens(encode.tokenizer) == {"[1238]": 3, "[1239]": 2, encode.tokenizer.id_to_token(6): 1}


def test_queries_and_documents_have_their_prompts(encode):
    def lists(vectors):
        return [vector.to_json() for vector in vectors]

    plain = lists(encode.encode_sparse(TEXTS))
    assert lists(encode.encode_sparse_document(TEXTS)) == plain
    queries = lists(encode.encode_sparse_query(iter(TEXTS)))
    assert queries == lists(encode.encode_sparse(["query : " + text for text in TEXTS]))
    assert queries == lists(encode.encode_sparse(TEXTS, prompt_name="query"))
    assert queries != plain
    assert encode.encode_sparse([]) == []


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda d: d("a text"), r"has sparse; type: load\(OUT\)\.encode_sparse"),
        (
            lambda d: d.encode("a text"),
            r"encode is for models with the head embedding or hybrid, and .* has sparse; type: .*encode_sparse",
        ),
        (lambda d: d.encode_query("a text"), "encode is for models with the head embedding"),
        (
            lambda d: d.encode_sparse("a", max_active_dims=0),
            "max_active_dims: got 0; accepted is an integer from 1 to 1238",
        ),
        (
            lambda d: d.encode_sparse("a", max_active_dims=1239),
            "max_active_dims: got 1239; accepted is an integer from 1 to 1238",
        ),
        (lambda d: d.encode_sparse("a", prompt_name="qeury"), "accepted are query, document; did you mean 'query'"),
        (lambda d: d.encode_sparse(("a", "b", 1)), "got int at index 2"),
    ],
    ids=range(7),
)
def test_bad_input(encode, call, message):
    with pytest.raises(InputError, match=message):
        call(encode)


def test_other_models_give_no_sparse_vectors(embedder):
    with pytest.raises(
        InputError, match=r"encode_sparse is for .* sparse, and .* has embedding; type: load\(OUT\).encode\("
    ):
        adtp_export.load(embedder[1]).encode_sparse("a text")


def test_the_graph_holds_no_logits_of_all_tokens(splade):
    """Two blocks of the vocabulary are multiplied, each is reduced to texts, and only those are joined; one table serves both ends."""
    graph = onnx.load(splade[1] / "model.onnx").graph
    tables = [tensor.name for tensor in graph.initializer if list(tensor.dims) == [1238, 32]]
    products = [node for node in graph.node if node.op_type == "Gemm" and "to_vocabulary" in node.name]
    shapes = {value.name: value.type.tensor_type.shape.dim for value in graph.value_info}
    assert len(tables) == 1
    assert [shapes[node.output[0]][1].dim_value for node in products] == [1024, 1238 - 1024]
    (joined,) = (node for node in graph.node if node.op_type == "Concat" and "to_vocabulary" in node.name)
    reduced = {node.output[0] for node in graph.node if node.op_type == "ReduceMax"}
    assert set(joined.input) <= reduced


def test_onnx_runtime_holds_one_table(splade, tmp_path):
    """What it computes while it loads a file is written down with its graph: no block is among that."""
    options = onnxruntime.SessionOptions()
    options.optimized_model_filepath, options.log_severity_level = str(tmp_path / "loaded.onnx"), 3
    onnxruntime.InferenceSession(splade[1] / "model.onnx", options, providers=["CPUExecutionProvider"])
    held = [list(tensor.dims) for tensor in onnx.load(tmp_path / "loaded.onnx").graph.initializer]
    assert [dims for dims in held if len(dims) == 2 and dims[0] > 100] == [[1238, 32]]


def test_adtp_run_prints_indices_and_values(splade, encode, capsys):
    typed = ["--text", TEXTS[0], "--max-active-dims", "5", "--prompt-name", "query", "--kept"]
    assert command(make_parser().parse_args([str(splade[1]), *typed])) == 0
    (line,) = map(json.loads, capsys.readouterr().out.splitlines())
    (expected,) = encode.encode_sparse_query(TEXTS[0], max_active_dims=5)
    assert list(line)[:3] == ["text", "indices", "values"]
    assert (line["indices"], line["tokens"][1:4]) == (expected.indices.tolist(), ["qu", "##ery", ":"])
    assert line["values"] == pytest.approx(expected.values.tolist(), abs=1e-5)
    with pytest.raises(InputError, match="--out is for models with the head embedding or hybrid, and .* has sparse"):
        command(make_parser().parse_args([str(splade[1]), "--text", "a", "--out", "x.npy"]))


@pytest.mark.usefixtures("has_ray")
def test_tables_have_indices_and_values(encode):
    import pyarrow

    from adtp_export.integrations.ray import answering

    model = answering.Answering(encode, ScoringConfig(max_active_dims=4), 32, pairs=False)
    found = model.table(pyarrow.table({"text": TEXTS}), ["text"], "x.parquet").drop_columns(["text"]).to_pylist()
    expected = [vector.to_json() for vector in encode.encode_sparse(TEXTS, max_active_dims=4)]
    assert [row["indices"] for row in found] == [row["indices"] for row in expected]
    with pytest.raises(
        InputError, match="truncate_dim: is for models with the head embedding or hybrid, and this one has sparse"
    ):
        answering.Answering(encode, ScoringConfig(truncate_dim=4), 32, pairs=False)
    for name, value in {
        "aggregation": "simple",
        "top_k": 7,
        "may_be_none": True,
        "windows": {"max_tokens": 16},
    }.items():
        with pytest.raises(InputError, match=f"{name}: is for models with the head .*, and this one has sparse"):
            answering.Answering(encode, ScoringConfig(**{name: value}), 32, pairs=False)


def test_triton_has_a_text_for_each_vector(splade, encode, tmp_path):
    assert triton.write(splade[1], tmp_path, "splade") == ["splade"]
    (name,) = OUTPUTS["sparse"]
    assert f'name: "{name}", data_type: TYPE_STRING, dims: [ 1 ]' in (tmp_path / "splade" / "config.pbtxt").read_text()
