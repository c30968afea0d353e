"""Steps of training in bfloat16: products are, and weights, gradients and what decides are not."""

import pytest
import torch
from testbed import TINY_BERT
from torch import nn
from transformers import BertConfig, BertForSequenceClassification

from adtp_export.data.tokenize import TokenizedText
from adtp_export.model.padded import RECEIVED, attention_received
from adtp_export.training.data import Examples
from adtp_export.training.method_table import METHODS
from adtp_export.training.methods import for_method
from adtp_export.training.models import make_student
from adtp_export.training.settings import TrainOptions
from adtp_export.training.trainer import Audience, Narrator, Stage, StageTrainer

SITES = {"top": "1.attention", "transkimmer": "0.attention", "layers": None}
LENGTHS = [9, 3, 14, 6]


def make(method, tmp_path, **settings):
    """A trainer of a tiny student in fp32, its model, and a batch."""
    sites, flops = SITES.get(method, "0.ffn"), 0.6 if METHODS[method].cuts else None
    chosen = TrainOptions(method=method, prune_sites=sites, flops=flops, batch_size=4, max_tokens=32, **settings)
    torch.manual_seed(0)
    student = make_student(BertForSequenceClassification(BertConfig(**TINY_BERT)), chosen)
    encoded = [TokenizedText(torch.randint(1, 97, (n,)).tolist(), [0] * n, False) for n in LENGTHS]
    attribution = [nn.functional.normalize(torch.rand(n), dim=0) for n in LENGTHS]
    rows = Examples(encoded=encoded, labels=[0, 1, 1, 0], pad_id=0).with_teacher(list(torch.randn(4, 2)), attribution)
    model = for_method(method).of(student, chosen, {"train": rows, "dev": rows}).train()
    run = Stage(model=model, examples=rows, judged=dict, epochs=1, rate=1e-3, work=tmp_path)
    trainer = StageTrainer(run, chosen, Narrator(Audience(print, print)))
    return trainer, model, rows.collate(range(4))


def computed(trainer, model, batch):
    """Return the loss of a step after its backward pass, and the dtypes that modules gave: of the encoder's products, and of predictors."""
    encoder, predictors = set(), set()
    deciding = {part for pruner in model.student.pruners.values() for part in pruner.modules()}
    hooks = [
        part.register_forward_hook(
            lambda module, _, output: (predictors if module in deciding else encoder).add(output.dtype)
        )
        for part in model.student.modules()
        if isinstance(part, nn.Linear)
    ]
    loss = trainer.compute_loss(model, trainer._prepare_inputs(dict(batch)))
    loss.backward()
    for hook in hooks:
        hook.remove()
    return loss, encoder, predictors


@pytest.mark.parametrize("method", METHODS)
def test_products_are_in_bfloat16_and_the_rest_is_not(method, tmp_path):
    trainer, model, batch = make(method, tmp_path, mixed_precision="bf16")
    loss, encoder, predictors = computed(trainer, model, batch)
    assert encoder == {torch.bfloat16}
    assert predictors <= {torch.float32}
    assert bool(predictors) == (method in ("adtp", "random", "transkimmer"))  # others have none
    assert loss.isfinite()
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    assert {gradient.dtype for gradient in gradients} == {torch.float32}
    assert all(gradient.isfinite().all() for gradient in gradients)


def test_without_it_all_is_in_fp32(tmp_path):
    loss, encoder, predictors = computed(*make("adtp", tmp_path))
    assert encoder | predictors | {loss.dtype} == {torch.float32}


def test_the_step_that_settles_decides_in_fp32_and_teaches_every_layer(tmp_path, monkeypatch):
    """What is cast for decisions without gradients must not serve the products of the step."""
    trainer, model, batch = make("ltp", tmp_path, mixed_precision="bf16")
    seen, prepare = [], model.prepare

    def watched(examples):
        seen.append(torch.is_autocast_enabled("cpu"))
        prepare(examples)

    monkeypatch.setattr(model, "prepare", watched)
    trainer.state.global_step, trainer.state.max_steps = 9, 10
    computed(trainer, model, batch)
    assert seen == [False]
    weights = [part.weight for part in model.student.bert.encoder.modules() if isinstance(part, nn.Linear)]
    assert all(weight.grad is not None and weight.grad.any() for weight in weights)


def test_received_attention_is_summed_in_fp32():
    weights, live = torch.rand(2, 3, 40, 40).softmax(-1).bfloat16(), torch.ones(2, 40, dtype=torch.bool)
    with torch.autocast("cpu", torch.bfloat16):
        found = attention_received(weights, live, RECEIVED, None)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, weights.float().sum((1, 2)))


def test_answers_are_in_fp32(tmp_path):
    _, model, batch = make("schedule", tmp_path)
    with torch.autocast("cpu", torch.bfloat16):
        answer, _ = model.through_cuts({name: batch[name] for name in ("input_ids", "attention_mask")})
    assert answer.dtype == torch.float32
