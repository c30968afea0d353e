"""Plans as text: the runner takes what Python writes, and refuses others in words and without harm."""

import ctypes
import subprocess
import sys

import numpy as np
import pytest
import runner_builds
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from runner_plans import PLAN

from adtp_export.plugins import plan as plans
from adtp_export.plugins.plan import INPUT, OUTPUT, WEIGHT, WORKSPACE, Bucket, Launch, Number, Plan, Pointer


@pytest.fixture(scope="module")
def built():
    return runner_builds.for_this_process()


@pytest.fixture
def gpu(built, monkeypatch):
    return runner_builds.driver_of(built, monkeypatch)


def said_of(built, text):
    """What the library says of a plan's text; it has no kernels for any."""
    library = ctypes.CDLL(str(built[0]))
    library.adtp_runner_create_for_host.restype = ctypes.c_void_p
    library.adtp_runner_error.restype = ctypes.c_char_p
    assert library.adtp_runner_create_for_host(text.encode(), None, 0, None, 0) is None
    return library.adtp_runner_error().decode()


WORDS = st.text(st.characters(codec="utf-8", categories=("L", "N", "P", "S")), max_size=12)
COUNTS = st.integers(1, 2**31 - 1)


def pointers(place, sizes):
    def of(index):
        return st.integers(0, sizes[index] - 1).map(lambda at: Pointer(place, at, index))

    return st.integers(0, len(sizes) - 1).flatmap(of) if sizes and sizes[0] else st.nothing()


NUMBERS = st.one_of(
    st.integers(-(2**31), 2**31 - 1).map(lambda value: Number("i32", value)),
    st.integers(-(2**63), 2**63 - 1).map(lambda value: Number("i64", value)),
    st.floats(width=32, allow_nan=False, allow_infinity=False).map(lambda value: Number("f32", value)),
    st.builds(Number, st.sampled_from(("i32", "i64")), st.sampled_from((plans.TEXTS, plans.LENGTH, plans.TOKENS))),
)


@st.composite
def any_plan(draw):
    sizes = st.lists(st.integers(1, 2**40), max_size=3)
    weights = draw(sizes)
    inputs, outputs = draw(sizes), draw(sizes)
    buckets = []
    for tokens in sorted(draw(st.sets(st.integers(1, 2**20), min_size=1, max_size=3))):
        texts = max([draw(st.integers(1, 512)), *(bucket.texts for bucket in buckets)])
        workspace = draw(st.integers(0, 2**40))
        places = [(WORKSPACE, [workspace]), (WEIGHT, weights), (INPUT, inputs), (OUTPUT, outputs)]
        arguments = st.one_of(NUMBERS, st.just(Pointer("null")), *(pointers(*place) for place in places))
        launch = st.builds(
            Launch,
            variant=WORDS.filter(lambda word: word and "#" not in word),
            programs=st.integers(1, 2**20),
            programs_per_text=st.integers(0, 2**20),
            arguments=st.lists(arguments, max_size=5).map(tuple),
            note=WORDS.filter(lambda word: word == word.strip().lstrip("# ")),
        )
        launches = tuple(draw(st.lists(launch, min_size=1, max_size=3)))
        buckets.append(
            Bucket(
                tokens=tokens,
                texts=texts,
                workspace=workspace,
                inputs=tuple(inputs),
                outputs=tuple(outputs),
                launches=launches,
            )
        )
    return Plan(tuple(weights), tuple(buckets))


@given(any_plan())
@settings(max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_what_is_written_is_read(gpu, built, plan):
    launch = plan.buckets[0].launches[0]
    name = launch.variant + (f" ({launch.note})" if launch.note else "")
    assert said_of(built, plans.write(plan)) == f"the plan launches {name}, and there is no such kernel"


def test_a_plan_that_memory_does_not_hold_is_refused(gpu, built):
    code = f"""
import ctypes, resource
library = ctypes.CDLL({str(built[0])!r})
library.adtp_runner_create_for_host.restype = ctypes.c_void_p
library.adtp_runner_error.restype = ctypes.c_char_p
text = b"x" * 2**28
used = 4096 * int(open("/proc/self/statm").read().split()[0])
resource.setrlimit(resource.RLIMIT_AS, (used + 2**27,) * 2)
assert library.adtp_runner_create_for_host(text, None, 0, None, 0) is None
print(library.adtp_runner_error().decode())
"""
    assert subprocess.check_output([sys.executable, "-c", code], text=True) == "out of memory\n"


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
def test_wrong_plans_are_refused(gpu, built, old, new, said):
    assert old in TEXT
    message = said_of(built, TEXT.replace(old, new, 1))
    assert message.startswith(f"plan, {said}" if said.startswith("line") else "plan, line"), message
    assert said in message


def test_changed_plans_are_taken_or_refused_in_words(gpu, built):
    """Words exchanged, doubled and left out."""
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
        message = said_of(built, " ".join(changed).replace(" \n ", "\n"))
        is_taken = message.startswith("the plan launches ")
        assert is_taken or message.startswith("plan, line "), message
        taken += is_taken
    assert 10 < taken < 390
