"""Gates: hard ones are true removal, soft ones have the right gradients, and what decides learns through them."""

import pytest
import torch
from decoder_models import DECODERS, make_decoder
from testbed import HEAD_FIELDS, TINY_BERT, make_batch, make_encoder
from transformers import BertConfig, BertForSequenceClassification

from adtp_export.data.tokenize import TokenizedText
from adtp_export.model.padded import layers_read
from adtp_export.training.data import Examples
from adtp_export.training.evaluate import judge
from adtp_export.training.losses import rank_loss
from adtp_export.training.methods import for_method, gated
from adtp_export.training.methods.top import likely, sample
from adtp_export.training.models import make_student
from adtp_export.training.settings import TrainOptions

LENGTHS, PADDED = [9, 1, 14, 6], 14
SITES = {"ltp": "0.ffn,2.ffn", "top": "1.attention,2.attention", "transkimmer": "0.attention,2.attention"}


def make_any(name, pruning, head="sequence", **fields):
    model = make_decoder(name, head, pruning) if name in DECODERS else make_encoder(name, pruning, head=head, **fields)
    return model.double()


def last(student, batch):
    """The tokens that stay beside the first."""
    return student.read_token(batch["input_ids"], batch["attention_mask"].bool()) if student.keeps_last else None


def hard_gates(student, also=None):
    """The pruners' own decisions, as gates."""

    def decide(pruner):
        def gate(seen, others):
            kept, first = others.clone(), torch.zeros(len(others), dtype=torch.int64)
            for anchor in (first,) if also is None else (first, also):
                kept = kept.scatter(1, anchor[:, None], True)
            stays = pruner(seen).keeping(also, first).padded(kept)
            return stays.to(seen.states.dtype), stays

        return gate

    return {key: decide(pruner) for key, pruner in student.pruners.items()}


def run_both(backbone, pruning, head="sequence"):
    student = make_any(backbone, pruning, head)
    batch = make_batch(LENGTHS, PADDED, types=2 if "token_type_ids" in student.input_names else 1)
    also = last(student, batch)
    passed = gated.run_gated(student.backbone, hard_gates(student, also), layers_read(student.pruners), batch, also)
    states, kept_site, _ = student.encode(batch["input_ids"], batch["attention_mask"], batch.get("token_type_ids"))
    return passed, states, kept_site


@pytest.mark.parametrize("backbone", ["bert", "mpnet", "deberta-v2", "modernbert", "qwen3", "mistral"])
@pytest.mark.parametrize("pruning", ["adtp", "ltp", "received-twice", "top", "transkimmer"])
def test_a_hard_gate_is_true_removal(backbone, pruning):
    passed, states, kept_site = run_both(backbone, pruning)
    live = kept_site >= 0
    torch.testing.assert_close(passed.states[live], states[live])
    for number, site in enumerate(passed.sites):
        assert torch.equal(site.kept, kept_site > number)
        assert torch.equal(site.gate, site.kept.double())
    assert ((kept_site >= 0) & (kept_site < len(passed.sites))).any()


@pytest.mark.parametrize(
    ("head", "backbone"),
    [*zip(HEAD_FIELDS, ["bert"] * 4), ("sequence", "modernbert"), ("sequence", "qwen3"), ("embedding", "qwen3")],
)
def test_heads_answer_behind_gates_as_behind_cuts(head, backbone):
    """Also where a head reads tokens that were dropped, and where it reads the mean."""
    student = make_any(backbone, "ltp", head, **HEAD_FIELDS[head])
    settings = TrainOptions(method="ltp", prune_sites="0.ffn,1.ffn,2.ffn", max_tokens=16, flops=0.6)
    model = for_method("ltp")(student, settings).eval()
    batch = make_batch(LENGTHS, PADDED, types=2 if "token_type_ids" in student.input_names else 1)
    hard = list(hard_gates(student, last(student, batch)).values())
    model.open = lambda number, pruner, seen, others: hard[number](seen, others)
    gates, cuts = model.through_gates(batch)[0], model.through_cuts(batch)[0]
    torch.testing.assert_close(gates, cuts)
    assert gates.abs().max() > 0.1


def test_attention_that_is_not_divided_anew_is_noticed(monkeypatch):
    monkeypatch.setattr(gated, "gated_softmax", lambda scores, gate: scores.softmax(-1) * gate)
    passed, states, kept_site = run_both("bert", "ltp")
    assert (passed.states - states)[kept_site >= 0].abs().max() > 1e-3


def test_a_closed_gate_cannot_push_the_others_to_zero():
    scores = torch.tensor([[300.0, 1.0, 0.0, -torch.inf]])
    gate = torch.tensor([[0.0, 1.0, 1.0, 0.0]])
    expected = torch.tensor([[1.0, 0.0]]).softmax(1)
    torch.testing.assert_close(gated.gated_softmax(scores, gate)[:, 1:3], expected)
    assert not gated.gated_softmax(scores, gate)[:, [0, 3]].any()
    assert not gated.gated_softmax(scores, torch.zeros(1, 4)).any()


def test_gates_have_the_gradient_of_finite_differences():
    """Open, half open and closed: a closed gate has a gradient, too, or nothing would open again."""
    student = make_encoder("bert", "ltp").double()
    for layer in range(3):
        student.backbone.attention(layer).projections[0].weight.mul_(0.01)  # no score is far above the others
    batch = make_batch(LENGTHS, PADDED)
    generator = torch.Generator().manual_seed(0)
    values = torch.rand(4, PADDED, generator=generator, dtype=torch.float64).mul(3).sub(1).clamp(0, 1)
    direction = torch.randn(4, PADDED, 32, generator=generator, dtype=torch.float64)

    def answer(gate):
        gates = {"0_ffn": lambda seen, kept: (gate, kept)}
        return (gated.run_gated(student.backbone, gates, {}, batch).states * direction).sum()

    values.requires_grad_()
    answer(values).backward()
    kinds = set()
    for row, column in ((0, 3), (0, 5), (0, 8), (2, 1), (2, 4), (2, 9), (3, 2), (3, 4)):
        high, low = values.detach().clone(), values.detach().clone()
        high[row, column] += 1e-6
        low[row, column] = max(0, low[row, column] - 1e-6)
        slope = (answer(high) - answer(low)).item() / (high - low)[row, column].item()
        assert values.grad[row, column].item() == pytest.approx(slope, rel=1e-3)
        assert abs(slope) > 1e-4
        kinds.add({0: "closed", 1: "open"}.get(values[row, column].item(), "half"))
    assert kinds == {"closed", "open", "half"}


def make(method, **change):
    """A method's model in double precision, in training without dropout, and a batch with a teacher's view."""
    torch.manual_seed(0)
    sites = SITES.get(method, "0.ffn,2.ffn")
    settings = TrainOptions(method=method, max_tokens=16, **{"prune_sites": sites, "flops": 0.6, **change})
    config = BertConfig(**TINY_BERT, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    student = make_student(BertForSequenceClassification(config), settings)
    more = [LENGTHS] if method == "top" else []
    model = for_method(method)(student, settings, *more).double().train()
    batch = make_batch(LENGTHS, PADDED)
    tokens = torch.rand(4, PADDED, dtype=torch.float64) * batch["attention_mask"]
    view = {"labels": torch.tensor([0, 1, 1, 0]), "teacher_logits": torch.randn(4, 2, dtype=torch.float64)}
    if method == "top":
        view["attribution"] = tokens
    return model, {**batch, **view}


def decisive(model, method):
    """What a method's gates are made of."""
    if method == "top":
        return [model.bins[1], model.switches]
    return [next(iter(p.parameters())) for p in model.student.pruners.values()]


@pytest.mark.parametrize("method", ["ltp", "top"])
def test_what_decides_has_the_gradient_of_finite_differences(method, monkeypatch):
    """Through gates, attention, the task's loss, and the term that presses towards the budget, whose weight is held still."""
    monkeypatch.setattr(gated, "RATE", 0.0)
    monkeypatch.setattr(gated, "GAIN", 0.0)
    model, batch = make(method)
    model.multiplier.fill_(0.7)
    for pruner in model.student.pruners.values():
        if method == "ltp":
            pruner.threshold.data.fill_(1 / 16)

    def loss():
        torch.manual_seed(1)  # the same samples of masks
        return model(**batch)["loss"]

    loss().backward()
    for parameter in decisive(model, method):
        direction = torch.randn(parameter.shape, dtype=torch.float64)
        losses = []
        for sign in (1, -1):
            with torch.no_grad():
                parameter += sign * 1e-7 * direction
                losses.append(loss().item())
                parameter -= sign * 1e-7 * direction
        slope = (losses[0] - losses[1]) / 2e-7
        assert abs(slope) > 1e-4
        assert (parameter.grad * direction).sum().item() == pytest.approx(slope, rel=1e-3)


def test_skimming_learns_through_samples_and_answers_without_noise():
    model, batch = make("transkimmer")
    first, second = (model(**batch)["open"].item() for _ in range(2))
    model(**batch)["loss"].backward()
    assert 0.5 < first < 1  # samples of tokens that all but surely stay
    assert first != second
    for parameter in decisive(model, "transkimmer"):
        assert parameter.grad.abs().max() > 1e-6
    model.eval()
    inputs = {name: batch[name] for name in ("input_ids", "attention_mask", "token_type_ids")}
    answers = [model.through_cuts(inputs)[0] for _ in range(2)]
    torch.testing.assert_close(*answers, rtol=0, atol=0)
    torch.testing.assert_close(answers[0], model.student(**inputs).logits)


@pytest.mark.parametrize("method", ["ltp", "top", "transkimmer", "schedule"])
def test_answers_and_counts_are_the_oracles(method):
    model, batch = make(method)
    if method == "ltp":
        for pruner in model.student.pruners.values():
            pruner.threshold.data.fill_(1 / 16)
    model.eval()
    inputs = {name: batch[name] for name in ("input_ids", "attention_mask", "token_type_ids")}
    answer, alive = model.through_cuts(inputs)
    expected = model.student(**inputs)
    torch.testing.assert_close(answer, expected.logits)
    for number, count in enumerate(alive):
        assert torch.equal(count, (expected.kept_site >= number).sum(1))


@pytest.mark.parametrize("method", ["ltp", "transkimmer"])
def test_what_gates_would_cut_is_what_cuts_cut(method):
    """The controller looks at that while gates are soft, or noisy; at the first site both have the same states before them."""
    model, batch = make(method)
    with torch.no_grad():
        for pruner in model.student.pruners.values():
            model.raise_bar(pruner, 0.06 if method == "ltp" else 3.0)
    inputs = {name: batch[name] for name in ("input_ids", "attention_mask", "token_type_ids")}
    _, sites = model.through_gates(inputs)
    expected = model.student(**inputs).kept_site > 0
    assert torch.equal(sites[0].kept, expected)
    assert 4 < expected.sum() < sum(LENGTHS)


def test_masks_are_as_likely_as_they_are_drawn():
    """4,000 draws: five standard deviations. A site that is switched off keeps all."""
    logits = torch.linspace(-3, 3, 7).expand(4000, 7)
    share, expected = (sample(logits) > 0).double().mean(0), likely(logits[0]).double()
    assert ((share - expected).abs() <= 5 * (expected * (1 - expected) / 4000).sqrt()).all()
    model, _ = make("top")
    with torch.no_grad():
        model.switches.copy_(torch.tensor([-50.0, 50.0]))
        model.bins[1].copy_(torch.linspace(-3, 3, 20))
    off, on = model.stays()
    torch.testing.assert_close(off, torch.ones_like(off))
    torch.testing.assert_close(on, likely(model.bins[1]))


def test_final_decisions_are_not_learned_on():
    model, batch = make("ltp")
    for progress, learned in ((0.0, True), (gated.SOFT - 0.01, True), (gated.SOFT, False), (0.99, False)):
        model.progress = progress
        model.zero_grad(set_to_none=True)
        model(**batch)["loss"].backward()
        assert all((pruner.threshold.grad is not None) == learned for pruner in model.student.pruners.values())
        assert model.student.get_input_embeddings().weight.grad.any()


def test_the_weight_follows_the_budget():
    model, _ = make("ltp", flops=0.5)
    model.progress = 1.0
    assert model.press(0.9) > 0
    high = model.multiplier.item()
    assert model.press(0.9) > high > 0
    for _ in range(60):
        weight = model.press(0.3)
    assert weight < 0  # it opens gates where too much is gone
    model.progress = 0.0
    model.multiplier.zero_()
    assert model.press(1.0) == 0  # nothing has to be gone at the start


@pytest.mark.parametrize("method", ["ltp", "transkimmer"])
def test_decisions_are_shifted_to_the_budget_before_they_are_judged(method):
    """From both sides; where all is at the budget, nothing moves."""
    model, _ = make(method)
    rows = some_rows()
    model.progress = 1.0
    for amount in (0.0, 0.08, -0.08) if method == "ltp" else (0.0, 6.0, -6.0):
        with torch.no_grad():
            for pruner in model.student.pruners.values():
                model.raise_bar(pruner, amount)
        model.prepare(rows)
        judged = judge(model, rows)
        told, excess = model.meet(judged)
        assert 0.57 < told["flops"] <= 0.6
        assert excess == 0
        assert len(set(judged.kept)) == 2
    before = [parameter.detach().clone() for parameter in decisive(model, method)]
    model.prepare(rows)
    assert all(torch.equal(a, b) for a, b in zip(before, decisive(model, method)))


def some_rows(count=40, seed=0):
    generator = torch.Generator().manual_seed(seed)
    encoded = [
        TokenizedText(torch.randint(1, 97, (n,), generator=generator).tolist(), [0] * n, False)
        for n in range(2, 2 + count)
    ]
    return Examples(encoded=encoded, labels=[0, 1] * (count // 2), pad_id=0)


def test_thresholds_settle_with_the_first_step_through_true_cuts():
    """So the student trains at its budget from there on, also where it is judged at the end alone; once, and without noise."""
    model, batch = make("ltp")
    model.dev = some_rows()
    thresholds = [pruner.threshold for pruner in model.student.pruners.values()]
    model.progress = gated.SOFT - 0.01
    model(**batch)
    assert not any(thresholds)
    model.progress = gated.SOFT
    state = torch.get_rng_state()
    model(**batch)
    assert torch.equal(torch.get_rng_state(), state)
    assert model.training
    assert model.state_dict()["settled"]  # a run that goes on from a checkpoint does not move them again
    assert gated.NEAR * 0.6 <= model.meet(judge(model, model.dev))[0]["flops"] <= 0.6
    found = [threshold.item() for threshold in thresholds]
    with torch.no_grad():
        thresholds[0] += 0.01
    model.train()(**batch)
    assert [threshold.item() for threshold in thresholds[1:]] == found[1:]
    assert thresholds[0].item() == pytest.approx(found[0] + 0.01)


def test_sites_stay_as_unequal_as_they_were_learned():
    """A site whose scores lie close together is not emptied, and one where all tokens stay keeps nearly all."""
    model, _ = make("ltp", flops=0.5, prune_sites="0.ffn,1.ffn,2.ffn")
    rows = some_rows()
    inputs = [rows.collate(range(40))]
    with torch.no_grad():
        for number, kept in enumerate((0.9, 1.0, 0.6)):
            model.eval()._keep(number, kept, inputs)
    before = judge(model, rows).kept
    assert before == pytest.approx([0.9, 1.0, 0.6], abs=0.05)
    model.progress = 1.0
    model.prepare(rows)
    first, second, third = judge(model, rows).kept
    assert second > 0.9
    assert first > third + 0.15
    assert model.meet(judge(model, rows))[0]["flops"] <= 0.5


def test_masks_meet_the_budget_on_the_dev_rows():
    """As many bins as the budget allows: one more would be too many."""
    model, batch = make("top", flops=0.7)
    with torch.no_grad():
        for number, logits in enumerate(model.bins):
            logits.copy_(torch.linspace(2, -2 - number, len(logits)))
        model.switches.fill_(3.0)
    model.eval()
    inputs = {name: batch[name] for name in ("input_ids", "attention_mask", "token_type_ids")}
    _, alive = model.through_cuts(inputs)
    share = model.share(alive).item()
    assert 0.6 < share <= 0.7
    texts = model.student.config.pruning["bins"]
    assert texts == [pruner.bins for pruner in model.student.pruners.values()]
    assert all(
        text.rstrip("0").count("0") == 0 and "0" in text for text in texts
    )  # the likeliest bins, here the first ones
    model.budget = 1.0
    model.finish()
    assert model.student.site_names == ()
    torch.testing.assert_close(model.through_cuts(inputs)[0], model.student(**inputs).logits)


def test_a_schedule_learns_whole_at_its_ratios_and_between():
    model, batch = make("schedule", flops=None, retention="0.4,0.6")
    seen = []
    through = model.through_cuts

    def noted(inputs):
        answer, alive = through(inputs)
        seen.append([count.tolist() for count in alive])
        return answer, alive

    model.through_cuts = noted
    loss = model(**batch)["loss"]
    whole, smallest, between = seen
    assert whole == [LENGTHS] * 3
    assert smallest[1:] == [[4, 1, 6, 3], [3, 1, 4, 2]]
    assert all(low <= middle <= high for low, middle, high in zip(smallest[2], between[2], whole[2]))
    assert [int(p.permille) for p in model.student.pruners.values()] == [400, 600]
    loss.backward()
    assert model.student.get_input_embeddings().weight.grad.any()
    model.weights["ce"] = model.weights["logit"] = 1e-12  # what is left is learned from the whole one
    losses = []
    for logits in (batch["teacher_logits"], -batch["teacher_logits"]):
        torch.manual_seed(1)  # the same lengths
        losses.append(model(**{**batch, "teacher_logits": logits})["loss"].item())
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    assert 0 < losses[0] < loss


def test_ranks_are_taught_in_the_teachers_order():
    teacher = torch.tensor([[9.0, 4.0, 3.0, 2.0, 1.0]])
    candidates = torch.tensor([[False, True, True, True, True]])
    right = rank_loss(torch.tensor([[0.0, 8.0, 4.0, 2.0, 1.0]]), teacher, candidates)
    losses = []
    for received in ([0.0, 8.0, 4.0, 1.0, 2.0], [0.0, 4.0, 8.0, 2.0, 1.0], [0.0, 1.0, 2.0, 4.0, 8.0]):
        losses.append(rank_loss(torch.tensor([received]), teacher, candidates).item())
    assert right < losses[0] < losses[1] < losses[2]  # the higher the ranks that are exchanged, the worse
    received = torch.tensor([[0.5, 1.0, 2.0, 4.0, 8.0]], requires_grad=True)
    rank_loss(received, teacher, candidates).backward()
    assert received.grad[0, 0] == 0
    assert received.grad[0, 1] < 0 < received.grad[0, 4]
    none = rank_loss(received, teacher, torch.zeros_like(candidates))
    assert none == 0
