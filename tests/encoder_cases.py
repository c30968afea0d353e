"""Cases for each variant of the encoder's kernels: few for every run, more for the record."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import encoder_checks as checks
import encoder_choices as choices
import encoder_grouped as grouped
import encoder_heads as heads
import encoder_prenorm as prenorm

from adtp_export.plugins.encoder.variants import (
    ABOVE,
    ADD_NORM,
    ADD_RMS,
    ANCHOR,
    CHOICE,
    EMBED,
    GATED,
    GROUPED,
    GROUPED_RECEIVED,
    LOOK_UP,
    NORMALIZE,
    POOL,
    PRODUCT,
    PUT_BACK,
    SCORES,
    SHARE,
    SKIM,
    SPREAD,
    TURN,
    UNPAD,
    VECTORS,
    Variant,
)

Case = tuple[Callable[..., float], dict[str, Any]]


def _product(variant: Variant) -> list[Case]:
    """Tiles and their neighbours, a K that no block divides, parts of which the last has nothing, fewer programs than tiles.

    In the second case each sum takes more blocks of K than there are stages, so that stages are overwritten.
    """
    m, n, k = (variant.constants[f"BLOCK_{axis}"] for axis in "MNK")
    is_parts, is_loose = variant.constants.get("bias", 0) is None, "n" in variant.loose
    blocks = variant.num_stages + 2
    long = ((2 * blocks - 1) if is_parts else blocks + 1) * k + 8
    given: list[dict[str, Any]] = [
        {"rows": m + 1, "n": n + (3 if is_loose else 8), "k": k + 8, "indexed": True, "programs": 3},
        {"rows": m - 1, "n": n - (3 if is_loose else 8), "k": long, "capacity": 2 * m + 1, "strides": (8, 8)},
        {"rows": 3, "n": 2 if is_loose else 8, "k": 3 * k},
    ]
    if is_parts:
        given = [case | {"parts": parts} for case, parts in zip(given, (4, 2, 2))]
    return [(checks.check_product, case | {"seed": seed}) for seed, case in enumerate(given)]


def _add_norm(variant: Variant) -> list[Case]:
    width = variant.constants["BLOCK_H"]
    is_whole = variant.constants.get("bias", 0) is None
    return [
        (checks.check_add_norm, {"rows": 5, "hidden": width - 8, "parts": 1 if is_whole else 3, "indexed": True, "programs": 3}),
        (checks.check_add_norm, {"rows": 2, "hidden": width, "seed": 1}),
        (checks.check_add_norm, {"rows": 3, "hidden": 24, "seed": 2}),
    ]  # fmt: skip


def _unpad(variant: Variant) -> list[Case]:
    return [
        (checks.check_unpad, {"lengths": (3, 0, 7, 1), "padded": 7, "num_texts": 9}),
        (checks.check_unpad, {"lengths": (2100,), "padded": 2500}),
        (checks.check_unpad, {"lengths": tuple(i % 3 for i in range(2060)), "padded": 2, "num_texts": 2070}),
        (checks.check_unpad, {"lengths": (5, 5, 5), "padded": 5, "num_rows": 8}),
    ]


def _embed(variant: Variant) -> list[Case]:
    width = variant.constants["BLOCK_H"]
    usual = {"lengths": (3, 0, 5), "padded": 6, "hidden": width - 8}
    return [
        (checks.check_embed, usual | {"programs": 4}),
        (checks.check_embed, usual | {"typed": False, "first_place": 2, "hidden": 16, "seed": 1}),
        (checks.check_embed, usual | {"foreign": True, "hidden": 16, "num_rows": 6, "seed": 2}),
    ]


def _scores(variant: Variant) -> list[Case]:
    return [
        (checks.check_scores, {"lengths": (1, 17, 50), "hidden": 72}),
        (checks.check_scores, {"lengths": (9, 30), "hidden": 136, "width": 130, "candidates": 16, "min_tokens": 6, "seed": 1}),
        (checks.check_scores, {"lengths": (4, 2), "hidden": 8, "width": 5, "candidates": 3, "ties": True, "seed": 2}),
        (checks.check_scores, {"lengths": (20,), "hidden": 40, "without_ratio": True, "seed": 3}),
    ]  # fmt: skip


MANY_TEXTS = 515
"""More than one look of the smaller choices takes in; of the larger ones, so many programs would be slow."""


def _choice(variant: Variant) -> list[Case]:
    block = variant.constants["BLOCK"]
    if "keeps" in variant.arguments:
        return [
            (choices.check_ranks, {"lengths": (1, 2, 40, 75), "bins": "1101001"}),
            (choices.check_ranks, {"lengths": (33, 90), "bins": "10", "values": 3, "seed": 1}),
            (choices.check_ranks, {"lengths": (block, 5), "bins": "1" * 30 + "0" * 70, "values": 40, "seed": 2}),
        ]
    given: list[dict[str, Any]] = [
        {"lengths": (1, 7, 70, 2, 33), "num_texts": 9},
        {"lengths": (50, 3, 60), "values": 2, "keep_first": False, "permille": 500, "seed": 1},
        {"lengths": (block, 5), "values": 50, "permille": 290, "seed": 2},
    ]
    if block < MANY_TEXTS:
        given.append({"lengths": tuple(1 + i % 2 for i in range(MANY_TEXTS)), "permille": 500, "seed": 3})
    if "table" in variant.arguments:
        given.append({"lengths": (5, 20, 9), "before": (30, 31, 9), "permille": 400, "seed": 4})
    return [(choices.check_best, case) for case in given]


def _above(variant: Variant) -> list[Case]:
    return [
        (choices.check_above, {"lengths": (1, 7, 70, 2, 33), "num_texts": 9}),
        (choices.check_above, {"lengths": (2048, 100), "values": 3, "seed": 1}),
        (choices.check_above, {"lengths": (3, 4), "threshold": 9.0, "num_texts": 2060, "seed": 2}),
    ]


def _rows(check: Callable[..., float]) -> Callable[[Variant], list[Case]]:
    """Cases of kernels that take row after row."""

    def cases(variant: Variant) -> list[Case]:
        width = variant.constants["BLOCK_H"]
        return [(check, {"rows": 5, "hidden": width - 8, "programs": 3}), (check, {"rows": 3, "hidden": 24, "seed": 1})]

    return cases


def _put_back(variant: Variant) -> list[Case]:
    return [
        (heads.check_put_back, {"rows": 5, "hidden": 520, "programs": 2}),
        (heads.check_put_back, {"rows": 3, "hidden": 24, "seed": 1}),
    ]


def _spread(variant: Variant) -> list[Case]:
    return [
        (heads.check_spread, {"lengths": (3, 1, 6), "padded": 7, "columns": 3, "stride": 3}),
        (heads.check_spread, {"lengths": (30, 2, 41), "padded": 41, "columns": 16, "stride": 24, "first": 5, "programs": 1}),
        (heads.check_spread, {"lengths": (2, 9), "padded": 9, "columns": 1, "stride": 2, "first": 1, "seed": 1}),
    ]  # fmt: skip


def _pool(variant: Variant) -> list[Case]:
    lengths = (1, 40, 16, 3)
    return [
        (heads.check_pool, {"lengths": lengths, "hidden": 136, "way": way, "programs": programs, "seed": way})
        for way, programs in ((1, 3), (2, None), (0, None), (3, None))
    ]


def _vectors(variant: Variant) -> list[Case]:
    return [
        (heads.check_vectors, {"texts": 3, "width": 520, "normalize": True, "programs": 2}),
        (heads.check_vectors, {"texts": 2, "width": 5, "normalize": False, "seed": 1}),
        (heads.check_vectors, {"texts": 2, "width": 24, "normalize": True, "zero": True, "seed": 2}),
    ]


def _share(variant: Variant) -> list[Case]:
    return [
        (choices.check_share, {"lengths": (1, 70, 2, 33), "wanted": 0.3, "num_texts": 9}),
        (choices.check_share, {"lengths": (600, 5), "wanted": 0.1, "programs": 1, "seed": 1}),
        (choices.check_share, {"lengths": (40, 41), "wanted": 0.7, "close": True, "seed": 2}),
        (choices.check_share, {"lengths": (9, 3), "wanted": 0.0, "seed": 3}),
    ]


def _grouped(variant: Variant) -> list[Case]:
    """Tiles and their neighbours, gaps beside none, windows on either side, queries that are few or none, more texts than one look."""
    m, n = (variant.constants[f"BLOCK_{axis}"] for axis in "MN")
    given: list[dict[str, Any]] = [
        {"lengths": (1, m - 1, 0, m + 1, 2 * n + 5), "reach": "causal", "heads": (2, 1)},
        {"lengths": (3, m + n + 3, 9, n, 1), "reach": "both", "gaps": True, "asks": ("all", "some", "none", "last"), "smaller": 24},
        {"lengths": tuple(1 + i % 2 for i in range(131)), "reach": "all", "heads": (1, 1), "smaller": 8},
        {"lengths": (2 * n + 7, m), "reach": "back", "gaps": True, "heads": (3, 3), "magnitude": 16},
        {"lengths": (40, m + 1), "reach": "ahead", "gaps": True, "asks": ("last", "all"), "heads": (2, 1)},
    ]  # fmt: skip
    return [(grouped.check_grouped, case | {"seed": seed}) for seed, case in enumerate(given)]


_CASES = {
    PRODUCT: _product, ADD_NORM: _add_norm, UNPAD: _unpad, EMBED: _embed, SCORES: _scores, CHOICE: _choice, ABOVE: _above,
    SHARE: _share, NORMALIZE: _rows(heads.check_normalize), SKIM: _rows(heads.check_skim), PUT_BACK: _put_back, SPREAD: _spread,
    POOL: _pool, VECTORS: _vectors,
    GROUPED: _grouped, GROUPED_RECEIVED: _grouped,
    **dict.fromkeys((LOOK_UP, ADD_RMS, TURN, GATED, ANCHOR), prenorm.cases_of),
}  # fmt: skip


def cases(variant: Variant) -> list[Case]:
    return _CASES[variant.kernel](variant)
