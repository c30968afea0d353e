"""The file that takes texts: written, and compared with the tokenizer and with the model that it holds."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import onnx

from ...contract import HEAD_SPANS, INPUT_IDS, TEXT
from ...data.tokenize import encode, pad
from ...errors import VerificationError, quoted
from ...graph import strings
from ...runtimes.onnxruntime import OnnxRuntimeEngine
from ...verify import samples
from .context import ExportContext, ModelFile
from .plan import ExportPlan

if TYPE_CHECKING:
    from ...model.checkpoint import Checkpoint

STRINGS = "model.strings.onnx"
ROWS = 256
"""Of verification texts that are compared."""
_LARGEST = 8
"""Texts of a batch, where they are not alone."""

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


def obstacle(checkpoint: Checkpoint) -> str | None:
    """Say why a checkpoint can have no such file; None where it can."""
    if checkpoint.student.config.head == HEAD_SPANS:
        return "the model answers questions about a context, and the file takes single texts"
    if (why := strings.obstacle(checkpoint.tokenizer)) is not None:
        return f"the tokenizer cannot be expressed in ONNX: {why}"
    return None


def write_strings(run: ExportContext, portable: ModelFile, plan: ExportPlan) -> tuple[str, ...]:
    """Write `STRINGS`, and compare it unless nothing is to be verified; return a note.

    Raises:
        VerificationError: it reads other tokens than the tokenizer, or answers otherwise than the model.
    """
    file, student = run.place(STRINGS), run.checkpoint.student
    with run.steps.step("strings_s", "putting the tokenizer before the model"), run.writing():
        before = strings.tokenizing(
            run.checkpoint.tokenizer, run.checkpoint.max_tokens, student.input_names, student.pad_id
        )
        strings.join(before, portable.file, file)
    if plan.options.skip_parity_check:
        return (f"{run.name(file)} has not been verified",)
    texts = [*HARD, *_of_rows(plan, student.config.head)]
    with (
        run.steps.step("verify_strings_s", f"comparing its tokens on {len(texts)} texts"),
        tempfile.TemporaryDirectory() as scratch,
    ):
        alone = Path(scratch) / file.name
        onnx.save(before, alone)
        check(run, texts, OnnxRuntimeEngine(alone, extensions=True))
        _check_answers(run, HARD[:_LARGEST], portable.file, file)
    return (
        f"{run.name(file)} takes texts. Its tokens are those of the tokenizer on {len(texts)} texts, {len(HARD)} of them hard ones",
    )


def check(run: ExportContext, texts: Sequence[str], engine: OnnxRuntimeEngine) -> None:
    """Compare the inputs that an engine makes of texts with those of the tokenizer: all texts in batches, the hard ones alone as well.

    Raises:
        VerificationError: one differs; the message says on which text.
    """
    batches = [[text] for text in HARD] + [list(texts[i : i + _LARGEST]) for i in range(0, len(texts), _LARGEST)]
    student = run.checkpoint.student
    for batch in batches:
        rows = encode(run.checkpoint.tokenizer, batch, run.checkpoint.max_tokens)
        expected = pad(rows, student.pad_id, student.input_names)
        found = engine.run({TEXT: np.array(batch, dtype=object)})
        for i, text in enumerate(batch):
            for name, array in expected.items():
                if found[name].shape == array.shape and np.array_equal(found[name][i], array[i]):
                    continue
                ids = [row[INPUT_IDS][i][:20].tolist() for row in (expected, found)]
                raise VerificationError(
                    f"--with-tokenizer: the tokenizer reads {quoted(text)} as {ids[0]}, and its form in ONNX as {ids[1]} ({name} differ); "
                    "leave the option out. Nothing was published"
                )


def _check_answers(run: ExportContext, texts: Sequence[str], model: Path, file: Path) -> None:
    """See that the file answers texts as the model answers their tokens, to the bit: it is the same graph."""
    student = run.checkpoint.student
    rows = encode(run.checkpoint.tokenizer, texts, run.checkpoint.max_tokens)
    batch = pad(rows, student.pad_id, student.input_names)
    expected = OnnxRuntimeEngine(model).run(batch)
    found = OnnxRuntimeEngine(file, extensions=True).run({TEXT: np.array(texts, dtype=object)})
    for name, array in expected.items():
        if not np.array_equal(found[name], array):
            raise VerificationError(
                f"--with-tokenizer: {file.name} gives other {name} than {model.name}. Nothing was published"
            )


def _of_rows(plan: ExportPlan, head: str) -> Iterator[str]:
    """Yield the texts of verification rows; of pairs both, of words the text that they make."""
    from ...data.rows import read

    rows = [(text, None) for text in samples.built_in_texts(pairs=False)]
    if plan.verify_text is not None:
        rows, _ = samples.sample(read(head, plan.verify_text), ROWS)
    for row, _ in rows:
        parts = [" ".join(row)] if isinstance(row, list) else [row] if isinstance(row, str) else row
        yield from (part.replace("\0", "") for part in parts)
