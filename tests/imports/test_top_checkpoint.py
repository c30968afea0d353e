"""ToP's own checkpoint and its own answers, checkpoints of other shapes, and what is refused."""

import json
import shutil

import numpy as np
import pytest
import torch
from originals import AgainstReference, Original, edit
from safetensors.torch import save_file

from adtp_export.errors import InputError
from adtp_export.imports import ReadOptions, open_checkpoint
from adtp_export.model.encoder import PrunedEncoder
from adtp_export.model.pruners.top import TopPruner, TopSettings

READ = ReadOptions(allow_pickle=True)


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    """Its third site is switched off."""
    return Original.open("top", tmp_path_factory, rows=(0, 1, 3))


def test_masks_are_those_of_the_original(original):
    student = original.checkpoint.student
    assert original.told["pruner_z"] == [1, 1, 0, 1]
    assert student.site_names == ("2.attention", "3.attention", "5.attention")
    assert student.config.settings.bins == [original.told["token_z"][i] for i in original.rows]
    assert any("1 drops nothing" in note for note in original.checkpoint.notes)


class TestAgainstReference(AgainstReference):
    pass


def test_the_original_answers_alike_where_it_keeps_the_same(original):
    """It counts padding and dropped tokens as queries, so it chooses others; `golden.json` says 4.9e-07 where it does not."""
    logits = original.checkpoint.student(**original.batch).logits.numpy()
    kept, theirs = original.kept(), original.golden["orig_kept"]
    assert np.array_equal(kept.sum((1, 2)), theirs.sum((1, 2)))  # as many in all rows
    same = (kept == theirs).all((0, 2))
    assert same.sum() == original.told["rows_with_equal_kept"] > 0
    assert np.abs(logits - original.golden["orig_logits"])[same].max() <= original.tolerance + 4.9e-7


def test_dropped_tokens_keep_the_state_of_the_reference(original):
    original.check_states()


@pytest.mark.parametrize("mistake", ["masks", "order"])
def test_planted_mistakes_are_noticed(original, mistake, monkeypatch):
    """Another mask at one site, and the ranks the other way round."""
    pruner, other = original.checkpoint.student.pruners["2_attention"], TopPruner(TopSettings(["1" * 20]), "", 0, 96, 3)
    made = {"masks": other.keeps, "order": lambda n, rank, keeps=pruner.keeps: keeps(n, n - 1 - rank)}
    monkeypatch.setattr(pruner, "keeps", made[mistake])
    assert not np.array_equal(original.kept(), original.golden["ref_kept"])


@pytest.fixture
def copied(tmp_path, original):
    return original.copy(tmp_path / "top")


def masks(directory, **changes):
    """Write other masks into a copy; None leaves one out."""
    stored = torch.load(directory / "zs.pt", weights_only=True)
    stored = {name: value for name, value in {**stored, **changes}.items() if value is not None}
    torch.save(stored, directory / "zs.pt")
    return directory


def test_other_bins_sites_and_precisions(copied):
    """Two sites of 7 bins in fp16, and values between 0 and 1, which the original takes for 1."""
    ranks = torch.tensor([[1, 0.5, 0, 1, 1, 0, 0], [0, 0, 1, 1, 1, 1, 1]], dtype=torch.float16)
    student = open_checkpoint(masks(copied, token_z=ranks, pruner_z=torch.ones(2, dtype=torch.float16)), READ).student
    assert student.site_names == ("4.attention", "5.attention")
    assert student.config.settings.bins == ["1101100", "0011111"]


def test_all_sites_switched_off_is_a_plain_encoder(copied, original):
    checkpoint = open_checkpoint(masks(copied, pruner_z=torch.zeros(4)), READ)
    assert checkpoint.student.site_names == ()
    assert any("4 drop nothing" in note for note in checkpoint.notes)
    dense = checkpoint.student.dense(**original.batch).logits
    torch.testing.assert_close(checkpoint.student(**original.batch).logits, dense, rtol=1e-5, atol=1e-6)


def as_safetensors(directory):
    weights = torch.load(directory / "pytorch_model.bin", weights_only=True)
    (directory / "pytorch_model.bin").unlink()
    return weights


def test_safetensors_and_leftovers_of_its_training(copied, original):
    """Its loss has a matrix of its own; its model for questions has a pooler that nothing reads."""
    weights = as_safetensors(copied)
    weights["layer_transformation.weight"] = torch.eye(96)
    weights["qa_outputs.weight"], weights["qa_outputs.bias"] = torch.randn(2, 96), torch.zeros(2)
    classifier = {name: weights.pop(name) for name in ("classifier.weight", "classifier.bias")}
    save_file(weights, copied / "model.safetensors")
    checkpoint = open_checkpoint(edit(copied, architectures=["ToPBertForQuestionAnswering"]), READ)
    assert checkpoint.student.config.head == "spans"
    assert checkpoint.student.site_names == original.checkpoint.student.site_names
    assert any("pooler" in note for note in checkpoint.notes)
    (copied / "model.safetensors").unlink()
    save_file({**weights, **classifier}, copied / "model.safetensors")
    with pytest.raises(InputError, match="zs.pt is a pickle, .* Add --allow-pickle"):
        open_checkpoint(edit(copied, architectures=["ToPBertForSequenceClassification"]))


def test_on_roberta(tmp_path, copied):
    """The paper has RoBERTa, too; `zs.pt` alone says whose it is."""
    write_roberta(tmp_path / "roberta")
    shutil.copy(copied / "zs.pt", tmp_path / "roberta")
    masks(tmp_path / "roberta", token_z=torch.ones(2, 5), pruner_z=torch.tensor([0.0, 1.0]))
    student = open_checkpoint(tmp_path / "roberta", READ).student
    assert isinstance(student, PrunedEncoder)
    assert (student.dense.config.model_type, student.site_names) == ("roberta", ("2.attention",))


def write_roberta(directory):
    from testbed import make_encoder

    make_encoder("roberta", "none").dense.save_pretrained(directory)
    words = ["<s>", "<pad>", "</s>", "<unk>", "[CLS]", "[SEP]", "[PAD]", "[UNK]", *(f"w{i}" for i in range(80))]
    (directory / "vocab.txt").write_text("\n".join(words))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"token_z": torch.ones(20)}, r"got token_z \(20,\), pruner_z \(4,\); accepted are token_z \(sites, bins\)"),
        ({"token_z": torch.ones(6, 20), "pruner_z": torch.ones(6)}, "for 1 to 5 sites of a model of 6 layers"),
        ({"pruner_z": torch.ones(3)}, r"pruner_z \(3,\); accepted"),
        ({"pruner_z": None}, "pruner_z missing; accepted"),
        ({"token_z": torch.ones(4, 0)}, "accepted are 1 to 1000 bins"),
        ({"token_z": torch.full((4, 20), torch.nan)}, "token_z holds values that are not from 0 to 1"),
        ({"pruner_z": torch.tensor([1.0, -1, 0, 1])}, "pruner_z holds values that are not"),
        ({"token_z": "masks"}, "accepted is a dictionary of the tensors token_z and pruner_z"),
        ({"head_z": torch.zeros(6, 3)}, "got 'head_z', which masks more than tokens"),
    ],
)
def test_bad_masks_are_named(copied, changes, message):
    with pytest.raises(InputError, match=message):
        open_checkpoint(masks(copied, **changes), READ)


def test_a_file_that_is_no_dictionary_or_no_pickle(copied):
    torch.save([torch.ones(4, 20), "token_z"], copied / "zs.pt")
    with pytest.raises(InputError, match="zs.pt holds list; accepted is a dictionary"):
        open_checkpoint(copied, READ)
    (copied / "zs.pt").write_bytes(b"token_z")
    with pytest.raises(InputError, match="zs.pt cannot be read"):
        open_checkpoint(copied, READ)


def test_its_module_is_not_opened(copied):
    (copied / "zs.pt").rename(copied / "l0_module.pt")
    with pytest.raises(InputError, match="zs.pt is missing.* l0_module.pt, which runs code .*, is not opened"):
        open_checkpoint(copied, READ)


def test_masks_of_cofi_are_not_tops(copied):
    """CoFi has a `zs.pt` of other masks: such a directory is read as the encoder that it is."""
    torch.save({"head_z": torch.ones(6, 3)}, copied / "zs.pt")
    config = json.loads((copied / "config.json").read_text())
    checkpoint = open_checkpoint(edit(copied, architectures=[config["architectures"][0].removeprefix("ToP")]), READ)
    assert checkpoint.student.site_names == ()
