"""Contenders are the networks that they are said to be, and run as `adtp-bench` runs them."""

import contextlib
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from testbed import TINY_BACKBONES, as_numpy, make_batch, make_encoder
from tolerances import assert_within_network
from transformers.modeling_outputs import SequenceClassifierOutput

from adtp_export.benchmarking import contenders, peers, processes
from adtp_export.benchmarking.contenders import Architecture
from adtp_export.environment import thread_count
from adtp_export.errors import EngineBuildError, InputError, MissingDependencyError
from adtp_export.graph.debug import debug_form
from adtp_export.model.flops import Shape, alive_tokens
from adtp_export.model.registry import fields
from adtp_export.runtimes import llamacpp, openvino
from adtp_export.runtimes.onnxruntime import OnnxRuntimeEngine

WITHOUT_LOGITS = {"ctranslate2", *peers.LLAMACPP}
TWO_LAYERS = Architecture(Shape(hidden=32, intermediate=64, heads=2, layers=2))


def test_a_scheduled_student_keeps_the_share(tmp_path):
    student, model = contenders.scheduled_student(TWO_LAYERS, ["0.ffn", "1.ffn"], 0.25, tmp_path)
    batch = make_batch([40, 12], 40, vocab_size=30000)
    with debug_form(student.path) as path:
        kept = OnnxRuntimeEngine(path).run(as_numpy(batch))["kept_site"]
    assert [n.tolist() for n in alive_tokens(kept, 2)] == [[40, 12], [10, 3], [10, 3]]
    assert np.array_equal(kept, model(**batch).kept_site)
    assert OnnxRuntimeEngine(student.path).outputs == ("logits",)
    assert (student.sites, student.is_student) == (("0.ffn", "1.ffn"), True)
    quicker = contenders.with_precomputed_projections(student, tmp_path)
    assert (quicker.name, quicker.precomputed_first_layer) == (f"{student.name}-precomputed", True)
    with pytest.raises(InputError, match="--precompute-embedding-projections: .*; leave it out"):
        contenders.with_precomputed_projections(quicker, tmp_path)


@pytest.mark.parametrize(
    ("sites", "retention", "message"),
    [
        (["0.mlp"], 0.5, "got '0.mlp'"),
        (["2.ffn"], 0.5, "got '2.ffn' in a model of 2 layers"),
        (["0.ffn"], 1.5, "got 1.5"),
        (["0.ffn"], 0.12345, "got 0.12345"),
    ],
)
def test_a_schedule_that_cannot_be_is_refused(tmp_path, sites, retention, message):
    with pytest.raises(InputError, match=message):
        contenders.scheduled_student(TWO_LAYERS, sites, retention, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_baselines_take_a_students_own_tables(tmp_path, monkeypatch):
    """No token types, and a vocabulary and position table that are not BERT's."""
    monkeypatch.setattr(contenders, "FULL_DEPTH", 1)
    tables = {"vocab_size": 40_000, "max_position_embeddings": 200, "type_vocab_size": 1}
    architecture = Architecture(Shape(hidden=32, intermediate=64, heads=2, layers=1), tables)
    assert architecture.input_names == ("input_ids", "attention_mask")
    batch = as_numpy(make_batch([200, 3], 200, vocab_size=40_000, types=1))
    for baseline in contenders.dense_baselines(architecture, tmp_path):
        engine = OnnxRuntimeEngine(baseline.path)
        assert engine.inputs == architecture.input_names
        assert np.isfinite(engine.run(batch)["logits"]).all()


@pytest.fixture(scope="module")
def baselines(tmp_path_factory):
    """Dense baselines of two layers for twelve: packed, padded, and their folder."""
    folder = tmp_path_factory.mktemp("baselines")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(contenders, "FULL_DEPTH", 2)
        yield *contenders.dense_baselines(TWO_LAYERS, folder), folder


def test_baselines_answer_as_their_networks_do(baselines):
    packed, padded, _ = baselines
    assert (packed.name, padded.name) == ("packed-dense-2", "padded-dense-2")
    networks = {packed: contenders.random_encoder(TWO_LAYERS), padded: contenders.dense_bert(TWO_LAYERS)}
    inputs = make_batch([7, 3], 7, vocab_size=30000)
    for contender, network in networks.items():
        assert_within_network(network, inputs, OnnxRuntimeEngine(contender.path).run(as_numpy(inputs))["logits"])


def test_where_a_head_reads_all_tokens_so_does_packed_dense(tmp_path, monkeypatch):
    """A tagger's last layer works for every token, and so has that of its baseline, or the tagger would look slow."""
    monkeypatch.setattr(contenders, "FULL_DEPTH", 2)
    tagger = replace(TWO_LAYERS, every_token=True)
    inputs = make_batch([7, 3], 7, vocab_size=30000)
    packed, padded = contenders.dense_baselines(tagger, tmp_path)
    assert not packed.cls_only_last_layer
    logits = OnnxRuntimeEngine(packed.path).run(as_numpy(inputs))["logits"]
    assert logits.shape == (2, 7, 2)
    assert_within_network(contenders.random_encoder(tagger), inputs, logits)
    assert OnnxRuntimeEngine(padded.path).run(as_numpy(inputs))["logits"].shape == (2, 2)


def test_a_plain_encoder_is_its_own_packed_baseline(tmp_path, monkeypatch):
    monkeypatch.setattr(contenders, "FULL_DEPTH", 1)
    made = contenders.dense_baselines(TWO_LAYERS.deep(1), tmp_path, plain=True)
    assert [c.name for c in made] == ["padded-dense-1"]


def test_names_of_shapes():
    assert contenders.named_shape("bert-base", 6) == Shape(hidden=768, intermediate=3072, heads=12, layers=6)
    with pytest.raises(InputError, match="did you mean 'bert-base'"):
        contenders.named_shape("bertbase", None)
    with pytest.raises(InputError, match="--layers: got 0"):
        contenders.named_shape("bert-base", 0)


def test_peers_answer_as_bert_does(baselines):
    """Every dense peer, loaded as `adtp-bench` loads it, on a ragged batch: the same network in other runtimes."""
    packed, _, folder = baselines
    names = [name for name in peers.choose_peers(["all"], forced=True) if name not in WITHOUT_LOGITS]
    assert {"optimum", "torch", "sorted", "ltp"} <= set(names)
    made = peers.dense_peers(names, packed, TWO_LAYERS, folder)
    batch = make_batch([7, 3, 9, 1, 4, 4, 2, 8, 5], 9, vocab_size=30000)
    made = [peer for peer in made if peer.precision == "fp32" and peer.engine != "torch-compile"]  # compiles for long
    assert {"optimum-dense-2", "optimum-fused-dense-2", "torch-eager-dense-2", "sorted-dense-2"} <= {
        p.name for p in made
    }
    answers = (processes.run(processes.load(peer), as_numpy(batch), peer.length_bucket_rows)["logits"] for peer in made)
    assert_within_network(contenders.dense_bert(TWO_LAYERS), batch, *answers)


class FirstStates(torch.nn.Module):
    """Answers with the states of first tokens, as peers without a classifier do."""

    def __init__(self, encoder):
        super().__init__()
        self.encoder = encoder

    def forward(self, **batch):
        return SequenceClassifierOutput(logits=self.encoder(**batch).last_hidden_state[:, 0])


@pytest.mark.usefixtures("has_ctranslate2")
def test_ctranslate2_encodes_as_bert_does(baselines):
    packed, _, folder = baselines
    batch = make_batch([7, 3, 9, 1, 4], 9, vocab_size=30000)
    plain, int8 = (processes.load(peer).run(as_numpy(batch))["states"]
                   for peer in peers.dense_peers(["ctranslate2"], packed, TWO_LAYERS, folder))  # fmt: skip
    assert_within_network(FirstStates(contenders.dense_bert(TWO_LAYERS).bert), batch, plain)
    assert 0 < np.abs(int8 - plain).max() < 0.1


@pytest.mark.skipif(llamacpp.installed() is None, reason="llama.cpp is not installed")
@pytest.mark.parametrize("piece", [512, 10])
def test_llamacpp_encodes_as_bert_does(baselines, monkeypatch, piece):
    """In one run or in several; its GELU is an approximation."""
    packed, _, folder = baselines
    monkeypatch.setattr(llamacpp, "PIECE", piece)
    batch = make_batch([7, 3, 9, 1, 4], 9, vocab_size=30000, types=1)
    with torch.no_grad():
        states = contenders.dense_bert(TWO_LAYERS).bert(**batch).last_hidden_state[:, 0].numpy()
    off = {}
    for peer in peers.dense_peers([*peers.LLAMACPP], packed, TWO_LAYERS, folder):
        answer = processes.load(peer).run(as_numpy(batch))["states"]
        cosines = (answer * states).sum(1) / np.linalg.norm(answer, axis=1) / np.linalg.norm(states, axis=1)
        assert cosines.min() > 0.999, peer
        off[peer.precision] = np.abs(answer - states).max()
    assert off["fp32"] < 2e-3
    assert off["fp32"] < off["bf16"] < off["q8_0"]


def test_llamacpp_runs_few_tokens_at_once():
    found = llamacpp.pieces([600, 100, 412, 1, *[1] * 300])
    assert [(rows.start, rows.stop) for rows in found] == [(0, 1), (1, 3), (3, 259), (259, 304)]
    assert llamacpp.pieces([7]) == [slice(0, 1)]


def test_llamacpp_that_is_missing(monkeypatch, tmp_path):
    monkeypatch.setenv(llamacpp.FOLDER, str(tmp_path))
    assert not set(peers.LLAMACPP) & set(peers.choose_peers(["all"], forced=True))
    with pytest.raises(MissingDependencyError, match="--peers llamacpp-bf16: llama.cpp .* type: make llamacpp"):
        peers.choose_peers(["llamacpp-bf16"], forced=True)


def test_what_this_machine_cannot_run_is_left_out_of_all_and_told_where_it_is_named(monkeypatch):
    monkeypatch.setattr(openvino, "installed", lambda: "1")
    monkeypatch.setattr(openvino, "has_bf16", lambda: False)
    assert "openvino-bf16" not in peers.choose_peers(["all"], forced=True)
    with pytest.raises(InputError, match="--peers openvino-bf16: this processor has no instructions for bf16"):
        peers.choose_peers(["openvino-bf16"], forced=True)
    monkeypatch.setattr(openvino, "installed", lambda: None)
    monkeypatch.delattr(openvino, "has_bf16")  # which would import it
    assert peers.choose_peers(["optimum"], forced=False) == ["optimum"]
    assert not {"openvino", "openvino-bf16"} & set(peers.choose_peers(["all"], forced=True))
    with pytest.raises(MissingDependencyError, match="--peers openvino-bf16: openvino is not installed"):
        peers.choose_peers(["openvino-bf16"], forced=True)


def test_without_a_compiler_one_peer_of_pytorch_is_left_out(monkeypatch, baselines):
    packed, _, folder = baselines
    monkeypatch.setattr(peers, "COMPILERS", ("no-such-compiler",))
    names = [peer.name for peer in peers.dense_peers(["torch"], packed, TWO_LAYERS, folder)]
    assert names == ["torch-eager-dense-2", "torch-sdpa-dense-2"]


def test_peers_by_name():
    assert "ltp" not in peers.choose_peers(["all"], forced=False)
    assert peers.choose_peers(["sorted", "torch"], forced=False) == ["sorted", "torch"]
    with pytest.raises(InputError, match="got 'all, torch'; accepted is either all, or names"):
        peers.choose_peers(["all", "torch"], forced=False)
    with pytest.raises(InputError, match="--peers: got 'openvin'.*did you mean 'openvino'"):
        peers.choose_peers(["torch", "openvin"], forced=True)
    with pytest.raises(InputError, match="ltp goes with --shape"):
        peers.choose_peers(["ltp"], forced=False)


def test_skewed_batches_are_also_run_in_parts(baselines):
    """In parts of 8 and one by one, by the process of the model that takes them whole; and the answers are the same."""
    packed, padded, _ = baselines
    student = replace(packed, name="student")
    models = [student, replace(packed, name="packed-dense-2"), replace(padded, name="padded-dense-2")]
    made = peers.splits(models, 2)
    assert {(c.name, c.length_bucket_rows, c.process) for c in made} == {
        ("student-sorted", 8, "student"),
        ("student-one-by-one", 1, "student"),
        ("sorted-packed-dense-2", 8, "packed-dense-2"),
        ("one-by-one-packed-dense-2", 1, "packed-dense-2"),
        ("sorted-dense-2", 8, "padded-dense-2"),
    }
    assert not peers.splits([*models, *made], 2)
    inputs = make_batch([7, 3, 9, 1, 4, 4, 2, 8, 5], 9, vocab_size=30000)
    batch, engine = as_numpy(inputs), processes.load(student)
    answers = (processes.run(engine, batch, rows)["logits"] for rows in (0, 1))
    assert_within_network(contenders.random_encoder(TWO_LAYERS), inputs, *answers)
    with processes.Processes([student, made[0]]) as running:
        assert len(running._children) == 1
        assert all(running.time_ms(name, batch) > 0 for name in ("student", "student-sorted"))


@pytest.mark.usefixtures("with_operators")
def test_attention_operators_are_timed_where_they_are_built(baselines):
    packed, padded, _ = baselines
    models = [replace(packed, name="student"), replace(packed, name="packed-dense-2"), padded]
    made = peers.with_plugin(models, 2)
    assert [c.name for c in made] == ["student-plugin", "plugin-packed-dense-2"]
    inputs = make_batch([7, 3, 9, 1], 9, vocab_size=30000)
    answers = (processes.load(made_here).run(as_numpy(inputs))["logits"] for made_here in (packed, made[0]))
    assert_within_network(contenders.random_encoder(TWO_LAYERS), inputs, *answers)


def test_attention_operators_are_left_out_where_they_are_not(baselines):
    assert peers.with_plugin([replace(baselines[0], name="student")], 2) == []


@pytest.fixture
def model_file(baselines):
    return baselines[0].path


def contender(name, path):
    return processes.Contender(name=name, path=path, layers=2, padded=False)


def test_contenders_run_in_processes_of_their_own(tmp_path, model_file):
    batch = as_numpy(make_batch([7, 3], 7, vocab_size=1000))
    with processes.Processes([contender(name, model_file) for name in "ab"]) as running:
        assert all(running.time_ms(name, batch) > 0 for name in "ab")
        with pytest.raises(RuntimeError, match="a: .*input_ids"):
            running.time_ms("a", {})
        assert running.time_ms("b", batch) > 0  # the other lives on
        with pytest.raises(EngineBuildError, match="the process of a has ended"):
            running.time_ms("a", batch)
    missing = contender("missing", tmp_path / "no.onnx")
    with pytest.raises(EngineBuildError, match="refuses no.onnx"), processes.Processes([missing]):
        pass


def test_a_script_needs_no_guard(tmp_path, model_file):
    """The contenders' processes do not run the script that asks for them."""
    script = tmp_path / "script.py"
    script.write_text(f"""
from pathlib import Path
import numpy as np
from adtp_export.benchmarking.processes import Contender, Processes
print("run")
one = Contender(name="one", path=Path({str(model_file)!r}), layers=2, padded=False)
names = ("input_ids", "attention_mask", "token_type_ids")
with Processes([one]) as running:
    print(running.time_ms("one", {{name: np.ones((2, 5), np.int64) for name in names}}) > 0)
""")
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, check=False)
    assert (done.stdout.split(), done.stderr) == (["run", "True"], "")


UNLIKE = {
    "bert-pruned": ["structured pruning"],
    "distilbert-pruned": ["structured pruning"],
    "electra": ["narrower ones"],
    "mpnet": ["bias by distance"],
    "deberta-v2": ["products with distances"],
    "modernbert": ["have a window", "no gates"],
}


@pytest.mark.parametrize("backbone", TINY_BACKBONES)
def test_what_dense_bert_does_not_share_is_said(backbone):
    config = make_encoder(backbone, "none").dense.config
    architecture = Architecture.of({**config.to_dict(), **fields(config)})
    assert len(architecture.unlike) == len(UNLIKE.get(backbone, []))
    for said, expected in zip(architecture.unlike, UNLIKE.get(backbone, [])):
        assert expected in said
    dense = architecture.deep(2)
    assert (dense.shape.sizes, dense.shape.windows, dense.shape.gated) == ((), (), False)
    assert dense.bert_config.hidden_size == 32


@pytest.mark.parametrize(
    ("engine", "bound", "pause", "sent"),
    [
        (processes.DEPLOYED, True, processes.SPINNING_S, 0),
        (processes.WITH_PLUGIN, True, processes.PAUSE_S, thread_count(0)),
        (processes.WITH_PLUGIN, False, processes.SPINNING_S, thread_count(0)),
    ],
)
def test_every_turn_waits_for_threads_to_sleep(tmp_path, monkeypatch, engine, bound, pause, sent):
    """Deployed ones spin as on a server, with the threads that the runtime chooses; so do those that are bound to no core."""
    told = []
    child = SimpleNamespace(connection=SimpleNamespace(send=told.append, close=lambda: None), close=lambda: None)
    monkeypatch.setattr(processes, "Child", lambda command: child)
    monkeypatch.setattr(processes.Processes, "_answer", lambda self, name: None)
    monkeypatch.setattr(processes, "threads_to_ask_for", lambda threads: 0 if bound else 2)
    contender = processes.Contender(name="a", path=tmp_path, layers=1, padded=False, engine=engine)
    with processes.Processes([contender]) as opened:
        assert opened._pause_s == pause
    assert told == [(contender, sent)]


@pytest.mark.parametrize(("asked", "settings"), [(0, {"1"}), (1, {"1"}), (2, set())])
def test_threads_sleep_after_a_run_where_they_wake_up_fast(tmp_path, monkeypatch, asked, settings):
    """Threads that are bound to cores do, and a single one needs no other."""
    student, _ = contenders.scheduled_student(TWO_LAYERS, ["0.ffn"], 0.5, tmp_path)
    monkeypatch.setattr(processes, "threads_to_ask_for", lambda threads: asked)
    options, found = processes.load(student, 2)._session.get_session_options(), set()
    with contextlib.suppress(RuntimeError):  # it has no such entry
        found.add(options.get_session_config_entry("session.force_spinning_stop"))
    assert found == settings
