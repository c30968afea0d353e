"""Plans as text: the runner and Python refuse the same ones, in words and without harm."""

import ctypes

import numpy as np
import pytest
import runner_builds
from runner_plans import PLAN

from adtp_export.errors import InputError
from adtp_export.plugins import plan as plans
from adtp_export.plugins.plan import Plan


@pytest.fixture(scope="module")
def built():
    return runner_builds.for_this_process()


@pytest.fixture
def gpu(built, monkeypatch):
    return runner_builds.driver_of(built, monkeypatch)


def refused(built, text):
    """What the library says of a plan's text, and whether Python refuses it, too."""
    library = ctypes.CDLL(str(built[0]))
    library.adtp_runner_create_for_host.restype = ctypes.c_void_p
    library.adtp_runner_error.restype = ctypes.c_char_p
    runner = library.adtp_runner_create_for_host(text.encode(), None, 0, None, 0)
    assert runner is None
    said = library.adtp_runner_error().decode()
    try:
        plans.parse(text)
    except InputError:
        return said, True
    return said, False


TEXT = plans.write(Plan((64,), PLAN.buckets[:2]))


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("adtp-plan 1", "adtp-plan 2", "line 1: got 'adtp-plan 2'; accepted is 'adtp-plan 1'"),
        ("weight 64", "weight", "line 2: got weight in 1 words; accepted is: weight BYTES"),
        ("weight 64", "weight 0", "line 2: got '0'; accepted are integers from 1 to 281474976710656"),
        ("weight 64", "weight 99999999999999999999", "line 2: got '99999999999999999999'"),
        (
            "bucket 32 texts 4",
            "bucket 32 text 4",
            "line 3: got a bucket in 6 words; accepted is: bucket TOKENS texts TEXTS",
        ),
        ("bucket 32", "bucket 0x20", "line 3: got '0x20'; accepted are integers from 1"),
        ("bucket 64", "bucket 32", "line 13: got '32'; accepted are integers from 33"),
        ("bucket 64 texts 8", "bucket 64 texts 3", "line 13: got '3'; accepted are integers from 4"),
        ("output 256", "output 256\noutput 1", "got bucket 64 with other numbers of inputs and outputs than the first"),
        ("input 36", "weight 36", "line 15: got weight; accepted are weights before all buckets"),
        ("output 256", "launch", "line 17: got a launch in 1 words"),
        ("4+2*texts input:0:0", "4+2*text input:0:0", "line 8: got programs '4+2*text'"),
        ("4+2*texts input:0:0", "4+2*texts4 input:0:0", "line 8: got programs '4+2*texts4'"),
        ("4+2*texts input:0:0", "0 input:0:0", "line 8: got programs '0'; accepted are 1 to 2147483647 programs"),
        ("4+2*texts input:0:0", "4+2000000000*texts input:0:0", "line 8: got programs '4+2000000000*texts'"),
        ("input:0:128", "input:2:0", "line 8: got '2'; accepted are integers from 0 to 1"),
        ("input:0:128", "weight:0:64", "line 8: got '64'; accepted are integers from 0 to 63"),
        ("input:0:128", "null:0", "line 8: got argument 'null:0'; accepted begin with workspace"),
        ("input:0:128", "input:0", "line 8: got 'input' in 2 parts; accepted is input:INDEX:OFFSET"),
        ("input:0:128", "inputs:0:128", "line 8: got argument 'inputs:0:128'; accepted begin with workspace"),
        ("i32:192", "i32:2147483648", "line 8: got '2147483648'; accepted are integers from -2147483648 to 2147483647"),
        ("i32:192", "i32:words", "line 8: got 'words'"),
        ("i32:192", "i64:9223372036854775808", "line 8: got '9223372036854775808'"),
        ("i32:192", "f32:tokens", "line 8: got 'tokens'; accepted are finite numbers of float32"),
        ("i32:192", "f32:1e39", "line 8: got '1e39'; accepted are finite numbers of float32"),
        ("i32:192", "f32:nan", "line 8: got 'nan'; accepted are finite numbers of float32"),
        ("workspace 8192", "workspace 0", "line 8: got workspace of 0 bytes"),
        (TEXT[12:], "", "line 1: got no bucket; accepted is at least one"),
        (TEXT[TEXT.index("launch") :], "", "line 7: got bucket 32 without a launch"),
        (TEXT, "", "line 1: got ''"),
    ],
)
def test_wrong_plans_are_refused_by_both_readers(gpu, built, old, new, said):
    assert old in TEXT
    message, also = refused(built, TEXT.replace(old, new, 1))
    assert message.startswith(f"plan, {said}" if said.startswith("line") else "plan, line"), message
    assert said in message
    assert also


def test_a_right_plan_is_read_by_both(gpu, built):
    message, also = refused(built, TEXT)
    assert message == "the plan launches fp16-d32-16x16 (layer 0), and there is no such kernel"
    assert not also


def test_both_readers_agree_on_changed_plans(gpu, built):
    """Words exchanged, doubled and left out: both take a text, or both refuse it."""
    generator = np.random.default_rng(39)
    words = TEXT.replace("\n", " \n ").split(" ")
    taken = 0
    for _ in range(400):
        changed = list(words)
        i, j = generator.integers(1, len(words), 2)
        match generator.integers(4):
            case 0:
                changed[i], changed[j] = changed[j], changed[i]
            case 1:
                changed[i] = changed[j]
            case 2:
                del changed[i]
            case 3:
                changed.insert(i, changed[j])
        text = " ".join(changed).replace(" \n ", "\n")
        message, also = refused(built, text)
        assert message.startswith("plan, line") == also, f"{message}\n{text}"
        taken += not also
    assert 10 < taken < 390
