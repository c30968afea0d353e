"""Chat templates in pieces, and models that rank by logits: what is read of a directory, how texts are cut, and what is refused."""

import dataclasses
import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from plain_models import edit_json
from safetensors.torch import load_file, save_file
from templated_models import CHAT, MODALITIES, STRUCTURED, TEMPLATE, make_tokenizer, write_embedder, write_reranker

from adtp_export.artifacts.records import convert
from adtp_export.data.template import ChatTemplate, Slot
from adtp_export.errors import InputError
from adtp_export.imports import ReadOptions, open_checkpoint
from adtp_export.imports.sentence_transformers import reading
from adtp_export.pipeline.companions import write_companions
from adtp_export.pipeline.convert import import_checkpoint

LONGEST = 40


@pytest.fixture
def directory(tmp_path):
    return write_reranker(tmp_path / "model")


def test_two_rows_of_the_head_and_the_pieces_of_the_template(directory, tmp_path):
    checkpoint = open_checkpoint(directory)
    table = load_file(directory / "model.safetensors")["model.embed_tokens.weight"]
    yes, no = (checkpoint.tokenizer.token_to_id(token) for token in ("yes", "no"))
    assert torch.equal(checkpoint.student.dense.score.weight, (table[yes] - table[no])[None])
    assert checkpoint.student.config.head == "sequence"
    assert checkpoint.student.dense.config.pad_token_id is None
    assert any("its score is the last token's logit of 'yes' less that of 'no'" in note for note in checkpoint.notes)
    before, after = TEMPLATE.split("{{ messages")[0], "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n"
    assert checkpoint.template.pair == [
        *(f"{before}find it\n<Query>: ", Slot("query"), "\n<Document>: ", Slot("document"), after)
    ]
    assert checkpoint.template.prompted_pair[:2] == [before, Slot("prompt")]
    assert checkpoint.template.text == []
    (tmp_path / "out").mkdir()
    write_companions(checkpoint, tmp_path / "out")
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert convert(written["adtp"]["template"], ChatTemplate) == checkpoint.template
    assert written["pad_token_id"] is None
    assert "template" not in checkpoint.describe()


def test_the_template_is_part_of_the_hash(directory):
    before = open_checkpoint(directory).sha256
    (directory / "chat_template.jinja").write_text(TEMPLATE.replace("Judge", "Weigh"))
    assert open_checkpoint(directory).sha256 != before


def test_a_head_of_its_own_in_bf16_and_no_false_token(tmp_path):
    directory = write_reranker(tmp_path / "model", family="qwen2", no=None, template=None, end=True)
    weights = {name: tensor.bfloat16() for name, tensor in load_file(directory / "model.safetensors").items()}
    weights["lm_head.weight"] = torch.randn_like(weights["model.embed_tokens.weight"])
    save_file(weights, directory / "model.safetensors", {"format": "pt"})
    checkpoint = open_checkpoint(directory)
    yes = checkpoint.tokenizer.token_to_id("yes")
    assert torch.equal(checkpoint.student.dense.score.weight, weights["lm_head.weight"][yes].float()[None])
    assert checkpoint.template is None


def test_what_adtp_import_writes_reads_alike(directory, tmp_path):
    import_checkpoint(directory, tmp_path / "student")
    found, expected = open_checkpoint(tmp_path / "student"), open_checkpoint(directory)
    assert (found.template, found.settings) == (expected.template, expected.settings)
    assert torch.equal(found.student.dense.score.weight, expected.student.dense.score.weight)
    for wrong in ({"pair": 3}, {"pair": [{"slot": "text"}]}):
        edit_json(tmp_path / "student" / "config.json", adtp={"template": wrong})
        with pytest.raises(InputError, match="adtp.template is none"):
            open_checkpoint(tmp_path / "student")


def test_vectors_of_texts_in_a_template(tmp_path):
    """Contents are trimmed; OUT tells sentence-transformers of the template."""
    directory = write_embedder(tmp_path / "model", template=CHAT)
    checkpoint = open_checkpoint(directory)
    assert checkpoint.template.text == ["<|im_start|>user\n", Slot("text", trim=True), "<|im_end|>\n"]
    (tmp_path / "out").mkdir()
    write_companions(checkpoint, tmp_path / "out")
    written = json.loads((tmp_path / "out" / "sentence_bert_config.json").read_text())
    assert written["modality_config"]["message"]["format"] == "flat"
    assert (tmp_path / "out" / "chat_template.jinja").read_text() == CHAT
    import_checkpoint(directory, tmp_path / "student")
    assert any("sentence-transformers does not" in note for note in open_checkpoint(tmp_path / "student").notes)
    with pytest.raises(InputError, match="texts go through a chat template"):
        reading(directory)
    edit_json(directory / "sentence_bert_config.json", modality_config=5)
    assert reading(directory).prompt == ""


def test_prompts_and_lengths_of_vectors_outlive_adtp_import(tmp_path):
    directory = write_embedder(tmp_path / "model")
    stored = {"prompts": {"query": "find "}, "default_prompt_name": "query", "truncate_dim": 8}
    (directory / "config_sentence_transformers.json").write_text(json.dumps(stored))
    import_checkpoint(directory, tmp_path / "student")
    (tmp_path / "out").mkdir()
    write_companions(open_checkpoint(tmp_path / "student"), tmp_path / "out")
    assert json.loads((tmp_path / "out" / "config_sentence_transformers.json").read_text()) == stored


def edit(name, **fields):
    return lambda directory: edit_json(directory / name, **fields)


def template(text):
    return lambda directory: (directory / "chat_template.jinja").write_text(text)


def prompted(directory):
    template("{% if messages[0].role == 'system' %}{{ raise_exception('no') }}{% endif %}" + TEMPLATE)(directory)
    edit_json(directory / "config_sentence_transformers.json", prompts={"web": "find"}, default_prompt_name="web")


def untied(directory):
    edit_json(directory / "config.json", tie_word_embeddings=False)


LIMITS, SCORE = "sentence_bert_config.json", "1_LogitScore/config.json"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda directory: (directory / "chat_template.jinja").unlink(), "and the tokenizer has none; save it as chat_template.jinja"),
        (template("{{ messages[5].content }}{% for"), "cannot be rendered: TemplateSyntaxError"),
        (template("{{ messages[0].content }}"), "the content of the role 'document' is not in it. Accepted is one that puts a pair"),
        (template(TEMPLATE.replace("| first }}<|im_end|>", "| first | upper }}<|im_end|>")), "the content of the role 'document'"),
        (template(TEMPLATE.replace("<Query>: {{", "<Query>: {{ '%i' % messages[0].content | length }}{{")), "it does more with"),
        (template(TEMPLATE.replace("| first }}<|im_end|>", "| first | truncate(500) }}<|im_end|>")), "it does more with"),
        (template("{% for m in messages %}{{ m.content }}{% endfor %}"), "nothing stands beside the content"),
        (template(f"{{{{ strftime_now('%d') }}}}{TEMPLATE}"), "it writes the date of the day"),
        (prompted, r"cannot be rendered with the model's prompts \(web\)"),
        (edit("tokenizer_config.json", truncation_side="left"), "truncation_side is 'left'; accepted beside a chat template is 'right'"),
        (edit(LIMITS, modality_config={"image": {}}), "modality_config is {'image': {}}; accepted are models that read texts"),
        (edit(LIMITS, modality_config={"message": 3, **MODALITIES}), "accepted are models that read texts"),
        (edit(LIMITS, processing_kwargs={"text": {"truncation": False}}), "processing_kwargs.text is {'truncation': False}; accepted"),
        (edit(LIMITS, processing_kwargs={"text": {"stride": 3}}), "processing_kwargs.text is {'stride': 3}"),
        (edit(LIMITS, processing_kwargs=[1]), r"processing_kwargs. is \[1\]"),
        (edit(LIMITS, processing_kwargs={"text": {"max_length": 2}}), "max_length: got 2; accepted is an integer of at least 4"),
        (edit(LIMITS, query_length=32), "query_length is 32; accepted are models that read queries and documents alike"),
        (edit(LIMITS, transformer_task="feature-extraction"), "transformer_task 'feature-extraction'; accepted before LogitScore"),
        (edit("config.json", model_type="bert"), "model_type 'bert', .*accepted before LogitScore is .* with one of llama"),
        (edit("config.json", final_logit_softcapping=30.0), "got final_logit_softcapping 30.0"),
        (edit("config.json", quantization_config={"quant_method": "gptq"}, vocab_size=9),
         "true_token_id: got .*; accepted is an integer from 0 to 8"),
        (edit(SCORE, true_token_id=None), "true_token_id: got .*; accepted is an integer from 0 to"),
        (edit(SCORE, false_token_id=True), "false_token_id: got .*; accepted is an integer"),
        (edit(SCORE, module_input_name="scores"), "accepted is an object with true_token_id"),
        (untied, "lm_head.weight is missing, and tie_word_embeddings does not say"),
        (lambda directory: (directory / "modules.json").unlink(), r'CrossEncoder\(".*model"\).save_pretrained\("RERANKER"\)'),
    ],
)  # fmt: skip
def test_bad_directories(directory, change, message):
    change(directory)
    with pytest.raises(InputError, match=message) as raised:
        open_checkpoint(directory)
    assert "\n" not in str(raised.value)


def test_another_head_is_refused(directory):
    with pytest.raises(InputError, match="modules.json says that the model ranks; leave --head out"):
        open_checkpoint(directory, ReadOptions(head="embedding"))


PAIRED = ChatTemplate(pair=["<|im_start|>", Slot("query", trim=True), " in ", Slot("document"), "<|im_end|>\nso:"])
TOKENIZER = make_tokenizer()
CONTENTS = st.text(st.sampled_from("a b\n\u00fc\u6f22<|>") | st.characters(exclude_categories=["Cs"]), max_size=60)


@settings(max_examples=60, deadline=None)
@given(CONTENTS, CONTENTS, st.integers(4, LONGEST))
def test_renderings_are_cut_and_end_as_the_template_does(query, document, longest):
    """The definition, written out: tokens of the whole, cut, and the end over the last ones where they fill the length."""
    (row,) = PAIRED.encode(TOKENIZER, [(query, document)], longest)
    text = f"<|im_start|>{query.strip()} in {document}<|im_end|>\nso:"
    whole = TOKENIZER.encode(text, add_special_tokens=False).ids
    end = TOKENIZER.encode("<|im_end|>\nso:", add_special_tokens=False).ids[-longest:]
    expected = whole if len(whole) < longest else [*whole[: longest - len(end)], *end]
    assert row.input_ids == expected
    assert row.truncated == (len(whole) > longest)
    (placed,) = PAIRED.placed(TOKENIZER, [(query, document)], longest)
    assert placed.row == row
    assert len(placed.offsets) == len(placed.words) == len(placed.sides) == len(row.input_ids)
    bare = dataclasses.replace(PAIRED, restore_suffix=False)
    assert bare.encode(TOKENIZER, [(query, document)], longest)[0].input_ids == whole[:longest]


def test_a_long_text_is_read_at_its_beginning():
    (row,) = PAIRED.encode(TOKENIZER, [("a " * 10**6, "b")], LONGEST)
    (expected,) = PAIRED.encode(TOKENIZER, [("a " * 100, "b")], LONGEST)
    assert row == expected


@pytest.mark.parametrize(
    ("text", "prompt", "message"),
    [
        ("alone", "", "got single texts, for which the model's chat template has no place; accepted are pairs"),
        (("a", "b"), "find", "got prompts, .* accepted are pairs without a prompt"),
        (("a", "\ud800"), "", "is not valid Unicode"),
    ],
)
def test_what_has_no_place(text, prompt, message):
    with pytest.raises(InputError, match=message):
        PAIRED.encode(TOKENIZER, [text], LONGEST, prompt)


def test_contents_as_lists_are_seen_by_the_template(tmp_path):
    checkpoint = open_checkpoint(write_reranker(tmp_path / "model", template=STRUCTURED))
    assert (
        checkpoint.template.render(("a", "b"), "c")
        == "[system] c [end]\n[query] a [end]\n[document] b [end]\n<|im_end|>"
    )
