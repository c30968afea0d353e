"""Plans of encoders, without a GPU: launches of each part, sizes, grids, places in memory, and what is refused."""

import dataclasses

import numpy as np
import pytest
import torch
from decoder_models import make_decoder
from tiny_models import PRUNINGS, TINY_BACKBONES, make_encoder

from adtp_export.errors import InputError
from adtp_export.model import PrunedEncoderConfig
from adtp_export.model.heads import head_class
from adtp_export.plugins.encoder import description, grids, planner
from adtp_export.plugins.encoder.arena import Arena
from adtp_export.plugins.encoder.launches import Sizes
from adtp_export.plugins.plan import write
from adtp_export.runtimes.described import describe, least_with_quotient

WIDE = {
    "hidden_size": 384,
    "num_attention_heads": 12,
    "intermediate_size": 1536,
    "num_hidden_layers": 6,
    "max_position_embeddings": 512,
}
"""MiniLM's."""

SMALL = Sizes(max_tokens=256)


def student(pruning, backbone="bert", head="sequence", embedding=None, **fields):
    torch.manual_seed(0)
    config = PrunedEncoderConfig(
        backbone={**TINY_BACKBONES[backbone], **fields}, pruning=pruning, head=head, num_labels=2,
        **({"embedding": embedding} if embedding else {}),
    )  # fmt: skip
    return head_class(head)(config).eval().requires_grad_(False)


@pytest.fixture(scope="module")
def adtp():
    pruning = {"method": "adtp", "sites": ["0.ffn"], "retention_ratios": [0.2, 0.5, 1.0]}
    return describe(student(pruning, **WIDE))


LAYERS = {f"layer {i}": 7 for i in range(6)}


@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
def test_a_run_of_six_layers_with_a_cut_is_48_launches(adtp, dtype):
    for bucket in planner.make(adtp, dtype, SMALL).plan.buckets:
        parts = planner.launches_by_part(bucket)
        assert parts == {"unpad": 1, "embed": 1, **LAYERS, "cut 0.ffn": 2, "head dense": 1, "head logits": 1}
        assert len(bucket.launches) == 48


@pytest.mark.parametrize(
    ("pruning", "expected"),
    [
        (None, LAYERS),
        ({"method": "schedule", "sites": ["1.attention"], "ratios": [0.5]}, LAYERS | {"cut 1.attention": 2}),
        ({"method": "ltp", "sites": ["2.ffn"], "padded_length": 16}, LAYERS | {"layer 2": 9, "cut 2.ffn": 1}),
        ({"method": "top", "sites": ["3.attention"], "bins": ["110"]}, LAYERS | {"layer 2": 9, "cut 3.attention": 1}),
        (
            {"method": "ltp", "sites": ["2.ffn"], "mode": "threshold"},
            LAYERS | {"layer 2": 9, "cut 2.ffn": 2},
        ),
        ({"method": "transkimmer", "sites": ["1.attention"]}, LAYERS | {"cut 1.attention": 4}),
        ({"method": "ltp", "sites": ["5.ffn"], "padded_length": 16}, LAYERS),
    ],
    ids=["none", "schedule", "ltp", "top", "share", "transkimmer", "behind the last attention"],
)
def test_launches_of_each_part(pruning, expected):
    (bucket, *_) = planner.make(describe(student(pruning, **WIDE)), "fp16", SMALL).plan.buckets
    parts = planner.launches_by_part(bucket)
    assert {name: n for name, n in parts.items() if name.startswith(("layer", "cut"))} == expected


@pytest.mark.parametrize(
    ("head", "expected"),
    [
        ("tokens", {"head put-back": 1, "head logits": 1, "head spread": 1}),
        ("spans", {"head put-back": 1, "head logits": 1, "head spread": 2}),
        ("embedding", {"head put-back": 1, "head pool": 1, "head spread": 1}),
    ],
)
def test_launches_of_heads_that_read_all_tokens(head, expected):
    pruning = {"method": "adtp", "sites": ["0.ffn"], "retention_ratios": [0.2, 0.5, 1.0]}
    (bucket, *_) = planner.make(describe(student(pruning, head=head, **WIDE)), "fp16", SMALL).plan.buckets
    parts = planner.launches_by_part(bucket)
    assert {name: n for name, n in parts.items() if name.startswith("head")} == expected


def test_there_is_a_bucket_for_each_power_of_two_and_its_launches_have_a_line_each(adtp):
    plan = planner.make(adtp, "fp16").plan
    assert [bucket.tokens for bucket in plan.buckets] == [2**i for i in range(5, 15)]
    assert write(plan).count("\nlaunch ") == 48 * len(plan.buckets)


def test_weights_are_of_the_type_and_each_is_there_once(adtp):
    found = planner.make(adtp, "bf16", SMALL)
    kinds = {str(array.dtype) for array in found.weights}
    assert kinds == {"bfloat16", "float32", "int32"}  # the cut's are in fp32
    stored = sum(array.size for array in found.weights if str(array.dtype) == "bfloat16")
    assert stored == sum(parameter.numel() for parameter in student(None, **WIDE).parameters())


def test_tables_of_a_cut_that_keeps_last_tokens_are_one_array_in_all_buckets():
    plans = [
        planner.make(describe(make_decoder("qwen3", "embedding", "schedule")), "fp16", Sizes(max_tokens=tokens))
        for tokens in (32, 256)
    ]
    assert [len(plan.plan.buckets) for plan in plans] == [1, 4]
    assert len({len(plan.weights) for plan in plans}) == 1


def test_a_workspace_is_used_again(adtp):
    """Its largest part is a feed-forward's: states, its inner rows, and the sum."""
    (bucket,) = planner.make(adtp, "fp16", Sizes(max_tokens=16_384)).plan.buckets[-1:]
    states = 2 * 16_384 * 384
    assert bucket.workspace < 8 * states


def test_places_do_not_overlap():
    arena = Arena()
    first, second, third = (arena.take(size) for size in (300, 256, 1))
    assert [place.offset for place in (first, second, third)] == [0, 512, 768]
    arena.give(second)
    assert arena.take(257).offset == 1024
    assert arena.take(256).offset == 512
    arena.give(first)
    assert arena.take(512).offset == 0
    assert arena.nbytes == 1536


@pytest.mark.parametrize(
    ("dtype", "kind", "shape", "most", "expected"),
    [
        ("fp16", "none", (32, 2304, 768), 32, ("product-fp16-32x64-none", 1, 36)),
        ("fp16", "none", (2048, 2304, 768), 2048, ("product-fp16-128x128-none", 1, 288)),
        ("fp16", "none", (16384, 3072, 768), 16384, ("product-fp16-128x128-none", 1, 512)),
        ("fp16", "parts", (128, 768, 3072), 128, ("product-fp16-32x64-parts", 3, 144)),
        ("fp16", "parts", (32, 768, 3072), 32, ("product-fp16-32x64-parts", 8, 96)),
        ("fp16", "parts", (32, 384, 384), 32, ("product-fp16-32x64-parts", 1, 6)),
        ("fp32", "parts", (32, 384, 384), 32, ("product-fp32-32x64-parts", 3, 18)),
        ("fp16", "parts", (128, 768, 3072), 16384, ("product-fp16-32x64-parts", 3, 512)),
    ],
)
def test_grids(dtype, kind, shape, most, expected):
    found = grids.of_product(dtype, kind, shape, most, 128)
    assert (found.variant.name, found.parts, found.programs) == expected


@pytest.mark.parametrize("divisor", [1, 12 * 128, 7])
@pytest.mark.parametrize("threshold", [0.0, 0.0017, 0.3])
def test_a_threshold_of_quotients(threshold, divisor):
    """To the bit what a division and a comparison in fp32 say, on both sides."""
    least = np.float32(least_with_quotient(threshold, divisor))
    below = np.nextafter(least, np.float32(-1))
    for x, holds in ((least, True), (below, False))[: 1 + (threshold > 0)]:
        assert bool(torch.tensor(x) / divisor >= torch.tensor(threshold)) == holds
    assert least_with_quotient(float("inf"), 1) == np.finfo(np.float32).max


REFUSED = {
    "mpnet": (lambda: make_encoder("mpnet", "none"), "the backbone 'mpnet'; accepted: bert, roberta"),
    "modernbert": (lambda: make_encoder("modernbert", "none"), "the backbone 'modernbert'"),
    "relu": (lambda: student(None, **WIDE, hidden_act="relu"), "hidden_act 'relu'; accepted: 'gelu'"),
    "from others": (lambda: student(PRUNINGS["from-others"], **WIDE), "by schedule by received-from-others"),
    "twice": (
        lambda: student(PRUNINGS["received-twice"], **WIDE),
        "cuts at 0.ffn and 1.attention, and the second one reads what tokens received before the first one",
    ),
    "restored twice": (
        lambda: student(
            {"method": "schedule", "sites": ["1.attention", "1.ffn"], "lengths": [9, 4], "restore": "layer"},
            head="tokens",
            **WIDE,
        ),
        "cuts at 1.attention and 1.ffn, and the second one restores what entered the layer; accepted: one of the two",
    ),
    "projections": (
        lambda: student(None, head="embedding", embedding={"projections": [[384, 12, True, "none"]]}, **WIDE),
        "a projection to 12 numbers; accepted: multiples of 8",
    ),
    "narrow heads": (
        lambda: make_encoder("bert", "none"),
        "layer 0 with 4 heads of size 8; accepted: sizes 32, 64, 128",
    ),
    "wide": (
        lambda: student(None, **{**WIDE, "hidden_size": 1536}),
        "of width 1536; accepted: multiples of 8 up to 1024",
    ),
    "many ratios": (
        lambda: student(
            {"method": "adtp", "sites": ["0.ffn"], "retention_ratios": [i / 20 for i in range(1, 21)]}, **WIDE
        ),
        "cut 0.ffn with 20 ratios; accepted: at most 16",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_has_no_kernel_is_refused(case):
    make, message = REFUSED[case]
    with pytest.raises(InputError, match=message):
        planner.make(describe(make()), "fp16", SMALL)


def test_texts_whose_states_32_bits_cannot_count_are_refused():
    described = describe(make_decoder("qwen3", "embedding"))
    longest = 2**30 // 32
    planner.checked(dataclasses.replace(described, longest=longest), "fp16")
    with pytest.raises(InputError, match=f"texts of {longest + 1} tokens with embeddings of width 32; accepted: up to"):
        planner.checked(dataclasses.replace(described, longest=longest + 1), "fp16")


def test_weights_beyond_fp16_are_refused(adtp):
    layer = dataclasses.replace(adtp.layers[3], scale=1.0)
    layer = dataclasses.replace(layer, output=description.Dense(layer.output.weight * 1e7, layer.output.bias))
    spoilt = dataclasses.replace(adtp, layers=(*adtp.layers[:3], layer, *adtp.layers[4:]))
    with pytest.raises(InputError, match=r"layer 3 with a weight of .* in fp16; accepted: up to 6.55e\+04; bf16 has"):
        planner.make(spoilt, "fp16", SMALL)
    planner.make(spoilt, "bf16", SMALL)
