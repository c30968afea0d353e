"""What a run does within its budget, by a clock that runs as contenders do. No test here depends on how fast a machine is."""

import contextlib
from types import SimpleNamespace

import numpy as np
import pytest

from adtp_export.benchmarking import interleaved_timing as turns
from adtp_export.benchmarking.budget import Budget, LeftOut, estimate, make_plan
from adtp_export.benchmarking.compare import relate
from adtp_export.benchmarking.processes import Contender
from adtp_export.benchmarking.workloads import Workload
from adtp_export.cli.bench import left_out_lines
from adtp_export.errors import InputError
from adtp_export.pipeline.bench import targets
from adtp_export.pipeline.bench.bench import _rank
from adtp_export.pipeline.bench.options import BenchOptions
from adtp_export.pipeline.bench.rounds import in_time
from adtp_export.pipeline.progress import Steps

SECONDS = {"student": 0.1, "packed-dense-6": 0.3, "padded-dense-12": 4.0, "sorted-dense-12": 3.0}
"""What contenders take for a batch of `GRID`; those of `MIXED` take up to twice as long, by their number."""

GRID = Workload("8x128", ({"number": np.array([0])},))
MIXED = Workload("mixed-32", tuple({"number": np.array([i])} for i in range(4)), skewed=True)


class Machine:
    """Runs contenders on a clock of its own. runs: of each on each workload, untimed ones included."""

    def __init__(self, monkeypatch):
        self.now, self.runs = 0.0, {}
        monkeypatch.setattr(turns.time, "perf_counter", lambda: self.now)

    def time_ms(self, workload, name, batch, warm):
        number = int(batch["number"][0])
        took = SECONDS[name] * (1 + number / 3)
        self.now += took * (1 + warm)
        key = (workload.name, name)
        self.runs[key] = self.runs.get(key, 0) + 1 + warm
        return 1e3 * took


def run(machine, workloads, **options):
    chosen = BenchOptions(shape="bert-base", **options)
    budget = Budget(chosen.budget, clock=lambda: machine.now)
    entries = {workload.name: list(SECONDS) for workload in workloads}
    return in_time(entries, workloads, machine.time_ms, chosen, budget, Steps())


@pytest.mark.parametrize("margin", [None, 0.05])
@pytest.mark.parametrize("seconds", [60, 120, 300, 1200])
def test_a_run_ends_within_its_budget(monkeypatch, seconds, margin):
    machine = Machine(monkeypatch)
    found, _ = run(machine, [GRID, MIXED], budget=seconds, margin=margin)
    assert 0.3 * seconds < machine.now <= seconds or machine.now < 300
    assert found["8x128"].keys() >= {"student", "packed-dense-6"}


def test_what_users_run_comes_before_peers(tmp_path):
    names = [
        "openvino-dense-12",
        "padded-dense-12",
        "plugin-packed-dense-6",
        "packed-dense-6",
        "student-plugin",
        "student",
    ]
    everyone = [Contender(name=name, path=tmp_path, layers=6, padded=False) for name in names]
    ranked = sorted(everyone, key=lambda one: _rank(one, 6))
    assert [one.name for one in ranked[:4]] == ["student", "student-plugin", "packed-dense-6", "padded-dense-12"]


def test_without_a_limit_everything_is_run_in_full(monkeypatch):
    machine = Machine(monkeypatch)
    found, left_out = run(machine, [GRID, MIXED], budget=0)
    assert left_out == []
    assert {name: len(ms) for name, ms in found["mixed-32"].items()} == dict.fromkeys(SECONDS, 24)
    assert machine.now > 400


def test_the_least_informative_contenders_are_left_out_by_name(monkeypatch):
    """Of 60 s, estimates take 14.8 and the profile gets 4.5. Of the other 40.7 the student and packed dense take 32."""
    machine = Machine(monkeypatch)
    found, left_out = run(machine, [GRID, MIXED], budget=60)
    assert all(set(ms) == {"student", "packed-dense-6"} for ms in found.values())
    names = [(each.workload, each.contender, each.seconds) for each in left_out]
    assert names == [
        ("8x128", "padded-dense-12", 24.0),
        ("mixed-32", "padded-dense-12", 24.0),
        ("8x128", "sorted-dense-12", 18.0),
        ("mixed-32", "sorted-dense-12", 18.0),
    ]
    lines = left_out_lines({"left_out": [vars(each) for each in left_out]})
    assert lines[1:] == [
        "mixed-32: no time for padded-dense-12 (takes 24.0 s), sorted-dense-12 (takes 18.0 s)",
        "a larger --budget, or 0, times what is missing, too",
    ]


def test_what_takes_more_than_a_second_runs_six_batches_once(monkeypatch):
    machine = Machine(monkeypatch)
    found, left_out = run(machine, [GRID, MIXED], budget=300)
    assert left_out == []
    for workload in ("8x128", "mixed-32"):
        assert len(found[workload]["padded-dense-12"]) == turns.CYCLES
        assert machine.runs[workload, "padded-dense-12"] == 1 + turns.CYCLES  # and the estimate
        assert len(found[workload]["student"]) >= 10


def test_estimates_end_at_a_third_of_the_budget():
    clock = [0.0]

    def time_ms(workload, name):
        clock[0] += 10
        return 1e4

    entries = {"8x128": list(SECONDS), "mixed-32": list(SECONDS)}
    budget = Budget(60, clock=lambda: clock[0])
    costs = estimate(entries, [GRID, MIXED], time_ms, budget)
    assert set(costs) == {("8x128", "student"), ("mixed-32", "student"), ("8x128", "packed-dense-6")}
    plan = make_plan(entries, [GRID, MIXED], costs, 20, budget)
    unknown = [each.contender for each in plan.left_out if each.seconds is None]
    assert unknown == ["packed-dense-6", *["padded-dense-12"] * 2, *["sorted-dense-12"] * 2]


def test_a_first_run_that_compiles_does_not_tell_what_a_run_takes():
    asked = []

    def time_ms(workload, name):
        asked.append(name)
        return 32_000.0 if name == "compiled" and asked.count(name) == 1 else 2.0

    costs = estimate({"8x128": ["student", "compiled"]}, [GRID], time_ms, Budget(300))
    assert asked == ["student", "compiled", "compiled"]
    assert costs == {("8x128", "student"): 0.002, ("8x128", "compiled"): 0.002}


def test_a_workload_without_its_first_contender_is_left_out():
    """All ratios are to that one."""
    entries = {"8x128": ["student", "plugin"], "mixed-32": ["student", "plugin"]}
    costs = {(workload, name): cost for workload in entries for name, cost in (("student", 2.0), ("plugin", 0.5))}
    plan = make_plan(entries, [GRID, MIXED], costs, 20, Budget(20, clock=lambda: 0.0))
    assert list(plan.turns) == ["8x128"]
    assert [each for each in plan.left_out if each.workload == "mixed-32"] == [
        LeftOut("mixed-32", name, turns.CYCLES * costs["mixed-32", name]) for name in ("student", "plugin")
    ]


def test_targets_have_the_medians_of_the_mean_batch(monkeypatch):
    """One that takes long runs the first batches alone, which are shorter here."""
    times = {"fast": np.array([*[10.0] * 6, *[50.0] * 6] * 2), "slow": np.array([20.0] * 6)}
    long = Workload("data-1", tuple({"number": np.array([i])} for i in range(12)))
    monkeypatch.setattr(targets, "in_time", lambda *given: ({"data-1": times}, []))
    monkeypatch.setattr(targets, "Processes", lambda *given: contextlib.nullcontext())
    monkeypatch.setattr(targets, "candidates", lambda known: times)
    monkeypatch.setattr(targets, "_takes", lambda *given: True)
    chosen = BenchOptions(shape="bert-base")
    rows, _ = targets._time(None, SimpleNamespace(targets={}), [long], chosen, Budget(0), Steps())
    assert {row["contender"]: row["p50_ms"] for row in rows} == {"fast": 30.0, "slow": 60.0}


def test_few_times_are_related_on_the_batches_that_both_ran():
    """The first batches of four are the longer ones, and ten times as slow by every contender."""
    long = np.array([10.0, 10.0, 1.0, 1.0])
    times = {"student": np.tile(long, 6), "slow": 40 * np.resize(long, 6)}
    flops = {"student": np.array([4.0, 4, 2, 2]), "slow": np.array([400.0, 400, 200, 200])}
    made = [Contender(name=name, path=None, layers=1, padded=True) for name in times]
    student, slow = relate("mixed-32", times, flops, made, ["student", "slow"])
    assert (student.p50_ms, student.rounds) == (5.5, 24)
    assert (slow.p50_ms, slow.rounds) == (220.0, 6)
    assert student.vs["slow"].speedup == 40
    assert student.vs["slow"].margin == 0
    assert slow.vs["student"].flops_ratio == 0.01


def test_the_quotient_of_sums_lies_within_its_interval():
    rng = np.random.default_rng(0)
    missed = 0
    for _ in range(2000):
        size = rng.choice([1.0, 3, 9], 6)
        slower, faster = (size * np.exp(0.05 * rng.standard_normal(6)) for _ in range(2))
        found, margin = turns.speedup_of_sums(2 * slower, faster)
        low, high = turns.interval(2 * slower / faster)
        assert low <= found <= high
        missed += abs(found - 2) > margin
    assert missed <= 0.05 * 2000


def test_a_negative_budget_is_refused():
    with pytest.raises(InputError, match="--budget"):
        BenchOptions(shape="bert-base", budget=-1)
