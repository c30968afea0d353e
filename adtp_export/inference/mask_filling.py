"""Masked tokens of texts, filled in as transformers' pipeline "fill-mask" does."""

from __future__ import annotations

import functools
from collections.abc import Iterable

from ..contract import DEFAULT_BATCH, HEAD_MASKED
from ..data.tokenize import unknown_id
from ..errors import check_int
from .answers import masked
from .asked import Asked, as_strings
from .batch_runner import BatchRunner
from .predictions import MaskPrediction


class MaskFilling(Asked):
    """What a `Predictor` has for models with the head "masked"."""

    @functools.cached_property
    def _unknown(self) -> int | None:
        return unknown_id(self.tokenizer)

    def fill_mask(
        self,
        texts: str | Iterable[str],
        *,
        top_k: int = 5,
        targets: str | Iterable[str] | None = None,
        batch_size: int = DEFAULT_BATCH,
    ) -> list[MaskPrediction]:
        """Say which tokens may stand in the place of each masked one.

        Each masked token is looked at for itself: where a text has several, the others stay masked.

        Args:
            texts: one text, or what gives several in an order, with the tokenizer's mask token, such as "[MASK]".
            top_k: tokens for each masked one, at most.
            targets: words to choose from, each of one token; default: the whole vocabulary. Scores are shares among all tokens.
            batch_size: as in a call.

        Returns:
            One record for each text, in their order.

        Raises:
            InputError: another head, a text without a masked token in what is read of it, a target that is not one token; or as a call
                does.
        """
        self._expect(HEAD_MASKED, what="fill_mask is")
        check_int("top_k", top_k, 1)
        listed, number = as_strings(texts, "texts"), self._config.adtp.mask_token_id
        assert number is not None  # such an export says it
        words = None if targets is None else as_strings(targets, "targets")
        ids = None if words is None else masked.target_ids(words, self.tokenizer, self._unknown)
        return BatchRunner(self, batch_size, False).fill(listed, number, top_k, ids)
