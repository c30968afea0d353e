"""Machine code against NumPy: lines of PTX, compiled by ptxas, do in the emulator what the PTX ISA says of the PTX.

That is the evidence for how instructions are read that NVIDIA documents by name only. Many lines share a program, because
each compilation takes a third of a second. Tests name the instructions that they rest on, and fail where ptxas chose others.
"""

import re

import ml_dtypes
import numpy as np
import probes
import pytest
from machine_code import ALL, MachineCode

RANDOM = np.random.default_rng(0)
EDGES = np.array([0, 1, 2, 31, 32, 33, 40, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF, 0xFFFFFFFE, 0x12345678], np.uint32)
A, B, C = (np.concatenate([RANDOM.permutation(EDGES), RANDOM.integers(0, 2**32, 20, np.uint32)]) for _ in range(3))
D = np.where(RANDOM.permutation(np.arange(32)) < 16, A, B)  # half of it equals A
N = RANDOM.integers(0, 32, 32).astype(np.uint32)
WORDS = [A, B, C, D, N]


@pytest.fixture(params=ALL)
def code(request, device, tmp_path):
    return MachineCode(device, request.param, tmp_path / "log")


def signed(x):
    return np.asarray(x, np.uint32).view(np.int32).astype(np.int64)


def wide(x):
    return np.asarray(x, np.uint32).astype(np.uint64)


def pair(low, high):
    return wide(low) | wide(high) << np.uint64(32)


def low(x):
    return np.asarray(x).astype(np.uint64).astype(np.uint32)


def high(x):
    return (np.asarray(x).astype(np.uint64) >> np.uint64(32)).astype(np.uint32)


REGISTERS = {name: f"%r{1 + i}" for i, name in enumerate("ABCDN")} | {
    "S": "%r180", "T": "%r181", "U": "%r182", "X": "%rd8", "Y": "%rd9", "Z": "%rd10"
}  # fmt: skip
"""The inputs, and registers for what lies between them and an output, which is called O."""


def check_all(code, table, inputs):
    """Run all lines of a table in one program; yield each with its output and what it should be."""
    lines = []
    for i, line in enumerate(table):
        text = re.sub(r"\bO\b", f"%r{probes.FIRST_OUTPUT + i}", line)
        lines += re.sub(r"\b[A-Z]\b", lambda name: REGISTERS[name[0]], text).replace(";", ";\n").splitlines()
    found = code.run("\n".join(lines), inputs, outputs=len(table))
    for words, (text, wanted) in zip(found, table.items()):
        yield text, words, np.asarray(wanted)


XYZ = "mov.b64 X, {A,B}; mov.b64 Y, {C,D}; mov.b64 Z, {B,C}; "
LOW, HIGH = " mov.b64 {O, T}, X;", " mov.b64 {T, O}, X;"
with np.errstate(over="ignore"):
    SUM3 = pair(A, B) + pair(C, D) + pair(B, C)
    QUOTIENT = np.trunc(signed(A) / np.where(N == 0, 1, N).astype(np.longdouble)).astype(np.int64)
    INTEGERS = {
        "add.s32 O, A, B;": A + B,
        "add.s32 S, A, B; sub.s32 O, C, S;": C - A - B,
        "neg.s32 O, A;": 0 - A,
        "mad.lo.s32 O, A, B, C;": A * B + C,
        "mul.hi.s32 O, A, B;": (signed(A) * signed(B) >> 32).astype(np.uint32),
        "mul.hi.u32 O, A, B;": high(wide(A) * wide(B)),
        "shl.b32 S, A, 3; add.s32 O, S, B;": (A << np.uint32(3)) + B,
        "abs.s32 O, A;": np.abs(signed(A)).astype(np.uint32),
        "min.s32 O, A, B;": np.minimum(signed(A), signed(B)).astype(np.uint32),
        "max.s32 O, A, B;": np.maximum(signed(A), signed(B)).astype(np.uint32),
        "popc.b32 O, A;": np.array([int(x).bit_count() for x in A], np.uint32),
        "lop3.b32 O, A, B, C, 0x6a;": (A & B) ^ C,
        "lop3.b32 O, A, B, C, 0xd8;": np.where(C, 0, 0) + ((A & ~C) | (B & C)),
        "not.b32 O, A;": ~A,
        "shl.b32 O, A, N;": A << N,
        "shr.u32 O, A, N;": A >> N,
        "shr.s32 O, A, N;": (signed(A) >> N).astype(np.uint32),
        "shl.b32 O, A, 7;": A << np.uint32(7),
        "bfe.u32 O, A, 3, 9;": A >> np.uint32(3) & np.uint32(511),
        "bfe.s32 O, A, 3, 9;": ((signed(A << np.uint32(20))) >> 23).astype(np.uint32),
        "bfe.s32 O, A, 0, 5;": ((signed(A << np.uint32(27))) >> 27).astype(np.uint32),
        "max.s32 S, N, 1; div.s32 O, A, S;": QUOTIENT.astype(np.uint32),
        "max.s32 S, N, 1; rem.s32 O, A, S;": (signed(A) - QUOTIENT * np.maximum(N, 1)).astype(np.uint32),
        XYZ + "add.s64 X, X, Y;" + LOW: low(pair(A, B) + pair(C, D)),
        XYZ + "add.s64 X, X, Y;" + HIGH: high(pair(A, B) + pair(C, D)),
        XYZ + "add.s64 X, X, Y; add.s64 X, X, Z;" + LOW: low(SUM3),
        XYZ + "add.s64 X, X, Y; add.s64 X, X, Z;" + HIGH: high(SUM3),
        XYZ + "shl.b64 X, X, 5;" + HIGH: high(pair(A, B) << np.uint64(5)),
        XYZ + "shl.b64 X, X, 4; add.s64 X, X, Y;" + LOW: low((pair(A, B) << np.uint64(4)) + pair(C, D)),
        XYZ + "shl.b64 X, X, 4; add.s64 X, X, Y;" + HIGH: high((pair(A, B) << np.uint64(4)) + pair(C, D)),
        XYZ + "cvt.s64.s32 X, A; shl.b64 X, X, 2; add.s64 X, X, Y;" + HIGH: high((signed(A) * 4).view(np.uint64) + pair(C, D)),
        XYZ + "mad.wide.s32 X, A, 4, Y;" + HIGH: high((signed(A) * 4).view(np.uint64) + pair(C, D)),
        XYZ + "mad.wide.s32 X, A, B, Y;" + LOW: low((signed(A) * signed(B)).view(np.uint64) + pair(C, D)),
        XYZ + "mad.wide.s32 X, A, B, Y;" + HIGH: high((signed(A) * signed(B)).view(np.uint64) + pair(C, D)),
        XYZ + "mad.wide.u32 X, A, B, Y;" + HIGH: high(wide(A) * wide(B) + pair(C, D)),
        "and.b32 S, A, 48; setp.ne.s32 %p1, S, 0; selp.b32 O, 7, 9, %p1;": np.where(A & 48, 7, 9),
    }  # fmt: skip


def test_integers(code):
    for text, found, wanted in check_all(code, INTEGERS, WORDS):
        np.testing.assert_array_equal(found, wanted.astype(np.uint32), err_msg=text)
    executed = code.executed()
    everywhere = {"IMAD.HI", "IMAD.HI.U32", "IMAD.WIDE", "IABS", "POPC", "LOP3.LUT", "SHF.L.U32", "SHF.R.U32.HI"}
    assert everywhere | {"SHF.R.S32.HI", "SHF.L.U64.HI", "SGXT", "LEA", "LEA.HI.X", "MUFU.RCP"} <= executed
    assert ({"IADD.64"} if code.architecture == "sm_120" else {"IADD3.X", "LEA.HI.X.SX32"}) <= executed
    assert executed & {"IMNMX", "VIMNMX", "VIMNMX.S32"}


X, Y = (
    np.concatenate([special, RANDOM.standard_normal(32 - len(special))]).astype(np.float32)
    for special in ([0, -0.0, np.inf, -np.inf, np.nan, 1e-40, 3e38, 1.5], [-0.0, 0, 1, np.inf, np.nan, np.nan, 3e38])
)
Z, W = RANDOM.standard_normal((2, 32)).astype(np.float32)
FLOATS = [X, Y, Z, W, N]


def flush(x):
    return np.where(np.abs(x) < np.finfo(np.float32).tiny, np.copysign(np.float32(0), x), x)


def fused(a, b, c):
    return (a.astype(np.longdouble) * b + c).astype(np.float32)


def nearest(x, dtype):
    return x.astype(dtype).view(np.uint16).astype(np.uint32)


def extremum(function):
    """Numbers win over NaN, and +0 is larger than -0 (PTX ISA, min and max)."""
    found = function(X, Y)
    zeros = (X == 0) & (Y == 0)
    return np.where(zeros, function(np.copysign(1, X), np.copysign(1, Y)) * np.float32(0), found)


def rounded_up(words):
    nearest_one = words.astype(np.float32)
    return np.where(nearest_one.astype(np.float64) < words, np.nextafter(nearest_one, np.float32(np.inf)), nearest_one)


def floats_of(text):
    return f"setp.{text} %p1, A, B; selp.b32 O, 7, 9, %p1;"


with np.errstate(all="ignore"):
    ARITHMETIC = {
        "add.f32 O, A, B;": X + Y,
        "sub.f32 O, A, B;": X - Y,
        "mul.f32 O, A, B;": X * Y,
        "fma.rn.f32 O, A, C, D;": fused(X, Z, W),
        "neg.f32 S, C; fma.rn.f32 O, S, A, B;": fused(-Z, X, Y),
        "fma.rn.ftz.f32 O, A, C, D;": flush(fused(flush(X), Z, W)),
        "mul.f32 S, C, 0f1E3CE508; fma.rn.ftz.f32 O, S, S, 0f00000000;": np.zeros(32),  # some 1e-40, which is flushed
        "max.f32 O, A, B;": extremum(np.fmax),
        "min.f32 O, A, B;": extremum(np.fmin),
        "abs.f32 S, A; add.f32 O, S, C;": np.abs(X) + Z,
        "mul.f32 O, A, 0f3FB8AA3B;": X * np.float32(1.4426950216293335),
        "setp.lt.s32 %p1, N, 9; selp.f32 O, A, 0fFF800000, %p1;": np.where(N < 9, X, -np.inf),
        "cvt.rn.f32.s32 O, A;": X.view(np.int32).astype(np.float32),
        "cvt.rn.f32.u32 O, A;": X.view(np.uint32).astype(np.float32),
        "cvt.rp.f32.s32 O, A;": rounded_up(X.view(np.int32)),
    }
    PACKED = {
        "cvt.rn.f16x2.f32 O, A, B;": nearest(X, np.float16) << 16 | nearest(Y, np.float16),
        "cvt.rn.bf16x2.f32 O, A, B;": nearest(X, ml_dtypes.bfloat16) << 16 | nearest(Y, ml_dtypes.bfloat16),
        floats_of("lt.f32"): np.where(X < Y, 7, 9),
        floats_of("gt.f32"): np.where(X > Y, 7, 9),
        floats_of("geu.f32"): np.where(~(X < Y), 7, 9),
        floats_of("neu.f32"): np.where(~(X == Y), 7, 9),
        floats_of("nan.f32"): np.where(np.isnan(X) | np.isnan(Y), 7, 9),
        "abs.f32 S, A; setp.gt.f32 %p1, S, 0f42FC0000; selp.b32 O, 7, 9, %p1;": np.where(np.abs(X) > 126, 7, 9),
        "cvt.rzi.ftz.u32.f32 O, D;": np.where(W > 0, np.trunc(np.abs(W)), 0),
    }


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_floats(code):
    for text, found, wanted in check_all(code, ARITHMETIC, FLOATS):
        found, wanted = found.view(np.float32), wanted.astype(np.float32)
        np.testing.assert_array_equal(found, wanted, err_msg=text)
        there = ~np.isnan(wanted)
        np.testing.assert_array_equal(np.signbit(found[there]), np.signbit(wanted[there]), err_msg=text)
    assert {"FADD", "FMUL", "FFMA", "FFMA.FTZ", "FMNMX", "FSEL", "I2F.RP"} <= code.executed()
    assert code.executed() & {"I2F", "I2FP.F32.S32"}


def test_conversions_and_comparisons_of_floats(code):
    for text, found, wanted in check_all(code, PACKED, FLOATS):
        numbers = ~(np.isnan(X) | np.isnan(Y)) if "x2" in text else slice(None)  # NaN has many patterns
        np.testing.assert_array_equal(found[numbers], wanted.astype(np.uint32)[numbers], err_msg=text)
    comparisons = {f"FSETP.{name}.AND" for name in ("GT", "GEU", "NEU", "NAN")}
    executed = code.executed()
    assert comparisons <= executed
    assert {"F2FP.BF16.F32.PACK_AB", "F2FP.BF16.PACK_AB"} & executed
    assert any(name.startswith("F2I.FTZ.U32.TRUNC") for name in executed)


def test_bits_become_predicates(code):
    """Seven bits of a word at once."""
    bits = "\n".join(f"and.b32 %r{180 + i}, %r1, {1 << i};\nsetp.ne.s32 %p{1 + i}, %r{180 + i}, 0;" for i in range(7))
    chosen = "\n".join(f"selp.b32 %r{100 + i}, 7, 9, %p{1 + i};" for i in range(7))
    found = code.run(f"{bits}\n{chosen}", [A], outputs=7)
    np.testing.assert_array_equal(found, [np.where(A >> np.uint32(i) & 1, 7, 9) for i in range(7)])
    assert "R2P" in code.executed()
