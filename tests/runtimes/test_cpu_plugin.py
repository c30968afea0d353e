"""The attention operators in ONNX Runtime: alone, in models, and as targets of an export."""

import json
import re
import shutil
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import onnx
import onnxruntime
import pytest
from cpu_operators import FLOAT, attend, feed, kinds_that_ran, mapped, model_of, session
from known_graphs import taking_known_graphs
from onnx import helper
from testbed import ROOT, as_numpy, exported_graph, make_batch, make_student, relist

import adtp_export
from adtp_export.artifacts.records import Manifest
from adtp_export.contract import ATTENTION, ATTENTION_RECEIVED, DOMAIN, NUM_HEADS, SCALE
from adtp_export.environment import fingerprint
from adtp_export.errors import InputError, MissingDependencyError
from adtp_export.graph.debug import debug_form
from adtp_export.plugins import compiling, operators
from adtp_export.runtimes.onnxruntime import OnnxRuntimeEngine
from adtp_export.targets.specs import RUNTIMES, TargetSpec
from adtp_export.verify.oracle import run_oracle
from adtp_export.verify.parity import compare

sys.path.insert(0, str(ROOT / "tests" / "ops"))
from ragged_inputs import bounds, make_inputs

PLAIN, PLUGIN, PRECOMPUTED_PLUGIN = (f"onnxruntime-cpu-fp32{form}" for form in ("", "-plugin", "-precomputed-plugin"))


def both_operators(heads, scale) -> onnx.ModelProto:
    """A model of two nodes, one of each operator, with their portable bodies."""
    names = ["q", "k", "v", "cu_seqlens"]
    settings = {"domain": DOMAIN, NUM_HEADS: heads, SCALE: scale}
    nodes = [
        helper.make_node(ATTENTION, names, ["first"], **settings),
        helper.make_node(ATTENTION_RECEIVED, names, ["output", "received"], **settings),
    ]
    return model_of(nodes, dict.fromkeys(("first", "output", "received"), FLOAT))


@pytest.mark.parametrize("lengths", [[1], [9, 30, 1], [150, *[3] * 20]], ids=str)
def test_they_take_the_place_of_the_functions(operators_library, tmp_path, lengths):
    inputs = make_inputs(lengths)
    model = both_operators(*inputs[4:])
    profiled = session(model, operators_library, profile=tmp_path / "profile")
    first, output, received = profiled.run(None, feed(*inputs))
    assert kinds_that_ran(profiled) == {ATTENTION, ATTENTION_RECEIVED}
    exact, allowed, exact_received, allowed_received = bounds(*inputs)
    assert (np.abs(first - exact) <= allowed).all()
    assert (np.abs(output - exact) <= allowed).all()
    assert (np.abs(received - exact_received) <= allowed_received).all()
    for ours, portable in zip((first, output, received), session(model).run(None, feed(*inputs))):
        np.testing.assert_allclose(ours, portable, rtol=1e-4, atol=1e-5)


def test_answers_depend_neither_on_threads_nor_on_who_takes_what(operators_library):
    """Every piece of work, in any order and on any thread, gives the same bits."""
    inputs = make_inputs([200, 1, 0, 40, 3], heads=3, head_size=40)
    (alone, _), (together, sums) = (attend(operators_library, *inputs, received=both) for both in (False, True))
    model = both_operators(*inputs[4:])
    for threads in (1, 2, 4):
        for _ in range(5):
            first, output, received = session(model, operators_library, threads).run(None, feed(*inputs))
            assert np.array_equal(first, alone)
            assert np.array_equal(output, together)
            assert np.array_equal(received, sums)


def test_many_callers_at_once(operators_library):
    """One session, asked by eight threads with batches of their own."""
    shared = session(both_operators(*make_inputs([1])[4:]), operators_library)
    cases = [make_inputs([5 * i + 1, 70, i], seed=i) for i in range(8)]
    alone = [shared.run(None, feed(*inputs)) for inputs in cases]
    with ThreadPoolExecutor(8) as pool:
        for _ in range(10):
            together = pool.map(lambda inputs: shared.run(None, feed(*inputs)), cases)
            assert all(np.array_equal(a, b) for got, one in zip(together, alone) for a, b in zip(got, one))


@pytest.mark.parametrize("bounds", [[0, 5, 4], [1, 8], [0, 9, 8], [0, 7], [0, -1, 8], []], ids=str)
def test_bounds_that_are_none_are_refused(operators_library, bounds):
    """No memory outside of the T rows is touched."""
    q, k, v, _, heads, scale = make_inputs([8])
    asked = session(both_operators(heads, scale), operators_library)
    wrong = {"q": q.numpy(), "k": k.numpy(), "v": v.numpy(), "cu_seqlens": np.array(bounds, np.int32)}
    with pytest.raises(Exception, match="cu_seqlens must be .* and rise from 0 to T"):
        asked.run(None, wrong)


def test_shapes_and_attributes_that_are_none_are_refused(operators_library):
    q, k, v, cu_seqlens, heads, scale = make_inputs([8])
    asked = session(both_operators(heads, scale), operators_library)
    with pytest.raises(Exception, match="must share one shape"):
        asked.run(None, feed(q, k[:4], v, cu_seqlens))
    with pytest.raises(Exception, match="num_heads must divide H"):
        session(both_operators(5, scale), operators_library).run(None, feed(q, k, v, cu_seqlens))
    with pytest.raises(Exception, match="num_heads must be at least 1"):
        session(both_operators(0, scale), operators_library)


# In models


@pytest.fixture(scope="module")
def judged(tmp_path_factory):
    """A student's file, and what it is compared with."""
    path, sites = tmp_path_factory.mktemp("judged") / "model.onnx", ("1.attention", "2.ffn")
    path.write_bytes(exported_graph(*sites))
    batches = [as_numpy(make_batch(n, max(n) + 4, seed=len(n))) for n in ([5, 60, 1, 2], [7])]
    return path, run_oracle(make_student(sites), batches)


@pytest.mark.usefixtures("with_operators")
def test_a_model_equals_the_oracle(judged):
    path, oracle = judged
    with debug_form(path) as debug:
        parity = compare(oracle, *(OnnxRuntimeEngine(p, plugin=True) for p in (path, debug)), True)
    assert parity.failure is None
    assert parity.prediction_agreement == parity.kept_token_agreement == 1


@pytest.mark.usefixtures("with_operators")
def test_a_wrong_operator_does_not(judged, tmp_path):
    """Here its softmax has another scale than the model says, by a thousandth."""
    path, oracle = judged
    model = onnx.load(path)
    for node in model.graph.node:
        for attribute in node.attribute:
            if (node.domain, attribute.name) == (DOMAIN, SCALE):
                attribute.f *= 1.001
    onnx.save(model, tmp_path / "wrong.onnx")
    with debug_form(tmp_path / "wrong.onnx") as debug:
        engines = [OnnxRuntimeEngine(p, plugin=True) for p in (tmp_path / "wrong.onnx", debug)]
        assert compare(oracle, *engines, True).failure


# As targets


@pytest.fixture(scope="module")
def opened():
    """Files that the export of `published` opens, and whether with the operators."""
    return []


@pytest.fixture(scope="module")
def published(operators_library, small, tmp_path_factory, opened):
    """The small student exported with --precompute-embedding-projections where the operators are built."""
    out = tmp_path_factory.mktemp("published") / "out"
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv(operators.SWITCH)
        patch.setattr(operators, "BUILT", operators_library.parent)
        init = OnnxRuntimeEngine.__init__

        def recorded(engine, path, *args, plugin=False, **options):
            opened.append((path, plugin))
            init(engine, path, *args, plugin=plugin, **options)

        patch.setattr(OnnxRuntimeEngine, "__init__", recorded)
        with taking_known_graphs():
            adtp_export.export(small, out, precompute_embedding_projections=True)
    return out


def test_targets_are_verified_beside_the_portable_ones(published, operators_library):
    manifest = Manifest.read(published)
    assert [name for name in manifest.targets if "plugin" in name] == [PLUGIN, PRECOMPUTED_PLUGIN]
    for name in (PLUGIN, PRECOMPUTED_PLUGIN):
        target, portable = manifest.targets[name], manifest.targets[name.removesuffix("-plugin")]
        assert (target.status, target.attention, target.file) == ("verified", "plugin", portable.file)
        assert portable.attention == "decomposed"
        assert target.details["p50_ms"] > 0
    shipped = f"plugins/{operators.FILE}"
    assert shipped in manifest.files
    assert (published / shipped).read_bytes() == operators_library.read_bytes()
    assert PLUGIN in (published / "report.md").read_text(encoding="utf-8")


def test_an_export_opens_no_session_twice(published, opened):
    """Each target has one of its file, which is timed too, and one of its debug form, which the targets of a file share."""
    assert len(set(opened)) == len(opened) == 8
    assert len({path for path, _ in opened}) == 4


def test_applications_register_the_library(published):
    """As docs/plugin.md says it."""
    text = (ROOT / "docs" / "plugin.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    names = {}
    exec(block.replace("OUT/", f"{published}/"), names)
    batch = {name: np.ones((2, 5), np.int64) for name in (i.name for i in names["session"].get_inputs())}
    expected = OnnxRuntimeEngine(published / "model.onnx").run(batch)["logits"]
    np.testing.assert_allclose(names["session"].run(None, batch)[0], expected, atol=1e-5)


def timed(out, times):
    """A copy of the directory in which targets took these milliseconds on this kind of machine."""
    document = json.loads((out / "manifest.json").read_text())
    for name, ms in times.items():
        document["targets"][name] |= {"p50_ms": ms, "timed_on": "8x64", "fingerprint": fingerprint()}
    return relist(out, document["targets"])


@pytest.fixture
def fast(published, tmp_path):
    out = shutil.copytree(published, tmp_path / "out")
    names = Manifest.read(out).targets
    return timed(out, {name: 1.0 if name == PLUGIN else 5.0 + len(name) for name in names})


@pytest.mark.usefixtures("with_operators")
def test_load_takes_the_faster_one(fast):
    deployment = adtp_export.load(fast)
    assert deployment.target == PLUGIN
    assert "fastest of" in deployment.reason
    texts = ["a wonderful film", "the soup was terrible " * 9, ""]
    portable = adtp_export.load(fast, target=PLAIN)
    for ours, theirs in zip(deployment(texts, return_kept=True), portable(texts, return_kept=True)):
        assert ours.kept == theirs.kept
        assert ours.scores == pytest.approx(theirs.scores, abs=1e-5)


def test_load_says_what_it_goes_without(fast):
    deployment = adtp_export.load(fast)
    assert deployment.target == PLAIN
    assert f"; not {PLUGIN}: ADTP_OPERATORS=off leaves the attention operators out" in deployment.reason
    with pytest.raises(
        InputError, match=rf"target: {PLUGIN} cannot run on this machine \(ADTP_OPERATORS=off .*\); {PLAIN}, .*can"
    ):
        adtp_export.load(fast, target=PLUGIN)


def test_a_library_that_the_system_does_not_load_is_left_alone(fast, tmp_path, monkeypatch):
    library = tmp_path / "elsewhere" / operators.FILE
    library.parent.mkdir()
    library.write_bytes(b"\x7fELF of another processor".ljust(1000, b"\0"))
    compiling.keep([library], {"sources": operators.sources_sha256()}, library.parent, operators._RECORD)
    monkeypatch.delenv(operators.SWITCH)
    monkeypatch.setattr(operators, "BUILT", library.parent)
    deployment = adtp_export.load(fast)
    assert deployment.target == PLAIN
    assert f"cannot load {operators.FILE}" in deployment.reason
    assert deployment("a wonderful film")[0].label
    with pytest.raises(MissingDependencyError, match=f"model.onnx: ONNX Runtime .* cannot load {operators.FILE}"):
        RUNTIMES["onnxruntime"].open(fast / "model.onnx", TargetSpec.parse(PLUGIN))


def test_half_a_library_is_none(operators_library, tmp_path, monkeypatch):
    """One that a full disk cut off: loading it would end the process. One with another bit might do anything."""
    elsewhere = shutil.copytree(operators_library.parent, tmp_path / "elsewhere")
    library, whole = elsewhere / operators.FILE, operators_library.read_bytes()
    monkeypatch.setattr(operators, "BUILT", elsewhere)
    assert operators.built() == library
    for changed in (whole[: len(whole) // 2], whole[:-9] + bytes([whole[-9] ^ 1]) + whole[-8:]):
        library.write_bytes(changed)
        assert operators.built() is None


@pytest.mark.usefixtures("with_operators")
def test_a_library_of_another_system_does_not_hide_the_package_s_own(operators_library, monkeypatch):
    """Where machines of two kinds share an installation, and one of them built its own."""
    assert operators.library() == operators_library
    monkeypatch.setattr(compiling, "SYSTEM", "Linux another")
    assert operators.COMPILED in operators.library().parents


def test_what_has_arithmetic_for_it():
    taken = {
        precision
        for precision in ("fp32", "fp16", "bf16", "int8", "fp8")
        if RUNTIMES["onnxruntime"].takes(TargetSpec.parse(f"onnxruntime-cpu-{precision}-plugin"))
    }
    assert taken == {"fp32", "int8"}
    for precision, able in (("fp32", False), ("bf16", True), ("int8", True)):
        assert RUNTIMES["onnxruntime"].takes(TargetSpec.parse(f"onnxruntime-cpu-{precision}-linear-plugin")) == able


def test_attention_plugin_needs_the_operators(small, tmp_path):
    with pytest.raises(
        MissingDependencyError,
        match="--attention plugin: ADTP_OPERATORS=off leaves the attention operators out",
    ):
        adtp_export.export(small, tmp_path / "out", attention="plugin")


# By default, with the library of the package


def test_an_export_verifies_them_and_carries_no_library(exported_by_default):
    manifest = Manifest.read(exported_by_default)
    assert {name: target.status for name, target in manifest.targets.items()} == {PLAIN: "verified", PLUGIN: "verified"}
    assert all(target.details["p50_ms"] > 0 for target in manifest.targets.values())
    assert not [name for name in manifest.files if "plugins" in name]
    assert not manifest.notes


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
@pytest.mark.usefixtures("with_shipped_operators")
def test_load_runs_the_library_of_the_package_and_none_of_the_directory(exported_by_default, tmp_path):
    out = shutil.copytree(exported_by_default, tmp_path / "out")
    (out / "plugins").mkdir()
    shutil.copy(operators.library(), out / "plugins" / operators.FILE)
    names = Manifest.read(out).targets
    deployment = adtp_export.load(timed(out, {name: 1.0 if name == PLUGIN else 5.0 for name in names}))
    assert deployment.target == PLUGIN
    assert deployment("a wonderful film")[0].label
    assert str(operators.library()) in mapped()
    assert not any(str(out) in name for name in mapped())


@pytest.mark.usefixtures("with_shipped_operators")
def test_load_takes_them_where_nothing_was_measured(exported_by_default, monkeypatch):
    """As on a server of another kind than the machine that exported."""
    monkeypatch.setattr("adtp_export.targets.choice.fingerprint", lambda: "of another machine")
    assert adtp_export.load(exported_by_default).target == PLUGIN
    monkeypatch.setenv(operators.SWITCH, "off")
    deployment = adtp_export.load(exported_by_default)
    assert deployment.target == PLAIN
    assert deployment.reason.count(f"; not {PLUGIN}: ADTP_OPERATORS=off leaves the attention operators out") == 1


@pytest.mark.slow
@pytest.mark.usefixtures("with_shipped_operators")
def test_two_versions_in_one_process(built_library):
    """Each session has the one that it registered: here the package's, and one of this machine's compiler."""
    inputs = make_inputs([40, 1, 9])
    model = both_operators(*inputs[4:])
    exact, allowed, *_ = bounds(*inputs)
    sessions = [session(model, library) for library in (operators.library(), built_library) for _ in range(2)]
    for each in sessions:
        assert (np.abs(each.run(None, feed(*inputs))[0] - exact) <= allowed).all()


@pytest.mark.usefixtures("with_shipped_operators")
def test_one_registration_for_each_session(operators_library):
    """docs/plugin.md says what ONNX Runtime answers to a second one."""
    options = onnxruntime.SessionOptions()
    for _ in range(2):
        options.register_custom_ops_library(str(operators.library()))
    model = both_operators(*make_inputs([3])[4:]).SerializeToString()
    with pytest.raises(Exception, match="already") as refused:
        onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    said = re.search(r"Domain already .*", str(refused.value))[0].rstrip(". ")
    assert said in " ".join((ROOT / "docs" / "plugin.md").read_text(encoding="utf-8").split())
