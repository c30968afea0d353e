"""Students are made of teachers by the names of weights, and retainers learn at a rate of their own."""

import pytest
import torch
from testbed import TINY_BERT
from transformers import AutoTokenizer, BertConfig, BertForSequenceClassification

from adtp_export.data.tokenize import TokenizedText
from adtp_export.errors import InputError
from adtp_export.training.data import Examples, Labels
from adtp_export.training.methods.adtp import Distillation, first_shares
from adtp_export.training.models import labels_of_teacher, make_student, save_model, student_config
from adtp_export.training.settings import TrainOptions
from adtp_export.training.trainer import Audience, Narrator, Stage, StageTrainer

KINDS = pytest.mark.parametrize(
    "kind",
    [{}, {"ratio": "static"}, {"method": "random"}, {"method": "layers"}],
    ids=["adaptive", "static", "random", "layers"],
)


def test_everybody_who_reads_new_files_reads_checkpoints(demo, tmp_path):
    """safetensors alone gives rights to their owner only."""
    (tmp_path / "new").write_text("")
    save_model(make_teacher(), AutoTokenizer.from_pretrained(demo), tmp_path)
    assert (tmp_path / "model.safetensors").exists()
    assert len({file.stat().st_mode for file in tmp_path.iterdir()}) == 1


def make_teacher(**fields):
    torch.manual_seed(0)
    return BertForSequenceClassification(BertConfig(**{**TINY_BERT, "num_hidden_layers": 6, "num_labels": 3, **fields}))


def make_rows(count, n):
    """Texts of n tokens."""
    encoded = [TokenizedText([1] * n, [0] * n, False)] * count
    return Examples(encoded=encoded, labels=[i % 2 for i in range(count)], pad_id=0)


@KINDS
@pytest.mark.parametrize(("layers", "chosen"), [(None, range(6)), (3, (1, 3, 5)), (2, (2, 5)), (4, (1, 2, 3, 5))])
def test_layers_are_spread_over_the_teachers(kind, layers, chosen):
    teacher = make_teacher()
    student = make_student(teacher, TrainOptions(**kind, layers=layers))
    assert student.backbone.num_layers == len(chosen)
    for i, number in enumerate(chosen):
        own, theirs = (m.base_model.encoder.layer[j].state_dict() for m, j in ((student.dense, i), (teacher, number)))
        assert all(torch.equal(own[name], theirs[name]) for name in theirs)
    assert torch.equal(student.get_input_embeddings().weight, teacher.get_input_embeddings().weight)
    assert student.num_labels == 3
    assert student.config.id2label == teacher.config.id2label


@KINDS
def test_weights_that_are_not_the_students_are_named(kind):
    teacher = make_teacher()
    teacher.register_parameter("adapter", torch.nn.Parameter(torch.zeros(2)))
    with pytest.raises(InputError, match="differ from the student's in adapter"):
        make_student(teacher, TrainOptions(**kind))
    teacher = make_teacher()
    del teacher.base_model.pooler.dense.bias
    with pytest.raises(InputError, match="differ from the student's in .*pooler.dense.bias"):
        make_student(teacher, TrainOptions(**kind))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layers": 7}, "--layers: got 7; the teacher has 6"),
        ({"prune_sites": "6.ffn"}, "in a model of 6 layers"),
        ({"prune_sites": "6.ffn", "ratio": "static"}, "in a model of 6 layers"),
        ({"prune_sites": "0.attention"}, "the earliest site is '0.ffn'"),
        ({"ratio": "static", "retention": "0.0002"}, "--retention: got '0.0002'; accepted is from 0.001 to 1"),
    ],
)
def test_students_that_cannot_be(change, message):
    with pytest.raises(InputError) as caught:
        student_config(make_teacher().config, TrainOptions(**change))
    assert message.lower() in str(caught.value).lower()


@KINDS
def test_pruners_learn_at_their_own_rate(kind, tmp_path):
    own = {} if kind.get("method") == "layers" else {"retainer_learning_rate": 1e-2}  # which has no pruners
    settings = TrainOptions(**kind, learning_rate=1e-4, **own)
    student = make_student(make_teacher(), settings)
    model = Distillation(student, settings, [0.5])
    rows = make_rows(4, 2)
    rates = dict.fromkeys(student.pruners.parameters(), settings.retainer_learning_rate)
    stage = Stage(model=model, examples=rows, judged=dict, epochs=1, rate=1e-4, work=tmp_path, rates=rates)
    trainer = StageTrainer(stage, settings, Narrator(Audience(print, print)))
    given = {p: group["lr"] for group in trainer.create_optimizer().param_groups for p in group["params"]}
    assert set(given) == set(model.parameters())
    for name, parameter in student.named_parameters():
        assert given[parameter] == (1e-2 if "_predictor" in name else 1e-4), name


def test_the_first_share_counts_the_floor_of_kept_tokens():
    """With a floor of 8, texts of 10 tokens keep 80% at any ratio below that, so the lowest share meets a wanted 50%."""
    rows = make_rows(3, 10)
    rows = rows.with_teacher(torch.zeros(3, 2), [torch.rand(10) + 0.1 for _ in range(3)])
    share = first_shares(rows, TrainOptions(retention="0.5", min_tokens=8))[0]
    assert share < 1e-5
    assert first_shares(rows, TrainOptions(retention="0.5"))[0] > 0.2


@pytest.mark.parametrize("problem_type", ["multi_label_classification", "regression"])
def test_a_teacher_of_another_problem_is_refused(problem_type):
    """Its student would be trained on one class for each text, and answer otherwise."""
    config = make_teacher(problem_type=problem_type).config
    with pytest.raises(
        InputError, match=f"problem_type is '{problem_type}'; accepted is 'single_label_classification'"
    ):
        labels_of_teacher("t", config, Labels(("a", "b", "c")))
    config.problem_type = "single_label_classification"
    assert labels_of_teacher("t", config, Labels(("a", "b", "c"))).names == ("a", "b", "c")


def test_labels_are_those_of_the_teacher_and_rows_may_lack_one():
    config = make_teacher().config
    config.id2label = {0: "b", 1: "c", 2: "a"}
    for known in (("a", "b", "c"), ("a", "c")):
        assert labels_of_teacher("t", config, Labels(known)).names == ("b", "c", "a")
    with pytest.raises(
        InputError,
        match="it knows b, c, a, the data has a, d; write the data's labels as the teacher names them, .* id2label",
    ):
        labels_of_teacher("t", config, Labels(("a", "d")))


def test_a_teacher_whose_classes_have_no_names_may_have_ten_and_more():
    """As names, LABEL_10 comes before LABEL_2."""
    config = make_teacher(num_labels=12).config
    names = tuple(f"LABEL_{number}" for number in range(12))
    assert labels_of_teacher("t", config, Labels(tuple(sorted(names)))).names == names
