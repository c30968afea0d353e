"""Output directories on the Hugging Face Hub: found, fetched, pushed. huggingface_hub comes with tokenizers."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import re
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import AdtpError, InputError, ellipsize, quoted, typed
from ..io import JSON_BYTES, sha256
from .directory import recover
from .records import MANIFEST_NAME, Manifest

CARD = "README.md"
"""The model card of a repository."""
_MAX_NAMED = 3
"""Files of others that a message names."""
_COMMIT, _ETAG = re.compile("[0-9a-f]{40}"), re.compile("[0-9A-Fa-f]{1,128}")
_DISTRUST = "Nothing of it was written. Check that HF_ENDPOINT names a Hub that you trust"
_CHECKS = "_adtp_export_checks"
_FRONT = re.compile(r"---\r?\n(.*?)\r?\n---", re.DOTALL)
_NAME = r"[A-Za-z0-9][A-Za-z0-9._-]*"
_REPOSITORY = re.compile(rf"(?P<repo>{_NAME}/{_NAME})(@(?P<revision>(?!.*\.\.)[A-Za-z0-9][A-Za-z0-9._/-]*))?")


def is_repository(name: object) -> bool:
    """Say whether something could be the name of a repository: text such as ``"user/repo"``."""
    return isinstance(name, str) and (named := _REPOSITORY.fullmatch(name)) is not None and named["revision"] is None


def located(directory: Any) -> Any:
    """Return a directory; one that is named like a repository of the Hub and is not here is fetched into huggingface_hub's cache.

    Args:
        directory: a path, ``"user/repo"`` or ``"user/repo@revision"``. All else is returned as it is; a `Path` is one of this machine.

    Raises:
        InputError: the Hub has no such repository or does not give it, it is no output directory, or the Hub cannot be reached.
    """
    named = _REPOSITORY.fullmatch(directory) if isinstance(directory, str) else None
    if named is None or is_here(directory):
        return directory
    return _fetched(named["repo"], named["revision"])


def is_here(directory: str | os.PathLike[str]) -> bool:
    """Say whether there is something of this name on this machine. A result that a killed run had moved aside is brought back."""
    with contextlib.suppress(OSError, ValueError):
        recover(Path(directory))
    return os.path.lexists(directory)


def _fetched(repo: str, revision: str | None) -> Path:
    """Fetch the files that a repository's manifest lists, all of one commit; those that are in the cache are not fetched again.

    Files that the repository lacks are left out: `checked_file` tells whoever needs one.
    """
    from huggingface_hub import _CACHED_NO_EXIST, errors, try_to_load_from_cache

    with _talking(repo, f"there is no directory {repo} here, and "):
        directory = _download(repo, MANIFEST_NAME, revision).parent
        try:
            files = Manifest.read(directory).files
        except InputError as error:
            raise InputError(
                f"{_url(repo)}: this version of adtp-export cannot read its {MANIFEST_NAME}; export its model again"
            ) from error
        commit = directory.name
        for name in files:
            if try_to_load_from_cache(repo, name, revision=commit) is _CACHED_NO_EXIST:
                continue
            try:
                _download(repo, name, commit, files[name]["bytes"])
            except errors.LocalEntryNotFoundError:
                raise
            except errors.EntryNotFoundError:
                continue
        return directory


@dataclass(frozen=True)
class _Asked:
    """A file that is asked of the Hub: of a revision, and of how many bytes, if that is known."""

    repo: str
    name: str
    revision: str | None
    size: int | None

    def check(self, commit: str | None, etag: str | None = None, size: int | None = None) -> None:
        """Refuse an answer that names no place in the cache, another commit, or another size; None is left to huggingface_hub.

        Raises:
            InputError: it does.
        """
        told = f"{_url(self.repo)}: the Hub's answer for {self.name} has"
        fixed = self.revision if _COMMIT.fullmatch(self.revision or "") else None
        if commit is not None and (not _COMMIT.fullmatch(commit) or commit != (fixed or commit)):
            accepted = fixed or "40 hexadecimal digits"
            raise InputError(f"{told} the commit {quoted(commit)}; accepted is {accepted}. {_DISTRUST}")
        if etag is not None and not _ETAG.fullmatch(etag):
            raise InputError(f"{told} the ETag {quoted(etag)}; accepted are hexadecimal digits. {_DISTRUST}")
        if size is not None and not (size == self.size if self.size is not None else 0 <= size <= JSON_BYTES):
            accepted = f"those {self.size} of its {MANIFEST_NAME}" if self.size is not None else f"at most {JSON_BYTES}"
            raise InputError(f"{told} {size} bytes; accepted are {accepted}. {_DISTRUST}")


_ASKED: ContextVar[_Asked | None] = ContextVar("_ASKED", default=None)


def _download(repo: str, name: str, revision: str | None, size: int | None = None) -> Path:
    """Return a file in huggingface_hub's cache, which fetches it if need be.

    The cache names files by what the Hub answers, its ETag and commit, and would follow ``..`` and absolute paths in them. So the
    answers are checked where huggingface_hub takes them, before it writes anything. Answers to others in this process are not.

    Args:
        size: its bytes; default: a document of at most `JSON_BYTES`.

    Raises:
        InputError: the answer is refused. What huggingface_hub raises, `_talking` tells.
    """
    from huggingface_hub import file_download

    if not hasattr(file_download.get_hf_file_metadata, _CHECKS):
        file_download.get_hf_file_metadata = _checking(file_download.get_hf_file_metadata)
    asked = _ASKED.set(_Asked(repo, name, revision, size))
    try:
        return Path(file_download.hf_hub_download(repo, name, revision=revision))
    finally:
        _ASKED.reset(asked)


def _checking(ask: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap what huggingface_hub asks about files with: what `_download` asks for is checked."""
    from huggingface_hub import constants, errors

    @functools.wraps(ask)
    def checked(*arguments: Any, **named: Any) -> Any:
        asked = _ASKED.get()
        try:
            answer = ask(*arguments, **named)
        except errors.EntryNotFoundError as error:  # that it has none is kept in the cache, too, below the commit
            headers = getattr(getattr(error, "response", None), "headers", {})
            if asked is not None:
                asked.check(headers.get(constants.HUGGINGFACE_HEADER_X_REPO_COMMIT))
            raise
        if asked is not None:
            asked.check(answer.commit_hash, answer.etag, answer.size)
        return answer

    setattr(checked, _CHECKS, True)
    return checked


def metadata_and_text(card: Path) -> tuple[str, str]:
    """Split a model card into the YAML of its metadata and its text; either may be empty.

    Raises:
        OSError, ValueError: it cannot be read, or is not UTF-8.
    """
    words = card.read_text(encoding="utf-8")
    found = _FRONT.match(words)
    return (found[1], words[found.end() :].strip()) if found else ("", words.strip())


def prepare(repo: str, names: Iterable[str] = ()) -> tuple[str, Path | None]:
    """See that a directory could be pushed to a repository; return its full name, and fetch the model card that it has, if any.

    Args:
        names: files that the directory is sure to have.

    Raises:
        InputError: no name of a repository, no token, the Hub cannot be reached, or the repository has files of these names that no
            export put there.
    """
    from huggingface_hub import HfApi

    with _talking(repo):
        api = HfApi()
        user = api.whoami()["name"]
        full = repo if "/" in repo else f"{user}/{repo}"
        if not is_repository(full):
            raise InputError(
                f"--push-to-hub: got {quoted(repo)}; accepted is a repository's name, such as {user}/my-model"
            )
        if not api.repo_exists(full):
            return full, None
        there = _There.of(api, full)
        there.refuse(names)
        return full, _download(full, CARD, there.commit) if CARD in there.files else None


def push(out: Path, repo: str) -> str:
    """Make a directory's files those of a repository, in one commit; return its address. A repository that is made is private.

    Of what the repository holds, only files that an earlier export put there are replaced or deleted.

    Raises:
        InputError: the Hub refuses, or cannot be reached; the message says how to push without another export. Or the repository has
            files of the same names that no export put there.
    """
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi

    again = f"{out} is complete; to push it later, type: hf upload {repo} {typed(out)} . --private"
    with _talking(repo, after=f". {again}"):
        api = HfApi()
        if "/" not in repo or not api.repo_exists(repo):
            repo = api.create_repo(repo, private=True, exist_ok=True).repo_id
        there = _There.of(api, repo)
        names = [*Manifest.read(out).files, MANIFEST_NAME]
        there.refuse(names, out)
        gone = sorted(there.listed & there.files.keys() - set(names))
        api.create_commit(
            repo,
            [
                *(CommitOperationAdd(name, out / name) for name in names),
                *(CommitOperationDelete(name) for name in gone),
            ],
            commit_message="Export of adtp-export",
            parent_commit=there.commit,  # what was looked at, or else the Hub refuses
        )
        return f"{api.endpoint}/{repo}"


@dataclass(frozen=True)
class _There:
    """What a repository holds: its commit, its files by name, and those that an earlier export put there."""

    repo: str
    commit: str
    files: Mapping[str, Any]
    listed: frozenset[str]

    @classmethod
    def of(cls, api: Any, repo: str) -> _There:
        """Ask the Hub.

        Raises:
            InputError: it has a manifest that is not of an export.
        """
        info = api.model_info(repo, files_metadata=True)
        _Asked(repo, "the repository", None, None).check(info.sha)
        files = {file.rfilename: file for file in info.siblings}
        if MANIFEST_NAME not in files:
            return cls(repo, info.sha, files, frozenset())
        directory = _download(repo, MANIFEST_NAME, info.sha).parent
        try:
            manifest = Manifest.read(directory)
        except InputError as error:
            raise InputError(
                f"{_url(repo)} has a {MANIFEST_NAME} that this version of adtp-export cannot read, so nothing says which files may be "
                "replaced; push to another repository"
            ) from error
        return cls(repo, info.sha, files, frozenset((MANIFEST_NAME, *manifest.files)))

    def refuse(self, names: Iterable[str], out: Path | None = None) -> None:
        """Raises InputError if a push of files would replace others that no export put there.

        Args:
            out: the directory with these files; those with the same bytes replace nothing.
        """
        foreign = [
            name
            for name in sorted(self.files.keys() & set(names) - self.listed)
            if not (self._is(name, out / name) if out else False) and not (name == CARD and self._says_nothing())
        ]
        if foreign:
            more = " and more" if len(foreign) > _MAX_NAMED else ""
            told = f"{out} is complete; " if out else ""
            raise InputError(
                f"{told}{_url(self.repo)} has files that adtp-export did not put there, and pushing would replace them: "
                f"{', '.join(foreign[:_MAX_NAMED])}{more}; "
                + (
                    f"type: hf upload ANOTHER-NAME {typed(out)} . --private"
                    if out
                    else "type --push-to-hub ANOTHER-NAME"
                )
                + ", or move these files elsewhere"
            )

    def _is(self, name: str, path: Path) -> bool:
        """Say whether a file there has the bytes of one here."""
        there = self.files[name]
        if there.lfs is not None:
            return bool(there.lfs.sha256 == sha256(path))
        return bool(there.size == path.stat().st_size and there.blob_id == _git_name(path.read_bytes()))

    def _says_nothing(self) -> bool:
        """Say whether the card is metadata alone, as the Hub makes it of a licence; those fields are kept."""
        try:
            return not metadata_and_text(_download(self.repo, CARD, self.commit))[1]
        except UnicodeDecodeError:
            return False


def _git_name(data: bytes) -> str:
    """Return what git calls a file of these bytes: the SHA-1 of a header and the bytes."""
    return hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest()


@contextlib.contextmanager
def _talking(repo: str, before: str = "", after: str = "") -> Iterator[None]:
    """Turn what huggingface_hub raises in a block into one clear message.

    Args:
        before, after: what the message begins and ends with.
    """
    from huggingface_hub import errors

    http = errors.HfHubHTTPError.__bases__[0].__module__.partition(".")[0]  # the library that this version has for it
    try:
        yield
    except AdtpError:
        raise
    except Exception as error:
        frames = [frame.f_globals.get("__name__", "") for frame, _ in traceback.walk_tb(error.__traceback__)]
        homes = {name.partition(".")[0] for name in (type(error).__module__, *frames)}
        if not homes & {http, "huggingface_hub"} and not isinstance(error, OSError):
            raise
        raise InputError(f"{before}{_told(error, repo)}{after}") from error


_LOGIN = "type: hf auth login"
_TOLD = {
    "HFValidationError": "the Hub has no repositories of such names: {url}; check the name",
    "LocalTokenNotFoundError": f"the Hub asks who you are, and there is no token; {_LOGIN}, or set HF_TOKEN",
    "GatedRepoError": f"{{url}} is open to those alone who were granted access; ask for it there, then {_LOGIN}",
    "RepositoryNotFoundError": f"the Hub has no {{url}}, or hides it from you; check the name, or {_LOGIN} if it is private",
    "RevisionNotFoundError": "{url} has no such revision; leave out what comes after the @, or name a branch, tag or commit",
    "LocalEntryNotFoundError": "the Hub cannot be reached for {url}, which the cache has not; check the network, or give a directory",
    "OfflineModeIsEnabled": "HF_HUB_OFFLINE forbids to ask for {url}, which the cache has not; unset it, or give a directory",
    "EntryNotFoundError": f"{{url}} has no {MANIFEST_NAME}, so adtp-export did not make it; export its model first",
}
"""What a failure of huggingface_hub means, and what to type; the first class that fits."""


def _told(error: Exception, repo: str) -> str:
    """Say what failed, and what to type."""
    from huggingface_hub import errors

    url = _url(repo)
    for name, told in _TOLD.items():
        if isinstance(error, getattr(errors, name)):
            return told.format(url=url)
    if isinstance(error, errors.HfHubHTTPError):
        if getattr(error.response, "status_code", None) == 412:  # `parent_commit` is not the newest
            return f"{url} was changed by somebody else meanwhile"
        refused = getattr(error.response, "status_code", None) in (401, 403)
        return (
            f"{url}: the Hub answers: {ellipsize(str(error))}{f'. If your token is wrong, {_LOGIN}' if refused else ''}"
        )
    if isinstance(error, OSError) and error.strerror is not None:  # of the cache
        return f"{url} cannot be written to {error.filename} ({error.strerror}); make room, or set HF_HOME"
    if isinstance(error, (ValueError, TypeError, LookupError, AttributeError, AssertionError)):
        said = ellipsize(f"{type(error).__name__}: {error}")
        return f"{url}: huggingface_hub cannot read what the Hub answers ({said}); check that HF_ENDPOINT names a Hub"
    return f"the Hub cannot be reached for {url} ({ellipsize(str(error)) or type(error).__name__}); check the network"


def _url(repo: str) -> str:
    from huggingface_hub import constants

    return f"{constants.ENDPOINT}/{repo}"
