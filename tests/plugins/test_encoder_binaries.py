"""What the repository ships as the encoder's compiled kernels: complete, current, without spills, and reproducible."""

import hashlib
import importlib.metadata
import importlib.util
import json
import re

import pytest
from test_binaries import SHARED_LIMIT

from adtp_export.cli import plugin
from adtp_export.errors import InputError
from adtp_export.plugins import ahead_of_time, library
from adtp_export.plugins.binaries import DIRECTORY, read_archive
from adtp_export.plugins.encoder import binaries
from adtp_export.plugins.encoder.variants import ALL, GATED, GROUPED, GROUPED_RECEIVED, PRODUCT, SCORES
from adtp_export.plugins.variants import ARCHITECTURES

ADVICE = "type: adtp-plugin build --kernels"


def all_binaries():
    for entry in binaries.manifest()["variants"]:
        for code, found in entry["binaries"].items():
            yield entry, code, found


def test_the_kernels_are_compiled_from_these_sources():
    assert binaries.manifest()["source_sha256"] == binaries.source_sha256(), ADVICE


def test_every_variant_is_there_for_every_gpu_and_says_how_it_is_launched():
    entries = binaries.manifest()["variants"]
    assert [entry["name"] for entry in entries] == [variant.name for variant in ALL]
    for entry, variant in zip(entries, ALL):
        assert set(entry["binaries"]) == {*ARCHITECTURES, "ptx"}
        assert list(entry["arguments"].items()) == list(variant.arguments.items())
        assert not any("T" in kind for kind in entry["arguments"].values())
        assert set(entry["multiples"]) <= set(entry["arguments"])


def test_files_are_those_of_the_manifest_and_small():
    path = DIRECTORY / binaries.ARCHIVE
    archive = read_archive(path)
    found = {name: archive.read(name) for name in archive.namelist()}
    listed = {found["file"]: found for _, _, found in all_binaries()}
    assert set(found) == set(listed)
    for name, data in found.items():
        assert (len(data), hashlib.sha256(data).hexdigest()) == (listed[name]["bytes"], listed[name]["sha256"])
        assert not any(word in data for word in (b".debug_line", b".debug_info", b".nv_debug", b".py")), name
    assert path.stat().st_size < 1_500_000


def test_no_register_spills_and_room_to_run():
    for entry, code, found in all_binaries():
        what = f"{entry['name']} for {code}: {found}"
        assert found["shared_bytes"] <= SHARED_LIMIT[code], what
        multiplies = entry["kernel"] in (PRODUCT, SCORES, GROUPED, GROUPED_RECEIVED, GATED)
        assert (found["tensor_core_instructions"] > 0) == multiplies, what
        if code != "ptx":
            assert found["stack_bytes"] == 0, what
            assert found["registers"] * entry["threads"] <= 65536, what


def test_nothing_depends_on_the_order_of_programs():
    """No atomics, so answers repeat to the bit."""
    texts = [binaries.binary(entry["name"], "ptx").data.decode() for entry in binaries.manifest()["variants"]]
    assert not any(re.search(r"\b(atom|red)\.", text) for text in texts)
    assert all("version 8.0" in text and ".target sm_80" in text and text.endswith("\0") for text in texts)


def test_an_unknown_variant_gets_one_clear_message():
    with pytest.raises(InputError, match="got variant 'product'; accepted are above, add_norm-bf16-1024-parts, "):
        binaries.binary("product", "ptx")


@pytest.fixture
def without_caches():
    cached = (binaries.manifest, binaries.entry, binaries.binary)
    yield [function.cache_clear() for function in cached]
    for function in cached:
        function.cache_clear()


@pytest.mark.usefixtures("without_caches")
def test_another_schema_is_refused(monkeypatch, tmp_path):
    monkeypatch.setattr(binaries, "DIRECTORY", tmp_path)
    (tmp_path / binaries.MANIFEST).write_text('{"schema": 0}')
    with pytest.raises(InputError, match="got schema 0; accepted is 1; type: adtp-plugin build --kernels"):
        binaries.manifest()


@pytest.mark.usefixtures("without_caches")
def test_what_is_compiled_anew_is_read_anew(monkeypatch, tmp_path):
    for module in (ahead_of_time, library):
        monkeypatch.setattr(module, "build", lambda *given: tmp_path)
    name = ALL[0].name
    before = binaries.manifest(), binaries.entry(name), binaries.binary(name, "ptx")
    plugin.command(plugin.make_parser().parse_args(["build", "--kernels"]))
    after = binaries.manifest(), binaries.entry(name), binaries.binary(name, "ptx")
    assert not any(new is old for new, old in zip(after, before))


def test_compiling_again_gives_the_same_bytes():
    if importlib.util.find_spec("triton") is None:
        pytest.skip("Triton is not installed")
    made_with = json.loads((DIRECTORY / binaries.MANIFEST).read_text())["triton"]
    if importlib.metadata.version("triton") != made_with:
        pytest.skip(f"the kernels were compiled with Triton {made_with}")
    jobs = [(ALL[0], "sm_80"), (ALL[1], "sm_90"), (ALL[-1], "sm_120")]
    for (name, architecture), code in ahead_of_time.compile_all(jobs).items():
        assert code.cubin == binaries.binary(name, architecture).data
