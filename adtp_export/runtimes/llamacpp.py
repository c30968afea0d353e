"""llama.cpp on the CPU: a dense peer that benchmarks time. It takes texts without padding, and runs GGUF files.

It comes as `@node-llama-cpp/linux-x64` builds it, with a library for each generation of processors: `make llamacpp`. Wheels for
Python are built for AVX2 alone, or here for an hour. Its functions are called through their C interface, which changes from version
to version: it is that of `VERSION`.
"""

from __future__ import annotations

import ctypes
import importlib.util
import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..data.tokenize import Batch
from ..environment import thread_count
from ..errors import EngineBuildError, MissingDependencyError

VERSION = "0.5.0"
FOLDER = "ADTP_LLAMACPP"
"""Names the folder with llama.cpp's libraries; by default that of `make llamacpp`."""

PIECE = 512
"""Tokens of one run, at most, but for a longer text; also llama.cpp's default. In longer runs attention spends more on pairs of tokens
of different texts, which it masks: BERT-base's width took 30% more in runs of 2048."""

MAX_TEXTS = 256
"""Of one run, in llama.cpp."""

MISSING = (
    f"llama.cpp {VERSION} is not installed; type: make llamacpp, or name a folder with its libraries in {FOLDER}; "
    "and pip install 'adtp-export[peers]'"
)
CLS_POOLING = 2
ERROR = 4


def installed() -> str | None:
    """Return llama.cpp's version, or None where it, of `VERSION`, or what writes its files is missing."""
    return VERSION if _library("llama") is not None and importlib.util.find_spec("gguf") else None


def _library(name: str) -> Path | None:
    built = Path(__file__).parents[2] / "build" / "llamacpp"
    return next(Path(os.environ.get(FOLDER) or built).rglob(f"lib{name}.v{VERSION}.so"), None)


class _ContextParams(ctypes.Structure):
    """`llama_context_params`."""

    _fields_ = [
        *((name, ctypes.c_uint32) for name in ("n_ctx", "n_batch", "n_ubatch", "n_seq_max")),
        *((name, ctypes.c_uint32) for name in ("n_rs_seq", "n_outputs_max", "n_outputs_max_per_seq")),
        *((name, ctypes.c_int32) for name in ("n_threads", "n_threads_batch", "ctx_type", "rope_scaling_type")),
        *((name, ctypes.c_int32) for name in ("pooling_type", "attention_type", "flash_attn_type")),
        ("others", ctypes.c_uint8 * 72),
        ("embeddings", ctypes.c_bool),
        ("more", ctypes.c_uint8 * 31),
    ]


class _ModelParams(ctypes.Structure):
    """`llama_model_params`; its defaults are right."""

    _fields_ = [("all", ctypes.c_uint64 * 10)]


class _Batch(ctypes.Structure):
    """`llama_batch`: for each token its id, position and text, and whether its state is wanted."""

    _fields_ = [
        ("n_tokens", ctypes.c_int32),
        *((name, ctypes.c_void_p) for name in ("token", "embd", "pos", "n_seq_id", "seq_id", "logits")),
    ]


_LOG = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)


class LlamaCppEngine:
    """A BERT encoder in llama.cpp; it answers with the states of [CLS], ``states (B, H)``, and has no classifier.

    All texts have token type 0, as everywhere in llama.cpp, and its GELU is the approximation by tanh.

    Args:
        path: a folder of transformers' BERT (`save_pretrained`); it is converted when it is loaded.
        threads: 0 takes one for each core that may be used.
        precision: of the matrices: ``fp32``, ``bf16`` or ``q8_0``, which is INT8 in blocks of 32.

    Raises:
        MissingDependencyError: llama.cpp is not installed.
        EngineBuildError: it does not load the model.
    """

    inputs: tuple[str, ...] = ("input_ids", "attention_mask")
    outputs: tuple[str, ...] = ("states",)

    def __init__(self, path: Path, threads: int = 0, precision: str = "fp32") -> None:
        library, backends = _library("llama"), _library("ggml")
        if installed() is None or library is None or backends is None:
            raise MissingDependencyError(MISSING)
        self._errors: list[str] = []
        self._log = _LOG(lambda level, text, _: self._errors.append(text.decode()) if level == ERROR else None)
        self._llama = _functions(library)
        self._llama.llama_log_set(self._log, None)
        ctypes.CDLL(str(backends)).ggml_backend_load_all_from_path(str(backends.parent).encode())
        self._longest = json.loads((path / "config.json").read_text(encoding="utf-8"))["max_position_embeddings"]
        with tempfile.TemporaryDirectory() as scratch:
            file = Path(scratch) / "model.gguf"
            write_gguf(path, file, precision)
            self._model = self._llama.llama_model_load_from_file(
                str(file).encode(), self._llama.llama_model_default_params()
            )
        self._context = self._model and self._llama.llama_init_from_model(self._model, self._settings(threads))
        if not self._context:
            raise EngineBuildError(f"llama.cpp {VERSION} refuses {path.name}: {' '.join(self._errors).strip()}")

    def _settings(self, threads: int) -> _ContextParams:
        settings: _ContextParams = self._llama.llama_context_default_params()
        tokens = max(PIECE, self._longest)
        settings.n_ctx = settings.n_batch = settings.n_ubatch = tokens
        settings.n_seq_max = MAX_TEXTS
        settings.n_threads = settings.n_threads_batch = thread_count(threads)
        settings.pooling_type, settings.embeddings = CLS_POOLING, True
        return settings

    def run(self, batch: Batch, wanted: Sequence[str] | None = None) -> dict[str, np.ndarray]:
        lengths = batch["attention_mask"].sum(1)
        states: list[np.ndarray] = []
        for rows in pieces(lengths):
            texts = [batch["input_ids"][row, : lengths[row]] for row in range(len(lengths))[rows]]
            states += self._encode(texts)
        return {"states": np.stack(states)}

    def _encode(self, texts: Sequence[np.ndarray]) -> list[np.ndarray]:
        counts = [len(text) for text in texts]
        ids = np.concatenate(texts).astype(np.int32)
        positions = np.concatenate([np.arange(count, dtype=np.int32) for count in counts])
        numbers = np.repeat(np.arange(len(texts), dtype=np.int32), counts)
        places = numbers.ctypes.data + numbers.itemsize * np.arange(len(ids), dtype=np.uint64)
        ones, wanted = np.ones(len(ids), np.int32), np.ones(len(ids), np.int8)
        arrays = (array.ctypes.data for array in (positions, ones, places, wanted))
        if failed := self._llama.llama_encode(self._context, _Batch(len(ids), ids.ctypes.data, None, *arrays)):
            raise EngineBuildError(
                f"llama.cpp {VERSION} does not run a batch ({failed}): {' '.join(self._errors).strip()}"
            )
        width = self._llama.llama_model_n_embd(self._model)
        found = (self._llama.llama_get_embeddings_seq(self._context, number) for number in range(len(texts)))
        return [np.ctypeslib.as_array(pointer, (width,)).copy() for pointer in found]


def pieces(lengths: Sequence[int] | np.ndarray) -> list[slice]:
    """Split rows of these lengths, in their order, into runs of at most `PIECE` tokens, or of one text, and `MAX_TEXTS` texts."""
    ends, tokens = [0], 0
    for row, length in enumerate(lengths):
        if row and (tokens + length > PIECE or row - ends[-1] == MAX_TEXTS):
            ends.append(row)
            tokens = 0
        tokens += int(length)
    return [slice(first, end) for first, end in zip(ends, [*ends[1:], len(lengths)])]


def _functions(path: Path) -> Any:
    """Load the library and say what its functions take and return."""
    library = ctypes.CDLL(str(path))
    library.llama_model_default_params.restype = _ModelParams
    library.llama_context_default_params.restype = _ContextParams
    library.llama_log_set.argtypes = [_LOG, ctypes.c_void_p]
    library.llama_model_load_from_file.argtypes = [ctypes.c_char_p, _ModelParams]
    library.llama_model_load_from_file.restype = ctypes.c_void_p
    library.llama_init_from_model.argtypes = [ctypes.c_void_p, _ContextParams]
    library.llama_init_from_model.restype = ctypes.c_void_p
    library.llama_model_n_embd.argtypes = [ctypes.c_void_p]
    library.llama_encode.argtypes = [ctypes.c_void_p, _Batch]
    library.llama_get_embeddings_seq.argtypes = [ctypes.c_void_p, ctypes.c_int32]
    library.llama_get_embeddings_seq.restype = ctypes.POINTER(ctypes.c_float)
    return library


def write_gguf(folder: Path, path: Path, precision: str) -> None:
    """Write the encoder of a `save_pretrained` folder as a GGUF file, as llama.cpp's own converter does, with made-up words."""
    import gguf
    from safetensors.numpy import load_file

    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.BERT, config["num_hidden_layers"])
    kind = {"fp32": "F32", "bf16": "BF16", "q8_0": "Q8_0"}[precision]
    writer = gguf.GGUFWriter(path, "bert")
    _describe(writer, config)
    writer.add_file_type({"F32": 0, "BF16": 32, "Q8_0": 7}[kind])
    for name, weights in load_file(folder / "model.safetensors").items():
        known = names.get_name(name.partition(".")[2], try_suffixes=(".weight", ".bias"))
        if known is None or known.startswith("cls."):  # embeddings need no pooler and no classifier
            continue
        small = weights.ndim == 1 or known.startswith(("position_embd", "token_types"))
        uneven = kind == "Q8_0" and weights.shape[-1] % 32
        stored = gguf.GGMLQuantizationType["F32" if small else "F16" if uneven else kind]
        writer.add_tensor(known, gguf.quants.quantize(weights.astype(np.float32), stored), raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _describe(writer: Any, config: Mapping[str, Any]) -> None:
    """Add sizes and a vocabulary: benchmarks give ids, but llama.cpp wants words."""
    import gguf

    writer.add_name("bert")
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_layer_norm_eps(config["layer_norm_eps"])
    writer.add_causal_attention(False)
    writer.add_pooling_type(gguf.PoolingType.CLS)
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    words = [f"\u2581w{i}" for i in range(config["vocab_size"] - len(special))]
    writer.add_token_type_count(config["type_vocab_size"])
    writer.add_tokenizer_model("bert")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(special + words)
    writer.add_token_types([gguf.TokenType.CONTROL] * len(special) + [gguf.TokenType.NORMAL] * len(words))
    writer.add_pad_token_id(0)
    writer.add_unk_token_id(1)
    writer.add_bos_token_id(2)
    writer.add_eos_token_id(3)
    writer.add_sep_token_id(3)
    writer.add_mask_token_id(4)
