"""Modelled times: near what an H100 took, in every row that is warm, and said to be modelled wherever they predict.

Of these tests, only the one of rows that were not fitted can notice a wrong count, and only a gross one.
"""

import dataclasses
import json

import pytest
from testbed import ROOT

from benchmarks.gpu import modelled_times as times
from benchmarks.harness.records import RECORDS, read_document
from benchmarks.render import gpu

WITHIN, UNSEEN_WITHIN = 0.08, 0.15
"""As docs and the changelog say it, of rows that are fitted and of others."""


@pytest.fixture(scope="module")
def record():
    return json.loads((RECORDS / "modelled-times.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def rows():
    return times.recorded(read_document(times.MEASURED), read_document(times.COUNTED)["timed"])


def test_the_record_follows_from_the_others(record):
    again = times.model(*map(read_document, (times.MEASURED, times.UNSEEN, times.COUNTED)))
    assert json.loads(json.dumps(again)) == {key: record[key] for key in again}, (
        "type: python -m benchmarks.gpu.modelled_times"
    )


@pytest.mark.parametrize(
    ("kind", "contenders", "within"),
    [("results", times.FILES, WITHIN), ("unseen", times.UNSEEN_FILES, UNSEEN_WITHIN)],
    ids=["fitted", "not fitted"],
)
def test_every_warm_row_is_reproduced(record, kind, contenders, within):
    warm = [row for row in record[kind] if not row["cold"]]
    assert len(warm) == {"results": 6 * 3, "unseen": 2 * 2}[kind]
    assert {row["contender"] for row in warm} == {*contenders}
    for row in warm:
        assert abs(row["error"]) <= within, row
        assert row["error"] == pytest.approx(row["modelled_us"] / row["measured_us"] - 1, abs=2e-3)


def test_only_what_ran_first_is_cold(record):
    """It took longer than larger batches that came after it, and the model says less."""
    fitted = [row for row in record["results"] if row["cold"]]
    assert {row["workload"] for row in fitted} == {"1x32"}
    assert len(fitted) == 3
    assert {row["workload"] for row in record["unseen"] if row["cold"]} == {"1x32", "1x128"}
    assert all(row["error"] < -0.2 for row in (*fitted, *(r for r in record["unseen"] if r["cold"])))


def test_costs_are_found_again_in_rows_that_were_made_of_them(rows):
    costs = times.Costs(fixed_us=80, launch_us=3, wait_us=20, tflops=250)
    made = [dataclasses.replace(row, measured_us=row.us(costs, 1e12)) for row in rows]
    found = dataclasses.asdict(times.fit(made, 1e12))
    assert found == pytest.approx(dataclasses.asdict(costs), rel=1e-6)


def test_all_costs_are_possible(record):
    costs = record["costs"]
    assert all(value > 0 for value in costs.values())
    assert costs["tflops"] < 989  # what an H100 can do in fp16 without sparsity


def test_fitted_rows_have_three_pairs_of_launches_and_waits(rows):
    """So that three costs fit any counts, as the docs say; rows that were not fitted have one more."""
    counted = read_document(times.COUNTED)["timed"]
    fitted = {(row.launches, row.waits) for row in rows}
    others = {(row.launches, row.waits) for row in times.unseen(read_document(times.UNSEEN), counted)}
    assert (len(fitted), len(others - fitted)) == (3, 1)


def test_costs_hang_on_no_single_row(rows):
    left_out = times.cold(rows)
    warm = [row for row in rows if (row.workload, row.contender) not in left_out]
    for row in warm:
        costs = times.fit([other for other in warm if other is not row], times.BYTES_PER_S["H100"])
        assert row.us(costs, times.BYTES_PER_S["H100"]) == pytest.approx(row.measured_us, rel=0.11)


def test_bytes_are_those_of_a_layer_by_hand(rows):
    """Of 6 more dense layers: 62 widths for a token in 15 launches, and each weight once, in two bytes."""
    width, tokens = times.HIDDEN, 128
    twelve, six = (
        next(r for r in rows if (r.workload, r.contender) == ("1x128", f"packed-dense-{layers}")) for layers in (12, 6)
    )
    weights = 12 * width**2 + 13 * width
    assert twelve.bytes - six.bytes == 6 * 2 * (62 * width * tokens + weights)
    assert twelve.launches - six.launches == 6 * 15


def test_the_runner_starts_at_most_49_kernels_and_never_waits(rows):
    for row in rows:
        plan = times.planned(row, times.rows_kept(row.workload, 290), 0)
        assert plan.launches == (48 if row.contender == "student" else 46)
        assert plan.waits == 0


def test_what_is_written_now_takes_less(record):
    """31 launches or so less in the dense file, and with the cut a wait: never more for any row."""
    for row in record["rewritten"]:
        saved = (row["timed_us"] - row["now_us"]) / record["costs"]["launch_us"]
        assert saved > {"student": 32 + 6, "packed-dense-6": 31, "packed-dense-12": 61}[row["contender"]]


def test_predictions_are_arithmetic_that_a_hand_can_follow(record):
    by_name = {(row["gpu"], row["workload"]): row for row in record["predictions"]}
    row = by_name["H100", "8x128"]
    flops = {r["contender"]: r["flops"] for r in read_document(times.MEASURED)["results"] if r["workload"] == "8x128"}
    dense, student = (n * 4.2 + flops[c] / 450e6 for n, c in ((46, "packed-dense-6"), (48, "student")))
    assert (row["dense_us"], row["student_us"]) == (round(dense), round(student))
    assert row["realized_fraction"] == round(dense / student / (flops["packed-dense-6"] / flops["student"]), 2)
    assert {row["gpu"] for row in record["predictions"]} == {"H100", "H100, at fitted rates", "RTX 4090"}


def test_published_rows_give_what_they_were_made_of():
    """12 layers of 7 launches and so many FLOPs take what NVIDIA published."""
    for gpu_name, (short, long) in times.PUBLISHED.items():
        costs = times.published_costs()[gpu_name]
        flops = 24 * 768**2 + 4 * 128 * 768
        for us, tokens in ((short, 128), (long, 4096)):
            again = 12 * (7 * costs["launch_us"] + flops * tokens / costs["tflops"] / 1e6)
            assert again == pytest.approx(us, rel=0.01)


def test_it_is_said_wherever_it_is_shown(record):
    assert record["label"] == "modelled, not measured"
    for shown in (gpu.render_fit(record), gpu.render_planned(record), gpu.render_rewritten(record)):
        assert "modelled" in shown
    text = (ROOT / "docs" / "gpu.md").read_text(encoding="utf-8")
    assert all(f"modelled-times.json#{part}" in text for part in ("fit", "rewritten", "planned"))
