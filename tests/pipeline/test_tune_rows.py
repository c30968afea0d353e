"""Rows that `adtp-tune` chooses and confirms on: apart in groups, and what they can prove."""

import json
import math
import random
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from known_graphs import taking_known_graphs
from plain_models import write_plain
from test_tune import FAST, searched
from training_runs import Heard

from adtp_export.benchmarking.paired import means_at_most
from adtp_export.data.tokenize import TokenizedText
from adtp_export.pipeline.progress import Steps
from adtp_export.pipeline.tune import exports, times
from adtp_export.pipeline.tune import tune as room
from adtp_export.pipeline.tune.choice import ALPHA, confirm
from adtp_export.pipeline.tune.options import TuneOptions
from adtp_export.pipeline.tune.rows import (
    CONFIRM,
    DISAGREEMENT,
    TOO_LARGE,
    groups_of,
    halves,
    least_needed,
    needed,
    parted,
    read,
    resolved,
    variance_of,
    what_rows_show,
    worth,
)
from adtp_export.pipeline.tune.run import Run
from adtp_export.pipeline.tune.students import RECORD
from adtp_export.training.data import Examples


@given(st.lists(st.integers(0, 30), min_size=2, max_size=200), st.integers(0, 5))
def test_no_group_is_in_both_halves(numbers, seed):
    groups = np.unique(numbers, return_inverse=True)[1]
    chosen, rest = halves(groups, seed)
    assert sorted([*chosen, *rest]) == list(range(len(groups)))
    assert not set(groups[chosen]) & set(groups[rest])
    drawn, others = parted(groups, CONFIRM, seed)
    sizes, wanted, most = np.bincount(groups), CONFIRM * len(groups), (CONFIRM + TOO_LARGE) * len(groups)
    assert len(drawn) <= most or len(drawn) == sizes.min()
    assert len(drawn) >= wanted or all(len(drawn) + sizes[group] > most for group in groups[others])


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("size", [100, 300, 400, 700])
@pytest.mark.parametrize("share", [0.2, CONFIRM])
def test_a_large_group_does_not_swallow_a_part(seed, size, share):
    groups = np.array([0] * size + [*range(1, 1001 - size)])
    drawn, rest = parted(groups, share, seed)
    assert worth(groups[drawn]) == len(drawn) == min(1000 * share, 1000 - size)
    assert len(rest) == 1000 - len(drawn)


def test_speed_is_measured_on_rows_from_everywhere_in_a_sorted_file():
    encoded = [TokenizedText([1] * n, [0] * n, False) for n in range(8, 520)]
    dev = Examples(encoded=encoded, labels=[0] * 512, pad_id=0, inputs=("input_ids", "attention_mask"))
    settings = SimpleNamespace(max_tokens=600, seed=0)
    rounds = times.workload(None, SimpleNamespace(parts={"dev": dev}, settings=settings))
    lengths = np.concatenate([batch["attention_mask"].sum(1) for batch in rounds.batches])
    assert len(set(lengths.tolist())) == 128
    assert (lengths.min() < 8 + 64, lengths.max() >= 520 - 64) == (True, True)


def test_pairs_of_one_first_text_are_one_group():
    pairs = [(f"a long premise, number {i} of them", f"hypothesis {i} {j}") for i in range(4) for j in range(3)]
    assert groups_of(pairs).tolist() == [i for i in range(4) for _ in range(3)]
    assert groups_of([["one", "two"], ["one", "three"]]).tolist() == [0, 1]  # words of two sentences


@pytest.mark.parametrize("drop", [0.5, 1.0, 5.0])
def test_fewer_rows_than_a_proof_takes_prove_nothing(drop):
    """Not even where a student answers every confirming row as the model does, and by itself."""
    rows = least_needed(drop)
    enough, few = (
        confirm([np.zeros(count)], np.arange(count), drop)[0] for count in (round(1.1 * rows), round(0.9 * rows))
    )
    assert enough.proven
    assert few.bound > drop
    assert not few.proven


def test_rows_that_a_proof_takes_are_enough_for_one():
    confirming = needed(1.0)
    assert 2_900 < confirming < 2_950
    assert 5_200 < needed(1.0, 4) < 5_250
    assert resolved(confirming) <= 1.0 < resolved(confirming - 1)
    assert 100 * 1.645 * math.sqrt(DISAGREEMENT / confirming) < resolved(confirming)


def test_rows_of_many_tags_prove_more_than_rows_of_one_answer():
    """Of students that gain and lose one tag in twenty each: with twice the rows that this takes most are proven, with a quarter few."""
    random, words = np.random.default_rng(0), [["word"] * length for length in (2, 9, 14, 30)]
    assert variance_of("spans", words) == variance_of("sequence", words) == DISAGREEMENT
    wanted = needed(1.0, 1, variance_of("tokens", words))
    assert least_needed(1.0) < wanted < needed(1.0) / 4
    proven = []
    for rows in (2 * wanted, wanted // 4):
        lengths = np.resize([len(row) for row in words], rows)
        changed = [random.multinomial(lengths, [0.05, 0.05, 0.9]) for _ in range(30)]
        drawn = [(lost - gained) / lengths for lost, gained, _ in (each.T for each in changed)]
        proven.append(sum(confirm([drops], np.arange(rows), 1.0)[0].proven for drops in drawn))
    assert proven[0] > 20
    assert proven[1] < 10


@pytest.mark.parametrize("candidates", [1, 4])
def test_overlapping_rows_prove_as_little_as_those_that_they_are_worth(candidates):
    """Of students that lose nothing: the bound is that of so many single rows, also where groups have unequal sizes."""
    sizes = np.array([1] * 150 + [4] * 40 + [20] * 12)
    groups = np.repeat(np.arange(len(sizes)), sizes)
    own = worth(groups)
    assert own < len(sizes) < len(groups)
    assert worth(np.arange(50)) == pytest.approx(50)
    nothing = [np.zeros(len(groups))] * candidates
    limit = 100 * math.log(candidates / ALPHA) / own
    found, first = confirm(nothing, groups, 1.1 * limit), confirm(nothing, groups, 0.9 * limit)
    assert found[0].proven
    assert not any(each.proven for each in first)


def test_bounds_hold_where_groups_have_unequal_sizes():
    """A tenth of them is twenty times as large as the others, and each is lost whole or not at all."""
    random, wrong = np.random.default_rng(0), 0
    for _ in range(100):
        sizes = np.where(random.random(200) < 0.1, 20, 1)
        groups = np.repeat(np.arange(200), sizes)
        lost = (random.random(200) < 0.03)[groups].astype(float)
        wrong += float(np.quantile(means_at_most(lost, groups), 0.95)) < 0.03
    assert wrong <= 5


def test_a_student_that_cannot_be_exported_makes_room_for_the_next(monkeypatch, tmp_path):
    run = object.__new__(Run)
    run.chosen, run.steps, run.out = SimpleNamespace(model="m"), Steps(), tmp_path
    ranked = [SimpleNamespace(name=f"student-{i}") for i in range(6)]
    students = SimpleNamespace(sound=lambda trial: tmp_path / trial.name)
    search, ready = SimpleNamespace(ranked=lambda: ranked, students=students), SimpleNamespace(precisions=["fp32"])

    def export_all(directories, *rest):
        return {name: path for name, path in directories.items() if name != "student-1"}

    monkeypatch.setattr(exports, "export_all", export_all)
    made = run._shortlist(ready, search, {exports.MODEL: tmp_path})
    assert [*made] == [exports.MODEL, "student-0", "student-2", "student-3"]


WORDS = ["the", "room", "was", "small", "and", "clean", "hotel", "near", "station", "great"]


def tagged(rng, number):
    words = rng.choices(WORDS, k=rng.randint(9, 14))
    return {"tokens": words, "tags": ["B-X" if word in ("room", "hotel") else "O" for word in words]}


def asked(rng, number):
    words = rng.choices(WORDS, k=rng.randint(9, 30))
    place = rng.randrange(len(words))
    answer = {"text": [words[place]], "answer_start": [len(" ".join([*words[:place], ""]))]}
    return {"question": f"was it {number}?", "context": " ".join(words), "answers": answer}


def model_and_rows(folder, head, make):
    """A model with a head, and the files of 60 rows to train on and as many of dev."""
    labels = {"id2label": {0: "B-X", 1: "O"}, "label2id": {"B-X": 0, "O": 1}} if head == "tokens" else {}
    (folder / "model").mkdir()
    directory, rng, rows = write_plain(folder / "model", head, **labels), random.Random(0), {}
    for name in ("train", "dev"):
        rows[name] = folder / f"{name}.jsonl"
        rows[name].write_text("".join(json.dumps(make(rng, i)) + "\n" for i in range(60)))
    return directory, rows


@pytest.mark.parametrize(("head", "make"), [("tokens", tagged), ("spans", asked)])
def test_what_rows_show_follows_from_what_they_answer(head, make, tmp_path):
    directory, rows = model_and_rows(tmp_path, head, make)
    found = read(TuneOptions(model=directory, out=tmp_path / "out", max_drop=50.0, batch_size=8, **rows))
    least, most = (1 / 14, 1 / 9) if head == "tokens" else (1, 1)
    assert least * DISAGREEMENT <= found.variance <= most * DISAGREEMENT
    said = what_rows_show(found.groups, found.variance, 1.0, 4)
    bound = resolved(worth(found.groups["test"]), 4, found.variance)
    assert f"bound a drop to within {bound:.1f} points" in said


@pytest.mark.slow
@pytest.mark.parametrize(("head", "make"), [("tokens", tagged), ("spans", asked)])
def test_tags_and_spans_go_through_it_as_well(head, make, tmp_path):
    directory, rows = model_and_rows(tmp_path, head, make)
    with taking_known_graphs():
        record = room.tune(directory, tmp_path / "out", max_drop=100.0, precisions="fp32", **rows, **FAST)
    assert {time["site"] for time in record["table"]} == {"", "1.attention"}
    assert np.isfinite([each["confirmed"]["drop"] for each in record["candidates"]]).all()
    (tmp_path / "cut").mkdir()  # which takes no less time in so small a model, so a run may not have trained one
    searched(tmp_path / "cut", directory, rows, Heard(), "1.attention")
    assert "1.attention" in (tmp_path / "cut" / RECORD).read_text()
