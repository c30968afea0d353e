"""What an attention operator is as a plugin of TensorRT or TensorRT-RTX in Python. `tensorrt` and `tensorrt_grouped` say which there are.

Names, version and fields are those of the C++ host (`cpp/`), so an engine built with one loads with the other.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..contract import NUM_HEADS, SCALE
from ..contract import PLUGIN_NAMESPACE as NAMESPACE
from ..contract import PLUGIN_VERSION as VERSION
from .binaries import Kind

STATES = 3
"""Inputs q, k and v; the others are integers."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """What TensorRT hands to a plugin that runs, with the plugin's own numbers.

    shapes: of the inputs. inputs, out, received: device addresses; received is 0 where it is no output. dtype: of q, by its name.
    """

    integers: Mapping[str, int]
    scale: float
    dtype: str
    shapes: Sequence[Any]
    inputs: Sequence[int]
    out: int
    received: int
    stream: int


@dataclass(frozen=True, kw_only=True)
class Operator:
    """An operator in all its forms. All tensors are linear; the output has the shape and dtype of q.

    Inputs are q, k and v ``(T, N*D)`` and cu_seqlens ``(B+1,) int32``; of a grouped one q ``(T, N*D)``, k and v ``(T', KV*D)``, and cu_q,
    cu_k, positions_q and positions_k, int32.

    names: of the forms. received: the one that also returns what each row of k received, fp32 ``(T,)`` or ``(T',)``. integers: names of
    the attributes beside the scale. grouped: whether queries share heads of k and v. check: raises InputError for a dtype and head size
    without kernels. prepare: loads the kernels of a layer before it runs. launch: runs it.
    """

    names: tuple[str, ...]
    received: str
    integers: tuple[str, ...]
    grouped: bool
    check: Callable[[str, int], None]
    prepare: Callable[[Kind], None]
    launch: Callable[[Run], None]

    def kind(self, trt: Any, layer: Any, plugin: Any) -> Kind:
        """Return what a layer launches.

        Raises:
            InputError: it has a dtype or a head size that the kernels do not do.
        """
        q = layer.get_input(0)
        dtype, size = types_of(trt).get(q.dtype, str(q.dtype)), q.shape[1] // plugin.integers[NUM_HEADS]
        self.check(dtype, size)
        return Kind(dtype, size, plugin.num_outputs == 2, self.grouped)


def field(trt: Any, name: str, *values: float) -> Any:
    """A field of the plugin; without values it only says of which type one is."""
    if name == SCALE:
        return trt.PluginField(name, np.array(values, np.float32), trt.PluginFieldType.FLOAT32)
    return trt.PluginField(name, np.array(values, np.int32), trt.PluginFieldType.INT32)


def types_of(trt: Any) -> dict[Any, str]:
    """Names of TensorRT's types that there are kernels for."""
    return {trt.DataType.HALF: "fp16", trt.DataType.BF16: "bf16", trt.DataType.FLOAT: "fp32"}


@functools.cache
def creator_class(trt: Any, operator: Operator) -> Any:
    """The creator class of an operator, derived from a flavour's own base classes; its attribute `plugin` is the class of plugins."""
    base: Any = _builds(trt, operator)

    class Plugin(base):
        """One layer: what TensorRT asks while it runs."""

        def clone(self) -> Any:
            return Plugin(self.plugin_name, self.integers, self.scale)

        def on_shape_change(self, inputs: Any, outputs: Any) -> None:
            # Builders come by as well, on machines without a GPU. What goes wrong here, `enqueue` meets again and says.
            with contextlib.suppress(Exception):
                size = inputs[0].dims[1] // self.integers[NUM_HEADS]
                operator.prepare(Kind(self.types[inputs[0].type], size, self.num_outputs == 2, operator.grouped))

        def attach_to_context(self, context: Any) -> Any:
            return self.clone()

        def set_tactic(self, tactic: int) -> None:
            pass

        def get_fields_to_serialize(self) -> Any:
            return self._collection

        def enqueue(
            self, input_desc: Any, output_desc: Any, inputs: Any, outputs: Any, workspace: int, stream: int
        ) -> None:
            run = Run(
                integers=self.integers,
                scale=self.scale,
                dtype=self.types[input_desc[0].type],
                shapes=[each.dims for each in input_desc],
                inputs=list(map(int, inputs)),
                out=int(outputs[0]),
                received=int(outputs[1]) if self.num_outputs == 2 else 0,
                stream=int(stream),
            )
            operator.launch(run)

    class Creator(trt.IPluginCreatorV3One):
        plugin = Plugin

        def __init__(self, plugin_name: str) -> None:
            trt.IPluginCreatorV3One.__init__(self)
            self.name, self.plugin_version, self.plugin_namespace = plugin_name, VERSION, NAMESPACE
            self._fields = [field(trt, name) for name in (*operator.integers, SCALE)]
            self.field_names = trt.PluginFieldCollection(self._fields)

        def create_plugin(self, name: str, fields: Any, phase: Any) -> Any:
            values = {f.name: f.data[0] for f in fields if f.name in (*operator.integers, SCALE)}
            return Plugin(self.name, {name: int(values[name]) for name in operator.integers}, float(values[SCALE]))

    return Creator


def _builds(trt: Any, operator: Operator) -> Any:
    """The base of a plugin class: what TensorRT asks while it builds an engine."""

    class Builds(trt.IPluginV3, trt.IPluginV3OneCore, trt.IPluginV3OneBuild, trt.IPluginV3OneRuntime):
        types = types_of(trt)

        def __init__(self, name: str, integers: Mapping[str, int], scale: float) -> None:
            for base in (trt.IPluginV3, trt.IPluginV3OneCore, trt.IPluginV3OneBuild, trt.IPluginV3OneRuntime):
                base.__init__(self)
            self.integers, self.scale = dict(integers), scale
            self.plugin_name, self.plugin_version, self.plugin_namespace = name, VERSION, NAMESPACE
            self.num_outputs = 2 if name == operator.received else 1
            # A collection copies pointers; the fields own what they point at, so they live as long as the plugin.
            self._fields = [field(trt, key, value) for key, value in (self.integers | {SCALE: scale}).items()]
            self._collection = trt.PluginFieldCollection(self._fields)

        def get_capability_interface(self, kind: Any) -> Any:
            return self

        def get_output_data_types(self, input_types: Any) -> Any:
            return [input_types[0], trt.DataType.FLOAT][: self.num_outputs]

        def get_output_shapes(self, inputs: Any, shape_inputs: Any, builder: Any) -> Any:
            received = trt.DimsExprs(1)
            received[0] = inputs[1 if operator.grouped else 0][0]
            return [trt.DimsExprs(inputs[0]), received][: self.num_outputs]

        def supports_format_combination(self, position: int, tensors: Any, num_inputs: int) -> bool:
            found = tensors[position].desc
            if found.format != trt.TensorFormat.LINEAR:
                return False
            if STATES <= position < num_inputs:
                return found.type == trt.DataType.INT32
            if position > num_inputs:  # received
                return found.type == trt.DataType.FLOAT
            return found.type == tensors[0].desc.type and found.type in self.types

        def configure_plugin(self, inputs: Any, outputs: Any) -> None:
            pass  # see tensorrt.check_network

    return Builds
