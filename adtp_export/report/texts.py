"""Single texts in `report.html`: which tokens stayed, and what was answered where."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from ..artifacts.records import Manifest
from ..explain.records import Explanation, TokenView, Views
from .explained import in_words, passed, shown

SHADES = 3
"""Colours of dropping sites; later sites share the last one."""


def texts(views: Views, manifest: Manifest) -> str:
    """Return the texts of a report as HTML, with what the colours mean."""
    sites = list(manifest.checkpoint["prune_sites"])
    legend = "".join(
        f"<span class='t d{min(i, SHADES - 1)}'>dropped at {escape(site)}</span> " for i, site in enumerate(sites)
    )
    if any(view.span for view in views.texts):
        legend += "<span class='t answer'>answer</span> "
    if any(view.explained for view in views.texts):
        legend += "<span class='t a' style='--a:90%'>what the answer rests on</span> "
    hint = "<p>Point at a token, or tap it, for the score that it was chosen by.</p>" if sites else ""
    return (
        f"<p class=legend><span class='t kept'>kept to the end</span> {legend}</p>{hint}{_means(views, manifest)}"
        + "".join(_text(view, sites) for view in views.texts)
    )


def _means(views: Views, manifest: Manifest) -> str:
    """Say what the upper rows are, and over all texts how what was kept compares with what answers rest on."""
    if not any(view.explained for view in views.texts):
        return ""
    figures = in_words(manifest.verification.get("explanation", {}))
    mean = f" Mean over these texts: {escape(figures)}." if figures else ""
    return (
        "<p>The upper row of a text shows its attribution: integrated gradients of the answer at the embeddings, with nothing "
        f"dropped. The stronger its colour, the more rests on a token.{mean}</p>"
    )


def _text(view: TokenView, sites: Sequence[str]) -> str:
    spans = [_token(view, i, sites) for i in range(len(view.tokens))]
    left = sum(site >= len(sites) for site in view.kept_site)
    figures = in_words(view.explained.figures) if view.explained else ""
    caption = " &middot; ".join(
        filter(None, [escape(view.answer), f"{left} of {len(view.tokens)} tokens", escape(figures)])
    )
    near = "".join(f"<li><b>{cosine:.3f}</b> {escape(text)}</li>" for text, cosine in view.near)
    listed = f"<ol class=near>{near}</ol>" if near else ""
    kind = "text tagged" if any(view.tags) else "text"
    rests = _attribution(view.tokens, view.explained) if view.explained else ""
    return f"<figure>{rests}<div class='{kind}'>{''.join(spans)}</div>{listed}<figcaption>{caption}</figcaption></figure>\n"


def _attribution(tokens: Sequence[str], explained: Explanation) -> str:
    """Return the row of tokens, coloured by how much rests on them."""
    return shaded(tokens, explained.attribution, [f"{share:.1%} of the attribution" for share in explained.attribution])


def shaded(tokens: Sequence[str], values: Sequence[float], tips: Sequence[str]) -> str:
    """Return a row of tokens, each coloured by its value against the largest, and what is told of it."""
    most = max(values) or 1.0
    spans = ""
    for token, value, tip in zip(tokens, values, tips):
        word, space, glued = _word(token)
        shade = f"style='--a:{100 * value / most:.0f}%' tabindex=0 data-tip='{escape(tip)}'"
        spans += f"{space}<span class='t a{glued}' {shade}>{escape(word)}</span>"
    return f"<div class='text rests'>{spans}</div>"


def _word(token: str) -> tuple[str, str, str]:
    """Return what is shown of a token, the space before it, and the class of those that go on with a word."""
    return (shown(token), " ", "") if token.startswith(" ") else (shown(token), "", " glued")


def _token(view: TokenView, i: int, sites: Sequence[str]) -> str:
    """Return one token: a colour for where it was dropped, its tag below, and a frame around an answer."""
    token, site = view.tokens[i], view.kept_site[i]
    kept = site >= len(sites)
    kind = "kept" if kept else f"d{min(site, SHADES - 1)}"
    scores = [f"{name}: {view.scores[name][i]:+.2f}" for name in sites if view.scores[name][i] is not None]
    way = passed(view.explained, i) if view.explained else ""
    tip = "; ".join(filter(None, [*scores, "kept" if kept else f"dropped at {sites[site]}", way]))
    word, space, glued = _word(token)
    answer = " answer" if view.span and view.span[0] <= i <= view.span[1] else ""
    tag = f"<br><small>{escape(view.tags[i])}</small>" if view.tags and view.tags[i] else ""
    return (
        f"{space}<span class='t {kind}{glued}{answer}' tabindex=0 data-tip='{escape(tip)}'>{escape(word)}{tag}</span>"
    )
