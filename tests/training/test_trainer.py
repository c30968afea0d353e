"""A stage looks at its losses without waiting for each, and before anything is kept of a step."""

import pytest
import torch
from torch import nn

from adtp_export.data.tokenize import TokenizedText
from adtp_export.errors import InputError
from adtp_export.training.data import Examples
from adtp_export.training.settings import TrainOptions
from adtp_export.training.trainer import Audience, Narrator, Stage, StageTrainer, run_stage

pytest.importorskip("accelerate")

SETTINGS = TrainOptions(batch_size=2, evaluations=4)
"""Twelve steps; the stage is judged, and a checkpoint written, every third."""


class Breaking(nn.Module):
    """Its loss is no number at one step."""

    def __init__(self, step, value):
        super().__init__()
        self.weight, self.steps, self.bad = nn.Parameter(torch.ones(())), 0, (step, value)

    def forward(self, **batch):
        self.steps += 1
        return {"loss": self.weight.square() * (self.bad[1] if self.steps == self.bad[0] else 1.0)}


QUIET = Audience(lambda *_: None, lambda *_: None)


def stage(model, work, judged, rows=24, **more):
    examples = Examples(encoded=[TokenizedText([1, 2], [0, 0], False)] * rows, labels=[0.0] * rows, pad_id=0)
    return Stage(model=model, examples=examples, judged=judged, work=work, **{"epochs": 1, "rate": 0.1, **more})


@pytest.mark.parametrize(("step", "value"), [(1, "nan"), (2, "inf"), (3, "nan"), (4, "-inf"), (12, "nan")])
def test_a_loss_that_is_no_number_is_named_before_anything_is_kept(tmp_path, step, value):
    """Weights after it are no numbers either, and neither are the losses; the first one counts."""
    model, judged = Breaking(step, float(value)), []

    def judge():
        judged.append(model.steps)
        return {"score": float(len(judged))}

    with pytest.raises(InputError, match=f"the loss became {value} at step {step} of 12, at a learning rate of 0.1"):
        run_stage(stage(model, tmp_path, judge), SETTINGS, QUIET)
    before = list(range(3, step, 3))
    assert judged == before
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(f"checkpoint-{at}" for at in before[-2:])


def test_no_step_waits_for_its_loss(tmp_path):
    """A tensor on the device "meta" has no value: to ask for it is an error."""
    run = stage(nn.Linear(1, 1), tmp_path, dict)
    trainer = StageTrainer(run, SETTINGS, Narrator(Audience(print, print)))
    for _ in range(3):
        loss = torch.zeros((), device="meta", requires_grad=True)
        assert trainer.compute_loss(lambda loss=loss: {"loss": loss}, {}) is loss
    with pytest.raises((RuntimeError, NotImplementedError), match="meta"):
        trainer.check_losses()


class Scored:
    """Judges a model by given scores, and knows after which steps it was asked."""

    def __init__(self, *scores):
        self.scores, self.model, self.steps = scores, Breaking(0, 0.0), []

    def __call__(self):
        self.steps.append(self.model.steps)
        return {"score": self.scores[len(self.steps) - 1]}


@pytest.mark.parametrize(("rows", "epochs"), [(10, 3), (11, 2), (7, 2.5), (10, 0.3)])
def test_one_evaluation_is_of_the_last_weights(tmp_path, rows, epochs):
    """An epoch ends with a batch that is not full, so rows times epochs by rows of a batch are too few steps."""
    judge = Scored(0.5)
    settings = TrainOptions(batch_size=4, evaluations=1)
    assert run_stage(stage(judge.model, tmp_path, judge, rows, epochs=epochs), settings, QUIET)
    assert judge.steps == [judge.model.steps]


def test_the_last_step_is_evaluated_where_steps_do_not_divide(tmp_path):
    judge = Scored(0.1, 0.2, 0.3, 0.4)
    assert run_stage(stage(judge.model, tmp_path, judge, 20), SETTINGS, QUIET)
    assert judge.steps == [3, 6, 9, 10]


def test_a_better_evaluation_before_the_last_is_told(tmp_path):
    judge = Scored(0.1, 0.4, 0.3, 0.2)
    assert not run_stage(stage(judge.model, tmp_path, judge), SETTINGS, QUIET)


def test_a_model_that_is_not_yet_final_does_not_win(tmp_path):
    """As one that keeps more tokens than it may in the end."""
    judge, notes = Scored(0.9, 0.8, 0.3, 0.2), []
    audience = Audience(lambda *_: None, notes.append)
    run_stage(stage(judge.model, tmp_path, judge, final_from=0.75), SETTINGS, audience)
    assert notes[-1].startswith("kept step 9 of 12")
    assert "score" not in notes[0]
    assert "score 0.3000" in notes[2]
