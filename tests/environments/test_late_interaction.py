"""`MultiVectorEncoder` of sentence-transformers, and PyLate, each in an environment of its own: their vectors are those of `load`."""

import json
import re

import numpy as np
import pytest
from late_models import EXPANSION, TEXTS, write_multi_vector, write_pylate, write_stanford
from plain_models import export_unverified
from test_sentence_transformers import PACKAGES, TOLERANCE, pip, run
from testbed import ROOT

import adtp_export

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

LONG = [*TEXTS, "", "word " * 80, "Hello, world! (yes); no."]
LOCAL = {"model_type": "modernbert", "local_attention": 60, "global_attn_every_n_layers": 2, "pad_token_id": 0}
LOCAL |= {"bos_token_id": 2, "eos_token_id": 3, "cls_token_id": 2, "sep_token_id": 3}
FEW = {**EXPANSION, "strategy": "min", "length": 10}
OLDER = [
    "pylate==1.6.0",
    "sentence-transformers==5.3.0",
    "transformers==5.3.0",
    "huggingface_hub<2",
    "tokenizers<0.23.1",
    "ujson",
]
"""PyLate wants an older sentence-transformers, and that an older transformers."""
REQUESTS = ["httpx", "httpcore", "h11", "anyio", "certifi", "idna", "typing_extensions"]
"""What that one's huggingface_hub wants."""
QDRANT = [
    "pydantic",
    "pydantic-core",
    "annotated-types",
    "typing-inspection",
    "portalocker",
    "protobuf",
    "grpcio",
    "urllib3",
]
QDRANT += ["h2", "hpack", "hyperframe"]


SENTENCE_TRANSFORMERS = """
import json, sys
from sentence_transformers import MultiVectorEncoder
model, texts = MultiVectorEncoder(sys.argv[1], device="cpu", local_files_only=True), json.load(open(sys.argv[2]))
sides = {side: getattr(model, f"encode_{side}")(texts, convert_to_numpy=True) for side in ("query", "document")}
scores = model.similarity(sides["query"], sides["document"])
print(json.dumps({"scores": scores.tolist(), **{side: [row.tolist() for row in rows] for side, rows in sides.items()}}))
"""
PYLATE = """
import json, sys
from pylate import models
model, texts = models.ColBERT(sys.argv[1], device="cpu", local_files_only=True), json.load(open(sys.argv[2]))
sides = {side: model.encode(texts, is_query=side == "query") for side in ("query", "document")}
print(json.dumps({side: [row.tolist() for row in rows] for side, rows in sides.items()}))
"""
LAYOUTS = {
    "stanford": write_stanford,
    "stanford, attended": lambda path: write_stanford(path, attend=True),
    "pylate, deep": lambda path: write_pylate(path, heads="deep"),
    "pylate, not filled up": lambda path: write_pylate(path, do_query_expansion=False, query_length=12),
    "pylate, local layers": lambda path: write_pylate(path, backbone=LOCAL),
}
OWN = {
    "own": write_multi_vector,
    "own, at least": lambda path: write_multi_vector(path, heads="deep", expansion=FEW),
    "own, not filled up": lambda path: write_multi_vector(
        path, expansion=None, mask={"skiplist_tasks": ["query", "document"]}
    ),
}


@pytest.fixture(scope="module")
def newest(tmp_path_factory):
    folder = tmp_path_factory.mktemp("newest")
    pip("install", "--target", folder, *PACKAGES)
    return folder


@pytest.fixture(scope="module")
def older(tmp_path_factory):
    folder = tmp_path_factory.mktemp("older")
    others = [name for name in PACKAGES if name not in ("sentence-transformers", "sentencepiece")]
    pip("install", "--target", folder, *OLDER, *others, *REQUESTS)
    return folder


def compare(environment, code, write, folder):
    model = write(folder / "model")
    (folder / "texts.json").write_text(json.dumps(LONG))
    late = adtp_export.load(export_unverified(model, folder / "out"))
    found = {"query": late.encode_query(LONG), "document": late.encode_document(LONG)}
    expected = run(environment, code, model, folder / "texts.json")
    for side, rows in found.items():
        assert [len(row) for row in rows] == [len(row) for row in expected[side]]
        for row, wanted in zip(rows, expected[side]):
            np.testing.assert_allclose(row, np.array(wanted), atol=TOLERANCE)
    if "scores" in expected:
        scores = adtp_export.maxsim(found["query"], found["document"])
        np.testing.assert_allclose(scores, expected["scores"], atol=max(map(len, found["query"])) * TOLERANCE)


@pytest.mark.parametrize("name", [*LAYOUTS, *OWN])
def test_sentence_transformers(newest, tmp_path, name):
    compare(newest, SENTENCE_TRANSFORMERS, {**LAYOUTS, **OWN}[name], tmp_path)


@pytest.mark.parametrize("name", LAYOUTS)
def test_pylate(older, tmp_path, name):
    compare(older, PYLATE, LAYOUTS[name], tmp_path)


def test_qdrant(tmp_path):
    """The recipe of the page. Its scores are those of `maxsim`."""
    folder = tmp_path / "packages"
    pip("install", "--target", folder, "qdrant-client", *REQUESTS, *QDRANT)
    write_pylate(tmp_path / "model")
    late = adtp_export.load(export_unverified(tmp_path / "model", tmp_path / "out"))
    section = (ROOT / "docs" / "rag.md").read_text().split("## Several vectors of each text")[1]
    code = re.findall(r"```python\n(.*?)```", section, re.DOTALL)[1].replace("COLBERT-export", str(tmp_path / "out"))
    told = "\nimport json\nprint(json.dumps([[each.id, each.score] for each in found]))"
    best = late.rank("films with a lighthouse", ["a ghost story at sea", "the soup was cold"])
    found = run(folder, code + told)
    assert [number for number, _ in found] == [each.index for each in best]
    np.testing.assert_allclose([score for _, score in found], [each.score for each in best], atol=24 * TOLERANCE)
