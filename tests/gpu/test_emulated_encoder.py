"""The encoder's compiled kernels in the emulator: the same checks as in Triton's interpreter, of what is shipped.

PTX of one variant of each kernel and precision, and machine code of one of each kernel, for the architecture that the hash of its PTX
chooses. `--slow` executes all. The record that `emulate_encoder.py` writes has them all, and a test holds it against what is shipped.
"""

import emulated_gpu
import emulation
import encoder_cases
import pytest
from encoder_launch import Emulated
from representatives import first_of_each

from adtp_export.plugins.encoder import binaries
from adtp_export.plugins.encoder.variants import ALL
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


@pytest.mark.slow
@pytest.mark.usefixtures("disassembler")
@pytest.mark.parametrize("code", CODES)
@pytest.mark.parametrize("variant", ALL, ids=lambda variant: variant.name)
def test_all_code_in_every_way(device, variant, code):
    for on in ({}, OTHER_WAY):
        run(device, variant, code, encoder_cases.cases(variant), on)
