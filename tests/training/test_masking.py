"""`--mask`: tokens are removed from texts that the student answers wrongly and its teacher rightly, and the rest is learned too."""

import dataclasses

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_distillation import SETTINGS, make, make_inputs

from adtp_export.errors import InputError
from adtp_export.training.data import Examples
from adtp_export.training.methods.masking import check_teacher, without_lowest
from adtp_export.training.settings import GRADIENT_DIFFERENCE, TrainOptions
from adtp_export.training.task import check_head

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
        ({"method": "layers", "mask": "random", "attribution": GRADIENT_DIFFERENCE}, "--mask random draws tokens"),
    ],
)
def test_what_settings_refuse(given, message):
    with pytest.raises(InputError, match=message):
        TrainOptions(**given)


def test_what_tasks_and_teachers_are_refused():
    with pytest.raises(InputError, match="--mask: got 'random' for --task tags; accepted is classification"):
        check_head("tokens", TrainOptions(mask="random"))
    examples = Examples(encoded=[None] * 2, labels=[0, 1], pad_id=0, teacher_logits=torch.eye(2).flip(0))
    with pytest.raises(InputError, match="the teacher answers none of the 2 training rows rightly"):
        check_teacher(examples, random=True)
