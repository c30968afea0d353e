"""Executes every binary of the encoder's kernels in the emulator, and writes what was seen to a record.

    python tests/gpu/emulate_encoder.py --record benchmarks/records/emulated-encoder.json

What the record has already, for the same binaries and the same emulator, is not run again. Needs g++, and Triton for its
disassembler; no GPU.
"""

from __future__ import annotations

import argparse
import collections
import hashlib
import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

import emulate
import emulated_gpu
import emulation
import encoder_cases
import encoder_choices
import encoder_grouped
import encoder_heads
import encoder_launch
import encoder_mutants
import encoder_prenorm
import ptx_mutants
from encoder_launch import Emulated

from adtp_export.plugins.encoder import binaries
from adtp_export.plugins.encoder.variants import ALL, Variant

RECORD = Path(__file__).parent.parent.parent / "benchmarks" / "records" / "emulated-encoder.json"
COMMAND = "python tests/gpu/emulate_encoder.py --record benchmarks/records/emulated-encoder.json"
WAYS = (emulate.WAYS[0], emulate.WAYS[-1])
"""Copies that land late, or early with warps reversed and tensor cores that cut."""


def execute(device: emulated_gpu.Device, variant: Variant, code: str) -> dict[str, Any]:
    """Run all cases of one binary; return its part of the record."""
    worst, launches = 0.0, 0
    for way in WAYS:
        device.set(emulation.capability_of(code), on=way)
        for check, case in encoder_cases.cases(variant):
            share = check(Emulated(device, code), variant, **case)
            if not share <= 1:
                raise SystemExit(f"{variant.name}, {code}, {case}, {way}: {share:.2f} of what rounding allows")
            worst, launches = max(worst, share), launches + 1
    sha256 = binaries.entry(variant.name)["binaries"][code]["sha256"]
    return {"sha256": sha256, "launches": launches, "worst_share_of_allowed": round(worst, 4)}


def execute_mutants(device: emulated_gpu.Device) -> dict[str, dict[str, int]]:
    """Run all sampled mutants; return how many of each variant were noticed, and how."""
    counts: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    for variant in encoder_mutants.SAMPLED:
        for mutant in encoder_mutants.sample(variant):
            counts[variant][encoder_mutants.verdict(device, variant, mutant)] += 1
    return {variant: dict(sorted(found.items())) for variant, found in counts.items()}


def emulator_sha256() -> str:
    """Hash of what decides what an execution says: the emulator, the cases, the checks, and the mutants."""
    digest = hashlib.sha256()
    modules = (
        encoder_cases, encoder_choices, encoder_grouped, encoder_heads, encoder_cases.checks, encoder_launch, encoder_mutants,
        encoder_prenorm, ptx_mutants,
    )  # fmt: skip
    mine = [Path(module.__file__) for module in modules]
    for path in (*sorted(emulated_gpu.SOURCES.glob("*.[ch]*")), *mine):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def record(path: Path) -> None:
    known = json.loads(path.read_text()) if path.is_file() else {}
    fresh = {"emulator_sha256": emulator_sha256(), "source_sha256": binaries.manifest()["source_sha256"]}
    before = known.get("binaries", {}) if known.get("emulator_sha256") == fresh["emulator_sha256"] else {}
    mutants = known.get("mutants", {}) if before and known.get("source_sha256") == fresh["source_sha256"] else {}
    device = emulated_gpu.device_of_this_process()
    document: dict[str, Any] = {"schema": 1, "command": COMMAND, **fresh, "binaries": before, "mutants": mutants}
    for variant in ALL:
        done = before.setdefault(variant.name, {})
        for code in emulate.CODES:
            if done.get(code, {}).get("sha256") != binaries.entry(variant.name)["binaries"][code]["sha256"]:
                done[code] = execute(device, variant, code)
                path.write_text(json.dumps(document, indent=1) + "\n")
        print(variant.name, max(done[code]["worst_share_of_allowed"] for code in emulate.CODES), flush=True)
    document["binaries"] = {variant.name: before[variant.name] for variant in ALL}
    document["mutants"] = mutants or execute_mutants(device)
    path.write_text(json.dumps(document, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--record", type=Path, metavar="FILE", default=RECORD, help="default: %(default)s")
    record(parser.parse_args().record)


if __name__ == "__main__":
    main()
