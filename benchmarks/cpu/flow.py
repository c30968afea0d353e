"""Attention flow of prompts: what the exact flow takes, and what is off where the graph is made smaller, as FlowPrune does.

    python -m benchmarks.cpu.flow [--tokens 100,300,1000] [--layers 12,30] [--sources 60] [--student WORK]
                                                                         # writes records/flow.json

The model has Qwen3's shape and random weights; its queries and keys are scaled so that attention is sharp, as in trained models. Time is
for each token whose flow is computed; tokens are drawn, and the last one, which answers, is among them. With --student, a trained
classifier of `benchmarks.students.masking` reads test texts, too.

FlowPrune (Xu et al., NeurIPS 2025) makes the graph smaller in two ways. It leaves out edges below a threshold. And it merges stretches of
layers into one, as `explain.merged_layers` does.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy.sparse import csr_array
from scipy.sparse.csgraph import maximum_flow

from adtp_export.data.tokenize import encode
from adtp_export.explain.flow import LARGEST as LIMIT
from adtp_export.explain.flow import flows, unit
from adtp_export.explain.merged_layers import FEWEST, merge
from adtp_export.explain.prompt import attended
from adtp_export.imports import open_checkpoint
from adtp_export.model.decoder import Decoder, load_decoder
from benchmarks.harness.records import RECORDS, claim, told, write

SEED, VOCABULARY, SCALE, LARGEST = 0, 1000, 2.0, 10
SHAPE = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}
THRESHOLDS, SHARES = (1e-6, 1e-4, 1e-2), (0.75, 0.5, 0.25)
STUDENT, PROMPTS, MAX_TOKENS = "pruner-integrated-gradients-0", 50, 96
AT_ONCE, MOST_EDGES = 2, 20_000_000
"""Tokens of which the flow is also solved on the whole graph at once, and the most edges of such a graph."""


def sharp(layers: int, tokens: int, folder: Path) -> Decoder:
    """Make a model; logits of attention have a standard deviation of about the square of `SCALE`."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(SEED)
    lengths = {"num_hidden_layers": layers, "max_position_embeddings": tokens, "vocab_size": VOCABULARY}
    model = Qwen3ForCausalLM(Qwen3Config(**SHAPE, **lengths))
    for layer in model.model.layers:
        for norm in (layer.self_attn.q_norm, layer.self_attn.k_norm):
            norm.weight.data.fill_(SCALE)
    model.save_pretrained(folder)
    return load_decoder(folder)


def compressed(layers: Sequence[np.ndarray], share: float) -> list[np.ndarray]:
    return merge(layers, max(FEWEST, round(share * len(layers))))


def without_small(layers: Sequence[np.ndarray], threshold: float) -> list[np.ndarray]:
    return [np.where(layer < threshold, 0.0, layer) for layer in layers]


def at_once(layers: Sequence[np.ndarray], sources: Sequence[int]) -> tuple[float | None, np.ndarray | None]:
    """Return seconds for each source, and flows to the last token, with all edges in one graph; None where there are too many."""
    tokens = len(layers[0])
    edges = [np.nonzero(np.rint(layer / unit(1))) for layer in layers]
    if sum(len(to) for to, _ in edges) > MOST_EDGES:
        return None, None
    begins = np.concatenate([level * tokens + origin for level, (_, origin) in enumerate(edges)])
    targets = np.concatenate([(level + 1) * tokens + to for level, (to, _) in enumerate(edges)])
    sizes = np.concatenate([np.rint(layer[places] / unit(1)) for layer, places in zip(layers, edges)])
    shape = (tokens * (len(layers) + 1),) * 2
    graph = csr_array((sizes.astype(np.int32), (begins.astype(np.int32), targets.astype(np.int32))), shape=shape)
    began = time.perf_counter()
    found = [min(maximum_flow(graph, source, shape[0] - 1).flow_value, LIMIT) for source in sources]
    return (time.perf_counter() - began) / len(sources), np.array(found) * unit(1)


def solved(layers: Sequence[np.ndarray], sources: Sequence[int]) -> tuple[float, np.ndarray]:
    """Return seconds for each source, and flows to the last token."""
    tokens, began = len(layers[0]), time.perf_counter()
    found = flows(layers, np.full(tokens, len(layers)), sources, [tokens - 1])
    return (time.perf_counter() - began) / len(sources), found


def compare(found: np.ndarray, exact: np.ndarray) -> dict[str, float]:
    """Return errors against the exact flow, and how many of the ten largest tokens agree."""
    apart, some = np.abs(found - exact), exact > 0
    ten = [set(np.argsort(-flow, kind="stable")[:LARGEST].tolist()) for flow in (found, exact)]
    return {
        "absolute": float(apart.mean()),
        "most": float(apart.max()),
        "relative": float((apart[some] / exact[some]).mean()),
        "agree": len(ten[0] & ten[1]),
    }


def measure(layers: Sequence[np.ndarray], attending: float, drawn: Sequence[int]) -> list[dict[str, Any]]:
    """Return a row for the exact flow from drawn tokens of one prompt, and one for each smaller graph."""
    rows: list[dict[str, Any]] = []
    exact = np.zeros(0)
    ways: list[tuple[str, float]] = [
        ("exact", 0.0),
        *(("edges", t) for t in THRESHOLDS),
        *(("layers", s) for s in SHARES),
    ]
    for how, much in ways:
        began = time.perf_counter()
        graph = layers if how == "exact" else (without_small if how == "edges" else compressed)(layers, much)
        if how == "layers" and rows[-1]["how"] == how and rows[-1]["left"] == len(graph):
            continue  # three layers are the fewest, whatever the share
        preparing = attending if how == "exact" else time.perf_counter() - began
        seconds, found = solved(graph, drawn)
        exact = found if how == "exact" else exact
        whole, same = at_once(graph, drawn[:AT_ONCE])
        assert same is None or np.array_equal(same, found[:AT_ONCE])
        row = {"how": how, "much": much, "tokens": len(layers[0]), "layers": len(layers), "left": len(graph)}
        edges = sum(int(np.count_nonzero(layer)) for layer in graph)
        times = {"prepare_s": preparing, "token_s": seconds, "once_s": whole}
        rows.append({**row, "edges": edges, **times, **compare(found, exact)})
    return rows


def of_random(decoder: Decoder, tokens: int, sources: int) -> list[dict[str, Any]]:
    random = np.random.default_rng(SEED)
    ids = random.integers(0, VOCABULARY, tokens).tolist()
    drawn = [*random.choice(tokens - 1, min(sources, tokens) - 1, replace=False).tolist(), tokens - 1]
    began = time.perf_counter()
    layers = attended(decoder.backbone, ids)
    return measure(layers, time.perf_counter() - began, drawn)


def of_student(work: Path) -> list[dict[str, Any]]:
    """Return rows as `measure` does, means over prompts, of a trained student and all tokens of each prompt."""
    opened = open_checkpoint(work / STUDENT)
    lines = (work / "test.tsv").read_text(encoding="utf-8").splitlines()[1 : PROMPTS + 1]
    texts = []
    for row in encode(opened.tokenizer, [line.split("\t")[0] for line in lines], MAX_TOKENS):
        began = time.perf_counter()
        layers = attended(opened.student.backbone, row.input_ids)
        texts.append(measure(layers, time.perf_counter() - began, range(len(row.input_ids))))
    return [
        {
            name: value if isinstance(value, str) else float(np.mean([row[name] for row in rows]))
            for name, value in rows[0].items()
        }
        for rows in zip(*texts)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", metavar="N,...", default="100,300,1000")
    parser.add_argument("--layers", metavar="N,...", default="12,30")
    parser.add_argument("--sources", metavar="N", type=int, default=60)
    parser.add_argument(
        "--student", metavar="WORK", type=Path, help="where benchmarks.students.masking trained its students"
    )
    parser.add_argument("--out", metavar="FILE", type=Path, default=RECORDS / "flow.json")
    options = parser.parse_args()
    claim(options.out)
    lengths, rows = [int(tokens) for tokens in options.tokens.split(",")], []
    for layers in map(int, options.layers.split(",")):
        with tempfile.TemporaryDirectory() as folder:
            decoder = sharp(layers, max(lengths), Path(folder))
            for tokens in lengths:
                found = of_random(decoder, tokens, options.sources)
                print(*found, sep="\n", flush=True)
                rows += found
    record: dict[str, Any] = {"sources": options.sources, "scale": SCALE, "results": rows}
    if options.student is not None:
        record |= {"prompts": PROMPTS, "student": of_student(options.student)}
    write(options.out, {**record, **told()})


if __name__ == "__main__":
    main()
