"""Floors of coverage: what falls below is named, and they only rise."""

import json

import pytest
from coverage_by_room import FLOORS, main, percentages, room
from test_rooms import ROOMS


def report(**percent):
    files = {
        f"adtp_export/{name}/x.py": {"summary": {"num_statements": 1000, "covered_lines": round(10 * value)}}
        for name, value in percent.items()
    }
    return {"files": files}


@pytest.fixture
def run(tmp_path):
    floors, found = tmp_path / "floors.json", tmp_path / "coverage.json"
    floors.write_text(json.dumps({"graph": 90, "model": 80}))

    def run(*options, **percent):
        found.write_text(json.dumps(report(**percent)))
        return main([str(found), *options], floors), json.loads(floors.read_text())

    return run


def test_rooms_are_those_of_the_tree():
    assert room("adtp_export/io.py") == "io"
    assert room("adtp_export/model/heads/sequence.py") == "model"
    assert room("calibration/plan.py") == "calibration"
    assert room("adtp_export/__init__.py") is None
    assert room("benchmarks/render/__main__.py") is None
    assert set(json.loads(FLOORS.read_text())) == {name.removesuffix(".py") for name in ROOMS} - {"tests"}


def test_lines_are_summed_over_the_files_of_a_room():
    files = report(graph=50)["files"] | {
        "adtp_export/graph/y.py": {"summary": {"num_statements": 3000, "covered_lines": 3000}},
        "adtp_export/graph/empty.py": {"summary": {"num_statements": 0, "covered_lines": 0}},
    }
    assert percentages({"files": files}) == {"graph": 87.5}


def test_a_room_below_its_floor_fails_and_is_named(run, capsys):
    assert run(graph=90, model=80)[0] == 0
    assert run(graph=89.9, model=99)[0] == 1
    assert "graph has 89.9% of its lines covered, its floor is 90%" in capsys.readouterr().out
    assert run(graph=99)[0] == 1  # nothing of model ran
    assert run(graph=99, model=99, verify=99)[0] == 1
    assert (
        "verify has no floor above 0, so nothing holds it; type: make coverage RAISE=--raise" in capsys.readouterr().out
    )
    assert run("--raise", graph=99, model=99, verify=0.5)[0] == 1  # it would stay green when the last test is gone


def test_floors_only_rise(run):
    assert run("--raise", graph=95.7, model=79, verify=50.2) == (1, {"graph": 95, "model": 80, "verify": 50})
    assert run("--raise", graph=95, model=80, verify=50.2) == (0, {"graph": 95, "model": 80, "verify": 50})
