"""`report.md` of an output directory, rendered from its manifest."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..artifacts.records import Manifest, Target
from ..errors import printable
from .explained import in_words
from .names import names, shapes, statuses
from .targets import FILE, TARGET, groups


def render(manifest: Manifest) -> str:
    """Return the report as GitHub-flavoured markdown."""
    checkpoint = manifest.checkpoint
    sites = ", ".join(f"`{site}`" for site in checkpoint["prune_sites"]) or "none"
    lines = [
        f"# {checkpoint['name']}",
        "",
        f"Exported by adtp-export {manifest.versions['adtp-export']}. Checkpoint sha256 `{checkpoint['sha256'][:16]}`, "
        f"stored as {checkpoint['stored_dtype']}, prune sites {sites}. "
        f"Shapes: {shapes(manifest)}.",
        "",
        "## Targets",
        "",
        *targets(manifest),
    ]
    for status, meaning in statuses(manifest).items():
        lines += [f"`{status}`: {meaning}.", ""]
    if figures := in_words(manifest.verification.get("explanation", {})):
        lines += [f"Answers to single texts, explained: {figures}.", ""]
    if manifest.retention:
        lines += [f"## Retention on {manifest.verification['text']}", "", *retention(manifest), ""]
    lines += _quantization(manifest)
    if manifest.notes:
        lines += ["## Notes", "", *(f"- {note.text}" for note in manifest.notes), ""]
    lines += ["## Versions", "", ", ".join(f"{name} {version}" for name, version in manifest.versions.items()), ""]
    return printable("\n".join(lines))


def targets(manifest: Manifest) -> list[str]:
    """Return what each target was found to be off: a table for all that were compared on the same rows, and what rows these are."""
    lines = []
    for group in groups(manifest):
        rows = [{**row, TARGET: f"`{row[TARGET]}`", FILE: f"`{row[FILE]}`"} for row in group.columns(manifest)]
        lines += table(tuple(rows[0]), [tuple(row.values()) for row in rows]) + [""]
        lines += [group.told, ""] if group.told else []
    return lines


def retention(manifest: Manifest) -> list[str]:
    """Return the table of what each site kept on the verification rows."""
    rows = [
        (f"`{site}`", f"{figures['mean_ratio']:.3f}", f"{figures['mean_kept_tokens']:.1f}")
        for site, figures in manifest.retention.items()
    ]
    return table(("site", "mean ratio", "mean kept tokens"), rows)


COSTLIEST = 5


def _quantization(manifest: Manifest) -> list[str]:
    """What was calibrated on, and what each quantized file's costliest products cost."""
    rows: dict[str, dict[str, list[tuple[str, ...]]]] = {}
    for target in manifest.targets.values():
        if costs := target.details.get("sensitivity"):
            of = rows.setdefault(_ranges(target.calibration), {})
            of[target.file] = [_cost(target, cost) for cost in costs[:COSTLIEST]]
    value = names(manifest).value
    head = ("file", "recipe", "product", f"mean {value} diff", f"max {value} diff", "in the file")
    lines = ["## Quantization", ""] if rows else []
    for told, files in rows.items():
        lines += [f"{told} The costliest matrix products, each quantized alone:", ""]
        lines += [*table(head, [row for of_file in files.values() for row in of_file]), ""]
    return lines


def _ranges(calibration: Mapping[str, Any]) -> str:
    if not calibration:
        return "No range rests on texts: each token has one of its own, or weights alone are rounded."
    return (
        f"Ranges from {calibration['rows']} of {calibration['of_rows']} rows of {calibration['text']} "
        f"({calibration['tokens']} tokens, sha256 `{calibration['sha256'][:16]}`)."
    )


def _cost(target: Target, cost: Mapping[str, Any]) -> tuple[str, ...]:
    place = "stays in base precision" if cost["product"] in target.details["left_in_base"] else "quantized"
    means, most = f"{cost['mean_abs_logit_diff']:.2e}", f"{cost['max_abs_logit_diff']:.2e}"
    return f"`{target.file}`", target.details["recipe"], f"`{cost['product']}`", means, most, place


def table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> list[str]:
    """Return the lines of a markdown table."""
    return [f"| {' | '.join(cells)} |" for cells in (head, ("---",) * len(head), *rows)]
