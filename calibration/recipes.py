"""Recipes: how a runtime wants a model quantized, as small TOML files beside this module."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, get_type_hints

import numpy as np

from ..contract import LINEAR, ORT_CPU
from ..errors import InputError, did_you_mean, ellipsize, quoted
from ..io import check_nesting, read_document
from .observers import observer

DIRECTORY = Path(__file__).parent / "recipes"
TARGETS = (ORT_CPU, LINEAR, "trt", "rtx")
PER_TOKEN = "per-token"
ACTIVATIONS = ("static", PER_TOKEN, "none")
E4M3_MAX = 448.0


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How to quantize for one target.

    Args:
        name: the file's name without ``.toml``.
        target: "ort-cpu", "linear", "trt" or "rtx": part of the exported file's name.
        format: "int8", or "fp8" (e4m3).
        base: "fp32" or "fp16": what everything else is computed in.
        activations: "static": ranges from calibration data; "per-token": each token has a scale and a zero point of its own, in operators
            that the target "linear" has; "none": weights alone are stored in 8 bits.
        observer: what turns a histogram into a range.
        smooth: share of an input channel's magnitude that its weights take over (SmoothQuant's alpha), so that a few large
            channels do not stretch the range of all; 0 is none. It needs the observer "minmax". Of activations "per-token" it is for the
            inputs that norms give (`plan.BEHIND_NORMS`).
        per_channel: one scale for each output channel of a weight, else one for all.
        pairs_fit_16_bits: choose weight scales so that no two neighbours times two activations overflow 16 bits. On
            processors without VNNI, ONNX Runtime adds pairs of products in 16 bits, and saturates silently.
        residual: quantize the residual inputs of the layers' sums too, so that a runtime can fuse product and sum.
        bias: "float", or "int32" for runtimes that add the bias inside an integer product.
        exclude: patterns (``layers.0.*``) of matrix products that stay in `base`.

    Raises:
        InputError: a value that is not accepted.
    """

    name: str
    target: str
    format: str
    base: str
    activations: str = "static"
    observer: str = "minmax"
    smooth: float = 0.0
    per_channel: bool = True
    pairs_fit_16_bits: bool = False
    residual: bool = False
    bias: str = "float"
    exclude: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        choices: dict[str, tuple[Any, ...]] = {
            "target": TARGETS,
            "format": ("int8", "fp8"),
            "base": ("fp32", "fp16"),
            "activations": ACTIVATIONS,
            "bias": ("float", "int32"),
        }
        for name, accepted in choices.items():
            if (value := getattr(self, name)) not in accepted:
                known = ", ".join(map(str, accepted))
                hint = did_you_mean(str(value), map(str, accepted))
                raise InputError(f"recipe {self.name}: {name} is {quoted(value)}; accepted are {known}{hint}")
        if not 0 <= self.smooth <= 1:
            raise InputError(f"recipe {self.name}: smooth is {self.smooth}; accepted are 0 to 1")
        if (self.target == LINEAR) != (self.activations == PER_TOKEN):
            raise InputError(
                f'recipe {self.name}: activations = "{PER_TOKEN}" is for target = "{LINEAR}", and that takes nothing else'
            )
        if self.target == LINEAR and (self.format, self.base, self.per_channel) != ("int8", "fp32", True):
            raise InputError(
                f'recipe {self.name}: target = "{LINEAR}" is for int8 with base = "fp32" and per_channel = true'
            )
        if self.smooth and (self.activations == "none" or self.observer != "minmax"):
            raise InputError(f'recipe {self.name}: smooth is for activations in 8 bits with observer = "minmax"')
        if self.residual and self.activations != "static":
            raise InputError(f"recipe {self.name}: residual is for static activations")
        if self.pairs_fit_16_bits and self.format == "fp8":
            raise InputError(f"recipe {self.name}: pairs_fit_16_bits is for int8")
        if self.bias == "int32" and (self.activations != "static" or self.format == "fp8"):
            raise InputError(f'recipe {self.name}: bias = "int32" is for int8 with static activations')
        observer(self.observer)

    @property
    def levels(self) -> np.ndarray:
        """Magnitudes that an activation can take, from 0 to 1."""
        if self.format == "int8":
            return np.arange(128) / 127
        import ml_dtypes

        values = np.arange(127, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float64)
        return values / E4M3_MAX

    @property
    def largest(self) -> float:
        """What the end of a range becomes in the format."""
        return E4M3_MAX if self.format == "fp8" else 127

    def quantized(self, products: Iterable[str]) -> list[str]:
        """Return which matrix products are quantized: those that no pattern of `exclude` matches.

        Raises:
            InputError: a pattern that matches none.
        """
        names = list(products)
        for pattern in self.exclude:
            if not any(fnmatchcase(name, pattern) for name in names):
                raise InputError(
                    f"recipe {self.name}: exclude has {quoted(pattern)}, which matches no matrix product; products are "
                    f"{ellipsize(', '.join(names))}{did_you_mean(pattern, names)}"
                )
        return [name for name in names if not any(fnmatchcase(name, pattern) for pattern in self.exclude)]


def built_in(target: str, format: str) -> Recipe:
    """Return the recipe that comes with adtp-export for a target."""
    return read(DIRECTORY / f"{target}.{format}.toml")


MAX_DOTS = 100


def _few_dots(text: str, path: Path) -> str:
    """Return a document whose lines are known to be read in little memory: for `a.b.c = 1`, TOML's parser keeps all beginnings of the key.

    Raises:
        InputError: a line with more than `MAX_DOTS` dots.
    """
    for number, line in enumerate(text.split("\n"), start=1):
        if (dots := line.count(".")) > MAX_DOTS:
            raise InputError(
                f"{path}: line {number} has {dots:,} dots; accepted are at most {MAX_DOTS}. Put long lists on several lines"
            )
    return text


def read(path: Path) -> Recipe:
    """Read a recipe.

    Raises:
        InputError: unreadable, not TOML, an unknown or missing key, or a value of another type or out of range.
    """
    try:
        stored = tomllib.loads(_few_dots(read_document(path), path))
    except InputError:
        raise
    except FileNotFoundError:
        raise InputError(f"{path}: there is no such file; give another one with --recipe FILE") from None
    except (OSError, ValueError, RecursionError) as error:  # TOML's errors and Python's limit of digits are ValueErrors
        raise InputError(f"{path}: cannot be read as a recipe ({ellipsize(str(error))})") from error
    check_nesting(stored, path)
    kinds = get_type_hints(Recipe)
    known = [field.name for field in fields(Recipe) if field.name != "name"]
    for key, value in list(stored.items()):
        if key not in known:
            raise InputError(
                f"{path}: got the key {quoted(key)}; accepted are {', '.join(known)}{did_you_mean(key, known)}"
            )
        expected = list if key == "exclude" else kinds[key]
        if key == "smooth" and type(value) is int:
            stored[key] = value = float(min(max(value, -1), 2))  # as wrong as it was, and no overflow
        if not isinstance(value, expected) or (isinstance(value, bool) and expected is not bool):
            raise InputError(f"{path}: {key} is {quoted(value)}; accepted is a value of type {expected.__name__}")
    for key in ("target", "format", "base"):
        if key not in stored:
            raise InputError(f"{path}: {key} is missing; a recipe has at least target, format and base")
    return Recipe(name=path.stem, exclude=tuple(map(str, stored.pop("exclude", ()))), **stored)


def find_recipes(formats: Sequence[str], targets: Sequence[str], files: Sequence[Path]) -> list[Recipe]:
    """Return one recipe for each target and format: a user's file, else the one that comes with adtp-export.

    Raises:
        InputError: a file that is no recipe, is for something that this run does not make, or for the same as another.
    """
    wanted = [(t, f) for f in formats for t in targets if (DIRECTORY / f"{t}.{f}.toml").exists()]
    given: dict[tuple[str, str], Recipe] = {}
    for file in files:
        recipe = read(file)
        key = recipe.target, recipe.format
        if key not in wanted:
            made = ", ".join(f"{f} for {t}" for t, f in wanted) or "nothing in 8 bits"
            raise InputError(f"--recipe {file}: it is {key[1]} for {key[0]}, and this run makes {made}")
        if key in given:
            raise InputError(f"--recipe {file}: {given[key].name} is {key[1]} for {key[0]} already; give one of them")
        given[key] = recipe
    return [given.get(key) or built_in(*key) for key in wanted]
