"""The names of `adtp_export/contract.py` against the operators, the plugin's two hosts, and a real export."""

import re

import onnx
import pytest
from safetensors.torch import load_file
from testbed import DEMO, ROOT

from adtp_export import contract
from adtp_export.graph.debug import debug_form
from adtp_export.ops import onnx_function
from adtp_export.plugins import tensorrt as python_host
from adtp_export.plugins import tensorrt_host
from adtp_export.runtimes import tensorrt

INT64, INT32, FLOAT = onnx.TensorProto.INT64, onnx.TensorProto.INT32, onnx.TensorProto.FLOAT

# The operators


QKV = ["q", "k", "v", "cu_seqlens"]
SIDES = ["q", "k", "v", "cu_q", "cu_k", "positions_q", "positions_k"]


@pytest.mark.parametrize(
    ("name", "inputs", "further"),
    [
        (contract.ATTENTION, QKV, []),
        (contract.ATTENTION_RECEIVED, QKV, []),
        (contract.ATTENTION_FROM_OTHERS, QKV, []),
        *((f"{contract.ATTENTION_RELATIVE}{end}", [*QKV, "positions", "table"], []) for end in ("", contract.RECEIVED)),
        *(
            (
                f"{contract.ATTENTION_DISENTANGLED}{end}",
                [*QKV, "positions", "distance_keys", "distance_queries", "buckets"],
                [],
            )
            for end in ("", contract.RECEIVED)
        ),
        *(
            (f"{contract.ATTENTION_WINDOW}{end}", [*QKV, "positions"], [contract.WINDOW])
            for end in ("", contract.RECEIVED)
        ),
        *(
            (name, SIDES, [contract.KV_HEADS, contract.WINDOW_BACK, contract.WINDOW_AHEAD])
            for name in (
                contract.ATTENTION_GROUPED,
                contract.ATTENTION_GROUPED_WINDOW,
                contract.ATTENTION_GROUPED_RECEIVED,
            )
        ),
    ],
)
def test_functions_and_schemas(name, inputs, further):
    (function,) = (each for each in onnx_function.portable_functions() if each.name == name)
    outputs = 2 if name.endswith(contract.RECEIVED) else 1
    assert (function.domain, function.name) == (contract.DOMAIN, name)
    assert sorted(function.attribute) == sorted([contract.NUM_HEADS, contract.SCALE, *further])
    defaults = {a.name: onnx.helper.get_attribute_value(a).decode() for a in function.attribute_proto}
    plugin = {"plugin_version": contract.PLUGIN_VERSION, "plugin_namespace": contract.PLUGIN_NAMESPACE}
    has_kernel = name in (contract.ATTENTION, contract.ATTENTION_RECEIVED) or contract.KV_HEADS in further
    assert defaults == (plugin if has_kernel else {})
    assert list(function.input) == inputs
    assert len(function.output) == outputs

    onnx_function.register_schemas()
    schema = onnx.defs.get_schema(name, contract.DOMAIN_VERSION, contract.DOMAIN)
    assert set(schema.attributes) == {contract.NUM_HEADS, contract.SCALE, *defaults, *further}
    assert [value.name for value in schema.inputs] == inputs
    assert len(schema.outputs) == outputs


def test_every_operator_has_a_body():
    names = {
        f"{name}{end}"
        for name in (
            contract.ATTENTION,
            contract.ATTENTION_RELATIVE,
            contract.ATTENTION_WINDOW,
            contract.ATTENTION_DISENTANGLED,
        )
        for end in ("", contract.RECEIVED)
    } | {contract.ATTENTION_FROM_OTHERS, contract.ATTENTION_GROUPED, contract.ATTENTION_GROUPED_WINDOW}
    names |= {contract.ATTENTION_GROUPED_RECEIVED}
    assert f"{contract.ATTENTION}{contract.FROM_OTHERS}" == contract.ATTENTION_FROM_OTHERS
    assert {function.name for function in onnx_function.portable_functions()} == names


# The plugin


def test_cpp_host():
    source = (ROOT / "plugins" / "cpp" / "plugin.cpp").read_text(encoding="utf-8")
    constants = dict(re.findall(r'constexpr char const\* (k\w+) = "(.*)";', source))
    assert constants == {
        "kName": contract.ATTENTION,
        "kNameReceived": contract.ATTENTION_RECEIVED,
        "kVersion": contract.PLUGIN_VERSION,
        "kNamespace": contract.PLUGIN_NAMESPACE,
    }
    fields = re.findall(r'PluginField\("(\w+)", [^)]*PluginFieldType::(\w+)', source)
    wanted = [(contract.NUM_HEADS, "kINT32"), (contract.SCALE, "kFLOAT32")]
    assert fields == wanted * 2  # what a plugin writes into an engine, and what its creator takes
    assert re.findall(r'strcmp\(field\.name, "(\w+)"\)', source) == [contract.NUM_HEADS, contract.SCALE]


def test_python_host():
    assert python_host.RAGGED.names == (contract.ATTENTION, contract.ATTENTION_RECEIVED)
    assert (tensorrt_host.VERSION, tensorrt_host.NAMESPACE) == (contract.PLUGIN_VERSION, contract.PLUGIN_NAMESPACE)


@pytest.fixture(params=[contract.ATTENTION, contract.ATTENTION_RECEIVED])
def creator(request, has_rtx):
    """A creator of the Python host, as TensorRT-RTX's registry gives it."""
    trt = tensorrt.RTX.load()
    with python_host.registered(trt):
        names = (request.param, contract.PLUGIN_VERSION, contract.PLUGIN_NAMESPACE)
        yield trt.get_plugin_registry().get_creator(*names)


def test_python_host_in_the_registry(creator):
    assert [field.name for field in creator.field_names] == [contract.NUM_HEADS, contract.SCALE]


# A real export


@pytest.fixture(scope="module")
def model(exported):
    """The demo student, written by the command, in its debug form."""
    with debug_form(exported / "model.onnx") as path:
        return onnx.load(path)


LAYERS, SITES = 4, ("1.attention", "2.ffn")  # of the demo student


def described(values):
    return {
        value.name: (
            value.type.tensor_type.elem_type,
            tuple(dim.dim_param or dim.dim_value for dim in value.type.tensor_type.shape.dim),
        )
        for value in values
    }


def test_inputs_and_outputs(model):
    assert described(model.graph.input) == {name: (INT64, axes) for name, axes in contract.INPUTS.items()}
    outputs = contract.OUTPUTS[contract.HEAD_SEQUENCE]
    assert outputs == {contract.LOGITS: (contract.BATCH, contract.LABELS)}
    assert described(model.graph.output) == {
        contract.LOGITS: (FLOAT, (contract.BATCH, 2)),  # the number of labels is fixed by the weights
        contract.KEPT_SITE: (INT32, contract.INPUTS[contract.INPUT_IDS]),
    }


def test_row_indices_of_the_cuts(model):
    made = [name for node in model.graph.node for name in node.output if name.startswith(contract.KEPT_ROWS)]
    assert made == [contract.UNPAD, *(f"{contract.KEPT_ROWS}{site}" for site in SITES)]


def test_matrix_products(model):
    nodes = {node.name: node for node in model.graph.node}
    wanted = {f"{contract.product(layer, place)}/Gemm" for layer in range(LAYERS) for place in contract.PRODUCTS}
    assert {name for name in nodes if re.fullmatch(r"layers\..*/Gemm", name)} == wanted
    for place, residual in contract.RESIDUALS.items():
        product = nodes[f"{contract.product(0, place)}/Gemm"]
        assert product.input[0] in nodes[f"{contract.product(0, residual)}/Add"].input


def test_weights_of_the_pruners(model):
    stored = [name for name in load_file(DEMO / "model.safetensors") if ".retainers." in name]
    found = [weight.name for weight in model.graph.initializer if weight.name.startswith(contract.PRUNERS)]
    assert len(found) == len(stored) > 0


def test_metadata(model):
    found = {prop.key for prop in model.metadata_props if prop.key.startswith(contract.METADATA)}
    wanted = (contract.VERSION, contract.PRECISION, contract.CHECKPOINT_SHA256, contract.PRUNE_SITES)
    assert found == {f"{contract.METADATA}{key}" for key in wanted}


def test_attention_nodes(model):
    assert {o.domain: o.version for o in model.opset_import}[contract.DOMAIN] == contract.DOMAIN_VERSION
    nodes = [node for node in model.graph.node if node.domain == contract.DOMAIN]
    assert [node.op_type for node in nodes] == [contract.ATTENTION] * LAYERS
    for node in nodes:
        attributes = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
        assert attributes.keys() == {contract.NUM_HEADS, contract.SCALE, "plugin_version", "plugin_namespace"}
        assert attributes["plugin_version"].decode() == contract.PLUGIN_VERSION
        assert attributes["plugin_namespace"].decode() == contract.PLUGIN_NAMESPACE
