"""Who stands in the table of `table.py`, and the process of each: it loads one, and answers with logits or ms.

All have the same weights, which are random, and take padded ids on the host to logits on the host.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.harness.processes import serve

if TYPE_CHECKING:
    from adtp_export.benchmarking.contenders import Architecture
    from adtp_export.model.encoder import PrunedEncoder
    from adtp_export.runtimes import Engine

STUDENT, DENSE = "runner-student", "runner-dense"
REFERENCE = "reference"
"""The process that says what is right, in fp32, and by how much a precision may be off."""

MULTIPLE = 8
"""How many times PyTorch's own error in a precision an answer may be off."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What a table's models are: BERT's width by name with sizes and tables, layers, precision, sites with the share that stays.

    library: of the runner, a path; "": that of `adtp-plugin build --cuda`. dry: on the CPU, and on the emulated GPU.
    """

    shape: str
    sizes: Mapping[str, int]
    tables: Mapping[str, float]
    layers: int
    precision: str
    sites: tuple[str, ...]
    retention: float
    library: str = ""
    dry: bool = False

    @property
    def architecture(self) -> Architecture:
        from adtp_export.benchmarking.contenders import Architecture
        from adtp_export.model.flops import Shape

        return Architecture(Shape(**self.sizes, layers=self.layers), self.tables)


def models(setting: Setting) -> tuple[PrunedEncoder, PrunedEncoder]:
    """Return dense BERT and the student of the same weights; transformers' own model is the `dense` of each."""
    from adtp_export.benchmarking.contenders import random_encoder, schedule

    shares = [setting.retention, *[1.0] * (len(setting.sites) - 1)]
    dense = random_encoder(setting.architecture)
    student = random_encoder(setting.architecture, schedule(setting.sites, shares))
    student.load_state_dict({**student.state_dict(), **dense.state_dict()})
    return dense.requires_grad_(False), student.requires_grad_(False)


def _in_runner(student: bool) -> Callable[[Setting, Path], Engine]:
    def make(setting: Setting, folder: Path) -> Engine:
        import torch

        from adtp_export.plugins.encoder.launches import Sizes
        from benchmarks.gpu.runner_peers import InRunner

        if setting.dry:
            sizes = Sizes(max_tokens=128, processors=3, mean_length=16)  # an emulated GPU is slow
        else:
            sizes = Sizes(processors=torch.cuda.get_device_properties(0).multi_processor_count)
        library = Path(setting.library) if setting.library else None
        return InRunner(models(setting)[student], setting.precision, sizes, library)

    return make


def _padded(compiled: bool) -> Callable[[Setting, Path], Engine]:
    def make(setting: Setting, folder: Path) -> Engine:
        from benchmarks.gpu.torch_peers import Padded

        return Padded(models(setting)[0].dense, setting.precision, compiled)

    return make


def _packed(how: str) -> Callable[[Setting, Path], Engine]:
    def make(setting: Setting, folder: Path) -> Engine:
        from benchmarks.gpu.torch_peers import Packed

        return Packed(models(setting)[0].dense, setting.precision, how)

    return make


def _fused(captured: bool) -> Callable[[Setting, Path], Engine]:
    def make(setting: Setting, folder: Path) -> Engine:
        from adtp_export.runtimes.onnxruntime import OnnxRuntimeEngine
        from benchmarks.gpu import onnx_peers

        name = "captured" if captured else "fused"
        plain, fused = folder / f"{name}-plain.onnx", folder / f"{name}.onnx"
        shape = setting.architecture.shape
        onnx_peers.export(models(setting)[0].dense, plain)
        onnx_peers.fuse(plain, fused, setting.precision, shape.heads, shape.hidden)
        if captured:
            return onnx_peers.Captured(fused, "cpu" if setting.dry else "cuda")
        return OnnxRuntimeEngine(fused, cuda=False if setting.dry else "tf32")

    return make


def _tensorrt(flavor: str) -> Callable[[Setting, Path], Engine]:
    def make(setting: Setting, folder: Path) -> Engine:
        from benchmarks.gpu import onnx_peers

        plain = folder / f"{flavor}-plain.onnx"
        onnx_peers.export(models(setting)[0].dense, plain)
        return onnx_peers.tensorrt(plain, flavor, setting.precision)

    return make


@dataclass(frozen=True)
class Peer:
    """what: in words, for the record. padded: it computes on padding."""

    what: str
    padded: bool
    make: Callable[[Setting, Path], Engine]


PEERS = {
    STUDENT: Peer("the student in this project's runner: one replay", False, _in_runner(student=True)),
    DENSE: Peer("dense BERT in the same runner, without padding", False, _in_runner(student=False)),
    "torch-sdpa": Peer("PyTorch, padded, scaled_dot_product_attention", True, _padded(compiled=False)),
    "torch-compile": Peer('the same by torch.compile(mode="reduce-overhead")', True, _padded(compiled=True)),
    "torch-varlen": Peer("PyTorch, no padding, variable-length flash attention", False, _packed("eager")),
    "torch-varlen-graphs": Peer("the same as CUDA graphs, for rounded numbers of tokens", False, _packed("graphs")),
    "torch-varlen-compile": Peer('the same by torch.compile(mode="reduce-overhead")', False, _packed("compile")),
    "ort-fused": Peer("ONNX Runtime CUDA, padded, its transformer fusions", True, _fused(captured=False)),
    "ort-fused-graphs": Peer("the same as its own CUDA graphs, inputs and outputs bound", True, _fused(captured=True)),
    "tensorrt": Peer("TensorRT, padded, one engine for all shapes", True, _tensorrt("tensorrt")),
    "rtx": Peer("TensorRT-RTX, padded, one engine for all shapes", True, _tensorrt("rtx")),
}
"""All contenders, in the order of the table's columns."""


class Reference:
    """Dense BERT and the student in PyTorch, in fp32 and in the precision that is judged."""

    def __init__(self, setting: Setting) -> None:
        import torch

        from adtp_export.verify.oracle import DTYPES, typed

        self._torch, self._device = torch, "cuda" if torch.cuda.is_available() else "cpu"
        dense, student = models(setting)
        self._models = {DENSE: dense.to(self._device), STUDENT: student.to(self._device)}
        self._rounded = (
            {name: typed(model, setting.precision).to(self._device) for name, model in self._models.items()}
            if setting.precision in DTYPES
            else {}
        )

    def answer(self, batch: Mapping[str, np.ndarray]) -> dict[str, Any]:
        """Return logits ``(B, labels)`` of both, and what became of the student's tokens, ``(B, S)``."""
        with self._torch.inference_mode():
            inputs = {name: self._torch.from_numpy(array).to(self._device) for name, array in batch.items()}
            said = self._models[STUDENT](**inputs)
            dense = self._models[DENSE].dense(**inputs).logits
            arrays = {STUDENT: said.logits, DENSE: dense, "kept_site": said.kept_site}
            return {name: tensor.cpu().numpy() for name, tensor in arrays.items()}

    def allowed(self, batch: Mapping[str, np.ndarray]) -> dict[str, float]:
        """Return by how much answers of both may be off: `MULTIPLE` times the largest error of PyTorch in the precision.

        In fp32 that is what TF32 may cost: products of 10 bits.
        """
        exact = self.answer(batch)
        if not self._rounded:
            return {name: MULTIPLE * 2**-10 * float(np.abs(exact[name]).max()) for name in (DENSE, STUDENT)}
        with self._torch.inference_mode():
            inputs = {name: self._torch.from_numpy(array).to(self._device) for name, array in batch.items()}
            said = {
                STUDENT: self._rounded[STUDENT](**inputs).logits,
                DENSE: self._rounded[DENSE].dense(**inputs).logits,
            }
        return {
            name: MULTIPLE * float(np.abs(tensor.float().cpu().numpy() - exact[name]).max())
            for name, tensor in said.items()
        }


def answering(name: str, folder: Path) -> Callable[[], Callable[[dict[str, Any]], dict[str, Any]]]:
    """Return what makes the answers of a contender's process: to a batch its logits, or its ms after an untimed run."""

    def make() -> Callable[[dict[str, Any]], dict[str, Any]]:
        setting = Setting(**json.loads((folder / "setting.json").read_text(encoding="utf-8")))
        if name == REFERENCE:
            reference = Reference(setting)
            return lambda asked: getattr(reference, asked["do"])(asked["batch"]) if "batch" in asked else {}
        engine = PEERS[name].make(setting, folder)

        def answer(asked: dict[str, Any]) -> dict[str, Any]:
            if "batch" not in asked:
                return {}
            found = engine.run(asked["batch"])
            if asked["do"] == "answer":
                return found
            began = time.perf_counter()
            engine.run(asked["batch"])
            return {"ms": (time.perf_counter() - began) * 1e3}

        return answer

    return make


def write_setting(setting: Setting, folder: Path) -> None:
    """Write what the processes of a folder read."""
    (folder / "setting.json").write_text(json.dumps(asdict(setting)), encoding="utf-8")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--worker", nargs=2, metavar=("NAME", "FOLDER"), required=True)
    asked_for, place = parser.parse_args().worker
    serve(answering(asked_for, Path(place)))
