"""Tokens that query and are never keys: [MASK] behind ColBERT's queries. transformers' forward defines it, with a mask of 0 there."""

from itertools import chain

import numpy as np
import pytest
import torch
from decoder_models import make_decoder
from hypothesis import given, settings
from hypothesis import strategies as st
from testbed import HEAD_FIELDS, PRUNINGS, TINY_BACKBONES, as_numpy, flat_kept, make_encoder
from tolerances import assert_within_oracle, oracle_on

from adtp_export.errors import InputError
from adtp_export.graph import program
from adtp_export.model import PrunedEncoderConfig
from adtp_export.model.heads import head_class
from adtp_export.model.packed import PackedStudent
from adtp_export.model.sequences import Keys, Packed
from adtp_export.runtimes.onnxruntime import OnnxRuntimeEngine
from adtp_export.runtimes.openvino import OpenVinoEngine
from adtp_export.verify.oracle import run_oracle, typed
from adtp_export.verify.parity import compare

MASK = 7
VECTORS = {"projections": [[32, 8, False, "none", False]], "expansion": MASK}
TEXTS = ((5, 4), (9, 0), (1, 3), (4, 11))
"""Tokens of texts, and how many are filled up behind them."""
NEAR = ((5, 2), (9, 0), (1, 3), (4, 1))
"""As far as local layers of the small ModernBERT see."""


def model_of(backbone, pruning="none", seed=0):
    return make_encoder(backbone, pruning, seed, head="vectors", vectors=VECTORS)


def batch_of(model, texts, seed=0):
    """Ids without those of padding and of the mask, then masks that are not attended to, then padding."""
    generator = torch.Generator().manual_seed(seed)
    width = max(map(sum, texts)) + 2
    ids = torch.randint(10, 97, (len(texts), width), generator=generator)
    mask = torch.zeros_like(ids)
    for row, (live, further) in enumerate(texts):
        mask[row, :live] = 1
        ids[row, live:] = model.pad_id
        ids[row, live : live + further] = MASK
    types = {"token_type_ids": torch.zeros_like(ids)} if "token_type_ids" in model.input_names else {}
    return {"input_ids": ids, "attention_mask": mask, **types}


FAMILIES = [
    name
    for name in TINY_BACKBONES
    if name not in ("mpnet", "deberta-v2", "camembert", "xlm-roberta", "distilbert-pruned")
]
PRUNED = [name for name in PRUNINGS if name not in ("none", "from-others")]


@pytest.mark.parametrize("backbone", FAMILIES)
def test_padded_is_transformers(backbone):
    model = model_of(backbone).double()
    batch = batch_of(model, NEAR if backbone == "modernbert" else TEXTS)
    answer, own = model(**batch), model.dense(**batch).last_hidden_state
    live = answer.kept_site >= 0
    assert live.sum(1).tolist() == [sum(text) for text in (NEAR if backbone == "modernbert" else TEXTS)]
    expected = model.of_states(own, live)["token_embeddings"]
    torch.testing.assert_close(answer.token_embeddings, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(("backbone", "pruning"), [*((f, "none") for f in FAMILIES), *(("bert", p) for p in PRUNED)])
def test_packed_is_padded(backbone, pruning):
    model = model_of(backbone, pruning)
    batches = [batch_of(model, NEAR if backbone == "modernbert" else TEXTS, seed) for seed in range(2)]
    oracle, answers = oracle_on(model, *batches), []
    for batch, expected in zip(batches, oracle.batches):
        (vectors,), rows = PackedStudent(model)(**batch)
        answers.append({"token_embeddings": vectors})
        kept = flat_kept(rows, batch["input_ids"].shape, len(model.site_names))
        assert np.array_equal(kept, expected.kept_site)
        for site, (live, further) in zip(kept, NEAR if backbone == "modernbert" else TEXTS):
            assert (site[live : live + further] == len(model.site_names)).all()  # cuts leave them
    assert_within_oracle(oracle, *answers)


CUTS = {
    "none": None,
    "adtp": {"method": "adtp", "sites": ["0.ffn", "1.attention"], "retention_ratios": [0.3, 0.6, 1.0]},
    "received": {"method": "schedule", "sites": ["0.ffn", "1.ffn"], "lengths": [6, 3], "order": "received"},
}


@pytest.mark.parametrize("cuts", CUTS)
def test_causal_models_have_them_too(cuts):
    """Grouped queries, and the last token of the text stays, which is not the last row."""
    backbone = dict(make_decoder("qwen3").config.backbone)
    torch.manual_seed(0)
    config = PrunedEncoderConfig(backbone=backbone, pruning=CUTS[cuts], head="vectors", vectors={"expansion": MASK})
    model = head_class("vectors")(config).eval().requires_grad_(False)
    batch = batch_of(model, TEXTS)
    batch["input_ids"] = batch["input_ids"] % config.vocab_size
    oracle = oracle_on(model, batch)
    (vectors,), rows = PackedStudent(model)(**batch)
    kept = flat_kept(rows, batch["input_ids"].shape, len(model.site_names))
    assert np.array_equal(kept, oracle.batches[0].kept_site)
    assert all(kept[i, live - 1] == len(model.site_names) for i, (live, _) in enumerate(TEXTS))
    assert_within_oracle(oracle, {"token_embeddings": vectors})


def test_they_change_nothing_of_the_text_before_them():
    model = model_of("bert").double()
    with_them, without = (model(**batch_of(model, texts)).token_embeddings for texts in ([(6, 9)], [(6, 0)]))
    torch.testing.assert_close(with_them[:, :6], without[:, :6], rtol=1e-12, atol=1e-12)
    assert with_them[0, 6:15].any(1).all()
    attended = batch_of(model, [(6, 9)])
    attended["attention_mask"][0, :15] = 1
    assert (model(**attended).token_embeddings[:, :6] - with_them[:, :6]).abs().max() > 1e-3


@pytest.mark.parametrize("head", ["vectors", "hybrid"])
def test_padding_stays_zero_in_half_precision(head):
    """There the least divisor of a vector is 0, and a vector of padding is 0 as well."""
    model = typed(make_encoder("bert", "none", head=head, **HEAD_FIELDS[head]), "fp16")
    batch = batch_of(model, [(9, 0), (2, 0)])
    states = torch.zeros(2, batch["input_ids"].shape[1], 32, dtype=torch.float16)
    found = model.of_states(states.index_fill(1, torch.arange(2), 1.0), batch["attention_mask"].bool())
    assert not found["token_embeddings"][1, 2:].any()
    assert all(
        values.isfinite().all() for values in (found["token_embeddings"][:, :2], found["token_embeddings"][1, 2:])
    )


@pytest.mark.usefixtures("has_openvino")
@pytest.mark.parametrize(
    ("backbone", "pruning"), [("bert", "received-twice"), pytest.param("modernbert", "none", marks=pytest.mark.slow)]
)
def test_runtimes_answer_alike(tmp_path, backbone, pruning):
    model = model_of(backbone, pruning)
    graph = program.export_portable(model, {"version": "test"})
    program.add_debug_outputs(graph)
    program.save(graph, tmp_path / "model.onnx")
    texts = NEAR if backbone == "modernbert" else TEXTS
    oracle = run_oracle(model, [as_numpy(batch_of(model, texts)), as_numpy(batch_of(model, texts[1:3], 1))])
    for load in (OnnxRuntimeEngine, OpenVinoEngine):
        assert compare(oracle, load(tmp_path / "model.onnx")).failure is None


@given(
    st.lists(st.tuples(st.integers(1, 5), st.integers(0, 4), st.integers(1, 5)), min_size=1, max_size=5), st.randoms()
)
@settings(max_examples=60, deadline=None)
def test_keys_are_gathered_and_all_others_stay(texts, random):
    """The definition: of each text the keys that stay, in order, then all that only query."""
    expected, stay, row, keys = [], [], 0, 0
    for live, further, most in texts:
        kept = sorted(random.sample(range(live), min(most, live)))
        expected.append([row + i for i in kept] + [row + live + i for i in range(further)])
        stay.append([keys + i for i in kept])
        row, keys = row + live + further, keys + live
    lengths = torch.tensor([live for live, _, _ in texts])
    bounds = torch.tensor([0, *(live + further for live, further, _ in texts)]).cumsum(0)
    where = torch.arange(row)
    tokens = Packed(where[:, None].float(), bounds, where, where, keys=Keys.first(lengths, bounds))
    cut = torch.tensor([0, *map(len, stay)]).cumsum(0)
    found, rows = tokens.gather_keys(torch.tensor([*chain(*stay)]), cut)
    assert rows.tolist() == found.origin.tolist() == [*chain(*expected)]
    assert found.lengths.tolist() == [len(each) for each in expected]
    assert found.attended.origin.tolist() == [each[i] for each, own in zip(expected, stay) for i in range(len(own))]
    assert found.attended.cu_seqlens.tolist() == cut.tolist()


@pytest.mark.parametrize(
    ("backbone", "pruning", "told"),
    [
        ("mpnet", "none", "attention has a bias for each distance"),
        ("deberta-v2", "none", "attention has a bias for each distance"),
        ("modernbert", "adtp", "may see nothing there after a cut"),
        ("bert", "from-others", "leave no diagonal to take out"),
    ],
)
def test_models_without_a_form_for_them_are_refused(backbone, pruning, told):
    with pytest.raises(InputError, match=told):
        model_of(backbone, pruning)


@pytest.mark.parametrize("value", [-1, 97, "[MASK]"])
def test_the_token_is_one_of_the_vocabulary(value):
    with pytest.raises(InputError, match=r"vectors\.expansion"):
        make_encoder("bert", "none", head="vectors", vectors={**VECTORS, "expansion": value})
