"""Drawings of records as SVG: two axes, lines, dots. Colours come from the page's style sheet, so they suit light and dark."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from html import escape

WIDTH, HEIGHT, X_BEGIN, X_END, Y_END, COLOURS = 640, 260, 44, 615, 215, 5

FILE_STYLE = (
    "text{fill:#68707c;font:11px system-ui,sans-serif}.grid{stroke:#8884}polyline{fill:none;stroke-width:2}.one{stroke:#888;"
    "stroke-dasharray:4 3}"
    + "".join(
        f"polyline.s{i}{{stroke:{colour}}}circle.s{i}{{fill:{colour}}}"
        for i, colour in enumerate(("#1f8a70", "#d4683a", "#6f80e0", "#b8921e", "#a85fb6"))
    )
)
"""For a page whose colours are not known: middle tones, seen on light and dark."""


def scale(low: float, high: float, begin: float, end: float) -> Callable[[float], float]:
    """Return the linear map of ``low..high`` to ``begin..end``."""
    return lambda value: begin + (end - begin) * (value - low) / (high - low)


def decades(low: float, high: float) -> list[float]:
    """Return the 1, 10, 100, ... inside a range, or 1-2-5 steps where there are too few."""
    span = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    ticks = [10.0**i for i in span if low <= 10.0**i <= high]
    return ticks if len(ticks) > 2 else [m * 10.0**i for i in span for m in (1, 2, 5) if low <= m * 10.0**i <= high]


class Plot:
    """An SVG drawing with two axes; places are given in data."""

    def __init__(self, x: Callable[[float], float], y: Callable[[float], float]) -> None:
        self.x, self.y, self.parts = x, y, list[str]()

    def axis_x(self, ticks: Iterable[tuple[float, str]], title: str) -> None:
        for value, text in ticks:
            self._text(self.x(value), Y_END + 16, text, "middle")
        self._text((X_BEGIN + X_END) / 2, HEIGHT - 8, title, "middle")

    def axis_y(self, ticks: Iterable[tuple[float, str]]) -> None:
        for value, text in ticks:
            self._text(X_BEGIN - 6, self.y(value) + 4, text, "end")
            self.parts.append(f"<path class='grid' d='M{X_BEGIN} {self.y(value):.1f}H{X_END}'/>")

    def line(self, points: Iterable[tuple[float, float]], kind: str) -> None:
        path = " ".join(f"{self.x(x):.1f},{self.y(y):.1f}" for x, y in points)
        self.parts.append(f"<polyline class='{kind}' points='{path}'/>")

    def dot(self, x: float, y: float, radius: float, kind: str, tip: str) -> None:
        place = f"cx='{self.x(x):.1f}' cy='{self.y(y):.1f}' r='{radius:.1f}'"
        self.parts.append(f"<circle class='{kind}' {place}><title>{escape(tip)}</title></circle>")

    def svg(self, label: str) -> str:
        """Return the drawing as an element of a page."""
        return (
            f"<svg viewBox='0 0 {WIDTH} {HEIGHT}' role='img' aria-label='{escape(label)}'>{''.join(self.parts)}</svg>"
        )

    def file(self, label: str, names: Sequence[str]) -> str:
        """Return the drawing as a file of its own, with a legend of the lines ``s0``, ``s1``, ..."""
        legend = "".join(
            f"<circle class='s{i}' cx='{X_BEGIN + 5 + 115 * i}' cy='{HEIGHT + 12}' r='5'/>"
            f"<text x='{X_BEGIN + 15 + 115 * i}' y='{HEIGHT + 16}'>{escape(name)}</text>"
            for i, name in enumerate(names)
        )
        return (
            f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {WIDTH} {HEIGHT + 24}' role='img' aria-label='{escape(label)}'>\n"
            f"<style>{FILE_STYLE}</style>\n{''.join(self.parts)}{legend}\n</svg>\n"
        )

    def _text(self, x: float, y: float, text: str, anchor: str) -> None:
        self.parts.append(f"<text x='{x:.1f}' y='{y:.1f}' text-anchor='{anchor}'>{escape(text)}</text>")
