"""Fixtures of `known_graphs`. Used as a plugin by `conftest.py`."""

import os

import known_graphs
import pytest
import torch


@pytest.fixture(scope="session", autouse=True)
def _folder(tmp_path_factory):
    base = tmp_path_factory.getbasetemp()
    known_graphs.FOLDER = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "known-graphs"
    known_graphs.FOLDER.mkdir(exist_ok=True)


@pytest.fixture(name="known_graphs")
def _known_graphs():
    """Let the package and the commands take graphs that are traced already, where a test looks at something else."""
    with known_graphs.taking_known_graphs():
        yield


@pytest.fixture
def traced_once(monkeypatch):
    """Fail where the exporter decomposes a network, which traces it again: `graph.program` has to translate all its operators."""

    def refuse(*_):
        raise AssertionError("an operator has no translation")

    monkeypatch.setattr(torch.export.ExportedProgram, "run_decompositions", refuse)
