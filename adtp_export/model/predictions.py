"""Masked-language heads, which give a logit for each token of the vocabulary, and products with it block by block.

All logits of 8,192 tokens would take 1 GB, and most who ask for them reduce them over the tokens at once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..errors import InputError, check_int, did_you_mean, quoted

MAX, SUM = POOLINGS = ("max", "sum")
ACTIVATIONS = {"relu": 1, "log1p_relu": 2}
"""Names that sentence-transformers has, and how many logarithms ``log(1 + x)`` follow ReLU."""
BLOCK = 1024
"""Tokens of the vocabulary whose logits are held at once: 4 KB for each token of the texts."""
MOST_BLOCKS = 64
"""Larger vocabularies have larger blocks, because a graph has some nodes for each."""


class Predictions(NamedTuple):
    """A masked-language head. transform: takes states ``(..., H)`` to what `decoder` reads. decoder: its `out_features` are V, the size
    of the vocabulary."""

    transform: nn.Module
    decoder: nn.Linear


class SparseSettings(NamedTuple):
    """How a sparse vector is made of the logits of a text's tokens: each is activated, and they are pooled.

    pooling: of `POOLINGS`. activation: of `ACTIVATIONS`.
    """

    pooling: str = MAX
    activation: str = "relu"

    @classmethod
    def read(cls, fields: Mapping[str, Any]) -> SparseSettings:
        """Check the field `sparse` of a configuration; raises InputError for what cannot be."""
        for name, value in fields.items():
            if name not in cls._fields:
                raise InputError(
                    f"sparse: got the field {quoted(name)}; accepted are {', '.join(cls._fields)}{did_you_mean(name, cls._fields)}"
                )
            accepted = POOLINGS if name == "pooling" else tuple(ACTIVATIONS)
            if value not in accepted:
                hint = did_you_mean(str(value), accepted)
                raise InputError(f"sparse.{name}: got {quoted(value)}; accepted are {', '.join(accepted)}{hint}")
        return cls(**fields)

    def activate(self, logits: Tensor) -> Tensor:
        """Return ``log(1 + relu(logits))``, with one logarithm more for "log1p_relu"."""
        values = logits.relu()
        for _ in range(ACTIVATIONS[self.activation]):
            values = values.log1p()
        return values


def check_masked(fills: bool, mask_id: Any, tokens: int, pruning: Mapping[str, Any]) -> None:
    """Raises InputError where a model that fills in masked tokens drops some, or has an id for them that is none of so many tokens'.

    Args:
        fills: it is such a model. mask_id: None where the tokenizer says it.
    """
    if not fills and mask_id is not None:
        raise InputError("mask_token_id: is for the head 'masked'; leave it out")
    if fills and pruning:
        raise InputError(
            "pruning: got cuts in a model with the head 'masked', which could drop the tokens that it is to fill in; accepted is none, so "
            "leave pruning out"
        )
    if mask_id is not None:
        check_int("mask_token_id", mask_id, 0, tokens - 1)


class Decoder(nn.Module):
    """Logits of transformed states, reduced or as they are.

    The number of blocks is known beforehand, so a graph needs no loop. Each reads rows of the same weights, which may be those of the token
    embeddings.

    Args:
        linear: is registered elsewhere in the model, and not once more here.
    """

    linear: nn.Linear

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.__dict__["linear"] = linear

    def forward(self, x: Tensor, reduce: Callable[[Tensor], Tensor], zero: Tensor | None = None) -> Tensor:
        """Return ``(B, V)`` of ``x (..., H)``.

        Args:
            reduce: takes the logits ``(..., v)`` of a block to ``(B, v)``; each token of the vocabulary for itself.
            zero: a 0, ``()`` of integers, that a graph computes of its inputs. Runtimes rearrange a constant table, or blocks of it, when
                they load a file, and then hold it twice: 94 MB more for BERT, 1 GB for XLM-R large.
        """
        weight, bias = self.linear.weight, self.linear.bias
        found, whole = [], weight.shape[0]
        size = max(BLOCK, -(-whole // MOST_BLOCKS))
        row = None if zero is None else torch.arange(min(size, whole), device=x.device) + zero
        for begin in range(0, whole, size):
            end = min(begin + size, whole)
            part = None if bias is None else bias[begin:end]
            rows = weight[begin:end] if row is None else weight.index_select(0, row[: end - begin] + begin)
            found.append(reduce(nn.functional.linear(x, rows, part)))
        return torch.cat(found, 1)
