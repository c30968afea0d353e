"""Tiles and splits of products that were the fastest on a GPU. No GPU has been asked yet.

`python -m benchmarks.gpu.tiles RECORD` writes this file, from a record of `benchmarks/gpu/run.sh probes`.
"""

PROCESSORS = 0
"""Of that GPU."""

FASTEST: dict[tuple[str, str, int, int], dict[int, tuple[str, int]]] = {}
"""By type, kind, N and K: for so many rows the name of a variant, and parts of its sum."""
