"""Small random models of late interaction with the demo student's tokenizer, as Stanford's ColBERT, PyLate and sentence-transformers save
them; and BGE-M3's three heads."""

import torch
from plain_models import SHAPE, add_tokenizer, edit_json, write_json, write_plain
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from transformers import AutoConfig, AutoModel

MARKED = {"vocab_size": 1240}
"""Fields of a model that knows two tokens more: its markers."""
TEXTS = [
    "a wonderful film about unbelievable heroes in California",
    "the soup was terrible !",
    "Jane Austen wrote it , and nobody in London disagreed ( at all ) with her wonderfully dry humour ; so it goes , and goes on and on",
    "ok",
]
HEADS = {
    "plain": [(32, 16, False, False)],
    "deep": [(32, 24, True, True), (24, 24, False, True), (24, 8, False, False)],
}
"""Dense layers by a name: inputs, outputs, bias, and whether the input is added."""


def write_stanford(directory, attend=False, **fields):
    """One weight file with the projection in it."""
    write_plain(directory, "embedding", **MARKED)
    add_markers(directory, "[unused0]", "[unused1]")
    weights = {f"bert.{name}": tensor for name, tensor in load_file(directory / "model.safetensors").items()}
    torch.manual_seed(3)
    weights["linear.weight"] = torch.randn(16, 32)
    save_file(weights, directory / "model.safetensors", {"format": "pt"})
    edit_json(directory / "config.json", architectures=["HF_ColBERT"])
    said = {"query_token_id": "[unused0]", "doc_token_id": "[unused1]", "query_maxlen": 24, "doc_maxlen": 40}
    write_json(
        directory / "artifact.metadata", {**said, "attend_to_mask_tokens": attend, "mask_punctuation": True, **fields}
    )
    return directory


def write_pylate(directory, heads="plain", backbone=None, **said):
    """Transformer and PyLate's Dense; what is said of texts is beside modules.json."""
    write_backbone(directory, backbone)
    add_markers(directory, "[Q] ", "[D] ")
    places = [
        ("sentence_transformers.models.Transformer", ""),
        *write_heads(directory, heads, "pylate.models.Dense.Dense"),
    ]
    list_modules(directory, places)
    write_json(directory / "sentence_bert_config.json", {"max_seq_length": 39, "do_lower_case": False})
    usual = {"query_prefix": "[Q] ", "document_prefix": "[D] ", "query_length": 24, "document_length": 40}
    usual |= {"do_query_expansion": True, "attend_to_expansion_tokens": False, "skiplist_words": list("!,.();")}
    write_json(
        directory / "config_sentence_transformers.json", {"model_type": "ColBERT", "prompts": {}, **usual, **said}
    )
    return directory


EXPANSION = {"strategy": "fixed", "attend": False, "token": None, "length": 24}


def write_multi_vector(directory, heads="plain", backbone=None, expansion=EXPANSION, mask=None, normalize=True):
    """What `MultiVectorEncoder.save_pretrained` writes: markers are prompts, and tokens that the tokenizer knows as special."""
    write_backbone(directory, backbone)
    add_markers(directory, "[Q]", "[D]")
    own = "sentence_transformers.base.modules"
    places = [(f"{own}.transformer.Transformer", ""), *write_heads(directory, heads, f"{own}.dense.Dense")]
    places.append(("sentence_transformers.multi_vector_encoder.modules.multi_vector_mask.MultiVectorMask", "8_Mask"))
    masked = {"skiplist_words": list("!,.();"), "skiplist_tasks": ["document"], "keep_only_token_ids": None}
    write_json(directory / "8_Mask" / "config.json", {**masked, **(mask or {})})
    if normalize:
        places.append((f"{own}.normalize.Normalize", "9_Normalize"))
        write_json(directory / "9_Normalize" / "config.json", {"module_input_name": "token_embeddings"})
    list_modules(directory, places)
    limits = {"max_seq_length": 60, "do_lower_case": False, "document_length": 40, "query_expansion": expansion}
    write_json(directory / "sentence_bert_config.json", limits)
    prompts = {"query": "[Q] ", "document": "[D] "}
    write_json(
        directory / "config_sentence_transformers.json",
        {"model_type": "MultiVectorEncoder", "prompts": prompts, "similarity_fn_name": "maxsim"},
    )
    return directory


def write_backbone(directory, fields):
    """Save a BERT, or another encoder of these fields, with the tokenizer."""
    if fields is None:
        return write_plain(directory, "embedding", **MARKED)
    torch.manual_seed(0)
    config = AutoConfig.for_model(**{**SHAPE, **MARKED, **fields})
    AutoModel.from_config(config).eval().save_pretrained(directory)
    return add_tokenizer(directory)


def write_heads(directory, heads, kind):
    """Save dense layers; return the class and the folder of each."""
    torch.manual_seed(3)
    places = []
    for i, (inputs, outputs, bias, residual) in enumerate(HEADS[heads], start=1):
        folder = f"{i}_Dense"
        fields = {"in_features": inputs, "out_features": outputs, "bias": bias}
        fields |= {"activation_function": "torch.nn.modules.linear.Identity", "use_residual": residual}
        if not kind.startswith("pylate"):
            fields |= {"module_input_name": "token_embeddings", "module_output_name": "token_embeddings"}
        write_json(directory / folder / "config.json", fields)
        weights = {"linear.weight": torch.randn(outputs, inputs)}
        if bias:
            weights["linear.bias"] = torch.randn(outputs)
        if residual and inputs != outputs:
            weights["residual.weight"] = torch.randn(outputs, inputs)
        save_file(weights, directory / folder / "model.safetensors", {"format": "pt"})
        places.append((kind, folder))
    return places


def list_modules(directory, places):
    listed = [{"idx": i, "name": str(i), "path": path, "type": kind} for i, (kind, path) in enumerate(places)]
    write_json(directory / "modules.json", listed)


def add_markers(directory, *names):
    """Add tokens to the tokenizer, which is then one for any family."""
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    tokenizer.add_special_tokens(list(names))
    tokenizer.save(str(directory / "tokenizer.json"))
    edit_json(directory / "tokenizer_config.json", tokenizer_class="PreTrainedTokenizerFast")
    (directory / "vocab.txt").unlink()


def write_bge_m3(directory, folder=""):
    """An XLM-RoBERTa whose vector is its first token's, and the two heads that FlagEmbedding keeps as pickles."""
    write_backbone(
        directory, {"model_type": "xlm-roberta", "type_vocab_size": 1, "pad_token_id": 0, "max_position_embeddings": 65}
    )
    own = "sentence_transformers.models"
    list_modules(
        directory,
        [(f"{own}.Transformer", folder), (f"{own}.Pooling", "1_Pooling"), (f"{own}.Normalize", "2_Normalize")],
    )
    write_json(
        directory / "1_Pooling" / "config.json", {"word_embedding_dimension": 32, "pooling_mode_cls_token": True}
    )
    write_json(directory / "sentence_bert_config.json", {"max_seq_length": 60, "do_lower_case": False})
    torch.manual_seed(4)
    for name, size in (("colbert", 32), ("sparse", 1)):
        torch.save(torch.nn.Linear(32, size).state_dict(), directory / f"{name}_linear.pt")
    return directory
