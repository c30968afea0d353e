"""Where tokens stand, and windows over long contexts as `tokenizers` cuts them."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from testbed import DEMO
from tokenizers import Tokenizer

from adtp_export.data import windows as module
from adtp_export.data.tokenize import encode, strings
from adtp_export.data.windows import Windows, encode_placed, encode_windows
from adtp_export.errors import InputError

TOKENIZER = Tokenizer.from_file(str(DEMO / "tokenizer.json"))
TEXT = "An unbelievable film , by Jane Austen !"


def test_tokens_know_their_characters():
    (placed,) = encode_placed(TOKENIZER, [TEXT], 64)
    assert placed.row == encode(TOKENIZER, [TEXT], 64)[0]
    shown = [TEXT[start:end].lower() for start, end in placed.offsets]
    for token, text, side in zip(strings(TOKENIZER, placed.row.input_ids), shown, placed.sides):
        assert side == (None if token in ("[CLS]", "[SEP]") else 0)
        assert token == "[UNK]" or text == ("" if side is None else token.removeprefix("##"))


def test_what_is_cut_is_cut_everywhere():
    (placed,) = encode_placed(TOKENIZER, [(TEXT, TEXT * 3)], 12)
    assert placed.row == encode(TOKENIZER, [(TEXT, TEXT * 3)], 12)[0]
    assert len(placed.offsets) == len(placed.words) == len(placed.sides) == 12
    assert set(placed.sides) == {None, 0, 1}


@given(st.integers(0, 6), st.integers(0, 90), st.integers(14, 40), st.integers(0, 7))
def test_windows_are_those_of_tokenizers(asked, words, window, overlap):
    pair = " ".join(["film"] * asked), " ".join(f"{'good' if i % 3 else 'bad'}" for i in range(words))
    (found,) = encode_windows(TOKENIZER, [pair], Windows(window, overlap))
    other = Tokenizer.from_str(TOKENIZER.to_str())
    other.no_padding()
    room = window - 3 - asked
    other.enable_truncation(window, stride=overlap if overlap < room else room // 2, strategy="only_second")
    expected = other.encode(*pair)
    for placed, encoding in zip(found, [expected, *expected.overflowing], strict=True):
        assert placed.row.input_ids == encoding.ids
        assert placed.row.token_type_ids == encoding.type_ids
        assert placed.offsets == encoding.offsets
        assert placed.sides == encoding.sequence_ids
        assert not placed.row.truncated


@pytest.mark.parametrize("context", ["", "good " * 100])
def test_a_long_question_leaves_room(context):
    (found,) = encode_windows(TOKENIZER, [("film " * 100, context)], Windows(20, 8))
    assert all(len(placed.row.input_ids) <= 20 and placed.row.truncated for placed in found)
    assert all(placed.sides.count(0) == 10 for placed in found)
    assert sum(placed.sides.count(1) for placed in found) >= len(context.split())


def test_a_long_context_takes_linear_time(monkeypatch):
    """`tokenizers` makes lists of all tokens each time that it is asked; it is asked once, however many windows there are."""
    asked = Counter()

    class Watched:
        def __init__(self, encoding):
            self._encoding = encoding

        def __getattr__(self, name):
            asked[name] += 1
            return getattr(self._encoding, name)

    read = module.read_whole
    monkeypatch.setattr(module, "read_whole", lambda *given, **options: map(Watched, read(*given, **options)))
    (found,) = encode_windows(TOKENIZER, [("which film ?", "good " * 30_000)], Windows())
    assert len(found) > 100
    assert sum(asked.values()) <= 6


def test_a_long_question_is_read_to_its_cut(monkeypatch):
    """As the whole of it would be; of a context there is a most, which one message says."""
    monkeypatch.setattr("adtp_export.data.truncate._CHARACTERS", 1)
    expected = encode_windows(TOKENIZER, [("film " * 100, "good")], Windows(20, 8))
    seen = []
    read = module.read_whole
    monkeypatch.setattr(
        module, "read_whole", lambda tokenizer, pairs: read(tokenizer, [seen.append(p) or p for p in pairs])
    )
    assert encode_windows(TOKENIZER, [("film " * 100_000, "good")], Windows(20, 8)) == expected
    assert len(seen[0][0]) < 2000
    monkeypatch.setattr(module, "MAX_CONTEXT", 1000)
    with pytest.raises(InputError, match="context: got 1,005 characters; accepted are at most 1,000. Divide it"):
        encode_windows(TOKENIZER, [("which film ?", "good " * 201)], Windows())


def test_windows_share_at_most_half():
    """As transformers' pipeline has it, whose stride is 128 however short its windows are."""
    pair = ("which film ?", "good " * 100)
    assert encode_windows(TOKENIZER, [pair], Windows(40, 39)) == encode_windows(TOKENIZER, [pair], Windows(40, 20))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_token": 5}, "windows: got 'max_token'; accepted are .* did you mean 'max_tokens'"),
        ({"max_tokens": 3}, "windows.max_tokens: got 3; accepted is an integer of at least 4"),
        ({"stride": -1}, "windows.stride: got .*; accepted is an integer of at least 0"),
        ({"max_answer_tokens": "many"}, "windows.max_answer_tokens: got 'many'; accepted is an integer of at least 1"),
        ("max_tokens", "accepted are numbers named max_tokens, stride, max_answer_tokens"),
    ],
)
def test_other_windows_are_refused(changes, message):
    with pytest.raises(InputError, match=message):
        Windows().changed(changes)
