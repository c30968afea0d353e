"""The output directory: written beside its place, renamed into it at the end.

An interrupted run leaves the previous result or none, never half of one.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType

from ..errors import InputError
from ..model.checkpoint import Checkpoint
from ..model.config import AdtpBertConfig, PrunedEncoderConfig
from ..model.tokenizer import TOKENIZER_FILES
from ..records import MANIFEST_NAME, Manifest, file_entry

_ENCODER_FIELDS = (
    "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "hidden_act",
    "max_position_embeddings", "type_vocab_size", "layer_norm_eps", "pad_token_id",
)  # fmt: skip
"""Written even where the checkpoint leaves them to their defaults: whoever loads the directory may have others."""

_WORK, _OLD = "adtp-work", "adtp-old"


class OutputDirectory:
    """A context in which files are written to `work`; `publish` makes them the directory `path`.

    Leaving the context without `publish` removes everything that was written.

    Raises:
        InputError: `path` exists and neither `force` nor `update` is given, is not ours to replace, or cannot be written.
    """

    def __init__(self, path: Path, force: bool = False, update: bool = False, protected: Path | None = None) -> None:
        self.path = Path(os.path.realpath(path))  # behind a symlink, what it points to
        self._replace = force or update
        if protected is not None and _swallows(self.path, protected.resolve()):
            raise InputError(f"--out: {path} is or holds the model directory {protected}; give another place")
        if self.path == Path(os.path.realpath(os.curdir)):
            raise InputError(f"--out: {path} is the current directory; give a directory of its own")
        with writing(self.path):
            self._check_place()
            if update and not self.path.exists():
                raise InputError(f"--update: {path} does not exist; leave --update out to make it")
        parent = next(parent for parent in self.path.parents if parent.is_dir())
        if not os.access(parent, os.W_OK | os.X_OK):
            raise InputError(f"--out: {parent} is not writable; give another --out")

    def _check_place(self) -> None:
        """Refuse what is there unless it is ours and may be replaced."""
        if not self.path.exists():
            return
        if not self.path.is_dir():
            raise InputError(f"--out: {self.path} is a file; give a directory")
        if not any(self.path.iterdir()):
            return
        if not self._replace:
            advice = "add --force to replace it, --update to add targets, or give another --out"
            raise InputError(f"--out: {self.path} exists; {advice}")
        if not _is_ours(self.path):
            raise InputError(
                f"--out: {self.path} was not made by adtp-export (it has no {MANIFEST_NAME} of ours); "
                "remove it yourself or give another place"
            )

    def __enter__(self) -> OutputDirectory:
        with writing(self.path):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._recover()
            self.work = Path(tempfile.mkdtemp(prefix=self._prefix(_WORK, os.getpid()), dir=self.path.parent))
            self.work.chmod(0o777 & ~_umask())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        shutil.rmtree(self.work, ignore_errors=True)

    def publish(self) -> None:
        """Put the written files in place of whatever `path` holds."""
        old = self.path.with_name(self._prefix(_OLD, os.getpid()))
        self._check_place()  # again: somebody may have been here since
        with writing(self.path):
            if self.path.exists():
                self.path.rename(old)
            try:
                self.work.rename(self.path)
            except OSError:
                if old.exists():
                    old.rename(self.path)
                raise
            if old.exists():
                old.rename(self.work)  # from here on it is rubbish, also to a later run
        shutil.rmtree(self.work, ignore_errors=True)

    def _prefix(self, kind: str, pid: int) -> str:
        return f".{self.path.name}.{kind}-{pid}-"

    def _recover(self) -> None:
        """Clear what killed runs left: half-written work goes, a result they had moved aside comes back."""
        pattern = re.compile(rf"\.{re.escape(self.path.name)}\.({_WORK}|{_OLD})-(\d+)-")
        for sibling in self.path.parent.iterdir():
            match = pattern.match(sibling.name)
            if match and not _running(int(match[2])):
                if match[1] == _OLD and not self.path.exists():
                    sibling.rename(self.path)
                else:
                    shutil.rmtree(sibling, ignore_errors=True)


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn what the file system refuses while writing `path` into one clear message."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise InputError(
                f"{path}: the disk is full ({error.strerror}); free some space or give another --out"
            ) from error
        raise InputError(f"{path} cannot be written ({error.strerror or error}); give another --out") from error


def write_companions(checkpoint: Checkpoint, work: Path) -> None:
    """Write tokenizer files and a plain transformers config with an `adtp` block, which other tools load without knowing us."""
    for name in TOKENIZER_FILES:
        if (source := checkpoint.directory / name).is_file():
            shutil.copyfile(source, work / name)
    if not (work / "tokenizer.json").exists():
        checkpoint.tokenizer.save(str(work / "tokenizer.json"))
    student = checkpoint.student
    config, encoder = student.config, student.dense.config
    stored = config.backbone if isinstance(config, PrunedEncoderConfig) else checkpoint.raw_config
    left = (*AdtpBertConfig.OWN_FIELDS, "auto_map", "torch_dtype", "dtype")
    plain = {
        **{name: value for name, value in stored.items() if name not in left},
        "model_type": encoder.model_type,
        "architectures": [type(student.dense).__name__],
        "id2label": {str(i): label for i, label in (config.id2label or {}).items()},
        "label2id": config.label2id,
        **{name: getattr(encoder, name) for name in _ENCODER_FIELDS},
        "problem_type": config.problem_type,
        "adtp": {
            "head": config.head,
            "max_tokens": student.max_tokens,
            "method": config.method,
            "prune_sites": list(student.site_names),
            **(dataclasses.asdict(config.settings) if config.settings else {}),
        },
    }
    (work / "config.json").write_text(json.dumps(plain, indent=2) + "\n", encoding="utf-8")


def write_manifest(manifest: Manifest, work: Path) -> Manifest:
    """Add size and hash of every file that has none yet to the manifest and write it, last of all; return it."""
    files = {
        name: manifest.files.get(name) or file_entry(path)
        for path in sorted(work.rglob("*"))
        if path.is_file() and (name := path.relative_to(work).as_posix()) != MANIFEST_NAME
    }
    manifest = dataclasses.replace(manifest, files=files)
    (work / MANIFEST_NAME).write_text(_as_text(manifest), encoding="utf-8")
    return manifest


def replace_file(out: Path, name: str, text: str) -> None:
    """Replace a text file of a published directory, and its entry in the manifest."""
    manifest = Manifest.read(out)
    with tempfile.TemporaryDirectory(dir=out) as scratch:
        new, new_manifest = Path(scratch) / name, Path(scratch) / MANIFEST_NAME
        new.write_text(text, encoding="utf-8")
        manifest = dataclasses.replace(manifest, files={**manifest.files, name: file_entry(new)})
        new_manifest.write_text(_as_text(manifest), encoding="utf-8")
        new.replace(out / name)
        new_manifest.replace(out / MANIFEST_NAME)


def _as_text(manifest: Manifest) -> str:
    return json.dumps(manifest.to_json(), indent=2, ensure_ascii=False) + "\n"


def _is_ours(directory: Path) -> bool:
    try:
        Manifest.read(directory)
    except InputError:
        return False
    return True


def _swallows(out: Path, protected: Path) -> bool:
    return out == protected or out in protected.parents


def _running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
