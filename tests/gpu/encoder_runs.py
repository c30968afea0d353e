"""A student's whole plan on the emulated GPU, as an engine: its workspace is an input, so that a test fills it and looks at it."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np
import runner_builds
import torch
from emulated_gpu import Device
from tiny_models import TINY_BACKBONES

from adtp_export.contract import KEPT_SITE, OUTPUTS
from adtp_export.model import PrunedEncoderConfig
from adtp_export.model.encoder import PrunedEncoder
from adtp_export.model.heads import head_class
from adtp_export.model.pruners.ltp import SHARE
from adtp_export.plugins.encoder import planner
from adtp_export.plugins.encoder.launches import Sizes
from adtp_export.plugins.plan import INPUT, WORKSPACE, Bucket, Launch, Plan, Pointer
from adtp_export.plugins.runner import Runner
from adtp_export.plugins.shipped import kernel
from adtp_export.runtimes.described import describe

WIDTH = {"hidden_size": 64, "num_attention_heads": 2, "intermediate_size": 100, "initializer_range": 0.3}
OWN_NAMES = {"hidden_size": "dim", "num_attention_heads": "n_heads", "intermediate_size": "hidden_dim"}

BACKBONES = {
    **{name: {**TINY_BACKBONES[name], **WIDTH} for name in ("bert", "roberta", "xlm-roberta", "camembert")},
    "distilbert": {**TINY_BACKBONES["distilbert"], **{OWN_NAMES.get(key, key): value for key, value in WIDTH.items()}},
    "electra": {**TINY_BACKBONES["electra"], **WIDTH, "embedding_size": 24},
    "bert-pruned": {
        **TINY_BACKBONES["bert"],
        **WIDTH,
        "pruned_heads": {"0": [1], "2": [0]},
        "intermediate_sizes": [100, 17, 5],
    },
}
"""Small models of a width for which there are kernels, of each backbone that has them."""

PRUNINGS = {
    "none": None,
    "adtp": {
        "method": "adtp",
        "sites": ["0.ffn", "1.attention", "2.attention"],
        "retention_ratios": [0.4, 0.7, 1.0],
        "saliency_hidden_size": 8,
    },
    "saliency": {"method": "schedule", "sites": ["0.attention", "1.ffn"], "ratios": [0.7, 0.5]},
    "received": {"method": "schedule", "sites": ["0.ffn", "1.ffn"], "lengths": [9, 4], "order": "received"},
    "ltp": {"method": "ltp", "sites": ["0.ffn", "1.ffn"], "padded_length": 16},
    "ltp-topk": {"method": "ltp", "sites": ["0.ffn", "1.ffn"], "mode": "topk", "rates": [0.7, 0.4]},
    "ltp-share": {"method": "ltp", "sites": ["0.ffn", "1.ffn"], "mode": "threshold"},
    "transkimmer": {"method": "transkimmer", "sites": ["0.attention", "2.attention"]},
    "top": {"method": "top", "sites": ["1.attention", "2.attention"], "bins": ["11011", "1011010"]},
}
"""Every rule that has kernels, and cuts at all places."""

SIZES = Sizes(max_tokens=128, processors=3, mean_length=16)
"""Of few processors, so that programs take several tiles."""


def make(
    backbone: str = "bert",
    pruning: str | dict = "adtp",
    seed: int = 0,
    head: str = "sequence",
    embedding=None,
    **fields,
) -> PrunedEncoder:
    """A random student; thresholds are such that some tokens fall at each cut, and some stay. fields: of the backbone."""
    torch.manual_seed(seed)
    config = PrunedEncoderConfig(
        backbone={**BACKBONES[backbone], **fields},
        pruning=PRUNINGS[pruning] if isinstance(pruning, str) else pruning,
        head=head,
        num_labels=2 if head == "spans" else 3,
        **({"embedding": embedding} if embedding else {}),
    )
    model = head_class(head)(config).eval().requires_grad_(False)
    for i, pruner in enumerate(model.pruners.values()):
        if hasattr(pruner, "threshold"):
            pruner.threshold.fill_((0.6 if pruner.mode == SHARE else 0.02) + 0.02 * i)
    return model


def opened(plan: Plan) -> Plan:
    """The same plan, with its workspace as its last input."""

    def moved(bucket: Bucket) -> Bucket:
        def argument(a):
            is_there = isinstance(a, Pointer) and a.place == WORKSPACE
            return Pointer(INPUT, a.offset, len(bucket.inputs)) if is_there else a

        launches = tuple(replace(each, arguments=tuple(map(argument, each.arguments))) for each in bucket.launches)
        return replace(bucket, workspace=0, inputs=(*bucket.inputs, bucket.workspace), launches=launches)

    return Plan(plan.weights, tuple(map(moved, plan.buckets)))


def argument_of(launch: Launch, name: str):
    return launch.arguments[list(kernel(launch.variant).types).index(name)]


def with_argument(launch: Launch, name: str, value) -> Launch:
    place = list(kernel(launch.variant).types).index(name)
    return replace(launch, arguments=(*launch.arguments[:place], value, *launch.arguments[place + 1 :]))


def changed(plan: Plan, note: str, change: Callable[[Bucket, Launch], Launch]) -> Plan:
    """A plan in which each bucket's launch of a note is another one."""

    def other(bucket: Bucket) -> Bucket:
        assert [each.note for each in bucket.launches].count(note) == 1
        return replace(
            bucket, launches=tuple(change(bucket, each) if each.note == note else each for each in bucket.launches)
        )

    return Plan(plan.weights, tuple(map(other, plan.buckets)))


class Emulated:
    """Answers like an engine, with ``logits`` and ``kept_site``.

    Args:
        change: of the plan, before it is run.
    """

    def __init__(
        self,
        student: PrunedEncoder,
        dtype: str,
        sizes: Sizes = SIZES,
        change: Callable[[Plan], Plan] = lambda plan: plan,
    ) -> None:
        self.student, self.inputs = student, student.input_names
        self.planned = planner.make(describe(student), dtype, sizes)
        self.plan = opened(change(self.planned.plan))
        library, driver = runner_builds.for_this_process()
        self.device = Device(driver)
        self.device.set(runner_builds.NEWER, on={"FORGIVE": False})
        self.runner = Runner(self.plan, library=library)
        self.weights = [self._upload(array) for array in self.planned.weights]
        self.stream = ctypes.c_void_p()
        self.device.call("cuStreamCreate", ctypes.byref(self.stream), 1)
        self.poison = 0xFF

    def close(self) -> None:
        self.runner.close()
        self.device.driver.cuCtxSetCurrent(None)
        self.device.driver.cuDevicePrimaryCtxRelease_v2(0)

    def _upload(self, array: np.ndarray) -> int:
        address = self.device.allocate(array.nbytes)
        self.device.call(
            "cuMemcpyHtoD_v2",
            ctypes.c_uint64(address),
            array.ctypes.data_as(ctypes.c_void_p),
            ctypes.c_size_t(array.nbytes),
        )
        return address

    def bucket(self, batch: Mapping[str, np.ndarray]) -> Bucket:
        """The one that a batch takes."""
        return next(bucket for bucket in self.plan.buckets if batch["input_ids"].size <= bucket.tokens)

    def run(self, batch: Mapping[str, np.ndarray], wanted: Sequence[str] | None = None) -> dict[str, np.ndarray]:
        """Answer int64 arrays ``(B, S)`` by name. Whatever the workspace holds before, a call does not see it: it is `poison`."""
        bucket = self.bucket(batch)
        texts, length = batch["input_ids"].shape
        answers = [np.full(shape, np.nan, np.float32) for shape in self._shapes(texts, length)]
        workspace = np.full(bucket.inputs[-1], self.poison, np.uint8)
        given = [np.ascontiguousarray(batch[name]) for name in self.inputs]
        with self.device.memory(*given, workspace, *answers) as addresses:
            inputs, outputs = addresses[: len(given) + 1], addresses[len(given) + 1 :]
            self.runner.enqueue(
                self.weights,
                inputs,
                outputs,
                self.stream.value,
                texts=texts,
                tokens=texts * length,
                length=length,
            )
            self.device.call("cuStreamSynchronize", self.stream)
            self.workspace = self.device.download(inputs[-1], workspace)
            found = [self.device.download(at, like) for at, like in zip(outputs, answers)]
        self.kept = list(self._kept(bucket, texts))
        return {**dict(zip(OUTPUTS[self.student.config.head], found)), KEPT_SITE: self._kept_site(batch)}

    def _shapes(self, texts: int, length: int) -> list[tuple[int, ...]]:
        """Of the outputs; the last axis of some follows from the plan."""
        shapes = []
        for axes, nbytes in zip(OUTPUTS[self.student.config.head].values(), self.plan.buckets[0].outputs):
            bucket = self.plan.buckets[0]
            sizes = [{"batch": texts, "sequence": length}.get(axis, 0) for axis in axes]
            rows = bucket.tokens if "sequence" in axes else bucket.texts
            shapes.append(tuple(size or nbytes // 4 // rows for size in sizes))
        return shapes

    def _kept(self, bucket: Bucket, texts: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Of each cut the rows that stay, and where texts begin then."""
        for launch in bucket.launches:
            if launch.note.startswith("cut ") and launch.note.endswith(" choice"):
                at = {name: argument_of(launch, name).offset // 4 for name in ("rows", "new_cu_seqlens")}
                words = self.workspace[: len(self.workspace) // 4 * 4].view(np.int32)
                bounds = words[at["new_cu_seqlens"] :][: bucket.texts + 1]
                assert (bounds[texts:] == bounds[texts]).all()
                yield words[at["rows"] :][: bounds[-1]], bounds[: texts + 1]

    def _kept_site(self, batch: Mapping[str, np.ndarray]) -> np.ndarray:
        live = batch["attention_mask"] != 0
        live[:, 0] = True
        kept_site = np.where(live, 0, -1).astype(np.int32)
        places = np.flatnonzero(live)
        for rows, _ in self.kept:
            places = places[rows]
            kept_site.flat[places] += 1
        return kept_site
