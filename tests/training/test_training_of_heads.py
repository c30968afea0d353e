"""From rows to a checkpoint, for every head: what is read, what is written, interrupted or not, and what is refused."""

import gzip
import json
import random
import shutil
from pathlib import Path

import pytest
import torch
from representatives import only
from safetensors.torch import load_file
from tokenizers.processors import TemplateProcessing
from torch.nn.functional import cosine_similarity
from training_runs import Heard
from transformers import AutoModel, AutoModelForQuestionAnswering, AutoModelForTokenClassification

import adtp_export
from adtp_export.contract import HEAD_SPANS, HEAD_TOKENS
from adtp_export.data.labelled import Question, read_questions
from adtp_export.data.tokenize import strings
from adtp_export.data.windows import Windows
from adtp_export.errors import InputError
from adtp_export.imports import open_checkpoint
from adtp_export.inference.answers import spans
from adtp_export.pipeline.train.train import train
from adtp_export.training.data import Labels, Table
from adtp_export.training.evaluate import ask
from adtp_export.training.models import load_config, load_tokenizer
from adtp_export.training.objectives import Reader, for_head
from adtp_export.training.objectives.spans import in_context
from adtp_export.training.settings import TrainOptions
from adtp_export.training.task import choose_head, read_task

FAST = {
    "max_tokens": 24,
    "dev_share": 0.2,
    "batch_size": 8,
    "teacher_learning_rate": 2e-3,
    "learning_rate": 1e-3,
    "epochs": 1,
    "evaluations": 2,
    "retention": 0.5,
}
WORDS = ["the", "room", "was", "small", "and", "clean", "hotel", "near", "station", "great"]


def asked(rng, number):
    """A question about a word of a context; each third one has no answer. Some contexts are longer than a window."""
    words = rng.choices(WORDS, k=rng.randint(5, 40))
    place = rng.randrange(len(words))
    begin = len(" ".join([*words[:place], ""]))
    answers = {"text": [words[place]], "answer_start": [begin]} if number % 3 else {"text": [], "answer_start": []}
    return {"question": f"was it {words[place]}?", "context": " ".join(words), "answers": answers}


def tagged(rng, number):
    words = rng.choices(WORDS, k=rng.randint(2, 12))
    return {"tokens": words, "tags": ["B-X" if word in ("room", "hotel", "station") else "O" for word in words]}


MAKERS = {
    "tags": tagged,
    "spans": asked,
    "texts": lambda rng, number: {"text": " ".join(rng.choices(WORDS, k=9))},
    "pairs": lambda rng, number: {
        "sentence1": " ".join(rng.choices(WORDS, k=9)),
        "sentence2": " ".join(rng.choices(WORDS, k=5)),
        "label": rng.random(),
    },
}


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    directory, rng = tmp_path_factory.mktemp("rows"), random.Random(0)
    for name, make in MAKERS.items():
        for split, count in (("train", 24), ("test", 9)):
            text = "".join(json.dumps(make(rng, i)) + "\n" for i in range(count))
            (directory / f"{name}-{split}.jsonl").write_text(text)
    return directory


class Stopped(Heard):
    """Stops the run at the student's second evaluation."""

    def note(self, text):
        super().note(text)
        if sum("kept_0.ffn" in note for note in self.notes) == 2:
            raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("name", "auto", "head", "teacher"),
    [
        pytest.param(
            "tags",
            AutoModelForTokenClassification,
            HEAD_TOKENS,
            {"precision", "recall", "f1", "accuracy"},
            marks=pytest.mark.slow,
        ),
        ("spans", AutoModelForQuestionAnswering, HEAD_SPANS, {"exact", "f1", "has_answer_f1", "no_answer_accuracy"}),
    ],
)
def test_a_run_ends_with_a_checkpoint_that_answers_as_judged(name, auto, head, teacher, base, rows, tmp_path):
    """Fine-tuned, attributed and distilled; the tagger, interrupted and resumed, has the same weights to the bit."""
    data = {"train": str(rows / f"{name}-train.jsonl"), "test": str(rows / f"{name}-test.jsonl"), "base": str(base)}
    steps = Heard()
    record = train(tmp_path / "whole", steps=steps, **data, **FAST)
    assert record["task"] == name
    assert set(record["teacher"]) == teacher <= set(record["student"])
    assert 0 < record["student"]["retention"]["0.ffn"] < 1
    assert record["student"]["flops_reduction"]["packed"] > 1
    config = json.loads((tmp_path / "whole" / "config.json").read_text())
    assert (config["model_type"], config["head"], config["pruning"]["method"]) == ("pruned_encoder", head, "adtp")
    student, task = auto.from_pretrained(tmp_path / "whole"), read_task(TrainOptions(**data, max_tokens=24))
    answers, _ = ask(student, task.parts["test"], task.objective)
    figures = task.objective.quality(answers, task.parts["test"])
    assert figures == {measure: record["student"][measure] for measure in teacher}
    if name == "spans":
        assert "windows" in next(note for note in steps.notes if "rows; spans" in note)
        assert len(task.parts["test"]) > len(task.tables["test"])
        windows = {"max_tokens": 24, "stride": 6, "max_answer_tokens": 30}
        assert config["windows"] == windows
        told = answers_of_the_export(tmp_path / "whole", data["test"], windows)
        assert told == pytest.approx({measure: record["student"][measure] for measure in teacher})
        return
    assert student.config.id2label == {0: "B-X", 1: "O"}
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path / "again", steps=Stopped(), **data, **FAST)
    assert train(tmp_path / "again", resume=True)["student"] == record["student"]
    whole, resumed = (load_file(tmp_path / run / "model.safetensors") for run in ("whole", "again"))
    assert all(whole[weight].equal(resumed[weight]) for weight in whole)


@pytest.mark.parametrize("name", only(["tags", "spans", "texts"], ["spans"]))
def test_fewer_layers_learn_every_task(name, base, rows, pipeline, tmp_path):
    """Without pruners; vectors have no labels, so the teacher's alone are learned from."""
    data = {"train": str(rows / f"{name}-train.jsonl"), "test": str(rows / f"{name}-test.jsonl")}
    models = {"teacher": str(pipeline), "task": "embedding"} if name == "texts" else {"base": str(base)}
    short = {option: value for option, value in FAST.items() if option != "retention"}
    record = train(tmp_path / "out", method="layers", layers=1, **data, **models, **short)
    student = open_checkpoint(tmp_path / "out").student
    assert (student.site_names, student.backbone.num_layers) == ((), 1)
    assert record["student"]["flops_reduction"]["teacher"] == 2


def answers_of_the_export(model, file, windows):
    """Export a model; see that its manifest judges what `load` answers, and return the measures."""
    out = model.parent / "out"
    manifest = adtp_export.export(model, out, verify_data=file, label_column="answers")
    assert json.loads((out / "config.json").read_text())["adtp"]["windows"] == windows
    asked, answer = list(read_questions(Path(file))), adtp_export.load(out)
    found = answer([(question.question, question.context) for question in asked], may_be_none=True)
    told = spans.quality([each.answer for each in found], [question.answers for question in asked])
    assert manifest.measures == pytest.approx(told)
    return told


@pytest.fixture
def pipeline(headless, tmp_path):
    """A sentence-transformers directory whose vectors are the first state, of length 1. It has a prompt, and its encoder a folder."""
    directory = tmp_path / "pipeline"
    shutil.copytree(headless, directory / "0_Transformer")
    (directory / "0_Transformer" / "sentence_bert_config.json").write_text(
        '{"max_seq_length": 40, "do_lower_case": true}'
    )
    prompts = {"prompts": {"about": "a review about "}, "default_prompt_name": "about"}
    (directory / "config_sentence_transformers.json").write_text(json.dumps(prompts))
    kinds = {"0_Transformer": "Transformer", "1_Pooling": "Pooling", "2_Normalize": "Normalize"}
    modules = [
        {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for i, (path, kind) in enumerate(kinds.items())
    ]
    (directory / "modules.json").write_text(json.dumps(modules))
    (directory / "1_Pooling").mkdir()
    pooling = {"word_embedding_dimension": 32, "pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}
    (directory / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    return directory


@pytest.mark.parametrize(("name", "settings"), [("texts", {}), ("pairs", {"ratio": "static", "layers": 1})])
def test_vectors_are_distilled_from_a_model_as_it_is(name, settings, headless, pipeline, rows, tmp_path):
    """From texts and a sentence-transformers directory; and from pairs with scores and a plain encoder, whose vectors are means."""
    teacher = pipeline if name == "texts" else headless
    files = {"train": str(rows / f"{name}-train.jsonl"), "test": str(rows / f"{name}-test.jsonl")}
    data = {**files, "dev_share": 0.2, "teacher": str(teacher), "task": "embedding", "max_tokens": 24}
    record = train(tmp_path / "out", **{**FAST, **data}, **settings)
    assert record["task"] == "embedding"
    assert set(record["teacher"]) == {"spearman", "cosine"} <= set(record["student"])
    assert record["teacher"]["cosine"] == pytest.approx(1)
    assert not (tmp_path / "out" / "teacher").exists()
    checkpoint = open_checkpoint(tmp_path / "out")
    told = {"prompts": {"about": "a review about "}, "prompt": "about", "max_tokens": 40} if name == "texts" else {}
    assert checkpoint.settings == told
    student = checkpoint.student
    assert student.settings.pooling == ("first" if name == "texts" else "mean")
    assert student.settings.normalize == (name == "texts")
    assert student.backbone.num_layers == settings.get("layers", 2)
    task = read_task(TrainOptions(**data))
    batch = task.parts["test"].collate(range(len(task.parts["test"])))
    begin = task.tokenizer.convert_ids_to_tokens(batch["input_ids"][0, 1:4])
    assert (begin == ["a", "re", "##v"]) == (name == "texts")
    dense = AutoModel.from_pretrained(headless)(**batch).last_hidden_state
    mean = (dense * batch["attention_mask"][:, :, None]).sum(1) / batch["attention_mask"].sum(1, keepdim=True)
    learned, other = (dense[:, 0], mean) if name == "texts" else (mean, dense[:, 0])
    torch.manual_seed(12345)  # training has set the one that the teacher may have been drawn by
    stranger = AutoModel.from_config(AutoModel.from_pretrained(headless).config).eval()(**batch).last_hidden_state[:, 0]
    vectors = student(**batch).sentence_embedding
    near, *far = (cosine_similarity(vectors, others) for others in (learned, other, stranger))
    assert record["student"]["cosine"] == pytest.approx(near.mean().item())
    assert all((near > cosines).all() for cosines in far)  # its teacher's vectors, made in the teacher's way
    with pytest.raises(InputError, match="is a student that drops tokens already"):
        train(tmp_path / "b", **{**data, "teacher": tmp_path / "out"})


def test_the_task_follows_from_the_columns(rows, tmp_path):
    with gzip.open(tmp_path / "a.jsonl.gz", "wt") as stream:
        stream.write((rows / "spans-train.jsonl").read_text())
    (tmp_path / "squad.json").write_text("{}")
    for path, head in (
        (rows / "tags-train.jsonl", "tokens"),
        (tmp_path / "a.jsonl.gz", "spans"),
        (tmp_path / "squad.json", "spans"),
        (rows / "pairs-train.jsonl", "sequence"),
        (tmp_path / "x.tsv", "sequence"),
    ):
        assert choose_head(TrainOptions(train=str(path))) == head
    assert choose_head(TrainOptions(train=str(rows / "tags-train.jsonl"), task="classification")) == "sequence"


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"tokens": ["a", "b"], "tags": ["O"]}, "row 2 has 2 words and 1 tags; accepted is one tag for each word"),
        ({"tokens": ["\u200b"], "tags": ["O"]}, r"row 2: its 1 tags do not align with tokens: .* take the row out"),
        ({"tokens": ["a"]}, "row 2 has no 'tags'"),
    ],
)
def test_tags_that_do_not_align_with_tokens(row, message, base, tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps(r) + "\n" for r in ({"tokens": ["a", "b"], "tags": ["O", "X"]}, row)))
    objective, settings = for_head("tokens"), TrainOptions()
    reader = Reader(load_tokenizer(str(base)), load_config(str(base)), Windows(32))

    def read():
        table = objective.read(path, settings)
        return objective.examples(table, objective.labels(table, settings), reader)

    with pytest.raises(InputError, match=message):
        read()


def test_an_answer_with_spaces_around_it_is_where_its_words_are(base, tmp_path):
    """Though no token stands for a space at the end of the context."""
    context, path = " the room was clean ", tmp_path / "a.jsonl"
    answers = [("clean", 14), ("clean ", 14), (" clean ", 13), ("the", 1), (" the", 0), ("room", 5)]
    rows = (
        {"question": "how?", "context": context, "answers": {"text": [t], "answer_start": [at]}} for t, at in answers
    )
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    objective, settings = for_head("spans"), TrainOptions()
    table = objective.read(path, settings)
    reader = Reader(load_tokenizer(str(base)), load_config(str(base)), Windows(32))
    clean, spaced, spaces, the, before, room = objective.examples(
        table, objective.labels(table, settings), reader
    ).labels
    assert clean == spaced == spaces
    assert the == before
    assert len({(0, 0), clean, the, room}) == 4


def test_a_row_without_any_token_is_named(base, tmp_path):
    """Tokenizers of decoders may add no token of their own."""
    path, tokenizer = tmp_path / "a.jsonl", load_tokenizer(str(base))
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="$A")
    rows = {"tokens": ["a", "b"], "tags": ["O", "X"]}, {"tokens": [""], "tags": ["O"]}
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    objective, settings = for_head("tokens"), TrainOptions()
    table = objective.read(path, settings)
    with pytest.raises(InputError, match="row 2: its 1 tags do not align with tokens"):
        objective.examples(
            table, objective.labels(table, settings), Reader(tokenizer, load_config(str(base)), Windows(32))
        )


WORDPIECES = {"room": 1, "hotel-like": 3, "xylophonist": 2}
"""Words, and how many pieces they have at least."""


def test_a_tag_is_its_words_first_piece(base):
    objective, tokenizer = for_head("tokens"), load_tokenizer(str(base))
    words = [*WORDPIECES, "\u200b", "the"]
    table = Table("a.jsonl", [words], [["X", "O", "X", "O", "O"]])
    rows = objective.examples(table, Labels(("O", "X")), Reader(tokenizer, load_config(str(base)), Windows(64)))
    tokens, labels = strings(tokenizer.backend_tokenizer, rows.encoded[0].input_ids), rows.labels[0]
    assert [label for label in labels if label != -100] == [1, 0, 1, 0]  # nothing is left of the fourth word
    assert len(tokens) >= 3 + sum(WORDPIECES.values())
    firsts = [i for i, label in enumerate(labels) if label != -100]
    for word, begin, end in zip([*WORDPIECES, "the"], firsts, [*firsts[1:], len(tokens) - 1]):
        assert "".join(token.removeprefix("##") for token in tokens[begin:end]) in (word, "[UNK]" * (end - begin))
    cut = objective.examples(table, Labels(("O", "X")), Reader(tokenizer, load_config(str(base)), Windows(4)))
    assert [label for label in cut.labels[0] if label != -100] == [1, 0]


def test_an_answer_is_found_in_the_windows_that_hold_it(base):
    objective, tokenizer = for_head("spans"), load_tokenizer(str(base))
    context = " ".join(f"room {i} was clean," for i in range(30))
    begin = context.index("room 9 was")
    asked = [Question("was it clean?", context, ("room 9 was",), (begin,)), Question("was it clean?", "no", (), ())]
    table = Table("a.jsonl", asked, [("room 9 was",), ()])
    rows = objective.examples(table, Labels(()), Reader(tokenizer, load_config(str(base)), Windows(48, 12)))
    assert rows.owners == [0] * (len(rows) - 1) + [1]
    assert rows.labels[-1] == (0, 0)
    held = 0
    for (first, last), places in zip(rows.labels[:-1], map(in_context, rows.placed)):
        inside = [place for place in places if place]
        if inside[0][0] <= begin and inside[-1][1] >= begin + len("room 9 was"):
            held += 1
            assert context[places[first][0] : places[last][1]] == "room 9 was"
        else:
            assert (first, last) == (0, 0)
    assert 1 <= held < len(rows) - 1


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"train": "texts", "task": "embedding", "base": "{base}"}, "give the model as --teacher, not as --base"),
        ({"train": "texts", "task": "embedding", "teacher": "{base}", "ablate": "teacher"}, "has no other loss"),
        (
            {"train": "texts", "task": "embedding", "teacher": "{base}", "label_column": "score"},
            "--label-column: says how alike two texts are",
        ),
        ({"train": "texts", "task": "embedding", "teacher": "{base}", "temperature": 5.0}, "--temperature: got 5 for"),
        (
            {"train": "texts", "task": "spans", "base": "{base}", "text_column": "x"},
            "--text-column: got 'x'; questions are",
        ),
        ({"train": "texts", "task": "tags", "base": "{base}"}, "row 1 has no 'tokens'; it has text"),
        ({"train": "texts", "task": "tag", "base": "{base}"}, "--task: got 'tag'; accepted are auto, classification"),
        ({"train": "texts", "task": "spans", "base": "{base}"}, "row 1 has no 'question'"),
        ({"train": "tags", "test": "other", "base": "{base}"}, "row 1 has the tag 'Z'; the tags are B-X, O"),
        ({"train": "tags", "test": "empty", "base": "{base}"}, "row 1 has the tag ''; the tags are B-X, O"),
        ({"train": "same", "base": "{base}"}, "all words have the tag 'O'"),
        ({"train": "unanswered", "base": "{base}"}, "no question has an answer"),
        ({"train": "tags", "teacher": "{base}"}, "no teacher: the model is BertForSequenceClassification"),
        ({"train": "spans", "teacher": "{base}"}, "no teacher: its file has no qa_outputs.bias"),
        ({"data": "conll2003", "task": "tags", "base": "{base}"}, "accepted is --train FILE"),
        ({"train": "texts", "test": "few", "task": "embedding", "teacher": "{base}"}, "a correlation takes at least 3"),
        ({"train": "tags", "base": "{rows}"}, "the model cannot be loaded"),
    ],
)
def test_what_cannot_be_trained_is_one_message(given, message, base, rows, tmp_path):
    more = {
        "other": [{"tokens": ["a"], "tags": ["Z"]}],
        "empty": [{"tokens": ["a", "b"], "tags": ["O", ""]}],
        "same": [{"tokens": ["a"], "tags": ["O"]}] * 4,
        "unanswered": [{"question": "?", "context": "a", "answers": {"text": [], "answer_start": []}}] * 4,
        "few": [{"text": "a"}] * 2,
    }
    for name, content in more.items():
        (rows / f"{name}-train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in content))
    given = {k: v.format(base=base, rows=rows) if isinstance(v, str) else v for k, v in given.items()}
    for split in ("train", "test"):
        if split in given:
            given[split] = rows / f"{given[split]}-train.jsonl"
    with pytest.raises(InputError) as caught:
        train(tmp_path / "out", max_tokens=24, dev_share=0.2, **given)
    assert message in str(caught.value)
    assert not (tmp_path / "out").exists()
