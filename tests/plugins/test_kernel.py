"""The kernels themselves, in Triton's interpreter on the CPU, against the one reference."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from representatives import first_of_each
from triton_interpreter import bf16_as_on_a_gpu

from adtp_export.ops.ragged_attention import received_bound, rounding_bound

triton = pytest.importorskip("triton", reason="Triton is not installed")

from triton.runtime import interpreter  # noqa: E402

from adtp_export.plugins.kernel import SCAN, ragged_attention, received_attention  # noqa: E402
from adtp_export.plugins.variants import VARIANTS, VARIANTS_OF_LSE, VARIANTS_OF_RECEIVED  # noqa: E402

TYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}


@pytest.fixture(scope="module", autouse=True)
def interpreted():
    with bf16_as_on_a_gpu():
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
    given = {"row_stride": q.stride(0), "num_tokens": tokens, "num_sequences": sequences, "num_heads": num_heads}
    ragged_attention[grid](q, k, v, cu_seqlens, out, scale=scale, **given, **variant.constants)
    return out


def check(variant, lengths, num_heads=2, seed=0):
    q, k, v, cu_seqlens = make_inputs(lengths, variant.dtype, num_heads * variant.head_size, seed)
    scale = variant.head_size**-0.5
    exact, allowed = rounding_bound(q, k, v, cu_seqlens, num_heads, scale)
    error = (run(variant, q, k, v, cu_seqlens, num_heads, scale).double() - exact).abs()
    assert (error <= allowed).all(), f"{variant.name} on {lengths}: {(error / allowed).max():.2f} of what is allowed"


@pytest.mark.parametrize("variant", first_of_each(VARIANTS, lambda v: (v.dtype, v.head_size)), ids=lambda v: v.name)
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
@settings(max_examples=30, deadline=None)
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
    given = {"row_stride": size, "num_tokens": tokens, "num_sequences": sequences, "num_heads": 1, "scale": 0.1}
    ragged_attention[(tokens // variant.block_m + sequences,)](
        q, k, v, cu_seqlens, out[guard : guard + tokens], **given, **variant.constants
    )
    assert (out[:guard] == -7).all()
    assert (out[-guard:] == -7).all()
    assert not out.isnan().any()


# What tokens received

PAIRS = list(zip(VARIANTS_OF_LSE, VARIANTS_OF_RECEIVED, strict=True))
OF_DTYPE = {dtype: next(pair for pair in PAIRS if pair[1].dtype == dtype) for dtype in TYPES}


def run_received(pair, q, k, cu_seqlens, num_heads, scale, guard=0):
    """Launch both kernels over columns of one tensor, into memory full of NaN: log-sum-exps, received.

    In front of each and behind there is -7, `guard` times.
    """
    (lse_of, received), tokens, sequences = pair, len(q), len(cu_seqlens) - 1
    kept = [torch.full((guard + n + guard,), -7.0) for n in (num_heads * tokens, tokens)]
    lse, sums = (t[guard : len(t) - guard].fill_(float("nan")) for t in kept)
    given = {"row_stride": q.stride(0), "num_tokens": tokens, "num_sequences": sequences, "num_heads": num_heads}
    grid = (tokens // lse_of.block_m + sequences) * num_heads
    ragged_attention[(grid,)](q, k, cu_seqlens=cu_seqlens, lse=lse, scale=scale, **given, **lse_of.constants)
    grid = tokens // received.block_m + sequences
    received_attention[(grid,)](q, k, cu_seqlens, lse, sums, scale=scale, **given, **received.constants)
    return kept if guard else (lse.view(num_heads, tokens), sums)


def share_of_allowed(received, inputs):
    exact, allowed = received_bound(*inputs)
    return float(((received.double() - exact).abs() / allowed).max())


def check_received(pair, lengths, num_heads=5, seed=0):
    size = pair[0].head_size
    q, k, _, cu_seqlens = make_inputs(lengths, pair[0].dtype, num_heads * size, seed)
    inputs = (q, k, cu_seqlens, num_heads, size**-0.5)
    _, received = run_received(pair, *inputs)
    assert (share := share_of_allowed(received, inputs)) <= 1, f"{pair[1].name} on {lengths}: {share:.2f}"


@pytest.mark.parametrize("pair", first_of_each(PAIRS, lambda pair: pair[0].dtype), ids=lambda pair: pair[1].name)
@pytest.mark.parametrize("case", ["one token", "tile and its neighbours", "block and its neighbours", "skewed"])
def test_received_on_ragged_lengths(pair, case):
    m, n = pair[1].block_m, pair[1].block_n
    lengths = {
        "one token": [1],
        "tile and its neighbours": [m - 1, m, m + 1],
        "block and its neighbours": [n - 1, 2 * n, n + 1],
        "skewed": [1, 0, 3, 2 * m + 5, 1, 1, 0],
    }
    check_received(pair, lengths[case])


@given(
    st.sampled_from(PAIRS),
    st.lists(st.integers(0, 40), min_size=1, max_size=6).filter(sum),
    st.integers(1, 9),
    st.integers(0, 2**16),
)
@settings(max_examples=15, deadline=None)
def test_received_on_any_lengths(pair, lengths, num_heads, seed):
    check_received(pair, lengths, num_heads, seed)


@pytest.mark.parametrize("mistake", ["scale", "a token too many", "a head left out", "a query left out"])
def test_a_mistake_in_what_was_received_is_noticed(mistake, monkeypatch):
    pair = OF_DTYPE["fp16"]
    q, k, _, cu_seqlens = make_inputs([1, 40, 9], "fp16", 5 * pair[0].head_size)
    inputs, scale = (q, k, cu_seqlens, 5), pair[0].head_size ** -0.5
    done = list(inputs)
    if mistake == "a token too many":
        done[2] = cu_seqlens + torch.tensor([0, 0, 1, 0], dtype=torch.int32)
    if mistake == "a head left out":
        done[3] = 4
    if mistake == "a query left out":
        load = interpreter.interpreter_builder.create_masked_load

        def masked(pointers, mask, *rest):  # of the queries' log-sum-exps, those of the third row of each block
            if mask.data.ndim == 3 and mask.data.shape[1] == 1:
                mask.data[..., 2] = False
            return load(pointers, mask, *rest)

        monkeypatch.setattr(interpreter.interpreter_builder, "create_masked_load", masked)
    _, received = run_received(pair, *done, scale * (1.001 if mistake == "scale" else 1))
    assert not share_of_allowed(received, (*inputs, scale)) <= 1


def test_log_sum_exps_are_those_of_the_scores():
    pair = OF_DTYPE["fp32"]
    size, lengths = pair[0].head_size, [3, 70, 1]
    q, k, _, cu_seqlens = make_inputs(lengths, "fp32", 2 * size)
    lse, _ = run_received(pair, q, k, cu_seqlens, 2, 0.1)
    for begin, end in zip(cu_seqlens, cu_seqlens[1:]):
        heads = (t[begin:end].double().unflatten(1, (2, size)).transpose(0, 1) for t in (q, k))
        scores = torch.matmul(next(heads), next(heads).transpose(1, 2)) * 0.1
        exact = torch.logsumexp(scores, -1) / np.log(2)
        torch.testing.assert_close(lse[:, begin:end].double(), exact, atol=1e-5, rtol=0)


def test_rows_beyond_the_last_sequence_are_left_alone():
    pair = OF_DTYPE["fp16"]
    q, k, _, cu_seqlens = make_inputs([5, 30, 40], "fp16", 5 * pair[0].head_size)
    lse, received = run_received(pair, q, k, cu_seqlens[:3], 5, 0.1)
    assert all(not t[:35].isnan().any() and t[35:].isnan().all() for t in (lse.T, received))
    for t in (q, k):
        t[35:] = float("inf")  # nor read
    assert torch.equal(run_received(pair, q, k, cu_seqlens[:3], 5, 0.1)[1][:35], received[:35])


@pytest.mark.parametrize("dtype", TYPES)
def test_sequences_give_nothing_to_each_other(dtype):
    pair = OF_DTYPE[dtype]
    q, k, _, cu_seqlens = make_inputs([5, 9, 3], dtype, 2 * pair[0].head_size)
    _, before = run_received(pair, q, k, cu_seqlens, 2, 0.1)
    for t in (q, k):
        t[5:14] = float("nan")
    _, after = run_received(pair, q, k, cu_seqlens, 2, 0.1)
    assert torch.equal(before[:5], after[:5])
    assert torch.equal(before[14:], after[14:])
    assert after[5:14].isnan().all()


def test_all_that_is_given_is_received():
    """Large scores neither overflow nor vanish: a text of n tokens gives n in each head."""
    pair = OF_DTYPE["fp16"]
    size, lengths = pair[0].head_size, [4, 70]
    q, k, _, cu_seqlens = make_inputs(lengths, "fp16", 3 * size)
    inputs = (q * 30, k * 30, cu_seqlens, 3, size**-0.5)
    _, received = run_received(pair, *inputs)
    assert share_of_allowed(received, inputs) <= 1
    assert [float(part.sum()) for part in received.split(lengths)] == pytest.approx([12, 210], rel=1e-3)


def test_work_of_what_was_received(monkeypatch):
    """A program for each tile of each text and for a few more, a product for each block of queries and four heads."""
    pair = OF_DTYPE["fp16"]
    m, n, num_heads = pair[1].block_m, pair[1].block_n, 5
    lengths = [5 * m, *[m // 2] * 7]
    dot, dots = interpreter.interpreter_builder.create_dot, []
    monkeypatch.setattr(
        interpreter.interpreter_builder, "create_dot", lambda a, *rest: dots.append(a.data.ndim) or dot(a, *rest)
    )
    check_received(pair, lengths, num_heads)
    wanted = sum(-(-length // m) * -(-length // n) for length in lengths) * 2
    assert dots.count(3) == wanted


@given(st.lists(st.integers(-(2**31), 2**31 - 1), min_size=2, max_size=8), st.integers(1, 40))
@settings(max_examples=30, deadline=None)
def test_nothing_outside_is_written_whatever_cu_seqlens_says(garbage, tokens):
    pair, guard = OF_DTYPE["fp32"], 64
    q, k = torch.ones(2, tokens, pair[0].head_size)
    for t in run_received(pair, q, k, torch.tensor(garbage, dtype=torch.int32), 1, 0.1, guard):
        assert (t[:guard] == -7).all()
        assert (t[-guard:] == -7).all()
