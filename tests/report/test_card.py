"""Model cards: the fields that the Hub reads, and how to run what is there."""

import dataclasses
import json

import pytest

from adtp_export.artifacts.records import Manifest
from adtp_export.report import card


@pytest.fixture(scope="module")
def manifest(packed_export):
    return Manifest.read(packed_export / "out")


@pytest.mark.parametrize(
    ("head", "config", "task", "use"),
    [
        ("tokens", {}, "token-classification", 'pipeline("token-classification", "a/b"'),
        ("spans", {}, "question-answering", 'model([("one text", "another")])'),
        ("embedding", {}, "sentence-similarity", 'SentenceTransformer("a/b", backend="onnx")'),
        ("sparse", {}, "feature-extraction", 'model.encode_sparse(["a text"])'),
        ("masked", {}, "fill-mask", 'model.fill_mask(["a [MASK] text"])'),
        ("vectors", {}, "feature-extraction", 'model.encode_document(["a text"])'),
        ("hybrid", {}, "feature-extraction", 'model.encode_hybrid(["a text"])'),
        (
            "sequence",
            {"sentence_transformers": {"version": "5"}},
            "text-ranking",
            'model.rank("a query", ["one text", "another"])',
        ),
        ("sequence", {"id2label": {"0": "ENTAILMENT", "1": "other"}}, "zero-shot-classification", "model.zero_shot("),
    ],
)
def test_cards_of_other_heads(manifest, tmp_path, head, config, task, use):
    manifest = dataclasses.replace(manifest, checkpoint={**manifest.checkpoint, "head": head, "prune_sites": []})
    (tmp_path / "config.json").write_text(json.dumps({"_name_or_path": "somebody/named"}))
    fields = card.metadata(manifest, tmp_path, config, None)
    assert fields["pipeline_tag"] == task
    assert (fields["base_model"], fields["tags"]) == ("somebody/named", ["onnx", "adtp-export"])
    text = card.render(manifest, fields, "a/b")
    assert use in text
    assert "# license: name that of your weights" in text


@pytest.mark.parametrize(("backbone", "library"), [("qwen2", "adtp-export"), ("eurobert", "transformers.js")])
def test_a_classifier_of_a_family_that_transformers_js_does_not_have(manifest, tmp_path, backbone, library):
    manifest = dataclasses.replace(manifest, checkpoint={**manifest.checkpoint, "backbone": backbone})
    fields = card.metadata(manifest, tmp_path, {}, None)
    assert fields["library_name"] == library
    assert ("```js" in card.render(manifest, fields, "a/b")) == (library == "transformers.js")


OWN = "license: other\nlicense_name: open\nlicense_link: {}\nbase_model: a/b\n"


@pytest.mark.parametrize(
    ("checkpoint", "replaced", "expected"),
    [
        ("license: apache-2.0\n", None, {"license": "apache-2.0"}),
        (
            OWN.format("https://x.org/l"),
            "language: en\n",
            {"license": "other", "license_name": "open", "license_link": "https://x.org/l"},
        ),
        (OWN.format("LICENSE"), None, {"license": "other", "license_name": "open"}),  # the export has no such file
        (OWN.format("https://x.org/l"), "license: mit\n", {"license": "mit"}),
        ("license:\nbase_model: a/b\n", None, {}),
        ("language: en\n", None, {}),
    ],
)
def test_a_card_has_the_licence_of_its_checkpoint_and_none_that_nobody_gave(
    manifest, tmp_path, checkpoint, replaced, expected
):
    for name, text in (("README.md", checkpoint), ("replaced.md", replaced)):
        (tmp_path / name).write_text(f"---\n{text}---\nwords\n")
    fields = card.metadata(manifest, tmp_path, {}, tmp_path / "replaced.md" if replaced else None)
    assert {name: value for name, value in fields.items() if name.startswith("license")} == expected
    assert ("# license: name that of your weights" in card.render(manifest, fields, "a/b")) == (not expected)
    assert fields.get("base_model") == ("a/b" if "a/b" in checkpoint else None)


def test_what_a_card_cannot_take_is_left_out(manifest, tmp_path):
    (tmp_path / "README.md").write_text("---\nlicense: [\n---\n")
    (tmp_path / "config.json").write_text(json.dumps({"_name_or_path": "./model"}))
    fields = card.metadata(manifest, tmp_path, {}, tmp_path / "README.md")
    assert fields.keys() == {"pipeline_tag", "library_name", "tags"}
