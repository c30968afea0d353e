"""What one run of generation did: times, the length of each layer's cache, and which parts of the picture stayed at each stage."""

from __future__ import annotations

import math
import os
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..contract import (
    CU_SEQLENS,
    GRID,
    IMAGE,
    IMAGE_KEPT,
    KEY,
    PREFILL_MODEL,
    PRESENT,
    ROWS,
    SQUARE,
    TILES,
    VALUE,
    VISION_MODEL,
    cached,
    entered,
)
from ..io import read_json
from ..runtimes.onnxruntime import OnnxRuntimeEngine
from .generation import Generator, Prompt
from .pixels import denormalized, resized
from .sampling import Sampling
from .tiles import Prepared

SHOWN_SIDE = 256
"""Pixels along a side of a drawn tile, where a picture has several."""


@dataclass(frozen=True, kw_only=True)
class Drawn:
    """Tiles to draw, each a square of ``side x side`` patches.

    tiles: ``(n, height, width, 3) uint8``. columns: of tiles in the picture. cells: ``(image tokens,) int64``, the patch of each image
    token of the prompt, counted over all tiles; -1: not drawn. whole_last: whether the last tile is the whole picture.
    """

    tiles: np.ndarray
    side: int
    columns: int
    cells: np.ndarray
    whole_last: bool


@dataclass(frozen=True, kw_only=True)
class Entering:
    """What enters the layers from one to another. copies: ``(image tokens,) int64``, how often each of the prompt's is there. text: tokens
    that are no image's. cache: bytes of keys and values of one of these layers.
    """

    first: int
    last: int
    copies: np.ndarray
    text: int
    cache: int

    @property
    def image(self) -> int:
        return int(self.copies.sum())

    @property
    def layers(self) -> int:
        return self.last - self.first + 1


@dataclass(frozen=True, kw_only=True)
class Trace:
    """One run. prompt: as the model's own text. file: that read it. seconds: of each run of a file, by its name without the suffix.

    per_picture: image tokens that the vision tower makes before any leaves, of all tiles. picture: None where there is none to draw.
    """

    model: str
    file: str
    prompt: str
    answer: str
    per_picture: int
    entering: Sequence[Entering]
    picture: Drawn | None
    seconds: Mapping[str, Sequence[float]]

    @property
    def layers(self) -> int:
        return sum(stage.layers for stage in self.entering)

    @property
    def cache(self) -> int:
        """Bytes of all layers."""
        return sum(stage.layers * stage.cache for stage in self.entering)

    @property
    def first_token(self) -> float:
        """Seconds in files until the first token is known."""
        return sum(sum(self.seconds.get(name, ())) for name in ("vision", "embed", "prefill"))

    @property
    def step(self) -> float | None:
        """The median of seconds for a further token."""
        return statistics.median(steps) if (steps := self.seconds.get("step")) else None


class TracedGenerator(Generator):
    """A generator that also says what its last run did; for one prompt at a time."""

    def __init__(self, directory: str | os.PathLike[str], threads: int = 0, target: str | None = None) -> None:
        self._seconds: dict[str, list[float]] = {}
        self._last: dict[str, tuple[Mapping[str, Any], Mapping[str, np.ndarray]]] = {}
        self._prepared: list[Prepared] = []
        super().__init__(directory, threads, target)

    def _engine(self, name: str) -> OnnxRuntimeEngine:
        engine = super()._engine(name)
        run, part = engine.run, name.removesuffix(".onnx")

        def timed(batch: Any, wanted: Sequence[str] | None = None) -> dict[str, np.ndarray]:
            begin = time.perf_counter()
            answer = run(batch, wanted)
            self._seconds.setdefault(part, []).append(time.perf_counter() - begin)
            if name in (PREFILL_MODEL, VISION_MODEL):
                self._last[part] = (batch, answer)
            return answer

        engine.run = timed  # type: ignore[method-assign]
        return engine

    def pictures(self, pictures: Sequence[object]) -> list[Prepared]:
        self._prepared = super().pictures(pictures)
        return self._prepared

    def stream(
        self, images: Sequence[object] | None, texts: Sequence[Prompt], sampling: Sampling | None = None, first: int = 0
    ) -> Iterator[list[str]]:
        self._seconds.clear()
        self._last.clear()
        self._prepared = []
        return super().stream(images, texts, sampling, first)

    def trace(self, prompt: Prompt, answer: str) -> Trace:
        """Say what the last run did, which had this prompt alone."""
        given, found = self._last["prefill"]
        picture = self._prepared[0] if self._prepared else None
        image_tokens = int(np.count_nonzero(given[IMAGE]))
        made = self._last["vision"][1] if picture else {}
        own = read_json(self.directory / "config.json")["adtp"]["image_tokens"] if picture else 0
        per_picture = own if IMAGE_KEPT in made else image_tokens
        return Trace(
            model=str(self.manifest.checkpoint["name"]),
            file=self._files[PREFILL_MODEL],
            prompt=prompt if isinstance(prompt, str) else self.chat.prompt(prompt)[0],
            answer=answer,
            per_picture=per_picture,
            entering=entering(given[IMAGE], found),
            picture=self._drawn(picture, own, image_tokens, made.get(IMAGE_KEPT)) if picture else None,
            seconds={name: tuple(values) for name, values in self._seconds.items()},
        )

    def _drawn(self, picture: Prepared, own: int, image_tokens: int, kept: np.ndarray | None) -> Drawn | None:
        """Return the tiles of a picture and where its tokens are; None where those of a tile are no square."""
        side, layout = math.isqrt(own), self._layout["layout"]
        if layout == GRID:
            return None
        before = own - side**2  # a first token that is of no patch
        if before not in (0, int(layout == SQUARE)):
            return None
        number = len(picture.tiles) if layout == TILES else 1
        places = np.arange(image_tokens) if kept is None else kept[0]
        cells = np.where(places - before < number * side**2, places - before, -1)
        settings = self._picture_settings
        tiles = [denormalized(tile, settings) for tile in picture.tiles[:number]]
        if number > 1 and self._side > SHOWN_SIDE:
            tiles = [resized(tile, SHOWN_SIDE, SHOWN_SIDE) for tile in tiles]
        columns = picture.written.count("<row_1_") or 1
        whole_last = number > 1
        return Drawn(tiles=np.stack(tiles), side=side, columns=columns, cells=cells, whole_last=whole_last)


def entering(image: np.ndarray, answer: Mapping[str, np.ndarray]) -> list[Entering]:
    """Say what entered which layers of one prompt.

    Args:
        image: ``(T,) bool``, what is of an image. answer: of `prefill.onnx`.
    """
    firsts = sorted(int(name.rpartition(".")[2]) for name in answer if name.startswith(f"{ROWS}."))
    layers = sum(name.startswith(f"{PRESENT}.") and name.endswith(KEY) for name in answer)
    found = []
    for first, following in zip(firsts, [*firsts[1:], layers]):
        rows = answer[entered(ROWS, first)]
        assert int(answer[entered(CU_SEQLENS, first)][-1]) == len(rows)
        copies = np.bincount(rows, minlength=len(image))
        size = sum(answer[cached(PRESENT, first, what)].nbytes for what in (KEY, VALUE))
        text = int(copies[~image].sum())
        found.append(Entering(first=first, last=following - 1, copies=copies[image], text=text, cache=size))
    return found
