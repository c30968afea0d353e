"""LTP against BERT itself, against one sequence at a time written down slowly, and FLOPs by hand."""

import pytest
import torch
from conftest import TINY_BERT, make_batch
from transformers import BertConfig, BertForSequenceClassification

from adtp_export.latency.ltp import LtpBert, ltp_flops, mean_retention, thresholds_for
from adtp_export.model.flops import Shape

LENGTHS, PADDED = [9, 1, 14, 6, 2], 16
RISING = [0.03, 0.06, 0.09]


def make_bert(attention="eager", **overrides):
    torch.manual_seed(0)
    fields = {**TINY_BERT, "num_labels": 3, **overrides}
    model = BertForSequenceClassification(BertConfig(**fields, attn_implementation=attention))
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter, std=0.3)
    return model.eval().requires_grad_(False)


def one_sequence(model, ids, types, thresholds, length):
    """Logits of one unpadded sequence, and how many of its tokens live on after each layer."""
    x = model.bert.embeddings(ids[None], token_type_ids=types[None])[0]
    heads = model.config.num_attention_heads
    kept = []
    for layer, threshold in zip(model.bert.encoder.layer, thresholds):
        inner = layer.attention.self
        contexts, received = [], torch.zeros(len(x))
        for q, k, v in zip(*(f(x).chunk(heads, dim=1) for f in (inner.query, inner.key, inner.value))):
            attention = torch.softmax(q @ k.T / q.shape[1] ** 0.5, dim=1)
            contexts.append(attention @ v)
            for query in attention:
                received += query
        x = layer.attention.output(torch.cat(contexts, dim=1), x)
        score = received / heads / (length or len(x))
        x = x[[i for i in range(len(x)) if i == 0 or score[i] >= threshold]]
        x = layer.output(layer.intermediate(x), x)
        kept.append(len(x))
    return model.classifier(torch.tanh(model.bert.pooler.dense(x[0]))), kept


def test_without_thresholds_it_is_bert():
    model, batch = make_bert(), make_batch(LENGTHS, PADDED)
    peer = LtpBert(model, [0.0] * 3)
    torch.testing.assert_close(peer(**batch), model(**batch).logits)
    assert [n.tolist() for n in peer.kept] == [LENGTHS] * 4


@pytest.mark.parametrize(
    ("thresholds", "length"), [(RISING, None), (RISING, PADDED), ([0.07, 0.0, 0.2], None), ([2.0] * 3, None)]
)
def test_a_batch_equals_one_sequence_at_a_time(thresholds, length):
    model, batch = make_bert(), make_batch(LENGTHS, PADDED)
    peer = LtpBert(model, thresholds, length)
    logits = peer(**batch)
    for i, n in enumerate(LENGTHS):
        expected, kept = one_sequence(
            model, batch["input_ids"][i, :n], batch["token_type_ids"][i, :n], thresholds, length
        )
        torch.testing.assert_close(logits[i], expected)
        assert [int(alive[i]) for alive in peer.kept] == [n, *kept]
    dropped = [int(before.sum() - after.sum()) for before, after in zip(peer.kept, peer.kept[1:])]
    assert dropped[0] > 0
    assert sum(dropped) < sum(LENGTHS) - len(LENGTHS) or thresholds[0] > 1  # neither none nor all


def test_cls_survives_any_threshold():
    model, batch = make_bert(), make_batch(LENGTHS, PADDED)
    peer = LtpBert(model, [1.5] * 3)
    assert peer(**batch).isfinite().all()
    assert [n.tolist() for n in peer.kept] == [LENGTHS] + [[1] * 5] * 3


def test_tokens_are_removed_and_not_masked():
    model, batch = make_bert(), make_batch(LENGTHS, PADDED)
    peer, widths = LtpBert(model, RISING), []
    for layer in model.bert.encoder.layer:
        layer.intermediate.register_forward_pre_hook(lambda module, inputs: widths.append(inputs[0].shape[1]))
    peer(**batch)
    assert widths == [int(n.max()) for n in peer.kept[1:]]
    assert widths[-1] < max(LENGTHS)


def test_a_row_without_live_tokens_counts_as_one():
    model = make_bert()
    batch = make_batch([5, 0], 5)
    one = make_batch([5, 1], 5) | {"input_ids": batch["input_ids"]}
    torch.testing.assert_close(LtpBert(model, RISING)(**batch), LtpBert(model, RISING)(**one))


@pytest.mark.parametrize("retention", [0.3, 0.5, 0.8, 1.0])
@pytest.mark.parametrize(("lengths", "length"), [([24], None), ([24, 13, 7, 18], None), ([24, 13, 7, 18], 24)])
def test_rising_thresholds_hit_the_retention(retention, lengths, length):
    model = make_bert(initializer_range=0.02, num_hidden_layers=4)  # as benchmarks draw weights: scores near 1/n
    batch = make_batch(lengths, 24)
    thresholds = thresholds_for(model, batch, retention, length)
    assert thresholds == pytest.approx([thresholds[-1] * (layer + 1) / 4 for layer in range(4)])
    peer = LtpBert(model, thresholds, length)
    peer(**batch)
    assert mean_retention(peer.kept) == pytest.approx(retention, abs=0.02)


def test_a_retention_below_cls_alone_is_refused():
    with pytest.raises(ValueError, match=r"retention 0.1: .* 0.250"):
        thresholds_for(make_bert(), make_batch([4, 4], 4), 0.1)


def test_what_cannot_be_pruned_is_refused():
    with pytest.raises(ValueError, match="eager"):
        LtpBert(make_bert("sdpa"), RISING)
    with pytest.raises(ValueError, match="2 thresholds for 3 layers"):
        LtpBert(make_bert(), RISING[:2])


def test_flops_by_hand():
    h, i = 8, 32
    kept = [torch.tensor([10, 5]), torch.tensor([4, 5]), torch.tensor([1, 2])]
    attention = sum(8 * n * h * h + 4 * n * n * h for n in (10, 5, 4, 5))
    assert ltp_flops(Shape(h, i, 2, 2), kept) == attention + sum(4 * n * h * i for n in (4, 5, 1, 2))
