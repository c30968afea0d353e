"""What a cubin says of its kernel, against the manifest and what hosts pass; broken files; machine code beside PTX."""

import ctypes
import struct

import emulation
import numpy as np
import probes
import pytest
import torch
from emulated_gpu import RefusedError
from machine_code import MachineCode, compiled
from test_emulated_kernels import architecture_of

from adtp_export.plugins import binaries, driver
from adtp_export.plugins.variants import ARCHITECTURES, SYMBOLS

VARIANTS = emulation.variants()
LIKE_PTX = ("sm_80", "sm_86", "sm_87", "sm_89")
"""For these Triton writes the PTX that is shipped; for others it writes other PTX, with sums in another order."""

MAX_THREADS, SHARED_BYTES, LOCAL_BYTES, REGISTERS = 0, 1, 3, 4  # CUfunction_attribute


def parameters_of(device, kernel):
    found, offset, size = [], ctypes.c_size_t(), ctypes.c_size_t()
    while device.driver.cuFuncGetParamInfo(kernel, len(found), ctypes.byref(offset), ctypes.byref(size)) == 0:
        found.append((offset.value, size.value))
    return found


@pytest.mark.parametrize("entry", VARIANTS, ids=lambda e: e["name"])
def test_kernels_take_what_hosts_pass(device, entry):
    code = architecture_of(entry)
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


def turns_and_others():
    """The code whose turn it is; the others are slow."""
    for entry in VARIANTS:
        for code in LIKE_PTX:
            marks = () if code == architecture_of(entry) else pytest.mark.slow
            yield pytest.param(entry, code, marks=marks, id=f"{entry['name']}-{code}")


@pytest.mark.parametrize(("entry", "code"), turns_and_others())
def test_machine_code_gives_the_bits_of_ptx(device, entry, code):
    data = emulation.make(
        emulation.small_cases(entry["kernel"], entry["block_m"])[0], entry["dtype"], entry["head_size"]
    )
    device.set(emulation.capability_of("ptx"))
    wanted = results(device, entry, data, with_lse(entry, "ptx"))
    device.set(emulation.capability_of(code))
    assert torch.equal(results(device, entry, data, with_lse(entry, code)), wanted)


@pytest.mark.slow
@pytest.mark.parametrize("architecture", [a for a in ARCHITECTURES if a not in LIKE_PTX])
@pytest.mark.parametrize("entry", VARIANTS, ids=lambda e: e["name"])
def test_shipped_ptx_compiled_for_a_gpu_gives_its_bits(device, entry, architecture):
    """As a driver would compile it: whatever instructions ptxas takes, they do what the PTX does."""
    data = emulation.make(
        emulation.small_cases(entry["kernel"], entry["block_m"])[0], entry["dtype"], entry["head_size"]
    )
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
    (table,) = struct.unpack_from("<Q", image, 40)
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
    newer = MachineCode(ampere.device, "sm_89", ampere.log).image("mov.u32 %r100, %r1;", 1)
    ampere.set({})
    with pytest.raises(RefusedError, match="no kernel image is available"):
        ampere.device.load(newer, "probe")


REFUSED = {
    "an instruction": ("clz.b32 %r100, %r1;", "machine code not known: instruction FLO in: FLO"),
    "a function": ("lg2.approx.ftz.f32 %r100, %r1;", "function [A-Z0-9]+ in: MUFU"),
    "a modifier": ("add.rz.ftz.f32 %r100, %r1, %r2;", r"modifier \.FTZ in: FADD.FTZ.RZ"),
    "a type": ("min.u32 %r100, %r1, %r2;", r"modifier \.U32 in: IMNMX.U32"),
    "a special register": ("mov.u32 %r100, %laneid;", "special register SR_LANEID"),
    "a word that is no parameter": ("mov.u32 %r100, %nctaid.y;", "constant bank: word 16 is no parameter"),
    "another barrier": ("bar.sync 1;", "number of the barrier in: BAR.SYNC.DEFER_BLOCKING 0x1"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_known_is_refused_when_it_is_loaded(ampere, name):
    body, words = REFUSED[name]
    with pytest.raises(RefusedError, match=words):
        ampere.run(body, [np.ones(probes.LANES, np.uint32)] * 2)


PART = "setp.lt.s32 %p1, %r0, COUNT;\n@%p1 bra $L_end;\nbar.sync 0;\n$L_end:"
LOOP = "setp.lt.s32 %p1, %r0, 9;\n$L_a:\nst.global.b32 [%rd4], {%r0};\nbar.sync 0;\nbra.uni $L_a;"
FAULTS = {
    "after an allocation": ("ld.global.b32 { %r100 }, [ %rd3 + 256 ];", "ends 4 bytes after an allocation of 256", "LDG"),
    "misaligned": ("ld.global.b32 { %r100 }, [ %rd3 + 2 ];", "not aligned to 4 bytes", "LDG"),
    "lanes disagree on memory": ("st.global.b32 [ %rd2 + 0 ], { %r0 };", "two lanes write different values", "STG"),
    "lanes part ways": (LOOP.replace("bra", "@%p1 bra"), "a branch that lanes of a warp disagree on", "@"),
    "a barrier for some lanes": (PART.replace("COUNT", "9"), "a barrier that only some lanes of a warp reach", "@"),
    "a barrier for some warps": (PART.replace("COUNT", "32"), "a barrier that only 1 of 2 warps reach", ""),
    "a shuffle of some lanes": (
        "setp.lt.s32 %p1, %r0, 7;\n@%p1 ret;\nshfl.sync.bfly.b32 %r100, %r1, 1, 31, -1;", "SHFL by some lanes only", "SHFL"
    ),
    "no end": (LOOP, "does not end", ""),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_faults_say_what_and_where(ampere, name):
    body, words, instruction = FAULTS[name]
    ampere.set({}, most=10_000)
    with pytest.raises(RefusedError, match=rf"{words}.* \[block 0, warp \d: {instruction}"):
        ampere.run(body, [np.arange(64, dtype=np.uint32)], threads=64)
