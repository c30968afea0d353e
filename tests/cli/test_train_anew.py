"""`--force` replaces a run of `adtp-train` as a whole, and nothing else."""

import contextlib
import os
import shutil
from pathlib import Path

import pytest
from training_runs import Heard

from adtp_export.artifacts.checks import contents
from adtp_export.artifacts.directory import alone_in
from adtp_export.errors import InputError
from adtp_export.pipeline.train import directory as room
from adtp_export.pipeline.train.train import train
from adtp_export.training.checkpoints import forget_newer
from adtp_export.training.settings import TrainOptions, as_yaml

pytest.importorskip("accelerate")


class Begun(Heard):
    """Stops a run at its first note, once it has its directory; keeps those before."""

    def note(self, text):
        super().note(text)
        if "classes" in text:
            raise KeyboardInterrupt


@pytest.fixture
def begin(base, reviews):
    """A function that begins a run and stops it; it gives what the run told."""

    def run(out, **options):
        steps = Begun()
        with pytest.raises(KeyboardInterrupt):
            train(out, steps=steps, **{"base": base, "train": reviews / "train.tsv", "max_tokens": 48, **options})
        return steps.notes

    return run


BEGUN = ["train.yaml", "work/inputs.json"]
"""What a run writes first."""


def files(directory):
    return sorted(path.relative_to(directory).as_posix() for path in directory.rglob("*") if path.is_file())


@pytest.fixture
def run(tmp_path):
    """A directory with all that a run writes; of some files the names alone."""
    out = tmp_path / "run"
    names = [
        "config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
        "sentence_bert_config.json",
        "results.json",
        "teacher/config.json",
        "teacher/model.safetensors",
        "teacher/vocab.txt",
        "teacher/sha256.json",
        "work/inputs.json",
        "work/teacher-done/model.safetensors",
        "work/teacher/checkpoint-3/optimizer.pt",
        "work/student/checkpoint-12/model.safetensors",
        "work/student/checkpoint-12/trainer_state.json",
        "work/student/checkpoint-12/rng_state_0.pth",
        "work/student/checkpoint-12/training_args.bin",
        f"work/attribution/{16 * '0f'}.safetensors",
        f"work/attribution/{16 * '0f'}.safetensors.1a2b3c4d.partial",
        "results.json.1a2b3c4d.partial",
    ]
    for name in names:
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        (out / name).write_text("old")
    (out / "train.yaml").write_text(as_yaml(TrainOptions(base="x", train="y", seed=7)))
    return out


def test_a_run_is_replaced_as_a_whole(run, begin):
    begin(run, force=True, seed=8)
    assert files(run) == BEGUN
    assert "seed: 8" in (run / "train.yaml").read_text()
    begin(run, force=True, seed=9)  # one that has not written anything yet is a run, too
    assert "seed: 9" in (run / "train.yaml").read_text()
    assert os.listdir(run.parent) == ["run"]


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("notes.txt", "notes.txt"),
        (".git/config", ".git"),
        ("src/model.py", "src"),
        ("teacher/notes.txt", "teacher/notes.txt"),
        ("work/thesis.tex", "work/thesis.tex"),
        ("work/student/checkpoint-12/mine/model.safetensors", "work/student/checkpoint-12/mine"),
        ("work/student/checkpoint-12/notes.txt", "work/student/checkpoint-12/notes.txt"),
        ("model-v1.safetensors", "model-v1.safetensors"),
        ("teacher/model-best.safetensors", "teacher/model-best.safetensors"),
        ("my.model", "my.model"),
        ("vocab.backup", "vocab.backup"),
        ("optimizer.pt", "optimizer.pt"),
    ],
)
def test_what_no_run_wrote_is_kept(run, begin, name, told):
    (run / name).parent.mkdir(parents=True, exist_ok=True)
    (run / name).write_text("mine")
    before = files(run)
    with pytest.raises(InputError, match=rf"more than a run of adtp-train.*: {told}.*; move that elsewhere"):
        begin(run, force=True)
    assert files(run) == before
    assert "seed: 7" in (run / "train.yaml").read_text()


@pytest.mark.parametrize(
    ("settings", "others", "message"),
    [
        ("epochs: 3\n", ["notes.txt"], "beside train.yaml it has neither work, teacher nor results.json"),
        ("model: resnet\n", ["results.json"], "unknown option 'model'"),
        ("- a\n", ["teacher/model.safetensors"], "accepted is a mapping"),
        (None, ["results.json"], "no run of adtp-train, so --force does not remove it"),
    ],
)
def test_a_folder_with_some_train_yaml_is_no_run(tmp_path, begin, settings, others, message):
    out = tmp_path / "project"
    for name in others:
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        (out / name).write_text("mine")
    if settings is not None:
        (out / "train.yaml").write_text(settings)
    before = files(out)
    with pytest.raises(InputError, match=message):
        begin(out, force=True)
    assert files(out) == before


@pytest.mark.parametrize("what", ["config", "cache", "train", "test", "base", "linked"])
def test_what_the_run_needs_is_not_removed(run, begin, base, reviews, tmp_path, what):
    config = tmp_path / "mine.yaml"
    config.write_text("epochs: 3\n")
    given = {"config": config, "cache": tmp_path / "cache"}
    if what == "config":
        given["config"] = run / "train.yaml"
    elif what == "cache":
        given["cache"] = run / "work" / "attribution"
    elif what == "base":
        shutil.rmtree(run / "teacher")
        given["base"] = shutil.copytree(base, run / "teacher")
    elif what == "linked":
        shutil.rmtree(run / "teacher")
        given["base"] = tmp_path / "linked"
        given["base"].mkdir()
        for path in shutil.copytree(base, run / "teacher").iterdir():
            (given["base"] / path.name).symlink_to(path)
    else:  # by a link, as the names inside are all known
        (tmp_path / "rows.tsv").symlink_to(run / "results.json")
        shutil.copyfile(reviews / "train.tsv", run / "results.json")
        given[what] = tmp_path / "rows.tsv"
    before = files(run)
    with pytest.raises(InputError, match=r"--force would remove .*, which this run needs; move it, or give another"):
        begin(run, force=True, **given)
    assert files(run) == before


@contextlib.contextmanager
def undeletable(name):
    """Files of a name cannot be deleted, whoever runs the tests."""
    real = os.unlink

    def unlink(path, *arguments, **options):
        if Path(os.fsdecode(path)).name == name:
            raise PermissionError(1, "Operation not permitted", os.fsdecode(path))
        real(path, *arguments, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "unlink", unlink)
        yield


def test_an_old_teacher_that_cannot_be_deleted_is_not_taken_for_the_new_one(run, begin):
    with undeletable("model.safetensors"):
        notes = begin(run, force=True, seed=8)
        assert files(run) == BEGUN
        (left,) = set(run.parent.iterdir()) - {run}
        assert (left / "teacher" / "model.safetensors").read_text() == "old"
        assert notes[0] == f"what is left of the earlier run cannot be removed; remove it yourself: {left}"
    begin(run, force=True)
    assert list(run.parent.iterdir()) == [run]


def test_a_run_that_a_killed_one_moved_aside_comes_back(run, begin):
    """Where the system has no exchange in one step."""
    run.rename(run.with_name(".run.adtp-old-x"))
    with pytest.raises(InputError, match="run exists; use --force to start anew"):
        begin(run)
    assert (run / "teacher" / "model.safetensors").exists()
    run.rename(run.with_name(".run.adtp-old-x"))
    with pytest.raises(InputError, match="is finished"):
        train(run, resume=True)
    assert list(run.parent.iterdir()) == [run]


def test_what_a_killed_run_left_is_cleared_by_the_one_that_goes_on(run, begin):
    """It was killed after the exchange, before the earlier run was removed."""
    left = shutil.copytree(run, run.with_name(".run.adtp-work-x"))
    begin(run, force=True)
    assert not left.exists()
    shutil.copytree(run, left)
    with pytest.raises(KeyboardInterrupt):
        train(run, resume=True, steps=Begun())
    assert list(run.parent.iterdir()) == [run]


def test_what_is_hashed_of_models_and_data(tmp_path):
    """What is read, and no notes beside it; an earlier version hashed less, under other names."""
    model, data = tmp_path / "model", tmp_path / "data"
    read = ["model/config.json", "model/vocab.txt", "model/1_Pooling/config.json", "model/pytorch_model.bin"]
    read += ["data/a.json", "data/train.jsonl.gz", "data/data/train-0.parquet"]
    others = ["model/README.txt", "model/notes.json", "model/run/results.json", "data/run/results.json"]
    for name in (*read, *others):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("{}")

    def hashes():
        return contents({"base": model, "data": data, "train": model / "config.json", "dev": None, "test": "nowhere"})

    before = hashes()
    assert set(before) == {"base/", "data/", "train"}
    for name in (*read, *others):
        (tmp_path / name).write_text("changed")
        assert (hashes() != before) == (name in read), name
        (tmp_path / name).write_text("{}")


@pytest.mark.parametrize("name", ["train.tsv", "base/model.safetensors", "base/tokenizer.json"])
def test_a_run_goes_on_with_what_it_was_begun_with(tmp_path, begin, base, reviews, name):
    given = {"train": tmp_path / "train.tsv", "base": tmp_path / "base"}
    shutil.copyfile(reviews / "train.tsv", given["train"])
    shutil.copytree(base, given["base"])
    out = tmp_path / "out"
    begin(out, **given)
    begin(out, base=None, train=None, max_tokens=None, resume=True)
    file, changed = tmp_path / name, name.partition("/")[0].removesuffix(".tsv")
    before = file.read_bytes()
    file.write_bytes(before[:-1] + bytes([before[-1] ^ 1]))
    with pytest.raises(
        InputError, match=f"--{changed} changed since the run in .* was begun; bring back what was there"
    ):
        begin(out, base=None, train=None, max_tokens=None, resume=True)
    file.write_bytes(before)
    begin(out, base=None, train=None, max_tokens=None, resume=True)


def test_an_empty_directory_is_trained_in_where_it_is(tmp_path, begin, monkeypatch):
    """It may be a mount point, which nothing can take the place of, or the current directory."""
    (tmp_path / "out").mkdir()
    inode = (tmp_path / "out").stat().st_ino
    monkeypatch.chdir(tmp_path / "out")
    begin(Path("."))
    assert (tmp_path / "out").stat().st_ino == inode
    assert files(tmp_path / "out") == BEGUN
    with pytest.raises(InputError, match="is or holds the current directory"):
        begin(Path("."), force=True)


def test_where_out_leads_is_replaced_and_the_link_stays(run, begin, tmp_path):
    link = tmp_path / "link"
    link.symlink_to(run)
    begin(link, force=True, seed=8)
    assert link.is_symlink()
    assert files(run) == BEGUN


def test_checkpoints_that_cannot_be_removed_end_the_run(run):
    """transformers would take a half of one for the newest."""
    last = run / "work" / "teacher" / "checkpoint-2"
    with (
        undeletable("optimizer.pt"),
        pytest.raises(InputError, match=r"optimizer\.pt cannot be removed .*; remove .*checkpoint-3 yourself"),
    ):
        forget_newer(last)


def test_what_an_interrupted_run_needs_stays_until_the_student_is_on_the_disk(run, monkeypatch):
    flushed, real, remove = [], os.fsync, shutil.rmtree

    def fsync(file):
        flushed.append(Path(os.readlink(f"/proc/self/fd/{file}")))
        real(file)

    def rmtree(path, **options):
        kept = [path for path in run.rglob("*") if not path.is_relative_to(run / "work")]
        assert set(flushed) == {run, *kept}
        assert flushed[-1] == run
        remove(path, **options)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(shutil, "rmtree", rmtree)
    room.finish(run, "{}\n")
    assert (run / "results.json").read_text() == "{}\n"
    assert not (run / "work").exists()


def test_all_names_of_a_run_are_known(run):
    assert all(room._OURS.fullmatch(name) for name in files(run))


def test_a_run_is_alone_in_its_directory(begin, base, reviews, tmp_path):
    """Or a second one would take the checkpoint that the first one is writing for what a killed run left."""
    out = tmp_path / "run"
    begin(out)
    before = files(out)
    with alone_in(out):
        for more in ({"resume": True}, {"force": True, "base": base, "train": reviews / "train.tsv", "max_tokens": 48}):
            with pytest.raises(InputError, match="another run works in .*; wait for its end, or give another --out"):
                train(out, steps=Heard(), **more)
    assert files(out) == before
    begin(out, force=True)
