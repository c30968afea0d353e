"""Committed records keep the names of their day; documents and commands have those of today."""

from __future__ import annotations

NOW_CALLED = {
    "--ort-cpu": "--precompute-embedding-projections",
    "student-lookup": "student-precomputed",
    "-lookup-plugin": "-precomputed-plugin",
}
"""What records call it, and what it is called now."""


def in_todays_names(text: str) -> str:
    """Return the text of a record with the names of today."""
    for earlier, now in NOW_CALLED.items():
        text = text.replace(earlier, now)
    return text
