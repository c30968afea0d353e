"""A graph whose middle layer was repeated is the graph that the exporter makes of the deep network."""

import hashlib

import onnx_ir as ir
import pytest

from adtp_export.benchmarking import contenders
from adtp_export.benchmarking.contenders import Architecture
from adtp_export.graph import program
from adtp_export.model.flops import Shape

FIVE_LAYERS = Architecture(Shape(hidden=32, intermediate=64, heads=2, layers=5))


def identity(graph: ir.Graph) -> dict[str, str]:
    """Hash each output of a graph over all that it is computed from: operators, attributes, weights and inputs."""

    def digest(*parts: object) -> str:
        return hashlib.sha256(repr(parts).encode()).hexdigest()

    seen = {value: digest(value.name) for value in graph.inputs}
    for value in graph.initializers.values():
        array = value.const_value.numpy()
        seen[value] = digest(array.dtype, array.shape, array.tobytes())
    for node in graph:
        attributes = sorted((name, str(attribute.value)) for name, attribute in node.attributes.items())
        read = digest(node.domain, node.op_type, attributes, [value and seen[value] for value in node.inputs])
        seen.update({output: digest(read, i) for i, output in enumerate(node.outputs)})
    return {output.name: seen[output] for output in graph.outputs} | {"nodes": len(graph)}


@pytest.mark.parametrize("form", ["packed", pytest.param("padded", marks=pytest.mark.slow)])
def test_a_deep_graph_is_what_the_exporter_makes(form):
    layered = {"packed": contenders.packed_dense, "padded": contenders.padded_dense}[form](FIVE_LAYERS)
    repeated, exported = layered.graph(5), layered.trace(5)
    if form == "packed":
        graphs = [program.finish(traced, {"version": "test"}).graph for traced in (repeated, exported)]
    else:
        for traced in (repeated, exported):
            traced.optimize()
        graphs = [repeated.model.graph, exported.model.graph]
    assert identity(graphs[0]) == identity(graphs[1])
    assert identity(layered.graph(4).model.graph) != identity(layered.graph(5).model.graph)
