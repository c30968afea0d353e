"""The encoder's compiled kernels in the emulator: the same checks as in Triton's interpreter, of what is shipped.

PTX of one variant of each kernel and precision, and machine code of one of each kernel, for the architecture that the hash of its PTX
chooses. `--slow` executes all, and so does `emulate_encoder.py`, which writes down what it saw.
"""

import emulated_gpu
import emulation
import encoder_cases
import encoder_checks
import numpy as np
import pytest
import torch
from encoder_launch import Emulated
from representatives import first_of_each

from adtp_export.plugins.encoder import binaries
from adtp_export.plugins.encoder.variants import ALL, BY_NAME
from adtp_export.plugins.variants import ARCHITECTURES

OTHER_WAY = {"EARLY": True, "REVERSE": True, "TRUNCATE": True}
CODES = (*ARCHITECTURES, "ptx")


def architecture_of(variant):
    """The architecture whose turn it is."""
    return ARCHITECTURES[int(binaries.entry(variant.name)["binaries"]["ptx"]["sha256"][:8], 16) % len(ARCHITECTURES)]


@pytest.fixture
def disassembler():
    if emulated_gpu.nvdisasm() is None:
        pytest.skip("Triton is not installed")


def run(device, variant, code, cases, on):
    device.set(emulation.capability_of(code), on=on)
    launch = Emulated(device, code)
    for check, case in cases:
        share = check(launch, variant, **case)
        assert share <= 1, f"{variant.name}, {code}, {case}: {share:.2f} of what is allowed"


@pytest.mark.parametrize("variant", first_of_each(ALL, lambda v: (v.kernel, v.dtype)), ids=lambda variant: variant.name)
def test_ptx(device, variant):
    first, *others = encoder_cases.cases(variant)
    run(device, variant, "ptx", others, {})
    run(device, variant, "ptx", [first], OTHER_WAY)


@pytest.mark.usefixtures("disassembler")
@pytest.mark.parametrize("variant", first_of_each(ALL, lambda v: v.kernel), ids=lambda variant: variant.name)
def test_machine_code_of_one_architecture(device, variant):
    first, second, *_ = encoder_cases.cases(variant)
    run(device, variant, architecture_of(variant), [first], {})
    run(device, variant, architecture_of(variant), [second], OTHER_WAY)


def test_every_architecture_has_its_turn():
    assert {architecture_of(variant) for variant in ALL} == set(ARCHITECTURES)


def garbage(size, rows, rng):
    """Integers that nobody filled: -1, any words, sorted words, words around what is right, the wrong way round, large."""
    words = rng.integers(-(2**31), 2**31, size)
    yield from (
        np.full(size, -1),
        words,
        np.sort(words),
        rng.integers(-5, rows + 6, size),
        np.arange(size)[::-1] * rows // size,
    )
    yield np.full(size, 2**31 - 1)


@pytest.mark.parametrize("name", ["grouped-fp16-d64", "grouped_lse-fp32-d64", "grouped_received-bf16-d64"])
def test_bounds_and_positions_that_make_no_sense_touch_nothing_else(device, name):
    """The memory around is no one's, so that the emulator faults on whatever is read or written there."""
    device.set(emulation.capability_of("ptx"))
    variant, rng, rows, texts = BY_NAME[name], np.random.default_rng(0), 70, 3
    tensors = {name: torch.ones(rows, 64, dtype=encoder_checks.TYPES[variant.dtype]) for name in ("q", "k", "v", "out")}
    tensors |= {name: torch.ones(rows) for name in ("lse", "received")}
    numbers = dict.fromkeys(("num_heads", "kv_heads"), 1) | dict.fromkeys(("q_stride", "kv_stride", "head_size"), 64)
    numbers |= {
        "num_queries": rows,
        "num_keys": rows,
        "num_texts": texts,
        "scale": 0.1,
        "window_back": 9,
        "window_ahead": 0,
    }
    made = [garbage(size, rows, rng) for size in (texts + 1, texts + 1, rows, rows)]
    for words in zip(*made):
        named = zip(("cu_q", "cu_k", "positions_q", "positions_k"), words)
        given = tensors | numbers | {key: torch.from_numpy(each.astype(np.int32)) for key, each in named}
        Emulated(device, "ptx")(variant, rows // 16 + texts, **{key: given[key] for key in variant.arguments})


@pytest.mark.slow
@pytest.mark.usefixtures("disassembler")
@pytest.mark.parametrize("code", CODES)
@pytest.mark.parametrize("variant", ALL, ids=lambda variant: variant.name)
def test_all_code_in_every_way(device, variant, code):
    for on in ({}, OTHER_WAY):
        run(device, variant, code, encoder_cases.cases(variant), on)
