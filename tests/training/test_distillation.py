"""The student in training is the student that is exported, and its loss has the right gradients."""

import dataclasses

import pytest
import torch
from testbed import TINY_BERT, make_batch
from transformers import AutoModelForSequenceClassification, BertConfig, BertForSequenceClassification

from adtp_export.data.tokenize import TokenizedText
from adtp_export.model import AdtpBertForSequenceClassification
from adtp_export.model.selection import kept_count
from adtp_export.training.data import Examples
from adtp_export.training.evaluate import judge
from adtp_export.training.judgement import one_ratio
from adtp_export.training.methods.adtp import Distillation
from adtp_export.training.models import make_student
from adtp_export.training.settings import TrainOptions

LENGTHS, PADDED = [9, 1, 14, 6], 14
SETTINGS = TrainOptions(prune_sites="0.ffn,2.attention", retention="0.5")


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
    assert len(trace.decisions) == 2
    for number, decision in enumerate(trace.decisions):
        assert (expected.kept_site == number).any()
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
        assert "_predictor" in name or packed[name].any(), name


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
        assert abs(losses[0] - losses[1]) / 2e-6 > 1e-3
        assert (losses[0] - losses[1]) / 2e-6 == pytest.approx((parameter.grad * direction).sum().item(), rel=1e-4)


@pytest.mark.parametrize(
    ("change", "gone"),
    [
        ({"ablate": "arp"}, "ratio_predictor"),
        ({"ablate": "tsp"}, "saliency_predictor"),
        ({"method": "random"}, "saliency_predictor"),
        ({"ablate": "ce,logit,ig"}, "classifier"),
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
    whole = make().train()
    whole.progress = 0.5
    whole(**batch, **view)["loss"].backward()
    taught = [name for name, p in whole.student.named_parameters() if p.grad is not None and p.grad.any()]
    assert any(gone in name for name in taught)


def test_without_a_teacher_the_result_does_not_depend_on_it():
    model = make(dataclasses.replace(SETTINGS, ablate="teacher"), num_labels=3)
    batch, view = make_inputs()
    view["teacher_logits"] = torch.randn(len(LENGTHS), 3, dtype=torch.float64)
    other = {**view, "teacher_logits": -view["teacher_logits"], "attribution": view["attribution"].flip(0)}
    torch.testing.assert_close(model(**batch, **view)["loss"], model(**batch, **other)["loss"])
    taught = make(num_labels=3)
    assert abs(taught(**batch, **view)["loss"] - taught(**batch, **other)["loss"]) > 0.01


def test_guided_cuts_keep_the_tokens_of_highest_attribution():
    model = make(dataclasses.replace(SETTINGS, prune_sites="0.ffn"))
    batch, view = make_inputs()
    trace = model.begin(batch["attention_mask"], view["attribution"])
    model.run(batch, trace)
    decision = trace.decisions[0]
    assert trace.candidates(decision).sum(1).tolist() == [n - 1 for n in LENGTHS]
    assert not trace.candidates(decision)[:, 0].any()
    kept = set(decision.origin[decision.rows].tolist())
    compared = 0
    for row, n in enumerate(LENGTHS):
        chosen = {place - row * PADDED for place in kept if place // PADDED == row} - {0}
        dropped = set(range(1, n)) - chosen
        attribution = view["attribution"][row]
        if chosen and dropped:
            assert min(attribution[i] for i in chosen) > max(attribution[i] for i in dropped)
            compared += 1
    assert compared == 3  # all but the text of one token


@pytest.mark.parametrize("kind", [{"ratio": "static"}, {"method": "random"}])
def test_a_fixed_ratio_is_the_same_for_all_texts(kind):
    model = make(TrainOptions(**kind, retention="0.3", min_tokens=2))
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
    assert same == ("ratio" in kind)


def test_each_site_of_a_schedule_has_its_own_ratio():
    model = make(TrainOptions(ratio="static", prune_sites="0.ffn,2.attention", retention="0.8,0.5"))
    batch, _ = make_inputs()
    trace = model.begin(batch["attention_mask"])
    model.run(batch, trace)
    first = [-(-n * 800 // 1000) for n in LENGTHS]
    assert trace.decisions[0].rule.count.tolist() == first
    assert trace.decisions[1].rule.count.tolist() == [-(-n * 500 // 1000) for n in first]


@pytest.mark.parametrize("guided", [True, False])
def test_ratios_are_taught_and_guided_with_the_floor_of_kept_tokens(guided):
    """Of 14 tokens with a floor of 6, the lowest ratio keeps 6, which hold the share; without a floor 0.4 is needed."""
    model = make(
        TrainOptions(
            prune_sites="0.ffn", retention="0.5", retention_ratios="10", min_tokens=6, teacher_forced_share=0.2
        )
    )
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


@pytest.mark.parametrize(
    ("ratio", "low", "alone"), [("adaptive", 1e3, True), ("adaptive", 0, False), ("static", 0, False)]
)
def test_what_each_text_keeps_is_judged_in_the_order_of_the_texts(ratio, low, alone):
    """And where all keep one ratio, that is seen: with rounded counts no shares of tokens would tell."""
    ratios = {"retention_ratios": "0.25,0.5,0.75,1.0"} if ratio == "adaptive" else {}
    model = make(TrainOptions(ratio=ratio, retention="0.5", **ratios))
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(2, 30, (150,), generator=generator).tolist()
    encoded = [TokenizedText(torch.randint(1, 97, (n,), generator=generator).tolist(), [0] * n, False) for n in lengths]
    rows = Examples(encoded=encoded, labels=[0, 1] * 75, pad_id=0)
    if ratio == "adaptive":
        predictor = model.student.pruners["0_ffn"].ratio_predictor
        predictor.weight.data *= 30  # so that texts differ
        predictor.bias.data[0] = low
    judged = judge(model, rows)
    assert judged.alive[0].tolist() == lengths
    for number in (0, 70, 149):
        one = rows.collate([number])
        logits = model.student(**{name: one[name] for name in ("input_ids", "attention_mask")}).logits[0]
        torch.testing.assert_close(judged.answers[number].double(), logits, atol=1e-5, rtol=1e-5)
    if ratio == "static":
        assert judged.ratios == {}
        return
    (chosen,) = judged.chosen.values()
    for kept, came, share in zip(judged.alive[1].tolist(), lengths, chosen.tolist()):
        assert kept == kept_count(torch.tensor([came]), round(1000 * share), 1).item()
    shares = judged.ratios["0.ffn"]
    assert sum(shares.values()) == pytest.approx(1)
    assert one_ratio(judged.ratios) == ({"0.ffn": "0.25"} if alone else {})
    assert (shares == {"0.25": 1.0}) == alone


def test_the_share_moves_towards_the_wanted_retention():
    for wanted, up in (("0.99", True), ("0.01", False)):
        model = make(dataclasses.replace(SETTINGS, retention=wanted)).train()
        before = model.share.clone()
        model.progress = 0.5
        batch, view = make_inputs()
        model(**batch, **view)
        assert ((model.share > before) == up).all()


def test_what_training_rows_keep_more_than_dev_rows_is_added_to_the_wanted_retention():
    model = make().train()
    model.progress = 0.5
    batch, view = make_inputs()
    model.meet_on_dev([0.1, 0.1])
    assert not model.surplus.any()  # nothing is known yet of training rows
    model(**batch, **view)
    kept = model.kept.clone()
    assert (kept > 0).all()
    model.meet_on_dev([0.1, 0.2])
    torch.testing.assert_close(model.surplus, kept - torch.tensor([0.1, 0.2], dtype=torch.float64))
    before = model.share.clone()
    trace = model.begin(batch["attention_mask"])
    model.run(batch, trace)
    given = torch.stack([d.rule.count.sum() / d.lengths.sum() for d in trace.decisions]).double()
    model._control(trace)
    torch.testing.assert_close(model.share, before + 0.01 * (0.5 + model.surplus - given))


@pytest.mark.parametrize("ratio", ["adaptive", "static"])
def test_the_floor_of_kept_tokens_reaches_the_cut_and_the_checkpoint(ratio, tmp_path):
    ratios = {"retention_ratios": "0.1,1.0"} if ratio == "adaptive" else {}
    model = make(TrainOptions(ratio=ratio, retention="0.1", min_tokens=6, **ratios))
    if ratio == "adaptive":
        model.student.pruners["0_ffn"].ratio_predictor.bias.data[0] = 1e3  # always the lowest
    batch, _ = make_inputs()
    trace = model.begin(batch["attention_mask"])
    model.run(batch, trace)
    floor = [min(n, 6) for n in LENGTHS]
    assert trace.decisions[0].cu_seqlens.diff().tolist() == floor
    model.student.save_pretrained(tmp_path)
    written = AutoModelForSequenceClassification.from_pretrained(tmp_path)
    assert (written(**batch).kept_site == 1).sum(1).tolist() == floor


def test_a_score_is_learned_by_squared_errors():
    """Regression: both errors of the output, and attribution of the output itself, whatever the teacher's class."""
    settings = dataclasses.replace(SETTINGS, beta=3.0, alpha=0.25, ablate="arp,tsp")
    model = make(settings, num_labels=1)
    batch, view = make_inputs()
    view["labels"] = torch.tensor([0.5, 3.0, 1.0, 2.0])
    view["teacher_logits"] = torch.tensor([[1.0], [2.5], [0.0], [2.0]], dtype=torch.float64)
    output = model.student(**batch).logits[:, 0]
    found = model(**batch, **view)
    torch.testing.assert_close(found["ce"], (output - view["labels"]).square().mean())
    torch.testing.assert_close(found["logit"], (output - view["teacher_logits"][:, 0]).square().mean())
    torch.testing.assert_close(found["loss"], 0.75 * found["ce"] + 0.25 * found["logit"] + 3 * found["ig"])
    embeddings = model.student.get_input_embeddings()
    seen = []
    handle = embeddings.register_forward_hook(lambda module, given, output: seen.append(output.requires_grad_()))
    (gradient,) = torch.autograd.grad(model.student(**batch).logits.sum(), seen)
    handle.remove()
    expected = (gradient * seen[0]).square().sum(-1).sqrt() * batch["attention_mask"]
    expected = expected / expected.norm(dim=1, keepdim=True)
    torch.testing.assert_close(found["ig"], (expected - view["attribution"]).square().sum(1).mean())


def test_the_share_does_not_move_while_the_teacher_makes_the_cuts():
    model = make(dataclasses.replace(SETTINGS, teacher_forced_share=0.2)).train()
    batch, view = make_inputs()
    for progress, seen in ((0.0, 0), (0.19, 0), (0.2, 1), (0.9, 2)):
        model.progress = progress
        before = model.share.clone()
        model(**batch, **view)
        assert model.seen == seen
        assert torch.equal(model.share, before) == (progress < 0.2)


def test_the_path_of_attribution_keeps_the_cuts_of_the_whole_text():
    model = make(dataclasses.replace(SETTINGS, ig_steps=3))
    asked = []
    for pruner in model.student.pruners.values():
        pruner.register_forward_hook(lambda *arguments: asked.append(1))
    batch, _ = make_inputs()
    trace = model.begin(batch["attention_mask"])
    model.attribute(batch, trace, None, False)
    assert len(asked) == len(trace.decisions) == 2


def test_attention_is_dropped_in_training():
    model = make(attention_probs_dropout_prob=0.9).train()
    batch, _ = make_inputs()
    first, second = (model.run(batch, model.begin(batch["attention_mask"])) for _ in range(2))
    assert not torch.allclose(first, second)


@pytest.mark.parametrize("guided", [False, True])
@pytest.mark.parametrize("method", ["adtp", "random"])
def test_cuts_tighten_over_the_warmup(method, guided):
    """From all tokens to what the student keeps; only in training, and the pruners are supervised as ever."""
    model = make(dataclasses.replace(SETTINGS, method=method, prune_sites="0.ffn", cut_warmup=0.4))
    batch, view = make_inputs()
    guide = view["attribution"] if guided and method == "adtp" else None

    def kept(training, progress):
        model.train(training).progress = progress
        trace = model.begin(batch["attention_mask"], guide)
        model.run(batch, trace)
        return trace.decisions[0].cu_seqlens.diff()

    final = kept(False, 0.0)
    assert (final < torch.tensor(LENGTHS)).any()
    assert kept(True, 0.0).tolist() == LENGTHS
    assert torch.equal(kept(True, 0.2), final + ((torch.tensor(LENGTHS) - final) / 2).round().long())
    assert torch.equal(kept(True, 0.4), final)
    assert torch.equal(kept(True, 1.0), final)
