"""An ONNX file that is one `adtp::AdtpEncoder`, read with numpy alone: the operator's plan, its weights, its inputs and outputs."""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ..contract import DOMAIN, ENCODER
from ..errors import InputError
from ..plugins import plan as plans

_GRAPH, _METADATA = 7, 14
_NODE, _INITIALIZER = 1, 5
_INPUT, _OUTPUT, _OP_TYPE, _ATTRIBUTE, _DOMAIN = 1, 2, 4, 5, 7
_ATTRIBUTE_NAME, _TEXT = 1, 4
_NAME, _RAW, _EXTERNAL = 8, 9, 13
_KEY, _VALUE = 1, 2
"""Numbers of fields in onnx.proto: of ModelProto, GraphProto, NodeProto, AttributeProto, TensorProto, StringStringEntryProto."""


@dataclass(frozen=True, kw_only=True)
class EncoderFile:
    """What a file holds. inputs, outputs: names, with types and axes in the words of `plugins/cpp/signature.h`, such as
    ``("int64", "texts", "length")``. weights: bytes of each, in the plan's order; they lie in the file. metadata: by name."""

    plan: plans.Plan
    inputs: dict[str, tuple[str, ...]]
    outputs: dict[str, tuple[str, ...]]
    weights: tuple[np.ndarray, ...]
    metadata: dict[str, str]


def read(path: Path) -> EncoderFile:
    """Read a file that ``adtp-export --cuda`` wrote.

    Raises:
        InputError: it is none, or it is damaged.
    """
    try:
        return _read(path)
    except (ValueError, IndexError, KeyError, OSError) as error:
        raise InputError(
            f"{path}: got no ONNX file with one {DOMAIN}::{ENCODER}; accepted: what adtp-export --cuda wrote"
        ) from error


def _read(path: Path) -> EncoderFile:
    content = _content(path)
    graph = _graph(content)
    (node,) = _nodes(graph)
    attributes = {
        bytes(_one(attribute, _ATTRIBUTE_NAME)).decode(): bytes(_one(attribute, _TEXT)).decode()
        for attribute in _all(node, _ATTRIBUTE)
    }
    arrays = {bytes(_one(tensor, _NAME)).decode(): _array(path.parent, tensor) for tensor in _all(graph, _INITIALIZER)}
    names, results = ([bytes(name).decode() for name in _all(node, kind)] for kind in (_INPUT, _OUTPUT))
    inputs = dict(zip(names, _words(attributes["inputs"])))
    return EncoderFile(
        plan=plans.read(attributes["plan"]),
        inputs=inputs,
        outputs=dict(zip(results, _words(attributes["outputs"]))),
        weights=tuple(arrays[name] for name in names[len(inputs) :]),
        metadata=dict(map(_entry, _all(content, _METADATA))),
    )


def _words(said: str) -> list[tuple[str, ...]]:
    return [tuple(one.split()) for one in said.split(";")]


def _content(path: Path) -> memoryview:
    with path.open("rb") as file:
        return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))


def _graph(content: memoryview) -> memoryview:
    return _one(content, _GRAPH)


def _nodes(graph: memoryview) -> Iterator[memoryview]:
    """Yield the nodes of a graph that are the operator."""
    for node in _all(graph, _NODE):
        if (bytes(_one(node, _OP_TYPE)), b"".join(map(bytes, _all(node, _DOMAIN)))) == (
            ENCODER.encode(),
            DOMAIN.encode(),
        ):
            yield node


def _array(directory: Path, tensor: memoryview) -> np.ndarray:
    """Return a weight's bytes, which lie in the file or in the one beside it."""
    external = dict(map(_entry, _all(tensor, _EXTERNAL)))
    if not external:
        return np.frombuffer(_one(tensor, _RAW), np.uint8)
    if Path(external["location"]).name != external["location"]:
        raise ValueError(external["location"])
    begin, size = int(external.get("offset", 0)), int(external["length"])
    return np.frombuffer(_content(directory / external["location"])[begin : begin + size], np.uint8)


def _entry(entry: memoryview) -> tuple[str, str]:
    return bytes(_one(entry, _KEY)).decode(), b"".join(map(bytes, _all(entry, _VALUE))).decode()


def _one(message: memoryview, field: int) -> memoryview:
    for found in _all(message, field):
        return found
    raise ValueError(f"no field {field}")


def _all(message: memoryview, field: int) -> Iterator[memoryview]:
    """Yield the texts, bytes or messages that a field of a protobuf message has."""
    at = 0
    while at < len(message):
        key, at = _number(message, at)
        match key & 7:
            case 0:
                _, at = _number(message, at)
            case 1:
                at += 8
            case 5:
                at += 4
            case 2:
                size, begin = _number(message, at)
                at = begin + size
                if at > len(message):
                    raise ValueError("the file ends early")
                if key >> 3 == field:
                    yield message[begin:at]
            case other:
                raise ValueError(f"protobuf has no wire type {other} here")


def _number(message: memoryview, at: int) -> tuple[int, int]:
    """Return a varint, and where it ends."""
    found = shift = 0
    while True:
        byte = message[at]
        found, at, shift = found | (byte & 0x7F) << shift, at + 1, shift + 7
        if byte < 0x80:
            return found, at
