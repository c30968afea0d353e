"""The record of what was executed of the encoder's kernels is taken up where it ended."""

import contextlib
import json

import emulate
import emulate_encoder
import pytest

from adtp_export.plugins.encoder.variants import BY_NAME

FIRST, SECOND = (BY_NAME[name] for name in ("unpad", "above"))


@pytest.fixture
def record(tmp_path, monkeypatch, emulated_library):
    """Record two variants' PTX; return what was executed, and the document. Executions are told, not done."""
    path = tmp_path / "encoder.json"
    monkeypatch.setattr(emulate_encoder, "ALL", (FIRST, SECOND))
    monkeypatch.setattr(emulate, "CODES", ("ptx",))

    def recorded(change=None, breaks_at=None):
        executed = []

        def execute(device, variant, code):
            if variant.name == breaks_at:
                raise KeyboardInterrupt
            executed.append(variant.name)
            sha256 = emulate_encoder.binaries.entry(variant.name)["binaries"][code]["sha256"]
            return {"sha256": sha256, "launches": 1, "worst_share_of_allowed": 0.5}

        def execute_mutants(device):
            executed.append("mutants")
            return {"unpad": {"fault": 1}}

        monkeypatch.setattr(emulate_encoder, "execute", execute)
        monkeypatch.setattr(emulate_encoder, "execute_mutants", execute_mutants)
        if change:
            path.write_text(json.dumps(json.loads(path.read_text()) | change))
        with contextlib.suppress(KeyboardInterrupt):
            emulate_encoder.record(path)
        return executed, json.loads(path.read_text())

    return recorded


def test_what_is_known_is_not_run_again(record):
    executed, document = record()
    assert executed == [FIRST.name, SECOND.name, "mutants"]
    assert record() == ([], document)


def test_what_was_found_with_another_emulator_is_run_again(record):
    record()
    executed, _ = record(change={"emulator_sha256": "another"})
    assert executed == [FIRST.name, SECOND.name, "mutants"]


def test_mutants_of_other_sources_are_run_again(record):
    record()
    assert record(change={"source_sha256": "another"})[0] == ["mutants"]


def test_an_interrupted_run_deletes_nothing(record):
    _, document = record()
    stale = {FIRST.name: {"ptx": {"sha256": "another"}}}
    _, left = record(change={"binaries": document["binaries"] | stale}, breaks_at=FIRST.name)
    assert left["binaries"][SECOND.name] == document["binaries"][SECOND.name]
    assert left["mutants"] == document["mutants"]
    assert record() == ([FIRST.name], document)
