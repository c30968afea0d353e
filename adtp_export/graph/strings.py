"""Texts in: a WordPiece tokenizer as nodes before a model, for applications that have no tokenizer library.

The operators are those of onnxruntime-extensions. Its `BertTokenizer` lowers and strips few characters beyond Latin ones and knows no
added tokens. So it is not used here: what the tokenizer's own normalizer makes of every character of Unicode becomes a table.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers

from ..contract import ATTENTION_MASK, BATCH, INPUT_IDS, INPUTS, SEQUENCE, TEXT, TOKEN_TYPE_IDS
from ..errors import InputError

EXTENSIONS, TABLES = "ai.onnx.contrib", "ai.onnx.ml"
_SURROGATES = range(0xD800, 0xE000)
_ASKED = (range(0x34000), range(0xE0000, 0xE1000))
"""Characters about which the tokenizer is asked. Unicode has no others, but for two planes of private ones."""
_PRIVATE = (range(0xF0000, 0xFFFFE), range(0x100000, 0x10FFFE))
_FIRST_MARK, _LAST_MARK, _BREAK = 0xE000, 0xF8FF, "\x1f"
"""Of private characters, those that stand for added tokens, and the character that parts others. The normalizer removes both."""
_PROBE = "0"
"""A character that the normalizer leaves as it is, and that no other becomes."""


@dataclass(frozen=True)
class _Characters:
    """What the normalizer and the splitting of words make of each character: removed, a space, a word of its own, or other text."""

    removed: list[int] = field(default_factory=list)
    spaces: list[int] = field(default_factory=list)
    alone: list[int] = field(default_factory=list)
    changed: dict[str, str] = field(default_factory=dict)


def obstacle(tokenizer: Tokenizer) -> str | None:
    """Say why a tokenizer cannot be expressed; None where it can be."""
    normalizer = tokenizer.normalizer
    if not isinstance(tokenizer.model, models.WordPiece):
        return f"its tokens are those of {type(tokenizer.model).__name__}, and WordPiece is what can be expressed"
    if not isinstance(normalizer, normalizers.BertNormalizer) or not normalizer.clean_text:
        return f"its normalizer is {type(normalizer).__name__}, and a BertNormalizer that cleans texts is what can be expressed"
    if not isinstance(tokenizer.pre_tokenizer, pre_tokenizers.BertPreTokenizer):
        return f"it splits words by {type(tokenizer.pre_tokenizer).__name__}, and BertPreTokenizer is what can be expressed"
    added, most = tokenizer.get_added_tokens_decoder(), _LAST_MARK - _FIRST_MARK + 1
    if len(added) > most:
        return f"it has {len(added)} added tokens, and up to {most} can be expressed"
    for token in added.values():
        if token.single_word or token.lstrip or token.rstrip or token.normalized:
            return f"its added token {token.content!r} looks at what is around it, or at normalized text"
    return None


def join(before: onnx.ModelProto, model: Path, file: Path) -> None:
    """Write a model with what `tokenizing` made before it: input ``text (batch) string``, and the outputs of the model.

    No texts have outputs without rows: `tokenizing` puts an empty text in their place, and what the model says of it is left out.

    Raises:
        InputError: the model is too large for one file.
    """
    if model.with_name(f"{model.name}.data").exists():
        raise InputError("--with-tokenizer: the model is too large for one file; leave the option out")
    whole = onnx.load(model)
    graph, nodes = whole.graph, list(whole.graph.node)
    build = _Builder("texts")
    for output in graph.output:
        of_all = f"{output.name}/of_all"
        for node in nodes:
            node.input[:] = [of_all if name == output.name else name for name in node.input]
            node.output[:] = [of_all if name == output.name else name for name in node.output]
        build.node("Slice", [of_all, build.integer(0), build.node("Shape", [TEXT])], output.name)
    del graph.node[:], graph.input[:]
    graph.node.extend([*before.graph.node, *nodes, *build.nodes])
    graph.input.extend(before.graph.input)
    graph.initializer.extend([*before.graph.initializer, *build.constants.values()])
    whole.opset_import.extend(opset for opset in before.opset_import if opset.domain in (EXTENSIONS, TABLES))
    onnx.save(whole, file)


def tokenizer_of(file: Path) -> onnx.ModelProto:
    """Return the tokenizer of a file that `join` wrote, alone: its nodes come first."""
    whole = onnx.load(file)
    graph = whole.graph
    made = [set(node.output) & INPUTS.keys() for node in graph.node]
    del graph.node[max(i for i, names in enumerate(made) if names) + 1 :], graph.output[:]
    names = [name for name in INPUTS if any(name in own for own in made)]
    graph.output.extend(helper.make_tensor_value_info(name, TensorProto.INT64, [BATCH, SEQUENCE]) for name in names)
    read = {name for node in graph.node for name in node.input}
    weights = [tensor for tensor in graph.initializer if tensor.name in read]
    del graph.initializer[:], whole.functions[:]
    graph.initializer.extend(weights)
    return whole


def tokenizing(tokenizer: Tokenizer, max_tokens: int, inputs: Iterable[str], pad_id: int = 0) -> onnx.ModelProto:
    """Return a tokenizer that `obstacle` has nothing against as a graph, from `TEXT` to a model's inputs.

    Texts are cut at `max_tokens`, as `data.tokenize.encode` does. Where there are none, the inputs have a row for an empty one.
    """
    build, inputs = _Builder("tokenizer"), list(inputs)
    special = {token.content: id for id, token in tokenizer.get_added_tokens_decoder().items()}
    marks = {token: chr(_FIRST_MARK + i) for i, token in enumerate(sorted(special, key=len, reverse=True))}
    words_by_id = sorted(tokenizer.get_vocab().items(), key=lambda word: word[1])  # it comes in another order each time
    vocabulary = {**dict(words_by_id), **{mark: special[token] for token, mark in marks.items()}}
    build.at_least_one()
    words = build.words(_characters(tokenizer, "".join(marks.values())), marks)
    ids, counts = build.pieces(*words, tokenizer.model, vocabulary)
    build.padded(ids, counts, special_ids(tokenizer), max_tokens, pad_id)
    if TOKEN_TYPE_IDS in inputs:
        build.node("Mul", [ATTENTION_MASK, build.integer(0)], TOKEN_TYPE_IDS)
    graph = helper.make_graph(
        build.nodes,
        "tokenizer",
        [helper.make_tensor_value_info(TEXT, TensorProto.STRING, [BATCH])],
        [helper.make_tensor_value_info(name, TensorProto.INT64, [BATCH, SEQUENCE]) for name in inputs],
        list(build.constants.values()),
    )
    opsets = [helper.make_opsetid(*known) for known in (("", 20), (EXTENSIONS, 1), (TABLES, 3))]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10)


def _characters(tokenizer: Tokenizer, kept: str) -> _Characters:
    """Ask the tokenizer's normalizer and splitter about every character of Unicode, except those in `kept`."""
    known = (i for part in (*_ASKED, *(part[:1] for part in _PRIVATE)) for i in part)
    every = [chr(i) for i in known if i not in _SURROGATES and chr(i) not in (_PROBE, *kept)]
    normal = tokenizer.normalizer.normalize_str(_PROBE + _PROBE.join(every) + _PROBE).split(_PROBE)[1:-1]
    assert len(normal) == len(every)
    distinct = sorted({character for text in normal for character in text})
    probe = _PROBE + _PROBE.join(distinct) + _PROBE
    pieces = tokenizer.pre_tokenizer.pre_tokenize_str(probe)
    alone = {piece for piece, _ in pieces if len(piece) == 1 and piece != _PROBE}
    spaces = set(distinct) - {character for piece, _ in pieces for character in piece}
    form = {c: " " if c in spaces else f" {c} " if c in alone else c for c in distinct}
    found = _Characters()
    for character, text in zip(every, normal):
        becomes = "".join(form[c] for c in text)
        if becomes == character:
            continue
        if not becomes:
            found.removed.append(ord(character))
        elif not becomes.strip(" "):
            found.spaces.append(ord(character))
        elif becomes.strip(" ") == character:
            found.alone.append(ord(character))
        else:
            found.changed[character] = becomes
    found.removed.extend(i for part in _PRIVATE if part[0] in found.removed for i in part[1:])
    return found


def _class(characters: Iterable[int]) -> str:
    """Return a class of characters of a regular expression, in ranges."""
    ranges: list[list[int]] = []
    for i in sorted(characters):
        if ranges and ranges[-1][1] in (i - 1, *([i - 1 - len(_SURROGATES)] if i == _SURROGATES.stop else [])):
            ranges[-1][1] = i
        else:
            ranges.append([i, i])
    return "[" + "".join(rf"\x{{{a:x}}}-\x{{{b:x}}}" for a, b in ranges) + "]"


def _quoted(text: str) -> str:
    """Return a regular expression that matches a text alone."""
    return "".join(rf"\x{{{ord(character):x}}}" for character in text)


class _Builder:
    """Collects nodes and constants with names of their own, below `scope`."""

    def __init__(self, scope: str) -> None:
        self.scope = scope
        self.nodes: list[onnx.NodeProto] = []
        self.constants: dict[str, onnx.TensorProto] = {}
        self.text = TEXT

    def constant(self, value: np.ndarray) -> str:
        name = f"{self.scope}/constant_{len(self.constants)}"
        self.constants[name] = numpy_helper.from_array(value, name)
        return name

    def integer(self, *values: int) -> str:
        return self.constant(np.array(values, np.int64))

    def strings(self, text: str) -> str:
        name = f"{self.scope}/constant_{len(self.constants)}"
        self.constants[name] = numpy_helper.from_array(np.array([text], dtype=object), name)
        return name

    def custom(self, kind: str, inputs: list[str], outputs: int, **attributes: Any) -> list[str]:
        """Add an operator of onnxruntime-extensions; return the names of its outputs."""
        names = [f"{self.scope}/{len(self.nodes)}_{kind}_{i}" for i in range(outputs)]
        self.nodes.append(helper.make_node(kind, inputs, names, name=names[0], domain=EXTENSIONS, **attributes))
        return names

    def node(self, kind: str, inputs: list[str], output: str = "", domain: str = "", **attributes: Any) -> str:
        name = f"{self.scope}/{len(self.nodes)}_{kind}"
        self.nodes.append(helper.make_node(kind, inputs, [output or name], name=name, domain=domain, **attributes))
        return output or name

    def replace(self, text: str, pattern: str, by: str) -> str:
        return self.custom("StringRegexReplace", [text, self.strings(pattern), self.strings(by)], 1, global_replace=1)[
            0
        ]

    def at_least_one(self) -> None:
        """Take an empty text where there is none: StringJoin ends the process on a rectangle without rows."""
        missing = self.node("Sub", [self.integer(1), self.node("Shape", [TEXT])])
        further = self.node("Expand", [self.strings(""), self.node("Max", [missing, self.integer(0)])])
        self.text = self.node("Concat", [TEXT, further], axis=0)

    def joined(self, at: str, characters: str) -> str:
        """Join characters to one text for each row; `at` has row and place of each."""
        rows = self.node("Shape", [self.text])
        longest = self.node(
            "Add",
            [
                self.node(
                    "ReduceMax",
                    [self.node("Concat", [at, self.constant(np.zeros((1, 2), np.int64))], axis=0), self.integer(0)],
                    keepdims=0,
                ),
                self.integer(0, 1),
            ],
        )
        shape = self.node("Concat", [rows, self.node("Gather", [longest, self.integer(1)])], axis=0)
        empty = self.node("Expand", [self.strings(""), shape])
        dense = self.node("ScatterND", [empty, at, characters])
        return self.custom("StringJoin", [dense, self.strings(""), self.integer(1)], 1)[0]

    def split(self, text: str, at: str) -> tuple[str, str]:
        """Split texts; return the row and place of each part ``(parts, 2)``, and the parts."""
        where, parts, _ = self.custom("StringSplit", [text, self.strings(at), self.constant(np.array([True]))], 3)
        return where, parts

    def words(self, seen: _Characters, marks: Mapping[str, str]) -> tuple[str, str]:
        """Make words of texts; return the row and place of each ``(words, 2)``, and the words. An added token is a word: its mark."""
        text = self.replace(self.text, _class(map(ord, marks.values())), "")
        for token, mark in marks.items():
            text = self.replace(text, _quoted(token), f" {mark} ")
        text = self.replace(text, _class(seen.removed), "")
        text = self.replace(text, _class(seen.spaces), " ")
        text = self.replace(text, f"({_class(seen.alone)})", r" \1 ")
        at, characters = self.split(self.replace(text, "(?s)(.)", rf"\1{_BREAK}"), _BREAK)
        table = "\n".join(f"{character}\t{becomes}" for character, becomes in seen.changed.items())
        (characters,) = self.custom("StringMapping", [characters], 1, map=table)
        return self.split(self.joined(at, characters), " ")

    def pieces(self, at: str, words: str, model: models.WordPiece, vocabulary: Mapping[str, int]) -> tuple[str, str]:
        """Divide words into pieces; return their ids, and their number in each text."""
        unknown = vocabulary[model.unk_token]
        settings: dict[str, Any] = {
            "vocab": json.dumps(vocabulary),
            "suffix_indicator": model.continuing_subword_prefix,
            "unknown_token": model.unk_token,
            "max_input_chars_per_word": model.max_input_chars_per_word,
        }
        tokens, starts, _, _ = self.custom("WordpieceTokenizer", [words, self.integer()], 4, **settings)
        keys: dict[str, Any] = {"keys_strings": list(vocabulary), "values_int64s": list(vocabulary.values())}
        ids = self.node("LabelEncoder", [tokens], domain=TABLES, default_int64=unknown, **keys)
        return self.whole_words(ids, starts, at, unknown)

    def whole_words(self, ids: str, starts: str, at: str, unknown: int) -> tuple[str, str]:
        """Make each word that has an unknown piece one unknown token: the operator leaves the pieces before it.

        Args:
            ids: of all tokens ``(N)``. starts: first token of each word, and N, ``(words + 1)``. at: row and place of each word.

        Returns:
            ids of the tokens that are left, and their number in each text ``(B)``.
        """
        first = self.node("Slice", [starts, self.integer(0), self.integer(-1), self.integer(0)])
        none = self.node("Mul", [ids, self.integer(0)])  # (N) zeros
        ones = self.node("Add", [self.node("Mul", [first, self.integer(0)]), self.integer(1)])
        begins = self.node("ScatterElements", [none, first, ones])
        word = self.node("Sub", [self.node("CumSum", [begins, self.integer(0)]), self.integer(1)])
        missing = self.node("Cast", [self.node("Equal", [ids, self.integer(unknown)])], to=TensorProto.INT64)
        in_word = self.node(
            "ScatterElements", [self.node("Mul", [first, self.integer(0)]), word, missing], reduction="max"
        )
        spoiled = self.node("Cast", [self.node("Gather", [in_word, word])], to=TensorProto.BOOL)
        ids = self.node("Where", [spoiled, self.integer(unknown), ids])
        stays = self.node("Or", [self.node("Not", [spoiled]), self.node("Cast", [begins], to=TensorProto.BOOL)])
        rows = self.node("Gather", [self.node("Gather", [at, self.constant(np.array(0, np.int64))], axis=1), word])
        none = self.node("Expand", [self.integer(0), self.node("Shape", [self.text])])
        counts = self.node(
            "ScatterElements", [none, rows, self.node("Cast", [stays], to=TensorProto.INT64)], reduction="add"
        )
        return self.node("Compress", [ids, stays], axis=0), counts

    def padded(self, ids: str, counts: str, around: tuple[list[int], list[int]], max_tokens: int, pad_id: int) -> None:
        """Put ids, so many for each row, into right-padded inputs with special tokens around them."""
        first, last = around
        begin = self.node("CumSum", [counts, self.integer(0)], exclusive=1)
        count = self.node("Min", [counts, self.integer(max_tokens - len(first) - len(last))])
        length = self.node("Add", [count, self.integer(len(first) + len(last))])
        longest = self.node("ReduceMax", [length, self.integer(0)], keepdims=0)
        zero, one = self.constant(np.array(0, np.int64)), self.constant(np.array(1, np.int64))
        places = self.node("Range", [zero, longest, one])  # (S)
        column = {
            name: self.node("Unsqueeze", [value, self.integer(1)])
            for name, value in (("begin", begin), ("count", count), ("length", length))
        }
        # Row b reads from [first | its ids | last]: all of them lie in one list, so that one Gather reads them.
        source = self.node("Concat", [self.integer(*first, *last), ids], axis=0)
        within = self.node("Sub", [places, self.integer(len(first))])
        own = self.node("Add", [self.node("Add", [within, column["begin"]]), self.integer(len(first) + len(last))])
        after = self.node("Add", [self.node("Sub", [within, column["count"]]), self.integer(len(first))])
        place = self.node("Where", [self.node("Less", [within, column["count"]]), own, after])
        place = self.node("Where", [self.node("Less", [places, self.integer(len(first))]), places, place])
        live = self.node("Less", [places, column["length"]])
        place = self.node("Where", [live, place, self.integer(0)])
        self.node("Where", [live, self.node("Gather", [source, place]), self.integer(pad_id)], INPUT_IDS)
        self.node("Cast", [live], ATTENTION_MASK, to=TensorProto.INT64)


def special_ids(tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
    """Return the ids that a tokenizer puts before a text, and those after it."""
    whole, own = tokenizer.encode("a").ids, tokenizer.encode("a", add_special_tokens=False).ids
    begin = next(i for i in range(len(whole)) if whole[i : i + len(own)] == own)
    return whole[:begin], whole[begin + len(own) :]
