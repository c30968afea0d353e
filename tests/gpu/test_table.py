"""`benchmarks/gpu/run.sh table` and `probes` without a GPU: contenders on the CPU and on the emulated GPU, and what becomes of times."""

import itertools
import json
import os
import subprocess
import sys

import numpy as np
import pytest
import runner_builds
import torch
from testbed import ROOT

from adtp_export.benchmarking.workloads import make_workloads
from adtp_export.plugins import runner
from adtp_export.plugins.encoder.launches import Sizes
from benchmarks.gpu import emulated, peers, probes, schemas, table, torch_peers
from benchmarks.gpu.peers import DENSE, REFERENCE, STUDENT
from benchmarks.gpu.runner_peers import InRunner
from benchmarks.harness.records import RECORDS
from benchmarks.render import gpu_table

SETTING = peers.Setting(
    shape="dry",
    sizes=table.DRY_SIZES,
    tables=table.DRY_TABLES,
    layers=2,
    precision="fp16",
    sites=("0.ffn",),
    retention=0.29,
    dry=True,
)


def batch_of(workload):
    (made,) = make_workloads([workload], table.INPUTS, table.DRY_TABLES["vocab_size"])
    return made.batches[0]


@pytest.fixture(scope="module")
def judged():
    """A batch of uneven texts, the right answers, and by how much they may be off."""
    reference, batch = peers.Reference(SETTING), batch_of("3x12")
    return batch, reference.answer(batch), reference.allowed(batch_of(table.DRY_PROBE))


def share(judged, engine, like):
    batch, exact, allowed = judged
    return float(np.abs(engine.run(batch)["logits"] - exact[like]).max()) / allowed[like]


COMPILED = ("torch-compile", "torch-varlen-compile")
ON_CPU = [name for name in peers.PEERS if name.startswith(("torch", "ort")) and name not in COMPILED]


@pytest.mark.parametrize("name", [*ON_CPU, *(pytest.param(name, marks=pytest.mark.slow) for name in COMPILED)])
def test_dense_contenders_are_right(judged, tmp_path, name):
    engine = peers.PEERS[name].make(SETTING, tmp_path)
    assert share(judged, engine, DENSE) <= 1
    assert engine.run(batch_of("1x8"))["logits"].shape == (1, 2)
    assert share(judged, engine, DENSE) <= 1  # after another shape, too


@pytest.mark.parametrize("student", [True, False])
def test_the_runner_is_right_and_the_check_tells_its_models_apart(judged, monkeypatch, student):
    built = runner_builds.for_this_process()
    runner_builds.driver_of(built, monkeypatch)
    model = peers.models(SETTING)[student]
    engine = InRunner(model, "fp16", Sizes(max_tokens=64, processors=3, mean_length=16), built[0])
    own, other = (STUDENT, DENSE) if student else (DENSE, STUDENT)
    assert share(judged, engine, own) <= 1 < share(judged, engine, other)
    engine.close()


def everywhere(q, k, v, cu_seqlens, longest):
    heads = (t[None].transpose(1, 2) for t in (q, k, v))
    return torch.nn.functional.scaled_dot_product_attention(*heads)[0].transpose(0, 1)


def test_attention_across_texts_is_noticed(judged, tmp_path, monkeypatch):
    engine = peers.PEERS["torch-varlen"].make(SETTING, tmp_path)
    monkeypatch.setattr(torch_peers, "attend", everywhere)
    assert share(judged, engine, DENSE) > 1


def test_room_for_tokens_grows_by_an_eighth_at_most():
    for tokens in range(1, 20_000, 7):
        assert tokens <= torch_peers.rounded(tokens) < max(tokens * 1.125, tokens + 64) + 1


class Process:
    """Stands for a contender's process; `behaviour` says by name what goes wrong."""

    behaviour: dict = {}
    asked: list = []

    def __init__(self, name, python, module, folder):
        self.name, self.wrong, self.times = name, self.behaviour.get(name, ""), 0

    def ask(self, limit_s, do="load", batch=None):
        self.asked.append((self.name, do))
        if self.wrong == do or (self.wrong == "later" and do == "time" and self.times > 4):
            raise RuntimeError(f"cannot {do}")
        if do == "load":
            return {}
        if do == "allowed":
            return {DENSE: 0.01, STUDENT: 0.01}
        rows = len(batch["input_ids"])
        dense, kept = np.zeros((rows, 2), np.float32), np.where(batch["attention_mask"], 0, -1)
        kept[:, :2] = 1
        if self.name == REFERENCE:
            return {DENSE: dense, STUDENT: dense + 1, "kept_site": kept}
        self.times += 1
        off = {"wrong": 0.02, "nan": np.nan}.get(self.wrong, 0.005) + (self.name == STUDENT)
        return {"logits": dense + np.float32(off)} if do == "answer" else {"ms": 2.0 if self.name == STUDENT else 3.0}

    def close(self):
        pass


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.setattr(table, "Asked", Process)
    monkeypatch.setattr(table, "library", lambda folder: None)
    monkeypatch.setattr(Process, "asked", [])

    def command(*arguments, **behaviour):
        monkeypatch.setattr(Process, "behaviour", {name.replace("_", "-"): what for name, what in behaviour.items()})
        names = "--contenders=runner-student,runner-dense,torch-sdpa,torch-varlen,ort-fused,rtx"
        usual = ("--dry-run", f"--records={tmp_path}", "--seconds=0.01", names)
        code = table.main([*usual, *arguments])
        (path,) = tmp_path.glob("gpu-*-table-fp16.json")
        (record,) = schemas.read(path)
        return code, record, json.loads(path.read_text())

    return command


def test_what_fails_or_is_wrong_is_left_out_with_its_reason_and_the_others_are_timed(run):
    wrong = {"torch_sdpa": "wrong", "torch_varlen": "nan", "ort_fused": "later", "rtx": "load"}
    code, record, document = run(**wrong)
    assert code == 0
    assert [cell.workload for cell in record.cells] == list(table.DRY_WORKLOADS)
    for cell in record.cells:
        assert {row.contender: row.p50_ms for row in cell.rows} == {STUDENT: 2.0, DENSE: 3.0}
        assert cell.rows[1].student_speedup == 1.5
        assert cell.left_out == {
            "torch-sdpa": "its answers are wrong: off by 2.0 times what is allowed",
            "torch-varlen": "its answers are wrong: off by nan times what is allowed",
            "ort-fused": "cannot time",
            "rtx": "cannot load",
        }
        assert cell.flops_ratio > 1
        assert cell.share_of_allowed_error_of_dense_answers == 100
    told = gpu_table.render_table(document)
    assert "| dry | 2 | 3x12 | **2.000** | 3.000 |" in told
    assert "- rtx is left out of all: cannot load" in told
    assert "| dry | 2 | 1x8 | 2.000 | 3.000 | 1.50x ± 0.00 |" in gpu_table.render_realized(document)


def test_a_wrong_runner_fails_the_command(run):
    code, record, _ = run(runner_student="wrong")
    assert code == 1
    assert all(row.student_speedup is None for cell in record.cells for row in cell.rows)


def test_a_run_goes_on_where_the_one_before_ended(run, monkeypatch):
    clock = itertools.count(0, 30)
    with monkeypatch.context() as late:
        late.setattr(table.time, "monotonic", lambda: next(clock))
        code, part, _ = run("--minutes=3")
    assert (code, [cell.workload for cell in part.cells]) == (0, list(table.DRY_WORKLOADS[:1]))
    _, whole, _ = run()
    assert [cell.workload for cell in whole.cells] == list(table.DRY_WORKLOADS)
    assert whole.cells[0] == part.cells[0]
    Process.asked.clear()
    assert run()[1] == whole
    assert Process.asked == []


def test_a_record_of_another_machine_is_not_gone_on_with(run, tmp_path):
    _, _, document = run()
    (path,) = tmp_path.glob("gpu-*")
    document["device"]["driver_version"] = "1"
    path.write_text(json.dumps(document))
    with pytest.raises(SystemExit, match="use another --records DIR"):
        run()


@pytest.mark.parametrize("module", [table, probes])
@pytest.mark.parametrize("where", [[], [f"--records={RECORDS}"]])
def test_a_dry_run_has_to_say_where_its_records_go(module, where, capsys):
    with pytest.raises(SystemExit):
        module.main(["--dry-run", *where])
    assert "its times mean nothing" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("command", ["table", "probes"])
def test_the_whole_command_in_a_dry_run(tmp_path, command):
    try:
        emulated.environment()
    except emulated.MissingError as error:
        pytest.skip(str(error))
    file = runner.build(tmp_path / "library")
    arguments = [ROOT / "benchmarks/gpu/run.sh", command, "--dry-run", "--records", tmp_path, "--library", file]
    done = subprocess.run(
        arguments, env={**os.environ, "PYTHON": sys.executable}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (path,) = tmp_path.glob("gpu-*.json")
    (record,) = schemas.read(path)
    if command == "probes":
        assert not record.failures
        assert record.launches is not None
        assert {way.error < 0.05 for product in record.products for way in product.ours} == {True}
        assert gpu_table.render_products(json.loads(path.read_text())).count("\n| dry |") == 4
        return
    for cell in record.cells:
        assert {row.contender for row in cell.rows} == set(peers.PEERS) - {"tensorrt", "rtx"}
        assert set(cell.left_out) == {"tensorrt", "rtx"}
