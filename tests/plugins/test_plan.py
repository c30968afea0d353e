"""A plan's text, and what makes no sense is refused in words. The runner reads it in `tests/gpu/test_runner_plans.py`."""

from dataclasses import replace

import pytest

from adtp_export.errors import InputError
from adtp_export.plugins import plan as plans
from adtp_export.plugins.plan import INPUT, OUTPUT, WEIGHT, WORKSPACE, Bucket, Launch, Number, Plan, Pointer

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


def test_a_plan_is_read_as_it_was_written():
    null = Launch(
        variant="other", programs=1, arguments=(Pointer("null"), Number("i64", -(2**40)), Number("i32", plans.LENGTH))
    )
    larger = replace(BUCKET, tokens=64, texts=8, outputs=(32,), inputs=(256,), launches=(LAUNCH, null))
    first = replace(BUCKET, outputs=(16,), launches=(replace(LAUNCH, arguments=(Pointer(OUTPUT, 4), Pointer(INPUT))),))
    plan = Plan((256, 16), (first, larger))
    assert plans.read(plans.write(plan)) == plan


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "plan: got ''; accepted: adtp-plan 1, the first line of plans of this version"),
        ("adtp-plan 2\n", "got 'adtp-plan 2'"),
        ("adtp-plan 1\nweight many\n", "plan, line 2: got 'weight many'; accepted: the lines that adtp-plan 1 has"),
        ("adtp-plan 1\ninput 3\n", "line 2: got 'input 3'"),
        ("adtp-plan 1\nbucket 3 texts 2\n", "line 2"),
        ("adtp-plan 1\n", "got no bucket"),
        ("adtp-plan 1\nbucket 32 texts 2 workspace 0\nlaunch kernel one\n", "line 3: got 'launch kernel one'"),
        ("adtp-plan 1\nbucket 32 texts 2 workspace 0\nlaunch kernel 1 i9:3\n", "line 3"),
        ("adtp-plan 1\nbucket 32 texts 2 workspace 0\nlaunch kernel 1 workspace:0\n", "workspace of 0 bytes"),
    ],
)
def test_texts_that_are_no_plans(text, message):
    with pytest.raises(InputError, match=message):
        plans.read(text)
