"""Latency: workloads, FLOPs, dense baselines, interleaved timing, and the realized fraction."""
