"""`--mask`: tokens are removed from texts that the student answers wrongly and its teacher rightly, and the rest is learned too."""

import dataclasses
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_distillation import LENGTHS, SETTINGS, make, make_inputs
from testbed import TINY_BERT
from transformers import BertConfig, BertForSequenceClassification

from adtp_export.errors import InputError
from adtp_export.training import stages
from adtp_export.training.data import Examples
from adtp_export.training.methods.masking import check_teacher, without_lowest
from adtp_export.training.objectives import for_head
from adtp_export.training.settings import GRADIENT_DIFFERENCE, TrainOptions
from adtp_export.training.task import check_head, read_task
from adtp_export.training.trainer import Audience

MASKED = dataclasses.replace(SETTINGS, mask="attribution", attribution=GRADIENT_DIFFERENCE, mask_share=0.4)


@given(st.lists(st.integers(3, 12), min_size=1, max_size=4), st.floats(0.001, 0.9), st.integers(0, 9))
def test_the_lowest_leave_and_both_ends_stay(lengths, share, seed):
    longest = max(lengths)
    mask = (torch.arange(longest) < torch.tensor(lengths)[:, None]).long()
    worth = torch.rand(mask.shape, generator=torch.Generator().manual_seed(seed))
    ids = (torch.arange(longest) + 1) * mask
    left = without_lowest({"input_ids": ids, "attention_mask": mask, "labels": torch.zeros(len(lengths))}, worth, share)
    for row, length in enumerate(lengths):
        count = max(1, round(share * (length - 2)))
        gone = set((worth[row, 1 : length - 1].argsort()[:count] + 2).tolist())
        kept = [i for i in range(1, length + 1) if i not in gone]
        assert left["input_ids"][row].tolist() == kept + [0] * (left["input_ids"].shape[1] - len(kept))
        assert left["attention_mask"][row].sum() == len(kept)


@pytest.mark.parametrize("mask", ["attribution", "random"])
def test_only_texts_that_differ_are_masked(mask):
    settings = dataclasses.replace(MASKED, mask=mask, teacher_forced_share=0.0)
    plain = make(dataclasses.replace(SETTINGS, attribution=GRADIENT_DIFFERENCE, teacher_forced_share=0.0)).train()
    model = make(settings).train()
    batch, view = make_inputs()
    answer, _ = model.through_cuts(batch)
    right = answer.argmax(1)
    classes = answer.shape[1]
    long = int((batch["attention_mask"].sum(1) > 2).sum())  # a shorter one has no token between its ends
    assert 0 < long < len(right)
    for labels, masked in ((right, 0), ((right + 1) % classes, long)):
        teacher = torch.nn.functional.one_hot(labels, classes).to(answer.dtype)
        view = {**view, "labels": labels, "teacher_logits": teacher}
        before = int(model.masked)
        losses = [each(**batch, **view)["loss"].item() for each in (plain, model)]
        assert int(model.masked) - before == masked
        assert (losses[0] < losses[1]) == bool(masked)
        if not masked:
            assert losses[0] == losses[1]
    assert model.record()["masked_texts"] == long
    assert model.state_dict()["masked"] == long  # a checkpoint keeps it


@pytest.mark.parametrize(("forced", "steps"), [(0.0, 2), (1.0, 1)], ids=["own cuts", "cuts of the teacher"])
def test_a_masked_text_is_learned_as_one_more_row(forced, steps):
    """Loss and gradient are those of one text at a time, without the tokens on which the teacher's gradients least exceed the student's."""
    settings = dataclasses.replace(MASKED, teacher_forced_share=forced, ig_steps=steps, mask_weight=0.5)
    plain = dataclasses.replace(settings, mask="none", mask_share=0.1, mask_weight=1.0)
    model, without = make(settings).train(), make(plain).train()
    batch, view = make_inputs()
    view["labels"] = 1 - model.through_cuts({**batch, **view})[0].argmax(1)
    right = torch.tensor([True, True, True, False])  # the teacher, of the last text; the second has no token to remove
    view["teacher_logits"] = torch.nn.functional.one_hot(
        torch.where(right, view["labels"], 1 - view["labels"]), 2
    ).double()
    losses = [each(**batch, **view)["loss"] for each in (model, without)]
    expected = torch.zeros((), dtype=torch.float64)
    for row in (0, 2):
        length = LENGTHS[row]
        text = {name: values[[row], :length] for name, values in (batch | {"attribution": view["attribution"]}).items()}
        guide = text["attribution"] if forced else None
        own = model.attribute(text, model.begin(text["attention_mask"], guide), view["teacher_logits"][[row]], False)[1]
        lowest = (text["attribution"] - own)[0, 1 : length - 1].argsort()[: round(0.4 * (length - 2))] + 1
        stay = [i for i in range(length) if i not in lowest]
        left = {name: values[:, stay] for name, values in text.items()}
        trace = model.begin(left["attention_mask"], left["attribution"] if forced else None)
        terms = model.task_terms(
            model.run(left, trace), {"labels": view["labels"][[row]]}, view["teacher_logits"][[row]]
        )
        expected = expected + 0.5 / len(LENGTHS) * model.weighted(terms)
    torch.testing.assert_close(losses[0] - losses[1], expected)
    found, base, added = (
        torch.autograd.grad(loss, each.student.get_input_embeddings().weight)[0]
        for loss, each in zip((*losses, expected), (model, without, model))
    )
    torch.testing.assert_close(found - base, added)


@pytest.mark.parametrize("masked", [0, 3])
def test_a_mask_that_found_no_text_is_told(monkeypatch, tmp_path, masked):
    settings = TrainOptions(method="layers", mask="random")
    rows = Examples(encoded=[None], labels=[0], pad_id=0, teacher_logits=[torch.tensor([1.0, 0.0])])
    task = SimpleNamespace(settings=settings, parts={"train": rows, "dev": rows}, objective=for_head("sequence"))
    monkeypatch.setattr(stages, "run_stage", lambda stage, *rest: stage.model.masked.add_(masked))
    notes = []
    teacher = BertForSequenceClassification(BertConfig(**TINY_BERT))
    stages.train_student(teacher, task, tmp_path, Audience(lambda done, total: None, notes.append))
    assert [note[:29] for note in notes] == ["--mask random masked no text."] * (masked == 0)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"mask": "leaf"}, "--mask: got 'leaf'; accepted are none, attribution, random"),
        ({"mask": "attribution", "mask_share": 1.0}, "a mask of every token leaves nothing to learn from"),
        ({"mask_share": 0.2}, "--mask-share: got 0.2, which nothing uses without --mask"),
        ({"mask": "random", "ablate": "teacher"}, "--ablate teacher has none"),
        ({"mask": "random", "ablate": "ce,logit"}, "leave one in"),
        ({"mask": "random", "method": "ltp"}, "--method ltp has no such setting, and adtp, random, layers have"),
        ({"method": "layers", "attribution": GRADIENT_DIFFERENCE}, "nothing uses without --mask"),
        (
            {"method": "layers", "mask": "random", "attribution": GRADIENT_DIFFERENCE},
            "nothing uses without --mask attribution",
        ),
        (
            {"method": "layers", "mask": "random", "ig_steps": 3},
            "--ig-steps: got 3, which nothing uses without --mask attribution",
        ),
    ],
)
def test_what_settings_refuse(given, message):
    with pytest.raises(InputError, match=message):
        TrainOptions(**given)


def test_what_tasks_and_teachers_are_refused(tmp_path):
    (tmp_path / "train.tsv").write_text("text\tlabel\na\t0.5\nb\t1.5\nc\t2.5\n")
    scores = TrainOptions(base="none", train=str(tmp_path / "train.tsv"), task="regression", mask="random")
    with pytest.raises(InputError, match="--mask: got 'random' for --task regression; accepted is classification"):
        read_task(scores)
    with pytest.raises(InputError, match="--mask: got 'random' for --task tags; accepted is classification"):
        check_head("tokens", TrainOptions(mask="random"))
    examples = Examples(encoded=[None] * 2, labels=[0, 1], pad_id=0, teacher_logits=torch.eye(2).flip(0))
    with pytest.raises(InputError, match="the teacher answers none of the 2 training rows rightly"):
        check_teacher(examples, "random")
