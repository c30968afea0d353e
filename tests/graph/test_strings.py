"""Texts in: the tokenizer before the model reads every character as the tokenizer itself does, or is refused."""

import dataclasses
import json
import random
import subprocess
import sys

import numpy as np
import onnx
import pytest
from testbed import DEMO, write_plain_bert
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers

import adtp_export
from adtp_export.artifacts.records import Manifest
from adtp_export.contract import INPUTS, TEXT
from adtp_export.data.tokenize import encode, pad
from adtp_export.errors import InputError, VerificationError
from adtp_export.graph import strings
from adtp_export.model.checkpoint import load_checkpoint
from adtp_export.pipeline.export import capabilities, verify
from adtp_export.pipeline.export.context import ExportContext
from adtp_export.pipeline.progress import Steps
from adtp_export.runtimes.onnxruntime import OnnxRuntimeEngine
from adtp_export.verify.samples import HARD

MOST = 64


@pytest.fixture(scope="module", autouse=True)
def _extensions():
    pytest.importorskip("onnxruntime_extensions", reason="onnxruntime-extensions is not installed")


@pytest.fixture(scope="module", autouse=True)
def _asked_once():
    """Asking about every character takes most of a test's time: it is done once for each normalizer."""
    ask, known = strings._characters, {}

    def asked(tokenizer, kept):
        key = repr(tokenizer.normalizer), kept
        if key not in known:
            known[key] = ask(tokenizer, kept)
        return known[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(strings, "_characters", asked)
        yield


@pytest.fixture
def tokenizer():
    return Tokenizer.from_file(str(DEMO / "tokenizer.json"))


def opened(tokenizer, folder, max_tokens=MOST):
    onnx.save(strings.tokenizing(tokenizer, max_tokens, INPUTS), folder / "tokenizer.onnx")
    return OnnxRuntimeEngine(folder / "tokenizer.onnx", extensions=True)


def differing(tokenizer, engine, texts, max_tokens=MOST):
    """The texts that the two read differently, in batches of several."""
    found = []
    for i in range(0, len(texts), 16):
        part = texts[i : i + 16]
        expected = pad(encode(tokenizer, part, max_tokens), 0, INPUTS)
        read = engine.run({TEXT: np.array(part, dtype=object)})
        assert all(read[name].dtype == np.int64 for name in INPUTS)
        found += [t for j, t in enumerate(part) if any(not np.array_equal(read[n][j], expected[n][j]) for n in INPUTS)]
    return found


CHARACTERS = (*range(1, 0xD800), *range(0xE000, 0x110000))
"""All of Unicode but U+0000, where ONNX Runtime ends a text."""


def drawn(count, seed=0):
    """Texts that have so many characters once, in any order."""
    characters = [chr(i) for i in random.Random(seed).sample(CHARACTERS, count)]
    return ["a".join(characters[i : i + 40]) for i in range(0, len(characters), 40)]


BERT = {"clean_text": True, "handle_chinese_chars": True, "strip_accents": None, "lowercase": True}


@pytest.mark.parametrize(
    "settings", [{}, {"lowercase": False, "strip_accents": True, "handle_chinese_chars": False}], ids=str
)
def test_every_kind_of_character_is_read_as_by_the_tokenizer(tokenizer, tmp_path, settings):
    tokenizer.normalizer = normalizers.BertNormalizer(**{**BERT, **settings})
    engine = opened(tokenizer, tmp_path)
    assert differing(tokenizer, engine, [*HARD, *drawn(60_000, seed=len(settings))]) == []


@pytest.mark.slow
def test_every_character_of_unicode_is_read_as_by_the_tokenizer(tokenizer, tmp_path):
    assert differing(tokenizer, opened(tokenizer, tmp_path), drawn(len(CHARACTERS))) == []


def test_words_of_a_vocabulary_are_read_in_any_mixture(tokenizer, tmp_path):
    """Pieces, punctuation, added tokens and unknown letters side by side, where words begin and end by chance."""
    draw, vocabulary = random.Random(0), sorted(tokenizer.get_vocab())
    parts = [*vocabulary, *("\u0e2a\u0e27", "\u0301", ".", "\u200b", "\u6f22", "X", "[SEP]", "x" * 99)]
    texts = [
        "".join(draw.choice(parts) + draw.choice(["", "", " "]) for _ in range(draw.randrange(30))) for _ in range(800)
    ]
    assert differing(tokenizer, opened(tokenizer, tmp_path), texts) == []


@pytest.mark.parametrize("most", [2, 7])
def test_long_texts_are_cut_as_by_the_tokenizer(tokenizer, tmp_path, most):
    engine = opened(tokenizer, tmp_path, most)
    assert differing(tokenizer, engine, ["", "a", "a b c d e f", "very " * 50, "wonderfulness"], most) == []


def broken(name, tokenizer):
    if name == "model":
        return Tokenizer(models.BPE())
    if name == "normalizer":
        tokenizer.normalizer = normalizers.NFC()
    elif name == "cleaning":
        tokenizer.normalizer = normalizers.BertNormalizer(clean_text=False)
    elif name == "words":
        tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    else:
        tokenizer.add_tokens([AddedToken("film", lstrip=True)])
    return tokenizer


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("model", "its tokens are those of BPE, and WordPiece is what can be expressed"),
        ("normalizer", "its normalizer is NFC"),
        ("cleaning", "a BertNormalizer that cleans texts"),
        ("words", "it splits words by Whitespace"),
        ("added", "its added token 'film' looks at what is around it"),
    ],
)
def test_tokenizers_that_cannot_be_expressed_are_named(tokenizer, name, told):
    assert strings.obstacle(tokenizer) is None
    assert told in strings.obstacle(broken(name, tokenizer))


def test_many_added_tokens_take_no_characters_of_texts(tokenizer, tmp_path):
    """U+F900 lies behind the private characters that stand for them."""
    tokenizer.add_special_tokens([f"[unused{i}]" for i in range(300)])
    assert differing(tokenizer, opened(tokenizer, tmp_path), ["a \uf900 film", "[unused299] film[unused0]"]) == []
    tokenizer.add_special_tokens([f"[more{i}]" for i in range(6400)])
    assert "6705 added tokens, and up to 6400 can be expressed" in strings.obstacle(tokenizer)


def test_a_difference_is_told_with_its_text(tokenizer, tmp_path, monkeypatch):
    """A table that lacks one letter's accent."""
    true = strings._characters

    def forgetful(*given):
        seen = true(*given)
        return dataclasses.replace(seen, changed={c: text for c, text in seen.changed.items() if c != "\u00e9"})

    run = ExportContext(checkpoint=load_checkpoint(DEMO), work=tmp_path, profile={}, steps=Steps())
    verify.check_tokens(run, HARD, opened(tokenizer, tmp_path, run.checkpoint.max_tokens))
    monkeypatch.setattr(strings, "_characters", forgetful)
    with pytest.raises(
        VerificationError, match=r"the tokenizer reads 'accents: .* as \[2, .*\], and its form in ONNX as \[2, .*\]"
    ):
        verify.check_tokens(run, HARD, opened(tokenizer, tmp_path, run.checkpoint.max_tokens))


@pytest.mark.usefixtures("known_graphs")
def test_an_export_takes_texts(small, tmp_path):
    """The file answers as `load` does, which has a tokenizer of its own; the manifest says what it was compared on."""
    (tmp_path / "rows.txt").write_text("a wonderful film\nna\u00efve \u6f22\u5b57\n")
    options = {"with_tokenizer": True, "verify_data": tmp_path / "rows.txt", "layout": "hub"}
    manifest = adtp_export.export(small, tmp_path / "out", **options)
    assert isinstance(manifest, Manifest)
    assert [(note.about, note.text) for note in manifest.notes] == [
        (
            "onnx/model.strings.onnx",
            f"onnx/model.strings.onnx takes texts. Its tokens are those of the tokenizer on {len(HARD) + 2} texts, "
            f"{len(HARD)} of them hard ones",
        )
    ]
    engine = OnnxRuntimeEngine(tmp_path / "out" / "onnx" / "model.strings.onnx", extensions=True)
    assert engine.inputs == (TEXT,)
    logits = engine.run({TEXT: np.array(HARD, dtype=object)})["logits"].astype(np.float64)
    found = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    expected = [list(answer.scores.values()) for answer in adtp_export.load(tmp_path / "out")(HARD)]
    np.testing.assert_allclose(found, expected, atol=1e-6)  # batches of other shapes round otherwise
    assert shapes_of_no_texts(tmp_path / "out" / "onnx" / "model.strings.onnx") == {"logits": [0, 2]}


def shapes_of_no_texts(file):
    """What a file answers to no texts, in a process of its own: an operator that ends the process would end the tests."""
    code = """
import json, sys, pathlib
import numpy
from adtp_export.runtimes.onnxruntime import OnnxRuntimeEngine
engine = OnnxRuntimeEngine(pathlib.Path(sys.argv[1]), extensions=True)
print(json.dumps({name: value.shape for name, value in engine.run({"text": numpy.array([], dtype=object)}).items()}))
"""
    done = subprocess.run([sys.executable, "-c", code, str(file)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_the_same_tokenizer_is_the_same_bytes():
    written = [
        strings.tokenizing(Tokenizer.from_file(str(DEMO / "tokenizer.json")), MOST, INPUTS).SerializeToString()
        for _ in range(2)
    ]
    assert written[0] == written[1]


def test_what_cannot_be_is_refused_before_the_export(demo, tmp_path):
    directory = write_plain_bert(demo, tmp_path / "model")
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(directory / "tokenizer.json"))
    with pytest.raises(
        InputError, match="--with-tokenizer: the tokenizer cannot be expressed in ONNX: it splits words by Whitespace"
    ):
        adtp_export.export(directory, tmp_path / "out", with_tokenizer=True)
    assert not (tmp_path / "out").exists()


def test_a_model_of_too_many_weights_is_refused_before_the_export(demo, tmp_path, monkeypatch):
    directory = write_plain_bert(demo, tmp_path / "model")
    stored = (directory / "model.safetensors").stat().st_size
    monkeypatch.setattr(capabilities, "INLINE_LIMIT_BYTES", stored // 2)
    with pytest.raises(
        InputError, match="--with-tokenizer: the model's weights take .* GB in fp32, and a file with its"
    ):
        adtp_export.export(directory, tmp_path / "out", with_tokenizer=True)
    assert not (tmp_path / "out").exists()
    weights = capabilities.fp32_bytes(load_checkpoint(directory).student)
    assert 0.9 * stored < weights < 1.1 * stored
