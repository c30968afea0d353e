"""Students of a causal model of vectors: trained by every method from a sentence-transformers directory, exported and verified."""

import json
import random
import shutil

import pytest
import torch
from decoder_models import SHAPE
from plain_models import add_tokenizer, edit_json, write_json
from transformers import Qwen3Config, Qwen3Model

import adtp_export
from adtp_export.imports import open_checkpoint
from adtp_export.pipeline.train.train import train
from adtp_export.training.settings import TrainOptions
from adtp_export.training.task import read_task

pytest.importorskip("accelerate")

WORDS = ["the", "room", "was", "small", "and", "clean", "hotel", "near", "station", "great"]
METHODS = {
    "adtp": "1.attention",
    "schedule": "0.ffn",
    "ltp": "0.ffn,1.ffn",
    "top": "1.attention",
    "transkimmer": "1.attention",
}
FAST = {
    "task": "embedding",
    "max_tokens": 24,
    "dev_share": 0.2,
    "batch_size": 8,
    "epochs": 3,
    "evaluations": 1,
    "flops": 0.7,
}


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    """Qwen3's shape with random weights; its vector is the last token's state, of length 1."""
    directory = tmp_path_factory.mktemp("qwen3")
    torch.manual_seed(0)
    sizes = {**SHAPE, "vocab_size": 1238, "num_hidden_layers": 3, "head_dim": 16}
    Qwen3Model(Qwen3Config(**sizes)).save_pretrained(directory)
    kinds = {"": "Transformer", "1_Pooling": "Pooling", "2_Normalize": "Normalize"}
    modules = [
        {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for i, (path, kind) in enumerate(kinds.items())
    ]
    write_json(directory / "modules.json", modules)
    pooling = {"word_embedding_dimension": 32, "pooling_mode_lasttoken": True, "pooling_mode_mean_tokens": False}
    write_json(directory / "1_Pooling" / "config.json", pooling)
    return add_tokenizer(directory)


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    path, rng = tmp_path_factory.mktemp("texts"), random.Random(0)
    for name, count in (("train", 48), ("test", 12)):
        rows = (json.dumps({"text": " ".join(rng.choices(WORDS, k=rng.randint(1, 18)))}) for _ in range(count))
        (path / f"{name}.jsonl").write_text("\n".join(rows))
    return path


@pytest.mark.parametrize(
    "method", ["adtp", *(pytest.param(method, marks=pytest.mark.slow) for method in METHODS if method != "adtp")]
)
def test_a_student_meets_its_budget_and_keeps_both_ends(teacher, texts, tmp_path, method):
    data = {"train": str(texts / "train.jsonl"), "test": str(texts / "test.jsonl"), "teacher": str(teacher)}
    record = train(tmp_path / "out", method=method, prune_sites=METHODS[method], **data, **FAST)
    assert record["student"]["flops_reduction"]["packed"] > 1
    assert all(0 < kept < 1 for kept in record["student"]["retention"].values())
    student = open_checkpoint(tmp_path / "out").student
    assert (student.config.method, student.settings.pooling, student.keeps_last) == (method, "last", True)
    ids = torch.randint(4, 1238, (2, 20), generator=torch.Generator().manual_seed(0))
    kept = student(ids).kept_site == len(student.site_names)
    assert kept[:, [0, -1]].all()


@pytest.mark.slow
def test_a_trained_student_is_exported_and_verified(teacher, texts, tmp_path):
    data = {"train": str(texts / "train.jsonl"), "test": str(texts / "test.jsonl"), "teacher": str(teacher)}
    record = train(tmp_path / "out", method="schedule", prune_sites="0.ffn,1.ffn", **data, **FAST)
    manifest = adtp_export.export(tmp_path / "out", tmp_path / "export")
    assert manifest.targets["onnxruntime-cpu-fp32"].status == "verified"
    rows = [json.loads(line)["text"] for line in (texts / "test.jsonl").read_text().splitlines()]
    found = torch.from_numpy(adtp_export.load(tmp_path / "export").encode(rows))
    expected = torch.from_numpy(adtp_export.load(unpruned(teacher, tmp_path)).encode(rows))
    cosine = torch.nn.functional.cosine_similarity(found, expected).mean().item()
    assert cosine == pytest.approx(record["student"]["cosine"])


def unpruned(teacher, tmp_path):
    adtp_export.export(teacher, tmp_path / "teacher", skip_parity_check=True)
    return tmp_path / "teacher"


@pytest.mark.parametrize("pad_of_config", [None, 0])
def test_a_classifier_finds_the_last_token_by_what_batches_are_padded_with(teacher, tmp_path, pad_of_config):
    """Real configurations name no token to pad with, or another one than their tokenizer."""
    base, file = tmp_path / "base", tmp_path / "rows.tsv"
    shutil.copytree(teacher, base, ignore=lambda folder, names: [name for name in names if name == "modules.json"])
    edit_json(base / "config.json", pad_token_id=pad_of_config)
    file.write_text("sentence\tlabel\n" + "".join(f"{' '.join(WORDS[: 1 + i % 9])}\t{i % 2}\n" for i in range(40)))
    task = read_task(TrainOptions(base=str(base), train=str(file), max_tokens=24, prune_sites="0.ffn"))
    model, rows = task.load_teacher(task.source, tuned=False).eval(), task.parts["train"]
    some = sorted(range(len(rows)), key=lambda number: rows.lengths[number])
    with torch.no_grad():
        together = task.objective.ask(model, rows.collate([some[0], some[-1]]))[0]
        torch.testing.assert_close(together, task.objective.ask(model, rows.collate(some[:1]))[0])
