"""Which tokens of a text go on with a word."""

from __future__ import annotations

from tokenizers import Tokenizer

from ..data.tokenize import strings, unknown_id
from ..data.windows import TextWithOffsets
from .answers import tokens


class Words:
    """Says which tokens go on with a word, as transformers' pipeline does.

    Where the vocabulary marks such tokens (WordPiece's "##"), their text is longer than what they stand for. Else a token goes on where no
    space is before it, or in its first place.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        model = tokenizer.model
        self._tokenizer = tokenizer
        self._marked = bool(getattr(model, "continuing_subword_prefix", None))
        self._unknown = unknown_id(tokenizer)

    def tokens(self, placed: TextWithOffsets, text: str) -> list[tokens.Token]:
        """Return the tokens of a text that are not special."""
        found, ids = [], placed.row.input_ids
        places = zip(placed.sides, placed.offsets, ids, strings(self._tokenizer, ids))
        for i, (side, (start, end), token, written) in enumerate(places):
            if side is None:
                continue
            joined = start > 0 and " " not in text[start - 1 : start + 1]
            inside = len(written) != end - start if self._marked else joined
            found.append(tokens.Token(i, start, end, inside and token != self._unknown))
        return found
