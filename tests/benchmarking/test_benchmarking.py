"""FLOPs by hand, workloads by definition, figures from known times. No test here depends on how fast a machine is."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from templated_models import make_tokenizer
from testbed import TINY_BACKBONES, make_batch, make_encoder, make_student
from tokenizers import Tokenizer
from torch.utils.flop_counter import FlopCounterMode

from adtp_export.benchmarking import interleaved_timing as turns
from adtp_export.benchmarking import profile, workloads
from adtp_export.benchmarking.compare import count_flops, relate
from adtp_export.benchmarking.interleaved_timing import in_this_process, measure
from adtp_export.benchmarking.processes import Contender, sorted_parts
from adtp_export.model.flops import Shape, alive_tokens, encoder_flops
from adtp_export.model.packed import PackedStudent
from adtp_export.model.padded import layers_read
from adtp_export.model.registry import fields
from adtp_export.report import html
from adtp_export.runtimes.onnxruntime import NodeTime

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


def test_flops_where_cls_alone_leaves_the_last_layer():
    h, i = SHAPE.hidden, SHAPE.intermediate
    last = 6 * 10 * h * h + 4 * 10 * 10 * h + 2 * h * h + 4 * h * i
    assert encoder_flops(SHAPE, [np.array([10])], cls_only_last_layer=True) == sum(layer(10)) + last
    projections = 6 * 10 * SHAPE.hidden**2
    assert encoder_flops(SHAPE, [np.array([10])], precomputed_first_layer=True) == 2 * sum(layer(10)) - projections
    behind_a_cut = layer(10)[0] + 4 * h * i  # the retainer reads all rows of the last layer's attention
    assert (
        encoder_flops(SHAPE, [np.array([10]), np.array([4])], ["1.ffn"], cls_only_last_layer=True)
        == sum(layer(10)) + behind_a_cut
    )


@pytest.mark.parametrize(
    ("backbone", "pruning"), [*((name, "none") for name in TINY_BACKBONES), ("bert", "received-twice")]
)
def test_both_forms_cost_what_pytorch_counts(backbone, pruning):
    """It sees every product of the padded form, and of the packed one all but those inside our own operator, which are
    counted in a dense run of each sequence alone. The pruner has no weights of its own."""
    model = make_encoder(backbone, pruning)
    lengths, padded = [9, 16, 1], 16
    parts, config = model.backbone, fields(model.dense.config)
    batch, shape = make_batch(lengths, padded, types=config["type_vocab_size"]), Shape.of(config)

    def counted(run, *arguments, **keywords):
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            run(*arguments, **keywords)
        return counter.get_total_flops()

    def attended(layer, n):  # by one text
        attention = parts.attention(layer)
        x, size = torch.randn(attention.heads, n, attention.dense.in_features // attention.heads), torch.arange(n)
        seen = (size[:, None] - size).abs() <= (attention.window[0] if attention.window[0] > 0 else n)
        pairs = counted(lambda: (x @ x.transpose(1, 2)) @ x) * int(seen.sum()) // n**2
        if attention.distances is None:
            return pairs
        distances = size[None] - size[:, None]
        return pairs + counted(attention.distances, x[None], x[None], distances) - tables(layer)

    def tables(layer):  # of distances, which the packed form has as constants
        distances = parts.attention(layer).distances
        return 0 if distances is None else counted(distances.columns)

    def around(tokens):  # what is not counted: embeddings, of which ELECTRA projects some, and the head
        ids = torch.zeros(tokens, dtype=torch.int64)
        return counted(parts.embeddings, ids, ids, ids) + counted(
            parts.classifier, torch.zeros(3, config["hidden_size"])
        )

    all_tokens = np.full(len(lengths), padded)
    received = len(layers_read(model.pruners)) * counted(torch.einsum, "bnqk,bq->bk", torch.ones(
        len(lengths), config["num_attention_heads"], padded, padded), torch.ones(len(lengths), padded))  # fmt: skip
    everywhere = dataclasses.replace(shape, windows=())  # the padded form masks what is too far away
    received += sum(map(tables, range(parts.num_layers)))
    assert counted(model, **batch) - received == encoder_flops(everywhere, [all_tokens]) + around(all_tokens.sum())

    sites = model.site_names
    alive = alive_tokens(model(**batch).kept_site.numpy(), len(sites))
    assert sites == () or alive[-1].sum() < alive[0].sum()
    cuts = {"none": [0, 0, 0], "received-twice": [0, 2, 2]}[pruning]  # before the attention of each layer
    inside = sum(attended(layer, int(n)) for layer, reached in enumerate(cuts) for n in alive[reached])
    found = counted(PackedStudent(model), **batch) + inside
    assert found == encoder_flops(shape, alive, sites, cls_only_last_layer=True) + around(sum(lengths))


def test_alive_tokens_of_a_real_run():
    student = make_student(["0.ffn", "1.ffn"])
    output = student(**make_batch([9, 4, 1], 10))
    alive = alive_tokens(output.kept_site.numpy(), 2)
    assert alive[0].tolist() == [9, 4, 1]
    for site in (0, 1):
        assert alive[site + 1].tolist() == output.decisions[site].count.tolist()


def test_grid_lengths_are_those_of_the_records():
    """Other lengths would be another workload under the same name."""
    assert workloads.grid_lengths(1, 128).tolist() == [128]
    assert workloads.grid_lengths(8, 128).tolist() == [128, 93, 81, 58, 61, 35, 39, 33]


def test_grid_lengths_are_uniform_from_a_quarter_on():
    """The mean of n draws from 32 to 128 is off by more than 5 of its deviations once in a million."""
    lengths = workloads.grid_lengths(4096, 128)
    assert (lengths.min(), lengths.max(), lengths[0]) == (32, 128, 128)
    deviation = np.sqrt((97**2 - 1) / 12)
    assert abs(lengths.mean() - 80) < 5 * deviation / np.sqrt(4096)
    assert abs(lengths.std() - deviation) < 1


def test_both_forms_of_the_grid_differ_in_their_words_alone(demo):
    """Running text, and random ids of the vocabulary, in the same shapes and lengths."""
    tokenizer = Tokenizer.from_file(str(demo / "tokenizer.json"))
    names, shapes, texts = (
        ("input_ids", "attention_mask", "token_type_ids"),
        [(1, 32), (8, 128)],
        ["a good film", "never"],
    )
    written = workloads.make_workloads(["1x32", "8x128"], names, 3000, tokenizer, texts)
    drawn = workloads.make_workloads(["1x32", "8x128"], names, 3000)
    assert [work.name for work in written] == [work.name for work in drawn] == ["1x32", "8x128"]
    first, last = tokenizer.encode("").ids
    for shape, (text,), (random,) in zip(shapes, *([work.batches for work in form] for form in (written, drawn))):
        assert set(text) == set(random) == set(names)
        assert text["input_ids"].shape == shape
        lengths = text["attention_mask"].sum(1)
        assert lengths.tolist() == workloads.grid_lengths(*shape).tolist()
        assert np.array_equal(text["attention_mask"], random["attention_mask"])
        assert not text["token_type_ids"].any()
        assert not random["token_type_ids"].any()
        live = text["attention_mask"] == 1
        for batch in (text, random):
            assert not batch["input_ids"][~live].any()
        assert (text["input_ids"][:, 0] == first).all()
        assert (text["input_ids"][np.arange(len(lengths)), lengths - 1] == last).all()
        words = {tokenizer.token_to_id(word) for word in " ".join(texts).split()}
        assert set(text["input_ids"][live].tolist()) == words | {first, last}
        assert ((random["input_ids"][live] >= 1000) & (random["input_ids"][live] < 3000)).all()
        assert len(set(random["input_ids"][live].tolist())) > len(lengths)


def test_running_text_of_a_tokenizer_without_special_tokens_is_as_long():
    names = ("input_ids", "attention_mask")
    (work,) = workloads.make_workloads(["1x32"], names, 500, make_tokenizer(), ["a good film", "never"])
    assert work.batches[0]["attention_mask"].sum(1).tolist() == workloads.grid_lengths(1, 32).tolist()


def test_skewed_batches():
    """Log-normal lengths, as far as the model reads; and one long text among short ones."""
    names = ("input_ids", "attention_mask")
    mixed, one_long = workloads.make_workloads(workloads.SKEWED, names, 3000)
    assert [w.skewed for w in (mixed, one_long)] == [True, True]
    lengths = np.stack([batch["attention_mask"].sum(1) for batch in mixed.batches])
    assert (lengths.shape, lengths.min(), lengths.max()) == ((4, 32), 5, 326)
    deviation = np.log(lengths).std()
    assert abs(np.log(lengths).mean() - np.log(36)) < 4 * deviation / lengths.size**0.5
    assert one_long.batches[0]["attention_mask"].sum(1).tolist() == [512] + [10] * 31
    short = workloads.make_workloads(workloads.SKEWED, names, 3000, longest=64)
    assert [w.batches[0]["input_ids"].shape for w in short] == [(32, 64), (32, 64)]


def test_real_lengths_keep_the_order_of_the_file(demo):
    tokenizer = Tokenizer.from_file(str(demo / "tokenizer.json"))
    texts = ["word " * (1 + i % 9) for i in range(70)]
    single, batched = workloads.real_lengths(tokenizer, texts, ("input_ids", "attention_mask"), 64)
    assert (single.name, batched.name) == ("data-1", "data-32")
    assert (single.skewed, batched.skewed) == (False, True)
    assert [len(b["input_ids"]) for b in batched.batches] == [32, 32, 6]
    lengths = [int(b["attention_mask"].sum()) for b in single.batches]
    assert lengths == [int(n) for b in batched.batches for n in b["attention_mask"].sum(1)]


def contender(name, **fields):
    return Contender(**{"name": name, "path": Path(), "layers": 1, "padded": False, **fields})


PAIR = [contender(name) for name in ("student", "dense")]


def test_relate_uses_paired_ratios():
    times = {"student": np.array([1.0, 2, 2, 2, 2, 10]), "dense": np.array([3.0, 6, 6, 6, 6, 11])}
    flops = {"student": np.array([10.0]), "dense": np.array([40.0])}
    student, dense = relate("1x8", times, flops, PAIR, ["dense"])
    assert student.p50_ms == 2.0
    assert student.vs["dense"].speedup == 3.0
    assert student.vs["dense"].flops_ratio == 4.0
    assert student.vs["dense"].realized_fraction == 0.75
    assert dense.vs == {}


def test_margin_covers_the_median_as_often_as_it_says():
    """Of 400 samples of 30 noisy ratios, the interval around each median holds the true one in about 95 of 100."""
    draws = np.random.default_rng(0).lognormal(0, 0.1, (400, 30))
    found = [turns.interval(values) for values in draws]
    assert 0.93 < np.mean([low <= 1 <= high for low, high in found]) < 1
    assert turns.interval(np.ones(10)) == (1, 1)


@pytest.mark.parametrize(("n", "inside"), [(6, 6), (9, 7), (10, 8), (60, 18)])
def test_an_interval_holds_the_median_with_95_percent(n, inside):
    """It leaves out as many values at each end as a fair coin allows: of 60, ranks 22 to 39."""
    low, high = turns.interval(np.arange(n))
    assert high - low + 1 == inside


def test_five_values_have_no_interval():
    with pytest.raises(ValueError, match="got 5 values; a 95% interval of their median takes at least 6"):
        turns.interval(np.arange(5))


def test_times_and_speedups_are_one_statistic():
    """A quotient of medians; the margin reaches to the far end of the interval of the paired ratios."""
    slower, faster = np.array([2.0, 4, 6, 8, 10, 12]), np.array([1.0, 2, 3, 4, 5, 24])
    found, margin = turns.speedup(slower, faster)
    assert found == np.median(slower) / np.median(faster) == 2.0
    assert margin == 1.5  # the smallest of six ratios is 0.5


def test_relate_counts_the_batches_that_ran():
    """Nine rounds over two batches: the first batch counts five times."""
    times = {"student": np.ones(9), "dense": np.ones(9)}
    flops = {"student": np.array([1.0, 1.0]), "dense": np.array([4.0, 1.0])}
    row = relate("data-1", times, flops, PAIR, ["dense"])[0]
    assert row.vs["dense"].flops_ratio == round(24 / 9, 3)
    assert row.rounds_ms == (1.0,) * 9


def test_times_are_those_of_whole_cycles():
    """Batches of 1 and 9 ms, of which the baseline takes 3 and 9: 12 / 10 in all, and the last round is no cycle."""
    times = {"student": np.array([1.0, 9.0] * 6 + [1.0]), "dense": np.array([3.0, 9.0] * 6 + [3.0])}
    flops = dict.fromkeys(times, np.ones(2))
    student, dense = relate("mixed-32", times, flops, PAIR, ["dense"])
    assert (student.vs["dense"].speedup, student.vs["dense"].margin) == (1.2, 0.0)
    assert dense.p50_ms / student.p50_ms == 1.2  # columns divide
    assert turns.by_cycle(np.arange(13.0), 200).tolist() == [
        1,
        3.5,
        5.5,
        7.5,
        9.5,
        11.5,
    ]  # six parts of a run that is no cycle
    assert turns.by_cycle(np.arange(5.0), 2).tolist() == [0, 1, 2, 3, 4]


def test_all_batches_are_run_through_six_times():
    work = workloads.Workload("mixed-32", tuple({"i": i} for i in range(8)), True)
    times = measure(work, "ab", in_this_process({name: CountingEngine([], name) for name in "ab"}), seconds=0)
    assert len(times["a"]) == 48


class CountingEngine:
    inputs = outputs = ()

    def __init__(self, log, name):
        self.log, self.name = log, name

    def run(self, batch):
        self.log.append((self.name, batch["i"]))
        return {}


def test_measure_takes_turns():
    log = []
    timer = in_this_process({name: CountingEngine(log, name) for name in "ab"})
    work = workloads.Workload("w", ({"i": 0}, {"i": 1}))
    times = measure(work, "ab", timer, seconds=0)
    assert len(times["a"]) == len(times["b"]) == 12  # six times through both batches
    assert log[::2] == log[1::2]  # each is timed right after an untimed run of the same batch
    measured = log[-48::2]
    assert [batch for _, batch in measured] == [i // 2 % 2 for i in range(24)]
    assert [name for name, _ in measured[::2]] == ["a", "b"] * 6  # each starts every other round


def test_flops_of_each_kind_of_contender():
    batch = {"attention_mask": np.tril(np.ones((6, 6), np.int64))[[5, 1, 3]]}  # lengths 6, 2, 4
    lengths = [np.array([6, 2, 4])]
    packed, padded = contender("packed", cls_only_last_layer=True), contender("padded", padded=True)
    assert count_flops(packed, SHAPE, batch) == encoder_flops(
        dataclasses.replace(SHAPE, layers=1), lengths, cls_only_last_layer=True
    )
    assert count_flops(padded, SHAPE, batch) == 3 * sum(layer(6))
    by_length = contender("sorted", padded=True, length_bucket_rows=2, layers=2)
    assert count_flops(by_length, SHAPE, batch) == 2 * (2 * sum(layer(4)) + sum(layer(6)))
    kept_site = np.where(batch["attention_mask"], 1, -1)
    kept_site[:, 1:3][batch["attention_mask"][:, 1:3] == 1] = 0  # dropped: 2, 1 and 2 of the tokens
    student = contender("student", sites=("0.ffn",))
    expected = sum(layer(6, m=4)) + sum(layer(2, m=1)) + sum(layer(4, m=2))
    assert count_flops(student, SHAPE, batch, kept_site) == expected


def test_sorted_parts_cover_the_batch():
    parts = sorted_parts(np.array([5, 1, 9, 1, 7]), 2)
    assert [(rows.tolist(), longest) for rows, longest in parts] == [([1, 3], 1), ([0, 4], 7), ([2], 9)]


def test_profile_accounts_for_the_products(exported):
    (work,) = workloads.make_workloads(["8x128"], ("input_ids", "attention_mask", "token_type_ids"), 1000)
    taken = profile.take(exported / "model.onnx", work, profile.Peaks(100.0, 10.0))
    assert 0 < taken.product_share < taken.accounted <= 1.01  # nodes run one after the other
    assert sum(taken.shares.values()) == pytest.approx(taken.accounted, abs=0.01)
    assert {"Gemm", "Gather", "TopK", "Softmax", "LayerNormalization"} <= set(taken.shares)
    config = json.loads((exported / "config.json").read_text())
    hidden, tokens = config["hidden_size"], int(work.batches[0]["attention_mask"].sum())
    first = next(p for p in taken.products if p.name == "layers.0.attention.qkv")
    assert (first.m, first.n, first.k) == (tokens, 3 * hidden, hidden)
    assert first.gflops == pytest.approx(2 * tokens * 3 * hidden**2 * first.count / first.ms / 1e6, rel=0.05)
    assert taken.weights_ms > 0


@pytest.mark.parametrize(("torch_s", "onnxruntime_s", "fastest"), [(2.0, 1.0, "ONNX Runtime"), (1.0, 2.0, "PyTorch")])
def test_the_roof_is_the_faster_product(monkeypatch, torch_s, onnxruntime_s, fastest):
    """Each is really computed, in small; the clock is ours."""
    monkeypatch.setattr(profile, "SIDE", 8)
    monkeypatch.setattr(profile, "LONG", 1000)
    found, clock = [], iter([[1.0, 0.5], [9.0, torch_s], [onnxruntime_s, 9.0]])

    def repeat(function, number, repeat):
        found.append(np.asarray(function()))
        return next(clock)

    monkeypatch.setattr(profile.timeit, "repeat", repeat)
    assert profile.measure_peaks(threads=1) == profile.Peaks(
        round(2 * 8**3 / 1e9, 1), round(4000 / 0.5 / 1e9, 2), fastest
    )
    assert found[1].shape == (8, 8)
    np.testing.assert_allclose(found[2], found[1], rtol=8 * 2**-23)  # sums of 8 positive products


def test_products_of_a_busy_machine_can_be_drawn(tmp_path, monkeypatch):
    """One product that was interrupted, one that took less than the profiler's microsecond, and one of a group without texts."""
    shape = ((1, 2), (2, 2))
    nodes = [
        NodeTime(name="a/Gemm", op_type="Gemm", ms=90.0, inputs=shape, output=(1, 2)),
        NodeTime(name="b/Gemm", op_type="Gemm", ms=0.0, inputs=((3, 2), (2, 2)), output=(3, 2)),
        NodeTime(name="c/MatMul", op_type="MatMul", ms=0.01, inputs=((0, 4, 1, 2), (0, 4, 2, 1)), output=(0, 4, 1, 1)),
    ]
    monkeypatch.setattr(profile, "profile", lambda *_: (nodes, 100.0))
    peaks = profile.Peaks(100.0, 10.0)
    taken = profile.take(tmp_path, workloads.Workload("1x1", ({},)), peaks)
    assert [product.name for product in taken.products] == ["a"]
    assert 0 < taken.products[0].gflops < 1e-6
    record = {"profiles": [dataclasses.asdict(taken)], "peaks": dataclasses.asdict(peaks)}
    assert "1 x 1 x (1, 2) @ (2, 2)" in html._profiles(record)
