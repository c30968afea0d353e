"""Explanations in words and as plain text: what an answer rests on, beside what was kept."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ..explain.records import BY_CHANCE, FLOWED, HELD, ORDER, POSSIBLE, Explanation, PromptExplained

HEAD = ("token", "attribution", "kept", "flow", "passed")
FLOW_HEAD, LARGEST = ("token", "place", "part of", "flow"), 10
"""Columns of the tokens that a generated token rests on most, and how many are shown."""


def in_words(figures: Mapping[str, float]) -> str:
    """Say the figures of a text, or their means, in words; nothing where there are none."""
    parts = []
    if HELD in figures:
        parts.append(
            f"kept tokens hold {figures[HELD]:.0%} of the attribution (at most {figures[POSSIBLE]:.0%}, by chance "
            f"{figures[BY_CHANCE]:.0%})"
        )
    if ORDER in figures:
        parts.append(f"Spearman of order and attribution {figures[ORDER]:+.2f}")
    if FLOWED in figures:
        parts.append(f"{figures[FLOWED]:.0%} of the flow from dropped tokens had passed before their cut")
    return "; ".join(parts)


def passed(explanation: Explanation, i: int) -> str:
    """Say what is known of the flow from token i; nothing where it was kept."""
    flow, share = explanation.flow[i], explanation.flowed[i]
    return "" if flow is None or share is None else f"{share:.0%} of its flow, {flow:.2f}, had passed"


def rows(tokens: Sequence[str], explanation: Explanation, sites: Sequence[str]) -> list[tuple[str, ...]]:
    """Return a row for each token, with the columns of `HEAD`."""
    found: list[tuple[str, ...]] = []
    for token, site, share, flow, flowed in zip(
        tokens, explanation.kept_site, explanation.attribution, explanation.flow, explanation.flowed
    ):
        kept = "kept" if site == len(sites) else f"dropped at {sites[site]}"
        way = ("", "") if flow is None or flowed is None else (f"{flow:.2f}", f"{flowed:.0%}")
        found.append((token, f"{share:.1%}", kept, *way))
    return found


def shown(token: str) -> str:
    """Return what is shown of a token that is text: without the space before it, and with marks for one that is nothing but space."""
    word = token.removeprefix(" ")
    return word if word.strip() else token.replace(" ", "␣").replace("\n", "\\n").replace("\t", "\\t")


def largest(explained: PromptExplained) -> list[tuple[str, ...]]:
    """Return a row for each of the tokens with the largest flow, largest first, with the columns of `FLOW_HEAD`."""
    order = sorted(range(len(explained.flow)), key=lambda i: -explained.flow[i])[:LARGEST]
    return [
        (shown(explained.tokens[i]), str(i), "prompt" if i < explained.prompt else "answer", f"{explained.flow[i]:.3f}")
        for i in order
    ]
