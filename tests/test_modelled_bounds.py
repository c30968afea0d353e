"""Lower bounds that were counted: below what was measured, of the kernels that are shipped, and right where they can be done by hand."""

import json

import pytest
from testbed import ROOT

from adtp_export.plugins import binaries
from benchmarks.gpu.attention_kernel import workloads
from benchmarks.gpu.lower_bounds import GPUS, HEAD_SIZE, HIDDEN, bound, variants

RECORDS = ROOT / "benchmarks" / "records"


@pytest.fixture(scope="module")
def record():
    return json.loads((RECORDS / "modelled-bounds.json").read_text())


def test_what_an_h100_took_is_longer(record):
    measured = json.loads((RECORDS / "ragged-attention-nvidia-h100-80gb-hbm3.json").read_text())["results"]
    kind = (record["dtype"], record["head_size"])
    times = {
        r["workload"]: r["device_us"]
        for r in measured
        if (r["dtype"], r["head_size"]) == kind and r["contender"] == "kernel"
    }
    ratios = [times[r["workload"]] / r["least_us"] for r in record["results"] if r["gpu"] == "H100"]
    assert len(ratios) == len(times) == 8
    assert (round(min(ratios), 1), round(max(ratios), 1)) == (2.3, 8.6)  # docs/gpu.md says so


def test_the_counts_are_of_these_kernels(record):
    assert record["kernels"] == binaries.manifest()["source_sha256"], "type: python -m benchmarks.gpu.lower_bounds"
    assert "not measured" in record["label"]
    assert record["rates"] == GPUS


def test_bounds_follow_from_the_counts(record):
    lengths = workloads()
    for row in record["results"]:
        gpu = GPUS[row["gpu"]]
        again = bound(gpu, record["counts"][gpu["code"]], lengths[row["workload"]])
        assert again == {key: row[key] for key in again}


def test_tensor_work_is_that_of_whole_tiles(record):
    """Two products of block_m x block_n x head size for a step, 2 FLOPs each; a whole sequence of tiles by hand."""
    for counted in record["counts"].values():
        for variant in variants():
            constant, share = counted[variant.name]["tensor_flops"]
            assert (constant, share) == (0, 2 * 2 * variant.block_m * variant.block_n * HEAD_SIZE)
    (row,) = [r for r in record["results"] if (r["workload"], r["gpu"]) == ("8x512", "RTX 3090")]
    flops = 8 * 4 * 512**2 * HIDDEN
    assert row["least_us"] == pytest.approx(flops / (82 * 512 * 1695), rel=1e-3)
