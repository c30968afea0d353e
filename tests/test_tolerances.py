"""No tolerance is typed in: it is derived where it stands, or by `tolerances.assert_within_oracle`."""

import ast
from pathlib import Path

import pytest
import torch
from testbed import make_batch, make_student
from tolerances import assert_within_network, assert_within_oracle, oracle_on

TESTS = Path(__file__).parent
KEYWORDS = {"abs", "rel", "atol", "rtol"}
LARGEST, SMALL = 1e-5, 1e-2
"""A typed number up to the first is some 100 roundings of a score or of a vector's number, which are 1 at most. Something that is to be
below a number up to the second is taken for an error."""

PRINTED = "figures that were rounded to be shown"
SLOPES = "a difference of two losses divided by a step: an error of the method, not of rounding"
SAMPLED = "shares of random texts"
SANITY = "a tolerance that was derived, and must be small"
PROBABILITIES = "scores of logits that transformers computed in other batches; none is exact"
FILES = {
    "cli/test_bench.py": PRINTED,
    "cli/test_export.py": SANITY,
    "cli/test_train.py": "a near tie may keep another token, and so answer one of a hundred texts otherwise",
    "integrations/ray/test_distributed.py": PRINTED,
    "inference/test_answers_end_to_end.py": PROBABILITIES,
    "inference/test_prompts.py": "vectors that must differ by more",
    "runtimes/test_cpu_forms_in_models.py": "two models in fp16, which round their sums in other places",
    "runtimes/test_cpu_plugin.py": "two fp32 kernels; the lines above hold the first one to a derived bound",
    "explain/test_explain_student.py": "a logit of a probability near 1, which loses digits",
    "benchmarking/test_benchmarking.py": PRINTED,
    "benchmarking/test_contenders.py": "llama.cpp, whose GELU is an approximation",
    "benchmarking/test_ltp_baseline.py": SAMPLED,
    "benchmarking/test_paired.py": "quantiles of ten thousand random draws",
    "model/test_positions.py": "angles in fp32 under states in fp64; and a difference that must be larger",
    "plugins/test_choice_of_variant.py": "times of a model that was fitted to measured ones",
    "plugins/test_kernel.py": "a sum of fp16 probabilities over a whole text",
    "plugins/test_pytorch.py": "a GPU beside the CPU",
    "test_benchmarks.py": PRINTED,
    "test_modelled_bounds.py": PRINTED,
    "test_modelled_times.py": "shares of recorded times that a fit may miss; figures that were rounded to be shown",
    "test_systems_benchmark.py": "whole tokens",
    "training/test_distillation.py": SLOPES,
    "training/test_gates.py": SLOPES,
    "training/test_gradient_difference.py": SLOPES,
    "training/test_losses.py": SAMPLED,
    "training/test_methods.py": PRINTED,
    "training/test_objectives.py": SLOPES,
    "verify/test_parity.py": SANITY,
    "verify/test_verdict_of_heads.py": SANITY,
}
"""Files with larger numbers, and why."""


def typed_in(source: str) -> list[str]:
    """Return tolerances that are numbers above `LARGEST`, as they stand: arguments, and what something is compared with that is small."""
    nodes = list(ast.walk(ast.parse(source)))
    given = (k for node in nodes if isinstance(node, ast.Call) for k in node.keywords)
    numbers = ((k.arg, k.value.value) for k in given if k.arg in KEYWORDS and isinstance(k.value, ast.Constant))
    found = [f"{name}={value}" for name, value in numbers if isinstance(value, float) and value > LARGEST]
    pairs = (pair for node in nodes if isinstance(node, ast.Compare) for pair in zip(node.ops, node.comparators))
    limits = (
        limit.value for kind, limit in pairs if isinstance(kind, ast.Lt | ast.LtE) and isinstance(limit, ast.Constant)
    )
    return found + [f"< {limit}" for limit in limits if isinstance(limit, float) and LARGEST < limit <= SMALL]


def test_a_typed_tolerance_is_found():
    assert typed_in("assert_close(a, b, rtol=1e-4, atol=1e-6)\napprox(1, abs=8 * error)") == ["rtol=0.0001"]
    assert typed_in("assert (a - b).abs().max() < 1e-3\nassert 0 < a <= b < 0.5\nassert a > 1e-3") == ["< 0.001"]


def test_no_tolerance_is_typed_in_but_where_a_reason_is():
    found = {
        path.relative_to(TESTS).as_posix(): given
        for path in TESTS.rglob("*.py")
        if (given := typed_in(path.read_text(encoding="utf-8")))
    }
    assert {name: given for name, given in found.items() if name not in FILES} == {}
    assert FILES.keys() - found.keys() == set(), "these need no exception any more"


@pytest.mark.parametrize("name", ["logits", "nan"])
def test_what_is_not_within_the_oracle_fails(name):
    model, batch = make_student([], num_hidden_layers=1), make_batch([5, 3], 5)
    oracle, logits = oracle_on(model, batch), model(**batch).logits
    assert_within_oracle(oracle, {"logits": logits})
    assert_within_network(model.dense, batch, logits)
    wrong = logits.clone()
    wrong[1, 0] += torch.nan if name == "nan" else 2 * oracle.tolerances["logits"]
    with pytest.raises(AssertionError):
        assert_within_oracle(oracle, {"logits": wrong})
    with pytest.raises(AssertionError):
        assert_within_network(model.dense, batch, wrong)
