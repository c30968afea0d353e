"""`report.html` of an output directory: one file that needs no network and no scripts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from ..artifacts.records import Manifest
from ..explain.records import HELD, Views
from .names import names, shapes, share, statuses
from .plot import COLOURS, X_BEGIN, X_END, Y_END, Plot, decades, log_scale, speedup_by_retention
from .targets import FILE, STATUS, TARGET, Group, groups
from .texts import texts

STYLE = (Path(__file__).parent / "report.css").read_text(encoding="utf-8")
BENCH, END_OF_BENCH = "<!-- bench -->", "<!-- end of bench -->"
RETENTION = "Retention"
SEEN = 0.01
"""Share of a run below which a matrix product is not drawn."""


def render(manifest: Manifest, views: Views | None = None, earlier: str = "") -> str:
    """Return the report as one HTML document, for light and dark screens of any width.

    Args:
        views: single texts and retention; None where nothing was run (``--skip-parity-check``).
        earlier: the report that this one replaces. Its latencies stay, and without `views` what it shows of single texts and retention.
    """
    shown = names(manifest).views
    sections = [
        _head(manifest, views),
        section("Targets", _targets(manifest)),
        _part(shown, lambda found: texts(found, manifest) if found.texts else "", views, earlier),
        _part(RETENTION, lambda found: _retention(found, manifest) if found.retention else "", views, earlier),
        f"{BENCH}\n{bench_of(earlier)}{END_OF_BENCH}\n",
        section("Precisions on this machine's CPU", _precisions(manifest)),
        section("What quantizing costs", _costs(manifest)),
        section("Notes", "".join(f"<p>{escape(note.text)}</p>" for note in manifest.notes)),
        section("Versions", f"<p>{escape(', '.join(f'{n} {v}' for n, v in manifest.versions.items()))}</p>"),
    ]
    return page(escape(str(manifest.checkpoint["name"])), sections)


def page(title: str, sections: Iterable[str]) -> str:
    """Return a document of sections; the title is escaped already."""
    return (
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<title>{title}</title>\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n<link rel="icon" href="data:,">\n'
        f"<style>\n{STYLE}</style>\n</head>\n<body>\n<main>\n{''.join(sections)}</main>\n</body>\n</html>\n"
    )


def _part(title: str, body: Callable[[Views], str], views: Views | None, earlier: str) -> str:
    """Return a section of what single texts show; without them that of an earlier report, if it has one."""
    if views is not None:
        return section(title, body(views))
    opening, closing = section(title, "\0").split("\0")
    _, _, rest = earlier.partition(opening)
    inside, ended, _ = rest.partition(closing)
    return section(title, inside) if ended else ""


def bench_of(document: str) -> str:
    """Return the latencies of `adtp-bench` in a report; "" where there are none."""
    _, _, rest = document.partition(f"{BENCH}\n")
    bench, closing, _ = rest.partition(END_OF_BENCH)
    return bench if closing else ""


def with_bench(document: str, bench: Mapping[str, Any]) -> str:
    """Return a report with the latencies of an `adtp-bench` document in their place, instead of older ones.

    Raises:
        ValueError: the report has no such place; another version wrote it.
    """
    before, opening, rest = document.partition(BENCH)
    _, closing, after = rest.partition(END_OF_BENCH)
    if not closing:
        raise ValueError(f"no {BENCH} in the report")
    return f"{before}{opening}\n{section('Latency against dense BERT', _bench(bench))}{closing}{after}"


def _bench(bench: Mapping[str, Any]) -> str:
    device, groups = bench["device"], []
    for workload in dict.fromkeys(row["workload"] for row in bench["results"]):
        rows = [row for row in bench["results"] if row["workload"] == workload]
        most = max(row["p99_ms"] for row in rows)
        student = next(row for row in rows if row["contender"] == "student")
        bars = ""
        for row in rows:
            p50, p90, p99 = (row[f"p{p}_ms"] for p in (50, 90, 99))
            versus = student["vs"].get(row["contender"])
            told = f"{p50:.1f} ms" + (f", {versus['speedup']:.1f}x the student's" if versus else "")
            marks = "".join(f"<u style='left:{100 * p / most:.1f}%'></u>" for p in (p90, p99))
            bars += (
                f"<span>{escape(row['contender'])}</span><i title='p50 {p50:.2f}, p90 {p90:.2f}, p99 {p99:.2f} ms'>"
                f"<b class='{'own' if row is student else 'peer'}' style='width:{100 * p50 / most:.1f}%'></b>{marks}</i>"
                f"<span>{told}</span>"
            )
        groups.append(f"<h3>{escape(workload)}</h3><div class=bars>{bars}</div>")
    told = (
        f"<p>Bars are medians, marks p90 and p99. {escape(str(device['model']))}, {device['cores']} cores; retention "
        f"{escape(bench['retention'])}. <code>{escape(bench['command'])}</code></p>"
    )
    return told + "".join(groups) + _sweeps(bench.get("sweeps", ())) + _profiles(bench)


def _sweeps(sweeps: Sequence[Mapping[str, Any]]) -> str:
    """Draw speedup against retention, a line per workload."""
    if not sweeps:
        return ""
    plot, names = speedup_by_retention(sweeps)
    told = "; ".join(
        f"{sweep['workload']}: " + ("none found" if (even := sweep["break_even"]) is None else f"{even:.0%}")
        for sweep in sweeps
    )
    note = f"<p>Over {escape(sweeps[0]['baseline'])}. Break-even retention: {escape(told)}.</p>"
    return f"<h3>Speedup against retention</h3>{note}<figure>{plot.svg('speedup against retention')}{legend(names)}</figure>"


def _profiles(bench: Mapping[str, Any]) -> str:
    """Draw where the student's time goes: shares of operators, and the roofline of its matrix products."""
    profiles, peaks = bench.get("profiles", ()), bench.get("peaks")
    if not profiles or not peaks:
        return ""
    roof, slope = peaks["gflops"], peaks["gigabytes_per_s"]
    runtime = peaks.get("runtime", "PyTorch")  # whose product was timed where records do not say it
    drawn = {
        profile["workload"]: [p for p in profile["products"] if p["ms"] >= SEEN * profile["run_ms"]]
        for profile in profiles
    }
    products = [product for found in drawn.values() for product in found]
    if not products:
        return ""
    low, high = min(p["intensity"] for p in products) / 1.5, max(p["intensity"] for p in products) * 1.5
    floor = min(p["gflops"] for p in products) / 1.5
    ceiling = max(roof, *(p["gflops"] for p in products)) * 1.3
    plot = Plot(log_scale(low, high, X_BEGIN, X_END), log_scale(floor, ceiling, Y_END, 10))
    plot.axis_x([(x, f"{x:g}") for x in decades(low, high)], "FLOPs per byte")
    plot.axis_y([(y, f"{y:g}") for y in decades(floor, ceiling)])
    corner = roof / slope
    plot.line(
        [(x, min(roof, slope * x)) for x in sorted({low, min(max(corner, low), high), high}) if slope * x >= floor],
        "roof",
    )
    for i, profile in enumerate(profiles):
        for p in drawn[profile["workload"]]:
            shape = f"{p['count']} x {p['batch']} x ({p['m']}, {p['k']}) @ ({p['k']}, {p['n']})"
            share = p["ms"] / profile["run_ms"]
            tip = f"{profile['workload']}, {p['name']}: {shape}, {p['gflops']:.0f} GFLOP/s, {share:.1%} of the run"
            plot.dot(p["intensity"], p["gflops"], 2.5 + 9 * share**0.5, f"s{i % COLOURS}", tip)
    told = (
        f"<p>Each circle is the student's matrix products of one shape, as large as their share of the run. The line is what this machine "
        f"reached: {roof:.0f} GFLOP/s, in a large matrix product of {escape(runtime)}, and {slope:.0f} GB/s from memory.</p>"
    )
    chart = f"<figure>{plot.svg('roofline')}{legend(profile['workload'] for profile in profiles)}</figure>"
    groups = ""
    for profile in profiles:
        shares = dict(list(profile["shares"].items())[:8])
        groups += (
            f"<h3>{escape(profile['workload'])}: first batch, {profile['accounted']:.1%} of {profile['run_ms']:.1f} ms accounted for, "
            f"{profile['product_share']:.1%} matrix products</h3>"
            f"<p>Reading all weights from memory once takes {profile['weights_ms']:.1f} ms.</p>{_bars(shares, '{:.1%}')}"
        )
    return f"<h3>Roofline, GFLOP/s</h3>{told}{chart}<details><summary>Shares of operators</summary>{groups}</details>"


def legend(names: Iterable[str]) -> str:
    """Return the names of the colours ``s0``, ``s1``, ... under a drawing."""
    items = "".join(f"<span class='s{i % COLOURS}'>{escape(name)}</span> " for i, name in enumerate(names))
    return f"<figcaption class=legend>{items}</figcaption>"


def section(title: str, body: str) -> str:
    """Return a part of a page under a heading; nothing where it is empty."""
    return f"<section>\n<h2>{title}</h2>\n{body}\n</section>\n" if body else ""


def _head(manifest: Manifest, views: Views | None) -> str:
    checkpoint = manifest.checkpoint
    verified = [t.parity for t in manifest.targets.values() if t.parity is not None]
    figures = [(f"{len(verified)} of {len(manifest.targets)}", "targets run and compared with PyTorch")]
    if verified:
        called = names(manifest)
        least = called.shown(min(map(called.alike, verified)))
        figures.append((least, called.answers if called.figure else f"same {called.answers}, at least"))
        figures.append((share(min(p.kept_token_agreement for p in verified)), "same tokens kept, at least"))
    if views:
        figures.append((f"{views.survivors:.0%}", "of a text's tokens stay to the end, on average"))
    if (held := manifest.verification.get("explanation", {}).get(HELD)) is not None:
        figures.append((f"{held:.0%}", "of the attribution is held by the tokens that stay, on average"))
    tiles = "".join(f"<div><b>{escape(value)}</b><span>{escape(text)}</span></div>" for value, text in figures)
    sites = ", ".join(checkpoint["prune_sites"]) or "none"
    return (
        f"<header>\n<h1>{escape(str(checkpoint['name']))}</h1>\n<p>Checkpoint <code>{escape(checkpoint['sha256'][:16])}</code>, "
        f"stored as {escape(checkpoint['stored_dtype'])}; prune sites {escape(sites)}; {shapes(manifest)}.</p>"
        f"\n<div class=tiles>{tiles}</div>\n</header>\n"
    )


def _targets(manifest: Manifest) -> str:
    unrun = "".join(f"<p><b>{escape(s)}</b>: {escape(meaning)}.</p>" for s, meaning in statuses(manifest).items())
    return "".join(_group(manifest, group) for group in groups(manifest)) + unrun


def _group(manifest: Manifest, group: Group) -> str:
    rows = [{title: escape(cell) for title, cell in row.items() if title != FILE} for row in group.columns(manifest)]
    for row in rows:
        row[TARGET] = f"<code>{row[TARGET]}</code>"
        row[STATUS] = f"<span class='status {row[STATUS]}'>{row[STATUS]}</span>"
    told = f"<p>{escape(group.told)}</p>" if group.told else ""
    return told + table(rows[0], [[*row.values()] for row in rows])


def _retention(views: Views, manifest: Manifest) -> str:
    charts = []
    for site, counts in views.retention.items():
        mean = manifest.retention[site]["mean_ratio"]
        told = f"{escape(site)}: {mean:.0%} of what arrives is kept, mean over {sum(counts):,} texts"
        charts.append(f"<figure>{_histogram(counts, mean)}<figcaption>{told}</figcaption></figure>")
    return f"<div class=charts>{''.join(charts)}</div>"


def _histogram(counts: Sequence[int], mean: float) -> str:
    width, height, base = 320, 120, 100
    step, most = width / len(counts), max(*counts, 1)
    bars = "".join(
        f"<rect x='{i * step + 1:.1f}' y='{base - base * n / most:.1f}' width='{step - 2:.1f}' height='{base * n / most:.1f}'>"
        f"<title>{i / len(counts):.0%} to {(i + 1) / len(counts):.0%}: {n} texts</title></rect>"
        for i, n in enumerate(counts)
    )
    marks = "".join(
        f"<text x='{share * width:.0f}' y='{height - 4}' text-anchor='{anchor}'>{share:.0%}</text>"
        for share, anchor in ((0, "start"), (0.5, "middle"), (1, "end"))
    )
    line = f"<line x1='{mean * width:.1f}' x2='{mean * width:.1f}' y1='0' y2='{base}'/>"
    return f"<svg viewBox='0 0 {width} {height}' role=img aria-label='share of tokens kept'>{bars}{line}{marks}</svg>"


def _precisions(manifest: Manifest) -> str:
    timed: dict[tuple[str, str], dict[str, float]] = {}
    for name, target in manifest.targets.items():
        if "p50_ms" in (details := target.details):
            where = str(details["timed_on"]), str(details.get("machine", ""))
            timed.setdefault(where, {})[name] = float(details["p50_ms"])
    return "".join(
        f"<p>Median of one batch of {escape(shape)} tokens, padded; targets took turns. {escape(machine)}</p>"
        f"{_bars(medians, '{:.1f} ms')}"
        for (shape, machine), medians in timed.items()
    )


def _costs(manifest: Manifest) -> str:
    parts = []
    for target in manifest.targets.values():
        if costs := target.details.get("sensitivity"):
            left = target.details["left_in_base"]
            told = f", {len(left)} of {len(costs)} products left unquantized" if left else ""
            means = {
                c["product"] + (" (left)" if c["product"] in left else ""): c["mean_abs_logit_diff"] for c in costs[:8]
            }
            parts.append(f"<h3>{escape(target.file)}{told}</h3>{_bars(means, '{:.1e}')}")
    told = f"<p>Mean change of a {names(manifest).value} when one matrix product alone is quantized; the eight costliest.</p>"
    return told + "".join(parts) if parts else ""


def _bars(values: Mapping[str, float], form: str) -> str:
    most = max(values.values()) or 1.0
    return "<div class=bars>" + "".join(
        f"<span>{escape(name)}</span><i><b style='width:{100 * value / most:.1f}%'></b></i><span>{form.format(value)}</span>"
        for name, value in values.items()
    ) + "</div>"  # fmt: skip


def table(head: Iterable[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table of texts that are escaped already; it scrolls where it is wider than the page."""
    top = "".join(f"<th>{escape(cell)}</th>" for cell in head)
    body = "".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>" for row in rows)
    return f"<div class=wide><table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>"
