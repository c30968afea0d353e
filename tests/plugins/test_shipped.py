"""Kernels that a plan may launch: all that are shipped, in the words of the runner."""

import pytest

from adtp_export.errors import InputError
from adtp_export.plugins import binaries, shipped
from adtp_export.plugins.encoder import binaries as encoder


def test_every_variant_is_there_with_all_its_code():
    names = shipped.names()
    variants = [entry for archive in (binaries, encoder) for entry in archive.manifest()["variants"]]
    assert len(set(names)) == len(names) == len(variants)
    for name, arguments in {
        "fp16-d64-64x64": "p16 p16 p16 p p16 i16 i i i f",
        "above": "p16 p16 p p p16 p16 f i i",
        "add_norm-fp16-512-whole": "p16 p p16 p16 p16 p16 p i i i i8 f i",
    }.items():
        found = shipped.kernel(name)
        assert sorted(code.architecture for code in found.codes) == [0, 80, 86, 87, 89, 90, 120]
        assert found.arguments == arguments


def test_words_of_a_kernel():
    types = {"x": "*fp16", "counts": "*i32", "n": "i32", "far": "i64", "eps": "fp32"}
    assert shipped.words(types, {"x": 16, "n": 8}) == "p16 p i8 l f"


def test_another_name_is_refused():
    with pytest.raises(
        InputError, match="'fp16-d32-16x17', and there is no such kernel; did you mean 'fp16-d32-16x16'?"
    ):
        shipped.kernel("fp16-d32-16x17")


def test_the_table_has_what_is_wanted():
    table = shipped.kernels_cpp(["fp16-d32-16x16"])
    assert table.count("uint64_t const") == 7
    assert '{"fp16-d32-16x16", "ragged_attention", "p16 p16 p16 p p16 i16 i i i f", 32, 80, 7, k0}' in table
    assert "kNumKernels = 1;" in table
