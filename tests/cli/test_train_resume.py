"""A run that was stopped goes on, whatever has happened to its files meanwhile."""

import os
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from training_runs import Heard
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from adtp_export.errors import InputError
from adtp_export.pipeline.train import directory as directory_room
from adtp_export.pipeline.train.train import train
from adtp_export.training import stages
from adtp_export.training.settings import TrainOptions
from adtp_export.training.task import read_task
from adtp_export.training.trainer import Audience


class Stopped(Heard):
    """Stops the run at an evaluation of the student."""

    def __init__(self, at):
        super().__init__()
        self.at = at

    def note(self, text):
        super().note(text)
        if sum("kept_0.ffn" in note for note in self.notes) == self.at:
            raise KeyboardInterrupt


@pytest.fixture(scope="module")
def stopped(tmp_path_factory, base, reviews):
    """A run that was stopped while the student was trained, and the student that it makes when it is gone on with."""
    out = tmp_path_factory.mktemp("stopped") / "run"
    rates = {"max_tokens": 48, "batch_size": 8, "teacher_learning_rate": 2e-3, "epochs": 1, "evaluations": 2}
    steps = Stopped(2)
    with pytest.raises(KeyboardInterrupt):
        train(out, base=base, train=reviews / "train.tsv", train_rows=32, steps=steps, **rates)
    assert steps.notes[-1] == f"what is done stays; to go on, type: adtp-train --out {out} --resume"
    resumed = shutil.copytree(out, out.with_name("resumed"))
    settings = (resumed / "train.yaml").read_text()
    assert "mixed_precision: 'no'\n" in settings
    (resumed / "train.yaml").write_text(settings.replace("mixed_precision: 'no'\n", ""))  # as earlier versions wrote it
    train(resumed, resume=True)
    assert not list(resumed.rglob("sha256.json"))
    return out, load_file(resumed / "model.safetensors")


def flip(path):
    content = bytearray(path.read_bytes())
    content[-5] ^= 1
    path.write_bytes(content)


def test_a_damaged_cache_and_teacher_are_made_anew(stopped, tmp_path):
    out = shutil.copytree(stopped[0], tmp_path / "out")
    views = {path: path.read_bytes() for path in (out / "work" / "attribution").iterdir()}
    assert len(views) == 2  # of the training rows, and of the dev rows, which stand in for the test rows
    for path in (*views, out / "teacher" / "model.safetensors"):
        flip(path)
    steps = Stopped(1)
    with pytest.raises(KeyboardInterrupt):
        train(out, resume=True, steps=steps)
    assert {path: path.read_bytes() for path in views} == views
    teacher = out / "teacher" / "model.safetensors"
    assert teacher.read_bytes() == (stopped[0] / "teacher" / "model.safetensors").read_bytes()
    for path in views:
        told = f"{path.name} in attribution is damaged (it has changed since it was written) and is computed anew"
        assert told in steps.notes
    (told,) = [note for note in steps.notes if note.startswith(f"the teacher in {out / 'teacher'} is damaged (")]
    assert "model.safetensors has changed since it was written" in told
    steps = Heard()
    train(out, resume=True, steps=steps)
    assert not any("damaged" in note for note in steps.notes)
    student = load_file(out / "model.safetensors")
    assert all(stopped[1][name].equal(student[name]) for name in stopped[1])


def empty(path):
    path.write_bytes(b"")


def without_a_hash(path):
    save_file({name: tensor[:1] for name, tensor in load_file(path).items()}, path)


@pytest.mark.parametrize("damage", [empty, without_a_hash, os.unlink])
def test_a_cache_of_other_rows_is_computed_anew(stopped, tmp_path, damage):
    """Files that cannot be read, and files of an earlier version, which have no hash, of other shapes."""
    out = shutil.copytree(stopped[0], tmp_path / "out")
    views = {path: path.read_bytes() for path in (out / "work" / "attribution").iterdir()}
    for path in views:
        damage(path)
    steps = Stopped(1)
    with pytest.raises(KeyboardInterrupt):
        train(out, resume=True, steps=steps)
    assert {path: path.read_bytes() for path in views} == views
    assert sum("is damaged" in note for note in steps.notes) == (0 if damage is os.unlink else 2)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("kappa: 0.5\n", "", "train.yaml has no kappa: it is damaged, or of another version"),
        ("base: ", "base: null # ", "give either --base MODEL"),
    ],
)
def test_settings_of_an_interrupted_run_that_are_damaged(stopped, tmp_path, old, new, message):
    out = shutil.copytree(stopped[0], tmp_path / "out")
    settings = (out / "train.yaml").read_text()
    (out / "train.yaml").write_text(settings.replace(old, new))
    with pytest.raises(InputError, match=message):
        train(out, resume=True)


@pytest.mark.parametrize("damaged", ["", "[1]", '{"train": '])
def test_damaged_hashes_of_its_inputs_are_told(stopped, tmp_path, damaged):
    out = shutil.copytree(stopped[0], tmp_path / "out")
    (out / "work" / "inputs.json").write_text(damaged)
    with pytest.raises(
        InputError, match=r"--resume: .*inputs\.json is damaged; remove it if data and model are as they were"
    ):
        train(out, resume=True)


def test_data_and_models_may_lie_elsewhere(stopped, base, reviews, tmp_path):
    out, moved = shutil.copytree(stopped[0], tmp_path / "out"), tmp_path / "moved.tsv"
    shutil.copy(reviews / "train.tsv", moved)
    with pytest.raises(KeyboardInterrupt):
        train(out, resume=True, train=moved, base=shutil.copytree(base, tmp_path / "base"), steps=Stopped(1))
    os.mkfifo(tmp_path / "pipe.tsv")
    others = [shutil.copy(moved, tmp_path / "moved.txt"), tmp_path / "pipe.tsv", tmp_path / ("x" * 300), moved]
    moved.write_text(moved.read_text().replace("the", "a"))
    for other in others:
        with pytest.raises(InputError, match=r"begun with other settings \(train\)"):
            train(out, resume=True, train=other)


def test_a_teacher_that_answers_one_class_is_told(stopped, reviews, tmp_path):
    """A classifier whose bias decides; with its own labels alone it is right."""
    teacher = AutoModelForSequenceClassification.from_pretrained(stopped[0] / "teacher")
    teacher.classifier.bias.data[1] += 1e3
    teacher.save_pretrained(tmp_path / "teacher")
    AutoTokenizer.from_pretrained(stopped[0] / "teacher").save_pretrained(tmp_path / "teacher")
    rows = (reviews / "test.tsv").read_text().splitlines(keepends=True)
    (tmp_path / "positive.tsv").write_text("".join(row for row in rows if not row.endswith("negative\n")))
    share = sum(row.endswith("positive\n") for row in rows) / (len(rows) - 1)
    for test, told in ((reviews / "test.tsv", True), (tmp_path / "positive.tsv", False)):
        data = {"train": reviews / "train.tsv", "train_rows": 32, "test": test, "teacher": tmp_path / "teacher"}
        steps = Stopped(1)
        with pytest.raises(KeyboardInterrupt):
            train(tmp_path / test.stem, steps=steps, max_tokens=48, evaluations=2, epochs=1, **data)
        notes = [note for note in steps.notes if note.startswith("the teacher answers ")]
        expected = f"the teacher answers 'positive' for 100.0% of the rows; {share:.1%} of them have that label. "
        assert [note.startswith(expected) for note in notes] == [True] * told


def test_two_runs_with_one_cache_do_not_meet(stopped, reviews, tmp_path, monkeypatch):
    """One begins to write what the other one is writing."""
    rows = {"train": str(reviews / "train.tsv"), "train_rows": 8, "dev_share": 0.9, "max_tokens": 48}
    task = read_task(TrainOptions(teacher=str(stopped[0] / "teacher"), method="random", **rows))
    teacher = task.load_teacher(task.source, tuned=True)
    audience, cache, real, others = Audience(lambda *_: None, print), tmp_path / "cache", stages.save_file, []

    def explained():
        return stages.explained(teacher, task.parts["train"], task, cache, audience)

    def save_file(*arguments):
        if not others:
            others.append(None)
            others.append(explained())
        real(*arguments)

    monkeypatch.setattr(stages, "save_file", save_file)
    mine = explained()
    assert [path.suffix for path in cache.iterdir()] == [".safetensors"]
    assert torch.equal(torch.stack(list(mine.teacher_logits)), torch.stack(list(others[1].teacher_logits)))

    def full(_, path, *rest):
        path.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(stages, "save_file", full)
    shutil.rmtree(cache)
    with pytest.raises(OSError, match="No space"):
        explained()
    assert list(cache.iterdir()) == []


def test_a_cache_is_a_directory(tmp_path, base, reviews):
    (tmp_path / "cache").write_text("")
    with pytest.raises(InputError, match="cache is a file; give a directory"):
        train(tmp_path / "out", base=base, train=reviews / "train.tsv", cache=tmp_path / "cache")
    assert not (tmp_path / "out").exists()


def test_an_empty_directory_stays_one_where_a_run_cannot_begin(tmp_path, base, reviews, monkeypatch):
    out = tmp_path / "out"
    out.mkdir()
    for name in ("_inputs", "as_yaml"):
        with monkeypatch.context() as patched:
            patched.setattr(directory_room, name, interrupted)
            with pytest.raises(KeyboardInterrupt):
                train(out, base=str(base), train=str(reviews / "train.tsv"), max_tokens=48)
        assert list(out.iterdir()) == []


def interrupted(*given):
    raise KeyboardInterrupt
