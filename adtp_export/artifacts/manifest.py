"""The manifest of an output directory: read, written, and extended by a file."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from pathlib import Path

from ..errors import AdtpError, InputError
from ..io import check_readable_name, json_text
from .directory import OutputDirectory, recover, writing
from .records import MANIFEST_NAME, Manifest, file_entry

ATTEMPTS = 10
"""To read a directory that exporters keep replacing."""


def read_manifest(directory: Path) -> Manifest:
    """Read the manifest of an output directory; one that a killed run had moved aside is brought back first.

    Raises:
        InputError: `directory` is not an output directory of adtp-export, or is damaged.
    """
    check_readable_name(directory)
    with contextlib.suppress(OSError, ValueError):  # the manifest's own message says more
        recover(directory)
    return Manifest.read(directory)


def open_settled(directory: Path, open_files: Callable[[Manifest], None]) -> None:
    """Open an output directory, and anew where another export takes its place meanwhile.

    Args:
        open_files: takes the manifest, and opens what it lists.

    Raises:
        AdtpError: what `read_manifest` and `open_files` raise; or the directory does not settle.
    """
    for _ in range(ATTEMPTS):
        manifest = read_manifest(directory)
        try:
            open_files(manifest)
        except AdtpError:
            if not is_replaced(directory, manifest):
                raise
        else:
            if not is_replaced(directory, manifest):
                return
    raise InputError(f"{directory} was replaced {ATTEMPTS} times while it was read; try again later")


def is_replaced(directory: Path, manifest: Manifest) -> bool:
    """Say whether another directory is in this one's place since its manifest was read."""
    return read_manifest(directory) != manifest


def list_files(manifest: Manifest, work: Path) -> Manifest:
    """Add size and hash of every file that has none yet to the manifest."""
    files = {
        name: manifest.files.get(name) or file_entry(path)
        for path in sorted(work.rglob("*"))
        if path.is_file() and (name := path.relative_to(work).as_posix()) != MANIFEST_NAME
    }
    return dataclasses.replace(manifest, files=files)


def write_manifest(manifest: Manifest, work: Path) -> Manifest:
    """List all files in the manifest and write it, last of all; return it."""
    manifest = list_files(manifest, work)
    (work / MANIFEST_NAME).write_text(json_text(manifest.to_json()), encoding="utf-8")
    return manifest


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
