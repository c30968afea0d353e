"""Drawings of records as SVG: two axes, lines, dots. Colours come from the page's style sheet, so they suit light and dark."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from html import escape
from typing import Any

Points = Sequence[tuple[float, float]]

WIDTH, HEIGHT, X_BEGIN, X_END, Y_END, COLOURS = 640, 260, 44, 615, 215, 7

FILE_STYLE = (
    "text{fill:#68707c;font:11px system-ui,sans-serif}.grid{stroke:#8884}polyline{fill:none;stroke-width:2}.one{stroke:#888;"
    "stroke-dasharray:4 3}"
    + "".join(
        f"polyline.s{i}{{stroke:{colour}}}circle.s{i}{{fill:{colour}}}"
        for i, colour in enumerate(("#1f8a70", "#d4683a", "#6f80e0", "#b8921e", "#a85fb6", "#c4506e", "#4a98b8"))
    )
)
"""For a page whose colours are not known: middle tones, seen on light and dark."""


def scale(low: float, high: float, begin: float, end: float) -> Callable[[float], float]:
    """Return the linear map of ``low..high`` to ``begin..end``."""
    return lambda value: begin + (end - begin) * (value - low) / (high - low)


def log_scale(low: float, high: float, begin: float, end: float) -> Callable[[float], float]:
    """Return the logarithmic map of ``low..high`` to ``begin..end``."""
    linear = scale(math.log(low), math.log(high), begin, end)
    return lambda value: linear(math.log(value))


def decades(low: float, high: float) -> list[float]:
    """Return the 1, 10, 100, ... inside a range, or 1-2-5 steps where there are too few."""
    span = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    ticks = [10.0**i for i in span if low <= 10.0**i <= high]
    return ticks if len(ticks) > 2 else [m * 10.0**i for i in span for m in (1, 2, 5) if low <= m * 10.0**i <= high]


def speedup_by_retention(sweeps: Sequence[Mapping[str, Any]]) -> tuple[Plot, list[str]]:
    """Draw the sweeps of an `adtp-bench` document, a line per workload; return the drawing and the lines' names."""
    lines = {
        sweep["workload"]: [
            (r, point["vs"][sweep["baseline"]]["speedup"]) for r, point in zip(sweep["retention"], sweep["points"])
        ]
        for sweep in sweeps
    }
    top = max(y for points in lines.values() for _, y in points)
    plot = Plot(scale(0, 1, X_BEGIN, X_END), scale(0, top * 1.05, Y_END, 10))
    plot.axis_x([(i / 5, f"{i / 5:.0%}") for i in range(6)], "tokens kept at the first site")
    plot.axis_y([(y, f"{y}x") for y in range(0, int(top) + 1, max(1, int(top) // 5))])
    plot.line([(0, 1), (1, 1)], "one")
    plot.curves(lines, "{name}: {x:.0%} kept, {y:.2f}x")
    return plot, list(lines)


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

    def curves(self, curves: Mapping[str, Points], tip: str) -> None:
        """Draw a line with dots for each name; `tip` says a dot in words: a format of name, x and y."""
        for i, (name, points) in enumerate(curves.items()):
            self.line(points, f"s{i % COLOURS}")
            for x, y in points:
                self.dot(x, y, 3.5, f"s{i % COLOURS}", tip.format(name=name, x=x, y=y))

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
        apart = min(115, (WIDTH - X_BEGIN) // max(1, len(names)))
        legend = "".join(
            f"<circle class='s{i % COLOURS}' cx='{X_BEGIN + 5 + apart * i}' cy='{HEIGHT + 12}' r='5'/>"
            f"<text x='{X_BEGIN + 15 + apart * i}' y='{HEIGHT + 16}'>{escape(name)}</text>"
            for i, name in enumerate(names)
        )
        return (
            f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {WIDTH} {HEIGHT + 24}' role='img' aria-label='{escape(label)}'>\n"
            f"<style>{FILE_STYLE}</style>\n{''.join(self.parts)}{legend}\n</svg>\n"
        )

    def _text(self, x: float, y: float, text: str, anchor: str) -> None:
        self.parts.append(f"<text x='{x:.1f}' y='{y:.1f}' text-anchor='{anchor}'>{escape(text)}</text>")
