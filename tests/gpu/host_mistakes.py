"""Mistakes that a host could make, planted one at a time, and what becomes of each."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

NOTICED = ""


@dataclass(frozen=True)
class Mistake:
    """`change` gets the host module and says what to do to calls; `why` is empty, or why nobody can notice it."""

    change: Callable[[Any], Callable[[Any], Any] | None]
    why: str = NOTICED


def _of_call(change: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda host: change


def _of_binary(change: Callable[[Any], Any]) -> Callable[[Any], None]:
    """Change what `choose` found."""

    def plant(host: Any) -> None:
        choose = host.choose
        host.choose = lambda *arguments: change(choose(*arguments))

    return plant


def _of_arguments(change: Callable[[Any, Any], Any]) -> Callable[[Any], None]:
    """Change values and types of a kernel's arguments."""

    def plant(host: Any) -> None:
        arguments = host.arguments
        host.arguments = lambda call, kernel: tuple(map(tuple, change(*map(list, arguments(call, kernel)))))

    return plant


def _with_programs(programs: Callable[[Any, int, int, int], int]) -> Callable[[Any], None]:
    """Change the size of the grid."""

    def plant(host: Any) -> None:
        host.Binary.programs = programs

    return plant


def _always_allowed(host: Any) -> None:
    host._MORE_THAN_ALWAYS_ALLOWED = 10**9


def _kernels(names: Callable[[Any], tuple[str, ...]]) -> Callable[[Any], None]:
    def plant(host: Any) -> None:
        correct = host.Call.kernels.fget
        host.Call.kernels = property(lambda call: names(correct(call)))

    return plant


def _of_architecture(name: str) -> Callable[[Any], None]:
    def plant(host: Any) -> None:
        right = host.gpu
        host.gpu = lambda device: replace(right(device), architecture=name)

    return plant


def _scale_as(kind: Any, value: Callable[[float], Any]) -> Callable[[Any], None]:
    def change(values: list, types: list) -> tuple[list, list]:
        at = types.index(ctypes.c_float)
        return [*values[:at], value(values[at]), *values[at + 1 :]], [*types[:at], kind, *types[at + 1 :]]

    return _of_arguments(change)


def _counts_as_int64(values: list, types: list) -> tuple[list, list]:
    return values, [ctypes.c_int64 if kind is ctypes.c_int32 else kind for kind in types]


PYTHON: dict[str, Mistake] = {
    "k and v exchanged": Mistake(_of_call(lambda c: replace(c, k=c.v, v=c.k))),
    "q and k exchanged": Mistake(_of_call(lambda c: replace(c, q=c.k, k=c.q))),
    "q and out exchanged": Mistake(_of_call(lambda c: replace(c, q=c.out, out=c.q))),
    "stride in bytes": Mistake(_of_call(lambda c: replace(c, row_stride=2 * c.row_stride))),
    "stride of another layout": Mistake(_of_call(lambda c: replace(c, row_stride=c.num_heads * c.head_size + 16))),
    "a sequence too many": Mistake(_of_call(lambda c: replace(c, sequences=c.sequences + 1))),
    "a sequence too few": Mistake(_of_call(lambda c: replace(c, sequences=c.sequences - 1))),
    "T and B exchanged": Mistake(_of_call(lambda c: replace(c, tokens=c.sequences, sequences=c.tokens))),
    "T padded to a multiple of 64": Mistake(
        _of_call(lambda c: replace(c, tokens=-(-c.tokens // 64) * 64)),
        "cu_seqlens says where the rows end; T only sizes the grid and limits garbage. Of received it strides rows: see the test",
    ),
    "a head too few": Mistake(_of_call(lambda c: replace(c, num_heads=c.num_heads - 1))),
    "scale squared": Mistake(_of_call(lambda c: replace(c, scale=c.scale**2))),
    "scale as a double": Mistake(_scale_as(ctypes.c_double, float)),
    "scale as an integer": Mistake(_scale_as(ctypes.c_int32, int)),
    "counts of 64 bits": Mistake(
        _of_arguments(_counts_as_int64), "the driver copies 4 bytes of each, and these are the lower ones"
    ),
    "no shared memory": Mistake(_of_binary(lambda b: replace(b, shared_bytes=0))),
    "16 bytes of shared memory too few": Mistake(_of_binary(lambda b: replace(b, shared_bytes=b.shared_bytes - 16))),
    "shared memory not asked for": Mistake(_always_allowed),
    "half the threads": Mistake(_of_binary(lambda b: replace(b, threads=b.threads // 2))),
    "twice the threads": Mistake(_of_binary(lambda b: replace(b, threads=2 * b.threads))),
    "tiles of another variant": Mistake(_of_binary(lambda b: replace(b, block_m=2 * b.block_m))),
    "grid: B left out": Mistake(_with_programs(lambda b, t, s, n: -(-t // b.block_m) * n)),
    "grid: heads left out": Mistake(_with_programs(lambda b, t, s, n: t // b.block_m + s)),
    "grid: more than is needed": Mistake(
        _with_programs(lambda b, t, s, n: (t // b.block_m + s + 1) * n), "a tile that nobody needs ends at once"
    ),
    "log-sum-exps left out": Mistake(_kernels(lambda names: tuple(n for n in names if n != "log_sum_exp"))),
    "received before log-sum-exps": Mistake(
        _kernels(lambda names: names if len(names) < 3 else (names[1], names[0], names[2]))
    ),
    "attention before received": Mistake(
        _kernels(lambda names: names if len(names) < 3 else (names[0], names[2], names[1]))
    ),
    "code of a newer GPU": Mistake(_of_architecture("sm_120")),
    "code of an older GPU of its kind": Mistake(
        _of_architecture("sm_80"),
        "machine code runs on later GPUs of its major version; it is only not made for this one",
    ),
    "q not aligned": Mistake(_of_call(lambda c: replace(c, q=c.q + 8))),
}
"""Planted in `adtp_export.plugins.driver`, on an sm_86."""


def plant(host: Any, name: str) -> Callable[[Any], Any]:
    """Plant a mistake in the host module; return what to do to each call."""
    change = PYTHON[name].change(host)
    return change if callable(change) else replace


CPP: dict[str, tuple[str, str, str]] = {
    "k and q exchanged": ("{&call.q, &call.k}", "{&call.k, &call.q}", NOTICED),
    "out before cu_seqlens": ("{&call.cuSeqlens, &call.out}", "{&call.out, &call.cuSeqlens}", NOTICED),
    "v left out": ("arguments.push_back(&call.v)", "(void)0", NOTICED),
    "scale is the number of heads": ("&call.numHeads, &call.scale", "&call.numHeads, &call.numHeads", NOTICED),
    "T and B exchanged": ("&call.tokens, &call.sequences", "&call.sequences, &call.tokens", NOTICED),
    "grid: B left out": ("variant->blockM + call.sequences", "variant->blockM", NOTICED),
    "grid: heads left out": ("tiles : tiles * call.numHeads", "tiles : tiles", NOTICED),
    "grid: more for received": (
        "tiles : tiles * call.numHeads",
        "tiles * call.numHeads : tiles * call.numHeads",
        "a tile that nobody needs ends at once",
    ),
    "no shared memory": ("binary->sharedBytes, stream", "0, stream", NOTICED),
    "shared memory not asked for": ("binary.sharedBytes > kAlwaysAllowedSharedBytes", "false", NOTICED),
    "a block of one warp": ("1, 1, variant->threads, 1, 1", "1, 1, 32, 1, 1", NOTICED),
    "received before log-sum-exps": (
        "Kind::kLSE, Kind::kRECEIVED, Kind::kATTENTION",
        "Kind::kRECEIVED, Kind::kLSE, Kind::kATTENTION",
        NOTICED,
    ),
    "received alone": (
        "Kind::kLSE, Kind::kRECEIVED, Kind::kATTENTION",
        "Kind::kRECEIVED, Kind::kATTENTION",
        NOTICED,
    ),
    "the first variant for all lengths": (
        "chosen(first, last, call.tokens, call.sequences, call.numHeads, device.processors)",
        "first",
        "every variant is right for every length; the choice is for speed",
    ),
    "PTX for every GPU": (
        "binaries[i].architecture == architecture)",
        "false)",
        "PTX is right on every GPU; the driver has to compile it",
    ),
}
"""Planted in `plugins/cpp/launch.cpp` or `driver.cpp`: words, what they become, and why nobody can notice it, if so."""

RUNNER: dict[str, tuple[str, str, str, str]] = {
    "no wait for the call before": (
        "runner.cpp",
        "Status const s = driver().cuStreamWaitEvent(stream, done, 0)",
        "Status const s = 0",
        NOTICED,
    ),
    "the call's end not recorded": (
        "runner.cpp",
        "std::string const error = record(stream);",
        "std::string const error;",
        NOTICED,
    ),
    "the host does not wait": (
        "runner.cpp",
        "error.empty() ? driver().cuEventSynchronize(done) : 0",
        "0",
        NOTICED,
    ),
    "a graph launched into a capture": ("runner.cpp", "return capturing ?", "return !stream ?", NOTICED),
    "memory for the smallest bucket alone": (
        "memory.cpp",
        "Bucket const& bucket = plan.buckets[i];\n        sizes",
        "Bucket const& bucket = plan.buckets[i - i];\n        sizes",
        NOTICED,
    ),
    "inputs over the workspace": (
        "memory.cpp",
        "mInputs = workspace + sizes.workspace",
        "mInputs = workspace",
        NOTICED,
    ),
    "parameters stay those of the first call": ("replay.cpp", "if (!changed)", "if (true)", NOTICED),
    "parameters set anew for every call": (
        "replay.cpp",
        "if (!changed)",
        "if (false)",
        "right, and slower: a test counts them",
    ),
    "programs of the largest call": (
        "replay.cpp",
        "nodeOf(*step.kernel, programs, parameters);\n        if (Status const s = driver().cuGraphExec",
        "nodeOf(*step.kernel, programs + 64, parameters);\n        if (Status const s = driver().cuGraphExec",
        "programs that nobody needs end at once",
    ),
    "programs of a call of one text": (
        "replay.cpp",
        "nodeOf(*step.kernel, programs, parameters);\n        if (Status const s = driver().cuGraphExec",
        "nodeOf(*step.kernel, programsOf(*step.launch, 1), parameters);\n        if (Status const s = driver().cuGraphExec",
        NOTICED,
    ),
    "a change that only the last argument may show": (
        "replay.cpp",
        "!= value || changed;",
        "!= value;",
        NOTICED,
    ),
    "launches do not follow each other": (
        "replay.cpp",
        "&step.node, mGraph, &last, last != nullptr, &node",
        "&step.node, mGraph, &last, false, &node",
        NOTICED,
    ),
    "the outputs' copy left out": (
        "replay.cpp",
        "return addCopy(buffers.outputCopy(*mBucket), context, last);",
        "return {};",
        NOTICED,
    ),
    "offsets left out": (
        "replay.cpp",
        "addressOf(call.inputs[argument.index]) + argument.value",
        "addressOf(call.inputs[argument.index])",
        NOTICED,
    ),
    "texts for tokens": (
        "replay.cpp",
        "static_cast<uint64_t>(call.texts);",
        "static_cast<uint64_t>(call.tokens);",
        NOTICED,
    ),
    "no shared memory": (
        "replay.cpp",
        "kernel.threads, 1, 1, kernel.sharedBytes, parameters.data(), nullptr, nullptr",
        "kernel.threads, 1, 1, 0, parameters.data(), nullptr, nullptr",
        NOTICED,
    ),
    "the graph freed once it is instantiated": (
        "replay.cpp",
        "Status const s = driver().cuGraphUpload(mExec, nullptr);",
        "Status const s = driver().cuGraphUpload(mExec, nullptr); driver().cuGraphDestroy(mGraph); mGraph = nullptr;",
        NOTICED,
    ),
}
"""Planted in a file of the runner: the file, words, what they become, and why nobody can notice it, if so."""
