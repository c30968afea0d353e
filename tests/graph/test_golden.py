"""The graph of a fixed student, as text: a change to it is seen in review, not in production.

Write it anew with: python tests/graph/test_golden.py
"""

from pathlib import Path

import onnx_ir as ir
import pytest
import torch

GOLDEN = Path(__file__).parent / "golden_graph.txt"


def describe() -> str:
    from testbed import make_student

    from adtp_export.graph import program

    model = program.export_portable(make_student(["0.ffn"], num_hidden_layers=2), {"version": "golden"})
    lines = [f"input {value.name}: {value.dtype.name} {value.shape}" for value in model.graph.inputs]
    for node in model.graph:
        inputs = ", ".join(value.name if value is not None else "-" for value in node.inputs)
        attributes = {n: a.value for n, a in sorted(node.attributes.items()) if a.type != ir.AttributeType.TENSOR}
        lines.append(
            f"{', '.join(o.name for o in node.outputs)} = {node.op_type}({inputs}) {attributes or ''}".rstrip()
        )
    lines += [f"output {value.name}: {value.dtype.name} {value.shape}" for value in model.graph.outputs]
    return "\n".join(lines) + "\n"


@pytest.mark.skipif(
    not torch.__version__.startswith("2.13."),
    reason="the golden graph was written with torch 2.13; other exporters name and order nodes differently",
)
def test_graph_is_the_golden_one():
    assert describe() == GOLDEN.read_text(encoding="utf-8")


if __name__ == "__main__":
    import sys

    sys.path[:0] = map(str, Path(__file__).parents[1:3])
    GOLDEN.write_text(describe(), encoding="utf-8")
