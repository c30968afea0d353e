"""Write the fastest tiles of a record of `benchmarks/gpu/run.sh probes` into `plugins/encoder/tiles.py`, where plans look for them:

    python -m benchmarks.gpu.tiles benchmarks/records/gpu-NAME-probes.json

Files of `adtp-export --cuda` get them with the next export.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from adtp_export.errors import AdtpError, InputError
from adtp_export.plugins.encoder import tiles
from benchmarks.gpu import schemas
from benchmarks.gpu.probes import WIDTHS, shapes

KINDS = {"qkv": "none", "output": "parts", "inner": "gelu", "ffn_output": "parts"}
"""The kind of each product in a plan."""

MOST_ERROR = 8
"""A way whose error is so many times the smallest one is wrong, however fast."""

Table = dict[tuple[str, str, int, int], dict[int, tuple[str, int]]]


def fastest(record: schemas.Probes) -> Table:
    """Return the table: by type, kind, N and K, for so many rows, a variant and its parts.

    Raises:
        InputError: the record has no products, or a shape that `probes` does not time.
    """
    found: Table = {}
    for product in record.products:
        if product.shape not in WIDTHS:
            raise InputError(f"got products of {product.shape}; accepted: {', '.join(WIDTHS)}, of a run on a GPU")
        kind = KINDS[product.product]
        least = min(way.error for way in product.ours)
        right = [way for way in product.ours if way.error <= MOST_ERROR * least]
        ways = {
            _kind(way): way for way in sorted(right, key=lambda way: way.us, reverse=True)
        }  # the fastest comes last
        if kind not in ways:
            continue
        chosen = {kind: (ways[kind].variant, ways[kind].parts)}
        if kind == "parts" and "none" in ways and ways["none"].us < ways[kind].us:  # a plan then takes the whole sum
            chosen = {kind: (ways[kind].variant, 1), "none": (ways["none"].variant, 1)}
        for name, way in chosen.items():
            n, k = shapes(*WIDTHS[product.shape])[product.product]
            found.setdefault((record.dtype, name, n, k), {})[product.rows] = way
    if not found:
        raise InputError("got a record without products; accepted: one of benchmarks/gpu/run.sh probes on a GPU")
    return found


def _kind(way: schemas.Way) -> str:
    return way.variant.rpartition("-")[2]


def written(table: Table, processors: int, gpu: str) -> str:
    """Return the module's text, as ruff formats it."""
    lines = [
        f'"""Tiles and splits of products that were the fastest on a GPU: {gpu}.',
        "",
        "`python -m benchmarks.gpu.tiles RECORD` writes this file, from a record of `benchmarks/gpu/run.sh probes`.",
        '"""',
        "",
        f"PROCESSORS = {processors}",
        '"""Of that GPU."""',
        "",
        "FASTEST: dict[tuple[str, str, int, int], dict[int, tuple[str, int]]] = {",
    ]
    for (dtype, kind, n, k), rows in sorted(table.items()):
        lines.append(f'    ("{dtype}", "{kind}", {n}, {k}): {{')
        lines += [f'        {count}: ("{name}", {parts}),' for count, (name, parts) in sorted(rows.items())]
        lines.append("    },")
    return "\n".join(
        [*lines, "}", '"""By type, kind, N and K: for so many rows the name of a variant, and parts of its sum."""', ""]
    )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("record", type=Path, metavar="RECORD")
    path = parser.parse_args(arguments).record
    try:
        if schemas.kind_of(path) is not schemas.Probes:
            raise InputError("got another file; accepted: gpu-NAME-probes.json")
        (record,) = schemas.read(path)
        assert isinstance(record, schemas.Probes)
        text = written(fastest(record), record.products[0].processors, record.device["name"])
    except (AdtpError, OSError, ValueError) as error:
        parser.error(f"{path}: {error}")
    Path(tiles.__file__).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
