"""Scripts of `benchmarks/`: what they conclude from known times. Nothing here depends on how fast a machine is."""

import copy
import json
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from testbed import ROOT

import adtp_export
from adtp_export.benchmarking import interleaved_timing as turns
from adtp_export.benchmarking.workloads import Workload, make_workloads
from adtp_export.contract import ATTENTION_MASK, INPUT_IDS
from benchmarks.cpu import arrivals, precision, regression, revisions
from benchmarks.gpu import attention_kernel, checks, shapes
from benchmarks.harness import records
from benchmarks.render import __main__ as render
from benchmarks.render import cpu, gpu, tables


def record(speedup, margin=0.05):
    versus = {"packed-dense-6": {"speedup": speedup, "flops_ratio": 3.0, "realized_fraction": 0.9, "margin": margin}}
    rows = [
        {"workload": "8x128", "contender": "student", "vs": versus},
        {"workload": "8x128", "contender": "other", "vs": {}},
    ]
    return {"results": rows}


@pytest.mark.parametrize(("now", "regressed"), [(2.85, False), (2.9, False), (2.65, True), (3.5, False)])
def test_a_regression_is_more_than_its_band(now, regressed):
    (row,) = regression.compare(record(2.9), record(now))
    assert row["band"] == pytest.approx(0.05 + 0.05 + 0.03 * 2.9, abs=1e-3)
    assert row["regressed"] is regressed


def test_a_noisy_run_proves_less():
    (row,) = regression.compare(record(2.9), record(2.65, margin=0.4))
    assert not row["regressed"]


def test_peers_and_both_forms_of_the_student_are_compared():
    device = {"model": "AMD EPYC", "cores": 2, "fingerprint": "0123456789ab"}
    recorded, now = (
        {
            "device": device,
            "results": [
                {
                    "workload": "8x128",
                    "contender": contender,
                    "vs": {name: {"speedup": value, "margin": 0.05} for name in peers},
                }
                for contender, value in (
                    ("student", 2.9),
                    ("ctranslate2-dense-12", 1.0),
                    ("student-precomputed", precomputed),
                )
            ],
        }
        for peers in [("packed-dense-6", "ctranslate2-dense-12")]
        for precomputed in (3.2, 2.0)
    )
    rows = regression.compare(recorded, now)
    assert [(row["contender"], row["baseline"]) for row in rows if row["regressed"]] == [
        ("student-precomputed", "packed-dense-6"),
        ("student-precomputed", "ctranslate2-dense-12"),
    ]
    assert len(rows) == 4
    nameless = {name: value for name, value in device.items() if name != "fingerprint"}  # as older records have it
    for then, here in ((device, {**device, "fingerprint": "ba9876543210"}), (nameless, device), (nameless, nameless)):
        elsewhere = regression.compare({**recorded, "device": then}, {**now, "device": here})
        assert {row["baseline"] for row in elsewhere} == {"packed-dense-6"}


def test_a_ratio_is_quoted_with_its_margin_however_wide_that_is():
    assert tables.quoted({"speedup": 7.84, "margin": 0.39}) == "7.8x ± 5%"
    assert tables.quoted({"speedup": 7.84, "margin": 2.40}) == "7.8x ± 31%"


def rounds_until(monkeypatch, spread, within, seconds=1.0):
    """How many rounds are timed of two contenders, the second of which varies by `spread`; a round takes 0.02 s of a clock."""
    clock, draw = [0.0], np.random.default_rng(0)

    def time_ms(name, batch):
        clock[0] += 0.01
        return 10.0 if name == "student" else 20.0 * (1 + spread * draw.uniform(-1, 1))

    monkeypatch.setattr(turns.time, "perf_counter", lambda: clock[0])
    workload = Workload("1x32", ({"input_ids": np.zeros((1, 32), np.int64)},))
    return len(turns.measure(workload, ["student", "other"], time_ms, seconds, within=within)["other"])


def test_a_margin_that_is_asked_for_takes_more_rounds(monkeypatch):
    plain = rounds_until(monkeypatch, spread=0.5, within=None)
    assert plain == 50  # one second
    assert rounds_until(monkeypatch, spread=0.001, within=0.05) == plain
    more = rounds_until(monkeypatch, spread=0.5, within=0.08)
    assert plain < more < 500
    assert rounds_until(monkeypatch, spread=0.9, within=0.001) == 500  # ten times as long at most


@pytest.mark.parametrize(("cycles", "rounds"), [(0, 60), (25, 600)])
def test_many_batches_come_as_often_as_is_asked(monkeypatch, cycles, rounds):
    """And what each cycle takes does not hang on which batches it had: all of them."""
    clock = iter(np.arange(1e6))
    monkeypatch.setattr(turns.time, "perf_counter", lambda: next(clock))
    workload = Workload("many", tuple({"ids": np.zeros((1, n))} for n in range(1, 25)))
    times = turns.measure(
        workload,
        ["student"],
        lambda name, batch: float(batch["ids"].shape[1]),
        1000,
        limits=turns.Limits(cycles=cycles),
    )["student"]
    assert len(times) == rounds
    assert (len(set(turns.by_cycle(times, 24))) == 1) == (cycles == 25)


def test_a_lucky_run_does_not_end_a_measurement(monkeypatch):
    """The pilot varies, and nothing after it does: as many rounds are run as the pilot said."""
    calls = [0]

    def time_ms(name, batch):
        calls[0] += 1
        return 10.0 if name == "student" or calls[0] > 2 * turns.PILOT_WITHIN else 10.0 + calls[0]

    workload = Workload("1x32", ({"input_ids": np.zeros((1, 32), np.int64)},))
    clock = iter(np.arange(1e6))
    monkeypatch.setattr(turns.time, "perf_counter", lambda: next(clock) * 0.2)
    times = turns.measure(workload, ["student", "other"], time_ms, 1, within=0.05)
    assert len(times["other"]) > turns.MAX_ROUNDS


def test_workloads_and_baselines_that_only_one_has_are_passed_over():
    other = copy.deepcopy(record(2.9))
    other["results"][0]["vs"] = {"padded-dense-12": other["results"][0]["vs"]["packed-dense-6"]}
    assert regression.compare(record(2.9), other) == []


def test_the_recorded_command_is_repeated_without_its_extras():
    command = (
        "adtp-bench --shape bert-base --layers 6 --peers all --retention 0.29 --sweep-retention --seconds 9 --json"
    )
    expected = {"shape": "bert-base", "layers": 6, "retention": 0.29, "peers": "all"}
    assert regression.again(command) == expected
    assert regression.again("adtp-bench some-export --workload 1x32 --threads 2") == {
        "out": Path("some-export"),
        "threads": 2,
    }


@pytest.mark.parametrize("path", regression.BY_DEFAULT, ids=lambda path: path.stem)
def test_committed_records_can_be_repeated(path, monkeypatch, tmp_path):
    """By the command itself, up to the timing, which says here what was recorded."""
    recorded, asked = records.read_document(path), {}
    monkeypatch.setattr(adtp_export, "bench", lambda **options: asked.update(options) or recorded)
    monkeypatch.setattr(sys, "argv", ["regression", str(path), "--seconds", "3"])
    assert regression.main() == 0
    assert (asked["shape"], asked["seconds"], asked["budget"]) == ("bert-base", 3, 0)


@given(
    st.lists(st.tuples(st.floats(0, 50), st.integers(1, 60)), min_size=1, max_size=40),
    st.integers(8, 128),
    st.booleans(),
)
def test_a_server_answers_every_request_once_within_its_budget(requests, budget, padded):
    arrive_ms, lengths = np.cumsum([gap for gap, _ in requests]), np.array([n for _, n in requests])
    ran = []

    def run_ms(chosen):
        ran.append(chosen)
        return 1.0 + 0.1 * len(chosen)

    took, sizes = arrivals.serve(arrive_ms, lengths, budget, padded, run_ms)
    assert np.concatenate(ran).tolist() == list(range(len(requests)))  # oldest first
    assert [len(chosen) for chosen in ran] == sizes
    assert (took >= 1.0 + 0.1 - 1e-6).all()
    for chosen in ran:
        tokens = lengths[chosen].max() * len(chosen) if padded else lengths[chosen].sum()
        assert len(chosen) == 1 or tokens <= budget
        started = arrive_ms[chosen] + took[chosen] - (1.0 + 0.1 * len(chosen))
        assert np.allclose(started, started[0])  # a batch is answered at once
        assert started[0] >= arrive_ms[chosen].max() - 1e-6  # nothing is served before it arrives


def test_an_idle_server_takes_requests_one_by_one():
    took, sizes = arrivals.serve(np.array([0.0, 100.0, 200.0]), np.array([5, 5, 5]), 100, False, lambda chosen: 7.0)
    assert took.tolist() == [7.0, 7.0, 7.0]
    assert sizes == [1, 1, 1]


@pytest.mark.parametrize("place", [0, 1, 2])
def test_an_error_that_is_no_number_is_the_largest_wherever_it_stands(place):
    shares = [0.25, 0.5, 0.125]
    assert attention_kernel.largest(shares) == 0.5
    shares[place] = float("nan")
    assert np.isnan(attention_kernel.largest(shares))


def test_scripts_name_workloads_that_there_are():
    for names in (shapes.WORKLOADS, checks.WORKLOADS, precision.GRID, [precision.CALIBRATION], revisions.GRID):
        made = make_workloads(names, [INPUT_IDS, ATTENTION_MASK], 1000)
        assert all((batch[ATTENTION_MASK].sum(1) > 0).all() for workload in made for batch in workload.batches)


def test_an_empty_place_for_figures_is_filled_and_what_follows_stays():
    empty = "<!-- figures: benchmarks/records/none.json -->\n<!-- end of figures -->\n"
    filled = render.fill(f"{empty}\ntext\n\n{empty}")
    assert filled.count("Not run yet.") == 2
    assert "\ntext\n" in filled
    assert render.fill(filled) == filled


def test_the_stream_mix_has_texts_of_both_kinds():
    lengths = arrivals.draw_lengths("mix", 400, np.random.default_rng(0))
    short = (lengths < 60).mean()
    assert 0.7 < short < 0.9
    assert lengths.max() > 300


def test_kernels_count_as_executed_by_the_record_alone(tmp_path):
    """The shipped hashes are those of the record; one without a launch, or with an error too large, is left out."""
    shipped = {
        path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8")
        for path in (ROOT / "plugins" / "kernels").glob("emulated.json")
    }
    assert gpu.digests(ROOT / "benchmarks" / "records") == shipped, "type: python -m benchmarks.render"
    rows = {"ptx": ("a", 3, 0.9), "sm_86": ("b", 0, 0.0), "sm_89": ("c", 3, 1.1)}
    fields = ("sha256", "launches", "worst_share_of_allowed")
    binaries = {"fp16-d32-16x16": {code: dict(zip(fields, row)) for code, row in rows.items()}}
    (tmp_path / "emulated.json").write_text(json.dumps({"command": "a test", "binaries": binaries}))
    (text,) = gpu.digests(tmp_path).values()
    assert json.loads(text) == {"command": "a test", "sha256": ["a"]}


def test_a_record_needs_a_commit(monkeypatch, tmp_path):
    """Nothing is written into the records from a tree with changes; elsewhere it may be."""
    monkeypatch.setattr("adtp_export.environment.commit", lambda: "0123-dirty")
    with pytest.raises(SystemExit, match="the tree has changes"):
        records.claim(records.RECORDS / "new.json")
    assert records.claim(tmp_path / "new.json") == tmp_path / "new.json"
    monkeypatch.setattr("adtp_export.environment.commit", lambda: "0123")
    records.claim(records.RECORDS / "new.json")


def test_what_cannot_be_written_is_said_before_measuring(tmp_path):
    (tmp_path / "broken.json").write_text("{")
    with pytest.raises(SystemExit, match=r"broken\.json is no record"):
        records.claim(tmp_path / "broken.json")
    with pytest.raises(SystemExit, match="there is no folder"):
        records.claim(tmp_path / "none" / "new.json")


def test_rows_of_a_record_are_replaced_by_key(tmp_path):
    path = tmp_path / "rows.jsonl"
    records.update(path, [{"stream": "a", "ms": 1}, {"stream": "b", "ms": 2}], key=lambda row: row["stream"])
    records.update(path, [{"stream": "a", "ms": 3}, {"stream": "a", "ms": 4}], key=lambda row: row["stream"])
    assert records.read_lines(path) == [{"stream": "b", "ms": 2}, {"stream": "a", "ms": 3}, {"stream": "a", "ms": 4}]


ADDED = """
import sys
from pathlib import Path
from benchmarks.harness import records
for number in range(40):
    records.update(Path(sys.argv[1]), [{"by": sys.argv[2], "number": number}], key=lambda row: (row["by"], row["number"]))
"""


def test_processes_that_add_to_one_record_lose_no_row(tmp_path):
    path, writers = tmp_path / "rows.jsonl", ("first", "second", "third")
    started = [subprocess.Popen([sys.executable, "-c", ADDED, path, name], cwd=ROOT) for name in writers]
    assert [process.wait() for process in started] == [0, 0, 0]
    assert Counter(row["by"] for row in records.read_lines(path)) == dict.fromkeys(writers, 40)
    assert list(tmp_path.iterdir()) == [path]


def test_the_factors_of_the_front_page_give_its_speedup():
    """24 ms = 2 (layers) x 3 (padding) x 4 (tokens) x 2 (operators) x 0.5 ms; the faster one of the peers is named."""
    times = {
        "student-plugin": 0.5,
        "student": 1.0,
        "packed-dense-6": 4.0,
        "padded-dense-6": 12.0,
        "padded-dense-12": 24.0,
        "openvino-bf16-dense-12": 9.0,
        "ctranslate2-int8-dense-12": 8.0,
    }
    vs = {name: {"speedup": 2 * ms, "margin": 0.02} for name, ms in times.items()}
    timed = next(iter(records.read_document(records.RECORDS / "precision-speed.json").values()))["bert-base"]
    hardware = timed["device"]["hardware"]
    record = {
        "command": "adtp-bench",
        "retention": "forced",
        "device": {"model": "a CPU", "hardware": hardware, "cores": 2, "threads": 2},
        "versions": {"onnxruntime": "1"},
        "results": [{"workload": "1x32", "contender": name, "p50_ms": ms, "vs": vs} for name, ms in times.items()],
    }
    told = cpu.front(record)
    factors = "2.0 x 3.0 x 4.0 x 2.0"
    assert f"| 1x32 | 24.0 | 8.0 (CTranslate2, int8) | 0.5 | {factors} | **48.0x ± 1%** | **16.0x ± 1%** |" in told
    ms = {(row["workload"], row["precision"]): row["p50_ms"] for row in timed["results"]}
    gain = ms["1x32", "fp32 with operators"] / ms["1x32", "int8 per token with operators"]
    least, most = map(float, re.search(r"and ([\d.]+) to ([\d.]+) times as fast in INT8", told).groups())
    assert least - 0.05 <= gain <= most + 0.05
    assert "a CPU, 2 cores, 2 threads" in told
    assert "On an H100 in fp16" in told


def test_only_a_whole_interval_reaches_the_goal():
    rows = [
        {"contender": str(i), "left_low": low, "left_high": high}
        for i, (low, high) in enumerate([(0.95, 1.0), (0.7, 1.2), (0.5, 0.9)])
    ]
    told = cpu.reached({"results": rows})
    assert told.startswith(
        "1 of 3 lines are shown to keep at least 0.95 of the speedup, and 1 to keep less. For the other 1"
    )
