"""The page of a run that generates text: its pictures, and where a prompt's image tokens are in them."""

import io
import re
import struct
import zlib
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from adtp_export.contract import ANYRES, SQUARE, TILES
from adtp_export.inference.pixels import denormalized, normalized
from adtp_export.inference.tiles import Prepared
from adtp_export.inference.traced import Entering, Trace, TracedGenerator
from adtp_export.report.generated import left_out, png, render


@given(arrays.arrays(bool, (5, 5)))
def test_what_left_is_covered(kept):
    covered = np.zeros((5, 5), dtype=int)
    for x, y, width, back in re.findall(r"M(\d+) (\d+)h(\d+)v1h-(\d+)z", left_out(kept)):
        assert width == back
        covered[int(y), int(x) : int(x) + int(width)] += 1
    assert np.array_equal(covered, ~kept)


@given(arrays.arrays(np.uint8, st.tuples(st.integers(1, 4), st.integers(1, 4), st.just(3))))
def test_pictures_are_png(picture):
    stream = io.BytesIO(png(picture))
    assert stream.read(8) == b"\x89PNG\r\n\x1a\n"
    chunks = {}
    while size := stream.read(4):
        kind = stream.read(4)
        chunks[kind] = stream.read(*struct.unpack(">I", size))
        assert zlib.crc32(kind + chunks[kind]) == struct.unpack(">I", stream.read(4))[0]
    assert list(chunks) == [b"IHDR", b"IDAT", b"IEND"]
    height, width = picture.shape[:2]
    assert chunks[b"IHDR"] == struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    lines = np.frombuffer(zlib.decompress(chunks[b"IDAT"]), np.uint8).reshape(height, 1 + 3 * width)
    assert not lines[:, 0].any()
    assert np.array_equal(lines[:, 1:].reshape(picture.shape), picture)


@pytest.mark.parametrize(
    "settings",
    [{}, {"image_mean": [0.48, 0.46, 0.41], "image_std": [0.27, 0.26, 0.28]}, {"do_normalize": False}, {"do_rescale": False}],
    ids=str,
)  # fmt: skip
def test_pixels_come_back(settings):
    picture = np.random.default_rng(0).integers(0, 256, (4, 5, 3), dtype=np.uint8)
    assert np.array_equal(denormalized(normalized(picture, settings), settings), picture)


@pytest.mark.parametrize(
    ("layout", "own", "tokens", "kept", "cells"),
    [
        (SQUARE, 4, 4, None, [0, 1, 2, 3]),
        (SQUARE, 5, 5, None, [-1, 0, 1, 2, 3]),  # a first token of no patch
        (SQUARE, 4, 2, [[1, 3]], [1, 3]),  # what the vision tower left
        (SQUARE, 7, 7, None, None),
        (TILES, 4, 12, None, list(range(12))),
        (ANYRES, 4, 7, None, [0, 1, 2, 3, -1, -1, -1]),
    ],
)
def test_where_image_tokens_are(layout, own, tokens, kept, cells):
    tiles = 1 if layout == SQUARE else 3
    picture = Prepared(np.zeros((tiles, 3, 8, 8), np.float32), "<row_1_col_1>x<row_1_col_2>x", list)
    generator = SimpleNamespace(_layout={"layout": layout}, _side=8, _picture_settings={})
    drawn = TracedGenerator._drawn(generator, picture, own, tokens, None if kept is None else np.array(kept))
    if cells is None:
        assert drawn is None
        return
    assert drawn.cells.tolist() == cells
    assert (drawn.side, len(drawn.tiles), drawn.columns) == (2, 3 if layout == TILES else 1, 2)


def test_a_prompt_without_a_picture():
    """Has no section about it, and text is no markup."""
    entering = [Entering(first=0, last=3, copies=np.zeros(0, int), text=5, cache=2048)]
    told = {"model": "m", "file": "prefill.onnx", "prompt": "<b>?", "answer": "</div>&", "per_picture": 0}
    text = render(Trace(**told, entering=entering, picture=None, seconds={"embed": [0.001], "prefill": [0.25]}))
    assert "What stayed" not in text
    assert "<div class=said>&lt;b&gt;?</div>" in text
    assert "<div class=said>&lt;/div&gt;&amp;</div>" in text
    assert "<td>Layers 0 to 3</td><td>5</td><td>0</td><td>5</td><td>2.0 KiB</td><td>8.0 KiB</td>" in text
    assert "<b>251.0 ms</b>" in text
