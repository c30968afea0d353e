"""The runner through its Python door, on an emulated GPU in this process: counts, sizes, and what it refuses."""

import ctypes
import threading
from dataclasses import replace

import numpy as np
import pytest
import runner_builds
import runner_plans
from runner_calls import counted, did, make, outputs_of, ran
from runner_plans import CALLS, HIDDEN, PLAN

from adtp_export.errors import CudaError, InputError, MissingDependencyError
from adtp_export.plugins.plan import WEIGHT, WORKSPACE, Number, Plan, Pointer
from adtp_export.plugins.runner import Runner


@pytest.fixture(scope="module")
def built():
    return runner_builds.for_this_process()


@pytest.fixture
def gpu(built, monkeypatch):
    """The emulated driver that the runner loads. No context is current."""
    return runner_builds.driver_of(built, monkeypatch)


@pytest.fixture
def device(built, monkeypatch):
    with runner_builds.device_of(built, monkeypatch) as made:
        yield made


@pytest.fixture
def expected(gpu, built):
    with make(built) as runner:
        return {call.name: ran(runner, call) for call in CALLS}


class Enqueued:
    """A call on the device's memory, and a stream for it."""

    def __init__(self, device, call):
        self.device, self.call, self.like = device, call, outputs_of(call)
        self.stream = ctypes.c_void_p()
        device.call("cuStreamCreate", ctypes.byref(self.stream), 1)
        self.addresses = [device.allocate(array.nbytes) for array in (*call.data(), *self.like)]
        for address, array in zip(self.addresses, (*call.data(), *self.like)):
            device.call(
                "cuMemcpyHtoD_v2", ctypes.c_uint64(address), array.ctypes.data_as(ctypes.c_void_p), array.nbytes
            )

    def enqueue(self, runner):
        sizes = {"texts": len(self.call.lengths), "tokens": self.call.tokens}
        runner.enqueue((), self.addresses[:2], self.addresses[2:], self.stream.value, **sizes)

    def finish(self):
        self.device.call("cuStreamSynchronize", self.stream)
        return [self.device.download(a, like).tobytes() for a, like in zip(self.addresses[2:], self.like)]


def test_a_replay_is_one_launch_and_waits_for_nothing(device, built, tmp_path, monkeypatch):
    """Nothing is read back. A bucket's nodes get new parameters where a call differs from the last one, and only there."""
    log = tmp_path / "calls"
    with Runner(PLAN, library=built[0]) as runner:
        full, few = Enqueued(device, CALLS[1]), Enqueued(device, CALLS[0])
        monkeypatch.setenv("ADTP_EMULATOR_CALLS", str(log))
        seen = []
        for call in (full, full, few, few):
            call.enqueue(runner)
            seen.append([line["did"] for line in did(log)])
            log.unlink()
        device.call("cuStreamSynchronize", few.stream)
        kernels = [line for line in did(log) if line["did"] == "kernel"]
    assert [(s.count("graph"), s.count("parameters"), len(s)) for s in seen] == [
        (1, 5, 6),
        (1, 0, 1),
        (1, 5, 6),
        (1, 0, 1),
    ]
    assert [line["graph"] - kernels[0]["graph"] for line in kernels] == [i // 5 for i in range(20)]
    assert not [line for line in did(log) if line["did"] == "copy"]


def test_on_host_memory_both_copies_are_in_the_graph(gpu, built, tmp_path, monkeypatch):
    log = tmp_path / "calls"
    with make(built) as runner:
        monkeypatch.setenv("ADTP_EMULATOR_CALLS", str(log))
        ran(runner, CALLS[0])
        log.unlink()
        ran(runner, CALLS[0])
    what = [line["did"] for line in did(log) if line["did"] != "wait"]
    assert what[:8] == ["graph", "copy", *["kernel"] * 5, "copy"]
    assert next(line["call"] for line in did(log) if line["did"] == "wait") == "cuEventSynchronize"
    assert counted(log, "parameters") == 0
    assert [line["nodes"] for line in did(log) if line["did"] == "graph"] == [7]


def test_only_launches_that_ask_a_call_get_new_parameters(gpu, built, tmp_path, monkeypatch):
    bucket = PLAN.buckets[0]
    first, *others = bucket.launches
    fixed = replace(
        first,
        programs=first.programs + 4 * first.programs_per_text,
        programs_per_text=0,
        arguments=tuple(Number(a.type, 32) if a == Number("i32", "tokens") else a for a in first.arguments),
    )
    fixed = replace(
        fixed, arguments=tuple(Number(a.type, 2) if a == Number("i32", "texts") else a for a in fixed.arguments)
    )
    plan = Plan((), (replace(bucket, launches=(fixed, *others)),))
    log = tmp_path / "calls"
    with make(built, plan) as runner:
        ran(runner, CALLS[0])
        monkeypatch.setenv("ADTP_EMULATOR_CALLS", str(log))
        ran(runner, runner_plans.Call("other", (3, 4)))
    assert counted(log, "parameters") == 4


def test_every_bucket_gives_the_same_as_a_plan_of_its_own(expected, built):
    for i, call in ((0, CALLS[0]), (1, CALLS[2]), (2, CALLS[3])):
        with make(built, Plan((), PLAN.buckets[i : i + 1])) as runner:
            assert ran(runner, call) == expected[call.name]


def test_what_is_larger_than_the_largest_bucket_is_refused(gpu, built):
    with make(built) as runner:
        assert runner.limits == (128, 8)
        for lengths in ((129,), (1,) * 9):
            with pytest.raises(InputError, match=r"accepted are at most 128 tokens of 8 texts: split the call"):
                ran(runner, runner_plans.Call("larger", lengths))
        with pytest.raises(InputError, match="got 0 texts, 0 tokens"):
            ran(runner, runner_plans.Call("nothing", ()))
        states, sums = outputs_of(CALLS[0])
        with pytest.raises(InputError, match="output 1 has 4096 bytes; accepted are at most 128"):
            runner.run(CALLS[0].data(), (states, np.zeros(1024, np.float32)), texts=2, tokens=23)
        states.flags.writeable = False
        with pytest.raises(InputError, match="outputs: got a read-only array; accepted: writeable ones"):
            runner.run(CALLS[0].data(), (states, sums), texts=2, tokens=23)
        with pytest.raises(InputError, match="inputs: got 1 arrays; accepted: 2"):
            runner.run(CALLS[0].data()[:1], (states, sums), texts=2, tokens=23)


def of_weights(plan):
    """A plan whose first launch takes k and v from weights."""

    def changed(bucket):
        first, *others = bucket.launches
        q, k, v, *rest = first.arguments
        taken = tuple(Pointer(WEIGHT, one.offset, i) for i, one in enumerate((k, v)))
        return replace(bucket, launches=(replace(first, arguments=(q, *taken, *rest)), *others))

    size = CALLS[0].data()[0].nbytes
    return Plan((size, size), tuple(changed(bucket) for bucket in plan.buckets[:1]))


def test_weights_are_copied_to_the_device_or_lie_there(expected, device, built):
    call = CALLS[0]
    qkv = call.data()[0]
    plan = of_weights(PLAN)
    with make(built, plan, [qkv, qkv.copy()]) as runner:
        assert ran(runner, call) == expected[call.name]
    one = Enqueued(device, call)
    with device.memory(qkv, qkv) as weights, Runner(plan, library=built[0]) as runner:
        sizes = {"texts": len(call.lengths), "tokens": call.tokens}
        runner.enqueue(weights, one.addresses[:2], one.addresses[2:], one.stream.value, **sizes)
        assert one.finish() == expected[call.name]
    with pytest.raises(InputError, match=r"weights: array 1 has 6 bytes; accepted: 8832"):
        make(built, plan, [qkv, qkv[:1, :3]])


def test_replays_wait_for_weights_that_are_still_on_their_way(expected, gpu, built, monkeypatch):
    """A driver may return before the weights are on the device, and the runner's stream does not wait for the legacy one."""
    monkeypatch.setenv("ADTP_EMULATOR_LATE_UPLOADS", "1")
    qkv = CALLS[0].data()[0]
    with make(built, of_weights(PLAN), [qkv, qkv]) as runner:
        assert ran(runner, CALLS[0]) == expected[CALLS[0].name]


def test_addresses_are_checked(device, built):
    with Runner(PLAN, library=built[0]) as runner:
        one = Enqueued(device, CALLS[0])
        one.addresses[1] += 4
        with pytest.raises(
            InputError, match=rf"input 1 is at address {one.addresses[1]}; accepted are multiples of 16"
        ):
            one.enqueue(runner)
        one.addresses[2] = 0
        one.addresses[1] -= 4
        with pytest.raises(InputError, match="output 0 is at address 0"):
            one.enqueue(runner)
        with pytest.raises(InputError, match=r"got \(0, 1, 2\) weights, inputs and outputs; accepted: \(0, 2, 2\)"):
            runner.enqueue((), one.addresses[:1], one.addresses[2:], 0, texts=1, tokens=1)
        with pytest.raises(InputError, match="made for a device's memory"):
            ran(runner, CALLS[0])


def test_any_thread_may_call_and_keeps_its_context(expected, device, built):
    """A runner makes its context current and then the one that was, or none."""
    with Runner(PLAN, library=built[0]) as runner:
        one, found = Enqueued(device, CALLS[0]), []

        def call():
            one.enqueue(runner)
            current = ctypes.c_void_p(1)
            device.call("cuCtxGetCurrent", ctypes.byref(current))
            found.append(current.value)

        thread = threading.Thread(target=call)
        thread.start()
        thread.join()
        assert found == [None]
        assert one.finish() == expected["few"]


def test_a_runner_for_the_device_needs_a_context(gpu, built):
    with pytest.raises(CudaError, match="this thread has no CUDA context"):
        Runner(PLAN, library=built[0])


def test_another_thread_may_capture_meanwhile(expected, device, built):
    """Nothing that a call does is forbidden by a capture in the strictest mode, of another stream."""
    with Runner(PLAN, library=built[0]) as runner:
        one, graph, capturing = Enqueued(device, CALLS[0]), ctypes.c_void_p(), Enqueued(device, CALLS[0])
        device.call("cuStreamBeginCapture_v2", capturing.stream, 0)
        one.enqueue(runner)
        device.call("cuStreamEndCapture", capturing.stream, ctypes.byref(graph))
        assert one.finish() == expected["few"]


def lost():
    """A plan that reads rows that are not there."""
    bucket = PLAN.buckets[0]
    first, *others = bucket.launches
    far = tuple(Number("i32", 2**24) if a == Number("i32", 3 * HIDDEN) else a for a in first.arguments)
    return Plan((), (replace(bucket, launches=(replace(first, arguments=far), *others)),))


def test_after_the_gpu_is_lost_a_new_runner_works(expected, gpu, built):
    runner = make(built, lost())
    for _ in range(2):
        with pytest.raises(CudaError, match=r"unspecified launch failure.*\(719\); the GPU is lost .*: load again"):
            ran(runner, CALLS[0])
    runner.close()
    with make(built) as runner:
        assert ran(runner, CALLS[0]) == expected["few"]


def test_a_call_that_fails_behind_its_launch_leaves_nothing_under_way(expected, gpu, built, tmp_path, monkeypatch):
    log = tmp_path / "calls"
    with make(built) as runner:
        monkeypatch.setenv("ADTP_EMULATOR_CALLS", str(log))
        monkeypatch.setenv("ADTP_EMULATOR_REFUSE", "cuEventRecord=1")
        with pytest.raises(CudaError, match="cuEventRecord: invalid argument"):
            ran(runner, CALLS[0])
        assert counted(log, "kernel") == 5
        monkeypatch.setenv("ADTP_EMULATOR_REFUSE", "")
        assert ran(runner, CALLS[0]) == expected["few"]


def test_kernels_that_do_not_fit(gpu, built, monkeypatch):
    bucket = PLAN.buckets[0]
    launch = bucket.launches[0]

    def changed(**fields):
        return Plan((), (replace(bucket, launches=(replace(launch, **fields),)),))

    with pytest.raises(InputError, match="the plan launches 'fp16-d33', and there is no such kernel"):
        make(built, changed(variant="fp16-d33"))
    with pytest.raises(
        CudaError,
        match=r"launches fp16-d32-16x16 \(layer 0\) with 9 arguments; accepted are p16 p16 p16 p p16 i16 i i i f",
    ):
        make(built, changed(arguments=launch.arguments[:-1]))
    with pytest.raises(CudaError, match="with i as argument 9; accepted are p16"):
        make(built, changed(arguments=(*launch.arguments[:-1], Number("i32", 1))))
    with pytest.raises(CudaError, match="with 24 as argument 5; accepted are multiples of 16"):
        make(built, changed(arguments=(*launch.arguments[:5], Number("i32", 24), *launch.arguments[6:])))
    with pytest.raises(CudaError, match="with 8 as argument 0; accepted are multiples of 16"):
        make(built, changed(arguments=(Pointer(WORKSPACE, 8), *launch.arguments[1:])))
    with pytest.raises(CudaError, match="with a call's number as argument 5; accepted are multiples of 16"):
        make(built, changed(arguments=(*launch.arguments[:5], Number("i32", "tokens"), *launch.arguments[6:])))
    monkeypatch.setenv("ADTP_EMULATOR_SM", "75")
    with pytest.raises(CudaError, match=r"fp16-d32-16x16: no kernel for sm_75; accepted are GPUs from sm_80 on"):
        make(built)


def test_a_runner_that_is_closed_or_not_built_says_so(gpu, built, monkeypatch):
    runner = make(built)
    runner.close()
    runner.close()
    with pytest.raises(CudaError, match="it is closed; make another one"):
        ran(runner, CALLS[0])
    monkeypatch.setattr("adtp_export.plugins.runner.built", lambda: None)
    with pytest.raises(MissingDependencyError, match="is not built; type: adtp-plugin build --cuda"):
        Runner(PLAN)


def test_closing_waits_for_calls_of_other_threads(gpu, built):
    runner = make(built)
    library, order = runner._library, []

    class Slow:
        def adtp_runner_run(self, *given):
            started.set()
            status = library.adtp_runner_run(*given)
            closing.wait(0.2)  # returns early where another thread may close meanwhile
            order.append("ran")
            return status

        def adtp_runner_destroy(self, handle):
            closing.set()
            order.append("closed")
            library.adtp_runner_destroy(handle)

    started, closing = threading.Event(), threading.Event()
    runner._library = Slow()
    thread = threading.Thread(target=ran, args=(runner, CALLS[0]))
    thread.start()
    assert started.wait(10)
    runner.close()
    thread.join()
    assert order == ["ran", "closed"]
