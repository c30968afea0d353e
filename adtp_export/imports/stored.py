"""Which names a stored checkpoint holds, read without loading it: nothing is unpickled."""

from __future__ import annotations

import contextlib
import io
import pickletools
import zipfile
from pathlib import Path

from safetensors import SafetensorError, safe_open

from ..errors import InputError
from ..io import read_json
from ..model.weights import PICKLE, WEIGHTS, first_file

MAX_BYTES = 1 << 24
"""Of a pickle that is looked into; that of a model of 1,000 layers has 3 MB."""
_LEGACY_PICKLES = 4
"""Before version 1.6, torch put three small pickles before the one with names, and weights after it."""


def weight_names(directory: Path) -> set[str]:
    """Return the names of a directory's weights, of a pickle all texts; none where there are no weights that can be read."""
    place = first_file(directory)
    if place is None:
        return set()
    if place.name == WEIGHTS:
        with contextlib.suppress(SafetensorError, OSError), safe_open(place, framework="pt") as stream:
            return set(stream.keys())
        return set()
    if place.name == PICKLE:
        return pickled_texts(place)
    with contextlib.suppress(InputError, KeyError, TypeError):
        return {str(name) for name in read_json(place)["weight_map"]}
    return set()


def pickled_texts(path: Path) -> set[str]:
    """Return the texts in a file of `torch.save`, by its opcodes alone; none where it cannot be read."""
    found: set[str] = set()
    with contextlib.suppress(Exception):  # what is no pickle fails in many ways
        if not path.is_file():
            return found
        stream = io.BytesIO(_pickle(path))
        for _ in range(_LEGACY_PICKLES):
            found.update(argument for _, argument, _ in pickletools.genops(stream) if isinstance(argument, str))
    return found


def _pickle(path: Path) -> bytes:
    """Return the first bytes of a file's pickle, which newer files have in an archive."""
    if not zipfile.is_zipfile(path):
        with path.open("rb") as stream:
            return stream.read(MAX_BYTES)
    with zipfile.ZipFile(path) as archive:
        name = next(name for name in archive.namelist() if name.rpartition("/")[2] == "data.pkl")
        with archive.open(name) as stream:
            return stream.read(MAX_BYTES)
