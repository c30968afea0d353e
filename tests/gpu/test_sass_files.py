"""What a cubin says of its kernel, against the manifest and what hosts pass; broken files; machine code beside PTX."""

import ctypes
import struct

import emulation
import probes
import pytest
import torch
from emulated_gpu import RefusedError
from machine_code import MachineCode, compiled

from adtp_export.plugins import binaries, driver
from adtp_export.plugins.variants import ARCHITECTURES, SYMBOLS

VARIANTS = emulation.variants()
LIKE_PTX = ("sm_80", "sm_86", "sm_87", "sm_89")
"""Triton makes the same PTX for these as for the driver's compiler, so that results are the same to the bit."""

MAX_THREADS, SHARED_BYTES, LOCAL_BYTES, REGISTERS = 0, 1, 3, 4  # CUfunction_attribute


def by_turns(entry, architectures):
    return architectures[int(entry["binaries"]["ptx"]["sha256"][:8], 16) % len(architectures)]


def parameters_of(device, kernel):
    found, offset, size = [], ctypes.c_size_t(), ctypes.c_size_t()
    while device.driver.cuFuncGetParamInfo(kernel, len(found), ctypes.byref(offset), ctypes.byref(size)) == 0:
        found.append((offset.value, size.value))
    return found


@pytest.mark.parametrize("entry", VARIANTS, ids=lambda e: e["name"])
def test_kernels_take_what_hosts_pass(device, entry):
    code = by_turns(entry, ARCHITECTURES)
    device.set(emulation.capability_of(code))
    kernel = device.load(binaries.binary(entry["name"], code).data, SYMBOLS[entry["kernel"]])
    call = driver.Call(**dict.fromkeys(("q", "k", "v", "cu_seqlens", "out", "row_stride", "tokens", "sequences"), 0),
                       num_heads=1, head_size=32, dtype="fp16", scale=1.0)  # fmt: skip
    types = driver.arguments(call, entry["kernel"])[1]
    layout = type("Layout", (ctypes.Structure,), {"_fields_": [(f"a{i}", kind) for i, kind in enumerate(types)]})
    fields = [getattr(layout, f"a{i}") for i in range(len(types))]
    assert parameters_of(device, kernel) == [(field.offset, field.size) for field in fields]
    value, said = ctypes.c_int(), {}
    for attribute in (MAX_THREADS, SHARED_BYTES, LOCAL_BYTES, REGISTERS):
        device.call("cuFuncGetAttribute", ctypes.byref(value), attribute, kernel)
        said[attribute] = value.value
    wanted = entry["binaries"][code]
    assert said == {MAX_THREADS: entry["threads"], SHARED_BYTES: 0, LOCAL_BYTES: wanted["stack_bytes"],
                    REGISTERS: wanted["registers"]}  # fmt: skip


def results(device, entry, data, chosen):
    runner = emulation.Runner(device)
    return runner.run(data, entry["dtype"], chosen)[-1].view(torch.uint8)


def with_lse(entry, code):
    return [binaries.binary(e["name"], code) for e in (emulation.lse_of(entry), entry) if e]


@pytest.mark.parametrize("entry", VARIANTS, ids=lambda e: e["name"])
def test_machine_code_gives_the_bits_of_ptx(device, entry):
    code = by_turns(entry, LIKE_PTX)
    data = emulation.make(emulation.small_cases(entry["kernel"], entry["block_m"])[0], entry["dtype"], entry["head_size"])
    device.set(emulation.capability_of("ptx"))
    wanted = results(device, entry, data, with_lse(entry, "ptx"))
    device.set(emulation.capability_of(code))
    assert torch.equal(results(device, entry, data, with_lse(entry, code)), wanted)


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("entry", VARIANTS, ids=lambda e: e["name"])
def test_shipped_ptx_compiled_for_a_gpu_gives_its_bits(device, entry, architecture):
    """As a driver would compile it: whatever instructions ptxas takes, they do what the PTX does."""
    data = emulation.make(emulation.small_cases(entry["kernel"], entry["block_m"])[0], entry["dtype"], entry["head_size"])
    chosen = with_lse(entry, "ptx")
    device.set(emulation.capability_of("ptx"))
    wanted = results(device, entry, data, chosen)
    device.set(emulation.capability_of(architecture))
    chosen = [binaries.Binary(**{**vars(b), "data": compiled(b.data, architecture)}) for b in chosen]
    assert torch.equal(results(device, entry, data, chosen), wanted)


@pytest.fixture
def ampere(device, tmp_path):
    return MachineCode(device, "sm_80", tmp_path / "log")


def section_headers(image):
    table, = struct.unpack_from("<Q", image, 40)
    size, count, _ = struct.unpack_from("<HHH", image, 58)
    return [table + size * i for i in range(count)]


def test_files_that_make_no_sense_are_refused(ampere):
    image = ampere.image("mov.u32 %r100, %r1;", 1)
    with pytest.raises(RefusedError, match="no kernel nobody"):
        ampere.device.load(image, "nobody")
    for header in section_headers(image)[1:]:
        broken = bytearray(image)
        struct.pack_into("<Q", broken, header + 24, 2**40)  # where the section lies
        with pytest.raises(RefusedError, match="the file ends before|nvdisasm refuses it|no kernel probe"):
            ampere.device.load(bytes(broken), "probe")
    with pytest.raises(RefusedError, match="no kernel image is available"):
        ampere.device.load(MachineCode(ampere.device, "sm_89", ampere.log).image("", 0), "probe")


REFUSED = {
    "an instruction": ("clz.b32 %r100, %r1;", "machine code not known: instruction FLO in: FLO"),
    "a function": ("sin.approx.ftz.f32 %r100, %r1;", "function SIN in: MUFU.SIN"),
    "a modifier": ("add.rz.ftz.f32 %r100, %r1, %r2;", r"modifier \.FTZ in: FADD.FTZ.RZ"),
    "a type": ("min.u32 %r100, %r1, %r2;", r"modifier \.U32 in: IMNMX.U32"),
    "a special register": ("mov.u32 %r100, %laneid;", "special register SR_LANEID"),
    "a word that is no parameter": ("mov.u32 %r100, %nctaid.x;", "constant bank: word 12 is no parameter"),
    "another barrier": ("bar.sync 1;", "number of the barrier in: BAR.SYNC.DEFER_BLOCKING 0x1"),
    "a carry of a difference": ("sub.cc.u32 %r180, %r1, %r2;\nsubc.u32 %r100, %r2, %r1;", "carry of a difference"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_known_is_refused_when_it_is_loaded(ampere, name):
    body, words = REFUSED[name]
    with pytest.raises(RefusedError, match=words):
        ampere.run(body, [emulation.np.ones(probes.LANES, "u4")] * 2)


LOOP = "mov.u32 %r100, 0;\n$L_a:\nadd.s32 %r100, %r100, 1;\nld.global.b32 {%r180}, [%rd3];\nsetp.lt.s32 %p1, %r100, %r180;\n@%p1 bra $L_a;"
FAULTS = {
    "behind an allocation": ("ld.global.b32 { %r100 }, [ %rd3 + 128 ];", "ends 4 bytes behind an allocation of 128.*: LDG"),
    "misaligned": ("ld.global.b32 { %r100 }, [ %rd3 + 2 ];", "not aligned to 4 bytes.*: LDG"),
    "lanes disagree on memory": ("st.global.b32 [ %rd2 + 0 ], { %r0 };", "two lanes write different values.*: STG"),
    "lanes part ways": (LOOP, "a branch that lanes of a warp disagree on"),
    "no end": (LOOP.replace("%r100, %r180", "%r100, 2000000"), "does not end"),
    "a shuffle of some lanes": ("setp.lt.s32 %p1, %r0, 7;\n@%p1 ret;\nshfl.sync.bfly.b32 %r100, %r1, 1, 31, -1;", "SHFL by some lanes only"),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_faults_say_what_and_where(ampere, name):
    body, words = FAULTS[name]
    ampere.set({}, most=10_000)
    with pytest.raises(RefusedError, match=rf"{words}.*\[block 0, warp 0|\[block 0, warp 0: {words}"):
        ampere.run(body, [emulation.np.arange(probes.LANES, dtype="u4")])


def test_a_barrier_that_some_warps_do_not_reach(ampere):
    body = "setp.lt.s32 %p1, %r0, 32;\n@%p1 bra $L_end;\nbar.sync 0;\n$L_end:"
    with pytest.raises(RefusedError, match="a barrier that only 1 of 2 warps reach"):
        ampere.run(body, [emulation.np.arange(64, dtype="u4")], threads=64)
