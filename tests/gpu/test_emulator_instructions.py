"""Single PTX instructions of the emulator against NumPy: arithmetic, conversions, shuffles, tensor cores."""

import ml_dtypes
import numpy as np
import probes
import pytest
from emulated_gpu import RefusedError

RANDOM = np.random.default_rng(0)
EDGES = np.array([0, 1, 2, 31, 32, 33, 40, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF, 0xFFFFFFFE, 0x12345678], np.uint32)
WORDS = [np.concatenate([RANDOM.permutation(EDGES), RANDOM.integers(0, 2**32, 20, np.uint32)]) for _ in range(3)]
SMALL = RANDOM.integers(0, 40, 32).astype(np.uint32)
FLOATS = [
    np.concatenate([[0, -0.0, np.inf, -np.inf, np.nan, 1e-40, 3e38, 1.5], RANDOM.standard_normal(24)]).astype(
        np.float32
    ),
    np.concatenate([RANDOM.standard_normal(30), [np.nan, -0.0]]).astype(np.float32),
    RANDOM.standard_normal(32).astype(np.float32),
]


def signed(x):
    return x.view(np.int32)


def bits_of(value, first, count, sign):
    """bfe by its definition in the PTX ISA, bit by bit."""
    last = min(first + count - 1, 31)
    fill = sign and count > 0 and value >> last & 1
    return sum(1 << i for i in range(32) if (value >> (first + i) & 1 if i < count and first + i <= 31 else fill))


def each(function):
    return lambda *words: np.array([function(*map(int, lane)) for lane in zip(*words)], np.uint32)


INTEGER = {
    "add.s32": lambda a, b: a + b,
    "sub.s32": lambda a, b: a - b,
    "mul.lo.s32": lambda a, b: a * b,
    "max.s32": lambda a, b: np.maximum(signed(a), signed(b)),
    "min.s32": lambda a, b: np.minimum(signed(a), signed(b)),
    "and.b32": lambda a, b: a & b,
    "or.b32": lambda a, b: a | b,
    "xor.b32": lambda a, b: a ^ b,
    "shl.b32": each(lambda a, n: a << n & 0xFFFFFFFF if n < 32 else 0),
    "shr.u32": each(lambda a, n: a >> n if n < 32 else 0),
    "shr.s32": each(lambda a, n: (a - (a >> 31 << 32) >> min(n, 31)) & 0xFFFFFFFF),
    "neg.s32": lambda a: 0 - a,
    "mad.lo.s32": lambda a, b, c: a * b + c,
    "bfe.u32": each(lambda a, b, n: bits_of(a, b, n, False)),
    "bfe.s32": each(lambda a, b, n: bits_of(a, b, n, True)),
    "mul.hi.s32": lambda a, b: (signed(a).astype(np.int64) * signed(b) >> 32).astype(np.uint32),
    "not.b32": lambda a: ~a,
    "popc.b32": each(lambda a: a.bit_count()),
    "mov.b32": lambda a: a,
    "mov.u32": lambda a: a,
}


def fused(a, b, c):
    return (a.astype(np.longdouble) * b.astype(np.longdouble) + c.astype(np.longdouble)).astype(np.float32)


def flush(x):
    return np.where(np.abs(x) < np.finfo(np.float32).tiny, np.copysign(np.float32(0), x), x)


FLOAT = {
    "add.f32": lambda a, b: a + b,
    "sub.f32": lambda a, b: a - b,
    "mul.f32": lambda a, b: a * b,
    "div.full.f32": lambda a, b: a / b,
    "max.f32": np.fmax,
    "neg.f32": lambda a: -a,
    "abs.f32": np.abs,
    "fma.rn.f32": fused,
    "fma.rn.ftz.f32": lambda a, b, c: flush(fused(flush(a), flush(b), flush(c))),
}


def one(opcode, operands):
    return f"{opcode} %r100, {', '.join(f'%r{1 + i}' for i in range(operands))};"


@pytest.mark.parametrize("opcode", INTEGER)
def test_integers(device, opcode):
    function = INTEGER[opcode]
    count = 1 if opcode.startswith(("neg", "mov", "not", "popc")) else 3 if opcode.startswith(("mad", "bfe")) else 2
    inputs = WORDS[:count]
    if opcode.startswith(("sh", "bfe")):
        inputs = [WORDS[0], SMALL, SMALL[::-1]][:count]
    np.testing.assert_array_equal(probes.run(device, one(opcode, count), inputs)[0], function(*inputs).view(np.uint32))


@pytest.mark.parametrize("opcode", FLOAT)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_floats(device, opcode):
    count = 1 if opcode.startswith(("neg", "abs")) else 3 if opcode.startswith("fma") else 2
    found = probes.run(device, one(opcode, count), FLOATS[:count])[0].view(np.float32)
    wanted = FLOAT[opcode](*FLOATS[:count])
    np.testing.assert_array_equal(found, wanted)
    if opcode != "max.f32":
        there = ~np.isnan(wanted)
        np.testing.assert_array_equal(np.signbit(found[there]), np.signbit(wanted[there]))


def test_ex2_is_a_power_of_two_within_two_units_of_the_last_place(device):
    x = np.concatenate([[0, -np.inf, np.inf, np.nan, -126, -127, 1e-40], np.linspace(-30, 4, 25)]).astype(np.float32)
    found = probes.run(device, one("ex2.approx.ftz.f32", 1), [x])[0].view(np.float32)
    wanted = flush(np.exp2(x.astype(np.float64)).astype(np.float32))
    np.testing.assert_array_max_ulp(found[~np.isnan(x)], wanted[~np.isnan(x)], 2)
    assert found[3] != found[3]


def test_division(device):
    a, b = WORDS[0], np.where(WORDS[1] == 0, 7, WORDS[1]).astype(np.uint32)
    wanted = np.trunc(signed(a) / signed(b).astype(np.longdouble)).astype(np.int64).astype(np.uint32)
    np.testing.assert_array_equal(probes.run(device, one("div.s32", 2), [a, b])[0], wanted)
    with pytest.raises(RefusedError, match="divided by zero"):
        probes.run(device, one("div.s32", 2), [a, np.zeros_like(a)])


def test_tf32_rounds_ties_away_from_zero(device):
    ties = np.array([0x3F801000, 0xBF801000, 0x3F803000, 0x3F800FFF], np.uint32).view(np.float32)
    x = np.concatenate([ties, [0, -0.0, np.inf, 1e-40], RANDOM.standard_normal(24)]).astype(np.float32)
    found = probes.run(device, one("cvt.rna.tf32.f32", 1), [x])[0].view(np.float32)
    _, exponent = np.frexp(np.where(np.isfinite(x), x, 0).astype(np.float64))
    exponent = np.maximum(exponent, -125)  # below it lie subnormal numbers, whose last place is fixed
    scaled = np.ldexp(x.astype(np.float64), 11 - exponent)
    wanted = np.ldexp(np.copysign(np.floor(np.abs(scaled) + 0.5), x), exponent - 11)
    np.testing.assert_array_equal(found[np.isfinite(x)], wanted[np.isfinite(x)].astype(np.float32))
    assert found[6] == np.inf


@pytest.mark.parametrize(("opcode", "dtype"), [("f16x2", np.float16), ("bf16x2", ml_dtypes.bfloat16)])
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_pairs_of_16_bits_round_to_nearest_even(device, opcode, dtype):
    special = [65504, 65519, 65520, -65536, 6e-8, 2.9e-8, 3e-8, 1e-10, 1 + 2**-11, 1 + 3 * 2**-11, np.inf, 1 + 2**-8]
    upper = np.concatenate([special, RANDOM.standard_normal(20)]).astype(np.float32)
    lower = np.concatenate([RANDOM.standard_normal(20) * 1e-6, special]).astype(np.float32)
    found = probes.run(device, one(f"cvt.rn.{opcode}.f32", 2), [upper, lower])[0]
    np.testing.assert_array_equal(found >> 16, upper.astype(dtype).view(np.uint16))
    np.testing.assert_array_equal(found & 0xFFFF, lower.astype(dtype).view(np.uint16))


def test_integers_to_floats_round_to_nearest_even(device):
    found = probes.run(device, one("cvt.rn.f32.s32", 1), [WORDS[0]])[0].view(np.float32)
    np.testing.assert_array_equal(found, signed(WORDS[0]).astype(np.float32))
    found = probes.run(device, one("cvt.rn.f32.u32", 1), [WORDS[0]])[0].view(np.float32)
    np.testing.assert_array_equal(found, WORDS[0].astype(np.float32))


INTEGER_COMPARISONS = {"lt.s32": np.less, "le.s32": np.less_equal, "gt.s32": np.greater, "ge.s32": np.greater_equal}
WORD_COMPARISONS = {
    "lt.u32": np.less, "gt.u32": np.greater, "ge.u32": np.greater_equal, "eq.b32": np.equal, "ne.b32": np.not_equal
}  # fmt: skip
FLOAT_COMPARISONS = {
    "lt.f32": np.less,
    "le.f32": np.less_equal,
    "gt.f32": np.greater,
    "ge.f32": np.greater_equal,
    "eq.f32": np.equal,
    "num.f32": lambda a, b: ~np.isnan(a) & ~np.isnan(b),
}


@pytest.mark.parametrize("kind", [*INTEGER_COMPARISONS, *WORD_COMPARISONS, *FLOAT_COMPARISONS])
def test_comparisons_and_selection(device, kind):
    is_float = kind in FLOAT_COMPARISONS
    a, b = FLOATS[:2] if is_float else (WORDS[0], np.where(SMALL > 20, WORDS[0], WORDS[1]))
    function = {**INTEGER_COMPARISONS, **WORD_COMPARISONS, **FLOAT_COMPARISONS}[kind]
    view = signed if kind in INTEGER_COMPARISONS else lambda x: x
    body = f"setp.{kind} %p1, %r1, %r2;\nsetp.lt.s32 %p2, %r0, 20;\nand.pred %p3, %p1, %p2;\nselp.b32 %r100, 7, 9, %p3;"
    wanted = np.where(function(view(a), view(b)) & (np.arange(32) < 20), 7, 9)
    np.testing.assert_array_equal(probes.run(device, body, [a, b])[0], wanted)


def test_16_bits(device):
    body = """
        cvt.u16.u32 %rs1, %r1;
        and.b16 %rs2, %rs1, 4095;
        shl.b16 %rs3, %rs2, 7;
        shr.u16 %rs4, %rs1, 3;
        or.b16 %rs5, %rs3, %rs4;
        cvt.u32.u16 %r100, %rs5;
    """
    half = WORDS[2] & 0xFFFF
    np.testing.assert_array_equal(probes.run(device, body, [WORDS[2]])[0], ((half & 4095) << 7 & 0xFFFF) | half >> 3)


def test_addresses_of_64_bits(device):
    """Each lane reads another's word at an address made in five ways; all must be the same."""
    body = """
        mul.wide.s32 %rd8, %r1, 4;
        add.s64 %rd9, %rd1, %rd8;
        ld.global.b32 { %r100 }, [ %rd9 + 128 ];
        mad.wide.u32 %rd9, %r1, 4, %rd1;
        ld.global.b32 { %r101 }, [ %rd9 + 128 ];
        cvt.s64.s32 %rd8, %r1;
        shl.b64 %rd8, %rd8, 2;
        add.s64 %rd9, %rd8, %rd1;
        ld.global.b32 { %r102 }, [ %rd9 + 128 ];
        cvt.u64.u32 %rd8, %r1;
        mul.lo.s64 %rd8, %rd8, 4;
        add.s64 %rd9, %rd8, %rd1;
        ld.global.b32 { %r103 }, [ %rd9 + 128 ];
        mul.wide.u32 %rd8, %r1, 4;
        add.s64 %rd9, %rd8, %rd1;
        ld.global.b32 { %r104 }, [ %rd9 + 128 ];
        sub.s32 %r180, %r1, 32;
        mad.wide.s32 %rd9, %r180, 4, %rd1;
        ld.global.b32 { %r105 }, [ %rd9 + 256 ];
    """
    other = RANDOM.permutation(32).astype(np.uint32)
    found = probes.run(device, body, [other, WORDS[1]], outputs=6)
    np.testing.assert_array_equal(found, np.tile(WORDS[1][other], (6, 1)))


def test_shuffles_and_sums_of_a_warp(device):
    body = """
        shfl.sync.bfly.b32 %r100, %r1, 5, 31, -1;
        shfl.sync.idx.b32 %r101, %r1, %r2, 31, -1;
        redux.sync.add.s32 %r102, %r1, -1;
        redux.sync.min.s32 %r103, %r1, -1;
        shfl.sync.up.b32 %r104, %r1, 3, 0, -1;
        mov.u32 %r105, %nctaid.x;
    """
    lane = np.arange(32)
    source = RANDOM.integers(0, 32, 32).astype(np.uint32)
    found = probes.run(device, body, [WORDS[0], source], outputs=6)
    np.testing.assert_array_equal(found[3], np.full(32, signed(WORDS[0]).min()).view(np.uint32))
    np.testing.assert_array_equal(found[4], WORDS[0][np.where(lane < 3, lane, lane - 3)])
    np.testing.assert_array_equal(found[5], np.ones(32))
    np.testing.assert_array_equal(found[0], WORDS[0][lane ^ 5])
    np.testing.assert_array_equal(found[1], WORDS[0][source])
    np.testing.assert_array_equal(found[2], np.full(32, WORDS[0].sum(dtype=np.uint32)))


MMA = {
    "f16": ("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32", np.float16, 16),
    "bf16": ("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32", ml_dtypes.bfloat16, 16),
    "tf32": ("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32", np.float32, 8),
}


def multiply(device, kind, a, b, c):
    opcode, dtype, _ = MMA[kind]
    words = np.uint32 if kind == "tf32" else np.uint16
    fragments = probes.of_fragments(
        kind, a.astype(dtype).view(words), b.astype(dtype).view(words), c.astype(np.float32)
    )
    body = f"""
        {opcode} {{ %r100, %r101, %r102, %r103 }}, {{ %r1, %r2, %r3, %r4 }}, {{ %r5, %r6 }}, {{ %r7, %r8, %r9, %r10 }};
    """
    return probes.of_result(probes.run(device, body, fragments, outputs=4))


@pytest.mark.parametrize("kind", MMA)
def test_mma_is_a_product_of_matrices(device, kind):
    dtype, k = MMA[kind][1:]
    a, b = (RANDOM.standard_normal(shape).astype(dtype).astype(np.float32) for shape in ((16, k), (k, 8)))
    c = RANDOM.standard_normal((16, 8)).astype(np.float32)
    read = (lambda x: (x.view(np.uint32) & 0xFFFFE000).view(np.float32)) if kind == "tf32" else lambda x: x
    exact = read(a).astype(np.float64) @ read(b).astype(np.float64) + c
    np.testing.assert_array_equal(multiply(device, kind, a, b, c), exact.astype(np.float32))
    device.set(on={"TRUNCATE": True})  # each of two sums loses less than its 9 terms' and its own last place
    cut = multiply(device, kind, a, b, c)
    largest = (np.abs(read(a)).max() * np.abs(read(b)).max()) * k + np.abs(c).max()
    assert 0 < np.abs(cut - exact).max() <= 2 * 10 * largest * 2**-23


@pytest.mark.parametrize("kind", MMA)
def test_mma_cuts_what_lies_far_below_the_largest_term(device, kind):
    k = MMA[kind][2]
    a, b, c = np.full((16, k), 2.0**-13), np.full((k, 8), 2.0**-12), np.ones((16, 8))
    assert (multiply(device, kind, a, b, c) == np.float32(1 + k * 2**-25)).all()
    device.set(on={"TRUNCATE": True})
    assert (multiply(device, kind, a, b, c) == 1).all()
