"""`export` on every head: verified with and without cuts, judged by labels, and quantized. The tables of heads and labels decide."""

import dataclasses
import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from testbed import DEMO, HEAD_FIELDS, TINY_BERT
from tokenizers import Tokenizer

import adtp_export
from adtp_export.artifacts.records import VERIFIED, Manifest, ShapeRange
from adtp_export.contract import OUTPUTS, VECTORS
from adtp_export.data.rows import TextSource, read, tokenize
from adtp_export.data.tokenize import encode
from adtp_export.data.windows import Windows
from adtp_export.errors import InputError
from adtp_export.inference.answers import spans
from adtp_export.model import PrunedEncoderConfig
from adtp_export.model.checkpoint import load_checkpoint
from adtp_export.model.heads import head_class
from adtp_export.pipeline.companions import write_companions
from adtp_export.pipeline.export import export as export_room
from adtp_export.pipeline.export import request
from adtp_export.pipeline.export.context import ExportContext
from adtp_export.pipeline.export.options import ExportOptions
from adtp_export.pipeline.export.reference import class_indices, verify_with
from adtp_export.pipeline.progress import Steps
from adtp_export.verify import samples

PRUNING = {"method": "adtp", "sites": ["0.ffn"], "retention_ratios": [0.3, 0.6, 1.0]}
WORDS = ["a", "wonderful", "film", ",", "and", "the", "cast", "is", "superb"]
CONTEXT = "the film was cold and so was the waiter"
ALIKE = [{"a": " ".join(WORDS[i:]), "b": " ".join(WORDS[::-1][: 4 + i]), "alike": i % 5} for i in range(6)]
LABELLED = {
    "sequence": [{"text": " ".join(WORDS[i:]), "label": f"LABEL_{i % 3}"} for i in range(8)],
    "tokens": [{"tokens": WORDS[i:], "tags": [f"LABEL_{j % 5}" for j in range(len(WORDS) - i)]} for i in range(8)],
    "spans": [
        {
            "question": f"what was {word}?",
            "context": CONTEXT,
            "answers": {"text": [word], "answer_start": [CONTEXT.index(word)]},
        }
        for word in ("film", "cold", "waiter")
    ]
    + [{"question": "who?", "context": CONTEXT, "answers": {"text": [], "answer_start": []}}],
    "embedding": ALIKE,
    "sparse": ALIKE,
}
LABELLED["hybrid"] = LABELLED["embedding"]
"""Rows with labels for every line of the table of heads but "vectors": nobody says which vectors of tokens are right."""

OPTIONS = {
    "sequence": {"label_column": "label"},
    "tokens": {"label_column": "tags"},
    "spans": {"label_column": "answers"},
    "embedding": {"label_column": "alike", "text_column": "a,b"},
    "sparse": {"label_column": "alike", "text_column": "a,b"},
    "hybrid": {"label_column": "alike", "text_column": "a,b"},
}
MEASURES = {
    "sequence": {"accuracy", "f1_macro", "matthews"},
    "tokens": {"accuracy", "f1_macro"},
    "spans": {"exact", "f1", "has_answer_f1", "no_answer_accuracy"},
    "embedding": {"spearman", "pearson"},
    "sparse": {"spearman", "pearson"},
    "hybrid": {"spearman", "pearson"},
}


def save(head, pruning, directory):
    """Write a small random checkpoint of format 2, with the demo's tokenizer."""
    torch.manual_seed(0)
    backbone = {**TINY_BERT, "model_type": "bert", "vocab_size": 1238, "num_hidden_layers": 2}
    model = head_class(head)(PrunedEncoderConfig(backbone=backbone, pruning=pruning, head=head, **HEAD_FIELDS[head]))
    model.save_pretrained(directory)
    for name in ("tokenizer.json", "tokenizer_config.json", "vocab.txt"):
        shutil.copy(DEMO / name, directory)
    return directory


def test_an_update_leaves_the_windows_that_other_targets_answer_in(tmp_path):
    directory, out = save("spans", None, tmp_path / "model"), tmp_path / "out"
    adtp_export.export(directory, out)
    config, tokenizer = ((out / name).read_text() for name in ("config.json", "tokenizer.json"))
    assert json.loads(config)["adtp"]["windows"]["max_tokens"] > 16
    longest = min(16, TINY_BERT["max_position_embeddings"])
    adtp_export.export(directory, out, update=True, packed_inputs=True, seq=f"1:8:{longest}")
    assert (out / "model.packed.onnx").exists()
    assert [(out / name).read_text() for name in ("config.json", "tokenizer.json")] == [config, tokenizer]


def test_an_update_is_judged_in_the_windows_that_load_reads(tmp_path, monkeypatch):
    """It has a larger --seq than the export before it."""
    directory, out = save("spans", None, tmp_path / "model"), tmp_path / "out"
    adtp_export.export(directory, out, seq="1:8:16", skip_parity_check=True)
    asked = []

    def fill(run, plan):
        asked.append(run.windows)
        raise InputError("far enough")

    monkeypatch.setattr(export_room, "_fill", fill)
    with pytest.raises(InputError, match="far enough"):
        adtp_export.export(directory, out, update=True, packed_inputs=True)
    read = json.loads((out / "config.json").read_text())["adtp"]["windows"]
    assert [dataclasses.asdict(windows) for windows in asked] == [read]


def write(path, rows):
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("heads")
    return {head: save(head, PRUNING, folder / head) for head in HEAD_FIELDS}


QUICK = [pytest.param(head, marks=[] if head in ("spans", "embedding") else [pytest.mark.slow]) for head in HEAD_FIELDS]


@pytest.mark.parametrize("head", QUICK)
def test_a_plain_model_of_each_head_is_verified(tmp_path, head, has_openvino):
    manifest = adtp_export.export(save(head, None, tmp_path / "model"), tmp_path / "out", openvino=True)
    assert {name: t.status for name, t in manifest.targets.items()} == dict.fromkeys(
        ("onnxruntime-cpu-fp32", "openvino-cpu-fp32"), VERIFIED
    )
    for target in manifest.targets.values():
        assert target.parity.prediction_agreement == target.parity.kept_token_agreement == 1
        assert list(target.parity.outputs) == (list(OUTPUTS[head]) if len(OUTPUTS[head]) > 1 else [])
    assert Manifest.read(tmp_path / "out").targets == manifest.targets
    stored = json.loads((tmp_path / "out" / "manifest.json").read_text())["targets"]["onnxruntime-cpu-fp32"]
    assert ("outputs" in stored) == (len(OUTPUTS[head]) > 1)  # fields that would be empty are not written
    assert ("answers" in stored) == (head in (*VECTORS, "vectors"))


@pytest.mark.usefixtures("known_graphs")
@pytest.mark.parametrize("head", [each for each in QUICK if each.values[0] in LABELLED])
def test_each_head_is_verified_quantized_and_judged(tmp_path, models, head):
    data = write(tmp_path / "rows.jsonl", LABELLED[head])
    manifest = adtp_export.export(
        models[head],
        tmp_path / "out",
        precisions="fp32,fp16,int8",
        verify_data=data,
        calibration_data=data,
        max_accuracy_drop=100,
        **OPTIONS[head],
    )
    assert {name: t.status for name, t in manifest.targets.items()} == dict.fromkeys(
        ("onnxruntime-cpu-fp32", "onnxruntime-cpu-fp16", "onnxruntime-cpu-int8"), VERIFIED
    )
    measures = manifest.measures
    assert set(measures) == MEASURES[head]
    fp32, _, int8 = (target.parity for target in manifest.targets.values())
    assert fp32.quality == pytest.approx(measures, abs=1e-5)  # of scores that two kernels computed
    assert fp32.max_abs_logit_diff <= fp32.tolerance < int8.tolerance
    costs = manifest.targets["onnxruntime-cpu-int8"].details["sensitivity"]
    assert len(costs) == 8
    assert costs[0]["mean_abs_logit_diff"] > 0
    rows = len(LABELLED[head]) * (2 if head in VECTORS else 1)
    int8 = manifest.targets["onnxruntime-cpu-int8"]
    assert fp32.rows == manifest.verification["rows"] == int8.calibration["rows"] == rows
    for report in ("report.md", "report.html"):
        text = (tmp_path / "out" / report).read_text()
        assert all(name in text for name in measures)


@pytest.mark.parametrize(
    ("head", "rows", "options", "message"),
    [
        ("tokens", [{"tokens": ["a", "b"], "tags": ["LABEL_0"]}], {}, "row 1 has 2 words and 1 tags"),
        (
            "tokens",
            [{"tokens": ["a"], "tags": ["LABEL_7"]}],
            {},
            "got the tag 'LABEL_7'; the student knows LABEL_0.*did you mean",
        ),
        ("tokens", None, {"text_column": "a,b"}, "accepted is one column, of lists of words"),
        ("spans", None, {"label_column": "answer"}, "type --label-column answers"),
        ("spans", None, {"text_column": "title,text"}, "type --label-column answers, and no --text-column"),
        ("spans", [{"question": "a", "context": "b"}], {}, "row 1 has no 'answers'"),
        ("embedding", [{"a": "x", "alike": 1}], {"text_column": "a"}, "name both columns"),
        ("embedding", [{"a": "x", "b": "y", "alike": "much"}], {}, "labels are numbers that say how alike"),
    ],
)
def test_wrong_labels_are_named(tmp_path, models, head, rows, options, message):
    data = write(tmp_path / "rows.jsonl", rows or LABELLED[head])
    with pytest.raises(InputError, match=message):
        adtp_export.export(models[head], tmp_path / "out", verify_data=data, **{**OPTIONS[head], **options})


def test_labels_are_all_names_or_all_numbers():
    """Stars are classes whose names are other numbers than theirs."""
    text, stars, signs = TextSource(Path("rows.tsv"), "text", "label"), dict(enumerate("12345")), {0: " neg", 1: "pos"}
    assert class_indices(["1", "2", "5"], stars, text) == [0, 1, 4]
    assert class_indices(["0", "1", "4"], stars, text) == [0, 1, 4]
    assert class_indices(["pos ", "neg"], signs, text) == [1, 0]
    assert class_indices([1.0, 0, "1"], signs, text) == [1, 0, 1]
    for labels, got in ((["0", "1", "5"], "0"), (["pos", "0"], "0"), (["pos", "neu"], "neu"), ([2], "2")):
        names = ", ".join(stars.values() if "5" in labels else ("neg", "pos"))
        with pytest.raises(
            InputError, match=f"got the label '{got}'; the student knows {names}, or in all rows their num"
        ):
            class_indices(labels, stars if "5" in labels else signs, text)


@pytest.mark.parametrize("head", ["masked", "vectors"])
def test_heads_whose_answers_no_label_judges_take_none(head):
    config = SimpleNamespace(head=head, problem_type=None, num_labels=None)
    with pytest.raises(InputError, match="no label says which of those are right; leave it out"):
        request._check_columns(ExportOptions("model", verify_data="rows.jsonl", label_column="label"), config)


@pytest.mark.parametrize(
    ("head", "rows", "count"),
    [
        ("tokens", LABELLED["tokens"], 8),
        ("tokens", [{"text": "a film"}], 1),
        ("spans", LABELLED["spans"], 4),
        ("embedding", [{"sentence1": "a film", "sentence2": "a cast"}], 2),
    ],
)
def test_rows_are_read_without_their_labels(tmp_path, models, head, rows, count):
    tokenizer = Tokenizer.from_file(str(DEMO / "tokenizer.json"))
    found = list(read(head, TextSource(write(tmp_path / "rows.jsonl", rows), None)))
    assert all(label is None for _, label in found)
    tokenized = tokenize(head, tokenizer, [text for text, _ in found], 64, Windows())
    assert len(tokenized.rows) == count
    if head == "spans":
        expected = encode(tokenizer, [(row["question"], row["context"]) for row in rows], 64)
        assert [row.input_ids for row in tokenized.rows] == [row.input_ids for row in expected]


@pytest.mark.parametrize(
    ("head", "texts", "each"),
    [
        ("sequence", ["good film " * 20] * 100, 1),
        ("embedding", [("good film " * 20, "good " * 40)] * 50, 2),
        ("spans", [("which ?", "good film " * 60)] * 50, 3),
    ],
)
def test_long_texts_are_fewer_rows(head, texts, each):
    """Texts are judged whole: all windows of a context, and both texts of a pair."""
    tokenizer = Tokenizer.from_file(str(DEMO / "tokenizer.json"))
    whole = tokenize(head, tokenizer, texts, 64, Windows(64, 10))
    tokens = [len(row.input_ids) for row in whole.rows]
    assert len(tokens) == each * len(texts)
    part = whole.first(1000)
    assert part.texts == 1000 // sum(tokens[:each])
    assert list(part.owners) == [number for number in range(part.texts) for _ in range(each)]
    assert part.rows == whole.rows[: len(part.owners)]
    assert part.places is None or part.places == whole.places[: len(part.owners)]
    assert whole.first(1).texts == 1
    assert whole.first(sum(tokens)).texts == len(texts)
    squares = whole.first(sum(n * n for n in tokens) / 2, lambda tokens: tokens**2)
    assert squares.texts == len(texts) // 2


@pytest.mark.parametrize(("head", "file"), [("sequence", False), ("sequence", True), ("sparse", True)])
def test_a_large_model_is_verified_on_fewer_texts(tmp_path, models, monkeypatch, head, file):
    """As many as it has time for, or memory for their sparse vectors, and the user is told."""
    run = ExportContext(
        checkpoint=load_checkpoint(models[head]),
        work=tmp_path,
        profile={"batch": ShapeRange(1, 1, 8), "seq": ShapeRange(1, 64, 64)},
        steps=Steps(),
    )
    write_companions(run.checkpoint, run.work)
    text = TextSource(write(tmp_path / "rows.jsonl", LABELLED["sequence"]), None) if file else None
    everything = verify_with(run, text, random=False)
    student, why = run.checkpoint.student, "the model is large"
    if head == "sparse":
        monkeypatch.setattr(samples, "MAX_WEIGHTS", 3 * student.dense.config.vocab_size)
        why = "the model's sparse vectors are large, so it is verified on the first 3 texts"
    else:
        monkeypatch.setattr(samples, "MAX_FLOPS", student.flops(np.array([64]))[0] / 2)
    bounded = verify_with(run, text, random=False)
    assert 0 < bounded.oracle.rows == bounded.record["rows"] < everything.oracle.rows
    assert not everything.notes
    told = "; to take more of them, type: --verify-data FILE --verify-rows N" if file else " FLOPs in all"
    assert [(note.text.startswith(why), note.text.endswith(told)) for note in bounded.notes] == [(True, True)]
    if not file:
        assert len(everything.record["languages"]) > len(bounded.record["languages"]) == 1


@pytest.mark.usefixtures("known_graphs")
def test_files_of_squad_are_verified_on(tmp_path, models):
    """The same questions as JSON lines and in SQuAD's own form; the context takes several windows."""
    rows = [{**row, "context": CONTEXT + " good film" * 60} for row in LABELLED["spans"]]
    nested = [
        {
            "context": row["context"],
            "qas": [
                {
                    "question": row["question"],
                    "answers": [dict(zip(("text", "answer_start"), pair)) for pair in zip(*row["answers"].values())],
                }
            ],
        }
        for row in rows
    ]
    (tmp_path / "squad.json").write_text(json.dumps({"data": [{"paragraphs": nested}]}))
    files = write(tmp_path / "rows.jsonl", rows), tmp_path / "squad.json"
    found = [list(read("spans", TextSource(file, None, label))) for file in files for label in (None, "answers")]
    assert found[0] == found[2]
    assert found[1] == found[3]
    manifest = adtp_export.export(models["spans"], tmp_path / "out", verify_data=files[1], label_column="answers")
    assert manifest.verification["windows"] == {"max_tokens": 64, "stride": 32, "max_answer_tokens": 15}
    assert manifest.verification["rows"] > 2 * len(rows)
    answer = adtp_export.load(tmp_path / "out")
    told = answer([text for text, _ in found[1]], may_be_none=True)
    expected = spans.quality([each.answer for each in told], [answers for _, answers in found[1]])
    assert manifest.measures == pytest.approx(expected)
