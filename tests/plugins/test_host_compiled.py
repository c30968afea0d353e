"""The C++ host compiled by g++ alone: what of it needs no TensorRT headers, and what an emulated GPU says of it."""

import os

import pytest
from plugin_host import SANITIZERS, lines

NO_B = ("launch.cpp", "/ variant->blockM + call.sequences;", "/ variant->blockM;")
"""Too few tiles for the ends of sequences: what they should write stays NaN."""
FORGETS = ("compare.h", "std::isnan(one) || one >= other", "one >= other")
"""How a NaN was forgotten at the next finite value."""


@pytest.fixture(scope="module")
def launcher(host):
    return host.compile("launch_check", "launch_check.cpp", "launch.cpp", flags=SANITIZERS)


def test_the_comparison_keeps_a_nan(launcher):
    assert [line[:4] for line in lines([launcher, "comparison"], os.environ)] == ["ok  "] * 4


def test_a_comparison_that_forgets_a_nan_is_noticed(host):
    program = host.compile("forgets", "launch_check.cpp", "launch.cpp", mistake=FORGETS)
    said = lines([program, "comparison"], os.environ, code=1)
    assert [line[:4] for line in said] == ["ok  ", "FAIL", "FAIL", "FAIL"]


def test_without_a_driver_launching_says_what_is_missing(launcher, no_gpu):
    environment = {name: value for name, value in os.environ.items() if name != "LD_LIBRARY_PATH"}
    (said,) = lines([launcher, "launch"], environment, code=3)
    assert "the CUDA driver (R525 or newer) is missing or lacks cuGetErrorString" in said


def test_launching_on_an_emulated_gpu(launcher, emulator):
    said = lines([launcher, "launch", "65"], emulator)
    assert len(said) == 18  # three types, three head sizes, with and without what was received
    assert all(line.startswith("ok  ") for line in said)


def test_too_few_tiles_are_noticed(host, emulator):
    program = host.compile("no_b", "launch_check.cpp", "launch.cpp", mistake=NO_B)
    said = lines([program, "launch", "32"], emulator, code=1)
    assert all("nan of what rounding allows" in line for line in said)


@pytest.fixture(scope="module")
def harness(host_with_headers):
    return host_with_headers.compile("harness", "harness.cpp", flags=SANITIZERS)


@pytest.mark.parametrize(("mistake", "code"), [(None, 0), (NO_B, 1)], ids=["as it is", "too few tiles"])
def test_the_harness_on_an_emulated_gpu(host_with_headers, harness, emulator, mistake, code):
    """It passes, and fails where the grid lacks its + B. The library that TensorRT would load is sanitized as well."""
    name, sources = f"host{code}.so", ("plugin.cpp", "launch.cpp")
    built = host_with_headers.compile(name, *sources, flags=SANITIZERS, mistake=mistake)
    said = lines([harness, built, "17"], emulator, code)
    ran = [line for line in said if "enqueue: " in line and "of what rounding allows" in line]
    assert len(ran) == 18
    assert all(line.startswith("FAIL" if mistake else "ok  ") for line in ran)
    assert not any(line.startswith("FAIL") for line in said if "enqueue" not in line)
