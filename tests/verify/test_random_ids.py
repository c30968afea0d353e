"""Rows that no text has: what built-in sentences do not notice, these do."""

import copy
import dataclasses
import re
import types

import numpy as np
import onnx_ir as ir
import pytest
import torch
from packed_engine import PackedEngine
from testbed import as_numpy, exported_graph, make_batch, make_encoder, make_student

from adtp_export.errors import VerificationError
from adtp_export.pipeline.export.context import ExportContext, WrittenFile
from adtp_export.pipeline.export.file_plan import ModelFile, TargetPlan
from adtp_export.pipeline.export.verify import verify_targets
from adtp_export.pipeline.progress import Steps
from adtp_export.targets.specs import TargetSpec
from adtp_export.verify import random_ids
from adtp_export.verify.oracle import for_precision, run_oracle, typed
from adtp_export.verify.parity import compare, judged
from adtp_export.verify.tables import wrong_embeddings

SITES = ["0.ffn"]


def lengths(batches):
    return sorted(int(n) for batch in batches for n in batch["attention_mask"].sum(1))


@pytest.fixture(scope="module")
def student():
    """It reads 160 tokens."""
    return make_student(SITES, max_position_embeddings=160)


@pytest.fixture(scope="module")
def texts():
    """As sentences are: shorter than 128 tokens, and of half the vocabulary."""
    batches = [as_numpy(make_batch([9, 124, 4], 124)), as_numpy(make_batch([30, 2], 30, seed=1))]
    return [{**batch, "input_ids": batch["input_ids"] % 50} for batch in batches]


@pytest.fixture(scope="module")
def oracle(student, texts):
    return run_oracle(student, texts, random=random_ids.draw(student, 160, 32))


@pytest.mark.parametrize(
    ("longest", "wanted"),
    [
        (4, [1, 2, 3, 4]),
        (33, [1, 2, 3, 15, 16, 17, 31, 32, 33]),
        (64, [1, 2, 3, 15, 16, 17, 31, 32, 33, 63, 64]),
        (160, [1, 2, 3, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 160]),
        (8192, [1, 2, 3, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 2048]),
    ],
)
def test_lengths_go_around_tiles_and_up_to_the_longest_text(student, longest, wanted):
    batches = random_ids.draw(student, longest, 4)
    assert lengths(batches) == wanted
    assert max(len(batch["input_ids"]) for batch in batches) <= 4


def test_rows_of_large_models_are_shorter(student, monkeypatch):
    monkeypatch.setattr(random_ids, "LONGEST_FLOPS", student.flops(np.array([100]))[0])
    assert max(lengths(random_ids.draw(student, 160, 32))) == 100


def test_ids_are_of_the_whole_vocabulary_and_rows_such_as_users_may_send(student):
    batches = random_ids.draw(student, 160, 32)
    live = np.concatenate([batch["input_ids"][batch["attention_mask"] == 1] for batch in batches])
    assert {*live} == {*range(97)} - {student.pad_id}
    assert len({*live[:96]}) == 96  # none twice, before all have come
    for batch in batches:
        for types_, mask in zip(batch["token_type_ids"], batch["attention_mask"]):
            row = types_[mask == 1]
            assert row[0] == 0
            assert (np.diff(row) >= 0).all()
            assert row[-1] <= 1
    again = random_ids.draw(student, 160, 32)
    assert all(np.array_equal(a[name], b[name]) for a, b in zip(batches, again) for name in a)
    assert "token_type_ids" not in random_ids.draw(make_encoder("roberta"), 64, 32)[0]


@pytest.mark.parametrize(("table", "row"), [("position_embeddings", 128), ("word_embeddings", 90)])
def test_what_texts_do_not_show_random_rows_do(student, texts, oracle, table, row):
    """Two positions beyond 128 swapped, and two tokens that are in no text."""
    wrong = copy.deepcopy(student)
    weight = wrong.bert.embeddings.get_submodule(table).weight
    weight[[row, row + 1]] = weight[[row + 1, row]]
    assert compare(run_oracle(student, texts), PackedEngine(wrong)).failure is None
    assert re.match("logits: off by|kept tokens differ", compare(oracle, PackedEngine(wrong)).failure)


def test_random_rows_have_no_answers(student, texts, oracle):
    """They decide how close outputs are, and nothing that is said of texts."""
    alone = run_oracle(student, texts)
    parity, answers = judged(oracle, PackedEngine(student))
    assert (parity.rows, parity.rows_compared, len(answers)) == (21, 21, 5)
    assert len(oracle.answers) == len(alone.answers) == 5
    assert oracle.retention == alone.retention
    assert oracle.of_texts.rows == 5
    assert for_precision(oracle, typed(student, "bf16"), "bf16").loss.texts == 5

    class Wrong(PackedEngine):
        def run(self, batch):
            found = super().run(batch)
            if not any(np.array_equal(batch["input_ids"], text["input_ids"]) for text in texts):
                found["logits"] = -found["logits"]
            return found

    parity = compare(oracle, Wrong(student))
    assert "logits: off by" in parity.failure
    assert parity.prediction_agreement == 1


def test_kept_tokens_that_agree_are_of_texts_alone(student, texts, oracle):
    class Other(PackedEngine):
        def run(self, batch):
            found = super().run(batch)
            if not any(np.array_equal(batch["input_ids"], text["input_ids"]) for text in texts):
                found["kept_site"] = np.where(found["kept_site"] >= 0, len(SITES), found["kept_site"])
            return found

    assert compare(oracle, Other(student)).kept_token_agreement == 1


def test_random_rows_alone_are_no_verdict(student, oracle):
    """Where an engine answered no text itself, its answers to random rows prove nothing."""
    texts = iter([False] * len(oracle.batches))
    batches = iter(batch for part in oracle.parts for batch in part.batches)
    parity, _ = judged(
        oracle, PackedEngine(student), own=lambda: np.full(len(next(batches).kept_site), next(texts, True))
    )
    assert parity.rows_compared > 0
    assert "could be compared" in parity.failure


def test_an_overflow_of_random_ids_alone_says_so(student, texts):
    wild = copy.deepcopy(student)
    wild.bert.embeddings.word_embeddings.weight[90:] = torch.inf
    with pytest.raises(
        VerificationError, match="on token ids drawn at random, .*on texts alone, type: --verify-data FILE"
    ):
        run_oracle(wild, texts, random=random_ids.draw(student, 160, 32))
    wild.bert.embeddings.word_embeddings.weight[:] = torch.inf
    with pytest.raises(VerificationError, match=r"in fp32 on this text, so no file can be compared with it$"):
        run_oracle(wild, texts, random=random_ids.draw(student, 160, 32))


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    path = tmp_path_factory.mktemp("tables") / "model.onnx"
    path.write_bytes(exported_graph(*SITES))
    return path


def test_a_file_with_another_embedding_is_refused(file, tmp_path):
    """Its token is in no row, and is found all the same."""
    student, name = make_student(SITES), "word_embeddings.weight"
    assert wrong_embeddings(file, student.get_input_embeddings().weight) is None
    model = ir.load(file)
    (value,) = (value for found, value in model.graph.initializers.items() if found.endswith(name))
    table = value.const_value.numpy().copy()
    table[[77, 80]] = table[[80, 77]]
    value.const_value = ir.tensor(table, name=value.name)
    assert "has no table" in wrong_embeddings(file, student.get_input_embeddings().weight[:, :-1])
    swapped = tmp_path / "model.onnx"
    ir.save(model, swapped)
    assert wrong_embeddings(swapped, student.get_input_embeddings().weight) == "has another embedding of token 77"
    batch = as_numpy(make_batch([9, 4], 9))
    batch["input_ids"] %= 50
    run = ExportContext(checkpoint=types.SimpleNamespace(student=student), work=tmp_path, profile={}, steps=Steps())
    target = TargetPlan(file=ModelFile(name="model.onnx"), spec=TargetSpec.parse("onnxruntime-cpu-fp32"))
    wrong = WrittenFile(file=target.file, path=swapped, oracle=run_oracle(student, [batch]))
    with pytest.raises(
        VerificationError, match=r"model\.onnx has another embedding of token 77\. Nothing was published"
    ):
        verify_targets(run, [target], {"model.onnx": wrong})
    found = verify_targets(run, [target], {"model.onnx": dataclasses.replace(wrong, path=file)})
    assert found.targets[str(target.spec)].status == "verified"
