"""Name nodes and values after the module they come from, and drop the exporter's own traces (source paths)."""

from __future__ import annotations

import ast
from collections import Counter

import onnx_ir as ir
from onnx_ir.passes import InPlacePass, PassResult

_SCOPES = "pkg.torch.onnx.name_scopes"
_HOOK = "_empty_nn_module_stack_from_metadata_hook"  # what torch.export writes where no module is active


class ReadableNames(InPlacePass):
    """A Gemm of layer 0's query, key and value becomes ``layers.0.attention.qkv/Gemm``; its output has the same name."""

    def call(self, model: ir.Model) -> PassResult:
        taken: Counter[str] = Counter()

        def unique(name: str) -> str:
            taken[name] += 1
            return name if taken[name] == 1 else f"{name}_{taken[name]}"

        for node in model.graph:
            node.name = unique(f"{_scope(node)}{node.op_type}")
            for i, value in enumerate(node.outputs):
                if not value.is_graph_output():
                    value.name = node.name if i == 0 else f"{node.name}:{i}"
        for initializer in list(model.graph.initializers.values()):
            if initializer.name and "." not in initializer.name:  # not a weight, so a constant
                initializer.name = unique(f"const/{_literal(initializer)}")
        for node in model.graph:  # names of modules are read above, so only now
            node.metadata_props.clear()
            for value in node.outputs:
                value.metadata_props.clear()
        for value in (*model.graph.inputs, *model.graph.initializers.values()):
            value.metadata_props.clear()
        model.graph.metadata_props.clear()
        return PassResult(model, modified=True)


def _scope(node: ir.Node) -> str:
    """Return the module path with a slash, or nothing at the top level."""
    text = node.metadata_props.get(_SCOPES)
    if text is None:  # made by the optimizer: it belongs to whoever feeds it
        producers = (value.producer() for value in node.inputs if value is not None)
        return next((_scope(p) for p in producers if p is not None), "")
    modules = [m for m in ast.literal_eval(text)[:-1] if m and m != _HOOK]
    return f"{modules[-1]}/" if modules else ""


def _literal(initializer: ir.Value) -> str:
    array = initializer.const_value.numpy()
    values = [str(x) for x in array.reshape(-1)]
    return "x".join(values) if len(values) <= 4 else f"{values[0]}..{values[-1]}"
