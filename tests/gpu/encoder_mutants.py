"""One-instruction changes of the encoder's PTX, and whether its checks in the emulator notice each."""

from __future__ import annotations

import itertools
from dataclasses import replace

import emulation
import encoder_cases
from emulated_gpu import Device, RefusedError
from encoder_launch import Emulated, StrayWriteError
from ptx_mutants import FAULT, MOST, SURVIVED, WRONG, Mutant, changes, synchronization, text_of

from adtp_export.plugins.encoder.variants import BY_NAME

SAMPLED = (
    "product-fp16-32x64-gelu",
    "product-fp32-32x64-parts",
    "add_norm-bf16-512-parts",
    "unpad",
    "embed-fp16-512",
    "scores-fp32-16",
    "choice-table-512",
    "choice-ranks-512",
    "above",
    "share",
    "normalize-fp16-512",
    "skim-512",
    "put_back-fp16",
    "spread-fp32",
    "pool-fp16",
    "vectors-fp32",
    "grouped-fp16-d64",
    "grouped_lse-bf16-d64",
    "grouped_received-fp32-d64",
    "look_up-fp16",
    "add_rms-bf16",
    "turn-fp16-d128",
    "anchor-bf16",
    "gated-fp16-32x64-silu",
)
"""Variants whose mutants are run: each kernel, with each rule of a choice."""

RANDOM_CHANGES = 20
"""Random changes of each of `SAMPLED`, beside those of its synchronization."""


def sample(variant: str) -> list[Mutant]:
    """Every third change of its synchronization, and random ones."""
    return [*itertools.islice(synchronization(variant), 0, None, 3), *changes(variant, RANDOM_CHANGES, seed=0)]


def verdict(device: Device, variant: str, mutant: Mutant | None) -> str:
    """What the checks say of a mutant, or of the unchanged code where there is none."""
    lines = text_of(variant)
    if mutant:
        lines[mutant.line] = f"\t{mutant.new}"
    image = "\n".join(lines).encode() + b"\0"
    launch = Emulated(device, "ptx", lambda binary: replace(binary, data=image))
    for at, (check, case) in enumerate(encoder_cases.cases(BY_NAME[variant])):
        device.set(emulation.capability_of("ptx"), most=MOST, on={"EARLY": at == 0, "REVERSE": at == 1})
        try:
            if not check(launch, BY_NAME[variant], **case) <= 1:
                return WRONG
        except StrayWriteError:
            return WRONG
        except RefusedError:
            return FAULT
    return SURVIVED
