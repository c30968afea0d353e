"""Texts through a session: tokenized, divided into batches, run, and answered in the form of the head."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ..artifacts.records import DECOMPOSED
from ..data.readers import Text
from ..data.tokenize import TokenizedText, encode_whole_second, pad, strings
from ..data.windows import Windows, encode_placed, encode_windows
from ..errors import InputError, check_int
from ..targets.specs import CPU
from .answers import masked, sequence, spans, sparse, tokens
from .batches import by_length, divide
from .predictions import MaskPrediction, Prediction, Reading, SpanPrediction, TaggedText
from .session import Session


class BatchRunner:
    """One call of a predictor.

    Args:
        batch_size: texts run at once, at most.
        return_kept: also say which tokens stayed.
        prompt: what is put before texts, where the head is "sequence", "embedding" or "sparse".

    Raises:
        InputError: a batch size below 1.
    """

    def __init__(self, session: Session, batch_size: int, return_kept: bool, prompt: str = "") -> None:
        check_int("batch_size", batch_size, 1)
        self._of, self._kept, self._prompt = session, return_kept, prompt
        self._most = min(batch_size, session.profile["batch"].max) if session.profile else batch_size

    def classify(self, texts: Sequence[Text]) -> list[Prediction]:
        """Give each text a label."""
        rows = self._of.encoded(texts, self._prompt)
        outputs, readings = self._run(rows)
        if not rows:
            return []
        found = sequence.answers(np.stack(outputs), self._of.labels, self._of.problem_type)
        return [Prediction(**vars(answer), **reading) for answer, reading in zip(found, readings)]

    def tag(self, texts: Sequence[Text], aggregation: str | None) -> list[TaggedText]:
        """Find what stands in each text."""
        listed = [text for text in texts if isinstance(text, str)]
        if len(listed) < len(texts):
            raise InputError("texts: got a pair; accepted for the head tokens are single texts")
        if aggregation is None:
            aggregation = tokens.usual_aggregation(self._of.labels)
        tokens.check_aggregation(aggregation)
        placed = encode_placed(self._of.tokenizer, listed, self._of.max_tokens)
        outputs, readings = self._run([p.row for p in placed])
        words = self._of.words
        return [
            TaggedText(
                entities=tokens.answers(logits, words.tokens(p, text), text, self._of.labels, aggregation), **reading
            )
            for logits, p, text, reading in zip(outputs, placed, listed, readings)
        ]

    def find(self, texts: Sequence[Text], windows: Windows, top_k: int, may_be_none: bool) -> list[SpanPrediction]:
        """Find the answer to each question in its context, which is read in windows."""
        check_int("top_k", top_k, 1)
        pairs = [text for text in texts if not isinstance(text, str)]
        if len(pairs) < len(texts):
            raise InputError(
                "texts: got a single text; accepted are questions with their contexts: (question, context)"
            )
        parts = encode_windows(self._of.tokenizer, pairs, windows)
        outputs, readings = self._run([p.row for placed in parts for p in placed])
        predictions, begin = [], 0
        for (_, context), placed in zip(pairs, parts):
            logits = outputs[begin : begin + len(placed)]
            found = spans.answers(context, list(zip(logits, placed)), windows.max_answer_tokens, top_k, may_be_none)
            best = found.parts[0]
            predictions.append(
                SpanPrediction(
                    answer=best.text,
                    start=best.start,
                    end=best.end,
                    score=best.score,
                    no_answer=found.no_answer,
                    answers=found.parts,
                    **readings[begin + found.window],
                )
            )
            begin += len(placed)
        return predictions

    def vectors(self, texts: Sequence[Text]) -> list[np.ndarray]:
        """Return the output of each text, ``(D,)``."""
        return self._run(self._of.encoded(texts, self._prompt))[0]

    def sparse_vectors(self, texts: Sequence[Text], most: int | None) -> list[sparse.SparseEmbedding]:
        """Return the sparse vector of each text, made before the next batch runs: dense ones take 120 KB each.

        Args:
            most: as of `sparse.answer`.
        """
        return self._run(self._of.encoded(texts, self._prompt), lambda weights: sparse.answer(weights, most))[0]

    def fill(self, texts: Sequence[str], mask_id: int, top_k: int, targets: np.ndarray | None) -> list[MaskPrediction]:
        """Find the best tokens for the masked ones of each text; their logits are gone before the next batch runs."""
        rows = self._of.encoded(texts)
        for i, row in enumerate(rows):
            if mask_id not in row.input_ids:
                named = self._of.tokenizer.id_to_token(mask_id)
                cut = f" in the {self._of.max_tokens} tokens that are read of it" if row.truncated else ""
                raise InputError(
                    f"texts: got no {named} at index {i}{cut}; accepted are texts with at least one {named}"
                )
        found, readings = self._run(rows, lambda logits: masked.best(logits, top_k, targets))
        return [
            MaskPrediction(
                masks=masked.fillings(row.input_ids, mask_id, best, self._of.tokenizer, self._of.pad_id), **reading
            )
            for row, best, reading in zip(rows, found, readings)
        ]

    def judge(self, pairs: Sequence[tuple[str, str]]) -> tuple[np.ndarray, list[bool]]:
        """Return the logits of pairs, ``(pairs, labels)``, and whether each first text was cut; second texts stay whole."""
        rows = encode_whole_second(self._of.tokenizer, pairs, self._of.max_tokens)
        return np.stack(self._run(rows)[0]), [row.truncated for row in rows]

    def read(self, texts: Sequence[Text]) -> list[Reading]:
        """Say what became of each text's tokens."""
        rows = self._of.encoded(texts, self._prompt)
        readings: dict[int, Reading] = {}
        for chosen in self.divided(rows):
            batch = pad([rows[i] for i in chosen], self._of.pad_id, self._of.inputs)
            for i, kept_site in zip(chosen, self._of.kept_site(batch)):
                readings[i] = Reading(**self._reading(rows[i], kept_site))
        return [readings[i] for i in range(len(rows))]

    def _run(
        self, rows: Sequence[TokenizedText], answer: Callable[[np.ndarray], Any] = lambda output: output
    ) -> tuple[list[Any], list[dict[str, Any]]]:
        """Run texts; return the output of each, without padding where it has a row for each token, and its fields of `Reading`.

        Args:
            answer: is made of each output, and returned in its place.
        """
        outputs: dict[int, Any] = {}
        readings: dict[int, dict[str, Any]] = {}
        for chosen in self.divided(rows):
            batch = pad([rows[i] for i in chosen], self._of.pad_id, self._of.inputs)
            found = self._of.run(batch)
            kept_site = self._of.kept_site(batch) if self._kept else [None] * len(chosen)
            for i, output, row_kept in zip(chosen, found, kept_site):
                outputs[i] = answer(output[: len(rows[i].input_ids)] if found.ndim > 2 else output)
                readings[i] = self._reading(rows[i], row_kept)
        return [outputs[i] for i in range(len(rows))], [readings[i] for i in range(len(rows))]

    def divided(self, rows: Sequence[TokenizedText]) -> list[list[int]]:
        """Divide texts into the batches that they run in; return the indices of each batch's texts."""
        lengths = [len(row.input_ids) for row in rows]
        pads = self._of.manifest.targets[self._of.target].attention == DECOMPOSED
        return divide(lengths, self._most, pads) if self._of.spec.device == CPU else by_length(lengths, self._most)

    def _reading(self, row: TokenizedText, kept_site: np.ndarray | None) -> dict[str, Any]:
        """Return the fields of `Reading`."""
        if kept_site is None:
            return {"truncated": row.truncated}
        names = self._of.sites
        sites = [int(site) for site in kept_site[: len(row.input_ids)]]
        return {
            "truncated": row.truncated,
            "tokens": strings(self._of.tokenizer, row.input_ids),
            "kept": [site == len(names) for site in sites],
            "dropped_at": [names[site] if site < len(names) else None for site in sites],
        }
