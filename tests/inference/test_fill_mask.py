"""`fill_mask`: what transformers' pipeline "fill-mask" gives, and what adtp-run and Ray make of it."""

import json

import numpy as np
import onnx
import pytest
import transformers
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from plain_models import edit_json, write_plain
from tokenizers import Tokenizer, models

import adtp_export
from adtp_export.cli.run import command, make_parser
from adtp_export.data.tokenize import unknown_id
from adtp_export.errors import InputError
from adtp_export.inference.answers import masked
from adtp_export.integrations.ray.config import ScoringConfig

TEXTS = ["a good [MASK] indeed", "[MASK] was [MASK] [MASK], really", "the plot is [MASK]", "film " * 20 + "[MASK]"]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A directory and its verified export."""
    folder = tmp_path_factory.mktemp("masked")
    write_plain(folder / "model", "open", initializer_range=0.2)
    manifest = adtp_export.export(folder / "model", folder / "out", head="masked")
    assert manifest.targets["onnxruntime-cpu-fp32"].status == "verified"
    return folder / "model", folder / "out"


def test_answers_are_those_of_the_pipeline(model):
    check_against_the_pipeline(*model, "onnxruntime-cpu-fp32")


@pytest.mark.slow
def test_openvino_answers_so_too(model, tmp_path):
    manifest = adtp_export.export(model[0], tmp_path / "out", head="masked", openvino=True)
    assert manifest.targets["openvino-cpu-fp32"].status == "verified"
    check_against_the_pipeline(model[0], tmp_path / "out", "openvino-cpu-fp32")


def check_against_the_pipeline(directory, out, target):
    pipeline = transformers.pipeline("fill-mask", model=str(directory), tokenizer=str(directory))
    for asked in ({}, {"top_k": 3}, {"targets": ["good", "film"]}):
        answers = adtp_export.load(out, target=target).fill_mask(TEXTS, batch_size=3, **asked)
        for answer, expected in zip(answers, pipeline(TEXTS, **asked), strict=True):
            rows = expected if isinstance(expected[0], list) else [expected]
            for row, own in zip(answer.masks, rows, strict=True):
                assert [vars(each) | {"score": None} for each in row] == [{**each, "score": None} for each in own]
                np.testing.assert_allclose(
                    [each.score for each in row], [each["score"] for each in own], rtol=0, atol=1e-5
                )


def test_the_file_names_the_axis_and_runtimes_hold_one_table(model):
    """What multiplies by a constant table rearranges it on loading, and token embeddings keep it as it is."""
    graph = onnx.load(model[1] / "model.onnx").graph
    (output,) = (output for output in graph.output if output.name == "mask_logits")
    assert [dim.dim_param or dim.dim_value for dim in output.type.tensor_type.shape.dim] == ["batch", "masks", 1238]
    tables = [weight.name for weight in graph.initializer if list(weight.dims) == [1238, 32]]
    readers = [node for node in graph.node if set(tables) & set(node.input)]
    constant = {weight.name for weight in graph.initializer}
    assert len(tables) == 1
    assert len(readers) > 1
    assert all(node.op_type == "Gather" and node.input[1] not in constant for node in readers)


@given(
    arrays(np.float32, st.tuples(st.integers(1, 3), st.integers(1, 9)), elements=st.integers(-2, 2)), st.integers(1, 10)
)
def test_the_best_are_those_of_a_stable_sort(logits, top_k):
    order = np.argsort(-logits, axis=1, kind="stable")[:, :top_k]
    assert np.array_equal(masked.best(logits, top_k, None).tokens, order)


def test_of_equal_tokens_the_first_are_best():
    found = masked.best(np.array([[1, 3, 3, 2.0]], np.float32), 3, None)
    assert found.tokens.tolist() == [[1, 2, 3]]
    assert masked.best(np.zeros((1, 4), np.float32), 9, np.array([2, 3])).scores.tolist() == [[0.25, 0.25]]


@pytest.mark.parametrize("name", ["<unk>", "[UNK]", "rest"])
def test_words_that_a_unigram_does_not_know_are_refused(name):
    """What stands for them has any name, and no attribute has its number."""
    tokenizer = Tokenizer(models.Unigram([("<pad>", 0.0), (name, -9.0), ("a", -1.0), ("b", -1.0)], 1))
    unknown = unknown_id(tokenizer)
    assert masked.target_ids(["b", "a"], tokenizer, unknown).tolist() == [2, 3]
    with pytest.raises(InputError, match="becomes the unknown token"):
        masked.target_ids(["\u4fe1"], tokenizer, unknown)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda m: m.fill_mask(["a [MASK]", "a film"]), r"texts: got no \[MASK\] at index 1; accepted are texts with"),
        (lambda m: m.fill_mask("film " * 70 + "[MASK]"), r"no \[MASK\] at index 0 in the 64 tokens that are read"),
        (lambda m: m.fill_mask("[MASK]", targets=["goodfilm"]), "targets: got 'goodfilm', which becomes 4 tokens"),
        (lambda m: m.fill_mask("[MASK]", targets=["\u2603"]), r"targets: got .*becomes the unknown token \(\[UNK\]\)"),
        (lambda m: m.fill_mask("[MASK]", targets=[3]), "targets: got int at index 0"),
        (lambda m: m.fill_mask("[MASK]", targets=["\ud800"]), "targets: got .*, which is not valid Unicode"),
        (lambda m: m.fill_mask("[MASK]", targets=[]), "targets: got none"),
        (lambda m: m.fill_mask("[MASK]", top_k=0), "top_k: got 0; accepted is an integer"),
        (lambda m: m(["a [MASK]"]), "a call is for .* has masked; type: .*fill_mask"),
        (lambda m: m.encode(["a [MASK]"]), "encode is for .* has masked; type: .*fill_mask"),
    ],
    ids=[
        "no mask",
        "mask cut off",
        "two tokens",
        "unknown",
        "no word",
        "no text",
        "no target",
        "top_k",
        "call",
        "encode",
    ],
)
def test_what_is_refused(model, call, message):
    with pytest.raises(InputError, match=message):
        call(adtp_export.load(model[1]))


@pytest.mark.usefixtures("has_ray")
def test_ray_has_no_column(model):
    from adtp_export.integrations.ray.answering import Answering

    with pytest.raises(
        InputError, match="fills in masked tokens, and there is no column for that; type: adtp-run OUT --file"
    ):
        Answering(adtp_export.load(model[1]), ScoringConfig(), 8, False)


def test_adtp_run(model, capsys):
    assert command(make_parser().parse_args([str(model[1]), TEXTS[0], "--top-k", "2", "--kept"])) == 0
    answer = json.loads(capsys.readouterr().out.splitlines()[-1])
    (expected,) = adtp_export.load(model[1]).fill_mask(TEXTS[0], top_k=2)
    assert answer["masks"] == expected.to_json()["masks"]
    assert answer["kept"] == [True] * len(answer["tokens"])
    with pytest.raises(InputError, match="--explain is for models with the head .* has masked; leave it out"):
        command(make_parser().parse_args([str(model[1]), TEXTS[0], "--explain", str(model[0])]))


def test_a_tokenizer_without_a_mask(model, tmp_path):
    directory = write_plain(tmp_path / "model", "open")
    edit_json(directory / "tokenizer_config.json", mask_token="[NONE]")
    with pytest.raises(InputError, match=r"mask_token '\[NONE\]', which is no token of the tokenizer"):
        adtp_export.export(directory, tmp_path / "out", head="masked")


@pytest.mark.parametrize("option", [{"packed_inputs": True}, {"triton": "repository"}, {"with_tokenizer": True}])
def test_forms_that_have_no_place_for_masks(model, tmp_path, option):
    with pytest.raises(InputError, match="masked tokens"):
        adtp_export.export(model[0], tmp_path / "out", head="masked", **option)
