"""Ragged attention as one operator: a torch custom op with its reference, and the ONNX function of the same name."""
