"""Learned Token Pruning as a peer: an exported LTP student with random weights, its thresholds found on the first batch of each workload.

Source: Kim et al., Learned Token Pruning for Transformers, KDD 2022 (arXiv 2107.00910); the pruner is `model.pruners.ltp`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ..data.tokenize import Batch
from ..errors import InputError
from ..graph import program
from ..graph.passes import MEASURED, run_passes
from ..graph.passes.expose_settings import setting_name
from ..model.encoder import PrunedEncoder
from ..model.packed import PackedStudent
from .contenders import Architecture, random_encoder
from .peers import LTP
from .processes import Contender

TOLERANCE, MAX_STEPS = 0.02, 40


@dataclass(frozen=True)
class LtpPeer:
    """contender: its file takes the thresholds as inputs. student: the same in PyTorch, where they are searched."""

    contender: Contender
    student: PrunedEncoder

    def settings(self, batch: Batch, retention: float) -> dict[str, np.ndarray]:
        """Return the thresholds for a batch as inputs of the file: fp32 scalars.

        Raises:
            InputError: no thresholds keep the share `retention` of this batch.
        """
        found = find_thresholds(
            self.student, {name: torch.from_numpy(array) for name, array in batch.items()}, retention
        )
        names = (setting_name(site, "threshold") for site in self.student.site_names)
        return {name: np.array(value, np.float32) for name, value in zip(names, found)}


def ltp_peer(architecture: Architecture, padded_length: int, folder: Path) -> LtpPeer:
    """Export LTP of an architecture with random weights, whose thresholds are set from outside.

    Args:
        padded_length: what scores are divided by, at least as long as any text.
    """
    layers = architecture.shape.layers
    sites = tuple(f"{i}.ffn" for i in range(layers))
    student = random_encoder(architecture, {"method": "ltp", "sites": list(sites), "padded_length": padded_length})
    set_thresholds(student, rising(1e-3, layers))  # exporters merge equal constants, so each is another
    model = program.export_portable(student, {"version": "bench"})
    run_passes(model, MEASURED)
    path = folder / f"{LTP}-{layers}.onnx"
    program.save(model, path)
    return LtpPeer(
        Contender(name=path.stem, path=path, layers=layers, padded=False, sites=sites, cls_only_last_layer=True),
        student,
    )


def find_thresholds(student: PrunedEncoder, batch: dict[str, Tensor], retention: float) -> list[float]:
    """Find thresholds that keep about the share `retention` of the batch's tokens, on average over layers.

    They stand in for learned ones where weights are random: ``theta_l = theta_L (l + 1) / L``, the linear rise that LTP
    starts its training from (its code with l for l + 1), theta_L found by bisection. It takes about 12 runs of the batch.
    The student keeps the thresholds that were tried last.

    Args:
        student: LTP at every ``i.ffn``, its padded length at least that of any text.
        batch: arguments of `PackedStudent.forward` by name.

    Raises:
        InputError: no thresholds of this form come within 0.02, such as where [CLS] alone is more than `retention`.
    """
    # With random weights all scores are near 1/N, so a layer drops almost nothing until its threshold reaches that, and
    # then almost everything. A wanted mean is met by the depth at which this happens, and by how many tokens that one
    # layer drops; thresholds chosen as quantiles of scores are not needed for it.
    packed, layers = PackedStudent(student), len(student.site_names)
    low, high = 1e-6, float(layers)  # at `high` layer 0 has threshold 1, which no score is above
    best, error = [0.0] * layers, 1 - retention
    for _ in range(MAX_STEPS):
        if abs(error) < TOLERANCE / 4:
            break
        final = (low * high) ** 0.5
        set_thresholds(student, rising(final, layers))
        share = mean_retention(packed, batch)
        if abs(share - retention) < abs(error):
            best, error = rising(final, layers), share - retention
        low, high = (final, high) if share > retention else (low, final)
    if abs(error) > TOLERANCE:
        raise InputError(
            f"--peers ltp: LTP cannot keep a share of {retention:g} of these tokens; the nearest share is {retention + error:.3f}. "
            "Give another --retention, or leave ltp out"
        )
    return best


def rising(final: float, layers: int) -> list[float]:
    """Thresholds that rise linearly to `final` in the last layer."""
    return [final * (layer + 1) / layers for layer in range(layers)]


def set_thresholds(student: PrunedEncoder, values: Sequence[float]) -> None:
    """Give each site of an LTP student its threshold."""
    with torch.no_grad():
        for pruner, value in zip(student.pruners.values(), values):
            pruner.get_parameter("threshold").fill_(value)


def mean_retention(packed: PackedStudent, batch: dict[str, Tensor]) -> float:
    """Run a batch; return the share of its tokens alive after a site, averaged over sites."""
    with torch.no_grad():
        kept = [len(rows) for rows in packed(**batch)[1]]
    return float(np.mean(kept[1:]) / kept[0])
