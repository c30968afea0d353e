"""Messages to prompts: a checkpoint's chat template, rendered with jinja2 as transformers renders it."""

from __future__ import annotations

import datetime
import functools
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NoReturn

from ..errors import InputError, ellipsize, needs_extras, quoted
from ..io import read_document, read_json

FILE, IN_JSON, SETTINGS, TOKENS = (
    "chat_template.jinja",
    "chat_template.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
)
_HOMES = (IN_JSON, "processor_config.json", SETTINGS)
"""JSON files that have a template in the field `chat_template`; the first that has one counts."""
_FIELD = "chat_template"
_ACCEPTED = (
    'a list such as [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What is this?"}]}]; the picture itself goes '
    "to images"
)


class Chat:
    """A chat template.

    Args:
        template: in jinja. names: of special tokens, such as `bos_token`. parts: whether contents are lists of parts, as where a model
            reads images; else they are texts.
    """

    def __init__(self, template: str, names: Mapping[str, str], parts: bool) -> None:
        self.template, self.names, self.parts = template, names, parts

    def prompt(self, messages: Any) -> tuple[str, bool]:
        """Return the prompt of messages, and whether the tokenizer adds special tokens to it.

        Raises:
            InputError: they are no messages, or the template cannot be rendered with them.
            MissingDependencyError: jinja2 is not installed.
        """
        given = [self._message(message) for message in messages] if isinstance(messages, (list, tuple)) else []
        if not given:
            raise InputError(f"messages: got {quoted(messages)}; accepted is {_ACCEPTED}")
        try:
            text: str = _compiled(self.template).render(
                messages=given, tools=None, documents=None, add_generation_prompt=True, **self.names
            )
        except ImportError:
            raise
        except Exception as error:  # templates raise what they like
            why = ellipsize(f"{type(error).__name__}: {error}").rstrip(" .:")
            raise InputError(
                f"the chat template cannot be rendered with {quoted(messages)}: {why}. Accepted are messages that it has places for, and "
                "prompts that are written out as text"
            ) from error
        begin = self.names.get("bos_token")
        return text, self.parts and not (begin and text.startswith(begin))

    def _message(self, message: Any) -> dict[str, Any]:
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise InputError(f"messages: got {quoted(message)}; accepted is {_ACCEPTED}")
        content = message.get("content")
        whole = [{"type": "text", "text": content}] if isinstance(content, str) else content
        if not isinstance(whole, (list, tuple)) or not whole:
            raise InputError(f"messages: got the content {quoted(content)}; accepted is {_ACCEPTED}")
        parts = [_part(part, self.parts) for part in whole]
        own = parts if self.parts else "".join(part["text"] for part in parts)
        return {**message, "content": own}


def _part(part: Any, images: bool) -> dict[str, Any]:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind == "text" and isinstance(part.get("text"), str):
        return {"type": "text", "text": part["text"]}
    if kind == "image" and images:
        if set(part) == {"type"}:
            return {"type": "image"}
        raise InputError(
            f"messages: got {quoted(part)}; accepted is {{'type': 'image'}}, and the picture itself in images"
        )
    kinds = "text and image" if images else "text: this model reads text alone"
    raise InputError(f"messages: got the part {quoted(part)}; accepted are parts of the type {kinds}")


def read_chat(find: Callable[[str], Path | None], parts: bool) -> Chat | None:
    """Read the chat template of a checkpoint; None where it has none.

    Args:
        find: from the name of a file to its path; None where there is none. parts: as of `Chat`.

    Raises:
        InputError: a file is damaged.
    """
    found: Any = None
    if (path := find(FILE)) is not None:
        try:
            found = read_document(path)
        except (OSError, ValueError) as error:
            raise InputError(f"{path} is no readable text: {ellipsize(str(error))}") from error
    stored = {name: read_json(path) for name in (*_HOMES, TOKENS) if (path := find(name)) is not None}
    settings = {name: fields for name, fields in stored.items() if isinstance(fields, dict)}
    found = found or next((own for fields in settings.values() if (own := fields.get(_FIELD))), None)
    if isinstance(found, list):  # several by name
        named = [each.get("template") for each in found if isinstance(each, dict) and each.get("name") == "default"]
        found = named[0] if named else None
    if not isinstance(found, str):
        return None
    return Chat(found, _special_tokens({**settings.get(TOKENS, {}), **settings.get(SETTINGS, {})}), parts)


def _special_tokens(settings: Mapping[str, Any]) -> dict[str, str]:
    """Return the special tokens that a tokenizer's settings name, by name."""
    extra = settings.get("extra_special_tokens")
    both = {**settings, **(extra if isinstance(extra, dict) else {})}
    spelled = {name: each.get("content") if isinstance(each, dict) else each for name, each in both.items()}
    return {name: each for name, each in spelled.items() if name.endswith("_token") and isinstance(each, str)}


@functools.cache
def _compiled(template: str) -> Any:
    """Compile a template, in a sandbox that keeps it from all but its variables."""
    with needs_extras("rendering a chat template"):
        import jinja2
        from jinja2 import nodes
        from jinja2.ext import Extension
        from jinja2.parser import Parser
        from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """`generation` marks what a model said, for training; the text is the same without it."""

        tags = {"generation"}

        def parse(self, parser: Parser) -> list[nodes.Node]:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    def refuse(message: str) -> NoReturn:
        raise jinja2.TemplateError(message)

    def to_json(value: Any, **settings: Any) -> str:
        return json.dumps(value, **{"ensure_ascii": False, **settings})

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = to_json
    environment.globals["raise_exception"] = refuse
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().astimezone().strftime(form)
    return environment.from_string(template)
