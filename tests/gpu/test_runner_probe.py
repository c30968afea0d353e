"""The runner beside the host that launches one by one: the same bytes, also under sanitizers; planted mistakes are noticed."""

import os
import subprocess

import emulated_gpu
import host_mistakes
import pytest
import runner_builds
import runner_plans

NEWER = 100
WAYS = ("create", "replays", "captures", "threads", "create-for-host", "host")
ADDRESSES = ("-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")
THREADS = ("-g", "-fsanitize=thread")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return runner_plans.folder_of(tmp_path_factory.mktemp("runner") / "calls")


@pytest.fixture
def executed(folder, emulated_library, tmp_path):
    """Run a probe; return what it said of each way, its errors, and its exit status."""

    def execute(probe, code=0, capability=NEWER, calls=folder):
        leaks, races = tmp_path / "leaks", tmp_path / "races"
        leaks.write_text("leak:libcuda.so.1\n")  # a driver's libraries stay: loaded kernels are not the host's leaks
        races.write_text("called_from_lib:libcuda.so.1\n")  # the driver's own lock must not stand in for the host's
        environment = dict(os.environ, LD_LIBRARY_PATH=str(emulated_library.parent))
        environment |= emulated_gpu.settings(capability) | {"TSAN_OPTIONS": f"suppressions={races}"}
        environment["LSAN_OPTIONS"] = f"suppressions={leaks}:print_suppressions=0"
        done = subprocess.run([probe, calls], env=environment, capture_output=True, text=True, check=False, timeout=300)
        said = dict(line.split(" ", 1) for line in done.stdout.splitlines())
        assert code is None or done.returncode == code, done.stdout + done.stderr
        return said, done.stderr

    return execute


def assert_right(said):
    assert said == dict.fromkeys(WAYS, "ok")


def test_the_runner_gives_the_bytes_of_launches_one_by_one(executed):
    """In replays, in a capture, from eight threads, and from host memory."""
    said, _ = executed(runner_builds.program())
    assert_right(said)


def test_it_does_so_with_machine_code(executed, tmp_path):
    if emulated_gpu.nvdisasm() is None:
        pytest.skip("Triton is not installed")
    said, _ = executed(runner_builds.program(), capability=86, calls=runner_plans.folder_of(tmp_path / "calls", 86))
    assert_right(said)


@pytest.mark.parametrize(
    "flags", [pytest.param(ADDRESSES, marks=pytest.mark.slow), THREADS], ids=["addresses", "threads"]
)
@pytest.mark.slow
def test_sanitizers_find_nothing(executed, flags):
    said, errors = executed(runner_builds.program(flags))
    assert_right(said)
    assert not errors


def is_noticed(executed, mistake):
    """By other bytes, by what the driver refuses, or by not coming to the end, where the runner as it is comes there."""
    said, _ = executed(runner_builds.program())
    assert_right(said)
    said, _ = executed(runner_builds.program(mistake=mistake), code=None)
    return said != dict.fromkeys(WAYS, "ok")


FEW = ("no wait for the call before", "launches do not follow each other")


@pytest.mark.parametrize("name", FEW)
def test_a_mistake_of_the_runner_is_noticed(executed, name):
    *mistake, why = host_mistakes.RUNNER[name]
    assert why == host_mistakes.NOTICED
    assert is_noticed(executed, mistake)


@pytest.mark.slow
@pytest.mark.parametrize("name", host_mistakes.RUNNER)
def test_all_mistakes_of_the_runner(executed, name):
    *mistake, why = host_mistakes.RUNNER[name]
    assert is_noticed(executed, mistake) == (why == host_mistakes.NOTICED), why


@pytest.mark.slow
def test_threads_that_do_not_take_turns_are_noticed(executed):
    mistake = (
        "runner.cpp",
        "std::lock_guard<std::mutex> const lock(mutex);\n    int32_t capturing",
        "int32_t capturing",
    )
    _, errors = executed(runner_builds.program(THREADS, mistake), code=None)
    assert "data race" in errors
