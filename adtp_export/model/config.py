"""`AdtpBertConfig`: a `BertConfig` plus where and how strongly tokens are pruned (checkpoint format 1)."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from transformers import AutoConfig, BertConfig

from ..errors import InputError

PERMILLE = 1000

_LEAST = {
    "saliency_hidden_size": 1,
    "min_tokens": 1,
    "hidden_size": 1,
    "intermediate_size": 1,
    "num_attention_heads": 1,
    "num_hidden_layers": 1,
    "vocab_size": 1,
    "type_vocab_size": 1,
    "max_position_embeddings": 4,  # [CLS], [SEP] twice, and a token
}
_PROBLEM_TYPES = (None, "regression", "single_label_classification", "multi_label_classification")


class PruneSite(NamedTuple):
    """One cut: before layer `layer`'s self-attention (``"attention"``) or its feed-forward (``"ffn"``)."""

    layer: int
    sublayer: str

    def __str__(self) -> str:
        return f"{self.layer}.{self.sublayer}"

    @property
    def key(self) -> str:
        """The site's name inside weight names, where a dot would split the path: ``"1_attention"``."""
        return f"{self.layer}_{self.sublayer}"


def parse_sites(sites: Sequence[str], num_layers: int) -> list[PruneSite]:
    """Parse `prune_sites`, in order.

    Raises:
        InputError: a malformed, unknown, repeated or unordered site, or one before layer 0.
    """
    accepted = f"accepted are 'i.attention' (i from 1 to {num_layers - 1}) and 'i.ffn' (i from 0 to {num_layers - 1})"
    parsed: list[PruneSite] = []
    for site in sites:
        match = re.fullmatch(r"(0|[1-9]\d*)\.(attention|ffn)", site) if isinstance(site, str) else None
        if match is None:
            raise InputError(f"prune_sites: got {site!r}; {accepted}")
        place = PruneSite(int(match[1]), match[2])
        if place == (0, "attention"):
            raise InputError(
                "prune_sites: got '0.attention'; at the raw embedding the [CLS] state is the same for every input, "
                "so a retainer there cannot adapt to the text. The earliest site is '0.ffn'"
            )
        if place.layer >= num_layers:
            raise InputError(f"prune_sites: got {site!r} in a model of {num_layers} layers; {accepted}")
        if parsed and place <= parsed[-1]:  # "attention" < "ffn" is also the order of execution
            raise InputError(
                f"prune_sites: got {site!r} after '{parsed[-1]}'; list each site once, in order of execution"
            )
        parsed.append(place)
    return parsed


def ratios_in_permille(ratios: Sequence[float]) -> list[int]:
    """Return the candidate ratios as integers in 1/1000, the only form in which they enter arithmetic.

    Raises:
        InputError: empty, not ascending, outside (0, 1], not multiples of 0.001, or the last is not 1.0.
    """
    rule = "retention_ratios must be distinct ascending multiples of 0.001 in (0, 1] that end with 1.0"
    if not ratios or not all(isinstance(r, (int, float)) and math.isfinite(r) for r in ratios):
        raise InputError(f"{rule}, got {ratios!r}")
    permille = [round(PERMILLE * r) for r in ratios]
    for ratio, q in zip(ratios, permille):
        if not 0 < ratio <= 1 or abs(PERMILLE * ratio - q) > 1e-6:
            raise InputError(f"{rule}, got {ratio!r} in {list(ratios)}")
    if any(a >= b for a, b in zip(permille, permille[1:])) or permille[-1] != PERMILLE:
        raise InputError(f"{rule}, got {list(ratios)}")
    return permille


class AdtpBertConfig(BertConfig):
    """Configuration of a token-pruned BERT encoder.

    Args:
        prune_sites: where a retainer cuts, in order of execution: ``"i.attention"`` before layer i's self-attention,
            ``"i.ffn"`` after layer i's attention sublayer and before its feed-forward; i is 0-based.
        retention_ratios: candidate ratios, ascending multiples of 0.001 in (0, 1], the last 1.0.
        saliency_hidden_size: width of the saliency predictor's hidden layer.
        min_tokens: floor of kept tokens per sequence, at least 1.
        kwargs: every field of `BertConfig`.

    Raises:
        InputError: a value outside these ranges (it is a `ValueError`, too).
    """

    model_type = "adtp_bert"
    keys_to_ignore_at_inference = ["kept_site", "decisions"]

    def __init__(
        self,
        prune_sites: Sequence[str] = ("0.ffn",),
        retention_ratios: Sequence[float] = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0),
        saliency_hidden_size: int = 96,
        min_tokens: int = 1,
        **kwargs: Any,
    ) -> None:
        for name, value in (("prune_sites", prune_sites), ("retention_ratios", retention_ratios)):
            if not isinstance(value, (list, tuple)):
                raise InputError(f"{name} must be a list, got {value!r}")
        self.prune_sites = list(prune_sites)
        self.retention_ratios = list(retention_ratios)
        self.saliency_hidden_size = saliency_hidden_size
        self.min_tokens = min_tokens
        super().__init__(**kwargs)
        for name, least in _LEAST.items():
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or not least <= value < 2**31:
                raise InputError(f"{name} must be an integer of at least {least}, got {value!r}")
        if self.pad_token_id is not None and not 0 <= self.pad_token_id < self.vocab_size:
            raise InputError(f"pad_token_id must be an id of the vocabulary, got {self.pad_token_id!r}")
        if not self.layer_norm_eps >= 0:
            raise InputError(f"layer_norm_eps must not be negative, got {self.layer_norm_eps!r}")
        if self.problem_type not in _PROBLEM_TYPES:
            raise InputError(
                f"problem_type: got {self.problem_type!r}; accepted are {', '.join(map(str, _PROBLEM_TYPES))}"
            )
        parse_sites(self.prune_sites, self.num_hidden_layers)
        ratios_in_permille(self.retention_ratios)
        if self.hidden_size % self.num_attention_heads:
            raise InputError(
                f"num_attention_heads must divide hidden_size, got {self.num_attention_heads} and {self.hidden_size}"
            )
        if (kind := getattr(self, "position_embedding_type", "absolute")) != "absolute":
            raise InputError(f"position_embedding_type: got {kind!r}; accepted is 'absolute'")

    @property
    def sites(self) -> list[PruneSite]:
        """`prune_sites`, parsed."""
        return parse_sites(self.prune_sites, self.num_hidden_layers)


AutoConfig.register(AdtpBertConfig.model_type, AdtpBertConfig)
