"""What `export` is asked for: options, and whether they contradict one another."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypedDict

from ...artifacts.records import PLUGIN, DECOMPOSED
from ...contract import LAYOUTS, PRECISIONS, TRT_FLAVORS
from ...errors import InputError, did_you_mean, flag_name, quoted
from ..options import PathLike

QUANTIZED = ("int8", "fp8")
ATTENTIONS = ("auto", PLUGIN, DECOMPOSED)
MAX_ACCURACY_DROP = 1.0
MAX_TOKENS = 8192
"""Of a capacity. What decides and masks in fixed sizes grows with its square."""


@dataclass(frozen=True, kw_only=True)
class ExportOptions:
    """Options of `export`, named as those of `adtp-export`. Lists may also be text with commas.

    trt: build TensorRT engines as well.
    trt_flavor: "tensorrt", "rtx", or "auto": TensorRT where it is installed beside a GPU, else TensorRT-RTX.
    gpu: GPUs to build for, such as ["sm_86", "sm_89"]; by default sm_86, sm_89 and sm_120 for TensorRT-RTX.
    per_gpu: one engine per GPU instead of one for all.
    attention: of engines: "plugin", "decomposed", or "auto": both, until the plugin's engine has been verified here. Of files for
        ONNX Runtime on CPUs: "plugin" or "auto" verify the operators of `adtp-plugin build --cpu` as well; "auto" where they are built.
    precisions: of "fp32", "fp16", "bf16", "int8" and "fp8". model.onnx, in fp32, is always written.
    precompute_embedding_projections: also write a file for ONNX Runtime on CPUs that looks its first projections up.
    ort_cuda: also write a file for ONNX Runtime's CUDA provider.
    capacity: also write files of fixed sizes, and engines of them with `trt`: tokens of a whole batch, as text with commas, or a list.
        After colons tokens that stay after each cut, "512:256:128".
    packed_inputs: also write a file that takes texts one after the other, without padding.
    inline: also write each file for all runtimes without functions of its own, for tools that drop them.
    batch: batch sizes that engines take, "MIN:OPT:MAX".
    seq: padded lengths that engines take, "MIN:OPT:MAX"; by default "1:128:512", or what the model reads.
    calibration_data: text that int8 and fp8 take their ranges from (.txt, .tsv, .csv, .jsonl, each also .gz).
    max_accuracy_drop: percentage points that a quantized target may lose; by default 1.
    recipes: files that replace the recipes for their targets.
    verify: compare every target with PyTorch.
    verify_data: text to verify on; by default `calibration_data`, else built-in sentences, and random token ids with either.
    verify_rows: so many rows of it; by default up to 1,024.
    text_column: text column of both files, or two with a comma for pairs.
    label_column: label column of `verify_data`; measures such as accuracy are reported as well.
    openvino: verify in OpenVINO as well.
    layout: "plain", or "hub": ONNX files in `onnx/` by the names that transformers.js, optimum and sentence-transformers look for, and a
        model card; by default that of the directory that is updated, and "hub" with `push_to_hub`.
    push_to_hub: also upload the directory to this repository of the Hub; one that does not exist is made, private.
    with_tokenizer: also write a file that takes texts in place of tokens, with operators of onnxruntime-extensions.
    triton: also write models of Triton Inference Server to this model repository; implies `packed_inputs`.
    triton_name: what they are called; by default as `model_dir`.
    debug_outputs: keep the output kept_site in the ONNX files.
    force: replace an existing output directory.
    update: add targets to an output directory of the same checkpoint.
    allow_pickle: accept pytorch_model.bin where there are no safetensors.
    padded_length: for checkpoints of LTP, the length that its evaluation padded to.
    length_config: for checkpoints of Length-Adaptive Transformer and PoWER-BERT, how many tokens each layer keeps: numbers, or a file
        that holds them.
    head: what the model answers with: "sequence", "tokens", "spans" or "embedding", where the directory leaves it open.
    """

    trt: bool = False
    trt_flavor: str = "auto"
    gpu: str | Sequence[str] | None = None
    per_gpu: bool = False
    attention: str | None = None
    precisions: str | Sequence[str] = ("fp32",)
    precompute_embedding_projections: bool = False
    ort_cuda: bool = False
    capacity: int | str | Sequence[int | str] | None = None
    packed_inputs: bool = False
    inline: bool = False
    batch: str = "1:8:32"
    seq: str | None = None
    calibration_data: PathLike | None = None
    max_accuracy_drop: float | None = None
    recipes: Sequence[PathLike] = ()
    verify: bool = True
    verify_data: PathLike | None = None
    verify_rows: int | None = None
    text_column: str | None = None
    label_column: str | None = None
    openvino: bool = False
    layout: str | None = None
    push_to_hub: str | None = None
    with_tokenizer: bool = False
    triton: PathLike | None = None
    triton_name: str | None = None
    debug_outputs: bool = False
    force: bool = False
    update: bool = False
    allow_pickle: bool = False
    padded_length: int | None = None
    length_config: PathLike | Sequence[int] | None = None
    head: str | None = None

    def check(self) -> None:
        """Raises InputError where a choice is unknown, or options contradict one another."""
        for name, choices in (
            ("attention", (None, *ATTENTIONS)),
            ("trt_flavor", TRT_FLAVORS),
            ("layout", (None, *LAYOUTS)),
        ):
            if (value := getattr(self, name)) not in choices:
                known = ", ".join(filter(None, choices))
                raise InputError(f"{flag_name(name)}: got {quoted(value)}; accepted are {known}")
        for name in ("gpu", "per_gpu"):
            if getattr(self, name) and not self.trt:
                raise InputError(f"{flag_name(name)} says how to build engines; add --trt")
        if self.attention and not (self.trt or self.precompute_embedding_projections):
            raise InputError(
                "--attention is about engines and files for ONNX Runtime on CPUs; add --trt or --precompute-embedding-projections"
            )
        if self.triton_name is not None and self.triton is None:
            raise InputError("--triton-name names the models of --triton REPO, which is missing")
        if self.force and self.update:
            raise InputError("--force replaces the output directory and --update adds to it; leave one out")
        self._check_verification()
        self._check_quantization()

    @property
    def formats(self) -> list[str]:
        """The 8-bit formats that are asked for."""
        return [precision for precision in parse_precisions(self.precisions) if precision in QUANTIZED]

    def _check_verification(self) -> None:
        if not self.verify and self.verify_data:
            raise InputError("--verify-data and --skip-parity-check contradict one another; leave one out")
        if self.label_column and not self.verify_data:
            raise InputError("--label-column names a column of --verify-data FILE, which is missing")
        if self.text_column and not (self.verify_data or self.calibration_data):
            raise InputError(
                "--text-column names a column of --verify-data FILE or --calibration-data FILE; both are missing"
            )
        if self.verify_rows is not None and (not self.verify_data or self.verify_rows < 1):
            raise InputError(f"--verify-rows: got {self.verify_rows}; accepted is at least 1, with --verify-data FILE")

    def _check_quantization(self) -> None:
        formats = self.formats
        given = {
            "--calibration-data": self.calibration_data is not None,
            "--max-accuracy-drop": self.max_accuracy_drop is not None,
            "--recipe": bool(self.recipes),
        }
        for typed, is_given in given.items():
            if is_given and not formats:
                raise InputError(f"{typed} is about quantized models; add --precision int8, or fp8 with --trt")
        if formats and not self.calibration_data:
            raise InputError(
                f"--precision {formats[0]} takes its ranges from text like yours; type: --calibration-data FILE (.txt, .tsv, "
                ".csv, .jsonl; 512 rows are enough)"
            )
        if "fp8" in formats and not self.trt:
            raise InputError(
                "--precision fp8 is for TensorRT engines; add --trt, or use int8, which ONNX Runtime takes too"
            )
        if (drop := self.max_accuracy_drop) is not None and not 0 <= drop <= 100:
            raise InputError(f"--max-accuracy-drop: got {drop:g}; accepted are 0 to 100 percentage points")
        if drop is not None and not self.verify:
            raise InputError(
                "--max-accuracy-drop is held by verification, and --skip-parity-check leaves that out; leave one of the two out"
            )


def parse_precisions(given: str | Sequence[str]) -> tuple[str, ...]:
    """Return precisions from the highest down; raises InputError for an unknown one."""
    names = [name.strip() for name in (given.split(",") if isinstance(given, str) else given)]
    for name in names:
        if name not in PRECISIONS:
            known = ", ".join(PRECISIONS)
            raise InputError(f"--precision: got {quoted(name)}; accepted are {known}{did_you_mean(name, PRECISIONS)}")
    return tuple(precision for precision in PRECISIONS if precision in names)


def parse_static_tokens(given: int | str | Sequence[int | str] | None) -> tuple[tuple[int, ...], ...]:
    """Return each capacity's tokens and bounds after cuts, the largest first; raises InputError for what is none."""
    listed = str(given).split(",") if isinstance(given, (int, str)) else [*map(str, given or ())]
    found = []
    for text in listed:
        parts = [part.strip() for part in text.split(":")]
        if not all(re.fullmatch("[0-9]{1,9}", part) and 0 < int(part) <= MAX_TOKENS for part in parts):
            raise InputError(
                f"--static-tokens: got {quoted(text)}; accepted are numbers of tokens up to {MAX_TOKENS}, such as --static-tokens 128,512, or "
                "with bounds after cuts --static-tokens 512:256:128"
            )
        found.append(tuple(map(int, parts)))
    if len({tokens for tokens, *_ in found}) < len(found):
        raise InputError(f"--static-tokens: got {quoted(given)}; give each number of tokens once")
    return tuple(sorted(found, reverse=True))


class ExportKeywords(TypedDict, total=False):
    """The fields of `ExportOptions`, for type checkers."""

    trt: bool
    trt_flavor: str
    gpu: str | Sequence[str] | None
    per_gpu: bool
    attention: str | None
    precisions: str | Sequence[str]
    precompute_embedding_projections: bool
    ort_cuda: bool
    capacity: int | str | Sequence[int | str] | None
    packed_inputs: bool
    inline: bool
    batch: str
    seq: str | None
    calibration_data: PathLike | None
    max_accuracy_drop: float | None
    recipes: Sequence[PathLike]
    verify: bool
    verify_data: PathLike | None
    verify_rows: int | None
    text_column: str | None
    label_column: str | None
    openvino: bool
    layout: str | None
    push_to_hub: str | None
    with_tokenizer: bool
    triton: PathLike | None
    triton_name: str | None
    debug_outputs: bool
    force: bool
    update: bool
    allow_pickle: bool
    padded_length: int | None
    length_config: PathLike | Sequence[int] | None
    head: str | None
