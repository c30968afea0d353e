"""Small encoders and data for tests of training, and steps that remember what they were told."""

import contextlib
import random
import runpy

import pytest
from testbed import ROOT
from transformers import (
    AutoModel,
    AutoTokenizer,
    BertConfig,
    BertForSequenceClassification,
)

from adtp_export.pipeline.progress import Steps


class Heard(Steps):
    """Steps that remember what they were told."""

    def __init__(self):
        super().__init__()
        self.notes, self.shares = [], []

    @contextlib.contextmanager
    def showing(self, text):
        yield lambda done, total: self.shares.append(done / total)

    def note(self, text):
        self.notes.append(text)


class StoppedAtProgress(Heard):
    """Stops a run when it tells its progress for the `at`-th time."""

    def __init__(self, at):
        super().__init__()
        self.at = at

    def showing(self, text):
        def progress(done, total):
            self.at -= 1
            if self.at == 0:
                raise KeyboardInterrupt

        return contextlib.nullcontext(progress)


@pytest.fixture(scope="module")
def base(tmp_path_factory, demo):
    """A pretrained encoder, small enough to fine-tune in seconds."""
    directory = tmp_path_factory.mktemp("base")
    tokenizer = AutoTokenizer.from_pretrained(demo)
    size = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    BertForSequenceClassification(
        BertConfig(vocab_size=len(tokenizer), max_position_embeddings=64, **size)
    ).save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def headless(tmp_path_factory, base):
    """The encoder alone, as it comes from pretraining."""
    directory = tmp_path_factory.mktemp("headless")
    AutoModel.from_pretrained(base).save_pretrained(directory)
    AutoTokenizer.from_pretrained(base).save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def reviews(tmp_path_factory):
    """Labelled reviews: train.tsv and test.tsv."""
    directory = tmp_path_factory.mktemp("reviews")
    writer = runpy.run_path(str(ROOT / "demo" / "corpus.py"))["Writer"](random.Random(0), False)
    for name, count in (("train", 240), ("test", 60)):
        rows = (writer.review() for _ in range(count))
        lines = (f"{text}\t{('negative', 'positive')[label]}\n" for text, label in rows)
        (directory / f"{name}.tsv").write_text("text\tlabel\n" + "".join(lines))
    return directory
