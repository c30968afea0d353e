"""An exported directory that answers: texts in, and out what the head says of them.

Needs numpy, tokenizers and one runtime; neither torch nor transformers is imported.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from ..contract import (
    DEFAULT_BATCH,
    HEAD_EMBEDDING,
    HEAD_HYBRID,
    HEAD_SEQUENCE,
    HEAD_SPANS,
    HEAD_TOKENS,
    HEAD_VECTORS,
)
from ..data.readers import Text
from ..data.sides import DOCUMENT, QUERY
from ..data.windows import TextWithOffsets, Windows
from ..errors import InputError, check_int, quoted
from ..targets.choice import PRECISION
from .answers import embedding, sequence, vectors, zero_shot
from .asked import as_strings, as_texts
from .batch_runner import BatchRunner
from .mask_filling import MaskFilling
from .multi_vector import MultiVectorEncoding
from .predictions import Ranked, Reading, ZeroShotPrediction


class Predictor(MultiVectorEncoding, MaskFilling):
    """An output directory of adtp-export, ready to answer; make one with `adtp_export.load`. Threads may share it, and processes: it
    is pickled as what it was opened from.

    Args:
        directory: holds `manifest.json`, `model.onnx`, tokenizer files.
        target: a target's name in the manifest; default: the best that runs here, as `choice.choose` has it.
        threads: CPU threads, 0 for one on each core that may be used.
        prefer: "precision": of the default, the highest precision alone. "speed": lower ones, too.
        check_hashes: compare the SHA-256 of every file that is opened with the manifest's; False saves 0.05 to 0.3 s for 100 MB.

    Attributes:
        target: the name of what was taken. reason: why, in one short sentence.
        head: what the model answers with: "sequence", "tokens", "spans", "embedding", "sparse", "masked", "vectors" or
            "hybrid".
        labels: of a classifier. prompts: texts that `encode` puts before others, by name. windows: how contexts of questions are read.

    Raises:
        InputError: not an output directory, a file that is not the one in its manifest, an unknown preference, an unknown
            target, or one that cannot run here.
        MissingDependencyError: no runtime for any target is installed.
        EngineBuildError: the runtime refuses the file.
    """

    def __call__(
        self,
        texts: Text | Iterable[Text],
        *,
        return_kept: bool = False,
        batch_size: int = DEFAULT_BATCH,
        aggregation: str | None = None,
        top_k: int = 1,
        may_be_none: bool = False,
        windows: Mapping[str, int] | None = None,
    ) -> list[Any]:
        """Answer texts, or pairs given as tuples, in their order: with a record of `predictions` for each.

        The head decides which: "sequence" gives `Prediction`, "tokens" `TaggedText`, and "spans", for pairs of a question and its
        context, `SpanPrediction`. For vectors, rankings and masked tokens there are `encode`, `encode_sparse`, `rank` and
        `fill_mask`.

        Args:
            texts: one text or pair, or a list, a generator, or anything else that gives them in an order.
            return_kept: also say which tokens stayed, by running the debug form of the same target as well. Making that form
                needs the extra "export".
            batch_size: texts run at once, at most; on CPUs their lengths decide how many (`batches.divide`).
            aggregation: for tokens, one of `inference.answers.tokens.AGGREGATIONS`; default: "simple" where labels mark entities, else
                "none".
            top_k: for questions, answers to give of each, at most.
            may_be_none: for questions, no answer is an answer, too.
            windows: for questions, what is to differ from the model's own `windows`: "max_tokens" read at once, "stride" that
                neighbours share, and "max_answer_tokens".

        Raises:
            InputError: something else than texts and pairs, no valid Unicode, a batch size below 1, an argument that is for another
                head, or windows that are too long for the model.
            MissingDependencyError: `return_kept` without the extra "export".
        """
        texts = as_texts(texts)
        self._expect(HEAD_SEQUENCE, HEAD_TOKENS, HEAD_SPANS)
        if aggregation is not None:
            self._expect(HEAD_TOKENS, what="aggregation is")
        if top_k != 1 or may_be_none:
            self._expect(HEAD_SPANS, what="top_k and may_be_none are")
        chosen = self._windows(windows)
        runs = BatchRunner(self, batch_size, return_kept, self._prompt(None, None))
        if self.head == HEAD_TOKENS:
            return runs.tag(texts, aggregation)
        return runs.find(texts, chosen, top_k, may_be_none) if self.head == HEAD_SPANS else runs.classify(texts)

    def encode(
        self,
        texts: str | Iterable[str],
        *,
        prompt_name: str | None = None,
        prompt: str | None = None,
        batch_size: int = DEFAULT_BATCH,
        truncate_dim: int | None = None,
    ) -> np.ndarray:
        """Turn texts into vectors, as `SentenceTransformer.encode` does.

        Args:
            texts: one text, or what gives several in an order.
            prompt_name: which of `prompts` is put before each text; default: the model's own default, mostly none.
            prompt: the text to put before each text, in place of one of `prompts`.
            batch_size: as in a call.
            truncate_dim: take the first numbers of each vector, so many; default: the model's own default, mostly all. Vectors of length
                1 are shorter then, as in sentence-transformers.

        Returns:
            ``(rows, D) float32``, in the order of the texts.

        Raises:
            InputError: the model gives no vectors, an unknown name of a prompt, a name and a text at once, more numbers than a vector
                has; or as a call does.
        """
        self._expect(HEAD_EMBEDDING, HEAD_HYBRID, what="encode is")
        listed, (whole, first) = as_strings(texts, "texts"), self._dimensions(truncate_dim)
        runs = BatchRunner(self, batch_size, False, self._prompt(prompt_name, prompt))
        return np.ascontiguousarray(embedding.answers(runs.vectors(listed), whole)[:, :first])

    def encode_query(
        self,
        texts: str | Iterable[str],
        *,
        prompt_name: str | None = None,
        prompt: str | None = None,
        batch_size: int = DEFAULT_BATCH,
        truncate_dim: int | None = None,
    ) -> Any:
        """Turn queries into vectors: `encode` with the prompt "query" where the call names no other; without if the model has none.

        Models with a vector for each token give a list, ``(n_i, D) float32`` for each query, which `maxsim` scores.
        """
        prompt_name, prompt = self._usual(QUERY, prompt_name, prompt)
        if self.head == HEAD_VECTORS:
            return self._vectors(texts, QUERY, self._prompt(prompt_name, prompt), batch_size, truncate_dim)
        return self.encode(
            texts, prompt_name=prompt_name, prompt=prompt, batch_size=batch_size, truncate_dim=truncate_dim
        )

    def encode_document(
        self,
        texts: str | Iterable[str],
        *,
        prompt_name: str | None = None,
        prompt: str | None = None,
        batch_size: int = DEFAULT_BATCH,
        truncate_dim: int | None = None,
    ) -> Any:
        """Turn documents into vectors: `encode` with the prompt "document" where the call names no other; without if the model has none.

        Models with a vector for each token give a list, ``(n_i, D) float32`` for each document. Tokens that the model drops have no vector,
        and neither have those that it skips, such as punctuation.
        """
        prompt_name, prompt = self._usual(DOCUMENT, prompt_name, prompt)
        if self.head == HEAD_VECTORS:
            return self._vectors(texts, DOCUMENT, self._prompt(prompt_name, prompt), batch_size, truncate_dim)
        return self.encode(
            texts, prompt_name=prompt_name, prompt=prompt, batch_size=batch_size, truncate_dim=truncate_dim
        )

    def rank(
        self,
        query: str,
        documents: Iterable[str],
        *,
        top_k: int | None = None,
        prompt_name: str | None = None,
        prompt: str | None = None,
        batch_size: int = DEFAULT_BATCH,
    ) -> list[Ranked]:
        """Sort documents by how well they fit a query, as `CrossEncoder.rank` does; with a vector for each token, by `maxsim`.

        Args:
            query: first text of each pair.
            documents: second texts.
            top_k: documents to return, at most; default: all.
            prompt_name, prompt: as of `encode`: an instruction for models that take one; with vectors of tokens it is the query's.
            batch_size: as in a call.

        Returns:
            Documents, best first. A score is the logistic function of the model's output, from 0 to 1, unless its configuration says
            otherwise; with vectors of tokens it is what `maxsim` gives.

        Raises:
            InputError: the model does not answer pairs with one number; or as a call does.
        """
        self._expect(HEAD_SEQUENCE, HEAD_VECTORS, what="rank is")
        if self.head == HEAD_SEQUENCE and len(self.labels) != 1:
            raise InputError(
                f"rank: the model answers with {len(self.labels)} labels; accepted are models with one output, as rerankers have; "
                "to classify, call the model itself (or leave --query out)"
            )
        if top_k is not None:
            check_int("top_k", top_k, 1)
        if not isinstance(query, str):
            raise InputError(f"query: got {type(query).__name__}; accepted is a string")
        listed = as_strings(documents, "documents")
        if self.head == HEAD_VECTORS:
            asked = self.encode_query([query], prompt_name=prompt_name, prompt=prompt, batch_size=batch_size)
            found = vectors.maxsim(asked, self.encode_document(listed, batch_size=batch_size))[0]
        else:
            runs = BatchRunner(self, batch_size, False, self._prompt(prompt_name, prompt))
            values = runs.vectors([(query, document) for document in listed])
            found = sequence.ranking(np.array(values).reshape(-1), self._config.activation)
        order = np.argsort(-found, kind="stable")[:top_k]
        return [Ranked(int(i), float(found[i]), listed[i]) for i in order]

    def zero_shot(
        self,
        texts: str | Iterable[str],
        labels: str | Iterable[str],
        hypothesis_template: str = zero_shot.HYPOTHESIS,
        multi_label: bool = False,
        *,
        batch_size: int = DEFAULT_BATCH,
    ) -> list[ZeroShotPrediction]:
        """Say which of these labels a text has, with a model of natural language inference, as transformers' pipeline does.

        Each text is read with a sentence about each label, which is never cut.

        Args:
            labels: a list, or one string with commas.
            hypothesis_template: the sentence, with {} for the label.
            multi_label: judge each label alone, so that a text may have several; else the scores of all add up to 1.
            batch_size: pairs run at once, at most.

        Raises:
            InputError: no label of the model is called entailment, a template without a place for the label, a label too long for the
                model; or as a call does.
        """
        self._expect(HEAD_SEQUENCE, what="zero_shot is")
        entails = zero_shot.entailment(self.labels)
        if entails is None or len(self.labels) < 2 or self.template is not None:
            raise InputError(
                f"zero_shot: the model has the labels {quoted(self.labels)}; accepted are models of natural language inference, with "
                "a label 'entailment' in id2label of their config.json"
            )
        listed, names = as_strings(texts, "texts"), zero_shot.checked(labels)
        sentences = zero_shot.hypotheses(names, hypothesis_template)
        if not listed:
            return []
        pairs = [(text, sentence) for text in listed for sentence in sentences]
        logits, cut = BatchRunner(self, batch_size, False).judge(pairs)
        shape = (len(listed), len(names))
        found = zero_shot.answers(logits.reshape(*shape, -1), entails, multi_label)
        truncated = [any(cut[i : i + len(names)]) for i in range(0, len(pairs), len(names))]
        return [
            ZeroShotPrediction(labels=[names[i] for i in order], scores=values, truncated=long)
            for (order, values), long in zip(found, truncated)
        ]

    def kept(
        self,
        texts: Text | Iterable[Text],
        *,
        prompt_name: str | None = None,
        prompt: str | None = None,
        batch_size: int = DEFAULT_BATCH,
    ) -> list[Reading]:
        """Say of each text which of its tokens stayed, whatever the model answers with. Long contexts are cut as other texts are.

        Models with a vector for each token read the texts as documents.

        Raises:
            InputError, MissingDependencyError: as a call or `encode` does.
        """
        return BatchRunner(self, batch_size, True, self._before(prompt_name, prompt)).read(as_texts(texts))

    def placed(
        self, texts: Text | Iterable[Text], *, prompt_name: str | None = None, prompt: str | None = None
    ) -> list[TextWithOffsets]:
        """Tokenize texts as `kept` reads them."""
        return self.encoded_placed(as_texts(texts), self._before(prompt_name, prompt))

    def _before(self, prompt_name: str | None, prompt: str | None) -> str:
        """Return the prompt that `kept` and `placed` put before texts: the one of the method that answers them."""
        if self.head == HEAD_VECTORS:
            prompt_name, prompt = self._usual(DOCUMENT, prompt_name, prompt)
        return self._prompt(prompt_name, prompt)

    def _windows(self, changes: Mapping[str, int] | None) -> Windows:
        """Return how contexts are read, with these changes; raises InputError where the model cannot."""
        if changes is None:
            return self.windows
        self._expect(HEAD_SPANS, what="windows are")
        chosen = self.windows.changed(changes)
        if chosen.max_tokens > self.max_tokens:
            raise InputError(
                f"windows.max_tokens: got {chosen.max_tokens}; {self.target} reads at most {self.max_tokens} tokens"
            )
        return chosen


def load(
    directory: str | os.PathLike[str],
    target: str | None = None,
    threads: int = 0,
    prefer: str = PRECISION,
    check_hashes: bool = True,
) -> Predictor:
    """Open an output directory of adtp-export; ``load(OUT)(["a text", "another"])`` answers in the form of the model's head.

    See `Predictor` for the arguments and errors, and `artifacts.hub.located` for ``load("user/repo")``, a repository of the Hub.
    """
    return Predictor(directory, target, threads, prefer, check_hashes)
