"""Encoders, one per file: where a family of transformers keeps its projections, and what surrounds them."""
