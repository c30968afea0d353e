"""INT8 and FP8: ranges from real text, quantize/dequantize pairs in the graph, and what each of them costs."""
