"""`--attribution gradient-difference`: the teacher's gradient norms minus the student's, each scaled from 0 to 1, as LeaF has it."""

import dataclasses

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from test_distillation import SETTINGS, make, make_inputs
from testbed import make_batch, make_student
from torch.nn.functional import cross_entropy

from adtp_export.data.tokenize import TokenizedText
from adtp_export.errors import InputError
from adtp_export.explain.gradients import answer_score, integrated_gradients, unit
from adtp_export.pipeline.train.train import train
from adtp_export.training.attribution import of_tokens, supervision
from adtp_export.training.data import Examples
from adtp_export.training.evaluate import explain
from adtp_export.training.objectives import for_head
from adtp_export.training.settings import ATTRIBUTIONS, GRADIENT_DIFFERENCE, INTEGRATED_GRADIENTS, TrainOptions

DIFFERS = dataclasses.replace(SETTINGS, attribution=GRADIENT_DIFFERENCE)


def min_max(values):
    return (values - values.min()) / (values.max() - values.min())


def leaf(gradients):
    """What LeaF's code does with the gradients ``(n, H)`` of a text, in numpy."""
    return min_max(np.linalg.norm(gradients, axis=1))


def loss_gradient(model, batch, classes):
    """The gradient of cross-entropy at the embeddings."""
    embedded = model.get_input_embeddings()(batch["input_ids"]).requires_grad_()
    handle = model.get_input_embeddings().register_forward_hook(lambda *arguments: embedded)
    (gradient,) = torch.autograd.grad(cross_entropy(model(**batch).logits, classes), embedded)
    handle.remove()
    return gradient


def test_norms_are_those_of_the_gradient_of_cross_entropy():
    """LeaF differentiates the loss. Of one answer that is a multiple of the gradient of its log odds, and scaling removes the factor."""
    model, batch = make_student([], num_labels=3, initializer_range=0.2).double(), make_batch([7, 5], 7)
    classes, embeddings = torch.tensor([2, 0]), model.get_input_embeddings()
    _, gradients = integrated_gradients(
        lambda: model(**batch).logits, embeddings, 1, lambda a, w: answer_score(a, classes), times_input=False
    )
    found = of_tokens(GRADIENT_DIFFERENCE, gradients, batch["attention_mask"].bool())
    for row, length in enumerate((7, 5)):
        alone = {name: values[[row], :length] for name, values in batch.items()}
        gradient = loss_gradient(model, alone, classes[[row]])
        np.testing.assert_allclose(found[row, 1:length], leaf(gradient[0, 1:].numpy()), atol=1e-9)
    assert not found[:, 0].any()  # the first token, which always stays, is not among those that are compared
    assert not found[1, 5:].any()


def test_the_difference_is_the_teachers_minus_the_students():
    live = torch.tensor([[True] * 5, [True] * 3 + [False] * 2, [True] + [False] * 4, [True] * 5])
    generator = torch.Generator().manual_seed(0)
    teacher, student = torch.rand(2, 4, 5, generator=generator, dtype=torch.float64)
    student[3] = teacher[3]
    found = supervision(GRADIENT_DIFFERENCE, teacher, student, live, kappa=0.5)
    for row, length in ((0, 5), (1, 3)):
        expected = min_max((teacher - student)[row, 1:length].numpy())
        np.testing.assert_allclose(found[row, 1:length], expected, rtol=1e-12)
        assert not found[row, [0, *range(length, 5)]].any()
    assert not found[2:].any()  # nothing to compare, and nothing that differs


def test_the_default_joins_both():
    """The very operations that students were trained with before there was a choice."""
    teacher, student = torch.rand(2, 4, 5)
    found = supervision(INTEGRATED_GRADIENTS, teacher, student, torch.ones(4, 5, dtype=torch.bool), kappa=0.3)
    assert torch.equal(found, unit((1 - 0.3) * teacher + 0.3 * student))


def own_norms(student, batch, classes):
    """Gradient norms of the padded student with its cuts, scaled row by row."""
    embedded = student.get_input_embeddings()(batch["input_ids"]).detach().requires_grad_()
    handle = student.get_input_embeddings().register_forward_hook(lambda *arguments: embedded)
    odds = answer_score(student(**batch).logits, classes)
    handle.remove()
    (gradient,) = torch.autograd.grad(odds.sum(), embedded)
    found = torch.zeros(gradient.shape[:2], dtype=gradient.dtype)
    for row, length in enumerate(batch["attention_mask"].sum(1).tolist()):
        if length > 1:
            found[row, 1:length] = torch.from_numpy(leaf(gradient[row, 1:length].numpy()))
    return found


@pytest.mark.parametrize("without", ["", "ig"])
def test_the_loss_teaches_the_difference(without, monkeypatch):
    model = make(dataclasses.replace(DIFFERS, ablate=without, kappa=0.0)).train()
    model.progress = 1.0
    batch, view = make_inputs()
    seen = []
    own_supervision = model._supervision
    monkeypatch.setattr(
        model, "_supervision", lambda trace, target: seen.append(target) or own_supervision(trace, target)
    )
    loss = model(**batch, **view)
    trace = model.begin(batch["attention_mask"])
    own = model.attribute({**batch, "labels": view["labels"]}, trace, view["teacher_logits"], False)[1]
    live = batch["attention_mask"].bool()
    torch.testing.assert_close(own, own_norms(model.student, batch, view["teacher_logits"].argmax(1)))
    assert 0 == own.min() < own.max() == 1
    expected = supervision(GRADIENT_DIFFERENCE, view["attribution"], own, live, 0.0)
    torch.testing.assert_close(seen[0], expected)
    lengths = (unit(own) - unit(view["attribution"])).square().sum(1).mean()
    torch.testing.assert_close(loss["ig"], lengths)


def test_the_loss_on_gradient_norms_has_the_gradient_of_finite_differences():
    model = make(dataclasses.replace(DIFFERS, beta=3.0, gamma=0.0))
    batch, view = make_inputs()
    model(**batch, **view)["loss"].backward()
    parameter = model.student.backbone.attention(1).projections[0].weight
    direction = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    losses = []
    for sign in (1, -1):
        with torch.no_grad():
            parameter += sign * 1e-6 * direction
        losses.append(model(**batch, **view)["loss"].item())
        with torch.no_grad():
            parameter -= sign * 1e-6 * direction
    assert abs(losses[0] - losses[1]) / 2e-6 > 1e-3
    assert (losses[0] - losses[1]) / 2e-6 == pytest.approx((parameter.grad * direction).sum().item(), rel=1e-4)


def test_a_run_has_its_own_place_in_the_cache(base, reviews, tmp_path):
    """The teacher is the same, and what is kept of its tokens is not. Its answers to dev rows are, and nothing is kept of their tokens."""
    rows = {"train": reviews / "train.tsv", "test": reviews / "test.tsv", "train_rows": 32, "max_tokens": 16}
    kept = []
    for kind in ATTRIBUTIONS:
        record = train(
            tmp_path / kind, base=base, attribution=kind, cache=tmp_path / "cache", epochs=1, teacher_epochs=1, **rows
        )
        assert record["settings"]["attribution"] == kind
        kept.append({path.name for path in (tmp_path / "cache").iterdir()} - set().union(*kept))
    assert [len(names) for names in kept] == [3, 2]
    for name in kept[1]:
        attribution = load_file(tmp_path / "cache" / name)["attribution"]
        assert (attribution.min(), attribution.max()) == (0, 1)


def test_a_teacher_is_explained_by_its_gradient_norms():
    teacher = make_student([], num_labels=3, initializer_range=0.2).double()
    ids = make_batch([7], 7)["input_ids"][0].tolist()
    row = TokenizedText(input_ids=ids, token_type_ids=[0] * 7, truncated=False)
    inputs = ("input_ids", "attention_mask", "token_type_ids")
    examples = Examples(encoded=[row], labels=[0], pad_id=0, inputs=inputs)
    answers, (found,) = explain(teacher, examples, for_head("sequence"), 1, 5, GRADIENT_DIFFERENCE)
    batch = {name: torch.tensor([[1] * 7 if name == "attention_mask" else [0] * 7]) for name in inputs}
    batch["input_ids"] = torch.tensor([ids])
    gradient = loss_gradient(teacher, batch, answers[0].argmax()[None])
    np.testing.assert_allclose(found[1:], leaf(gradient[0, 1:].numpy()), atol=1e-9)


def test_what_is_refused():
    with pytest.raises(InputError, match=f"--attribution: got 'leaf'; accepted are {', '.join(ATTRIBUTIONS)}"):
        TrainOptions(attribution="leaf")
    with pytest.raises(InputError, match="leave one of them out"):
        TrainOptions(attribution=GRADIENT_DIFFERENCE, ablate="teacher")
