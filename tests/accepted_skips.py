"""A skip that nobody expected fails the run: a test that does not run proves nothing. Used as a plugin by `conftest.py`.

Accepted is what `make test` cannot put on a machine. What it installs must be there. Tests marked slow are left out together, because
skipping thousands one by one takes time, and are counted beside the skips.
"""

import re
from collections import Counter
from collections.abc import Iterable

import pytest

ACCEPTED = (
    r"needs an? (NVIDIA )?GPU",
    r"this machine has a (sm_\d+|GPU)",  # some tests are about machines without one
    r"this ONNX Runtime has the kernel",
    r"needs root",
    r"classic TensorRT is not installed",  # some gigabytes, for a GPU
    r"needs .* of the material beside the repository, which is not here",
    r"the TensorRT headers are (missing|in the system's paths)",
    r"the CUDA toolkit's headers are missing",
    r"the emulator is not built",
    r"the cross compiler is missing",
    r"CMake or a C\+\+ compiler is missing",
    r"this processor has no (avx|amx)",
    r"adtp-plugin build (--cpu --all )?needs",
    r"neither chromium nor google-chrome is installed",
    r"(Node|Wine) is not installed",
    r"llama\.cpp is not installed",  # it comes from npm
    r"Triton Inference Server is not installed",
    r"Python's shared library is missing",  # the library of onnxruntime-extensions that pip brings looks for it
    r"the environment (for optimum )?could not be made",  # a network is missing
    r"looks into /proc",
    r"this machine has no newer Python",
)


SLOW = "slow; runs with --slow, as in make test-all"
LEFT_OUT = pytest.StashKey[int]()
"""How many tests of this session were left out for `SLOW`."""


def reasons(terminal) -> list[str]:
    """Return the reason of each skip, one for each test, or for each file that was skipped whole."""
    return [report.longrepr[2].removeprefix("Skipped: ") for report in terminal.stats.get("skipped", [])]


def counted(told: Iterable[str]) -> list[tuple[int, str]]:
    """Count reasons by the accepted pattern that they match, most first; the most frequent one stands for its like."""
    groups: dict[str, Counter[str]] = {}
    for reason in told:
        pattern = next((pattern for pattern in ACCEPTED if re.match(pattern, reason)), reason)
        groups.setdefault(pattern, Counter())[reason] += 1
    lines = []
    for group in groups.values():
        first = group.most_common(1)[0][0]
        lines.append((group.total(), first + (f" (and {len(group) - 1} like it)" if len(group) > 1 else "")))
    return sorted(lines, key=lambda line: (-line[0], line[1]))


def unexpected(terminal) -> dict[str, set[str]]:
    """Return the reasons of skips that are not accepted, with the tests or files that gave them."""
    found: dict[str, set[str]] = {}
    for report in terminal.stats.get("skipped", []):
        reason = report.longrepr[2].removeprefix("Skipped: ")
        if not any(re.match(pattern, reason) for pattern in ACCEPTED):
            found.setdefault(reason, set()).add(report.nodeid)
    return found


def terminal_of(config):
    """Return the reporter of the whole session; None in a worker of xdist, which sees a part of it."""
    return config.pluginmanager.get_plugin("terminalreporter") if not hasattr(config, "workerinput") else None


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config, items):
    """Leave the slow tests out, unless `--slow` asks for them."""
    slow = [] if config.getoption("--slow") else [item for item in items if item.get_closest_marker("slow")]
    config.stash[LEFT_OUT] = len(slow)
    if slow:
        config.hook.pytest_deselected(items=slow)
        items[:] = [item for item in items if not item.get_closest_marker("slow")]


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node):
    """Take the count of a worker of xdist: each collects all tests."""
    left_out = getattr(node, "workeroutput", {}).get("left_out", 0)
    node.config.stash[LEFT_OUT] = max(left_out, node.config.stash.get(LEFT_OUT, 0))


def pytest_sessionfinish(session):
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["left_out"] = session.config.stash.get(LEFT_OUT, 0)
    terminal = terminal_of(session.config)
    if terminal is not None and unexpected(terminal) and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter):
    left_out = terminalreporter.config.stash.get(LEFT_OUT, 0)
    lines = counted(reasons(terminalreporter))
    if lines or left_out:
        terminalreporter.section("tests that were skipped, by reason")
    for count, reason in [(left_out, SLOW), *lines] if left_out else lines:
        terminalreporter.write_line(f"{count:5} {reason}")
    for reason, tests in unexpected(terminalreporter).items():
        terminalreporter.section("unexpected skip", red=True)
        terminalreporter.write_line(f"{', '.join(sorted(tests))}: {reason}")
        terminalreporter.write_line(
            "Install what is missing (make test), or add the reason to tests/accepted_skips.py."
        )
