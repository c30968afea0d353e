"""The exporter without work that it does twice: the same graphs in half the time. Importing this makes it so, in this process.

`graph/test_graph.py` compares the files. The exporter is PyTorch's and onnxscript's, for which users wait as they are.
"""

import copy
import functools

import onnxscript.rewriter  # noqa: F401 - which the exporter imports at the first trace
import torch.fx.config
from onnxscript.rewriter._rewrite_rule import RewriteRule
from torch._export import utils
from torch.fx import Interpreter
from torch.onnx._internal.exporter._registration import ONNXRegistry
from torch.onnx._internal.fx.passes import type_promotion

AS_THEY_ARE = {
    (ONNXRegistry, "from_torchlib"): ONNXRegistry.__dict__["from_torchlib"],
    (RewriteRule, "try_rewrite"): RewriteRule.try_rewrite,
    (type_promotion.InsertTypePromotion, "_run"): type_promotion.InsertTypePromotion._run,
    (utils, "_materialize_cpp_cia_ops"): utils._materialize_cpp_cia_ops,
    (torch.fx.config, "do_not_emit_stack_traces"): False,  # which says where in the code each node comes from
}
"""What this replaces."""

read = functools.cache(ONNXRegistry.from_torchlib)


def _from_torchlib(*version, **named):
    """Read the 500 translations of operators once in a process."""
    registry = copy.copy(read(*version, **named))
    registry.functions = {target: [*translations] for target, translations in registry.functions.items()}
    return registry


def _try_rewrite(self, model, graph, node, **named):
    """Ask for the kind of the operator first: before it does, a rule lists all nodes of the graph, for every node of it."""
    kind = self._target_pattern.output_nodes[0].op_identifier()
    if kind is not None and kind != node.op_identifier():
        return None
    return AS_THEY_ARE[RewriteRule, "try_rewrite"](self, model, graph, node, **named)


class _InsertionError(Exception):
    """A value needs another type, or is not known."""


class _Look(type_promotion._TypePromotionInterpreter):
    """Take values as the trace left them, which computed them a moment ago, and insert nothing."""

    def run_node(self, node):
        with self._set_current_node(node):
            if rule := type_promotion.get_type_promotion_rule(node, self.type_promotion_table):
                self._maybe_promote_node(node, rule)
        if node.op != "call_function":
            return Interpreter.run_node(self, node)
        if node.users and "val" not in node.meta:
            raise _InsertionError
        return node.meta.get("val")  # a check has none

    def _create_node(self, *_):
        raise _InsertionError


def _insert_types(self):
    """Compute all values again only where there is something to insert."""
    try:
        with self.fake_mode:
            _Look(self.module, self.interpreter.type_promotion_table).run(*self._fetch_fake_args())
    except _InsertionError:
        return AS_THEY_ARE[type_promotion.InsertTypePromotion, "_run"](self)
    return self.module


ONNXRegistry.from_torchlib = staticmethod(_from_torchlib)
RewriteRule.try_rewrite = _try_rewrite
type_promotion.InsertTypePromotion._run = _insert_types
utils._materialize_cpp_cia_ops = functools.cache(
    utils._materialize_cpp_cia_ops
)  # no operator is registered after the imports
torch.fx.config.do_not_emit_stack_traces = True
