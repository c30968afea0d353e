"""`adtp-train` from text to a checkpoint that exports, interrupted or not."""

import json
import os
import random
import runpy
import signal
import subprocess
import sys

import pytest
from conftest import ROOT, Command, run_cli
from safetensors.torch import load_file
from transformers import (
    AutoModel,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BertConfig,
    BertForSequenceClassification,
)

pytest.importorskip("accelerate")

FAST = ("--max-tokens", 48, "--batch-size", 16, "--teacher-learning-rate", 2e-3, "--learning-rate", 1e-3)


@pytest.fixture(scope="module")
def base(tmp_path_factory, demo):
    """A pretrained encoder, small enough to fine-tune in seconds."""
    directory = tmp_path_factory.mktemp("base")
    tokenizer = AutoTokenizer.from_pretrained(demo)
    size = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    BertForSequenceClassification(
        BertConfig(vocab_size=len(tokenizer), max_position_embeddings=64, **size)
    ).save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def headless(tmp_path_factory, base):
    """The encoder alone, as it comes from pretraining."""
    directory = tmp_path_factory.mktemp("headless")
    AutoModel.from_pretrained(base).save_pretrained(directory)
    AutoTokenizer.from_pretrained(base).save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def reviews(tmp_path_factory):
    """Labelled reviews: train.tsv and test.tsv."""
    directory = tmp_path_factory.mktemp("reviews")
    writer = runpy.run_path(str(ROOT / "demo" / "corpus.py"))["Writer"](random.Random(0), False)
    for name, count in (("train", 240), ("test", 60)):
        rows = (writer.review() for _ in range(count))
        lines = (f"{text}\t{('negative', 'positive')[label]}\n" for text, label in rows)
        (directory / f"{name}.tsv").write_text("text\tlabel\n" + "".join(lines))
    return directory


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
    student = record["student"]
    assert set(student["retention"]) == {"0.ffn", "1.ffn"}
    assert 0 < student["retention"]["1.ffn"] <= student["retention"]["0.ffn"] <= 1
    assert student["flops_reduction"]["padded"] > student["flops_reduction"]["packed"] > 1
    assert set(student["saliency"]) == {"teacher", "student", "joint"}
    assert record["settings"]["epochs"] == 2
    assert "on dev: accuracy" in stderr
    assert not (out / "work").exists()


def test_what_it_writes_is_a_checkpoint_for_adtp_export_and_transformers(trained, reviews, tmp_path):
    out, record, _ = trained
    arguments = ("--out", tmp_path / "export", "--verify-data", reviews / "test.tsv", "--label-column", "label")
    result = run_cli("adtp-export", out, *arguments, "--seq", "1:32:48", "--json")
    assert result.returncode == 0, result.stderr
    target = json.loads(result.stdout)["targets"]["onnxruntime-cpu-fp32"]
    assert target["status"] == "verified"
    assert target["accuracy"] == record["student"]["accuracy"]  # of the ONNX file, and of the student in training
    assert f"{target['accuracy']:.2%}" in (tmp_path / "export" / "report.md").read_text()
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
    command.wait_for(lambda: list(again.glob("work/student/checkpoint-*/trainer_state.json")))
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
    record = json.loads(result.stdout)
    assert record["task"] == "regression"
    assert set(record["teacher"]) == {"spearman", "pearson"} <= set(record["student"])
    teacher = tmp_path / "a" / "teacher"
    more = ("--teacher", teacher, "--out", tmp_path / "b", "--layers", 1, "--ratio", "static", "--without", "ig")
    result = run_cli("adtp-train", *common, *more)
    assert result.returncode == 0, result.stderr
    config = json.loads((tmp_path / "b" / "config.json").read_text())
    assert (config["num_hidden_layers"], config["retention_ratios"]) == (1, [0.3, 1.0])
    result = run_cli("adtp-export", tmp_path / "b", "--out", tmp_path / "export")
    assert result.returncode == 0, result.stderr


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
        (("--train", "{reviews}/train.tsv", "--teacher", "{trained}"), "model_type is 'adtp_bert'; accepted is 'bert'"),
        (("--train", "{reviews}/other.tsv", "--teacher", "{trained}/teacher"), "the teacher does not match: it knows"),
        (("--train", "{reviews}/train.tsv", "--teacher", "{headless}"), "no teacher: its file has no classifier.bias"),
        (("--train", "{reviews}/train.tsv", "--layers", 3), "--layers: got 3; the teacher has 2"),
        (("--train", "{reviews}/train.tsv", "--min-tokens", 0), "--min-tokens: got 0; accepted is at least 1"),
        (("--train", "{reviews}/train.tsv", "--data", "glue/sst2"), "give either --data NAME or --train FILE"),
        (("--train", "{reviews}/train.tsv", "--test", "{reviews}/empty.tsv"), "empty.tsv: holds no text"),
        (("--train", "{reviews}/train.tsv", "--base", "{reviews}"), "the model cannot be loaded"),
        ((), "give either --data NAME or --train FILE"),
    ],
)
def test_errors_are_one_message_and_leave_nothing(base, headless, reviews, trained, tmp_path, arguments, message):
    (reviews / "other.tsv").write_text((reviews / "train.tsv").read_text().replace("\tpositive", "\tgood"))
    (reviews / "empty.tsv").write_text("text\tlabel\n")
    given = [str(a).format(reviews=reviews, trained=trained[0], headless=headless) for a in arguments]
    models = () if {"--teacher", "--base"} & set(given) else ("--base", base)
    result = run_cli("adtp-train", *given, *models, "--out", tmp_path / "out")
    assert result.returncode == 2, result.stderr
    assert message in result.stderr
    assert "Traceback" not in result.stderr
    assert not (tmp_path / "out").exists()
