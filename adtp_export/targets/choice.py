"""Which target of a manifest to run here, and why."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ..artifacts.checks import check_target
from ..artifacts.records import BUILT_NOT_RUN, EMULATED, INCONCLUSIVE, PLUGIN, UNVERIFIED, VERIFIED, Manifest, Target
from ..contract import LINEAR
from ..environment import fingerprint, hardware, instructions, machine
from ..errors import InputError, MissingDependencyError, did_you_mean, quoted
from ..runtimes import encoder, onnxruntime
from .measured import Times, times_here, typical
from .specs import CPU, CUDA, PACKED, PRECISIONS, PRECOMPUTED, RUNTIMES, TargetSpec

PRECISION, SPEED = "precision", "speed"
PREFERENCES = (PRECISION, SPEED)

TRUST = (VERIFIED, INCONCLUSIVE, UNVERIFIED, EMULATED, BUILT_NOT_RUN)
GPU_ORDER = ("fp16", "bf16", "fp8", "int8", "fp32")
"""Precisions on a GPU by the speed that is expected of them, where nothing was measured."""
FORMS = (PRECOMPUTED, "", PACKED, LINEAR)
"""Forms of files by the same."""
QUICK = {"int8": {"avx512_vnni", "avx_vnni"}, "bf16": {"avx512_bf16", "amx_bf16"}}
"""Instructions, any of which makes our products in a precision the fastest that a CPU has; the fastest precision first."""
SLOW_ON = {"GenuineIntel": {"avx512_bf16"}}
"""By vendor those of them that are no faster there than products in fp32."""


@dataclass(frozen=True)
class Choice:
    """A target's name in the manifest, its value, and in one short sentence why it was taken."""

    name: str
    spec: TargetSpec
    reason: str


def choose(manifest: Manifest, wanted: str | None, prefer: str, directory: Path, threads: int = 0) -> Choice:
    """Choose the target to run on this machine.

    Verified ones before others, then those of which too few rows could be compared; what was never run last. Of those the highest
    precision alone, unless `prefer` is "speed". Of those the one that `adtp-bench --write` measured fastest on this machine. Where
    it did not: on a GPU before the CPU; then what was measured fastest on this kind of machine, or else the first in the order of
    runtimes. What is run to prove a file for another runtime right comes after everything else.

    Args:
        wanted: a target's name in the manifest, which is taken if it runs here.
        prefer: "precision" or "speed".
        directory: where the manifest lies.
        threads: of each runtime, as `load` is given them.

    Raises:
        InputError: an unknown preference, an unknown target, or one that cannot run here.
        MissingDependencyError: nothing runs here.
    """
    targets = manifest.targets
    if prefer not in PREFERENCES:
        hint = did_you_mean(prefer, PREFERENCES) if isinstance(prefer, str) else ""
        raise InputError(f"prefer: got {quoted(prefer)}; accepted are {' and '.join(PREFERENCES)}{hint}")
    if wanted is not None:
        check_target(wanted, targets, directory)
        here = runnable(targets)
        if wanted not in here:
            why = f" ({obstacle})" if (obstacle := _plugin_obstacle(wanted)) else ""
            raise InputError(
                f"target: {wanted} cannot run on this machine{why}; {', '.join(here) or 'nothing else'} can"
            )
        return Choice(wanted, here[wanted], "asked for")
    pool = candidates(targets)
    kind = targets[next(iter(pool))].status
    if prefer == PRECISION:
        highest = min((spec.precision for spec in pool.values()), key=PRECISIONS.index)
        pool = {name: spec for name, spec in pool.items() if spec.precision == highest}
        kind += f" {highest}"
    times, ignored = times_here(directory, manifest, list(pool), threads) if len(pool) > 1 else ({}, "")
    if times:
        name, reason = _fastest_here(times, kind)
        return Choice(name, pool[name], reason + _left_out(targets, name))
    if on_gpu := {name: spec for name, spec in pool.items() if spec.device == CUDA}:
        pool, kind = on_gpu, f"{kind} GPU"
    name, reason = _fastest({name: (spec, targets[name]) for name, spec in pool.items()}, kind)
    return Choice(name, pool[name], reason + _left_out(targets, name) + (f"; {ignored}" if ignored else ""))


def candidates(targets: Mapping[str, Target]) -> dict[str, TargetSpec]:
    """Return the targets that are taken where none is asked for, and of all precisions: of those that run here the most trusted.

    Raises:
        MissingDependencyError: nothing runs here.
    """
    here = runnable(targets)
    if not here:
        obstacles = filter(None, map(_plugin_obstacle, targets))
        elsewhere = (
            f"none of its targets ({', '.join(targets)}) runs here: they are for another device or runtime, or failed. Install the "
            "runtime of one of them, or export again on this machine"
        )
        none_installed = "no runtime is installed for any target; type: pip install 'adtp-export[cpu]'"
        raise MissingDependencyError(
            next(obstacles, elsewhere if RUNTIMES["onnxruntime"].installed() else none_installed)
        )
    trust = min((targets[name].status for name in here), key=TRUST.index)
    pool = {name: spec for name, spec in here.items() if targets[name].status == trust}
    return {name: spec for name, spec in pool.items() if not spec.is_proof} or pool


def runnable(targets: Mapping[str, Target]) -> dict[str, TargetSpec]:
    """Return the targets that can run on this machine, without those whose status this version does not know."""
    return {name: spec for name, target in targets.items() if (spec := _runs_here(name, target)) is not None}


def _fastest_here(times: Times, kind: str) -> tuple[str, str]:
    """Return the name of the target that is fastest by what was measured on this machine, and the reason to take it."""
    means = {name: typical(p50_ms) for name, p50_ms in times.items()}
    name, other = sorted(means, key=means.__getitem__)[:2]
    shapes = list(times[name])
    on = f"{'the geometric mean of ' if len(shapes) > 1 else ''}{', '.join(shapes)}"
    return name, (
        f"fastest of {len(means)} {kind} targets measured on this machine: {means[name]:.2f} ms on {on}; next {other}, "
        f"{means[other]:.2f} ms"
    )


def _left_out(targets: Mapping[str, Target], name: str) -> str:
    """Say why a target's form with the plugin cannot run here, where it has one."""
    obstacle = _plugin_obstacle(other) if (other := f"{name}-{PLUGIN}") in targets else None
    return f"; not {other}: {obstacle}" if obstacle else ""


def _plugin_obstacle(name: str) -> str | None:
    """Say why a target cannot run here for want of its plugin alone; None otherwise."""
    spec = _parsed(name)
    if spec is None or spec.attention != PLUGIN or spec.gpus or not RUNTIMES[spec.runtime].takes(spec):
        return None
    if not RUNTIMES[spec.runtime].installed():
        return None
    return onnxruntime.operators_obstacle() if spec.device == CPU else encoder.obstacle()


def _runs_here(name: str, target: Target) -> TargetSpec | None:
    """Return the value of a target that can run here, None for others."""
    if target.status not in TRUST:
        return None
    spec = _parsed(name)
    return spec if spec and RUNTIMES[spec.runtime].runs_here(spec) else None


def _parsed(name: str) -> TargetSpec | None:
    """Return the value of a target's name; None for one of a later version."""
    try:
        return TargetSpec.parse(name)
    except InputError:
        return None


def _fastest(pool: Mapping[str, tuple[TargetSpec, Target]], kind: str) -> tuple[str, str]:
    """Return the name of the fastest, by measurement or else by expectation, and the reason to take it."""
    if len(pool) == 1:
        return next(iter(pool)), f"the only {kind} target that runs here"
    targets = {name: target for name, (_, target) in pool.items()}
    times = _measured(targets)
    if times:
        name = min(times, key=lambda name: times[name][0])
        ms, shape = times[name]
        among = f"fastest of {len(times)}" if len(times) > 1 else f"the only one of {len(pool)}"
        return name, f"{among} {kind} targets measured on this kind of machine: {ms:.1f} ms on {shape}"
    name = min(pool, key=lambda name: _expectation(pool[name][0]))
    return name, (
        f"first by default of {len(pool)} {kind} targets: none was measured on this kind of machine{_distrusted(targets)}"
    )


def _measured(pool: Mapping[str, Target]) -> dict[str, tuple[float, str]]:
    """Return ms and shape of the verified targets measured on this kind of machine, on the shape that most were measured on.

    Machines are of one kind where their fingerprints are the same: names are not enough, see `machine`.
    """
    here = fingerprint()
    times = {
        name: (float(target.details["p50_ms"]), str(target.details["timed_on"]))
        for name, target in pool.items()
        if target.status == VERIFIED and target.details.keys() >= {"p50_ms", "timed_on"}
        if target.details.get("fingerprint") == here
    }
    shapes = Counter(shape for _, shape in times.values()).most_common(1)
    return {name: (ms, shape) for name, (ms, shape) in times.items() if shape == shapes[0][0]}


def _distrusted(pool: Mapping[str, Target]) -> str:
    """Say that times of a machine of the same name do not count, where there are any."""
    here, name = fingerprint(), machine()
    timed = [target.details for target in pool.values() if "p50_ms" in target.details]
    found = {str(details.get("fingerprint")) for details in timed if details.get("machine") == name} - {here}
    if not found:
        return ""
    other = " and ".join(sorted(found)).replace("None", "none")
    return f" (times of {name} do not count: their fingerprint is {other}, and here it is {here})"


def _expectation(spec: TargetSpec) -> tuple[int, int, int, bool]:
    """Sort key where nothing was measured. Only a preference for speed leaves several precisions to choose from."""
    order: tuple[str, ...] = GPU_ORDER if spec.device == CUDA else PRECISIONS
    form = FORMS.index(spec.form) if spec.form in FORMS else 0  # fixed sizes are there because somebody asked for them
    if _is_quick(spec):
        form, order = -1, tuple(QUICK)
    return RUNTIMES[spec.runtime].rank, form, order.index(spec.precision), spec.attention != PLUGIN


def _is_quick(spec: TargetSpec) -> bool:
    """Say whether a target's products have instructions of their own here that are faster than those for fp32."""
    if spec.device != CPU or spec.form != LINEAR or spec.attention != PLUGIN:
        return False
    quick = QUICK.get(spec.precision, set()) - SLOW_ON.get(hardware()["vendor"], set())
    return not quick.isdisjoint(instructions())
