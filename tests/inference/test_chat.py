"""Messages to prompts: rendered as transformers renders them, and what is refused."""

import json
import re
from types import SimpleNamespace

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from adtp_export.errors import InputError
from adtp_export.inference.chat import Chat, read_chat
from adtp_export.pipeline.export.decoder import chat_note

SMOLVLM = (
    "<|im_start|>{% for message in messages %}{{message['role'] | capitalize}}{% if message['content'][0]['type'] == 'image' %}{{':'}}"
    "{% else %}{{': '}}{% endif %}{% for line in message['content'] %}{% if line['type'] == 'text' %}{{line['text']}}"
    "{% elif line['type'] == 'image' %}{{ '<image>' }}{% endif %}{% endfor %}<end_of_utterance>\n{% endfor %}"
    "{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"
)
QWEN = (
    "{%- if messages[0].role != 'system' %}\n    {{- '<|im_start|>system\\nBe kind.<|im_end|>\\n' }}\n{%- endif %}\n"
    "{%- for message in messages %}\n{%- if message.role == 'tool' %}{% continue %}{% endif %}\n"
    "    {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}\n{%- endfor %}\n"
    "{%- if add_generation_prompt %}\n    {%- generation %}{{- '<|im_start|>assistant\\n' }}{%- endgeneration %}\n{%- endif %}"
)
LLAMA = (
    "{{ bos_token }}{% for m in messages %}[{{ m.role }}] {{ m.content | tojson }}{{ m | tojson(sort_keys=True, separators=(',', ':')) }}"
    "{{ eos_token }}{% endfor %}"
)
NAMES = {"bos_token": "<s>", "eos_token": "</s>"}
IMAGE_AND_TEXT = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "Wie heißt <b>?"}]}]
TURNS = [
    {"role": "user", "content": "one"},
    {"role": "assistant", "content": "two \u6f22"},
    {"role": "user", "content": "{{ three }}\n"},
]


@pytest.mark.parametrize(
    ("template", "messages", "parts"),
    [(SMOLVLM, IMAGE_AND_TEXT, True), (QWEN, TURNS, False), (LLAMA, TURNS, False)],
    ids=["parts", "texts", "special tokens"],
)
def test_as_transformers_renders(template, messages, parts):
    (wanted,), _ = render_jinja_template([messages], chat_template=template, add_generation_prompt=True, **NAMES)
    found, special = Chat(template, NAMES, parts).prompt(messages)
    assert found == wanted
    assert special == parts
    assert not Chat(LLAMA, NAMES, True).prompt(IMAGE_AND_TEXT)[1]


def test_contents_are_what_a_template_takes():
    """Parts for a model with images, and a text for others."""
    assert (
        Chat(SMOLVLM, {}, True).prompt([{"role": "user", "content": "one"}])[0].startswith("<|im_start|>User: one<end")
    )
    (message,) = IMAGE_AND_TEXT
    content = [part for part in message["content"] if part["type"] == "text"]
    assert "user\nWie heißt <b>?<|im_end|>" in Chat(QWEN, {}, False).prompt([{"role": "user", "content": content}])[0]


@pytest.mark.parametrize(
    ("messages", "told"),
    [
        ([], r"messages: got \[\]; accepted is a list such as"),
        (7, "messages: got 7"),
        (["one"], "messages: got 'one'"),
        ([{"role": "user"}], "got the content None"),
        ([{"role": "user", "content": [{"type": "video"}]}], "accepted are parts of the type text and image"),
        ([{"role": "user", "content": [{"type": "image", "url": "a.png"}]}], "the picture itself in images"),
        ([{"role": "judge", "content": "x"}], "cannot be rendered .* TemplateError: no judges. Accepted are messages"),
    ],
)
def test_messages_that_are_refused(messages, told):
    template = "{% if messages[0].role == 'judge' %}{{ raise_exception('no judges') }}{% endif %}"
    with pytest.raises(InputError, match=told):
        Chat(template, {}, True).prompt(messages)


def test_a_model_of_text_alone_takes_no_image():
    with pytest.raises(InputError, match="accepted are parts of the type text: this model reads text alone"):
        Chat(QWEN, {}, False).prompt(IMAGE_AND_TEXT)


def test_a_template_reaches_nothing_outside():
    with pytest.raises(InputError, match="SecurityError"):
        Chat("{{ messages.__class__.__mro__[1].__subclasses__() }}", {}, True).prompt(IMAGE_AND_TEXT)


@pytest.mark.parametrize(
    ("files", "found"),
    [
        ({"chat_template.jinja": "A", "tokenizer_config.json": {"chat_template": "B", "bos_token": {"content": "<s>"}}}, "A"),
        ({"chat_template.json": {"chat_template": "C"}, "tokenizer_config.json": {"chat_template": "B"}}, "C"),
        ({"tokenizer_config.json": {"chat_template": [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]}}, "D"),
        ({"tokenizer_config.json": {"chat_template": "E"}, "special_tokens_map.json": {"bos_token": "<s>"}}, "E"),
        ({"tokenizer_config.json": {}}, None),
        ({}, None),
    ],
)  # fmt: skip
def test_where_templates_are(files, found, tmp_path):
    for name, content in files.items():
        (tmp_path / name).write_text(content if isinstance(content, str) else json.dumps(content))

    def find(name):
        return tmp_path / name if name in files else None

    chat = read_chat(find, True)
    assert (chat and chat.template) == found
    if found in ("A", "E"):
        assert chat.names == {"bos_token": "<s>"}


@pytest.mark.parametrize(
    ("template", "image_token", "told"),
    [
        (SMOLVLM.encode(), 5, None),
        (b"{{ messages[0].content }}", None, None),
        (b"{{ 'user: ' + messages[0].content }}", 5, "messages cannot be used: the chat template cannot be rendered .* TypeError"),
        (b"{{ messages[0].content", None, "TemplateSyntaxError"),
        (b"{% for i in range(1000000) %}a{% endfor %}", None, "OverflowError"),
        (b"\xff", None, "chat_template.jinja is no readable text: .*utf-8"),
    ],
    ids=["parts", "text", "text for parts", "syntax", "length", "bytes"],
)  # fmt: skip
def test_what_the_export_says_of_a_template(template, image_token, told, tmp_path):
    (tmp_path / "chat_template.jinja").write_bytes(template)
    notes = chat_note(SimpleNamespace(directory=tmp_path, image_token=image_token))
    assert len(notes) == (told is not None)
    assert all(re.search(told, note.text) for note in notes)
