"""Several vectors of each text from an export: as transformers, PyLate and FlagEmbedding compute them, scored, printed, and refused."""

import json
import re

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from known_graphs import taking_known_graphs
from late_models import TEXTS, write_bge_m3, write_multi_vector, write_pylate, write_stanford
from plain_models import export_unverified
from safetensors.torch import load_file
from testbed import ROOT
from tokenizers import Tokenizer
from transformers import AutoModel

import adtp_export
from adtp_export import maxsim
from adtp_export.cli.run import command, make_parser
from adtp_export.errors import InputError
from adtp_export.inference.answers import vectors
from adtp_export.integrations.ray.config import ScoringConfig
from adtp_export.verify.oracle import MULTIPLE

LONG = [*TEXTS, "", "word " * 80, "Hello, world! (yes); no."]
WRITERS = {"stanford": write_stanford, "pylate": write_pylate, "multi-vector": write_multi_vector}
LENGTHS = {"query": 24, "document": 40}


@pytest.fixture(scope="module")
def exports(tmp_path_factory):
    """The directory and its export, by the layout's name; made when asked for."""
    folder, made = tmp_path_factory.mktemp("late"), {}

    def get(name):
        if name not in made:
            model = {**WRITERS, "bge-m3": write_bge_m3}[name](folder / name)
            out = folder / f"{name}-out"
            with taking_known_graphs():  # those of three layouts are one
                adtp_export.export(model, out, skip_parity_check=True, allow_pickle=name == "bge-m3")
            made[name] = (model, adtp_export.load(out))
        return made[name]

    return get


def error_of(run):
    """Run something in fp64, and return how far fp32 is off: as far as `verify` lets a target be."""
    exact, single = run(torch.float64), run(torch.float32)
    off = max(float((a - b.double()).abs().max()) for a, b in zip(exact, single))
    largest = max(float(a.abs().max()) for a in exact)
    return exact, MULTIPLE * max(off, largest * torch.finfo(torch.float32).eps)


def read_as_pylate(directory, texts, side):
    """Ids and masks, written once more from PyLate's definition: cut, the marker behind the first token, filled up without attention."""
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    tokenizer.enable_truncation(LENGTHS[side] - 1)
    marker = {"query": 1238, "document": 1239}[side]
    rows = [[ids[0], marker, *ids[1:]] for ids in (tokenizer.encode(text).ids for text in texts)]
    filled = [row + [4] * (LENGTHS[side] - len(row)) if side == "query" else row for row in rows]
    return filled, [len(row) for row in rows]


@pytest.mark.parametrize("layout", WRITERS)
@pytest.mark.parametrize("side", LENGTHS)
def test_vectors_are_those_of_transformers(exports, layout, side):
    directory, model = exports(layout)
    filled, live = read_as_pylate(directory, LONG, side)
    folder = directory if layout == "stanford" else directory / "1_Dense"
    projection = load_file(folder / "model.safetensors")["linear.weight"]
    skipped = [tokenizer_id(directory, word) for word in ("!", ",", ".", "(", ")", ";", "?")][
        : 6 if layout != "stanford" else 7
    ]

    def run(dtype):
        bert = AutoModel.from_pretrained(directory, dtype=dtype).eval()
        found = []
        for ids, n in zip(filled, live):
            mask = torch.tensor([[1] * n + [0] * (len(ids) - n)])
            with torch.no_grad():
                states = bert(torch.tensor([ids]), attention_mask=mask).last_hidden_state[0]
            unit = torch.nn.functional.normalize(states @ projection.to(dtype).T, dim=1)
            stays = [side == "query" or i not in skipped for i in ids]
            found.append(unit[torch.tensor(stays)])
        return found

    expected, bound = error_of(run)
    answered = getattr(model, f"encode_{side}")(LONG)
    assert [each.shape for each in answered] == [tuple(each.shape) for each in expected]
    for found, wanted in zip(answered, expected):
        assert found.dtype == np.float32
        assert np.abs(found - wanted.numpy()).max() <= bound


def tokenizer_id(directory, word):
    return Tokenizer.from_file(str(directory / "tokenizer.json")).token_to_id(word)


def test_ranking_is_by_the_sum_of_maxima(exports):
    _, model = exports("pylate")
    query, documents = model.encode_query(TEXTS[0]), model.encode_document(TEXTS)
    scores = [(query[0] @ document.T).max(1).sum() for document in documents]
    ranked = model.rank(TEXTS[0], TEXTS, top_k=3)
    assert [each.index for each in ranked] == np.argsort(scores)[::-1][:3].tolist()
    np.testing.assert_allclose([each.score for each in ranked], sorted(scores, reverse=True)[:3], rtol=1e-6)
    assert [each.text for each in ranked] == [TEXTS[each.index] for each in ranked]
    assert model.encode_query([]) == []


def test_three_answers_of_one_run_are_flag_embeddings(exports):
    """Its arithmetic, written once more: `M3Embedder` 1.4."""
    directory, model = exports("bge-m3")
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    tokenizer.enable_truncation(60)
    rows = [tokenizer.encode(text).ids for text in LONG]
    heads = {name: torch.load(directory / f"{name}_linear.pt", weights_only=True) for name in ("colbert", "sparse")}

    def run(dtype):
        encoder = AutoModel.from_pretrained(directory, dtype=dtype).eval()
        found = []
        for ids in rows:
            with torch.no_grad():
                states = encoder(torch.tensor([ids]), attention_mask=torch.ones(1, len(ids))).last_hidden_state[0]
            colbert, sparse = (states @ heads[n]["weight"].to(dtype).T + heads[n]["bias"].to(dtype) for n in heads)
            found += [
                torch.nn.functional.normalize(states[:1], dim=1),
                torch.nn.functional.normalize(colbert[1:], dim=1),
                sparse.relu(),
            ]
        return found

    expected, bound = error_of(run)
    found = model.encode_hybrid(LONG)
    assert found.dense.shape == (len(LONG), 32)
    for i, ids in enumerate(rows):
        dense, colbert, weights = expected[3 * i : 3 * i + 3]
        assert np.abs(found.dense[i] - dense.numpy()).max() <= bound
        assert np.abs(found.vectors[i] - colbert.numpy()).max() <= bound
        lexical: dict[int, float] = {}
        for number, weight in zip(ids, weights[:, 0].tolist()):
            if number not in (0, 1, 2) and weight > lexical.get(number, 0):
                lexical[number] = weight
        sure = {number for number, weight in lexical.items() if weight > bound}
        assert sure <= set(found.sparse[i].indices.tolist()) <= set(lexical)
        for number, value in zip(found.sparse[i].indices.tolist(), found.sparse[i].values.tolist()):
            assert abs(value - lexical[number]) <= bound
        assert (np.diff(found.sparse[i].indices) > 0).all()
    assert np.array_equal(model.encode(LONG), found.dense)
    assert np.array_equal(model.encode_hybrid(LONG, truncate_dim=5).dense, found.dense[:, :5])
    assert [each.values.tolist() for each in model.encode_sparse(LONG)] == [
        each.values.tolist() for each in found.sparse
    ]


def test_kept_tokens_are_those_of_documents(exports):
    """Markers of sentence-transformers' own class are prompts, and PyLate's are tokens."""
    for layout, marker in (("pylate", "[D] "), ("multi-vector", "[D]")):
        _, model = exports(layout)
        read = model.kept(TEXTS)
        assert [each.tokens[:2] for each in read] == [["[CLS]", marker]] * len(TEXTS)
        assert [placed.row.input_ids[1] for placed in model.placed(TEXTS)] == [1239] * len(TEXTS)


def test_dropped_tokens_have_no_vector(tmp_path):
    from plain_models import write_pruned
    from testbed import HEAD_FIELDS

    write_pruned(tmp_path / "model", "vectors", **HEAD_FIELDS["vectors"])
    model = adtp_export.load(export_unverified(tmp_path / "model", tmp_path / "out"))
    kept = model.kept(TEXTS)
    counts = [sum(each.kept) for each in kept]
    assert [len(found) for found in model.encode_document(TEXTS)] == counts
    assert sum(counts) < sum(len(each.tokens) for each in kept)


def arrays(counts, seed):
    generator = np.random.default_rng(seed)
    return [generator.standard_normal((n, 4)).astype(np.float32) for n in counts]


@given(st.lists(st.integers(0, 6), max_size=6), st.lists(st.integers(0, 6), max_size=9), st.integers(1, 40))
@settings(max_examples=60, deadline=None)
def test_scores_are_the_definition_whatever_the_blocks(query_counts, document_counts, most):
    queries, documents = arrays(query_counts, 1), arrays(document_counts, 2)
    expected = [
        [
            -np.inf
            if not len(d)
            else sum(max(float(np.dot(row, other)) for other in d.astype(np.float64)) for row in q)
            for d in documents
        ]
        for q in queries
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(vectors, "MAX_SCORES", most)
        found = maxsim(queries, documents)
    assert found.shape == (len(queries), len(documents))
    if found.size:
        sums = 6 * 4 * 4 * 16  # products of a score, each of two numbers below 4 or so
        np.testing.assert_allclose(found, expected, atol=sums * np.finfo(np.float32).eps)


def test_one_array_is_one_text():
    assert maxsim(np.eye(2, dtype=np.float32), [np.eye(2, dtype=np.float32)] * 3).tolist() == [[2.0] * 3]


@pytest.mark.parametrize(
    ("documents", "told"),
    [
        ([np.ones((2, 3), np.float32)], "vectors of 2, 3 numbers"),
        ([np.ones(2, np.float32)], r"got float32 \(2,\) at index 0 of documents"),
        (["a text"], "got str at index 0 of documents"),
        ([np.ones((1, 2), int)], "got int64"),
    ],
)
def test_what_is_no_list_of_vectors_is_refused(documents, told):
    with pytest.raises(InputError, match=told):
        maxsim([np.ones((1, 2), np.float32)], documents)


def test_what_wants_one_vector_is_refused(exports):
    _, model = exports("pylate")
    for call, told in (
        (lambda: model.encode(TEXTS), r"encode is for models with the head embedding or hybrid.*encode_query"),
        (lambda: model(TEXTS), "a call is for models with the head"),
        (lambda: model.encode_hybrid(TEXTS), "encode_hybrid is for models with the head hybrid"),
        (lambda: model.encode_query(TEXTS, truncate_dim=3), "a vector for each token is taken whole"),
        (lambda: model.encode_document([("a", "b")]), "got a pair at index 0"),
        (lambda: model.rank(["a"], TEXTS), "query: got list"),
    ):
        with pytest.raises(InputError, match=told):
            call()
    _, hybrid = exports("bge-m3")
    with pytest.raises(InputError, match="rank is for models with the head sequence or vectors"):
        hybrid.rank("a", TEXTS)
    with pytest.raises(InputError, match="truncate_dim: got 33; accepted is an integer from 1 to 32"):
        hybrid.encode_hybrid(TEXTS, truncate_dim=33)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"packed_inputs": True}, "--packed-inputs: the model fills queries up"),
        ({"static_tokens": "512"}, "--static-tokens: the model fills queries up"),
        ({"triton": "repository"}, "--triton: the model gives several vectors"),
        ({"with_tokenizer": True}, "--with-tokenizer: the model tells queries from documents"),
        ({"verify_data": "x.jsonl", "label_column": "y"}, "--label-column: the model gives a vector for each token"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_forms_without_a_place_for_them_are_refused(exports, tmp_path, monkeypatch, options, told):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x.jsonl").write_text(json.dumps({"text": "a", "y": 1}))
    directory, _ = exports("pylate")
    with pytest.raises(InputError, match=told):
        adtp_export.export(directory, tmp_path / "out", **options)


def test_what_the_command_prints(exports, capsys):
    _, model = exports("pylate")
    (line,) = printed(capsys, model.directory, "--text", TEXTS[1])
    assert line == {"text": TEXTS[1], "vectors": model.encode_document(TEXTS[1])[0].tolist()}
    (best,) = printed(capsys, model.directory, "--query", TEXTS[0], "--top-k", "1", "--text", TEXTS[0])
    assert best == {"text": TEXTS[0], "score": model.rank(TEXTS[0], TEXTS[:1])[0].score, "index": 0}
    _, hybrid = exports("bge-m3")
    (line,) = printed(capsys, hybrid.directory, "--text", TEXTS[1], "--truncate-dim", "5")
    (dense,), (sparse,), (vectors,) = hybrid.encode_hybrid(TEXTS[1], truncate_dim=5)
    assert line == {
        "text": TEXTS[1],
        "vector": dense.tolist(),
        "sparse": sparse.to_json(),
        "vectors": vectors.tolist(),
    }


@pytest.mark.usefixtures("has_ray")
def test_columns_of_a_table(exports):
    """What Ray's workers write: documents with a vector for each token, and all three answers of a hybrid model."""
    import pyarrow

    from adtp_export.integrations.ray.answering import Answering

    rows = pyarrow.table({"text": TEXTS})
    _, late = exports("pylate")
    found = Answering(late, ScoringConfig(), 2, False).table(rows, ["text"], "rows")
    for row, own in zip(found["vectors"].to_pylist(), late.encode_document(TEXTS), strict=True):
        assert np.array_equal(np.array(row, np.float32), own)
    _, three = exports("bge-m3")
    found = Answering(three, ScoringConfig(truncate_dim=5), 2, False).table(rows, ["text"], "rows").to_pylist()
    for row, dense, sparse, tokens in zip(
        found, *three.encode_hybrid(TEXTS, truncate_dim=5, batch_size=2), strict=True
    ):
        assert np.array_equal(np.array(row["vector"], np.float32), dense)
        assert {name: row[name] for name in ("indices", "values")} == sparse.to_json()
        assert np.array_equal(np.array(row["vectors"], np.float32), tokens)
    with pytest.raises(InputError, match="truncate_dim: is for models with the head embedding or hybrid"):
        Answering(late, ScoringConfig(truncate_dim=5), 2, False)


def printed(capsys, *arguments):
    capsys.readouterr()
    assert command(make_parser().parse_args([*map(str, arguments)])) == 0
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_the_page_s_recipes_run(exports):
    """As they are written, but for the names of directories."""
    _, late = exports("pylate")
    _, hybrid = exports("bge-m3")
    section = (ROOT / "docs" / "rag.md").read_text().split("## Several vectors of each text")[1]
    first, qdrant, three = re.findall(r"```python\n(.*?)```", section, re.DOTALL)[:3]
    assert "QdrantClient" in qdrant  # which environments/test_late_interaction.py runs
    found: dict = {}
    exec(first.replace("COLBERT-export", str(late.directory)), found)
    assert found["scores"].shape == (1, 2)
    assert [each.score for each in found["best"]] == sorted(found["scores"][0].tolist(), reverse=True)
    exec(three.replace("M3-export", str(hybrid.directory)), found)
    assert found["dense"].shape == (2, 32)
