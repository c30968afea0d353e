"""The recipes of docs/rag.md run as they are written, each in an environment of its own, and their vectors are those of `load`."""

import dataclasses
import subprocess

import numpy as np
import pytest
from plain_models import write_sentence_transformer

import adtp_export
from benchmarks.serving import rag

SHORT = ["a wonderful film", "the soup was terrible !", "ok", "na\u00efve caf\u00e9 \u6f22\u5b57 \U0001f389"]
LONG = ["many words of a long text " * 40, "Jane Austen wrote it , and nobody in London disagreed at all . " * 9]
"""More than the 20 tokens that the model reads."""
TOLERANCE = 1e-5
"""Of the elements of vectors of length 1: fp32 in other batches, and in three builds of ONNX Runtime."""
WITHOUT_END = "The pipeline of transformers.js"
"""It cuts long texts without their last token."""

QUERIES = {
    "LangChain": f"embeddings.embed_query({SHORT[0]!r})",
    "LlamaIndex": f"embedding.get_query_embedding({SHORT[0]!r})",
    "Chroma": f"collection._embedding_function.embed_query([{SHORT[0]!r}])[0]",
    "txtai": f"embeddings.transform({SHORT[0]!r})",
    "Haystack": f'AdtpTextEmbedder("MODEL-export").run({SHORT[0]!r})["embedding"]',
}
"""How a client embeds a query."""


@pytest.fixture(scope="module")
def exports(tmp_path_factory):
    """One model in both layouts, by the language that reads them."""
    folder = tmp_path_factory.mktemp("models")
    model = write_sentence_transformer(folder / "model", dense=False)
    for language, layout in (("python", "plain"), ("js", "hub")):
        adtp_export.export(model, folder / language, layout=layout, skip_parity_check=True)
    return folder


def test_the_page_has_a_recipe_for_each_client():
    assert set(rag.recipes()) == {
        "tokenizers and ONNX Runtime alone",
        "transformers.js",
        WITHOUT_END,
        "fastembed",
        "LangChain",
        "LlamaIndex",
        "Chroma",
        "txtai",
        "Haystack",
    }


def test_each_client_is_pinned():
    pinned = {line.partition("==")[0] for line in rag.CONSTRAINTS.read_text().splitlines() if "==" in line}
    asked = {package for recipe in rag.recipes().values() for package in recipe.packages}
    outer = {"tokenizers", "onnxruntime", "torch"}
    assert asked - outer == pinned - outer - {"qdrant-client"}  # which searches, and embeds nothing


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", rag.recipes())
def test_vectors_are_those_of_load(exports, tmp_path, name):
    recipe = rag.recipes()[name]
    if name in QUERIES:
        query = f"\nimport numpy\nnumpy.testing.assert_allclose({QUERIES[name]}, vectors[0], atol={TOLERANCE})\n"
        recipe = dataclasses.replace(recipe, code=recipe.code + query)
    try:
        program = rag.environment(recipe, tmp_path)
    except rag.NotInstalledError as error:
        pytest.skip(str(error))
    texts = SHORT if name == WITHOUT_END else SHORT + LONG
    out = exports / recipe.language
    assert [row.truncated for row in adtp_export.load(out).kept(SHORT + LONG)] == [False] * 4 + [True] * 2
    expected = adtp_export.load(out).encode(texts)
    np.testing.assert_allclose(rag.run(recipe, program, tmp_path, out, texts), expected, atol=TOLERANCE)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_qdrant_finds_what_has_the_largest_product(splade, tmp_path):
    section = rag.PAGE.read_text(encoding="utf-8").partition("## Sparse vectors")[2]
    code = section.partition("```python\n")[2].partition("```")[0]
    try:
        program = rag.environment(rag.Recipe(language="python", code=code, packages=("qdrant-client",)), tmp_path)
    except rag.NotInstalledError as error:
        pytest.skip(str(error))
    (tmp_path / "SPLADE-export").symlink_to(splade[1])
    result = subprocess.run([program, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    model, texts = adtp_export.load(splade[1]), ["a ghost story at sea", "cold soup"]
    (query,), rows = model.encode_sparse_query("films with a lighthouse"), model.encode_sparse_document(texts)
    weights = dict(zip(query.indices, query.values))
    scores = [sum(weights.get(i, 0) * value for i, value in zip(row.indices, row.values)) for row in rows]
    ranked = sorted(zip(scores, texts), reverse=True)
    found = [line.split(" ", 1) for line in result.stdout.splitlines()]
    assert [text for _, text in found] == [text for _, text in ranked]
    assert [score for score, _ in found] == [f"{round(float(score), 3)}" for score, _ in ranked]
