"""Products of four warps (wgmma, sm_90) in the emulator against NumPy: layouts in shared memory, and what must wait."""

import ml_dtypes
import numpy as np
import pytest
from emulated_gpu import RefusedError
from machine_code import MachineCode

N, THREADS = 32, 128
RANDOM = np.random.default_rng(5)
LANE, WARP = np.arange(THREADS) % 32, np.arange(THREADS) // 32


@pytest.fixture
def hopper(device, tmp_path):
    return MachineCode(device, "sm_90", tmp_path / "log")


def fragments(a):
    """Registers of A ``(64, 16)`` 16-bit words: "Register Fragments for wgmma.mma_async.m64nNk16"."""
    rows, columns = 16 * WARP + (LANE >> 2), 2 * (LANE & 3)
    places = [(rows + 8 * (i & 1), columns + 8 * (i >> 1)) for i in range(4)]
    return [a[r, c].astype(np.uint32) | a[r, c + 1].astype(np.uint32) << 16 for r, c in places]


def product_of(words):
    """D ``(64, N)`` from its registers."""
    d = np.zeros((64, N), np.float32)
    for i, word in enumerate(words):
        d[16 * WARP + (LANE >> 2) + 8 * (i >> 1 & 1), 8 * (i // 4) + 2 * (LANE & 3) + (i & 1)] = word.view(np.float32)
    return d


def laid_out(b, width, transposed):
    """B ``(16, N)`` as bytes of shared memory; the leading and stride offsets; "Shared Memory Matrix Layout".

    width: bytes of a row of a swizzling atom of 8 rows, 16 for none. Each 16 bytes of a row are exchanged with those at the
    number that differs by the row's number, in what an atom's row has of them.
    """
    rows = b if transposed else b.T  # rows run along N where transposed, else along K
    data = np.ascontiguousarray(rows).view(np.uint8)
    memory = np.zeros(4096, np.uint8)
    leading, stride = (2048, 8 * width) if transposed else (1024, 8 * width) if width > 16 else (128, 256)
    for row in range(data.shape[0]):
        for chunk in range(data.shape[1] // 16):
            along = chunk * 16
            place = along // width * leading + along % width + row // 8 * stride + row % 8 * width
            place ^= (place // 128 % (width // 16)) * 16
            memory[place : place + 16] = data[row, along : along + 16]
    return memory, leading, stride


PROGRAM = """
    mov.u32 %r182, global_smem;
    shl.b32 %r180, %r0, 5;
    add.s32 %r180, %r180, %r182;
    st.shared.v4.b32 [%r180], {{%r5, %r6, %r7, %r8}};
    st.shared.v4.b32 [%r180+16], {{%r9, %r10, %r11, %r12}};
    fence.proxy.async.shared::cta;
    bar.sync 0;
    and.b32 %r181, %r182, 262143;
    shr.u32 %r181, %r181, 4;
    cvt.u64.u32 %rd8, %r181;
    or.b64 %rd8, %rd8, {descriptor};
    {zeros}
    wgmma.fence.sync.aligned;
    wgmma.mma_async.sync.aligned.m64n32k16.f32.{kind}.{kind} {{{d}}}, {{%r1, %r2, %r3, %r4}}, %rd8, 0, 1, 1, {transposed};
    wgmma.mma_async.sync.aligned.m64n32k16.f32.{kind}.{kind} {{{d}}}, {{%r1, %r2, %r3, %r4}}, %rd8, 1, 1, 1, {transposed};
    wgmma.commit_group.sync.aligned;
    wgmma.wait_group.sync.aligned 0;
"""
MODES = {16: 0, 128: 1, 64: 2, 32: 3}
D = [f"%r{100 + i}" for i in range(16)]


def program(kind, width, leading, stride, transposed):
    descriptor = (leading >> 4) << 16 | (stride >> 4) << 32 | MODES[width] << 62
    return PROGRAM.format(
        descriptor=descriptor - (descriptor >> 63 << 64),
        zeros="\n".join(f"mov.b32 {register}, 0;" for register in D),
        d=", ".join(D),
        kind=kind,
        transposed=int(transposed),
    )


def inputs_of(a, memory):
    words = memory.view(np.uint32).reshape(THREADS, 8)
    return [*fragments(a.view(np.uint16)), *np.ascontiguousarray(words.T)]


@pytest.mark.parametrize(
    ("width", "transposed"), [(16, False), (32, False), (64, False), (128, False), (32, True), (64, True)]
)
def test_product_of_a_warpgroup(hopper, width, transposed):
    kind, dtype = ("f16", np.float16) if width != 32 else ("bf16", ml_dtypes.bfloat16)
    a, b = (RANDOM.integers(-8, 9, shape).astype(dtype) for shape in ((64, 16), (16, N)))
    memory, leading, stride = laid_out(b, width, transposed)
    body = program(kind, width, leading, stride, transposed)
    for early in (False, True):
        hopper.set({"EARLY": early})
        found = hopper.run(body, inputs_of(a, memory), outputs=16, threads=THREADS, shared=4096)
        np.testing.assert_array_equal(product_of(found), 2 * (a.astype(np.float32) @ b.astype(np.float32)))
    executed = hopper.executed()
    assert {f"HGMMA.64x32x16.F32{'.BF16' if kind == 'bf16' else ''}", "WARPGROUP.ARRIVE"} <= executed
    assert {"WARPGROUP.DEPBAR.LE", "FENCE.VIEW.ASYNC.S"} <= executed


@pytest.mark.parametrize("early", [False, True])
def test_memory_must_not_change_while_it_is_multiplied(hopper, early):
    """A store behind the products and before the wait for them is noticed, whenever they are formed."""
    hopper.set({"EARLY": early})
    a, b = (RANDOM.integers(-8, 9, shape).astype(np.float16) for shape in ((64, 16), (16, N)))
    memory, leading, stride = laid_out(b, 64, False)
    commit = "wgmma.commit_group.sync.aligned;"
    spoilt = commit + "\nst.shared.v4.b32 [%r180], {%r1, %r1, %r1, %r1};"
    body = program("f16", 64, leading, stride, False).replace(commit, spoilt)
    with pytest.raises(RefusedError, match="race: "):
        hopper.run(body, inputs_of(a, memory), outputs=16, threads=THREADS, shared=4096)


def test_what_was_written_needs_a_fence(hopper):
    """ptxas adds no fence of its own, and tensor cores of a warpgroup see shared memory in their own way (async proxy)."""
    a, b = (RANDOM.integers(-8, 9, shape).astype(np.float16) for shape in ((64, 16), (16, N)))
    memory, leading, stride = laid_out(b, 64, False)
    body = program("f16", 64, leading, stride, False).replace("fence.proxy.async.shared::cta;", "")
    with pytest.raises(RefusedError, match=r"HGMMA: shared memory was written since the last fence"):
        hopper.run(body, inputs_of(a, memory), outputs=16, threads=THREADS, shared=4096)
