"""How a vector of each token is made of its state: the field `vectors` of checkpoint format 2."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from ..errors import InputError, check_int, did_you_mean, quoted
from .projections import check_widths, dimension, token_projection


class VectorSettings(NamedTuple):
    """projections: dense layers, each with its input size, its output size, whether it has a bias, its activation, and whether its input
    is added; and `NORMALIZE` where vectors get length 1 before another dense layer. normalize: to length 1, at the end. expansion: id of
    the token that queries are filled up with where it is never attended to; None: all tokens are.
    """

    projections: tuple[tuple[int, int, bool, str, bool] | str, ...] = ()
    normalize: bool = True
    expansion: int | None = None

    @classmethod
    def read(cls, fields: Mapping[str, Any]) -> VectorSettings:
        """Check the field `vectors` of a configuration; raises InputError for what cannot be."""
        for name in fields:
            if name not in cls._fields:
                raise InputError(
                    f"vectors: got the field {quoted(name)}; accepted are {', '.join(cls._fields)}{did_you_mean(name, cls._fields)}"
                )
        settings = cls(**{**fields, "projections": tuple(map(token_projection, fields.get("projections", ())))})
        if not isinstance(settings.normalize, bool):
            raise InputError(f"vectors.normalize: got {quoted(settings.normalize)}; accepted are true and false")
        return settings

    def check(self, encoder: Any) -> None:
        """Raises InputError where a projection does not take what comes before it, or the encoder has no such token."""
        check_widths("vectors.projections", self.projections, int(encoder.hidden_size))
        if self.expansion is not None:
            check_int("vectors.expansion", self.expansion, 0, int(encoder.vocab_size) - 1)

    def dimension(self, hidden_size: int) -> int:
        """Length of a vector."""
        return dimension(self.projections, hidden_size)
