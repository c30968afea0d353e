"""`tune`: from a fine-tuned model to the fastest student of it that is good enough, or to the best one that is fast enough."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from ...errors import InputError, needs_extras
from ...io import telling_full_disk
from ...options import takes
from ..progress import Steps, telling_how_to_go_on
from ..train.directory import GO_ON
from . import directory
from .options import TuneOptions


@takes(TuneOptions)
@needs_extras("tune", "train")
def tune(chosen: TuneOptions) -> dict[str, Any]:
    """Find the fastest student of a model that loses no more than it may, or the one that loses least at a speed, and prove it.

    Where `out` holds a finished run of the same settings, another goal is met from what is trained there already.

    Returns:
        What `results.json` holds: the verdict, what was chosen, all candidates, plan, rows. With `plan`, the plan alone. "published" says
        whether `out` has an export and a student for this goal now.

    Raises:
        InputError: bad data or settings, too few rows or too little time, or a directory of something else.
        MissingDependencyError: a package for training is not installed; the message says how to install it.
    """
    steps = chosen.steps or Steps()
    if not Path(chosen.model, "config.json").is_file():
        raise InputError(
            f"MODEL: {chosen.model} has no config.json; give the directory of a fine-tuned transformers model"
        )
    with steps.step("import_s", "importing PyTorch and transformers"):
        from ...training.trainer import quiet
        from .rows import read
        from .run import Run
    with quiet():
        with steps.step("data_s", "reading the data"):
            rows = read(chosen)
        if chosen.plan:
            with telling_full_disk(), tempfile.TemporaryDirectory() as scratch:
                run = Run(chosen, rows, steps)
                return run.planned(run.prepared(Path(scratch)))
        with (
            directory.claimed(chosen) as finished,
            telling_full_disk(Path(chosen.out), GO_ON),
            telling_how_to_go_on(steps, "type the same command again, and add --resume"),
        ):
            return Run(chosen, rows, steps).search(finished)
