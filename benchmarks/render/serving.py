"""Render the records of `benchmarks/serving` and `benchmarks/ray`."""

from __future__ import annotations

from typing import Any

from benchmarks.render.tables import place, table


def render_triton(record: dict[str, Any]) -> str:
    """Return what a server adds to `load`: rates, latencies, and what became of all requests."""
    versions = record["versions"]
    rows = {
        f"requests, from {record['clients']} clients": f"{record['requests']:,}",
        "missing answers, other answers than `load`'s": f"{record['missing']}, {record['differing']}",
        "texts a second": f"{record['texts_per_second']:,.0f}",
        "as a share of `load` in batches of that size": f"{record['throughput_of_load']:.2f}",
        "as a share of `load` in batches of 32 texts": f"{record['throughput_of_load_of_32']:.2f}",
        "texts in a batch, mean": f"{record['texts_per_execution']:.1f}",
        "p50, p99 of a request": f"{record['p50_ms']:.0f} ms, {record['p99_ms']:.0f} ms",
    }
    return (
        f"{table(('', ''), rows.items())}\n\n{place(record)}, which clients and server share. "
        f"Server of Triton {versions['tritonserver']}, {record['target']}."
    )


def render_distributed(record: dict[str, Any]) -> str:
    """Return how fast two workers are, and what became of rows whose workers were killed."""
    speed, killed = record["throughput"], record["kill"]
    rounds, rates = speed["ray_of_process_rounds"], speed["texts_per_s"]
    rows = {
        "two workers, texts/s": f"{rates['ray']:,.0f}",
        "one process with two threads, texts/s": f"{rates['process']:,.0f}",
        f"their ratio, median and range of {len(rounds)} rounds": f"{speed['ray_of_process']:.2f} ({min(rounds):.2f} to {max(rounds):.2f})",
        f"the same with Ray's start, {speed['rows']:,} texts": f"{rates['ray_with_start'] / rates['process_with_start']:.2f}",
        "rows while workers were killed": f"{killed['rows']:,}",
        "workers killed": f"{killed['workers_killed']}",
        "rows lost, rows doubled": f"{killed['numbers_lost']:,}, {killed['numbers_doubled']:,}",
        f"answers that differ, of {killed['answers_compared']:,} compared": f"{killed['other_answers']:,}",
        "seconds of a second run, which finds all parts": f"{killed['seconds_of_a_second_run']:.0f}",
    }
    return (
        f"{table(('', ''), rows.items())}\n\n{speed['model']}, sentences of SST-2; for the killed workers {killed['model']}, "
        f"{killed['words_of_a_text']} words a text. {place(speed)}, Ray {speed['versions']['ray']}."
    )


def render_rag(record: dict[str, Any]) -> str:
    """Return, of each client and model, the smallest cosine to `load` over short and over long texts."""
    models, kinds = list(dict.fromkeys(row["model"] for row in record["results"])), list(record["texts"])
    rows = {(row["client"], row["model"]): row for row in record["results"]}
    lines = []
    for client in dict.fromkeys(row["client"] for row in record["results"]):
        version = ", ".join(f"{name} {number}" for name, number in rows[client, models[0]]["versions"].items())
        lines.append([client, version, *(f"{rows[client, model][kind]:.4f}" for model in models for kind in kinds)])
    heads = ["client", "version", *(f"{model}, {kind} texts" for model in models for kind in kinds)]
    counts = " and ".join(f"{count} {kind}" for kind, count in record["texts"].items())
    told = f"The smallest cosine to `load`, over {counts} texts. Long ones are more than the model reads."
    return f"{table(heads, lines, texts=2)}\n\n{told} ONNX Runtime {record['versions']['onnxruntime']}."
