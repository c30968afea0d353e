"""Settings and files of a tokenizer: which are followed, as transformers does, and which are told."""

import contextlib
import json
import shutil
import sys

import pytest
import torch
import transformers
from plain_models import edit_json, write_plain
from testbed import DEMO
from tokenizers import ByteLevelBPETokenizer, Tokenizer, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.processors import BertProcessing, RobertaProcessing, Sequence, TemplateProcessing
from transformers import CamembertConfig

import adtp_export
from adtp_export.data.tokenize import encode, pad
from adtp_export.errors import InputError, MissingDependencyError
from adtp_export.imports import open_checkpoint
from adtp_export.model.tokenizer import complete, load_tokenizer
from adtp_export.model.tokenizer_settings import ignored_settings
from adtp_export.training.models import load_tokenizer as load_for_training


@pytest.mark.parametrize(
    ("kind", "settings", "message"),
    [
        (
            "bert",
            {"tokenizer_class": "BertJapaneseTokenizer"},
            "vocab.txt is of BertJapaneseTokenizer; made of it here",
        ),
        ("bert", {"auto_map": {"AutoTokenizer": ["t.T"]}}, "it has code of its own, which is not run"),
        ("mpnet", {}, "vocab.txt is of MPNetTokenizer; .* Save a tokenizer.json"),
        ("bert", {"tokenizer_class": "BertTokenizerFast"}, None),
        ("roberta", {}, None),
        ("bert", {}, None),
    ],
)
def test_files_of_other_tokenizers_are_not_read_as_those_of_bert(tmp_path, kind, settings, message):
    shutil.copy(DEMO / "vocab.txt", tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    config = transformers.AutoConfig.for_model(kind, vocab_size=2000, pad_token_id=0)
    with contextlib.nullcontext() if message is None else pytest.raises(InputError, match=message):
        load_tokenizer(tmp_path, config)


def test_merges_of_qwen_are_not_read_as_those_of_roberta(tmp_path):
    (tmp_path / "merges.txt").write_text("")
    with pytest.raises(InputError, match="merges.txt is of Qwen2Tokenizer; made of it here"):
        load_tokenizer(tmp_path, transformers.Qwen2Config())


@pytest.mark.parametrize("whole", [True, False], ids=["tokenizer.json", "vocab.txt"])
@pytest.mark.parametrize("file", ["added_tokens.json", "tokenizer_config.json"])
def test_added_tokens_that_stand_beside_a_tokenizer_are_added(tmp_path, file, whole):
    shutil.copy(DEMO / ("tokenizer.json" if whole else "vocab.txt"), tmp_path)
    config = transformers.BertConfig(vocab_size=2000)
    free = load_tokenizer(tmp_path, config).get_vocab_size()

    def write(number):
        token = {"content": "[E1]", "lstrip": False, "rstrip": False, "normalized": False, "special": True}
        written = {"[E1]": number} if file == "added_tokens.json" else {"added_tokens_decoder": {str(number): token}}
        (tmp_path / file).write_text(json.dumps(written))

    write(free)
    assert load_tokenizer(tmp_path, config).encode("a [E1] film", add_special_tokens=False).ids[1] == free
    write(free + 1)
    with pytest.raises(InputError, match=rf"the token '\[E1\]' has the id {free + 1}, and the next free one is {free}"):
        load_tokenizer(tmp_path, config)


SPECIAL_IN_TEXTS = ("a film", "", "a [SEP] b<s> c [MASK]", "<z> x</s><a> y<mask> z")
BYTES = ["<s>", "<pad>", "</s>", "<unk>", "<mask>", "<a>", "<z>"]


def words_of_bert(folder):
    vocabulary = (DEMO / "vocab.txt").read_text(encoding="utf-8")
    (folder / "vocab.txt").write_text(f"{vocabulary.rstrip()}\n<a>\n<z>\n", encoding="utf-8")


def bytes_of_roberta(folder):
    trained = ByteLevelBPETokenizer()
    trained.train_from_iterator(["a film and b c x y z"] * 3, vocab_size=300, special_tokens=BYTES, show_progress=False)
    trained.save_model(str(folder))


@pytest.mark.parametrize(
    ("kind", "write"), [("bert", words_of_bert), ("roberta", bytes_of_roberta)], ids=["vocab.txt", "merges.txt"]
)
@pytest.mark.parametrize("named", [{}, {"cls_token": "<a>", "sep_token": "<z>"}], ids=["usual", "named"])
def test_special_tokens_have_the_names_that_settings_say(tmp_path, kind, write, named):
    config = transformers.AutoConfig.for_model(kind, vocab_size=3000, max_position_embeddings=66)
    config.save_pretrained(tmp_path)
    write(tmp_path)
    settings = {"tokenizer_class": {"bert": "BertTokenizer", "roberta": "RobertaTokenizer"}[kind], **named}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    loaded, theirs = load_tokenizer(tmp_path, config), transformers.AutoTokenizer.from_pretrained(tmp_path)
    for text in SPECIAL_IN_TEXTS:
        assert loaded.encode(text).ids == theirs(text)["input_ids"]
        assert loaded.encode("a film", text or "b").ids == theirs("a film", text or "b")["input_ids"]


def test_a_vocabulary_without_the_tokens_that_frame_a_text_is_refused(tmp_path):
    bytes_of_roberta(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text('{"cls_token": "<first>"}')
    with pytest.raises(InputError, match="the tokenizer cannot be loaded: its vocabulary has no <first>"):
        load_tokenizer(tmp_path, transformers.RobertaConfig(vocab_size=3000))


def test_special_tokens_that_are_only_named_are_no_words(tmp_path):
    """Whoever makes a tokenizer.json need not list them among the added ones."""
    written = json.loads((DEMO / "tokenizer.json").read_text(encoding="utf-8"))
    (tmp_path / "tokenizer.json").write_text(json.dumps({**written, "added_tokens": []}), encoding="utf-8")
    names = {f"{token.lower()}_token": f"[{token}]" for token in ("CLS", "SEP", "MASK", "PAD", "UNK")}
    names["bos_token"] = "[NOWHERE]"
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", **names}))
    config = transformers.BertConfig(vocab_size=3000)
    loaded, whole = load_tokenizer(tmp_path, config), Tokenizer.from_file(str(DEMO / "tokenizer.json"))
    for text in ("a [SEP] film[MASK] and [CLS]", "[PAD][UNK] [sep]", "[NOWHERE]"):
        assert loaded.encode(text).ids == whole.encode(text).ids


def test_the_message_for_a_missing_package_names_it(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "sentencepiece", None)  # hidden, where it is installed
    (tmp_path / "sentencepiece.bpe.model").write_bytes(b"")
    config = CamembertConfig(vocab_size=9)
    with pytest.raises(MissingDependencyError, match="type: pip install sentencepiece$"):
        load_tokenizer(tmp_path, config)


def test_settings_of_a_tokenizer_that_are_ignored_are_told(plain_bert):
    """These settings decide what transformers' tokenizers read, and are not followed here."""
    assert open_checkpoint(plain_bert).notes == ()
    settings = plain_bert / "tokenizer_config.json"
    edit_json(settings, truncation_side="left", model_max_length=64, do_lower_case=False)
    side, limit, case = (
        note.removeprefix("plain/tokenizer_config.json: ") for note in open_checkpoint(plain_bert).notes
    )
    assert side == "truncation_side is ignored: long texts are cut at the end"
    assert limit == "model_max_length, 64, is ignored: texts are read up to 128 tokens"
    assert case == "do_lower_case is ignored: texts are lower-cased, as tokenizer.json says"
    names = ["input_ids", "token_type_ids", "attention_mask"]
    edit_json(
        settings, tokenizer_class="PreTrainedTokenizerFast", model_input_names=names
    )  # it does not read do_lower_case either
    assert len(open_checkpoint(plain_bert).notes) == 2
    edit_json(
        settings, truncation_side="right", model_max_length=10**30, do_lower_case=None, tokenizer_class="BertTokenizer"
    )
    assert open_checkpoint(plain_bert).notes == ()
    edit_json(plain_bert / "tokenizer.json", normalizer={"type": "BertNormalizer", "lowercase": False, **NORMALIZER})
    (case,) = open_checkpoint(plain_bert).notes  # BertTokenizer lower-cases unless it is told not to
    assert case.endswith("do_lower_case is ignored: texts are not lower-cased, as tokenizer.json says")


NORMALIZER = {"clean_text": True, "handle_chinese_chars": True, "strip_accents": None}
TEMPLATE = TemplateProcessing(
    single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
)


@pytest.mark.parametrize("processor", [TEMPLATE, Sequence([TEMPLATE]), BertProcessing(("[SEP]", 3), ("[CLS]", 2))])
@pytest.mark.parametrize("typed", [True, False, None])
def test_pairs_have_types_where_the_tokenizer_says_that_the_model_reads_them(tmp_path, processor, typed):
    """transformers leaves out what `model_input_names` does not name, and BERT then takes 0 for all tokens; so does version 5."""
    model = write_plain(tmp_path / "model", "sequence")
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    tokenizer.post_processor = processor
    tokenizer.save(str(model / "tokenizer.json"))
    names = ["input_ids", "attention_mask", *(["token_type_ids"] if typed else [])]
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "pad_token": "[PAD]"}
    settings |= {} if typed is None else {"model_input_names": names}
    (model / "tokenizer_config.json").write_text(json.dumps(settings))
    checkpoint = open_checkpoint(model)
    by_default = "token_type_ids" in transformers.PreTrainedTokenizerFast.model_input_names
    missing = [note for note in checkpoint.notes if "model_input_names is missing: every token of a pair" in note]
    assert len(missing) == (typed is None and not by_default)
    typed = by_default if typed is None else typed
    pairs = [("a film", "great great film"), ("a", "b")]
    batch = pad(encode(checkpoint.tokenizer, pairs, 32), checkpoint.student.pad_id, checkpoint.student.input_names)
    asked = transformers.AutoTokenizer.from_pretrained(model)(*zip(*pairs), padding=True, return_tensors="pt")
    assert bool(batch["token_type_ids"].any()) == typed == ("token_type_ids" in asked)
    expected = transformers.AutoModelForSequenceClassification.from_pretrained(model).eval()(**asked).logits
    found = checkpoint.student(**{name: torch.tensor(values) for name, values in batch.items()}).logits
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    trained = pad(encode(load_for_training(str(model)).backend_tokenizer, pairs, 32), 0, batch.keys())
    assert all((trained[name] == batch[name]).all() for name in batch)


@pytest.mark.parametrize("file", ["tokenizer_config.json", "config.json"])
@pytest.mark.parametrize("named", [{}, {"do_lower_case": True}, {"tokenizer_class": "DistilBertTokenizer"}], ids=str)
def test_pairs_have_the_types_of_the_class_that_transformers_takes_also_once_imported(tmp_path, named, file):
    model = write_plain(tmp_path / "model", "sequence")
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    tokenizer.post_processor = TEMPLATE
    tokenizer.save(str(model / "tokenizer.json"))
    (model / "tokenizer_config.json").write_text(json.dumps({"pad_token": "[PAD]"}))
    edit_json(model / file, **named)
    adtp_export.import_checkpoint(model, tmp_path / "imported")
    asked = transformers.AutoTokenizer.from_pretrained(model)("a film", "great")
    for place in (model, tmp_path / "imported"):
        (row,) = encode(open_checkpoint(place).tokenizer, [("a film", "great")], 32)
        assert row.token_type_ids == asked.get("token_type_ids", [0] * len(row.input_ids))


@pytest.fixture
def byte_level(tmp_path):
    """Write a byte-level tokenizer that says whether a space stands before a text, and settings beside it."""

    def write(spaced, settings):
        words = ["<s>", "<pad>", "</s>", "<unk>", "<mask>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
        made = Tokenizer(BPE({word: i for i, word in enumerate(words)}, []))
        split = pre_tokenizers.Split("b", "isolated")
        made.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=spaced)])
        if settings.get("tokenizer_class") == "RobertaTokenizer":  # has no other way to split
            made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=spaced)
        made.post_processor = RobertaProcessing(("</s>", 2), ("<s>", 0), add_prefix_space=spaced)
        made.add_special_tokens(words[:5])
        made.save(str(tmp_path / "tokenizer.json"))
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"pad_token": "<pad>", **settings}))
        config = transformers.RobertaConfig(vocab_size=len(words))
        config.save_pretrained(tmp_path)
        return config

    return write


TEXTS = ["a film", " a  film", "<mask> a", "a <mask>film", "<mask>"]


@pytest.mark.parametrize("kind", ["RobertaTokenizer", "PreTrainedTokenizerFast"])
@pytest.mark.parametrize("asked", [{}, {"add_prefix_space": True}, {"add_prefix_space": False}], ids=str)
@pytest.mark.parametrize("spaced", [True, False])
def test_a_space_before_a_text_is_what_the_class_in_transformers_takes(byte_level, tmp_path, spaced, asked, kind):
    tokenizer = load_tokenizer(tmp_path, byte_level(spaced, {"tokenizer_class": kind, **asked}))
    expected = transformers.AutoTokenizer.from_pretrained(tmp_path)
    for text in TEXTS:
        assert tokenizer.encode(text).ids == expected(text)["input_ids"]


def test_a_space_before_a_text_is_set_in_a_sequence_as_well(byte_level, tmp_path):
    config = byte_level(False, {"tokenizer_class": "GPT2TokenizerFast", "add_prefix_space": True})
    tokens = load_tokenizer(tmp_path, config).encode("a", add_special_tokens=False).tokens
    assert tokens == ["\u0120", "a"]


def test_a_token_takes_the_spaces_that_stand_beside_the_tokenizer(byte_level, tmp_path):
    """`<mask>` of RoBERTa takes the space before it; its file may not say so."""
    mask = {"content": "<mask>", "lstrip": True, "rstrip": False, "normalized": False, "single_word": False}
    config = byte_level(False, {"tokenizer_class": "RobertaTokenizer", "added_tokens_decoder": {"4": mask}})
    edit_json(tmp_path / "tokenizer_config.json", mask_token="<mask>")
    tokenizer = load_tokenizer(tmp_path, config)
    expected = transformers.AutoTokenizer.from_pretrained(tmp_path)
    for text in TEXTS:
        assert tokenizer.encode(text).ids == expected(text)["input_ids"]
    assert tokenizer.encode("a <mask>", add_special_tokens=False).tokens == ["a", " <mask>"]
    complete(tmp_path / "tokenizer.json", tmp_path, config)
    alone = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert alone.encode("a <mask>", add_special_tokens=False).tokens == ["a", " <mask>"]


@pytest.mark.parametrize("file", ["tokenizer_config.json", "special_tokens_map.json"])
@pytest.mark.parametrize("name", ["additional_special_tokens", "extra_special_tokens"])
def test_special_tokens_that_are_only_named_are_added(tmp_path, file, name):
    shutil.copy(DEMO / "tokenizer.json", tmp_path)
    config = transformers.BertConfig(vocab_size=2000)
    plain = load_tokenizer(tmp_path, config)
    free, film = plain.get_vocab_size(), plain.token_to_id("film")
    named = ["[E1]", {"content": "[E2]", "lstrip": True}, "[SEP]", "film"]
    (tmp_path / file).write_text(json.dumps({name: named if "extra" not in name else dict(zip("abcd", named))}))
    found = load_tokenizer(tmp_path, config).encode("[E1] [E2]filmfilm", add_special_tokens=False)
    assert found.ids == [free, free + 1, film, film]
    assert found.offsets[1] == (4, 9)  # with the space before it
    small = transformers.BertConfig(vocab_size=free)  # which knows neither
    assert load_tokenizer(tmp_path, small).get_vocab_size() == free


@pytest.mark.parametrize(
    ("normalizer", "settings", "told"),
    [
        (
            {"strip_accents": None},
            {"strip_accents": False},
            ["strip_accents is ignored: texts are stripped of accents"],
        ),
        ({"strip_accents": False}, {}, ["strip_accents is ignored: texts are not stripped of accents"]),
        ({"handle_chinese_chars": False}, {}, ["tokenize_chinese_chars is ignored: texts are not split"]),
        ({"lowercase": False}, {}, ["do_lower_case is ignored: texts are not lower-cased"]),
        ({"lowercase": False, "strip_accents": False}, {"do_lower_case": False}, []),
        ({}, {"split_special_tokens": True}, ["split_special_tokens is ignored: special tokens that are typed"]),
        ({}, {}, []),
    ],
)
@pytest.mark.parametrize("wrapped", [False, True], ids=["alone", "in a sequence"])
@pytest.mark.parametrize("named", [{"tokenizer_class": "BertTokenizer"}, {}], ids=["named", "of the family"])
def test_a_normalizer_that_is_not_as_the_settings_ask_is_told(plain_bert, normalizer, settings, told, named, wrapped):
    made = {"type": "BertNormalizer", "lowercase": True, **NORMALIZER, **normalizer}
    made = {"type": "Sequence", "normalizers": [made]} if wrapped else made
    edit_json(plain_bert / "tokenizer.json", normalizer=made)
    (plain_bert / "tokenizer_config.json").write_text(json.dumps({**named, **settings}))
    notes = [note.partition(".json: ")[2] for note in open_checkpoint(plain_bert).notes]
    assert len(notes) == len(told)
    assert all(note.startswith(begin) for note, begin in zip(notes, told))


def test_ignored_settings_of_sentence_transformers_are_told(tmp_path):
    model = write_plain(tmp_path / "model", "embedding")
    modules = [
        {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"},
        {"idx": 1, "name": "1", "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"},
    ]
    (model / "modules.json").write_text(json.dumps(modules))
    (model / "1_Pooling").mkdir()
    (model / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode_mean_tokens": True}))
    settings = {"do_lower_case": False, "truncation_side": "left", "model_max_length": 16}
    (model / "tokenizer_config.json").write_text(json.dumps(settings))
    checkpoint = open_checkpoint(model)
    assert checkpoint.max_tokens == 16
    side, case = [note for note in checkpoint.notes if "is ignored" in note]
    assert "truncation_side is ignored" in side
    assert "do_lower_case is ignored" in case
    (model / "sentence_bert_config.json").write_text(json.dumps({"do_lower_case": True}))
    made = {"type": "BertNormalizer", "lowercase": False, **NORMALIZER}
    edit_json(model / "tokenizer.json", normalizer=made)
    (model / "tokenizer_config.json").write_text("{}")
    (accents,) = [note for note in open_checkpoint(model).notes if "is ignored" in note]
    assert "strip_accents is ignored: texts are not stripped of accents" in accents


def test_tokens_in_other_places_are_told(byte_level, tmp_path):
    config = byte_level(False, {"tokenizer_class": "RobertaTokenizer"})
    trimmed = json.loads((tmp_path / "tokenizer.json").read_text())["post_processor"]
    edit_json(tmp_path / "tokenizer.json", post_processor={**trimmed, "trim_offsets": False})
    (note,) = ignored_settings(tmp_path, load_tokenizer(tmp_path, config), config)
    assert "RobertaTokenizer of transformers" in note
    assert "makes tokens with other offsets" in note


def test_a_text_has_the_same_tokens_each_time(byte_level, tmp_path):
    """A dropout is for training; `tokenizer.json` may still have it."""
    config = byte_level(False, {"tokenizer_class": "PreTrainedTokenizerFast"})
    edit_json(
        tmp_path / "tokenizer.json",
        model={**json.loads((tmp_path / "tokenizer.json").read_text())["model"], "dropout": 0.9},
    )
    assert load_tokenizer(tmp_path, config).model.dropout is None
    complete(tmp_path / "tokenizer.json", tmp_path, config)
    assert json.loads((tmp_path / "tokenizer.json").read_text())["model"]["dropout"] is None


def test_a_padding_token_that_frames_texts_is_refused(byte_level, tmp_path):
    """RoBERTa counts no position at padding, so its positions would not be those of the export."""
    config = byte_level(False, {"tokenizer_class": "RobertaTokenizer"})
    load_tokenizer(tmp_path, config)
    config.pad_token_id = Tokenizer.from_file(str(tmp_path / "tokenizer.json")).token_to_id("</s>")
    with pytest.raises(InputError, match=r"gives texts the token '</s>', which pad_token_id, \d+, says is padding"):
        load_tokenizer(tmp_path, config)
