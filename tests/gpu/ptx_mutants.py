"""One-instruction changes of the shipped PTX, and whether a run in the emulator notices each."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

import emulation
from emulated_gpu import RefusedError

from adtp_export.plugins import binaries
from adtp_export.plugins.encoder import binaries as encoder
from adtp_export.plugins.encoder.variants import BY_NAME

MOST = 3_000_000
"""Instructions of a block, above which a mutant is taken not to end; those of shipped code take less than a tenth of it."""

FAULT, WRONG, SURVIVED = "fault", "wrong", "survived"


@dataclass(frozen=True)
class Mutant:
    """A line of a variant's PTX, by its number, and what it becomes; empty where it is dropped."""

    variant: str
    kind: str
    line: int
    old: str
    new: str


def text_of(variant: str) -> list[str]:
    archive = encoder if variant in BY_NAME else binaries
    return archive.binary(variant, "ptx").data.rstrip(b"\0").decode().split("\n")


def _body(lines: list[str]) -> list[int]:
    """Numbers of lines that are instructions, but for branches and the end."""
    is_instruction = re.compile(r"\s+(@!?%p\d+\s+)?(?!ret|bra)[a-z][a-z0-9_.]*\b.*;$")
    return [i for i, line in enumerate(lines) if is_instruction.match(line)]


def synchronization(variant: str) -> Iterator[Mutant]:
    """Each barrier dropped, each wait for a group less, each group not committed."""
    lines = text_of(variant)
    for i in _body(lines):
        line = lines[i].strip()
        if line.startswith("bar.sync"):
            yield Mutant(variant, "barrier dropped", i, line, "")
        if found := re.match(r"cp\.async\.wait_group\s+(\d+);", line):
            yield Mutant(variant, "a group less waited for", i, line, f"cp.async.wait_group {int(found[1]) + 1};")
        if line.startswith("cp.async.commit_group"):
            yield Mutant(variant, "commit dropped", i, line, "")


def _changed(kind: str, line: str, registers: list[str], chance: random.Random) -> str | None:
    """A line after a change of a kind, if the line has what is to be changed."""
    used = re.findall(r"%r\d+", line)
    numbers = re.findall(r"(?<=[ +,\t])-?\d+(?=[,;\] ])", line)
    if kind == "dropped":
        return "" if not re.match(r"\s+(mov|bar)", line) else None
    if kind == "another register" and len(used) > 1:
        old = chance.choice(used[1:])
        new = chance.choice([r for r in registers if r != old])
        return re.sub(rf"{old}(?!.*{old})(?!\d)", new, line)
    if kind == "another number" and numbers:
        old = numbers[-1]
        return re.sub(
            rf"(?<=[ +,\t]){re.escape(old)}(?=[,;\] ])", str(int(old) + chance.choice((-16, -1, 1, 16))), line, count=1
        )
    if kind == "another comparison" and "setp." in line:
        return line.replace("setp.lt", "setp.le") if "setp.lt" in line else line.replace("setp.gt", "setp.lt")
    if kind == "operands exchanged" and (
        found := re.match(r"(\s+(?:sub|selp|shl|shr|div)\S*\s+\S+), (\S+), ([^;,]+)(.*)", line)
    ):
        return f"{found[1]}, {found[3]}, {found[2]}{found[4]}"
    return None


KINDS = ("dropped", "another register", "another number", "another comparison", "operands exchanged")


def changes(variant: str, count: int, seed: int) -> Iterator[Mutant]:
    """Random changes of single instructions."""
    lines, chance = text_of(variant), random.Random(f"{variant}{seed}")
    body, registers = _body(lines), sorted(set(re.findall(r"%r\d+", "\n".join(lines))))
    while count:
        i, kind = chance.choice(body), chance.choice(KINDS)
        new = _changed(kind, lines[i], registers, chance)
        if new is not None and new != lines[i]:
            count -= 1
            yield Mutant(variant, kind, i, lines[i].strip(), new.strip())


def verdict(runner: emulation.Runner, mutant: Mutant | None, entry: dict) -> str:
    """What a run says of a mutant, or of the unchanged code where there is none."""
    lines = text_of(entry["name"])
    if mutant:
        lines[mutant.line] = f"\t{mutant.new}"
    binary = replace(binaries.binary(entry["name"], "ptx"), data="\n".join(lines).encode() + b"\0")
    lse = emulation.lse_of(entry)
    chosen = [*([binaries.binary(lse["name"], "ptx")] if lse else []), binary]
    cases = [
        *emulation.small_cases(entry["kernel"], entry["block_m"]),
        *emulation.edge_cases(entry["kernel"], entry["block_m"]),
    ]
    for at, case in enumerate(cases):
        runner.device.set(emulation.capability_of("ptx"), most=MOST, on={"EARLY": at == 0, "REVERSE": at == 1})
        try:
            share, _ = emulation.run_and_compare(runner, entry, case, chosen)
        except RefusedError:
            return FAULT
        if not share <= 1:
            return WRONG
    return SURVIVED


SAMPLED = ("fp16-d64-64x32", "fp32-d64-16x16", "received-fp16-d64-64x16", "lse-bf16-d32-64x32")
"""Variants whose mutants are run: each kernel, each dtype's instructions, with asynchronous copies and without."""

RANDOM_CHANGES = 60
"""Random changes of each of `SAMPLED`, beside those of its synchronization."""

_TOGETHER = "its copies go with the next group, and the next wait is for all groups"
_UNTOUCHED = "the last copies are of zeros, to words that nothing touches any more"
_ORDERED = "no two warps touch a word on both sides of it: the barrier before or behind orders them"
_NO_KEYS = "only for a sequence without keys, and such a sequence has no tile"
_SAME_LOGARITHM = (
    "where a float is split into exponent and mantissa; one bit pattern further, the logarithm is the same"
)
EQUIVALENT: dict[tuple[str, int], str] = {
    ("fp16-d64-64x32", 45): "which four lanes store a sum that all lanes of the warp have",
    ("fp16-d64-64x32", 182): _TOGETHER,
    ("fp16-d64-64x32", 548): _TOGETHER,
    ("fp16-d64-64x32", 576): _NO_KEYS,
    ("fp16-d64-64x32", 598): _UNTOUCHED,
    ("fp16-d64-64x32", 599): _ORDERED,
    ("fp32-d64-16x16", 158): "fills rows of queries behind the sequence, whose results are not stored",
    ("fp32-d64-16x16", 728): _NO_KEYS,
    ("fp32-d64-16x16", 744): _NO_KEYS,
    ("fp32-d64-16x16", 745): _NO_KEYS,
    ("fp32-d64-16x16", 788): _ORDERED,
    ("lse-bf16-d32-64x32", 241): "adds an address as a subnormal float, below 1e-40, to a sum that begins with 0",
    ("lse-bf16-d32-64x32", 418): _UNTOUCHED,
    ("lse-bf16-d32-64x32", 419): _ORDERED,
    ("lse-bf16-d32-64x32", 428): _SAME_LOGARITHM,
    ("lse-bf16-d32-64x32", 547): _SAME_LOGARITHM,
    ("received-fp16-d64-64x16", 212): _ORDERED,
    (
        "received-fp16-d64-64x16",
        382,
    ): "one more tile is copied ahead, of rows behind the sequence, which are zeros already",
    ("received-fp16-d64-64x16", 671): _ORDERED,
}
"""Mutants that nobody can notice, by variant and line, with the reason. They are those of the kernels as they are now."""


def sample(variant: str) -> list[Mutant]:
    return [*synchronization(variant), *changes(variant, RANDOM_CHANGES, seed=0)]


def unexplained(mutant: Mutant, found: str) -> bool:
    """Whether a mutant survived for no known reason."""
    return found == SURVIVED and (mutant.variant, mutant.line) not in EQUIVALENT
