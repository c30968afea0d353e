"""`adtp-export --static-tokens`: files and engines of fixed sizes, judged as all others, and served by the smallest that fits."""

import csv
import dataclasses
import gzip
import itertools
import json

import numpy as np
import pytest
from known_graphs import taking_known_graphs
from testbed import DEMO, run_cli, shared_or_skip

import adtp_export
from adtp_export.artifacts.records import Manifest
from adtp_export.errors import InputError, VerificationError
from adtp_export.pipeline.export import engines
from adtp_export.pipeline.export import export as export_room
from adtp_export.pipeline.export.options import ExportOptions, parse_static_tokens
from adtp_export.pipeline.export.request import check_static_sizes, read_request
from adtp_export.runtimes.packed import FixedEngine, Judged, StaticEngines
from adtp_export.targets.specs import RUNTIMES, TargetSpec

TEXTS = [
    "fine",
    "a waste of an evening",
    "the second act sags, but the last twenty minutes are as good as anything " * 2,
]
SIZES = {"batch": "1:4:8", "seq": "1:32:96"}


@pytest.fixture(scope="module")
def out(tmp_path_factory, small):
    directory = tmp_path_factory.mktemp("capacity") / "out"
    with taking_known_graphs():
        adtp_export.export(small, directory, static_tokens="40:24,96", **SIZES)
    return directory


def test_every_size_is_verified_on_texts_that_fit_it(out):
    manifest = Manifest.read(out)
    small, large = (manifest.targets[f"onnxruntime-cpu-fp32-static_{size}x8"] for size in (40, 96))
    assert small.file == "model.static_40x8.onnx"
    assert {target.status for target in manifest.targets.values()} == {"verified"}
    assert (small.details["rows_after_cuts"], large.details["rows_after_cuts"]) == ([24], [96])
    assert 0 < small.details["rows_in_this_size"] < small.parity.rows == large.details["rows_in_this_size"]
    assert small.details["rows_in_this_size"] == small.parity.rows_compared >= small.parity.rows / 2
    assert small.parity.kept_token_agreement == 1


@pytest.mark.usefixtures("has_openvino")
def test_openvino_proves_small_sizes_in_bf16(tmp_path):
    """It ended the process where it joined steps of its own to kernels; so the export has one of its own here."""
    sizes = ("--static-tokens", 128, "--batch", "1:2:8", "--precision", "bf16")
    result = run_cli("adtp-export", DEMO, "--out", tmp_path / "out", "--json", *sizes)
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout)["targets"]["openvino-cpu-bf16-static_128x8"]["status"] == "verified"


@pytest.mark.usefixtures("has_rtx")
@pytest.mark.parametrize("debug", [False, True])
def test_engines_are_judged_with_a_larger_one_for_the_texts_that_do_not_fit(tmp_path, small, monkeypatch, debug):
    """As on a GPU: the files themselves, in ONNX Runtime, stand for the engines that none here can run."""
    opened = []

    def build(run, plan, spec, model, name):
        return b"an engine", {"profile": {}}

    def open_file(engine, spec):
        opened.append((engine.name, spec.form))
        model = engine.with_suffix(".onnx")  # of a debug form
        if not model.exists():
            model = engine.parents[1] / f"model.{spec.form}.onnx" if spec.form else engine.parents[1] / "model.onnx"
        cpu = TargetSpec.parse("-".join(filter(None, ("onnxruntime-cpu-fp32", spec.form))))
        return RUNTIMES["onnxruntime"].open(model, cpu)

    monkeypatch.setattr(engines, "_build", build)
    monkeypatch.setattr(engines, "_open", open_file)
    monkeypatch.setattr(export_room, "make_export_plan", running_here(export_room.make_export_plan))
    asked = {"trt": True, "gpu": "sm_86", "attention": "decomposed", "debug_outputs": debug}
    with taking_known_graphs():
        manifest = adtp_export.export(small, tmp_path / "out", static_tokens="40:24,96", **asked, **SIZES)
    found = {name: target for name, target in manifest.targets.items() if name.startswith("rtx")}
    assert {target.status for target in found.values()} == {"verified"}
    (little,) = (target for name, target in found.items() if "static_40" in name)
    assert 0 < little.details["rows_in_this_size"] < little.parity.rows
    assert {form for _, form in opened} == {"", "static_40x8", "static_96x8"}


def running_here(make):
    """Plan engines as on a machine with their GPU."""

    def planned(*given):
        plan = make(*given)
        return dataclasses.replace(plan, engines=[dataclasses.replace(each, runs_here=True) for each in plan.engines])

    return planned


def rows_of_size(tokens, room):
    """An engine of 8 texts that answers with their numbers; it overflows with more than `room` tokens."""

    class Engine:
        inputs, outputs = ("input_ids", "cu_seqlens"), ("logits", "overflow")

        def run(self, batch, wanted=None):
            begins = batch["cu_seqlens"][:-1]
            return {
                "logits": batch["input_ids"][begins.clip(0, tokens - 1)],
                "overflow": np.array([batch["cu_seqlens"][-1] > room]),
            }

    return FixedEngine(Engine(), tokens, 8)


def test_a_verdict_on_a_size_runs_all_texts_that_it_takes():
    """Batches are halved for it; a text that does not fit it, or of which more stays than it has room for, runs in the next one."""
    engine = Judged([rows_of_size(20, 15), rows_of_size(96, 96)])
    lengths = np.array([4, 4, 30, 16, 15, 6, 7])
    mask = (np.arange(30) < lengths[:, None]).astype(np.int64)
    batch = {"input_ids": mask * np.arange(1, 8)[:, None], "attention_mask": mask}
    assert engine.run(batch)["logits"].tolist() == [1, 2, 3, 4, 5, 6, 7]
    assert engine.own.tolist() == [True, True, False, False, True, True, True]
    assert [each.rows_run for each in engine.engines] == [5, 2]
    assert engine.run({name: array[2:4] for name, array in batch.items()})["logits"].tolist() == [3, 4]
    assert engine.own.tolist() == [False, False]


def test_load_takes_the_smallest_that_fits(out):
    load = adtp_export.load(out, target="onnxruntime-cpu-fp32-static_40x8")
    padded = adtp_export.load(out, target="onnxruntime-cpu-fp32")
    assert isinstance(load._engine, StaticEngines)
    small, large = load._engine.engines
    assert (small.tokens, large.tokens) == (40, 96)
    for found, expected in zip(
        load(TEXTS, return_kept=True, batch_size=1), padded(TEXTS, return_kept=True), strict=True
    ):
        assert (found.label, found.tokens, found.kept) == (expected.label, expected.tokens, expected.kept)
        assert found.score == pytest.approx(expected.score, abs=1e-5)
    assert small.rows_run
    assert large.rows_run
    many = padded.tokenizer.encode_batch(TEXTS[:2] * 20)  # more than one size holds
    longest = max(map(len, many))
    ids = np.array([row.ids + [0] * (longest - len(row)) for row in many])
    batch = {"input_ids": ids, "attention_mask": (ids > 0).astype(np.int64), "token_type_ids": ids * 0}
    allowed = sum(each.manifest.targets[each.target].parity.tolerance for each in (load, padded))
    assert (
        np.abs(load.run(batch) - padded.run(batch)).max() <= allowed
    )  # both are as near to fp64 as their targets must be


def test_it_is_not_what_runs_on_a_cpu_unless_asked_for(out):
    assert adtp_export.load(out).target == "onnxruntime-cpu-fp32"


def test_texts_are_cut_where_engines_would_cut_them(out):
    (found,) = adtp_export.load(out, target="onnxruntime-cpu-fp32-static_40x8")(["so " * 500])
    assert found.truncated


@pytest.mark.slow  # engines of fixed sizes are built in graph/test_fixed_sizes.py
@pytest.mark.usefixtures("has_rtx", "no_gpu")
def test_engines_of_every_size(tmp_path, small):
    manifest = adtp_export.export(
        small,
        tmp_path / "out",
        static_tokens=[96],
        trt=True,
        attention="decomposed",
        skip_parity_check=True,
        precisions=["fp16"],
        **SIZES,
    )
    name = "rtx-sm_86+sm_89+sm_120-fp16-decomposed-static_96x8"
    target = manifest.targets[name]
    assert (target.file, target.status) == (f"engines/{name}.engine", "built-not-run")
    assert target.details["model"] == "model.static_96x8.fp16.onnx"
    assert "rtx-sm_86+sm_89+sm_120-fp16-decomposed" in manifest.targets


def test_static_sizes_are_read():
    assert parse_static_tokens("128, 512:256:128") == ((512, 256, 128), (128,))
    assert parse_static_tokens([512, "128:64"]) == ((512,), (128, 64))
    assert parse_static_tokens(512) == ((512,),)
    assert parse_static_tokens(None) == ()


@pytest.mark.parametrize("given", ["", "x", "-1", "0", "512:", "1e3", "9999", "9" * 5000, "512,512:256", True])
def test_what_is_no_static_size(given):
    with pytest.raises(InputError, match="--static-tokens: got"):
        parse_static_tokens(given)


@pytest.mark.parametrize(
    ("text", "cuts", "said"),
    [
        ("64", 1, "a text may have 96 tokens and keep all, so give one of at least 96, or --seq 1:32:64"),
        ("128:64", 1, "the largest one has 128:64"),
        ("96:3", 1, "give one of at least 96$"),
        ("96:50:20", 1, r"got 96:50:20; accepted after the tokens is one bound for each cut of the model \(1\)"),
        ("96:97", 1, "none larger than the number before it"),
        ("96:50", 0, "got 96:50; the model has no cuts, so type 96 alone"),
        ("8,96", 1, "got 8; a batch has up to 8 texts"),
    ],
)
def test_what_does_not_fit_the_model(text, cuts, said):
    request = read_request(ExportOptions("MODEL", static_tokens=text, **SIZES))
    with pytest.raises(InputError, match=said):
        check_static_sizes(request.static_sizes, {"batch": request.batch, "seq": request.seq}, cuts)


def test_nothing_is_written_where_it_does_not_fit(tmp_path, small):
    with pytest.raises(InputError, match="--static-tokens: got 96:97"):
        adtp_export.export(small, tmp_path / "out", static_tokens="96:97", **SIZES)
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_a_size_that_no_text_fits_is_not_verified(tmp_path, small):
    (tmp_path / "long.txt").write_text("so " * 60)
    with pytest.raises(VerificationError, match="no text of the verification fits it"):
        adtp_export.export(small, tmp_path / "out", static_tokens="20,96", verify_data=tmp_path / "long.txt", **SIZES)


@pytest.mark.slow
def test_a_thousand_texts_are_answered_alike(tmp_path):
    """Of SST-2, in batches of up to 32: in all sizes, halves of batches that overflow, and the file of free sizes."""
    with gzip.open(shared_or_skip("data/sst2/train.tsv.gz"), "rt", encoding="utf-8", newline="") as stream:
        rows = csv.DictReader(stream, delimiter="\t", quoting=csv.QUOTE_NONE)
        texts = [row["sentence"] for row in itertools.islice(rows, 1000)]
    adtp_export.export(DEMO, tmp_path / "out", static_tokens="128,512:200:200,1024", seq="1:64:128")
    fixed, free = (
        adtp_export.load(tmp_path / "out", target=f"onnxruntime-cpu-fp32{e}") for e in ("-static_128x32", "")
    )
    for found, expected in zip(fixed(texts, return_kept=True), free(texts, return_kept=True), strict=True):
        assert (found.label, found.kept) == (expected.label, expected.kept)
        assert found.score == pytest.approx(expected.score, abs=1e-5)
    assert all(engine.rows_run for engine in fixed._engine.engines)
