"""TensorRT's own attention on packed texts: the network takes it, and no kernel is there.

Where one of these tests fails, that has changed. Then engines without the attention plugin need no rectangles any more, and
`AdtpRaggedAttention` can be lowered to this layer.
"""

import pytest

from adtp_export.runtimes import tensorrt

TOKENS, HEADS, SIZE, TEXTS = 64, 2, 64, 4


def build(gpu: str, dtype: str, form: str) -> tuple[bool, str]:
    """Build one attention layer of fixed sizes, which may be made of other layers; return whether that went well, and what was said."""
    trt = tensorrt.RTX.load()
    logger = tensorrt.callbacks.logger(trt)
    builder = trt.Builder(logger)
    network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    packed = form == "PACKED_NHD"
    shape = (TOKENS, HEADS, SIZE) if packed else (TEXTS, HEADS, TOKENS // TEXTS, SIZE)
    q, k, v = (network.add_input(name, getattr(trt, dtype), shape) for name in "qkv")
    layer = network.add_attention(q, k, v, trt.AttentionNormalizationOp.SOFTMAX, False)
    layer.decomposable = True
    if packed:
        bounds = network.add_input("cu_seqlens", trt.int32, (TEXTS + 1,))
        layer.query_form = layer.key_value_form = trt.AttentionIOForm.PACKED_NHD
        layer.query_lengths = layer.key_value_lengths = bounds
    network.mark_output(layer.get_output(0))
    config = builder.create_builder_config()
    config.num_compute_capabilities = 1
    config.set_compute_capability(getattr(trt.ComputeCapability, gpu), 0)
    engine = builder.build_serialized_network(network, config)
    return engine is not None, logger.said()


@pytest.mark.usefixtures("has_rtx")
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("gpu", ["SM86", "SM89", "SM120"])
def test_no_kernel_for_packed_texts(gpu, dtype):
    built, said = build(gpu, dtype, "PACKED_NHD")
    assert not built
    assert "no fused kernel is available on this target and no decomposition exists" in said


@pytest.mark.usefixtures("has_rtx")
def test_the_same_layer_is_built_for_rectangles():
    """So what is refused above is the form, and not the layer."""
    built, said = build("SM89", "float16", "PADDED_BHND")
    assert built, said
