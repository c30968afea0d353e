"""A file of text that joins an output directory, or replaces one there: the directory is published anew, in one step."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from ..directory import OutputDirectory, write_manifest, writing
from ..records import Manifest


def add_file(out: Path, manifest: Manifest, name: str, text: str) -> None:
    """Write a file into an output directory whose manifest this is, and list it there.

    Raises:
        InputError: `out` cannot be replaced, a file in it is not the one that its manifest lists, or another run has replaced it.
    """
    with OutputDirectory(out, update=True) as directory:
        directory.carry_over(manifest, but=(name,))
        others = {known: entry for known, entry in manifest.files.items() if known != name}
        with writing(out):
            (directory.work / name).write_text(text, encoding="utf-8")
            write_manifest(dataclasses.replace(manifest, files=others), directory.work)
        directory.publish()
