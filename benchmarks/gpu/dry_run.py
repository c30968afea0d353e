"""What `--dry-run` puts in the place of a GPU, so that every line that writes a record has run before a real GPU runs it.

Kernels are launched on the emulated GPU of `emulated.py`. Its times mean nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from adtp_export.plugins import driver as host
from adtp_export.plugins.pytorch import _call

NAME = "emulated, no GPU"
HIDDEN, CHECKS = 128, ([1], [15, 16, 17], [0, 5, 0])


def install(script: dict[str, Any]) -> None:
    """Have `attention_kernel.py`, whose globals these are, run on the CPU and on the emulated GPU, with little work."""
    script |= {
        "DEVICE": "cpu",
        "HIDDEN": HIDDEN,
        "CHECKS": CHECKS,
        "attend": attend,
        "attend_received": attend_received,
    }
    script |= {"measure": measure, "limits": lambda: {"bytes_per_s": 1e12, "flops_per_s": 1e14}}
    script |= {"workloads": lambda: {"dry": [5, 17]}, "gpu_name": lambda: NAME}
    script |= {"architecture": lambda: host.gpu(0).architecture}


def attend(*inputs: Any, check_values: bool = True, binary: Any = None) -> torch.Tensor:
    """As the PyTorch host's, of tensors on the CPU: q, k, v, cu_seqlens, number of heads, scale."""
    return run(inputs, () if binary is None else (binary,), received=False)[0]


def attend_received(
    *inputs: Any, check_values: bool = True, binaries: Sequence[Any] = ()
) -> tuple[torch.Tensor, torch.Tensor]:
    """As the PyTorch host's, of tensors on the CPU."""
    return run(inputs, binaries, received=True)


def run(inputs: Sequence[Any], binaries: Sequence[Any], received: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Copy to the emulated GPU, launch as the Python host does, copy back."""
    from cuda.bindings import driver

    host._checked(driver.cuInit(0))
    host._checked(driver.cuCtxSetCurrent(host._checked(driver.cuDevicePrimaryCtxRetain(0))))
    q, k, v, bounds = (t.contiguous() for t in inputs[:4])
    out, sums = torch.full_like(q, float("nan")), torch.full((len(q),), float("nan"))
    tensors = (q, k, v, bounds, out, sums)
    places = []
    for tensor in tensors:
        size = max(tensor.numel() * tensor.element_size(), 1)
        places.append(int(host._checked(driver.cuMemAlloc(size))))
        host._checked(driver.cuMemcpyHtoD(places[-1], tensor.data_ptr(), tensor.numel() * tensor.element_size()))
    names = ("q", "k", "v", "cu_seqlens", "out", "received")
    call = replace(_call(q, k, v, bounds, out, *inputs[4:]), **dict(zip(names, places)))
    host.launch(call if received else replace(call, received=0), 0, binaries)
    for tensor, place in ((out, places[4]), (sums, places[5])):
        host._checked(driver.cuMemcpyDtoH(tensor.data_ptr(), place, tensor.numel() * tensor.element_size()))
    for place in places:
        host._checked(driver.cuMemFree(place))
    return out, sums


def measure(runs: dict[str, Callable[[], Any]]) -> dict[str, dict[str, float | None]]:
    """One call of each by the host's clock."""
    found: dict[str, dict[str, float | None]] = {}
    for name, call in runs.items():
        began = time.perf_counter()
        call()
        us = round((time.perf_counter() - began) * 1e6, 2)
        found[name] = {"device_us": us, "wall_us": us, "vs_flash": None}
    return found
