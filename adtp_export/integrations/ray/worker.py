"""What runs on other machines: a deployment that answers part after part."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import socket
import time
from dataclasses import dataclass
from typing import Any

import pyarrow
from pyarrow import fs
from pyarrow import parquet as pq

from ...errors import AdtpError, InputError, ellipsize
from ...inference.predictor import Predictor, load
from ...targets import measured
from . import parts
from .answering import MAX_ROWS, Answering
from .config import ScoringConfig, Workers
from .storage import Directory

MAX_ATTEMPTS = 5
"""At a part: what kills so many workers kills all."""


@dataclass(frozen=True, kw_only=True)
class Model:
    """What each worker opens. digest: as of `digest_of`, of OUT as the driver saw it; None: not compared."""

    out: str | os.PathLike[str]
    digest: str | None
    asked: ScoringConfig
    workers: Workers

    def open(self) -> Predictor:
        """Open the deployment.

        Raises:
            AdtpError: it cannot be opened here, or is not the one that the driver saw.
        """
        threads = str(self.workers.threads)
        os.environ["RAYON_NUM_THREADS"] = threads  # of the tokenizer, before its first use
        pyarrow.set_cpu_count(self.workers.threads)
        deployment = load(
            self.out, self.asked.target, self.workers.threads, self.asked.prefer, self.workers.check_hashes
        )
        if self.digest is not None and digest_of(deployment) != self.digest:
            raise InputError(f"{self.out} is another export than that of the driver; copy one to all machines")
        return deployment


def digest_of(deployment: Predictor) -> str:
    """Return a SHA-256 of a deployment: its targets' statuses, and all its files but reports, and times, by which a target is chosen."""
    manifest = deployment.manifest
    files = {
        name: entry["sha256"]
        for name, entry in manifest.files.items()
        if name != measured.NAME and not name.endswith((".md", ".html"))
    }
    statuses = {name: target.status for name, target in manifest.targets.items()}
    return hashlib.sha256(json.dumps([files, statuses], sort_keys=True).encode()).hexdigest()


class Attempts:
    """Counts, in one process for all workers, how often each part was begun."""

    def __init__(self) -> None:
        self._begun: dict[str, int] = {}

    def begin(self, name: str) -> int:
        self._begun[name] = self._begun.get(name, 0) + 1
        return self._begun[name]


@dataclass(frozen=True, kw_only=True)
class Job:
    """What workers are to do with each part. attempts: the actor of `Attempts`."""

    model: Model
    columns: list[str]
    stores: list[fs.FileSystem]
    to: Directory
    attempts: Any


class PartWorker:
    """Answers parts: takes the fields of one `Part` in lists of length 1, and returns what became of it likewise.

    Errors of users come back as values: `error` is the message and `kind` the class. `fatal` says that the model does not open, which
    no other part would change.
    """

    def __init__(self, job: Job) -> None:
        self._job = job
        self._answering: Answering | None = None

    def __call__(self, batch: dict[str, Any]) -> dict[str, list[Any]]:
        part = parts.Part(
            **{name: values[0].item() if hasattr(values[0], "item") else values[0] for name, values in batch.items()}
        )
        began = time.time()
        told = {
            "name": part.name,
            "path": part.path,
            "start": part.start,
            "rows": part.rows,
            "error": "",
            "kind": "",
            "fatal": False,
        }
        try:
            if self._is_to_be_answered(part):
                if self._answering is None:
                    told["fatal"] = True
                    self._answering = self._opened()
                    told["fatal"] = False
                write_answers(self._job, part, self._answering)
        except AdtpError as error:
            told |= {"error": str(error), "kind": type(error).__name__}
        worker = f"{socket.gethostname()}:{os.getpid()}"
        told |= {"began": began, "seconds": time.time() - began, "worker": worker}
        return {name: [value] for name, value in told.items()}

    def _is_to_be_answered(self, part: parts.Part) -> bool:
        """Say whether a part is not there yet, and count the attempt.

        Raises:
            InputError: it had too many.
        """
        import ray

        if part.is_in(self._job.to):  # it was written, and then its result was lost with a machine
            return False
        if ray.get(self._job.attempts.begin.remote(part.name)) > MAX_ATTEMPTS:
            raise InputError(
                f"{part.path}: rows {part.start + 1} to {part.start + part.rows} ended {MAX_ATTEMPTS} workers, mostly for want of "
                "memory; run fewer workers on a machine, or fewer --rows-per-part"
            )
        return True

    def _opened(self) -> Answering:
        model = self._job.model
        return Answering(model.open(), model.asked, model.workers.batch_size, len(self._job.columns) == 2)


def write_answers(job: Job, part: parts.Part, answering: Answering) -> None:
    """Answer the rows of a part, and write its file.

    Raises:
        InputError: the part cannot be read or answered, or the store refuses.
    """
    about = {"adtp.file": part.path, "adtp.start": str(part.start), "adtp.target": answering.target}
    with job.to.writing(part.name) as stream, contextlib.ExitStack() as unfinished:
        writer, place = None, part.start
        for table in parts.read(job.stores[part.store], part, job.columns, job.model.asked.keep, MAX_ROWS):
            try:
                answered = answering.table(table, job.columns, part.path, place).replace_schema_metadata(about)
            except OSError as error:  # of a runtime; it says nothing of the place that is written to
                rows = f"rows {place + 1} to {place + table.num_rows}"
                raise InputError(f"{part.path}: {rows} cannot be answered ({ellipsize(str(error))})") from error
            with job.to.told("written"):
                if writer is None:
                    writer = pq.ParquetWriter(stream, answered.schema)
                    unfinished.callback(_give_up, writer)
                writer.write_table(answered)
            place += table.num_rows
        assert writer is not None
        with job.to.told("written"):
            writer.close()


def _give_up(writer: pq.ParquetWriter) -> None:
    """Close a writer that an error left open, before its stream is closed; nothing where it is closed."""
    with contextlib.suppress(OSError, pyarrow.ArrowException):
        writer.close()


class TableWorker:
    """Answers the tables of a dataset of Ray."""

    def __init__(self, model: Model) -> None:
        self._model, self._deployment = model, model.open()
        self._answering: Answering | None = None

    def __call__(self, table: pyarrow.Table) -> pyarrow.Table:
        asked, where = self._model.asked, "a batch of the dataset"
        columns = parts.text_columns(table.schema, where, asked)
        if self._answering is None:
            size = self._model.workers.batch_size
            self._answering = Answering(self._deployment, asked, size, len(columns) == 2)
        parts.check(table.schema, where, columns, asked, self._answering.names())
        return self._answering.table(table, columns, where)
