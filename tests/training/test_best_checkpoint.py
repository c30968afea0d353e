"""Which checkpoint a stage keeps, why, and when it ends early."""

import pytest
import torch
from test_checkpoints import Run
from training_runs import Heard

from adtp_export.data.tokenize import TokenizedText
from adtp_export.pipeline.train.train import train
from adtp_export.training import stages
from adtp_export.training.data import Examples
from adtp_export.training.evaluate import loss_against_teacher
from adtp_export.training.methods.base import Method
from adtp_export.training.objectives import for_head

pytest.importorskip("accelerate")

ENDING = "ending at step 9 of 12: 2 evaluations without a better one"


def test_the_loss_against_the_teacher_is_the_mean_over_rows():
    """Rows of several lengths and batches, which are judged longest first."""
    rows, generator = 70, torch.Generator().manual_seed(0)
    own, theirs = torch.randn(2, rows, 3, generator=generator)
    texts = [TokenizedText([1] * (1 + i % 7), [0] * (1 + i % 7), False) for i in range(rows)]
    examples = Examples(encoded=texts, labels=[0] * rows, pad_id=0).with_teacher(list(theirs), None)
    soft = (theirs / 2).softmax(1)
    wanted = 4 * (soft * (soft.log() - (own / 2).log_softmax(1))).sum(1).mean()
    assert loss_against_teacher(list(own), examples, for_head("sequence"), 2.0) == pytest.approx(
        wanted.item(), rel=1e-5
    )
    assert loss_against_teacher(list(theirs), examples, for_head("sequence"), 2.0) == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ({}, "kept step 4 of 6, of the best loss against the teacher on dev"),
        ({"best_by": "quality"}, "kept step 6 of 6, of the best quality on dev"),
        pytest.param({"ablate": "teacher"}, "kept step 6 of 6, of the best quality on dev", marks=pytest.mark.slow),
    ],
)
def test_a_student_is_chosen_by_its_loss_against_the_teacher(base, reviews, tmp_path, monkeypatch, given, kept):
    """Accuracy rises to the end, and the loss is lowest before it."""
    losses, right = iter([0.3, 0.1, 0.2]), iter([0.5, 0.6, 0.7])
    judge = stages.judge

    def judged(*arguments):
        judgement = judge(*arguments)
        judgement.quality["accuracy"] = next(right)
        return judgement

    monkeypatch.setattr(stages, "judge", judged)
    monkeypatch.setattr(stages, "loss_against_teacher", lambda *_: next(losses))
    steps = Heard()
    settings = {"max_tokens": 48, "batch_size": 8, "epochs": 1, "evaluations": 3, "method": "layers"}
    train(tmp_path / "out", base=base, train=reviews / "train.tsv", train_rows=48, steps=steps, **settings, **given)
    told = [note for note in steps.notes if note.startswith("kept ")]
    assert told[0].endswith(", of the best quality on dev")  # the teacher's
    assert told[1:] == [kept]
    assert any("teacher_loss 0.1000, score -0.1000" in note for note in steps.notes) == (not given)


def test_too_much_kept_costs_more_than_a_lower_loss_gains(base, reviews, tmp_path, monkeypatch):
    """A student that keeps a fifth too much is not the best one, though its loss is."""
    losses, excess = iter([0.1, 0.2]), iter([0.2, 0.0])
    monkeypatch.setattr(stages, "loss_against_teacher", lambda *_: next(losses))
    meet = Method.meet
    monkeypatch.setattr(Method, "meet", lambda self, judgement: (meet(self, judgement)[0], next(excess)))
    steps = Heard()
    settings = {"max_tokens": 48, "batch_size": 8, "epochs": 1, "evaluations": 2, "method": "random"}
    train(tmp_path / "out", base=base, train=reviews / "train.tsv", train_rows=32, steps=steps, **settings)
    assert "kept step 4 of 4, of the best loss against the teacher on dev" in steps.notes


def test_a_stage_ends_where_it_gets_no_better(tmp_path):
    run = Run(tmp_path / "work", (0.4, 0.3, 0.2, 0.5), patience=2)
    weights = run.go()
    assert run.notes[-2:] == [ENDING, "kept step 3 of 12, of the best quality on dev"]
    whole = Run(tmp_path / "whole", (0.4, 0.3, 0.2, 0.1))
    assert torch.equal(weights, whole.go())
    assert not any("ending" in note for note in whole.notes)


def test_evaluations_before_decisions_are_final_do_not_count(tmp_path):
    run = Run(tmp_path / "work", (0.4, 0.3, 0.2, 0.1), patience=2, final_from=0.5)
    run.go()
    assert not any("ending" in note for note in run.notes)
    assert run.notes[-1] == "kept step 6 of 12, of the best quality on dev"


def test_a_run_goes_on_from_a_checkpoint_that_may_not_win(tmp_path):
    run = Run(tmp_path / "work", (0.9, None), final_from=0.5)
    with pytest.raises(KeyboardInterrupt):
        run.go()
    again = Run(run.work, (0.3, 0.2, 0.1), final_from=0.5)
    weights = again.go()
    assert again.notes[0] == "going on from checkpoint-3"
    assert again.notes[-1] == "kept step 6 of 12, of the best quality on dev"
    assert torch.equal(weights, Run(tmp_path / "whole", (0.9, 0.3, 0.2, 0.1), final_from=0.5).go())


def test_a_run_that_goes_on_ends_where_it_would_have_ended(tmp_path):
    run = Run(tmp_path / "work", (0.4, 0.3, None), patience=2)
    with pytest.raises(KeyboardInterrupt):
        run.go()
    again = Run(run.work, (0.2, 0.5), patience=2)
    weights = again.go()
    assert again.notes[-2:] == [ENDING, "kept step 3 of 12, of the best quality on dev"]
    assert torch.equal(weights, Run(tmp_path / "whole", (0.4, 0.3, 0.2, 0.1)).go())


def test_a_run_that_goes_on_from_its_end_keeps_the_same(tmp_path):
    """It was killed after the last checkpoint was written; an evaluation more would be a better one."""
    ended = Run(tmp_path / "work", (0.4, 0.3, 0.2, 0.5), patience=2)
    weights = ended.go()
    again = Run(ended.work, (0.5,), patience=2)
    assert torch.equal(again.go(), weights)
    assert again.notes == ["going on from checkpoint-9", *ended.notes[-2:]]
