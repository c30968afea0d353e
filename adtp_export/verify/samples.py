"""Texts to verify on: a file's, or built-in sentences of very different lengths, in batches of different sizes."""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeVar

import numpy as np
from tokenizers import Tokenizer

from ..data.readers import Text
from ..data.tokenize import Batch, TokenizedText, pad, unknown_id

Item = TypeVar("Item")

MAX_ROWS = 1024
"""Rows taken from a larger file, by a fixed seed."""

MAX_TOKENS = 32768
"""Tokens in all, which bounds the time, unless rows are asked for: long texts are fewer rows."""

MAX_FLOPS = 8e12
"""In all, of one forward without pruning, which bounds the time where a model is large: 8,600 tokens of one of 0.6 billion parameters."""

MAX_WEIGHTS = 1 << 24
"""Of all sparse vectors together, which bounds memory and the time to compare them: 549 texts in a vocabulary of 30,522."""

MAX_BATCH_TOKENS = 4096
"""Padded tokens of one batch, which bounds the memory that the fp64 oracle takes."""

_SIZES = (1, 7, 3, 16, 2, 32, 5)

BUILT_IN: tuple[str, ...] = (
    "ok",
    "no",
    "superb!",
    "not again, please",
    "the plot thickens",
    "a waste of an evening",
    "I would watch it twice.",
    "the soup was cold and so was the waiter",
    "nothing here works, and nobody seems to mind",
    "Delivered on Tuesday; the left hinge had already come loose.",
    "It's small, it's loud, it's cheap - and my kids adore every minute with it.",
    "the second act sags, but the last twenty minutes are as good as anything this year",
    "Zürich, Kraków, Århus, 東京: the tour goes everywhere except where you live :-)",
    "Version 2.3.1 fixes the crash on start-up (see #4512), breaks printing, and doubles memory use to 1,024 MB.",
    "we came for the view, stayed for the music, and left, rather late, with two new friends and a stain on the good coat",
    "What begins as a quiet portrait of a lighthouse keeper slowly turns into something stranger: a ghost story in which "
    "nobody dies, a love story in which nobody speaks, and, in its best scenes, a comedy about the weather.",
    "The manual says that assembly takes twenty minutes. It took us three hours, one trip to the hardware store and most "
    "of our patience, because step four shows a part that is not in the box, step nine shows a part that exists twice, "
    "and the drawing for step twelve seems to belong to a different shelf altogether. Once it stood, though, it stood.",
)

_LONG = (
    "On the first morning the harbour was empty, and the few people who walked along the quay looked as if they had "
    "been sent there by somebody else. The kiosk sold newspapers from the day before. By noon a ferry arrived, unloaded "
    "four crates of lemons and a piano, and left again without taking anybody along. "
)


def built_in_texts(pairs: bool) -> list[Text]:
    """Sentences from one word up; with `pairs`, every other row is a sentence pair."""
    texts: list[Text] = [*BUILT_IN, _LONG * 2]
    if not pairs:
        return texts
    shifted = [*texts[5:], *texts[:5]]
    return [(a, b) if i % 2 else a for i, (a, b) in enumerate(zip(texts, shifted))]  # type: ignore[misc]


QUESTIONS: tuple[tuple[str, int], ...] = (
    ("What was cold?", 7),
    ("When was it delivered?", 9),
    ("who adores it", 10),
    ("Which part of the film is better?", 11),
    ("Where does the tour not go?", 12),
    ("How much memory does version 2.3.1 use?", 13),
    ("Who left with two new friends?", 14),
    ("What does the portrait of the lighthouse keeper turn into, and what is its best scene about?", 15),
    ("How long did the assembly take?", 16),
    ("Who wrote the manual?", 16),
    ("Is it any good?", 2),
    ("What did the ferry unload before it left again?", 17),
)
"""Questions, and the number of the built-in text that each is about. One has no answer there."""


def built_in_questions() -> list[Text]:
    """Questions with their contexts, from one word to a paragraph."""
    contexts = built_in_texts(pairs=False)
    return [(question, str(contexts[number])) for question, number in QUESTIONS]


LANGUAGES: Mapping[str, tuple[str, str]] = {
    "German": ("Wer schläft vor dem Ofen?", "Der alte Hund schläft vor dem Ofen, und niemand möchte ihn wecken."),
    "French": (
        "Où est passé le train ?",
        "Le train de nuit est déjà passé ; il faudra attendre à la gare jusqu'à l'été.",
    ),
    "Spanish": ("¿Qué olvidó la señora?", "La señora olvidó su paraguas en el café, así que volvió mañana y noche."),
    "Turkish": ("Çocuklar nerede?", "Çocuklar bahçede oynuyor; yağmur başlayınca içeri gelecekler."),  # noqa: RUF001
    "Russian": ("Кто открыл окно?", "Сосед открыл окно, и вся комната сразу наполнилась запахом сирени."),
    "Greek": ("Πού είναι το καράβι;", "Το καράβι είναι στο λιμάνι και φεύγει αύριο το πρωί για τα νησιά."),  # noqa: RUF001
    "Arabic": ("أين الكتاب؟", "الكتاب على الطاولة قرب النافذة، ولم يفتحه أحد منذ الصيف."),
    "Hebrew": ("מתי נפתחת החנות?", "החנות נפתחת בשמונה בבוקר, אבל בימי שישי היא נסגרת מוקדם."),
    "Hindi": ("बारिश कब रुकी?", "बारिश शाम को रुकी, और बच्चे खेलने के लिए बाहर चले गए।"),
    "Thai": ("ร้านอยู่ที่ไหน", "ร้านอยู่ตรงข้ามสถานีรถไฟ เปิดทุกวันยกเว้นวันจันทร์"),
    "Chinese": ("谁写了这封信？", "这封信是我的祖母写的，她当时住在海边的一个小镇。"),  # noqa: RUF001
    "Japanese": ("猫はどこにいますか。", "猫は窓のそばで寝ていて、雨の音にも目を覚まさない。"),
    "Korean": ("버스는 언제 옵니까?", "버스는 십 분 뒤에 오지만, 오늘은 눈 때문에 늦을 것 같다."),
}
"""A question, and a sentence that answers it, by language."""


def in_languages(tokenizer: Tokenizer, pairs: bool) -> dict[str, Text]:
    """Return the sentences, or questions with their sentences, of those languages whose words or letters a tokenizer knows."""
    unknown = unknown_id(tokenizer)
    return {
        language: (question, sentence) if pairs else sentence
        for language, (question, sentence) in LANGUAGES.items()
        if _known(tokenizer.encode(sentence, add_special_tokens=False).ids, unknown)
    }


def _known(ids: list[int], unknown: int | None) -> bool:
    """Say whether at most one token in eight of a text stands for what the vocabulary lacks."""
    return unknown is None or 8 * ids.count(unknown) <= len(ids)


HARD: tuple[str, ...] = (
    *("", " ", "\t\n\r", "a", "\u0301", "[", "word", "two words"),
    "accents: \u00dcn\u00efc\u00f6d\u00e9 na\u00efve caf\u00e9 \u00c0\u00c9\u00ce \u0141\u00f3d\u017a "
    "e\u0301a\u0300 \u00f1 \u0130stanbul \u1e9e \u00df",
    "other scripts: \u0391\u0392\u0393 \u03a3\u03af\u03c3\u03c5\u03c6\u03bf\u03c2 "
    "\u041f\u0440\u0438\u0432\u0435\u0442 \u0627\u0644\u0633\u0644\u0627\u0645 "
    "\u0928\u092e\u0938\u094d\u0924\u0947 \u0e2a\u0e27\u0e31\u0e2a\u0e14\u0e35",
    "CJK: \u6f22\u5b57\u3068\u4eee\u540d \u4e2d\u6587word\u4e2d\u6587 \uc548\ub155\ud558\uc138\uc694 \uf900 \U00020000",
    "emoji: \U0001f389party \U0001f469\u200d\U0001f469\u200d\U0001f467 \U0001f1e9\U0001f1ea \u2764\ufe0f "
    "\U0001f44d\U0001f3fd",
    f"very long words: {'x' * 99} {'y' * 100} {'z' * 101} {'word' * 500} end",
    f"a long text: {'very ' * 700}good",
    "control characters: a\x01b\x07 c\x1fd \x7f e\x85f \u200bzero\u200dwidth\ufeff \u202eabc\u202c \ufffd \u00ad",
    "spaces: a\u00a0b\u3000c\u2028d\u2003e\x0bf\x0cg   h",
    "private characters: \ue000 \uf800 \uf8ff \U000f0000 \U0010fffd and none: \uffff \U0003fffe",
    "tokens in a text: [SEP] x[MASK]y [CLS] [PAD][UNK] [sep] [S\u200bEP] [ SEP ] <s> </s>",
    "punctuation: don't can't U.S.A. 3.14 $5 \u00a33 \u20ac2 +=<>~`^| \u201cquoted\u201d \u2018x\u2019 "
    "\u2026 \u2014dash\u2013 \u00bfqu\u00e9? \u00aboui\u00bb ##ing",
    "forms: \ufb01ne \ufb02ow \u00bd \u2460 \uff21\uff22\uff23\uff11 \u01c5 \u01c4 \u212b \u2126 \u212a "
    "\ufdfa \u1fbc \u0149 \U0001d400",
)
"""Texts that tokenizers read differently where they differ at all. None has U+0000: the interface of ONNX Runtime ends a text there."""


def sample(items: Iterable[Item], rows: int = MAX_ROWS) -> tuple[list[Item], int]:
    """Take all items, or `rows` of them by a fixed seed (reservoir sampling); return them and how many there were."""
    chosen: list[Item] = []
    generator = random.Random(0)
    total = 0
    for total, item in enumerate(items, start=1):
        if len(chosen) < rows:
            chosen.append(item)
        elif (place := generator.randrange(total)) < rows:
            chosen[place] = item
    return chosen, total


def shuffled(items: Sequence[Item]) -> list[Item]:
    """Return items in an order drawn by a fixed seed, so that batches mix lengths."""
    order = list(items)
    random.Random(0).shuffle(order)
    return order


def make_batches(
    rows: Sequence[TokenizedText],
    names: Sequence[str],
    pad_id: int,
    max_batch: int,
) -> list[Batch]:
    """Divide tokenized texts into right-padded batches of changing sizes, in order.

    Args:
        names: inputs of the graph.
        max_batch: largest batch.
    """
    sizes = itertools.cycle(min(size, max_batch) for size in _SIZES)
    batches: list[Batch] = []
    taken: list[TokenizedText] = []
    size = next(sizes)
    for row in rows:
        longest = max(len(r.input_ids) for r in (*taken, row))
        if taken and (len(taken) == size or longest * (len(taken) + 1) > MAX_BATCH_TOKENS):
            batches.append(pad(taken, pad_id, names))
            taken, size = [], next(sizes)
        taken.append(row)
    batches.append(pad(taken, pad_id, names))
    return batches


EACH = 7
"""One token in so many is masked, as in the training of BERT."""


def masks(tokens: np.ndarray) -> np.ndarray:
    """Return how many tokens `masked` masks in texts of so many tokens, ``(texts,)`` both."""
    return -(-np.maximum(tokens - 2, 1) // EACH)


def masked(row: TokenizedText, mask_id: int) -> TokenizedText:
    """Return a text with some of its tokens masked, if none is yet; never its first one, and its last one only where there are two."""
    if mask_id in row.input_ids or len(row.input_ids) < 2:
        return row
    ids = list(row.input_ids)
    for i in range(1, max(len(ids) - 1, 2), EACH):
        ids[i] = mask_id
    return dataclasses.replace(row, input_ids=ids)
