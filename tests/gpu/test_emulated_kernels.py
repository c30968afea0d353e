"""Every shipped kernel, executed in an emulator: right on ragged lengths, and whatever is in `cu_seqlens`, it stays inside.

PTX and machine code of one variant of each kernel and precision, for an architecture that the hash of its PTX chooses, so that the
choice stays until kernels change. `--slow` executes all of it, in every way; so does `emulate.py`, whose record a test holds against
what is shipped.
"""

import json
from dataclasses import replace

import emulate
import emulated_gpu
import emulation
import numpy as np
import pytest
import torch
from emulated_gpu import RefusedError
from representatives import first_of_each

from adtp_export.plugins import binaries
from adtp_export.plugins.variants import ARCHITECTURES, ATTENTION, LSE, RECEIVED

VARIANTS = emulation.variants()
OF_EACH_TYPE = first_of_each(VARIANTS, lambda entry: (entry["kernel"], entry["dtype"]))
OTHER_WAY = {"EARLY": True, "REVERSE": True, "TRUNCATE": True}


def architecture_of(entry):
    """The architecture whose turn it is."""
    return ARCHITECTURES[int(entry["binaries"]["ptx"]["sha256"][:8], 16) % len(ARCHITECTURES)]


@pytest.fixture
def runner(device):
    return emulation.Runner(device)


@pytest.fixture
def disassembler():
    if emulated_gpu.nvdisasm() is None:
        pytest.skip("Triton is not installed")


def check(runner, entry, code, cases, on):
    runner.device.set(emulation.capability_of(code), on=on)
    for case in cases:
        share = emulation.check(runner, entry, code, case, emulation.lse_of(entry))
        assert share <= 1, f"{entry['name']}, {code}, {case}: {share:.2f} of what is allowed"


def cases_of(entry, kind=emulation.small_cases):
    return kind(entry["kernel"], entry["block_m"])


@pytest.mark.parametrize("entry", OF_EACH_TYPE, ids=lambda e: e["name"])
def test_ptx(runner, entry):
    first, second = cases_of(entry)
    check(runner, entry, "ptx", [first, *cases_of(entry, emulation.edge_cases)], {})
    check(runner, entry, "ptx", [second], OTHER_WAY)


@pytest.mark.usefixtures("disassembler")
@pytest.mark.parametrize("entry", OF_EACH_TYPE, ids=lambda e: e["name"])
def test_machine_code_of_one_architecture(runner, entry):
    first, second = cases_of(entry)
    check(runner, entry, architecture_of(entry), [second], {})
    check(runner, entry, architecture_of(entry), [first], OTHER_WAY)


def test_every_architecture_has_its_turn():
    assert {architecture_of(entry) for entry in VARIANTS} == set(ARCHITECTURES)


@pytest.mark.slow
@pytest.mark.usefixtures("disassembler")
@pytest.mark.parametrize("code", emulate.CODES)
@pytest.mark.parametrize("entry", VARIANTS, ids=lambda e: e["name"])
def test_all_code_in_every_way(runner, entry, code):
    for case, way in emulate.work_of(entry):
        check(runner, entry, code, [case], way)


def garbage(sequences, tokens, rng):
    """cu_seqlens that nobody filled: -1, any words, sorted words, words around what is right, the wrong way round, large."""
    size = sequences + 1
    yield np.full(size, -1)
    words = rng.integers(-(2**31), 2**31, size)
    yield words
    yield np.sort(words)
    yield rng.integers(-5, tokens + 6, size)
    yield np.arange(size)[::-1] * tokens // sequences
    yield np.full(size, 2**31 - 1)


def run_garbage(runner, entry, code, sequences, tokens):
    """The memory around is no one's, so that the emulator faults on whatever is read or written there."""
    rng = np.random.default_rng(3)
    lse = emulation.lse_of(entry)
    chosen = [binaries.binary(e["name"], code) for e in (lse, entry) if e]
    case = emulation.Case(lengths=(tokens,), heads=1)
    data = emulation.make(case, entry["dtype"], entry["head_size"])
    for words in garbage(sequences, tokens, rng):
        bounds = torch.from_numpy(words.astype(np.int32))
        runner.run(replace(data, cu_seqlens=bounds), entry["dtype"], chosen)


@pytest.mark.parametrize("entry", OF_EACH_TYPE, ids=lambda e: e["name"])
def test_lengths_that_make_no_sense_touch_nothing_else(runner, entry):
    run_garbage(runner, entry, "ptx", 3, entry["block_m"] + 5)


@pytest.mark.slow
@pytest.mark.usefixtures("disassembler")
@pytest.mark.parametrize("code", emulate.CODES)
@pytest.mark.parametrize("entry", OF_EACH_TYPE, ids=lambda e: e["name"])
def test_lengths_that_make_no_sense_touch_nothing_else_in_any_code(runner, entry, code):
    runner.device.set(emulation.capability_of(code))
    for sequences, tokens in ((3, 37), (130, 70)):
        run_garbage(runner, entry, code, sequences, tokens)


def test_without_the_check_of_bounds_garbage_would_be_read(runner):
    """The same launch as above with one row less than it is told of: the emulator notices."""
    entry = VARIANTS[0]
    data = emulation.make(emulation.Case(lengths=(21,), heads=1, packed=False), entry["dtype"], entry["head_size"])
    short = replace(data, q=data.q[:20], k=data.k[:20], v=data.v[:20])
    with pytest.raises(RefusedError, match="after an allocation of|before all allocations"):
        runner.run(short, entry["dtype"], [binaries.binary(entry["name"], "ptx")], tokens=21)


CAPACITY, LIVE = 300, 50
"""Rows of a launch whose size is fixed, and how many of them belong to sequences."""
BOUNDS = torch.tensor([0, 30, 50, 50, 50], dtype=torch.int32)
"""Texts that are not there are empty ones at the end."""
SCAN_INSTRUCTIONS = 100
"""Of a warp: `_rows_of` for up to 128 sequences, and a comparison. A live program of these tests executes at least 400."""


def logged(runner, entry, code, data, log):
    """What a launch wrote, and what the emulator counted."""
    runner.device.set(emulation.capability_of(code), log=log)
    chosen = [binaries.binary(e["name"], code) for e in (emulation.lse_of(entry), entry) if e]
    written = runner.run(data, entry["dtype"], chosen)[-1]
    return written, json.loads(log.read_text().splitlines()[-1])


@pytest.mark.usefixtures("disassembler")
@pytest.mark.parametrize("kernel", [ATTENTION, LSE, RECEIVED])
@pytest.mark.parametrize("code", ["ptx", "turn"])
def test_rows_beyond_the_last_sequence_cost_a_look_at_the_lengths(runner, kernel, code, tmp_path):
    """Dead rows of a fixed capacity hold NaN: nothing reads or writes them, and their programs end after `_rows_of`."""
    entry = next(e for e in VARIANTS if e["kernel"] == kernel and e["dtype"] == "fp16")
    code = architecture_of(entry) if code == "turn" else code
    data = emulation.make(emulation.Case(lengths=(CAPACITY,)), entry["dtype"], entry["head_size"])
    for t in (data.q, data.k, data.v):
        t[LIVE:] = float("nan")
    alone = replace(data, q=data.q[:LIVE], k=data.k[:LIVE], v=data.v[:LIVE], cu_seqlens=BOUNDS)
    written, some = logged(runner, entry, code, alone, tmp_path / "alone")
    among, more = logged(runner, entry, code, replace(data, cu_seqlens=BOUNDS), tmp_path / "among")
    shape = (data.heads, -1) if kernel == LSE else (1, len(among), -1)
    rows = [t.view(shape) if kernel == LSE else t.view(len(t), -1).T for t in (written, among)]
    assert torch.equal(rows[1][:, :LIVE], rows[0])
    assert rows[1][:, LIVE:].isnan().all()
    extra = {name: more[name] - some[name] for name in (*emulate.COUNTED, "programs")}
    dead, threads = extra["programs"], entry["threads"]
    assert dead >= (CAPACITY - LIVE) // entry["block_m"]
    assert extra["tensor_flops"] == extra["bytes_written"] == 0
    assert extra["bytes_read"] == dead * 4 * (
        len(BOUNDS) - 1 + 2 * threads
    )  # all lengths once, and each thread's own two
    assert 0 < extra["instructions"] <= dead * threads // 32 * SCAN_INSTRUCTIONS


def test_sequences_do_not_see_each_other(runner):
    for dtype in emulation.TYPES:
        entry = next(e for e in VARIANTS if e["kernel"] == ATTENTION and e["dtype"] == dtype)
        chosen = [binaries.binary(entry["name"], "ptx")]
        data = emulation.make(emulation.Case(lengths=(5, 9, 3)), dtype, entry["head_size"])
        before = runner.run(data, dtype, chosen)[0]
        for t in (data.q, data.k, data.v):
            t[5:14] = float("nan")
        after = runner.run(data, dtype, chosen)[0]
        assert torch.equal(before[:5], after[:5])
        assert torch.equal(before[14:], after[14:])
