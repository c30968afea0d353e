"""What a product costs is found in the student itself, which is afterwards what it was."""

import copy

import numpy as np
import pytest
import torch
from language_models import save_causal
from testbed import as_numpy, make_batch, make_student

from adtp_export.calibration import recipes, simulate
from adtp_export.calibration.collect import collect
from adtp_export.calibration.plan import QuantizationPlan, make_quantization_plan
from adtp_export.calibration.quantize import stored_weight
from adtp_export.model.decoder import load_decoder
from adtp_export.model.packed import PackedStudent

RECIPES = {path.stem: path for path in sorted(recipes.DIRECTORY.glob("*.toml"))}


@pytest.fixture(scope="module")
def student():
    student = make_student(["0.ffn"], initializer_range=0.2)
    PackedStudent(student)  # joins weights of projections, once and for all
    return student


@pytest.fixture(scope="module")
def batches():
    return [as_numpy(make_batch([9, 32, 1], 32))]


@pytest.fixture(scope="module", params=sorted(RECIPES))
def plan(request, student, batches):
    return make_quantization_plan(recipes.read(RECIPES[request.param]), student, collect(student, batches))


def state(student):
    """Each weight, by where it lies and by its value, and each module's hooks."""
    weights = {
        name: (weight.data_ptr(), weight.detach().numpy().tobytes()) for name, weight in student.named_parameters()
    }
    return weights, [len(module._forward_pre_hooks) for module in student.modules()]


def test_costs_are_those_of_copies_that_are_quantized_one_product_at_a_time(student, batches, plan, monkeypatch):
    """In fp64: packed rows are summed in another order, which in fp32 now and then rounds to another of the 256 numbers."""
    student = copy.deepcopy(student).double()
    PackedStudent(student)

    def answers(asked):
        """Of the padded student, which has no joined weights."""
        with torch.inference_mode():
            return np.concatenate([asked(**{k: torch.from_numpy(v) for k, v in b.items()}).logits for b in batches])

    expected = {}
    for name, scales in plan.scales.items():
        rounded = simulate.simulate(student, QuantizationPlan(plan.recipe, {name: scales}))
        off = np.abs(answers(rounded) - answers(student))
        expected[name] = float(off.mean()), float(off.max())
    assert any(mean for mean, _ in expected.values())
    rounding = 2 * torch.finfo(torch.float32).eps * float(np.abs(answers(student)).max())  # answers are told in fp32
    before = state(student)
    with monkeypatch.context() as patch:
        patch.setattr(simulate.copy, "deepcopy", None)  # which would take the student's memory again
        costs = simulate.sensitivity(student, plan, batches)
    assert {cost.product for cost in costs} == expected.keys()
    for cost in costs:
        found = cost.mean_abs_logit_diff, cost.max_abs_logit_diff
        assert found == pytest.approx(expected[cost.product], rel=0, abs=rounding)
    assert state(student) == before


def round_all(student, plan, batches):
    products = {name: (module,) for name, module in PackedStudent(student).products.items()}
    simulate._round_in_place(student, products, plan)


@pytest.mark.parametrize(
    ("where", "work"),
    [
        ("_answers", simulate.sensitivity),
        ("stored_weight", round_all),
    ],
)
def test_the_student_is_what_it_was_after_an_error_too(student, batches, plan, monkeypatch, where, work):
    before, calls, real = state(student), [], getattr(simulate, where)

    def fail(*arguments):
        calls.append(arguments)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return real(*arguments)

    monkeypatch.setattr(simulate, where, fail)
    with pytest.raises(KeyboardInterrupt):
        work(student, plan, batches)
    assert state(student) == before


def test_products_of_a_model_that_generates_text(tmp_path):
    """A copy has the weights that the plan stores, times their scales, and rounds the inputs of each product to 256 numbers per token."""
    save_causal(tmp_path, "llama", num_hidden_layers=1)
    decoder = load_decoder(tmp_path)
    products = simulate.products_of(decoder.backbone)
    before = {name: [part.weight.clone() for part in parts] for name, parts in products.items()}
    plan, rounded = simulate.quantize_decoder(decoder, recipes.built_in("linear", "int8"))
    assert plan.scales.keys() == products.keys()
    for name, parts in simulate.products_of(rounded.backbone).items():
        scales, whole = plan.scales[name], np.concatenate([weight.numpy() for weight in before[name]])
        found = np.concatenate([part.weight.numpy() for part in parts])
        assert np.array_equal(found, stored_weight(whole, scales, plan).astype(np.float32) * scales.weight[:, None])
        assert (np.abs(found - whole) <= scales.weight[:, None] * (0.5 + 2**-20)).all()
        x = torch.randn(3, found.shape[1], generator=torch.Generator().manual_seed(0))
        (seen,) = simulate._round_tokens(parts[0], (x,), torch.ones(1))
        assert torch.equal(parts[0](x), torch.nn.functional.linear(seen, parts[0].weight, parts[0].bias))
        assert max(len(row.unique()) for row in seen) <= 256
        assert not torch.equal(seen, x)
    assert all(
        torch.equal(part.weight, old) for name, parts in products.items() for part, old in zip(parts, before[name])
    )
