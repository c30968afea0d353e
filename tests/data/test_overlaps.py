"""Rows that repeat each other are one group."""

from adtp_export.data.overlaps import joined, normalized, overlapping


def test_phrases_of_a_sentence_are_in_its_group():
    texts = [
        "a film of quiet power and grace",
        "of quiet power and grace",  # in both sentences, which it joins
        "The cast, as ever, is fine.",
        "a play of quiet power and grace",
        "the cast as ever is FINE",
        "power and a film of",  # these words, but not side by side
    ]
    assert overlapping(texts) == [0, 0, 1, 0, 1, 2]


def test_a_short_phrase_does_not_join_what_has_nothing_in_common():
    texts = ["one of the best films of this year", "of the year", "he is one of the worst of the year", "one of the"]
    first, _, second, short = overlapping(texts)
    assert first != second
    assert short in (first, second)


def test_words_are_whole_and_texts_without_words_are_equal_to_themselves_alone():
    assert overlapping(["art house films are here", "smart house films are here and there"]) == [0, 1]
    assert overlapping(["...", "!", "...", "", " ", ""]) == [0, 1, 0, 2, 3, 2]
    assert overlapping([]) == []
    assert normalized("  It's  GOOD ") == "it s good"


def test_characters_are_words_where_there_are_no_spaces():
    texts = [
        "这部电影的剧情非常精彩",
        "我觉得这部电影的剧情非常精彩... 真的!",
        "这部电影很无聊",
        "这部电影",
        "ภาพยนตร์เรื่องนี้ดีมาก",
        "ฉันคิดว่าภาพยนตร์เรื่องนี้ดีมากจริงๆ",
    ]
    first, second, other, short, thai, longer = overlapping(texts)
    assert first == second != other
    assert short in (first, other)  # four characters say little
    assert thai == longer
    assert overlapping(["映画 the plot is fine", "I say 映画 the plot is fine"]) == [0, 0]
    assert normalized("Ünï 電影,ok") == "ünï 電 影 ok"
    assert normalized("ジョン・スミス") == normalized("ジョン スミス")
    assert normalized("မြန်မာ။") == normalized("မြန်မာ")
    assert normalized("_a_ b") == "_a_ b"


def test_rows_are_joined_by_either_numbering():
    assert joined([0, 0, 1, 2, 3], [0, 1, 1, 2, 3]) == [0, 0, 0, 1, 2]
    assert joined([5, 6], [7, 8]) == [0, 1]
    assert joined([], []) == []
