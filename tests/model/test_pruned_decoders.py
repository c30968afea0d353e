"""Families that follow Llama and drop tokens: what stays, that packed is padded, and what is refused."""

import pytest
import torch
from decoder_models import HEADS, batch_of, make_decoder
from hypothesis import given, settings
from hypothesis import strategies as st
from testbed import flat_kept
from tiny_models import PRUNINGS
from tolerances import assert_within_oracle, oracle_on

from adtp_export.contract import OUTPUTS
from adtp_export.errors import InputError
from adtp_export.model import PrunedEncoderConfig
from adtp_export.model.heads import head_class
from adtp_export.model.packed import PackedInputs, PackedStudent

CUTS = [name for name in PRUNINGS if name not in ("none", "from-others")]
LENGTHS = ([7], [1], [1, 9, 4, 9], [24, 3, 1, 2, 11])


@pytest.mark.parametrize("pruning", CUTS)
@pytest.mark.parametrize(
    ("name", "head"),
    [
        ("qwen3", "embedding"),
        ("qwen3", "sequence"),
        ("qwen2-local", "tokens"),
        ("mistral-bidirectional", "sequence"),
        ("llama-ungrouped", "embedding"),
        ("eurobert-mean", "sequence"),
        ("eurobert-bos", "sequence"),
        ("gemma", "embedding"),
    ],
)
def test_packed_is_padded(name, head, pruning):
    """The same tokens stay, the first and the one that ends a causal text or that a head reads among them; some fall."""
    model = make_decoder(name, head, pruning)
    batches = [batch_of(lengths) for lengths in LENGTHS]
    oracle, packed, dropped = oracle_on(model, *batches), PackedStudent(model), 0
    found = []
    for batch in batches:
        outputs, kept = packed(**batch)
        found.append(dict(zip(OUTPUTS[head], outputs, strict=True)))
        sites = model(**batch).kept_site
        assert flat_kept(kept, tuple(batch["input_ids"].shape), len(model.pruners)).tolist() == sites.tolist()
        live = batch["attention_mask"].bool()
        assert (sites[:, 0] == len(model.pruners)).all()
        if model.keeps_last:
            assert (sites.gather(1, model.read_token(batch["input_ids"], live)[:, None]) == len(model.pruners)).all()
        dropped += int((sites[live] < len(model.pruners)).sum())
    assert_within_oracle(oracle, *found)
    assert dropped


@pytest.mark.parametrize(
    ("name", "head", "keeps"),
    [
        ("qwen3", "tokens", True),
        ("qwen3-bidirectional", "sequence", True),
        ("qwen3-bidirectional", "embedding", True),
        ("qwen3-bidirectional", "tokens", False),
        ("eurobert-bos", "sequence", False),
    ],
)
def test_who_keeps_the_last_token(name, head, keeps):
    """Causal models, and those whose head reads it; a classifier keeps the last one that is no padding by its id."""
    model = make_decoder(name, head, "schedule")
    assert model.keeps_last == keeps
    batch = batch_of([9, 1])
    read = model.read_token(batch["input_ids"], batch["attention_mask"].bool())
    assert read.tolist() == [7 if head == "sequence" and name.startswith("qwen3") else 8, 0]


@given(st.lists(st.integers(0, 12), min_size=1, max_size=5).filter(any), st.sampled_from(CUTS))
@settings(max_examples=25, deadline=None)
def test_packed_inputs_of_any_texts(lengths, pruning):
    """Texts without tokens among them."""
    model = MODELS.setdefault(pruning, make_decoder("qwen3", "sequence", pruning))
    some = [n for n in lengths if n]
    batch = batch_of(some)
    ids = batch["input_ids"][batch["attention_mask"].bool()]
    bounds = torch.tensor([0, *torch.tensor(lengths).cumsum(0)], dtype=torch.int32)
    (logits,), _ = PackedInputs(model)(ids, bounds)
    expected = model(**batch).logits
    torch.testing.assert_close(logits[torch.tensor(lengths) > 0], expected)


MODELS = {}


def test_what_a_causal_token_received_is_a_mean():
    """The pruner's scores are attention weights, summed and divided by how many queries see each key."""
    model = make_decoder("qwen3", "embedding", "received-twice")
    batch = batch_of([12])
    order = model(**batch).decisions[0].rule.order[0, :12]
    parts, x = model.backbone.attention(0), model.backbone.embeddings(batch["input_ids"], None, None)
    q, k, _ = parts.heads_of(
        torch.cat([p(parts.before(x)) for p in parts.projections], -1), torch.arange(batch["input_ids"].shape[1])
    )
    k = k.repeat_interleave(parts.heads // parts.key_heads, -2)
    scores = torch.einsum("qnd,knd->nqk", q[0, :12], k[0, :12]) * parts.scale
    weights = scores.masked_fill(torch.ones(12, 12).triu(1).bool(), -torch.inf).softmax(-1)
    torch.testing.assert_close(order, weights.sum((0, 1)) / torch.arange(12, 0, -1))


@pytest.mark.parametrize(
    ("name", "pruning", "message"),
    [
        ("qwen3", {**PRUNINGS["schedule"], "keep_first": False}, "in causal models all tokens attend to the first"),
        ("qwen3", PRUNINGS["from-others"], "attention depends on positions"),
        ("eurobert", PRUNINGS["from-others"], "attention has groups of queries"),
    ],
)
def test_what_cannot_be_is_told(name, pruning, message):
    fields = make_decoder(name).config.backbone
    config = PrunedEncoderConfig(
        backbone={**fields, "num_hidden_layers": 3}, pruning=pruning, head="tokens", **HEADS["tokens"]
    )
    with pytest.raises(InputError, match=message):
        head_class("tokens")(config)
