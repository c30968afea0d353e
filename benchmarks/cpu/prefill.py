"""What becomes of FLOPs that image tokens save when they leave inside a decoder: prefill, dense against pruned, in ONNX Runtime.

    python -m benchmarks.cpu.prefill [--shapes smolvlm-256m qwen2-0.5b] [--rounds 15]      # writes records/prefill.json

Weights are random and the vocabulary is small: the time depends on sizes and on how many tokens stay, and not on which ones. Stages are
those of Balanced Token Pruning for LLaVA-1.5-7B, at the same share of the depth. PyTorch runs transformers' own model with SDPA. The three
take turns; each time is that of a run after an untimed one.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from adtp_export.contract import CU_SEQLENS, IMAGE, INPUTS_EMBEDS, KEY, PRESENT, VALUE, cached
from adtp_export.graph import program
from adtp_export.graph.decoder import export_prefill
from adtp_export.model import registry
from adtp_export.model.decoder import Decoder
from adtp_export.model.flops import Shape, encoder_flops
from adtp_export.model.image_pruners import PRESETS, SeenImage, read_stages
from adtp_export.runtimes.onnxruntime import OnnxRuntimeEngine, operators_obstacle
from benchmarks.harness.records import RECORDS, claim, told, write

TEXT = 80
"""Tokens of text, half of them before the image."""
SHAPES: dict[str, tuple[str, int, dict[str, int]]] = {
    "smolvlm-256m": ("llama", 1024, {
        "hidden_size": 576, "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3, "intermediate_size": 1536}),
    "qwen2-0.5b": ("qwen2", 576, {
        "hidden_size": 896, "num_hidden_layers": 24, "num_attention_heads": 14, "num_key_value_heads": 2, "intermediate_size": 4864}),
    "tiny": ("llama", 64, {
        "hidden_size": 32, "num_hidden_layers": 8, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 64}),
}  # fmt: skip
"""Family, image tokens, and sizes."""
PUBLISHED_LAYERS = 32
DENSE, PRUNED, PYTORCH = "dense", "pruned", "transformers"


def make(shape: str, pruned: bool) -> Decoder:
    kind, image_tokens, sizes = SHAPES[shape]
    config = CONFIG_MAPPING[kind](vocab_size=4096, max_position_embeddings=4096, **sizes)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval().requires_grad_(False)
    layers = sizes["num_hidden_layers"]
    stages = [{**stage, "layer": max(1, round(stage["layer"] * layers / PUBLISHED_LAYERS))} for stage in PRESETS["btp"]]
    if shape == "tiny":
        stages[0]["spatial"] = 0
    return Decoder(
        directory=Path(),
        raw_config={},
        model=model,
        backbone=registry.backbone(kind)(model),
        stages=read_stages({"method": "btp", "stages": stages}, layers, image_tokens) if pruned else (),
        image_token=0,
        image_tokens=image_tokens,
    )


def flops(decoder: Decoder) -> float:
    """Count those of one prompt's prefill."""
    count, alive = decoder.image_tokens, [np.array([TEXT + decoder.image_tokens])]
    for stage in decoder.stages:
        count = stage.left(count, decoder.image_tokens)
        alive.append(np.array([TEXT + count]))
    sites = [f"{stage.layer}.attention" for stage in decoder.stages]
    return encoder_flops(Shape.of(registry.fields(decoder.backbone.config)), alive, sites)


class Choices(torch.nn.Module):
    """All stages' choices on ``asked (1, n)`` and ``states (1, n, H)``, without the decoder: a profiler would slow loops down."""

    def __init__(self, decoder: Decoder) -> None:
        super().__init__()
        self.stages, self.spread = decoder.stages, decoder.spread

    def forward(self, asked: torch.Tensor, states: torch.Tensor) -> list[torch.Tensor]:
        at_input = count = asked.shape[1]
        found = []
        for stage in self.stages:
            live, counts = torch.ones(1, count, dtype=torch.bool), torch.tensor([count])
            seen = SeenImage(
                asked[:, :count], states[:, :count], live, counts, torch.tensor([at_input]), self.spread[:count]
            )
            found.append(stage.copies(seen))
            count = stage.left(count, at_input)
        return found


def choices(decoder: Decoder, states: np.ndarray, path: Path) -> Callable[[], Any]:
    """Return what runs all choices of one prompt in ONNX Runtime."""
    feed = {"asked": states[None, :, 0].copy(), "states": states[None]}
    example = tuple(map(torch.from_numpy, feed.values()))
    names = [f"copies.{stage.layer}" for stage in decoder.stages]
    traced = program.trace_network(lambda: Choices(decoder), example, None, list(feed), names)
    traced.optimize()
    program.save(traced.model, path)
    engine = OnnxRuntimeEngine(path, stop_spinning=True)
    return lambda: engine.run(feed)


def timed(run: Callable[[], Any]) -> float:
    run()
    began = time.perf_counter()
    run()
    return time.perf_counter() - began


def measure(shape: str, rounds: int, folder: Path) -> dict[str, Any]:
    decoders = {DENSE: make(shape, False), PRUNED: make(shape, True)}
    plugin = operators_obstacle() is None
    n = TEXT + decoders[DENSE].image_tokens
    image = np.zeros(n, dtype=bool)
    image[TEXT // 2 : n - TEXT // 2] = True
    states = np.random.default_rng(0).standard_normal((n, decoders[DENSE].hidden_size)).astype(np.float32)
    feed = {INPUTS_EMBEDS: states, CU_SEQLENS: np.array([0, n], dtype=np.int32), IMAGE: image}
    runs: dict[str, Callable[[], Any]] = {}
    for name, decoder in decoders.items():
        program.save(export_prefill(decoder, {"version": "bench"}), folder / f"{name}.onnx")
        engine = OnnxRuntimeEngine(folder / f"{name}.onnx", plugin=plugin, stop_spinning=True)
        runs[name] = lambda engine=engine: engine.run(feed)
    model, batch = decoders[DENSE].model, torch.from_numpy(states)[None]
    with torch.inference_mode():
        runs[PYTORCH] = lambda: model(inputs_embeds=batch, use_cache=True, logits_to_keep=1)
        times = {name: [] for name in runs}
        for _ in range(rounds):
            for name, run in runs.items():
                times[name].append(timed(run))
    medians = {name: float(np.median(each)) for name, each in times.items()}
    counted = {name: flops(decoder) for name, decoder in decoders.items()}
    ratio = counted[DENSE] / counted[PRUNED]
    speedup = float(np.median(np.array(times[DENSE]) / np.array(times[PRUNED])))
    choosing = choices(decoders[PRUNED], states[image], folder / "choices.onnx")
    caches = {
        name: sum(
            found[cached(PRESENT, i, what)].nbytes
            for i in range(decoders[DENSE].backbone.num_layers)
            for what in (KEY, VALUE)
        )
        for name in decoders
        for found in [runs[name]()]
    }
    return {
        "shape": shape,
        "plugin": plugin,
        "rounds_s": times,
        "median_s": medians,
        "flops": counted,
        "speedup": speedup,
        "realized_fraction": speedup / ratio,
        "over_transformers": medians[PYTORCH] / medians[PRUNED],
        "choice_share": float(np.median([timed(choosing) for _ in range(rounds)])) / medians[PRUNED],
        "cache_bytes": caches,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=["smolvlm-256m", "qwen2-0.5b"])
    parser.add_argument("--rounds", metavar="N", type=int, default=15)
    parser.add_argument("--out", metavar="FILE", type=Path, default=RECORDS / "prefill.json")
    options = parser.parse_args()
    claim(options.out)
    rows = []
    for shape in options.shapes:
        with tempfile.TemporaryDirectory() as temporary:
            rows.append(measure(shape, options.rounds, Path(temporary)))
            print({name: value for name, value in rows[-1].items() if name != "rounds_s"})
    write(options.out, {"text_tokens": TEXT, "results": rows, **told()})


if __name__ == "__main__":
    main()
