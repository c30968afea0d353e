"""Length-Adaptive Transformer for questions, where the first token may fall: against a slow model of its paper, text by text."""

import math

import numpy as np
import pytest
import torch
import transformers
from plain_models import SHAPE, add_tokenizer, write_plain, write_sentence_transformer
from testbed import as_numpy, make_batch

import adtp_export
from adtp_export.errors import InputError
from adtp_export.graph import program
from adtp_export.graph.debug import debug_form
from adtp_export.imports import ReadOptions, open_checkpoint
from adtp_export.model.packed import PackedStudent
from adtp_export.runtimes.onnxruntime import OnnxRuntimeEngine
from adtp_export.runtimes.openvino import OpenVinoEngine
from adtp_export.verify.oracle import MULTIPLE, run_oracle
from adtp_export.verify.parity import compare

LENGTHS, LAYERS, HEADS = [14, 7, 3], 3, SHAPE["num_attention_heads"]
TOKENS = [30, 20, 12, 9, 5, 2, 1, *[25] * 8]
BERT_NAMES = (
    "attention.self.query", "attention.self.key", "attention.self.value", "attention.output.dense", "attention.output.LayerNorm",
    "intermediate.dense", "output.dense", "output.LayerNorm",
)  # fmt: skip
FAMILIES = {
    "bert": (transformers.BertForQuestionAnswering, transformers.BertConfig, {}, "encoder.layer", BERT_NAMES),
    "roberta": (
        transformers.RobertaForQuestionAnswering,
        transformers.RobertaConfig,
        {"pad_token_id": 1, "type_vocab_size": 1},
        "encoder.layer",
        BERT_NAMES,
    ),
    "distilbert": (
        transformers.DistilBertForQuestionAnswering,
        transformers.DistilBertConfig,
        {"dim": 32, "n_layers": LAYERS, "n_heads": HEADS, "hidden_dim": 48},
        "transformer.layer",
        (
            *(f"attention.{name}_lin" for name in ("q", "k", "v", "out")), "sa_layer_norm", "ffn.lin1", "ffn.lin2",
            "output_layer_norm",
        ),
    ),
}  # fmt: skip
"""transformers' class, its configuration, further fields, and where the parts of a layer are."""


def write(directory, family):
    make, configure, fields, *_ = FAMILIES[family]
    torch.manual_seed(0)
    model = make(configure(**{**SHAPE, "num_hidden_layers": LAYERS, **fields})).eval()
    for name, weight in model.named_parameters():  # biases and norms that do something
        if weight.ndim == 1:
            torch.nn.init.normal_(weight.data, 1.0 if "norm" in name.lower() and name.endswith("weight") else 0.0, 0.3)
    model.save_pretrained(directory)
    return add_tokenizer(directory)


class Slow:
    """One text of n tokens at a time, in fp64, as section 3 of the paper has it: drop after attention, restore at the end."""

    def __init__(self, weights, family):
        self.w = {name: tensor.double().numpy() for name, tensor in weights.items()}
        self.family, (*_, self.layers, self.names) = family, FAMILIES[family]

    def linear(self, x, name):
        return x @ self.w[f"{name}.weight"].T + self.w[f"{name}.bias"]

    def norm(self, x, name):
        x = (x - x.mean(1, keepdims=True)) / np.sqrt(x.var(1, keepdims=True) + 1e-12)
        return x * self.w[f"{name}.weight"] + self.w[f"{name}.bias"]

    def embed(self, ids, types):
        tables = f"{self.family}.embeddings"
        places = np.arange(len(ids)) + (2 if self.family == "roberta" else 0)
        x = self.w[f"{tables}.word_embeddings.weight"][ids] + self.w[f"{tables}.position_embeddings.weight"][places]
        if self.family != "distilbert":
            x = x + self.w[f"{tables}.token_type_embeddings.weight"][types]
        return self.norm(x, f"{tables}.LayerNorm")

    def answer(self, ids, types):
        """Return the logits of start and end ``(n, 2)``, and at which site each token fell (LAYERS: at none)."""
        x = self.embed(ids, types)
        alive, restored, fell = np.arange(len(ids)), x.copy(), np.zeros(len(ids), int)
        for i, length in enumerate(LENGTHS):
            query, key, value, out, norm, wide, narrow, last = (
                f"{self.family}.{self.layers}.{i}.{name}" for name in self.names
            )
            q, k, v = (np.split(self.linear(x, name), HEADS, 1) for name in (query, key, value))
            scores = [a @ b.T / math.sqrt(a.shape[1]) for a, b in zip(q, k)]
            given = [np.exp(s) / np.exp(s).sum(1, keepdims=True) for s in scores]
            y = self.norm(self.linear(np.hstack([p @ c for p, c in zip(given, v)]), out) + x, norm)
            received = sum(p.sum(0) for p in given)
            keep = np.sort(np.argsort(-received, kind="stable")[: min(length, len(alive))])
            alive, y = alive[keep], y[keep]
            fell[alive] += 1
            h = self.linear(y, wide)
            h = h / 2 * (1 + np.vectorize(math.erf)(h / math.sqrt(2)))
            x = restored[alive] = self.norm(self.linear(h, narrow) + y, last)
        return self.linear(restored, "qa_outputs"), fell


@pytest.fixture(
    scope="module", params=["bert", *(pytest.param(f, marks=pytest.mark.slow) for f in FAMILIES if f != "bert")]
)
def family(request):
    return request.param


@pytest.fixture(scope="module")
def checkpoint(family, tmp_path_factory):
    directory = write(tmp_path_factory.mktemp("questions") / family, family)
    return open_checkpoint(directory, ReadOptions(length_config=LENGTHS))


@pytest.fixture(scope="module")
def batch(checkpoint):
    batch = make_batch(TOKENS, 32, vocab_size=1238)
    batch["input_ids"][batch["attention_mask"].bool() & (batch["input_ids"] < 5)] = 5  # no padding inside texts
    return {name: batch[name] for name in checkpoint.student.input_names}


@pytest.fixture(scope="module")
def expected(checkpoint, family, batch):
    """The slow model's logits ``(B, S, 2)`` and kept_site ``(B, S)``."""
    slow = Slow(checkpoint.student.state_dict(), family)
    logits, kept = np.zeros((len(TOKENS), 32, 2)), np.full((len(TOKENS), 32), -1)
    for b, n in enumerate(TOKENS):
        types = batch.get("token_type_ids", torch.zeros_like(batch["input_ids"]))[b, :n].numpy()
        logits[b, :n], kept[b, :n] = slow.answer(batch["input_ids"][b, :n].numpy(), types)
    return logits, kept


def test_first_tokens_fall_and_others_stay(expected):
    _, kept = expected
    assert (kept[:, 0] < LAYERS).any()
    assert (kept[:, 0] == LAYERS).any()
    assert all(((row == LAYERS).sum() == min(LENGTHS[-1], n)) for row, n in zip(kept, TOKENS))


def test_padded_pytorch(checkpoint, batch, expected):
    exact = type(checkpoint.student)(checkpoint.student.config).double().eval()
    exact.load_state_dict(checkpoint.student.state_dict())
    with torch.no_grad():
        answer = exact(**batch)
    assert np.array_equal(answer.kept_site, expected[1])
    for side, logits in enumerate((answer.start_logits, answer.end_logits)):
        np.testing.assert_allclose(logits, expected[0][..., side], rtol=0, atol=1e-11)


@pytest.fixture(scope="module")
def oracle(checkpoint, batch):
    return run_oracle(checkpoint.student, [as_numpy(batch)])


def test_packed_pytorch(checkpoint, batch, expected, oracle):
    outputs, _ = PackedStudent(checkpoint.student)(**batch)
    for side, (name, logits) in enumerate(zip(("start_logits", "end_logits"), outputs)):
        assert np.abs(logits.numpy() - expected[0][..., side]).max() <= MULTIPLE * oracle.output_errors[name]


@pytest.fixture(scope="module")
def exported(checkpoint, tmp_path_factory):
    path = tmp_path_factory.mktemp("exported") / "model.onnx"
    program.save(program.export_portable(checkpoint.student, {"version": "test"}), path)
    return path


@pytest.mark.usefixtures("has_openvino")
@pytest.mark.parametrize("load", [OnnxRuntimeEngine, OpenVinoEngine])
def test_runtimes(load, exported, batch, expected, oracle):
    """The tokens of the slow model, its logits to fp32 rounding, and a verdict: margins count the first token, too."""
    with debug_form(exported) as debug:
        answer = load(debug).run(as_numpy(batch))
        verdict = compare(oracle, load(exported), load(debug), exact_debug=load is OnnxRuntimeEngine)
    assert np.array_equal(answer["kept_site"], expected[1])
    for side, name in enumerate(("start_logits", "end_logits")):
        assert np.abs(answer[name] - expected[0][..., side]).max() <= MULTIPLE * oracle.output_errors[name]
    assert verdict.failure is None


def test_planted_mistakes_are_noticed(checkpoint, batch, expected):
    """A first token that always stays; a dropped token that answers with the state at its cut."""
    student = checkpoint.student
    for name, value in (("keeps_first", True), ("restores_entered", False)):
        for pruner in student.pruners.values():
            setattr(pruner, name, value)
        try:
            answer = student(**batch)
        finally:
            for pruner in student.pruners.values():
                setattr(pruner, name, not value)
        assert np.abs(answer.start_logits - expected[0][..., 0]).max() > 0.01
        assert (name == "restores_entered") == np.array_equal(answer.kept_site, expected[1])


def test_a_pooler_that_nobody_reads_is_left_out(tmp_path):
    """The original's class for questions has BERT's pooler."""
    directory = write(tmp_path / "model", "bert")
    model = transformers.BertForQuestionAnswering.from_pretrained(directory)
    model.bert.pooler = transformers.models.bert.modeling_bert.BertPooler(model.config)
    model.save_pretrained(directory)
    checkpoint = open_checkpoint(directory, ReadOptions(length_config=LENGTHS))
    assert any("does not use: bert.pooler.dense" in note for note in checkpoint.notes)


def test_an_export_of_questions(tmp_path):
    """All of it: notes, the verdict on built-in questions, and what OUT says of the schedule."""
    directory = write_plain(tmp_path / "model", "spans")
    manifest = adtp_export.export(directory, tmp_path / "out", length_config="12,6")
    assert {target.status for target in manifest.targets.values()} == {"verified"}
    assert any("the first token may be dropped" in note.text for note in manifest.notes)
    told = {name: manifest.checkpoint[name] for name in ("method", "lengths", "order", "keep_first", "restore")}
    assert told == {
        "method": "schedule", "lengths": [12, 6], "order": "received", "keep_first": False, "restore": "layer"
    }  # fmt: skip
    answer = adtp_export.load(tmp_path / "out")([("Who wrote it?", "Jane Austen wrote it, long ago.")])[0]
    assert answer.answer in "Jane Austen wrote it, long ago."


def test_heads_that_read_the_first_token_keep_it(tmp_path):
    """For them the reader protects it; a checkpoint of format 2 that does not is refused."""
    directory = write_plain(tmp_path / "model", "sequence")
    checkpoint = open_checkpoint(directory, ReadOptions(length_config="12,6"))
    assert checkpoint.student.config.settings.keep_first
    checkpoint.student.config.pruning["keep_first"] = False
    checkpoint.student.save_pretrained(tmp_path / "student")
    add_tokenizer(tmp_path / "student")
    with pytest.raises(InputError, match="keep_first: got false, and this model answers with the first token"):
        open_checkpoint(tmp_path / "student")
    fields = {"pooling": "first", "normalize": False, "projections": []}
    config = type(checkpoint.student.config)(
        backbone=checkpoint.student.config.backbone,
        pruning=checkpoint.student.config.pruning,
        head="embedding",
        embedding=fields,
    )
    with pytest.raises(InputError, match="head 'embedding'"):
        adtp_export.model.heads.head_class("embedding")(config)
    config.embedding = {**fields, "pooling": "mean"}
    adtp_export.model.heads.head_class("embedding")(config)


def test_a_pipeline_of_sentence_transformers_is_not_taken_for_one(tmp_path):
    with pytest.raises(InputError, match="--length-config is for checkpoints of Length-Adaptive Transformer"):
        open_checkpoint(write_sentence_transformer(tmp_path / "model"), ReadOptions(length_config="12,6"))
