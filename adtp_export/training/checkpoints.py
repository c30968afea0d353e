"""Checkpoints of a stage: sealed with hashes when they are written, which are compared before a run goes on from one."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path

from accelerate import PartialState
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from ..artifacts.directory import remove
from ..errors import InputError
from ..io import check_regular, read_json, sha256, written_whole

HASHES, STATE, WEIGHTS = "sha256.json", "trainer_state.json", "model.safetensors"
MAX_REASON = 200


def seal(directory: Path) -> None:
    """Write the hashes of a directory's files beside them."""
    files = sorted(path for path in directory.iterdir() if path.is_file() and path.name != HASHES)
    with written_whole(directory / HASHES) as partial:
        partial.write_text(json.dumps({path.name: sha256(path) for path in files}, indent=2), encoding="utf-8")


def broken_seal(directory: Path, needed: Sequence[str] = ()) -> str | None:
    """Say which file is not as it was sealed, or which of `needed` was not; None where all are as they should be.

    A directory of which nothing is needed may have no seal.
    """
    if not needed and not (directory / HASHES).exists():
        return None
    try:
        hashes = read_json(directory / HASHES)
        for name in (*hashes, *needed):
            check_regular(directory / name)
        changed = [name for name, known in hashes.items() if sha256(directory / name) != known]
    except Exception as error:  # no file, no JSON, no mapping, no names: many types
        return reason(error)
    if changed:
        return f"{changed[0]} has changed since it was written"
    return next((f"{name} is missing from {HASHES}" for name in needed if name not in hashes), None)


def reason(error: Exception) -> str:
    """Return the first line of what an exception says, or its name."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0][:MAX_REASON]


def files_of(processes: int) -> tuple[str, ...]:
    """Name the files of a checkpoint that training goes on from; each process has a random state of its own."""
    states = [f"rng_state_{rank}.pth" for rank in range(processes)] if processes > 1 else ["rng_state.pth"]
    return (WEIGHTS, "optimizer.pt", "scheduler.pt", STATE, *states)


def _launch(processes: int) -> str:
    run = "-m adtp_export.cli.train"
    return f"torchrun --nproc-per-node {processes} {run}" if processes > 1 else "adtp-train"


def _others(checkpoint: Path, processes: int) -> int | None:
    """Return how many processes wrote a checkpoint that is whole, where it is another number; None where not, or it does not say."""
    try:
        wrote = sum(name.startswith("rng_state") for name in read_json(checkpoint / HASHES))
    except (InputError, TypeError, AttributeError):
        return None
    other = wrote not in (0, processes) and broken_seal(checkpoint, files_of(wrote)) is None
    return wrote if other else None


def _step(checkpoint: Path) -> int:
    return int(checkpoint.name.rsplit("-", 1)[1])


def forget_newer(last: Path) -> None:
    """Remove the checkpoints after the one that is gone on from: transformers would keep those and remove what it writes next.

    Raises:
        InputError: one cannot be removed.
    """
    processes = PartialState()
    processes.wait_for_everyone()
    if processes.is_main_process:
        for checkpoint in last.parent.glob(f"{PREFIX_CHECKPOINT_DIR}-[0-9]*"):
            if _step(checkpoint) > _step(last):
                remove(checkpoint)
    processes.wait_for_everyone()


def newest_whole(work: Path, processes: int, note: Callable[[str], None]) -> Path | None:
    """Return the newest checkpoint of a stage that is whole; None where none was written to its end.

    Args:
        work: folder of the stage's checkpoints.
        processes: how many go on from it.
        note: is told which are passed over, and why.

    Raises:
        InputError: there are checkpoints, and none is whole; or another number of processes wrote them.
    """
    damaged = []
    for checkpoint in sorted(work.glob(f"{PREFIX_CHECKPOINT_DIR}-[0-9]*"), key=_step, reverse=True):
        if not (checkpoint / HASHES).exists():  # it is written last
            note(f"passing over {checkpoint.name}, which was not written to its end")
        elif wrote := _others(checkpoint, processes):
            raise InputError(
                f"--resume: got {processes} {'process' if processes == 1 else 'processes'}, and {wrote} began the run; "
                f"type: {_launch(wrote)} --resume, with the same --out"
            )
        elif found := broken_seal(checkpoint, files_of(processes)):
            damaged.append(f"{checkpoint.name}: {found}")
            note(f"passing over {checkpoint.name}, which is damaged ({found})")
        else:
            return checkpoint
    if damaged:
        raise InputError(
            f"--resume: no checkpoint in {work} is whole ({damaged[0]}); type: rm -r {shlex.quote(str(work))}, and give "
            "--resume again: this stage then starts anew, and earlier ones stay"
        )
    return None
