"""Files: what users give, read within bounds of time, memory and recursion; and what is written, whole and lasting.

Locks, an exchange of two paths in one step, and writes that survive a power cut are what an output directory is made with.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import hashlib
import json
import os
import re
import shutil
import stat
import sys
import tempfile
import uuid
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, Any

from .errors import InputError, ellipsize, printable_json, quoted

try:
    import fcntl
except ImportError:  # Windows: nothing can be told to be a leftover there, so nothing is cleared
    fcntl = None  # type: ignore[assignment]

JSON_BYTES, SETTINGS_BYTES = 16 << 20, 1 << 16
"""Most of a JSON document, and of a recipe or settings that people type: a parser's objects take up to a thousand times as much."""
MAX_NESTING = 64
MAX_ROW = 1 << 26
"""Characters of a row, or of a document in JSON: small compressed files hold lines of gigabytes. They take up to 2 GB of memory."""


def check_readable_name(directory: str | os.PathLike[str]) -> None:
    """See that all names in a path are text: safetensors and ONNX Runtime open no others.

    Raises:
        InputError: the bytes of one are not UTF-8.
    """
    for part in Path(directory).parts:
        try:
            if os.fsencode(part).decode() == part:
                continue
            then = "UTF-8, and this locale is not; type PYTHONUTF8=1 before the command"
        except UnicodeError:
            then = "not UTF-8, and neither safetensors nor ONNX Runtime opens such paths; rename it"
        raise InputError(f"{directory}: the name {quoted(part)} in this path is {then}")


def is_file(path: Path) -> bool:
    """Say whether there is a regular file; raises PermissionError where that may not be known."""
    try:
        return stat.S_ISREG(os.stat(path).st_mode)
    except PermissionError:
        raise
    except (OSError, ValueError):  # no path at all, for one
        return False


def unreadable(path: Path, error: PermissionError) -> InputError:
    """Return what to raise where a user has no right to read something."""
    return InputError(f"{path} may not be read ({error.strerror}); ask its owner for the right to")


def check_regular(path: Path) -> None:
    """See that a path, where it exists, is a file: pipes, sockets and devices would wait or never end.

    Raises:
        InputError: it is something else.
    """
    try:
        mode = os.stat(path).st_mode
    except (OSError, ValueError):
        return  # opening it says what is wrong
    if not stat.S_ISREG(mode):
        kinds = {stat.S_IFDIR: "directory", stat.S_IFIFO: "pipe", stat.S_IFSOCK: "socket"}
        kind = kinds.get(stat.S_IFMT(mode), "device")
        raise InputError(f"{path}: cannot be read: it is a {kind}; accepted is a file. Type the path of one")


@contextlib.contextmanager
def writing_scratch(what: str) -> Iterator[None]:
    """Turn what the file system refuses while temporary files are made into one clear message.

    Args:
        what: is written, for the message.
    """
    try:
        yield
    except OSError as error:
        place = tempfile.tempdir or os.environ.get("TMPDIR", "/tmp")
        raise InputError(
            f"{place}: {what} cannot be written there ({error.strerror or error}); free some space, or type TMPDIR=DIR before the "
            "command, with a directory that has room"
        ) from error


_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_FULL_TOLD = re.compile(
    rf"No space left on device|os error ({'|'.join(map(str, _FULL))})\b|PytorchStreamWriter|inline_container.*unexpected pos"
)
"""What libraries say: safetensors repeats the system's error, `torch.save` does not."""


def is_full(error: BaseException | None) -> bool:
    """Say whether an error tells that there is no room on a disk."""
    return (isinstance(error, OSError) and error.errno in _FULL) or bool(error and _FULL_TOLD.search(str(error)))


@contextlib.contextmanager
def telling_full_disk(out: Path | None = None, then: str = "") -> Iterator[None]:
    """Turn what a full disk makes of a long run into one clear message, also where a library writes; other errors pass.

    Args:
        out: where the run writes, beside temporary files. then: what to do once there is room.
    """
    try:
        yield
    except InputError:
        raise
    except Exception as error:  # of libraries: many types
        if not is_full(error):
            raise
        named = getattr(error, "filename", None)
        places = [Path(named)] if isinstance(named, str) else [*filter(None, (out, Path(tempfile.gettempdir())))]
        there = [place for place in places if place.exists()] or [Path()]
        place = min(there, key=lambda each: shutil.disk_usage(each).free)
        way = "" if place == out else ", or type TMPDIR=DIR before the command, with a directory that has room"
        raise InputError(f"{place}: the disk is full; free some space{way}{then and f', then {then}'}") from error


def read_document(path: Path, most: int = SETTINGS_BYTES) -> str:
    """Read a small text file, in UTF-8.

    Raises:
        InputError: not a file, or larger than `most` bytes. OSError, UnicodeDecodeError: it cannot be read.
    """
    check_regular(path)
    if (size := path.stat().st_size) > most:
        raise InputError(f"{path}: got {size:,} bytes; accepted are at most {most:,}")
    return path.read_text(encoding="utf-8")


def json_text(document: Any) -> str:
    """Spell a document for a file: indented, with letters of all scripts, and with what no file in UTF-8 can hold written out."""
    return printable_json(json.dumps(document, indent=2, ensure_ascii=False)) + "\n"


def read_json(path: Path) -> Any:
    """Read a JSON document.

    Raises:
        InputError: it cannot be read, is not JSON, or is nested deeper than `MAX_NESTING`.
    """
    try:
        text = read_document(path, JSON_BYTES)
    except InputError:
        raise
    except (OSError, ValueError) as error:
        kind = "cannot be read" if isinstance(error, OSError) else "is not readable JSON"
        raise InputError(f"{path} {kind}: {ellipsize(str(error))}") from error
    return parse_json(text, path)


def parse_json(text: str | bytes, source: Path | str) -> Any:
    """Parse a JSON document.

    Raises:
        InputError: it is none, or is nested deeper than `MAX_NESTING`; `source` begins the message.
    """
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{source} is not readable JSON: {ellipsize(str(error))}") from error
    check_nesting(value, source)
    return value


class Lines:
    """The lines of a text file, one after the other; those of one row are `MAX_ROW` characters at most.

    Raises:
        InputError: a longer row; `path` is named in the message.
    """

    def __init__(self, stream: IO[str], path: Path) -> None:
        self._stream, self._path = stream, path
        self._number = self._held = 0

    def __iter__(self) -> Iterator[str]:
        while line := self._stream.readline(MAX_ROW + 1):
            self._number += 1
            self._held += len(line)
            if self._held > MAX_ROW:
                raise InputError(
                    f"{self._path}: line {self._number}: a row has more than {MAX_ROW:,} characters, which is the most "
                    "accepted; divide its text"
                )
            yield line

    def rows(self, made: Iterable[Any] | None = None) -> Iterator[Any]:
        """Yield rows that are made of these lines; by default, the lines."""
        for row in self if made is None else made:
            self._held = 0
            yield row


def check_nesting(value: Any, source: Path | str) -> None:
    """See that objects and lists are not nested deeper than `MAX_NESTING`.

    Raises:
        InputError: they are; `source` begins the message.
    """
    level = [value]
    for _ in range(MAX_NESTING):
        level = [
            child
            for outer in level
            if isinstance(outer, (dict, list))
            for child in (outer.values() if isinstance(outer, dict) else outer)
        ]
        if not level:
            return
    raise InputError(f"{source}: values are nested deeper than {MAX_NESTING} levels, which is the most accepted")


def with_weights(model: Path) -> list[Path]:
    """Return the files of an ONNX model: itself, and the one beside it that holds its weights, where there is one."""
    return [path for path in (model, model.with_name(f"{model.name}.data")) if path.exists()]


_AT_FDCWD, _RENAME_EXCHANGE = -100, 2  # linux/fcntl.h, linux/fs.h


def hold(folder: Path, wait: bool = False) -> int | None:
    """Lock a folder and return the lock, to be closed; None where the system or the file system has no locks.

    The lock is the kernel's: it ends with the process, and counts between containers that share a volume.

    Raises:
        BlockingIOError: another process holds it, and `wait` is not given.
    """
    if fcntl is None:
        return None
    lock = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        os.close(lock)
        raise
    except OSError:
        os.close(lock)
        return None
    except BaseException:
        os.close(lock)
        raise
    return lock


@contextlib.contextmanager
def holding(folder: Path) -> Iterator[None]:
    """Hold the lock of a folder for the time of a block, once whoever has it lets it go."""
    lock = hold(folder, wait=True)
    try:
        yield
    finally:
        if lock is not None:
            os.close(lock)


def give_as(work: Path, there: os.stat_result) -> None:
    """Give all that is in `work` the owner and the group of what it replaces, as far as this user may; else no group gets rights by it.
    Files that other directories have, too, stay as they are."""
    for place in (work, *work.rglob("*")):
        if (found := place.lstat()).st_nlink > 1 and stat.S_ISREG(found.st_mode):
            continue
        for owner in (there.st_uid, -1):  # root may give things away, and others may choose among their groups
            with contextlib.suppress(OSError):
                os.chown(place, owner, there.st_gid, follow_symlinks=False)
                break
    mode = stat.S_IMODE(there.st_mode) | stat.S_IRWXU
    if work.stat().st_gid != there.st_gid:
        mode &= ~stat.S_IRWXG | (mode & stat.S_IRWXO) << 3
    work.chmod(mode)


def exchange(one: Path, other: Path) -> bool:
    """Exchange two directories in one step; return False, and do nothing, where system or file system cannot."""
    if sys.platform != "linux":
        return False
    renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)  # glibc 2.28
    if renameat2 is None:
        return False
    arguments = (_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), ctypes.c_uint(_RENAME_EXCHANGE))
    if renameat2(*arguments) == 0:
        return True
    code = ctypes.get_errno()
    if code in (errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP, errno.EPERM):
        return False
    raise OSError(code, os.strerror(code), str(other))


def flush(path: Path) -> None:
    """Wait until a file, or all that is in a directory, is on the disk; links are left alone.

    Without that, a power cut may leave the names of files that were written last, and not their content.

    Raises:
        OSError: the disk refuses.
    """
    if path.is_dir():
        for child in path.iterdir():
            if not child.is_symlink():
                flush(child)
    flush_alone(path)


def flush_alone(path: Path) -> None:
    """Wait until a file, or the names in a directory, are on the disk, as after a rename in it.

    Raises:
        OSError: the disk refuses.
    """
    if os.name == "nt":  # which opens no directories, and flushes no file that is open for reading
        return
    file = os.open(path, os.O_RDONLY)
    try:
        os.fsync(file)
    except OSError as error:
        if error.errno != errno.EINVAL:  # some file systems flush no directories
            raise
    finally:
        os.close(file)


@contextlib.contextmanager
def written_whole(path: Path) -> Iterator[Path]:
    """Yield a path to write to, which no other process has; at the end of the block the file takes the place of `path` in one step.

    After an error it is removed, and what was at `path` stays.
    """
    partial = path.with_name(f"{path.name}.{uuid.uuid4().hex[:8]}.partial")
    try:
        yield partial
        partial.replace(path)
    except BaseException:  # signals, too
        partial.unlink(missing_ok=True)
        raise


def directory_name(directory: Path) -> str:
    """Return the last part of a directory's path: of a link its own name, of ``.`` that of the current directory."""
    return Path(os.path.abspath(directory)).name


def check_model_directory(directory: Path) -> None:
    """Raises InputError where there is no directory of that name."""
    if not os.path.isdir(directory):  # unlike Path.is_dir, no exception for a name that cannot be
        what = "is not a directory" if os.path.exists(directory) else "does not exist"
        how = "(config.json, model.safetensors, ...); hf download gets one from the Hub"
        raise InputError(f"{directory} {what}; give the directory of a model {how}")


def umask() -> int:
    """Return the mask of rights that new files do not get. Without Linux's record it is changed for a moment, for all threads."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/status").read_text("ascii", "replace").splitlines():
            if line.startswith("Umask:"):
                return int(line.partition(":")[2], 8)
    mask = os.umask(0)
    os.umask(mask)
    return mask


def share(*files: Path) -> None:
    """Give files the rights that new ones get. safetensors writes files that their owner alone can read."""
    rights = 0o666 & ~umask()
    for file in files:
        file.chmod(rights)


def sha256(*paths: Path) -> str:
    """Hash the bytes of files, one after the other, without reading them whole."""
    digest = hashlib.sha256()
    for path in paths:
        with path.open("rb") as stream:
            hashlib.file_digest(stream, lambda: digest)
    return digest.hexdigest()
