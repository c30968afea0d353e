"""TensorRT and TensorRT-RTX: one builder and one engine class for both flavours, whose Python APIs are alike.

The differences, all in this file: RTX builds ahead of time for a list of GPUs and needs none to build;
classic TensorRT builds for the GPU it runs on. An engine's attention is the graph's portable body, or the plugin of
`adtp_export.plugins`, whose host is registered for the time of the build.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import importlib.util
import signal
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from .. import contract
from ..artifacts.records import DECOMPOSED, PLUGIN, ShapeRange
from ..contract import CU_SEQLENS, per_token
from ..data.tokenize import Batch
from ..errors import EngineBuildError, InputError, MissingDependencyError, did_you_mean, quoted
from ..plugins import binaries
from ..plugins import grouped as grouped_attention
from ..plugins import tensorrt as plugin_host
from . import rtx_libraries
from . import tensorrt_callbacks as callbacks
from .cuda import DeviceBuffers, local_gpu

TOPK_LIMIT = 3840
"""Largest K of TensorRT's TopK layer, hence the longest row a cut can take."""


@dataclass(frozen=True, kw_only=True)
class Flavor:
    """One of the two products: its name in options, in file names, its module and its package extra."""

    option: str
    short: str
    module: str
    extra: str
    product: str

    def installed(self) -> str | None:
        """Return the version of the Python package, or None."""
        if importlib.util.find_spec(self.module) is None:
            return None
        try:
            return importlib.metadata.version(self.module.replace("_", "-"))
        except importlib.metadata.PackageNotFoundError:  # brought by a package of another name
            return "unknown"

    def load(self) -> Any:
        """Import the module.

        Raises:
            MissingDependencyError: not installed, or its libraries do not load.
        """
        advice = f"type: pip install 'adtp-export[{self.extra}]'"
        if self.installed() is None:
            raise MissingDependencyError(f"{self.product} is not installed; {advice}")
        try:
            if self is RTX:
                rtx_libraries.load()
            return importlib.import_module(self.module)
        except (ImportError, OSError) as error:
            raise MissingDependencyError(
                f"{self.product} is installed but does not load ({error}); {advice}"
            ) from error


TENSORRT = Flavor(option=contract.TENSORRT, short="trt", module="tensorrt", extra="trt", product="TensorRT")
RTX = Flavor(option=contract.RTX, short="rtx", module=rtx_libraries.MODULE, extra="rtx", product="TensorRT-RTX")
FLAVORS = {flavor.option: flavor for flavor in (TENSORRT, RTX)}
"""By the names of `contract.TRT_FLAVORS`, of which "auto" is one of these two."""

RTX_GPUS = ("sm_75", "sm_80", "sm_86", "sm_89", "sm_120", "sm_121")
DEFAULT_GPUS = ("sm_86", "sm_89", "sm_120")


def choose_flavor(option: str) -> Flavor:
    """Resolve ``auto`` (TensorRT when it is installed and a GPU is here, else TensorRT-RTX) or a flavour by name.

    Raises:
        InputError: classic TensorRT was asked for where no GPU is.
        MissingDependencyError: the flavour is not installed.
    """
    gpu = local_gpu()
    flavor = (TENSORRT if TENSORRT.installed() and gpu else RTX) if option == contract.AUTO else FLAVORS[option]
    if flavor.installed() is None:
        raise MissingDependencyError(
            f"{flavor.product} is not installed; type: pip install 'adtp-export[{flavor.extra}]'"
        )
    if flavor is TENSORRT and gpu is None:
        raise InputError(
            "--trt-flavor tensorrt: classic TensorRT builds on the GPU that it builds for. There is none here, or cuda-python is "
            "missing. Build on that machine, or use --trt-flavor rtx, which needs no GPU"
        )
    return flavor


def parse_gpus(text: str | None, flavor: Flavor) -> tuple[str, ...]:
    """Parse ``--gpu sm_86,sm_89``; None gives the flavour's default.

    Raises:
        InputError: an unknown GPU, or one that this flavour cannot build for here.
    """
    here = (local_gpu(),) if flavor is TENSORRT else ()
    if text is None:
        return here if flavor is TENSORRT else DEFAULT_GPUS  # type: ignore[return-value]
    accepted = here if flavor is TENSORRT else RTX_GPUS
    names = tuple(dict.fromkeys(name.strip() for name in text.split(",")))
    for name in names:
        if name not in accepted:
            known = ", ".join(str(a) for a in accepted)
            raise InputError(
                f"--gpu: got {quoted(name)}; accepted for {flavor.product} here: {known}{did_you_mean(name, RTX_GPUS)}"
            )
    return tuple(sorted(names, key=lambda name: int(name.removeprefix("sm_"))))


def gpus_for(precision: str, gpus: Sequence[str], chosen: bool) -> tuple[str, ...]:
    """Return those of `gpus` that have products in a precision: all, but fp8 needs sm_89.

    Args:
        chosen: the user named them, so that none may be left out.

    Raises:
        InputError: one that the user named has none, or none has.
    """
    able = tuple(gpu for gpu in gpus if precision != "fp8" or int(gpu.removeprefix("sm_")) >= 89)
    if not able or (chosen and len(able) < len(gpus)):
        unable = ", ".join(gpu for gpu in gpus if gpu not in able)
        fit = ",".join(gpu for gpu in RTX_GPUS if int(gpu.removeprefix("sm_")) >= 89)
        raise InputError(
            f"--precision fp8: {unable} has no e4m3 products; they come with sm_89. Type: --gpu {fit}, or use int8 or fp16"
        )
    return able


def check_profile(profile: Mapping[str, ShapeRange]) -> None:
    """Raises InputError where a row, or the number of rows, is more than TopK can take: attention sorts texts by length."""
    for axis in ("seq", "batch"):
        if (most := profile[axis].max) > TOPK_LIMIT:
            raise InputError(
                f"--{axis}: got a MAX of {most}; accepted with --trt is at most {TOPK_LIMIT} (TensorRT's TopK)"
            )


def plugin_obstacle(precision: str, head_size: int, gpus: Sequence[str], grouped: bool = False) -> str | None:
    """Say why an engine cannot have the attention plugin, or None where it can. grouped: that of grouped queries and positions."""
    try:
        (grouped_attention.check if grouped else binaries.check)(precision, head_size)
        for gpu in gpus:
            binaries.code_for(gpu)
    except InputError as error:
        return str(error)
    return None


def build(
    flavor: Flavor,
    path: Path,
    profile: Mapping[str, ShapeRange],
    gpus: Sequence[str],
    attention: str = DECOMPOSED,
    progress: callbacks.Progress | None = None,
) -> tuple[Any, dict[str, Any]]:
    """Build an engine for every GPU in `gpus`.

    Args:
        path: ONNX model with dynamic ``(batch, sequence)`` inputs, with packed inputs, or with fixed sizes.
        profile: ranges of the axes "batch" and "seq"; nothing reads them where sizes are fixed.
        attention: "decomposed" for the graph's own body, "plugin" for the kernels of `adtp_export.plugins`.

    Returns:
        The serialized engine (a buffer) and what the builder knows about it, for the manifest.

    Raises:
        EngineBuildError: the parser or the builder refuses the model; the message has their words.
        InputError: the plugin was asked for and has no kernel for the model's heads.
    """
    trt = flavor.load()
    if attention == PLUGIN and flavor is RTX and not rtx_libraries.load():
        raise EngineBuildError(
            "this process imported tensorrt_rtx before adtp_export did; its parser then aborts at a plugin. Import "
            "adtp_export.runtimes.tensorrt and call RTX.load() first"
        )
    with plugin_host.registered(trt, attention == PLUGIN):
        return _build(trt, flavor, path, profile, gpus, attention, progress)


def _build(
    trt: Any,
    flavor: Flavor,
    path: Path,
    profile: Mapping[str, ShapeRange],
    gpus: Sequence[str],
    attention: str,
    progress: callbacks.Progress | None,
) -> tuple[Any, dict[str, Any]]:
    logger = callbacks.logger(trt)
    builder = trt.Builder(logger)
    # TensorRT 10 builds weakly typed networks unless told otherwise; from 11 on the flag has no effect.
    network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    parser = trt.OnnxParser(network, logger)  # it owns the weights, so it lives until the engine is built
    layers = _parse(trt, flavor, parser, network, path, attention)
    config = builder.create_builder_config()
    config.clear_flag(trt.BuilderFlag.TF32)  # fp32 means fp32: TF32 would flip decisions
    shapes = builder.create_optimization_profile()
    for tensor in map(network.get_input, range(network.num_inputs)):
        if -1 in tuple(tensor.shape):  # else sizes are fixed
            shapes.set_shape(tensor.name, *_range(tensor.name, tuple(tensor.shape), profile))
    config.add_optimization_profile(shapes)
    if flavor is RTX:
        config.num_compute_capabilities = len(gpus)
        for i, gpu in enumerate(gpus):
            config.set_compute_capability(getattr(trt.ComputeCapability, gpu.replace("sm_", "SM")), i)
    if progress is not None:
        config.progress_monitor = monitor = callbacks.monitor(trt, progress)  # kept: the config does not own it
    with _signals_held():
        engine = builder.build_serialized_network(network, config)
        if progress is not None:
            config.progress_monitor = None
            del monitor
    if engine is None:
        hint = (
            ""
            if "sm_75" not in gpus
            else ". TensorRT-RTX 1.7 has no fp32 matrix products for Turing (sm_75), and pruners decide in fp32; leave it out of --gpu"
        )
        raise EngineBuildError(
            f"{flavor.product} {trt.__version__} cannot build {path.name} for {', '.join(gpus)}: {logger.said()}{hint}"
        )
    details = {
        "gpus": list(gpus),
        "builder": f"{flavor.product} {trt.__version__}",
        "network_layers": network.num_layers,
        "plugin_layers": len(layers),
    }
    return engine, details | binaries.told(layers, gpus)


def _range(name: str, shape: tuple[int, ...], profile: Mapping[str, ShapeRange]) -> list[tuple[int, ...]]:
    """Return the smallest, the usual and the largest shape of an input; packed ones hold any number of tokens up to the largest."""
    batch, seq = profile["batch"], profile["seq"]
    if shape == (-1, -1):
        return [(batch.min, seq.min), (batch.opt, seq.opt), (batch.max, seq.max)]
    if name.startswith(CU_SEQLENS):
        return [(2,), (batch.opt + 1,), (batch.max + 1,)]
    return [(tokens, *shape[1:]) for tokens in (1, batch.opt * seq.opt, batch.max * seq.max)]


def _parse(trt: Any, flavor: Flavor, parser: Any, network: Any, path: Path, attention: str) -> list[Any]:
    """Fill a network from an ONNX file; return what each of its plugin layers launches."""
    if not parser.parse_from_file(str(path)):
        errors = [parser.get_error(i) for i in range(parser.num_errors)]
        said = "; ".join(f"{e.node_operator()} {e.node_name()}: {e.desc()}" for e in errors)
        said = said or callbacks.collector(trt).said()
        raise EngineBuildError(f"{flavor.product} {trt.__version__} cannot parse {path.name}: {said}")
    layers = plugin_host.check_network(trt, network)
    if bool(layers) != (attention == PLUGIN):
        why = "this process has loaded the plugin's library"
        if attention == PLUGIN:
            why = "there is no kernel for its attention, or an older adtp-export wrote the file; export the model again"
            if flavor is TENSORRT and tuple(map(int, trt.__version__.split(".")[:2])) < (10, 7):
                why = "plugins need 10.7 or newer"
        raise EngineBuildError(
            f"{flavor.product} {trt.__version__} made {len(layers)} plugin layers of {path.name}, asked for {attention} "
            f"attention: {why}"
        )
    return layers


@contextlib.contextmanager
def _signals_held() -> Iterator[None]:
    """Hold SIGINT and SIGTERM back until a block ends, also by an error: raised inside a callback, they would be lost in the library.

    A handler that C code installed before Python started is left alone: Python could not put it back.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    held: list[int] = []
    numbers = [number for number in (signal.SIGINT, signal.SIGTERM) if signal.getsignal(number) is not None]
    before = {number: signal.signal(number, lambda n, frame: held.append(n)) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        for missed in held:
            signal.raise_signal(missed)


def runs_here(flavor: Flavor, gpus: Sequence[str]) -> bool:
    """Say whether an engine for `gpus` can be tried on this machine."""
    return flavor.installed() is not None and local_gpu() in gpus


class TensorRtEngine:
    """A serialized engine on the local GPU. Threads may share it, and run it one after the other.

    A context has one set of shapes and addresses, so a second caller would need a second one, with the memory of all activations.
    It would gain little: the kernels of a batch are made to fill the GPU.

    Args:
        attention: "plugin" for engines with plugin layers.
        library: the C++ host to run them with, which stays in the process: no decomposed engine can be built in it any more.
            Without it the Python host runs them, a little later for each layer.

    Raises:
        MissingDependencyError: the flavour is not installed.
        EngineBuildError: the runtime refuses the engine, or fails to run it.
    """

    def __init__(self, path: Path, flavor: Flavor, attention: str = DECOMPOSED, library: Path | None = None) -> None:
        self._trt = trt = flavor.load()
        self._name, self._logger = path.name, callbacks.logger(trt)
        if attention == PLUGIN:
            _host(trt, library)
        self._runtime = trt.Runtime(self._logger)
        self._engine = self._runtime.deserialize_cuda_engine(path.read_bytes())
        if self._engine is None:
            raise EngineBuildError(f"{flavor.product} {trt.__version__} cannot load {path.name}: {self._logger.said()}")
        names = [self._engine.get_tensor_name(i) for i in range(self._engine.num_io_tensors)]
        self.inputs = tuple(n for n in names if self._engine.get_tensor_mode(n) == trt.TensorIOMode.INPUT)
        self.outputs = tuple(n for n in names if n not in self.inputs)
        self._fixed = all(size >= 0 for name in self.inputs for size in self._engine.get_tensor_shape(name))
        self._context = self._engine.create_execution_context(*self._settings())
        if self._context is None:
            raise EngineBuildError(f"{path.name} cannot be set up to run: {self._logger.said()}")
        self._buffers = DeviceBuffers()
        self._alone = threading.Lock()

    def _settings(self) -> tuple[Any, ...]:
        """Return what its context is made with: where sizes are fixed, TensorRT-RTX captures a run once and replays it."""
        if not self._fixed or not hasattr(self._engine, "create_runtime_config"):
            return ()
        settings = self._engine.create_runtime_config()
        settings.cuda_graph_strategy = self._trt.CudaGraphStrategy.WHOLE_GRAPH_CAPTURE
        return (settings,)

    def run(self, batch: Batch, wanted: Sequence[str] | None = None) -> dict[str, np.ndarray]:
        """Run a batch; one below the engine's profile is padded up to it, and the answer cut back. Other outputs stay on the device."""
        wanted = self.outputs if wanted is None else wanted
        if self._fixed or CU_SEQLENS in self.inputs:
            return self._run({name: np.ascontiguousarray(batch[name]) for name in self.inputs}, wanted)
        least = tuple(self._engine.get_tensor_profile_shape(self.inputs[0], 0)[0])
        rows, columns = batch[self.inputs[0]].shape
        lacking = ((0, max(0, least[0] - rows)), (0, max(0, least[1] - columns)))
        results = self._run({
            name: np.ascontiguousarray(np.pad(np.pad(batch[name], ((0, 0), lacking[1])), (lacking[0], (0, 0)), "edge"))
            for name in self.inputs
        }, wanted)  # fmt: skip
        return {name: a[:rows, :columns] if per_token(name, a.ndim) else a[:rows] for name, a in results.items()}

    def _run(self, arrays: Batch, wanted: Sequence[str]) -> dict[str, np.ndarray]:
        with self._alone:  # from the first address that is set to the last answer that is copied
            return self._execute(arrays, wanted)

    def _execute(self, arrays: Batch, wanted: Sequence[str]) -> dict[str, np.ndarray]:
        context, trt = self._context, self._trt
        for name, address in self._buffers.upload(arrays).items():
            if not context.set_input_shape(name, arrays[name].shape):
                raise InputError(
                    f"{name}: got shape {arrays[name].shape}, outside the profile {self._name} was built for"
                )
            context.set_tensor_address(name, address)
        results = {}
        for name in self.outputs:
            kind = trt.nptype(self._engine.get_tensor_dtype(name))
            answer = np.empty(tuple(context.get_tensor_shape(name)), kind)
            context.set_tensor_address(name, self._buffers.reserve(name, answer.nbytes))
            if name in wanted:
                results[name] = answer
        if not context.execute_async_v3(self._buffers.stream):
            raise EngineBuildError(f"{self._name} does not run: {self._logger.said()}")
        self._buffers.download(results)
        return results


_REGISTERING = threading.Lock()
"""The registry is one for the process, and threads may open engines at once."""


def _host(trt: Any, library: Path | None) -> None:
    """Have a host of the plugin registered; one that is there already serves, whichever it is."""
    with _REGISTERING:
        if plugin_host.is_registered(trt):
            return
        if library is None:
            plugin_host.register(trt)
        elif trt.get_plugin_registry().load_library(str(library)) is None:
            raise EngineBuildError(f"{library} does not load as a plugin library: {callbacks.collector(trt).said()}")
