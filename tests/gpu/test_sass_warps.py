"""Machine code of what lanes and warps do together, against NumPy: shuffles, sums, shared memory, matrices, copies.

As in test_sass_instructions.py, ptxas compiles PTX, and tests name the instructions that they rest on.
"""

import ml_dtypes
import numpy as np
import probes
import pytest
from emulated_gpu import RefusedError
from machine_code import ALL, MachineCode

LANE = np.arange(32)
WORDS = np.random.default_rng(0).integers(0, 2**32, (5, 32), np.uint32)


@pytest.fixture(params=ALL)
def code(request, device, tmp_path):
    return MachineCode(device, request.param, tmp_path / "log")


@pytest.fixture
def ampere(device, tmp_path):
    return MachineCode(device, "sm_80", tmp_path / "log")


def test_lanes_exchange_words(code):
    body = """
        shfl.sync.bfly.b32 %r100, %r1, 2, 31, -1;
        shfl.sync.idx.b32 %r101, %r1, %r2, 31, -1;
        redux.sync.add.s32 %r102, %r1, -1;
        mov.u32 %r103, %ctaid.x;
        mov.u32 %r104, %tid.x;
    """
    by = WORDS[1] % 32
    found = code.run(body, [WORDS[0], by], outputs=5)
    wanted = [WORDS[0][LANE ^ 2], WORDS[0][by], np.full(32, WORDS[0].sum(dtype=np.uint32)), LANE * 0, LANE]
    np.testing.assert_array_equal(found, np.array(wanted))
    assert {"SHFL.BFLY", "SHFL.IDX", "REDUX.SUM.S32", "S2R", "STG.E", "LDG.E", "EXIT"} <= code.executed()
    assert code.executed() & {"ULDC.64", "LDCU.64"}


EXCHANGE = """
    mov.u32 %r182, global_smem;
    mad.lo.s32 %r183, %r0, 4, %r182;
    mad.lo.s32 %r184, %r0, 8, %r182;
    mad.lo.s32 %r185, %r0, 16, %r182;
    st.shared.b32 [%r183+64], {%r1};
    st.shared.v2.b32 [%r184+320], {%r2, %r3};
    st.shared.v4.b32 [%r185+832], {%r4, %r5, %r6, %r7};
    bar.sync 0;
    xor.b32 %r181, %r0, 45;
    mad.lo.s32 %r183, %r181, 4, %r182;
    mad.lo.s32 %r184, %r181, 8, %r182;
    mad.lo.s32 %r185, %r181, 16, %r182;
    ld.shared.b32 %r100, [%r183+64];
    ld.shared.v2.b32 {%r101, %r102}, [%r184+320];
    ld.shared.v4.b32 {%r103, %r104, %r105, %r106}, [%r185+832];
"""
"""Each thread writes 1, 2 and 4 words, and after a barrier reads those of a thread of the other warp."""

BYTES = 832 + 16 * 64
DATA = np.arange(7 * 64, dtype=np.uint32).reshape(7, 64) * 3


@pytest.mark.parametrize("reverse", [False, True])
def test_warps_exchange_words(code, reverse):
    code.set({"REVERSE": reverse})
    found = code.run(EXCHANGE, DATA, outputs=7, threads=64, shared=BYTES)
    np.testing.assert_array_equal(found, DATA[:, np.arange(64) ^ 45])
    names = {f"{name}{end}" for name in ("LDS", "STS") for end in ("", ".64", ".128")}
    assert names | {"BAR.SYNC.DEFER_BLOCKING"} <= code.executed()


def test_races_and_bounds_of_shared_memory(ampere):
    with pytest.raises(RefusedError, match="race|nobody wrote"):
        ampere.run(EXCHANGE.replace("bar.sync 0;", ""), DATA, outputs=7, threads=64, shared=BYTES)
    with pytest.raises(RefusedError, match=r"the block has 0 to 1840 \[block 0, warp 1: STS.128"):
        ampere.run(EXCHANGE, DATA, outputs=7, threads=64, shared=BYTES - 16)
    with pytest.raises(RefusedError, match="nobody wrote"):
        ampere.run(EXCHANGE.replace("st.shared.b32 [%r183+64], {%r1};", ""), DATA, 7, 64, BYTES)


MATRICES = np.random.default_rng(1).integers(0, 2**16, (4, 8, 8)).astype(np.uint16)
ROWS = MATRICES.reshape(32, 8).view(np.uint32)  # 4 words each


def pairs(matrix):
    """What lanes hold of an 8x8 matrix of 16 bits (PTX ISA, ldmatrix)."""
    first, second = (matrix[LANE >> 2, 2 * (LANE & 3) + j].astype(np.uint32) for j in range(2))
    return first | second << 16


def test_matrices_come_out_of_shared_memory(code):
    body = """
        mov.u32 %r182, global_smem;
        mad.lo.s32 %r180, %r5, 16, %r182;
        st.shared.v4.b32 [%r180+16], {%r1, %r2, %r3, %r4};
        bar.warp.sync -1;
        ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%r100, %r101, %r102, %r103}, [%r180+16];
        ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%r104, %r105, %r106, %r107}, [%r180+16];
        ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%r108}, [%r180+16];
    """
    order = np.random.default_rng(2).permutation(32).astype(np.uint32)
    found = code.run(body, [*np.ascontiguousarray(ROWS.T), order], outputs=9, shared=528)
    np.testing.assert_array_equal(found, [pairs(m) for m in (*MATRICES, *MATRICES.transpose(0, 2, 1), MATRICES[0])])
    assert {"LDSM.16.M88", "LDSM.16.M88.4", "LDSM.16.MT88.4"} <= code.executed()


@pytest.mark.parametrize("architecture", ["sm_90", "sm_120"])
def test_matrices_go_into_shared_memory(device, tmp_path, architecture):
    code = MachineCode(device, architecture, tmp_path / "log")
    body = """
        mov.u32 %r182, global_smem;
        mad.lo.s32 %r180, %r0, 16, %r182;
        stmatrix.sync.aligned.m8n8.x4.shared.b16 [%r180], {%r1, %r2, %r3, %r4};
        bar.warp.sync -1;
        ld.shared.v4.b32 {%r100, %r101, %r102, %r103}, [%r180];
    """
    found = code.run(body, [pairs(matrix) for matrix in MATRICES], outputs=4, shared=512)
    np.testing.assert_array_equal(found.T, ROWS)
    assert "STSM.16.M88.4" in code.executed()


COPY = """
    mov.u32 %r182, global_smem;
    mad.lo.s32 %r180, %r0, 16, %r182;
    mad.wide.s32 %rd8, %r0, 16, %rd1;
    setp.ne.s32 %p1, %r5, 0;
    selp.b32 %r183, 16, 0, %p1;
    cp.async.cg.shared.global [ %r180 + 0 ], [ %rd8 + 0 ], 0x10, %r183;
    cp.async.commit_group;
    cp.async.wait_group 0;
    ld.shared.v4.b32 {%r100, %r101, %r102, %r103}, [%r180];
"""
IS_READ = (np.arange(32) % 3).astype(np.uint32)


@pytest.mark.parametrize("early", [False, True])
def test_copies_fill_with_zeros(code, early):
    code.set({"EARLY": early})
    found = code.run(COPY, [*WORDS[:4], IS_READ], outputs=4, shared=512)
    np.testing.assert_array_equal(found.T, np.where(IS_READ[:, None], WORDS[:4].reshape(32, 4), 0))
    assert {"LDGSTS.E.BYPASS.128", "LDGDEPBAR", "DEPBAR.LE"} <= code.executed()


def test_copies_have_to_be_waited_for(ampere):
    with pytest.raises(RefusedError, match="still writing"):
        ampere.run(COPY.replace("cp.async.wait_group 0;", ""), [*WORDS[:4], IS_READ], outputs=4, shared=512)


KINDS = {
    "f16": ("m16n8k16.row.col.f32.f16.f16.f32", np.float16, "HMMA.16816.F32"),
    "bf16": ("m16n8k16.row.col.f32.bf16.bf16.f32", ml_dtypes.bfloat16, "HMMA.16816.F32.BF16"),
    "tf32": ("m16n8k8.row.col.f32.tf32.tf32.f32", np.float32, "HMMA.1688.F32.TF32"),
}


def test_tensor_cores_of_a_warp(code):
    """Small integers: every product and sum is exact, so that order and rounding do not matter."""
    random = np.random.default_rng(3)
    body, inputs, wanted = [], [], []
    for i, (kind, (shape, dtype, _)) in enumerate(KINDS.items()):
        depth, bits = (8, np.uint32) if kind == "tf32" else (16, np.uint16)
        a, b, c = (random.integers(-8, 9, size).astype(np.float32) for size in ((16, depth), (depth, 8), (16, 8)))
        inputs += probes.of_fragments(kind, a.astype(dtype).view(bits), b.astype(dtype).view(bits), c)
        given = [f"%r{1 + 10 * i + k}" for k in range(10)]
        parts = [f"%r{100 + 4 * i + k}" for k in range(4)], given[:4], given[4:6], given[6:]
        body.append(f"mma.sync.aligned.{shape} {', '.join('{' + ', '.join(part) + '}' for part in parts)};")
        wanted.append(a @ b + c)
    found = code.run("\n".join(body), inputs, outputs=12)
    for i, product in enumerate(wanted):
        np.testing.assert_array_equal(probes.of_result(found[4 * i : 4 * i + 4]), product)
    assert {name for _, _, name in KINDS.values()} <= code.executed()
