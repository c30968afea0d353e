"""Packed student to ONNX: the exporter call, and graph passes, one per file."""
