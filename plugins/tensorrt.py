"""The Python host: `AdtpRaggedAttention` and `AdtpRaggedAttentionReceived` as plugins of TensorRT or TensorRT-RTX that launch
the compiled kernels. `tensorrt_grouped` has those with grouped queries, which are registered with them.

Building needs neither a GPU nor CUDA; running takes the interpreter lock for every layer, so applications ship the C++ host.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from ..contract import ATTENTION, ATTENTION_RECEIVED, NUM_HEADS
from .binaries import Kind, check
from .driver import Call, launch, prepare
from .tensorrt_grouped import GROUPED
from .tensorrt_host import NAMESPACE, STATES, Operator, Run, creator_class


def _launch(run: Run) -> None:
    (tokens, hidden), heads = run.shapes[0], run.integers[NUM_HEADS]
    q, k, v, cu_seqlens = run.inputs
    call = Call(
        q=q,
        k=k,
        v=v,
        cu_seqlens=cu_seqlens,
        out=run.out,
        row_stride=hidden,
        tokens=tokens,
        sequences=run.shapes[STATES][0] - 1,
        num_heads=heads,
        head_size=hidden // heads,
        dtype=run.dtype,
        scale=run.scale,
        received=run.received,
    )
    launch(call, run.stream)


RAGGED = Operator(
    names=(ATTENTION, ATTENTION_RECEIVED),
    received=ATTENTION_RECEIVED,
    integers=(NUM_HEADS,),
    grouped=False,
    check=check,
    prepare=prepare,
    launch=_launch,
)
OPERATORS = (RAGGED, GROUPED)
_registered: dict[str, list[Any]] = {}
"""Creators by module; a registry keeps no reference to a Python object."""


@contextlib.contextmanager
def registered(trt: Any, wanted: bool = True) -> Iterator[None]:
    """Register the plugins, or take them away, for the time of a block: a parser takes the plugin if there is one, and the
    portable body of the same node if not.

    Args:
        trt: the module `tensorrt` or `tensorrt_rtx`.
    """
    before = trt.__name__ in _registered
    _set(trt, wanted)
    try:
        yield
    finally:
        _set(trt, before)


def is_registered(trt: Any) -> bool:
    """Whether a host of the plugins is registered, this one or the C++ library."""
    names = {creator.name for creator in trt.get_plugin_registry().all_creators}
    return all(names.issuperset(operator.names) for operator in OPERATORS)


def register(trt: Any) -> None:
    """Register the plugins with the global registry of a flavour, for engines that have it. Once is enough."""
    _set(trt, True)


def _set(trt: Any, wanted: bool) -> None:
    if wanted == (trt.__name__ in _registered):
        return
    registry = trt.get_plugin_registry()
    if wanted:
        _registered[trt.__name__] = [creator_class(trt, each)(name) for each in OPERATORS for name in each.names]
        for creator in _registered[trt.__name__]:
            registry.register_creator(creator, NAMESPACE)
    else:
        for creator in _registered.pop(trt.__name__):
            registry.deregister_creator(creator)


def check_network(trt: Any, network: Any) -> list[Kind | None]:
    """Check the plugin layers of a parsed network; return what each launches, None for those of another host.

    A Python plugin cannot refuse its inputs while an engine is built: TensorRT-RTX 1.7.1 corrupts its memory then.

    Raises:
        InputError: a layer has a dtype or a head size that the kernel does not do.
    """
    found: list[Kind | None] = []
    for layer in map(network.get_layer, range(network.num_layers)):
        if layer.type == trt.LayerType.PLUGIN_V3:
            layer.__class__ = trt.IPluginV3Layer
            plugin = layer.plugin
            own = (each for each in OPERATORS if isinstance(plugin, creator_class(trt, each).plugin))
            found.append(next((each.kind(trt, layer, plugin) for each in own), None))
    return found
