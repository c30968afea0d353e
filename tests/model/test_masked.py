"""Logits of masked tokens: every family's masked-language head, as transformers computes it, and no other row of it."""

import json

import numpy as np
import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from test_sparse import FAMILIES, batch_for
from tiny_models import make_encoder
from tokenizers import ByteLevelBPETokenizer

from adtp_export.errors import InputError
from adtp_export.model import PrunedEncoderConfig, predictions
from adtp_export.model.heads import head_class
from adtp_export.model.heads.masked import some_of_each
from adtp_export.model.packed import PackedInputs, PackedStudent
from adtp_export.model.selection import compacted
from adtp_export.model.tokenizer import load_tokenizer

MASK = 7


def make(backbone, **fields):
    torch.manual_seed(0)
    config = PrunedEncoderConfig(backbone=backbone, head="masked", mask_token_id=MASK, **fields)
    return head_class("masked")(config).eval().requires_grad_(False)


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_transformers_own_for_masked_tokens(monkeypatch, family):
    """In blocks that do not divide the vocabulary.

    The rows of `batch_for` have 40, 1, 9 and 33 tokens. transformers rounds a root mean square to fp32, whatever the states are.
    """
    monkeypatch.setattr(predictions, "BLOCK", 40)
    model = make(FAMILIES[family]).double()
    batch = batch_for(model)
    ids = batch["input_ids"]
    ids[ids == MASK] += 1
    places = [[0, 4, 39], [], [8], [1, 2]]
    for row, own in zip(ids, places):
        row[own] = MASK
    ids[2, 10] = MASK  # in the padding
    expected, found = model.dense(**batch).logits, model(**batch).mask_logits
    rows = torch.zeros(4, 3, expected.shape[-1], dtype=torch.float64)
    for i, own in enumerate(places):
        rows[i, : max(len(own), 1)] = expected[i, own or [0]]
    tolerance = 1e-5 if family == "eurobert" else 1e-11
    torch.testing.assert_close(found, rows, rtol=0, atol=tolerance)
    torch.testing.assert_close(PackedStudent(model)(**batch)[0][0], found, rtol=0, atol=1e-11)


def test_packed_inputs_have_the_same_logits():
    """A text without tokens has zeros."""
    model = make(FAMILIES["bert"]).double()
    ids = torch.tensor([5, MASK, 9, MASK, 8, 6])
    (found,), _ = PackedInputs(model)(ids, torch.tensor([0, 4, 4, 6], dtype=torch.int32), torch.zeros_like(ids))
    expected = [model.dense(input_ids=ids[None, a:b]).logits[0] for a, b in ((0, 4), (4, 6))]
    zero = torch.zeros_like(expected[0][0])
    rows = [expected[0][[1, 3]], torch.stack([zero, zero]), torch.stack([expected[1][0], zero])]
    torch.testing.assert_close(found, torch.stack(rows), rtol=0, atol=1e-11)


@given(st.lists(st.lists(st.booleans(), min_size=1, max_size=9), min_size=1, max_size=6))
@settings(max_examples=100, deadline=None)
def test_rows_are_the_masked_ones_and_the_first_of_texts_without(texts):
    bounds = np.cumsum([0, *map(len, texts)])
    expected = [
        bounds[i] + j for i, text in enumerate(texts) for j, own in enumerate(text) if own or (j == 0 and not any(text))
    ]
    asked, cu_seqlens = torch.tensor([own for text in texts for own in text]), torch.tensor(bounds)
    rows, found = compacted(some_of_each(asked, cu_seqlens), cu_seqlens)
    assert rows.tolist() == expected
    assert found.tolist() == np.searchsorted(expected, bounds).tolist()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"pruning": {"method": "adtp", "sites": ["1.ffn"]}}, "pruning: got cuts in a model with the head 'masked'"),
        ({"mask_token_id": 4000}, "mask_token_id: got 4000; accepted is an integer from 0 to 96"),
        ({"mask_token_id": "x"}, "mask_token_id: got .x.; accepted is an integer"),
        ({"sparse": {"pooling": "max"}}, "sparse: is for the head 'sparse'"),
    ],
    ids=["cuts", "id too large", "no id", "field of another head"],
)
def test_what_is_refused(fields, message):
    with pytest.raises(InputError, match=message):
        PrunedEncoderConfig(**{"backbone": FAMILIES["bert"], "head": "masked", "mask_token_id": 1, **fields})


@pytest.mark.parametrize("file", ["special_tokens_map.json", "tokenizer_config.json", "decoder"])
def test_a_mask_takes_the_space_before_it_where_files_of_byte_level_tokenizers_say_so(tmp_path, file):
    trained, text = ByteLevelBPETokenizer(), "good <mask>"
    trained.train_from_iterator([text], vocab_size=300, special_tokens=["<s>", "<pad>", "</s>", "<unk>", "<mask>"])
    trained.save_model(str(tmp_path))
    token = {"__type": "AddedToken", "content": "<mask>", "lstrip": True, "rstrip": False, "single_word": False}
    token["normalized"] = False
    files = {name: {} for name in ("special_tokens_map.json", "tokenizer_config.json")}
    if file in files:
        files[file]["mask_token"] = token
    else:
        files["tokenizer_config.json"] |= {"mask_token": "<mask>", "added_tokens_decoder": {"4": token}}
    for name, content in files.items():
        (tmp_path / name).write_text(json.dumps(content))
    own = load_tokenizer(tmp_path, transformers.RobertaConfig(vocab_size=300))
    ids = own.encode(text).ids
    assert ids == transformers.RobertaTokenizer.from_pretrained(str(tmp_path))(text).input_ids
    assert own.token_to_id("\u0120") not in ids  # the space alone


def test_other_heads_have_no_mask():
    with pytest.raises(InputError, match="mask_token_id: is for the head 'masked'"):
        PrunedEncoderConfig(backbone=FAMILIES["bert"], head="sparse", mask_token_id=1)
    assert make_encoder("bert").asked_id is None
