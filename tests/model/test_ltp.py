"""LTP against one unpadded sequence at a time, written down slowly, and against BERT where nothing is dropped."""

import pytest
import torch
from testbed import PRUNINGS, make_batch, make_encoder
from tolerances import assert_within_oracle, oracle_on

from adtp_export.errors import InputError
from adtp_export.model import PrunedEncoderConfig
from adtp_export.model.packed import PackedStudent

LENGTHS, PADDED = [9, 1, 14, 6, 2], PRUNINGS["ltp"]["padded_length"]


def make_ltp(thresholds):
    model = make_encoder("bert", "ltp")
    for pruner, threshold in zip(model.pruners.values(), thresholds):
        pruner.threshold.fill_(threshold)
    return model


def one_sequence(model, ids, types):
    """Logits of one unpadded sequence, and how many of its tokens live on after each layer."""
    bert = model.dense.bert
    x = bert.embeddings(ids[None], token_type_ids=types[None])[0]
    heads, kept = bert.config.num_attention_heads, []
    for layer, pruner in zip(bert.encoder.layer, model.pruners.values()):
        inner = layer.attention.self
        contexts, received = [], torch.zeros(len(x))
        for q, k, v in zip(*(f(x).chunk(heads, dim=1) for f in (inner.query, inner.key, inner.value))):
            attention = torch.softmax(q @ k.T / q.shape[1] ** 0.5, dim=1)
            contexts.append(attention @ v)
            for query in attention:
                received += query
        x = layer.attention.output(torch.cat(contexts, dim=1), x)
        score = received / heads / PADDED
        x = x[[i for i in range(len(x)) if i == 0 or score[i] >= pruner.threshold]]
        x = layer.output(layer.intermediate(x), x)
        kept.append(len(x))
    return model.dense.classifier(torch.tanh(bert.pooler.dense(x[0]))), kept


def test_without_thresholds_it_is_bert():
    model, batch = make_ltp([0.0] * 3), make_batch(LENGTHS, PADDED)
    output = model(**batch)
    torch.testing.assert_close(output.logits, model.dense(**batch).logits)
    assert [decision.count.tolist() for decision in output.decisions] == [LENGTHS] * 3


@pytest.mark.parametrize("thresholds", [[0.02, 0.04, 0.06], [0.05, 0.0, 0.1], [2.0] * 3], ids=str)
def test_a_batch_equals_one_sequence_at_a_time(thresholds):
    model, batch = make_ltp(thresholds), make_batch(LENGTHS, PADDED)
    padded, ((packed,), rows) = model(**batch), PackedStudent(model)(**batch)
    alone = []
    for i, n in enumerate(LENGTHS):
        expected, kept = one_sequence(model, batch["input_ids"][i, :n], batch["token_type_ids"][i, :n])
        alone.append(expected)
        assert [int(decision.count[i]) for decision in padded.decisions] == kept
    oracle = oracle_on(model, batch)
    for logits in (torch.stack(alone), padded.logits, packed):
        assert_within_oracle(oracle, {"logits": logits})
    alive = [len(kept) for kept in rows]
    assert alive == [sum(LENGTHS), *(int(decision.count.sum()) for decision in padded.decisions)]
    assert alive[0] > alive[1]
    assert alive[-1] > len(LENGTHS) or thresholds[0] > 1  # neither none nor all


def test_cls_survives_any_threshold():
    output = make_ltp([1.5] * 3)(**make_batch(LENGTHS, PADDED))
    assert output.logits.isfinite().all()
    assert [decision.count.tolist() for decision in output.decisions] == [[1] * 5] * 3


def test_dropped_tokens_cost_nothing():
    """They are removed, where the original masks them out and computes on them all the same."""
    model, widths = make_ltp([0.02, 0.04, 0.06]), []
    packed = PackedStudent(model)
    for layer in packed.layers[:-1]:  # the last one works for [CLS] alone
        layer.ffn.intermediate.register_forward_pre_hook(lambda module, inputs: widths.append(len(inputs[0])))
    rows = packed(**make_batch(LENGTHS, PADDED))[1]
    assert widths == [len(kept) for kept in rows[1:-1]]
    assert widths[0] < sum(LENGTHS)


@pytest.mark.parametrize(
    ("pruning", "message"),
    [
        ({"sites": ["1.attention"], "padded_length": 16}, "got '1.attention'; LTP drops tokens after"),
        ({"sites": ["0.ffn"]}, "padded_length is missing"),
        ({"sites": ["0.ffn"], "padded_length": 0}, "padded_length: got 0; accepted is an integer of at least 1"),
        ({"sites": ["0.ffn"], "mode": "most"}, "pruning.mode: got 'most'; accepted are "),
        ({"sites": ["0.ffn"], "padded_length": 9, "rates": [0.5]}, "pruning.rates is for the mode 'topk'"),
        ({"sites": ["0.ffn"], "mode": "topk", "rates": [1.5]}, "pruning.rates: got .1.5. for 1 sites"),
    ],
)
def test_bad_settings_are_named(pruning, message):
    with pytest.raises(InputError, match=message):
        PrunedEncoderConfig(pruning={"method": "ltp", **pruning})
