"""An output directory on disk: exchanged whole when it is written, compared with its manifest when it is read.

A run writes beside the directory and exchanges the two in one step, so that a kill leaves the old result or the new one. It holds
a lock (`flock`) on the folder it works in. A folder without a lock is what a killed run left, and the next run clears it.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import TracebackType

from ..errors import AdtpError, InputError, quoted
from ..io import check_readable_name, exchange, flush, flush_alone, give_as, hold, holding, is_full, umask
from .checks import checked_file
from .records import MANIFEST_NAME, Manifest

_WORK, _OLD = "adtp-work", "adtp-old"
_NAMED = 3
"""Unlisted files that a message names."""


class OutputDirectory:
    """A context in which files are written to `work`; `publish` makes them the directory `path`.

    Leaving the context without `publish` removes everything that was written.

    Args:
        force: what is at `path` may be replaced, if a run wrote all of it.
        update: the same, and there has to be something.
        protected: a directory whose files stay, wherever its links lead.
        beside: work is done in its folder, in folders named after it; default: `path`. It is on the same file system.

    Raises:
        InputError: `path` exists and neither `force` nor `update` is given, is not ours to replace, holds files that its
            manifest does not list, or cannot be written.
    """

    ADVICE = "add --force to replace it, --update to add targets"
    WAITS = True
    """Whether `publish` waits for another run that holds what it is to replace. All hold it for a moment, but for `alone_in`."""

    def __init__(
        self,
        path: Path,
        force: bool = False,
        update: bool = False,
        protected: Path | None = None,
        beside: Path | None = None,
    ) -> None:
        try:
            self.path = Path(os.path.realpath(path))  # of a symlink, what it points to
        except ValueError as error:
            raise InputError(f"got {quoted(str(path))}, which is no path ({error})") from error
        check_readable_name(self.path)
        self.beside = beside or self.path
        self._replace = force or update
        self._before: Manifest | None = None
        if protected is not None:
            _check_protected(path, self.path, protected)
        if self.path in _current_directories():
            raise InputError(
                f"{path} is or holds the current directory, which cannot be replaced; go to another one first"
            )
        with writing(self.path):
            recover(self.path, self.beside)
            self._check_place()
            if update and not self.path.exists():
                raise InputError(f"--update: {path} does not exist; leave --update out to make it")
        parent = next(parent for parent in self.path.parents if parent.is_dir())
        if not os.access(parent, os.W_OK | os.X_OK):
            raise InputError(f"{parent} is not writable; give another place")

    def _check_place(self) -> None:
        """Refuse what is there unless it is ours and may be replaced."""
        if not self.path.exists():
            return
        if not self.path.is_dir():
            raise InputError(f"{self.path} is a file; give a directory")
        if os.path.ismount(self.path):
            raise InputError(
                f"{self.path} is a mount point, which cannot be replaced; give a place in it, such as {self.path / 'model'}"
            )
        if not any(self.path.iterdir()):
            return
        if not self._replace:
            raise InputError(f"{self.path} exists; {self.ADVICE}, or give another place")
        self._check_ours()

    def _check_ours(self) -> None:
        """Refuse what no run wrote, and what has more in it than a run wrote."""
        try:
            manifest = Manifest.read(self.path)
        except InputError as error:
            raise InputError(
                f"{self.path} was not made by adtp-export, or is damaged ({error}); remove it yourself or give "
                "another place"
            ) from error
        if unlisted := _unlisted(self.path, manifest):
            raise InputError(
                f"{self.path} holds what its {MANIFEST_NAME} does not list, and replacing it would delete that: "
                f"{', '.join(unlisted)}; move that elsewhere"
            )

    def __enter__(self) -> OutputDirectory:
        with writing(self.path):
            self.beside.parent.mkdir(parents=True, exist_ok=True)
            recover(self.path, self.beside)
            clear_leftovers(self.path, self.beside)
            self.work, self._lock = self._make_work()
            there = self.path.stat().st_mode if self.path.exists() else 0o777 & ~umask()
            self.work.chmod(stat.S_IMODE(there) | stat.S_IRWXU)  # a private result stays private
        return self

    def _make_work(self) -> tuple[Path, int | None]:
        """Make the folder to work in, and hold it; another run may have cleared it before it was held."""
        while True:
            work = Path(tempfile.mkdtemp(prefix=f".{self.beside.name}.{_WORK}-", dir=self.beside.parent))
            try:
                lock = hold(work)
            except (FileNotFoundError, BlockingIOError):
                continue
            if lock is None or work.exists():
                return work, lock
            os.close(lock)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        shutil.rmtree(self.work, ignore_errors=True)
        self._let_go()

    def carry_over(self, manifest: Manifest, but: Iterable[str] = ()) -> None:
        """Copy the files of the directory that is updated to `work`, except those named in `but`; `publish` then replaces it alone.

        Raises:
            InputError: one is not the file that the manifest lists.
        """
        self._before = manifest
        with writing(self.path):
            for name in manifest.files.keys() - set(but):
                place = self.work / name
                place.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(source := checked_file(self.path, manifest, name, check_hashes=False), place)
                place.chmod(stat.S_IMODE(source.stat().st_mode) | stat.S_IWUSR)
                try:
                    checked_file(self.work, manifest, name)
                except InputError as error:  # it is told where the user has it
                    raise InputError(str(error).replace(str(self.work), str(self.path))) from error

    def publish(self) -> None:
        """Put the written files in place of whatever `path` holds.

        Raises:
            InputError: `path` may no longer be replaced, another run has replaced what was carried over, or the file system refuses.
        """
        with writing(self.path):
            if os.name != "nt" and self.path.exists():
                give_as(self.work, self.path.stat())
            flush(self.work)
            self._check_place()  # again: somebody may have been here since
        old = self.work.with_name(_OLD.join(self.work.name.rsplit(_WORK, 1)))
        with writing(self.path):
            # Held, or another run takes it for a leftover once it lies where `work` was.
            lock = _hold_what_is_at(self.path, self.beside, self.WAITS)
            try:
                self._check_before(self.path)
                if not self.path.exists():
                    self.work.rename(self.path)
                elif exchange(self.work, self.path):
                    try:
                        self._check_before(self.work)  # where nothing can be locked, another run may have been faster
                    except InputError:
                        exchange(self.work, self.path)
                        raise
                else:
                    self._move_in(old)
                flush_alone(self.path.parent)
                for place in (self.work, old):  # after an exchange the old result is in `work`
                    with contextlib.suppress(OSError):
                        place.chmod(stat.S_IRWXU)  # it may have been one that nobody writes into
                    shutil.rmtree(place, ignore_errors=True)
            finally:
                if lock is not None:
                    os.close(lock)
                self._let_go()

    def _let_go(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _check_before(self, directory: Path) -> None:
        """Refuse to replace what another run has put in place of what was carried over."""
        if self._before is not None and Manifest.read(directory) != self._before:
            raise InputError(f"{self.path} was replaced by another run meanwhile; run this again")

    def _move_in(self, old: Path) -> None:
        """Publish in two steps, where the system has no exchange. A reader between them waits for the lock on what was at `path`."""
        try:
            if self.path.exists():
                self.path.rename(old)
            self.work.rename(self.path)
        except BaseException:  # signals, too
            if old.exists() and not self.path.exists():
                old.rename(self.path)
            raise


def recover(path: Path, beside: Path | None = None) -> None:
    """Bring back a result that a killed run had moved aside; do nothing where `path` exists.

    Args:
        beside: as for `OutputDirectory`.

    Raises:
        OSError: the file system refuses.
    """
    path = Path(os.path.realpath(path))
    beside = beside or path
    if path.exists() or not beside.parent.is_dir():
        return
    for old in _leftovers(beside, _OLD):
        # Another reader was faster, or it is somebody else's.
        with contextlib.suppress(FileNotFoundError, PermissionError), holding(old):
            if not path.exists():  # without locks a live run may find it taken, and says so
                old.rename(path)


def remove(place: Path) -> None:
    """Remove a directory whose name is used next, so that nothing of it may stay; do nothing where there is none.

    Raises:
        InputError: the file system refuses.
    """
    try:
        shutil.rmtree(place)
    except FileNotFoundError:
        pass
    except OSError as error:
        what = Path(error.filename or place)
        raise InputError(
            f"{what} cannot be removed ({error.strerror}); remove {place} yourself, and type the same again"
        ) from error


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn what the file system refuses while writing `path`, also to a library, into one clear message."""
    try:
        yield
    except AdtpError:
        raise
    except Exception as error:  # of libraries: many types
        told = getattr(error, "strerror", None)
        if is_full(error):
            raise InputError(
                f"{path}: the disk is full ({told or 'no room is left'}); free some space or give another place"
            ) from error
        if not isinstance(error, OSError):
            raise
        raise InputError(f"{path} cannot be written ({told or error}); give another place") from error


def held_by(out: Path, place: Path) -> Path | None:
    """Return the first of a directory and what it links to, or a file, that is in `out` itself, wherever links lead; None where none is.

    A directory may hold `out`: what lies in it and is no link is nowhere else.
    """
    readable = place.is_dir() and os.access(place, os.R_OK | os.X_OK)
    links = sorted(file for file in place.iterdir() if file.is_symlink()) if readable else []
    for file in [place, *links]:
        target = file.resolve()
        if out == target or out in target.parents:
            return file
    return None


def _check_protected(asked: Path, out: Path, protected: Path) -> None:
    """Refuse to replace a directory that holds another one, or files that the other one links to."""
    if (file := held_by(out, protected)) is not None:
        what = "the model directory" if file is protected else "a file that the model directory links to:"
        raise InputError(f"{asked} is or holds {what} {file}; give another place")


def foreign(directory: Path, is_ours: Callable[[str, Path], bool]) -> list[str]:
    """Name what a directory holds that no run wrote: the first few, and that there are more.

    Args:
        is_ours: takes a name relative to the directory, as POSIX writes it, and the path; says whether a run wrote it.
    """
    found: list[str] = []
    for path in directory.rglob("*"):
        name = path.relative_to(directory).as_posix()
        if not is_ours(name, path):
            found.append(name)
            if len(found) > _NAMED:
                return [*sorted(found[:_NAMED]), "and more"]
    return sorted(found)


def _unlisted(directory: Path, manifest: Manifest) -> list[str]:
    """Name what an output directory holds beside the files of its manifest."""
    known = {MANIFEST_NAME, *manifest.files}
    folders = {parent.as_posix() for name in known for parent in Path(name).parents}
    return foreign(
        directory,
        lambda name, path: name in known or (name in folders and path.is_dir() and not path.is_symlink()),
    )


def _leftovers(path: Path, *kinds: str) -> list[Path]:
    pattern = re.compile(rf"\.{re.escape(path.name)}\.({'|'.join(kinds)})-")
    return [sibling for sibling in path.parent.iterdir() if pattern.match(sibling.name)]


def clear_leftovers(path: Path, beside: Path | None = None) -> None:
    """Remove what killed runs left beside `path`; a result that was moved aside stays until `path` has one."""
    for leftover in _leftovers(beside or path, _WORK, *([_OLD] if path.exists() else [])):
        with contextlib.suppress(
            FileNotFoundError, PermissionError, BlockingIOError
        ):  # gone, somebody else's, or in use
            if (lock := hold(leftover)) is not None:
                shutil.rmtree(leftover, ignore_errors=True)
                os.close(lock)


def _taken(out: Path) -> InputError:
    return InputError(f"--out: another run works in {out}; wait for its end, or give another --out")


@contextlib.contextmanager
def alone_in(out: Path) -> Iterator[None]:
    """Keep other runs out of a directory in a block.

    Raises:
        InputError: another run works there.
    """
    try:
        lock = hold(out)
    except BlockingIOError:
        raise _taken(out) from None
    try:
        yield
    finally:
        if lock is not None:
            os.close(lock)


def _hold_what_is_at(path: Path, beside: Path, wait: bool) -> int | None:
    """Lock the directory at a path, once it is there and no other run has put another one in its place.

    Raises:
        InputError: another run holds it, and `wait` is not given.
    """
    while True:
        try:
            lock = hold(path, wait)
        except BlockingIOError:
            raise _taken(path) from None
        except FileNotFoundError:  # another run is between its two steps
            recover(path, beside)
            if not path.exists():
                return None
            continue
        if lock is None:
            return None
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(lock), path.stat()):
                return lock
        os.close(lock)


def _current_directories() -> set[Path]:
    """Return the directory that this process is in and all that hold it; none where it has been removed."""
    try:
        here = Path(os.path.realpath(os.curdir))
    except FileNotFoundError:
        return set()
    return {here, *here.parents}
