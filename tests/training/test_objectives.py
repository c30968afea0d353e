"""The losses and scores of every head are those of plain definitions, row by row; and the student in training is the oracle."""

import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from testbed import HEAD_FIELDS, PRUNINGS, TINY_BACKBONES, make_batch, make_encoder
from torch.nn.functional import cross_entropy, mse_loss, normalize

from adtp_export.data.labelled import Question
from adtp_export.data.tokenize import TokenizedText
from adtp_export.data.windows import TextWithOffsets
from adtp_export.errors import InputError
from adtp_export.explain.gradients import answer_score
from adtp_export.model import AdtpBertForSequenceClassification, registry
from adtp_export.model.heads import head_class
from adtp_export.model.registry import input_names
from adtp_export.training.data import Examples, Labels
from adtp_export.training.evaluate import ask, check_order
from adtp_export.training.losses import logit_loss
from adtp_export.training.methods.adtp import Distillation
from adtp_export.training.models import make_student
from adtp_export.training.objectives import TABLE, for_head
from adtp_export.training.objectives.embedding import TextExamples
from adtp_export.training.objectives.sequence import another_order
from adtp_export.training.objectives.spans import QuestionExamples, decode
from adtp_export.training.objectives.tokens import NO_LABEL, TaggedExamples
from adtp_export.training.settings import HEAD_OF_TASK, TrainOptions

LENGTHS, PADDED = [9, 3, 14, 6], 14
SETTINGS = TrainOptions(prune_sites="0.ffn,2.attention", retention="0.5", beta=3.0)


def make_teacher(head, backbone="bert"):
    """A dense model of a head, as its objective asks it."""
    model = make_encoder(backbone, "none", head=head, **HEAD_FIELDS[head]).double()
    return model if head == "embedding" else model.dense.eval()


def make_inputs(head, backbone="bert"):
    """Inputs, labels as the head's rows have them, and a teacher's view, all of a random kind."""
    model = make_teacher(head, backbone)
    config = getattr(model, "dense", model).config
    types = 2 if "token_type_ids" in input_names(config) else 1
    batch = make_batch(LENGTHS, PADDED, types=types)
    batch["input_ids"][:, 0] = 5
    generator = torch.Generator().manual_seed(1)
    live = batch["attention_mask"].bool()
    tags = torch.randint(0, 5, live.shape, generator=generator).masked_fill(~live, -100)
    tags[:, ::3] = -100  # further pieces of words, and special tokens
    start = torch.tensor([2, 0, 7, 1])
    labels = {
        "sequence": {"labels": torch.tensor([0, 2, 1, 1])},
        "tokens": {"labels": tags},
        "spans": {"start_positions": start, "end_positions": start + torch.tensor([3, 0, 2, 0])},
        "embedding": {},
    }[head]
    attribution = torch.rand(live.shape, generator=generator, dtype=torch.float64) * live
    with torch.no_grad():
        answer = for_head(head).ask(model, batch)
    view = {"teacher_logits": answer + torch.randn(answer.shape, generator=generator).double()}
    return batch, labels, {**view, "attribution": attribution / attribution.norm(dim=1)[:, None]}


def make(head, backbone="bert", settings=SETTINGS):
    student = make_student(make_teacher(head, backbone), settings, head).double()
    return Distillation(student, settings, [0.6] * len(settings.sites)).eval()


def test_every_head_and_task_has_an_objective():
    assert set(TABLE) == set(registry.HEADS) - {"sparse", "masked", "vectors", "hybrid"} == set(HEAD_OF_TASK.values())
    for head in TABLE:
        assert for_head(head).head == head


@pytest.mark.parametrize("backbone", TINY_BACKBONES)
@pytest.mark.parametrize("head", TABLE)
def test_answers_cuts_and_the_whole_loss_on_every_backbone(head, backbone):
    """In evaluation mode the network in training answers as the oracle does, and its loss reaches the encoder."""
    model = make(head, backbone)
    batch, labels, view = make_inputs(head, backbone)
    trace = model.begin(batch["attention_mask"])
    answer = model.run(batch, trace)
    expected = model.student(**batch)
    if head == "embedding":
        torch.testing.assert_close(normalize(answer, dim=1), expected.sentence_embedding)
    elif head == "spans":
        torch.testing.assert_close(answer, torch.stack([expected.start_logits, expected.end_logits], -1))
    else:
        torch.testing.assert_close(answer, expected.logits)
    assert [(expected.kept_site > i).sum().item() for i in range(2)] == [len(d.rows) for d in trace.decisions]
    loss = model(**batch, **labels, **view)["loss"]
    loss.backward()
    assert torch.isfinite(loss)
    products = model.student.backbone.products(1).values()
    assert all(linear.weight.grad.any() for product in products for linear in product)


@pytest.mark.parametrize("backbone", TINY_BACKBONES)
def test_a_student_may_have_fewer_layers_on_every_backbone(backbone):
    """Of three layers the second and the third: each keeps its weights, and what kind of layer it is.

    The first layer of ModernBERT has no norm before its attention, so it stays the first.
    """
    teacher = make_teacher("tokens", backbone)
    student = make_student(teacher, TrainOptions(layers=2, prune_sites="0.ffn"), "tokens").double()
    theirs, own = registry.backbone(teacher.config.model_type)(teacher), student.backbone
    assert own.num_layers == 2
    for i, number in enumerate((0, 2) if backbone == "modernbert" else (1, 2)):
        for left, right in zip(own.products(i).values(), theirs.products(number).values()):
            assert all(torch.equal(a.weight, b.weight) for a, b in zip(left, right))
        assert own.attention(i).window == theirs.attention(number).window


@pytest.mark.parametrize("head", TABLE)
def test_the_whole_loss_has_the_gradient_of_finite_differences(head):
    model = make(head)
    batch, labels, view = make_inputs(head)
    model(**batch, **labels, **view)["loss"].backward()
    parameter = model.student.backbone.attention(1).projections[0].weight
    direction = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    losses = []
    for sign in (1, -1):
        with torch.no_grad():
            parameter += sign * 1e-6 * direction
        losses.append(model(**batch, **labels, **view)["loss"].item())
        with torch.no_grad():
            parameter -= sign * 1e-6 * direction
    slope = (losses[0] - losses[1]) / 2e-6
    assert abs(slope) > 1e-3
    assert slope == pytest.approx((parameter.grad * direction).sum().item(), rel=1e-4)


def test_classes_of_texts_are_learned_as_format_1_always_did():
    """To the bit: the terms are torch's own losses of the logits, and F is the log odds of the teacher's class."""
    objective, (_, labels, view) = for_head("sequence"), make_inputs("sequence")
    teacher = view["teacher_logits"]
    answer = teacher.roll(1, 0)
    assert torch.equal(objective.label_loss(answer, labels), cross_entropy(answer, labels["labels"]))
    assert torch.equal(objective.logit_loss(answer, teacher, labels, 2.0), logit_loss(answer, teacher, 2.0))
    assert torch.equal(objective.score(answer, teacher, labels), answer_score(answer, teacher.argmax(1)))
    score, target = torch.randn(4, 1), torch.tensor([0.5, 1, 2, 3])
    assert torch.equal(objective.label_loss(score, {"labels": target}), mse_loss(score[:, 0], target))
    student = make("sequence").student
    assert type(student) is AdtpBertForSequenceClassification
    assert student.config.model_type == "adtp_bert"


def divergence(student, teacher, temperature):
    soft = (teacher / temperature).softmax(0)
    return temperature**2 * (soft * (soft.log() - (student / temperature).log_softmax(0))).sum()


def test_tags_are_learned_word_by_word():
    objective, (_, labels, view) = for_head("tokens"), make_inputs("tokens")
    teacher = view["teacher_logits"]
    answer = teacher.roll(1, 0)
    words = [(b, t) for b in range(len(LENGTHS)) for t in range(PADDED) if labels["labels"][b, t] != -100]
    assert 0 < len(words) < sum(LENGTHS)
    ce = [-answer[b, t].log_softmax(0)[labels["labels"][b, t]] for b, t in words]
    torch.testing.assert_close(objective.label_loss(answer, labels), torch.stack(ce).mean())
    kl = [divergence(answer[b, t], teacher[b, t], 2.0) for b, t in words]
    torch.testing.assert_close(objective.logit_loss(answer, teacher, labels, 2.0), torch.stack(kl).mean())
    odds = torch.zeros(len(LENGTHS), dtype=torch.float64)
    for b, t in words:
        probability = answer[b, t].softmax(0)[teacher[b, t].argmax()]
        odds[b] += (probability / (1 - probability)).log()
    torch.testing.assert_close(objective.score(answer, teacher, labels), odds)


def test_spans_are_learned_over_the_live_positions():
    objective, (batch, labels, view) = for_head("spans"), make_inputs("spans")
    teacher = view["teacher_logits"]
    answer = teacher.roll(1, 0)
    ce, kl, odds = [], [], []
    for b, n in enumerate(LENGTHS):
        gold = (labels["start_positions"][b], labels["end_positions"][b])
        chances = [answer[b, :n, side].softmax(0)[gold[side]] for side in (0, 1)]
        ce += [-chance.log() for chance in chances]
        kl += [divergence(answer[b, :n, side], teacher[b, :n, side], 2.0) for side in (0, 1)]
        odds.append(sum((chance / (1 - chance)).log() for chance in chances))
    both = {**batch, **labels}
    torch.testing.assert_close(objective.label_loss(answer, both), torch.stack(ce).mean())
    torch.testing.assert_close(objective.logit_loss(answer, teacher, both, 2.0), torch.stack(kl).mean())
    torch.testing.assert_close(objective.score(answer, teacher, both), torch.stack(odds))


def test_vectors_are_learned_by_their_cosine():
    objective, (_, _, view) = for_head("embedding"), make_inputs("embedding")
    teacher = view["teacher_logits"]
    answer = teacher.roll(1, 0)
    cosines = torch.stack([a @ t / (a.norm() * t.norm()) for a, t in zip(answer, teacher)])
    torch.testing.assert_close(objective.logit_loss(answer, teacher, {}, 2.0), (1 - cosines).mean())
    torch.testing.assert_close(objective.score(answer, teacher, {}), cosines * answer.norm(dim=1))
    weights = make("embedding").weights
    assert weights["logit"] == 1  # of L_CE and L_logit, for there are no labels
    assert "ce" not in weights


def test_a_teacher_of_vectors_has_an_attribution_of_its_own():
    """The cosine of a vector with itself has no gradient: F has to be another scalar."""
    model = make("embedding", settings=dataclasses.replace(SETTINGS, prune_sites=""))
    batch, _, _ = make_inputs("embedding")
    _, attribution = model.attribute(batch, model.begin(batch["attention_mask"]), None, False)
    torch.testing.assert_close(attribution.norm(dim=1), torch.ones(len(LENGTHS), dtype=torch.float64))
    assert (attribution > 1e-3)[batch["attention_mask"].bool()].float().mean() > 0.5


@pytest.mark.parametrize("ratio", ["adaptive", "static"])
@pytest.mark.parametrize("head", [head for head in TABLE if head != "sequence"])
def test_students_of_other_heads_are_format_2(head, ratio):
    student = make(head, settings=dataclasses.replace(SETTINGS, ratio=ratio)).student
    assert type(student) is head_class(head)
    assert student.config.model_type == "pruned_encoder"
    assert student.config.pruning["method"] == {"adaptive": "adtp", "static": "schedule"}[ratio]
    assert student.config.num_labels == {"tokens": 5}.get(head, 2)
    assert PRUNINGS[{"adaptive": "adtp", "static": "schedule"}[ratio]]["method"] == student.config.method
    if head == "embedding":
        assert student.config.embedding == HEAD_FIELDS[head]["embedding"]


def rows(lengths):
    return [TokenizedText([1] * n, [0] * n, False) for n in lengths]


def test_tags_are_judged_at_the_first_pieces():
    examples = TaggedExamples(encoded=rows([4, 3]), labels=[[-100, 1, -100, 0], [-100, 2, -100]], pad_id=0, names="abc")
    assert examples.collate([0, 1])["labels"].tolist() == [[-100, 1, -100, 0], [-100, 2, -100, -100]]
    answers = [torch.eye(3)[[0, 1, 2, 2]], torch.eye(3)[[1, 2, 1]]]
    figures = for_head("tokens").quality(answers, examples)
    assert figures["accuracy"] == pytest.approx(2 / 3)
    assert for_head("tokens").main_score(figures) == figures["accuracy"]


def test_the_best_span_of_all_windows_answers_unless_none_is_likelier():
    context = "ab cd ef"
    placed = []
    for places in ([(0, 2), (3, 5)], [(3, 5), (6, 8)]):
        row, sides = TokenizedText([1] * 5, [0] * 5, False), [None, 0, 1, 1, None]
        placed.append(
            TextWithOffsets(row, [(0, 0), (0, 1), *places, (0, 0)], [None, 0, *[p[0] for p in places], None], sides)
        )
    asked = [Question("?", context, ("ef",), (6,)), Question("?", context, (), ())]
    examples = QuestionExamples(
        encoded=rows([5] * 4), labels=[(0, 0), (3, 3), (0, 0), (0, 0)], pad_id=0, placed=placed * 2, questions=asked,
        owners=[0, 0, 1, 1], longest=15,
    )  # fmt: skip
    batch = examples.collate([1, 0])
    assert (batch["start_positions"].tolist(), batch["end_positions"].tolist()) == ([3, 0], [3, 0])
    one, other, none = (torch.zeros(5, 2) for _ in range(3))
    one[2], one[0] = 2.0, -1.0  # "ab"
    other[3] = 4.0  # "ef", whose window is surer
    none[1], none[0] = 9.0, 0.5  # the question cannot answer itself: 0 against 1 of [CLS]
    answers = [one, other, none, none]
    assert decode(answers, examples) == ["ef", ""]
    figures = for_head("spans").quality(answers, examples)
    assert figures == {"exact": 1.0, "f1": 1.0, "has_answer_f1": 1.0, "no_answer_accuracy": 1.0}
    second = examples.some([3, 2])
    assert (second.questions, second.owners, second.placed) == (asked[1:], [0, 0], [placed[1], placed[0]])
    assert decode([none, none], dataclasses.replace(second, questions=asked[:1])) == ["cd"]


def test_vectors_are_judged_by_scores_or_by_the_teachers_cosines():
    angles = np.radians([0, 10, 0, 40, 0, 90, 0, 20])
    vectors = torch.tensor(np.stack([np.cos(angles), np.sin(angles)], 1))
    pairs = TextExamples(encoded=rows([3] * 8), labels=[3.0, 1.0, 0.0, 2.0], pad_id=0)
    objective = for_head("embedding")
    assert objective.quality(list(vectors), pairs) == pytest.approx({"spearman": 1, "cosine": 1})
    texts = dataclasses.replace(pairs, labels=[]).with_teacher(list(vectors.flip(0)), [torch.ones(3)] * 8)
    figures = objective.quality(list(vectors), texts)
    mean = (vectors * vectors.flip(0)).sum(1).mean().item()
    assert figures["cosine"] == pytest.approx(mean)
    assert -1 < figures["spearman"] < 1
    assert objective.quality(list(2 * vectors.flip(0)), texts)["spearman"] == pytest.approx(1)


@pytest.mark.parametrize(
    ("wrong", "order"),
    [
        (None, None),
        ([2, 0, 1], {"0": "business", "1": "world", "2": "sport"}),
        ([1, 1, 1], None),  # it knows nothing, which is no order
    ],
)
def test_classes_in_another_order_are_found_by_the_answers(wrong, order):
    """A teacher without names for its classes is taken to have them in the order of the data's."""
    names = ("sport", "business", "world")
    true = np.arange(300) % 3
    answered = true if wrong is None else np.array(wrong)[true]
    answered = np.where(np.arange(300) % 10 == 0, 0, answered)  # some are mistakes
    expected = order and {str(number): names[wrong.index(number)] for number in range(3)}
    assert expected == order
    assert another_order(answered, true, names) == order
    assert another_order(answered[:30], true[:30], names) is None
    assert another_order(answered, true, ()) is None


def test_guesses_are_in_no_order():
    """A teacher of two classes at chance: once in some 10,000 draws it would be told to exchange them."""
    draws = np.random.default_rng(0).integers(0, 2, (2, 400, 60))
    assert [another_order(*rows, ("a", "b")) for rows in zip(*draws)] == [None] * 400


@pytest.mark.parametrize("head", ["sequence", "tokens"])
def test_a_teacher_that_is_asked_learns_nothing(head):
    batch, _, _ = make_inputs(head)
    rows = [TokenizedText(row[row != 0].tolist(), [0] * int((row != 0).sum()), False) for row in batch["input_ids"]]
    examples = Examples(
        encoded=rows, labels=[0] * len(rows), pad_id=0, inputs=("input_ids", "attention_mask", "token_type_ids")
    )
    answers, _ = ask(make_teacher(head), examples, for_head(head))
    assert not any(answer.requires_grad for answer in answers)


def test_tags_in_another_order_are_found_too():
    objective = for_head("tokens")
    rows = [[NO_LABEL, 0, 1, NO_LABEL], [1, 0, 1, 1]] * 20
    examples = SimpleNamespace(labels=rows)
    swapped = [torch.eye(2)[[0, *(1 - max(tag, 0) for tag in row[1:])]] for row in rows]
    swapped = [
        answer if row[0] == NO_LABEL else torch.eye(2)[[1 - tag for tag in row]] for answer, row in zip(swapped, rows)
    ]
    assert objective.classes_in_another_order(swapped, examples, ("DET", "NOUN")) == {"0": "NOUN", "1": "DET"}
    right = [torch.eye(2)[[max(tag, 0) for tag in row]] for row in rows]
    assert objective.classes_in_another_order(right, examples, ("DET", "NOUN")) is None
    with pytest.raises(
        InputError, match=r'By its answers they are NOUN, DET; write .* "id2label": \{"0": "NOUN", "1": "DET"\}'
    ):
        check_order(swapped, examples, objective, Labels(("DET", "NOUN")), "TEACHER")
