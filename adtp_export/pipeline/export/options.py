"""What `export` is asked for: options, and whether they contradict one another."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ...artifacts.records import DECOMPOSED, PLUGIN
from ...contract import LAYOUTS, PRECISIONS, PRECOMPUTED_MODEL, TRT_FLAVORS
from ...errors import InputError, did_you_mean, flag_name, quoted
from ...io import directory_name
from ...options import COUNT, PathLike, Range, ReadOptions, about, listed, option
from ..progress import Steps

QUANTIZED = ("int8", "fp8")
ATTENTIONS = ("auto", PLUGIN, DECOMPOSED)
MAX_ACCURACY_DROP = 1.0
MAX_TOKENS = 8192
"""Of a static size. The operators that decide and mask in static shapes grow with its square."""


@dataclass(frozen=True, kw_only=True)
class ExportOptions(ReadOptions):
    """Options of `export` and `adtp-export`. Lists may also be text with commas."""

    # An option is one paragraph, which a formatter would take apart.
    # fmt: off
    model_dir: PathLike = field(kw_only=False, metadata=about(
        "checkpoint directory with config.json, model.safetensors and the tokenizer: a token-pruned student, a plain "
        "transformers encoder, or a checkpoint of another supported system", metavar="MODEL_DIR"))
    out: PathLike | None = field(default=None, kw_only=False, metadata=about(
        "output directory (default: ./<name of MODEL_DIR>-export)", metavar="DIR", flag="--out"))
    force: bool = option(False, "replace an existing output directory")
    update: bool = option(False, "add targets to an existing export of the same checkpoint")

    pruning: str | PathLike | None = option(None,
        "which image tokens of a vision-language model are dropped: a method as published for LLaVA-1.5-7B (btp, fastv, pyramiddrop, "
        "divprune) or Qwen2.5-VL-7B (btp-qwen), or a JSON file with its settings. Vision towers take divprune. If the field "
        "pruning of config.json has this method, its settings count (default: that field, or none)", "checkpoint",
        metavar="NAME")

    precisions: str | Sequence[str] = option(("fp32",),
        "precisions of the ONNX files and engines: fp32, fp16, bf16, int8, fp8. model.onnx, in fp32, is always written",
        "ONNX files", metavar="LIST", flag="--precision")
    precompute_embedding_projections: bool = option(False,
        f"also write {PRECOMPUTED_MODEL} for ONNX Runtime on CPUs, which reads the first layer's projections from tables: about 10% "
        "faster, and larger by 12 bytes x vocabulary x hidden size. Also copies the library of the attention operators to "
        "OUT/plugins", "ONNX files")
    ort_cuda: bool = option(False, "also write model.ort-cuda.PRECISION.onnx for ONNX Runtime's CUDA provider", "ONNX files")
    cuda: bool = option(False,
        "also write model.cuda.PRECISION.onnx for our own CUDA kernels, which run a whole batch as one CUDA graph: with the library of "
        "adtp-plugin build --cuda, by adtp_export alone or in ONNX Runtime's CUDA provider", "ONNX files")
    packed_inputs: bool = option(False,
        "also write model.packed.onnx, which takes the tokens of all texts concatenated, with cumulative lengths, instead of a padded "
        "batch", "ONNX files")
    static_tokens: int | str | Sequence[int | str] | None = option(None,
        "also export static-shape models for CUDA graph replay; T is the total number of tokens per batch of up to --batch MAX texts. "
        "Append the maximum number of tokens after each prune site, e.g. 512:256:128", "ONNX files", metavar="T[,T...]")
    inline: bool = option(False,
        "also write each ONNX file for all runtimes without model-local functions (model.inline.onnx), for tools that do not "
        "support them", "ONNX files")
    with_tokenizer: bool = option(False,
        "also write model.strings.onnx, which takes strings as input; it includes the tokenizer as operators of "
        "onnxruntime-extensions", "ONNX files")
    debug_outputs: bool = option(False,
        "keep the output kept_site, the prune site at which each token was dropped, in the ONNX files", "ONNX files")

    trt: bool = option(False, "also build TensorRT engines", "engines")
    trt_flavor: str = option("auto",
        "auto: TensorRT if it is installed beside a GPU, otherwise TensorRT-RTX, which builds without a GPU",
        "engines", choices=TRT_FLAVORS)
    gpu: str | Sequence[str] | None = option(None,
        "compute capabilities of the GPUs to build for (default: the GPU of this machine; for TensorRT-RTX sm_86,sm_89,sm_120)",
        "engines", metavar="LIST")
    per_gpu: bool = option(False, "build one engine per GPU instead of one for all", "engines")
    attention: str | None = option(None,
        "attention implementation of engines and of ONNX Runtime on CPUs: plugin uses the ragged-attention kernels, decomposed uses "
        "standard ONNX operators, auto makes both, but keeps only the plugin engine if it can be verified on this machine (default: "
        "auto)", "engines", choices=ATTENTIONS)
    batch: str = option("1:8:32", "smallest, usual and largest batch size of engines", "engines", metavar="MIN:OPT:MAX")
    seq: str | None = option(None,
        "smallest, usual and largest padded length of engines (default: 1:128:512, with MAX limited to what the model reads)",
        "engines", metavar="MIN:OPT:MAX")

    calibration_data: PathLike | None = option(None,
        "text from which int8 and fp8 ranges are calibrated, 512 rows at most: .txt, .tsv, .csv or .jsonl, each also .gz. Without it, int8 "
        "is for CPUs alone, with a range per token",
        "quantization", metavar="FILE")
    max_accuracy_drop: float | None = option(None,
        "percentage points that a quantized target may lose: of accuracy with --label-column, otherwise of unchanged predictions. The "
        f"most sensitive matrix products stay unquantized until the limit holds (default: {MAX_ACCURACY_DROP:g})",
        "quantization", metavar="X", within=Range(0, 100, "from 0 to 100 percentage points"))
    recipes: Sequence[PathLike] = option((),
        "quantization recipe (TOML) that replaces the built-in one for its target and format; may be given several times",
        "quantization", metavar="FILE", flag="--recipe")

    verify_data: PathLike | None = option(None,
        "text to verify on: .txt, .tsv, .csv, .jsonl or SQuAD's .json, each also .gz (default: --calibration-data, or built-in sentences)",
        "verification", metavar="FILE")
    verify_rows: int | None = option(None,
        "number of rows of --verify-data to use (default: up to 1,024)", "verification", metavar="N", within=COUNT)
    text_column: str | None = option(None,
        "text column of --verify-data and --calibration-data, or two separated by a comma for sentence pairs",
        "verification", metavar="C")
    label_column: str | None = option(None,
        "label column of --verify-data; accuracy or the measures of the task are then reported for every target",
        "verification", metavar="C")
    skip_parity_check: bool = option(False,
        "do not compare the exported files with the PyTorch model; they are marked unverified", "verification")
    openvino: bool = option(False, "also verify the model in OpenVINO", "verification")

    layout: str | None = option(None,
        "names of the ONNX files: plain puts model.onnx into the output directory; hub uses onnx/ and the names that transformers.js, "
        "optimum and sentence-transformers expect, and adds a model card (default: plain, or hub with --push-to-hub; with --update "
        "the existing one)", "publishing", choices=LAYOUTS)
    push_to_hub: str | None = option(None,
        "also upload the output directory to this Hugging Face Hub repository, such as user/my-model; a missing repository is created "
        "as private", "publishing", metavar="REPO")
    triton: PathLike | None = option(None,
        "also add models to this Triton Inference Server repository: strings in for the Python backend, tokens in for ONNX Runtime and "
        "TensorRT. Implies --packed-inputs", "publishing", metavar="REPO")
    triton_name: str | None = option(None,
        "name of the Triton models (default: the name of MODEL_DIR)", "publishing", metavar="NAME")
    # fmt: on
    steps: Steps | None = None

    def check(self) -> None:
        for name in ("gpu", "per_gpu", "trt_flavor"):
            if getattr(self, name) != getattr(ExportOptions, name) and not self.trt:
                raise InputError(f"{flag_name(name)} says how to build engines; add --trt")
        if self.triton_name is not None and self.triton is None:
            raise InputError("--triton-name names the models of --triton REPO, which is missing")
        if self.force and self.update:
            raise InputError("--force replaces the output directory and --update adds to it; leave one out")
        self._check_verification()
        self._check_quantization()

    @property
    def directory(self) -> Path:
        """Where the export goes; when nothing is said: ``./<name of MODEL_DIR>-export``."""
        return Path(f"{directory_name(Path(self.model_dir))}-export" if self.out is None else self.out)

    @property
    def formats(self) -> list[str]:
        """The 8-bit formats that are asked for."""
        return [precision for precision in parse_precisions(self.precisions) if precision in QUANTIZED]

    def _check_verification(self) -> None:
        if self.skip_parity_check and self.verify_data:
            raise InputError("--verify-data and --skip-parity-check contradict one another; leave one out")
        if self.label_column and not self.verify_data:
            raise InputError("--label-column names a column of --verify-data FILE, which is missing")
        if self.text_column and not (self.verify_data or self.calibration_data):
            raise InputError(
                "--text-column names a column of --verify-data FILE or --calibration-data FILE; both are missing"
            )
        if self.verify_rows is not None and not self.verify_data:
            raise InputError("--verify-rows counts rows of --verify-data FILE, which is missing")

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
        if "fp8" in formats and not self.trt:
            raise InputError(
                "--precision fp8 is for TensorRT engines; add --trt, or use int8, which ONNX Runtime takes too"
            )
        if formats and not self.calibration_data and self.trt:
            raise InputError(
                f"--precision {formats[0]} takes its ranges from text like yours; type: --calibration-data FILE (.txt, .tsv, "
                ".csv, .jsonl; 512 rows are enough)"
            )
        if self.max_accuracy_drop is not None and self.skip_parity_check:
            raise InputError(
                "--max-accuracy-drop is held by verification, and --skip-parity-check leaves that out; leave one of the two out"
            )


def parse_precisions(given: str | Sequence[str]) -> tuple[str, ...]:
    """Return precisions from the highest down; raises InputError for an unknown one, or for none."""
    names = listed(given)
    if not any(names):
        raise InputError(f"--precision: got none; accepted are {', '.join(PRECISIONS)}")
    for name in names:
        if name not in PRECISIONS:
            known = ", ".join(PRECISIONS)
            raise InputError(f"--precision: got {quoted(name)}; accepted are {known}{did_you_mean(name, PRECISIONS)}")
    return tuple(precision for precision in PRECISIONS if precision in names)


def precisions_among(options: ExportOptions, accepted: Sequence[str], what: str, hint: str = "") -> tuple[str, ...]:
    """Return the precisions that are asked for, with fp32 first; raises InputError for one that `what` do not have."""
    asked = parse_precisions(options.precisions)
    if other := next((each for each in asked if each not in accepted), None):
        raise InputError(f"--precision: got {other}; accepted for {what} are {', '.join(accepted)}{hint}")
    return ("fp32", *(each for each in asked if each != "fp32"))


def parse_static_tokens(given: int | str | Sequence[int | str] | None) -> tuple[tuple[int, ...], ...]:
    """Return each size's tokens and bounds after cuts, the largest first; raises InputError for what is none."""
    texts = str(given).split(",") if isinstance(given, (int, str)) else [*map(str, given or ())]
    found = []
    for text in texts:
        parts = [part.strip() for part in text.split(":")]
        if not all(re.fullmatch("[0-9]{1,9}", part) and 0 < int(part) <= MAX_TOKENS for part in parts):
            raise InputError(
                f"--static-tokens: got {quoted(text)}; accepted are numbers of tokens up to {MAX_TOKENS}, such as --static-tokens 128,512, "
                "or with bounds after cuts --static-tokens 512:256:128"
            )
        found.append(tuple(map(int, parts)))
    if len({tokens for tokens, *_ in found}) < len(found):
        raise InputError(f"--static-tokens: got {quoted(given)}; give each number of tokens once")
    return tuple(sorted(found, reverse=True))
