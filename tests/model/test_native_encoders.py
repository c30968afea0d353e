"""GTE, NomicBERT, jina-embeddings-v3 and Gemma: names of weights as transformers writes them, and models of any shape."""

import pytest
import torch
import transformers
from decoder_models import LLAMA3, YARN
from hypothesis import given, settings
from hypothesis import strategies as st
from plain_models import add_tokenizer
from safetensors.torch import load_file
from testbed import HEAD_FIELDS, as_numpy, make_batch, make_encoder
from tiny_models import GATED_BACKBONES, edit_weights
from tolerances import assert_within_oracle, oracle_on

from adtp_export.contract import OUTPUTS
from adtp_export.errors import InputError
from adtp_export.graph import program
from adtp_export.imports import ReadOptions, open_checkpoint
from adtp_export.model import PrunedEncoderConfig
from adtp_export.model.heads import head_class
from adtp_export.model.packed import PackedStudent
from adtp_export.runtimes.onnxruntime import OnnxRuntimeEngine
from adtp_export.runtimes.openvino import OpenVinoEngine
from adtp_export.verify.oracle import run_oracle
from adtp_export.verify.parity import compare

LENGTHS = ([24], [1], [1, 9, 4, 9], [20, 3, 1, 1, 11])
SHAPE = {
    "vocab_size": 1238,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
}


def batches_of(model):
    """Batches of each length; padding has the padding id, by which classifiers find the last token."""
    found = []
    for seed, lengths in enumerate(LENGTHS):
        batch = make_batch(lengths, max(lengths), types=2 if "token_type_ids" in model.input_names else 1, seed=seed)
        batch["input_ids"] = torch.where(batch["attention_mask"].bool(), batch["input_ids"], model.pad_id)
        found.append(batch)
    return found


def assert_packed_is_the_oracle(model):
    """Where tokens are not dropped, the oracle is transformers' own forward."""
    batches, packed = batches_of(model), PackedStudent(model)
    names = OUTPUTS[model.config.head]
    answers = [dict(zip(names, packed(**batch)[0], strict=True)) for batch in batches]
    assert_within_oracle(oracle_on(model, *batches), *answers)


@pytest.mark.parametrize("pruning", ["none", "adtp", "received-twice"])
@pytest.mark.parametrize("head", ["sequence", "tokens", "embedding"])
@pytest.mark.parametrize("backbone", GATED_BACKBONES)
def test_packed_is_padded(backbone, head, pruning):
    assert_packed_is_the_oracle(make_encoder(backbone, pruning, head=head, **HEAD_FIELDS[head]))


@pytest.mark.parametrize(
    ("backbone", "pruning", "head"),
    [("gte", "adtp", "embedding"), pytest.param("nomic_bert", "none", "tokens", marks=pytest.mark.slow)],
)
@pytest.mark.usefixtures("has_openvino")
def test_files_equal_the_oracle(tmp_path, backbone, pruning, head):
    model, path = make_encoder(backbone, pruning, head=head, **HEAD_FIELDS[head]), tmp_path / "model.onnx"
    graph = program.export_portable(model, {"version": "test"})
    program.add_debug_outputs(graph)
    program.save(graph, path)
    oracle = run_oracle(model, [as_numpy(batch) for batch in batches_of(model)])
    for load in (OnnxRuntimeEngine, OpenVinoEngine):
        assert compare(oracle, load(path)).failure is None


@pytest.mark.parametrize(
    ("name", "old", "asked"),
    [
        ("GteForSequenceClassification", "gte.encoder.layer.1.attention.qkv_proj.bias", None),
        ("GteForMaskedLM", "gte.encoder.layer.0.mlp.up_gate_proj.weight", "embedding"),
        ("GteForMaskedLM", "lm_head.norm.weight", "masked"),
        ("NomicBertModel", "encoder.layers.1.mlp.fc12.weight", None),
        ("NomicBertForTokenClassification", "nomic_bert.encoder.layers.0.attn.Wqkv.weight", None),
        ("JinaEmbeddingsV3ForQuestionAnswering", "roberta.encoder.layers.0.mixer.Wqkv.weight", None),
        ("JinaEmbeddingsV3Model", "emb_ln.weight", None),
    ],
)
def test_names_that_transformers_writes(tmp_path, name, old, asked):
    """The weights are those that transformers reads of the same file, and of one with its own names, as this package writes it."""
    torch.manual_seed(0)
    kind = getattr(transformers, name)
    kind(kind.config_class(**SHAPE)).save_pretrained(tmp_path)
    assert old in load_file(tmp_path / "model.safetensors")
    model = open_checkpoint(add_tokenizer(tmp_path), ReadOptions(head=asked)).student
    own = kind.from_pretrained(tmp_path)
    expected = {n.removeprefix(f"{own.base_model_prefix}."): tensor for n, tensor in own.state_dict().items()}
    for n, tensor in model.state_dict().items():
        assert torch.equal(tensor, expected[n.removeprefix(f"{own.base_model_prefix}.")]), n
    model.save_pretrained(tmp_path / "again")
    again = open_checkpoint(add_tokenizer(tmp_path / "again")).student.state_dict()
    assert all(torch.equal(tensor, again[n]) for n, tensor in model.state_dict().items())


def under_the_first_prefix(weights):
    """Names as the code of GTE's own has them."""
    for name in list(weights):
        weights["new." + name] = weights.pop(name)


@pytest.mark.parametrize(
    ("name", "fields", "change"),
    [
        ("GteModel", {"position_embedding_type": "rope"}, under_the_first_prefix),
        ("NomicBertModel", {"n_embd": 32}, None),
        ("JinaEmbeddingsV3Model", {"position_embedding_type": "rotary"}, None),
    ],
)
def test_what_transformers_keeps_of_an_older_configuration(tmp_path, name, fields, change):
    """It reads none of these fields; a model that it converted has them still."""
    kind = getattr(transformers, name)
    kind(kind.config_class(**SHAPE, **fields)).save_pretrained(tmp_path)
    if change is not None:
        edit_weights(tmp_path, change)
    own = kind.from_pretrained(tmp_path).state_dict()
    found = open_checkpoint(add_tokenizer(tmp_path)).student.state_dict()
    assert all(torch.equal(tensor, own[n]) for n, tensor in found.items())


def test_a_head_that_transformers_does_not_have():
    with pytest.raises(
        InputError,
        match="'spans', for which .* no gte model; accepted are sequence, tokens, embedding, sparse, masked, vectors, hybrid$",
    ):
        make_encoder("gte", "none", head="spans")


@st.composite
def shapes(draw):
    """Fields of a model of any of the families that positions turn."""
    pick = lambda *values: draw(st.sampled_from(values))  # noqa: E731
    family = pick(
        "gemma3_text", "gte", "nomic_bert", "jina_embeddings_v3", "llama", "mistral", "qwen2", "qwen3", "eurobert"
    )
    heads, layers = pick(1, 2, 3, 6), pick(1, 2, 3)
    rope = pick({"rope_type": "default"}, YARN, LLAMA3, {"rope_type": "linear", "factor": 2.0})
    fields = {
        "model_type": family,
        "vocab_size": 97,
        "hidden_size": heads * pick(4, 8, 16),
        "num_attention_heads": heads,
        "num_hidden_layers": layers,
        "intermediate_size": pick(17, 48),
        "max_position_embeddings": 24,
        "initializer_range": 0.2,
        "pad_token_id": pick(0, 5),
        "hidden_act": pick("silu", "gelu", "relu", "gelu_pytorch_tanh"),
        "rope_parameters": {"rope_theta": pick(100.0, 1e4), **rope},
        **({} if family == "qwen2" else {"head_dim": pick(4, 10, 16)}),
    }
    if family in ("gte", "nomic_bert", "jina_embeddings_v3"):
        return {**fields, "type_vocab_size": pick(*([0] if family == "gte" else []), 1, 2)}
    fields |= {
        "num_key_value_heads": pick(*(n for n in (1, 2, 3, 6) if heads % n == 0)),
        "attention_bias": pick(True, False),
        "attention_dropout": pick(0.0, 0.2),
        "sliding_window": pick(2, 5, 8),
        "layer_types": [pick("full_attention", "sliding_attention") for _ in range(layers)],
        "use_sliding_window": True,
        "mask_token_id": 3,
        "bos_token_id": 1,
        "eos_token_id": 2,
        **({} if family == "eurobert" else {"is_causal": pick(True, False)}),
    }
    if family == "mistral":
        fields["layer_types"] = ["sliding_attention"] * layers
    if family == "gemma3_text":
        fields["hidden_activation"] = fields["hidden_act"]
        fields["use_bidirectional_attention"] = pick(True, False)
        fields["query_pre_attn_scalar"] = pick(3, 256)
        fields["rope_parameters"] = {
            "full_attention": fields["rope_parameters"],
            "sliding_attention": {"rope_theta": 77.0},
        }
    return fields


@given(shapes(), st.sampled_from(["sequence", "mean", "first", "last"]))
@settings(max_examples=15, deadline=None)
def test_any_shape(backbone, answer):
    """Answers of packed texts are those of transformers."""
    torch.manual_seed(0)
    head = answer if answer == "sequence" else "embedding"
    own = {"num_labels": 3} if head == "sequence" else {"embedding": {"pooling": answer}}
    model = head_class(head)(PrunedEncoderConfig(backbone=backbone, head=head, **own)).eval().requires_grad_(False)
    for parameter in model.parameters():
        parameter.add_(0.1 * torch.randn_like(parameter))
    assert_packed_is_the_oracle(model)


def test_dropout_follows_the_model():
    """Off in a model that answers, on in one that trains: of attention probabilities, and of GTE's gated values."""
    states, probabilities = torch.randn(64, 32), torch.ones(64, 64)
    jina, gte = make_encoder("jina_embeddings_v3", "none"), make_encoder("gte", "none")
    for model, module, x in (
        (jina, jina.backbone.attention(0).dropout, probabilities),
        (gte, gte.backbone.feed_forward(0).intermediate, states),
    ):
        answered = module(x)
        assert torch.equal(module(x), answered)
        model.train()
        assert not torch.equal(module(x), answered)
