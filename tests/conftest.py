"""What pytest asks of the tests as a whole; `testbed` has what tests use.

The process that divides tests among workers reads this file, too, and runs none of them. So nothing is imported here that takes long.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import os
import sys

import pytest

from adtp_export.cli.console import GARBAGE

os.environ.setdefault("TRITON_INTERPRET", "1")  # before anything imports Triton: the kernels run on the CPU
os.environ["ADTP_OPERATORS"] = "off"  # most tests are about the graph; fixtures of `cpu_operators` switch them on
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")  # of sessions that tests open themselves
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch: threads that spin slow the other workers
os.environ.setdefault("TORCH_FAKE_TENSOR_DISPATCH_CACHE", "0")  # asking takes longer than making

pytest_plugins = ["accepted_skips", "pytester"]
PLUGINS = (
    "testbed",
    "cpu_operators",
    "distributions",
    "driver_calls",
    "emulated_gpu",
    "plain_models",
    "plugin_host",
    "ray_cluster",
    "shared_graphs",
    "training_runs",
)
"""Of processes that run tests."""


def pytest_addoption(parser):
    parser.addoption("--slow", action="store_true", help="run the tests marked slow as well (make test-all)")


def pytest_configure(config):
    """Give each worker of xdist cores of its own, so that the threads of runtimes do not wait for one another's.

    Scan for garbage as rarely as the commands do: exports make millions of objects, and scanning them takes a tenth of the time.
    """
    gc.set_threshold(*GARBAGE)
    worker = getattr(config, "workerinput", None)
    counts_lines = config.pluginmanager.hasplugin("_cov")  # of imports here alone: workers begin later
    if worker or counts_lines or not config.getoption("numprocesses", None):
        pytest.register_assert_rewrite(*PLUGINS)
        for plugin in PLUGINS:
            config.pluginmanager.import_plugin(plugin)
    if worker and hasattr(os, "sched_setaffinity"):
        cores = sorted(os.sched_getaffinity(0))
        share = cores[int(worker["workerid"].removeprefix("gw")) % len(cores) :: worker["workercount"]]
        os.sched_setaffinity(0, share)


def pytest_collection_finish():
    """What was imported and collected stays to the end. Trainers and exporters ask for a collection, which would scan it each time."""
    gc.collect()
    gc.freeze()
    # Later than pytest's last collections, of which each would scan it. Python's own collection at the end needs it.
    atexit.register(gc.unfreeze)


FEW = 20_000
"""Objects that are not worth a collection."""


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item, nextitem):
    """So does what a file of tests leaves in caches, such as the exporter's translations and modules that it was the first to import.

    A file that made few objects since the last collection leaves none to speak of.
    """
    new, *scanned = gc.get_count()
    if (nextitem is None or nextitem.path != item.path) and (new > FEW or any(scanned)):
        gc.collect()
        gc.freeze()


def pytest_unconfigure():
    if inductor := sys.modules.get("torch._inductor.runtime.cache_dir_utils"):
        with contextlib.suppress(OSError):  # it makes its folder as it is imported; one that is in use stays
            os.rmdir(inductor.default_cache_dir())


MADE_ONCE = {"exported", "packed_export"}
"""Fixtures that the first worker which asks makes for all, in half a minute."""


def pytest_collection_modifyitems(config, items):
    # The first worker begins at the front, so it alone makes what takes long, and nobody waits for it.
    items.sort(key=lambda item: MADE_ONCE.isdisjoint(item.fixturenames))
