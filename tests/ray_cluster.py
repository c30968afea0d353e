"""A Ray cluster of two machines that are processes here, for tests. Used as a plugin by `conftest.py`."""

import importlib.util
import os

import pytest

MACHINE = {
    "num_cpus": 1,
    "object_store_memory": 80 * 2**20,  # the least that Ray takes, since /dev/shm may be small
    "env_vars": {"ADTP_OPERATORS": "on"},  # as users have it, whatever most tests do
}


@pytest.fixture(scope="session")
def has_ray():
    if importlib.util.find_spec("ray") is None or importlib.util.find_spec("pyarrow") is None:
        pytest.skip("Ray is not installed")


class TwoMachines:
    """Two machines of one processor each. A machine that was lost comes back with `restore`."""

    def __init__(self):
        import ray
        from ray.cluster_utils import Cluster

        head = {**MACHINE, "include_dashboard": False}
        self._cluster = Cluster(initialize_head=True, head_node_args=head)
        self.address = self._cluster.address
        self._second = None
        self.restore()
        ray.init(address=self.address, log_to_driver=False, logging_level="ERROR")

    def restore(self):
        if self._second is None:
            self._second = self._cluster.add_node(**MACHINE)
            self._cluster.wait_for_nodes()

    def lose_the_second(self):
        self._cluster.remove_node(self._second, allow_graceful=False)
        self._second = None

    def close(self):
        import ray

        ray.shutdown()
        self._cluster.shutdown()


@pytest.fixture(scope="session")
def two_machines(has_ray):
    before = {name: os.environ.get(name) for name in ("RAY_USAGE_STATS_ENABLED", "RAY_BACKEND_LOG_LEVEL")}
    os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_BACKEND_LOG_LEVEL": "fatal"}
    machines = TwoMachines()
    yield machines
    machines.close()
    for name, value in before.items():
        os.environ.pop(name) if value is None else os.environ.update({name: value})
