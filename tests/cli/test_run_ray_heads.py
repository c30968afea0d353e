"""Tables of texts have the answers of `load`, for each head; what it prints, they have in columns."""

import pytest
from plain_models import TEXTS

import adtp_export
from adtp_export.errors import InputError
from adtp_export.integrations.ray.config import ScoringConfig

pytestmark = pytest.mark.usefixtures("has_ray")


def answered(out, columns, **asked):
    """Answer columns with two blocks of texts; return the rows, without what was kept."""
    import pyarrow

    from adtp_export.integrations.ray import answering

    model = answering.Answering(adtp_export.load(out), ScoringConfig(keep=["id"], **asked), 32, len(columns) == 2)
    table = pyarrow.table({"id": list(range(len(TEXTS))), **columns})
    found = model.table(table, list(columns), "x.parquet")
    empty = model.table(table.slice(0, 0), list(columns), "x.parquet")
    assert found.schema == empty.schema
    assert found.column_names == ["id", *model.names()]
    assert found.column("id").to_pylist() == table.column("id").to_pylist()
    return found.drop_columns(["id"]).to_pylist()


@pytest.fixture
def small_blocks(monkeypatch):
    from adtp_export.integrations.ray import answering

    monkeypatch.setattr(answering, "MAX_ROWS", 3)
    monkeypatch.setattr(answering, "MAX_CHARACTERS", 60)


def near(expected):
    """Numbers up to rounding: batches are others in blocks."""
    if isinstance(expected, dict):
        return {name: near(value) for name, value in expected.items()}
    if isinstance(expected, list):
        return [near(value) for value in expected]
    return pytest.approx(expected, abs=1e-5) if isinstance(expected, float) else expected


def test_entities(tagger, small_blocks):
    expected = adtp_export.load(tagger[1])(TEXTS, aggregation="first")
    assert answered(tagger[1], {"text": TEXTS}, aggregation="first") == near([a.to_json() for a in expected])


@pytest.mark.slow
def test_questions(answerer, small_blocks):
    asked = {"top_k": 2, "windows": {"max_tokens": 24, "stride": 3}}
    expected = adtp_export.load(answerer[1])([("who ?", text) for text in TEXTS], **asked)
    columns = {"question": ["who ?"] * len(TEXTS), "context": TEXTS}
    assert answered(answerer[1], columns, **asked) == near([answer.to_json() for answer in expected])


@pytest.mark.slow
def test_vectors(embedder, small_blocks):
    expected = adtp_export.load(embedder[1]).encode(TEXTS)
    assert answered(embedder[1], {"text": TEXTS}) == near([{"vector": vector.tolist()} for vector in expected])


def test_what_is_kept(embedder):
    import pyarrow

    from adtp_export.integrations.ray import answering

    table = pyarrow.table({"id": [1, 2], "text": TEXTS[:2]}).replace_schema_metadata({"pandas": "{}"})
    load = adtp_export.load(embedder[1])
    for keep, names in ((None, ["id", "text"]), (["text", "id", "text"], ["text", "id"]), ([], [])):
        found = answering.Answering(load, ScoringConfig(keep=keep), 32, False).table(table, ["text"], "x.parquet")
        assert (found.column_names, found.num_rows, found.schema.metadata) == ([*names, "vector"], 2, None)


def test_values_and_pairs(reranker, small_blocks):
    expected = adtp_export.load(reranker[1])([("a film", text) for text in TEXTS])
    found = answered(reranker[1], {"first": ["a film"] * len(TEXTS), "second": TEXTS}, prefix="a_")
    assert [row["a_score"] for row in found] == near([answer.score for answer in expected])
    assert {row["a_label"] for row in found} == {"LABEL_0"}


def test_what_is_about_other_heads_is_refused(reranker, answerer):
    for out, columns, asked in (
        (reranker[1], ["text"], {"aggregation": "first"}),
        (reranker[1], ["text"], {"prompt_name": "query"}),
        (answerer[1], ["text"], {}),
    ):
        with pytest.raises(InputError):
            answered(out, dict.fromkeys(columns, TEXTS), **asked)


def test_a_row_without_a_text_is_named(exported):
    import pyarrow

    text = pyarrow.array(["a", None, "b"])
    broken = pyarrow.StringArray.from_buffers(
        1, pyarrow.array([0, 1], pyarrow.int32()).buffers()[1], pyarrow.py_buffer(b"\xff")
    )
    from adtp_export.integrations.ray import answering

    model = answering.Answering(adtp_export.load(exported), ScoringConfig(), 32, False)
    with pytest.raises(InputError, match=r"x\.parquet: row 102 has no text in 'text'"):
        model.table(pyarrow.table({"text": text}), ["text"], "x.parquet", 100)
    with pytest.raises(InputError, match=r"x\.parquet: column 'text' is not UTF-8 text"):
        model.table(pyarrow.table({"text": broken}), ["text"], "x.parquet", 100)
