"""The directory of a run of adtp-tune: who may go on there, and what another choice replaces."""

import errno
import json
import os
import shutil
from types import SimpleNamespace

import numpy as np
import pytest
from training_runs import Heard

from adtp_export.errors import InputError
from adtp_export.io import hold, read_json
from adtp_export.pipeline.tune import directory, exports
from adtp_export.pipeline.tune.directory import TOLD
from adtp_export.pipeline.tune.options import TuneOptions
from adtp_export.pipeline.tune.plan import Plan
from adtp_export.pipeline.tune.run import _timed_shapes
from adtp_export.pipeline.tune.shapes import Arm
from adtp_export.pipeline.tune.students import RECORD, WEIGHTS, Students, Trial
from adtp_export.training.checkpoints import seal


def test_a_run_is_gone_on_with_as_it_was_begun(tmp_path):
    files = {name: tmp_path / name for name in ("train", "dev")}
    for path in (*files.values(), tmp_path / "model.safetensors"):
        path.write_text("first")
    out = tmp_path / "out"

    def begun(**more):
        chosen = TuneOptions(model=tmp_path, out=out, workload=files["dev"], **files, **more)
        with directory.claimed(chosen) as finished:
            return finished

    assert not begun(batch_size=8)
    assert not begun()  # nothing was made with the other settings: perhaps they were refused
    (out / "work" / directory.TABLE).write_text("{}")
    with pytest.raises(InputError, match=r"other settings \(batch_size\)"):
        begun(batch_size=8)
    assert not begun(max_drop=2.0)  # times of shapes alone are there
    (out / "work" / directory.PLAN).write_text("{}")
    with pytest.raises(InputError, match="an unfinished run; add --resume"):
        begun(max_drop=2.0)
    assert not begun(max_drop=2.0, resume=True)
    with pytest.raises(InputError, match=r"other settings \(max_drop\)"):
        begun(max_drop=3.0, resume=True)
    (out / directory.RESULTS).write_text("{}")
    assert begun(max_drop=3.0)
    (out / directory.STUDENT).mkdir()
    (out / directory.STUDENT / "notes.txt").write_text("mine")
    with pytest.raises(InputError, match=r"holds more than a student.*: notes.txt; move that elsewhere"):
        begun(max_drop=3.0)  # before anything is exported and timed
    shutil.rmtree(out / directory.STUDENT)
    settings = json.loads((out / directory.SETTINGS).read_text())
    del settings["options"]["mixed_precision"]  # as an earlier version wrote it
    (out / directory.SETTINGS).write_text(json.dumps(settings))
    assert begun()
    with pytest.raises(InputError, match=r"other settings \(mixed_precision\)"):
        begun(mixed_precision="bf16")
    (tmp_path / "moved").mkdir()
    files["train"] = shutil.move(files["train"], tmp_path / "moved")
    assert begun()
    lock = hold(out)
    with pytest.raises(InputError, match="another run works in"):
        begun()
    os.close(lock)
    (tmp_path / "model.safetensors").write_text("second")
    with pytest.raises(InputError, match=r"other settings \(the content of model\)"):
        begun()
    (tmp_path / "model.safetensors").write_text("first")
    shutil.rmtree(out / "work")
    with pytest.raises(InputError, match="a run without its work/, so nothing else can be chosen"):
        begun()
    (out / directory.SETTINGS).write_text("{}")
    with pytest.raises(InputError, match="is not of adtp-tune"):
        begun()


def test_another_choice_replaces_what_a_run_published_and_nothing_else(exported, tmp_path):
    out = tmp_path / "out"
    trial = out / "work" / directory.TRIALS / "a"
    trial.mkdir(parents=True)
    for name in ("config.json", WEIGHTS, TOLD):
        (trial / name).write_text(name)

    def files():
        return sorted(path.relative_to(out).as_posix() for path in out.rglob("*") if "work" not in path.parts)

    directory.publish(out, trial, exported)
    directory.publish(out, trial, exported)
    published = files()
    assert {"student/config.json", f"student/{WEIGHTS}", "export/model.onnx"} <= set(published)
    assert f"student/{TOLD}" not in published
    for place, told in (("student", "more than a student"), ("export", "manifest.json does not list")):
        notes = out / place / "notes.txt"
        notes.write_text("mine")
        for student in (trial, None):
            with pytest.raises(InputError, match=f"{told}.*: notes.txt; move that elsewhere"):
                directory.publish(out, student, exported)
        assert files() == sorted([*published, f"{place}/notes.txt"])
        notes.unlink()
    directory.publish(out, None, exported)
    assert files() == [name for name in published if not name.startswith("student")]


def test_a_disk_that_is_full_while_a_choice_is_published_leaves_the_one_before(exported, tmp_path, monkeypatch):
    out, trials = tmp_path / "out", [tmp_path / "trials" / name for name in "ab"]
    for trial in trials:
        trial.mkdir(parents=True)
        (trial / WEIGHTS).write_text(trial.name)
    directory.publish(out, trials[0], exported)
    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    usual = shutil.copytree

    def full(source, *rest, **more):
        if source == exported:
            raise OSError(errno.ENOSPC, "No space left on device")
        return usual(source, *rest, **more)

    monkeypatch.setattr(shutil, "copytree", full)
    for student in (trials[1], None):
        with pytest.raises(InputError, match="export: the disk is full"):
            directory.publish(out, student, exported)
        assert {path: path.read_bytes() for path in out.rglob("*") if path.is_file()} == before


def test_names_that_are_no_text_are_written(tmp_path):
    """Of a file that was named where names were not in UTF-8."""
    settings = {"train": "donn\udce9es.tsv", "label": "\u00e9"}
    directory.write(tmp_path / "tune.json", settings)
    assert read_json(tmp_path / "tune.json") == settings
    assert "\u00e9" in (tmp_path / "tune.json").read_text(encoding="utf-8")


@pytest.fixture
def kept(tmp_path):
    """The students of a run: `a` with its weights, and `b` without."""

    def opened():
        return Students(tmp_path, tmp_path / "work", rows=4)

    lines = []
    for name in "ab":
        place = tmp_path / "work" / directory.TRIALS / name
        place.mkdir(parents=True)
        (place / WEIGHTS).write_bytes(bytes(1000))
        np.savez(place / TOLD, loss=np.ones(4), score=np.ones(4))
        seal(place)
        trial = Trial(name=name, arm=Arm(2, "0.ffn", 0.5), rows=8, start="", loss=1.0, drop=0.0)
        lines.append(json.dumps(trial.to_json()) + "\n")
    (tmp_path / RECORD).write_text("".join(lines))
    students = opened()
    students.forget(students.done["b"])
    return tmp_path, opened


def test_students_that_are_as_they_were_written_are_used(kept):
    out, opened = kept
    (out / RECORD).write_text((out / RECORD).read_text().replace("\n", "\n\n"))  # as editors leave it
    students = opened()
    students.check_complete()
    assert [trial.name for trial in students.can_be_chosen()] == ["a"]
    for name, trial in students.done.items():
        assert students.sound(trial).name == name
        assert students.told(trial).score.tolist() == [1.0] * 4


def test_damaged_students_and_records_are_refused(kept):
    out, opened = kept
    place, record = out / "work" / directory.TRIALS / "a", (out / RECORD).read_text()
    students = opened()
    os.truncate(place / TOLD, 100)
    with pytest.raises(InputError, match=rf"a/{TOLD} is damaged .*, so nothing can be chosen there"):
        students.told(students.done["a"])
    seal(place)
    (place / WEIGHTS).write_bytes(bytes(999) + b"x")
    with pytest.raises(InputError, match=rf"a is damaged \({WEIGHTS} has changed since it was written\)"):
        students.sound(students.done["a"])
    (out / RECORD).write_text(record.replace('"rows": 8', '"rows": ', 1))
    with pytest.raises(InputError, match=f"{RECORD}, line 1: it is damaged"):
        opened()
    for partial in (record.splitlines(keepends=True)[0], ""):
        (out / RECORD).write_text(partial)
        with pytest.raises(InputError, match="does not name all students of the run"):
            opened().check_complete()


PLANNED = {"levels": [{"speedup": 2.0, "arms": []}], "rungs": [8], "refined": 8, "seconds": {}}
TIMED = {"trace_s": 1.0, "times": [{"layers": 2, "site": "", "retention": 1.0, "precision": "fp32", "ms": 1.0}]}


@pytest.mark.parametrize(
    ("build", "whole", "damaged"),
    [
        (Plan.of, PLANNED, [{"levels": [{"speedup": 2.0}]}, {"rungs": "ab"}, {"refined": None}, {"seconds": 1}]),
        (
            _timed_shapes,
            TIMED,
            [{"trace_s": None}, {"times": [{"layers": 2}]}, {"times": [1]}, {"device": {"cores": 1}}],
        ),
    ],
    ids=["plan", "times"],
)
def test_damaged_plans_and_times_of_shapes_are_told(tmp_path, build, whole, damaged):
    path = tmp_path / "stored.json"
    path.write_text(json.dumps(whole))
    directory.stored(path, build)
    for change in damaged:
        path.write_text(json.dumps({**whole, **change}))
        with pytest.raises(
            InputError, match=r"--out: .*stored\.json is damaged, or of another version \(.*; give another --out"
        ):
            directory.stored(path, build)
    for text in ("", "[]", "1"):
        path.write_text(text)
        with pytest.raises(InputError, match=r"^--out: .*stored\.json .*; give another --out$"):
            directory.stored(path, build)


@pytest.mark.parametrize("damaged", ["", "[1]", '{"a fp32": 1}', '{"a fp32": {"a fp32": {}}}'])
def test_damaged_times_of_candidates_are_made_anew(tmp_path, monkeypatch, damaged):
    figures = {"ms": 1.0, "speedup": 2.0, "margin": 0.1}
    monkeypatch.setattr(exports.times, "deployed", lambda asked, *_: dict.fromkeys(asked, figures))
    built = {name: SimpleNamespace(path=tmp_path, targets={"fp32": "t"}) for name in ("model", "a")}

    def timed():
        return exports.timed(built, [("a", "fp32")], None, tmp_path, steps)

    (tmp_path / exports.TIMES).write_text(damaged)
    steps = Heard()
    assert timed().times["a fp32"] == figures
    told = f"{tmp_path / exports.TIMES} is damaged, or of another version, so the candidates are timed anew"
    assert steps.notes == [told]
    monkeypatch.delattr(exports.times, "deployed")
    assert timed().times["a fp32"] == figures
    assert steps.notes == [told]


def test_times_of_candidates_on_another_machine_are_told(tmp_path, monkeypatch):
    """They stay, so that the same student is chosen; results say where they were taken. So do margins of a busy machine."""
    figures = {"ms": 1.0, "speedup": 2.0, "margin": 1.0}
    monkeypatch.setattr(exports.times, "deployed", lambda asked, *_: dict.fromkeys(asked, figures))
    built = {name: SimpleNamespace(path=tmp_path, targets={"fp32": "t"}) for name in ("model", "a")}
    notes = []
    for fingerprint in ("first", "first", "second"):
        there = {"model": f"{fingerprint} processor", "fingerprint": fingerprint}
        monkeypatch.setattr(exports, "cpu", lambda threads, there=there: there)
        monkeypatch.setattr(exports, "fingerprint", lambda fingerprint=fingerprint: fingerprint)
        steps = Heard()
        assert exports.timed(built, [("a", "fp32")], None, tmp_path, steps).device["model"] == "first processor"
        assert steps.notes[-1].startswith("the machine was busy")
        assert f"to time them again, remove {tmp_path / exports.TIMES} and give the same command" in steps.notes[-1]
        notes.append(steps.notes[:-1])
    assert notes == [[], [], ["candidates were timed on another machine (first processor); this one may differ"]]


@pytest.mark.parametrize("damaged", ["[]", '{"options": [], "sha256": {}}', '{"options": {}, "sha256": null}', "{}"])
def test_settings_of_something_else_are_refused(tmp_path, damaged):
    (tmp_path / directory.SETTINGS).write_text(damaged)
    chosen = TuneOptions(model=tmp_path, out=tmp_path, train=tmp_path / directory.SETTINGS)
    with pytest.raises(InputError, match="is not of adtp-tune"), directory.claimed(chosen):
        pass


def test_a_published_student_is_known_by_names_alone(kept, exported):
    """It is that of a trial whose files may be gone."""
    out, opened = kept
    students = opened()
    directory.publish(out, students.sound(students.done["a"]), exported)
    assert {path.name for path in (out / directory.STUDENT).iterdir()} == {WEIGHTS}
    shutil.rmtree(out / "work" / directory.TRIALS)
    directory.published(out)
