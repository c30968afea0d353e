"""The student in training is the student that is exported, and its loss has the right gradients."""

import dataclasses

import pytest
import torch
from conftest import TINY_BERT, flat_kept, make_batch, make_encoder
from transformers import BertConfig, BertForSequenceClassification

from adtp_export.model import AdtpBertForSequenceClassification
from adtp_export.model.packed import PackedStudent
from adtp_export.training.distillation import DifferentiableAttention, Distillation
from adtp_export.training.models import make_student
from adtp_export.training.settings import Settings

LENGTHS, PADDED = [9, 1, 14, 6], 14
SETTINGS = Settings(prune_sites="0.ffn,2.attention", retention="0.5")


def make(settings=SETTINGS, **overrides):
    fields = {**TINY_BERT, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, **overrides}
    torch.manual_seed(0)
    student = make_student(BertForSequenceClassification(BertConfig(**fields)), settings).double()
    return Distillation(student, settings, [0.6] * len(settings.sites)).eval()


def make_inputs(seed=0):
    batch = make_batch(LENGTHS, PADDED, seed=seed)
    attribution = torch.rand(len(LENGTHS), PADDED, dtype=torch.float64) * batch["attention_mask"]
    logits = torch.randn(len(LENGTHS), 2, dtype=torch.float64)
    labels = torch.tensor([0, 1, 1, 0])
    return batch, {
        "labels": labels,
        "teacher_logits": logits,
        "attribution": attribution / attribution.norm(dim=1)[:, None],
    }


@pytest.mark.parametrize("ratio", ["adaptive", "static"])
def test_answers_and_cuts_are_the_oracles(ratio):
    model = make(dataclasses.replace(SETTINGS, ratio=ratio))
    assert isinstance(model.student, AdtpBertForSequenceClassification) == (ratio == "adaptive")  # format 1, or 2
    batch, _ = make_inputs()
    trace = model.begin(batch["attention_mask"])
    logits = model.run(batch, trace)
    expected = model.student(**batch)
    torch.testing.assert_close(logits, expected.logits)
    for number, decision in enumerate(trace.decisions):
        kept = torch.zeros(batch["input_ids"].numel(), dtype=torch.bool)
        kept[decision.origin[decision.rows]] = True
        assert torch.equal(kept.view(batch["input_ids"].shape), expected.kept_site > number)


def test_gradients_are_those_of_the_padded_student():
    model = make()
    batch, view = make_inputs()
    torch.nn.functional.cross_entropy(model.run(batch, model.begin(batch["attention_mask"])), view["labels"]).backward()
    packed = {name: p.grad for name, p in model.student.named_parameters()}
    model.zero_grad(set_to_none=True)
    model.student(**batch, labels=view["labels"]).loss.backward()
    for name, parameter in model.student.named_parameters():
        torch.testing.assert_close(packed[name], parameter.grad, msg=name)


def test_the_whole_loss_has_the_gradient_of_finite_differences():
    """L_IG is a loss on a gradient: this is what tells that the second derivative is there, and right."""
    model = make(dataclasses.replace(SETTINGS, beta=3.0, ig_steps=2))
    model.progress = 0.0  # no share of the student's own attribution: the supervision is held constant
    batch, view = make_inputs()
    model(**batch, **view)["loss"].backward()
    generator = torch.Generator().manual_seed(0)
    for parameter in (
        model.student.backbone.attention(1).projections[0].weight,
        model.student.get_input_embeddings().weight,
        model.student.pruners["0_ffn"].saliency_predictor[0].weight,
    ):
        direction = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        step = 1e-6 * direction
        losses = []
        for sign in (1, -1):
            with torch.no_grad():
                parameter += sign * step
            losses.append(model(**batch, **view)["loss"].item())
            with torch.no_grad():
                parameter -= sign * step
        assert (losses[0] - losses[1]) / 2e-6 == pytest.approx((parameter.grad * direction).sum().item(), rel=1e-4)


@pytest.mark.parametrize(
    ("change", "gone"),
    [
        ({"without": "arp"}, "ratio_predictor"),
        ({"without": "tsp"}, "saliency_predictor"),
        ({"ratio": "random"}, "saliency_predictor"),
        ({"without": "ce,logit,ig"}, "classifier"),
        ({"gamma": 0.0}, "retainers"),
    ],
)
def test_a_term_left_out_teaches_nothing(change, gone):
    model = make(dataclasses.replace(SETTINGS, **change)).train()
    batch, view = make_inputs()
    model.progress = 0.5
    model(**batch, **view)["loss"].backward()
    untaught = {name: p for name, p in model.student.named_parameters() if gone in name}
    assert untaught
    for name, parameter in untaught.items():
        assert parameter.grad is None or not parameter.grad.any(), name
    assert any(p.grad is not None and p.grad.any() for p in model.parameters())


def test_without_a_teacher_the_result_does_not_depend_on_it():
    model = make(dataclasses.replace(SETTINGS, without="teacher"))
    batch, view = make_inputs()
    other = {**view, "teacher_logits": -view["teacher_logits"], "attribution": view["attribution"].flip(0)}
    torch.testing.assert_close(model(**batch, **view)["loss"], model(**batch, **other)["loss"])


def test_guided_cuts_keep_the_tokens_of_highest_attribution():
    model = make(dataclasses.replace(SETTINGS, prune_sites="0.ffn"))
    batch, view = make_inputs()
    trace = model.begin(batch["attention_mask"], view["attribution"])
    model.run(batch, trace)
    decision = trace.decisions[0]
    kept = set(decision.origin[decision.rows].tolist())
    for row, n in enumerate(LENGTHS):
        chosen = {place - row * PADDED for place in kept if place // PADDED == row} - {0}
        dropped = set(range(1, n)) - chosen
        attribution = view["attribution"][row]
        if chosen and dropped:
            assert min(attribution[i] for i in chosen) > max(attribution[i] for i in dropped)


@pytest.mark.parametrize("ratio", ["static", "random"])
def test_a_fixed_ratio_is_the_same_for_all_texts(ratio):
    model = make(Settings(ratio=ratio, retention="0.3", min_tokens=2))
    assert model.student.config.pruning == {
        "method": "schedule",
        "sites": ["0.ffn"],
        "ratios": [0.3],
        "order": "saliency",
        "saliency_hidden_size": 96,
        "min_tokens": 2,
    }
    batch, _ = make_inputs()
    traces = [model.begin(batch["attention_mask"]) for _ in range(2)]
    for trace in traces:
        model.run(batch, trace)
    kept = [min(n, max(2, -(-n * 300 // 1000))) for n in LENGTHS]
    assert traces[0].decisions[0].rule.count.tolist() == kept
    assert traces[0].decisions[0].cu_seqlens.diff().tolist() == kept
    same = torch.equal(traces[0].decisions[0].rows, traces[1].decisions[0].rows)
    assert same == (ratio == "static")


def test_each_site_of_a_schedule_has_its_own_ratio():
    model = make(Settings(ratio="static", prune_sites="0.ffn,2.attention", retention="0.8,0.5"))
    batch, _ = make_inputs()
    trace = model.begin(batch["attention_mask"])
    model.run(batch, trace)
    first = [-(-n * 800 // 1000) for n in LENGTHS]
    assert trace.decisions[0].rule.count.tolist() == first
    assert trace.decisions[1].rule.count.tolist() == [-(-n * 500 // 1000) for n in first]


@pytest.mark.parametrize("guided", [True, False])
def test_ratios_are_taught_and_guided_with_the_floor_of_kept_tokens(guided):
    """Of 14 tokens with a floor of 6, the lowest ratio keeps 6, which hold the share; without a floor 0.4 is needed."""
    model = make(Settings(prune_sites="0.ffn", retention="0.5", retention_ratios="10", min_tokens=6, guided=0.2))
    model.share.fill_(0.5)
    batch = make_batch([14], 14)
    even = torch.ones(1, 14, dtype=torch.float64) / 14**0.5
    even[0, 5:] *= 0.1  # tokens 1 to 4 hold more than half, tokens 1 and 2 do not
    view = {"labels": torch.tensor([0]), "teacher_logits": torch.zeros(1, 2).double(), "attribution": even}
    if guided:
        trace = model.begin(batch["attention_mask"], even)
        model.run(batch, trace)
        assert trace.decisions[0].cu_seqlens.tolist() == [0, 6]
        return
    trace = model.begin(batch["attention_mask"])
    model.run(batch, trace)
    lowest = torch.nn.functional.cross_entropy(trace.decisions[0].rule.choice, torch.tensor([0]))
    torch.testing.assert_close(model(**batch, **view)["arp"], lowest.detach())


@pytest.mark.parametrize("pruning", ["adtp", "ltp", "schedule", "schedule-received"])
def test_attention_with_gradients_says_what_each_token_received(pruning):
    student = make_encoder(pruning=pruning).double()
    batch = make_batch(LENGTHS, PADDED)
    expected = student(**batch)
    logits, rows = PackedStudent(student, DifferentiableAttention)(**batch)
    torch.testing.assert_close(logits, expected.logits)
    kept = flat_kept(rows, tuple(batch["input_ids"].shape), len(student.site_names))
    assert kept.tolist() == expected.kept_site.tolist()
    assert (kept < len(student.site_names)).any()


def test_the_share_moves_towards_the_wanted_retention():
    for wanted, up in (("0.99", True), ("0.01", False)):
        model = make(dataclasses.replace(SETTINGS, retention=wanted)).train()
        before = model.share.clone()
        model.progress = 0.5
        batch, view = make_inputs()
        model(**batch, **view)
        assert ((model.share > before) == up).all()
