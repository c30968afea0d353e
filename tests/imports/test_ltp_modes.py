"""LTP's two other ways to prune, against a reference of this file: one text at a time, tokens that leave are gone."""

import math

import numpy as np
import pytest
import torch
from originals import AgainstReference, Original, edit
from torch.nn.functional import gelu, layer_norm, linear

from adtp_export.errors import InputError
from adtp_export.imports import ReadOptions, open_checkpoint
from adtp_export.model.fixed import static_size
from adtp_export.model.pruners.ltp import MAX_TOKENS, counts_in_fp32

READ = ReadOptions(allow_pickle=True)
MODES = {
    "threshold": {"prune_mode": "threshold", "token_threshold": 3 / 32},
    "topk": {"prune_mode": "topk", "token_keep_rate": 0.3},
}
LAYERS, HEADS = 6, 3


class Reference:
    """RoBERTa's layers in fp64, from the weights of LTP's file, with a rule that says which tokens leave after a layer's attention."""

    def __init__(self, path, rule):
        self.rule, stored = rule, torch.load(path, weights_only=True)
        self.weights = {name.removeprefix("ibert."): tensor.double() for name, tensor in stored.items()}

    def dense(self, name, x):
        return linear(x, self.weights[f"{name}.weight"], self.weights[f"{name}.bias"])

    def norm(self, name, x):
        return layer_norm(x, x.shape[-1:], self.weights[f"{name}.weight"], self.weights[f"{name}.bias"], 1e-5)

    def answer(self, ids):
        """Return the logits of ``ids (n,)``, and of every site the tokens that stay, the scores of those alive, and the margin."""
        table = {n: self.weights[f"embeddings.{n}_embeddings.weight"] for n in ("word", "position", "token_type")}
        x = table["word"][ids] + table["position"][2 + torch.arange(len(ids))] + table["token_type"][0]
        x, alive, sites = self.norm("embeddings.LayerNorm", x), torch.arange(len(ids)), []
        for layer in range(LAYERS):
            at = f"encoder.layer.{layer}"
            q, k, v = (
                self.dense(f"{at}.attention.self.{n}", x).view(len(x), HEADS, -1).transpose(0, 1)
                for n in ("query", "key", "value")
            )
            shares = (q @ k.transpose(1, 2) / math.sqrt(q.shape[-1])).softmax(-1)
            found = (shares @ v).transpose(0, 1).flatten(1)
            x = self.norm(f"{at}.attention.output.LayerNorm", x + self.dense(f"{at}.attention.output.dense", found))
            decided = self.rule(layer, shares.sum((0, 1)), len(ids))
            if decided is not None:
                stays, margin = decided
                sites.append((alive[stays], alive, shares.sum((0, 1)), margin))
                x, alive = x[stays], alive[stays]
            wide = gelu(self.dense(f"{at}.intermediate.dense", x))
            x = self.norm(f"{at}.output.LayerNorm", x + self.dense(f"{at}.output.dense", wide))
        return self.dense("classifier.out_proj", self.dense("classifier.dense", x[0]).tanh()), sites


def share_of_the_largest(layer, scores, length):
    relative = scores / scores.max()
    stays = relative >= MODES["threshold"]["token_threshold"]
    stays[0] = True
    others = (relative[1:] - MODES["threshold"]["token_threshold"]).abs()
    return stays.nonzero()[:, 0], others.min().item() if len(others) else math.inf


def best_of_a_rate(layer, scores, length):
    """Of six layers the first three keep all; then 1 - 0.7 / 3, 1 - 1.4 / 3 and 0.3 of the text's first length stay."""
    if layer < 3:
        return None
    count = max(1, round(length * (1 - 0.7 * (layer - 2) / 3)))
    ranked = (1 + scores[1:].argsort(descending=True)).tolist()
    edge = scores[ranked].tolist()
    margin = edge[count - 2] - edge[count - 1] if 1 < count < len(scores) else math.inf
    return torch.tensor(sorted([0, *ranked[: count - 1]])), margin


def golden(path, rule, source):
    """What the reference answers to the rows of the shared material, as arrays of their names and shapes."""
    reference, (rows, columns) = Reference(path, rule), source["input_ids"].shape
    answers = [
        reference.answer(torch.from_numpy(i[m > 0])) for i, m in zip(source["input_ids"], source["attention_mask"])
    ]
    sites = len(answers[0][1])
    kept, score = np.zeros((sites, rows, columns), bool), np.full((sites, rows, columns), np.inf)
    margin = np.full((sites, rows), np.inf)
    for row, (_, decided) in enumerate(answers):
        for site, (stays, alive, scores, closest) in enumerate(decided):
            kept[site, row, stays] = True
            score[site, row, alive] = scores
            margin[site, row] = closest
    logits = torch.stack([logits for logits, _ in answers]).numpy()
    inputs = {name: source[name] for name in ("input_ids", "attention_mask", "token_type_ids")}
    return {**inputs, "ref_logits": logits, "ref_kept": kept, "ref_score": score, "ref_margin": margin}


@pytest.fixture(scope="module", params=MODES)
def original(request, tmp_path_factory):
    source = Original.open("ltp", tmp_path_factory, READ)
    folder = tmp_path_factory.mktemp(request.param)
    directory = edit(source.copy(folder / "checkpoint"), **MODES[request.param])
    rule = {"threshold": share_of_the_largest, "topk": best_of_a_rate}[request.param]
    np.savez(folder / "golden.npz", **golden(directory / "pytorch_model.bin", rule, source.golden))
    return Original(folder=folder, options=READ, work=tmp_path_factory.mktemp("work"))


class TestAgainstReference(AgainstReference):
    pass


def test_tokens_leave_at_the_first_three_sites(original):
    alive = original.golden["ref_kept"].sum((1, 2))
    assert len(alive) == len(original.checkpoint.student.site_names)
    assert (np.diff([original.golden["attention_mask"].sum(), *alive[:3]]) < 0).all()
    assert alive[-1] > len(original.golden["input_ids"])


def of_the_sum(rule, live):
    return rule._above(rule.order.sum(1, keepdim=True))


MISTAKES = {  # a share of all scores together, and a rate of what the layer before left
    "threshold": ("adtp_export.model.selection.KeepAboveShare.of_threshold", of_the_sum),
    "topk": ("adtp_export.model.pruners.Seen.at_input", property(lambda seen: seen.lengths)),
}


def test_a_planted_mistake_is_noticed(original, monkeypatch):
    monkeypatch.setattr(*MISTAKES[original.checkpoint.student.config.settings.mode])
    assert not np.array_equal(original.kept(), original.golden["ref_kept"])


def test_a_static_size_holds_one_text_of_its_length(original):
    """Rates are shares of a text's first length, and not of what the site before left."""
    student = original.checkpoint.student
    size = static_size(student, 48, 1)
    answer = student(input_ids=torch.full((1, 48), 7), attention_mask=torch.ones(1, 48, dtype=torch.int64))
    stays = [int(decision.kept.sum()) for decision in answer.decisions]
    assert all(kept <= room <= 48 for kept, room in zip(stays, size.kept, strict=True))
    if student.config.settings.rates:
        assert size.kept == (38, 27, 16)


def test_counts_are_rounded_in_fp32():
    """15 times 0.9 is below 13.5 with the nearest fp32 number to 0.9, and 13.5 when that product is rounded to fp32: 14, which is even."""
    counts = counts_in_fp32(0.9)
    assert counts[[0, 1, 5, 15]].tolist() == [1, 1, 4, 14]
    n, rate = np.arange(MAX_TOKENS + 1, dtype=np.float32), np.float32(0.9)
    assert np.array_equal(counts, np.maximum(np.rint(n * rate), 1).astype(np.int64))


@pytest.fixture
def copied(tmp_path, tmp_path_factory):
    return Original.open("ltp", tmp_path_factory, READ).copy(tmp_path / "ltp")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"prune_mode": "threshold", "token_threshold": 1.5},
            "token_threshold is 1.5; accepted is a number from 0 to 1",
        ),
        ({"prune_mode": "threshold"}, "token_threshold is None"),
        ({"prune_mode": "topk", "token_keep_rate": "half"}, "token_keep_rate is 'half'"),
        ({"prune_mode": "topk", "token_keep_rate": float("nan")}, "token_keep_rate is nan"),
    ],
)
def test_bad_checkpoints_are_named(copied, changes, message):
    with pytest.raises(InputError, match=message):
        open_checkpoint(edit(copied, **changes), READ)


@pytest.mark.parametrize("mode", MODES)
def test_other_modes_have_no_padded_length(copied, mode):
    with pytest.raises(InputError, match=f"that of .* is '{mode}', where no padded length counts: leave it out"):
        open_checkpoint(edit(copied, **MODES[mode]), ReadOptions(allow_pickle=True, padded_length=64))


@pytest.mark.parametrize(
    "off", [{"prune_mode": "topk", "token_keep_rate": 1}, {"prune_mode": "threshold", "token_threshold": 0}]
)
def test_pruning_that_is_off_drops_nothing(copied, off):
    checkpoint = open_checkpoint(edit(copied, **off), READ)
    assert checkpoint.student.site_names == ()
    assert any("6 of its layers drop nothing" in note for note in checkpoint.notes)
