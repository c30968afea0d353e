"""One run of a model that generates text as a page: the prompt, the answer, and the picture with what stayed of it at each stage."""

from __future__ import annotations

import base64
import struct
import zlib
from html import escape

import numpy as np

from ..explain.records import PromptExplained
from ..inference.traced import Drawn, Entering, Trace
from .explained import FLOW_HEAD, largest, shown
from .html import page, section, table
from .texts import shaded


def render(trace: Trace, explained: PromptExplained | None = None) -> str:
    """Return the page; pictures are inside, so it needs no other file. explained: None leaves that section out."""
    answer = f"<div class=said>{escape(trace.answer)}</div>"
    return page(
        escape(f"{trace.model}: {trace.answer[:60]}"),
        [
            _head(trace),
            section("Prompt", f"<div class=said>{escape(trace.prompt)}</div>"),
            section("Answer", answer),
            section("What a token rests on", _flow(explained)) if explained else "",
            section("What stayed of the picture", _picture(trace)),
            section("Tokens and cache", _cache(trace)),
            section("Times of this run", _times(trace)),
        ],
    )


def png(picture: np.ndarray) -> bytes:
    """Write ``(height, width, 3) uint8`` as PNG."""
    height, width = picture.shape[:2]
    lines = np.concatenate([np.zeros((height, 1), np.uint8), picture.reshape(height, -1)], 1)

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    body = zlib.compress(lines.tobytes(), 9)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", body) + chunk(b"IEND", b"")


def _head(trace: Trace) -> str:
    first = trace.entering[0]
    whole = trace.layers * first.cache * (trace.per_picture + first.text) / (first.image + first.text)
    figures = [(_ms(trace.first_token), "until the first token, in the model's files")]
    if trace.step is not None:
        figures.append((_ms(trace.step), "for each further token, median"))
    if trace.per_picture:
        figures.append(
            (f"{_mean_image(trace) / trace.per_picture:.0%}", "of the image tokens enter a layer, on average")
        )
        figures.append((f"{trace.cache / whole:.0%}", "of the cache that the whole prompt would need"))
    tiles = "".join(f"<div><b>{escape(value)}</b><span>{escape(text)}</span></div>" for value, text in figures)
    return (
        f"<header>\n<h1>{escape(trace.model)}</h1>\n<p>The prompt was read by <code>{escape(trace.file)}</code>.</p>\n"
        f"<div class=tiles>{tiles}</div>\n</header>\n"
    )


def _mean_image(trace: Trace) -> float:
    return sum(stage.layers * stage.image for stage in trace.entering) / trace.layers


def _picture(trace: Trace) -> str:
    if not trace.per_picture:
        return ""
    if trace.picture is None:
        return "<p>The image tokens of this model form no square of patches, so they are not drawn.</p>"
    drawn = trace.picture
    sources = "".join(
        f"<image id='tile{i}' width='{drawn.side}' height='{drawn.side}' preserveAspectRatio='none' "
        f"href='data:image/png;base64,{base64.b64encode(png(tile)).decode('ascii')}'/>"
        for i, tile in enumerate(drawn.tiles)
    )
    told = "<p>Each picture shows what enters the layers that are named below it. Patches that have left are dark.</p>"
    if drawn.whole_last:
        told += "<p>The model reads the picture in tiles; the last one is the whole picture, small.</p>"
    if (drawn.cells < 0).sum() > 1:
        told += (
            "<p>This model also reads the picture in large tiles, whose tokens are not drawn. What is drawn is the whole "
            "picture, small; the counts are of all image tokens.</p>"
        )
    stages = "".join(_stage(trace, drawn, number) for number in range(len(trace.entering)))
    return f"{told}<svg class=sources><defs>{sources}</defs></svg><div class=charts>{stages}</div>"


def _flow(explained: PromptExplained) -> str:
    name, layers = escape(shown(explained.token)), explained.merge_layers
    token = f"the generated token <code>{name}</code>" if name else "the end of the text"
    inexact = f"Layers are merged until at most {layers} are left, so flows may not be exact. " if layers else ""
    tips = [f"flow {value:.3f}" for value in explained.flow]
    rows = [(f"<code>{escape(row[0])}</code>", *row[1:]) for row in largest(explained)]
    return (
        f"<p>Attention flow to {token} from each token before it: the most that can pass along the attention of all layers. "
        f"{inexact}The stronger its colour, the larger the flow.</p>"
        f"<figure><div class='text rests'>{shaded(explained.tokens, explained.flow, tips)}</div></figure>{table(FLOW_HEAD, rows)}"
    )


def _stage(trace: Trace, drawn: Drawn, number: int) -> str:
    stage = trace.entering[number]
    patches = drawn.side**2
    there = np.zeros(len(drawn.tiles) * patches, dtype=bool)
    shown = drawn.cells >= 0
    there[drawn.cells[shown]] = stage.copies[shown] > 0
    tiles = "".join(
        f"<svg class=tile viewBox='0 0 {drawn.side} {drawn.side}' role=img aria-label='{label}'><use href='#tile{i}'/>"
        f"<path class=gone d='{left_out(kept)}'/></svg>"
        for i, kept in enumerate(there.reshape(-1, drawn.side, drawn.side))
        for label in [f"{int(kept.sum())} of {patches} patches stay"]
    )
    twice = int((stage.copies > 1).sum())
    doubled = f", {twice} of them twice" if twice else ""
    return (
        f"<figure><div class=shot style='grid-template-columns:repeat({drawn.columns},1fr)'>{tiles}</div><figcaption>"
        f"{layers_of(stage)}: {stage.image:,} of {trace.per_picture:,} image tokens{doubled}</figcaption></figure>"
    )


def left_out(kept: np.ndarray) -> str:
    """Return the path around what is False in ``(side, side) bool``, a rectangle for each run in a row."""
    path = ""
    for y, row in enumerate(kept):
        edges = np.flatnonzero(np.diff(np.concatenate([[True], row, [True]])))
        path += "".join(f"M{begin} {y}h{end - begin}v1h{begin - end}z" for begin, end in edges.reshape(-1, 2).tolist())
    return path


def layers_of(stage: Entering) -> str:
    """Name the layers that a stage is about, counted from 0."""
    return f"Layer {stage.first}" if stage.layers == 1 else f"Layers {stage.first} to {stage.last}"


def _cache(trace: Trace) -> str:
    rows = [
        (
            layers_of(stage),
            f"{stage.image + stage.text:,}",
            f"{stage.image:,}",
            f"{stage.text:,}",
            _kib(stage.cache),
            _kib(stage.layers * stage.cache),
        )
        for stage in trace.entering
    ]
    rows.append(("All layers", "", "", "", "", _kib(trace.cache)))
    head = ("", "tokens", "of the image", "of the text", "cache of each layer", "cache of these")
    return f"<p>What entered each layer with the prompt, and its keys and values.</p>{table(head, rows)}"


def _times(trace: Trace) -> str:
    rows = [
        (f"<code>{escape(name)}</code>", str(len(values)), _ms(float(np.median(values))), _ms(sum(values)))
        for name, values in trace.seconds.items()
    ]
    told = "<p>Measured once, with what a runtime does at its first run; not a benchmark.</p>"
    return told + table(("file", "runs", "median", "sum"), rows)


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:,.1f} ms"


def _kib(size: int) -> str:
    return f"{size / 1024:,.1f} KiB"
