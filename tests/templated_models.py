"""Small random models that follow Llama, with a byte-level tokenizer and chat templates, as sentence-transformers 6 saves them."""

import torch
import transformers
from plain_models import write_json
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from adtp_export.verify.samples import built_in_texts

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
SHAPE = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 128,
    "initializer_range": 0.3,
}
FAMILIES = {"qwen3": {"head_dim": 16}, "qwen2": {}}
TEMPLATE = (
    "<|im_start|>system\nJudge the pair.<|im_end|>\n<|im_start|>user\n<Instruct>: "
    '{{ messages | selectattr("role", "eq", "system") | map(attribute="content") | first | default("find it", true) }}\n'
    '<Query>: {{ messages | selectattr("role", "eq", "query") | map(attribute="content") | first }}\n'
    '<Document>: {{ messages | selectattr("role", "eq", "document") | map(attribute="content") | first }}'
    "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
)
CHAT = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content | trim }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""What a model of vectors reads texts in; it trims them."""
STRUCTURED = "{% for m in messages %}[{{ m.role }}] {{ m.content[0].text }} [end]\n{% endfor %}{{ eos_token }}"
"""Takes contents as lists of parts, and has a place for any role."""
MODALITIES = {"text": {"method": "forward", "method_output_name": "logits"}}
MESSAGES = {**MODALITIES, "message": MODALITIES["text"]}


def make_tokenizer(end=False):
    """Train byte-level pieces on the built-in sentences. end: texts end in the padding token, as Qwen3-Embedding's do."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=500, initial_alphabet=sorted(alphabet), show_progress=False)
    tokenizer.train_from_iterator([*built_in_texts(pairs=False), "yes no yes no yes no"], trainer)
    tokenizer.add_tokens(["yes", "no"])
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    if end:
        parts = {"single": f"$A {SPECIAL[0]}", "pair": f"$A $B {SPECIAL[0]}"}
        tokenizer.post_processor = processors.TemplateProcessing(
            **parts, special_tokens=[(SPECIAL[0], tokenizer.token_to_id(SPECIAL[0]))]
        )
    return tokenizer


def write_tokenizer(directory, template, end=False, **settings):
    """Save a tokenizer's files; return it."""
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer = make_tokenizer(end)
    tokenizer.save(str(directory / "tokenizer.json"))
    fields = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 10**6, "padding_side": "left"}
    fields |= {"eos_token": SPECIAL[2], "pad_token": SPECIAL[0], **settings}
    write_json(directory / "tokenizer_config.json", {k: v for k, v in fields.items() if v is not None})
    if template is not None:
        (directory / "chat_template.jinja").write_text(template)
    return tokenizer


def write_causal(directory, tokenizer, family="qwen3", **fields):
    """Save a random model that generates."""
    torch.manual_seed(0)
    fields = {"vocab_size": tokenizer.get_vocab_size(), "tie_word_embeddings": True, **FAMILIES[family], **fields}
    kind = getattr(transformers, f"{family.capitalize()}Config")
    pad = fields.pop("pad_token_id", tokenizer.token_to_id(SPECIAL[0]))
    config = kind(**{**SHAPE, **fields}, pad_token_id=pad, bos_token_id=None, eos_token_id=None)
    transformers.AutoModelForCausalLM.from_config(config).eval().save_pretrained(directory)


def write_modules(directory, kinds):
    """Save `modules.json`, and each module's settings in a folder of its own; the first one's lie in the directory."""
    names = [kind.rpartition(".")[2] for kind, _ in kinds]
    places = [f"{i}_{name}" if i else "" for i, name in enumerate(names)]
    modules = [
        {"idx": i, "name": str(i), "path": place, "type": f"sentence_transformers.{kind}"}
        for i, ((kind, _), place) in enumerate(zip(kinds, places))
    ]
    write_json(directory / "modules.json", modules)
    for (_, fields), place in zip(kinds, places):
        write_json(directory / place / ("config.json" if place else "sentence_bert_config.json"), fields)


def write_reranker(directory, family="qwen3", template=TEMPLATE, no="no", end=False, **fields):
    """Save what sentence-transformers makes of a model that generates. fields: of `sentence_bert_config.json`."""
    tokenizer = write_tokenizer(directory, template, end)
    write_causal(directory, tokenizer, family)
    read = {"transformer_task": "text-generation", "module_output_name": "causal_logits"}
    read["modality_config"] = MESSAGES if template else MODALITIES
    ids = {"true_token_id": tokenizer.token_to_id("yes"), "false_token_id": no and tokenizer.token_to_id(no)}
    score = {**ids, "module_input_name": "causal_logits"}
    kinds = ("base.modules.transformer.Transformer", "cross_encoder.modules.logit_score.LogitScore")
    write_modules(directory, list(zip(kinds, ({**read, **fields}, score))))
    write_json(directory / "config_sentence_transformers.json", {"model_type": "CrossEncoder"})
    return directory


def write_embedder(directory, after=(), template=None, pooling="lasttoken", **fields):
    """Save a model of vectors as sentence-transformers does.

    Args:
        after: of each module behind Pooling, the number that Dense gives with its bias and its activation; None for Normalize.
        fields: of `sentence_bert_config.json`.
    """
    tokenizer = write_tokenizer(directory, template, end=template is None)
    write_causal(directory, tokenizer)
    states = {"method": "forward", "method_output_name": "last_hidden_state"}
    read = {"modality_config": {"text": states, "message": {**states, "format": "flat"}}} if template else {}
    kinds = [
        ("base.modules.transformer.Transformer", {**read, "module_output_name": "token_embeddings", **fields}),
        ("sentence_transformer.modules.pooling.Pooling", {"embedding_dimension": 32, "pooling_mode": pooling}),
    ]
    width = SHAPE["hidden_size"]
    torch.manual_seed(1)
    for i, dense in enumerate(after, start=2):
        if dense is None:
            kinds.append(("base.modules.normalize.Normalize", {}))
            continue
        outputs, bias, activation = dense
        weights = {
            "linear.weight": torch.randn(outputs, width) / 4,
            **({"linear.bias": torch.randn(outputs)} if bias else {}),
        }
        (directory / f"{i}_Dense").mkdir()
        save_file(weights, directory / f"{i}_Dense" / "model.safetensors", {"format": "pt"})
        sizes = {"in_features": width, "out_features": outputs, "bias": bias}
        kinds.append(("base.modules.dense.Dense", {**sizes, "activation_function": activation}))
        width = outputs
    write_modules(directory, kinds)
    return directory


ACTIVATION = "torch.nn.modules.activation."
"""Where sentence-transformers says that activations are, but for `IDENTITY`."""
IDENTITY = "torch.nn.modules.linear.Identity"
