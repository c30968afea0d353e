"""The kernel on CUDA tensors: what it refuses (everywhere), and that it equals the reference (on a GPU)."""

import pytest
import torch

from adtp_export.errors import InputError
from adtp_export.ops.ragged_attention import rounding_bound
from adtp_export.plugins.pytorch import attend


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
    with pytest.raises(InputError, match=message):
        attend(*arguments)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("head_size", [32, 64, 128])
@pytest.mark.parametrize("lengths", [[1], [15, 16, 17], [63, 64, 65], [2, 300, 1, 7], [512] * 4], ids=str)
def test_equals_the_reference_on_a_gpu(dtype, head_size, lengths):
    hidden = 3 * head_size
    qkv = torch.randn(sum(lengths), 3 * hidden, device="cuda").to(dtype)
    q, k, v = qkv.chunk(3, dim=1)
    cu_seqlens = torch.tensor([0, *torch.tensor(lengths).cumsum(0)], dtype=torch.int32, device="cuda")
    scale = head_size**-0.5
    out = attend(q, k, v, cu_seqlens, 3, scale).double().cpu()
    exact, allowed = rounding_bound(*(t.cpu() for t in (q, k, v, cu_seqlens)), 3, scale, multiple=8)
    assert ((out - exact).abs() <= allowed).all()
