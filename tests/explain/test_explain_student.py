"""Explanations are of the student's own answer, of attention as transformers has it, and they can say that a student chose badly."""

import copy

import numpy as np
import pytest
import torch
from testbed import HEAD_FIELDS, PRUNINGS, TINY_BACKBONES, as_numpy, make_batch, make_encoder, make_student
from transformers import AutoModelForSequenceClassification

from adtp_export.data.windows import Windows
from adtp_export.explain.answer import explained
from adtp_export.explain.flow import capacities, flows
from adtp_export.explain.gradients import answer_score
from adtp_export.explain.records import BY_CHANCE, FLOWED, HELD, ORDER, POSSIBLE
from adtp_export.explain.student import agreement, explain, means
from adtp_export.inference.answers.spans import told
from adtp_export.model.heads.embedding import finished

N = 14


def one_text(types=2, seed=0, n=N):
    row = as_numpy(make_batch([n], n, types=types, seed=seed))
    return {**row, "input_ids": np.maximum(row["input_ids"], 3)}  # no padding token of any family


def tensors(row):
    return {name: torch.from_numpy(values) for name, values in row.items()}


@pytest.mark.parametrize("head", HEAD_FIELDS)
def test_each_head_is_explained(head):
    row, asked = one_text(), np.arange(N) > 3
    student = make_encoder("bert", "schedule", head=head, **HEAD_FIELDS[head])
    found, said = explain(student, row, asked), student(**tensors(row))
    assert list(found.kept_site) == said.kept_site[0].tolist()
    dropped = [site < 2 for site in found.kept_site]
    assert 0 < sum(dropped) < N
    assert sum(found.attribution) == pytest.approx(1)
    assert min(found.attribution) > 0
    assert [value is not None for value in found.flow] == [value is not None for value in found.flowed] == dropped
    assert all(0 <= share <= 1 for share in found.flowed if share is not None)
    assert set(found.figures) == {HELD, POSSIBLE, BY_CHANCE, ORDER, FLOWED}
    assert found.figures[HELD] <= found.figures[POSSIBLE]
    assert found.figures[FLOWED] == pytest.approx(np.mean([share for share in found.flowed if share is not None]))


@pytest.mark.parametrize("backbone", TINY_BACKBONES)
def test_each_backbone_is_explained(backbone):
    student = make_encoder(backbone, "schedule", num_labels=3)
    found = explain(student, one_text(types=2 if "token_type_ids" in student.input_names else 1), np.ones(N, bool))
    assert sum(found.attribution) == pytest.approx(1)
    assert FLOWED in found.figures


def test_a_configuration_that_asks_for_tuples_changes_nothing():
    student = make_encoder("bert", "adtp")
    expected = explain(student, one_text(), np.ones(N, bool))
    student.dense.config.return_dict = False
    assert explain(student, one_text(), np.ones(N, bool)) == expected


@pytest.mark.parametrize("head", HEAD_FIELDS)
def test_what_is_explained_is_the_students_own_answer(head):
    """Of the same output, F is the log odds of what is answered; for vectors their length in their own direction."""
    student = make_encoder("bert", "adtp", head=head, **HEAD_FIELDS[head])
    asked = np.arange(N) > 3
    said = student(**tensors(one_text()))
    found = explained(student, said, asked)
    score = found.score(student.dense(**tensors(one_text())) if head == "sparse" else said)
    if head == "sequence":
        odds = (said.logits.softmax(1).max(1).values).logit()
        assert list(found.ends) == [0]
    elif head == "tokens":
        odds = said.logits[0, 4:].softmax(1).max(1).values.logit().sum()[None]
        assert list(found.ends) == list(range(4, N))
    elif head == "spans":
        start, end = told(said.start_logits[0].numpy(), said.end_logits[0].numpy(), asked, Windows.max_answer_tokens)
        assert set(found.ends) == {start, end}
        odds = said.start_logits.softmax(1)[:, start].logit() + said.end_logits.softmax(1)[:, end].logit()
    elif head == "sparse":
        weights = make_encoder("bert", "none", head=head, **HEAD_FIELDS[head])(**tensors(one_text())).sparse_embedding
        odds = torch.cosine_similarity(weights, said.sparse_embedding) * weights.norm(dim=1)
        assert list(found.ends) == list(range(N))
    elif head == "vectors":
        stayed = said.kept_site[0] == len(student.pruners)
        projected = finished(said.last_hidden_state[0, stayed], student.projections, normalize=False)
        odds = projected.norm(dim=1).sum()[None]
        assert list(found.ends) == torch.nonzero(stayed).flatten().tolist()
    elif head == "hybrid":
        odds = said.last_hidden_state[:, 0].norm(dim=1)
        assert list(found.ends) == [0]
    else:
        pooled = said.last_hidden_state.mean(1)
        odds = torch.tanh(student.projections[0].linear(pooled)).norm(dim=1)
        assert list(found.ends) == list(range(N))
    torch.testing.assert_close(score, odds, rtol=1e-4, atol=1e-5)


def test_several_labels_are_explained_together():
    student = make_student(num_labels=3, problem_type="multi_label_classification")
    said = student(**tensors(one_text()))
    found = explained(student, said, np.ones(N, bool))
    torch.testing.assert_close(found.score(said), said.logits.abs().sum(1))
    numbers = make_student(num_labels=3, problem_type="regression")
    said = numbers(**tensors(one_text()))
    torch.testing.assert_close(explained(numbers, said, np.ones(N, bool)).score(said), said.logits.sum(1))
    single = copy.copy(said)
    single.logits = said.logits[:, :1]
    torch.testing.assert_close(answer_score(single.logits, torch.tensor([0])), single.logits[:, 0])


@pytest.mark.parametrize("backbone", ["bert", "roberta", "modernbert"])
def test_flow_is_of_the_attention_of_transformers(backbone, tmp_path):
    """Dropped tokens and their flow are computed here from `output_attentions`, with a site of each kind."""
    student = make_encoder(backbone, "received-twice", num_labels=2)  # cuts at 0.ffn, 1.attention and 2.ffn
    row = one_text(types=2 if "token_type_ids" in student.input_names else 1)
    student.dense.save_pretrained(
        tmp_path, state_dict={k: v for k, v in student.state_dict().items() if "pruners" not in k}
    )
    plain = AutoModelForSequenceClassification.from_pretrained(tmp_path, attn_implementation="eager").eval()
    with torch.no_grad():
        attentions = plain(**tensors(row), output_attentions=True).attentions
    layers = [capacities(weights[0].numpy()) for weights in attentions]
    found = explain(student, row, np.ones(N, bool))
    kept_site = np.array(found.kept_site)
    assert {0, 1, 2, 3} == set(kept_site)
    dropped = np.flatnonzero(kept_site < 3)
    ends = [0] if student.reads_first else range(N)
    whole = flows(layers, np.full(N, 3), dropped, ends)
    left = flows(layers, np.array([1, 1, 3, 3])[kept_site], dropped, ends)
    rounding = 3 * N**2 * 1e-6  # of edges, which the other attention rounds differently
    np.testing.assert_allclose([found.flow[i] for i in dropped], whole, atol=rounding)
    np.testing.assert_allclose([found.flowed[i] for i in dropped], left / whole, atol=2 * rounding / whole.min())


@pytest.mark.parametrize(("site", "share"), [("0.attention", 0.0), ("0.ffn", 1.0)])
def test_one_layer_has_passed_all_or_nothing(site, share):
    """Before the only attention nothing has passed; after it all has, for [CLS] has read what it reads."""
    pruning = {"method": "schedule", "sites": [site], "ratios": [0.5]}
    backbone = {**TINY_BACKBONES["bert"], "num_hidden_layers": 1}
    student = type(make_encoder())(type(make_encoder().config)(backbone=backbone, pruning=pruning, num_labels=2)).eval()
    found = explain(student, one_text(), np.ones(N, bool))
    assert {value for value in found.flowed if value is not None} == {share}


def test_a_student_that_keeps_the_worst_is_told():
    """The attribution does not depend on the cuts, nor on which of two classes is explained. So turning the saliency round turns the
    correlation round."""
    student = make_student(["0.ffn"], retention_ratios=[0.5, 1.0])
    with torch.no_grad():
        student.pruners["0_ffn"].ratio_predictor.bias.copy_(torch.tensor([100.0, 0.0]))
    turned = copy.deepcopy(student)
    with torch.no_grad():
        for parameter in turned.pruners["0_ffn"].saliency_predictor[2].parameters():
            parameter.neg_()
    row, asked = one_text(), np.ones(N, bool)
    found, other = explain(student, row, asked), explain(turned, row, asked)
    assert found.attribution == other.attribution
    assert found.figures[ORDER] == pytest.approx(-other.figures[ORDER], abs=1e-12)
    assert abs(found.figures[ORDER]) > 0.01  # above rounding, so that its sign means something
    assert found.figures[POSSIBLE] == other.figures[POSSIBLE]
    assert found.figures[HELD] != other.figures[HELD]


def test_a_first_token_that_competes_counts():
    """It always stays in one of two students of the same weights and cuts."""
    held, some = {}, make_encoder("bert", "schedule", head="spans")
    for keep_first in (True, False):
        pruning = {**PRUNINGS["schedule"], "keep_first": keep_first}
        student = type(some)(type(some.config)(backbone=TINY_BACKBONES["bert"], pruning=pruning, head="spans")).eval()
        student.load_state_dict(some.state_dict())
        row = one_text()
        found = explain(student, row, np.arange(N) > 3)
        first = 1 if keep_first else 0
        values, stays = np.array(found.attribution)[first:], np.array(found.kept_site)[first:] == 2
        held[keep_first] = found.figures[HELD]
        assert held[keep_first] == pytest.approx(values[stays].sum() / values.sum())
    assert held[True] != held[False]


def test_agreement_by_hand():
    """The first token always stays, so it counts nowhere."""
    attribution = np.array([0.5, 0.1, 0.2, 0.05, 0.15])
    kept = np.array([True, True, True, False, False])
    found = agreement(attribution, kept, np.array([9.0, 3.0, 4.0, 1.0, 2.0]))
    assert found == pytest.approx({HELD: 0.6, POSSIBLE: 0.7, BY_CHANCE: 0.5, ORDER: 0.8})
    best = agreement(attribution, attribution > 0.12, attribution)
    assert best[HELD] == pytest.approx(best[POSSIBLE])
    assert best[ORDER] == pytest.approx(1)
    for nothing_chosen in (np.ones(5, bool), np.arange(5) == 0):
        assert agreement(attribution, nothing_chosen, attribution) == {}
    assert ORDER not in agreement(attribution[:4], kept[:4], attribution[:4])


def test_means_are_of_the_texts_that_have_a_figure():
    student = make_student(["0.ffn"])
    found = [explain(student, one_text(n=n, seed=n), np.ones(n, bool)) for n in (1, 3, 9, 14)]
    assert found[0].figures == {}
    for name, value in means(found).items():
        known = [e.figures[name] for e in found if name in e.figures]
        assert value == pytest.approx(np.mean(known))
        assert 0 < len(known) < len(found)
