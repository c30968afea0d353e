"""What a manifest says of targets that several runs wrote: each stays with the rows, and the notes, that are about it."""

import dataclasses
import json
import re
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from testbed import DEMO

from adtp_export.artifacts.manifest import write_manifest
from adtp_export.artifacts.records import TIMING, VERIFICATION, Manifest, Note, Parity, ShapeRange, Target
from adtp_export.cli.console import Console
from adtp_export.cli.export import _summarize
from adtp_export.errors import EngineBuildError, InputError
from adtp_export.explain.records import Views
from adtp_export.model.checkpoint import load_checkpoint
from adtp_export.pipeline.export import timing
from adtp_export.pipeline.export.context import ExportContext, StepResult
from adtp_export.pipeline.export.engines import ship_plugin_libraries
from adtp_export.pipeline.export.manifest import joined, make_manifest, with_times
from adtp_export.pipeline.export.quantize import Calibration
from adtp_export.pipeline.export.reference import Verification
from adtp_export.pipeline.progress import Steps
from adtp_export.report import card, html, markdown
from adtp_export.report.targets import groups

FP32, FP16, INT8 = (f"onnxruntime-cpu-{precision}" for precision in ("fp32", "fp16", "int8"))
FILES = {FP32: "model.onnx", FP16: "model.fp16.onnx", INT8: "model.ort-cpu.int8.onnx"}
ONE = ShapeRange(1, 1, 1)


@pytest.fixture(scope="module")
def checkpoint():
    return load_checkpoint(DEMO)


def verified(name, accuracy, **details):
    parity = Parity(
        rows=100,
        rows_compared=98,
        max_abs_logit_diff=1e-6,
        mean_abs_logit_diff=1e-7,
        prediction_agreement=1.0,
        kept_token_agreement=1.0,
        tolerance=1e-5,
        accuracy=accuracy,
        quality={"accuracy": accuracy},
    )
    return Target(file=FILES[name], status="verified", attention="decomposed", parity=parity, details=details)


def unverified(name, status="unverified"):
    return Target(file=FILES[name], status=status, attention="decomposed")


QUANTIZED = {
    "recipe": "ort-cpu.int8",
    "left_in_base": [],
    "ranges": {"x": 2.5},
    "sensitivity": [{"product": "x", "mean_abs_logit_diff": 0.1, "max_abs_logit_diff": 0.2}],
}


@pytest.fixture
def exported(checkpoint, tmp_path):
    """Make the manifest of a run with these targets, verified and calibrated on `rows`; of an update with `previous`."""

    def make(targets, rows=None, notes=(), previous=None):
        run = ExportContext(checkpoint=checkpoint, work=tmp_path, profile={"batch": ONE, "seq": ONE}, steps=Steps())
        for target in targets.values():
            if not (tmp_path / target.file).exists():
                (tmp_path / target.file).write_text(target.file)
        record = {
            "text": rows,
            "sha256": f"of {rows}",
            "rows": 100,
            "batches": 9,
            "accuracy": 0.5,
            "quality": {"accuracy": 0.5},
        }
        oracle = SimpleNamespace(retention={"1.attention": {"mean_ratio": 0.5, "mean_kept_tokens": len(rows or "")}})
        verification = Verification(oracle, record, (), Views((), {}, 0.5)) if rows else None
        ranges = {"text": rows, "rows": 9, "of_rows": 9, "tokens": 99, "sha256": "0" * 64}
        calibration = Calibration([], {}, ranges) if rows else None
        manifest = make_manifest(run, StepResult(targets, tuple(notes)), verification, calibration)
        if previous is not None:
            manifest = joined(manifest, previous, tmp_path)
        return write_manifest(dataclasses.replace(manifest, files={}), tmp_path)

    return make


@pytest.fixture
def updated(exported):
    """Two targets on the rows of a.tsv, and a third one added on b.tsv."""
    first = exported({FP32: verified(FP32, 0.25), INT8: verified(INT8, 0.125, **QUANTIZED)}, "a.tsv")
    return exported({FP16: verified(FP16, 0.75)}, "b.tsv", previous=first)


def test_an_update_leaves_others_with_the_rows_that_they_were_compared_on(updated, tmp_path):
    assert {name: target.verification["text"] for name, target in updated.targets.items()} == {
        FP32: "a.tsv",
        INT8: "a.tsv",
        FP16: "b.tsv",
    }
    assert updated.targets[FP32].verification["sha256"] == "of a.tsv"
    assert {name: target.calibration.get("text") for name, target in updated.targets.items()} == {
        FP32: None,
        INT8: "a.tsv",
        FP16: None,
    }
    assert updated.verification["text"] == "b.tsv"
    assert updated.retention["1.attention"]["mean_kept_tokens"] == len("b.tsv")
    assert Manifest.read(tmp_path) == updated


def test_an_update_without_verification_changes_no_rows(exported):
    first = exported({FP32: verified(FP32, 0.25)}, "a.tsv")
    second = exported({FP32: unverified(FP32), FP16: unverified(FP16)}, previous=first)
    assert second.targets[FP32] == first.targets[FP32]
    assert second.targets[FP16].verification == {}
    assert (second.verification, second.retention) == (first.verification, first.retention)


def test_what_ran_elsewhere_is_still_known(exported):
    """A file that was verified on a machine with a GPU, and written again, to the same bytes, on one without."""
    first = exported({FP32: verified(FP32, 0.25)}, "a.tsv")
    second = exported({FP32: unverified(FP32, "built-not-run")}, "b.tsv", previous=first)
    assert second.targets[FP32] == first.targets[FP32]


@pytest.mark.parametrize("ending", ["", ".data"])
def test_a_file_that_changed_is_known_no_longer(exported, tmp_path, ending):
    """The weights of a large one lie beside it, and its own bytes stay where these alone change."""
    (tmp_path / f"{FILES[FP32]}.data").write_text("weights")
    first = exported({FP32: verified(FP32, 0.25, p50_ms=1.0)}, "a.tsv", [Note("of its times", FP32)])
    (tmp_path / f"{FILES[FP32]}{ending}").write_text("another graph")
    second = exported({FP16: unverified(FP16)}, previous=first)
    known = second.targets[FP32]
    assert (known.status, known.parity, known.verification, known.details) == ("unverified", None, {}, {})
    assert second.notes == ()


def test_a_file_that_changed_is_described_by_the_run_that_wrote_it(exported, tmp_path):
    """Two targets share it, and only one of them runs where it is written anew."""
    plugin, lost = f"{INT8}-plugin", {"points_lost": {"points": 0.1}, "p50_ms": 1.0}
    old, slow = verified(INT8, 0.5, **QUANTIZED, **lost), [Note("int8 is slow", TIMING)]
    first = exported({INT8: old, plugin: old}, "a.tsv", slow)
    (tmp_path / FILES[INT8]).write_text("another graph")
    new = QUANTIZED | {"recipe": "mine", "left_in_base": ["x"]}
    second = exported({INT8: verified(INT8, 0.5, **new, points_lost={"points": 0.2})}, "b.tsv", previous=first)
    known = second.targets[plugin]
    assert (known.status, known.parity, known.details, known.calibration["text"]) == ("unverified", None, new, "b.tsv")
    assert second.notes == ()
    assert "| mine |" in markdown.render(second)
    assert "ort-cpu.int8 |" not in markdown.render(second)


def test_notes_on_times_are_of_the_run_that_timed(exported, tmp_path):
    first = exported(
        {FP32: verified(FP32, 0.25), INT8: verified(INT8, 0.1, **QUANTIZED)}, "a.tsv", [Note("old", TIMING)]
    )
    for timed, told in ((False, ["old", "new"]), (True, ["new"])):
        update = dataclasses.replace(
            first, targets={FP16: verified(FP16, 0.75)}, notes=(Note("new", "" if not timed else TIMING),)
        )
        assert [note.text for note in joined(update, first, tmp_path, timed=timed).notes] == told


def test_times_of_two_runs_do_not_stand_together(exported):
    """Those that this run did not time are forgotten, but for those of another kind of machine."""
    here, there = {"fingerprint": "here", "p50_ms": 1.0, "timed_on": "1x8"}, {"fingerprint": "there", "p50_ms": 2.0}
    manifest = exported(
        {FP32: verified(FP32, 0.1, **here), FP16: verified(FP16, 0.1, **here), INT8: verified(INT8, 0.1, **there)}
    )
    assert with_times(manifest, {}) == manifest
    new = {"fingerprint": "here", "p50_ms": 3.0, "timed_on": "2x8"}
    targets = with_times(manifest, {FP32: new}).targets
    assert (targets[FP32].details, targets[FP16].details, targets[INT8].details) == (new, {}, there)


def test_earlier_targets_are_timed_with_new_ones(exported, tmp_path, monkeypatch):
    """By precision, the highest first. One that does not open is left out, and so is one of a version to come."""
    ms, refused = {FP32: 2.0, FP16: 4.0, INT8: 1.0}, set()

    def opened(run, found, name, spec, target):
        if name in refused:
            raise EngineBuildError(name)

    monkeypatch.setattr(timing, "_opened", opened)
    monkeypatch.setattr(timing, "_timed_batch", lambda run, batches: {"input_ids": np.zeros((1, 8))})
    monkeypatch.setattr(timing, "in_this_process", lambda engines: lambda name, batch: ms[name])
    monkeypatch.setattr(
        timing, "measure", lambda rounds, names, time_ms, *rest, **more: {name: [time_ms(name, {})] for name in names}
    )
    before = exported({name: verified(name, 0.1) for name in (INT8, FP32)}).targets
    before["onnxruntime-cpu-fp4"] = before[FP32]
    made, run = exported({FP16: verified(FP16, 0.1)}).targets, SimpleNamespace(engines={}, work=tmp_path, steps=Steps())
    for timed in ([FP32, FP16, INT8], [FP32, FP16]):
        found = timing.time_targets(run, SimpleNamespace(batches=[]), made, before, 2)
        assert list(found.details) == timed
        (note,) = found.notes
        assert note.text.startswith("fp16 is not faster than fp32")
        assert note.about == TIMING
        refused.add(INT8)
    refused.add(FP16)
    with pytest.raises(EngineBuildError):
        timing.time_targets(run, SimpleNamespace(batches=[]), made, before, 2)
    assert not timing.time_targets(run, SimpleNamespace(batches=[]), {}, before, 2).details


def test_a_large_earlier_target_that_does_not_open_is_left_out(exported, tmp_path, monkeypatch):
    """Large models are opened one at a time, and then there is none to time."""

    def opened(run, found, name, spec, target):
        if name == FP32:
            raise EngineBuildError(name)

    monkeypatch.setattr(timing, "_opened", opened)
    monkeypatch.setattr(timing, "_timed_batch", lambda run, batches: {"input_ids": np.zeros((1, 8))})
    monkeypatch.setattr(timing, "in_this_process", lambda engines: lambda name, batch, warm=False: 1.0)
    monkeypatch.setattr(timing, "stored_bytes", lambda path: timing.LARGE_BYTES + 1)
    monkeypatch.setattr(timing, "TIMING_SECONDS", 0)
    run = SimpleNamespace(engines={}, work=tmp_path, steps=Steps())
    before, made = (exported({name: verified(name, 0.1)}).targets for name in (FP32, FP16))
    assert list(timing.time_targets(run, SimpleNamespace(batches=[]), made, before, 2).details) == [FP16]


def test_measures_on_different_rows_stand_in_different_tables(updated):
    told = markdown.render(updated).split("## Retention")[0]
    assert re.findall(r"onnxruntime-cpu-\w+|12\.50%|25\.00%|75\.00%|on [ab]\.tsv", told) == [
        *(FP32, "25.00%", INT8, "12.50%", "on a.tsv"),
        *(FP16, "75.00%", "on b.tsv"),
    ]
    assert told.count("| rows compared |") == told.count("| accuracy |") == 2
    page = html.render(updated)
    assert page.count("<th>rows compared</th>") == 2
    assert re.findall(r"<code>onnxruntime-cpu-\w+|on [ab]\.tsv(?= \(\d+ rows\), which)", page) == [
        *("on a.tsv", f"<code>{FP32}", f"<code>{INT8}"),
        *("on b.tsv", f"<code>{FP16}"),
    ]
    fields = card.metadata(updated, Path("nowhere"), {}, None)
    found = card.render(updated, fields, "user/model")
    assert ("Compared with the fp32 PyTorch model on a.tsv" in found, "stay on b.tsv" in found) == (True, True)
    assert "## Retention on b.tsv" in markdown.render(updated)


def test_the_command_prints_a_table_for_each_set_of_rows(updated, capsys):
    _summarize(updated, Path("out"), Console())
    said = " ".join(capsys.readouterr().err.split())
    places = [said.index(text) for text in ("on a.tsv", FP32, "25.00%", "on b.tsv", FP16, "75.00%")]
    assert places == sorted(places)


def test_ranges_stand_with_the_files_that_have_them(exported):
    first = exported({INT8: verified(INT8, 0.5, **QUANTIZED)}, "a.tsv")
    other = "onnxruntime-cpu-trt.int8"
    FILES.setdefault(other, "model.trt.int8.onnx")
    both = exported({other: verified(other, 0.5, **QUANTIZED)}, "b.tsv", previous=first)
    told = markdown.render(both).split("## Quantization")[1].split("## Versions")[0]
    assert re.findall(r"rows of ([ab]\.tsv)|\| `(model\S+)`", told) == [
        ("a.tsv", ""),
        ("", FILES[INT8]),
        ("b.tsv", ""),
        ("", FILES[other]),
    ]
    weights_alone = exported({INT8: verified(INT8, 0.5, **QUANTIZED | {"ranges": {}})}, "a.tsv")
    assert weights_alone.targets[INT8].calibration == {}
    assert "weights alone are rounded" in markdown.render(weights_alone)


def test_targets_that_were_not_compared_stand_with_the_others_or_alone(exported, updated):
    engine = unverified(FP32, "built-not-run")
    alone = exported({FP32: verified(FP32, 0.5), FP16: engine}, "a.tsv")
    assert [list(group.targets) for group in groups(alone)] == [[FP32, FP16]]
    more = dataclasses.replace(updated, targets={"rtx-sm_86-fp32": engine, **updated.targets})
    assert [(list(group.targets), group.told[:8]) for group in groups(more)] == [
        ([FP32, INT8], "Compared"),
        ([FP16], "Compared"),
        (["rtx-sm_86-fp32"], ""),
    ]


def test_notes_go_with_what_they_are_about(exported):
    """Of what a run looks at again, it replaces what an earlier one said; and of what it does not, nothing."""
    before = [
        Note("a run's own"),
        Note("of a.tsv", VERIFICATION),
        Note("fp32 was slow", FP32),
        Note("int8 was slow", INT8),
        Note("texts were tried", "model.strings.onnx"),
        Note("products were left", FILES[INT8]),
    ]
    first = exported({FP32: verified(FP32, 0.5), INT8: verified(INT8, 0.5, **QUANTIZED)}, "a.tsv", before)
    again = [Note("another run's own"), Note("of b.tsv", VERIFICATION)]
    second = exported({FP32: verified(FP32, 0.5), FP16: verified(FP16, 0.5)}, "b.tsv", again, first)
    assert [note.text for note in second.notes] == [
        "int8 was slow",
        "texts were tried",
        "products were left",
        "another run's own",
        "of b.tsv",
    ]
    third = exported({INT8: unverified(INT8)}, None, [Note("not verified", INT8)], second)
    assert [note.text for note in third.notes] == [
        "int8 was slow",
        "texts were tried",
        "products were left",
        "of b.tsv",
    ]


def test_libraries_that_engines_of_an_earlier_run_need_are_still_asked_for(checkpoint, tmp_path, monkeypatch):
    from adtp_export.plugins import library

    monkeypatch.setattr(library, "built", lambda: None)
    run = ExportContext(checkpoint=checkpoint, work=tmp_path, profile={}, steps=Steps())
    engine = Target(file="engines/x.engine", status="built-not-run", attention="plugin")
    (note,) = ship_plugin_libraries(run, {"rtx-sm_86-fp32-plugin": engine}, for_cpu=False).notes
    assert "need the C++ library of the attention plugin" in note.text
    assert note.about == ""


def test_a_manifest_of_another_version_is_no_damaged_one(tmp_path, exported):
    exported({FP32: verified(FP32, 0.5)}, "a.tsv")
    text = (tmp_path / "manifest.json").read_text()
    (tmp_path / "manifest.json").write_text(text.replace('"schema": 3', '"schema": 1'))
    with pytest.raises(
        InputError, match="schema 1 is not 3, as another version of adtp-export wrote it; remove .* and export"
    ):
        Manifest.read(tmp_path)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda document: document["profile"].update(batch="3:2:1"), "profile: batch: got '3:2:1'"),
        (
            lambda document: document["targets"][FP32].update(profile={"batch": "1:1:1", "seq": "1:2:x"}),
            "seq: got '1:2:x'",
        ),
        (
            lambda document: document["files"].update({"a\ud800": document["files"]["model.onnx"]}),
            "surrogates not allowed",
        ),
    ],
)
def test_a_damaged_manifest_says_what_to_do(edit, message, tmp_path, exported):
    exported({FP32: verified(FP32, 0.5)}, "a.tsv")
    document = json.loads((tmp_path / "manifest.json").read_text())
    edit(document)
    (tmp_path / "manifest.json").write_text(json.dumps(document))
    with pytest.raises(InputError, match=f"manifest.json is damaged .*{message}.*; remove .* and export again"):
        Manifest.read(tmp_path)
