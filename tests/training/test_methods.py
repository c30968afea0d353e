"""Every method trains a student to its budget, and its checkpoint exports untouched."""

import dataclasses
import json
import os
import random
import re
import subprocess
import sys

import numpy as np
import pytest
import scipy.stats
import torch
from safetensors.torch import load_file
from training_runs import Heard
from transformers import AutoModelForSequenceClassification

import adtp_export
from adtp_export.errors import InputError, flag_name
from adtp_export.model.flops import Shape
from adtp_export.pipeline.train.train import train
from adtp_export.training.budget import check_tokens_left
from adtp_export.training.evaluate import ask
from adtp_export.training.methods.base import SLACK
from adtp_export.training.models import make_student
from adtp_export.training.settings import TrainOptions
from adtp_export.training.task import read_task

pytest.importorskip("accelerate")

FLOPS = 0.6
LEAST = 0.53
"""Of a student of that budget: ToP has 20 bins, of 2.5% of the FLOPs each at this site, and thresholds fall between tokens."""
TESTED = 60
GUESSED = scipy.stats.binom.isf(1e-6, TESTED, 0.5) / TESTED
"""The share of right answers that guessing exceeds once in a million times: half of the texts have each label."""
FAST = {"max_tokens": 48, "batch_size": 8, "learning_rate": 1e-3, "evaluations": 4}
QUICK_PRUNERS = {"retainer_learning_rate": 5e-3}
"""Of methods that have some to train."""
FIRST = "schedule"
"""This run fine-tunes the teacher of all."""
PLACES = [
    "the",
    "room",
    "was",
    "small",
    "and",
    "clean",
    "hotel",
    "near",
    "station",
    "with",
    "view",
    "sea",
    "two",
    "beds",
]
OPINIONS = (["bad", "awful"], ["great", "good"])


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """Models this small are slower with more."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def opinions(tmp_path_factory):
    """Texts whose label hangs on two words, which stand anywhere."""
    directory, rng = tmp_path_factory.mktemp("opinions"), random.Random(0)
    for name, count in (("train", 400), ("test", TESTED)):
        lines = ["text\tlabel\n"]
        for number in range(count):
            words = rng.choices(PLACES, k=rng.randint(8, 24))
            for place in rng.sample(range(len(words)), 2):
                words[place] = rng.choice(OPINIONS[number % 2])
            lines.append(f"{' '.join(words)}\t{('negative', 'positive')[number % 2]}\n")
        (directory / f"{name}.tsv").write_text("".join(lines))
    return directory


@pytest.fixture(scope="module")
def students(tmp_path_factory, base, opinions):
    """A function that trains a student by a method, once; it gives the directory and the record."""
    work, done = tmp_path_factory.mktemp("methods"), {}

    def run(method):
        if method not in done:
            first = {"base": base, "teacher_epochs": 3, "teacher_learning_rate": 3e-3}
            models = first if method == FIRST else {"teacher": run(FIRST)[0] / "teacher"}
            rows = {"train": opinions / "train.tsv", "dev": opinions / "test.tsv"}
            own = {} if method == "schedule" else QUICK_PRUNERS
            record = train(work / method, method=method, flops=FLOPS, epochs=3, **rows, **models, **FAST, **own)
            done[method] = work / method, record
        return done[method]

    return run


STUDENTS = [
    ("schedule", "schedule", ["0.ffn", "1.ffn"]),
    ("random", "schedule", ["0.ffn"]),
    ("ltp", "ltp", ["0.ffn", "1.ffn"]),
    ("top", "top", ["1.attention"]),
    ("transkimmer", "transkimmer", ["0.attention", "1.attention"]),
]


@pytest.mark.parametrize(("method", "pruner", "sites"), STUDENTS[1:])
def test_two_steps_of_a_method_make_a_student(students, opinions, tmp_path, method, pruner, sites):
    """All that a run does, in two steps: it teaches little, but the student keeps to its budget and answers as it was judged."""
    rows = {"train": str(opinions / "train.tsv"), "train_rows": 16, "dev": str(opinions / "test.tsv")}
    teacher = str(students(FIRST)[0] / "teacher")
    short = {
        **FAST,
        **QUICK_PRUNERS,
        "evaluations": 1,
        "epochs": 1,
        "flops": FLOPS,
        "method": method,
        "teacher": teacher,
    }
    record = train(tmp_path / "out", **rows, **short)
    assert record["student"]["flops_reduction"]["packed"] >= 1 / (FLOPS * SLACK)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (config["pruning"]["method"], config["pruning"]["sites"]) == (pruner, sites)
    student = AutoModelForSequenceClassification.from_pretrained(tmp_path / "out")
    task = read_task(TrainOptions(**rows, **short))
    answers, _ = ask(student, task.parts["test"], task.objective)
    figures = task.objective.quality(answers, task.parts["test"])
    judged = {name: record["student"][name] for name in figures}
    assert set(figures) == set(judged)
    if method != "random":  # which is judged on tokens drawn anew
        assert figures == judged
    begun = make_student(task.load_teacher(teacher, tuned=True), task.settings).state_dict()
    trained = load_file(tmp_path / "out" / "model.safetensors")
    learned = {name for name in begun if not begun[name].equal(trained[name])}
    assert "bert.embeddings.word_embeddings.weight" in learned
    own = {name for name in begun if name.startswith("pruners.")}
    assert own & learned == (set() if method == "random" else own)
    if method == "top":  # which tokens leave is in its settings alone
        assert "0" in config["pruning"]["bins"][0]


@pytest.mark.parametrize(
    ("method", "pruner", "sites"),
    [STUDENTS[0], *(pytest.param(*student, marks=pytest.mark.slow) for student in STUDENTS[1:])],
)
def test_a_student_meets_its_budget_and_exports(students, opinions, tmp_path, method, pruner, sites):
    out, record = students(method)
    student = record["student"]
    assert LEAST < 1 / student["flops_reduction"]["packed"] <= FLOPS * SLACK
    assert student["accuracy"] > GUESSED
    assert record["teacher"]["accuracy"] > GUESSED
    config = json.loads((out / "config.json").read_text())
    assert (config["model_type"], config["pruning"]["method"]) == ("pruned_encoder", pruner)
    assert config["pruning"]["sites"] == sites == list(student["retention"])
    assert record["settings"]["flops"] == FLOPS
    adtp_export.export(out, tmp_path / "export", verify_data=opinions / "test.tsv", label_column="label")
    manifest = json.loads((tmp_path / "export" / "manifest.json").read_text())
    target = manifest["targets"]["onnxruntime-cpu-fp32"]
    assert target["status"] == "verified"
    assert target["accuracy"] == student["accuracy"]  # of the ONNX file, and of the student in training
    assert set(student["saliency"]) == ({"teacher", "student", "joint"} if method == "random" else set())
    for site, kept in student["retention"].items():
        mean = manifest["retention"][site]["mean_kept_tokens"]
        assert mean == pytest.approx(kept * student["tokens"], rel=0.01)


def test_fewer_layers_are_a_student_without_pruners(students, opinions, tmp_path):
    """It learns by the task loss alone, exports as a plain encoder, and its FLOPs are told against the teacher's."""
    rows = {"train": opinions / "train.tsv", "dev": opinions / "test.tsv", "teacher": students(FIRST)[0] / "teacher"}
    steps = Heard()
    record = train(tmp_path / "out", method="layers", layers=1, epochs=2, steps=steps, **rows, **FAST)
    student = record["student"]
    assert student["accuracy"] > GUESSED
    assert (student["retention"], student["saliency"]) == ({}, {})
    assert student["flops_reduction"]["packed"] == 1
    assert student["flops_reduction"]["teacher"] == 2
    assert not any(name.startswith("attribution") for name in steps.durations_s)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (config["pruning"], config["backbone"]["num_hidden_layers"]) == ({}, 1)
    assert not any(name.startswith("pruners.") for name in load_file(tmp_path / "out" / "model.safetensors"))
    adtp_export.export(tmp_path / "out", tmp_path / "export", verify_data=opinions / "test.tsv", label_column="label")
    target = json.loads((tmp_path / "export" / "manifest.json").read_text())["targets"]["onnxruntime-cpu-fp32"]
    assert (target["status"], target["accuracy"]) == ("verified", student["accuracy"])


class Stopped(Heard):
    """Stops the run at the student's second evaluation."""

    def note(self, text):
        super().note(text)
        if sum("teacher_loss " in note for note in self.notes) == 2:
            raise KeyboardInterrupt


@pytest.mark.slow
def test_killed_and_resumed_is_the_same_as_not_killed(students, opinions, tmp_path):
    """Weights to the bit, with samples of masks, the controller, and final decisions: ToP has them all."""
    out, record = students("top")
    rows = {"train": opinions / "train.tsv", "dev": opinions / "test.tsv", "teacher": students(FIRST)[0] / "teacher"}
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path / "again", method="top", flops=FLOPS, epochs=3, steps=Stopped(), **rows, **FAST, **QUICK_PRUNERS)
    assert train(tmp_path / "again", resume=True)["student"] == record["student"]
    whole, resumed = (load_file(path / "model.safetensors") for path in (out, tmp_path / "again"))
    assert all(whole[name].equal(resumed[name]) for name in whole)


def right_of(opinions, teacher, out, device, precision):
    """Train students of three seeds as the command does; return the share of right answers of all three."""
    command = [
        sys.executable,
        "-m",
        "adtp_export.cli.train",
        "--json",
        "--teacher",
        teacher,
        "--mixed-precision",
        precision,
    ]
    command += ["--train", opinions / "train.tsv", "--dev", opinions / "test.tsv", "--flops", FLOPS, "--epochs", 3]
    command += [part for name, value in FAST.items() for part in (flag_name(name), value)]
    environment = os.environ | ({"CUDA_VISIBLE_DEVICES": ""} if device == "cpu" else {})
    found = []
    for seed in range(3):
        asked = [*command, "--seed", seed, "--out", out / f"{precision}-{seed}"]
        done = subprocess.run(list(map(str, asked)), env=environment, check=True, capture_output=True, text=True)
        found.append(json.loads(done.stdout)["student"]["accuracy"])
    return sum(found) / len(found)


@pytest.mark.parametrize(
    "device",
    [
        pytest.param("cpu", marks=pytest.mark.slow),
        pytest.param(
            "cuda",
            marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")],
        ),
    ],
)
def test_students_learn_as_much_in_bf16_as_in_fp32_on_the_cpu(students, opinions, tmp_path, device):
    """Within four standard errors of independent draws; both answer the same texts, so that is more than they may differ by."""
    teacher = students(FIRST)[0] / "teacher"
    full, half = (right_of(opinions, teacher, tmp_path, *kind) for kind in (("cpu", "no"), (device, "bf16")))
    assert min(full, half) > GUESSED
    mean = (full + half) / 2
    assert abs(full - half) <= 4 * (2 * mean * (1 - mean) / (3 * TESTED)) ** 0.5


@pytest.mark.parametrize("mask", ["attribution", pytest.param("random", marks=pytest.mark.slow)])
def test_masks_of_a_resumed_run_are_those_of_a_whole_one(students, opinions, tmp_path, mask):
    """Drawn masks and dropout go on where they were. At such a rate a student unlearns what its teacher knows, so texts are masked."""
    rows = {"train": opinions / "train.tsv", "dev": opinions / "test.tsv", "train_rows": 64}
    chosen = {"method": "layers", "layers": 1, "mask": mask, "mask_share": 0.3}
    if mask == "attribution":
        chosen["attribution"] = "gradient-difference"
    wild = {"learning_rate": 0.1, "warmup": 0.0, "epochs": 2, "evaluations": 2}
    given = {**FAST, **rows, **chosen, **wild, "teacher": students(FIRST)[0] / "teacher"}
    whole, resumed = Heard(), Heard()
    record = train(tmp_path / "whole", steps=whole, **given)["student"]
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path / "again", steps=Stopped(), **given)
    assert train(tmp_path / "again", resume=True, steps=resumed)["student"] == record
    assert record["masked_texts"] > 0
    last = [[note for note in steps.notes if note.startswith("step 16 of 16: loss ")] for steps in (whole, resumed)]
    assert len(last[0]) == 1
    assert last[0] == last[1]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"method": "ltp", "prune_sites": "0.attention"}, "accepted are 'i.ffn'"),
        ({"method": "top", "prune_sites": "0.ffn"}, "'i.attention' from 1 on"),
        ({"method": "schedule", "prune_sites": "0.attention"}, "Begin at '0.ffn'"),
        ({"method": "top", "flops": 0.3}, "--flops: got 0.3; cuts at 1.attention leave at least 0.5"),
        (
            {"method": "transkimmer", "flops": 0.56, "prune_sites": "1.attention"},
            r"--flops: got 0.56; with a first cut at 1.attention it leaves [23]\.\d of \d\d\.\d tokens to all layers after it, and "
            r"accepted are at least 4. Give 0\.\d+ or more, or an earlier site as --prune-sites: 0.attention",
        ),
        ({"flops": 0.05}, r"cuts at 0.ffn leave at least 0\.\d+ of the FLOPs. Give more$"),
        ({"flops": 0.34}, r"--flops: got 0.34; with a first cut at 0.ffn it leaves .* Give 0\.\d+ or more$"),
        ({"flops": 0.6, "retention": "0.9"}, "--retention: got '0.9' with --flops 0.6, for which it would be 0."),
        ({"method": "schedule", "retention": "0.9,0.8,0.7"}, "for 2 prune sites; give one value, or one per site"),
    ],
)
def test_what_a_method_cannot_do_is_told_before_training(base, reviews, change, message):
    with pytest.raises(InputError, match=message):
        read_task(TrainOptions(base=str(base), train=str(reviews / "train.tsv"), max_tokens=48, **change))


@pytest.mark.parametrize("method", ["adtp", "random", "schedule"])
def test_retention_follows_from_the_flops(base, reviews, method):
    """The largest with which they are met; and what is written of a run can be read again."""
    data = {"base": str(base), "train": str(reviews / "train.tsv"), "max_tokens": 48, "method": method}
    found = read_task(TrainOptions(**data, flops=0.6)).settings
    less = read_task(TrainOptions(**data, flops=0.5)).settings
    assert len(set(found.target_retention)) == 1
    assert 0.1 < less.target_retention[0] < found.target_retention[0] < 1
    assert read_task(found).settings == found


@pytest.mark.parametrize("sigma", [0.3, 0.7, 1.0])
@pytest.mark.parametrize("mean", [9, 11, 13])
def test_the_budget_that_is_advised_leaves_enough_tokens(mean, sigma):
    """However cuts of short texts round up."""
    lengths = np.clip(np.random.default_rng(0).lognormal(np.log(mean), sigma, 500).astype(int), 3, 512)
    shape, settings = (
        Shape(hidden=768, intermediate=3072, heads=12, layers=12),
        TrainOptions(base="base", train="t.tsv"),
    )
    settings = dataclasses.replace(settings, prune_sites="0.ffn")
    with pytest.raises(InputError, match="Give ") as refused:
        check_tokens_left(settings, 0.2, shape, lengths.tolist())
    check_tokens_left(settings, float(re.search(r"Give (0\.\d+)", str(refused.value))[1]), shape, lengths.tolist())
