"""Single PTX instructions on predicates, 8, 16 and 64 bits against NumPy, beside those of test_emulator_instructions.py."""

import ml_dtypes
import numpy as np
import probes
import pytest
from test_emulator_instructions import RANDOM, SMALL, WORDS, flush, one


def test_predicates(device):
    body = """
        setp.lt.s32 %p1, %r1, 20;
        setp.lt.s32 %p2, %r2, 20;
        or.pred %p3, %p1, %p2;
        xor.pred %p4, %p1, %p2;
        mov.pred %p5, -1;
        xor.pred %p5, %p5, %p3;
        mov.pred %p6, %p4;
        mov.pred %p1, 0;
        selp.b32 %r100, 1, 0, %p3;
        selp.b32 %r101, 1, 0, %p6;
        selp.b32 %r102, 1, 0, %p5;
        selp.b32 %r103, 1, 0, %p1;
    """
    a, b = SMALL < 20, SMALL[::-1] < 20
    found = probes.run(device, body, [SMALL, SMALL[::-1]], outputs=4)
    np.testing.assert_array_equal(found, [a | b, a ^ b, ~(a | b), np.zeros(32)])


WIDE = {
    "min.s64": np.minimum,
    "max.s64": np.maximum,
    "or.b64": np.bitwise_or,
    "sub.s64": np.subtract,
    "mad.lo.s64": lambda a, b: a * b + b,
}


@pytest.mark.parametrize("opcode", WIDE)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_64_bits(device, opcode):
    """Each lane reads two numbers, and writes one and what comparisons say of the two."""
    third = ", %rd10" if opcode.startswith("mad") else ""
    body = f"""
        mul.wide.s32 %rd8, %r0, 8;
        add.s64 %rd8, %rd1, %rd8;
        ld.global.b64 {{ %rd9 }}, [ %rd8 + 0 ];
        ld.global.b64 {{ %rd10 }}, [ %rd8 + 256 ];
        {opcode} %rd11, %rd9, %rd10{third};
        setp.lt.s64 %p1, %rd9, %rd10;
        setp.ne.b64 %p2, %rd9, %rd10;
        mov.b64 %rd12, %rd11;
        cvt.u32.u64 %r100, %rd12;
        mov.u64 %rd13, 0x100000000;
        selp.b32 %r101, 1, 0, %p1;
        selp.b32 %r102, 1, 0, %p2;
    """
    a, b = (np.stack(words, 1).view(np.int64)[:, 0].copy() for words in ((WORDS[0], WORDS[1]), (WORDS[2], WORDS[0])))
    b[::3] = a[::3]
    found = probes.run(device, body, [*np.concatenate([a, b]).view(np.uint32).reshape(4, 32)], outputs=3)
    np.testing.assert_array_equal(found[0], WIDE[opcode](a, b).astype(np.uint64).astype(np.uint32))
    np.testing.assert_array_equal(found[1], a < b)
    np.testing.assert_array_equal(found[2], a != b)


def test_bytes_and_halves_in_memory(device):
    """What is narrower than a register fills it up with zeros; a store writes no more than it says."""
    body = """
        mul.wide.s32 %rd8, %r0, 4;
        add.s64 %rd8, %rd1, %rd8;
        ld.global.b8 { %rs1 }, [ %rd8 + 1 ];
        ld.global.b16 { %rs2 }, [ %rd8 + 2 ];
        setp.ne.b16 %p1, %rs1, %rs2;
        selp.b16 %rs3, %rs1, %rs2, %p1;
        mov.b16 %rs4, %rs3;
        cvt.u32.u16 %r100, %rs4;
        shl.b32 %r180, %r0, 3;
        st.shared.b32 [%r180], %r1;
        st.shared.v2.b8 [%r180+4], {%rs1, %rs2};
        mov.u16 %rs5, 7;
        st.shared.v2.b8 [%r180+6], {%rs5, %rs5};
        bar.sync 0;
        ld.shared.b16 %r101, [%r180+2];
        ld.shared.b8 %rs6, [%r180+3];
        cvt.u32.u16 %r102, %rs6;
        ld.shared.b32 %r103, [%r180+4];
        st.shared.b16 [%r180+4], %rs1;
        ld.shared.b32 %r106, [%r180+4];
        ld.shared.b16 %rs7, [%r180+2];
        cvt.u32.u16 %r107, %rs7;
        ld.shared.v4.b16 {%rs1, %rs2, %rs3, %rs4}, [%r180];
        cvt.u32.u16 %r104, %rs2;
        mov.b64 %rd9, %rd8;
        st.global.b16 [ %rd8 + 2 ], { %rs1 };
        ld.global.b32 { %r105 }, [ %rd9 + 0 ];
    """
    words = WORDS[1]
    second, upper = words >> 8 & 0xFF, words >> 16
    found = probes.run(device, body, [words], outputs=8, shared=256)
    np.testing.assert_array_equal(found[0], np.where(second != upper, second, upper))
    np.testing.assert_array_equal(found[1], upper)
    np.testing.assert_array_equal(found[2], words >> 24)
    np.testing.assert_array_equal(found[3], second | (upper & 0xFF) << 8 | 0x07070000)
    np.testing.assert_array_equal(found[4], upper)
    np.testing.assert_array_equal(found[5], words & 0xFFFF | words << 16)
    np.testing.assert_array_equal(found[6], second | 0x07070000)
    np.testing.assert_array_equal(found[7], upper)


def test_pairs_in_memory_and_small_copies(device):
    body = """
        mul.wide.s32 %rd8, %r0, 8;
        add.s64 %rd8, %rd1, %rd8;
        ld.global.v2.b32 { %r180, %r181 }, [ %rd8 + 0 ];
        shl.b32 %r182, %r0, 4;
        ld.global.b64 { %rd9 }, [ %rd8 + 256 ];
        st.shared.v2.b64 [%r182], {%rd9, %rd8};
        bar.sync 0;
        ld.shared.v2.b64 {%rd10, %rd11}, [%r182];
        cvt.u32.u64 %r102, %rd10;
        st.global.v2.b32 [ %rd11 + 0 ], { %r181, %r180 };
        ld.global.v2.b32 { %r100, %r101 }, [ %rd8 + 0 ];
        bar.sync 0;
        cp.async.ca.shared.global [ %r182 + 0 ], [ %rd8 + 256 ], 0x8, 8;
        cp.async.commit_group;
        cp.async.wait_group 0;
        bar.sync 0;
        ld.shared.b32 %r103, [%r182+4];
    """
    words = RANDOM.integers(0, 2**32, (4, 32), np.uint32)
    found = probes.run(device, body, [*words], outputs=4, shared=512)
    pairs = words.reshape(2, 32, 2)
    np.testing.assert_array_equal(found[:2], pairs[0].T[::-1])
    np.testing.assert_array_equal(found[2:], pairs[1].T)


def test_halves_of_a_register(device):
    body = "mov.b32 {%rs1, %rs2}, %r1;\nmov.b32 %r100, {%rs2, %rs1};\ncvt.u32.u16 %r101, %rs1;"
    found = probes.run(device, body, [WORDS[1]], outputs=2)
    np.testing.assert_array_equal(found, [WORDS[1] >> 16 | WORDS[1] << 16, WORDS[1] & 0xFFFF])


@pytest.mark.parametrize(("name", "dtype"), [("f16", np.float16), ("bf16", ml_dtypes.bfloat16)])
def test_16_bits_to_floats(device, name, dtype):
    body = f"cvt.u16.u32 %rs1, %r1;\ncvt.f32.{name} %r100, %rs1;"
    half = np.concatenate([[0, -0.0, np.inf, -np.inf, 6e-8, 65504], RANDOM.standard_normal(26)]).astype(dtype)
    found = probes.run(device, body, [half.view(np.uint16).astype(np.uint32)])[0].view(np.float32)
    np.testing.assert_array_equal(found, half.astype(np.float32))
    body = f"cvt.rn.{name}.f32 %rs1, %r1;\ncvt.u32.u16 %r100, %rs1;"
    whole = np.concatenate([[0, -0.0, np.inf, 1 + 2**-11, 70000, 1e-7], RANDOM.standard_normal(26)]).astype(np.float32)
    with np.errstate(over="ignore"):
        wanted = whole.astype(dtype).view(np.uint16)
    np.testing.assert_array_equal(probes.run(device, body, [whole])[0], wanted)


def test_roots(device):
    x = np.concatenate([[0, np.inf, 1e-40, 1, 4], RANDOM.uniform(1e-30, 1e30, 27)]).astype(np.float32)
    found = probes.run(device, one("rsqrt.approx.ftz.f32", 1), [x])[0].view(np.float32)
    with np.errstate(divide="ignore"):
        np.testing.assert_array_max_ulp(found, (1 / np.sqrt(flush(x).astype(np.float64))).astype(np.float32), 2)
    found = probes.run(device, one("sqrt.approx.ftz.f32", 1), [x])[0].view(np.float32)
    np.testing.assert_array_max_ulp(found, np.sqrt(flush(x)), 2)
