"""Executes every shipped binary in the emulator, and writes what was seen to a record.

    python tests/gpu/emulate.py --record benchmarks/records/emulated.json

What the record has already, for the same binaries and the same emulator, is not run again. Takes about ten minutes of one
core from nothing. Needs g++, and Triton for its disassembler; no GPU.
"""

from __future__ import annotations

import argparse
import collections
import hashlib
import itertools
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

import emulated_gpu
import emulation
import ptx_mutants

from adtp_export.plugins import binaries
from adtp_export.plugins.variants import ARCHITECTURES

RECORD = Path(__file__).parent.parent.parent / "benchmarks" / "records" / "emulated.json"
COMMAND = "python tests/gpu/emulate.py --record benchmarks/records/emulated.json"
CODES = (*ARCHITECTURES, "ptx")
WAYS = [
    {"EARLY": early, "REVERSE": reverse, "TRUNCATE": truncate}
    for early, reverse, truncate in itertools.product((False, True), repeat=3)
]
"""When copies land, which warp runs first, how tensor cores round."""

COUNTED = ("instructions", "tensor_flops", "bytes_read", "bytes_written")
RATIOS = ("sectors", "shared_passes")
"""Beside each of these the log has the least that it could be."""


def work_of(entry: dict) -> list[tuple[emulation.Case, dict[str, bool]]]:
    """All cases in one way, and the small ones in all ways."""
    small = emulation.small_cases(entry["kernel"], entry["block_m"])
    work = [(case, WAYS[0]) for case in emulation.thorough_cases(entry["kernel"], entry["block_m"])]
    return work + [(case, way) for way in WAYS[1:] for case in small]


def execute(runner: emulation.Runner, entry: dict, code: str, log: Path) -> dict[str, Any]:
    """Run one binary on all its work; return its part of the record."""
    work = work_of(entry)
    lse, worst, digest = emulation.lse_of(entry), 0.0, hashlib.sha256()
    for case, way in work:
        runner.device.set(emulation.capability_of(code), log=log, on=way)
        share, written = emulation.check_and_keep(runner, entry, code, case, lse)
        if not share <= 1:
            raise SystemExit(f"{entry['name']}, {code}, {case}, {way}: {share:.2f} of what rounding allows")
        worst = max(worst, share)
        if way == WAYS[0]:
            digest.update(written)
    launches = [json.loads(line) for line in log.read_text().splitlines()]
    log.unlink()
    mine = launches[1::2] if lse else launches
    assert len(mine) == len(work)
    totals = collections.Counter()
    for launch in mine:
        totals.update({key: launch[key] for key in (*COUNTED, *RATIOS, *(f"{key}_least" for key in RATIOS))})
    return {
        "sha256": entry["binaries"][code]["sha256"],
        "launches": len(mine),
        "worst_share_of_allowed": round(worst, 4),
        "outputs_sha256": digest.hexdigest()[:16],
        **{key: totals[key] for key in COUNTED},
        **{f"{key}_over_least": round(totals[key] / max(totals[f"{key}_least"], 1), 4) for key in RATIOS},
    }


def execute_mutants(runner: emulation.Runner) -> dict[str, Any]:
    """Run all sampled mutants; return how many of each kind were noticed, and why the others cannot be."""
    kinds: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    entries = {entry["name"]: entry for entry in emulation.variants()}
    survivors = []
    for variant in ptx_mutants.SAMPLED:
        for mutant in ptx_mutants.sample(variant):
            found = ptx_mutants.verdict(runner, mutant, entries[variant])
            kinds[mutant.kind][found] += 1
            if ptx_mutants.unexplained(mutant, found):
                raise SystemExit(f"not noticed, and nobody says why: {mutant}")
            if found == ptx_mutants.SURVIVED:
                why = ptx_mutants.EQUIVALENT[variant, mutant.line]
                change = f"{mutant.old} -> {mutant.new or 'nothing'}".replace("\t", " ")
                survivors.append({"variant": variant, "line": mutant.line, "change": change, "why": why})
    return {
        "kinds": {kind: dict(sorted(counts.items())) for kind, counts in sorted(kinds.items())},
        "equivalent": survivors,
    }


def emulator_sha256() -> str:
    """Hash of what decides what an execution says: the emulator and the cases."""
    digest = hashlib.sha256()
    for path in (*sorted(emulated_gpu.SOURCES.glob("*.[ch]*")), Path(emulation.__file__)):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def record(path: Path) -> None:
    known = json.loads(path.read_text()) if path.is_file() else {}
    fresh = {"emulator_sha256": emulator_sha256(), "source_sha256": binaries.manifest()["source_sha256"]}
    same = known.get("emulator_sha256") == fresh["emulator_sha256"]
    before = known.get("binaries", {}) if same else {}
    runner = emulation.Runner(emulated_gpu.device_of_this_process())
    document = {"schema": 1, "command": COMMAND, **fresh, "binaries": before, "mutants": {}}
    with tempfile.TemporaryDirectory() as scratch:
        for entry, code in itertools.product(emulation.variants(), CODES):
            done = before.setdefault(entry["name"], {})
            if done.get(code, {}).get("sha256") != entry["binaries"][code]["sha256"]:
                done[code] = execute(runner, entry, code, Path(scratch) / "log.jsonl")
                path.write_text(json.dumps(document, indent=1) + "\n")
                print(entry["name"], code, done[code]["worst_share_of_allowed"], flush=True)
    names = {entry["name"] for entry in emulation.variants()}
    document["binaries"] = {name: before[name] for name in before if name in names}
    runner.device.set()
    document["mutants"] = known["mutants"] if same and known.get("mutants") else execute_mutants(runner)
    path.write_text(json.dumps(document, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--record", type=Path, metavar="FILE", default=RECORD, help="default: %(default)s")
    record(parser.parse_args().record)


if __name__ == "__main__":
    main()
