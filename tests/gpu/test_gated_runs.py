"""Decoder-style encoders from padded ids to vectors on the emulated GPU, by one plan: by the verdict's own rule."""

import numpy as np
import pytest
import runner_builds
import tiny_models
import torch
from decoder_models import batch_of, make_decoder
from encoder_runs import Emulated, argument_of, changed, with_argument
from representatives import only
from testbed import as_numpy

from adtp_export.errors import InputError
from adtp_export.model.packed import PackedStudent
from adtp_export.plugins.encoder.checks import checked
from adtp_export.plugins.encoder.launches import Sizes
from adtp_export.plugins.plan import Number
from adtp_export.runtimes.described import describe
from adtp_export.verify.oracle import for_precision, run_oracle, typed
from adtp_export.verify.parity import compare

LENGTHS, ONE = (17, 1, 9, 20, 2), (20,)
SIZES = Sizes(max_tokens=128, processors=3, mean_length=16)
"""Of few processors, so that programs take several tiles."""


@pytest.fixture
def run(monkeypatch):
    """Makes engines, and closes them."""
    built, made = runner_builds.for_this_process(), []
    runner_builds.driver_of(built, monkeypatch)

    def engine(student, precision, **further):
        made.append(Emulated(student, precision, SIZES, **further))
        return made[-1]

    yield engine
    for each in made:
        each.close()


def oracle_for(student, precision, *lengths):
    oracle = run_oracle(student, [as_numpy(batch_of(each, pad=5)) for each in lengths])
    return oracle if precision == "fp32" else for_precision(oracle, typed(student, precision), precision)


def assert_right(run, student, precision="fp32", *lengths):
    """Answers are right by the verdict's rule; in fp32 the same rows stay as in the packed network, to the bit."""
    lengths = lengths or (LENGTHS, ONE)
    engine = run(student, precision)
    assert compare(oracle_for(student, precision, *lengths), engine).failure is None
    if precision == "fp32":
        batch = batch_of(lengths[0], pad=5)
        engine.run(as_numpy(batch))
        with torch.no_grad():
            _, (_, *kept) = PackedStudent(student)(**batch)
        assert len(kept) == len(engine.kept) == len(student.site_names)
        for rows, (found, bounds) in zip(kept, engine.kept):
            assert np.array_equal(found, rows.numpy())
            assert bounds[-1] == len(rows)


MODELS = ("qwen3", "qwen3-bidirectional", "qwen2-local", "llama", "llama-ungrouped", "mistral", "mistral-bidirectional")
PRUNINGS = ("adtp", "ltp", "schedule", "transkimmer")


@pytest.mark.parametrize("name", only(MODELS, ("llama", "mistral-bidirectional")))
def test_every_family(run, name):
    assert_right(run, make_decoder(name, "embedding"))


@pytest.mark.parametrize("pruning", only(PRUNINGS, ("adtp",)))
def test_every_pruner(run, pruning):
    """Positions go on behind each cut; the first token of a text and the last stay."""
    assert_right(run, make_decoder("qwen3", "embedding", pruning))


FURTHER = {
    "topk": {"method": "ltp", "mode": "topk", "sites": ["0.ffn", "2.ffn"], "rates": [0.5, 0.1]},
    "share": {"method": "ltp", "mode": "threshold", "sites": ["0.ffn", "2.ffn"]},
    "one-token": {"method": "schedule", "sites": ["0.ffn", "2.attention"], "lengths": [1, 1], "order": "received"},
}
"""Rules that leave a text its first token and its last, or its only one."""


@pytest.mark.slow
@pytest.mark.parametrize("rule", FURTHER)
def test_further_rules(run, monkeypatch, rule):
    monkeypatch.setitem(tiny_models.PRUNINGS, rule, FURTHER[rule])
    assert_right(run, make_decoder("qwen3", "embedding", rule), "fp32", LENGTHS, (1,), (2, 3))


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes", [{"keep_first": False}, {"keep_first": False, "restore": "layer"}], ids=["cut", "layer"]
)
def test_first_tokens_that_may_fall(run, monkeypatch, changes):
    pruning = {"method": "schedule", "sites": ["0.ffn", "1.ffn"], "lengths": [9, 4], "order": "received", **changes}
    monkeypatch.setitem(tiny_models.PRUNINGS, "falling", pruning)
    assert_right(run, make_decoder("qwen3-bidirectional", "embedding", "falling"))


@pytest.mark.slow
def test_a_tagger(run):
    assert_right(run, make_decoder("qwen2-bidirectional", "tokens", "schedule"))


@pytest.mark.parametrize("precision", only(("fp16", "bf16"), ("fp16",)))
def test_lower_precisions(run, precision):
    assert_right(run, make_decoder("qwen3", "embedding", "adtp"), precision)


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "fp16", "bf16"])
@pytest.mark.parametrize("pruning", ["none", *PRUNINGS])
@pytest.mark.parametrize("name", MODELS)
def test_all_together(run, name, pruning, precision):
    assert_right(run, make_decoder(name, "embedding", pruning), precision)


WIDE = {
    "hidden_size": 1096, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 128, "intermediate_size": 1500,
    "num_hidden_layers": 1, "initializer_range": 0.03,
}  # fmt: skip
"""Rows of more than one block, heads of Qwen3's size, and a feed-forward that gets some units more."""


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_large_sizes(run, precision):
    assert_right(run, make_decoder("qwen3", "embedding", **WIDE), precision)


def number(name, value):
    return lambda bucket, launch: with_argument(launch, name, Number("i32", value))


def values_of_keys(bucket, launch):
    return with_argument(launch, "v", argument_of(launch, "k"))


MISTAKES = {
    "heads without a norm": ("layer 0 turn", number("normed", 0)),
    "positions of the wrong rows": ("layer 2 turn", number("indexed", 0)),
    "keys that are not turned": ("layer 0 turn", number("kv_heads", 0)),
    "a gate that is not indexed": ("layer 2 ffn inner", number("indexed", 0)),
    "a sum that is not indexed": ("layer 1 attention norm", number("indexed", 0)),
    "values of keys": ("layer 1 attention", values_of_keys),
    "one group of keys": ("layer 0 attention", number("kv_heads", 1)),
    "later tokens are seen": ("layer 0 attention", number("window_ahead", -1)),
    "a sum without the product": ("layer 0 ffn norm", number("num_parts", 0)),
    "the first ratio for all": ("cut 1.attention anchors", number("candidates", 1)),
    "a norm of what is left": ("head norm", number("num_rows", 3)),
}


@pytest.mark.parametrize("mistake", only(MISTAKES, ("positions of the wrong rows",)))
def test_mistakes_in_a_plan_are_noticed(run, mistake):
    note, change = MISTAKES[mistake]
    student = make_decoder("qwen3", "embedding", "schedule" if "positions" in mistake else "adtp")
    engine = run(student, "fp32", change=lambda plan: changed(plan, note, change))
    assert compare(oracle_for(student, "fp32", LENGTHS), engine).failure


@pytest.mark.slow
def test_answers_are_the_same_to_the_bit_whatever_memory_held(run):
    student = make_decoder("qwen3", "embedding", "adtp")
    engine, batch = run(student, "fp16"), as_numpy(batch_of(LENGTHS, pad=5))
    first = engine.run(batch)["sentence_embedding"]
    engine.poison = 0
    assert np.array_equal(engine.run(batch)["sentence_embedding"], first)


@pytest.mark.parametrize(
    ("name", "head", "pruning", "message"),
    [
        ("qwen3", "sequence", "none", "got a classifier of the last token; accepted: one vector of a text, and taggers"),
        ("gemma", "embedding", "none", "got the backbone 'gemma3_text'; accepted: bert, .*, electra, llama, mistral, qwen2, qwen3"),
        ("qwen3", "embedding", "top", "got cut 1.attention by top where last tokens stay, too; accepted: adtp, schedule, ltp"),
        ("qwen3", "embedding", "received-twice", "got cuts at 0.ffn and 1.attention, and the second one reads"),
    ],
)  # fmt: skip
def test_what_has_no_kernel_is_refused(name, head, pruning, message):
    with pytest.raises(InputError, match=f"encoder on a GPU: {message}"):
        checked(describe(make_decoder(name, head, pruning)), "fp32")
