"""The C++ host compiled by g++ alone: what of it needs no TensorRT headers, and what an emulated GPU says of it."""

import os

import pytest
from plugin_host import PLUGIN, SANITIZERS, lines

NO_B = ("launch.cpp", "/ variant->blockM + call.sequences;", "/ variant->blockM;")
"""Too few tiles for the ends of sequences: what they should write stays NaN."""
FORGETS = ("compare.h", "std::isnan(one) || one >= other", "one >= other")
"""How a NaN was forgotten at the next finite value."""
LAUNCHES = """
#include "launch.h"
#include <cstdio>
int main()
{
    adtp::Call const call{nullptr, nullptr, nullptr, nullptr, nullptr, 64, 1, 1, 1, 64, "fp16", 1, nullptr};
    std::puts(adtp::launch(call, nullptr).c_str());
}
"""


def compared(host, name, mistake=None):
    """What the comparison says of right and wrong results: one digit for each line of comparison.cpp."""
    program = host.compile(name, "comparison.cpp", flags=SANITIZERS, mistake=mistake)
    return [line[-1] for line in lines([program], os.environ)]


def test_the_comparison_keeps_a_nan(host):
    assert compared(host, "comparison") == ["1", "1", "1", "1"]


def test_a_comparison_that_forgets_a_nan_is_noticed(host):
    assert compared(host, "forgets", FORGETS) == ["1", "0", "0", "0"]


@pytest.mark.slow
def test_without_a_driver_launching_says_what_is_missing(host, no_gpu):
    (host.sources / "launches.cpp").write_text(LAUNCHES)
    program = host.compile("launches", "launches.cpp", "launch.cpp", "driver.cpp", flags=SANITIZERS)
    environment = {name: value for name, value in os.environ.items() if name != "LD_LIBRARY_PATH"}
    (said,) = lines([program], environment)
    assert said == "the CUDA driver (R525 or newer) is missing or lacks cuGetErrorString"


CAPTURES = (
    "harness.cpp",
    "&& runtime.onShapeChange(descriptions.data(), 4, descriptions.data(), build.getNbOutputs()) == 0",
    '&& unsetenv("ADTP_EMULATOR_CAPTURING") == 0'
    " && runtime.onShapeChange(descriptions.data(), 4, descriptions.data(), build.getNbOutputs()) == 0"
    ' && setenv("ADTP_EMULATOR_CAPTURING", "1", 1) == 0',
)
"""A harness on whose GPU nothing can be loaded during enqueue, as where a stream is captured."""
LATE = ("plugin.cpp", "if (status == 0)", "if (status != 0)")


@pytest.fixture(scope="module")
def capturing_harness(host_with_headers):
    return host_with_headers.compile("captures", "harness.cpp", flags=SANITIZERS, mistake=CAPTURES)


@pytest.mark.parametrize(("mistake", "code"), [(None, 0), (LATE, 1)], ids=["as it is", "loaded by enqueue"])
def test_enqueue_loads_nothing(host_with_headers, capturing_harness, emulator, mistake, code):
    name, sources = f"prepares{code}.so", PLUGIN
    built = host_with_headers.compile(name, *sources, flags=SANITIZERS, mistake=mistake)
    said = [
        line for line in lines([capturing_harness, built, "1"], emulator, code) if "of what rounding allows" in line
    ]
    assert len(said) == 18
    assert any(line.startswith("FAIL") for line in said) == bool(mistake)


@pytest.fixture(scope="module")
def harness(host_with_headers):
    return host_with_headers.compile("harness", "harness.cpp", flags=SANITIZERS)


@pytest.mark.parametrize(("mistake", "code"), [(None, 0), (NO_B, 1)], ids=["as it is", "too few tiles"])
def test_the_harness_on_an_emulated_gpu(host_with_headers, harness, emulator, mistake, code):
    """It passes, and fails where the grid lacks its + B. The library that TensorRT would load is sanitized as well."""
    name, sources = f"host{code}.so", PLUGIN
    built = host_with_headers.compile(name, *sources, flags=SANITIZERS, mistake=mistake)
    said = lines([harness, built, "17"], emulator, code)
    ran = [line for line in said if "enqueue: " in line and "of what rounding allows" in line]
    assert len(ran) == 18
    assert all(line.startswith("FAIL" if mistake else "ok  ") for line in ran)
    assert not any(line.startswith("FAIL") for line in said if "enqueue" not in line)
