"""Small PTX programs around one instruction, whose answers NumPy can check."""

from __future__ import annotations

import ctypes

import numpy as np
from emulated_gpu import Device

FIRST_OUTPUT = 100
"""Programs read their inputs in %r1, %r2, ... and leave their outputs in %r100, %r101, ..."""

LANES = 32


def program(
    body: str, inputs: int, outputs: int, threads: int = LANES, version: str = "8.0", target: str = "sm_80"
) -> bytes:
    """PTX whose every thread reads `inputs` words, runs `body`, and writes `outputs` words. %rd1 and %rd2 are the arrays.

    %r0 is the thread, %rd3 its first input. Registers from %r180, %rd8 and %p0 on are free.
    """
    loads = [f"ld.global.b32 {{ %r{1 + i} }}, [ %rd3 + {4 * threads * i} ];" for i in range(inputs)]
    stores = [f"st.global.b32 [ %rd4 + {4 * threads * i} ], {{ %r{FIRST_OUTPUT + i} }};" for i in range(outputs)]
    lines = [
        f".version {version}", f".target {target}", ".address_size 64",
        ".extern .shared .align 16 .b8 global_smem[];",
        ".visible .entry probe(",
        ".param .u64 .ptr .global .align 1 probe_param_0,",
        ".param .u64 .ptr .global .align 1 probe_param_1",
        ")", f".reqntid {threads}", "{",
        ".reg .pred %p<8>;", ".reg .b16 %rs<8>;", ".reg .b32 %r<200>;", ".reg .b64 %rd<16>;",
        "ld.param.b64 %rd1, [probe_param_0];", "ld.param.b64 %rd2, [probe_param_1];",
        "mov.u32 %r0, %tid.x;", "mad.wide.s32 %rd3, %r0, 4, %rd1;", "mad.wide.s32 %rd4, %r0, 4, %rd2;",
        *loads, *body.strip().splitlines(), *stores, "ret;", "}",
    ]  # fmt: skip
    return "\n".join(lines).encode() + b"\0"


def run(
    device: Device, body: str, inputs: list[np.ndarray], outputs: int = 1, threads: int = LANES, shared: int = 0
) -> np.ndarray:
    """Run a program on words (uint32 or float32, one for each thread); return its outputs ``(outputs, threads) uint32``."""
    words = [np.ascontiguousarray(a).view(np.uint32) for a in inputs]
    given = np.concatenate([*words, np.zeros(0, np.uint32)])
    wanted = np.zeros((outputs, threads), np.uint32)
    kernel = device.load(program(body, len(inputs), outputs, threads), "probe", shared)
    with device.memory(given, wanted) as addresses:
        device.launch(kernel, 1, threads, shared, addresses, (ctypes.c_uint64, ctypes.c_uint64))
        return device.download(addresses[1], wanted)


def of_fragments(kind: str, a: np.ndarray, b: np.ndarray, c: np.ndarray) -> list[np.ndarray]:
    """Registers of all lanes for A ``(16, K)``, B ``(K, 8)`` and C ``(16, 8)``: "Matrix Fragments for mma.m16n8k16" and k8.

    Numbers of A and B are words of 16 bits, two of which go into a register, or of 32 bits.
    """
    lane = np.arange(LANES)
    group, thread = lane >> 2, lane & 3

    def pair(matrix, row, column):
        return matrix[row, column].astype(np.uint32) | matrix[row, column + 1].astype(np.uint32) << 16

    if kind == "tf32":
        of_a = [a[group + 8 * (i & 1), thread + 4 * (i >> 1)] for i in range(4)]
        of_b = [b[thread + 4 * i, group] for i in range(2)]
    else:
        of_a = [pair(a, group + 8 * (i & 1), 2 * thread + 8 * (i >> 1)) for i in range(4)]
        of_b = [pair(b.T, group, 2 * thread + 8 * i) for i in range(2)]
    of_c = [c[group + 8 * (i >> 1), 2 * thread + (i & 1)] for i in range(4)]
    return [np.ascontiguousarray(x) for x in (*of_a, *of_b, *of_c)]


def of_result(words: np.ndarray) -> np.ndarray:
    """D ``(16, 8) float32`` from four registers of all lanes."""
    lane = np.arange(LANES)
    d = np.zeros((16, 8), np.float32)
    for i in range(4):
        d[(lane >> 2) + 8 * (i >> 1), 2 * (lane & 3) + (i & 1)] = words[i].view(np.float32)
    return d
