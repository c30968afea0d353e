"""Render the records of `triton_throughput.py` and of `distributed.py`."""

from __future__ import annotations

from typing import Any


def render_triton(record: dict[str, Any]) -> str:
    """Return what a server adds to `load`: rates, latencies, and what became of all requests."""
    device, versions = record["device"], record["versions"]
    lines = [
        "| | |",
        "| --- | ---: |",
        f"| requests, from {record['clients']} clients | {record['requests']:,} |",
        f"| missing answers, other answers than `load`'s | {record['missing']}, {record['differing']} |",
        f"| texts a second | {record['texts_per_second']:,.0f} |",
        f"| as a share of `load` in batches of that size | {record['throughput_of_load']:.2f} |",
        f"| as a share of `load` in batches of 32 texts | {record['throughput_of_load_of_32']:.2f} |",
        f"| texts in a batch, mean | {record['texts_per_execution']:.1f} |",
        f"| p50, p99 of a request | {record['p50_ms']:.0f} ms, {record['p99_ms']:.0f} ms |",
        "",
        f"{device['model']}, {device['cores']} cores, which clients and server share. Server of Triton {versions['tritonserver']}, "
        f"{record['target']}.",
    ]
    return "\n".join(lines)


def render_distributed(record: dict[str, Any]) -> str:
    """Return how fast two workers are, and what became of rows whose workers were killed."""
    speed, killed = record["throughput"], record["kill"]
    rounds, device = speed["ray_of_process_rounds"], speed["device"]
    lines = [
        "| | |",
        "| --- | ---: |",
        f"| two workers, texts/s | {speed['texts_per_s']['ray']:,.0f} |",
        f"| one process with two threads, texts/s | {speed['texts_per_s']['process']:,.0f} |",
        f"| their ratio, median and range of {len(rounds)} rounds | "
        f"{speed['ray_of_process']:.2f} ({min(rounds):.2f} to {max(rounds):.2f}) |",
        f"| the same with Ray's start, {speed['rows']:,} texts | "
        f"{speed['texts_per_s']['ray_with_start'] / speed['texts_per_s']['process_with_start']:.2f} |",
        f"| rows while workers were killed | {killed['rows']:,} |",
        f"| workers killed | {killed['workers_killed']} |",
        f"| rows lost, rows doubled | {killed['numbers_lost']:,}, {killed['numbers_doubled']:,} |",
        f"| answers that differ, of {killed['answers_compared']:,} compared | {killed['other_answers']:,} |",
        f"| seconds of a second run, which finds all parts | {killed['seconds_of_a_second_run']:.0f} |",
        "",
        f"{speed['model']}, sentences of SST-2; for the killed workers {killed['model']}, {killed['words_of_a_text']} words a text. "
        f"{device['model']}, {device['cores']} cores, Ray {speed['versions']['ray']}.",
    ]
    return "\n".join(lines)
