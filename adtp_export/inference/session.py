"""An output directory, opened on the best target this machine has: tokenized batches in, arrays out.

Needs numpy, tokenizers and one runtime; neither torch nor transformers is imported.
"""

from __future__ import annotations

import functools
import logging
import os
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..artifacts.checks import check_arguments, checked_model
from ..artifacts.hub import located
from ..artifacts.manifest import is_replaced, open_settled
from ..artifacts.records import Manifest
from ..contract import END_LOGITS, HEAD_IMAGES, HEAD_SPANS, HEAD_TEXT, KEPT_SITE, OUTPUTS, START_LOGITS
from ..data.readers import Text
from ..data.sides import DOCUMENT
from ..data.tokenize import Batch, TokenizedText, check_batch, encode
from ..data.windows import TextWithOffsets, encode_placed
from ..errors import InputError, needs_extras
from ..runtimes import Engine
from ..targets.choice import PRECISION, choose
from ..targets.sizes import open_with_sizes, sizes_of
from ..targets.specs import RUNTIMES, profile_of
from .answers import for_head
from .config import read_config
from .words import Words


class Session:
    """What a `Predictor` runs on; arguments, attributes and errors are the ones it documents."""

    def __init__(
        self,
        directory: str | os.PathLike[str],
        target: str | None = None,
        threads: int = 0,
        prefer: str = PRECISION,
        check_hashes: bool = True,
    ) -> None:
        check_arguments(directory, target, threads)
        here = located(directory)
        lasting = Path(here).absolute() if here is directory else directory  # the name of a repository of the Hub
        self._asked = (lasting, target, threads, prefer, check_hashes)
        self.directory, self._threads, self._check_hashes = Path(here).absolute(), threads, check_hashes
        open_settled(self.directory, functools.partial(self._open, target, prefer))

    def _open(self, target: str | None, prefer: str, manifest: Manifest) -> None:
        self.manifest = manifest
        if self.manifest.checkpoint.get("head") == HEAD_IMAGES:
            raise InputError(
                f"{self.directory} holds a vision tower; type: adtp_export.encode_images({str(self.directory)!r}, [...]), or adtp-run "
                "with --image"
            )
        if self.manifest.checkpoint.get("head") == HEAD_TEXT:
            raise InputError(
                f"{self.directory} holds a model that generates text; type: adtp_export.generate({str(self.directory)!r}, texts=[...]), or "
                "adtp-run"
            )
        config, self.tokenizer = read_config(self.directory, self._file)
        self.labels, self.problem_type, self.sites = config.labels, config.kind, config.adtp.prune_sites
        self.pad_id, self.max_tokens = config.pad_id, config.max_tokens
        for_head(config.adtp.head)
        self.head, self.prompts, self._config = config.adtp.head, config.adtp.prompts, config
        self.template, self.sides = config.adtp.template, config.adtp.vectors
        choice = choose(self.manifest, target, prefer, self.directory, self._threads)
        self.target, self.reason, self.spec = choice.name, choice.reason, choice.spec
        logging.getLogger("adtp_export").info("%s: %s", self.target, self.reason)
        chosen = self.manifest.targets[self.target]
        self.profile = profile_of(chosen)
        if self.profile:  # an engine takes no more than it was built for
            self.max_tokens = min(self.max_tokens, self.profile["seq"].max)
        self.windows = config.adtp.windows.within(self.max_tokens)
        self._engine = open_with_sizes(self.manifest.targets, self.spec, self._file, self._threads)
        self.inputs = self._engine.inputs
        self._wanted = [START_LOGITS, END_LOGITS] if self.head == HEAD_SPANS else [next(iter(OUTPUTS[self.head]))]
        if lacking := [name for name in self._wanted if name not in self._engine.outputs]:
            raise InputError(
                f"{self.directory}: {chosen.file} gives {', '.join(self._engine.outputs)}, and not {', '.join(lacking)}; export again "
                "with --force"
            )
        self._inspector: Engine | None = None
        self._inspecting = threading.Lock()

    def __reduce__(self) -> tuple[Any, ...]:
        """Be pickled as what was asked for. So another process opens OUT as `load` does there, and reads what is in it then."""
        return type(self), self._asked

    @functools.cached_property
    def words(self) -> Words:
        """Which tokens go on with a word; reading it off the tokenizer takes longer than a text does."""
        return Words(self.tokenizer)

    def encoded(self, texts: Sequence[Text], prompt: str = "") -> list[TokenizedText]:
        """Tokenize texts or pairs as the model reads them: with a prompt before them, and in its chat template where it has one."""
        if self.template is not None:
            return self.template.encode(self.tokenizer, texts, self.max_tokens, prompt)
        if self.sides is not None:
            return self.sides.encode(self.tokenizer, _single(prompt, texts), DOCUMENT, self.max_tokens)
        return encode(self.tokenizer, put_before(prompt, texts), self.max_tokens)

    def encoded_placed(self, texts: Sequence[Text], prompt: str = "") -> list[TextWithOffsets]:
        """Tokenize as `encoded` does, and say where each token is; in a chat template that is a place in the rendered text."""
        if self.template is not None:
            return self.template.placed(self.tokenizer, texts, self.max_tokens, prompt)
        if self.sides is not None:
            return self.sides.placed(self.tokenizer, _single(prompt, texts), DOCUMENT, self.max_tokens)
        return encode_placed(self.tokenizer, put_before(prompt, texts), self.max_tokens)

    def _file(self, name: str) -> Path:
        """Return a file's path, compared with the manifest, and so is the file that holds its weights."""
        return checked_model(self.directory, self.manifest, name, self._check_hashes)

    def run(self, batch: Batch) -> np.ndarray:
        """Run one tokenized batch of int64 ``(B, S)`` inputs; return fp32 of a shape that the head decides.

        sequence: ``logits (B, num_labels)``; tokens: ``logits (B, S, num_labels)``; spans: logits of start and end, ``(B, S, 2)``;
        embedding, hybrid: vectors ``(B, D)``; sparse: weights ``(B, vocab_size)``; vectors:
        ``(B, S, D)``; masked: logits ``(B, masks, vocab_size)``. Padding has zeros.

        Raises:
            InputError: no mapping of arrays, missing inputs, left padding, an empty row, ids out of range, or rows that are too
                long.
        """
        found = self.outputs(batch, self._wanted)
        outputs = [found[name] for name in self._wanted]
        return np.stack(outputs, -1) if len(outputs) > 1 else outputs[0]

    def outputs(self, batch: Batch, names: Sequence[str]) -> Mapping[str, np.ndarray]:
        """Run one batch as `run` does; return several outputs of the head by name, as `contract.OUTPUTS` has them."""
        return self._engine.run(self._checked(batch), list(names))

    def kept_site(self, batch: Batch) -> np.ndarray:
        """Say what became of each token: ``(B, S) int32``, the index of the site that dropped it,
        ``len(sites)`` if it stayed, -1 for padding. Checks as `run` does.
        """
        return self.inspector().run(self._checked(batch))[KEPT_SITE]

    def inspector(self) -> Engine:
        """Return an engine with the output ``kept_site`` as well, made on first use."""
        with self._inspecting:
            if self._inspector is None:
                self._inspector = self._engine if KEPT_SITE in self._engine.outputs else self._open_debug_form()
            return self._inspector

    def _checked(self, batch: Batch) -> Batch:
        if not isinstance(batch, Mapping):
            raise InputError(f"batch: got {type(batch).__name__}; accepted is a dict of arrays by input name")
        missing = [name for name in self.inputs if name not in batch]
        if missing:
            raise InputError(f"batch: {', '.join(missing)} missing; the model takes {', '.join(self.inputs)}")
        try:
            batch = {name: np.asarray(batch[name]) for name in self.inputs}
        except ValueError as error:
            raise InputError(
                f"batch: rows of different lengths; accepted are arrays (B, S), padded on the right ({error})"
            ) from error
        check_batch(batch, self._config.vocab_size, self._config.type_vocab_size, self.max_tokens)
        return {name: array.astype(np.int64, copy=False) for name, array in batch.items()}

    def _open_debug_form(self) -> Engine:
        with needs_extras("telling which tokens stay (--kept)"):
            from ..graph.debug import debug_form
        chosen = self.manifest.targets[str(spec := sizes_of(self.manifest.targets, self.spec)[-1])]
        try:
            model = self._file(chosen.details.get("model", chosen.file))  # an engine names its model
        except InputError:
            if is_replaced(self.directory, self.manifest):
                raise InputError(f"{self.directory} was replaced since it was loaded; load it again") from None
            raise
        with debug_form(model) as path:
            return RUNTIMES[spec.runtime].open_model(path, spec, self.profile, self._threads)


def _single(prompt: str, texts: Sequence[Text]) -> list[str]:
    """Return texts that are no pairs, with a prompt before them; raises InputError for pairs."""
    found = []
    for i, text in enumerate(texts):
        if not isinstance(text, str):
            raise InputError(f"texts: got a pair at index {i}; accepted for vectors of tokens are strings")
        found.append(prompt + text)
    return found


def put_before(prompt: str, texts: Sequence[Text]) -> Sequence[Text]:
    """Put a prompt before texts; of a pair before the first one."""
    if not prompt:
        return texts
    return [prompt + text if isinstance(text, str) else (prompt + text[0], text[1]) for text in texts]
