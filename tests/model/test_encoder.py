"""Over the tables of backbones and pruners: padded is transformers, packed is padded, and a checkpoint comes back."""

import copy

import numpy as np
import pytest
import torch
from decoder_models import FAMILIES
from representatives import only_rows
from testbed import HEAD_FIELDS, PRUNINGS, SITE_SETS, TINY_BACKBONES, flat_kept, make_batch, make_encoder, make_student
from tiny_models import GATED_BACKBONES
from tolerances import assert_within_oracle, oracle_on
from transformers import (
    AutoModel,
    AutoModelForMaskedLM,
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)

from adtp_export.contract import OUTPUTS
from adtp_export.errors import InputError
from adtp_export.model import registry
from adtp_export.model.fixed import Fixed
from adtp_export.model.heads import head_class
from adtp_export.model.packed import PackedStudent
from adtp_export.model.registry import fields
from adtp_export.model.sequences import Packed

LENGTHS = ([7], [1], [1, 9, 4, 9], [20, 3, 1, 1, 11])
every_backbone = pytest.mark.parametrize("backbone", TINY_BACKBONES)
every_head = pytest.mark.parametrize("head", HEAD_FIELDS)
every_pruning = pytest.mark.parametrize("pruning", PRUNINGS)
TRIPLES = sorted(
    {(backbone, pruning, "sequence") for backbone in TINY_BACKBONES for pruning in ("adtp", "received-twice")}
    | {(backbone, "adtp", head) for backbone in TINY_BACKBONES for head in HEAD_FIELDS}
    | {("bert", pruning, head) for pruning in PRUNINGS for head in HEAD_FIELDS}
)
"""Of the pruners two with every backbone, one that reads states and one that reads attention: all triples would take minutes."""
LATE = ("vectors", "hybrid")
"""Heads that work on finished states of tokens that are left, whatever made these: two backbones and one pruner stand for all."""
every_two = pytest.mark.parametrize(
    ("backbone", "pruning", "head"),
    only_rows(
        TRIPLES,
        [each for each in TRIPLES if each[2] not in LATE or each[:2] in (("bert", "adtp"), ("modernbert", "adtp"))],
    ),
)


def batch_for(model, lengths, seed=0):
    types = fields(model.dense.config)["type_vocab_size"]
    batch = make_batch(lengths, max(lengths) + 2, types=types, seed=seed)
    pad = model.dense.config.pad_token_id
    batch["input_ids"][(batch["input_ids"] == pad) & batch["attention_mask"].bool()] = 5  # RoBERTa counts from these
    return batch


def test_the_tables_of_these_tests_are_complete():
    tiny = {fields["model_type"] for table in (TINY_BACKBONES, GATED_BACKBONES) for fields in table.values()}
    assert tiny | set(FAMILIES) == set(registry.BACKBONES)
    assert {p["method"] for p in PRUNINGS.values() if p} == set(registry.PRUNERS)
    assert {*HEAD_FIELDS, "masked"} == set(registry.HEADS) == set(OUTPUTS)  # which drops no token


PADDED = [(backbone, head) for backbone in TINY_BACKBONES for head in HEAD_FIELDS if head != "sparse"]
"""Sparse vectors have their own file."""


@pytest.mark.parametrize(
    ("backbone", "head"), only_rows(PADDED, [each for each in PADDED if each[1] not in LATE or each[0] == "bert"])
)
def test_padded_without_pruners_is_transformers(backbone, head):
    model = make_encoder(backbone, "none", head=head, **HEAD_FIELDS[head]).double()
    for lengths in LENGTHS:
        batch = batch_for(model, lengths)
        own, answer, live = model.dense(**batch), model(**batch), batch["attention_mask"].bool()
        if head in ("vectors", "hybrid"):
            own = model.of_states(own.last_hidden_state, live)
        compared = [name for name in OUTPUTS[head] if name in own]
        assert compared
        for name in compared:
            if "sequence" in OUTPUTS[head][name]:
                assert not answer[name][~live].any()
                answer[name], own[name] = answer[name][live], own[name][live]
            torch.testing.assert_close(answer[name], own[name], rtol=1e-12, atol=1e-12)


@every_two
def test_packed_is_padded(backbone, pruning, head):
    model = make_encoder(backbone, pruning, head=head, **HEAD_FIELDS[head])
    packed, batches = PackedStudent(model), [batch_for(model, lengths) for lengths in LENGTHS]
    oracle, answers = oracle_on(model, *batches), []
    for batch, expected in zip(batches, oracle.batches):
        outputs, rows = packed(**batch)
        answers.append(dict(zip(OUTPUTS[head], outputs, strict=True)))
        assert np.array_equal(flat_kept(rows, batch["input_ids"].shape, len(model.site_names)), expected.kept_site)
    assert_within_oracle(oracle, *answers)


@every_pruning
def test_tokens_fall_at_each_site(pruning):
    """The random models of these tests do exercise their rules."""
    model = make_encoder("bert", pruning)
    decisions = model(**batch_for(model, [20] * 16)).decisions
    assert len(decisions) == len(model.site_names)
    for decision in decisions:
        assert (decision.count < decision.live.sum(1)).any()
        assert (decision.count > 1).any()


@pytest.mark.parametrize("pooling", ["first", "mean", "max"])
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_vectors_are_pooled_over_the_tokens_of_the_text(pooling, lengths):
    """The definition, written once more: of sentence-transformers, text by text."""
    fields = {"embedding": {"pooling": pooling, "normalize": True, "projections": [[32, 16, False, "none"]]}}
    model = make_encoder("bert", "adtp", head="embedding", **fields).double()
    (vectors, states), _ = PackedStudent(model)(**batch_for(model, lengths))
    for vector, row, n in zip(vectors, states, lengths):
        found = {"first": row[0], "mean": row[:n].mean(0), "max": row[:n].amax(0)}[pooling]
        projected = model.projections[0].linear.weight @ found
        torch.testing.assert_close(vector, projected / projected.norm(), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("head", ["tokens", "spans", "embedding"])
def test_a_dropped_token_answers_with_the_state_that_reached_its_cut(head):
    """Later layers do not change it, whatever is in them."""
    model = make_encoder("bert", "adtp", head=head, **HEAD_FIELDS[head])
    batch = batch_for(model, [20] * 16)
    answer, name = model(**batch), list(OUTPUTS[head])[-1]
    dropped, stayed = answer.kept_site == 0, answer.kept_site == 2  # the first site is 1.attention: after layer 0
    assert dropped.any()
    changed = copy.deepcopy(model)
    for layer in changed.dense.base_model.encoder.layer[1:]:
        layer.output.LayerNorm.weight.fill_(7.0)
    other = changed(**batch)[name]
    assert torch.equal(other[dropped], answer[name][dropped])
    assert not torch.equal(other[stayed], answer[name][stayed])


AUTO = {
    "sequence": AutoModelForSequenceClassification,
    "tokens": AutoModelForTokenClassification,
    "spans": AutoModelForQuestionAnswering,
    "embedding": AutoModel,
    "sparse": AutoModelForMaskedLM,
}


@every_two
def test_round_trip(tmp_path, backbone, pruning, head):
    labels = {0: "no", 1: "perhaps", 2: "yes"}
    fields = {"id2label": labels} if "num_labels" in HEAD_FIELDS[head] else HEAD_FIELDS[head]
    model = make_encoder(backbone, pruning, head=head, **fields)
    model.save_pretrained(tmp_path)
    again = AUTO.get(head, head_class(head)).from_pretrained(tmp_path)
    assert not again.training
    assert type(again) is type(model)
    assert again.site_names == model.site_names
    assert again.config.settings == model.config.settings
    assert "id2label" not in fields or again.config.id2label == labels
    before, after = model.state_dict(), again.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    batch = batch_for(model, [6, 2])
    assert all(torch.equal(model(**batch)[name], again(**batch)[name]) for name in OUTPUTS[head])


@every_backbone
def test_plain_weights_load_as_they_are(tmp_path, backbone):
    """Names of backbone and head are transformers' own, so teachers and plain models load without a conversion."""
    model = make_encoder(backbone, "adtp")
    names = {name for name in model.state_dict() if not name.startswith("pruners.")}
    assert names == set(model.dense.state_dict())
    assert {name.split(".")[1] for name in model.state_dict() if name.startswith("pruners.")} == {
        "1_attention",
        "2_ffn",
    }


@pytest.mark.parametrize("sites", SITE_SETS, ids=str)
@pytest.mark.parametrize(("heads", "hidden"), [(4, 32), (1, 32), (2, 128), (1, 128)])
def test_format_1_at_other_head_sizes(sites, heads, hidden):
    student = make_student(sites, num_attention_heads=heads, hidden_size=hidden, retention_ratios=[0.137, 0.333, 1.0])
    batch = make_batch([20, 3, 1, 11], 22)
    (logits,), rows = PackedStudent(student)(**batch)
    oracle = oracle_on(student, batch)
    assert_within_oracle(oracle, {"logits": logits})
    kept_site = flat_kept(rows, batch["input_ids"].shape, len(sites))
    assert np.array_equal(kept_site, oracle.batches[0].kept_site)


def test_retention_differs_between_sequences():
    """The random students of these tests do exercise an adaptive ratio."""
    counts = make_student(["1.attention"])(**make_batch([20] * 16, 20)).decisions[0].count
    assert len(set(counts.tolist())) > 2


def test_a_row_without_live_tokens_counts_as_one():
    student = make_student()
    batch = make_batch([4, 1], 5)
    empty = {**batch, "attention_mask": batch["attention_mask"].clone()}
    empty["attention_mask"][1] = 0
    assert torch.equal(student(**batch).logits, student(**empty).logits)
    assert torch.equal(PackedStudent(student)(**batch)[0][0], PackedStudent(student)(**empty)[0][0])


def test_left_padding_is_refused():
    batch = make_batch([3], 5)
    batch["attention_mask"] = batch["attention_mask"].flip(1)
    with pytest.raises(ValueError, match="right padding"):
        make_student()(**batch)


@pytest.mark.parametrize("pruning", [name for name, fields in PRUNINGS.items() if fields])
def test_dropped_tokens_are_gone_for_good(pruning):
    """After its cut a dropped token moves nothing: no logit, no later decision. Kept ones move the logits of their own row,
    besides [CLS], as long as attention follows."""
    model = make_encoder("bert", pruning).double()
    batch = batch_for(model, [20] * 8)
    before = model(**batch)

    def moved(site, tokens):
        """Run again with the states of some tokens moved right after the cut."""

        def move(module, arguments):
            states = arguments[0].clone()
            states[tokens] += 10
            return (states, *arguments[1:])

        parts = model.backbone
        modules = parts.attention(site.layer).projections if site.sublayer == "attention" else (
            parts.feed_forward(site.layer).intermediate,
        )  # fmt: skip
        handles = [module.register_forward_pre_hook(move) for module in modules]
        try:
            return model(**batch)
        finally:
            for handle in handles:
                handle.remove()

    assert len(model.config.sites) == len(before.decisions) > 0
    for site, decision in zip(model.config.sites, before.decisions):
        dropped, others = decision.live & ~decision.kept, decision.kept.clone()
        others[:, 0] = False
        assert dropped.any()
        assert others.any()
        after = moved(site, dropped)
        assert torch.equal(after.logits, before.logits)
        assert torch.equal(after.kept_site, before.kept_site)
        changed = (moved(site, others).logits != before.logits).any(1)
        attention_follows = site.sublayer == "attention" or site.layer + 1 < model.backbone.num_layers
        assert torch.equal(changed, others.any(1) & attention_follows), site


def test_the_callers_student_keeps_its_mode():
    student = make_student().train()
    student.dropout.eval()
    modes = [module.training for module in student.modules()]
    assert PackedStudent(student).training
    assert [module.training for module in student.modules()] == modes


def test_export_of_a_student_in_training_has_no_dropout():
    from adtp_export.graph import program

    student = make_student(num_hidden_layers=1).train()
    model = program.export_portable(student, {"version": "test"})
    assert not any(node.op_type == "Dropout" for node in model.graph)
    assert all(module.training for module in student.modules())


@pytest.mark.parametrize(
    ("problem", "num_labels", "labels"),
    [
        (None, 3, torch.tensor([0, 2])),
        ("regression", 1, torch.tensor([0.5, -1.0])),
        ("multi_label_classification", 3, torch.tensor([[1.0, 0, 1], [0, 0, 1]])),
    ],
)
def test_every_kind_of_label_trains(problem, num_labels, labels):
    student = make_student(problem_type=problem, num_labels=num_labels).requires_grad_(True)
    output = student(**make_batch([5, 3], 5), labels=labels)
    output.loss.backward()
    assert torch.isfinite(student.classifier.weight.grad).all()
    assert student.classifier.weight.grad.abs().sum() > 0


@pytest.mark.parametrize(
    ("table", "name", "message"),
    [
        (registry.backbone, "brt", "did you mean 'bert'"),
        (registry.pruner, "adpt", "did you mean 'adtp'"),
        (head_class, "sequences", "did you mean 'sequence'"),
        (registry.pruner, None, "accepted are adtp, ltp, schedule, top, transkimmer"),
    ],
)
def test_unknown_names_are_told_with_the_known_ones(table, name, message):
    with pytest.raises(InputError, match=message):
        table(name)


def test_dead_rows_take_no_part_in_poolings():
    """Of fixed sizes, whose rows behind the last text may hold NaN, and where texts may be empty."""
    states = torch.randn(9, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    places = torch.arange(9)
    packed = Packed(states, torch.tensor([0, 2, 9]), places, places)
    dead = torch.cat([states, torch.full((3, 4), torch.nan, dtype=torch.float64)])
    fixed = Fixed(dead, torch.tensor([0, 2, 2, 9, 9]), torch.arange(12), torch.arange(12))
    for own, expected in (
        (fixed.mean(), packed.mean()),
        (fixed.maxima()(dead), packed.maxima()(states)),
        (fixed.sum(dead), packed.sum(states)),
    ):
        torch.testing.assert_close(own[[0, 2]], expected)
    assert not fixed.sum(dead)[[1, 3]].any()
    assert not fixed.mean()[[1, 3]].any()
