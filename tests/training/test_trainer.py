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


def stage(model, work, judged):
    rows = [TokenizedText([1, 2], [0, 0], False)] * 24
    examples = Examples(encoded=rows, labels=[0.0] * 24, pad_id=0)
    return Stage(model=model, examples=examples, judged=judged, epochs=1, rate=0.1, work=work)


@pytest.mark.parametrize(("step", "value"), [(1, "nan"), (2, "inf"), (3, "nan"), (4, "-inf"), (12, "nan")])
def test_a_loss_that_is_no_number_is_named_before_anything_is_kept(tmp_path, step, value):
    """Weights after it are no numbers either, and neither are the losses; the first one counts."""
    model, judged = Breaking(step, float(value)), []

    def judge():
        judged.append(model.steps)
        return {"score": float(len(judged))}

    with pytest.raises(InputError, match=f"the loss became {value} at step {step} of 12, at a learning rate of 0.1"):
        run_stage(stage(model, tmp_path, judge), SETTINGS, Audience(lambda *_: None, lambda *_: None))
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
