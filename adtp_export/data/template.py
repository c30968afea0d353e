"""Chat templates around texts. They are rendered at export and stored in pieces, so answering needs no Jinja.

Source: sentence-transformers 6, whose module `Transformer` renders texts, cuts them and ends them as is done here.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from tokenizers import Encoding, Tokenizer

from ..errors import InputError
from .readers import Text
from .tokenize import TokenizedText, read_whole, reading_texts
from .truncate import MAX_CHARACTERS, Beginnings, check_unicode
from .windows import TextWithOffsets

TEXT, QUERY, DOCUMENT, PROMPT = "text", "query", "document", "prompt"
"""What stands in slots: a single text, the two sides of a pair, and what is put before either."""
SLOTS = {
    "text": (TEXT,),
    "pair": (QUERY, DOCUMENT),
    "prompted_text": (PROMPT, TEXT),
    "prompted_pair": (PROMPT, QUERY, DOCUMENT),
}
"""The lists of pieces, and what stands in the slots of each."""
FILLERS = ("0", "1 2 3 4")
"""Two contents whose tokens differ. What both renderings end with is the template's own end."""


@dataclass(frozen=True)
class Slot:
    """A place in a template. slot: what stands there. trim: without the space at its ends."""

    slot: str
    trim: bool = False


@dataclass(frozen=True, kw_only=True)
class ChatTemplate:
    """What stands around texts, as literal pieces and slots in order.

    text, pair: of a single text, and of a pair. prompted_text, prompted_pair: the same where a prompt is given. Those that the template
    has no place for are empty. restore_suffix: the template's end stays where a long text is cut.

    Raises:
        ValueError: a slot for something that such a text does not have.
    """

    text: list[str | Slot] = field(default_factory=list)
    pair: list[str | Slot] = field(default_factory=list)
    prompted_text: list[str | Slot] = field(default_factory=list)
    prompted_pair: list[str | Slot] = field(default_factory=list)
    restore_suffix: bool = True

    def __post_init__(self) -> None:
        for name, slots in SLOTS.items():
            if unknown := {piece.slot for piece in getattr(self, name) if isinstance(piece, Slot)} - {*slots}:
                raise ValueError(f"{name} has the slots {sorted(unknown)}; accepted are {', '.join(slots)}")

    def render(self, text: Text, prompt: str = "") -> str:
        """Return a text or a pair with the template around it.

        Raises:
            InputError: the template has no place for a single text, a pair or a prompt; no valid Unicode.
        """
        single = isinstance(text, str)
        pieces = self._pieces(single, bool(prompt))
        values = {TEXT: text} if isinstance(text, str) else dict(zip((QUERY, DOCUMENT), text))
        for value in values.values():
            check_unicode(value[:MAX_CHARACTERS])
        if not pieces:
            lacks = "prompts" if prompt and self._pieces(single, False) else "single texts" if single else "pairs"
            taken = "pairs" if self.pair else "single texts"
            raise InputError(
                f"texts: got {lacks}, for which the model's chat template has no place; accepted are {taken}"
                + (" without a prompt" if lacks == "prompts" else "")
            )
        return fill(pieces, {**values, PROMPT: prompt})

    def encode(
        self, tokenizer: Tokenizer, texts: Sequence[Text], max_tokens: int, prompt: str = ""
    ) -> list[TokenizedText]:
        """Render texts or pairs and tokenize them without special tokens of the tokenizer's own, each cut at `max_tokens`.

        A rendering that fills `max_tokens` gets the template's end over its last tokens, so that a model that reads the last one reads
        what it was trained on.

        Raises:
            InputError: as `render` and `data.tokenize.encode` say.
        """
        return [row for row, _ in self._rows(tokenizer, texts, max_tokens, prompt, offsets=False)]

    def placed(
        self, tokenizer: Tokenizer, texts: Sequence[Text], max_tokens: int, prompt: str = ""
    ) -> list[TextWithOffsets]:
        """Tokenize as `encode` does, and say where each token is in the rendered text."""
        found = []
        for row, encoding in self._rows(tokenizer, texts, max_tokens, prompt, offsets=True):
            size = len(row.input_ids)
            sides: list[int | None] = [0] * size
            found.append(TextWithOffsets(row, encoding.offsets[:size], encoding.word_ids[:size], sides))
        return found

    def _rows(
        self, tokenizer: Tokenizer, texts: Sequence[Text], max_tokens: int, prompt: str, offsets: bool
    ) -> Iterator[tuple[TokenizedText, Encoding]]:
        short, end = Beginnings(tokenizer, max_tokens), functools.cache(self._end)
        rendered = [self.render(text, prompt) for text in texts]
        with reading_texts():
            inputs = [short.of(text) for text in rendered]
        encodings = read_whole(tokenizer, inputs, offsets=offsets, special=False)
        for text, whole, encoding in zip(texts, rendered, encodings):
            ids, cut = encoding.ids[:max_tokens], len(encoding) > max_tokens or len(whole) > MAX_CHARACTERS
            if self.restore_suffix and (cut or len(ids) == max_tokens):
                tail = end(tokenizer, isinstance(text, str), prompt)[-len(ids) :]
                ids[len(ids) - len(tail) :] = tail
            yield TokenizedText(ids, [0] * len(ids), cut), encoding

    def _end(self, tokenizer: Tokenizer, single: bool, prompt: str) -> list[int]:
        """Return the tokens that all renderings end with: none where two of them differ nowhere, or at once."""
        first, second = (
            tokenizer.encode(self.render(filler if single else (filler, filler), prompt), add_special_tokens=False).ids
            for filler in FILLERS
        )
        pairs = zip(reversed(first), reversed(second))
        count = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(first), len(second)))
        return first[len(first) - count :] if count < min(len(first), len(second)) else []

    def _pieces(self, single: bool, prompted: bool) -> list[str | Slot]:
        if single:
            return self.prompted_text if prompted else self.text
        return self.prompted_pair if prompted else self.pair


def fill(pieces: Sequence[str | Slot], contents: Mapping[str, str]) -> str:
    """Put contents, by their slots, into their places."""
    return "".join(
        piece if isinstance(piece, str) else contents[piece.slot].strip() if piece.trim else contents[piece.slot]
        for piece in pieces
    )
