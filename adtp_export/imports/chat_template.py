"""Chat templates that sentence-transformers puts around texts: rendered here, once, and taken apart into what always stands there.

Source: `Transformer` and `InputFormatter` of sentence-transformers 6.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..data.template import DOCUMENT, FILLERS, PROMPT, QUERY, SLOTS, TEXT, ChatTemplate, Slot, fill
from ..errors import InputError, check_int, ellipsize, quoted
from ..io import read_json
from ..model.tokenizer_settings import TOKENIZER_SETTINGS

FILE = "chat_template.jinja"
_BUCKETS = ("chat_template", "text", "common")
"""Where `processing_kwargs` may say how texts are cut; the first that does decides."""
_OTHERS = ("image", "audio", "video")
"""Of what is no text."""
_CUTS = (
    "padding",
    "truncation",
    "max_length",
    "return_tensors",
    "pad_to_multiple_of",
    "padding_side",
    "logits_to_keep",
)
"""Keywords that a graph has no use for, or that say how long texts may be."""
_TRUNCATION = (None, True, "longest_first")
_STRUCTURED = ("content[0]", ".type", "'type'", '"type"', "item.type", "message.content[")
"""What a template has that takes contents as lists of parts."""
_DATE = "strftime_now"
"""A function that transformers gives to templates. None is there to call when they are rendered here."""
_PROBES = (
    *("", " ", "a\n", "  two words \n\n", "{{ x }} {% y %}", "</s> <|im_end|>", "Üni & <b> \u6f22\u5b57 \U0001f389"),
    *FILLERS,
    "a long text " * 1000,
)
"""Contents with which the pieces are held against the template."""


@dataclass(frozen=True)
class Processing:
    """How a Transformer module processes texts. template: None where it takes them as they are. max_tokens: where it says that."""

    template: ChatTemplate | None
    max_tokens: int | None


def read(home: Path, limits: Mapping[str, Any], output: str) -> Processing:
    """Read what `sentence_bert_config.json` says of texts, and render the tokenizer's chat template if they go through that.

    Args:
        home: folder of the tokenizer.
        limits: the fields of that file.
        output: what of the model's output the next module reads: "last_hidden_state" or "logits".

    Raises:
        InputError: settings that a graph or `load` does not have, or a template that does more than put texts into places.
    """
    for name in ("query_length", "document_length", "query_expansion"):
        if limits.get(name) is not None:
            raise InputError(
                f"{home}: {name} is {quoted(limits[name])}; accepted are models that read queries and documents alike"
            )
    buckets = _buckets(home, limits.get("processing_kwargs") or {})
    longest = next((bucket["max_length"] for bucket in buckets.values() if bucket.get("max_length") is not None), None)
    if longest is not None:
        check_int(f"{home}: processing_kwargs.max_length", longest, 4)
    modalities = limits.get("modality_config")
    if modalities is None:
        return Processing(None, longest)
    known = modalities if isinstance(modalities, dict) else {}
    taken = known.get("message", known.get(TEXT))
    if not isinstance(taken, dict) or taken.get("method") != "forward" or taken.get("method_output_name") != output:
        raise InputError(
            f"{home}: modality_config is {quoted(modalities)}; accepted are models that read texts, of whose forward {output} is taken"
        )
    if "message" not in known:
        return Processing(None, longest)
    kind = "pair" if output == "logits" else "text"
    return Processing(_rendered(home, kind, taken.get("format", "auto"), buckets["chat_template"]), longest)


def _buckets(home: Path, given: Any) -> dict[str, dict[str, Any]]:
    """Return the keywords of a call that are stored; raises InputError for those that change texts otherwise."""
    known = given if isinstance(given, dict) else {"": given}
    for name, bucket in known.items():
        fits = isinstance(bucket, dict) and bucket.get("truncation") in _TRUNCATION
        own = fits and (name == "chat_template" or not set(bucket) - {*_CUTS})
        if not own and name not in _OTHERS:
            raise InputError(
                f"{home}: processing_kwargs.{name} is {quoted(bucket)}; accepted are chat_template, and for text max_length, with "
                "truncation from the longest side on"
            )
    return {name: known.get(name, {}) for name in _BUCKETS}


def _rendered(home: Path, needed: str, form: Any, keywords: Mapping[str, Any]) -> ChatTemplate:
    """Take apart the template of a folder's tokenizer.

    Args:
        needed: "pair" or "text": what the model cannot do without.
        form: "flat" or "structured" contents, or "auto".
        keywords: of `apply_chat_template`.
    """
    settings = read_json(home / TOKENIZER_SETTINGS) if (home / TOKENIZER_SETTINGS).is_file() else {}
    if isinstance(settings, dict) and settings.get("truncation_side", "right") != "right":
        raise InputError(
            f"{home / TOKENIZER_SETTINGS}: truncation_side is {quoted(settings['truncation_side'])}; accepted beside a chat template is "
            "'right'"
        )
    render = _renderer(home, form, {k: v for k, v in keywords.items() if k not in (*_CUTS, "restore_suffix")})
    found: dict[str, list[str | Slot]] = {}
    why = ""
    for name, slots in SLOTS.items():
        try:
            found[name] = _pieces(render, slots, required=[slot for slot in slots if slot != PROMPT])
        except _UnfitError as unfit:
            why = str(unfit) if name == needed else why
    if why:
        roles = "a pair of the roles 'query' and 'document'" if needed == "pair" else "a text of the role 'user'"
        raise InputError(
            f"{home}: the chat template cannot be rendered: {why}. Accepted is one that puts {roles} into places of its own; save that as "
            f"{FILE} beside the tokenizer"
        )
    return ChatTemplate(**found, restore_suffix=bool(keywords.get("restore_suffix", True)))


Render = Callable[[Mapping[str, str]], str]


class _UnfitError(Exception):
    """Why a template has no place for something."""


def _renderer(home: Path, form: Any, keywords: Mapping[str, Any]) -> Render:
    """Return what renders contents by slot, as sentence-transformers has transformers do it."""
    import transformers

    try:
        tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(str(home), local_files_only=True)
    except Exception as error:  # of many kinds
        raise InputError(f"{home}: transformers cannot load the tokenizer: {ellipsize(str(error))}") from error
    template = tokenizer.chat_template
    if not template:
        raise InputError(
            f"{home}: texts go through a chat template (modality_config names 'message'), and the tokenizer has none; save it as {FILE} "
            "beside the tokenizer"
        )
    if form not in ("flat", "structured"):
        spelled = template if isinstance(template, str) else ""
        form = "flat" if spelled and not any(pattern in spelled for pattern in _STRUCTURED) else "structured"

    def render(contents: Mapping[str, str]) -> str:
        messages = [
            {"role": _ROLES[slot], "content": value if form == "flat" else [{"type": "text", "text": value}]}
            for slot, value in contents.items()
        ]
        try:
            return str(tokenizer.apply_chat_template(messages, tokenize=False, **{_DATE: ""}, **keywords))
        except Exception as error:  # templates raise what they like
            if _DATE in str(template) and "not callable" in str(error):
                raise _UnfitError("it writes the date of the day") from error
            raise _UnfitError(ellipsize(f"{type(error).__name__}: {error}")) from error

    return render


_ROLES = {TEXT: "user", QUERY: "query", DOCUMENT: "document", PROMPT: "system"}


def _pieces(render: Render, slots: Sequence[str], required: Sequence[str]) -> list[str | Slot]:
    """Return what a rendering consists of, literal pieces and slots; what it leaves out of `required` is an error.

    Raises:
        _UnfitError: it leaves out a content, or does more with contents than to put them into places.
    """
    marks = {slot: f"mark0{slot}1mark" for slot in slots}
    rendered = render(marks)
    lacking = [slot for slot in required if marks[slot] not in rendered]
    if lacking:
        raise _UnfitError(f"the content of the role {_ROLES[lacking[0]]!r} is not in it")
    names = {mark: slot for slot, mark in marks.items()}
    parts = [part for part in re.split(f"({'|'.join(names)})", rendered) if part]
    if not any(part.strip() for part in parts if part not in names):
        raise _UnfitError("nothing stands beside the content, so an empty text would have no tokens")
    probes = [{slot: probe or "-" if slot == PROMPT else probe for slot in slots} for probe in _PROBES]
    probes += [{**dict.fromkeys(slots, "x"), slot: probe} for slot in required for probe in _PROBES]
    wanted = [(probe, render(probe)) for probe in probes]
    wrong: dict[str, str] = {}
    for trimmed in (chosen for count in range(len(slots) + 1) for chosen in itertools.combinations(slots, count)):
        pieces = [Slot(names[part], names[part] in trimmed) if part in names else part for part in parts]
        differing = next((probe for probe, text in wanted if fill(pieces, probe) != text), None)
        if differing is None:
            return pieces
        wrong = differing
    raise _UnfitError(f"it does more with {quoted(wrong)} than to put that into places")


_ARGUMENTS = (
    "config_args", "config_kwargs", "tokenizer_args", "processor_kwargs", "model_args", "model_kwargs", "tokenizer_name_or_path",
)  # fmt: skip
"""What sentence-transformers passes on to transformers."""
_HARMLESS = {
    "torch_dtype",
    "dtype",
    "attn_implementation",
    "trust_remote_code",
    "cache_dir",
    "local_files_only",
    "token",
    "revision",
}
"""Arguments that change no answer here."""


def without_arguments(home: Path, limits: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of a Transformer module, which pass nothing on that this would not see.

    Raises:
        InputError: they do.
    """
    for name in _ARGUMENTS:
        given = limits.get(name)
        more = {key for key in given if key not in _HARMLESS} if isinstance(given, dict) else given
        if more:
            raise InputError(
                f"{home}: its settings for sentence-transformers have {name}: {quoted(given)}, which is not read here. Write it into "
                "config.json or the tokenizer's files, and leave it out there"
            )
    return limits
