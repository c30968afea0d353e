"""What the emulator allows of memory, barriers and asynchronous copies, and what it faults on; matrices out of memory."""

import ctypes

import numpy as np
import probes
import pytest
from emulated_gpu import RefusedError

WORDS = np.arange(32, dtype=np.uint32) * 0x01010101 + 7


def fault(device, body, match, threads=32, shared=1024, words=1):
    inputs = [np.resize(WORDS, threads) for _ in range(words)]
    with pytest.raises(RefusedError, match=match):
        probes.run(device, body, inputs, threads=threads, shared=shared)


ADDRESS = "shl.b32 %r180, %r0, 2;"


def through_shared(*between):
    """Write a word for each thread, do something, read the word of the thread opposite."""
    return "\n".join(
        [
            ADDRESS,
            "st.shared.b32 [%r180], {%r1};",
            *between,
            "xor.b32 %r181, %r180, 252;",
            "ld.shared.b32 %r100, [%r181];",
        ]
    )


def test_warps_exchange_words_across_a_barrier(device):
    words = np.arange(64, dtype=np.uint32)
    for reverse in (False, True):
        device.set(on={"REVERSE": reverse})
        found = probes.run(device, through_shared("bar.sync 0;"), [words], threads=64, shared=256)
        np.testing.assert_array_equal(found[0], words[::-1])


def test_a_missing_barrier_is_a_race(device):
    fault(device, through_shared(), "nobody wrote|race: reads what another warp wrote", threads=64)
    twice = through_shared("bar.sync 0;") + "\nst.shared.b32 [%r180], {%r0};"
    fault(device, twice, "race: ", threads=64)
    same_place = "mov.u32 %r180, 0;\nst.shared.b32 [%r180], {%r181};"
    fault(device, "shr.u32 %r181, %r0, 5;\n" + same_place, "race: two warps write different values", threads=64)
    device.set(on={"NO_RACES": True})
    probes.run(device, "shr.u32 %r181, %r0, 5;\n" + same_place, [np.resize(WORDS, 64)], threads=64, shared=256)


def test_two_warps_may_write_the_same_value(device):
    body = "mov.u32 %r180, 0;\nst.shared.b32 [%r180], {%r180};\nbar.sync 0;\nld.shared.b32 %r100, [%r180];"
    assert (probes.run(device, body, [np.resize(WORDS, 64)], threads=64, shared=256) == 0).all()


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("word", [0, 9 << 16])
def test_each_byte_has_its_own_writer(device, reverse, word):
    """One warp writes two bytes, the next what the other two have already, and the third may not change those."""
    device.set(on={"REVERSE": reverse})
    store = "mov.b32 {{%rs1, %rs2}}, %r{0};\n@%p{1} st.shared.v2.b8 [%r180+{2}], {{%rs1, %rs2}};"
    body = "\n".join(
        [
            "mov.u32 %r180, 0;\nmov.u32 %r182, 0;\nst.shared.b32 [%r180], {%r182};\nbar.sync 0;",
            "shr.u32 %r181, %r0, 5;",
            *(f"setp.eq.b32 %p{1 + warp}, %r181, {warp};" for warp in range(3)),
            f"mov.u32 %r183, 5;\nmov.u32 %r184, {word};",
            store.format(183, 1, 0),
            store.format(182, 2, 2),
            store.format(184, 3, 2),
        ]
    )
    if word:
        fault(device, body, "race: two warps write different values", threads=96)
    else:
        probes.run(device, body, [np.resize(WORDS, 96)], threads=96, shared=4)


def test_blocks_run_in_both_orders(device):
    """Blocks that write to one place: who comes last is seen."""
    kernel = device.load(probes.program("mov.u32 %r100, %ctaid.x;", 1, 1), "probe")
    for reverse, last in ((False, 2), (True, 0)):
        device.set(on={"REVERSE": reverse})
        with device.memory(WORDS, WORDS) as addresses:
            device.launch(kernel, 3, 32, 0, addresses, (ctypes.c_uint64, ctypes.c_uint64))
            assert (device.download(addresses[1], WORDS) == last).all()


FAULTS = {
    "shared memory that nobody wrote": ("ld.shared.b32 %r100, [%r0+4];".replace("%r0", "%r180"), "nobody wrote"),
    "after shared memory": (
        "st.shared.b32 [%r180+1024], {%r1};",
        "4 bytes at shared address 1024; the block has 0 to 1024",
    ),
    "shared memory, misaligned": ("st.shared.v2.b32 [%r180], {%r1, %r1};", "shared address 4 is not aligned to 8"),
    "lanes disagree": ("mov.u32 %r180, 0;\nst.shared.b32 [%r180], {%r0};", "two lanes write different values"),
    "after an allocation": ("ld.global.b32 { %r100 }, [ %rd3 + 128 ];", "ends 4 bytes after an allocation of 128"),
    "before an allocation": ("ld.global.b32 { %r100 }, [ %rd1 + -4 ];", "before all allocations|after an allocation"),
    "global memory, misaligned": ("ld.global.b32 { %r100 }, [ %rd3 + 2 ];", "not aligned to 4 bytes"),
    "lanes disagree globally": ("st.global.b32 [ %rd2 + 0 ], { %r0 };", "two lanes write different values"),
    "lanes part ways": ("setp.lt.s32 %p1, %r0, 9;\n@%p1 bra $L_end;\n$L_end:", "divergent branch"),
    "no end": ("$L_again:\nbra.uni $L_again;", "does not end"),
    "a shuffle of some lanes": ("shfl.sync.bfly.b32 %r100, %r1, 1, 31, 7;", "only with all 32 lanes"),
    "a barrier of its own": ("bar.sync 1;", "only barrier 0"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_faults_say_what_where_and_which_instruction(device, name):
    body, words = FAULTS[name]
    device.set(most=10_000)
    fault(
        device, f"{ADDRESS}\n{body}", rf"unspecified launch failure: .*({words}).* \[block 0(, warp 0)?: .*\] \(719\)"
    )


def test_a_barrier_that_some_warps_do_not_reach(device):
    body = "setp.lt.s32 %p1, %r0, 32;\n@%p1 bra $L_end;\nbar.sync 0;\n$L_end:"
    fault(device, body, "a barrier that only 1 of 2 warps reach", threads=64)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("sin.approx.f32 %r100, %r1;", "PTX instruction not known: sin.approx.f32"),
        ("add.s32.sat %r100, %r1, %r1;", "PTX instruction not known"),
        ("@%p1 add.s32 %r100, %r1, %r1;", "not known under a guard"),
        ("add.s32 %r100, %r1;", "with 2 operands"),
        ("add.s32 %r100, %rd1, %r1;", "operand not known: %rd1"),
        ("add.s64 %rd9, %r1, 4;", "operand not of 64 bits: %r1"),
        ("add.s32 %r100, %r200, %r1;", "register that is not declared: 200 of 200"),
        (".local .b32 x;", "directive not known"),
        ("bra $L_nowhere;", "label that is not there"),
        ("mov.u32 %r100, %clock;", "operand not known: %clock"),
    ],
)
def test_what_is_not_known_is_refused_when_it_is_loaded(device, line, words):
    with pytest.raises(RefusedError, match=words):
        device.load(probes.program(line, 1, 1), "probe")


def test_a_guard_chooses_lanes(device):
    body = """
        setp.lt.s32 %p1, %r0, 5;
        mov.u32 %r100, 1;
        mov.u32 %r101, 1;
        @%p1 ld.global.b32 { %r100 }, [ %rd3 + 0 ];
        @!%p1 ld.global.b32 { %r101 }, [ %rd3 + 0 ];
    """
    found = probes.run(device, body, [WORDS], outputs=2)
    np.testing.assert_array_equal(found, np.where(np.arange(32) < 5, [WORDS, np.ones(32)], [np.ones(32), WORDS]))


@pytest.mark.parametrize("words", [1, 2, 4])
def test_wide_accesses(device, words):
    """Each thread writes its words next to each other, and reads those of the next thread, in one access each."""
    width = "" if words == 1 else f"v{words}."
    into = ", ".join(f"%r{1 + i}" for i in range(words))
    out = ", ".join(f"%r{100 + i}" for i in range(words))
    load = f"ld.shared.{width}b32 {{{out}}}, [%r181];" if words > 1 else "ld.shared.b32 %r100, [%r181];"
    body = f"""
        mul.lo.s32 %r180, %r0, {4 * words};
        st.shared.{width}b32 [%r180], {{{into}}};
        bar.warp.sync -1;
        add.s32 %r181, %r180, {4 * words};
        and.b32 %r181, %r181, {128 * words - 1};
        {load}
    """
    given = [np.arange(32, dtype=np.uint32) + 100 * i for i in range(words)]
    found = probes.run(device, body, given, outputs=words, shared=128 * words)
    np.testing.assert_array_equal(found, [np.roll(x, -1) for x in given])


@pytest.mark.parametrize("transposed", [False, True])
def test_ldmatrix_reads_four_matrices(device, transposed):
    """Lane 8 i + row has the address of a row of matrix i, here in another order than memory's."""
    numbers = np.random.default_rng(1).integers(0, 2**16, (4, 8, 8)).astype(np.uint16)
    rows = numbers.reshape(32, 8).view(np.uint32)  # 4 words each
    order = np.random.default_rng(2).permutation(32).astype(np.uint32)  # where a lane's row lies
    body = f"""
        shl.b32 %r180, %r5, 4;
        st.shared.v4.b32 [%r180+16], {{%r1, %r2, %r3, %r4}};
        bar.warp.sync -1;
        ldmatrix.sync.aligned.m8n8.x4.{"trans." if transposed else ""}shared.b16 {{%r100, %r101, %r102, %r103}}, [%r180+16];
        ldmatrix.sync.aligned.m8n8.x1.shared.b16 {{%r104}}, [%r180+16];
    """
    found = probes.run(device, body, [*np.ascontiguousarray(rows.T), order], outputs=5, shared=528)
    lane = np.arange(32)
    for i in range(5):
        matrix = numbers[0] if i == 4 else numbers[i].T if transposed else numbers[i]
        pair = [matrix[lane >> 2, 2 * (lane & 3) + j].astype(np.uint32) for j in range(2)]
        np.testing.assert_array_equal(found[i], pair[0] | pair[1] << 16)


COPY = """
    shl.b32 %r180, %r0, 4;
    mad.wide.s32 %rd8, %r0, 16, %rd1;
    cp.async.cg.shared.global [ %r180 + 0 ], [ %rd8 + 0 ], 0x10, %r5;
    cp.async.commit_group;
"""
READ = "ld.shared.v4.b32 {%r100, %r101, %r102, %r103}, [%r180];"


@pytest.mark.parametrize("early", [False, True])
def test_cp_async_fills_with_zeros_after_what_is_read(device, early):
    device.set(on={"EARLY": early})
    numbers = np.random.default_rng(3).integers(1, 2**32, (4, 32), np.uint32)
    valid = np.array([16, 0, 4, 8] * 8, np.uint32)
    found = probes.run(device, f"{COPY}cp.async.wait_group 0;\n{READ}", [*numbers, valid], outputs=4, shared=512)
    wanted = np.where(np.arange(4) * 4 < valid[:, None], numbers.reshape(32, 4), 0)
    np.testing.assert_array_equal(found.T, wanted)


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize(
    ("between", "words"),
    [
        ("", "reads a word that cp.async is still writing"),
        ("cp.async.wait_group 1;", "reads a word that cp.async is still writing"),  # one group may be under way
        ("st.shared.b32 [%r180], {%r1};", "writes a word that cp.async is still writing"),
    ],
)
def test_memory_that_is_being_copied_must_be_left_alone(device, early, between, words):
    device.set(on={"EARLY": early})
    valid = np.full(32, 16, np.uint32)
    with pytest.raises(RefusedError, match=words):
        probes.run(device, f"{COPY}{between}\n{READ}", [WORDS] * 4 + [valid], outputs=4, shared=512)


def test_groups_are_waited_for_in_their_order(device):
    body = f"""{COPY}
        cp.async.cg.shared.global [ %r180 + 512 ], [ %rd8 + 0 ], 0x10, %r5;
        cp.async.commit_group;
        cp.async.wait_group 1;
        {READ}
    """
    valid = np.full(32, 16, np.uint32)
    given = [WORDS + i for i in range(4)]
    found = probes.run(device, body, [*given, valid], outputs=4, shared=1024)
    np.testing.assert_array_equal(found.T, np.array(given).reshape(32, 4))
    with pytest.raises(RefusedError, match="still writing"):
        probes.run(device, body.replace("[%r180];", "[%r180+512];"), [*given, valid], outputs=4, shared=1024)


def test_what_was_copied_needs_a_barrier_for_other_warps(device):
    body = COPY + "cp.async.wait_group 0;\nBARRIER\nxor.b32 %r180, %r180, 512;\n" + READ
    given = [np.resize(WORDS, 64) + i for i in range(4)] + [np.full(64, 16, np.uint32)]
    found = probes.run(device, body.replace("BARRIER", "bar.sync 0;"), given, outputs=4, threads=64, shared=1024)
    assert (found[:, :32] != found[:, 32:]).any()
    with pytest.raises(RefusedError, match="race|nobody wrote"):
        probes.run(device, body.replace("BARRIER", ""), given, outputs=4, threads=64, shared=1024)
