"""Checkpoints of a stage: sealed with hashes when they are written, and opened wholly before a run goes on from one."""

from __future__ import annotations

import json
import random
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import PartialState
from safetensors.torch import load_file
from torch import nn
from transformers import TrainerState
from transformers.trainer_pt_utils import safe_globals
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from ..artifacts.directory import remove
from ..artifacts.records import sha256
from ..errors import InputError
from ..io import check_regular, read_json, written_whole

HASHES, STATE, WEIGHTS = "sha256.json", "trainer_state.json", "model.safetensors"
MAX_REASON = 200


def seal(directory: Path) -> None:
    """Write the hashes of a directory's files beside them."""
    files = sorted(path for path in directory.iterdir() if path.is_file() and path.name != HASHES)
    with written_whole(directory / HASHES) as partial:
        partial.write_text(json.dumps({path.name: sha256(path) for path in files}, indent=2), encoding="utf-8")


def broken_seal(directory: Path) -> str | None:
    """Say which file is not as it was sealed; None where all are, and in directories that were never sealed."""
    seal = directory / HASHES
    if not seal.exists():
        return None
    try:
        hashes = read_json(seal)
        for name in hashes:
            check_regular(directory / name)
        changed = [name for name, known in hashes.items() if sha256(directory / name) != known]
    except Exception as error:  # no file, no JSON, no mapping, no names: many types
        return reason(error)
    return f"{changed[0]} has changed since it was written" if changed else None


def reason(error: Exception) -> str:
    """Return the first line of what an exception says, or its name."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0][:MAX_REASON]


@dataclass(frozen=True)
class Expected:
    """What a stage's checkpoints hold: the weights of its model, and the optimizer's state of groups of parameters.

    processes: how many train; each has a random state of its own.
    """

    model: nn.Module
    groups: Sequence[Sequence[nn.Parameter]]
    processes: int

    def damage(self, checkpoint: Path) -> str | None:
        """Say what is wrong with a checkpoint; None where it can be gone on from."""
        states = [f"rng_state_{rank}.pth" for rank in range(self.processes)]
        opened: dict[str, Callable[[Path], None]] = {
            WEIGHTS: self._open_weights,
            "optimizer.pt": self._open_optimizer,
            "scheduler.pt": self._open_schedule,
            STATE: _open_state,
            **dict.fromkeys(states if self.processes > 1 else ["rng_state.pth"], _open_random),
        }
        return broken_seal(checkpoint) or _first_failure(checkpoint, opened)

    def damage_of_weights(self, checkpoint: Path) -> str | None:
        """Say what is wrong with a checkpoint of which the weights alone are needed."""
        return broken_seal(checkpoint) or _first_failure(checkpoint, {WEIGHTS: self._open_weights})

    def _open_weights(self, path: Path) -> None:
        expected = {name: weight.shape for name, weight in self.model.state_dict().items()}
        _require(
            {name: weight.shape for name, weight in load_file(path).items()} == expected, "weights of another model"
        )

    def _open_optimizer(self, path: Path) -> None:
        stored = _load(path)
        sizes = [len(group["params"]) for group in stored["param_groups"]]
        _require(sizes == [len(group) for group in self.groups], "other groups of parameters")
        for parameter, state in zip([p for group in self.groups for p in group], _by_number(stored["state"])):
            moments = (state[name].shape for name in ("exp_avg", "exp_avg_sq")) if state else ()
            _require(all(shape == parameter.shape for shape in moments), "moments of other parameters")
            _require(not state or state["step"].numel() == 1, "no number of steps")

    def _open_schedule(self, path: Path) -> None:
        stored = _load(path)
        _require(all(isinstance(stored[name], int) for name in ("last_epoch", "_step_count")), "no number of steps")
        for name, kind in (("base_lrs", float), ("_last_lr", float), ("lr_lambdas", (dict, type(None)))):
            fits = [isinstance(value, kind) for value in stored[name]]
            _require(fits == [True] * len(self.groups), f"another {name}")


def _by_number(states: dict[int, Any]) -> list[dict[str, Any]]:
    return [states.get(number, {}) for number in range(max(states, default=-1) + 1)]


def _load(path: Path) -> Any:
    with safe_globals():  # numbers, tensors, arrays: what is unpickled can run no code
        return torch.load(path, map_location="cpu", weights_only=True)


def _open_random(path: Path) -> None:
    stored = _load(path)
    random.Random().setstate(stored["python"])
    np.random.RandomState().set_state(stored["numpy"])
    torch.Generator().set_state(stored["cpu"])


def _open_state(path: Path) -> None:
    state = TrainerState.load_from_json(str(path))
    _require(state.global_step == _step(path.parent), f"the state of step {state.global_step}")
    counts = (state.max_steps, state.num_train_epochs, state.train_batch_size, state.num_input_tokens_seen)
    _require(all(isinstance(count, int) for count in counts), "counts that are no integers")
    numbers = (state.epoch, state.total_flos, state.best_metric or 0, state.best_global_step or 0)
    _require(all(isinstance(number, (int, float)) for number in numbers), "text for a number")
    _require(isinstance(state.log_history, list) and all(isinstance(e, dict) for e in state.log_history), "no history")


def _require(fits: bool, found: str) -> None:
    if not fits:
        raise ValueError(f"it holds {found}")


def _first_failure(checkpoint: Path, opened: dict[str, Callable[[Path], None]]) -> str | None:
    for name, read in opened.items():
        try:
            check_regular(checkpoint / name)
            read(checkpoint / name)
        except Exception as error:  # every reader has its own types
            return f"{name}: {reason(error)}"
    return None


def _is_json(path: Path) -> bool:
    try:
        read_json(path)
    except InputError:
        return False
    return True


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


def newest_whole(work: Path, damage: Callable[[Path], str | None], note: Callable[[str], None]) -> Path | None:
    """Return the newest checkpoint of a stage that is whole; None where none was written to its end.

    Args:
        work: folder of the stage's checkpoints.
        damage: says what is wrong with one, None where it is whole.
        note: is told which are passed over, and why.

    Raises:
        InputError: there are checkpoints, and none is whole.
    """
    damaged = []
    for checkpoint in sorted(work.glob(f"{PREFIX_CHECKPOINT_DIR}-[0-9]*"), key=_step, reverse=True):
        if not (checkpoint / HASHES).exists() and not _is_json(checkpoint / STATE):  # these are written last
            note(f"passing over {checkpoint.name}, which was not written to its end")
        elif found := damage(checkpoint):
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
