"""Questions about reviews in folds: which there are, how readers are trained and timed, and what is rendered of their records."""

import json
import random
import shutil

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from plain_models import write_plain

from benchmarks.pruning import equal_data as data
from benchmarks.pruning import equal_spans, equal_speed, equal_time, splits
from benchmarks.pruning.equal_training import Run
from benchmarks.render import predictions
from benchmarks.render.equal_spans import render_spans

TOLD = {"device": {"model": "a CPU", "cores": 2}, "versions": {"onnxruntime": "1", "torch": "2"}}


@given(st.lists(st.integers(0, 9), max_size=40), st.integers(0, 3))
def test_folds_ask_each_question_once_and_keep_reviews_together(more, seed):
    rows = [{"id": i, "context": str(review)} for i, review in enumerate([*range(10), *more])]
    found = list(splits.folds(rows, "context", random.Random(seed), {"dev": 2}))
    assert sorted(row["id"] for fold in found for row in fold["test"]) == list(range(len(rows)))
    for fold in found:
        assert sorted(row["id"] for part in fold.values() for row in part) == list(range(len(rows)))
        sides = [{row["context"] for row in part} for part in fold.values()]
        assert sum(map(len, sides)) == len(set().union(*sides))


def test_questions_are_timed_in_windows_of_what_is_read(tmp_path, demo):
    folder = tmp_path / "subjqa-0"
    folder.mkdir()
    asked = {"question": "was it good", "context": "a good film " * 300, "answers": {"text": [], "answer_start": []}}
    (folder / "dev.jsonl").write_text(f"{json.dumps(asked)}\n" * 100)
    made = equal_time.workload("subjqa-0", 32, tmp_path, demo / "tokenizer.json", ("input_ids", "attention_mask"))
    assert [batch["input_ids"].shape[0] for batch in made.batches] == [32, 32]
    lengths = np.concatenate([batch["attention_mask"].sum(1) for batch in made.batches])
    assert lengths.max() == data.MAX_TOKENS["subjqa-0"]


@pytest.fixture
def asked(tmp_path):
    """Records of readers in two folds of 200 questions about 100 reviews: AD-TP loses ten points to its teacher and five to 3 layers."""

    def reader(dataset, arm, at, f1, **more):
        run = Run("plan", dataset, arm, at, 32, 0.3 if arm == "adtp" else 1.0, 0)
        found = {**run._asdict(), "f1": [f1] * 200, "agreed": [90] * 200, **TOLD, **more}
        return [{**found, "precision": precision} for precision in ("fp32", "int8")]

    lines = []
    for fold in ("subjqa-0", "subjqa-1"):
        shared = {
            "answerable": [1, 0] * 100,
            "groups": [i // 2 for i in range(200)],
            "rows": {"train": 3000},
            "tokens": 200.0,
        }
        lines += reader(fold, "teacher", 6, 60, **shared)
        timed = {"speed": {"32": {"speedup": 2.0}}, "timed": {**TOLD, "device": {"model": "another CPU", "cores": 4}}}
        lines += reader(fold, "layers", 3, 55, **(timed if fold == "subjqa-0" else {}))
        lines += reader(fold, "adtp", 3, 50, kept={"question": 0.8, "context": 0.2})
    (tmp_path / "equal-time-spans.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return tmp_path / "equal-time-spans.jsonl"


def test_readers_are_compared_with_their_teacher_and_with_fewer_layers(asked):
    told = render_spans(asked).splitlines()
    assert told[2].startswith("| teacher | FP32 | 60.0 | 60.0 | 60.0 | 90.0 |")
    assert "| 3 layers | FP32 | 55.0 | 55.0 | 55.0 | 90.0 | -5.0 (-5.0 to -5.0) |  | 2.00x |" in told
    assert (
        "| AD-TP, time of 3 layers | FP32 | 50.0 | 50.0 | 50.0 | 90.0 | -10.0 (-10.0 to -10.0) | -5.0 (-5.0 to -5.0) |  |"
        in told
    )
    assert "2 of 5 folds: 400 questions about 200 reviews" in told[-1]
    assert "80.0% of the tokens of questions and 20.0% of the tokens of contexts" in told[-1]
    assert "first fold: another CPU, 4 cores" in told[-1]


def test_students_are_compared_with_the_teacher_that_they_learned_from(asked):
    """Those of 3 layers have teachers that were trained anew, whose F1 is 57 and not 60."""
    lines = [json.loads(line) for line in asked.read_text().splitlines()]
    for line in lines:
        if line["arm"] == "layers":
            line["of_teacher"] = [57] * 200
    asked.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    assert "| 3 layers | FP32 | 55.0 | 55.0 | 55.0 | 90.0 | -2.0 (-2.0 to -2.0) |  | 2.00x |" in render_spans(asked)


def test_folds_are_shown_once_they_are_whole(asked):
    """Readers of other times, which are not planned, change nothing."""
    lines = [json.loads(line) for line in asked.read_text().splitlines()]

    def told(chosen):
        asked.write_text("".join(f"{json.dumps(line)}\n" for line in chosen))
        return render_spans(asked)

    whole = told(lines)
    assert told([*lines, {**lines[2], "at": 2}]) == whole
    assert "1 of 5 folds: 200 questions" in told(lines[:-1])
    for few in (0, 2, 4):  # nothing, the teacher, and fewer layers
        with pytest.raises(KeyError, match="a fold"):
            told(lines[:few])
    with pytest.raises(ValueError, match="twice"):
        told([*lines, lines[-1]])


def test_a_prediction_of_readers_is_settled_by_all_folds(asked):
    def told():
        return next(line for line in predictions.scored(asked.parent).splitlines() if "| SubjQA |" in line)

    assert "| open | -5.0 (-5.0 to -5.0), folds: 2 | plan |" in told()
    second = [line for line in asked.read_text().splitlines() if "subjqa-1" in line]
    for fold in (2, 3, 4):
        asked.write_text(
            asked.read_text() + "".join(line.replace("subjqa-1", f"subjqa-{fold}") + "\n" for line in second)
        )
    assert "| right | -5.0 (-5.0 to -5.0), folds: 5 | plan |" in told()


@pytest.mark.slow
def test_readers_of_a_fold_are_trained_exported_and_asked(tmp_path, monkeypatch, with_operators):
    """A teacher and its two students, all small; a second call has nothing left to do."""
    small = {"batch_size": 16, "train_rows": 48}
    own = data.Data(
        teacher={"teacher_epochs": 1, **small},
        student={"epochs": 1, "evaluations": 1, **small},
        cut={"cut_warmup": 0.333},
    )
    monkeypatch.setitem(data.SIZES["plan"], "subjqa-0", own)
    monkeypatch.setitem(data.MAX_TOKENS, "subjqa-0", 40)
    source, record = tmp_path / "splits" / "subjqa-0", tmp_path / "spans.jsonl"
    source.mkdir(parents=True)
    for part, count in (("train", 60), ("dev", 20), ("test", 24)):
        rows = []
        for i in range(count):
            text = f"the plot of number {i} was slow and the film was good {'as we all know ' * (i % 8)}"
            answers = {"text": ["good"] * (i % 2), "answer_start": [text.index("good")] * (i % 2)}
            rows.append({"question": "how was the film", "context": text, "answers": answers})
        (source / f"{part}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    base = write_plain(tmp_path / "base", "spans", num_hidden_layers=6)
    called = [
        "train",
        str(tmp_path / "splits"),
        str(base),
        str(tmp_path / "work"),
        "--folds",
        "0",
        "--out",
        str(record),
    ]
    monkeypatch.setattr("sys.argv", ["equal_spans", *called])
    equal_spans.main()
    found = [json.loads(line) for line in record.read_text().splitlines()]
    assert [(row["arm"], row["precision"]) for row in found] == [
        (arm, precision) for arm in ("teacher", "layers", "adtp") for precision in ("fp32", "int8")
    ]
    assert {row["status"] for row in found if row["precision"] == "fp32"} == {"verified"}
    assert all(len(row["f1"]) == len(row["agreed"]) == 24 for row in found)
    assert found[0]["agreed"] == [100] * 24  # with itself
    assert all(row["of_teacher"] == found[0]["f1"] for row in found[2:])
    assert found[0]["answerable"] == [0, 1] * 12
    kept = found[4]["kept"]
    assert 0 < kept["context"] < 0.6
    assert 0 < kept["question"] <= 1
    assert not list((tmp_path / "work" / "unfinished").iterdir())
    equal_spans.main()
    assert [json.loads(line) for line in record.read_text().splitlines()] == found
    record.write_text("".join(f"{json.dumps(row)}\n" for row in found if row["arm"] != "adtp"))
    monkeypatch.setattr(equal_spans, "trained", None)  # what is there is not trained again
    monkeypatch.setitem(equal_time.TEXTS, ("subjqa-0", 32), 8)
    monkeypatch.setattr(equal_speed, "SECONDS", 0.5)
    monkeypatch.setattr("sys.argv", ["equal_spans", "speed", *called[1:4], "--out", str(record)])
    equal_spans.main()
    timed = [json.loads(line) for line in record.read_text().splitlines()]
    assert all(row["speed"]["32"]["ms"] > 0 and row["timed"]["commit"] for row in timed)
    shutil.rmtree(tmp_path / "work" / "exported" / equal_spans.teacher_of("subjqa-0").folder)
    with pytest.raises(
        SystemExit, match="there is no export of plan-subjqa-0-teacher.*; run train --folds 0 there first"
    ):
        equal_spans.main()
