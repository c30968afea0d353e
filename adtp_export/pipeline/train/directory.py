"""The directory of a training run: begun anew in place of an earlier run, never of anything else, and gone on with."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ...artifacts.checks import contents
from ...artifacts.directory import OutputDirectory, clear_leftovers, foreign, held_by, recover, writing
from ...data.readers import ending
from ...errors import InputError
from ...io import flush, flush_alone, read_json, written_whole
from ...training.settings import TrainOptions, as_yaml, read_settings
from ..convert import WEIGHT_FILES

SETTINGS, RESULTS, WORK, TEACHER = "train.yaml", "results.json", "work", "teacher"
TEACHER_DONE, STUDENT, VIEWS = "teacher-done", "student", "attribution"
"""Folders in `WORK`, beside that of the teacher's checkpoints."""
GO_ON = "add --resume: the run goes on where it was"
"""What to do about a run that ended early, once it can go on."""
INPUTS = "inputs.json"
"""In `WORK`: hashes of the data and the model that the run was begun with."""

MODEL_FILES = rf"(config|generation_config|sha256)\.json|{WEIGHT_FILES}|model\.safetensors\.index\.json"
TOKENIZER_FILES = (
    r"(tokenizer|tokenizer_config|special_tokens_map|added_tokens)\.json|vocab\.(txt|json)|merges\.txt|chat_template\.jinja"
    r"|(tokenizer|spiece|spm|sentencepiece\.bpe)\.model"
)
_TEXTS = r"config_sentence_transformers\.json|sentence_\w+_config\.json"
_STATE = r"(optimizer|scheduler|scaler)\.(pt|bin)|rng_state(_\d+)?\.pth|trainer_state\.json|training_args\.bin"
PARTIAL = r"(\.[0-9a-f]{8}\.partial)?"
_OURS = re.compile(
    rf"({re.escape(SETTINGS)}|{re.escape(RESULTS)}){PARTIAL}"
    rf"|{WORK}/{INPUTS}{PARTIAL}"
    rf"|{WORK}|{TEACHER}|{WORK}/({TEACHER}|{STUDENT}|{TEACHER_DONE}|{VIEWS})"
    rf"|(({TEACHER}|{WORK}/{TEACHER_DONE})/)?({MODEL_FILES}|{TOKENIZER_FILES}|{_TEXTS}){PARTIAL}"
    rf"|{WORK}/({TEACHER}|{STUDENT})/checkpoint-\d+(/({MODEL_FILES}|{TOKENIZER_FILES}|{_TEXTS}|{_STATE}){PARTIAL})?"
    rf"|{WORK}/{VIEWS}/[0-9a-f]{{32}}\.safetensors{PARTIAL}"
)
"""Names that a run, or transformers for it, gives to files and folders."""


class TrainingDirectory(OutputDirectory):
    """A directory that a run begins in, in place of an earlier run, which is removed once the new one is there.

    Raises:
        InputError: as `OutputDirectory`; or another run works there.
    """

    ADVICE = "use --force to start anew"
    WAITS = False

    def _check_ours(self) -> None:
        refused = f"--out: {self.path} is no run of adtp-train, so --force does not remove it"
        try:
            read_settings(self.path / SETTINGS)
        except InputError as error:
            raise InputError(f"{refused} ({error}); give another directory") from error
        if not any((self.path / name).exists() for name in (WORK, TEACHER, RESULTS)):
            raise InputError(
                f"{refused}: beside {SETTINGS} it has neither {WORK}, {TEACHER} nor {RESULTS}; give another directory"
            )
        if others := foreign(self.path, lambda name, _: _OURS.fullmatch(name) is not None):
            raise InputError(
                f"--out: {self.path} holds more than a run of adtp-train, and --force would delete that: {', '.join(others)}; "
                "move that elsewhere"
            )


def check_anew(out: Path, force: bool, needed: Sequence[Path]) -> None:
    """See that a run may begin in `out`, and bring back what a killed run had moved aside.

    Args:
        needed: files and directories that the run reads or writes beside `out`.

    Raises:
        InputError: it may not.
    """
    with writing(out):
        if _is_empty(out):
            return
    if out.exists() and not force:
        unfinished = (out / SETTINGS).is_file() and not (out / RESULTS).is_file()
        hint = "--resume to go on, " if unfinished else ""
        raise InputError(f"--out: {out} exists; use {hint}--force to start anew, or give another directory")
    directory = TrainingDirectory(out, force)
    for place in needed if out.exists() else ():
        if (file := held_by(directory.path, place)) is not None:
            raise InputError(f"--force would remove {file}, which this run needs; move it, or give another --out")


def find_run(out: Path) -> None:
    """Bring back a run that a killed one had moved aside; do nothing where `out` exists."""
    with writing(out):
        recover(out)


def begin(out: Path, settings: TrainOptions, force: bool) -> Path | None:
    """Make `out` the directory of a new run; the earlier one is whole until then, and removed after it.

    Returns:
        What is left of the earlier run, because it could not be removed; None where nothing is.

    Raises:
        InputError: `out` may not be replaced, or cannot be written.
    """
    if _is_empty(out):  # it stays what it is: a mount point, say, or the current directory
        with writing(out):
            _fill(out, settings)
        return None
    with TrainingDirectory(out, force) as directory, writing(out):
        _fill(directory.work, settings)
        directory.publish()
    return directory.work if directory.work.exists() else None


def _inputs(settings: Mapping[str, Any]) -> dict[str, str]:
    """Hash the data and the model that settings name, as far as they are files."""
    named = ("train", "dev", "test", "data", "base", "teacher")
    return contents({name: settings[name] for name in named if name in settings})


def _inputs_before(out: Path) -> dict[str, str]:
    """Return the hashes of what the run in `out` was begun with; earlier versions wrote none."""
    stored = out / WORK / INPUTS
    try:
        return dict(read_json(stored)) if stored.is_file() else {}
    except (InputError, TypeError, ValueError) as error:
        raise InputError(
            f"--resume: {stored} is damaged; remove it if data and model are as they were, or use --force to start anew"
        ) from error


def moved_inputs(out: Path, given: Mapping[str, Any], kept: Mapping[str, Any]) -> dict[str, Any]:
    """Return those of the `given` settings that name what the run in `out` was begun with, wherever it lies now.

    Args:
        kept: the settings of that run. A file that ends otherwise would be read otherwise.
    """
    before = _inputs_before(out)
    asked = {
        name: place
        for name, place in given.items()
        if (name in before and os.path.isfile(place) and ending(Path(place)) == ending(Path(kept[name])))
        or (f"{name}/" in before and os.path.isdir(place))
    }
    same = {name.rstrip("/") for name, now in _inputs(asked).items() if before.get(name) == now}
    return {name: asked[name] for name in same}


def check_inputs(out: Path, settings: TrainOptions) -> None:
    """Raises InputError where data or model are not what the run was begun with."""
    before = _inputs_before(out)
    if changed := [name.rstrip("/") for name, now in _inputs(vars(settings)).items() if before.get(name, now) != now]:
        raise InputError(
            f"--resume: {' and '.join(f'--{name}' for name in changed)} changed since the run in {out} was begun; bring back what was "
            "there, or use --force to start anew"
        )


def check_unfinished(out: Path) -> None:
    """Raises InputError where the run in `out` needs no more work."""
    if (out / RESULTS).is_file():
        raise InputError(f"--resume: the run in {out} is finished; give another --out, or --force to start anew")


def go_on(out: Path) -> None:
    """Clear what killed runs have left beside `out`."""
    with contextlib.suppress(OSError):  # nothing here is needed for going on
        clear_leftovers(out.resolve())


def finish(out: Path, record: str) -> None:
    """Write `results.json`, last of all, and remove what only an interrupted run needs, once the rest is on the disk."""
    for place in out.iterdir():
        if place.name != WORK:
            flush(place)
    _replace_text(out / RESULTS, record)
    flush(out / RESULTS)
    flush_alone(out)
    shutil.rmtree(out / WORK, ignore_errors=True)


def _replace_text(path: Path, text: str) -> None:
    """Write a file whole or not at all."""
    with written_whole(path) as partial:
        partial.write_text(text, encoding="utf-8")


def _is_empty(out: Path) -> bool:
    return out.is_dir() and not any(out.iterdir())


def _fill(directory: Path, settings: TrainOptions) -> None:
    """Write what a run begins with into an empty directory, which is empty again where that fails, so that another may begin in it."""
    hashes = _inputs(vars(settings))
    (directory / WORK).mkdir()  # fails where another run has begun meanwhile
    try:
        _replace_text(directory / WORK / INPUTS, json.dumps(hashes, indent=2) + "\n")
        _replace_text(directory / SETTINGS, as_yaml(settings))
    except BaseException:
        shutil.rmtree(directory / WORK, ignore_errors=True)
        raise
