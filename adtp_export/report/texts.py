"""Single texts in `report.html`: which tokens stayed, and what was answered where."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from ..records import Manifest, TokenView, Views

SHADES = 3
"""Colours of dropping sites; sites behind share the last one."""


def texts(views: Views, manifest: Manifest) -> str:
    """Return the texts of a report as HTML, with what the colours mean."""
    sites = list(manifest.checkpoint["prune_sites"])
    legend = "".join(
        f"<span class='t d{min(i, SHADES - 1)}'>dropped at {escape(site)}</span> " for i, site in enumerate(sites)
    )
    if any(view.span for view in views.texts):
        legend += "<span class='t answer'>answer</span> "
    told = "<p>Point at a token, or tap it, for the score that it was chosen by.</p>" if sites else ""
    return f"<p class=legend><span class='t kept'>kept to the end</span> {legend}</p>{told}" + "".join(
        _text(view, sites) for view in views.texts
    )


def _text(view: TokenView, sites: Sequence[str]) -> str:
    spans = [_token(view, i, sites) for i in range(len(view.tokens))]
    left = sum(site >= len(sites) for site in view.kept_site)
    told = " &middot; ".join(filter(None, [escape(view.answer), f"{left} of {len(view.tokens)} tokens"]))
    near = "".join(f"<li><b>{cosine:.3f}</b> {escape(text)}</li>" for text, cosine in view.near)
    listed = f"<ol class=near>{near}</ol>" if near else ""
    kind = "text tagged" if any(view.tags) else "text"
    return f"<figure><div class='{kind}'>{''.join(spans)}</div>{listed}<figcaption>{told}</figcaption></figure>\n"


def _token(view: TokenView, i: int, sites: Sequence[str]) -> str:
    """Return one token: a colour for where it was dropped, its tag below, and a frame around an answer."""
    token, site = view.tokens[i], view.kept_site[i]
    kept = site >= len(sites)
    kind = "kept" if kept else f"d{min(site, SHADES - 1)}"
    scores = [f"{name}: {view.scores[name][i]:+.2f}" for name in sites if view.scores[name][i] is not None and i > 0]
    tip = "; ".join([*scores, "kept" if kept else f"dropped at {sites[site]}"])
    word = token.removeprefix("##")
    space, glued = ("", " glued") if word != token else (" ", "")
    answer = " answer" if view.span and view.span[0] <= i <= view.span[1] else ""
    tag = f"<br><small>{escape(view.tags[i])}</small>" if view.tags and view.tags[i] else ""
    return (
        f"{space}<span class='t {kind}{glued}{answer}' tabindex=0 data-tip='{escape(tip)}'>{escape(word)}{tag}</span>"
    )
