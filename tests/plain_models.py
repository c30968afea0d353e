"""Small random models with the demo student's tokenizer, as transformers and sentence-transformers save them, and their exports."""

import json
import shutil
from pathlib import Path

import pytest
import torch
import transformers
from known_graphs import taking_known_graphs
from safetensors.torch import save_file
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, processors

import adtp_export
from adtp_export import PrunedEncoderConfig
from adtp_export.model.heads import head_class

DEMO = Path(__file__).parent.parent / "demo" / "student"
SHAPE = {
    "vocab_size": 1238,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
    "initializer_range": 0.5,  # answers differ from text to text
}
CLASSES = {
    "sequence": "BertForSequenceClassification",
    "tokens": "BertForTokenClassification",
    "spans": "BertForQuestionAnswering",
    "embedding": "BertModel",
    "open": "BertForMaskedLM",
}
TAGS = ["O", "B-PER", "I-PER", "B-LOC", "I-LOC"]
TEXTS = [
    "a wonderful film about unbelievable heroes in California",
    "the soup was terrible !",
    "Jane Austen wrote it , and nobody in London disagreed at all with her wonderfully dry humour",
    "ok",
]


def write_plain(directory, head, **fields):
    """Save a random BERT with a head, and the tokenizer."""
    torch.manual_seed(0)
    labels = {"id2label": dict(enumerate(TAGS))} if head == "tokens" else {}
    config = transformers.BertConfig(**{**SHAPE, **labels, **fields})
    model = getattr(transformers, CLASSES[head])(config).eval()
    model.save_pretrained(directory)
    return add_tokenizer(directory)


def write_pruned(directory, head, **fields):
    """Save a random student of format 2 that drops tokens, and the tokenizer."""
    torch.manual_seed(0)
    pruning = {
        "method": "adtp",
        "sites": ["0.ffn", "1.ffn"],
        "retention_ratios": [0.3, 0.6, 1.0],
        "saliency_hidden_size": 8,
    }
    config = PrunedEncoderConfig(backbone={**SHAPE, "model_type": "bert"}, pruning=pruning, head=head, **fields)
    head_class(head)(config).save_pretrained(directory)
    return add_tokenizer(directory)


def add_tokenizer(directory):
    for name in ("tokenizer.json", "tokenizer_config.json", "vocab.txt"):
        shutil.copy(DEMO / name, directory)
    return directory


WORDS = ["a", "film", ",", "and", "2", "good", "words", "the", "food", "was", "cold"]


def deberta_tokenizer():
    """Parts and ids of DeBERTa-v3's own: types of pairs are told apart, and its models have no table for them."""
    special = [(token, 0.0) for token in ("[PAD]", "[CLS]", "[SEP]", "[UNK]")]
    tokenizer = Tokenizer(models.Unigram([*special, *((f"▁{word}", -2.0) for word in WORDS)], unk_id=3))
    spaces = normalizers.Replace(Regex(r"\s{2,}|[\n\r\t]"), " ")
    tokenizer.normalizer = normalizers.Sequence([spaces, normalizers.NFC(), normalizers.Strip(left=False)])
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Metaspace()])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 1), ("[SEP]", 2)]
    )
    return tokenizer


def write_sentence_transformer(directory, folder="", dense=True, **pooling):
    """Save what sentence-transformers would: a Transformer, in a folder or not, pooling, a projection on request, normalization."""
    home = directory / folder
    write_plain(home, "embedding")
    types = ["Transformer", "Pooling", *(["Dense"] if dense else []), "Normalize"]
    places = [folder, *(f"{i}_{name}" for i, name in enumerate(types) if i)]
    modules = [
        {"idx": i, "name": str(i), "path": place, "type": f"sentence_transformers.models.{name}"}
        for i, (name, place) in enumerate(zip(types, places))
    ]
    write_json(directory / "modules.json", modules)
    write_json(home / "sentence_bert_config.json", {"max_seq_length": 20, "do_lower_case": False})
    fields = {
        "word_embedding_dimension": 32,
        "pooling_mode_mean_tokens": True,
        "pooling_mode_cls_token": False,
        **pooling,
    }
    write_json(directory / "1_Pooling" / "config.json", fields)
    if dense:
        config = {
            "in_features": 32,
            "out_features": 6,
            "bias": True,
            "activation_function": "torch.nn.modules.activation.Tanh",
        }
        write_json(directory / "2_Dense" / "config.json", config)
        torch.manual_seed(1)
        weights = {"linear.weight": torch.randn(6, 32), "linear.bias": torch.randn(6)}
        save_file(weights, directory / "2_Dense" / "model.safetensors", {"format": "pt"})
    return directory


SPARSE = "sentence_transformers.sparse_encoder"
FILL_MASK = {
    "transformer_task": "fill-mask",
    "modality_config": {"text": {"method": "forward", "method_output_name": "logits"}},
    "module_output_name": "token_embeddings",
}


def write_sparse_encoder(directory, old=False, width="embedding_dimension", **pooling):
    """Save what `SparseEncoder` would, in version 6 or in an older one: a model of masked language, SPLADE's pooling, and prompts."""
    write_plain(directory, "open", initializer_range=0.2)  # logits of a size at which 1e-5 is some hundred roundings
    first = f"{SPARSE}.models.MLMTransformer" if old else "sentence_transformers.base.modules.transformer.Transformer"
    second = f"{SPARSE}.models.SpladePooling" if old else f"{SPARSE}.modules.splade_pooling.SpladePooling"
    modules = [
        {"idx": i, "name": str(i), "path": path, "type": kind}
        for i, (kind, path) in enumerate(((first, ""), (second, "1_SpladePooling")))
    ]
    write_json(directory / "modules.json", modules)
    write_json(directory / "sentence_bert_config.json", {"max_seq_length": 20, **({} if old else FILL_MASK)})
    fields = {"pooling_strategy": "max", "activation_function": "relu", width: SHAPE["vocab_size"]}
    write_json(directory / "1_SpladePooling" / "config.json", {**fields, **pooling})
    settings = {"model_type": "SparseEncoder", "prompts": {"query": "query : ", "document": ""}, "max_active_dims": 200}
    write_json(directory / "config_sentence_transformers.json", {**settings, "similarity_fn_name": "dot"})
    return directory


def write_json(path, document):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document))


def edit_json(path, **changes):
    """Set fields of a JSON object; None removes one."""
    document = {**json.loads(path.read_text()), **changes} if path.exists() else changes
    write_json(path, {name: value for name, value in document.items() if value is not None})


def export_unverified(model_dir, out):
    """Export without verification, which has tests of its own."""
    with taking_known_graphs():
        adtp_export.export(model_dir, out, skip_parity_check=True)
    return out


def _exported(name, write):
    @pytest.fixture(scope="session", name=name)
    def fixture(tmp_path_factory):
        folder = tmp_path_factory.mktemp(name)
        return write(folder / "model"), export_unverified(folder / "model", folder / "out")

    return fixture


tagger = _exported("tagger", lambda path: write_plain(path, "tokens"))
answerer = _exported("answerer", lambda path: write_plain(path, "spans"))
embedder = _exported("embedder", write_sentence_transformer)
reranker = _exported("reranker", lambda path: write_plain(path, "sequence", num_labels=1))
splade = _exported("splade", lambda path: write_sparse_encoder(path, activation_function="log1p_relu"))
pruned_tagger = _exported("pruned_tagger", lambda path: write_pruned(path, "tokens", id2label=dict(enumerate(TAGS))))
"""Each gives the model's directory and its export."""
