"""Machine code of the encoder's kernels against NumPy, beside that of attention: longer integers, bytes, halves, lanes that part.

As in test_sass_instructions.py, ptxas compiles PTX, and tests name the instructions that they rest on.
"""

import ml_dtypes
import numpy as np
import pytest
from machine_code import ALL, MachineCode
from test_sass_instructions import WORDS, A, B, C, D, N, W, X, check_all, flush, high, low, pair, signed

LANE = np.arange(32)


@pytest.fixture(params=ALL)
def code(request, device, tmp_path):
    return MachineCode(device, request.param, tmp_path / "log")


def of_predicate(text, is_true):
    return f"{text} selp.b32 O, 7, 9, %p1;", np.where(is_true, 7, 9)


FIRST, SECOND, THIRD = pair(A, B), pair(C, D), pair(C, B)  # the upper words of the first and the third are equal
XYZ = "mov.b64 X, {A,B}; mov.b64 Y, {C,D}; mov.b64 Z, {C,B}; "
LOW, HIGH = " mov.b64 {O, T}, X;", " mov.b64 {T, O}, X;"
with np.errstate(over="ignore"):
    LEAST = np.minimum(FIRST.view(np.int64), SECOND.view(np.int64)).view(np.uint64)
    INTEGERS = dict([
        of_predicate(XYZ + "setp.lt.s64 %p1, X, Y;", FIRST.view(np.int64) < SECOND.view(np.int64)),
        of_predicate(XYZ + "setp.ge.s64 %p1, X, Z;", FIRST.view(np.int64) >= THIRD.view(np.int64)),
        of_predicate(XYZ + "setp.gt.u64 %p1, X, Z;", FIRST > THIRD),
        of_predicate(XYZ + "setp.le.u64 %p1, X, Y;", FIRST <= SECOND),
        of_predicate(XYZ + "setp.ne.s64 %p1, X, Z;", FIRST != THIRD),
        of_predicate("mov.b64 X, {A,B}; mov.b64 Y, {D,B}; setp.eq.s64 %p1, X, Y;", A == D),
        of_predicate("mov.b64 X, {A,B}; mov.b64 Y, {D,B}; setp.lt.s64 %p1, X, Y;", A < D),
        of_predicate(
            "setp.lt.s32 %p2, A, B; setp.gt.s32 %p3, C, D; or.pred %p1, %p2, %p3;",
            (signed(A) < signed(B)) | (signed(C) > signed(D)),
        ),
    ])  # fmt: skip
    INTEGERS |= {
        XYZ + "sub.s64 X, X, Y;" + LOW: low(FIRST - SECOND),
        XYZ + "sub.s64 X, X, Y;" + HIGH: high(FIRST - SECOND),
        "mov.b64 X, {N,B}; mov.b64 Y, {N,D}; sub.s64 X, X, Y;" + HIGH: high(pair(N, B) - pair(N, D)),
        "mov.b64 X, {N,B}; add.s64 X, X, -4;" + HIGH: high(pair(N, B) - np.uint64(4)),
        "mov.b64 X, {N,B}; add.s64 X, X, -4;" + LOW: low(pair(N, B) - np.uint64(4)),
        XYZ + "min.s64 X, X, Y;" + HIGH: high(LEAST),
        XYZ + "min.s64 X, X, Y;" + LOW: low(LEAST),
        XYZ + "max.s64 X, X, Z;" + LOW: low(np.maximum(FIRST.view(np.int64), THIRD.view(np.int64)).view(np.uint64)),
        "add.s32 S, A, B; max.s32 O, S, C;": np.maximum(signed(A + B), signed(C)).astype(np.uint32),
        "sub.s32 S, N, 9; max.s32 O, S, 1;": np.maximum(N.astype(np.int64) - 9, 1).astype(np.uint32),
        "min.s32 S, A, B; max.s32 O, S, 0;": np.maximum(np.minimum(signed(A), signed(B)), 0).astype(np.uint32),
        "min.s32 S, A, B; min.s32 O, S, C;": np.minimum(np.minimum(signed(A), signed(B)), signed(C)).astype(np.uint32),
        "prmt.b32 O, A, B, 0x5410;": (A & np.uint32(0xFFFF)) | B << np.uint32(16),
        "prmt.b32 O, A, B, 0x7632;": A >> np.uint32(16) | (B & np.uint32(0xFFFF0000)),
        "prmt.b32 O, A, B, 0x0b37;": np.where(A >> 31, 0x00FF0000, 0).astype(np.uint32)
        | (A & np.uint32(0xFF)) << np.uint32(24) | A >> np.uint32(24) << np.uint32(8) | B >> np.uint32(24),
    }  # fmt: skip


def test_integers(code):
    for text, found, wanted in check_all(code, INTEGERS, WORDS):
        np.testing.assert_array_equal(found, np.asarray(wanted).astype(np.uint32), err_msg=text)
    executed = code.executed()
    assert "PRMT" in executed
    assert ({"IMNMX.S64"} if code.architecture == "sm_120" else {"ISETP.LT.AND.EX"}) <= executed
    assert any(name.startswith("ISETP") and ".OR" in name for name in executed)
    assert code.architecture != "sm_120" or any(name.startswith("ISETP") and "64" in name for name in executed)


def of_halves(x, dtype):
    return np.asarray(x, np.uint32).astype(np.uint16).view(dtype).astype(np.float32)


APART = "mov.b32 {%rs1, %rs2}, A; "
FINITE = np.concatenate([[0x8000, 0x80007C00, 0x3C000001], np.random.default_rng(4).integers(0, 0x7BFF, 29) * 65537])
HALVES = [FINITE.astype(np.uint32), np.float32(X), W, W, N]
with np.errstate(all="ignore"):
    FROM_HALVES = {
        APART + "cvt.f32.f16 O, %rs1;": of_halves(HALVES[0], np.float16),
        APART + "cvt.f32.f16 O, %rs2;": of_halves(HALVES[0] >> 16, np.float16),
        APART + "cvt.f32.f16 S, %rs2; add.f32 O, S, C;": of_halves(HALVES[0] >> 16, np.float16) + W,
        APART + "cvt.f32.f16 S, %rs1; sub.f32 O, S, C;": of_halves(HALVES[0], np.float16) - W,
        APART + "cvt.f32.bf16 S, %rs2; add.f32 O, S, C;": of_halves(HALVES[0] >> 16, ml_dtypes.bfloat16) + W,
    }


def test_halves_become_floats(code):
    for text, found, wanted in check_all(code, FROM_HALVES, HALVES):
        np.testing.assert_array_equal(found.view(np.float32), wanted, err_msg=text)
    assert "HADD2.F32" in code.executed()


def test_roots(code):
    found = code.run("rsqrt.approx.ftz.f32 %r100, %r1;", [np.abs(X)])[0].view(np.float32)
    x = np.abs(X).astype(np.float64)
    with np.errstate(divide="ignore"):
        wanted = (1 / np.sqrt(np.where(x < np.finfo(np.float32).tiny, 0, x))).astype(np.float32)
    np.testing.assert_array_max_ulp(found[~np.isnan(X)], wanted[~np.isnan(X)], 2)
    found = code.run("sqrt.approx.ftz.f32 %r100, %r1;", [np.abs(X)])[0].view(np.float32)
    np.testing.assert_array_max_ulp(found[~np.isnan(X)], np.sqrt(flush(np.abs(X)))[~np.isnan(X)], 2)
    assert {"MUFU.RSQ", "MUFU.SQRT"} <= code.executed()


def test_lanes_below_and_the_least(code):
    body = """
        shfl.sync.up.b32 %r100, %r1, 3, 0, -1;
        redux.sync.min.s32 %r101, %r1, -1;
        mov.u32 %r102, %nctaid.x;
    """
    found = code.run(body, [A], outputs=3)
    least = np.full(32, signed(A).min()).astype(np.uint32)
    np.testing.assert_array_equal(found, [A[np.where(LANE < 3, LANE, LANE - 3)], least, np.ones(32)])
    assert {"SHFL.UP", "REDUX.MIN.S32"} <= code.executed()


NARROW = """
    mov.u32 %r182, global_smem;
    mad.lo.s32 %r180, %r0, 4, %r182;
    mad.wide.s32 %rd8, %r0, 4, %rd1;
    st.shared.b32 [%r180], %r1;
    bar.warp.sync -1;
    ld.shared.u8 %rs1, [%r180+1];
    ld.shared.u16 %rs2, [%r180+2];
    ld.global.u8 %rs3, [%rd8+3];
    ld.global.u16 %rs4, [%rd8+2];
    cvt.u32.u16 %r100, %rs1;
    cvt.u32.u16 %r101, %rs2;
    cvt.u32.u16 %r102, %rs3;
    cvt.u32.u16 %r103, %rs4;
    st.shared.b16 [%r180], %rs4;
    st.global.b16 [%rd8], %rs1;
    ld.shared.b32 %r104, [%r180];
    ld.global.b32 %r105, [%rd8];
"""


def test_bytes_and_halves_in_memory(code):
    found = code.run(NARROW, [A], outputs=6, shared=128)
    upper, second = A >> np.uint32(16), A >> np.uint32(8) & np.uint32(0xFF)
    np.testing.assert_array_equal(found[:4], [second, upper, A >> np.uint32(24), upper])
    np.testing.assert_array_equal(found[4:], [upper | upper << np.uint32(16), second | upper << np.uint32(16)])
    assert {"LDS.U8", "LDS.U16", "LDG.E.U8", "LDG.E.U16", "STS.U16", "STG.E.U16"} <= code.executed()


def test_small_copies(code):
    body = """
        mov.u32 %r182, global_smem;
        mad.lo.s32 %r180, %r0, 8, %r182;
        mad.wide.s32 %rd8, %r0, 8, %rd1;
        setp.ne.s32 %p1, %r3, 0;
        selp.b32 %r183, 8, 0, %p1;
        cp.async.ca.shared.global [ %r180 + 0 ], [ %rd8 + 0 ], 0x8, %r183;
        cp.async.commit_group;
        cp.async.wait_group 0;
        ld.shared.v2.b32 {%r100, %r101}, [%r180];
    """
    is_read = (LANE % 3).astype(np.uint32)
    found = code.run(body, [A, B, is_read], outputs=2, shared=256)
    np.testing.assert_array_equal(found.T, np.where(is_read[:, None], np.stack([A, B]).reshape(32, 2), 0))
    assert "LDGSTS.E.64" in code.executed()


@pytest.mark.parametrize("architecture", ["sm_90", "sm_120"])
def test_one_matrix_goes_into_shared_memory(device, tmp_path, architecture):
    code = MachineCode(device, architecture, tmp_path / "log")
    body = """
        mov.u32 %r182, global_smem;
        and.b32 %r181, %r0, 7;
        mad.lo.s32 %r180, %r181, 16, %r182;
        stmatrix.sync.aligned.m8n8.x1.shared.b16 [%r180], {%r1};
        bar.warp.sync -1;
        mad.lo.s32 %r180, %r0, 4, %r182;
        ld.shared.b32 %r100, [%r180];
    """
    np.testing.assert_array_equal(
        code.run(body, [A], shared=128)[0], A
    )  # two numbers of a row lie in each lane already
    assert "STSM.16.M88" in code.executed()


PARTING = """
    mov.u32 %r100, 0;
    mov.u32 %r180, %r1;
    setp.lt.s32 %p2, %r0, 11;
    $L_a:
    setp.le.s32 %p1, %r180, 0;
    @%p1 bra $L_end;
    mad.lo.s32 %r100, %r100, %r2, %r180;
    sub.s32 %r180, %r180, 1;
    @%p2 bra $L_a;
    add.s32 %r100, %r100, 1000;
    bra $L_a;
    $L_end:
    shfl.sync.bfly.b32 %r101, %r100, 1, 31, -1;
"""


def test_lanes_that_part_meet_again(code):
    """Each lane goes around as often as it wants to; behind that they are together."""
    found = code.run(PARTING, [N, B], outputs=2)
    wanted = np.zeros(32, np.uint64)
    for lane in range(32):
        for left in range(int(N[lane]), 0, -1):
            wanted[lane] = (int(wanted[lane]) * int(B[lane]) + left + (1000 if lane >= 11 else 0)) % 2**32
    np.testing.assert_array_equal(found, [wanted, wanted[LANE ^ 1]])
    assert any(name.startswith("BSSY") for name in code.executed())
