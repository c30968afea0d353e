"""Runs the Python host on calls of grouped attention, in a process of its own whose libcuda.so.1 is the emulated one.

    python grouped_host.py FOLDER [--enqueue]

FOLDER has ``NAME.npz`` and ``NAME.json`` of each call, and gets ``NAME.out`` and ``NAME.received``. With --enqueue TensorRT-RTX's plugin
and descriptors are used, in what could be a capture: the driver loads nothing meanwhile.
"""

import json
import os
import sys
from pathlib import Path

import numpy as np
from cuda.bindings import driver as cuda
from python_host import checked, uploaded

from adtp_export.plugins import grouped


def enqueue(given: dict, numbers: dict) -> None:
    import tensorrt_rtx as trt

    from adtp_export import contract
    from adtp_export.plugins import tensorrt_grouped as plugins
    from adtp_export.plugins import tensorrt_host

    name = plugins.ATTENTION_GROUPED_RECEIVED if given["received"] else plugins.ATTENTION_GROUPED
    fields = [tensorrt_host.field(trt, key, numbers[key]) for key in (*plugins.GROUPED.integers, contract.SCALE)]
    creator = tensorrt_host.creator_class(trt, plugins.GROUPED)(name)
    plugin = creator.create_plugin("attention", trt.PluginFieldCollection(fields), trt.TensorRTPhase.RUNTIME)
    plugin = plugin.attach_to_context(None)

    def described(shape, dtype):
        result = trt.PluginTensorDesc()
        result.dims, result.type, result.format = trt.Dims(shape), dtype, trt.TensorFormat.LINEAR
        return result

    kind = {"fp16": trt.DataType.HALF, "bf16": trt.DataType.BF16, "fp32": trt.DataType.FLOAT}[numbers["dtype"]]
    queries, keys, texts = (numbers[key] for key in ("queries", "keys", "texts"))
    states = [(queries, numbers["q_stride"]), *[(keys, numbers["kv_stride"])] * 2]
    inputs = [described(shape, kind) for shape in states]
    inputs += [described((size,), trt.DataType.INT32) for size in (texts + 1, texts + 1, queries, keys)]
    outputs = [inputs[0], described((keys,), trt.DataType.FLOAT)][: plugin.num_outputs]
    plugin.on_shape_change(inputs, outputs)
    os.environ["ADTP_EMULATOR_CAPTURING"] = "1"
    addresses = [given["out"], given["received"]][: plugin.num_outputs]
    plugin.enqueue(inputs, outputs, [given[key] for key in plugins.POINTERS], addresses, 0, 0)
    os.environ["ADTP_EMULATOR_CAPTURING"] = "0"


def main() -> None:
    folder = Path(sys.argv[1])
    checked(cuda.cuInit(0))
    checked(cuda.cuCtxSetCurrent(checked(cuda.cuDevicePrimaryCtxRetain(0))))
    for path in sorted(folder.glob("*.npz")):
        numbers, arrays = json.loads(path.with_suffix(".json").read_text()), dict(np.load(path))
        is_received = numbers.pop("is_received")
        given = {name: uploaded(array) for name, array in arrays.items()}
        at_received = given["received"]
        given["received"] = at_received if is_received else 0
        if "--enqueue" in sys.argv:
            enqueue(given, numbers)
        else:
            grouped.launch(grouped.Call(**given, **numbers), 0)
        for name, address in (("out", given["out"]), ("received", at_received)):
            data = np.empty_like(arrays[name])
            checked(cuda.cuMemcpyDtoH(data.ctypes.data, address, data.nbytes))
            data.tofile(path.with_suffix(f".{name}"))


if __name__ == "__main__":
    main()
