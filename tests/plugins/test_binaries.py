"""What the repository ships as compiled kernels: complete, current, without spills, and reproducible."""

import hashlib
import importlib.metadata
import importlib.util
import json
import re
import shutil
import sys

import pytest

from adtp_export.errors import InputError, MissingDependencyError
from adtp_export.plugins import ahead_of_time, binaries
from adtp_export.plugins.driver import _POINTERS, Call, arguments
from adtp_export.plugins.variants import (
    ALL,
    ARCHITECTURES,
    ATTENTION,
    DTYPES,
    HEAD_SIZES,
    LSE,
    RECEIVED,
    SYMBOLS,
    VARIANTS,
    VARIANTS_OF_LSE,
    VARIANTS_OF_RECEIVED,
)

SHARED_LIMIT = dict.fromkeys((*ARCHITECTURES, "ptx"), 99 * 1024) | {
    "sm_80": 163 * 1024,
    "sm_87": 163 * 1024,
    "sm_90": 227 * 1024,
}
"""Shared memory a program may have, in bytes (CUDA C++ Programming Guide, table of technical specifications)."""


def all_binaries():
    for entry in binaries.manifest()["variants"]:
        for code, found in entry["binaries"].items():
            yield entry, code, found


def test_the_kernels_are_compiled_from_these_sources():
    assert binaries.manifest()["source_sha256"] == binaries.source_sha256(), "type: adtp-plugin build --kernels"


def test_every_variant_is_there_for_every_gpu():
    manifest = binaries.manifest()
    assert [entry["name"] for entry in manifest["variants"]] == [variant.name for variant in ALL]
    assert {(entry["kernel"], entry["dtype"], entry["head_size"]) for entry in manifest["variants"]} == {
        (kernel, dtype, size) for kernel in SYMBOLS for dtype in DTYPES for size in HEAD_SIZES
    }
    assert all(set(entry["binaries"]) == {*ARCHITECTURES, "ptx"} for entry in manifest["variants"])


def test_files_are_those_of_the_manifest_and_small():
    path = binaries.DIRECTORY / binaries.ARCHIVE
    archive = binaries.read_archive(path)
    found = {name: archive.read(name) for name in archive.namelist()}
    listed = {found["file"]: found for _, _, found in all_binaries()}
    assert set(found) == set(listed)
    for name, data in found.items():
        assert len(data) == listed[name]["bytes"]
        assert hashlib.sha256(data).hexdigest() == listed[name]["sha256"]
    assert sum(map(len, found.values())) == binaries.manifest()["bytes"] < 7_000_000
    assert path.stat().st_size < 500_000


def test_no_register_spills_and_room_to_run():
    assert len(list(all_binaries())) == len(ALL) * (len(ARCHITECTURES) + 1)
    for entry, code, found in all_binaries():
        what = f"{entry['name']} for {code}: {found}"
        assert found["shared_bytes"] <= SHARED_LIMIT[code], what
        assert found["tensor_core_instructions"] > 0, what
        if code != "ptx":
            assert found["stack_bytes"] == 0, what
            assert found["registers"] * entry["threads"] <= 65536, what


def test_no_sum_depends_on_the_order_of_programs():
    """No atomics, so answers repeat to the bit."""
    archive = binaries.read_archive(binaries.DIRECTORY / binaries.ARCHIVE)
    texts = [archive.read(name).decode() for name in archive.namelist() if name.endswith(".ptx")]
    assert len(texts) == len(ALL)
    assert not any(re.search(r"\b(atom|red)\.", text) for text in texts)


def test_no_debug_data():
    archive = binaries.read_archive(binaries.DIRECTORY / binaries.ARCHIVE)
    assert any(name.endswith(".ptx") for name in archive.namelist())
    for name in archive.namelist():
        data = archive.read(name)
        assert not any(word in data for word in (b".debug_line", b".debug_info", b".nv_debug", b".py")), name
        if name.endswith(".ptx"):
            assert b".target sm_80" in data
            assert b".version 8.0" in data  # what drivers of CUDA 12.0 read
            assert data.endswith(b"\0")


def test_without_lzma_reading_the_kernels_says_what_to_do(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "lzma", None)  # as in a Python that was built without it
    with pytest.raises(MissingDependencyError, match="needs Python's module lzma, .* apt install liblzma-dev"):
        binaries.read_archive(tmp_path / "other.zip.xz")


@pytest.fixture
def triton_of_the_kernels():
    if importlib.util.find_spec("triton") is None:
        pytest.skip("Triton is not installed")
    made_with = binaries.manifest()["triton"]
    if importlib.metadata.version("triton") != made_with:
        pytest.skip(f"the kernels were compiled with Triton {made_with}")


@pytest.mark.usefixtures("triton_of_the_kernels")
def test_compiling_again_gives_the_same_bytes():
    jobs = [
        (VARIANTS[0], "sm_80"),
        (VARIANTS[-1], "sm_120"),
        (VARIANTS_OF_RECEIVED[0], "sm_90"),
        (VARIANTS_OF_LSE[0], "sm_86"),
    ]
    compiled = ahead_of_time.compile_all(jobs)
    for (name, architecture), code in compiled.items():
        assert code.cubin == binaries.binary(name, architecture).data
    assert compiled[VARIANTS[0].name, "sm_80"].ptx == binaries.binary(VARIANTS[0].name, "ptx").data


def test_the_variant_follows_the_mean_length():
    def chosen(tokens, sequences, gpu="sm_86", dtype="fp16", head_size=64, kernel=ATTENTION):
        kind = binaries.Kind(dtype, head_size, received=kernel != ATTENTION)
        return binaries.choose(binaries.Gpu(gpu, 1), kind, tokens, sequences, 12, kernel)

    assert chosen(32 * 8, 8).name == "fp16-d64-16x32"
    assert chosen(32 * 8 + 1, 8).name == "fp16-d64-64x32"
    assert chosen(512, 1).name == "fp16-d64-64x64"
    assert chosen(512, 1, dtype="fp32", head_size=128).name == "fp32-d128-16x16"
    assert chosen(0, 1).programs(0, 1, 12) == 12
    assert chosen(100, 3, kernel=RECEIVED).programs(100, 3, 12) == 100 // 64 + 3
    assert chosen(100, 3, kernel=LSE).name == "lse-fp16-d64-64x32"
    assert chosen(100, 3).kernel == ATTENTION
    assert chosen(100, 3).programs(100, 3, 12) == (100 // chosen(100, 3).block_m + 3) * 12
    for gpu in ARCHITECTURES:
        assert chosen(8, 1, gpu).data[:4] == b"\x7fELF"
    for newer in ("sm_100", "sm_103", "sm_121"):
        assert chosen(8, 1, newer).data.lstrip().startswith(b".version")
    assert chosen(8, 1, "sm_80").data != chosen(8, 1, "sm_86").data


@pytest.fixture
def driver(no_gpu):
    return pytest.importorskip("cuda.bindings.driver", reason="cuda-bindings is not installed")


@pytest.mark.parametrize("kernel", SYMBOLS)
def test_arguments_are_what_cuda_python_takes(driver, kernel):
    """Without a driver a launch gets as far as looking for it, which is behind the conversion of its arguments. With one the
    kernel itself is tested."""
    call = Call(
        q=16, k=16, v=16, cu_seqlens=16, out=16, row_stride=64, tokens=3, sequences=1, num_heads=1, head_size=64,
        dtype="fp16", scale=0.125,
    )  # fmt: skip
    with pytest.raises(RuntimeError, match="driver library"):
        driver.cuLaunchKernel(driver.CUfunction(1), 1, 1, 1, 32, 1, 1, 0, 0, arguments(call, kernel), 0)
    named = [name.replace("lse", "out") for name in binaries.manifest()["kernels"][kernel]["arguments"]]
    assert len(arguments(call, kernel)[0]) == len(named) + 2  # Triton's scratch memory
    assert named[: len(_POINTERS[kernel])] == list(_POINTERS[kernel])


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        (("sm_75", "fp16", 64), "no kernel for sm_75; accepted are sm_80, sm_86"),
        (("sm_86", "fp64", 64), "got dtype fp64; accepted are fp16, bf16, fp32"),
        (("sm_86", "fp16", 48), "got head size 48; accepted are 32, 64, 128"),
    ],
)
def test_what_there_is_no_kernel_for(asked, message):
    with pytest.raises(InputError, match=message):
        binaries.choose(binaries.Gpu(asked[0], 28), binaries.Kind(*asked[1:]), 16, 1, 12)


KIND = binaries.Kind("fp16", 64)
GPUS = ("sm_86", "sm_120")


@pytest.fixture
def recorded(tmp_path, monkeypatch):
    """Record all binaries as executed but those that a test names as (variant, code)."""

    def record(*left_out):
        hashes = [f["sha256"] for entry, code, f in all_binaries() if (entry["name"], code) not in left_out]
        shutil.copy(binaries.DIRECTORY / binaries.MANIFEST, tmp_path)
        (tmp_path / binaries.EMULATED).write_text(json.dumps({"command": "a test", "sha256": hashes}))
        monkeypatch.setattr(binaries, "DIRECTORY", tmp_path)
        binaries.executed.cache_clear()

    yield record
    binaries.executed.cache_clear()


@pytest.mark.parametrize(
    ("left_out", "holds"),
    [
        ((), True),
        (("fp16-d64-64x64", "sm_89"), True),  # a GPU that the engine is not for
        (("fp16-d32-128x64", "sm_86"), True),  # another head size
        (("lse-fp16-d64-64x32", "sm_86"), True),  # a kernel that the engine does not launch
        (("fp16-d64-64x64", "sm_120"), False),  # a variant for long texts, which may come
        (("fp16-d64-16x32", "sm_86"), False),
    ],
)
def test_kernels_are_emulated_when_all_that_can_be_launched_were_executed(recorded, left_out, holds):
    recorded(left_out)
    assert binaries.emulated([KIND], GPUS) == holds


def test_what_tokens_received_takes_more_kernels(recorded):
    recorded(("lse-fp16-d64-64x32", "sm_86"))
    assert not binaries.emulated([KIND, binaries.Kind("fp16", 64, received=True)], GPUS)


def test_grouped_queries_launch_others(recorded):
    recorded()
    assert not binaries.emulated([KIND, binaries.Kind("fp16", 64, grouped=True)], GPUS)


def test_other_gpus_run_ptx(recorded):
    recorded(("fp16-d64-64x64", "ptx"))
    assert not binaries.emulated([KIND], ["sm_100"])
    assert binaries.emulated([KIND], GPUS)


def test_nothing_is_emulated_without_a_record(tmp_path, monkeypatch, recorded):
    recorded()
    (tmp_path / binaries.EMULATED).unlink()
    binaries.executed.cache_clear()
    assert not binaries.emulated([KIND], GPUS)
    assert not binaries.emulated([], GPUS)


def test_only_binaries_that_are_shipped_are_recorded_as_executed():
    assert binaries.executed() <= {found["sha256"] for _, _, found in all_binaries()}
