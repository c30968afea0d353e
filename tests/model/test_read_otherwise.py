"""Tokenizers that transformers reads otherwise than their files say, and those that do not fit their model."""

import json

import pytest
import transformers
from plain_models import edit_json, write_plain
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers
from tokenizers.models import Unigram
from tokenizers.processors import TemplateProcessing

from adtp_export.errors import InputError
from adtp_export.imports import ReadOptions, open_checkpoint
from adtp_export.model.tokenizer import load_tokenizer
from adtp_export.model.tokenizer_settings import ignored_settings


def unigram(directory, kind, **settings):
    """Write the files of a tokenizer that transformers makes anew from its vocabulary."""
    special = ["[PAD]", "[CLS]", "[SEP]", "[UNK]", "[MASK]"]
    scores = [(each, 0.0) for each in special] + [(f"\u2581{word}", -2.0) for word in ["the", "food", "was", "good"]]
    made = Tokenizer(Unigram([*scores, *((letter, -9.0) for letter in "\u2581abcdefghijklmnopqrstuvwxyz")], unk_id=3))
    made.pre_tokenizer = pre_tokenizers.Metaspace()
    made.add_special_tokens(special)
    ends = [("[CLS]", 1), ("[SEP]", 2)]
    made.post_processor = TemplateProcessing("[CLS] $A [SEP]", "[CLS] $A [SEP] $B:1 [SEP]:1", ends)
    made.save(str(directory / "tokenizer.json"))
    names = {f"{name}_token": f"[{name.upper()}]" for name in ("cls", "sep", "unk", "pad", "mask")}
    names |= {"bos_token": "[CLS]", "eos_token": "[SEP]"}
    (directory / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": kind, **names, **settings}))
    return made


@pytest.mark.parametrize(
    ("kind", "settings", "told"),
    [
        ("DebertaV2Tokenizer", {"do_lower_case": True}, "of 'The FOOD was good', DebertaV2Tokenizer of transformers"),
        ("XLMRobertaTokenizer", {}, "of '  two  spaces ', XLMRobertaTokenizer of transformers"),
        ("PreTrainedTokenizerFast", {}, None),
    ],
)
def test_a_text_of_which_transformers_makes_other_tokens_is_told(tmp_path, kind, settings, told):
    made, config = unigram(tmp_path, kind, **settings), transformers.BertConfig(type_vocab_size=1)
    notes = ignored_settings(tmp_path, made, config)
    assert len(notes) == (told is not None)
    assert all(told in note for note in notes)
    assert all("save AutoTokenizer.from_pretrained(DIR) into DIR" in note for note in notes)
    transformers.AutoTokenizer.from_pretrained(tmp_path).save_pretrained(tmp_path)  # as the note says
    assert ignored_settings(tmp_path, Tokenizer.from_file(str(tmp_path / "tokenizer.json")), config) == ()


def test_a_pair_and_a_typed_token_of_which_transformers_makes_other_tokens_are_told(tmp_path):
    made = pieces(tmp_path, "[CLS] $A [SEP] $B:0 [SEP]:0")
    (note,) = ignored_settings(tmp_path, made, transformers.BertConfig())
    assert "of 'The FOOD was good' and 'na\\xefve caf\\xe9', BertTokenizer of transformers" in note
    assert "makes tokens with other types" in note
    assert ignored_settings(tmp_path, pieces(tmp_path), transformers.BertConfig()) == ()
    edit_json(tmp_path / "tokenizer.json", added_tokens=[])
    unnamed = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    (note,) = ignored_settings(tmp_path, unnamed, transformers.BertConfig())
    assert "of 'good and [UNK] and [SEP]" in note
    assert "makes tokens with other ids" in note


def test_tokens_that_the_model_does_not_know_and_masks_that_take_in_a_space_are_not_told(tmp_path):
    own = pieces(tmp_path)
    known = Tokenizer.from_str(own.to_str())
    own.add_special_tokens(["<image>", AddedToken("[MASK]", lstrip=True, special=True)])
    own.save(str(tmp_path / "tokenizer.json"))
    edit_json(tmp_path / "tokenizer_config.json", additional_special_tokens=["<image>"])
    assert ignored_settings(tmp_path, known, transformers.BertConfig()) == ()


def pieces(directory, pair="[CLS] $A [SEP] $B:1 [SEP]:1"):
    """Write a WordPiece tokenizer, and settings that name BERT's class; return the tokenizer."""
    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "good", "film", "and", "bad", *"[]abcdeklmnpsu"]
    made = Tokenizer(models.WordPiece({word: i for i, word in enumerate(vocabulary)}, unk_token="[UNK]"))
    made.normalizer, made.pre_tokenizer = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
    made.post_processor = TemplateProcessing("[CLS] $A [SEP]", pair, [("[CLS]", 2), ("[SEP]", 3)])
    made.add_special_tokens(vocabulary[:5])
    made.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "BertTokenizer"}))
    return made


@pytest.mark.parametrize("kind", [transformers.RobertaConfig, transformers.MPNetConfig])
def test_a_padding_token_that_stands_for_unknown_words_is_refused(tmp_path, kind):
    """Where padding is, these models count no position, so positions would not be those of the export."""
    pieces(tmp_path)
    with pytest.raises(InputError, match=r"gives texts the token '\[UNK\]', which pad_token_id, 1, says is padding"):
        load_tokenizer(tmp_path, kind(pad_token_id=1))


def test_a_mask_token_that_is_read_as_letters_is_refused(tmp_path):
    write_plain(tmp_path, "open")
    edit_json(tmp_path / "tokenizer.json", added_tokens=[])
    (tmp_path / "tokenizer_config.json").unlink()
    with pytest.raises(InputError, match=r"reads '\[MASK\]' as ordinary letters"):
        open_checkpoint(tmp_path, ReadOptions(head="masked"))
