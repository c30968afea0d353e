"""adtp-export: trained, token-pruned transformers become deployments whose latency really drops.

`import adtp_export` is light. `AdtpBertForSequenceClassification` and `AdtpBertConfig` bring in torch and
transformers when they are first used, and register with the Auto classes; `load` opens an exported directory
and needs neither.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__all__ = ["AdtpBertConfig", "AdtpBertForSequenceClassification", "load"]

if TYPE_CHECKING:
    from .engines.deployment import load
    from .model import AdtpBertConfig, AdtpBertForSequenceClassification


def __getattr__(name: str) -> Any:
    if name in ("AdtpBertConfig", "AdtpBertForSequenceClassification"):
        from . import model

        return getattr(model, name)
    if name == "load":
        from .engines.deployment import load

        return load
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
