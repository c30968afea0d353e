"""The kernel itself, in Triton's interpreter on the CPU, against the one reference."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from adtp_export.ops.ragged_attention import rounding_bound

triton = pytest.importorskip("triton", reason="Triton is not installed")

from triton.runtime import interpreter  # noqa: E402

from adtp_export.plugins.kernel import SCAN, ragged_attention  # noqa: E402
from adtp_export.plugins.variants import VARIANTS  # noqa: E402

TYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}


@pytest.fixture(scope="module", autouse=True)
def bf16_as_on_a_gpu():
    """The interpreter multiplies the bits of bf16 as integers and cuts them off instead of rounding; set both right."""
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


def make_inputs(lengths, dtype, hidden, seed=0):
    generator = torch.Generator().manual_seed(seed)
    q, k, v = torch.randn(sum(lengths), 3 * hidden, generator=generator).to(TYPES[dtype]).chunk(3, dim=1)
    return q, k, v, torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32)


def run(variant, q, k, v, cu_seqlens, num_heads, scale):
    """Launch over columns of one tensor, into memory full of NaN."""
    tokens, sequences = len(q), len(cu_seqlens) - 1
    out = torch.full((tokens, q.shape[1]), float("nan"), dtype=q.dtype)
    grid = ((tokens // variant.block_m + sequences) * num_heads,)
    sizes = {"HEAD_SIZE": variant.head_size, "BLOCK_M": variant.block_m, "BLOCK_N": variant.block_n}
    ragged_attention[grid](
        q, k, v, cu_seqlens, out, q.stride(0), tokens, sequences, num_heads, scale, **sizes
    )  # fmt: skip
    return out


def check(variant, lengths, num_heads=2, seed=0):
    q, k, v, cu_seqlens = make_inputs(lengths, variant.dtype, num_heads * variant.head_size, seed)
    scale = variant.head_size**-0.5
    exact, allowed = rounding_bound(q, k, v, cu_seqlens, num_heads, scale, multiple=4)
    error = (run(variant, q, k, v, cu_seqlens, num_heads, scale).double() - exact).abs()
    assert (error <= allowed).all(), f"{variant.name} on {lengths}: {(error / allowed).max():.2f} of what is allowed"


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda v: v.name)
@pytest.mark.parametrize(
    "case", ["one token", "tile and its neighbours", "block and its neighbours", "pruned to [CLS]", "long tail"]
)
def test_every_variant_on_ragged_lengths(variant, case):
    m, n = variant.block_m, variant.block_n
    lengths = {
        "one token": [1],
        "tile and its neighbours": [m - 1, m, m + 1],
        "block and its neighbours": [n - 1, 2 * n, n + 1],
        "pruned to [CLS]": [1] * 7,
        "long tail": [3, 1, 2 * m + 5, 0, 4],
    }
    check(variant, lengths[case])


@given(
    st.sampled_from(VARIANTS),
    st.lists(st.integers(0, 40), min_size=1, max_size=6).filter(sum),
    st.integers(1, 2),
    st.integers(0, 2**16),
)
@settings(max_examples=30, deadline=None)
def test_any_lengths(variant, lengths, num_heads, seed):
    check(variant, lengths, num_heads, seed)


def test_work_follows_tokens_and_not_the_longest_text(monkeypatch):
    """One long text among short ones: a program for each tile of each text, which takes that text's keys alone."""
    variant = next(v for v in VARIANTS if v.dtype == "fp16")
    lengths, num_heads = [5 * variant.block_m, *[variant.block_m // 2] * 7], 2
    dot, dots, programs = interpreter.interpreter_builder.create_dot, [], []
    monkeypatch.setattr(interpreter.interpreter_builder, "create_dot", lambda *a: dots.append(0) or dot(*a))
    place = interpreter.interpreter_builder.set_grid_idx
    monkeypatch.setattr(interpreter.interpreter_builder, "set_grid_idx", lambda *at: programs.append(at) or place(*at))
    check(variant, lengths, num_heads)
    tiles = [-(-n // variant.block_m) for n in lengths]
    blocks = [-(-n // variant.block_n) for n in lengths]
    assert len(dots) == 2 * num_heads * sum(m * n for m, n in zip(tiles, blocks))
    assert len(programs) == num_heads * (sum(lengths) // variant.block_m + len(lengths))
    idle = len(programs) - num_heads * sum(tiles)
    assert idle <= num_heads * len(lengths)  # at most one for each text; a rectangle would launch 5 tiles for each


def test_more_sequences_than_one_look():
    check(VARIANTS[0], [1 + i % 3 for i in range(SCAN.value + 3)], num_heads=1)


@pytest.mark.parametrize("dtype", TYPES)
def test_sequences_do_not_see_each_other(dtype):
    variant = next(v for v in VARIANTS if v.dtype == dtype)
    q, k, v, cu_seqlens = make_inputs([5, 9, 3], dtype, 2 * variant.head_size)
    before = run(variant, q, k, v, cu_seqlens, 2, 0.1)
    for t in (q, k, v):
        t[5:14] = float("nan")
    after = run(variant, q, k, v, cu_seqlens, 2, 0.1)
    assert torch.equal(before[:5], after[:5])
    assert torch.equal(before[14:], after[14:])


def test_large_scores_do_not_overflow():
    variant = next(v for v in VARIANTS if v.dtype == "fp16")
    q, k, v, cu_seqlens = make_inputs([4, 20], "fp16", variant.head_size)
    out = run(variant, q * 200, k * 200, v, cu_seqlens, 1, variant.head_size**-0.5)
    assert torch.isfinite(out).all()


@given(st.lists(st.integers(-(2**31), 2**31 - 1), min_size=2, max_size=8), st.integers(1, 40))
@settings(max_examples=60, deadline=None)
def test_nothing_outside_is_touched_whatever_cu_seqlens_says(garbage, tokens):
    """Builders may time a layer on memory that nobody has filled."""
    variant = next(v for v in VARIANTS if v.dtype == "fp32")
    size, guard = variant.head_size, 64
    inputs = torch.full((3, tokens + 2 * guard, size), float("nan"))
    inputs[:, guard:-guard] = 1.0
    out = torch.full((tokens + 2 * guard, size), -7.0)
    q, k, v = (t[guard : guard + tokens] for t in inputs)
    cu_seqlens = torch.tensor(garbage, dtype=torch.int32)
    sequences = len(garbage) - 1
    sizes = {"HEAD_SIZE": size, "BLOCK_M": variant.block_m, "BLOCK_N": variant.block_n}
    ragged_attention[(tokens // variant.block_m + sequences,)](
        q, k, v, cu_seqlens, out[guard : guard + tokens], size, tokens, sequences, 1, 0.1, **sizes
    )  # fmt: skip
    assert (out[:guard] == -7).all()
    assert (out[-guard:] == -7).all()
    assert not out.isnan().any()
