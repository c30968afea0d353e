"""Dense BERT on padded texts in ONNX Runtime with its transformer fusions, also as its own CUDA graphs, and in TensorRT."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from adtp_export.artifacts.records import DECOMPOSED, ShapeRange

if TYPE_CHECKING:
    import torch

    from adtp_export.runtimes import Engine

Batch = Mapping[str, np.ndarray]

OPSET = 17
"""ONNX Runtime's fusions look for the patterns of PyTorch's older exporter."""

LENGTH_STEP = 16
"""Lengths, where each shape costs a capture, are rounded up to multiples of it."""

PROFILE = {"batch": ShapeRange(1, 32, 64), "seq": ShapeRange(8, 128, 512)}


def export(bert: Any, path: Path) -> None:
    """Export transformers' BERT as optimum does."""
    import torch

    from adtp_export.graph.program import quiet_exporter

    class Exported(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = bert

        def forward(self, ids: torch.Tensor, mask: torch.Tensor, types: torch.Tensor) -> torch.Tensor:
            return self.model(input_ids=ids, attention_mask=mask, token_type_ids=types).logits

    names = ("input_ids", "attention_mask", "token_type_ids")
    with torch.no_grad(), quiet_exporter():
        torch.onnx.export(
            Exported(),
            tuple(torch.ones(3, 7, dtype=torch.int64) for _ in names),
            path,
            dynamo=False,
            opset_version=OPSET,
            input_names=list(names),
            output_names=["logits"],
            dynamic_axes={name: {0: "batch", 1: "sequence"} for name in names},
        )


def fuse(source: Path, path: Path, precision: str, heads: int, hidden: int) -> None:
    """Write a BERT with ONNX Runtime's own transformer fusions, its weights and states in a precision."""
    from onnxruntime.transformers import optimizer

    with contextlib.redirect_stdout(io.StringIO()):
        model = optimizer.optimize_model(str(source), model_type="bert", num_heads=heads, hidden_size=hidden)
    if precision == "fp16":
        model.convert_float_to_float16(keep_io_types=True)
    elif precision != "fp32":
        raise ValueError(f"ONNX Runtime's optimizer writes no files in {precision}")
    model.save_model_to_file(str(path))


class Captured:
    """A session of ONNX Runtime that captures a CUDA graph for each shape, with inputs and outputs bound; on the CPU it only binds.

    Args:
        device: "cuda" or "cpu".
    """

    outputs: tuple[str, ...] = ("logits",)

    def __init__(self, path: Path, device: str) -> None:
        import onnxruntime

        from adtp_export.runtimes.onnxruntime import cuda_provider

        self._device, self._onnxruntime = device, onnxruntime
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 3
        providers: list[Any] = []
        if device == "cuda":
            name, settings = cuda_provider(exact=False)
            providers.append((name, {**settings, "enable_cuda_graph": "1"}))
        else:
            providers.append("CPUExecutionProvider")
        self._session = onnxruntime.InferenceSession(str(path), options, providers=providers, enable_fallback=0)
        if device == "cuda" and "CUDAExecutionProvider" not in self._session.get_providers():
            raise RuntimeError("ONNX Runtime cannot start its CUDA provider here")
        self.inputs = tuple(i.name for i in self._session.get_inputs())
        self._bound: dict[tuple[int, ...], tuple[Any, Any, dict[str, Any], Any]] = {}

    def run(self, batch: Batch, wanted: Sequence[str] | None = None) -> dict[str, np.ndarray]:
        missing = -batch["input_ids"].shape[1] % LENGTH_STEP
        arrays = {name: np.ascontiguousarray(np.pad(batch[name], ((0, 0), (0, missing)))) for name in self.inputs}
        shape = arrays["input_ids"].shape
        if shape not in self._bound:
            self._bound[shape] = self._bind(arrays)
        binding, how, inputs, logits = self._bound[shape]
        for name, array in arrays.items():
            inputs[name].update_inplace(array)
        self._session.run_with_iobinding(binding, how)
        return {"logits": logits.numpy()}

    def _bind(self, arrays: Batch) -> tuple[Any, Any, dict[str, Any], Any]:
        ort = self._onnxruntime
        binding, how = self._session.io_binding(), ort.RunOptions()
        if self._device == "cuda":
            how.add_run_config_entry("gpu_graph_id", str(len(self._bound) + 1))
        inputs = {name: ort.OrtValue.ortvalue_from_numpy(array, self._device, 0) for name, array in arrays.items()}
        labels = self._session.get_outputs()[0].shape[1]
        rows = len(arrays["input_ids"])
        logits = ort.OrtValue.ortvalue_from_shape_and_type([rows, labels], np.float32, self._device, 0)
        for name, value in inputs.items():
            binding.bind_ortvalue_input(name, value)
        binding.bind_ortvalue_output("logits", logits)
        return binding, how, inputs, logits


def tensorrt(plain: Path, flavor: str, precision: str) -> Engine:
    """Build an engine of a BERT for any shape of the table, and load it.

    Args:
        plain: as `export` writes it.
        flavor: "tensorrt" or "rtx".
    """
    from benchmarks.gpu.checks import clip_masks, load, make_runnable, obstacles

    if obstacle := obstacles()["obstacles"][flavor]:
        raise RuntimeError(obstacle)
    clip_masks(plain)
    made = make_runnable(flavor, plain.with_suffix(""), precision, DECOMPOSED, PROFILE)
    return load(flavor, made, DECOMPOSED)
