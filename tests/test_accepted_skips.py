"""A run with an unexpected skip fails and names it, in one process and in several."""

import re
from pathlib import Path

import pytest
from accepted_skips import ACCEPTED

CONFTEST = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
from accepted_skips import pytest_collection_modifyitems, pytest_sessionfinish, pytest_terminal_summary, pytest_testnodedown
def pytest_addoption(parser): parser.addoption("--slow", action="store_true")
def pytest_configure(config): config.addinivalue_line("markers", "slow: takes long")
"""
IN_A_FIXTURE = """
import pytest
@pytest.fixture
def made(): pytest.skip("no time today")
def test_it(made): pass
def test_other(): pass
"""
OF_A_FILE = "import pytest\npytest.importorskip('no_such_module', reason='no time today')\ndef test_it(): pass"


def run(pytester, code, *options):
    pytester.makeconftest(CONFTEST)
    pytester.makepyfile(code, test_fine="def test_fine(): pass")
    return pytester.runpytest_inprocess("-p", "no:cacheprovider", *options)


@pytest.mark.parametrize(
    ("code", "options"),
    [
        ("import pytest\ndef test_it(): pytest.skip('no time today')", ()),
        ("import pytest\n@pytest.mark.skip(reason='no time today')\ndef test_it(): pass", ()),
        (IN_A_FIXTURE, ()),
        (OF_A_FILE, ()),
        (IN_A_FIXTURE, ("-n", "1")),
        (OF_A_FILE, ("-n", "1")),
    ],
    ids=["in a test", "as a mark", "in a fixture", "of a file", "in a worker", "of a file, in a worker"],
)
def test_an_unexpected_skip_fails_the_run_and_is_named(pytester, code, options):
    result = run(pytester, code, *options)
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.stdout.fnmatch_lines(["*unexpected skip*", "*: no time today"])


@pytest.mark.parametrize(
    "code",
    [
        "def test_it(): pass",
        "import pytest\ndef test_it(): pytest.skip('needs an NVIDIA GPU')",
        "import pytest\n@pytest.mark.xfail(reason='no time today')\ndef test_it(): assert False",
    ],
    ids=["none", "accepted", "expected to fail"],
)
def test_others_do_not(pytester, code):
    result = run(pytester, code)
    assert result.ret == pytest.ExitCode.OK
    result.stdout.no_fnmatch_line("*unexpected skip*")


def test_what_make_installs_is_not_on_the_list():
    for name in ("OpenVINO", "TensorRT-RTX", "Triton", "CTranslate2"):
        assert not any(re.match(pattern, f"{name} is not installed") for pattern in ACCEPTED)


def test_skips_are_counted_by_reason(pytester):
    code = "import pytest\n" + "".join(
        f"def test_{i}(): pytest.skip({reason!r})\n"
        for i, reason in enumerate(
            ["needs an NVIDIA GPU", "needs a GPU", "Node is not installed", "needs an NVIDIA GPU"]
        )
    )
    result = run(pytester, code)
    assert result.ret == pytest.ExitCode.OK
    result.stdout.fnmatch_lines(
        [
            "*tests that were skipped, by reason*",
            "    3 needs an NVIDIA GPU (and 1 like it)",
            "    1 Node is not installed",
        ]
    )


@pytest.mark.parametrize("options", [(), ("-n", "2"), ("--slow",)], ids=["one process", "two workers", "asked for"])
def test_slow_tests_are_left_out_and_counted(pytester, options):
    code = "import pytest\n@pytest.mark.slow\n@pytest.mark.parametrize('n', range(3))\ndef test_it(n): pass"
    result = run(pytester, code, *options)
    assert result.ret == pytest.ExitCode.OK
    if "--slow" in options:
        assert result.parseoutcomes() == {"passed": 4}
    else:
        result.assert_outcomes(passed=1)
        result.stdout.fnmatch_lines(["    3 slow; runs with --slow, as in make test-all"])
