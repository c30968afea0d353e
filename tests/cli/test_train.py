"""`adtp-train` and `train` from text to a checkpoint that exports, interrupted or not."""

import dataclasses
import inspect
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
from types import SimpleNamespace

import pytest
import scipy.stats
import torch
from safetensors.torch import load_file
from testbed import Command, run_cli
from training_runs import Heard
from transformers import (
    AutoModelForSequenceClassification,
)
from transformers.utils import logging as transformers_logging

import adtp_export
from adtp_export.errors import InputError, MissingDependencyError
from adtp_export.model.selection import kept_count
from adtp_export.pipeline.train.train import _telling_lost_process, train
from adtp_export.training.settings import TrainOptions
from adtp_export.training.task import read_task

pytest.importorskip("accelerate")

FAST = ("--max-tokens", 48, "--batch-size", 16, "--teacher-learning-rate", 2e-3, "--learning-rate", 1e-3)


def data(reviews):
    return "--train", reviews / "train.tsv", "--test", reviews / "test.tsv"


@pytest.fixture(scope="module")
def trained(tmp_path_factory, base, reviews):
    """A finished run, with its record."""
    out = tmp_path_factory.mktemp("trained") / "student"
    arguments = ("--base", base, "--out", out, *FAST, "--epochs", 2, "--evaluations", 3, "--prune-sites", "0.ffn,1.ffn")
    result = run_cli("adtp-train", *data(reviews), *arguments, "--retention", "0.6,0.4", "--json")
    assert result.returncode == 0, result.stderr
    return out, json.loads(result.stdout), result.stderr


def test_the_record_says_what_was_trained(trained):
    out, record, stderr = trained
    assert json.loads((out / "results.json").read_text()) == record
    assert record["rows"] == {"train": 228, "dev": 12, "test": 60}
    assert record["judged_on"] == "test"
    student = record["student"]
    assert set(student["retention"]) == {"0.ffn", "1.ffn"}
    assert 0 < student["retention"]["1.ffn"] <= student["retention"]["0.ffn"] <= 1
    assert student["flops_reduction"]["padded"] > student["flops_reduction"]["packed"] > 1
    assert set(student["saliency"]) == {"teacher", "student", "joint"}
    for judged in (record["teacher"], student):
        assert {"accuracy", "f1", "matthews"} <= set(judged)
    assert record["settings"]["epochs"] == 2
    assert "on dev: accuracy" in stderr
    assert not (out / "work").exists()


@pytest.mark.parametrize(
    ("judged_on", "told"),
    [("test", "60 test rows, "), ("dev", "60 dev (they also chose the checkpoint) rows, ")],
)
def test_the_summary_says_what_rows_the_figures_are_of(trained, capsys, judged_on, told):
    from adtp_export.cli.console import Console
    from adtp_export.cli.train import _summarize

    _summarize({**trained[1], "judged_on": judged_on}, trained[0], Console())
    assert told in " ".join("".join(capsys.readouterr()).split())


def test_what_it_writes_is_a_checkpoint_for_adtp_export_and_transformers(trained, reviews, tmp_path):
    out, record, _ = trained
    arguments = ("--out", tmp_path / "export", "--verify-data", reviews / "test.tsv", "--label-column", "label")
    result = run_cli("adtp-export", out, *arguments, "--seq", "1:32:48", "--json")
    assert result.returncode == 0, result.stderr
    manifest = json.loads(result.stdout)
    target = manifest["targets"]["onnxruntime-cpu-fp32"]
    assert target["status"] == "verified"
    measures = {name: record["student"][name] for name in ("accuracy", "f1", "matthews")}
    assert target["quality"] == manifest["verification"]["quality"] == measures
    assert target["accuracy"] == record["student"]["accuracy"]  # of the ONNX file, and of the student in training
    shown = (f"{measures['accuracy']:.2%}", f"{measures['f1']:.4f}", f"{measures['matthews']:.4f}")
    report = (tmp_path / "export" / "report.md").read_text()
    assert "| accuracy | f1 | matthews | rows compared | file |" in report
    rows = f"{target['rows_compared']} of {target['rows']}"
    assert f"| {' | '.join(shown)} | {rows} | `model.onnx` |" in report
    assert "reaches accuracy {}, f1 {}, matthews {} on the labels".format(*shown) in report
    assert "".join(f"<td>{value}</td>" for value in shown) in (tmp_path / "export" / "report.html").read_text()
    student = record["student"]
    retention = json.loads(result.stdout)["retention"]["0.ffn"]
    assert retention["mean_kept_tokens"] == pytest.approx(student["retention"]["0.ffn"] * student["tokens"])
    teacher = AutoModelForSequenceClassification.from_pretrained(out / "teacher")
    assert list(teacher.config.label2id) == ["negative", "positive"]


def test_killed_and_resumed_is_the_same_as_not_killed(trained, reviews, tmp_path):
    """Weights to the bit: order, dropout, optimizer, schedule and the share of attribution all go on where they were."""
    out, _, _ = trained
    again = tmp_path / "again"
    arguments = ["--config", out / "train.yaml", "--out", again]
    command = Command("adtp-train", *arguments)
    command.wait_for(lambda: list(again.glob("work/student/checkpoint-*/sha256.json")))
    assert command.finish(signal.SIGKILL).returncode == -signal.SIGKILL
    assert not (again / "results.json").exists()

    result = run_cli("adtp-train", "--out", again)
    assert result.returncode == 2
    assert "give either --base MODEL" in result.stderr
    result = run_cli("adtp-train", *arguments)
    assert result.returncode == 2
    assert "use --resume to go on" in result.stderr
    result = run_cli("adtp-train", "--out", again, "--resume", "--epochs", 7)
    assert result.returncode == 2
    assert "other settings (epochs)" in result.stderr

    teacher = again / "teacher"
    result = run_cli("adtp-train", *data(reviews), "--teacher", teacher, "--out", again, "--force")
    assert result.returncode == 2
    assert "--force would remove" in result.stderr

    result = run_cli("adtp-train", "--out", again, "--resume")
    assert result.returncode == 0, result.stderr
    assert "going on from checkpoint-" in result.stderr
    whole, resumed = (load_file(path / "model.safetensors") for path in (out, again))
    assert all(whole[name].equal(resumed[name]) for name in whole)
    records = [json.loads((path / "results.json").read_text())["student"] for path in (out, again)]
    assert records[0] == records[1]


def test_a_full_disk_ends_a_run_that_goes_on_later(trained, tmp_path):
    """A limit on file size stands in for a full disk."""
    out, _, _ = trained
    again = tmp_path / "again"
    limit = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))"
    result = run_cli("adtp-train", "--config", out / "train.yaml", "--out", again, prelude=limit)
    assert result.returncode == 2, result.stderr
    assert re.search(r": the disk is full; free some space.*, then add --resume: the run goes on", result.stderr)
    assert "Traceback" not in result.stderr
    result = run_cli("adtp-train", "--out", again, "--resume")
    assert result.returncode == 0, result.stderr
    assert (again / "results.json").exists()


@pytest.mark.parametrize(
    ("processes", "said", "told"),
    [
        (2, "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:537] Read error: Connection reset by peer", True),
        (4, "NCCL communicator was aborted on rank 1", True),
        (2, "shape '[2, 3]' is invalid for input of size 7", False),
        (1, "Connection reset by peer", False),
    ],
)
def test_a_process_that_lost_another_says_so(processes, said, told):
    expected = (
        (InputError, "another process of this run has ended, or does not answer") if told else (RuntimeError, said)
    )
    with (
        pytest.raises(expected[0], match=re.escape(expected[1])),
        _telling_lost_process(SimpleNamespace(num_processes=processes)),
    ):
        raise RuntimeError(said)


@pytest.mark.slow
def test_two_processes_train_one_student(base, reviews, tmp_path):
    """Gradients of gradients, best checkpoint, files and messages with DistributedDataParallel."""
    launch = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", 2, "-m", "adtp_export.cli.train")
    arguments = (*data(reviews), "--base", base, "--out", tmp_path / "out", *FAST, "--evaluations", 2, "--epochs", 1)
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([*map(str, launch + arguments)], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    assert "step 4 of 8" in done.stderr  # 228 rows in steps of 2 x 16
    assert done.stderr.count("distilling the student") == 1
    record = json.loads((tmp_path / "out" / "results.json").read_text())
    assert 0 < record["student"]["retention"]["0.ffn"] < 1


@pytest.mark.slow
def test_pairs_with_a_score_and_a_teacher_given(base, tmp_path):
    """Regression on sentence pairs, as STS-B is; the second run takes the first one's teacher."""
    rng = random.Random(0)
    words = ["the", "room", "was", "small", "and", "clean", "hotel", "near", "station", "great"]
    rows = []
    for _ in range(120):
        first = rng.choices(words, k=8)
        same = rng.randint(0, 8)
        second = first[:same] + rng.choices(words, k=8 - same)
        rows.append({"sentence1": " ".join(first), "sentence2": " ".join(second), "label": same / 8 * 5})
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    common = ("--train", tmp_path / "pairs.jsonl", "--dev-share", 0.2, *FAST, "--evaluations", 1, "--epochs", 1)
    result = run_cli("adtp-train", *common, "--base", base, "--out", tmp_path / "a", "--json")
    assert result.returncode == 0, result.stderr
    assert "without effect" not in result.stderr
    record = json.loads(result.stdout)
    assert record["task"] == "regression"
    assert record["judged_on"] == "dev"
    assert set(record["teacher"]) == {"spearman", "pearson"} <= set(record["student"])
    teacher = tmp_path / "a" / "teacher"
    more = ("--teacher", teacher, "--out", tmp_path / "b", "--layers", 1, "--ratio", "static", "--ablate", "ig")
    result = run_cli("adtp-train", *common, *more)
    assert result.returncode == 0, result.stderr
    assert "--teacher-learning-rate: without effect, since the model of --teacher is taken as it is" in result.stderr
    config = json.loads((tmp_path / "b" / "config.json").read_text())
    assert config["backbone"]["num_hidden_layers"] == 1
    assert (config["model_type"], config["pruning"]["method"]) == ("pruned_encoder", "schedule")
    assert (config["pruning"]["ratios"], config["pruning"]["order"]) == ([0.3], "saliency")
    labelled = ("--verify-data", tmp_path / "pairs.jsonl", "--label-column", "label")
    result = run_cli("adtp-export", tmp_path / "b", "--out", tmp_path / "export", *labelled)
    assert result.returncode == 0, result.stderr
    assert "spearman" in result.stderr
    answers = adtp_export.load(tmp_path / "export")([(row["sentence1"], row["sentence2"]) for row in rows])
    values, truths = [answer.score for answer in answers], [row["label"] for row in rows]
    manifest = json.loads((tmp_path / "export" / "manifest.json").read_text())
    for judged in (manifest["verification"], manifest["targets"]["onnxruntime-cpu-fp32"]):
        assert judged["accuracy"] is None
        for name, measure in (("pearson", scipy.stats.pearsonr), ("spearman", scipy.stats.spearmanr)):
            expected = measure(values, truths).statistic
            assert judged["quality"][name] == pytest.approx(expected, abs=0.01)  # a near tie may keep another token
    (tmp_path / "words.jsonl").write_text(json.dumps({**rows[0], "label": "much"}) + "\n")
    labelled = ("--verify-data", tmp_path / "words.jsonl", "--label-column", "label")
    result = run_cli("adtp-export", tmp_path / "b", "--out", tmp_path / "words", *labelled)
    assert result.returncode == 2
    assert "words.jsonl: the student answers with a number, so labels are numbers: could not" in result.stderr


def test_a_loss_that_is_no_number_stops_and_names_the_step(base, reviews, tmp_path):
    arguments = ("--base", base, "--out", tmp_path / "out", "--teacher-learning-rate", 1e30, "--max-tokens", 48)
    result = run_cli("adtp-train", *data(reviews), *arguments)
    assert result.returncode == 2
    assert "the loss became nan at step 2 of" in result.stderr.replace("inf", "nan")
    assert "start anew with a lower one" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--train", "{reviews}/missing.tsv"), "missing.tsv: there is no such file"),
        (("--train", "{reviews}/train.tsv", "--label-column", "labels"), "did you mean 'label'"),
        (("--train", "{reviews}/train.tsv", "--prune-sites", "2.ffn"), "in a model of 2 layers"),
        (("--train", "{reviews}/train.tsv", "--max-tokens", 100), "the model takes up to 64"),
        (
            ("--train", "{reviews}/train.tsv", "--teacher", "{trained}"),
            "is a student that drops tokens already; give the model that it was made from",
        ),
        (("--train", "{reviews}/other.tsv", "--teacher", "{trained}/teacher"), "the teacher does not match: it knows"),
        (("--train", "{reviews}/train.tsv", "--teacher", "{headless}"), "no teacher: its file has no classifier.bias"),
        (("--train", "{reviews}/train.tsv", "--layers", 3), "--layers: got 3; the teacher has 2"),
        (
            ("--train", "{reviews}/train.tsv", "--stride", 9),
            "--stride: got 9 for --task classification; only spans have",
        ),
        (("--train", "{reviews}/train.tsv", "--min-tokens", 0), "--min-tokens: got 0; accepted is at least 1"),
        (("--train", "{reviews}/train.tsv", "--data", "glue/sst2"), "give either --data NAME or --train FILE"),
        (("--train", "{reviews}/train.tsv", "--test", "{reviews}/empty.tsv"), "empty.tsv: holds no text"),
        (("--train", "{reviews}/train.tsv", "--base", "{reviews}"), "the model cannot be loaded"),
        (("--train", "{reviews}/train.tsv", "--base", "{pickled}"), "pickled weights only (pytorch_model.bin)"),
        ((), "give either --data NAME or --train FILE"),
    ],
)
def test_errors_are_one_message_and_leave_nothing(base, headless, reviews, trained, tmp_path, arguments, message):
    (reviews / "other.tsv").write_text((reviews / "train.tsv").read_text().replace("\tpositive", "\tgood"))
    (reviews / "empty.tsv").write_text("text\tlabel\n")
    (pickled := tmp_path / "pickled").mkdir()
    for file in base.iterdir():
        shutil.copy(file, pickled)
    (pickled / "model.safetensors").rename(pickled / "pytorch_model.bin")
    places = {"reviews": reviews, "trained": trained[0], "headless": headless, "pickled": pickled}
    given = [str(a).format(**places) for a in arguments]
    models = () if {"--teacher", "--base"} & set(given) else ("--base", base)
    result = run_cli("adtp-train", *given, *models, "--out", tmp_path / "out")
    assert result.returncode == 2, result.stderr
    assert message in result.stderr
    assert "Traceback" not in result.stderr
    assert not (tmp_path / "out").exists()


def test_train_from_python_returns_the_record(trained, reviews, tmp_path):
    """An ablation, with the teacher of another run; as in the command, tokens are drawn and saliency is not taught."""
    out, steps = tmp_path / "out", Heard()
    data = {"train": reviews / "train.tsv", "test": str(reviews / "test.tsv"), "teacher": trained[0] / "teacher"}
    rates = {"max_tokens": 48, "batch_size": 16, "learning_rate": 1e-3, "epochs": 1, "evaluations": "2"}
    chosen = {"method": "random", "prune_sites": ["0.ffn", "1.ffn"], "retention": [0.8, 0.5], "min_tokens": 3}
    before = transformers_logging.get_verbosity(), transformers_logging.is_progress_bar_enabled()
    record = train(out, cache=tmp_path / "cache", steps=steps, **data, **rates, **chosen)
    assert (transformers_logging.get_verbosity(), transformers_logging.is_progress_bar_enabled()) == before
    assert record == json.loads((out / "results.json").read_text())
    assert record["settings"]["retention"] == "0.8,0.5"
    assert record["settings"]["train"] == str(reviews / "train.tsv")
    assert record["durations_s"] == steps.durations_s
    assert "student_s" in steps.durations_s
    assert "teacher_s" not in steps.durations_s
    assert sum("on dev: accuracy" in note for note in steps.notes) == 2
    assert max(steps.shares) == 1
    assert len(list((tmp_path / "cache").glob("*.safetensors"))) == 3
    student = AutoModelForSequenceClassification.from_pretrained(out)
    assert student.config.pruning["ratios"] == [0.8, 0.5]
    assert student.config.pruning["min_tokens"] == 3
    assert student.config.label2id == {"negative": 0, "positive": 1}
    rows = read_task(
        TrainOptions(base=str(trained[0] / "teacher"), max_tokens=48, **{n: str(data[n]) for n in ("train", "test")})
    )
    lengths = torch.tensor(rows.parts["test"].lengths)
    first = kept_count(lengths, 800, min_tokens=3)
    shares = {"0.ffn": first, "1.ffn": kept_count(first, 500, min_tokens=3)}
    whole = lengths.sum().item()
    assert record["student"]["retention"] == {site: kept.sum().item() / whole for site, kept in shares.items()}


def test_the_signature_of_train_lists_every_setting():
    parameters = inspect.signature(train).parameters
    for field in dataclasses.fields(TrainOptions):
        assert parameters[field.name].kind is inspect.Parameter.KEYWORD_ONLY
        assert parameters[field.name].default == field.default
        assert f"{field.name}: {field.metadata['help']}" in inspect.getdoc(train)
    rest = [name for name in parameters if name not in {field.name for field in dataclasses.fields(TrainOptions)}]
    assert rest == ["out", "config", "resume", "force", "cache", "steps"]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"epoch": 3}, "unknown option 'epoch'; did you mean 'epochs'"),
        ({"epochs": "many"}, "--epochs: got 'many'; accepted is a number"),
        ({"epochs": None}, "--epochs: got nothing"),
        ({"resume": True, "force": True}, "give one of them"),
        ({"resume": True}, "holds no run of adtp-train"),
        ({"teacher": "a", "base": "b"}, "give either --base MODEL"),
        ({"base": "b"}, "give either --data NAME or --train FILE"),
        ({"dev": "a", "dev_share": 0.2}, "--dev-share: got 0.2, which nothing uses beside --dev"),
    ],
)
def test_errors_of_train_are_exceptions(tmp_path, given, message):
    with pytest.raises(InputError, match=message):
        train(tmp_path / "out", **given)
    assert not (tmp_path / "out").exists()


def test_a_package_that_is_missing_is_named(tmp_path):
    """In a process of its own: what has been imported cannot be missing."""
    prelude = "import sys; sys.modules['scipy'] = None"
    result = run_cli("adtp-train", "--train", "x.tsv", "--base", "b", "--out", tmp_path / "out", prelude=prelude)
    assert result.returncode == MissingDependencyError.exit_code
    assert "pip install 'adtp-export[train]'" in result.stderr
