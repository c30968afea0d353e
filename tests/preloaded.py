"""What commands of the tests are forked with: modules that most of them import, and the exporter as in `quick_traces`.

The fork server imports this, which `testbed` starts. The first trace of a process takes seconds longer than the next ones, and here
it is one of the server.
"""

import os

import networkx  # noqa: F401 - which PyTorch imports at the first trace
import quick_traces
import rich.console  # noqa: F401
import torch.export._trace
import torch.onnx._internal.exporter._core  # noqa: F401

import adtp_export.benchmarking.compare
import adtp_export.calibration.simulate
import adtp_export.cli.console
import adtp_export.graph.program
import adtp_export.model.checkpoint
import adtp_export.pipeline.export.capabilities
import adtp_export.pipeline.export.export
import adtp_export.plugins.encoder.planner
import adtp_export.report.html
import adtp_export.training.stages
import adtp_export.verify.parity  # noqa: F401

quick_traces.read()
_ours, _, _theirs = os.environ.pop("PYTHONPATH").partition(os.pathsep)
if _theirs:
    os.environ["PYTHONPATH"] = _theirs  # a process that a command starts has nothing of the tests
