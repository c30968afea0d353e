"""The file of a sweep: its retention is set from outside, and keeps what the same retention keeps from inside."""

import dataclasses

import numpy as np
import pytest
from known_graphs import known_graph
from onnx_ir.passes import PreconditionError
from testbed import as_numpy, make_batch

from adtp_export.benchmarking import contenders, sweep, workloads
from adtp_export.benchmarking.contenders import Architecture
from adtp_export.benchmarking.processes import Contender
from adtp_export.graph import program
from adtp_export.graph.debug import debug_form
from adtp_export.graph.passes import MEASURED, run_passes
from adtp_export.model.flops import Shape, alive_tokens
from adtp_export.runtimes.onnxruntime import OnnxRuntimeEngine

TWO_LAYERS = Architecture(Shape(hidden=32, intermediate=64, heads=2, layers=2))
SITES = ("0.ffn", "1.attention")


@pytest.mark.slow
def test_retention_is_set_from_outside(tmp_path):
    adjustable, _ = contenders.adjustable_student(TWO_LAYERS, SITES, tmp_path / "adjustable.onnx", min_tokens=4)
    batch = as_numpy(make_batch([40, 12, 3], 40, vocab_size=30000))
    with debug_form(adjustable.path) as path:
        engine = OnnxRuntimeEngine(path)
    assert engine.inputs[3:] == tuple(sweep.settings(SITES, 1000))
    for permille, kept in ((250, [10, 4, 3]), (290, [12, 4, 3]), (999, [40, 12, 3]), (1000, [40, 12, 3])):
        answer = engine.run({**batch, **sweep.settings(SITES, permille)})
        assert [n.tolist() for n in alive_tokens(answer["kept_site"], 2)] == [[40, 12, 3], kept, kept]
    fixed, _ = contenders.scheduled_student(TWO_LAYERS, SITES, 0.5, tmp_path)
    given = engine.run({**batch, **sweep.settings(SITES, 500)})
    own = OnnxRuntimeEngine(fixed.path).run(batch)["logits"]
    rows = slice(0, 2)  # the third is where min_tokens makes a difference
    assert np.array_equal(given["logits"][rows], own[rows])


@pytest.mark.parametrize("ratios", [[0.25, 1.0], pytest.param([0.3, 0.3], marks=pytest.mark.slow)], ids=str)
def test_settings_that_the_exporter_merged_are_refused(ratios):
    """1.0 is also the 1000 that shares are divided by."""
    student = contenders.random_encoder(TWO_LAYERS, contenders.schedule(SITES, ratios))
    model = program.export_portable(student, {"version": "test"})
    with pytest.raises(PreconditionError, match="equal constants were merged"):
        run_passes(model, MEASURED)


def test_an_adjustable_tagger_answers_for_all_tokens(tmp_path):
    tagger = dataclasses.replace(TWO_LAYERS, every_token=True)
    batch = as_numpy(make_batch([9, 4], 9, vocab_size=30000))
    for sites in (SITES, ()):
        made, student = contenders.adjustable_student(tagger, sites, tmp_path / f"{len(sites)}.onnx", "tagger")
        assert (made.name, made.sites, made.cls_only_last_layer, student.site_names) == ("tagger", sites, False, sites)
        assert OnnxRuntimeEngine(made.path).run({**batch, **sweep.settings(sites, 300)})["logits"].shape == (2, 9, 2)


def test_a_student_without_settings_stays_as_it_is():
    model = known_graph(contenders.random_encoder(TWO_LAYERS.deep(1)))
    before = [value.name for value in model.graph.inputs]
    run_passes(model, MEASURED)
    assert [value.name for value in model.graph.inputs] == before


def test_a_sweep_counts_what_it_keeps(tmp_path):
    architecture = TWO_LAYERS.deep(1)
    packed = Contender(
        name="packed-dense-1", path=tmp_path / "packed-1.onnx", layers=1, padded=False, cls_only_last_layer=True
    )
    program.save(known_graph(contenders.random_encoder(architecture)), packed.path)
    timed = workloads.make_workloads(["1x32", "8x128"], architecture.input_names, 30000)
    ratios = tuple(i / 20 for i in range(1, 21))
    small, large = sweep.sweep(sweep.Swept(architecture, ("0.ffn",), ratios), packed, timed, tmp_path, lambda left: 0.0)
    assert (small.workload, large.workload, large.baseline) == ("1x32", "8x128", "packed-dense-1")
    assert len(large.retention) == sweep.MAX_RATIOS
    assert (large.retention[0], large.retention[-1]) == (0.05, 1.0)
    flops = [point.flops for point in large.points]
    assert flops == sorted(flops)
    assert [point.contender for point in large.points] == [f"{ratio:g}" for ratio in large.retention]
    swept = sweep.Swept(architecture, ("0.ffn",), ratios[-1:])
    some = sweep.sweep(swept, packed, timed, tmp_path, lambda left: 0.0 if left == 2 else None)
    assert [each.workload for each in some] == ["1x32"]


def test_a_sweep_that_keeps_all_is_dense():
    timed = workloads.make_workloads(["8x128"], TWO_LAYERS.input_names, 30000)[0]
    swept = sweep.Swept(TWO_LAYERS, SITES, (0.5, 1.0))
    dense = dataclasses.replace(swept, sites=())
    kept = [sweep._flops(TWO_LAYERS.shape, swept, permille, timed).item() for permille in (500, 1000)]
    assert kept[0] < kept[1] == sweep._flops(TWO_LAYERS.shape, dense, 1000, timed).item()
    tagger = dataclasses.replace(dense, architecture=dataclasses.replace(TWO_LAYERS, every_token=True))
    assert kept[1] < sweep._flops(TWO_LAYERS.shape, tagger, 1000, timed).item()


@pytest.mark.parametrize(
    ("speedups", "expected"), [((3.0, 1.5, 0.5), 0.75), ((3.0, 2.0, 1.5), None), ((0.9, 0.8, 0.7), None)]
)
def test_break_even(speedups, expected):
    assert sweep.break_even((0.1, 0.5, 1.0), speedups) == expected
