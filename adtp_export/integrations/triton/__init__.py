"""Exports for inference servers: what these need beside an output directory, written once it is complete."""
