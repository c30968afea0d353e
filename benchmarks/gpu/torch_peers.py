"""Dense BERT in PyTorch as people run it on a GPU: padded and packed, in eager mode, compiled, and as CUDA graphs.

Where there is no GPU, as in a dry run, it runs on the CPU: there attention of packed texts is a loop, and nothing is captured.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

Batch = Mapping[str, np.ndarray]

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LENGTH_STEP = 16
"""Lengths of padded texts, where each shape costs a capture, are rounded up to multiples of it."""

STEPS_PER_OCTAVE, LEAST_STEP = 8, 64
"""The same of tokens of packed texts: so many steps between powers of two, none smaller than so many tokens."""

WARM_UPS = 3


def rounded(tokens: int) -> int:
    """Return the tokens that a captured call of packed texts has room for."""
    step = max(LEAST_STEP, 2 ** (tokens - 1).bit_length() // 2 // STEPS_PER_OCTAVE)
    return -(-tokens // step) * step


class Staging:
    """Gets integers to the device by one copy from pinned memory, to the same place each time."""

    def __init__(self, most: int = 2**20) -> None:
        self._pinned = torch.empty(most, dtype=torch.int64, pin_memory=DEVICE == "cuda")
        self._there = torch.empty(most, dtype=torch.int64, device=DEVICE)

    def __call__(self, arrays: Sequence[np.ndarray]) -> list[Tensor]:
        """Return arrays on the device, each with its shape."""
        sizes = [array.size for array in arrays]
        np.concatenate([array.ravel() for array in arrays], out=self._pinned[: sum(sizes)].numpy(), casting="same_kind")
        self._there[: sum(sizes)].copy_(self._pinned[: sum(sizes)], non_blocking=True)
        parts = self._there[: sum(sizes)].split(sizes)
        return [part.view(array.shape) for part, array in zip(parts, arrays)]


class Captured:
    """Runs a function as CUDA graphs, one for each key; tensors of a key have the same addresses each time."""

    def __init__(self, function: Callable[..., Tensor]) -> None:
        self._function = function
        self._graphs: dict[tuple[int, ...], tuple[Any, Tensor]] = {}

    def __call__(self, key: tuple[int, ...], *arguments: Any) -> Tensor:
        if DEVICE == "cpu":
            return self._function(*arguments)
        if key not in self._graphs:
            self._graphs[key] = self._capture(arguments)
        graph, out = self._graphs[key]
        graph.replay()
        return out

    def _capture(self, arguments: Sequence[Any]) -> tuple[Any, Tensor]:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(WARM_UPS):
                self._function(*arguments)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = self._function(*arguments)
        return graph, out


class Padded:
    """transformers' own BERT with PyTorch's scaled_dot_product_attention, on padded texts.

    Args:
        bert: in fp32; it is copied.
        compiled: by ``torch.compile(mode="reduce-overhead")``, for any shape.
    """

    inputs: tuple[str, ...] = ("input_ids", "attention_mask", "token_type_ids")
    outputs: tuple[str, ...] = ("logits",)

    def __init__(self, bert: Any, precision: str, compiled: bool = False) -> None:
        model = copy.deepcopy(bert).to(DEVICE, DTYPES[precision]).eval()
        model.set_attn_implementation("sdpa")
        self._staged, self._step = Staging(), LENGTH_STEP if compiled else 1
        self._model = compile_for_speed(model) if compiled else model

    def run(self, batch: Batch, wanted: Sequence[str] | None = None) -> dict[str, np.ndarray]:
        missing = -batch["input_ids"].shape[1] % self._step
        given = [np.pad(batch[name], ((0, 0), (0, missing))) for name in self.inputs]
        with torch.inference_mode():
            ids, mask, types = self._staged(given)
            logits = self._model(input_ids=ids, attention_mask=mask, token_type_ids=types).logits
            return {"logits": logits.float().cpu().numpy()}


def compile_for_speed(model: nn.Module) -> Any:
    """Return a model as ``torch.compile`` makes it for least time; without a GPU nothing is compiled, only traced."""
    how: dict[str, Any] = {"mode": "reduce-overhead"} if DEVICE == "cuda" else {"backend": "eager"}
    compiled = torch.compile(model, dynamic=True, **how)

    def call(*arguments: Any, **named: Any) -> Any:
        torch.compiler.cudagraph_mark_step_begin()
        return compiled(*arguments, **named)

    return call


class PackedBert(nn.Module):
    """transformers' BERT on tokens of texts one after the other: one product for Q, K and V, and variable-length flash attention.

    The last layer works for all tokens, as in every library that has such a BERT.
    """

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.embeddings, self.layers = model.bert.embeddings, model.bert.encoder.layer
        self.pooler, self.classifier = model.bert.pooler, model.classifier
        self.heads = model.config.num_attention_heads
        own = [layer.attention.self for layer in self.layers]
        self.qkv = nn.ModuleList(joined([a.query, a.key, a.value]) for a in own)

    def forward(self, ids: Tensor, types: Tensor, places: Tensor, cu_seqlens: Tensor, longest: int) -> Tensor:
        """Return logits ``(B, labels)`` of ``(T,)`` ids, token types and places in their text, and ``(B+1,)`` cu_seqlens."""
        tables, bounds = self.embeddings, cu_seqlens.int()
        x = tables.word_embeddings(ids) + tables.token_type_embeddings(types) + tables.position_embeddings(places)
        x = tables.LayerNorm(x)
        for layer, qkv in zip(self.layers, self.qkv):
            q, k, v = qkv(x).unflatten(1, (3, self.heads, -1)).unbind(1)
            x = layer.attention.output(attend(q, k, v, bounds, longest).flatten(1), x)
            x = layer.output(layer.intermediate(x), x)
        return self.classifier(self.pooler(x[cu_seqlens[:-1], None]))


def joined(linears: Sequence[nn.Linear]) -> nn.Linear:
    """Return products on the same rows as one."""
    weight = torch.cat([linear.weight.detach() for linear in linears])
    whole = nn.Linear(weight.shape[1], weight.shape[0], device=weight.device, dtype=weight.dtype)
    whole.weight.data, whole.bias.data = weight, torch.cat([linear.bias.detach() for linear in linears])
    return whole


def attend(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, longest: int) -> Tensor:
    """Attend in each text, ``(T, N, D)``; rows behind the last text mean nothing."""
    if q.is_cuda:
        from torch.nn.attention.varlen import varlen_attn

        context = varlen_attn(q, k, v, cu_seqlens, cu_seqlens, longest, longest)
        assert isinstance(context, Tensor)
        return context
    out = torch.zeros_like(q)
    for begin, end in itertools.pairwise(cu_seqlens.tolist()):
        heads = (t[None, begin:end].transpose(1, 2) for t in (q, k, v))
        out[begin:end] = functional.scaled_dot_product_attention(*heads)[0].transpose(0, 1)
    return out


class Packed:
    """`PackedBert` on padded texts, whose padding the host leaves out.

    Args:
        bert: in fp32; it is copied.
        how: "eager"; "graphs", captured for rounded numbers of tokens; or "compile", which captures, too.
    """

    inputs: tuple[str, ...] = Padded.inputs
    outputs: tuple[str, ...] = Padded.outputs

    def __init__(self, bert: Any, precision: str, how: str) -> None:
        packed = PackedBert(copy.deepcopy(bert).to(DEVICE, DTYPES[precision])).eval()
        self._staged, self._how = Staging(), how
        self._model = compile_for_speed(packed) if how == "compile" else packed
        self._captured = Captured(self._model)

    def run(self, batch: Batch, wanted: Sequence[str] | None = None) -> dict[str, np.ndarray]:
        live = batch["attention_mask"] != 0
        lengths = live.sum(1)
        tokens, longest = int(lengths.sum()), int(lengths.max())
        if self._how != "eager":
            tokens, longest = rounded(tokens), rounded(longest)
        missing = (0, tokens - int(lengths.sum()))
        places = np.nonzero(live)[1]
        given = [np.pad(a, missing) for a in (batch["input_ids"][live], batch["token_type_ids"][live], places)]
        with torch.inference_mode():
            *given_there, bounds = self._staged([*given, np.cumsum([0, *lengths])])
            arguments = (*given_there, bounds, longest)
            captured = self._how == "graphs"
            key = (tokens, len(lengths), longest)
            logits = self._captured(key, *arguments) if captured else self._model(*arguments)
            return {"logits": logits.float().cpu().numpy()}
