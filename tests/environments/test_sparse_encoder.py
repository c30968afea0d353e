"""`SparseEncoder` of sentence-transformers: what it saves is read, and what it answers is answered."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
from plain_models import TEXTS, export_unverified, write_plain
from test_sentence_transformers import TOLERANCE, environment, run  # noqa: F401 - a fixture

import adtp_export

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

FORMS = [(pooling, activation) for pooling in ("max", "sum") for activation in ("relu", "log1p_relu")]
MADE = """
import json, sys
from sentence_transformers import SparseEncoder
from sentence_transformers.sparse_encoder.modules import SpladePooling
folder, texts, found = sys.argv[1], json.loads(sys.argv[2]), []
for i, (pooling, activation) in enumerate(json.loads(sys.argv[3])):
    model = SparseEncoder(f"{folder}/plain", device="cpu", local_files_only=True, prompts={"query": "query : "}, max_active_dims=300)
    model[1] = SpladePooling(pooling, activation)
    model.save_pretrained(f"{folder}/{i}")
    model = SparseEncoder(f"{folder}/{i}", device="cpu", local_files_only=True)
    ask = {"convert_to_sparse_tensor": False}
    whole, best = (encode(texts, **ask).tolist() for encode in (model.encode_document, model.encode_query))
    found.append({"documents": whole, "queries": best, "tokens": model.decode(model.encode(texts[0]), top_k=5)})
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def made(environment, tmp_path_factory):  # noqa: F811
    """Directories that it saved, one for each form, and its answers."""
    folder = tmp_path_factory.mktemp("sparse")
    write_plain(folder / "plain", "open", initializer_range=0.2)
    found = run(environment, MADE, folder, json.dumps(TEXTS), json.dumps(FORMS))
    return [SimpleNamespace(directory=folder / str(i), **each) for i, each in enumerate(found)]


def dense(vectors, width=1238):
    found = np.zeros((len(vectors), width), np.float32)
    for row, vector in zip(found, vectors):
        row[vector.indices] = vector.values
    return found


@pytest.mark.parametrize("number", range(len(FORMS)), ids=map(str, FORMS))
def test_vectors_are_its_own(made, tmp_path, number):
    """A sum of weights has as many roundings as there are tokens."""
    own = made[number]
    model = adtp_export.load(export_unverified(own.directory, tmp_path / "out"))
    scale = max(1, np.abs(own.documents).max())
    for found, expected in (
        (model.encode_sparse_document(TEXTS), own.documents),
        (model.encode_sparse_query(TEXTS), own.queries),
    ):
        assert all(len(vector.indices) == 300 for vector in found)
        np.testing.assert_allclose(dense(found), expected, atol=TOLERANCE * scale)
    (vector,) = model.encode_sparse(TEXTS[0], max_active_dims=5)
    assert list(vector.tokens(model.tokenizer)) == [token for token, _ in own.tokens]
