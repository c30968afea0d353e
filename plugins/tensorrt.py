"""The Python host: `AdtpRaggedAttention` and `AdtpRaggedAttentionReceived` as plugins of TensorRT or TensorRT-RTX that launch
the compiled kernels. `tensorrt_grouped` has those with grouped queries, which are registered with them.

Names, version and fields are those of the C++ host (`cpp/`), so an engine built with one loads with the other. Building
needs neither a GPU nor CUDA; running takes the interpreter lock for every layer, so applications ship the C++ host.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

from ..contract import ATTENTION, ATTENTION_RECEIVED, NUM_HEADS, SCALE
from ..contract import PLUGIN_NAMESPACE as NAMESPACE
from ..contract import PLUGIN_VERSION as VERSION
from . import tensorrt_grouped as grouped
from .binaries import Kind, check
from .driver import Call, launch, prepare

CU_SEQLENS = 3
"""Its place among the inputs."""

NAMES = (ATTENTION, ATTENTION_RECEIVED)
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
    return {creator.name for creator in trt.get_plugin_registry().all_creators}.issuperset((*NAMES, *grouped.NAMES))


def register(trt: Any) -> None:
    """Register the plugins with the global registry of a flavour, for engines that have it. Once is enough."""
    _set(trt, True)


def _set(trt: Any, wanted: bool) -> None:
    if wanted == (trt.__name__ in _registered):
        return
    registry = trt.get_plugin_registry()
    if wanted:
        further = [grouped.creator_class(trt)(name) for name in grouped.NAMES]
        _registered[trt.__name__] = [*(_classes(trt)(name) for name in NAMES), *further]
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
            kind = None
            if isinstance(plugin := layer.plugin, _classes(trt).plugin):
                q = layer.get_input(0)
                dtype, size = grouped.types_of(trt).get(q.dtype, str(q.dtype)), q.shape[1] // plugin.num_heads
                check(dtype, size)
                kind = Kind(dtype, size, plugin.num_outputs == 2)
            elif isinstance(plugin, grouped.creator_class(trt).plugin):
                kind = grouped.kind_of(trt, layer, plugin)
            found.append(kind)
    return found


@functools.cache
def _classes(trt: Any) -> Any:
    """The creator class, derived from the flavour's own base classes."""
    plugin_class = _plugin_class(trt)

    class Creator(trt.IPluginCreatorV3One):
        plugin = plugin_class

        def __init__(self, plugin_name: str) -> None:
            trt.IPluginCreatorV3One.__init__(self)
            self.name, self.plugin_version, self.plugin_namespace = plugin_name, VERSION, NAMESPACE
            self._fields = [grouped.field(trt, name) for name in (NUM_HEADS, SCALE)]
            self.field_names = trt.PluginFieldCollection(self._fields)

        def create_plugin(self, name: str, fields: Any, phase: Any) -> Any:
            values = {f.name: f.data[0] for f in fields if f.name in (NUM_HEADS, SCALE)}
            return plugin_class(self.name, int(values[NUM_HEADS]), float(values[SCALE]))

    return Creator


def _plugin_class(trt: Any) -> Any:
    types = grouped.types_of(trt)

    class Plugin(trt.IPluginV3, trt.IPluginV3OneCore, trt.IPluginV3OneBuild, trt.IPluginV3OneRuntime):
        """Inputs q, k, v ``(T, H)`` and cu_seqlens ``(B+1,) int32``; output ``(T, H)``, in the dtype of q. All linear.

        One of the two has received ``(T,) fp32`` as well.
        """

        def __init__(self, name: str, num_heads: int, scale: float) -> None:
            for base in (trt.IPluginV3, trt.IPluginV3OneCore, trt.IPluginV3OneBuild, trt.IPluginV3OneRuntime):
                base.__init__(self)
            self.num_heads, self.scale = num_heads, scale
            self.plugin_name, self.plugin_version, self.plugin_namespace = name, VERSION, NAMESPACE
            self.num_outputs = 2 if name == ATTENTION_RECEIVED else 1
            # A collection copies pointers; the fields own what they point at, so they live as long as the plugin.
            self._fields = [grouped.field(trt, NUM_HEADS, num_heads), grouped.field(trt, SCALE, scale)]
            self._collection = trt.PluginFieldCollection(self._fields)

        def get_capability_interface(self, kind: Any) -> Any:
            return self

        def clone(self) -> Any:
            return Plugin(self.plugin_name, self.num_heads, self.scale)

        # Build

        def get_output_data_types(self, input_types: Any) -> Any:
            return [input_types[0], trt.DataType.FLOAT][: self.num_outputs]

        def get_output_shapes(self, inputs: Any, shape_inputs: Any, builder: Any) -> Any:
            received = trt.DimsExprs(1)
            received[0] = inputs[0][0]
            return [trt.DimsExprs(inputs[0]), received][: self.num_outputs]

        def supports_format_combination(self, position: int, tensors: Any, num_inputs: int) -> bool:
            found = tensors[position].desc
            if found.format != trt.TensorFormat.LINEAR:
                return False
            if position == CU_SEQLENS:
                return found.type == trt.DataType.INT32
            if position > num_inputs:  # received
                return found.type == trt.DataType.FLOAT
            return found.type == tensors[0].desc.type and found.type in types

        def configure_plugin(self, inputs: Any, outputs: Any) -> None:
            pass  # see check_network

        # Run

        def on_shape_change(self, inputs: Any, outputs: Any) -> None:
            # Builders come by as well, on machines without a GPU. What goes wrong here, `enqueue` meets again and says.
            with contextlib.suppress(Exception):
                _, hidden = inputs[0].dims
                prepare(Kind(types[inputs[0].type], hidden // self.num_heads, self.num_outputs == 2))

        def attach_to_context(self, context: Any) -> Any:
            return self.clone()

        def set_tactic(self, tactic: int) -> None:
            pass

        def get_fields_to_serialize(self) -> Any:
            return self._collection

        def enqueue(
            self, input_desc: Any, output_desc: Any, inputs: Any, outputs: Any, workspace: int, stream: int
        ) -> None:
            tokens, hidden = input_desc[0].dims
            call = Call(
                q=int(inputs[0]),
                k=int(inputs[1]),
                v=int(inputs[2]),
                cu_seqlens=int(inputs[CU_SEQLENS]),
                out=int(outputs[0]),
                row_stride=hidden,
                tokens=tokens,
                sequences=input_desc[CU_SEQLENS].dims[0] - 1,
                num_heads=self.num_heads,
                head_size=hidden // self.num_heads,
                dtype=types[input_desc[0].type],
                scale=self.scale,
                received=int(outputs[1]) if self.num_outputs == 2 else 0,
            )
            launch(call, int(stream))

    return Plugin
