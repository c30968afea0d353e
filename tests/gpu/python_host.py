"""Runs the Python host on the calls that a folder describes (host_calls.py): a process of its own, as a user's would be.

    python python_host.py FOLDER [--enqueue] [--mistake NAME]

LD_LIBRARY_PATH has the emulated driver. With --enqueue TensorRT-RTX's plugin and descriptors are used, else `driver.launch`. What the
plugin enqueues could be captured: the driver loads nothing meanwhile.
Prints a line for each call: its name, then "ok" or what the host says.
"""

import argparse
import os
from dataclasses import replace
from pathlib import Path

import host_mistakes
import numpy as np
from cuda.bindings import driver as cuda

from adtp_export.plugins import driver as host

BYTES = {"fp16": 2, "bf16": 2, "fp32": 4}


def checked(result):
    status, *values = result
    assert status == cuda.CUresult.CUDA_SUCCESS, status
    return values[0] if values else None


def uploaded(data: np.ndarray) -> int:
    address = int(checked(cuda.cuMemAlloc(max(data.nbytes, 1))))
    if data.nbytes:
        checked(cuda.cuMemcpyHtoD(address, data.ctypes.data, data.nbytes))
    return address


def read_calls(folder: Path):
    """Each call's name with the call, its memory filled."""
    for line in (folder / "calls.txt").read_text().splitlines():
        name, dtype, *fields, scale = line.split()
        size, heads, tokens, sequences, stride, packed, received = map(int, fields)
        step = heads * size * BYTES[dtype]
        if packed:
            first = uploaded(np.fromfile(folder / f"{name}.qkv", np.uint8))
            q, k, v = (first + i * step for i in range(3))
        else:
            q, k, v = (uploaded(np.fromfile(folder / f"{name}.{end}", np.uint8)) for end in "qkv")
        yield (
            name,
            host.Call(
                q=q,
                k=k,
                v=v,
                cu_seqlens=uploaded(np.fromfile(folder / f"{name}.cu", np.uint8)),
                out=uploaded(np.full(tokens * step, 0xFF, np.uint8)),
                row_stride=stride,
                tokens=tokens,
                sequences=sequences,
                num_heads=heads,
                head_size=size,
                dtype=dtype,
                scale=float(scale),
                received=uploaded(np.full(tokens * 4, 0xFF, np.uint8)) if received else 0,
            ),
        )


def enqueue(call: host.Call) -> None:
    """What TensorRT-RTX would do with the plugin: create it from fields, attach it, hand it descriptors and addresses."""
    import tensorrt_rtx as trt

    from adtp_export.plugins import tensorrt as plugins

    name = plugins.ATTENTION_RECEIVED if call.received else plugins.ATTENTION
    creator = plugins.creator_class(trt, plugins.RAGGED)(name)
    fields = trt.PluginFieldCollection(
        [
            trt.PluginField("num_heads", np.array([call.num_heads], np.int32), trt.PluginFieldType.INT32),
            trt.PluginField("scale", np.array([call.scale], np.float32), trt.PluginFieldType.FLOAT32),
        ]
    )
    plugin = creator.create_plugin("attention", fields, trt.TensorRTPhase.RUNTIME).attach_to_context(None)

    def described(shape, dtype):
        result = trt.PluginTensorDesc()
        result.dims, result.type, result.format = trt.Dims(shape), dtype, trt.TensorFormat.LINEAR
        return result

    kind = {"fp16": trt.DataType.HALF, "bf16": trt.DataType.BF16, "fp32": trt.DataType.FLOAT}[call.dtype]
    states = described((call.tokens, call.num_heads * call.head_size), kind)
    bounds = described((call.sequences + 1,), trt.DataType.INT32)
    outputs, addresses = [states], [call.out]
    if call.received:
        outputs, addresses = [states, described((call.tokens,), trt.DataType.FLOAT)], [call.out, call.received]
    inputs = [states, states, states, bounds]
    plugin.on_shape_change(inputs, outputs)
    os.environ["ADTP_EMULATOR_CAPTURING"] = "1"
    try:
        plugin.enqueue(inputs, outputs, [call.q, call.k, call.v, call.cu_seqlens], addresses, 0, 0)
    finally:
        os.environ["ADTP_EMULATOR_CAPTURING"] = "0"


def download(folder: Path, name: str, call: host.Call) -> None:
    nbytes = call.tokens * call.num_heads * call.head_size * BYTES[call.dtype]
    for end, address, size in ((".out", call.out, nbytes), (".sums", call.received, 4 * call.tokens)):
        if address:
            data = np.empty(size, np.uint8)
            checked(cuda.cuMemcpyDtoH(data.ctypes.data, address, size))
            data.tofile(folder / (name + end))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--enqueue", action="store_true")
    parser.add_argument("--mistake", choices=host_mistakes.PYTHON)
    options = parser.parse_args()
    checked(cuda.cuInit(0))
    checked(cuda.cuCtxSetCurrent(checked(cuda.cuDevicePrimaryCtxRetain(0))))
    change = host_mistakes.plant(host, options.mistake) if options.mistake else replace
    for name, call in read_calls(options.folder):
        try:
            (enqueue if options.enqueue else host.launch)(change(call), *(() if options.enqueue else (0,)))
            said = "ok"
        except Exception as error:  # whatever a mistake leads to
            said = " ".join(f"{type(error).__name__}: {error}".split())
        print(name, said, flush=True)
        download(options.folder, name, call)


if __name__ == "__main__":
    main()
