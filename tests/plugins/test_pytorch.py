"""The kernels on CUDA tensors: what it refuses (everywhere), and that it equals the reference (on a GPU)."""

import numpy as np
import pytest
import torch
from testbed import make_batch, make_student

from adtp_export.errors import InputError
from adtp_export.model.packed import PackedStudent
from adtp_export.ops.grouped_attention import (
    grouped_received_bound,
    grouped_rounding_bound,
    ragged_attention_grouped_received,
)
from adtp_export.ops.ragged_attention import received_bound, rounding_bound
from adtp_export.plugins import binaries
from adtp_export.plugins.driver import Call, gpu, launch
from adtp_export.plugins.pytorch import NAMES, _grouped, attend, attend_received
from adtp_export.plugins.variants import HEAD_SIZES, VARIANTS, VARIANTS_OF_LSE, VARIANTS_OF_RECEIVED


def make(tokens=12, hidden=128, dtype=torch.float16, bounds=(0, 5, 12)):
    q, k, v = torch.randn(3, tokens, hidden).to(dtype)
    return [q, k, v, torch.tensor(bounds, dtype=torch.int32), 2, 0.125]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (make(dtype=torch.float64), "got dtype torch.float64; accepted are fp16, bf16, fp32"),
        (make(hidden=96), "got head size 48; accepted are 32, 64, 128"),
        (
            [*make()[:3], torch.tensor([0, 5, 12]), 2, 0.1],
            r"cu_seqlens: got \(3,\) torch.int64; accepted is \(B\+1,\) int32",
        ),
        (make(bounds=(1, 5, 12)), r"got \[1, 5, 12\]; accepted are values rising from 0 to T = 12"),
        (make(bounds=(0, 5, 11)), "rising from 0 to T = 12"),
        (make(bounds=(0, 13, 12)), "rising from 0 to T = 12"),
        ([make()[0][:-1], *make()[1:]], r"got shapes \(11, 128\), \(12, 128\), \(12, 128\)"),
        ([make()[0].float(), *make()[1:]], "got dtypes torch.float32, torch.float16"),
        ([*make()[:4], 3, 0.1], "num_heads: got 3; accepted are divisors of H = 128"),
        ([make()[0].T.contiguous().T, *make()[1:]], "accepted is one row stride, columns dense"),
        (make(), "got tensors on cpu; accepted is one CUDA device"),
    ],
)
def test_wrong_use_is_named(arguments, message):
    for function in (attend, attend_received):
        with pytest.raises(InputError, match=message):
            function(*arguments)


def make_grouped(dtype=torch.float16, size=64):
    """Of two texts, 5 and 7 keys; queries are the last three of each. Four heads read two."""
    q, k, v = torch.randn(6, 4 * size).to(dtype), *torch.randn(2, 12, 2 * size).to(dtype)
    bounds = [torch.tensor(cu, dtype=torch.int32) for cu in ([0, 3, 6], [0, 5, 12])]
    places = [torch.tensor(at, dtype=torch.int32) for at in ([2, 3, 4, 8, 10, 12], [0, 1, 2, 3, 4, *range(0, 14, 2)])]
    return [q, k, v, *bounds, *places]


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        (make_grouped(torch.float64), "got dtype torch.float64; accepted are fp32, fp16, bf16"),
        (make_grouped(torch.float32, 256), "got head size 256; accepted in fp32 are multiples of 8 up to 128"),
        (make_grouped(), "got tensors on cpu; accepted is one CUDA device"),
    ],
    ids=["dtype", "head size", "device"],
)
def test_wrong_use_of_grouped_queries_is_named(inputs, message):
    with pytest.raises(InputError, match=message):
        _grouped(*inputs[:3], inputs[3:], (4, 2, 0.125, -1, 0))


needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
HEADS = 3
LENGTHS = [[1], [15, 16, 17], [63, 64, 65], [2, 300, 1, 7], [512] * 4]


def on_gpu(lengths, dtype, head_size):
    """q, k, v as columns of one tensor, and cu_seqlens."""
    qkv = torch.randn(sum(lengths), 3 * HEADS * head_size, device="cuda").to(dtype)
    bounds = torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32, device="cuda")
    return [*qkv.chunk(3, dim=1), bounds]


def assert_right(out, inputs, head_size):
    exact, allowed = rounding_bound(*(t.cpu() for t in inputs), HEADS, head_size**-0.5)
    assert ((out.double().cpu() - exact).abs() <= allowed).all()


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("dtype", NAMES, ids=str)
@pytest.mark.parametrize("head_size", HEAD_SIZES)
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_equals_the_reference_on_a_gpu(dtype, head_size, lengths):
    inputs = on_gpu(lengths, dtype, head_size)
    assert_right(attend(*inputs, HEADS, head_size**-0.5), inputs, head_size)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("code", ["machine code", "PTX"])
@pytest.mark.parametrize("variant", VARIANTS, ids=lambda v: v.name)
def test_each_variant_equals_the_reference_on_a_gpu(variant, code):
    """PTX is what newer GPUs than those compiled for run."""
    binary = binaries.binary(variant.name, "ptx" if code == "PTX" else binaries.code_for(gpu(0).architecture))
    dtype, size = next(t for t, name in NAMES.items() if name == variant.dtype), variant.head_size
    for lengths in LENGTHS:
        inputs = on_gpu(lengths, dtype, size)
        assert_right(attend(*inputs, HEADS, size**-0.5, binary=binary), inputs, size)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("code", ["machine code", "PTX"])
@pytest.mark.parametrize("pair", [*zip(VARIANTS_OF_LSE, VARIANTS_OF_RECEIVED)], ids=lambda pair: pair[1].name)
def test_what_was_received_equals_the_reference_on_a_gpu(pair, code):
    kind = "ptx" if code == "PTX" else binaries.code_for(gpu(0).architecture)
    attention = next(v for v in VARIANTS if (v.dtype, v.head_size) == (pair[0].dtype, pair[0].head_size))
    chosen = [binaries.binary(variant.name, kind) for variant in (*pair, attention)]
    dtype, size = next(t for t, name in NAMES.items() if name == pair[0].dtype), pair[0].head_size
    for lengths in LENGTHS:
        inputs = on_gpu(lengths, dtype, size)
        out, received = attend_received(*inputs, HEADS, size**-0.5, binaries=chosen)
        assert_right(out, inputs, size)
        q, k, _, cu_seqlens = (t.cpu() for t in inputs)
        exact, allowed = received_bound(q, k, cu_seqlens, HEADS, size**-0.5)
        assert ((received.double().cpu() - exact).abs() <= allowed).all()
        again = attend_received(*inputs, HEADS, size**-0.5, binaries=chosen)
        assert torch.equal(out, again[0])
        assert torch.equal(received, again[1])


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("dtype", NAMES, ids=str)
@pytest.mark.parametrize("size", [24, 64, 128])
@pytest.mark.parametrize("reach", [(-1, 0), (3, 8), (5, 0), (-1, -1)], ids=str)
def test_grouped_queries_equal_the_reference_on_a_gpu(dtype, size, reach):
    inputs, numbers = make_grouped(dtype, size), (4, 2, size**-0.5, *reach)
    out, received = ragged_attention_grouped_received(*(t.cuda() for t in inputs), *numbers)
    q, k, _, *rest = inputs
    for written, (exact, allowed) in (
        (out, grouped_rounding_bound(*inputs, *numbers)),
        (received, grouped_received_bound(q, k, *rest, *numbers)),
    ):
        assert ((written.double().cpu() - exact).abs() <= allowed).all()


@pytest.mark.gpu
@needs_gpu
def test_a_captured_launch_serves_other_lengths():
    """A launch reads lengths on the GPU alone, so that a CUDA graph holds for any with the same T and B."""
    inputs = on_gpu([100, 3, 25], torch.float16, 64)
    attend(*inputs, HEADS, 0.125)  # loads the kernel, which a capture may not
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attend(*inputs, HEADS, 0.125, check_values=False)
    for lengths in ([100, 3, 25], [1, 126, 1], [42, 43, 43]):
        for old, new in zip(inputs, on_gpu(lengths, torch.float16, 64)):
            old.copy_(new)
        out.fill_(float("nan"))
        graph.replay()
        assert_right(out, inputs, 64)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("bounds", [[-5, 3, 99], [2**31 - 1] * 3, [-(2**31)] * 3, [90, 10, 50], [0, 2**31 - 1, 7]])
@pytest.mark.parametrize("variant", [v for v in VARIANTS if v.head_size == 64], ids=lambda v: v.name)
def test_wrong_lengths_write_to_no_other_memory(variant, bounds):
    dtype, tokens, around = next(t for t, name in NAMES.items() if name == variant.dtype), 64, 4096
    q, k, v = torch.randn(3, tokens, HEADS * 64, device="cuda").to(dtype)
    cu_seqlens = torch.tensor(bounds, dtype=torch.int32, device="cuda")
    memory = torch.full((around + tokens + around, HEADS * 64), 7.0, dtype=dtype, device="cuda")
    out = memory[around : around + tokens]
    addresses = {"q": q, "k": k, "v": v, "cu_seqlens": cu_seqlens, "out": out}
    sizes = {"row_stride": HEADS * 64, "tokens": tokens, "sequences": 2, "num_heads": HEADS, "head_size": 64}
    call = Call(**{n: t.data_ptr() for n, t in addresses.items()}, **sizes, dtype=variant.dtype, scale=0.125)
    binary = binaries.binary(variant.name, binaries.code_for(gpu(0).architecture))
    launch(call, torch.cuda.current_stream().cuda_stream, [binary])
    torch.cuda.synchronize()
    assert (memory[:around] == 7).all()
    assert (memory[around + tokens :] == 7).all()


@pytest.mark.gpu
@needs_gpu
def test_rows_beyond_the_reach_of_32_bits():
    """The last sequence begins more than 2**31 elements behind the first."""
    if torch.cuda.mem_get_info()[0] < 10 * 2**30:
        pytest.skip("needs an NVIDIA GPU with 10 GB of free memory")
    hidden, size = 1536, 64
    many, last = 2**31 // (3 * hidden) + 1, 70
    qkv = torch.zeros(many + last, 3 * hidden, dtype=torch.float16, device="cuda")
    tail = torch.randn(last, 3 * hidden, device="cuda").half()
    qkv[many:] = tail
    cu_seqlens = torch.tensor([*range(0, many, 512), many, many + last], dtype=torch.int32, device="cuda")
    out = attend(*qkv.chunk(3, dim=1), cu_seqlens, hidden // size, 0.125)
    alone = torch.tensor([0, last], dtype=torch.int32)
    exact, allowed = rounding_bound(*tail.cpu().chunk(3, dim=1), alone, hidden // size, 0.125)
    assert ((out[many:].double().cpu() - exact).abs() <= allowed).all()
    assert not out[:many].any()


@pytest.mark.gpu
@needs_gpu
def test_a_packed_student_answers_on_a_gpu_as_on_the_cpu():
    student = make_student(["1.attention", "2.ffn"], hidden_size=64, num_attention_heads=2)
    batch = make_batch([9, 32, 1, 17], 32)
    (logits,), kept = PackedStudent(student)(**batch)
    on_device, kept_there = PackedStudent(student.cuda())(**{name: tensor.cuda() for name, tensor in batch.items()})
    assert all(torch.equal(a, b.cpu()) for a, b in zip(kept, kept_there, strict=True))
    torch.testing.assert_close(on_device.cpu(), logits, atol=1e-4, rtol=1e-4)
