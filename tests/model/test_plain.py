"""Plain transformers directories: the head that a directory says it has, `--head`, and names of weights."""

import json
from pathlib import Path

import pytest
import torch
import transformers
from plain_models import CLASSES, SHAPE, add_tokenizer, edit_json, write_plain, write_pruned
from safetensors.torch import load_file
from templated_models import write_tokenizer
from tiny_models import edit_weights

from adtp_export.data.tokenize import encode
from adtp_export.data.windows import encode_placed
from adtp_export.errors import InputError
from adtp_export.imports import ReadOptions, open_checkpoint
from adtp_export.model import registry
from adtp_export.model.config import EmbeddingSettings
from adtp_export.model.plain import check_code, head_of
from adtp_export.model.tokenizer import load_tokenizer
from adtp_export.pipeline.companions import write_companions

ADDED = {"special": True, **dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)}
HEADS = [name for name in registry.HEADS if name in CLASSES]
"""Those that a class of transformers says."""


@pytest.mark.parametrize("head", HEADS)
def test_a_directory_says_its_head(tmp_path, head):
    directory = write_plain(tmp_path, head)
    for asked in (None, head):
        student = open_checkpoint(directory, ReadOptions(head=asked)).student
        assert student.config.head == head
    stored = load_file(directory / "model.safetensors")
    assert all(torch.equal(tensor, stored[name]) for name, tensor in student.state_dict().items())


@pytest.mark.parametrize("head", HEADS)
def test_another_head_than_the_directorys_is_refused(tmp_path, head):
    other = next(name for name in HEADS if name != head)
    with pytest.raises(InputError, match=f"--head: got {other}, and .* says that the model has the head '{head}'"):
        open_checkpoint(write_plain(tmp_path / "plain", head), ReadOptions(head=other))
    labels = {"num_labels": 2} if head in ("sequence", "tokens") else {}
    directory = write_pruned(tmp_path / "pruned", head, **labels)
    with pytest.raises(InputError, match=f"the head '{head}'; leave --head out"):
        open_checkpoint(directory, ReadOptions(head=other))
    assert open_checkpoint(directory, ReadOptions(head=head)).student.config.head == head


@pytest.mark.parametrize("name", ["x", "xForCausalLM"])
def test_a_thousand_names_are_one_short_message(tmp_path, name):
    directory = write_plain(tmp_path, "sequence")
    edit_json(directory / "config.json", architectures=[name] * 1000)
    with pytest.raises(InputError, match=name) as error:
        open_checkpoint(directory)
    assert len(str(error.value)) < 1000


@pytest.mark.parametrize("head", [head for head in CLASSES if head not in ("embedding", "sequence")])
def test_vectors_of_an_encoder_need_a_word(tmp_path, head):
    """The encoder's weights have a prefix there, and the other head's are left out; a plain mean is what they are pooled by."""
    directory = write_plain(tmp_path, head)
    edit_json(directory / "config.json", architectures=["BertForSomethingElse"])
    with pytest.raises(
        InputError, match="is BertForSomethingElse, which does not say .* --head NAME, accepted are sequence, tokens"
    ):
        open_checkpoint(directory)
    checkpoint = open_checkpoint(directory, ReadOptions(head="embedding"))
    assert EmbeddingSettings.read(checkpoint.student.config.embedding) == EmbeddingSettings("mean", False, ())
    stored = load_file(directory / "model.safetensors")
    for name, tensor in checkpoint.student.state_dict().items():
        assert torch.equal(tensor, stored[f"bert.{name}"])
    told = " ".join(checkpoint.notes)
    assert "has no modules.json: its vectors are the mean" in told
    assert "weights that the head embedding does not use" in told


@pytest.mark.parametrize("head", HEADS)
def test_the_prefix_of_the_encoder_may_be_there_or_not(tmp_path, head):
    directory = write_plain(tmp_path, head)
    expected = open_checkpoint(directory).student.state_dict()

    def turn(weights):
        for name in list(weights):
            other = name.removeprefix("bert.") if name.startswith("bert.") else f"bert.{name}"
            if not name.startswith(("classifier", "qa_outputs")):
                weights[other] = weights.pop(name)

    edit_weights(directory, turn)
    found = open_checkpoint(directory).student.state_dict()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in found.items())


@pytest.mark.parametrize(
    ("fields", "asked", "message"),
    [
        (
            {"architectures": ["BertLMHeadModel"]},
            None,
            "the model generates text \\(BertLMHeadModel\\); accepted are encoders",
        ),
        ({"architectures": ["RobertaForCausalLM"]}, "sequence", "the model generates text"),
        ({"is_encoder_decoder": True, "architectures": None}, None, "generates text \\(is_encoder_decoder\\)"),
        ({"architectures": ["BertForPreTraining"]}, None, "--head NAME"),
        ({"architectures": ["BertForTokenClassification"]}, "spans", "has the head 'tokens'; leave --head out"),
    ],
)
def test_what_is_no_head(tmp_path, fields, asked, message):
    directory = write_plain(tmp_path, "sequence")
    edit_json(directory / "config.json", **fields)
    with pytest.raises(InputError, match=message):
        open_checkpoint(directory, ReadOptions(head=asked))


CODE = {"AutoModel": "code.Model"}
NATIVE = "code of its own, which is never run here; accepted is the same model as transformers' {}Model saves it: model_type '{}', {}"
GTE, NOMIC = (
    NATIVE.format("Gte", "gte", "transformers>=5.18"),
    NATIVE.format("NomicBert", "nomic_bert", "transformers>=5.5"),
)
JINA = NATIVE.format("JinaEmbeddingsV3", "jina_embeddings_v3", "transformers>=5.4")
QUANTIZED = "accepted are fp32, fp16 and bf16. Give the model that they were made of; --precision int8"
DENSE = "layers.; accepted are dense models that read text alone"
IMAGES = "reads images or sound; save its language model alone, a gemma3_text.; accepted are 'adtp_bert'"


def renamed(old, new, dtype=None):
    """Change the weights of a classifier: another name of one, and another type."""
    return lambda weights: weights.update({new: weights.pop(old).to(dtype)})


@pytest.mark.parametrize(
    ("fields", "change", "message"),
    [
        ({"model_type": "new", "auto_map": CODE}, None, GTE),
        ({"model_type": "nomic_bert", "n_embd": 32, "hidden_size": None}, None, NOMIC),
        ({"model_type": "xlm-roberta", "position_embedding_type": "rotary"}, None, JINA),
        ({"model_type": "xlm-roberta", "lora_adaptations": ["separation"], "auto_map": CODE}, None, JINA),
        (
            {"model_type": "nvembed", "auto_map": CODE},
            None,
            "'nvembed', a model with code of its own .auto_map., .* bert,",
        ),
        (
            {"model_type": "qwen2", "auto_map": CODE},
            None,
            "code.Model., which is never run here, .* own qwen2 reads: remove auto_map, and set is_causal to false if",
        ),
        ({"model_type": "t5", "is_encoder_decoder": True}, None, "'t5' .an encoder-decoder.; accepted are 'adtp_bert'"),
        ({"model_type": "qwen3_moe"}, None, "'qwen3_moe' .it has mixture-of-experts layers.; accepted are 'adtp_bert'"),
        (
            {"model_type": "nomic_bert", "n_embd": 32, "num_experts": 8},
            None,
            f"'nomic_bert' .it has mixture-of-experts {DENSE}",
        ),
        ({"model_type": "gemma3", "vision_config": {}, "text_config": {"model_type": "gemma3_text"}}, None, IMAGES),
        (
            {},
            renamed("classifier.weight", "classifier.qweight", torch.int32),
            f"classifier.qweight is torch.int32.; {QUANTIZED}",
        ),
        ({}, renamed("classifier.weight", "classifier.weight", torch.float8_e4m3fn), QUANTIZED),
        ({}, renamed("classifier.bias", "classifier.weight_scale_inv"), QUANTIZED),
        (
            {},
            renamed("classifier.bias", "classifier.lora_A.weight"),
            "hold adapters .classifier.lora_A.weight.; accepted are",
        ),
        (
            {},
            lambda weights: weights.pop("bert.embeddings.word_embeddings.weight"),
            "1 missing .bert.embeddings.word_embed",
        ),
    ],
    ids=lambda given: "a change" if callable(given) else str(given),  # not its address, which workers disagree on
)
def test_what_is_no_encoder_here(tmp_path, fields, change, message):
    """One message says what it is and what is accepted."""
    directory = write_plain(tmp_path, "sequence")
    edit_json(directory / "config.json", **fields)
    if change is not None:
        edit_weights(directory, change)
    with pytest.raises(InputError, match=message) as raised:
        open_checkpoint(directory)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    "fields",
    [
        {"model_type": "mistral", "auto_map": CODE, "is_causal": False},
        {"model_type": "gemma3_text", "auto_map": CODE, "use_bidirectional_attention": True},
        {"model_type": "llama", "auto_map": {"AutoTokenizer": ["code.T", None]}},
        {"model_type": "eurobert", "auto_map": CODE},
    ],
    ids=lambda fields: fields["model_type"],
)
def test_code_beside_a_model_that_says_what_its_tokens_see(fields):
    check_code(fields, Path("config.json"))


def test_an_adapter_beside_its_model(tmp_path):
    """transformers would add it, where PEFT is installed."""
    directory = write_plain(tmp_path, "embedding")
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        (directory / name).write_text("{}")
    with pytest.raises(
        InputError, match="holds an adapter .adapter_config.json. beside its model; merge them in Python"
    ):
        open_checkpoint(directory)


def test_a_tied_head_that_is_missing(tmp_path):
    """Nothing reads it: the states of a model that generates text."""
    torch.manual_seed(0)
    config = transformers.Gemma3TextConfig(**SHAPE, num_key_value_heads=2, head_dim=8, tie_word_embeddings=True)
    transformers.Gemma3ForCausalLM(config).save_pretrained(tmp_path)
    assert "lm_head.weight" not in load_file(tmp_path / "model.safetensors")
    assert open_checkpoint(add_tokenizer(tmp_path), ReadOptions(head="embedding")).student.config.head == "embedding"


def test_nothing_said_is_a_classifier(tmp_path):
    assert head_of({}, tmp_path, None) == "sequence"
    assert head_of({"architectures": None}, tmp_path, "spans") == "spans"
    assert head_of({"architectures": ["XLMRobertaForQuestionAnswering"]}, tmp_path, None) == "spans"
    assert head_of({"architectures": ["MPNetModel"]}, tmp_path, None) == "embedding"


def test_an_unknown_head(tmp_path):
    with pytest.raises(InputError, match="--head: got 'vector'; accepted are sequence, tokens, spans, embedding"):
        open_checkpoint(write_plain(tmp_path, "open"), ReadOptions(head="vector"))


def test_a_head_whose_weights_are_missing(tmp_path):
    with pytest.raises(InputError, match="2 missing \\(qa_outputs"):
        open_checkpoint(write_plain(tmp_path, "open"), ReadOptions(head="spans"))


def test_a_sentence_piece_model_needs_its_family_or_a_package(tmp_path):
    directory = write_plain(tmp_path, "sequence")
    for name in ("tokenizer.json", "vocab.txt"):
        (directory / name).unlink()
    with pytest.raises(InputError, match="has no tokenizer; accepted are tokenizer.json, .* sentencepiece.bpe.model"):
        open_checkpoint(directory)
    (directory / "sentencepiece.bpe.model").write_bytes(b"")
    with pytest.raises(
        InputError, match="a SentencePiece model of 'bert'; converted are those of xlm-roberta, camembert"
    ):
        open_checkpoint(directory)


def test_a_tokenizer_that_adds_no_token(tmp_path):
    """As Qwen's: accepted for models that follow Llama; a text without any token is refused when it is read."""
    write_tokenizer(tmp_path, None)
    shape = {"vocab_size": 600, "max_position_embeddings": 64, "pad_token_id": None}
    tokenizer = load_tokenizer(tmp_path, transformers.Qwen2Config(**shape))
    for read in (encode, encode_placed):
        with pytest.raises(InputError, match="got '' at index 1, for which the tokenizer gives no token; leave such"):
            read(tokenizer, ["a film", ""], 64)
        assert len(read(tokenizer, ["a film", ("", "ok")], 64)) == 2
    with pytest.raises(InputError, match="gives no token for ''; accepted is one that adds a first token"):
        load_tokenizer(tmp_path, transformers.BertConfig(**shape))


def test_labels_are_of_classifiers_alone(tmp_path):
    for head in HEADS:
        out = tmp_path / f"{head}-out"
        out.mkdir()
        write_companions(open_checkpoint(write_plain(tmp_path / head, head)), out)
        written = json.loads((out / "config.json").read_text())
        assert ("id2label" in written) == (head in ("sequence", "tokens"))
        assert written["architectures"] == [CLASSES[head]]
        assert written["adtp"]["head"] == head


def test_windows_of_questions_are_no_longer_than_the_tokenizer_says(tmp_path):
    directory = write_plain(tmp_path / "plain", "spans")
    edit_json(
        directory / "tokenizer_config.json", model_max_length=open_checkpoint(directory).student.windows.max_tokens
    )
    assert not any("model_max_length" in note for note in open_checkpoint(directory).notes)


def test_labels_with_two_numbers_are_told(plain_bert):
    edit_json(plain_bert / "config.json", id2label={"0": "no", "1": "yes"}, label2id={"no": 1, "yes": 0})
    (note,) = open_checkpoint(plain_bert).notes
    assert (
        note
        == "plain/config.json: label2id gives 'no' another number than id2label, which is followed here; correct one of them"
    )


@pytest.mark.parametrize(
    "labels", [{"id2label": ["a", "b"]}, {"id2label": {"neg": 0}}, {"label2id": "x"}, {"id2label": {"0": ["a"]}}]
)
def test_labels_of_any_form_are_no_matter_where_there_are_none(labels, tmp_path):
    directory = write_plain(tmp_path / "plain", "spans")
    edit_json(directory / "config.json", **labels)
    assert not any("label2id" in note for note in open_checkpoint(directory).notes)


def test_questions_that_transformers_reads_behind_their_contexts_are_told(tmp_path):
    model = write_plain(tmp_path / "model", "spans")
    assert open_checkpoint(model).notes == ()
    (model / "tokenizer_config.json").write_text('{"padding_side": "left"}')
    (note,) = open_checkpoint(model).notes
    assert note.endswith("padding_side is ignored: questions are read before their contexts")


def test_texts_that_tokenizer_json_cuts_at_their_beginning_are_told(plain_bert):
    cut = {"direction": "Left", "max_length": 64, "strategy": "LongestFirst", "stride": 0}
    edit_json(plain_bert / "tokenizer.json", truncation=cut)
    (note,) = open_checkpoint(plain_bert).notes
    assert note.endswith("truncation_side is ignored: long texts are cut at the end")


def test_a_tokenizer_that_transformers_cannot_read_with_is_read(plain_bert):
    """BertTokenizer makes a tokenizer with another name for unknown words, which the vocabulary does not have."""
    stored = json.loads((plain_bert / "tokenizer.json").read_text())["model"]
    vocabulary = {"<unk>" if word == "[UNK]" else word: number for word, number in stored["vocab"].items()}
    model = {**stored, "unk_token": "<unk>", "vocab": vocabulary}
    added = [
        {**ADDED, "id": i, "content": word} for i, word in enumerate(vocabulary) if word in ("[PAD]", "[CLS]", "[SEP]")
    ]
    edit_json(plain_bert / "tokenizer.json", model=model, added_tokens=added)
    (plain_bert / "tokenizer_config.json").write_text('{"tokenizer_class": "BertTokenizer"}')
    with pytest.raises(Exception, match="UNK"):
        transformers.AutoTokenizer.from_pretrained(plain_bert).backend_tokenizer.encode("\u0533")
    assert open_checkpoint(plain_bert).notes == ()
