"""Steps of training in bfloat16: products are, and weights, gradients and what decides are not."""

import pytest
import torch
from conftest import TINY_BERT
from torch import nn
from transformers import BertConfig, BertForSequenceClassification

from adtp_export.data.tokenize import TokenizedText
from adtp_export.training.data import Examples
from adtp_export.training.method_table import METHODS
from adtp_export.training.methods import for_method
from adtp_export.training.models import make_student
from adtp_export.training.settings import TrainOptions
from adtp_export.training.trainer import Audience, Narrator, Stage, StageTrainer, training_arguments

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
    trainer = StageTrainer(run, chosen, training_arguments(run, chosen), Narrator(Audience(print, print)))
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
    loss = trainer.compute_loss(model, dict(batch))
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
