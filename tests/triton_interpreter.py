"""Triton's interpreter on the CPU, with bf16 as a GPU has it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
import torch


@contextlib.contextmanager
def bf16_as_on_a_gpu() -> Iterator[None]:
    """The interpreter multiplies the bits of bf16 as integers and cuts them off instead of rounding; set both right."""
    import triton
    from triton.runtime import interpreter

    builder = interpreter.interpreter_builder
    dot, truncate = builder.create_dot, builder.create_fp_trunc

    def widened(handle):
        is_bf16 = handle.dtype.scalar == triton.language.bfloat16
        return builder.create_fp_ext(handle, triton.language.float32) if is_bf16 else handle

    def to_nearest(handle, dtype):
        if dtype.scalar != triton.language.bfloat16:
            return truncate(handle, dtype)
        rounded = torch.from_numpy(handle.data).to(torch.bfloat16)
        return interpreter.TensorHandle(rounded.view(torch.uint16).numpy(), dtype.scalar)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(builder, "create_dot", lambda a, b, *rest: dot(widened(a), widened(b), *rest), raising=False)
        patch.setattr(builder, "create_fp_trunc", to_nearest, raising=False)
        yield
