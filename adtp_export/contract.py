"""Names that rooms share: the graph's inputs and outputs, its matrix products and metadata, and the attention operators.

`tests/test_contract.py` compares them with a real export and with the C++ source of the plugin.
"""

from __future__ import annotations

from collections.abc import Container

__version__ = "0.1.0"

BATCH, SEQUENCE, LABELS, HIDDEN = "batch", "sequence", "num_labels", "hidden_size"
VOCABULARY = "vocab_size"
"""Axes."""

INPUT_IDS, ATTENTION_MASK, TOKEN_TYPE_IDS = "input_ids", "attention_mask", "token_type_ids"
TEXT = "text"
"""Input ``(batch) string`` of a file that has its tokenizer before the model."""
INPUTS = dict.fromkeys((INPUT_IDS, ATTENTION_MASK, TOKEN_TYPE_IDS), (BATCH, SEQUENCE))
"""Inputs of the graph with their axes, all int64; token types only where the model tells them apart."""

TOKENS, BOUNDS, CU_SEQLENS = "tokens", "batch + 1", "cu_seqlens"
PACKED_INPUTS = {INPUT_IDS: (TOKENS,), CU_SEQLENS: (BOUNDS,), TOKEN_TYPE_IDS: (TOKENS,)}
"""Those of its form with packed inputs, where outputs have the axis `TOKENS` in place of batch and sequence: texts one after the
other, and the places where they begin and end, int32."""

LOGITS, START_LOGITS, END_LOGITS = "logits", "start_logits", "end_logits"
SENTENCE_EMBEDDING, LAST_HIDDEN_STATE = "sentence_embedding", "last_hidden_state"
TOKEN_EMBEDDINGS, TOKEN_WEIGHTS = "token_embeddings", "token_weights"
HEAD_SEQUENCE, HEAD_TOKENS, HEAD_SPANS, HEAD_EMBEDDING = "sequence", "tokens", "spans", "embedding"
HEAD_VECTORS, HEAD_HYBRID = "vectors", "hybrid"
SPARSE_EMBEDDING, HEAD_SPARSE = "sparse_embedding", "sparse"
MASK_LOGITS, HEAD_MASKED, MASKS = "mask_logits", "masked", "masks"
VECTORS = (HEAD_EMBEDDING, HEAD_SPARSE, HEAD_HYBRID)
"""Heads that give a vector of each text, which are compared with one another. A pair is two texts to them."""
OUTPUTS: dict[str, dict[str, tuple[str, ...]]] = {
    HEAD_SEQUENCE: {LOGITS: (BATCH, LABELS)},
    HEAD_TOKENS: {LOGITS: (BATCH, SEQUENCE, LABELS)},
    HEAD_SPANS: {START_LOGITS: (BATCH, SEQUENCE), END_LOGITS: (BATCH, SEQUENCE)},
    HEAD_EMBEDDING: {SENTENCE_EMBEDDING: (BATCH, HIDDEN), LAST_HIDDEN_STATE: (BATCH, SEQUENCE, HIDDEN)},
    HEAD_SPARSE: {SPARSE_EMBEDDING: (BATCH, VOCABULARY)},
    HEAD_MASKED: {MASK_LOGITS: (BATCH, MASKS, VOCABULARY)},
    HEAD_VECTORS: {TOKEN_EMBEDDINGS: (BATCH, SEQUENCE, HIDDEN)},
    HEAD_HYBRID: {
        SENTENCE_EMBEDDING: (BATCH, HIDDEN),
        TOKEN_WEIGHTS: (BATCH, SEQUENCE),
        TOKEN_EMBEDDINGS: (BATCH, SEQUENCE, HIDDEN),
    },
}
"""Outputs of each head in order, with their axes, all fp32; padding has zeros. The first is what an answer is made of. In the last
two heads tokens that were dropped have zeros, too."""

KEPT_SITE = "kept_site"
"""Output ``(batch, sequence) int32`` of the debug form."""

OVERFLOW = "overflow"
"""Output ``(sites,) int64`` of files with fixed sizes: how many tokens that stay found no room at each. With any, the answer is none."""


def per_token(name: str, rank: int) -> bool:
    """Say whether the second axis of an output of so many axes is that of tokens: the logits of a tagger have three."""
    axes_of_that_name = [outputs[name] for outputs in OUTPUTS.values() if name in outputs]
    return name == KEPT_SITE or any(len(axes) == rank and axes[1] == SEQUENCE for axes in axes_of_that_name)


ORT_CPU, ORT_CUDA, OWN_CUDA, LINEAR = "ort-cpu", "ort-cuda", "cuda", "linear"
"""What files for ONNX Runtime's CPU or CUDA provider alone are called, those for our own CUDA kernels, and those whose matrix products
are operators of lower precision, and recipes for the first and the last."""


def model_name(form: str = "", precision: str = "fp32", made_for: str = "") -> str:
    """Name an ONNX file as the plain layout does: what alone it is made for, its form, and a precision other than fp32.

    The precision of a file that is made for one runtime is always said: ``model.ort-cpu.int8.onnx``.
    """
    said = precision if made_for or precision != "fp32" else ""
    return ".".join(filter(None, ("model", made_for, form, said, "onnx")))


MODEL = model_name()
"""The portable file in fp32, from which all others are made."""
PACKED_MODEL = model_name("packed")
"""The same for packed inputs."""
PRECOMPUTED_MODEL = model_name(made_for="precomputed")
"""The one whose first layer looks its projections up."""
PLAIN, HUB = "plain", "hub"
LAYOUTS = (PLAIN, HUB)
"""How an output directory names its ONNX files."""
_ON_THE_HUB = {
    MODEL: "onnx/model.onnx",
    model_name(precision="fp16"): "onnx/model_fp16.onnx",
    model_name(precision="int8", made_for=ORT_CPU): "onnx/model_quantized.onnx",
}


def layout_path(name: str, layout: str) -> str:
    """Return where a layout has an ONNX file. That of the Hub has all in `onnx/`, some by the names that other libraries look for."""
    return name if layout == PLAIN else _ON_THE_HUB.get(name, f"onnx/{name}")


def layout_of(files: Container[str]) -> str:
    """Tell the layout of an output directory by the names of its files."""
    return PLAIN if MODEL in files else HUB


VISION_MODEL, EMBED_MODEL, PREFILL_MODEL, STEP_MODEL = "vision.onnx", "embed.onnx", "prefill.onnx", "step.onnx"
"""Files of a model that generates text: pictures to image tokens, ids to states, prompts to keys and values, and one token more."""
SQUARE, TILES, ANYRES, GRID = "square", "tiles", "anyres", "grid"
"""How a picture becomes tiles for `vision.onnx`: one square; tiles with text between them (Idefics3); tiles of which borders are cut off,
and a token behind each row of patches (LLaVA-NeXT). Or it stays whole, a grid of patches of any size (Qwen2-VL)."""
MOST_PATCHES = 4096
"""Patches along a side of a picture that stays whole, at most."""
HEAD_TEXT, HEAD_IMAGES = "text", "images"
"""What such a model answers with, as a manifest calls it; and what a vision tower of its own does, which has `VISION_MODEL` alone."""
IMAGE_EMBEDS = "image_embeds"
"""Its output with a vector of each picture."""
PIXEL_VALUES, IMAGE_FEATURES, INPUTS_EMBEDS, IMAGE = "pixel_values", "image_features", "inputs_embeds", "image"
IMAGE_KEPT, PATCH_PLACES = "image_kept", "patch_places"
POSITIONS, ROWS, PAST, PRESENT, KEY, VALUE = "positions", "rows", "past", "present", "key", "value"
"""Their inputs and outputs. `CU_SEQLENS`, `POSITIONS` and `ROWS` end with the layer that such tokens enter first (`entered`)."""


def entered(name: str, layer: int) -> str:
    """Name what belongs to the tokens that enter layers from one on: ``cu_seqlens.0``."""
    return f"{name}.{layer}"


def cached(when: str, layer: int, what: str) -> str:
    """Name keys or values: ``past.0.key``."""
    return f"{when}.{layer}.{what}"


def in_precision(name: str, precision: str) -> str:
    """Name a file of a model that generates text: ``prefill.onnx`` in fp32, else ``prefill.fp16.onnx``."""
    return name if precision == "fp32" else name.replace(".onnx", f".{precision}.onnx")


KEPT_ROWS = "kept_rows/"
"""What the names of the row indices of each cut begin with; the first is `UNPAD`, the others end with the site."""
UNPAD = f"{KEPT_ROWS}unpad"

PRUNERS = "cuts."
"""What the names of a pruner's weights begin with in the graph. What they feed decides, so it stays in fp32."""

ROTATE = ".attention.rotate/"
"""Part of the names of nodes that turn queries and keys by their positions. They stay in fp32."""

RMS = ".rms/"
"""Part of the names of nodes that divide states by their root mean square. They stay in fp32: squares overflow in fp16."""

QKV, ATTENTION_OUTPUT, INTERMEDIATE, OUTPUT = (
    "attention.qkv",
    "attention.output.dense",
    "ffn.intermediate.dense",
    "ffn.output.dense",
)
"""Places of a layer's matrix products; their nodes are called ``layers.<i>.<place>/Gemm``."""
PRODUCTS = (QKV, ATTENTION_OUTPUT, INTERMEDIATE, OUTPUT)
RESIDUALS = {QKV: "attention.output", INTERMEDIATE: "ffn.output"}
"""Products whose input is also the residual of their sublayer, and where that is added."""


def product(layer: int, place: str) -> str:
    """Name a matrix product: ``layers.0.attention.qkv``."""
    return f"layers.{layer}.{place}"


ASKED, IMAGE_CUTS = ".attention.asked/", "image_cuts."
"""Part of the names of nodes that say what the last token asks, and what those of a stage begin with. They decide, so they stay in fp32."""

METADATA = "adtp."
"""What the keys of the model's metadata properties begin with: ``adtp.version``, ``adtp.precision`` ..."""
VERSION, PRECISION, CHECKPOINT_SHA256, PRUNE_SITES, RECIPE = (
    "version",
    "precision",
    "checkpoint_sha256",
    "prune_sites",
    "recipe",
)

MAX_THREADS = 1024
"""That a user may ask a runtime for."""

DEFAULT_BATCH = 128
"""Texts that `load` runs at once, at most. On CPUs it is mostly their tokens that decide (`inference.batches`)."""

DEFAULT_PICTURES = 8
"""Pictures that run at once."""

PRECISIONS = ("fp32", "fp16", "bf16", "int8", "fp8")
"""Of targets, from the highest down."""

AUTO, TENSORRT, RTX = "auto", "tensorrt", "rtx"
TRT_FLAVORS = (AUTO, TENSORRT, RTX)
"""What `--trt-flavor` takes; `runtimes.tensorrt` has the two that engines are built by."""

DOMAIN, DOMAIN_VERSION = "adtp", 1
ATTENTION, ATTENTION_RECEIVED = "AdtpRaggedAttention", "AdtpRaggedAttentionReceived"
ATTENTION_FROM_OTHERS = "AdtpRaggedAttentionFromOthersReceived"
ATTENTION_RELATIVE, ATTENTION_WINDOW = "AdtpRaggedAttentionRelative", "AdtpRaggedAttentionWindow"
ATTENTION_DISENTANGLED = "AdtpRaggedAttentionDisentangled"
ATTENTION_GROUPED, ATTENTION_GROUPED_WINDOW = "AdtpRaggedAttentionGrouped", "AdtpRaggedAttentionGroupedWindow"
ATTENTION_GROUPED_RECEIVED = "AdtpRaggedAttentionGroupedReceived"
ENCODER = "AdtpEncoder"
"""The operator that a whole model is, from ids to answers. Its inputs are the model's, then the weights of a plan."""
RECEIVED = "Received"
"""What the names of the operators end with that have a second output, ``received (T,) fp32``."""
FROM_OTHERS = "FromOthersReceived"
"""The ending where that output leaves out what each token gives itself. There is no kernel for it."""
NUM_HEADS, SCALE, WINDOW = "num_heads", "scale", "window"
KV_HEADS, WINDOW_BACK, WINDOW_AHEAD = "kv_heads", "window_back", "window_ahead"
BF16_PRODUCTS = "bf16_products"
"""Of attention whose products may be computed in bf16 where a kernel gains by it: 1. Other files do not have it."""
BF16_LINEAR, INT8_LINEAR, IN_FEATURES = "AdtpBf16Linear", "AdtpInt8Linear", "in_features"
"""Matrix products in lower precision, and their attribute, K."""
GELU, IN_THREE = "Gelu", "Qkv"
"""Endings of those with an erf GELU behind them, and of those whose queries, keys and values are three results."""
ADD_NORM = "AddNorm"
"""The ending of a product that is added to a residual and normalized."""
BF16_FEED_FORWARD, INT8_FEED_FORWARD = f"AdtpBf16FeedForward{ADD_NORM}", f"AdtpInt8FeedForward{ADD_NORM}"
"""Two products with a GELU between them, and the same behind them, whose residual is their input."""
INNER_FEATURES, EPSILON = "inner_features", "epsilon"
"""Attributes: values between the two products, and what a norm adds to the variance."""
PLUGIN_VERSION, PLUGIN_NAMESPACE = "1", ""
"""Of `ATTENTION`, `ATTENTION_RECEIVED` and the three with grouped queries as TensorRT's plugins, which have these names. Their fields are
`NUM_HEADS` and `SCALE`; those with grouped queries also have `KV_HEADS`, `WINDOW_BACK` and `WINDOW_AHEAD`."""
