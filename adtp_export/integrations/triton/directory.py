"""Models in a repository of Triton on disk: exchanged whole, and replaced only as long as they are what an export wrote."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TypedDict

from ...artifacts.directory import OutputDirectory, clear_leftovers, foreign, recover
from ...artifacts.records import FileEntry, convert, file_entry
from ...errors import InputError
from ...io import read_json

OPTION, NAME_OPTION = "--triton", "--triton-name"
RECORD = "adtp-export.json"
"""In a model's folder: the name that an export wrote it under, its own name, and its files. Triton reads no such file."""
WEIGHTS = (".onnx", ".data", ".engine", ".safetensors")
"""Files that nobody edits by hand."""
_CACHE = re.compile(r"(.+/)?__pycache__(/[^/]+\.pyc)?")
"""What Python leaves beside a `model.py` that it runs."""


class _Record(TypedDict):
    triton: str
    model: str
    files: dict[str, FileEntry]


class ModelDirectory(OutputDirectory):
    """The folder of a model.

    It is worked on beside the repository where that is possible, because a server looks into the repository.

    Args:
        repository: an absolute path without links.
        family: the name that an export writes this model under, with others.
        replace: a model of that family.

    Raises:
        InputError: another model is there, or one of that family that may not be replaced or that somebody changed.
    """

    def __init__(self, repository: Path, name: str, family: str, replace: bool) -> None:
        self._place, self._family = repository / name, family
        super().__init__(self._place, replace, beside=_beside(repository, name))

    def _check_place(self) -> None:
        repository, name = self._place.parent, self._place.name
        if not os.path.lexists(self._place):
            return
        record = None if self._place.is_symlink() else _read(self._place)
        if record is None or record["triton"] != self._family:
            raise InputError(
                f"{OPTION}: {repository} has another model {name}, which is not replaced; type {NAME_OPTION} NAME"
            )
        if not self._replace:
            raise InputError(
                f"{OPTION}: {repository} has a model {name}; add --force to replace it, or type {NAME_OPTION} NAME"
            )
        if others := foreign(self._place, lambda name, path: _is_ours(name, path, record["files"])):
            raise InputError(
                f"{OPTION}: {self._place} holds what no export wrote, or what was changed since, and replacing it would lose that: "
                f"{', '.join(others)}; move {name} out of {repository}, or type {NAME_OPTION} NAME"
            )


def settle(repository: Path) -> None:
    """Bring back models that killed runs had moved aside, and clear what else they left.

    Raises:
        OSError: the file system refuses.
    """
    home = _beside(repository, "")
    pattern = re.compile(rf"\.{re.escape(home.name)}(?P<model>[^@]+)\.adtp-(work|old)-")
    for model in {found["model"] for place in _names(home.parent) if (found := pattern.match(place))}:
        recover(repository / model, _beside(repository, model))
        clear_leftovers(repository / model, _beside(repository, model))


def written_before(repository: Path, family: str) -> set[str]:
    """Name the models of a repository that an export wrote under a name."""
    found = ((name, _read(repository / name)) for name in _names(repository))
    return {name for name, record in found if record is not None and record["triton"] == family}


def write_record(folder: Path, model: str, family: str, known: Mapping[str, FileEntry]) -> None:
    """Write the record of a model whose files are in a folder.

    Args:
        known: files by place in the folder that need not be read.
    """
    files = {
        name: known.get(name) or file_entry(path)
        for path in sorted(folder.rglob("*"))
        if path.is_file() and (name := path.relative_to(folder).as_posix())
    }
    record = _Record(triton=family, model=model, files=files)
    (folder / RECORD).write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


def _beside(repository: Path, model: str) -> Path:
    """Return what folders that a model is worked on in are named after; no name of a model holds an @."""
    above = next((parent for parent in repository.parents if parent.exists()), repository)
    serves = not os.path.ismount(repository) and os.access(above, os.W_OK | os.X_OK)
    return (repository.parent if serves else repository) / f"{repository.name}@{model}"


def _names(folder: Path) -> list[str]:
    return sorted(os.listdir(folder)) if folder.is_dir() else []


def _read(folder: Path) -> _Record | None:
    """Return the record of a model; None where no export wrote it under that name, or nobody can tell."""
    path = folder / RECORD
    try:
        record = convert(read_json(path), _Record) if path.is_file() else None
    except (OSError, ValueError):
        return None
    return record if record is not None and record["model"] == folder.name else None


def _is_ours(name: str, path: Path, files: Mapping[str, FileEntry]) -> bool:
    """Say whether a file of a model is as an export wrote it. Of weights the size tells: they may be gigabytes."""
    if path.is_symlink():
        return False
    if path.is_dir():
        return _CACHE.fullmatch(name) is not None or any(file.startswith(f"{name}/") for file in files)
    if (listed := files.get(name)) is None:
        return name == RECORD or _CACHE.fullmatch(name) is not None
    same = path.stat().st_size == listed["bytes"]
    return same and (path.suffix in WEIGHTS or file_entry(path) == listed)
