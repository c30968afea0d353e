"""A run goes on from the newest checkpoint that is whole, whatever has happened to the others."""

import dataclasses
import json
import os
import pickle
import random
import shutil

import pytest
import torch
from corruption import corrupt
from safetensors.torch import load_file
from torch import nn

from adtp_export.data.tokenize import TokenizedText
from adtp_export.errors import InputError
from adtp_export.training.checkpoints import HASHES, STATE, WEIGHTS, broken_seal, files_of, newest_whole, seal
from adtp_export.training.data import Examples
from adtp_export.training.settings import TrainOptions
from adtp_export.training.trainer import Audience, Stage, run_stage

SETTINGS = TrainOptions(batch_size=2, evaluations=4, seed=3)
STEPS = (3, 6, 9, 12)
"""At which the stage is judged and a checkpoint is written; the two newest and the best are kept."""


class Model(nn.Module):
    """A word is worth a number; dropout draws from the random state that checkpoints hold."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.words, self.dropout = nn.Embedding(30, 4), nn.Dropout(0.5)

    def forward(self, input_ids, labels, **rest):
        return {"loss": (self.dropout(self.words(input_ids)).sum((1, 2)) - labels).square().mean()}


class Run:
    """One stage in `work`. scores: of the evaluations, in order; None interrupts."""

    def __init__(self, work, scores=(0.1, 0.4, 0.3, 0.2), patience=None, final_from=0.0):
        self.work, self.scores, self.notes, self.model = work, list(scores), [], Model()
        self.settings, self.final_from = dataclasses.replace(SETTINGS, patience=patience), final_from

    def judged(self):
        done = sum(note.startswith("step ") for note in self.notes)
        if self.scores[done] is None:
            raise KeyboardInterrupt
        return {"score": self.scores[done]}

    def go(self):
        rows = [TokenizedText([1 + i, 2 + i], [0, 0], False) for i in range(24)]
        examples = Examples(encoded=rows, labels=[float(i % 3) for i in range(24)], pad_id=0)
        how = {"epochs": 1, "rate": 0.1, "work": self.work, "final_from": self.final_from}
        stage = Stage(model=self.model, examples=examples, judged=self.judged, **how)
        self.best_is_last = run_stage(stage, self.settings, Audience(lambda done, total: None, self.notes.append))
        return self.model.words.weight.detach().clone()


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Weights of a stage that nothing interrupted: those of step 6."""
    run = Run(tmp_path_factory.mktemp("whole"))
    weights = run.go()
    assert torch.equal(weights, load_file(run.work / "checkpoint-6" / WEIGHTS)["words.weight"])
    return weights


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory):
    """A stage with checkpoints of steps 3 and 6, interrupted at step 9."""
    run = Run(tmp_path_factory.mktemp("interrupted"), (0.1, 0.4, None))
    with pytest.raises(KeyboardInterrupt):
        run.go()
    assert sorted(path.name for path in run.work.iterdir()) == ["checkpoint-3", "checkpoint-6"]
    return run.work


@pytest.fixture
def work(interrupted, tmp_path):
    return shutil.copytree(interrupted, tmp_path / "work")


def halve(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def flip(path):
    """Flip a byte in the middle: of tensors where a file has them."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def empty(path):
    path.write_bytes(b"")


def remove(path):
    path.unlink()


NEEDED = files_of(processes=1)


@pytest.mark.parametrize("damage", [halve, flip, empty, remove])
@pytest.mark.parametrize("file", [*NEEDED, HASHES])
def test_damage_since_a_checkpoint_was_written_is_noticed(work, file, damage):
    checkpoint = work / "checkpoint-6"
    assert broken_seal(checkpoint, NEEDED) is None
    damage(checkpoint / file)
    found = broken_seal(checkpoint, NEEDED)
    assert found is not None
    assert file in found or (file, damage) == (HASHES, flip)  # that names the file whose hash was flipped


def test_a_checkpoint_of_another_number_of_processes_is_noticed(interrupted):
    found = broken_seal(interrupted / "checkpoint-6", files_of(processes=2))
    assert found == f"rng_state_0.pth is missing from {HASHES}"


@pytest.mark.parametrize(("file", "damage"), [(WEIGHTS, flip), ("optimizer.pt", remove)])
def test_a_damaged_checkpoint_is_passed_over(work, whole, file, damage):
    damage(work / "checkpoint-6" / file)
    run = Run(work, (0.4, 0.3, 0.2))
    weights = run.go()
    assert run.notes[0].startswith("passing over checkpoint-6, which is damaged (")
    assert file in run.notes[0]
    assert run.notes[1] == "going on from checkpoint-3"
    assert torch.equal(weights, whole)


class Evil:
    def __reduce__(self):
        return os.system, ("touch executed",)


@pytest.mark.parametrize("file", ["optimizer.pt", "rng_state.pth"])
def test_pickled_objects_are_not_made(work, monkeypatch, file):
    """Not even where somebody wrote hashes for them: transformers unpickles numbers, tensors and arrays alone."""
    monkeypatch.chdir(work)
    torch.save(Evil(), work / "checkpoint-6" / file)
    seal(work / "checkpoint-6")
    with pytest.raises(pickle.UnpicklingError, match="Weights only load failed"):
        Run(work, (0.3, 0.2)).go()
    assert not (work / "executed").exists()


def test_random_damage_is_noticed(interrupted, tmp_path):
    """Of every kind that `corruption.corrupt` knows: any change of a file but the hashes' own is damage."""
    for case in range(60):
        draw = random.Random(f"resume {case}")
        checkpoint = shutil.copytree(interrupted / "checkpoint-6", tmp_path / str(case) / "checkpoint-6")
        path = draw.choice(sorted(checkpoint.iterdir()))
        before = path.read_bytes()
        how = corrupt(path, draw)
        found = broken_seal(checkpoint, NEEDED)
        assert found is None or len(found) < 300, how
        changed = not path.is_file() or path.is_symlink() or path.read_bytes() != before
        if changed and path.name != HASHES:
            assert found, how


def test_what_comes_after_a_damaged_checkpoint_is_kept(tmp_path):
    """Transformers keeps few checkpoints, and takes the damaged one, of a later step, for the newest."""
    run = Run(tmp_path / "work", (0.4, 0.1, 0.3, None))
    with pytest.raises(KeyboardInterrupt):
        run.go()
    flip(run.work / "checkpoint-9" / WEIGHTS)
    again = Run(run.work, (0.1, 0.3, 0.2))
    again.go()
    assert "going on from checkpoint-3" in again.notes
    assert sorted(path.name for path in run.work.iterdir()) == ["checkpoint-12", "checkpoint-3"]


def test_a_first_checkpoint_that_was_being_written_is_no_damage(tmp_path, whole):
    run = Run(tmp_path / "work", (0.1, None))
    with pytest.raises(KeyboardInterrupt):
        run.go()
    (run.work / "checkpoint-3" / HASHES).unlink()
    again = Run(run.work)
    assert torch.equal(again.go(), whole)
    assert again.notes[0] == "passing over checkpoint-3, which was not written to its end"


def test_a_checkpoint_that_was_not_written_to_its_end_is_passed_over(work, whole):
    """Its hashes come last."""
    (work / "checkpoint-6" / HASHES).unlink()
    run = Run(work, (0.4, 0.3, 0.2))
    assert torch.equal(run.go(), whole)
    assert run.notes[:2] == [
        "passing over checkpoint-6, which was not written to its end",
        "going on from checkpoint-3",
    ]


def test_where_none_is_whole_one_message_says_what_to_type(work, whole):
    for checkpoint in work.iterdir():
        flip(checkpoint / WEIGHTS)
    with pytest.raises(InputError) as caught:
        Run(work).go()
    message = str(caught.value)
    assert "checkpoint-6: model.safetensors has changed since it was written" in message
    assert f"type: rm -r {work}, and give --resume again" in message
    shutil.rmtree(work)
    assert torch.equal(Run(work).go(), whole)


@pytest.mark.parametrize(("began", "now"), [(2, 1), (1, 2), (3, 2)])
def test_another_number_of_processes_is_no_damage(tmp_path, began, now):
    (checkpoint := tmp_path / "checkpoint-3").mkdir()
    for name in files_of(began):
        (checkpoint / name).write_text(name)
    seal(checkpoint)
    assert newest_whole(tmp_path, began, print) == checkpoint
    with pytest.raises(
        InputError, match=rf"--resume: got {now} process.*, and {began} began the run; type: .*--resume"
    ):
        newest_whole(tmp_path, now, print)
    flip(checkpoint / WEIGHTS)
    for processes in (began, now):
        with pytest.raises(InputError, match="no checkpoint in .* is whole"):
            newest_whole(tmp_path, processes, print)


@pytest.mark.parametrize("damage", [flip, pytest.param(remove, marks=pytest.mark.slow)])
def test_the_next_best_takes_the_place_of_a_damaged_best(tmp_path, damage):
    run = Run(tmp_path / "work", (0.4, 0.1, 0.3, None))
    with pytest.raises(KeyboardInterrupt):
        run.go()
    assert sorted(path.name for path in run.work.iterdir()) == ["checkpoint-3", "checkpoint-9"]
    damage(run.work / "checkpoint-3" / WEIGHTS)
    again = Run(run.work, (0.2,))
    weights = again.go()
    assert "going on from checkpoint-9" in again.notes
    (told,) = [note for note in again.notes if note.startswith("the best checkpoint so far is damaged (")]
    assert told.endswith("; checkpoint-9 takes its place")
    assert torch.equal(weights, load_file(run.work / "checkpoint-9" / WEIGHTS)["words.weight"])


def test_the_best_is_found_where_the_run_was_moved(interrupted, whole, tmp_path):
    moved = shutil.copytree(interrupted, tmp_path / "moved")
    run = Run(moved, (0.3, 0.2))
    assert torch.equal(run.go(), whole)
    state = json.loads((moved / "checkpoint-12" / STATE).read_text())
    assert state["best_model_checkpoint"] == str(moved / "checkpoint-6")
