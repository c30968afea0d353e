"""Texts on a cluster: each row is there once, whatever dies."""

import contextlib
import dataclasses
import json
import os
import re
import shutil
import threading
from types import SimpleNamespace

import pytest
from testbed import ROOT, run_cli

import adtp_export
from adtp_export.errors import InputError
from adtp_export.integrations.ray import ScoringConfig, Workers, score
from benchmarks.ray import workers as ray_workers
from benchmarks.ray.workers import killing

PAGE = (ROOT / "docs" / "scale.md").read_text(encoding="utf-8")
ROWS = 2400
WORDS = [
    "a",
    "wonderful",
    "film",
    "but",
    "the",
    "soup",
    "was",
    "cold",
    "and",
    "nobody",
    "cared",
    "about",
    "it",
    "at",
    "all",
]


def text(i):
    return " ".join(WORDS[(i * 7 + j) % len(WORDS)] for j in range(1 + i % 13))


def write_files(folder, files=3, rows=ROWS, **columns):
    """Write rows with running numbers to several files, in groups of another size than parts."""
    import pyarrow
    from pyarrow import parquet

    folder.mkdir()
    each = rows // files
    for n in range(files):
        ids = range(n * each, (n + 1) * each)
        table = pyarrow.table({"id": list(ids), "text": [text(i) for i in ids], **columns})
        parquet.write_table(table, folder / f"texts-{n}.parquet", row_group_size=70)
    return folder


def answers_of(folder):
    from pyarrow import parquet

    return parquet.read_table(folder).sort_by("id").to_pylist()


def check_answers(folder, exported, rows=ROWS, target="onnxruntime-cpu-fp32"):
    """Each row is there once, with the answer of `load`."""
    found = answers_of(folder)
    assert [row["id"] for row in found] == list(range(rows))
    expected = adtp_export.load(exported, target)([text(i) for i in range(rows)])
    for row, answer in zip(found, expected, strict=True):
        assert (row["text"], row["label"], row["truncated"]) == (text(row["id"]), answer.label, False)
        assert row["scores"] == pytest.approx(answer.scores, abs=1e-5)
        assert row["score"] == max(row["scores"].values())


def asked(**fields):
    return ScoringConfig(**{"target": "onnxruntime-cpu-fp32", "rows_per_part": 200, **fields})


@pytest.mark.slow
def test_a_killed_worker_neither_loses_nor_doubles_rows(two_machines, exported, tmp_path):
    texts, to, parts = write_files(tmp_path / "texts"), tmp_path / "answers", []
    with killing(to) as killed:
        told = score(f"{texts}/*.parquet", exported, to, asked=asked(), progress=parts.append)
    assert killed.workers, "no worker was killed"
    assert killed.left
    assert (told.rows, told.parts, told.found) == (ROWS, 12, 0)
    assert len({(part.file, part.start) for part in parts}) == len(parts) == 12
    check_answers(to, exported)
    before = {path.name: path.stat().st_mtime_ns for path in to.iterdir()}
    assert sorted(name.partition("-")[0] for name in before) == ["_adtp", "_adtp", *["part"] * 12]
    again = score([f"{texts}/*.parquet", texts], exported, to, asked=asked())
    assert (again.rows, again.found) == (ROWS, 12)
    assert {path.name: path.stat().st_mtime_ns for path in to.iterdir()} == before


@pytest.mark.slow
def test_workers_answer_with_the_operators(two_machines, exported_by_default, tmp_path, monkeypatch):
    """They refuse the target where these do not load."""
    monkeypatch.delenv("ADTP_OPERATORS")
    texts, to, target = write_files(tmp_path / "texts"), tmp_path / "answers", "onnxruntime-cpu-fp32-plugin"
    assert score(texts, exported_by_default, to, asked=asked(target=target)).rows == ROWS
    check_answers(to, exported_by_default, target=target)


@pytest.mark.slow
def test_a_lost_machine_neither_loses_nor_doubles_rows(two_machines, exported, tmp_path):
    texts, to, parts = write_files(tmp_path / "texts", rows=12000), tmp_path / "answers", []

    def losing(finished):
        parts.append(finished)
        if len(parts) == 6:
            two_machines.lose_the_second()

    try:
        told = score(texts, exported, to, asked=asked(rows_per_part=200), progress=losing)
    finally:
        two_machines.restore()
    assert told.parts == 60
    check_answers(to, exported, rows=12000)


@pytest.mark.slow
def test_a_part_that_kills_all_workers_is_named(two_machines, exported, tmp_path):
    """Whoever takes up a part dies."""
    texts, to = write_files(tmp_path / "texts", files=1, rows=60_000), tmp_path / "answers"
    ended = threading.Event()

    def kill_all():
        while not ended.wait(0.05):
            ray_workers.kill()

    killer = threading.Thread(target=kill_all)
    killer.start()
    try:
        with pytest.raises(InputError, match=r"texts-0\.parquet: rows 1 to 60000 ended 5 workers"):
            score(texts, exported, to, asked=asked(rows_per_part=60_000), workers=Workers(count=1))
    finally:
        ended.set()
        killer.join()
    assert [path.name for path in to.iterdir() if path.name.startswith("part")] == []


@pytest.mark.slow
def test_a_part_that_cannot_be_read_does_not_stop_the_others(two_machines, exported, tmp_path):
    """The command, with a damaged page in a file. Mended, it goes on; mended so that the file is a newer one, it does not."""
    from pyarrow import parquet

    texts, to = write_files(tmp_path / "texts"), tmp_path / "answers"
    damaged = texts / "texts-1.parquet"
    whole, place = damaged.read_bytes(), parquet.read_metadata(damaged).row_group(1).column(1).data_page_offset
    stamp = damaged.stat().st_mtime_ns
    damaged.write_bytes(whole[:place] + bytes(200) + whole[place + 200 :])
    os.utime(damaged, ns=(stamp, stamp))
    words = ("adtp-run", exported, "--ray", "--file", f"{texts}/*.parquet", "--out", to, "--rows-per-part", 200)
    words = (*words, "--target", "onnxruntime-cpu-fp32")
    result = run_cli(*words, env={"RAY_ADDRESS": two_machines.address})
    assert result.returncode == 2, result.stderr
    assert result.stdout == ""
    assert "texts-1.parquet: cannot be read as Parquet" in result.stderr.splitlines()[-1]
    assert result.stderr.endswith(f"Finished parts stay in {to}; correct this, and run the same command again\n")
    there = {path.name: path.stat().st_mtime_ns for path in to.glob("part-*")}
    assert 8 <= len(there) < 12  # of the damaged file, parts beside the page may be there
    damaged.write_bytes(whole)
    result = run_cli(*words, env={"RAY_ADDRESS": two_machines.address})
    assert result.returncode == 2  # the file is another one now
    assert "an input changed since" in result.stderr
    os.utime(damaged, ns=(stamp, stamp))
    result = run_cli(*words, env={"RAY_ADDRESS": two_machines.address})
    assert result.returncode == 0, result.stderr
    assert result.stdout == f"{to}\n"
    assert f"2,400 rows in 12 parts, {len(there)} of them found there" in result.stderr
    check_answers(to, exported)
    assert there.items() <= {path.name: path.stat().st_mtime_ns for path in to.glob("part-*")}.items()


@pytest.mark.slow
def test_a_dataset_of_ray_comes_back_with_answers(two_machines, exported, tmp_path):
    """Also where workers would take each processor, and Ray needs one to read files with."""
    import ray.data

    (tmp_path / "texts.jsonl").write_text("".join(json.dumps({"text": text(i)}) + "\n" for i in range(7)))
    read = score(ray.data.read_json(str(tmp_path / "texts.jsonl")), exported, asked=asked()).take_all()
    assert sorted(row["text"] for row in read) == sorted(map(text, range(7)))
    rows = [{"id": i, "text": text(i), "label": "known"} for i in range(100)]
    dataset = ray.data.from_items(rows, override_num_blocks=3)
    found = score(dataset, exported, asked=asked(prefix="answer_", keep=["id", "label"])).take_all()
    expected = adtp_export.load(exported, "onnxruntime-cpu-fp32")([row["text"] for row in rows])
    assert len(found) == 100
    for row in found:
        assert list(row) == ["id", "label", "answer_label", "answer_score", "answer_scores", "answer_truncated"]
        assert (row["label"], row["answer_label"]) == ("known", expected[row["id"]].label)


@pytest.mark.slow
def test_more_than_a_machine_has_is_refused(two_machines, exported, tmp_path):
    texts = write_files(tmp_path / "texts")
    for workers, message in (
        (Workers(threads=2), "--threads: a worker would take 2 CPUs, and the largest machine has 1"),
        (Workers(gpus=0.5), "--gpus: a worker would take 0.5 GPUs, and the largest machine has 0"),
    ):
        with pytest.raises(InputError, match=message):
            score(texts, exported, tmp_path / "answers", workers=workers)
    assert not (tmp_path / "answers").exists()


def told_by_worker(job, count, monkeypatch):
    """What a worker says of a part that was begun so many times."""
    import ray

    from adtp_export.integrations.ray.worker import PartWorker

    monkeypatch.setattr(ray, "get", lambda number: number)
    monkeypatch.setenv("RAYON_NUM_THREADS", "1")  # so that what the worker sets ends with the test
    job = dataclasses.replace(job, attempts=SimpleNamespace(begin=SimpleNamespace(remote=lambda name: count)))
    part = {"name": ["p.parquet"], "store": [0], "path": ["x.parquet"], "start": [0], "rows": [7]}
    told = PartWorker(job)(part)
    return told["error"][0], told["kind"][0], told["fatal"][0]


def test_a_part_that_ends_workers_stops_no_other_and_a_model_that_does_not_open_does(has_ray, tmp_path, monkeypatch):
    from adtp_export.integrations.ray import storage
    from adtp_export.integrations.ray.worker import Job, Model

    model = Model(out=tmp_path / "none", digest=None, asked=asked(), workers=Workers())
    job = Job(model=model, columns=["text"], stores=[], to=storage.directory(tmp_path), attempts=None)
    error, kind, fatal = told_by_worker(job, 6, monkeypatch)
    assert "x.parquet: rows 1 to 7 ended 5 workers" in error
    assert (kind, fatal) == ("InputError", False)
    error, kind, fatal = told_by_worker(job, 5, monkeypatch)
    assert "none" in error
    assert (kind, fatal) == ("InputError", True)


def test_workers_need_all_they_take_on_one_machine(has_ray, monkeypatch):
    import ray

    from adtp_export.integrations.ray import driver

    machines = [{"CPU": 64.0}, {"CPU": 5.0, "GPU": 2.0}, {"CPU": 3.0, "GPU": 1.0}]
    nodes = [{"Alive": True, "Resources": machine} for machine in machines]
    monkeypatch.setattr(ray, "nodes", lambda: [*nodes, {"Alive": False, "Resources": {"CPU": 1e6}}])
    with pytest.raises(InputError, match="--threads: .* 6 CPUs, and the largest machine with such GPUs has 5"):
        driver._check_room(Workers(threads=6, gpus=1))
    driver._check_room(Workers(threads=64))
    for workers, most in (
        (Workers(threads=4), 17),
        (Workers(threads=2, gpus=0.5), 3),
        (Workers(gpus=1), 3),
        (Workers(count=2), 2),
    ):
        assert driver._most(workers) == most


def test_workers_leave_a_processor_to_read_a_dataset_with(has_ray, monkeypatch):
    import ray

    from adtp_export.integrations.ray import driver

    for machines, workers, expected in (
        ([2], Workers(), (1, 1)),
        ([2], Workers(count=1), (1, 1)),
        ([5], Workers(threads=2), (2, 2)),
        ([4, 4], Workers(threads=2), (3, 2)),
        ([1], Workers(), (1, 0)),
        ([4], Workers(threads=4), (1, 0)),
    ):
        nodes = [{"Alive": True, "Resources": {"CPU": float(cpus)}} for cpus in machines]
        monkeypatch.setattr(ray, "nodes", lambda nodes=nodes: nodes)
        assert driver._beside_reads(workers) == expected


def test_settings_are_those_of_the_first_run(has_ray, exported, tmp_path):
    """Before any work: other questions, another model, other files in the place."""
    texts, to = write_files(tmp_path / "texts"), tmp_path / "answers"
    to.mkdir()
    settings = to / "_adtp-run.json"
    for content, message in (
        ('{"format": 2}', "holds answers of another run: its model was None"),
        ('{"format": 1}', "holds answers of another run: its format was 1, and now is 2"),
        ("{", "is damaged"),
        ("[]", "holds answers of another run"),
    ):
        settings.write_text(content)
        with pytest.raises(InputError, match=message):
            score(texts, exported, to)
    settings.unlink()
    (to / "mine.txt").write_text("mine")
    with pytest.raises(InputError, match="holds files, and no _adtp-run.json"):
        score(texts, exported, to)
    assert [path.name for path in to.iterdir()] == ["mine.txt"]
    with pytest.raises(InputError, match=r"texts-0\.parquet is in .*texts, where the answers go"):
        score(texts, exported, texts)


def test_of_two_runs_that_begin_in_one_place_and_ask_other_things_one_is_refused(
    has_ray, exported, tmp_path, monkeypatch
):
    """Each comes to an empty place, and while it connects the other one begins. Two that ask the same may both go on."""
    from adtp_export.integrations.ray import driver, storage

    texts, to = write_files(tmp_path / "texts", files=1, rows=3), tmp_path / "answers"
    began = []

    def run(todo, job, progress):
        for part in todo:
            (to / part.name).write_bytes(next(texts.iterdir()).read_bytes())

    @contextlib.contextmanager
    def connected():
        if not began:
            began.append(1)
            assert score(texts, exported, to, asked=other).rows == 3
        yield

    monkeypatch.setattr(driver, "_connected", connected)
    monkeypatch.setattr(driver, "_check_room", lambda workers: None)
    monkeypatch.setattr(driver, "_attempts", lambda: None)
    monkeypatch.setattr(driver, "_run", run)
    other = asked(prefix="b_")
    with pytest.raises(InputError, match="another run, which asks something else, has just begun there"):
        score(texts, exported, to, asked=asked())
    assert json.loads((to / "_adtp-run.json").read_text())["prefix"] == "b_"
    assert len([path for path in to.iterdir() if path.name.startswith(storage.CLAIM)]) == 1
    with pytest.raises(InputError, match="holds answers of another run"):
        score(texts, exported, to, asked=asked())
    assert score(texts, exported, to, asked=other).found == 1
    shutil.rmtree(to)
    began.clear()
    other = asked()
    assert score(texts, exported, to, asked=asked()).rows == 3
    (to / "_adtp-run.json").unlink()
    for path in to.glob("part-*"):  # as if the run had been killed between its claim and its settings
        path.unlink()
    assert score(texts, exported, to, asked=asked()).found == 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--ray", "--text", "a"], "--text does not go with --ray"),
        (["--ray", "--file", "x.parquet"], "say --out DIR"),
        (["--ray", "--file", "x.parquet", "--out", "o", "--kept"], "--kept does not go with --ray"),
        (["--ray", "--file", "x.parquet", "--out", "o", "--seed", "0"], "--seed is for models that generate text"),
        (["--text", "a", "--keep", "id"], "--keep goes with --ray"),
        (["--file", "s3://bucket/x.parquet"], "URIs go with --ray"),
        (["--ray", "--file", "none/*.parquet", "--out", "o"], "none/*.parquet: no file matches"),
        (["--ray", "--file", "none.parquet", "--out", "o"], "none.parquet: there is no such file"),
        (["--ray", "--file", "x.jsonl", "--out", "o"], "accepted are Parquet files"),
        (["--ray", "--file", "x://y", "--out", "o"], "cannot be opened"),
    ],
)
def test_bad_options_are_one_message(has_ray, exported, tmp_path, words, message):
    result = run_cli("adtp-run", exported, *words, cwd=tmp_path)
    assert result.returncode == 2, result.stderr
    assert message in result.stderr.splitlines()[-1]
    assert (result.stdout, list(tmp_path.iterdir())) == ("", [])


def test_settings_name_what_decides_answers(tmp_path):
    assert json.loads(json.dumps(asked(keep=("id",)).to_json())) == asked(keep=["id"]).to_json()
    for fields in (
        {"keep": "id"},
        {"keep": [1]},
        {"rows_per_part": 0},
        {"prefix": 3},
        {"labels": ["a"], "truncate_dim": 0},
    ):
        with pytest.raises(InputError):
            ScoringConfig(**fields)
    bad_gpus = [{"gpus": number} for number in (-1, 1.5, 1e-5, float("nan"), "1")]
    for fields in ({"count": 0}, {"threads": 0}, *bad_gpus, {"batch_size": 0}):
        with pytest.raises(InputError):
            Workers(**fields)


def test_costs_of_the_document_follow_from_records():
    rows = re.findall(r"^\| .* \| `(\S+)` \| ([\d.]+) \| ([\d,]+) \| ([\d,]+) \|$", PAGE, re.MULTILINE)
    records = {name: json.loads((ROOT / "benchmarks" / "records" / name).read_text()) for name, *_ in rows}
    embedding = {
        row["stream"]: row["texts_per_s"]
        for row in records["embedding.json"]["results"]
        if (row["how"], row["contender"]) == ("sorted", "adtp-export")
    }
    peers = {
        row["contender"]: 32_000 / row["p50_ms"]
        for row in records["cpu-peers.json"]["results"]
        if row["workload"] == "32x64"
    }
    rates = [embedding["sst2"], embedding["20news"], peers["student"], peers["padded-dense-12"]]
    for rate, (_, per_core, hours, price) in zip(rates, rows, strict=True):
        assert float(per_core) == pytest.approx(rate / 2, abs=0.006)
        assert float(hours.replace(",", "")) == pytest.approx(1e9 / 3600 / (rate / 2), abs=0.51)
        assert float(price.replace(",", "")) == pytest.approx(0.04 * 1e9 / 3600 / (rate / 2), abs=0.51)
