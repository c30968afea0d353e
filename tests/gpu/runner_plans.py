"""A plan of attention launches for the runner's tests, and what `runner_probe.cpp` reads: plan, kernels and calls in a folder."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import emulation
import numpy as np
import torch

from adtp_export.plugins import shipped
from adtp_export.plugins.plan import (
    INPUT,
    OUTPUT,
    TEXTS,
    TOKENS,
    WORKSPACE,
    Bucket,
    Launch,
    Number,
    Plan,
    Pointer,
    write,
)
from adtp_export.plugins.variants import RECEIVED

HEADS, HEAD_SIZE = 2, 32
HIDDEN = HEADS * HEAD_SIZE
ROW = 2 * HIDDEN
"""Bytes of a row of states in fp16."""

SCALE = float(np.float32(0.176776695))

SMALL, LARGE = "fp16-d32-16x16", "fp16-d32-64x32"
"""What the hosts take up to a mean length of 32, and up to 160."""

LSE_OF, RECEIVED_OF = "lse-fp16-d32-64x32", "received-fp16-d32-64x32"


def attention_bucket(tokens: int, texts: int, variant: str) -> Bucket:
    """Attention on ``(T, 3H)``, attention on that, and attention with what was received on that: five launches."""
    states = tokens * ROW
    first, second = Pointer(WORKSPACE), Pointer(WORKSPACE, states)
    out, sums, bounds = Pointer(OUTPUT), Pointer(OUTPUT, 0, 1), Pointer(INPUT, 0, 1)
    columns = tuple(Pointer(INPUT, i * ROW) for i in range(3))

    def launch(name: str, pointers: tuple[Pointer, ...], stride: int, note: str) -> Launch:
        entry = next(entry for entry in emulation.variants() if entry["name"] == name)
        heads = 1 if entry["kernel"] == RECEIVED else HEADS
        counts = (Number("i32", stride), Number("i32", TOKENS), Number("i32", TEXTS), Number("i32", HEADS))
        return Launch(
            variant=name,
            programs=tokens // entry["block_m"] * heads,
            programs_per_text=heads,
            arguments=(*pointers, *counts, Number("f32", SCALE)),
            note=note,
        )

    return Bucket(
        tokens=tokens,
        texts=texts,
        workspace=2 * states,
        inputs=(3 * states, 4 * (texts + 1)),
        outputs=(states, 4 * tokens),
        launches=(
            launch(variant, (*columns, bounds, first), 3 * HIDDEN, "layer 0"),
            launch(variant, (first, first, first, bounds, second), HIDDEN, "layer 1"),
            launch(LSE_OF, (second, second, bounds, out), HIDDEN, "layer 2: log-sum-exps"),
            launch(RECEIVED_OF, (second, second, bounds, out, sums), HIDDEN, "layer 2: received"),
            launch(variant, (second, second, second, bounds, out), HIDDEN, "layer 2: attention"),
        ),
    )


PLAN = Plan((), (attention_bucket(32, 4, SMALL), attention_bucket(64, 8, SMALL), attention_bucket(128, 8, LARGE)))


@dataclass(frozen=True)
class Call:
    """One call: lengths of its texts."""

    name: str
    lengths: tuple[int, ...]

    @property
    def tokens(self) -> int:
        return sum(self.lengths)

    def data(self) -> tuple[np.ndarray, np.ndarray]:
        """qkv ``(T, 3H)``, fp16 as uint16; cu_seqlens ``(B+1,) int32``."""
        seed = len(self.lengths) + 10 * self.tokens
        generator = torch.Generator().manual_seed(seed)
        qkv = torch.randn(self.tokens, 3 * HIDDEN, generator=generator).half()
        return qkv.numpy().view(np.uint16), np.cumsum([0, *self.lengths], dtype=np.int32)


CALLS = (
    Call("few", (20, 3)),
    Call("full", (9, 7, 11, 5)),
    Call("more", (30, 1, 0, 18)),
    Call("large", (60, 65)),
    Call("again", (30, 2)),
)
"""One bucket after the other, and the first again with other numbers of texts and tokens."""


def folder_of(folder: Path, architecture: int = 0, plan: Plan = PLAN) -> Path:
    """Write what `runner_probe` reads, with code for a GPU such as 86; 0: PTX."""
    folder.mkdir()
    (folder / "plan.txt").write_text(write(plan), encoding="utf-8")
    lines = [str(architecture)]
    for name in plan.variants:
        kernel = shipped.kernel(name)
        (found,) = (one for one in kernel.codes if one.architecture == architecture)
        (folder / name).write_bytes(found.data)
        lines.append(f"{name} {kernel.symbol} {kernel.threads} {found.shared_bytes}")
        lines.append(kernel.arguments)
    (folder / "kernels.txt").write_text("\n".join(lines) + "\n")
    for call in CALLS:
        qkv, bounds = call.data()
        (folder / f"{call.name}.qkv").write_bytes(qkv.tobytes())
        (folder / f"{call.name}.cu").write_bytes(bounds.tobytes())
    calls = (f"{call.name} {call.tokens} {len(call.lengths)}" for call in CALLS)
    (folder / "calls.txt").write_text("\n".join(calls) + "\n")
    return folder
