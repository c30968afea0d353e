"""The record of what was executed has every shipped binary, as it is shipped."""

import json
import shutil

import emulate
import emulated_gpu
import emulation
import pytest

ADVICE = f"kernels have changed; type: {emulate.COMMAND}"


@pytest.fixture(scope="module")
def record():
    return json.loads(emulate.RECORD.read_text())


def test_every_binary_of_the_manifest_was_executed(record):
    shipped = {
        (e["name"], code): found["sha256"] for e in emulation.variants() for code, found in e["binaries"].items()
    }
    executed = {
        (name, code): found["sha256"] for name, codes in record["binaries"].items() for code, found in codes.items()
    }
    assert executed == shipped, ADVICE
    assert len(executed) == 7 * len(emulation.variants())


def test_all_were_right_on_many_launches(record):
    for name, codes in record["binaries"].items():
        for code, found in codes.items():
            assert 0 < found["worst_share_of_allowed"] <= 1, (name, code)
            assert found["launches"] > 20
            assert found["tensor_flops"] > 0


def test_changes_were_noticed_or_explained(record):
    counts = [
        kind.get(word, 0) for kind in record["mutants"]["kinds"].values() for word in ("fault", "wrong", "survived")
    ]
    survived = sum(kind.get("survived", 0) for kind in record["mutants"]["kinds"].values())
    assert sum(counts) > 250
    assert survived == len(record["mutants"]["equivalent"])
    assert all(found["why"] for found in record["mutants"]["equivalent"]), ADVICE


def test_a_record_is_taken_up_where_it_ended(device, tmp_path, monkeypatch):
    """What is there is not run again; other binaries are, and those of no variant go."""
    entry = emulation.variants()[0]
    path = tmp_path / "emulated.json"
    monkeypatch.setattr(emulation, "variants", lambda: [entry])
    monkeypatch.setattr(emulate, "CODES", ("ptx",))
    monkeypatch.setattr(emulate, "execute_mutants", lambda runner: {"kinds": {}, "equivalent": []})
    monkeypatch.setattr(emulation, "thorough_cases", emulation.small_cases)
    monkeypatch.setattr(emulate, "WAYS", emulate.WAYS[:2])
    emulate.record(path)
    document = json.loads(path.read_text())
    found = document["binaries"][entry["name"]]["ptx"]
    assert found["sha256"] == entry["binaries"]["ptx"]["sha256"]
    assert found["launches"] == 4
    found["launches"] = 5
    document["binaries"]["gone"] = {}
    path.write_text(json.dumps(document))
    emulate.record(path)
    document = json.loads(path.read_text())
    assert document["binaries"] == {entry["name"]: {"ptx": found}}
    document["binaries"][entry["name"]]["ptx"]["sha256"] = "of another binary"
    path.write_text(json.dumps(document))
    emulate.record(path)
    assert json.loads(path.read_text())["binaries"][entry["name"]]["ptx"]["launches"] == 4


def test_without_a_compiler_the_emulator_says_so(monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(emulated_gpu.MissingError, match=r"CMake or a C\+\+ compiler is missing"):
        emulated_gpu.library()
