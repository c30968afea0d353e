"""Directories of late interaction: Stanford's, PyLate's, sentence-transformers'; and BGE-M3's. What is read, and what is refused."""

import json

import pytest
import torch
from late_models import EXPANSION, write_bge_m3, write_multi_vector, write_pylate, write_stanford
from plain_models import edit_json, write_json
from safetensors.torch import load_file, save_file

from adtp_export.data.sides import Side, Sides
from adtp_export.errors import InputError
from adtp_export.imports import ReadOptions, open_checkpoint, options_for

Q, D, MASK = 1238, 1239, 4
"""Ids of markers and of [MASK]."""
PUNCTUATION = [5, 462, 463, 466, 468, 486]
LAYOUTS = {"Stanford": write_stanford, "PyLate": write_pylate, "sentence-transformers": write_multi_vector}


def test_stanfords(tmp_path):
    checkpoint = open_checkpoint(write_stanford(tmp_path / "model"))
    assert checkpoint.sides.query == Side(marker=Q, max_tokens=24, expand_to=24)
    assert checkpoint.sides.document == Side(marker=D, max_tokens=40)
    assert (checkpoint.sides.expansion, checkpoint.sides.attends) == (MASK, False)
    assert len(checkpoint.sides.skip) == 32  # string.punctuation, one token each
    assert checkpoint.student.config.vectors["projections"] == [[32, 16, False, "none", False]]
    torch.manual_seed(3)
    assert torch.equal(checkpoint.student.projections[0].linear.weight, torch.randn(16, 32))
    assert (checkpoint.student.expansion, checkpoint.max_tokens) == (MASK, 40)
    assert any("(Stanford): a vector for each token; queries are filled up to 24 tokens" in n for n in checkpoint.notes)


def test_stanfords_without_metadata_has_its_defaults(tmp_path):
    directory = write_stanford(tmp_path / "model")
    (directory / "artifact.metadata").unlink()
    sides = open_checkpoint(directory).sides
    assert (sides.query.max_tokens, sides.document.max_tokens, sides.query.marker) == (32, 220, Q)


def test_pylates(tmp_path):
    checkpoint = open_checkpoint(write_pylate(tmp_path / "model", heads="deep"))
    assert checkpoint.sides == Sides(
        query=Side(marker=Q, max_tokens=24, expand_to=24),
        document=Side(marker=D, max_tokens=40),
        expansion=MASK,
        skip=PUNCTUATION,
    )
    assert checkpoint.student.config.vectors["projections"] == [
        [32, 24, True, "none", True],
        [24, 24, False, "none", True],
        [24, 8, False, "none", False],
    ]


def test_pylates_defaults_and_switches(tmp_path):
    names = ("query_length", "document_length", "do_query_expansion", "attend_to_expansion_tokens", "skiplist_words")
    sides = open_checkpoint(write_pylate(tmp_path / "usual", **dict.fromkeys(names))).sides
    assert (sides.query.max_tokens, sides.query.expand_to, sides.document.max_tokens, len(sides.skip)) == (
        32,
        32,
        180,
        32,
    )
    off = open_checkpoint(write_pylate(tmp_path / "off", do_query_expansion=False, query_length=12))
    assert off.sides.query == Side(marker=Q, max_tokens=12)
    assert off.student.expansion is off.sides.expansion is None
    attended = open_checkpoint(write_pylate(tmp_path / "attended", attend_to_expansion_tokens=True))
    assert (attended.sides.expansion, attended.student.expansion) == (MASK, None)  # a graph like any other


@pytest.mark.parametrize(("write", "activation"), [(write_pylate, "none"), (write_multi_vector, "tanh")])
def test_a_dense_layer_without_an_activation_has_that_of_its_class(tmp_path, write, activation):
    path = write(tmp_path / "model") / "1_Dense" / "config.json"
    fields = json.loads(path.read_text())
    del fields["activation_function"]
    write_json(path, fields)
    checkpoint = open_checkpoint(tmp_path / "model")
    assert checkpoint.student.config.vectors["projections"] == [[32, 16, False, activation, False]]


def test_sentence_transformers_own(tmp_path):
    checkpoint = open_checkpoint(write_multi_vector(tmp_path / "model"))
    assert checkpoint.settings["prompts"] == {"query": "[Q] ", "document": "[D] "}
    assert checkpoint.sides == Sides(
        query=Side(max_tokens=24, expand_to=24), document=Side(max_tokens=40), expansion=MASK, skip=PUNCTUATION
    )
    few = {**EXPANSION, "strategy": "min", "length": 10, "token": "[SEP]"}
    least = open_checkpoint(
        write_multi_vector(
            tmp_path / "min", expansion=few, mask={"skiplist_tasks": ["query", "document"]}, normalize=False
        )
    )
    assert least.sides.query == Side(max_tokens=60, expand_to=10)
    assert (least.sides.expansion, least.sides.skips_queries) == (3, True)
    assert least.student.config.vectors["normalize"] is False


@pytest.mark.parametrize(
    ("tasks", "counted"),
    [(["query"], (1, 2)), ("document", (2, 1)), (["query", "document"], (1, 1)), ([], (2, 2)), (None, (2, 1))],
    ids=str,
)
def test_words_are_skipped_where_the_directory_says(tmp_path, tasks, counted):
    sides = open_checkpoint(write_multi_vector(tmp_path / "model", mask={"skiplist_tasks": tasks})).sides
    assert tuple(sides.counts([700, PUNCTUATION[0]], name).sum() for name in ("query", "document")) == counted


@pytest.mark.parametrize("tasks", [3, ["queries"], {"query": True}], ids=str)
def test_other_tasks_are_refused(tmp_path, tasks):
    with pytest.raises(InputError, match="skiplist_tasks is .*; accepted is a list of query and document"):
        open_checkpoint(write_multi_vector(tmp_path / "model", mask={"skiplist_tasks": tasks}))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_was_read_survives_an_import(tmp_path, layout):
    from adtp_export import import_checkpoint

    before = open_checkpoint(LAYOUTS[layout](tmp_path / "model"))
    found = import_checkpoint(tmp_path / "model", tmp_path / "student")
    after = open_checkpoint(tmp_path / "student")
    assert found["head"] == "vectors"
    assert (after.sides, after.max_tokens) == (before.sides, before.max_tokens)
    assert after.student.config.vectors == before.student.config.vectors
    for name, weight in before.student.state_dict().items():
        assert torch.equal(weight, after.student.state_dict()[name])


def set_fields(**fields):
    return lambda directory: edit_json(directory / "config_sentence_transformers.json", **fields)


def set_dense(**fields):
    return lambda directory: edit_json(directory / "1_Dense" / "config.json", **fields)


def pooled(directory):
    modules = json.loads((directory / "modules.json").read_text())
    write_json(
        directory / "modules.json", [*modules, {"path": "2_Pooling", "type": "sentence_transformers.models.Pooling"}]
    )


def without_mask(directory):
    fields = json.loads((directory / "tokenizer.json").read_text().replace("[MASK]", "[WALL]"))
    write_json(directory / "tokenizer.json", fields)


BAD = {
    "marker": (set_fields(query_prefix="[Query] "), r"query_prefix is '\[Query\] ', which is no token"),
    "no marker": (set_fields(document_prefix=3), "document_prefix is 3, which is no token"),
    "long": (set_fields(query_length=65), "filled up to 65 tokens, and the model reads 64"),
    "length": (set_fields(document_length="long"), "document_length"),
    "words": (set_fields(skiplist_words="!,."), "skiplist_words is '!,.'; accepted is a list of words"),
    "no mask": (without_mask, r"filled up with '\[MASK\]', which is no token"),
    "module": (
        pooled,
        "got the module 'sentence_transformers.models.Pooling'; accepted in a model of late interaction",
    ),
    "activation": (set_dense(activation_function="evil.Tanh"), "activation_function is 'evil.Tanh'"),
    "sizes": (set_dense(in_features=31), "got one of 31 inputs after 32 outputs"),
    "residual": (set_dense(use_residual="yes"), r"vectors\.projections: got"),
}


@pytest.mark.parametrize("name", BAD)
def test_pylates_that_are_refused(tmp_path, name):
    change, told = BAD[name]
    directory = write_pylate(tmp_path / "model")
    change(directory)
    with pytest.raises(InputError, match=told):
        open_checkpoint(directory)


def test_local_layers_have_to_see_something(tmp_path):
    """transformers' two implementations of attention answer differently there."""
    local = {"model_type": "modernbert", "local_attention": 20, "global_attn_every_n_layers": 2, "pad_token_id": 0}
    special = {"bos_token_id": 2, "eos_token_id": 3, "cls_token_id": 2, "sep_token_id": 3}
    with pytest.raises(InputError, match="layers with a window see 10 back"):
        open_checkpoint(write_pylate(tmp_path / "model", backbone={**local, **special}))
    open_checkpoint(write_pylate(tmp_path / "near", backbone={**local, **special}, query_length=11))


def test_others_that_are_refused(tmp_path):
    stanford = write_stanford(tmp_path / "stanford")
    with pytest.raises(InputError, match="--head: got embedding, and"):
        open_checkpoint(stanford, ReadOptions(head="embedding"))
    weights = load_file(stanford / "model.safetensors")
    del weights["linear.weight"]
    save_file(weights, stanford / "model.safetensors", {"format": "pt"})
    with pytest.raises(InputError, match=r"linear\.weight is missing"):
        open_checkpoint(stanford)
    (stanford / "artifact.metadata").write_text("[")
    with pytest.raises(InputError, match=r"artifact\.metadata is no JSON"):
        open_checkpoint(stanford)
    for number, (fields, told) in enumerate(
        (
            ({"expansion": {"strategy": "most", "length": 9}}, "query_expansion is"),
            ({"expansion": {**EXPANSION, "token": "[WALL]"}}, r"filled up with '\[WALL\]'"),
            ({"mask": {"keep_only_token_ids": [9]}}, "keep_only_token_ids is set, as for images"),
        )
    ):
        with pytest.raises(InputError, match=told):
            open_checkpoint(write_multi_vector(tmp_path / str(number), **fields))


def test_a_student_says_the_same_of_graph_and_texts(tmp_path):
    from adtp_export import import_checkpoint

    import_checkpoint(write_pylate(tmp_path / "model"), tmp_path / "student")
    fields = json.loads((tmp_path / "student" / "config.json").read_text())
    fields["vectors"]["expansion"] = None
    write_json(tmp_path / "student" / "config.json", fields)
    with pytest.raises(InputError, match="the expansion that is not attended to is 4 in adtp"):
        open_checkpoint(tmp_path / "student")


def test_bge_m3_needs_leave_to_read_pickles(tmp_path):
    directory = write_bge_m3(tmp_path / "model")
    with pytest.raises(InputError, match="unpickling can run code. Add --allow-pickle"):
        open_checkpoint(directory)
    dense = open_checkpoint(directory, ReadOptions(head="embedding"))
    assert dense.student.config.head == "embedding"
    whole = open_checkpoint(directory, ReadOptions(allow_pickle=True))
    assert whole.student.config.head == "hybrid"
    assert whole.sides == Sides(unweighted=[0, 1, 2])  # [PAD], [UNK], [CLS]: a BERT's tokenizer says no eos_token
    assert whole.sha256 != dense.sha256
    torch.manual_seed(4)
    assert torch.equal(whole.student.token_projections[0].linear.weight, torch.nn.Linear(32, 32).weight)
    known = {"head": "hybrid"}
    assert open_checkpoint(directory, options_for(directory, known, True)).sha256 == whole.sha256
    with pytest.raises(InputError, match="--head: got tokens"):
        open_checkpoint(directory, ReadOptions(allow_pickle=True, head="tokens"))


class Evil:
    """Runs code where it is unpickled without care."""

    def __reduce__(self):
        return (exec, ("raise SystemExit('the pickle ran')",))


@pytest.mark.parametrize(
    ("stored", "told"),
    [
        (Evil(), "colbert_linear.pt cannot be read"),
        ({"weight": torch.ones(32, 31), "bias": torch.ones(32)}, r"accepted are a weight \(n, 32\) and a bias"),
        ([torch.ones(1)], "holds list"),
        ({"weight": torch.full((32, 32), torch.nan), "bias": torch.ones(32)}, "NaN or infinite weights"),
    ],
    ids=["code", "shape", "kind", "nan"],
)
def test_pickles_of_something_else_are_refused(tmp_path, stored, told):
    directory = write_bge_m3(tmp_path / "model")
    torch.save(stored, directory / "colbert_linear.pt")
    with pytest.raises(InputError, match=told):
        open_checkpoint(directory, ReadOptions(allow_pickle=True))
