"""Packed student to ONNX: the exporter call, graph passes (one per file), and the output directory."""
