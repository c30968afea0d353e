"""Long texts are cut as `tokenizers` cuts them, in little memory, and no process waits for ever."""

import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import (
    AddedToken,
    ByteLevelBPETokenizer,
    Regex,
    Tokenizer,
    models,
    normalizers,
    pre_tokenizers,
    trainers,
)
from tokenizers.processors import ByteLevel, RobertaProcessing, TemplateProcessing

from adtp_export.data.tokenize import encode, strings
from adtp_export.data.truncate import Beginnings, _seam, plain, portions, prepared, reach, settled, unset
from adtp_export.errors import InputError


def truncated_by_the_library(tokenizer, texts, max_tokens):
    tokenizer.no_padding()
    tokenizer.enable_truncation(max_tokens)
    found = tokenizer.encode_batch(list(texts))
    return [(list(e.ids), list(e.type_ids), list(e.tokens), bool(e.overflowing)) for e in found]


SPECIAL = ["<s>", "<pad>", "</s>", "<unk>"]
CORPUS = ["a wonderful film, and it's 90 minutes long", "the naïve café was terrible; don't go!", "Über 中文 foo bar"]


def rare_words(count):
    return [f"{a}{b}{c}" for a in "bdgk" for b in "aeiou" for c in "lmnr"][:count]


def byte_level(processor, normalizer=None, added=()):
    """A byte-level BPE tokenizer as RoBERTa's: its mask takes the space before it."""
    made = ByteLevelBPETokenizer(add_prefix_space=isinstance(processor, TemplateProcessing))
    made.train_from_iterator(CORPUS * 3, vocab_size=400, min_frequency=1, special_tokens=SPECIAL)
    tokenizer = made._tokenizer
    tokenizer.normalizer = normalizer
    tokenizer.add_special_tokens([AddedToken("<mask>", lstrip=True)])
    tokenizer.add_tokens(list(added))
    tokenizer.post_processor = processor
    return tokenizer


def unigram(pre_tokenizer, normalizer):
    """A SentencePiece model as XLM-RoBERTa's."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.normalizer, tokenizer.pre_tokenizer = normalizer, pre_tokenizer
    trainer = trainers.UnigramTrainer(vocab_size=90, special_tokens=SPECIAL, unk_token="<unk>", show_progress=False)
    tokenizer.train_from_iterator([*CORPUS, " ".join(rare_words(60))] * 3, trainer)
    tokenizer.add_special_tokens([AddedToken("<mask>", lstrip=True)])
    tokenizer.post_processor = RobertaProcessing(("</s>", 2), ("<s>", 0))
    return tokenizer


def word_piece(demo, normalizer=None, added=()):
    tokenizer = Tokenizer.from_file(str(demo / "tokenizer.json"))
    tokenizer.normalizer = normalizer or tokenizer.normalizer
    tokenizer.add_tokens(list(added))
    return tokenizer


@pytest.fixture(scope="module")
def tokenizers(demo):
    return [
        word_piece(demo),
        word_piece(demo, normalizers.BertNormalizer(clean_text=False, lowercase=False, strip_accents=True)),
        word_piece(demo, normalizers.NFKC(), [AddedToken("café", normalized=True), AddedToken("foo", rstrip=True)]),
        byte_level(RobertaProcessing(("</s>", 2), ("<s>", 0))),
        byte_level(
            TemplateProcessing(single="<s> $A", pair="<s> $A </s> $B:1", special_tokens=[("<s>", 0), ("</s>", 2)])
        ),
        byte_level(ByteLevel()),
        byte_level(ByteLevel(), normalizers.NFC(), ["  ", "   ", "|||IP|||"]),
        unigram(pre_tokenizers.Metaspace(), normalizers.NFKC()),
        unigram(
            pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace()]),
            normalizers.Sequence(
                [normalizers.Replace("``", '"'), normalizers.Nmt(), normalizers.Replace(Regex(" {2,}"), " ")]
            ),
        ),
    ]


FAMILIES = 9
CHARACTERS = st.text(
    st.sampled_from("aeé中文字한\u11a8 \t\n.'!0`\u0301\u0316\u00a8\u200b\x1c\x85\u3000\ufffd\x00İΣ\uff76\uff9e\u093f"),
    max_size=12,
)
WORDS = st.sampled_from(
    [
        "<mask>",
        "[MASK]",
        "film",
        "wonderful",
        "don't",
        "we'll",
        "foo",
        "café",
        "x" * 120,
        "  ",
        " \n ",
        "|||IP|||",
        "中" * 50,
        "\u0301" * 40,
    ]
)
TEXTS = st.tuples(st.lists(CHARACTERS | WORDS, max_size=40), st.sampled_from(["", " "])).map(
    lambda drawn: drawn[1].join(drawn[0])
)


@given(
    which=st.integers(0, FAMILIES - 1),
    texts=st.lists(TEXTS | st.tuples(TEXTS, TEXTS), min_size=1, max_size=3),
    max_tokens=st.integers(4, 24),
)
@settings(max_examples=200, deadline=None)
def test_texts_are_cut_as_tokenizers_cuts_them(tokenizers, which, texts, max_tokens):
    """Places where a text may be cut are sought everywhere here, not only behind many characters."""
    expected = truncated_by_the_library(tokenizers[which], texts, max_tokens)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("adtp_export.data.truncate._CHARACTERS", 1)
        patch.setattr("adtp_export.data.truncate._PATTERN", 4)  # "'ll" is the longest one here
        if not all(ids for ids, *_ in expected):  # of a tokenizer that adds no token
            with pytest.raises(InputError, match="the tokenizer gives no token"):
                encode(tokenizers[which], texts, max_tokens)
            return
        rows = encode(tokenizers[which], texts, max_tokens)
    assert [(row.input_ids, row.token_type_ids, row.truncated) for row in rows] == [
        (i, t, c) for i, t, _, c in expected
    ]


@given(which=st.integers(0, FAMILIES - 1), text=TEXTS, near=st.integers(1, 600))
@settings(max_examples=500, deadline=None)
def test_settled_tokens_are_those_of_the_whole_text(tokenizers, which, text, near):
    tokenizer = tokenizers[which]
    unset(tokenizer)
    end = _seam(text, min(near, len(text) - 1))
    beginning = tokenizer.encode(text[:end], add_special_tokens=False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("adtp_export.data.truncate._PATTERN", 4)
        count = settled(beginning, text, end, reach(tokenizer))
    whole = tokenizer.encode(text, add_special_tokens=False)
    assert (beginning.ids[:count], beginning.offsets[:count]) == (whole.ids[:count], whole.offsets[:count])


@pytest.mark.parametrize(
    ("which", "before", "after"),
    [
        (0, "one two (three [MA", "SK] four"),
        (3, "one two (three <ma", "sk> four"),
        (4, "one two (three fil", "m four"),
        (6, "one two (three |||I", "P||| four"),
        (6, "one two (three a" + "\u0301" * 300, "\u0316 four"),  # canonical order puts the last mark first
        (8, "one two (three fi", "lm four"),
    ],
)
def test_what_reaches_across_a_seam_unsettles_what_is_before_it(tokenizers, which, before, after):
    tokenizer = tokenizers[which]
    unset(tokenizer)
    beginning, whole = (tokenizer.encode(text, add_special_tokens=False) for text in (before, before + after))
    same = next(i for i, (one, other) in enumerate(zip(beginning.ids, whole.ids)) if one != other)
    assert settled(beginning, before + after, len(before), 0) > 0
    assert settled(beginning, before + after, len(before), reach(tokenizer)) <= same
    text, end = "one two " * 200 + before + after, 8 * 200 + len(before)
    count = settled(tokenizer.encode(text[:end], add_special_tokens=False), text, end, reach(tokenizer))
    assert count > 2 * 150


def test_what_stands_by_itself_in_every_normal_form():
    """Not marks, parts of syllables, what becomes a mark, nor space."""
    assert all(map(plain, "a!~0é中字한кषض"))
    assert not any(map(plain, " \n\x00\u0301\u093f\u11a8\u1100\u0e33\u3099\uff9e\u200b\u0d4e\U0001f600"))


def test_tokens_are_written_as_the_vocabulary_has_them(tokenizers):
    words, bytes_, text = tokenizers[0], tokenizers[3], "An unbelievable film"
    (row,) = encode(words, [text], 16)
    assert strings(words, row.input_ids) == words.encode(text).tokens
    (row,) = encode(words, ["日"], 16)
    assert strings(words, row.input_ids) == ["[CLS]", "[UNK]", "[SEP]"]
    (row,) = encode(bytes_, ["a  <mask>"], 16)
    assert strings(bytes_, row.input_ids)[-2] == "<mask>"  # without the spaces that it takes
    assert strings(words, [words.get_vocab_size()]) == ["?"]


@given(st.integers(0, 40), st.integers(0, 40), st.integers(4, 20))
@settings(max_examples=60, deadline=None)
def test_sides_of_any_length(tokenizers, first, second, max_tokens):
    pair = ("film " * first, "film " * second)
    for tokenizer in tokenizers:
        (expected,) = truncated_by_the_library(tokenizer, [pair], max_tokens)
        if not expected[0]:
            continue
        (row,) = encode(tokenizer, [pair], max_tokens)
        assert (row.input_ids, row.token_type_ids, strings(tokenizer, row.input_ids), row.truncated) == expected


def test_where_long_texts_can_be_cut(tokenizers):
    """Not where a regular expression may look at any character, nor where what looks plain is left out."""
    for tokenizer in tokenizers:
        tokenizer.enable_truncation(4)  # as a file may have it
        assert len(Beginnings(tokenizer, 10).of("a wonderful film , " * 100)) < 1000
    assert all(reach(tokenizer) < 250 for tokenizer in tokenizers)
    other = byte_level(ByteLevel())
    for normalizer in (
        normalizers.Replace("a", ""),
        normalizers.Replace(Regex("a+b"), "c"),
        normalizers.Replace("a" * 17, "a"),
    ):
        other.normalizer = normalizer
        assert reach(other) is None
    other.normalizer = normalizers.Replace("\u200b", "")
    assert reach(other) is not None
    other.pre_tokenizer = pre_tokenizers.Split(Regex("a(?=.*b)"), "isolated")
    assert reach(other) is None


def most_memory(demo, texts: str) -> float:
    """MB that `encode` takes of `texts`, a Python expression, in a process of its own."""
    code = f"""
import resource, tokenizers
from adtp_export.data.tokenize import encode
texts = {texts}
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
tokenizer = tokenizers.Tokenizer.from_file({str(demo / "tokenizer.json")!r})
encode(tokenizer, ["a"], 128)
before = peak()
encode(tokenizer, texts, 128)
print(peak() - before)"""
    return float(subprocess.check_output([sys.executable, "-c", code], text=True))


@pytest.mark.parametrize(
    "texts",
    [
        "[('the film was ' * 1000, 'terrible food ' * 2000)]",
        "['the film ' * 1_000_000]",
        "['a' * 10_000_000]",
        "['\u4f60\u597d\u3002' * 1_000_000, '\u4f60\u597d' * 1_000_000]",
    ],
)
def test_long_texts_take_little_memory(demo, texts):
    """The combinations of what was cut off took hundreds of MB, and a whole text up to 2 GB."""
    assert most_memory(demo, texts) < 60


@pytest.mark.parametrize("which", range(FAMILIES))
@pytest.mark.parametrize("text", ["x" * 400, "中" * 400, "\u0301" * 400, "\U0001f600" * 400, "a中" * 200])
def test_texts_without_spaces_are_cut_at_a_bound(tokenizers, which, text):
    """Where the bound is nearer than so many settled tokens, what is before it is the text; and each answer says that there was more."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("adtp_export.data.truncate.MAX_CHARACTERS", 100)
        rows = encode(tokenizers[which], [text, (text, text)], 31)
    expected = truncated_by_the_library(tokenizers[which], [text[:100], (text[:100], text[:100])], 31)
    assert [(row.input_ids, row.token_type_ids) for row in rows] == [(i, t) for i, t, _, _ in expected]
    assert all(row.truncated for row in rows)


def test_a_tokenizer_that_multiplies_texts_is_refused(tokenizers):
    """A hundred letters would become 10**14."""
    for tokenizer in tokenizers:
        assert prepared(tokenizer) is tokenizer
    for step, grown in (
        (normalizers.Replace("a", "a" * 4), 16),
        (normalizers.Replace(Regex("b*"), "bb"), 16),
        (normalizers.Prepend("a" * 9), 9),
        (normalizers.Precompiled(charsmap("a" * 100)), 100),
    ):
        other = byte_level(ByteLevel())
        other.normalizer = normalizers.Sequence([normalizers.NFC(), *[step] * 6])
        with pytest.raises(InputError, match=f"normalizer may make {grown} characters of one"):
            prepared(other)
    other.normalizer = normalizers.Sequence(
        [normalizers.Precompiled(charsmap("a" * 30)), normalizers.Replace("aa", "aaaa")]
    )
    prepared(other)


def charsmap(form):
    """SentencePiece's table of normal forms, with an empty trie: its size in bytes, the trie, and the forms, each ended by a zero."""
    trie = bytes(1024)
    return len(trie).to_bytes(4, "little") + trie + form.encode() + b"\0"


def test_reading_texts_sets_nothing(tokenizers):
    """Setting takes a lock that others hold while they read: a process that is forked meanwhile would wait for ever."""
    tokenizer = Tokenizer.from_str(tokenizers[0].to_str())
    tokenizer.enable_truncation(8)
    tokenizer.enable_padding(length=100)
    prepared(tokenizer)
    assert (tokenizer.truncation, tokenizer.padding) == (None, None)
    calls = []

    class Watched:
        def __getattr__(self, name):
            calls.append(name)
            return getattr(tokenizer, name)

    encode(Watched(), ["a film", ("one " * 1000, "another " * 1000)], 16)
    assert {"padding", "truncation", "encode", "encode_batch_fast"} <= set(calls)
    assert not [name for name in calls if name.startswith(("no_", "enable_", "add_", "train", "post_processor"))]


def test_a_portion_of_so_many_texts_waits_for_no_other():
    """Which a program may send when it has the answers to these."""
    asked = []

    def texts():
        for i in range(5):
            asked.append(i)
            yield "a"

    found = portions(texts(), most_texts=2)
    assert [(next(found), len(asked)) for _ in range(3)] == [(["a"] * 2, 2), (["a"] * 2, 4), (["a"], 5)]
    assert list(portions(iter(["ab", "a", "b"]), most=2)) == [["ab"], ["a", "b"]]


FORKING = """
import os, sys, threading
from tokenizers import Tokenizer
from adtp_export.data.tokenize import encode
from adtp_export.data.truncate import prepared
tokenizer = prepared(Tokenizer.from_file(sys.argv[1]))
expected = encode(tokenizer, ["a film"], 16)
reading = threading.Event()
def read():
    while True:
        encode(tokenizer, ["a wonderful film " * 200] * 20, 128)
        reading.set()
for _ in range(3):
    threading.Thread(target=read, daemon=True).start()
reading.wait()
for _ in range(20):
    child = os.fork()
    if not child:
        os._exit(encode(tokenizer, ["a film"], 16) != expected)
    assert os.waitpid(child, 0)[1] == 0
os._exit(0)
"""


def test_children_that_are_forked_while_threads_read_texts_read_them_too(demo):
    """Two of three waited for ever."""
    subprocess.run([sys.executable, "-c", FORKING, demo / "tokenizer.json"], check=True, timeout=300)
