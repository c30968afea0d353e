"""Words and their tokens, contexts and their windows."""

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from adtp_export.errors import InputError
from adtp_export.training.places import first_pieces, place_texts, place_windows, tokens_of

CONTEXT = " ".join(f"room{i} was clean," for i in range(30))


@pytest.fixture(scope="module", params=["wordpiece", "bytes"])
def tokenizer(request, demo):
    if request.param == "wordpiece":
        return Tokenizer.from_file(str(demo / "tokenizer.json"))
    made = Tokenizer(models.BPE())
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    names = ["<s>", "</s>"]
    trained = trainers.BpeTrainer(vocab_size=300, special_tokens=names, initial_alphabet=made.pre_tokenizer.alphabet())
    made.train_from_iterator([CONTEXT, "the hotel near the station"], trained)
    made.post_processor = processors.RobertaProcessing(("</s>", 1), ("<s>", 0), add_prefix_space=False)
    return made


def test_the_first_piece_of_each_word_begins_it(tokenizer):
    words = ["the", "hotel-like", "station", ",", "x" * 9, "é"]
    ((encoded, offsets),) = place_texts(tokenizer, [" ".join(words)], 64)
    found = first_pieces(words, offsets)
    assert None not in found
    assert found == sorted(set(found))
    begin = 0
    for word, token in zip(words, found):
        first, last = offsets[token]
        assert first <= begin < last  # byte-level tokens may have the space before the word
        begin += len(word) + 1
    assert len(found) < len(encoded.input_ids) - 2  # some words have further pieces


def test_words_behind_the_cut_have_no_token(tokenizer):
    words = ["the"] * 20
    ((encoded, offsets),) = place_texts(tokenizer, [" ".join(words)], 10)
    assert encoded.truncated
    assert len(encoded.input_ids) == 10
    assert offsets[0] is offsets[-1] is None  # special tokens are still there
    found = first_pieces(words, offsets)
    assert found[:8] == list(range(1, 9))
    assert found[8:] == [None] * 12


def test_a_word_that_shares_its_token_has_none():
    assert first_pieces(["ab", "c", "d"], [None, (0, 4), (5, 6), None]) == [1, None, 2]
    assert first_pieces(["", "ab"], [None, (1, 3), None]) == [None, 1]


def test_windows_cover_the_context_and_share_the_stride(tokenizer):
    question = "was it clean?"
    short, long = place_windows(tokenizer, [(question, "clean"), (question, CONTEXT)], 48, 8)
    assert len(short) == 1
    assert not short[0].encoded.truncated
    assert len(long) > 3
    asked = [offset for offset in long[0].offsets if offset is None]
    for row in long:
        assert len(row.encoded.input_ids) <= 48
        assert [offset for offset in row.offsets if offset is None] == asked  # the question and special tokens
    spans = [[place for place in row.offsets if place] for row in long]
    assert spans[0][0][0] == 0
    assert spans[-1][-1][1] == len(CONTEXT)
    for before, after in zip(spans, spans[1:]):
        assert after[:8] == before[-8:]


def test_a_long_question_leaves_half_of_a_window(tokenizer):
    (rows,) = place_windows(tokenizer, [("why " * 200, CONTEXT)], 32, 4)
    for row in rows[:-1]:
        assert len(row.encoded.input_ids) == 32
        held = sum(place is not None for place in row.offsets)
        assert held == 32 - 16 - tokenizer.num_special_tokens_to_add(True)
    with pytest.raises(InputError, match="--stride: got 16 with --max-tokens 32; accepted is below 1"):
        place_windows(tokenizer, [("why", CONTEXT)], 32, 16)


def test_tokens_of_an_answer(tokenizer):
    rows = place_windows(tokenizer, [("was it clean?", CONTEXT)], 48, 8)[0]
    begin = CONTEXT.index("room9 was")
    found = [(row, tokens) for row in rows if (tokens := tokens_of(begin, begin + 9, row.offsets))]
    assert 1 <= len(found) < len(rows)
    for row, (first, last) in found:
        assert CONTEXT[row.offsets[first][0] : row.offsets[last][1]].strip() == "room9 was"
    for row in rows:
        held = [place for place in row.offsets if place]
        inside = held[0][0] <= begin and held[-1][1] >= begin + 9
        assert (tokens_of(begin, begin + 9, row.offsets) is not None) == inside
