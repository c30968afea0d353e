"""From a record of the probes to the table of tiles, and from that to plans."""

import json
import runpy

import pytest

from adtp_export.plugins.encoder import grids, tiles
from adtp_export.plugins.encoder.variants import ALL
from benchmarks.gpu import tiles as command

NAME = "product-fp16-{}"


def way(name, us, parts=1, error=0.01):
    return {"variant": NAME.format(name), "parts": parts, "us": us, "error": error}


def product(name, rows, *ours):
    return {
        "shape": "bert-base",
        "product": name,
        "rows": rows,
        "processors": 132,
        "torch_us": 3.0,
        "ours": list(ours),
    }


PRODUCTS = [
    product("qkv", 128, way("32x64-none", 5.0), way("64x64-none", 4.0), way("32x64-parts", 1.0)),
    product("qkv", 2048, way("64x64-none", 30.0), way("128x128-none", 29.0), way("32x64-none", 1.0, error=0.9)),
    product("inner", 128, way("64x64-gelu", 6.0), way("32x64-gelu", 5.5)),
    product("ffn_output", 128, way("64x64-none", 9.0), way("32x64-parts", 6.0, 4), way("32x64-parts", 7.0, 8)),
    product("output", 2048, way("128x128-none", 8.0), way("64x64-parts", 9.0, 2)),
]


@pytest.fixture
def record(tmp_path):
    """A function that writes a record of products, and says where it is."""

    def write(products, name="gpu-nvidia-h100-probes.json"):
        told = {"command": "probes", "commit": None, "device": {"name": "NVIDIA H100"}, "versions": {}, "dtype": "fp16"}
        path = tmp_path / name
        path.write_text(json.dumps({**told, "launches": None, "products": products, "profiles": [], "failures": {}}))
        return path

    return write


@pytest.fixture
def measured(record, tmp_path, monkeypatch):
    """The table that the command writes, in force."""
    monkeypatch.setattr(tiles, "__file__", str(tmp_path / "tiles.py"))
    command.main([str(record(PRODUCTS))])
    found = runpy.run_path(str(tmp_path / "tiles.py"))
    monkeypatch.setattr(tiles, "FASTEST", found["FASTEST"])
    monkeypatch.setattr(tiles, "PROCESSORS", found["PROCESSORS"])


@pytest.mark.parametrize(
    ("kind", "shape", "processors", "expected"),
    [
        ("none", (100, 2304, 768), 132, ("64x64-none", 1, 72)),
        ("none", (129, 2304, 768), 66, ("128x128-none", 1, 36)),
        ("none", (9000, 2304, 768), 264, ("128x128-none", 1, 1056)),
        ("gelu", (128, 3072, 768), 132, ("32x64-gelu", 1, 192)),
        ("parts", (128, 768, 3072), 132, ("32x64-parts", 4, 192)),
        ("parts", (512, 768, 768), 132, ("64x64-parts", 1, 96)),
        ("none", (512, 768, 768), 132, ("128x128-none", 1, 24)),
    ],
    ids=["next rows above", "and above", "more rows", "GELU", "parts", "a whole sum is faster", "and has its tile"],
)
@pytest.mark.usefixtures("measured")
def test_plans_take_what_was_the_fastest(kind, shape, processors, expected):
    found = grids.of_product("fp16", kind, shape, shape[0], processors)
    assert (found.variant.name.removeprefix(NAME.format("")), found.parts, found.programs) == expected


@pytest.mark.parametrize(
    ("dtype", "shape", "processors"),
    [("bf16", (128, 2304, 768), 132), ("fp16", (128, 1152, 384), 132), ("fp16", (128, 2304, 768), 65)],
    ids=["another type", "another width", "a smaller GPU"],
)
def test_elsewhere_the_rules_hold(request, dtype, shape, processors):
    expected = grids.of_product(dtype, "none", shape, shape[0], processors)
    request.getfixturevalue("measured")
    assert grids.of_product(dtype, "none", shape, shape[0], processors) == expected


def test_the_committed_table_names_variants_that_there_are():
    names = {variant.name for variant in ALL}
    assert all(name in names for rows in tiles.FASTEST.values() for name, _ in rows.values())


@pytest.mark.parametrize(
    ("products", "name", "message"),
    [
        ([], "gpu-x-probes.json", "got a record without products; accepted: one of benchmarks/gpu/run.sh probes"),
        (
            [product("qkv", 5, way("32x64-none", 1.0)) | {"shape": "dry"}],
            "gpu-x-probes.json",
            "got products of dry; accepted: minilm, bert-base",
        ),
        ([{}], "gpu-x-probes.json", "missing required field"),
        (PRODUCTS, "gpu-x-device.json", "got another file; accepted: gpu-NAME-probes.json"),
    ],
)
def test_other_records_are_refused_and_nothing_is_written(
    record, tmp_path, monkeypatch, capsys, products, name, message
):
    monkeypatch.setattr(tiles, "__file__", str(tmp_path / "tiles.py"))
    with pytest.raises(SystemExit):
        command.main([str(record(products, name))])
    assert message in capsys.readouterr().err
    assert not (tmp_path / "tiles.py").exists()
