"""`AdtpRaggedAttentionGrouped`, its form with a window and the one that says what keys received, as plugins of TensorRT in Python.

As in `tensorrt`: names, version and fields are those of the C++ host.
"""

from __future__ import annotations

import contextlib
import functools
from typing import Any

import numpy as np

from ..contract import (
    ATTENTION_GROUPED,
    ATTENTION_GROUPED_RECEIVED,
    ATTENTION_GROUPED_WINDOW,
    KV_HEADS,
    NUM_HEADS,
    SCALE,
    WINDOW_AHEAD,
    WINDOW_BACK,
)
from ..contract import PLUGIN_NAMESPACE as NAMESPACE
from ..contract import PLUGIN_VERSION as VERSION
from .binaries import Kind
from .grouped import Call, check, launch, prepare

NAMES = (ATTENTION_GROUPED, ATTENTION_GROUPED_WINDOW, ATTENTION_GROUPED_RECEIVED)
INTEGERS = (NUM_HEADS, KV_HEADS, WINDOW_BACK, WINDOW_AHEAD)
_STATES = 3
"""Inputs q, k and v; the others are integers."""
_POINTERS = ("q", "k", "v", "cu_q", "cu_k", "positions_q", "positions_k")


def field(trt: Any, name: str, *values: float) -> Any:
    """A field of the plugin; without values it only says of which type one is."""
    if name == SCALE:
        return trt.PluginField(name, np.array(values, np.float32), trt.PluginFieldType.FLOAT32)
    return trt.PluginField(name, np.array(values, np.int32), trt.PluginFieldType.INT32)


def types_of(trt: Any) -> dict[Any, str]:
    """Names of TensorRT's types that there are kernels for."""
    return {trt.DataType.HALF: "fp16", trt.DataType.BF16: "bf16", trt.DataType.FLOAT: "fp32"}


@functools.cache
def creator_class(trt: Any) -> Any:
    """The creator class, derived from a flavour's own base classes."""
    plugin_class = _plugin_class(trt)

    class Creator(trt.IPluginCreatorV3One):
        plugin = plugin_class

        def __init__(self, plugin_name: str) -> None:
            trt.IPluginCreatorV3One.__init__(self)
            self.name, self.plugin_version, self.plugin_namespace = plugin_name, VERSION, NAMESPACE
            self._fields = [field(trt, name) for name in (*INTEGERS, SCALE)]
            self.field_names = trt.PluginFieldCollection(self._fields)

        def create_plugin(self, name: str, fields: Any, phase: Any) -> Any:
            values = {f.name: f.data[0] for f in fields if f.name in (*INTEGERS, SCALE)}
            return plugin_class(self.name, {name: int(values[name]) for name in INTEGERS}, float(values[SCALE]))

    return Creator


def kind_of(trt: Any, layer: Any, plugin: Any) -> Kind:
    """What a layer launches.

    Raises:
        InputError: it has a dtype or a head size that the kernels do not do.
    """
    q = layer.get_input(0)
    dtype, size = types_of(trt).get(q.dtype, str(q.dtype)), q.shape[1] // plugin.integers[NUM_HEADS]
    check(dtype, size)
    return Kind(dtype, size, plugin.num_outputs == 2, grouped=True)


def _plugin_class(trt: Any) -> Any:
    types = types_of(trt)

    class Plugin(trt.IPluginV3, trt.IPluginV3OneCore, trt.IPluginV3OneBuild, trt.IPluginV3OneRuntime):
        """Inputs q ``(T, N*D)``, k and v ``(T', KV*D)``, cu_q, cu_k, positions_q and positions_k, int32; output ``(T, N*D)``, in the
        dtype of q. All linear. One of the three has received ``(T',) fp32`` as well.
        """

        def __init__(self, name: str, integers: dict[str, int], scale: float) -> None:
            for base in (trt.IPluginV3, trt.IPluginV3OneCore, trt.IPluginV3OneBuild, trt.IPluginV3OneRuntime):
                base.__init__(self)
            self.integers, self.scale = integers, scale
            self.plugin_name, self.plugin_version, self.plugin_namespace = name, VERSION, NAMESPACE
            self.num_outputs = 2 if name == ATTENTION_GROUPED_RECEIVED else 1
            # A collection copies pointers; the fields own what they point at, so they live as long as the plugin.
            self._fields = [field(trt, key, value) for key, value in (integers | {SCALE: scale}).items()]
            self._collection = trt.PluginFieldCollection(self._fields)

        def get_capability_interface(self, kind: Any) -> Any:
            return self

        def clone(self) -> Any:
            return Plugin(self.plugin_name, self.integers, self.scale)

        # Build

        def get_output_data_types(self, input_types: Any) -> Any:
            return [input_types[0], trt.DataType.FLOAT][: self.num_outputs]

        def get_output_shapes(self, inputs: Any, shape_inputs: Any, builder: Any) -> Any:
            received = trt.DimsExprs(1)
            received[0] = inputs[1][0]
            return [trt.DimsExprs(inputs[0]), received][: self.num_outputs]

        def supports_format_combination(self, position: int, tensors: Any, num_inputs: int) -> bool:
            found = tensors[position].desc
            if found.format != trt.TensorFormat.LINEAR:
                return False
            if _STATES <= position < num_inputs:
                return found.type == trt.DataType.INT32
            if position > num_inputs:  # received
                return found.type == trt.DataType.FLOAT
            return found.type == tensors[0].desc.type and found.type in types

        def configure_plugin(self, inputs: Any, outputs: Any) -> None:
            pass  # see tensorrt.check_network

        # Run

        def on_shape_change(self, inputs: Any, outputs: Any) -> None:
            # Builders come by as well, on machines without a GPU. What goes wrong here, `enqueue` meets again and says.
            with contextlib.suppress(Exception):
                size = inputs[0].dims[1] // self.integers[NUM_HEADS]
                prepare(Kind(types[inputs[0].type], size, self.num_outputs == 2, grouped=True))

        def attach_to_context(self, context: Any) -> Any:
            return self.clone()

        def set_tactic(self, tactic: int) -> None:
            pass

        def get_fields_to_serialize(self) -> Any:
            return self._collection

        def enqueue(
            self, input_desc: Any, output_desc: Any, inputs: Any, outputs: Any, workspace: int, stream: int
        ) -> None:
            (queries, width), (keys, of_keys) = input_desc[0].dims, input_desc[1].dims
            call = Call(
                **{name: int(address) for name, address in zip(_POINTERS, inputs)},
                **self.integers,
                out=int(outputs[0]),
                q_stride=width,
                kv_stride=of_keys,
                queries=queries,
                keys=keys,
                texts=input_desc[_STATES].dims[0] - 1,
                head_size=width // self.integers[NUM_HEADS],
                dtype=types[input_desc[0].type],
                scale=self.scale,
                received=int(outputs[1]) if self.num_outputs == 2 else 0,
            )
            launch(call, int(stream))

    return Plugin
