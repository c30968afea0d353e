"""Files of pictures, made with Pillow: read and prepared to the bit as transformers' own processors do it, or refused in one message."""

import json
import struct
import sys
import zlib

import numpy as np
import pytest
from PIL import Image, ImageOps
from transformers.image_transforms import convert_to_rgb
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
from transformers.models.llava.image_processing_pil_llava import LlavaImageProcessorPil
from transformers.models.llava_next.image_processing_pil_llava_next import LlavaNextImageProcessorPil
from transformers.models.llava_onevision.image_processing_pil_llava_onevision import LlavaOnevisionImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil
from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil

from adtp_export.errors import InputError
from adtp_export.inference import pixels
from adtp_export.inference.pixels import BICUBIC, BILINEAR, LANCZOS, MOST_PIXELS, read_picture, resized
from adtp_export.inference.tiles import prepared

SIDE = 16
PINPOINTS = [[16, 16], [16, 32], [32, 16], [32, 32], [48, 16]]
CROPPED = {"size": {"shortest_edge": SIDE}, "crop_size": {"height": SIDE, "width": SIDE}}
LARGER = {**CROPPED, "size": {"shortest_edge": SIDE + 4}}
SQUARE = {"size": {"height": SIDE, "width": SIDE}}
TILES = {"size": {"longest_edge": 64}, "max_image_size": {"longest_edge": SIDE}}
ANYRES = {"layout": "anyres", "pinpoints": PINPOINTS, "most": None}
PATCHES = {
    "patch_size": 4,
    "merge_size": 2,
    "temporal_patch_size": 2,
    "size": {"shortest_edge": 64, "longest_edge": 2048},
}
GRID = {"layout": "grid", "patch": 4, "merge": 2, "temporal": 2}
PROCESSORS = {
    "clip": (CLIPImageProcessorPil(**CROPPED), {"layout": "square"}),
    "llava": (LlavaImageProcessorPil(**CROPPED), {"layout": "square"}),
    "siglip": (SiglipImageProcessorPil(**SQUARE), {"layout": "square"}),
    "llava_next": (LlavaNextImageProcessorPil(**CROPPED, image_grid_pinpoints=PINPOINTS), ANYRES),
    "llava_next of another size": (LlavaNextImageProcessorPil(**LARGER, image_grid_pinpoints=PINPOINTS), ANYRES),
    "llava_onevision": (LlavaOnevisionImageProcessorPil(**SQUARE, image_grid_pinpoints=PINPOINTS), ANYRES),
    "idefics3": (Idefics3ImageProcessorPil(**TILES), {"layout": "tiles"}),
    "smolvlm": (SmolVLMImageProcessorPil(**TILES), {"layout": "tiles"}),
    "qwen2_vl": (Qwen2VLImageProcessorPil(**PATCHES), GRID),
}
SIZES = ((16, 16), (23, 40), (75, 31), (1, 40), (40, 1), (3, 200), (5, 5), (64, 64), (600, 700))
ORIENTATION = 0x0112
"""EXIF's number for how a camera was held."""


def drawn(mode, size=(40, 23)):
    """A random picture of one of Pillow's modes."""
    bands = len(Image.new(mode, (1, 1)).getbands())
    shape = (size[1], size[0]) if bands == 1 else (size[1], size[0], bands)
    if mode == "1":
        return Image.fromarray(np.random.default_rng(0).random(shape) > 0.5)
    colors = np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)
    if mode == "P":
        return Image.fromarray(colors).convert("RGB").quantize(16)
    return Image.frombytes(mode, size, colors.tobytes())


FILES = {
    "colors.png": ("RGB", {}),
    "gray.png": ("L", {}),
    "gray_alpha.png": ("LA", {}),
    "alpha.png": ("RGBA", {}),
    "palette.png": ("P", {}),
    "palette_with_a_clear_color.png": ("P", {"transparency": 3}),
    "gray_with_a_clear_level.png": ("L", {"transparency": 77}),
    "two_colors.png": ("1", {}),
    "photo.jpg": ("RGB", {"quality": 80}),
    "gray.jpg": ("L", {}),
    "print.jpg": ("CMYK", {}),
    "lossy.webp": ("RGB", {}),
    "alpha.webp": ("RGBA", {"lossless": True}),
    "print.tif": ("CMYK", {"compression": "tiff_lzw"}),
    "plain.bmp": ("RGB", {}),
}


def compared(path, processor="llava"):
    """Check that a file is read and prepared as transformers' processor does it with Pillow's picture."""
    own, layout = PROCESSORS[processor]
    with Image.open(path) as opened:
        turned = ImageOps.exif_transpose(opened)
        found = read_picture(path)
        assert np.array_equal(found, convert_to_rgb(turned, return_numpy=True))
        wanted = np.asarray(own(turned)["pixel_values"])
    settings = json.loads(own.to_json_string())
    tiles = prepared(found, settings, layout, SIDE, "<image>").tiles
    assert np.array_equal(tiles, wanted.reshape(tiles.shape))


@pytest.mark.parametrize("name", FILES)
def test_a_file_is_what_transformers_reads(name, tmp_path):
    mode, options = FILES[name]
    drawn(mode).save(tmp_path / name, **options)
    compared(tmp_path / name)


def test_cameras_and_animations(tmp_path):
    """All eight ways to hold a camera; of an animation the first picture."""
    for held in range(1, 9):
        exif = Image.Exif()
        exif[ORIENTATION] = held
        drawn("RGB").save(tmp_path / f"{held}.jpg", exif=exif)
        compared(tmp_path / f"{held}.jpg")
    frames = [Image.new("RGB", (40, 23), color) for color in ("red", "blue")]
    frames[0].save(tmp_path / "two.gif", save_all=True, append_images=frames[1:])
    compared(tmp_path / "two.gif")
    assert read_picture(tmp_path / "two.gif")[0, 0].tolist() == [255, 0, 0]


@pytest.mark.parametrize("processor", PROCESSORS)
def test_tiles_are_those_of_transformers(processor, tmp_path):
    """Every class of processors, with its settings as it saves them: of tall, wide, tiny and large pictures, and of lines of pixels."""
    for width, height in SIZES:
        drawn("RGB", (width, height)).save(tmp_path / "picture.png")
        compared(tmp_path / "picture.png", processor)


@pytest.mark.parametrize(
    ("own", "settings"),
    [({}, {}), ({"min_pixels": 28**2, "max_pixels": 56**2}, {"size": {"min_pixels": 28**2, "max_pixels": 56**2}})],
)
def test_settings_that_are_left_out(own, settings):
    """A whole picture is then prepared as Qwen2-VL's processor does by default; older settings have other names for pixels."""
    colors = drawn("RGB", (90, 50))
    layout = {"layout": "grid", "patch": 14, "merge": 2, "temporal": 2}
    tiles = prepared(np.asarray(colors), settings, layout, 0, "<image>").tiles
    assert np.array_equal(tiles, Qwen2VLImageProcessorPil(**own)(colors)["pixel_values"])


@pytest.mark.parametrize("kernel", [BICUBIC, BILINEAR, LANCZOS])
def test_pictures_are_resized_without_pillow_as_with_it(kernel, monkeypatch):
    """To the bit, whether rows or columns come first."""
    for before in ((23, 40), (40, 40), (5, 300), (300, 5), (60, 40), (90, 40), (1, 50), (50, 1)):
        colors = np.asarray(drawn("RGB", before[::-1]))
        for after in ((16, 16), (70, 31), (20, 100), before):
            with_pillow = resized(colors, *after, kernel)
            with monkeypatch.context() as changed:
                changed.setitem(sys.modules, "PIL", None)
                assert np.array_equal(resized(colors, *after, kernel), with_pillow)


def png_of(width, height):
    """A PNG file without pixels that says how many it has."""
    chunks = {b"IHDR": struct.pack(">II5B", width, height, 8, 2, 0, 0, 0), b"IDAT": b""}
    written = [struct.pack(">I", len(c)) + n + c + struct.pack(">I", zlib.crc32(n + c)) for n, c in chunks.items()]
    return b"\x89PNG\r\n\x1a\n" + b"".join(written)


def damaged(path):
    """Write one of the files that are refused."""
    if path.stem == "cut":
        drawn("RGB", (200, 200)).save(path)
        path.write_bytes(path.read_bytes()[:-9000])
    elif path.stem == "empty":
        path.touch()
    elif path.stem == "no_pixels":
        path.write_bytes(png_of(0, 5))
    elif path.stem == "too_large":
        path.write_bytes(png_of(60_000, 60_000))
    elif path.stem == "sixteen":
        Image.fromarray(np.arange(400, dtype=np.uint16).reshape(20, 20)).save(path)
    elif path.stem == "text":
        path.write_text("no picture")
    elif path.stem == "gray":
        np.save(path, np.zeros((4, 4), dtype=np.uint8))
    return path


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("cut.jpg", "cut.jpg is no picture that can be read: (?i:.*truncated)"),
        ("cut.png", "cut.png is no picture that can be read"),
        ("empty.png", "empty.png is no picture that can be read"),
        ("no_pixels.png", "no_pixels.png is no picture that can be read"),
        ("too_large.png", "too_large.png is no picture that can be read: .*exceeds limit"),
        ("sixteen.png", r"sixteen.png has gray levels of more than 8 bits .* accepted are 8 bits"),
        ("text.jpg", "text.jpg is no picture that can be read: cannot identify"),
        ("missing.jpg", "missing.jpg is no picture that can be read: .*No such file"),
        ("gray.npy", r"gray.npy is a picture of the shape \(4, 4\) and the type uint8"),
    ],
)
def test_files_that_are_refused(name, told, tmp_path):
    with pytest.raises(InputError, match=told):
        read_picture(damaged(tmp_path / name))


def test_arrays_in_files(tmp_path):
    """Whatever the case of their names."""
    colors = np.asarray(drawn("RGB"))
    with (tmp_path / "colors.NPY").open("wb") as file:
        np.save(file, colors)
    assert np.array_equal(read_picture(tmp_path / "colors.NPY"), colors)


def test_pictures_that_are_refused(tmp_path):
    """A Pillow image that is read late, lists that are no array, and a line of pixels that would become a large square."""
    with pytest.raises(InputError, match="what was given is no picture"):
        read_picture([[1], [1, 2]])
    path = damaged(tmp_path / "cut.jpg")
    with Image.open(path) as opened, pytest.raises(InputError, match="what was given is no picture (?i:.*truncated)"):
        read_picture(opened)
    assert pixels.MOST_PIXELS == 2 * Image.MAX_IMAGE_PIXELS  # where Pillow begins to refuse
    line = np.zeros((MOST_PIXELS // 10_000, 1, 3), dtype=np.uint8)
    with pytest.raises(InputError, match="is resized to .* Cut off a part of its longer side"):
        prepared(line, {"size": {"shortest_edge": 224}}, {"layout": "square"}, 224, "<image>")
