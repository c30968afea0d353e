"""What a call of `train` is asked for, beside how to train: `training.settings.TrainOptions`."""

from __future__ import annotations

from dataclasses import dataclass, field

from ...errors import InputError
from ...options import Options, PathLike, about, option
from ..progress import Steps


@dataclass(frozen=True, kw_only=True)
class RunOptions(Options):
    """Options of `train` and `adtp-train` that are no settings of the student."""

    out: PathLike = field(
        kw_only=False, metadata=about("directory for the student; a new or an empty one", metavar="DIR", flag="--out")
    )
    config: PathLike | None = option(
        None,
        "YAML file with settings; those given on the command line, or as keywords, take precedence",
        metavar="YAML",
    )
    resume: bool = option(False, "continue the interrupted run in the output directory, with its settings")
    force: bool = option(False, "start anew where the output directory holds a run")
    cache: PathLike | None = option(
        None, "directory that keeps the teacher's attribution, for other runs with the same teacher", metavar="DIR"
    )
    steps: Steps | None = None

    def check(self) -> None:
        if self.resume and self.force:
            raise InputError("--resume goes on with a run and --force starts anew; give one of them")
