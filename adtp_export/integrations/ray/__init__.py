"""Many machines: texts in Parquet files, or in a dataset of Ray, are answered by workers on a Ray cluster.

Ray places, restarts and retries; nothing here schedules. A part is a range of rows of one file, and has one output file of a
name that follows from it. So a part that is answered twice is there once, and a part that is there is not answered again.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from ...errors import InputError, needs_extras
from .config import PartResult, ScoringConfig, Summary, Workers

if TYPE_CHECKING:
    import ray.data

__all__ = ["ScoringConfig", "PartResult", "Summary", "Workers", "score"]

Place = str | os.PathLike[str]


@needs_extras("adtp_export.integrations.ray.score")
def score(
    dataset: Place | Sequence[Place] | ray.data.Dataset,
    out: Place,
    to: Place | None = None,
    *,
    asked: ScoringConfig | None = None,
    workers: Workers | None = None,
    progress: Callable[[PartResult], None] | None = None,
) -> Any:
    """Answer all texts of Parquet files, or of a dataset of Ray.

    Ray is where this process is connected already, where RAY_ADDRESS says, or in the cluster that runs on this machine. Else it is started
    here. This machine opens the model once in any case.

    What comes back are the columns of the input and those of the answer, named as the fields of `load`'s answers:

    - sequence: ``label`` string, ``score`` double, ``scores`` struct with a double for each label, ``truncated`` bool
    - tokens: ``entities`` list of struct (label, text, start, end, score), ``truncated``
    - spans: ``answer``, ``start``, ``end``, ``score``, ``no_answer``, ``answers`` list of struct (text, start, end, score), ``truncated``
    - embedding: ``vector``, a list of D floats, of fixed size
    - sparse: ``indices`` and ``values``, lists of a token's id and its weight
    - vectors: ``vectors``, a list of lists of D floats
    - hybrid: all of the last three
    - with labels of the caller's own: ``labels`` list of string, ``scores`` list of double, best first, ``truncated``

    Args:
        dataset: Parquet files: a path, a pattern such as ``"texts/*.parquet"``, a directory, a URI such as ``"s3://bucket/x/*.parquet"``,
            or several of these. Or a `ray.data.Dataset`.
        out: output directory of adtp-export. All machines see it under this path, or it is a repository of the Hub.
        to: for files, the directory or URI to write to, which all machines see. Parts that are there already stay.
        asked: columns, and what is asked of the model.
        workers: how many, and what each has.
        progress: is told of each finished part, and of those that were there.

    Returns:
        For files a `Summary`. For a dataset another one, with the answers, which Ray computes when it is read.

    Raises:
        InputError: bad input of any kind, also where Ray cannot be reached. Finished parts stay. What is wrong with the rows of a dataset
            is told by Ray, in an error of its own, when the answers are read.
        MissingDependencyError: the extra "ray" is not installed, or a runtime.
    """
    import ray.data

    from .driver import score_dataset, score_files

    asked, workers = asked or ScoringConfig(), workers or Workers()
    if isinstance(dataset, ray.data.Dataset):
        if to is not None or progress is not None:
            raise InputError(
                "to, progress: a dataset of Ray comes back as one; write it with its own methods, such as write_parquet"
            )
        return score_dataset(dataset, out, asked, workers)
    if to is None:
        raise InputError('to: name the directory to write to, such as score("texts/*.parquet", "OUT", "answers")')
    places = [dataset] if isinstance(dataset, (str, os.PathLike)) else list(dataset)
    return score_files(places, out, to, asked=asked, workers=workers, progress=progress or (lambda finished: None))
