"""Rows, labels and batches."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from adtp_export.data.labelled import Question
from adtp_export.data.readers import read_rows
from adtp_export.data.tokenize import TokenizedText
from adtp_export.errors import InputError
from adtp_export.training.data import Examples, Labels, LengthGrouped, Table, load_tables
from adtp_export.training.objectives import for_head
from adtp_export.training.settings import TrainOptions, as_yaml, read_settings


@pytest.mark.parametrize(
    ("labels", "task", "names"),
    [
        (["1", "0", "1"], "auto", ("0", "1")),
        (["10", "9", "2"], "auto", ("2", "9", "10")),
        ([True, False], "auto", ("False", "True")),
        (["bad", "good"], "auto", ("bad", "good")),
        ([1.0, 0.0], "auto", ("0", "1")),
        (["2.5", "1"], "auto", ()),
        ([1, 2, 3], "regression", ()),
        (["2.5", "1"], "classification", ("1", "2.5")),
        (["2.5", "nan"], "classification", ("nan", "2.5")),
        (["2", "nan"], "auto", ("nan", "2")),
        (["2.5", "nan", "x"], "auto", ("nan", "x", "2.5")),
    ],
)
def test_what_the_labels_are(labels, task, names):
    table = Table("x.tsv", ["t"] * len(labels), labels)
    found = Labels.of(table, task)
    assert found.names == names
    assert len(found.encode(table)) == len(labels)


@pytest.mark.parametrize(
    ("labels", "task", "message"),
    [
        (["1", "1"], "auto", "at least two classes"),
        (["a", "b"], "regression", "takes numbers"),
        (["0.5", "nan"], "auto", "row 2 has the label 'nan', and others are numbers; .* --task classification"),
        (["-Inf", "0.5"], "auto", "row 1 has the label '-Inf'"),
    ],
)
def test_labels_that_do_not_fit(labels, task, message):
    with pytest.raises(InputError, match=message):
        Labels.of(Table("x.tsv", ["t"] * 2, labels), task)


def test_a_label_of_another_split_is_named():
    with pytest.raises(InputError, match="dev.tsv: row 2 has the label 'c'; the classes are a, b"):
        Labels(("a", "b")).encode(Table("dev.tsv", ["t"] * 2, ["a", "c"]))


def write(path, rows):
    path.write_text("label\tsentence\n" + "".join(f"{label}\t{text}\n" for label, text in rows))
    return str(path)


def test_files_without_dev_and_test_are_split(tmp_path):
    train = write(tmp_path / "train.tsv", [(i % 2, f"text {i}") for i in range(100)])
    tables = load_tables(TrainOptions(train=train, dev_share=0.2))
    assert {split: len(table) for split, table in tables.items()} == {"train": 80, "dev": 20, "test": 20}
    assert not set(tables["train"].texts) & set(tables["dev"].texts)
    assert load_tables(TrainOptions(train=train, dev_share=0.2))["dev"].texts == tables["dev"].texts
    fewer = tables["train"].sample(30)
    assert set(fewer.texts) < set(tables["train"].texts)
    assert fewer.source == "30 of 80 rows of train.tsv"
    assert tables["train"].sample(None) == tables["train"].sample(80) == tables["train"]


def test_classes_keep_the_order_of_a_data_set():
    table = Table("mrpc", ["t"] * 2, ["not_equivalent", "equivalent"], ("not_equivalent", "equivalent"))
    assert Labels.of(table, "auto").encode(table) == [0, 1]


def test_a_data_set_by_name(tmp_path):
    pytest.importorskip("datasets")
    for split, count in (("train", 8), ("test", 4)):
        (tmp_path / f"{split}.csv").write_text("text,label\n" + "".join(f"row {i},{i % 2}\n" for i in range(count)))
    tables = load_tables(TrainOptions(data=str(tmp_path), dev_share=0.25))
    assert {split: len(table) for split, table in tables.items()} == {"train": 6, "dev": 2, "test": 4}
    with pytest.raises(InputError, match="no label column 'labl'; it has text, label; did you mean 'label'"):
        load_tables(TrainOptions(data=str(tmp_path), label_column="labl"))
    with pytest.raises(InputError, match="which `datasets` cannot load"):
        load_tables(TrainOptions(data=str(tmp_path / "missing")))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.tsv", "sentence\nx\n", "no label column 'label'; it has sentence"),
        ("a.tsv", "label\tsentence\n\tx\n", "row 1 has no label"),
        ("a.tsv", "label\tsentence\n", "holds no text"),
        ("a.txt", "x\n", "has no labels"),
        ("a.jsonl", '{"text": "x", "label": null}\n', "row 1 has no label"),
        ("a.jsonl", '{"text": "x", "label": NaN}\n', "row 1 has no label"),
        ("a.jsonl", '{"text": "x", "label": ["a"]}\n', "row 1 has no label"),
        ("a.csv", "sentence,label\nhello, world,1\n", "row 1 has more fields than the header"),
        ("a.csv", 'sentence,label\ngood,1\n"bad film,0\nfine,1\n', "cannot be read as a table .*ends with one"),
        ("a.csv", 'sentence,label\n"good" film,1\n', "cannot be read as a table"),
        ("a.csv", "sentence,sentence,label\na,b,1\n", "2 columns are called 'sentence'; give each a name of its own"),
        ("a.tsv", "label\tsentence\tlabel\n1\ta\t0\n", "2 columns are called 'label'"),
    ],
)
def test_files_without_labels(tmp_path, name, content, message):
    (tmp_path / name).write_text(content)
    with pytest.raises(InputError, match=message):
        list(read_rows(tmp_path / name, label_column="label"))


def examples(lengths):
    encoded = [TokenizedText([1] * n, [0] * n, False) for n in lengths]
    return Examples(encoded=encoded, labels=list(range(len(lengths))), pad_id=0)


def test_batches_hold_every_row_once_with_the_teachers_view():
    lengths = [3, 9, 1, 4, 4]
    rows = examples(lengths).with_teacher(torch.arange(5.0)[:, None], [torch.full((n,), float(n)) for n in lengths])
    seen = []
    for numbers, batch in rows.batches(2):
        seen += numbers
        assert batch["labels"].tolist() == numbers == batch["teacher_logits"][:, 0].tolist()
        assert batch["attention_mask"].sum(1).tolist() == [lengths[i] for i in numbers]
        assert torch.equal(batch["attribution"] > 0, batch["attention_mask"].bool())
    assert sorted(seen) == list(range(5))


@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=30), size=st.integers(1, 9), tokens=st.integers(1, 120)
)
def test_batches_stay_within_rows_and_tokens(lengths, size, tokens):
    """A row of more tokens is a batch of its own, and no batch could take the next row as well."""
    batches = list(examples(lengths).batches(size, tokens))
    assert sorted(number for numbers, _ in batches for number in numbers) == list(range(len(lengths)))
    for place, (numbers, batch) in enumerate(batches):
        cells, longest = batch["attention_mask"].numel(), batch["attention_mask"].shape[1]
        assert len(numbers) == 1 or (len(numbers) <= size and cells <= tokens)
        assert place == len(batches) - 1 or len(numbers) == size or cells + longest > tokens


def test_order_depends_on_seed_and_epoch_alone():
    lengths = np.random.default_rng(0).integers(1, 50, 203)
    sampler = LengthGrouped(lengths, 8, seed=1)
    first = list(sampler)
    assert sorted(first) == list(range(203))
    assert list(sampler) == first
    sampler.set_epoch(1)
    assert list(sampler) != first
    assert list(LengthGrouped(lengths, 8, seed=2)) != first
    spread = [np.ptp(lengths[first[i : i + 8]]) for i in range(0, 200, 8)]
    assert np.mean(spread) < np.ptp(lengths) / 3


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"ratio": "fixed"}, "accepted are adaptive, static"),
        ({"method": "tops"}, "did you mean 'top'"),
        ({"method": "ltp", "beta": 0.3}, "--beta: got 0.3; --method ltp has no such setting, and adtp, random have"),
        ({"method": "transkimmer", "retention": "0.4"}, "give --flops, or leave it out"),
        ({"method": "layers", "flops": 0.5}, "--flops: got 0.5; --method layers drops no tokens. .* give --layers"),
        ({"method": "layers", "prune_sites": "0.ffn"}, "--prune-sites: got '0.ffn'; --method layers drops no tokens"),
        ({"method": "layers", "retention": "0.4"}, "--retention: got '0.4'; --method layers drops no tokens"),
        (
            {"method": "schedule", "retainer_learning_rate": 0.1},
            "--retainer-learning-rate: got 0.1; --method schedule has no such setting, and adtp, random, ltp, top, transkimmer have",
        ),
        ({"method": "layers", "ablate": "ig"}, "accepted are ce, logit and teacher"),
        ({"method": "schedule", "ablate": "ig"}, "accepted are ce, logit and teacher"),
        ({"ablate": "rank"}, "accepted are ce, logit, ig, arp, tsp and teacher"),
        ({"flops": 0.0}, "--flops: got 0.0; accepted is from 0.001 to 1"),
        ({"ablate": "ipg"}, "did you mean 'ig'"),
        ({"retention": "0.3,0.4"}, "for 1 prune site;"),
        ({"retention": "1.5"}, "accepted is from 0.001 to 1"),
        ({"retention": "0.0004", "ratio": "static"}, "--retention: got '0.0004'; accepted is from 0.001 to 1"),
        ({"dev_share": 0.0}, "--dev-share: got 0.0; accepted is from 0.000001 to 0.9"),
        ({"dev_share": 1.0}, "--dev-share: got 1.0; accepted is from 0.000001 to 0.9"),
        ({"retention": "half"}, "numbers with commas"),
        ({"retention_ratios": "0.3,0.5"}, "end with 1.0"),
        (
            {"retention_ratios": "0.3,1.0", "ratio": "static"},
            "--retention-ratios: got '0.3,1.0', which nothing uses with",
        ),
        ({"alpha": 2.0}, "from 0 to 1"),
        ({"epochs": 0.0}, "above 0"),
        ({"batch_size": 0}, "at least 1"),
        ({"seed": -1}, "at least 0"),
        ({"epochs": float("inf")}, "above 0"),
        ({"epochs": None}, "--epochs: got nothing; its default is 3.0"),
        ({"ablate": "ce,logit,ig,arp,tsp"}, "no term left"),
        ({"ablate": "ce,logit,ig", "prune_sites": ""}, "no term left"),
    ],
)
def test_settings_out_of_range(change, message):
    with pytest.raises(InputError, match=message):
        TrainOptions(**change)


def test_settings_as_yaml_and_back(tmp_path):
    settings = TrainOptions(base="x", retention="0.2,0.4", prune_sites="0.ffn,1.ffn", learning_rate=1e-5)
    (tmp_path / "a.yaml").write_text(as_yaml(settings))
    assert TrainOptions(**read_settings(tmp_path / "a.yaml")) == settings
    (tmp_path / "b.yaml").write_text("prune-sites: [0.ffn, 1.ffn]\nepochs: 2\n")
    assert read_settings(tmp_path / "b.yaml") == {"prune_sites": "0.ffn,1.ffn", "epochs": 2.0}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("epoch: 3", "unknown option 'epoch'; did you mean 'epochs'"),
        ("epochs: many", "epochs: got 'many'; accepted is a number"),
        ("batch_size: 1.5", "accepted is an integer"),
        ("- a", "holds list"),
        ("a: [", "cannot be read as YAML"),
    ],
)
def test_yaml_that_is_refused(tmp_path, content, message):
    (tmp_path / "a.yaml").write_text(content)
    with pytest.raises(InputError, match=message):
        read_settings(tmp_path / "a.yaml")


def test_questions_about_one_text_stay_on_one_side(tmp_path):
    questions = [Question(f"question {i}", f"text {i // 3}", (), ()) for i in range(30)]
    table = Table("x", questions, [() for _ in questions])
    tables = load_tables(TrainOptions(base="b", train="x.jsonl", dev_share=0.1), lambda path, settings: table)
    sides = [{question.context for question in tables[split].texts} for split in ("train", "dev")]
    assert sides[1]
    assert not sides[0] & sides[1]
    assert len(tables["train"]) + len(tables["dev"]) == 30


@pytest.mark.parametrize("texts", [["a", "b"], [("a", "b"), ("a", "c")], [["a", "b"], ["a"]]], ids=str)
def test_equal_texts_stay_on_one_side(texts):
    """Texts, pairs and words; about as many rows are held out as were asked for."""

    def numbered(text, i):
        if isinstance(text, str):
            return f"{text} {i}"
        return [*text, str(i)] if isinstance(text, list) else (text[0], f"{text[1]} {i}")

    rows = [numbered(text, i) for i in range(20) for text in texts] * 5
    table = Table("x", rows, [0] * len(rows))
    tables = load_tables(TrainOptions(base="b", train="x.jsonl", dev_share=0.1), lambda path, settings: table)
    dev, train = tables["dev"].texts, tables["train"].texts
    assert not [row for row in dev if row in train]
    assert len(rows) == 200
    assert 20 <= len(dev) < 20 + 5
    assert len(dev) + len(train) == 200


@pytest.mark.parametrize(
    ("texts", "apart"),
    [
        (["a"] * 20, False),
        (["a", "b"] * 50, False),
        (["a"] * 99 + ["b"], False),
        (["a"] * 60 + [str(i) for i in range(40)], True),
        ([str(i // 15) for i in range(100)], True),
    ],
    ids=["one text", "two texts", "one beside another", "a large one", "many of some rows"],
)
def test_large_texts_do_not_swallow_the_training_rows(texts, apart):
    """Where no other rows are enough, a text is on both sides."""
    table = Table("x", texts, [0] * len(texts))
    tables = load_tables(TrainOptions(base="b", train="x.jsonl", dev_share=0.1), lambda path, settings: table)
    dev, train = tables["dev"].texts, tables["train"].texts
    assert len(texts) / 20 <= len(dev) <= len(texts) / 5
    assert len(dev) + len(train) == len(texts)
    assert not apart or not set(dev) & set(train)


def test_classes_of_a_data_set_may_have_any_names():
    table = Table("x", ["t"] * 2, ["0.5", "nan"], ("0.5", "1", "nan"))
    assert Labels.of(table, "auto").names == table.classes


def test_classes_of_a_data_set_are_those_of_its_training_rows(tmp_path):
    pytest.importorskip("datasets")
    for split, names in (("train", "ab"), ("validation", "ab"), ("test", "abc")):
        (tmp_path / f"{split}.csv").write_text("text,label\n" + "".join(f"row {split},{name}\n" for name in names))
    settings = TrainOptions(data=str(tmp_path))
    tables = load_tables(settings)
    labels = for_head("sequence").labels(tables["train"].all_rows(), settings)
    assert labels.names == ("a", "b")
    with pytest.raises(InputError, match="'c'"):
        labels.encode(tables["test"])


@pytest.mark.parametrize("task", ["sequence", "tokens"])
def test_a_rare_class_that_was_held_out_is_a_class(task):
    """Whichever rows are drawn for dev."""
    names = ["rare", *["a", "b"] * 20]
    texts = [f"row {i}" for i in range(41)] if task == "sequence" else [["row", str(i)] for i in range(41)]
    labels = names if task == "sequence" else [[name, "a"] for name in names]
    settings = TrainOptions(base="b", train="x.jsonl", dev_share=0.3)
    for first in range(41):  # it is in another place each time
        table = Table("x.jsonl", texts, labels[first:] + labels[:first])
        tables = load_tables(settings, lambda path, settings, table=table: table)
        assert for_head(task).labels(tables["train"].all_rows(), settings).names == ("a", "b", "rare")
