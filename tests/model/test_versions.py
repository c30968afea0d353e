"""Configurations that another line of transformers wrote. These tests run under transformers 4.57, too: see `environments/`."""

import pytest
import torch
from testbed import TINY_BACKBONES, make_batch
from tolerances import assert_within_oracle, oracle_on

from adtp_export.errors import InputError
from adtp_export.model import PrunedEncoderConfig
from adtp_export.model.backbones.modernbert import GLOBAL, LOCAL, TRANSFORMERS_4, ModernBert, layer_kinds, period, theta
from adtp_export.model.heads import head_class

TINY = {name: value for name, value in TINY_BACKBONES["modernbert"].items() if name != "global_attn_every_n_layers"}
OLDER = {"global_attn_every_n_layers": 2, "global_rope_theta": 700.0, "local_rope_theta": 30.0}
NEWER = {
    "layer_types": [GLOBAL, LOCAL, GLOBAL],
    "rope_parameters": {
        GLOBAL: {"rope_type": "default", "rope_theta": 700.0},
        LOCAL: {"rope_type": "default", "rope_theta": 30.0},
    },
}
"""The same model, as transformers 4 and 5 write it; no number is a default."""
WRITTEN = {
    "4": OLDER,
    "5": NEWER,
    "both": {**OLDER, **NEWER},
    "5, beside what is stale": {**OLDER, **NEWER, "global_attn_every_n_layers": 3},
}


def make(fields):
    torch.manual_seed(0)
    config = PrunedEncoderConfig(backbone={**TINY, **fields}, num_labels=3)
    return head_class("sequence")(config).eval().requires_grad_(False)


@pytest.mark.parametrize("version", WRITTEN)
def test_modernbert_is_the_same_model_whoever_wrote_it(version):
    """As this package reads it, and as transformers' own forward does."""
    model, batch = make(WRITTEN[version]), make_batch([30, 9], 30, types=1)
    config = model.dense.config
    assert layer_kinds(config) == NEWER["layer_types"]
    assert [theta(config, kind) for kind in (GLOBAL, LOCAL)] == [700, 30]
    alone = {name: tensor[:1] for name, tensor in batch.items()}
    expected, other = make(OLDER).dense(**alone).logits, make({}).dense(**alone).logits
    torch.testing.assert_close(model.dense(**alone).logits, expected, rtol=0, atol=0)
    oracle = oracle_on(model, alone)
    assert_within_oracle(oracle, {"logits": model(**alone).logits})
    with pytest.raises(AssertionError):
        assert_within_oracle(oracle, {"logits": other})


@pytest.mark.parametrize(
    ("kinds", "every"),
    [("G", 1), ("GG", 1), ("GLG", 2), ("GLLGLLG", 3), ("GLL", 3), ("LG", None), ("GLGG", None), ("LL", None)],
)
def test_a_period_is_what_transformers_4_reads(kinds, every):
    named = [{"G": GLOBAL, "L": LOCAL}[kind] for kind in kinds]
    assert period(named) == every
    fields = ModernBert.readable({"layer_types": named, "global_attn_every_n_layers": 9})
    assert fields.get("global_attn_every_n_layers") == every


def test_layers_without_a_period_are_read_rightly_or_refused():
    """transformers 4 has no field for them."""
    fields = {**NEWER, "layer_types": [GLOBAL, GLOBAL, LOCAL]}
    if TRANSFORMERS_4:
        with pytest.raises(InputError, match="type: pip install 'transformers>=5'"):
            make(fields)
    else:
        assert layer_kinds(make(fields).dense.config) == fields["layer_types"]


@pytest.mark.parametrize("backbone", ["bert-pruned", "distilbert-pruned"])
def test_pruned_heads_are_loaded(backbone, tmp_path):
    """Made on the meta device, as a checkpoint is; and by transformers' own `from_pretrained`."""
    torch.manual_seed(0)
    config = PrunedEncoderConfig(backbone=TINY_BACKBONES[backbone], num_labels=3)
    kind, batch = head_class("sequence"), make_batch([9, 4], 9, types=1)
    batch = {name: batch[name] for name in ("input_ids", "attention_mask")}
    model = kind(config).eval()
    with torch.device("meta"):
        empty = kind(config)
    shapes = {name: tensor.shape for name, tensor in model.state_dict().items()}
    assert {name: tensor.shape for name, tensor in empty.state_dict().items()} == shapes
    model.save_pretrained(tmp_path)
    loaded = kind.from_pretrained(tmp_path).eval()
    with torch.no_grad():
        torch.testing.assert_close(loaded(**batch).logits, model(**batch).logits, rtol=0, atol=0)
        oracle = oracle_on(model, batch)
        for logits in (model(**batch).logits, loaded.dense(**batch).logits):
            assert_within_oracle(oracle, {"logits": logits})
