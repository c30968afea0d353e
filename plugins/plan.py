"""A plan: what the runner launches for each size of a call, and the text that `cpp/plan.cpp` reads.

The text has a line for each thing. Numbers are decimal; what follows ``#`` is a note::

    adtp-plan 1
    weight BYTES
    bucket TOKENS texts TEXTS workspace BYTES
    input BYTES
    output BYTES
    launch VARIANT PROGRAMS ARGUMENT ... # NOTE

Weights come first, each with its bytes. Buckets follow, smaller ones first. Each has its inputs, its outputs and its launches, in the
order of their execution. PROGRAMS is a number, or ``NUMBER+FACTOR*texts``. An argument is one of:

- ``workspace:OFFSET``, ``weight:INDEX:OFFSET``, ``input:INDEX:OFFSET``, ``output:INDEX:OFFSET``: a pointer, its offset in bytes; all
  of these places begin at multiples of 16 bytes;
- ``null``: a pointer to nothing;
- ``i32:VALUE``, ``i64:VALUE``, ``f32:VALUE``: a number. For an integer, VALUE may be ``texts``, ``length`` or ``tokens``: those of a call.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass, replace

from ..errors import InputError, quoted

FIRST_LINE = "adtp-plan 1"

WORKSPACE, WEIGHT, INPUT, OUTPUT, NULL = "workspace", "weight", "input", "output", "null"
TEXTS, LENGTH, TOKENS = "texts", "length", "tokens"
"""What a call says of itself: texts B, the length S of padded inputs, rows that may be used (B * S, or T where there is no padding)."""

_TYPES = ("i32", "i64", "f32")
_MOST_COUNT, _MOST_BYTES = 2**31 - 1, 2**48


@dataclass(frozen=True)
class Pointer:
    """Memory of a launch: `offset` bytes behind the begin of the workspace, or of weight, input or output `index`; or `NULL`."""

    place: str
    offset: int = 0
    index: int = 0

    def __str__(self) -> str:
        parts = {NULL: (), WORKSPACE: (self.offset,)}.get(self.place, (self.index, self.offset))
        return ":".join(map(str, (self.place, *parts)))


@dataclass(frozen=True)
class Number:
    """A number of a launch. type: "i32", "i64" or "f32". value: a constant; of integers also `TEXTS`, `LENGTH` or `TOKENS`."""

    type: str
    value: int | float | str

    def __str__(self) -> str:
        return f"{self.type}:{self.value}"


Argument = Pointer | Number


@dataclass(frozen=True, kw_only=True)
class Launch:
    """One kernel. programs: of its grid, along x; programs_per_text: on top, for each text of a call. note: for messages."""

    variant: str
    programs: int
    arguments: tuple[Argument, ...]
    programs_per_text: int = 0
    note: str = ""

    def __str__(self) -> str:
        more = f"+{self.programs_per_text}*{TEXTS}" if self.programs_per_text else ""
        note = f" # {self.note}" if self.note else ""
        return " ".join(["launch", self.variant, f"{self.programs}{more}", *map(str, self.arguments)]) + note


@dataclass(frozen=True, kw_only=True)
class Bucket:
    """What is launched for calls of at most `tokens` rows of at most `texts` texts.

    workspace: bytes. inputs, outputs: bytes of each, at most.
    """

    tokens: int
    texts: int
    workspace: int
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    launches: tuple[Launch, ...]


@dataclass(frozen=True)
class Plan:
    """weights: bytes of each. buckets: smaller ones first."""

    weights: tuple[int, ...]
    buckets: tuple[Bucket, ...]

    @property
    def variants(self) -> tuple[str, ...]:
        """Names of the kernels that it launches."""
        return tuple(dict.fromkeys(launch.variant for bucket in self.buckets for launch in bucket.launches))


def write(plan: Plan) -> str:
    """Return a plan as text.

    Raises:
        InputError: it makes no sense; see `check`.
    """
    check(plan)
    lines = [FIRST_LINE, *(f"weight {size}" for size in plan.weights)]
    for bucket in plan.buckets:
        lines.append(f"bucket {bucket.tokens} texts {bucket.texts} workspace {bucket.workspace}")
        lines += [f"input {size}" for size in bucket.inputs]
        lines += [f"output {size}" for size in bucket.outputs]
        lines += map(str, bucket.launches)
    return "\n".join(lines) + "\n"


def read(text: str) -> Plan:
    """Return the plan that a text says; the inverse of `write`.

    Raises:
        InputError: it is of another version, or makes no sense.
    """
    first, *lines = text.splitlines() or [""]
    _require(first == FIRST_LINE, quoted(first), f"{FIRST_LINE}, the first line of plans of this version")
    weights: list[int] = []
    buckets: list[Bucket] = []
    for at, line in enumerate(lines, start=2):
        said, _, note = line.partition(" # ")
        try:
            match said.split():
                case ["weight", size]:
                    weights.append(int(size))
                case ["bucket", tokens, "texts", texts, "workspace", size]:
                    buckets.append(_empty(int(tokens), int(texts), int(size)))
                case ["input", size]:
                    buckets[-1] = replace(buckets[-1], inputs=(*buckets[-1].inputs, int(size)))
                case ["output", size]:
                    buckets[-1] = replace(buckets[-1], outputs=(*buckets[-1].outputs, int(size)))
                case ["launch", variant, programs, *arguments]:
                    buckets[-1] = replace(
                        buckets[-1], launches=(*buckets[-1].launches, _launch(variant, programs, arguments, note))
                    )
                case _:
                    raise ValueError(line)
        except (ValueError, IndexError):
            raise InputError(
                f"plan, line {at}: got {quoted(line)}; accepted: the lines that {FIRST_LINE} has"
            ) from None
    plan = Plan(tuple(weights), tuple(buckets))
    check(plan)
    return plan


def _empty(tokens: int, texts: int, workspace: int) -> Bucket:
    return Bucket(tokens=tokens, texts=texts, workspace=workspace, inputs=(), outputs=(), launches=())


def _launch(variant: str, programs: str, arguments: list[str], note: str) -> Launch:
    least, _, factor = programs.removesuffix(f"*{TEXTS}").partition("+")
    return Launch(
        variant=variant,
        programs=int(least),
        programs_per_text=int(factor or 0),
        arguments=tuple(map(_argument, arguments)),
        note=note,
    )


def _argument(text: str) -> Argument:
    match text.split(":"):
        case [kind, value] if kind in _TYPES:
            named = value in (TEXTS, LENGTH, TOKENS)
            return Number(kind, value if named else float(value) if kind == "f32" else int(value))
        case ["null"]:
            return Pointer(NULL)
        case ["workspace", offset]:
            return Pointer(WORKSPACE, int(offset))
        case [place, index, offset]:
            return Pointer(place, int(offset), int(index))
    raise ValueError(text)


def check(plan: Plan) -> None:
    """Raises InputError for a plan that the runner would refuse."""
    for size in plan.weights:
        _check_int("weight", size, 1, _MOST_BYTES)
    _require(bool(plan.buckets), "no bucket", "at least one")
    tokens, texts = 0, 1
    for bucket in plan.buckets:
        name = f"bucket {bucket.tokens}"
        _check_int(f"{name}: tokens", bucket.tokens, tokens + 1, _MOST_COUNT)
        _check_int(f"{name}: texts", bucket.texts, texts, _MOST_COUNT)
        _check_int(f"{name}: workspace", bucket.workspace, 0, _MOST_BYTES)
        for size in (*bucket.inputs, *bucket.outputs):
            _check_int(f"{name}: input or output", size, 1, _MOST_BYTES)
        numbers = (len(bucket.inputs), len(bucket.outputs))
        first = (len(plan.buckets[0].inputs), len(plan.buckets[0].outputs))
        _require(numbers == first, f"{name} with {numbers} inputs and outputs", f"{first}, those of the first bucket")
        _require(bool(bucket.launches), f"{name} without a launch", "at least one")
        for i, launch in enumerate(bucket.launches):
            _check_launch(f"{name}, launch {i} ({launch.variant})", launch, bucket, plan.weights)
        tokens, texts = bucket.tokens, bucket.texts


def _check_launch(name: str, launch: Launch, bucket: Bucket, weights: tuple[int, ...]) -> None:
    variant, note = launch.variant, launch.note
    _require(
        bool(variant) and variant.isprintable() and not {" ", "#"} & {*variant}, name, "names without spaces and #"
    )
    _require(
        note.isprintable() and note == note.strip().lstrip("# "), f"{name}: note {quoted(note)}", "one line of text"
    )
    _check_int(f"{name}: programs", launch.programs, 0, _MOST_COUNT)
    _check_int(f"{name}: programs per text", launch.programs_per_text, 0, _MOST_COUNT)
    least, most = (launch.programs + launch.programs_per_text * texts for texts in (1, bucket.texts))
    _require(least >= 1 and most <= _MOST_COUNT, f"{name}: {least} to {most} programs", f"1 to {_MOST_COUNT}")
    sizes = {WORKSPACE: (bucket.workspace,), WEIGHT: weights, INPUT: bucket.inputs, OUTPUT: bucket.outputs}
    for i, argument in enumerate(launch.arguments):
        if isinstance(argument, Pointer):
            _check_pointer(f"{name}, argument {i} ({argument})", argument, sizes)
        else:
            _check_number(f"{name}, argument {i} ({argument})", argument)


def _check_pointer(name: str, pointer: Pointer, sizes: dict[str, tuple[int, ...]]) -> None:
    if pointer == Pointer(NULL):
        return
    _require(pointer.place in sizes, name, ", ".join((*sizes, NULL)))
    there = sizes[pointer.place]
    _require(bool(there), f"{name}: the plan has no {pointer.place}", "a place that there is")
    _check_int(f"{name}: index", pointer.index, 0, len(there) - 1)
    _require(there[pointer.index] > 0, f"{name}: {pointer.place} of 0 bytes", "a place in memory that there is")
    _check_int(f"{name}: offset", pointer.offset, 0, there[pointer.index] - 1)


def _check_number(name: str, number: Number) -> None:
    _require(number.type in _TYPES, name, ", ".join(_TYPES))
    if number.type == "f32":
        _require(isinstance(number.value, float | int) and _is_float32(number.value), name, "finite numbers of float32")
    elif isinstance(number.value, str):
        _require(number.value in (TEXTS, LENGTH, TOKENS), name, f"integers, {TEXTS}, {LENGTH} and {TOKENS}")
    else:
        most = _MOST_COUNT if number.type == "i32" else 2**63 - 1
        _check_int(name, number.value, -most - 1, most)


def _is_float32(value: float) -> bool:
    try:
        struct.pack("<f", value)
    except OverflowError:
        return False
    return math.isfinite(value)


def _check_int(name: str, value: object, least: int, most: int) -> None:
    is_int = isinstance(value, int) and not isinstance(value, bool)
    _require(is_int and least <= value <= most, f"{name}: {value}", f"integers from {least} to {most}")  # type: ignore[operator]


def _require(holds: bool, got: str, accepted: str) -> None:
    if not holds:
        raise InputError(f"plan: got {got}; accepted: {accepted}")
