"""adtp-export: transformers encoders, token-pruned or plain, become deployments whose latency really drops.

`import adtp_export` is light. `export`, `import_checkpoint`, `bench`, `train` and `tune` are what the commands do; `load` opens an exported
directory and needs neither torch nor transformers. The model and configuration classes bring both in when they are first used,
and register with the Auto classes. `load` comes with the package itself, and a runtime; everything else needs the extra
"export", as `MissingDependencyError` says where it is missing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from .contract import __version__ as __version__

if TYPE_CHECKING:
    from .artifacts.records import Manifest
    from .inference.answers.vectors import maxsim
    from .inference.generation import generate
    from .inference.images import ImageEncoder, encode_images
    from .inference.predictor import load
    from .model import (
        AdtpBertConfig,
        AdtpBertForSequenceClassification,
        PrunedEncoderConfig,
        PrunedEncoderForSequenceClassification,
    )
    from .pipeline.bench.bench import bench
    from .pipeline.convert import import_checkpoint
    from .pipeline.export.export import export
    from .pipeline.train.train import train
    from .pipeline.tune.tune import tune

_HOMES = {
    "AdtpBertConfig": "model",
    "AdtpBertForSequenceClassification": "model",
    "ImageEncoder": "inference.images",
    "Manifest": "artifacts.records",
    "PrunedEncoderConfig": "model",
    "PrunedEncoderForSequenceClassification": "model",
    "bench": "pipeline.bench.bench",
    "encode_images": "inference.images",
    "export": "pipeline.export.export",
    "generate": "inference.generation",
    "import_checkpoint": "pipeline.convert",
    "load": "inference.predictor",
    "maxsim": "inference.answers.vectors",
    "train": "pipeline.train.train",
    "tune": "pipeline.tune.tune",
}
"""Public names, and the modules that they are imported from when asked for."""

__all__ = [
    "AdtpBertConfig",
    "AdtpBertForSequenceClassification",
    "ImageEncoder",
    "Manifest",
    "PrunedEncoderConfig",
    "PrunedEncoderForSequenceClassification",
    "bench",
    "encode_images",
    "export",
    "generate",
    "import_checkpoint",
    "load",
    "maxsim",
    "train",
    "tune",
]


def __dir__() -> list[str]:
    """List what may be imported from here, which `__getattr__` imports when it is asked for."""
    return sorted([*__all__, "__version__"])


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from .errors import needs_extras

    with needs_extras(f"adtp_export.{name}"):
        return getattr(importlib.import_module(f".{_HOMES[name]}", __name__), name)
