"""Files of an output directory, compared with what its manifest says of them."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Collection, Mapping
from pathlib import Path

from ..contract import HEAD_IMAGES, HEAD_TEXT, MAX_THREADS
from ..errors import InputError, check_int, did_you_mean, quoted
from ..io import sha256, unreadable
from .records import MANIFEST_NAME, Manifest

_ANEW = "export again with --force, or fetch the directory anew"
_OTHERS = {HEAD_TEXT: "a model that generates text", HEAD_IMAGES: "a vision tower"}


def check_arguments(directory: object, target: object, threads: object) -> None:
    """Raises InputError for what cannot be an output directory, the name of a target, or a number of threads."""
    if not isinstance(directory, (str, os.PathLike)):
        raise InputError(f"directory: got {type(directory).__name__}; accepted is a path")
    if not isinstance(target, (str, type(None))):
        raise InputError(f"target: got {type(target).__name__}; accepted is a target's name, or None")
    check_int("threads", threads, 0, MAX_THREADS)


def check_target(name: str, targets: Collection[str], directory: Path) -> None:
    """Raises InputError for a target that an output directory does not have."""
    if name not in targets:
        raise InputError(
            f"target: got {quoted(name)}; {directory} has {', '.join(targets)}{did_you_mean(name, targets)}"
        )


def check_reads_texts(directory: Path, manifest: Manifest) -> None:
    """Raises InputError for an export that is no encoder of texts."""
    if other := _OTHERS.get(manifest.checkpoint.get("head", "")):
        raise InputError(f"{directory} holds {other}; accepted are exports of encoders of texts")


def find_file(directory: Path, manifest: Manifest, name: str) -> Path | None:
    """Return a file as `checked_file` does; None where the manifest lists none of that name."""
    return checked_file(directory, manifest, name) if name in manifest.files else None


def checked_file(directory: Path, manifest: Manifest, name: str, check_hashes: bool = True) -> Path:
    """Return the path of a file of an output directory, once it is seen to be the one that the manifest lists.

    Args:
        name: relative, as in the manifest.
        check_hashes: compare its SHA-256, too, which reads the whole file: 0.05 to 0.3 s for 100 MB.

    Raises:
        InputError: it is not listed, not there, no regular file, or has another size or hash.
    """
    listed, path = manifest.files.get(name), directory / name
    if listed is None:
        raise InputError(f"{directory}: {MANIFEST_NAME} does not list {quoted(name)}; {_ANEW}")
    try:
        found = path.stat()  # follows links: download caches are made of them
        if not stat.S_ISREG(found.st_mode):
            raise InputError(f"{path} is not a regular file; {_ANEW}")
        if found.st_size != listed["bytes"]:
            raise InputError(
                f"{path} is damaged: it has {found.st_size} bytes, and {MANIFEST_NAME} says {listed['bytes']}; {_ANEW}"
            )
        if check_hashes and (digest := sha256(path)) != listed["sha256"]:
            raise InputError(
                f"{path} is damaged: its SHA-256 begins with {digest[:16]}, and {MANIFEST_NAME} says "
                f"{listed['sha256'][:16]}; {_ANEW}"
            )
    except PermissionError as error:
        raise unreadable(path, error) from error
    except OSError as error:
        raise InputError(f"{path} cannot be read ({error.strerror}); {_ANEW}") from error
    return path


def checked_model(directory: Path, manifest: Manifest, name: str, check_hashes: bool = True) -> Path:
    """Return the path of a model as `checked_file` does, which also looks at the file beside it that holds its weights."""
    if (weights := f"{name}.data") in manifest.files:
        checked_file(directory, manifest, weights, check_hashes)
    return checked_file(directory, manifest, name, check_hashes)


def contents(places: Mapping[str, str | os.PathLike[str] | None]) -> dict[str, str]:
    """Hash what a run reads, by name: files, models and folders of data. What is None, or not on this disk, is left out.

    Of a folder the name has a "/" behind it.
    """
    found = {name: Path(place) for name, place in places.items() if place is not None and Path(place).exists()}
    return {
        name + "/" * place.is_dir(): sha256(*(_read_in(place) if place.is_dir() else [place]))
        for name, place in found.items()
    }


_OF_MODELS = re.compile(
    r"[^/]*\.(safetensors|bin|model|jinja)|([^/]*config|config_sentence_transformers|modules|tokenizer|vocab|special_tokens_map"
    r"|added_tokens)\.json|vocab\.txt|merges\.txt|\d+_[A-Za-z]+/(config\.json|model\.safetensors|pytorch_model\.bin)"
)
"""Names of what transformers and sentence-transformers read of a model."""
_OF_DATA = re.compile(r".*\.(parquet|arrow|(jsonl|csv|tsv)(\.gz)?)|[^/]*\.(json|txt)(\.gz)?")
"""Names of tables. A run's own directory may lie beside them; it has no such below it."""


def _read_in(directory: Path) -> list[Path]:
    model = any((directory / name).is_file() for name in ("config.json", "modules.json", "model.safetensors"))
    kind = _OF_MODELS if model else _OF_DATA
    files = ((path.relative_to(directory).as_posix(), path) for path in directory.rglob("*"))
    return [path for name, path in sorted(files) if kind.fullmatch(name) and path.is_file()]
