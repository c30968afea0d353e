"""The side that asks: plans parts, has Ray run them, and tells what became of them."""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from typing import Any

import ray
import ray.data

from ... import errors
from ...artifacts.hub import is_here
from ...errors import InputError, ellipsize, quoted
from ...inference.predictor import load
from . import storage
from .answering import MAX_ROWS, Answering
from .config import PartResult, ScoringConfig, Summary, Workers
from .parts import Part, PartitionPlan, plan
from .parts import found as found_in
from .worker import Attempts, Job, Model, PartWorker, TableWorker, digest_of

Place = str | os.PathLike[str]
FORMAT = 2
"""Version of the settings file. In version 1 the model's digest also covered reports and times."""


def score_files(
    places: Sequence[Place],
    out: Place,
    place: Place,
    *,
    asked: ScoringConfig,
    workers: Workers,
    progress: Callable[[PartResult], None],
) -> Summary:
    """Answer files, as `score` says."""
    files, to = storage.find(places), storage.directory(place)
    if inside := [file for file in files if file.path.startswith(f"{to.path}/") and file.store == to.store]:
        raise InputError(
            f"{inside[0].path} is in {to.shown}, where the answers go; leave it out, or give another place"
        )
    model, planned = _prepared(files, _absolute(out), asked, workers)
    settings = {"format": FORMAT, "model": model.digest, **asked.to_json(), "columns": ",".join(planned.columns)}
    found = _found(to, settings, planned)
    todo = [part for part in planned.parts if part.name not in found]
    for part in planned.parts:
        if part.name in found:
            progress(PartResult(file=part.path, start=part.start, rows=part.rows, began=0, seconds=0, worker=""))
    began = to.changed(storage.SETTINGS)  # by the last run that had something to do: this one, or an earlier one
    if todo:
        with _connected():
            _check_room(workers)
            _claim(to, settings)
            began = to.changed(storage.SETTINGS)
            job = Job(model=model, columns=planned.columns, stores=planned.stores, to=to, attempts=_attempts())
            _run(todo, job, progress)
        if lost := {part.name for part in todo} - found_in(todo, to):
            raise InputError(
                f"{to.shown}: {len(lost)} of {len(todo)} parts were written elsewhere; give a place that all machines share"
            )
    to.clear(began)
    return Summary(sum(part.rows for part in planned.parts), len(planned.parts), len(found))


def score_dataset(dataset: ray.data.Dataset, out: Place, asked: ScoringConfig, workers: Workers) -> ray.data.Dataset:
    """Answer a dataset, as `score` says."""
    _check_room(workers)
    model = Model(out=_absolute(out), digest=None, asked=asked, workers=workers)
    # What the workers would refuse is refused here.
    load(model.out, asked.target, workers.threads, asked.prefer, workers.check_hashes)
    return dataset.map_batches(
        TableWorker,
        fn_constructor_args=(model,),
        batch_size=min(asked.rows_per_part, MAX_ROWS),
        batch_format="pyarrow",
        **_actors(workers, *_beside_reads(workers)),
    )


def _absolute(out: Place) -> Place:
    """Return where OUT is: other machines have other current directories. A repository of the Hub stays a name."""
    return os.path.abspath(out) if is_here(out) else out


def _prepared(
    files: Sequence[storage.File], out: Place, asked: ScoringConfig, workers: Workers
) -> tuple[Model, PartitionPlan]:
    """Open the model once, and plan. What the workers would refuse is refused here.

    Raises:
        AdtpError: of any kind.
    """
    deployment = load(out, asked.target, workers.threads, asked.prefer, workers.check_hashes)
    pairs = len(plan(files[:1], asked, ()).columns) == 2
    planned = plan(files, asked, Answering(deployment, asked, workers.batch_size, pairs).names())
    return Model(out=out, digest=digest_of(deployment), asked=asked, workers=workers), planned


def _found(to: storage.Directory, settings: dict[str, Any], planned: PartitionPlan) -> set[str]:
    """Return the names of the parts that are there whole; nothing is written. Others are answered again.

    Raises:
        InputError: it holds something else.
    """
    there = {name for name in to.names() if not name.startswith(storage.PARTIAL)} - {_claim_name(settings)}
    if storage.SETTINGS not in there:
        if there:
            raise InputError(
                f"{to.shown} holds files, and no {storage.SETTINGS}: adtp-run did not make it; give another place"
            )
        return set()
    before = to.read_json(storage.SETTINGS)
    if not isinstance(before, dict) or before != settings:
        was = before if isinstance(before, dict) else {}
        name = next((name for name in {**settings, **was} if was.get(name) != settings.get(name)), "format")
        raise InputError(
            f"{to.shown} holds answers of another run: its {name} was {quoted(was.get(name))}, and now is {quoted(settings.get(name))}; "
            "ask the same, or give another place"
        )
    names = {part.name for part in planned.parts}
    answers = {name for name in there if not name.startswith(("_", "."))}
    if foreign := sorted(answers - names):
        raise InputError(
            f"{to.shown} holds {foreign[0]}, which is no part of these files: an input changed since, or is not among them now; "
            "give another place"
        )
    return found_in([part for part in planned.parts if part.name in answers], to)


def _claim_name(settings: dict[str, Any]) -> str:
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()
    return f"{storage.CLAIM}{digest[:16]}.json"


def _claim(to: storage.Directory, settings: dict[str, Any]) -> None:
    """Write what a run asks into its place, unless another run, which asks something else, has begun there at the same time.

    Parts of the two would have the same names. Each run first writes a claim, which is named by what it asks, and then looks for claims of
    others. So of two runs at least the later one sees the other.

    Raises:
        InputError: there is another one. Nothing of this run stays.
    """
    own = _claim_name(settings)
    to.write_json(own, settings)
    if any(name.startswith(storage.CLAIM) and name != own for name in to.names()):
        to.remove(own)
        raise InputError(
            f"{to.shown}: another run, which asks something else, has just begun there; give another place"
        )
    to.write_json(storage.SETTINGS, settings)


@contextlib.contextmanager
def _connected() -> Iterator[None]:
    """Connect to a cluster, or start one here, for the time of a block; one that is connected stays so.

    Raises:
        InputError: there is none where RAY_ADDRESS says.
    """
    if ray.is_initialized():
        yield
        return
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_BACKEND_LOG_LEVEL", "fatal")
    try:
        ray.init(include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
    except (ConnectionError, ValueError, RuntimeError) as error:
        where = os.environ.get("RAY_ADDRESS", "this machine")
        raise InputError(
            f"Ray cannot be reached or started at {where} ({ellipsize(str(error))}); see RAY_ADDRESS"
        ) from error
    try:
        yield
    finally:
        ray.shutdown()


def _machines() -> list[dict[str, float]]:
    """Return what each machine of the cluster has."""
    return [node["Resources"] for node in ray.nodes() if node["Alive"]]


def _check_room(workers: Workers) -> None:
    """Raises InputError where no machine has what a worker needs: Ray would wait for one."""
    machines, largest = _machines(), "the largest machine"
    for name, needed, typed in (("GPU", workers.gpus, "--gpus"), ("CPU", workers.threads, "--threads")):
        most = max((machine.get(name, 0) for machine in machines), default=0)
        if needed > most:
            raise InputError(f"{typed}: a worker would take {needed} {name}s, and {largest} has {most:g}; give fewer")
        if needed and name == "GPU":
            machines, largest = [each for each in machines if each.get(name, 0) >= needed], f"{largest} with such GPUs"


def _most(workers: Workers) -> int:
    """Return how many workers the machines have room for, or fewer where that is asked for."""
    room = 0
    for machine in _machines():
        by_cpu = int(machine.get("CPU", 0) // workers.threads)
        room += min(by_cpu, int(machine.get("GPU", 0) / workers.gpus)) if workers.gpus else by_cpu
    return max(1, room if workers.count is None else min(room, workers.count))


def _beside_reads(workers: Workers) -> tuple[int, int]:
    """Return how many workers leave a processor for what reads a dataset, and with how many processors Ray counts each.

    Workers have theirs to the end. Where they have all, Ray waits forever for one to read with. So a single worker that needs all of them
    is not counted.
    """
    most = _most(workers)
    if sum(machine.get("CPU", 0) for machine in _machines()) > most * workers.threads:
        return most, workers.threads
    return (most - 1, workers.threads) if most > 1 else (1, 0)


def _actors(workers: Workers, most: int, processors: int) -> dict[str, Any]:
    """Return what Ray Data is told of the workers. The pool may shrink, so that a part of a lost machine finds room elsewhere.

    Args:
        processors: that Ray keeps for each of them.
    """
    return {
        "compute": ray.data.ActorPoolStrategy(
            min_size=1, max_size=most, initial_size=most, max_tasks_in_flight_per_actor=1
        ),
        "num_cpus": processors,
        "num_gpus": workers.gpus or None,
    }


def _attempts() -> Any:
    """Start the process that counts attempts. It takes no processor, and prefers this machine; one that is lost counts anew."""
    here = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(
        ray.get_runtime_context().get_node_id(), soft=True
    )
    return (
        ray.remote(Attempts)
        .options(num_cpus=0, max_restarts=-1, max_task_retries=-1, scheduling_strategy=here)
        .remote()
    )


def _run(todo: Sequence[Part], job: Job, progress: Callable[[PartResult], None]) -> None:
    """Have Ray run parts to the end; one that fails does not stop the others.

    Raises:
        AdtpError: a part failed.
    """
    workers = job.model.workers
    items = ray.data.from_items([asdict(part) for part in todo], override_num_blocks=len(todo))
    dataset = items.map_batches(
        PartWorker,
        fn_constructor_args=(job,),
        batch_size=1,
        **_actors(workers, min(len(todo), _most(workers)), workers.threads),
    )
    dataset.context.enable_progress_bars = False
    dataset.context.print_on_execution_start = False
    failed = []
    with _quiet():
        for told in dataset.iter_rows():
            if not told["error"]:
                progress(
                    PartResult(
                        file=told["path"],
                        **{name: told[name] for name in ("start", "rows", "began", "seconds", "worker")},
                    )
                )
                continue
            failed.append(told)
            if told["fatal"]:
                break
    if failed:
        told = failed[-1] if failed[-1]["fatal"] else failed[0]
        kind, message = getattr(errors, told["kind"]), told["error"]
        if told["fatal"]:
            raise kind(f"a worker on {told['worker'].rpartition(':')[0]} cannot start: {message}")
        others = f" {len(failed)} of {len(todo)} parts failed." if len(failed) > 1 else ""
        raise kind(
            f"{message}.{others} Finished parts stay in {job.to.shown}; correct this, and run the same command again"
        )


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Leave out what Ray Data says of its plans; errors stay."""
    logger = logging.getLogger("ray.data")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)
