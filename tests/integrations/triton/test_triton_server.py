"""A real Triton Inference Server answers from a repository that an export wrote."""

import json
import re
import shutil

import numpy as np
import pytest
from cpu_operators import mapped
from plain_models import TEXTS
from testbed import ROOT, relist

import adtp_export
from adtp_export.integrations.triton import repository as triton
from adtp_export.plugins import operators
from benchmarks.serving import triton_server

CLIENTS = 16
PLUGIN = "onnxruntime-cpu-fp32-plugin"
NO_BACKEND = r"unable to find backend library for backend '(onnxruntime|tensorrt)'"
LONGER = [" ".join(["a", *["good", "film", "and"] * 40][:i]) for i in range(1, 101)]
"""Texts of a hundred lengths, so that no batch of two is a rectangle."""


def without_unknown(out):
    """Give an export a tokenizer that refuses what its vocabulary has not."""
    tokenizer = json.loads((out / "tokenizer.json").read_text())
    tokenizer["model"]["unk_token"] = "[NOWHERE]"
    (out / "tokenizer.json").write_text(json.dumps(tokenizer))
    relist(out)


@pytest.fixture(scope="module")
def out(exported, tmp_path_factory):
    out = shutil.copytree(exported, tmp_path_factory.mktemp("triton") / "out")
    without_unknown(out)
    return out


@pytest.fixture(scope="module")
def server(has_triton, out, packed_export):
    """A server with the demo student, and with models whose backends are not in that server."""
    repository = out.parent / "models"
    triton.write(out, repository, "demo")
    ids = repository / "ids"
    shutil.copytree(packed_export / "repository" / "small-ids", ids)
    config = (ids / "config.pbtxt").read_text().replace('"small-ids"', '"ids"')
    (ids / "config.pbtxt").write_text(config)
    wrong = shutil.copytree(ids, repository / "wrong")
    (wrong / "config.pbtxt").write_text(config.replace('"ids"', '"wrong"').replace("_WITH_ZERO", "_WITH_ONE"))
    with triton_server.Server(repository) as server:
        yield server


def ask(server, model, columns, **options):
    return [answer for answer, _ in triton_server.ask(server.url, model, columns, CLIENTS, **options)]


def values(answer, name):
    return answer.as_numpy(name).ravel().tolist()


def expect(answer, expected, tolerance):
    """An answer of the server is what `load` says, but for what other batches round otherwise."""
    assert [label.decode() for label in values(answer, "label")] == [e.label for e in expected]
    scores = np.array([[*e.scores.values()] for e in expected])
    np.testing.assert_allclose(answer.as_numpy("scores"), scores, rtol=0, atol=tolerance)
    np.testing.assert_allclose(values(answer, "score"), scores.max(1), rtol=0, atol=tolerance)
    assert values(answer, "truncated") == [e.truncated for e in expected]


@pytest.fixture(scope="module")
def tolerance(out):
    """Logits of both sides are within the target's tolerance of fp64, and a probability moves by a quarter of what two logits do at
    most: 4 tolerances / 4. It is rounded to fp32."""
    deployment = adtp_export.load(out)
    return deployment.manifest.targets[deployment.target].parity.tolerance + 2.0**-24


def test_texts_of_all_lengths_share_batches_and_answers_are_those_of_load(server, out, tolerance):
    load = adtp_export.load(out)
    texts = [*LONGER, "word " * 300]
    assert len({len(p.row.input_ids) for p in load.placed(LONGER)}) == len(LONGER)
    before = triton_server.statistics(server.url, "demo")["executions"]
    answers = ask(server, "demo", [{"text": [text]} for text in texts])
    for answer, expected in zip(answers, load(texts), strict=True):
        expect(answer, [expected], tolerance)
    counted = triton_server.statistics(server.url, "demo")
    assert counted["executions"] - before < len(texts)
    assert max(counted["sizes"]) > 1


def test_a_model_answers_with_the_operators(has_triton, exported_by_default, tmp_path, monkeypatch):
    """Those that the server's processes find, too: of the package, or built here."""
    monkeypatch.delenv(operators.SWITCH)
    triton.write(exported_by_default, tmp_path / "models", "fast")
    config = tmp_path / "models" / "fast" / "config.pbtxt"
    given = 'key: "target", value { string_value: "'
    assert given in config.read_text()
    config.write_text(config.read_text().replace(given, f"{given}{PLUGIN}"))
    load = adtp_export.load(exported_by_default, PLUGIN)
    with triton_server.Server(tmp_path / "models") as server:
        answers = ask(server, "fast", [{"text": [text]} for text in LONGER[:20]])
        loaded = set().union(*map(mapped, server.processes))
    assert str(operators.library()) in loaded
    for answer, expected in zip(answers, load(LONGER[:20]), strict=True):
        expect(answer, [expected], load.manifest.targets[PLUGIN].parity.tolerance + 2.0**-24)


def test_a_request_may_hold_several_texts_or_pairs(server, out, tolerance):
    load = adtp_export.load(out)
    several, pair = ask(server, "demo", [{"text": LONGER[:3]}, {"text": ["a film"], "text_pair": ["the plot is thin"]}])
    expect(several, load(LONGER[:3]), tolerance)
    expect(pair, load([("a film", "the plot is thin")]), tolerance)


def test_bad_requests_are_answered_with_an_error_and_the_others_go_on(server, out, tolerance):
    load = adtp_export.load(out)
    good = [{"text": [text]} for text in LONGER[:30]]
    bad = [{"text": [b"caf\xe9"]}, {"text": ["fine", "\u6f22"]}]
    answers = ask(server, "demo", [*good[:15], *bad * 8, *good[15:]])
    refused = answers[15 : 15 + len(bad) * 8]
    for i, error in enumerate(refused):
        said = str(error)
        assert ("text: got bytes that are no UTF-8" if i % 2 == 0 else "the tokenizer cannot read a text") in said
    for answer, expected in zip([*answers[:15], *answers[-15:]], load(LONGER[:30]), strict=True):
        expect(answer, [expected], tolerance)


def test_only_the_outputs_that_are_asked_for_are_sent(server):
    (answer,) = ask(server, "demo", [{"text": ["fine"]}], outputs=["score"])
    assert [output["name"] for output in answer.get_response()["outputs"]] == ["score"]


def test_the_client_of_the_documents_gets_an_answer(server, capsys):
    text = (ROOT / "docs" / "serving.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    exec(block.replace("localhost:8000", server.url).replace('"reviews"', '"demo"'), {})
    label, score = capsys.readouterr().out.split()
    assert label == "positive"
    assert 0.5 < float(score) <= 1


def reasons(server):
    from tritonclient.http import InferenceServerClient

    with InferenceServerClient(server.url) as client:
        return {entry["name"]: entry.get("reason", "") for entry in client.get_model_repository_index()}


def test_the_server_reads_configurations_of_backends_that_it_has_not(server):
    """Which comes after it has read them: a planted mistake is told before."""
    found = reasons(server)
    assert re.search(NO_BACKEND, found["ids"])
    assert "wrong" not in found or not re.search(NO_BACKEND, found["wrong"])
    assert "BATCH_ACCUMULATED_ELEMENT_COUNT_WITH_ONE" in server.log


@pytest.fixture(scope="module")
def heads(has_triton, tmp_path_factory, tagger, answerer, embedder, reranker):
    """A server with a model of each head, and files for packed inputs of the two that answer for tokens."""
    repository = tmp_path_factory.mktemp("heads") / "models"
    for name, (_, out) in {"answers": answerer, "ranks": reranker}.items():
        triton.write(out, repository, name)
    for name, (model, _) in {"tags": tagger, "vectors": embedder}.items():
        out = repository.parent / name
        adtp_export.export(model, out, triton=repository, triton_name=name)
    with triton_server.Server(repository) as server:
        yield server


@pytest.mark.slow
def test_tags(heads, tagger):
    answers = ask(heads, "tags", [{"text": [text]} for text in TEXTS])
    expected = adtp_export.load(tagger[1])(TEXTS)
    assert sum(len(tagged.entities) for tagged in expected) > 5
    for answer, tagged in zip(answers, expected, strict=True):
        (entities,) = map(json.loads, values(answer, "entities"))
        for entity, wanted in zip(entities, tagged.entities, strict=True):
            assert {**entity, "score": 0} == {**vars(wanted), "score": 0}
            assert entity["score"] == pytest.approx(wanted.score, abs=1e-5)


@pytest.mark.slow
def test_spans(heads, answerer):
    pairs = [(question, f"{TEXTS[2]} {context}") for question in TEXTS[:2] for context in TEXTS]
    answers = ask(heads, "answers", [{"question": [q], "context": [c]} for q, c in pairs])
    for answer, wanted in zip(answers, adtp_export.load(answerer[1])(pairs), strict=True):
        assert values(answer, "answer") == [wanted.answer.encode()]
        assert values(answer, "start") + values(answer, "end") == [wanted.start, wanted.end]
        assert values(answer, "score") == pytest.approx([wanted.score], abs=1e-5)
        assert values(answer, "no_answer") == pytest.approx([wanted.no_answer], abs=1e-5)


@pytest.mark.slow
def test_vectors_and_prompts(heads, embedder):
    load = adtp_export.load(embedder[1])
    given = [{"text": [text]} for text in TEXTS]
    for prompt in (None, *load.prompts):
        answers = ask(heads, "vectors", given, parameters={"prompt_name": prompt} if prompt else None)
        found = np.concatenate([answer.as_numpy("sentence_embedding") for answer in answers])
        np.testing.assert_allclose(found, load.encode(TEXTS, prompt_name=prompt), rtol=0, atol=1e-5)
    (refused,) = ask(heads, "vectors", given[:1], parameters={"prompt_name": "shout"})
    assert "prompt_name: got 'shout'; accepted are" in str(refused)


@pytest.mark.slow
def test_a_reranker_has_the_score_of_rank(heads, reranker):
    pairs = [("which film", text) for text in TEXTS]
    answers = ask(heads, "ranks", [{"text": [a], "text_pair": [b]} for a, b in pairs])
    for answer, wanted in zip(answers, adtp_export.load(reranker[1])(pairs), strict=True):
        assert values(answer, "label") == [b"LABEL_0"]
        assert values(answer, "score") == pytest.approx([wanted.score], abs=1e-5)


@pytest.mark.slow
def test_the_server_reads_what_is_scattered_over_tokens(heads):
    found = reasons(heads)
    for name in ("tags-ids", "vectors-ids"):
        assert re.search(NO_BACKEND, found[name]), found[name]
