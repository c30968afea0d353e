"""The student is a real transformers model."""

import copy
import subprocess
import sys

import pytest
import torch
from testbed import make_batch, make_encoder, make_student
from tolerances import assert_within_network
from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer, pipeline

from adtp_export import AdtpBertConfig, AdtpBertForSequenceClassification
from adtp_export.errors import InputError
from adtp_export.model.pruners import Seen


def test_importing_the_room_registers(demo):
    code = (
        "import sys, adtp_export.model; from transformers import AutoConfig; "
        "print(type(AutoConfig.from_pretrained(sys.argv[1])).__name__)"
    )
    assert subprocess.check_output([sys.executable, "-c", code, demo], text=True).strip() == "AdtpBertConfig"


def test_auto_classes(demo):
    assert isinstance(AutoConfig.from_pretrained(demo), AdtpBertConfig)
    assert isinstance(AutoModelForSequenceClassification.from_pretrained(demo), AdtpBertForSequenceClassification)


def test_a_class_refuses_students_of_another_format(tmp_path):
    """transformers would give it random retainers, and a note on stderr."""
    make_encoder("bert", "adtp").save_pretrained(tmp_path)
    with pytest.raises(InputError, match="of checkpoint format 2; load it with AutoModelForSequenceClassification"):
        AdtpBertForSequenceClassification.from_pretrained(tmp_path)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_round_trip(tmp_path, dtype):
    student = make_student(["0.ffn", "2.attention"], min_tokens=2).to(dtype)
    student.save_pretrained(tmp_path)
    again = AutoModelForSequenceClassification.from_pretrained(tmp_path, dtype=dtype).eval()
    assert again.config.prune_sites == ["0.ffn", "2.attention"]
    assert again.config.min_tokens == 2
    before, after = student.state_dict(), again.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    batch = make_batch([6, 2], 6)
    assert torch.equal(student.float()(**batch).logits, again.float()(**batch).logits)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("pruning", ["adtp", "schedule", "ltp", "top", "transkimmer"])
def test_pruners_decide_in_fp32(dtype, pruning):
    """`from_pretrained` keeps the stored dtype from transformers 5 on; decisions must not become coarser by that."""
    model = make_encoder("bert", pruning)
    stored = next(iter(model.to(dtype).pruners.values()))
    exact = copy.deepcopy(stored).float()
    states = torch.randn(2, 6, 32, dtype=dtype)
    lengths = torch.tensor([6, 2])
    seen = [Seen(x, x[:, 0], lengths, lengths, torch.rand(2, 6)) for x in (states, states.float())]
    for coarse, fine in zip(seen, [seen[1]._replace(received=seen[0].received)]):
        low, high = stored(coarse), exact(fine)
        assert low.order.dtype == torch.float32
        torch.testing.assert_close(low.order, high.order, rtol=1e-6, atol=1e-6)


def test_weight_names_are_the_contract():
    names = {n for n in make_student(["1.attention"]).state_dict() if "layer.1" in n or "retainers" in n}
    site = "bert.encoder.retainers.1_attention"
    assert {f"{site}.ratio_predictor.weight", f"{site}.saliency_predictor.2.bias"} <= names
    assert "bert.encoder.layer.1.attention.self.query.weight" in names
    assert not any("permille" in n for n in names)


def test_dense_weights_are_berts():
    """Everything but the retainers has the names and shapes of transformers' BERT, so students start from one."""
    from transformers import BertConfig, BertForSequenceClassification

    student = make_student([])
    config = BertConfig(
        **{k: v for k, v in student.config.to_dict().items() if k not in ("model_type", "architectures")}
    )
    bert = BertForSequenceClassification(config).eval()
    shapes = {n: t.shape for n, t in bert.state_dict().items()}
    assert shapes == {n: t.shape for n, t in student.state_dict().items()}
    bert.load_state_dict(student.state_dict())
    batch = make_batch([9, 4, 1], 9)
    assert_within_network(bert, batch, bert(**batch).logits, student(**batch).logits)


def test_the_loss_of_questions_is_transformers():
    model, batch = make_encoder("bert", "none", head="spans").double(), make_batch([6, 6], 6)
    ends = {"start_positions": torch.tensor([1, 4]), "end_positions": torch.tensor([3, 4])}
    torch.testing.assert_close(model(**batch, **ends).loss, model.dense(**batch, **ends).loss)


def test_pipeline(demo):
    model = AutoModelForSequenceClassification.from_pretrained(demo)
    classify = pipeline("text-classification", model=model, tokenizer=AutoTokenizer.from_pretrained(demo))
    answers = classify(["a wonderful film , truly brilliant", "the food was terrible and cold"], batch_size=2)
    assert [a["label"] for a in answers] == ["positive", "negative"]
