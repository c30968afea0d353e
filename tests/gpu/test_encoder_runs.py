"""Students from padded ids to answers on the emulated GPU, by one plan: against the packed network and by the verdict's own rule."""

import json

import encoder_runs
import numpy as np
import pytest
import runner_builds
import torch
from encoder_runs import BACKBONES, PRUNINGS, SIZES, Emulated, changed, with_argument
from testbed import as_numpy, make_batch

from adtp_export.model.checkpoint import load_checkpoint
from adtp_export.model.packed import PackedStudent
from adtp_export.plugins.encoder import planner
from adtp_export.plugins.encoder.launches import Sizes
from adtp_export.plugins.plan import Number
from adtp_export.plugins.runner import Runner
from adtp_export.verify.oracle import for_precision, run_oracle, typed
from adtp_export.verify.parity import compare

ONE, USUAL, MANY = ((20,), 20), ((17, 0, 1, 20, 12), 20), (tuple(1 + i % 3 for i in range(30)), 3)
"""Lengths and the padded length: one text, which takes the smallest bucket; usual ones, with one that is empty; many."""

FULL = ((17, 3, 1, 20, 12), 20)
"""Usual ones without an empty one, about which transformers' own forward, the definition where no token is dropped, says something else."""


@pytest.fixture
def run(monkeypatch):
    """Makes engines, and closes them."""
    built, made = runner_builds.for_this_process(), []
    runner_builds.driver_of(built, monkeypatch)

    def engine(*arguments, **further):
        made.append(Emulated(*arguments, **further))
        return made[-1]

    yield engine
    for each in made:
        each.close()


def batch_for(student, lengths, padded, seed=0):
    batch = make_batch(lengths, padded, types=len(student.input_names) - 1, seed=seed)
    batch["input_ids"][batch["input_ids"] == student.pad_id] += 1  # transformers' RoBERTa does not count such tokens
    return batch


def oracle_for(student, precision, *shapes):
    oracle = run_oracle(student, [as_numpy(batch_for(student, *shape)) for shape in shapes])
    return oracle if precision == "fp32" else for_precision(oracle, typed(student, precision), precision)


def assert_packed(student, engine, shape):
    """The same rows stay as in the packed network, to the bit."""
    batch = batch_for(student, *shape)
    engine.run(as_numpy(batch))
    with torch.no_grad():
        _, (_, *kept) = PackedStudent(student)(**batch)
    assert len(kept) == len(engine.kept) > 0
    for rows, (found, bounds) in zip(kept, engine.kept):
        assert np.array_equal(found, rows.numpy())
        assert bounds[-1] == len(rows)


@pytest.mark.parametrize("pruning", PRUNINGS)
def test_every_pruner(run, pruning):
    student = encoder_runs.make(pruning=pruning)
    engine, usual = run(student, "fp32"), USUAL if student.site_names else FULL
    assert compare(oracle_for(student, "fp32", ONE, usual, MANY), engine).failure is None
    if student.site_names:
        assert_packed(student, engine, USUAL)


RESTORING = {**PRUNINGS["received"], "restore": "layer"}
HEADS = {
    "tokens": {"head": "tokens", "pruning": "adtp"},
    "tokens, as they entered a layer": {"head": "tokens", "pruning": RESTORING},
    "tokens, and first ones may fall": {"head": "tokens", "pruning": {**PRUNINGS["received"], "keep_first": False}},
    "spans": {"head": "spans", "pruning": "ltp"},
    "last states": {"head": "embedding", "pruning": "adtp", "embedding": {"pooling": "last"}},
    "first states": {"head": "embedding", "pruning": "adtp", "embedding": {"pooling": "first"}},
    "means": {"head": "embedding", "pruning": "adtp", "embedding": {"pooling": "mean", "normalize": True}},
    "projections": {
        "head": "embedding",
        "pruning": None,
        "embedding": {"pooling": "max", "projections": [[64, 16, True, "tanh"], [16, 8, False, "none"]]},
    },
}


@pytest.mark.parametrize("kind", HEADS)
def test_heads_that_read_all_tokens(run, kind):
    """Tokens that fell answer, too, with the state that came to their cut or entered its layer."""
    student = encoder_runs.make(**HEADS[kind])
    engine = run(student, "fp32")
    assert compare(oracle_for(student, "fp32", ONE, FULL), engine).failure is None
    if student.site_names:
        assert_packed(student, engine, FULL)


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp16", "bf16"])
@pytest.mark.parametrize("kind", HEADS)
def test_heads_in_lower_precisions(run, kind, precision):
    student = encoder_runs.make(**HEADS[kind])
    assert compare(oracle_for(student, precision, ONE, FULL), run(student, precision)).failure is None


@pytest.mark.parametrize("backbone", BACKBONES)
def test_every_backbone(run, backbone):
    student = encoder_runs.make(backbone)
    engine = run(student, "fp32")
    assert compare(oracle_for(student, "fp32", USUAL), engine).failure is None
    assert_packed(student, engine, ONE)


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
@pytest.mark.parametrize("pruning", ["adtp", "ltp"])
def test_lower_precisions(run, precision, pruning):
    student = encoder_runs.make(pruning=pruning)
    assert compare(oracle_for(student, precision, USUAL, MANY), run(student, precision)).failure is None


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "fp16", "bf16"])
@pytest.mark.parametrize("pruning", PRUNINGS)
@pytest.mark.parametrize("backbone", BACKBONES)
def test_all_together(run, backbone, pruning, precision):
    student = encoder_runs.make(backbone, pruning, seed=1)
    usual = USUAL if student.site_names else FULL
    assert compare(oracle_for(student, precision, ONE, usual, MANY), run(student, precision)).failure is None


WIDTHS = {
    "MiniLM": {"hidden_size": 384, "intermediate_size": 1536, "num_hidden_layers": 6, "initializer_range": 0.08},
    "BERT-base": {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 2, "initializer_range": 0.06},
}


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@pytest.mark.parametrize("width", WIDTHS)
def test_real_widths(run, width, precision):
    """With the tiles and parts that a GPU of 128 processors gets."""
    pruning = {**PRUNINGS["adtp"], "sites": ["0.ffn"]}
    student = encoder_runs.make(pruning=pruning, num_attention_heads=12, **WIDTHS[width])
    engine = run(student, precision, Sizes(max_tokens=256))
    several = (40, 33, 3, 20), 40
    assert compare(oracle_for(student, precision, ONE, several), engine).failure is None


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_sums_in_parts(run, precision):
    """A feed-forward whose second product is split, and parts of which the last one is shorter."""
    student = encoder_runs.make(intermediate_size=600)
    engine = run(student, precision, Sizes(max_tokens=32, processors=64, mean_length=16))
    parts = [
        encoder_runs.argument_of(launch, "parts").value
        for launch in engine.plan.buckets[0].launches
        if "-parts" in launch.variant and "product" in launch.variant
    ]
    assert max(parts) > 1
    assert compare(oracle_for(student, precision, ONE), engine).failure is None


def test_answers_are_the_same_to_the_bit_whatever_memory_held_and_whatever_ran_before(run):
    student = encoder_runs.make()
    engine = run(student, "fp16")
    one, usual = (as_numpy(batch_for(student, *shape)) for shape in (ONE, USUAL))
    first = engine.run(usual)["logits"]
    engine.poison = 0
    engine.run(one)
    assert np.array_equal(engine.run(usual)["logits"], first)


def test_each_bucket_gives_the_same_answer(run):
    student = encoder_runs.make()
    oracle, engine = oracle_for(student, "fp32", ONE), run(student, "fp32")
    assert compare(oracle, engine).failure is None
    engine.plan = encoder_runs.Plan(engine.plan.weights, engine.plan.buckets[-1:])
    engine.runner.close()
    engine.runner = Runner(engine.plan, library=runner_builds.for_this_process()[0])
    assert compare(oracle, engine).failure is None
    assert len(SIZES.buckets) == 3


def test_a_call_on_host_memory_is_one_replay(run, tmp_path, monkeypatch):
    student = encoder_runs.make()
    expected = run(student, "fp32")
    batch = as_numpy(batch_for(student, *ONE))
    log, logits = tmp_path / "calls", np.zeros(3, np.float32)
    sizes = {"texts": 1, "tokens": 20, "length": 20}
    with Runner(expected.planned.plan, expected.planned.weights, library=runner_builds.for_this_process()[0]) as runner:
        runner.run(list(batch.values()), [logits], **sizes)
        monkeypatch.setenv("ADTP_EMULATOR_CALLS", str(log))
        runner.run(list(batch.values()), [logits], **sizes)
    did = [line["did"] for line in map(json.loads, log.read_text().splitlines()) if line["did"] != "wait"]
    launches = len(expected.plan.buckets[0].launches)
    assert did[: launches + 3] == ["graph", "copy", *["kernel"] * launches, "copy"]
    assert np.array_equal(logits, expected.run(batch)["logits"][0])


def test_a_cut_behind_the_last_attention_decides_nothing(run):
    """The classifier reads first rows alone, and these stay."""
    pruning = {**PRUNINGS["ltp"], "sites": ["0.ffn", "2.ffn"]}
    student = encoder_runs.make(pruning=pruning)
    engine, batch = run(student, "fp32"), batch_for(student, *USUAL)
    assert not any("2.ffn" in part for part in planner.launches_by_part(engine.plan.buckets[0]))
    oracle = oracle_for(student, "fp32", USUAL)
    found = engine.run(as_numpy(batch))["logits"]
    assert np.abs(found - oracle.batches[0].references["logits"]).max() <= oracle.tolerances["logits"]


def number(name, value):
    return lambda bucket, launch: with_argument(launch, name, Number("i32", value))


def other_rows(bucket, launch):
    """As many rows as texts."""
    return with_argument(launch, "live", encoder_runs.argument_of(bucket.launches[0], "texts"))


MISTAKES = {
    "a residual that is not indexed": ("layer 0 ffn norm", number("indexed", 0)),
    "a product that is not indexed": ("layer 0 ffn inner", number("indexed", 0)),
    "first rows of the wrong bounds": ("layer 2 attention norm", number("indexed", 0)),
    "too few rows": ("layer 0 ffn inner", other_rows),
    "the first ratio for all": ("cut 0.ffn scores", number("candidates", 1)),
    "a head too few": ("layer 1 attention", number("num_heads", 1)),
    "values of keys": (
        "layer 1 attention",
        lambda bucket, launch: with_argument(launch, "v", encoder_runs.argument_of(launch, "k")),
    ),
    "types that are not read": ("embed", number("typed", 0)),
    "the first place is another": ("embed", number("first_place", 1)),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_in_a_plan_are_noticed(run, mistake):
    note, change = MISTAKES[mistake]
    student = encoder_runs.make()
    engine = run(student, "fp32", change=lambda plan: changed(plan, note, change))
    assert compare(oracle_for(student, "fp32", USUAL), engine).failure


@pytest.mark.parametrize("name", ["parts", "num_parts"])
def test_a_wrong_number_of_parts_is_noticed(run, name):
    student = encoder_runs.make(intermediate_size=600)
    note = "layer 1 ffn output" if name == "parts" else "layer 1 ffn norm"
    engine = run(
        student,
        "fp32",
        Sizes(max_tokens=32, processors=64, mean_length=16),
        lambda plan: changed(plan, note, number(name, 1)),
    )
    assert compare(oracle_for(student, "fp32", ONE), engine).failure


@pytest.mark.parametrize("precision", ["fp32", "fp16", "bf16"])
def test_the_trained_student_of_the_repository(run, demo, precision):
    """It has four layers, and cuts before an attention and before a feed-forward, by ten ratios."""
    student = load_checkpoint(demo).student
    assert compare(oracle_for(student, precision, ONE, USUAL), run(student, precision)).failure is None
