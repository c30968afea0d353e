"""Attention of the packed student in training."""

import pytest
import torch
from decoder_models import make_decoder
from testbed import flat_kept, make_batch, make_encoder

from adtp_export.model.packed import PackedStudent
from adtp_export.training.differentiable import DifferentiableAttention

LENGTHS, PADDED = [9, 1, 14, 6], 14


@pytest.mark.parametrize(
    ("backbone", "pruning"),
    [
        *(("bert", pruning) for pruning in ("adtp", "ltp", "schedule", "from-others", "top", "transkimmer")),
        *(("qwen3", pruning) for pruning in ("adtp", "ltp", "top")),
    ],
)
def test_attention_with_gradients_says_what_each_token_received(backbone, pruning):
    student = (
        make_encoder(pruning=pruning) if backbone == "bert" else make_decoder(backbone, pruning=pruning)
    ).double()
    batch = make_batch(LENGTHS, PADDED, types=2 if "token_type_ids" in student.input_names else 1)
    expected = student(**batch)
    (logits,), rows = PackedStudent(student, DifferentiableAttention)(**batch)
    torch.testing.assert_close(logits, expected.logits)
    kept = flat_kept(rows, tuple(batch["input_ids"].shape), len(student.site_names))
    assert kept.tolist() == expected.kept_site.tolist()
    assert (kept < len(student.site_names)).any()
