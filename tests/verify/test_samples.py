import re
from collections import Counter

from tokenizers import Tokenizer, models, pre_tokenizers

from adtp_export.data.tokenize import encode
from adtp_export.verify import samples


def test_built_in_texts_are_of_very_different_lengths(demo):
    tokenizer = Tokenizer.from_file(str(demo / "tokenizer.json"))
    lengths = [len(row.input_ids) for row in encode(tokenizer, samples.built_in_texts(pairs=False), 512)]
    assert min(lengths) <= 4
    assert max(lengths) >= 128


def test_pairs_give_token_types(demo):
    tokenizer = Tokenizer.from_file(str(demo / "tokenizer.json"))
    rows = encode(tokenizer, samples.built_in_texts(pairs=True), 512)
    assert any(1 in row.token_type_ids for row in rows)
    assert any(1 not in row.token_type_ids for row in rows)


def test_questions_are_about_their_contexts():
    """Each context but one has a word of its question, written alike."""
    words = [
        ({*re.findall(r"\w+", q.lower())}, {*re.findall(r"\w+", c.lower())}) for q, c in samples.built_in_questions()
    ]
    assert sum(bool(asked & there) for asked, there in words) >= len(words) - 1
    lengths = [len(there) for _, there in words]
    assert min(lengths) == 1
    assert max(lengths) > 40


def test_batches_hold_every_row_once_and_change_size(demo):
    tokenizer = Tokenizer.from_file(str(demo / "tokenizer.json"))
    texts = [f"{'word ' * (i % 40)}number {i}" for i in range(200)]
    names = ("input_ids", "attention_mask")
    batches = samples.make_batches(encode(tokenizer, texts, 64), names, 0, 16)
    sizes = Counter(len(b["input_ids"]) for b in batches)
    assert len(sizes) > 3
    assert max(sizes) == 16
    assert sum(size * count for size, count in sizes.items()) == 200
    assert all(b["input_ids"].size <= samples.MAX_BATCH_TOKENS for b in batches)
    seen = Counter(tuple(row[mask == 1]) for b in batches for row, mask in zip(b["input_ids"], b["attention_mask"]))
    assert seen == Counter(tuple(row.input_ids) for row in encode(tokenizer, texts, 64))


def test_sampling_is_fixed_and_streams():
    texts = (str(i) for i in range(5000))
    chosen, total = samples.sample(texts, 100)
    assert (len(chosen), total) == (100, 5000)
    assert chosen == samples.sample(map(str, range(5000)), 100)[0]
    assert max(map(int, chosen)) > 2500
    assert samples.sample(["a", "b"], 100) == (["a", "b"], 2)


def test_other_languages_are_those_that_a_tokenizer_knows(demo):
    """A small English vocabulary spells Latin letters; one that knows bytes spells everything, and one of words nothing."""
    found = samples.in_languages(Tokenizer.from_file(str(demo / "tokenizer.json")), pairs=False)
    assert set(found) == {"German", "French", "Spanish", "Turkish"}
    pieces = pre_tokenizers.ByteLevel.alphabet()
    in_bytes = Tokenizer(models.BPE({piece: i for i, piece in enumerate(pieces)}, []))
    in_bytes.pre_tokenizer = pre_tokenizers.ByteLevel()
    assert samples.in_languages(in_bytes, pairs=True) == samples.LANGUAGES
    for unknown in ("<unk>", "[UNK]"):
        assert samples.in_languages(Tokenizer(models.Unigram([(unknown, 0.0), ("a", -1.0)], 0)), pairs=False) == {}
    assert samples.in_languages(Tokenizer(models.WordPiece({"[UNK]": 0}, unk_token="[UNK]")), pairs=False) == {}
