"""adtp-tune on a tiny model: what it refuses, what it trains, and that a run that is killed and gone on with chooses the same student."""

import dataclasses
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time

import pytest
import torch
from known_graphs import prelude, taking_known_graphs
from safetensors.torch import load_file
from torch.nn.modules.module import register_module_forward_hook
from training_runs import Heard, StoppedAtProgress
from transformers import AutoTokenizer, BertForSequenceClassification
from tuning import times

import adtp_export
from adtp_export.cli import tune as command
from adtp_export.errors import InputError
from adtp_export.pipeline.tune import times as times_room
from adtp_export.pipeline.tune import trials as trials_room
from adtp_export.pipeline.tune import tune as room
from adtp_export.pipeline.tune.directory import TOLD
from adtp_export.pipeline.tune.exports import TIMES
from adtp_export.pipeline.tune.options import TuneOptions
from adtp_export.pipeline.tune.plan import SHORTLIST, Plan
from adtp_export.pipeline.tune.race import Search
from adtp_export.pipeline.tune.rows import read, what_was_cut
from adtp_export.pipeline.tune.shapes import Arm, Level
from adtp_export.pipeline.tune.students import RECORD, WEIGHTS, Students
from adtp_export.pipeline.tune.trials import Trials, ask_teacher
from adtp_export.training.trainer import Audience, quiet, this_process

FAST = {"max_tokens": 32, "batch_size": 8, "learning_rate": 2e-3, "epochs": 1.0}
QUIET = Audience(lambda done, total: None, lambda text: None)


@pytest.fixture(scope="module")
def reviewed(tmp_path_factory, reviews):
    """The reviews; some are in both files."""
    directory = tmp_path_factory.mktemp("reviewed")
    return {
        part: shutil.copy(reviews / f"{name}.tsv", directory) for part, name in (("train", "train"), ("dev", "test"))
    }


@pytest.fixture(scope="module")
def model(tmp_path_factory, base, reviewed):
    """A classifier that was fine-tuned for a moment."""
    directory = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    names = {"id2label": {0: "negative", 1: "positive"}, "label2id": {"negative": 0, "positive": 1}}
    tuned = BertForSequenceClassification.from_pretrained(base, **names).train()
    tokenizer = AutoTokenizer.from_pretrained(base)
    rows = [line.rsplit("\t", 1) for line in open(reviewed["train"]).read().splitlines()[1:]]
    optimizer = torch.optim.AdamW(tuned.parameters(), 2e-3)
    for begin in range(0, len(rows), 16):
        texts, labels = zip(*rows[begin : begin + 16])
        batch = tokenizer(list(texts), padding=True, truncation=True, max_length=32, return_tensors="pt")
        tuned(**batch, labels=torch.tensor([names["label2id"][label] for label in labels])).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    tuned.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


def options(model, rows, out="unused", **more):
    return TuneOptions(model=model, out=out, **rows, **{**FAST, **more})


def searched(out, model, rows, steps, site="0.ffn", **more):
    """Search below `out` with the times and the plan of no machine; return the names of the shortlist."""
    chosen = options(model, rows, max_drop=60.0, **more)
    table = times(layers=2, first=0.5, site=site)
    raced = (Level(1.2, (Arm(2, site, 0.5), Arm(2, site, 0.25))), Level(1.9, (Arm(1),)))
    plan = Plan(levels=raced, rungs=(8, 24, 72), refined=24, seconds={})
    with quiet():
        data = read(chosen)
        loaded = data.task.load_teacher(str(model), tuned=True)
        teacher = loaded.to(this_process().device).eval().requires_grad_(False)
        students = Students(out, out / "work", len(data.groups["dev"]))
        asked = ask_teacher(teacher, data, plan.rungs[-1], students.work, QUIET)
        search = Search(Trials(students, teacher, data, asked), table, ["fp32"], chosen.drop, None)
        search.run(plan, steps)
    return [trial.name for trial in search.ranked()[:SHORTLIST]]


def weights(out, names):
    return {name: load_file(out / "work" / "trials" / name / WEIGHTS) for name in names}


def test_a_search_that_was_stopped_chooses_the_same_student(model, reviewed, tmp_path):
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    for out in (whole, broken):
        out.mkdir()
    steps = Heard()
    names = searched(whole, model, reviewed, steps)
    lines = (whole / RECORD).read_text().splitlines()
    rungs = [json.loads(line)["rows"] for line in lines]
    assert rungs[:3] == [8, 8, 8]
    assert 72 in rungs
    assert sum(json.loads(line)["start"] != "" for line in lines) == 3
    assert len(names) == 3
    for at in (2, 9):
        with pytest.raises(KeyboardInterrupt):
            searched(broken, model, reviewed, StoppedAtProgress(at))
    record = broken / RECORD
    kept = record.read_text().splitlines(keepends=True)
    record.write_text("".join(kept[:-1]) + kept[-1][:20])  # killed as it was written: the student is there
    assert searched(broken, model, reviewed, Heard()) == names
    assert record.read_text().splitlines() == lines
    expected = weights(whole, names)
    for name, found in weights(broken, names).items():
        assert all(expected[name][key].equal(found[key]) for key in expected[name])
    again = Heard()
    assert searched(broken, model, reviewed, again) == names
    assert again.shares == []  # nothing was trained
    (broken / "work" / "trials" / names[0] / TOLD).unlink()
    with pytest.raises(InputError, match=f"has no {names[0]} any more"):
        searched(broken, model, reviewed, Heard())


def test_an_interrupted_run_says_how_to_go_on(model, reviewed, tmp_path):
    steps = StoppedAtProgress(1)
    with pytest.raises(KeyboardInterrupt):
        room.tune(model, out=tmp_path / "out", steps=steps, **reviewed, **FAST)
    assert "rows of test.tsv are rows of train.tsv, too" in steps.notes[0]
    assert steps.notes[-1] == "what is done stays; to go on, type the same command again, and add --resume"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_a_search_trains_on_the_gpu_in_bf16(model, reviewed, tmp_path):
    products = set()

    def hear(module, given, found):
        if isinstance(module, torch.nn.Linear) and module.training:
            products.add((found.device.type, found.dtype))

    with register_module_forward_hook(hear):
        names = searched(tmp_path, model, reviewed, Heard(), mixed_precision="bf16")
    assert len(names) == 3
    assert products == {("cuda", torch.bfloat16)}
    assert '"loss": null' not in (tmp_path / RECORD).read_text()


def test_after_a_step_of_bisection_that_diverges_the_next_has_the_same_start(model, reviewed, tmp_path, monkeypatch):
    usual, begun = trials_room.train_student, []

    def spoiled(teacher, task, work, audience, start=None):
        if start is not None:
            begun.append(work.name)
            if len(begun) == 1:
                task = dataclasses.replace(task, settings=dataclasses.replace(task.settings, learning_rate=1e38))
        return usual(teacher, task, work, audience, start)

    monkeypatch.setattr(trials_room, "train_student", spoiled)
    names = searched(tmp_path, model, reviewed, Heard())
    lines = [json.loads(line) for line in (tmp_path / RECORD).read_text().splitlines()]
    first, *others = (line for line in lines if line["name"] in begun)
    assert (first["loss"], len(others)) == (None, 2)
    assert others[0]["start"] == first["start"] != first["name"]
    assert first["name"] not in names


@pytest.mark.parametrize("which", [{1}, {1, 2}])
def test_a_student_whose_training_diverges_is_left_out_and_the_search_goes_on(
    model, reviewed, tmp_path, monkeypatch, which
):
    usual = trials_room.train_student

    def spoiled(teacher, task, *rest):
        if task.settings.layers in which:
            task = dataclasses.replace(task, settings=dataclasses.replace(task.settings, learning_rate=1e38))
        return usual(teacher, task, *rest)

    monkeypatch.setattr(trials_room, "train_student", spoiled)
    heard = Heard()
    names = searched(tmp_path, model, reviewed, heard)
    lines = [json.loads(line) for line in (tmp_path / RECORD).read_text().splitlines()]
    diverged = [line for line in lines if line["loss"] is None]
    assert {line["arm"]["layers"] for line in diverged} == which
    assert len({line["name"] for line in diverged}) == len(diverged) == (1 if which == {1} else 3)  # in the first rung
    assert bool(names) == (which == {1})
    assert not {line["name"] for line in diverged} & set(names)
    assert sum("training diverged at --learning-rate" in note for note in heard.notes) == len(diverged)
    assert all(not (tmp_path / "work" / "trials" / line["name"] / WEIGHTS).exists() for line in diverged)
    again = Heard()
    assert searched(tmp_path, model, reviewed, again) == names
    assert again.shares == []


def labelled(path, rows):
    path.write_text("text\tlabel\n" + "".join(f"{text}\t{label}\n" for text, label in rows))
    return path


def many(count, seed, labels=("negative", "positive")):
    rng = random.Random(seed)
    words = [f"word{i}" for i in range(200)]
    return [(" ".join(rng.choices(words, k=8)), rng.choice(labels)) for _ in range(count)]


def aloud(rows):
    return [(text.upper() + " !", label) for text, label in rows]


@pytest.mark.parametrize(
    ("dev", "more", "message"),
    [
        (aloud(many(80, 0)), {}, "80 of 80 rows of dev.tsv are rows of train.tsv, too"),
        (
            many(30, 1),
            {},
            "18 rows to choose on and 12 to confirm on, in 18 and 12 groups of .* at least 20 groups of each",
        ),
        ([*many(80, 0), *many(30, 1)], {}, "at least 20 groups .* 80 of 110 rows of dev.tsv are rows .* left out"),
        (many(300, 1), {"strict": True}, "120 rows to confirm on cannot .* 750 dev .* --max-drop 2.5"),
        (many(80, 1, ("negative", "neutral")), {}, "has the label 'neutral'"),
        (many(80, 1), {"batch_size": 10**6}, "--batch-size: got 1,000,000; train.tsv has 80 rows to train on"),
    ],
)
def test_rows_that_prove_nothing_are_refused(model, tmp_path, dev, more, message):
    rows = {"train": labelled(tmp_path / "train.tsv", many(80, 0)), "dev": labelled(tmp_path / "dev.tsv", dev)}
    with pytest.raises(InputError, match=message):
        read(options(model, rows, **more))


def test_dev_rows_that_are_training_rows_are_left_out(model, tmp_path):
    known, new = many(80, 0), many(80, 1)
    dev = labelled(tmp_path / "dev.tsv", [*new[:40], *aloud(known[:3]), *new[40:]])
    found = read(options(model, {"train": labelled(tmp_path / "train.tsv", known), "dev": dev}))
    tables = found.task.tables
    assert sorted(tables["dev"].texts + tables["test"].texts) == sorted(text for text, _ in new)
    assert len(tables["train"]) == 80
    assert re.match("3 of 83 rows of dev.tsv are rows of train.tsv, too, such as row 41, .* left out", found.left_out)


def test_labels_that_the_model_does_not_know_are_refused(model, tmp_path):
    train = labelled(tmp_path / "train.tsv", many(300, 0, ("bad", "good")))
    with pytest.raises(InputError, match="it knows negative, positive, the data has bad, good"):
        read(options(model, {"train": train}))


def test_a_model_without_its_tokenizer_is_refused(model, reviewed, tmp_path):
    """transformers would make one that knows special tokens alone."""
    for name in ("config.json", "model.safetensors"):
        shutil.copy(model / name, tmp_path)
    with pytest.raises(InputError, match="its tokenizer knows no words; copy tokenizer.json of the model there"):
        read(options(tmp_path, reviewed))


def test_rows_are_held_out_by_groups(model, tmp_path):
    """Without dev rows, each text and its beginning are on one side."""
    rows = [part for text, label in many(300, 0) for part in ((text, label), (text.rsplit(" ", 2)[0], label))]
    found = read(options(model, {"train": labelled(tmp_path / "train.tsv", rows)})).task.tables
    begin = [{" ".join(text.split()[:6]) for text in found[part].texts} for part in ("train", "dev", "test")]
    assert sum(map(len, begin)) == len(set.union(*begin)) == 300


def test_rows_that_are_not_read_whole_are_told(model, tmp_path):
    data = {"train": labelled(tmp_path / "train.tsv", many(300, 0))}

    def told(most):
        return what_was_cut(read(options(model, data, max_tokens=most)).task)

    assert told(64) == ""
    assert re.match(r"\d+ of \d+ dev rows reach --max-tokens 5 and are read up to there", told(5))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"speedup": 3.0, "max_drop": 1.0}, "--max-drop and --speedup are two goals"),
        ({"precisions": "fp16"}, "--precision: got 'fp16'"),
        ({"precisions": ()}, "--precision: got ''"),
        ({"train": None}, "--train: got nothing"),
        ({"plan": True, "resume": True}, "--plan only prints"),
    ],
)
def test_options_that_contradict_each_other(given, message):
    with pytest.raises(InputError, match=message):
        TuneOptions(**{"model": "m", "out": "o", "train": "t", **given})


def test_a_directory_of_something_else_is_refused(model, reviewed, tmp_path):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(InputError, match="holds no run of adtp-tune; give a new or an empty directory"):
        room.tune(model, tmp_path, **reviewed, **FAST)
    with pytest.raises(InputError, match="leave --resume out to start one"):
        room.tune(model, tmp_path / "new", resume=True, **reviewed, **FAST)
    with pytest.raises(InputError, match="has no config.json; give the directory"):
        room.tune(tmp_path, tmp_path / "new", **reviewed, **FAST)
    assert (tmp_path / "file").read_text() == "mine"


def test_workloads_that_cannot_be_run_are_refused(model, reviewed):
    task = read(options(model, reviewed)).task
    with pytest.raises(InputError, match="--workload: got 8x33; texts have at most 32 tokens"):
        times_room.workload("8x33", task)
    for shape in ("0x8", "8x4", "99999x32"):
        told = f"--workload: got '{shape}'; accepted are a file of texts, and .* of at least 8 tokens, and 1,048,576 in all"
        with pytest.raises(InputError, match=told):
            times_room.workload(shape, task)
    assert times_room.workload("8x8", task).batches[0]["attention_mask"].sum(1).min() >= 2


def listed(out):
    return {path.relative_to(out).as_posix(): path.stat().st_mtime_ns for path in out.rglob(f"trials/*/{WEIGHTS}")}


@pytest.mark.slow
@pytest.mark.usefixtures("with_operators")
def test_a_run_publishes_what_it_confirmed_and_chooses_anew(model, reviewed, tmp_path, capsys, monkeypatch):
    # Whether so small a student is faster, the machine decides.
    twice = {"ms": 1.0, "speedup": 2.0, "margin": 0.1}
    monkeypatch.setattr(times_room, "deployed", lambda exports, *_: dict.fromkeys(exports, twice))
    out, more = tmp_path / "out", {**reviewed, **FAST}
    with taking_known_graphs():
        record = room.tune(model, out, max_drop=100.0, steps=Heard(), **more)
        assert (record["verdict"], record["published"]) == ("proven", True)
        answers = adtp_export.load(out / "export", target=record["chosen"]["target"])(["a wonderful place"])
        assert answers[0].label in ("negative", "positive")
        assert {each["name"] for each in record["candidates"]} >= {"model", record["chosen"]["name"]}
        fp32 = {trial["name"]: trial["drop"] for trial in record["trials"]}
        assert all(each["drop"] == fp32[each["name"]] for each in record["candidates"] if each["precision"] == "fp32")
        assert json.loads((out / "results.json").read_text())["chosen"] == record["chosen"]
        page = (out / "tune.html").read_text()
        assert all(trial["told"] in page for trial in record["trials"])
        before = listed(out)
        anew = room.tune(model, out, max_drop=50.0, steps=(steps := Heard()), **more)
        assert listed(out) == before
        assert not any(name.startswith("trial_") for name in steps.durations_s)
        assert len(anew["trials"]) == len(record["trials"])
        code = command.command(True, {"model": model, "out": out, "speedup": 500.0, **more})
        assert code == 1
        told = json.loads(capsys.readouterr().out)
        assert (told["verdict"], told["published"], told["chosen"]) == ("nearest", False, None)
        kept, results = (out / RECORD).read_text(), (out / "results.json").read_text()
        (out / RECORD).unlink()
        with pytest.raises(InputError, match="does not name all students of the run"):
            room.tune(model, out, max_drop=40.0, **more)
        (out / RECORD).write_text(kept)
        student = next(each["name"] for each in record["candidates"] if each["name"] != "model")
        os.truncate(out / "work" / "trials" / student / WEIGHTS, 1000)
        with pytest.raises(InputError, match=f"{student} is damaged .*{WEIGHTS} has changed"):
            room.tune(model, out, max_drop=40.0, **more)
        assert (out / "results.json").read_text() == results
    with pytest.raises(InputError, match=r"holds a run of other settings \(seed\)"):
        room.tune(model, out, seed=1, **more)


def found_below(folder):
    """All that is in a folder; of what a run removes meanwhile, a part (`Path.rglob` would raise)."""
    return {os.path.join(place, name) for place, folders, files in os.walk(folder) for name in (*folders, *files)}


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_run_that_was_killed_ten_times_chooses_the_same_student(model, reviewed, tmp_path):
    code = prelude() + "from adtp_export.cli.tune import main; main()"
    given = [f"--{name.replace('_', '-')}={value}" for name, value in {**reviewed, **FAST}.items()]
    fixed = [str(model), *given, "--max-drop=100", "--precision=fp32"]
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    first = subprocess.run([sys.executable, "-c", code, *fixed, "--out", whole], stderr=subprocess.DEVNULL)
    assert first.returncode in (0, 1)  # whether so small a student is faster, the machine decides
    shutil.copytree(whole, broken, ignore=shutil.ignore_patterns("results.json", "trials*", "exports", "times.json"))
    rng, kills = random.Random(0), 0
    while kills < 10 and not (broken / "results.json").exists():  # from the stored times and plan on
        run = subprocess.Popen(
            [sys.executable, "-c", code, *fixed, "--out", broken, "--resume"],
            stderr=subprocess.DEVNULL,
        )
        before, changes = found_below(broken), rng.randrange(1, 8)
        while run.poll() is None and len(before ^ found_below(broken)) < changes:
            time.sleep(0.01)
        run.send_signal(signal.SIGKILL)
        kills += run.wait() == -signal.SIGKILL
    assert kills == 10
    shutil.copy(whole / "work" / TIMES, broken / "work")  # a machine never measures the same times twice
    subprocess.run([sys.executable, "-c", code, *fixed, "--out", broken, "--resume"], check=False)
    of_whole, of_broken = (json.loads((out / "results.json").read_text()) for out in (whole, broken))
    assert of_broken["chosen"] == of_whole["chosen"]
    assert [each["confirmed"] for each in of_broken["candidates"]] == [
        each["confirmed"] for each in of_whole["candidates"]
    ]
    assert (broken / RECORD).read_text() == (whole / RECORD).read_text()
    names = [json.loads(line)["name"] for line in (whole / RECORD).read_text().splitlines()]
    kept = [name for name in names if (whole / "work" / "trials" / name / WEIGHTS).exists()]
    expected = weights(whole, kept)
    for name, found in weights(broken, kept).items():
        assert all(expected[name][key].equal(found[key]) for key in expected[name])
