"""Rerankers that generate: their template, prompts, what is cut, and how each door of the package answers with them."""

import json

import numpy as np
import pytest
from plain_models import edit_json, export_unverified
from templated_models import write_reranker

import adtp_export
from adtp_export.cli.run import command, make_parser
from adtp_export.errors import InputError

DOCUMENTS = ["a ghost story at sea", "", "cold soup " * 60, "\u00dcn\u00ef \u6f22\u5b57"]


@pytest.fixture(scope="module")
def ranker(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranker")
    write_reranker(folder / "model")
    prompts = {"prompts": {"web": "search the web"}, "default_prompt_name": "web"}
    edit_json(folder / "model" / "config_sentence_transformers.json", **prompts)
    return export_unverified(folder / "model", folder / "out")


def test_scores_are_what_a_call_gives(ranker):
    load = adtp_export.load(ranker)
    found = load.rank("which film", DOCUMENTS)
    answers = load([("which film", text) for text in DOCUMENTS])
    scores = np.array([answer.score for answer in answers])
    assert [each.index for each in found] == np.argsort(-scores).tolist()
    np.testing.assert_allclose([each.score for each in found], np.sort(scores)[::-1], atol=1e-6)
    assert [answer.truncated for answer in answers] == [False, False, True, False]


def test_a_prompt_is_an_instruction(ranker):
    load = adtp_export.load(ranker)
    (usual,), (named,), (own,) = (
        load.rank("q", ["d"], **given) for given in ({}, {"prompt_name": "web"}, {"prompt": "find"})
    )
    assert usual == named != own
    (read,) = load.kept([("q", "d")], prompt="find")
    (placed,) = load.placed([("q", "d")], prompt="find")
    assert len(read.tokens) == len(placed.row.input_ids)
    assert "".join(read.tokens).count("<|im_start|>") == 3
    with pytest.raises(InputError, match="got single texts, for which the model's chat template has no place"):
        load("alone")
    with pytest.raises(InputError, match="zero_shot: the model has the labels"):
        load.zero_shot("a", ["b"])


def test_a_prompt_stands_before_the_query_where_there_is_no_template(reranker):
    load = adtp_export.load(reranker[1])
    assert load.rank("film", DOCUMENTS[:2], prompt="a : ") == load.rank("a : film", DOCUMENTS[:2])


def test_the_command_ranks(ranker, capsys):
    typed = [str(ranker), *DOCUMENTS[:2], "--query", "which film", "--prompt", "find"]
    assert command(make_parser().parse_args(typed)) == 0
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    expected = adtp_export.load(ranker).rank("which film", DOCUMENTS[:2], prompt="find")
    assert [line["index"] for line in found] == [each.index for each in expected]


@pytest.mark.usefixtures("has_ray")
def test_tables_of_pairs_have_the_model_s_default_prompt(ranker):
    import pyarrow

    from adtp_export.integrations.ray import answering
    from adtp_export.integrations.ray.config import ScoringConfig

    load = adtp_export.load(ranker)
    model = answering.Answering(load, ScoringConfig(), 32, pairs=True)
    table = pyarrow.table({"query": ["q"] * len(DOCUMENTS), "document": DOCUMENTS})
    found = model.table(table, ["query", "document"], "x.parquet").column("score").to_pylist()
    expected = [answer.score for answer in load([("q", text) for text in DOCUMENTS])]
    np.testing.assert_allclose(found, expected, atol=1e-5)
