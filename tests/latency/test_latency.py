"""FLOPs by hand, workloads by definition, figures from known times. No test here depends on how fast a machine is."""

import numpy as np
import pytest
from conftest import as_numpy, make_batch, make_student
from tokenizers import Tokenizer

from adtp_export.errors import InputError
from adtp_export.latency import contenders, workloads
from adtp_export.latency.compare import measure, relate
from adtp_export.model.flops import Shape, alive_tokens, encoder_flops

SHAPE = Shape(hidden=8, intermediate=32, heads=2, layers=2)


def layer(n, h=8, i=32, m=None):
    m = n if m is None else m
    return 8 * n * h * h + 4 * n * n * h, 4 * m * h * i


def test_flops_of_a_dense_encoder():
    assert encoder_flops(SHAPE, [np.array([10])]) == 2 * sum(layer(10))
    assert encoder_flops(SHAPE, [np.array([10, 3])]) == 2 * (sum(layer(10)) + sum(layer(3)))


def test_flops_behind_cuts():
    attention, ffn = layer(10, m=4)
    assert encoder_flops(SHAPE, [np.array([10]), np.array([4])], ["0.ffn"]) == attention + ffn + sum(layer(4))
    assert encoder_flops(SHAPE, [np.array([10]), np.array([4])], ["1.attention"]) == sum(layer(10)) + sum(layer(4))
    three = [np.array([10]), np.array([6]), np.array([2])]
    expected = layer(10)[0] + layer(6)[1] + layer(6)[0] + layer(2)[1]
    assert encoder_flops(SHAPE, three, ["0.ffn", "1.ffn"]) == expected


def test_alive_tokens_of_a_real_run():
    student = make_student(["0.ffn", "1.ffn"])
    output = student(**make_batch([9, 4, 1], 10))
    alive = alive_tokens(output.kept_site.numpy(), 2)
    assert alive[0].tolist() == [9, 4, 1]
    for site in (0, 1):
        assert alive[site + 1].tolist() == output.decisions[site].count.tolist()


def test_grid_lengths_are_the_documented_ones():
    assert workloads.grid_lengths(1, 128).tolist() == [128]
    expected = np.random.default_rng(0).integers(16, 65, 32)
    expected[0] = 64
    assert workloads.grid_lengths(32, 64).tolist() == expected.tolist()


@pytest.mark.parametrize("with_text", [True, False])
def test_grid_batches(demo, with_text):
    tokenizer = Tokenizer.from_file(str(demo / "tokenizer.json")) if with_text else None
    names = ("input_ids", "attention_mask", "token_type_ids")
    for work in workloads.grid([(1, 32), (8, 128)], names, 1000, tokenizer, ["a good film", "never again"]):
        (batch,) = work.batches
        size, padded = map(int, work.name.split("x"))
        assert batch["input_ids"].shape == (size, padded)
        assert batch["attention_mask"].sum(1).tolist() == workloads.grid_lengths(size, padded).tolist()
        assert set(batch) == set(names)
        if with_text:
            first, last = tokenizer.encode("").ids
            ends = batch["attention_mask"].sum(1) - 1
            assert (batch["input_ids"][:, 0] == first).all()
            assert (batch["input_ids"][np.arange(size), ends] == last).all()


def test_real_lengths_keep_the_order_of_the_file(demo):
    tokenizer = Tokenizer.from_file(str(demo / "tokenizer.json"))
    texts = ["word " * (1 + i % 9) for i in range(70)]
    single, batched = workloads.real_lengths(tokenizer, texts, ("input_ids", "attention_mask"), 64)
    assert (single.name, batched.name) == ("data-1", "data-32")
    assert [len(b["input_ids"]) for b in batched.batches] == [32, 32, 6]
    lengths = [int(b["attention_mask"].sum()) for b in single.batches]
    assert lengths == [int(n) for b in batched.batches for n in b["attention_mask"].sum(1)]


def test_relate_uses_paired_ratios():
    times = {"student": np.array([1.0, 2.0, 10.0]), "dense": np.array([3.0, 6.0, 11.0])}
    flops = {"student": np.array([10.0]), "dense": np.array([40.0])}
    student, dense = relate("1x8", times, flops, ["dense"])
    assert student.p50_ms == 2.0
    assert student.vs["dense"].speedup == 3.0
    assert student.vs["dense"].flops_ratio == 4.0
    assert student.vs["dense"].realized_fraction == 0.75
    assert dense.vs == {}


def test_relate_counts_the_batches_that_ran():
    """Three rounds over two batches: the first batch counts twice."""
    times = {"student": np.ones(3), "dense": np.ones(3)}
    flops = {"student": np.array([1.0, 1.0]), "dense": np.array([4.0, 1.0])}
    assert relate("data-1", times, flops, ["dense"])[0].vs["dense"].flops_ratio == 3.0


class CountingEngine:
    inputs = outputs = ()

    def __init__(self, log, name):
        self.log, self.name = log, name

    def run(self, batch):
        self.log.append((self.name, batch["i"]))
        return {}


def test_measure_takes_turns():
    log = []
    engines = {name: CountingEngine(log, name) for name in "ab"}
    work = workloads.Workload("w", ({"i": 0}, {"i": 1}))
    times = measure(work, engines, seconds=0)
    assert len(times["a"]) == len(times["b"]) == 10
    measured = log[-20:]
    assert [batch for _, batch in measured] == [i // 2 % 2 for i in range(20)]
    assert [name for name, _ in measured[::2]] == ["a", "b"] * 5  # each starts every other round


def test_forced_student_keeps_the_forced_share(tmp_path):
    from adtp_export.engines.onnxruntime import OnnxRuntimeEngine

    shape = Shape(hidden=32, intermediate=64, heads=2, layers=2)
    student, debug, _ = contenders.forced_student(shape, ["0.ffn", "1.ffn"], 0.25, tmp_path)
    batch = as_numpy(make_batch([40, 12], 40, vocab_size=30000))
    kept = OnnxRuntimeEngine(debug).run(batch)["kept_site"]
    assert [n.tolist() for n in alive_tokens(kept, 2)] == [[40, 12], [10, 3], [10, 3]]
    assert OnnxRuntimeEngine(student.path).outputs == ("logits",)


def test_baselines_take_a_students_own_tables(tmp_path, monkeypatch):
    """No token types, and a vocabulary and position table that are not BERT's."""
    from adtp_export.engines.onnxruntime import OnnxRuntimeEngine

    monkeypatch.setattr(contenders, "FULL_DEPTH", 1)
    shape = Shape(hidden=32, intermediate=64, heads=2, layers=1)
    tables = {"vocab_size": 40_000, "max_position_embeddings": 200, "type_vocab_size": 1}
    batch = as_numpy(make_batch([200, 3], 200, vocab_size=40_000, types=1))
    for baseline in contenders.dense_baselines(shape, tmp_path, lambda done, total: None, tables):
        engine = OnnxRuntimeEngine(baseline.path)
        assert engine.inputs == ("input_ids", "attention_mask")
        assert np.isfinite(engine.run(batch)["logits"]).all()


def test_baselines_answer_alike_padded_and_packed(tmp_path, monkeypatch):
    """The two dense forms are the same network: equal weights give equal logits."""
    import torch
    from transformers import BertForSequenceClassification

    from adtp_export.engines.onnxruntime import OnnxRuntimeEngine

    monkeypatch.setattr(contenders, "FULL_DEPTH", 3)
    shape = Shape(hidden=32, intermediate=64, heads=2, layers=3)
    packed, padded = contenders.dense_baselines(shape, tmp_path, lambda done, total: None)
    assert (packed.name, padded.name) == ("packed-dense-3", "padded-dense-3")
    student = contenders._random_student(shape, (), [1.0])
    torch.manual_seed(0)
    from transformers import BertConfig

    bert = BertForSequenceClassification(BertConfig(**contenders._bert_fields(shape))).eval()
    inputs = make_batch([7, 3], 7, vocab_size=30000)
    batch = as_numpy(inputs)
    with torch.no_grad():
        torch.testing.assert_close(
            torch.from_numpy(OnnxRuntimeEngine(padded.path).run(batch)["logits"]),
            bert(**inputs).logits,
            rtol=1e-4,
            atol=1e-5,
        )
        torch.testing.assert_close(
            torch.from_numpy(OnnxRuntimeEngine(packed.path).run(batch)["logits"]),
            student(**inputs).logits,
            rtol=1e-4,
            atol=1e-5,
        )


def test_names_of_shapes():
    assert contenders.named_shape("bert-base", 6) == Shape(768, 3072, 12, 6)
    with pytest.raises(InputError, match="did you mean 'bert-base'"):
        contenders.named_shape("bertbase", None)
    with pytest.raises(InputError, match="--layers: got 0"):
        contenders.named_shape("bert-base", 0)
