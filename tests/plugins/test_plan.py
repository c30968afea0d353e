"""A plan's text: what is written is read again, and what makes no sense is refused in words."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from adtp_export.errors import InputError
from adtp_export.plugins import plan as plans
from adtp_export.plugins.plan import INPUT, OUTPUT, WEIGHT, WORKSPACE, Bucket, Launch, Number, Plan, Pointer

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
def test_what_is_written_is_read_again(plan):
    assert plans.parse(plans.write(plan)) == plan


LAUNCH = Launch(
    variant="kernel",
    programs=4,
    arguments=(Pointer(WORKSPACE), Pointer(WEIGHT, 16), Number("i32", plans.TEXTS), Number("f32", 0.125)),
    programs_per_text=2,
    note="layer 0",
)
BUCKET = Bucket(tokens=32, texts=4, workspace=64, inputs=(128,), outputs=(), launches=(LAUNCH,))
PLAN = Plan((256,), (BUCKET,))


def test_the_text_of_a_plan():
    assert plans.write(PLAN) == (
        "adtp-plan 1\nweight 256\nbucket 32 texts 4 workspace 64\ninput 128\n"
        "launch kernel 4+2*texts workspace:0 weight:0:16 i32:texts f32:0.125 # layer 0\n"
    )
    assert PLAN.variants == ("kernel",)


@pytest.mark.parametrize(
    ("launch", "message"),
    [
        ({"variant": "two words"}, "two words.*accepted: names without spaces and #"),
        ({"variant": ""}, "accepted: names"),
        ({"note": "two\nlines"}, "note .*accepted: one line of text"),
        ({"programs": 0, "programs_per_text": 0}, "got bucket 32, launch 0 .kernel.: 0 to 0 programs"),
        ({"programs": 2**31}, "programs: 2147483648; accepted: integers from 0 to 2147483647"),
        ({"programs": True}, "programs: True; accepted: integers"),
        (
            {"arguments": (Pointer("heap"),)},
            r"argument 0 \(heap:0:0\); accepted: workspace, weight, input, output, null",
        ),
        ({"arguments": (Pointer(OUTPUT),)}, "the plan has no output"),
        ({"arguments": (Pointer(INPUT, 0, 1),)}, "index: 1; accepted: integers from 0 to 0"),
        ({"arguments": (Pointer(INPUT, 128),)}, "offset: 128; accepted: integers from 0 to 127"),
        ({"arguments": (Pointer("null", 16),)}, "accepted: workspace, weight, input, output, null"),
        ({"arguments": (Number("i8", 1),)}, "accepted: i32, i64, f32"),
        ({"arguments": (Number("i32", 2**31),)}, "accepted: integers from -2147483648 to 2147483647"),
        ({"arguments": (Number("i32", "words"),)}, "accepted: integers, texts, length and tokens"),
        ({"arguments": (Number("f32", 1e39),)}, "accepted: finite numbers of float32"),
        ({"arguments": (Number("f32", float("inf")),)}, "accepted: finite numbers of float32"),
        ({"arguments": (Number("f32", plans.TEXTS),)}, "accepted: finite numbers of float32"),
    ],
)
def test_launches_that_make_no_sense(launch, message):
    plan = Plan(PLAN.weights, (replace(BUCKET, launches=(replace(LAUNCH, **launch),)),))
    with pytest.raises(InputError, match=message):
        plans.write(plan)


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (Plan((0,), (BUCKET,)), "weight: 0; accepted: integers from 1"),
        (Plan((256,), ()), "got no bucket"),
        (Plan((256,), (BUCKET, BUCKET)), "bucket 32: tokens: 32; accepted: integers from 33"),
        (Plan((256,), (BUCKET, replace(BUCKET, tokens=64, texts=2))), "texts: 2; accepted: integers from 4"),
        (Plan((256,), (BUCKET, replace(BUCKET, tokens=64, inputs=()))), r"bucket 64 with \(0, 0\) inputs and outputs"),
        (Plan((256,), (replace(BUCKET, launches=()),)), "bucket 32 without a launch"),
    ],
)
def test_plans_that_make_no_sense(plan, message):
    with pytest.raises(InputError, match=message):
        plans.write(plan)


def test_a_line_that_is_wrong_is_named():
    with pytest.raises(InputError, match=r"plan, line 2: got 'weight two'; accepted|plan, line 2: got 'two'"):
        plans.parse("adtp-plan 1\nweight two\n")
    with pytest.raises(InputError, match="of another version, or none"):
        plans.parse("<html>")
