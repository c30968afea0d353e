"""What a disk and its system give: locks, an exchange in one step, files that are there whole, and that survive a power cut."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

try:
    import fcntl
except ImportError:  # Windows: nothing can be told to be a leftover there, so nothing is cleared
    fcntl = None  # type: ignore[assignment]

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


def umask() -> int:
    """Return the mask of rights that new files do not get."""
    mask = os.umask(0)
    os.umask(mask)
    return mask
