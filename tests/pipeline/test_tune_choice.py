"""What adtp-tune compares and concludes: shapes from times, plans from rates, bounds from answers."""

import dataclasses
import math
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tuning import times

from adtp_export.artifacts.records import Target
from adtp_export.benchmarking import paired
from adtp_export.cli import tune as command
from adtp_export.cli.console import Console
from adtp_export.errors import InputError
from adtp_export.pipeline.tune import choice
from adtp_export.pipeline.tune import times as tune_times
from adtp_export.pipeline.tune.choice import (
    Candidate,
    Confirmed,
    choose,
    confirm,
    going_on,
    meets,
    standard_error,
)
from adtp_export.pipeline.tune.exports import Exported
from adtp_export.pipeline.tune.plan import RUNGS, Plan, Rates, make_plan, seconds_for
from adtp_export.pipeline.tune.shapes import RETENTIONS, Arm, Table, Time, fastest_of, levels
from adtp_export.report.tuned import cells, render

BOTH = ("fp32", "int8")


def test_shapes_of_a_level_take_as_long_as_fewer_layers():
    table = times()
    found = levels(table, None, BOTH)
    assert [level.speedup for level in found] == sorted(table.fastest(Arm(depth), BOTH) for depth in (4, 3, 2))
    slowest, middle, fastest = (level.arms for level in found)
    assert slowest == (Arm(6, "0.ffn", 0.6), Arm(4))
    assert [arm.layers for arm in middle] == [6, 4, 3]
    assert [arm.layers for arm in fastest] == [6, 4, 3, 2]
    for level in found:
        for arm in level.arms:
            assert table.fastest(arm, BOTH) == pytest.approx(level.speedup, rel=2e-3 * 6)  # retentions are of 1/1000


def test_a_student_races_at_one_level_alone():
    """Noise may make a whole student the best of two speeds: here 6 layers take a little longer than 8."""
    whole = {12: 10.0, 8: 8.0, 6: 8.05, 4: 6.0}
    timed = [Time(Arm(depth), "fp32", ms) for depth, ms in whole.items()]
    cuts = [
        Time(Arm(depth, "0.ffn", at), "fp32", ms * (0.4 + 0.5 * at)) for depth, ms in whole.items() for at in RETENTIONS
    ]
    found = levels(Table([*timed, *cuts]), None, ["fp32"])
    arms = [arm for level in found for arm in level.arms]
    assert len(arms) == len(set(arms))
    assert arms.count(Arm(8)) == 1


def test_an_asked_speedup_makes_one_level():
    table = times()
    (level,) = levels(table, 3, BOTH)
    assert all(table.fastest(arm, BOTH) >= 3 for arm in level.arms)
    assert len([arm for arm in level.arms if not arm.site]) == 1  # of whole students the deepest
    assert levels(table, 50, BOTH) == []
    (alone,) = levels(table, 3, ("fp32",))
    assert all(table.speedup(arm, "fp32") >= 3 for arm in alone.arms)
    arm, most = fastest_of(table, BOTH)
    for almost in (most, most * 0.99):  # not even the fastest shape is as far ahead as others should be
        assert arm in levels(table, almost, BOTH)[0].arms


@given(st.floats(0.1, 100), st.floats(0.1, 100))
def test_a_shape_is_as_fast_as_itself(whole, half):
    """Whatever quotients of times are rounded to, and whichever is faster."""
    (level,) = levels(Table([Time(Arm(2), "fp32", whole), Time(Arm(1), "fp32", half)]), None, ["fp32"])
    assert level.arms == (Arm(1),)


def test_one_layer_has_no_shapes_to_try():
    assert levels(Table([Time(Arm(1), "fp32", 2.0), Time(Arm(1), "int8", 1.0)]), None, BOTH) == []


def test_times_that_noise_turned_around_stay_in_order():
    rows = [
        Time(Arm(2), "fp32", 10.0),
        *(Time(Arm(2, "0.ffn", r), "fp32", ms) for r, ms in zip(RETENTIONS, (9, 9.5, 5, 6))),
    ]
    found = Table(rows).shape_for(2, 10 / 5.5, ["fp32"])
    assert found is None  # 6 ms is the least that is certain
    assert Table(rows).shape_for(2, 10 / 9.5, ["fp32"]).retention <= 1


def test_a_table_and_a_plan_come_back_from_json():
    table = times()
    assert Table.of(table.to_json()).times == table.times
    plan = Plan(levels=tuple(levels(table, None, BOTH)), rungs=(8, 24, 72), refined=24, seconds={"race": 1.0})
    again = Plan.of(plan.to_json())
    assert again.arms == plan.arms
    assert (again.rungs, again.refined) == (plan.rungs, plan.refined)


def rates(found, train=0.01):
    arms = {arm for level in found for arm in level.arms}
    return Rates(train=dict.fromkeys(arms, train), judge=dict.fromkeys(arms, 0.001), explain=0.002, export=20.0)


@pytest.mark.parametrize("hours", [0.5, 1, 2])
def test_a_plan_uses_the_time_and_not_more(hours):
    found = levels(times(), None, BOTH)
    plan = make_plan(found, rates(found), (60_000, 500), (hours, hours), (32, 3.0, True))
    assert sum(plan.seconds.values()) <= 3600 * hours
    more = seconds_for(plan.rungs[0] + 1, found, rates(found), (60_000, 500), True)
    assert sum(more.values()) > 3600 * hours
    assert [rows / plan.rungs[0] for rows in plan.rungs] == list(RUNGS)


def test_a_plan_ends_at_the_most_epochs():
    found = levels(times(), None, BOTH)
    plan = make_plan(found, rates(found), (300, 100), (100, 100), (32, 3.0, True))
    assert plan.rungs[-1] == 900


def test_too_little_time_is_refused_with_how_much_it_takes():
    found = levels(times(), None, BOTH)
    with pytest.raises(InputError, match=r"--hours: .* Give --hours [\d.]+ or more") as refused:
        make_plan(found, rates(found), (60_000, 500), (0.1, 0.01), (32, 3.0, True))
    hours = float(str(refused.value).split("--hours ")[-1].split(" ")[0])
    assert make_plan(found, rates(found), (60_000, 500), (hours, hours - 0.09), (32, 3.0, True)).rungs[0] >= 16 * 32


def test_the_best_third_goes_on_and_what_is_close_to_it():
    rng = np.random.default_rng(0)
    groups, base = np.arange(400), rng.random(400)
    far = [base + step for step in (0.0, 0.5, 1.0, 1.5)]
    equal = [base] * 4
    assert going_on(far, groups, equal, groups) == [0, 1]
    close = [base, base + 1, base + 1 + rng.normal(0, 1, 400) * 0.1 + 0.001, base + 2]
    assert going_on(close, groups, equal, groups) == [0, 1, 2]
    assert going_on([base], groups, [base], groups) == [0]


def test_what_is_right_more_often_goes_on_whatever_its_loss():
    """Of four arms the last has the largest loss; scores are of half as many rows, as of questions with two windows each."""
    losses, groups = [np.full(400, loss) for loss in (0.2, 0.5, 0.9, 1.3)], np.arange(400)
    right = np.random.default_rng(0).random(200)
    for more, chosen in ((0.04, [0, 1, 3]), (0.0, [0, 1])):
        scores = [*[(right < 0.9).astype(float)] * 3, (right < 0.9 + more).astype(float)]
        assert going_on(losses, groups, scores, np.arange(200)) == chosen
    assert going_on(losses[3:], groups, scores[3:], np.arange(200)) == [0]


def test_a_standard_error_counts_groups():
    values = np.random.default_rng(0).random(300)
    alone = standard_error(values, np.arange(300))
    assert alone == pytest.approx(values.std() / math.sqrt(300))
    thrice = standard_error(np.repeat(values, 3), np.repeat(np.arange(300), 3))
    assert thrice == pytest.approx(alone)


def drops(rows, lost, gained, seed=0):
    """The teacher's right answers minus a student's."""
    drawn = np.random.default_rng(seed).random(rows)
    return np.where(drawn < lost, 1.0, np.where(drawn > 1 - gained, -1.0, 0.0))


@pytest.fixture
def fewer_draws(monkeypatch):
    monkeypatch.setattr("adtp_export.benchmarking.paired.DRAWS", 500)


@pytest.mark.usefixtures("fewer_draws")
def test_enough_rows_prove_a_drop_and_few_do_not():
    many, few = drops(4000, 0.01, 0.01), drops(400, 0.06, 0.05, 1)
    (sure,) = confirm([many], np.arange(len(many)), 1.0)
    (unsure,) = confirm([few], np.arange(len(few)), 1.0)
    assert sure.proven
    assert sure.bound <= 1.0
    assert not unsure.proven
    assert unsure.bound >= 1.0
    (repeated,) = confirm([np.repeat(few, 10)], np.repeat(np.arange(len(few)), 10), 1.0)
    assert not repeated.proven


@pytest.mark.usefixtures("fewer_draws")
def test_bounds_hold_for_all_candidates_together():
    found = drops(3000, 0.03, 0.03)
    groups = np.arange(len(found))
    (alone,) = confirm([found], groups, 1.0)
    among = confirm([found, drops(3000, 0.2, 0.1), drops(3000, 0.2, 0.1, 1)], groups, 1.0)
    assert among[0].bound > alone.bound
    assert [each.proven for each in among[1:]] == [False, False]
    assert all(each.proven == (each.bound <= 1.0) for each in among)


@pytest.mark.usefixtures("fewer_draws")
def test_a_bound_says_what_is_proven():
    """Each of two is proven alone, by little, and neither where both are asked for; nothing is where no drop is the goal."""
    found = np.repeat([1.0, -1.0, 0.0], [60, 60, 1880])
    both, groups = [found, np.roll(found, 1000)], np.arange(len(found))
    assert all(confirm([each], groups, 1.0)[0].proven for each in both)
    together = confirm(both, groups, 1.0)
    assert [(each.proven, each.bound <= 1.0) for each in together] == [(False, False)] * 2
    assert confirm(both, groups, None) == together
    sure = confirm([*both[:1], np.zeros(len(found))], groups, 1.0)  # which leaves the whole level to the other
    assert sure[0] == confirm(both[:1], groups, 1.0)[0]


@pytest.mark.usefixtures("fewer_draws")
@pytest.mark.parametrize(
    ("rows", "lost", "gained"),
    [
        (500, 0.06, 0.05),
        (200, 0.06, 0.049),
        (1000, 0.013, 0.002),
        (200, 0.013, 0.002),
        (100, 0.012, 0.0),
        (40, 0.012, 0.0),
    ],
)
def test_a_true_drop_at_the_limit_is_rarely_taken_for_less(rows, lost, gained):
    """Also where losses are so rare that most samples have none."""
    wrong = sum(confirm([drops(rows, lost, gained, seed)], np.arange(rows), 1.0)[0].proven for seed in range(60))
    expected = choice.ALPHA * 60
    assert wrong <= expected + 4 * math.sqrt(expected)


def test_no_loss_on_few_rows_proves_little():
    for rows in (20, 200, 2000):
        (found,) = confirm([np.zeros(rows)], np.arange(rows), 1.0)
        exact = 1 - choice.ALPHA ** (1 / rows)  # a weight of so many, and of one more that is lost
        density = rows * (1 - exact) ** (rows - 1)
        error = math.sqrt(choice.ALPHA * (1 - choice.ALPHA) / paired.DRAWS) / density
        assert found.bound == pytest.approx(100 * exact, abs=500 * error)
        assert found.proven == (rows > 200)
    (together,) = confirm([np.zeros(2000)], np.zeros(2000, int), 1.0)
    assert together.bound > 50  # one group is one draw


def candidate(name, speedup, drop, bound, margin=0.05, dev=0.0):
    confirmed = Confirmed(drop=drop, bound=bound, proven=bound <= 1)
    return Candidate(name=name, precision="fp32", speedup=speedup, margin=margin, drop=dev, confirmed=confirmed)


MODEL = candidate("model", 2.2, 0.0, 0.3)


@pytest.mark.parametrize(
    ("others", "strict", "name", "verdict"),
    [
        ([candidate("a", 3.0, 0.4, 0.9), candidate("b", 4.0, 0.4, 1.4)], True, "a", "proven"),
        ([candidate("a", 3.0, 0.4, 0.9), candidate("b", 4.0, 0.4, 1.4)], False, "b", "likely"),
        ([candidate("a", 4.0, 0.4, 0.9), candidate("b", 3.0, 0.4, 1.4)], False, "a", "proven"),
        ([candidate("a", 1.0, 0.4, 0.9)], False, "model", "proven"),
        ([], True, "model", "proven"),
    ],
)
def test_the_fastest_that_loses_little_enough_is_chosen(others, strict, name, verdict):
    found, how = choose([MODEL, *others], 1.0, None, strict)
    assert (found.name, how) == (name, verdict)


def test_without_a_proof_what_is_likely_is_chosen_unless_strict():
    others = [candidate("a", 3.0, 0.9, 2.0), candidate("b", 4.0, 0.4, 1.4), candidate("c", 5.0, 1.4, 3.0)]
    found, how = choose(others, 1.0, None, False)
    assert (found.name, how) == ("b", "likely")
    found, how = choose(others, 1.0, None, True)
    assert (found.name, how) == ("b", "nearest")
    assert choose([candidate("a", 1.02, 0.0, 0.0)], 1.0, None, False) == (None, "nearest")


def test_of_those_that_are_fast_enough_the_best_on_dev_is_chosen():
    others = [candidate("a", 3.2, 0.1, 2.0, dev=1.5), candidate("b", 3.1, 3.0, 4.0, dev=1.0), candidate("c", 2.9, 0, 0)]
    found, how = choose(others, None, 3.0, False)
    assert (found.name, how) == ("b", "proven")
    found, how = choose(others[2:], None, 3.0, False)
    assert (found.name, how) == ("c", "nearest")
    found, how = choose([dataclasses.replace(others[0], margin=0.3)], None, 3.0, False)
    assert (found.name, how) == ("a", "likely")


def test_a_candidate_that_is_no_faster_meets_no_goal():
    assert meets(candidate("a", 1.04, 0.0, 0.0), 1.0, None) is None
    assert meets(candidate("a", 1.06, 0.0, 0.0), 1.0, None) == "proven"
    assert meets(candidate("a", 3.02, 0.0, 0.0), None, 3.0) == "likely"
    assert meets(candidate("a", 3.06, 9.0, 9.0), None, 3.0) == "proven"
    assert meets(candidate("a", 2.9, 0.0, 0.0), None, 3.0) is None


def recorded(others, most, speedup=None, strict=False):
    """A record of a run with these candidates, as `tune` returns it."""
    best, verdict = choose([MODEL, *others], most, speedup, strict)
    told = {
        each.name: {**dataclasses.asdict(each), "told": each.name, "target": "cpu", "meets": meets(each, most, speedup)}
        for each in (MODEL, *others)
    }
    arm = {"told": "2 layers", "rows": 72, "speedup": 0.9, "loss": 0.1, "drop": 0.5, "error": 0.2}
    return {
        "verdict": verdict,
        "published": verdict != "nearest",
        "chosen": told[best.name],
        "candidates": list(told.values()),
        "trials": [arm, {**arm, "told": "1 layer", "loss": None, "drop": 87.654}],
        "table": times().to_json(),
        "rows": {"train": 80, "dev": 60, "test": 40},
        "shows": "little",
        "workload": "8x128",
        "goal": {"max_drop": most, "speedup": speedup},
    }


def test_page_and_screen_tell_all_candidates(capsys):
    record = recorded([candidate("a", 3.0, 0.4, 0.9), candidate("b", 4.0, 0.4, 1.4)], 1.0, strict=True)
    page, out = render(record, "<m>"), Console()
    command._show(record, "out", out)
    screen = capsys.readouterr()
    assert page.count("(chosen)") == page.count("a, fp32 (chosen)") == 1
    assert "<m>" not in page
    assert "<td>training diverged</td>" in page
    assert "87.65" not in page
    for each in record["candidates"]:
        for cell in cells(each):
            assert cell in page
            assert cell in screen.out
    assert "proven: a, fp32: 3.00x, 0.40 points lost (bound 0.90)" in screen.err
    assert "Faster and likely, but not proven on so few rows: b, fp32 (4.00x)" in screen.err
    command._show({**record, "verdict": "likely", "chosen": record["candidates"][-1]}, "out", out)
    assert "The fastest that is proven, for --strict: a, fp32 (3.00x)" in capsys.readouterr().err
    alone = recorded([candidate("b", 4.0, 0.4, 1.4)], 1.0)
    slow = {**alone["candidates"][0], "speedup": 1.02, "meets": None}
    command._show({**alone, "candidates": [slow, alone["chosen"]]}, "out", out)
    assert "for --strict" not in capsys.readouterr().err
    assert "next: adtp-run out/export --target cpu --file FILE" in screen.err
    assert "Each bound holds with 95%, for all candidates together" in render(recorded([], None, 2.0), "m")


def test_precisions_are_those_of_the_stored_times(monkeypatch):
    table = times()
    alone = Table(time for time in table.times if time.precision == "fp32")
    monkeypatch.setattr(tune_times.onnxruntime, "operators_obstacle", lambda: None)
    assert tune_times.precisions_of(table, BOTH) == BOTH
    assert tune_times.precisions_of(alone, BOTH) == ("fp32",)  # the operators came later
    monkeypatch.setattr(tune_times.onnxruntime, "operators_obstacle", lambda: "they do not load")
    assert tune_times.precisions_of(table, ["fp32"]) == ("fp32",)
    with pytest.raises(InputError, match="has times in INT8, which cannot run here now: they do not load"):
        tune_times.precisions_of(table, BOTH)


def test_a_file_of_each_precision_is_a_candidate_however_well_verified():
    """On long texts in INT8 nearly every row keeps some other token, so that too few can be compared. Its answers decide."""
    given = {
        "onnxruntime-cpu-fp32": ("verified", 3.0),
        "onnxruntime-cpu-int8": ("inconclusive", 2.0),
        "onnxruntime-cpu-int8-linear": ("inconclusive", 1.0),
        "onnxruntime-cpu-bf16-linear": ("unverified", 1.0),
        "onnxruntime-cuda-fp16": ("built-not-run", 0.1),
    }
    targets = {
        name: Target(file="model.onnx", status=status, attention="decomposed", details={"p50_ms": ms})
        for name, (status, ms) in given.items()
    }
    found = Exported.of(Path("out"), SimpleNamespace(targets=targets))
    chosen = {
        "fp32": "onnxruntime-cpu-fp32",
        "int8": "onnxruntime-cpu-int8-linear",
        "bf16": "onnxruntime-cpu-bf16-linear",
    }
    assert found.targets == chosen
    assert found.statuses == {precision: given[name][0] for precision, name in chosen.items()}
