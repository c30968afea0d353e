"""Files on this machine or in a store such as S3, by pyarrow's file systems: found, written whole, listed."""

from __future__ import annotations

import contextlib
import functools
import glob
import json
import os
import re
import uuid
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow
from fsspec.implementations.arrow import ArrowFSWrapper
from pyarrow import fs
from pyarrow import parquet as pq

from ...errors import InputError, ellipsize, quoted
from ...io import JSON_BYTES, parse_json

SETTINGS = "_adtp-run.json"
"""What a directory of answers says of itself. Readers of Parquet directories pass over names that begin with an underscore."""
CLAIM = "_adtp-claim-"
"""How names of files begin that say which runs write to a place."""
PARTIAL = "_partial-"
"""How names of files begin while these are being written."""
_WILD = re.compile(r"[*?\[]")
_OTHERS = re.compile(r"\.(txt|tsv|csv|jsonl?)(\.gz)?$")


@dataclass(frozen=True)
class File:
    """A file of a store, as it is now. time: of its last change, in ns."""

    store: fs.FileSystem
    path: str
    size: int
    time: int


@dataclass(frozen=True)
class Directory:
    """A place to write to. shown: as it was typed. run: names the run that writes; another run on the same place has another name."""

    store: fs.FileSystem
    path: str
    shown: str
    run: str

    def names(self) -> set[str]:
        """Return the names of what is in it; none where it does not exist.

        Raises:
            InputError: it is a file, or the store refuses.
        """
        with self.told("read"):
            kind = self.store.get_file_info(self.path).type
            if kind == fs.FileType.File:
                raise InputError(f"{self.shown} is a file; give a directory")
            return {
                info.base_name for info in self.store.get_file_info(fs.FileSelector(self.path, allow_not_found=True))
            }

    def has(self, name: str) -> bool:
        """Say whether there is a file of this name."""
        with self.told("read"):
            return bool(self.store.get_file_info(f"{self.path}/{name}").type == fs.FileType.File)

    def read_json(self, name: str) -> Any:
        """Read a JSON document.

        Raises:
            InputError: it is none, or the store refuses.
        """
        with self.told("read"), self.store.open_input_stream(f"{self.path}/{name}") as stream:
            content = stream.read(JSON_BYTES + 1)
        if len(content) > JSON_BYTES:
            raise InputError(
                f"{self.shown}/{name} is damaged (it has more than {JSON_BYTES:,} bytes); give another place"
            )
        try:
            return parse_json(content, name)
        except InputError as error:
            raise InputError(f"{self.shown}/{name} is damaged ({error}); give another place") from error

    def rows(self, name: str) -> int | None:
        """Return how many rows a Parquet file has by its footer; None where there is no such file, or it is damaged.

        Raises:
            InputError: the store refuses.
        """
        if not self.has(name):
            return None
        with self.told("read"):
            file = self.store.open_input_file(f"{self.path}/{name}")
        with file:
            try:
                return int(pq.read_metadata(file).num_rows)
            except (pyarrow.ArrowException, OSError):  # Thrift's errors come as the latter
                return None

    def write_json(self, name: str, document: Any) -> None:
        """Make the directory where it is not there, and write a document into it.

        Raises:
            InputError: the store refuses.
        """
        with self.told("written"):
            self.store.create_dir(self.path)
        with self.writing(name) as stream, self.told("written"):
            stream.write(json.dumps(document, indent=1).encode())

    @contextlib.contextmanager
    def writing(self, name: str) -> Iterator[Any]:
        """Yield a stream whose content becomes the file of this name at the end of the block, in one step; after an error it does not.

        What is written in the block is told by `told("written")` there: other errors of a block are its own.

        Raises:
            InputError: the store refuses to open the stream, to close it, or to move the file into its place.
        """
        partial, final = f"{self.path}/{PARTIAL}{self.run}-{uuid.uuid4().hex}-{name}", f"{self.path}/{name}"
        with self.told("written"):
            stream = self.store.open_output_stream(partial)
        try:
            yield stream
            with self.told("written"):
                stream.close()
                self._move(partial, final)
        except BaseException:
            with contextlib.suppress(OSError):
                stream.close()
            with contextlib.suppress(OSError):
                self.store.delete_file(partial)
            raise

    def _move(self, partial: str, final: str) -> None:
        """Move a written file into its place; another run with the same answers may have been faster, and cleared this file."""
        try:
            self.store.move(partial, final)
        except OSError:
            found = self.store.get_file_info([partial, final])
            if [info.type for info in found] != [fs.FileType.NotFound, fs.FileType.File]:
                raise

    def remove(self, name: str) -> None:
        """Remove a file.

        Raises:
            InputError: the store refuses.
        """
        with self.told("written"):
            self.store.delete_file(f"{self.path}/{name}")

    def changed(self, name: str) -> int | None:
        """Return when a file was last changed, in ns by the clock of the store; None where that is not known."""
        with self.told("read"):
            return self.store.get_file_info(f"{self.path}/{name}").mtime_ns

    def clear(self, before: int | None) -> None:
        """Remove what killed workers had begun to write: in this run, or in an earlier one.

        Another run may write to the same place at the same time. Its files stay, but for those that it no longer needs.

        Args:
            before: files of other runs are leftovers where they were last changed before this time, as of `changed`, and the file that
                they were to become exists.
        """
        with self.told("read"):
            there = self.store.get_file_info(fs.FileSelector(self.path, allow_not_found=True))
        whole = {info.base_name for info in there}
        for info in there:
            if not info.base_name.startswith(PARTIAL):
                continue
            own = info.base_name.startswith(f"{PARTIAL}{self.run}-")
            older = None not in (before, info.mtime_ns) and info.mtime_ns < before
            if own or (older and info.base_name.removeprefix(PARTIAL).split("-", 2)[-1] in whole):
                with contextlib.suppress(OSError):
                    self.store.delete_file(info.path)

    @contextlib.contextmanager
    def told(self, what: str) -> Iterator[None]:
        """Turn what the store refuses in a block into one clear message. what: "read" or "written"."""
        try:
            yield
        except OSError as error:
            raise InputError(f"{self.shown} cannot be {what} ({ellipsize(str(error))}); give another place") from error


def directory(place: str | os.PathLike[str]) -> Directory:
    """Return a place to write to, by its path or URI; nothing is written.

    Raises:
        InputError: no path and no URI that pyarrow knows.
    """
    return Directory(*_resolved(place), os.fspath(place).rstrip("/"), uuid.uuid4().hex[:12])


def find(places: Sequence[str | os.PathLike[str]]) -> list[File]:
    """Return the Parquet files that paths, patterns, directories and URIs name, each once, in the order of their paths.

    Raises:
        InputError: there are none, or the store refuses.
    """
    named = [file for place in places for file in _named(place)]
    if not named:
        raise InputError("no files are named; give the path of a Parquet file, or a pattern")
    stores = stores_of(named)
    found = {(file.path, stores.index(file.store)): file for file in named}  # two stores may have files of one path
    return [found[key] for key in sorted(found)]


def stores_of(files: Iterable[File]) -> list[fs.FileSystem]:
    """Return the stores that files are in, each once, in the order in which they first come. A store has no hash."""
    stores: list[fs.FileSystem] = []
    for file in files:
        if file.store not in stores:
            stores.append(file.store)
    return stores


def _named(place: str | os.PathLike[str]) -> list[File]:
    text = str(place)
    if _OTHERS.search(text):
        raise InputError(
            f"{text}: accepted are Parquet files; Ray reads others, in Python: "
            'adtp_export.integrations.ray.score(ray.data.read_json("texts.jsonl"), "OUT").write_parquet("answers")'
        )
    store, path = _resolved(place)
    try:
        info = store.get_file_info(path)
        if info.type == fs.FileType.File:
            return [_file(store, info)]
        if info.type == fs.FileType.Directory:
            pattern = f"{glob.escape(path)}/*.parquet"
        elif not _WILD.search(text):
            raise InputError(f"{text}: there is no such file; type the path of a Parquet file, or a pattern in quotes")
        else:
            relative = "://" not in text and not os.path.isabs(text)
            pattern = os.path.normpath(f"{glob.escape(os.getcwd())}/{text}") if relative else path
        names = ArrowFSWrapper(store).glob(pattern)
        shown_ones = [name for name in names if not name.rpartition("/")[2].startswith(("_", "."))]
        infos = [info for info in store.get_file_info(shown_ones) if info.type == fs.FileType.File]
    except (OSError, UnicodeError) as error:  # pyarrow reads no names that are not UTF-8
        raise InputError(f"{text}: cannot be listed ({ellipsize(str(error))})") from error
    if not infos:
        raise InputError(f"{text}: no file matches; type the path of a Parquet file, or a pattern in quotes")
    return [_file(store, info) for info in infos]


def _file(store: fs.FileSystem, info: fs.FileInfo) -> File:
    return File(store, info.path, info.size, info.mtime_ns or 0)


def _resolved(place: str | os.PathLike[str]) -> tuple[fs.FileSystem, str]:
    text = os.fspath(place) if isinstance(place, os.PathLike) else place
    accepted = "accepted are paths, and URIs such as s3://bucket/folder"
    if not isinstance(text, str) or not text or "\0" in text:
        raise InputError(f"got {quoted(text)}; {accepted}")
    try:
        text.encode()  # as pyarrow does
        if "://" not in text:
            return fs.LocalFileSystem(), os.path.abspath(text)
        store, path = _of_uri(text)
    except (pyarrow.ArrowException, OSError, ValueError) as error:
        raise InputError(f"{text}: cannot be opened ({ellipsize(str(error))}); {accepted}") from error
    if not path.strip("/"):
        raise InputError(f"{text}: names no folder; {accepted}")
    return store, path.rstrip("/")


@functools.cache
def _of_uri(uri: str) -> tuple[fs.FileSystem, str]:
    """Resolve a URI, once: for S3, pyarrow asks a server for the bucket's region."""
    store, path = fs.FileSystem.from_uri(uri)
    return store, path
