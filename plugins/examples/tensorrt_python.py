"""Build and run an engine with the attention plugin, with TensorRT's own Python API and the C++ plugin library.

    python tensorrt_python.py OUT                          # OUT: what adtp-export --trt wrote, with OUT/plugins
    python tensorrt_python.py OUT --module tensorrt_rtx    # TensorRT-RTX, which builds without a GPU

Nothing of adtp_export is imported. Running needs cuda-python (pip install cuda-bindings) and a GPU.
"""

import argparse
import atexit
import ctypes
import importlib
import importlib.util
import shutil
import tempfile
from pathlib import Path

import numpy as np


def complete_rtx_libraries():
    """TensorRT-RTX 1.7's parser opens libtensorrt_rtx.so when it meets a plugin; its wheel has libtensorrt_rtx.so.1 only."""
    source = Path(importlib.util.find_spec("tensorrt_rtx_libs").origin).parent
    directory = Path(tempfile.mkdtemp())
    atexit.register(shutil.rmtree, directory)
    for library in source.glob("lib*.so.*"):
        (directory / library.name).symlink_to(library)
    (directory / "libtensorrt_rtx.so").symlink_to(source / "libtensorrt_rtx.so.1")
    for name in ("libtensorrt_rtx.so.1", "libtensorrt_onnxparser_rtx.so.1"):
        ctypes.CDLL(str(directory / name))


def build(trt, logger, model):
    builder = trt.Builder(logger)
    network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    parser = trt.OnnxParser(network, logger)
    if not parser.parse_from_file(str(model)):
        raise SystemExit("\n".join(parser.get_error(i).desc() for i in range(parser.num_errors)))
    kinds = [network.get_layer(i).type for i in range(network.num_layers)]
    print(f"{kinds.count(trt.LayerType.PLUGIN_V3)} plugin layers, {kinds.count(trt.LayerType.SOFTMAX)} softmax layers")
    config = builder.create_builder_config()
    config.clear_flag(trt.BuilderFlag.TF32)
    shapes = builder.create_optimization_profile()
    for i in range(network.num_inputs):
        shapes.set_shape(network.get_input(i).name, (1, 1), (8, 64), (32, 128))
    config.add_optimization_profile(shapes)
    engine = builder.build_serialized_network(network, config)
    if engine is None:
        raise SystemExit("the builder refuses; its log says why")
    return engine


def run(trt, logger, engine, batch):
    from cuda.bindings import runtime as cuda

    def call(function, *arguments):
        status, *values = function(*arguments)
        if int(status):
            raise SystemExit(f"{function.__name__}: {status.name}")
        return values[0] if values else None

    context = trt.Runtime(logger).deserialize_cuda_engine(engine).create_execution_context()
    stream = call(cuda.cudaStreamCreate)
    for name, array in batch.items():
        address = call(cuda.cudaMalloc, array.nbytes)
        call(cuda.cudaMemcpy, address, array.ctypes.data, array.nbytes, cuda.cudaMemcpyKind.cudaMemcpyHostToDevice)
        context.set_input_shape(name, array.shape)
        context.set_tensor_address(name, int(address))
    logits = np.empty(tuple(context.get_tensor_shape("logits")), np.float32)
    address = call(cuda.cudaMalloc, logits.nbytes)
    context.set_tensor_address("logits", int(address))
    context.execute_async_v3(int(stream))
    call(cuda.cudaStreamSynchronize, stream)
    call(cuda.cudaMemcpy, logits.ctypes.data, address, logits.nbytes, cuda.cudaMemcpyKind.cudaMemcpyDeviceToHost)
    return logits


def has_gpu():
    from cuda.bindings import runtime as cuda

    status, count = cuda.cudaGetDeviceCount()
    return int(status) == 0 and count > 0


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path, help="output directory of adtp-export --trt")
    parser.add_argument("--module", default="tensorrt", choices=("tensorrt", "tensorrt_rtx"))
    options = parser.parse_args()
    if options.module == "tensorrt_rtx":
        complete_rtx_libraries()
    trt = importlib.import_module(options.module)
    logger = trt.Logger(trt.Logger.ERROR)
    # The one line that makes the parser take the plugin, and the runtime load engines that have it:
    if trt.get_plugin_registry().load_library(str(options.out / "plugins" / "libadtp_plugins.so")) is None:
        raise SystemExit(
            f"{options.out}/plugins/libadtp_plugins.so does not load; type: adtp-plugin build, then adtp-export"
        )
    engine = build(trt, logger, options.out / "model.onnx")
    print(f"engine of {engine.nbytes / 1e6:.1f} MB")
    if not has_gpu():
        print("no GPU here: built, not run")
        return
    names = ("input_ids", "attention_mask", "token_type_ids")
    batch = dict(zip(names, (np.full((2, 9), 5), np.ones((2, 9)), np.zeros((2, 9)))))
    print(run(trt, logger, engine, {name: array.astype(np.int64) for name, array in batch.items()}))


if __name__ == "__main__":
    main()
