"""What is put before texts whose vectors are asked for: by a name, by a text, or as sentence-transformers does for queries."""

import json

import numpy as np
import pytest
from plain_models import TEXTS, export_unverified, write_json, write_sentence_transformer

import adtp_export
from adtp_export.cli.run import command, make_parser
from adtp_export.errors import InputError

PROMPTS = {"query": "query : ", "corpus": "text : ", "passage": "passage of a film : "}


@pytest.fixture(scope="module")
def prompted(tmp_path_factory):
    folder = tmp_path_factory.mktemp("prompted")
    model = write_sentence_transformer(folder / "model")
    write_json(model / "config_sentence_transformers.json", {"prompts": PROMPTS, "default_prompt_name": "corpus"})
    return export_unverified(model, folder / "out")


@pytest.mark.parametrize(
    ("method", "given", "before"),
    [
        ("encode", {}, PROMPTS["corpus"]),
        ("encode", {"prompt_name": "passage"}, PROMPTS["passage"]),
        ("encode", {"prompt": "a film : "}, "a film : "),
        ("encode_query", {}, PROMPTS["query"]),
        ("encode_query", {"prompt_name": "passage"}, PROMPTS["passage"]),
        ("encode_query", {"prompt": ""}, ""),
        ("encode_document", {}, ""),  # sentence-transformers takes its own empty "document" before a "passage"
        ("encode_document", {"prompt_name": "passage"}, PROMPTS["passage"]),
        ("encode_document", {"prompt": "a film : "}, "a film : "),
    ],
    ids=str,
)
def test_each_text_has_its_prompt(prompted, method, given, before):
    load = adtp_export.load(prompted)
    wanted = load.encode([before + text for text in TEXTS], prompt="")
    np.testing.assert_array_equal(getattr(load, method)(TEXTS, **given), wanted)
    assert before == "" or not np.allclose(wanted, load.encode(TEXTS, prompt=""), atol=1e-3)


def test_tokens_show_the_prompt(prompted):
    load = adtp_export.load(prompted)
    (whole,) = load.kept("query : ok", prompt="")
    assert load.kept("ok", prompt_name="query") == load.kept("ok", prompt="query : ") == [whole]
    assert [whole] != load.kept("ok", prompt="")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"prompt_name": "qeury"},
            "prompt_name: got 'qeury'; accepted are query, corpus, passage.* did you mean 'query'",
        ),
        ({"prompt": 1}, "prompt: got int; accepted is a string"),
        ({"prompt": "a : ", "prompt_name": "query"}, "give a text or a name, not both"),
    ],
)
def test_bad_prompts(prompted, given, message):
    with pytest.raises(InputError, match=message):
        adtp_export.load(prompted).encode_query("ok", **given)


def test_the_command_takes_a_name_or_a_text(prompted, capsys):
    load = adtp_export.load(prompted)
    for typed, before in ((["--prompt-name", "query"], PROMPTS["query"]), (["--prompt", "a : "], "a : ")):
        assert command(make_parser().parse_args([str(prompted), "--text", "ok", *typed])) == 0
        found = json.loads(capsys.readouterr().out)["vector"]
        np.testing.assert_allclose(found, load.encode(before + "ok", prompt="")[0], atol=1e-6)


def test_the_first_numbers_of_a_vector(prompted, capsys):
    load = adtp_export.load(prompted)
    whole = load.encode(TEXTS)
    for method, given in (("encode", {}), ("encode_query", {}), ("encode_document", {"prompt_name": "passage"})):
        found, expected = (getattr(load, method)(TEXTS, **given, **cut) for cut in ({"truncate_dim": 4}, {}))
        np.testing.assert_array_equal(found, expected[:, :4])
    assert command(make_parser().parse_args([str(prompted), "--text", TEXTS[0], "--truncate-dim", "4"])) == 0
    np.testing.assert_allclose(json.loads(capsys.readouterr().out)["vector"], whole[0, :4], atol=1e-6)
    for wrong in (0, whole.shape[1] + 1, 2.0):
        with pytest.raises(InputError, match="truncate_dim: got .*; accepted is an integer from 1 to 6"):
            load.encode(TEXTS, truncate_dim=wrong)
