"""`tune.html`: what `adtp-tune` tried, what each trial loses and how fast it is, and what was confirmed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from .html import legend, page, section, table
from .plot import COLOURS, X_BEGIN, X_END, Y_END, Plot, scale

VERDICTS = {
    "proven": "Proven: the bound is within what was asked for.",
    "likely": "Likely: the measured value is within what was asked for, and its bound is not.",
    "nearest": "Nothing meets what was asked for. The nearest candidate is shown, and nothing was published.",
}


COLUMNS = ("candidate", "speedup", "points lost on dev", "lost on confirmation rows", "bound")


def render(record: Mapping[str, Any], name: str) -> str:
    """Return the page of a record of `tune` as one HTML document."""
    title = f"adtp-tune {escape(name)}"
    sections = [
        f"<header>\n<h1>{title}</h1>\n<p>{escape(VERDICTS[record['verdict']])}</p>\n</header>\n",
        section("Candidates", _candidates(record)),
        section("What was tried", _frontier(record) + _trials(record["trials"])),
        section("What the rows show", f"<p>{escape(record['shows'])}.</p>"),
        section("Times of untrained shapes", _times(record)),
    ]
    return page(title, sections)


def _goal(goal: Mapping[str, Any]) -> str:
    if goal["speedup"] is not None:
        return f"at least {goal['speedup']:g}x"
    return f"at most {goal['max_drop']:g} points lost"


def cells(candidate: Mapping[str, Any]) -> list[str]:
    """Return what `COLUMNS` say of a candidate."""
    found = candidate["confirmed"]
    speedup = f"{candidate['speedup']:.2f}x ± {candidate['margin']:.2f}"
    lost = [f"{points:.2f}" for points in (candidate["drop"], found["drop"], found["bound"])]
    return [f"{candidate['told']}, {candidate['precision']}", speedup, *lost]


def _candidates(record: Mapping[str, Any]) -> str:
    if not record["candidates"]:
        return "<p>No candidate was exported.</p>"
    rows = []
    for each in record["candidates"]:
        name, *figures = map(escape, cells(each))
        mark = " (chosen)" if record["published"] and each == record["chosen"] else ""
        rows.append([name + mark, *figures, f"<code>{escape(each['target'])}</code>"])
    goal = record["goal"]
    bounds = "Each bound holds with 95%, for all candidates together."
    if goal["speedup"] is None:
        bounds = "The chance that any candidate is called proven wrongly is 5% at most (Holm's correction)."
    told = (
        f"<p>Asked for: {_goal(goal)}. Speedups are over the model itself in fp32, packed, timed in turns on "
        f"{escape(record['workload'])}. Bounds come from {record['rows']['test']} rows that took no part in the search. {bounds}</p>"
    )
    return told + table((*COLUMNS, "target"), rows)


def _frontier(record: Mapping[str, Any]) -> str:
    """Draw points lost on dev by speedup: trials by the rows they were trained on, and what was confirmed."""
    kinds: dict[str, list[tuple[float, float, str]]] = {}
    for trial in (each for each in record["trials"] if each["loss"] is not None):
        kinds.setdefault(f"{trial['rows']:,} rows", []).append((trial["speedup"], trial["drop"], trial["told"]))
    for each in record["candidates"]:
        kinds.setdefault("confirmed", []).append((each["speedup"], each["confirmed"]["drop"], each["told"]))
    points = [point for found in kinds.values() for point in found]
    if not points:
        return ""
    right, top = max(x for x, _, _ in points) * 1.05, max(1.0, *(y for _, y, _ in points)) * 1.05
    low = min(0.0, *(y for _, y, _ in points))
    plot = Plot(scale(min(1.0, *(x for x, _, _ in points)), max(right, 2), X_BEGIN, X_END), scale(low, top, 10, Y_END))
    plot.axis_x([(x, f"{x}x") for x in range(1, int(right) + 1)], "speedup over the model in fp32")
    step = max(1, round((top - low) / 5))
    plot.axis_y([(y, f"{-y:+d}" if y else "0") for y in range(int(low), int(top) + 1, step)])
    if (most := record["goal"]["max_drop"]) is not None and most <= top:
        plot.line([(1, most), (right, most)], "one")
    for number, found in enumerate(kinds.values()):
        for x, y, told in found:
            plot.dot(x, y, 4, f"s{number % COLOURS}", f"{told}: {x:.2f}x, {y:.2f} points lost")
    return f"<figure>{plot.svg('points lost by speedup')}{legend(kinds)}</figure>"


def _trials(trials: Sequence[Mapping[str, Any]]) -> str:
    rows = [
        [
            escape(trial["told"]),
            f"{trial['rows']:,}",
            f"{trial['speedup']:.2f}x",
            *(
                ("training diverged", "all")
                if trial["loss"] is None
                else (f"{trial['loss']:.4f}", f"{trial['drop']:.2f} ± {trial['error']:.2f}")
            ),
        ]
        for trial in trials
    ]
    told = (
        "<p>The loss is that of one row against the model's answer. It tells students apart that are right equally often, and shapes of "
        "one speed race by it. Points are lost on the rows to choose on, with one standard error; speedups are of untrained exports.</p>"
    )
    return told + table(("student", "rows trained on", "speedup", "loss", "points lost"), rows) if rows else ""


def _times(record: Mapping[str, Any]) -> str:
    rows = [
        [
            str(time["layers"]),
            escape(time["site"] or "none"),
            f"{time['retention']:.0%}",
            time["precision"],
            f"{time['ms']:.2f}",
        ]
        for time in record["table"]
    ]
    return table(("layers", "cut", "tokens kept", "precision", "ms"), rows)
