"""`report.md` of an output directory, rendered from its manifest."""

from __future__ import annotations

from collections.abc import Sequence

from ..errors import printable
from ..records import Manifest, Target, show_measure
from .explained import in_words
from .names import names, not_run


def render(manifest: Manifest) -> str:
    """Return the report as GitHub-flavoured markdown."""
    checkpoint = manifest.checkpoint
    sites = ", ".join(f"`{site}`" for site in checkpoint["prune_sites"]) or "none"
    measures = manifest.measures
    lines = [
        f"# {checkpoint['name']}",
        "",
        f"Exported by adtp-export {manifest.versions['adtp-export']}. Checkpoint sha256 `{checkpoint['sha256'][:16]}`, "
        f"stored as {checkpoint['stored_dtype']}, prune sites {sites}. "
        f"Profile: batch {manifest.profile['batch']}, sequence {manifest.profile['seq']}.",
        "",
        "## Targets",
        "",
        *targets(manifest),
        "",
    ]
    for status, meaning in not_run(manifest).items():
        lines += [f"`{status}`: {meaning}.", ""]
    if manifest.verification:
        shown = ", ".join(f"{name} {show_measure(name, value)}" for name, value in measures.items())
        told = f", which reaches {shown} on the labels" if measures else ""
        lines += [f"Compared with the fp32 PyTorch student on {manifest.verification['text']}{told}.", ""]
    if figures := in_words(manifest.verification.get("explanation", {})):
        lines += [f"Answers to single texts, explained: {figures}.", ""]
    if manifest.retention:
        lines += ["## Retention on those rows", "", *retention(manifest), ""]
    lines += _quantization(manifest)
    if manifest.notes:
        lines += ["## Notes", "", *(f"- {note}" for note in manifest.notes), ""]
    lines += ["## Versions", "", ", ".join(f"{name} {version}" for name, version in manifest.versions.items()), ""]
    return printable("\n".join(lines))


def targets(manifest: Manifest) -> list[str]:
    """Return the table of targets with what each was found to be off."""
    called = names(manifest)
    differences = (f"max {called.value} diff", "allowed", called.answers, "kept tokens", *called.columns)
    head = ("target", "status", *differences, *manifest.measures, "file", "MB")
    return table(head, [_target_row(name, target, manifest) for name, target in manifest.targets.items()])


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
    quantized = {target.file: target.details for target in manifest.targets.values() if "sensitivity" in target.details}
    if not quantized:
        return []
    calibration = manifest.calibration
    lines = [
        "## Quantization",
        "",
        f"Ranges from {calibration['rows']} of {calibration['of_rows']} rows of {calibration['text']} "
        f"({calibration['tokens']} tokens, sha256 `{calibration['sha256'][:16]}`). The costliest matrix products, each "
        "quantized alone:",
        "",
    ]
    rows = []
    for file, details in quantized.items():
        for cost in details["sensitivity"][:COSTLIEST]:
            place = "stays in base precision" if cost["product"] in details["left_in_base"] else "quantized"
            means, most = f"{cost['mean_abs_logit_diff']:.2e}", f"{cost['max_abs_logit_diff']:.2e}"
            rows.append((f"`{file}`", details["recipe"], f"`{cost['product']}`", means, most, place))
    value = names(manifest).value
    head = ("file", "recipe", "product", f"mean {value} diff", f"max {value} diff", "in the file")
    return [*lines, *table(head, rows), ""]


def table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> list[str]:
    """Return the lines of a markdown table."""
    return [f"| {' | '.join(cells)} |" for cells in (head, ("---",) * len(head), *rows)]


def _target_row(name: str, target: Target, manifest: Manifest) -> tuple[str, ...]:
    size = manifest.files[target.file]["bytes"]
    called = names(manifest)
    figures = ("",) * (4 + len(called.extra) + len(manifest.measures))
    if (p := target.parity) is not None:
        excused = f" ({len(p.excused_flips)} excused)" if p.excused_flips else ""
        figures = (
            f"{p.max_abs_logit_diff:.2e}",
            f"{p.tolerance:.2e}",
            f"{p.prediction_agreement:.2%}",
            f"{p.kept_token_agreement:.3%}{excused}",
            *called.shown(p),
            *p.shown(manifest.measures),
        )
    return (f"`{name}`", target.status, *figures, f"`{target.file}`", f"{size / 1e6:.1f}")
