"""What reports show of single texts, and what is said of them. Frozen, and without PyTorch: `adtp-run` shows them where there is none."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

HELD, POSSIBLE, BY_CHANCE = "attribution_held", "attribution_possible", "attribution_by_chance"
ORDER, FLOWED = "order_spearman", "flow_before_cut"
"""Figures of an explanation; `explain.student.agreement` says what they are."""


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """Why a text of n tokens was answered as it was. kept_site: as in `TokenView`. attribution: share of each token in what the
    answer rests on. Of dropped tokens, None for others: flow, the most that could pass from it to the answer if nothing were dropped;
    flowed, the share of that which passes before its cut. figures: by name, `HELD` and so on, where the text has them."""

    kept_site: tuple[int, ...]
    attribution: tuple[float, ...]
    flow: tuple[float | None, ...]
    flowed: tuple[float | None, ...]
    figures: Mapping[str, float]


@dataclass(frozen=True, kw_only=True)
class PromptExplained:
    """What a generated token rests on. tokens: those before it, of the prompt and generated ones; the first `prompt` are of the prompt.
    token: the generated one, "" where the text ended. flow: the most that can pass from each of `tokens` to where it was read off.
    merge_layers: as `prompt_flow` has it."""

    tokens: tuple[str, ...]
    prompt: int
    token: str
    flow: tuple[float, ...]
    merge_layers: int | None = None


@dataclass(frozen=True, kw_only=True)
class TokenView:
    """One text as the student read it: its n tokens as `readable` has them, and for each the index of the site that dropped it (the
    number of sites if it stayed). scores: by site, what each token that was still there was chosen by, else None. answer: what was
    predicted, in words. tags: of each token, "" where there is nothing to say; span: first and last token of the answer; near: the
    nearest other texts with their cosines. explained: what the answer rests on; None where nothing can be dropped."""

    tokens: tuple[str, ...]
    kept_site: tuple[int, ...]
    scores: Mapping[str, tuple[float | None, ...]]
    answer: str
    tags: tuple[str, ...] = ()
    span: tuple[int, int] | None = None
    near: tuple[tuple[str, float], ...] = ()
    explained: Explanation | None = None


@dataclass(frozen=True)
class Views:
    """What reports show of single texts. retention: by site, rows in equal bins of the share kept, from 0 to 1.
    survivors: share of a text's tokens that stay to the end, mean over rows."""

    texts: tuple[TokenView, ...]
    retention: Mapping[str, tuple[int, ...]]
    survivors: float
