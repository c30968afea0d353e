"""Rows of Parquet files in parts, and files that are written whole."""

import os
import shutil
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from adtp_export.artifacts.manifest import add_file, read_manifest
from adtp_export.errors import InputError
from adtp_export.integrations.ray.config import ScoringConfig
from adtp_export.targets import measured

pytestmark = pytest.mark.usefixtures("has_ray")


def write(path, *, ids=(), group=1000, **columns):
    import pyarrow
    from pyarrow import parquet

    columns = {"id": list(ids), "text": [f"text {i}" for i in ids], **columns}
    table = pyarrow.table({name: values for name, values in columns.items() if values is not None})
    parquet.write_table(table, path, row_group_size=group)
    return path


@pytest.fixture(scope="module")
def scratch(tmp_path_factory):
    return tmp_path_factory.mktemp("parts")


@settings(max_examples=40, deadline=None)
@given(
    files=st.lists(st.integers(0, 40), min_size=1, max_size=3),
    group=st.integers(1, 13),
    rows_per_part=st.integers(1, 50),
    at_once=st.integers(1, 20),
    keep=st.sampled_from([None, ["id"], []]),
)
def test_every_row_is_in_one_part(scratch, files, group, rows_per_part, at_once, keep):
    import pyarrow

    from adtp_export.integrations.ray import parts, storage

    paths = []
    for n, rows in enumerate(files):
        ids = range(sum(files[:n]), sum(files[:n]) + rows)
        texts = [f"text {i}" for i in ids]
        columns = {"id": pyarrow.array(ids, pyarrow.int64()), "text": pyarrow.array(texts, pyarrow.string())}
        paths.append(write(scratch / f"{n}.parquet", group=group, **columns))
    asked = ScoringConfig(rows_per_part=rows_per_part, keep=keep)
    planned = parts.plan(storage.find(paths), asked, ("label",))
    assert len({part.name for part in planned.parts}) == len(planned.parts)
    assert planned.columns == ["text"]
    found = []
    for part in planned.parts:
        assert part.rows <= rows_per_part
        tables = list(parts.read(planned.stores[part.store], part, ["text"], keep, at_once))
        assert tables
        for table in tables:
            assert table.num_rows <= at_once
            assert table.column_names == (["text"] if keep == [] else ["id", "text"])
            found += table.column("text").to_pylist()
    assert found == [f"text {i}" for i in range(sum(files))]


def plan_of(places, names=("label", "score"), **fields):
    from adtp_export.integrations.ray import parts, storage

    return parts.plan(storage.find(places), ScoringConfig(**fields), names)


def test_a_file_of_many_is_named(tmp_path):
    """All footers are read before any work."""
    good = [write(tmp_path / f"{n}.parquet", ids=range(3)) for n in range(3)]
    plan_of([tmp_path])
    odd = tmp_path / "odd.parquet"
    for columns, fields, message in (
        ({"text": None, "texts": ["a"]}, {}, "no column 'text'; it has id, texts; did you mean 'texts'"),
        ({"text": [1]}, {}, "column 'text' has the type int64; accepted is text"),
        ({"text": ["a"], "label": [1]}, {}, "has a column 'label', and so has the answer; say --prefix"),
        ({"text": ["a"]}, {"keep": ["key"]}, "no column 'key'"),
    ):
        write(odd, **{"id": [1], **columns})
        fields = {"columns": "text", **fields}
        with pytest.raises(InputError, match=r"odd\.parquet: |0\.parquet: ") as caught:
            plan_of([tmp_path], **fields)
        assert message in str(caught.value)
    for content in (b"", b"PAR1 no footer PAR1", good[0].read_bytes()[:-20]):
        odd.write_bytes(content)
        with pytest.raises(InputError, match=r"odd\.parquet: cannot be read as Parquet"):
            plan_of([tmp_path], columns="text")
    write(odd, text=["a"], label=[1], id=[1])
    plan_of([tmp_path], columns="text", keep=["id", "text"])
    plan_of([tmp_path], columns="text", names=("answer_label",))


def test_files_are_found_by_path_pattern_folder_and_uri(tmp_path, monkeypatch):
    from adtp_export.integrations.ray import storage

    folder = tmp_path / "a b%20[1]ü"
    (folder / "deep").mkdir(parents=True)
    for name in ("one.parquet", "two.parquet", "_hidden.parquet", ".hidden.parquet", "deep/three.parquet"):
        write(folder / name, ids=[1])

    def names(*places):
        return [os.path.relpath(file.path, folder) for file in storage.find(places)]

    monkeypatch.chdir(folder)
    assert (
        names("*.parquet")
        == names(".")
        == names("one.parquet", "t*.parquet", "*.parquet")
        == names("deep/../*.parquet", "../*/*.parquet", ".", (folder / "one.parquet").as_uri())
        == ["one.parquet", "two.parquet"]
    )
    assert names("**/*.parquet") == ["deep/three.parquet", "one.parquet", "two.parquet"]
    assert names((folder / "deep" / "three.parquet").as_uri()) == ["deep/three.parquet"]
    for places, message in (
        (["deep/deeper/*.parquet"], "no file matches"),
        ([], "no files are named"),
        ([5], "got 5; accepted are paths"),
        (["file:///"], "names no folder"),
        (["\udcff.parquet"], "cannot be opened"),
    ):
        with pytest.raises(InputError, match=message):
            names(*places)
    (folder / os.fsdecode(b"\xff.parquet")).write_bytes(b"")
    with pytest.raises(InputError, match="cannot be listed"):
        names("*.parquet")


def test_files_of_one_path_in_two_stores_are_two(monkeypatch):
    from pyarrow import fs

    from adtp_export.integrations.ray import storage

    stores = {"one": fs.LocalFileSystem(), "two": fs.LocalFileSystem(use_mmap=True)}
    monkeypatch.setattr(storage, "_named", lambda place: [storage.File(stores[place], "bucket/x.parquet", 1, 1)])
    assert [file.store for file in storage.find(["two", "one", "two"])] == [stores["two"], stores["one"]]


def test_names_of_parts_are_no_longer_than_file_systems_take(tmp_path):
    from adtp_export.integrations.ray import storage

    (part,) = plan_of([write(tmp_path / f"{chr(0x6F22) * 80}.parquet", ids=range(3))]).parts
    to = storage.directory(tmp_path / "to")
    to.store.create_dir(to.path)
    with to.writing(part.name):
        (partial,) = to.names()
    assert to.names() == {part.name} < {part.name, partial}
    assert max(len(name.encode()) for name in (part.name, partial)) <= 255


def test_another_file_in_its_place_is_another_part(tmp_path):
    first = plan_of([write(tmp_path / "x.parquet", ids=range(3))]).parts
    assert plan_of([tmp_path / "x.parquet"]).parts == first
    write(tmp_path / "x.parquet", ids=range(4))
    assert plan_of([tmp_path / "x.parquet"]).parts[0].name != first[0].name
    from adtp_export.integrations.ray import parts, storage

    (part,) = first
    os.truncate(tmp_path / "x.parquet", 100)
    with pytest.raises(InputError, match="cannot be read"):
        list(parts.read(storage.directory(tmp_path).store, part, ["text"], None, 10))
    write(tmp_path / "x.parquet", ids=range(2))
    with pytest.raises(InputError, match="has 2 rows, and had 3 or more"):
        list(parts.read(storage.directory(tmp_path).store, part, ["text"], None, 10))


def test_a_file_is_there_whole_or_not_at_all(tmp_path):
    from adtp_export.integrations.ray import storage

    to = storage.directory(f"{tmp_path}/to/")
    assert to.names() == set()
    to.write_json("x.json", {"a": 1})
    assert (to.read_json("x.json"), to.names(), to.has("x.json"), to.has("y")) == ({"a": 1}, {"x.json"}, True, False)

    def fail():
        with to.writing("y") as stream:
            stream.write(b"half")
            assert len(to.names()) == 2
            assert not to.has("y")
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert to.names() == {"x.json"}
    with pytest.raises(InputError, match="is a file"):
        storage.directory(tmp_path / "to" / "x.json").names()
    with pytest.raises(InputError, match="cannot be written"):
        storage.directory(tmp_path / "to" / "x.json" / "z").write_json("w", 1)


@pytest.mark.parametrize(
    "content", ["[" * 100 + "]" * 100, "[" * 100_000, '{"a":' * 5000 + "1" + "}" * 5000, "[" + "1" * 5000]
)
def test_settings_of_any_content_are_one_message(tmp_path, content):
    from adtp_export.integrations.ray import storage

    (tmp_path / "x.json").write_text(content)
    with pytest.raises(InputError, match=r"x\.json is damaged \(.*\); give another place"):
        storage.directory(tmp_path).read_json("x.json")


def test_settings_of_any_size_are_one_message(tmp_path, monkeypatch):
    from adtp_export.integrations.ray import storage

    monkeypatch.setattr(storage, "JSON_BYTES", 10)
    (tmp_path / "x.json").write_text('"12345678"')
    assert storage.directory(tmp_path).read_json("x.json") == "12345678"
    (tmp_path / "x.json").write_text('"123456789"')
    with pytest.raises(InputError, match="it has more than 10 bytes"):
        storage.directory(tmp_path).read_json("x.json")


def test_a_part_is_there_where_its_file_is_whole(tmp_path):
    """A file that was cut short, or is another one of that name, is answered again."""
    from adtp_export.integrations.ray import parts, storage, worker

    planned = plan_of([write(tmp_path / "x.parquet", ids=range(30))], rows_per_part=10).parts
    to = storage.directory(tmp_path / "to")
    assert parts.found(planned, to) == set()
    (tmp_path / "to").mkdir()
    for part in planned:
        write(tmp_path / "to" / part.name, ids=range(10))
    assert parts.found(planned, to) == {part.name for part in planned}
    cut, other, gone = (tmp_path / "to" / part.name for part in planned)
    whole = cut.read_bytes()
    write(other, ids=range(9))
    gone.unlink()
    for length in (0, 3, 12, len(whole) // 2, len(whole) - 1):
        cut.write_bytes(whole[:length])
        assert parts.found(planned, to) == set()
    for begin in range(len(whole) - 40, len(whole) - 4):  # of the footer and its length, with its mark in place
        cut.write_bytes(whole[:begin] + bytes(4) + whole[begin + 4 :])
        parts.found(planned, to)
    cut.write_bytes(whole)
    assert parts.found(planned, to) == {planned[0].name}
    counted = SimpleNamespace(begin=SimpleNamespace(remote=lambda name: 1))
    job = worker.Job(model=None, columns=["text"], stores=[], to=to, attempts=counted)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ray.get", lambda number: number)
        assert [worker.PartWorker(job)._is_to_be_answered(part) for part in planned] == [False, True, True]


def test_a_run_leaves_what_another_one_is_writing(tmp_path):
    """Two runs that ask the same of the same files; a killed one had been there before."""
    from adtp_export.integrations.ray import storage

    mine, theirs = (storage.directory(tmp_path / "to") for _ in range(2))
    killed = storage.directory(tmp_path / "to")
    mine.store.create_dir(mine.path)
    (tmp_path / "to" / f"_partial-{killed.run}-1-y").write_bytes(b"half")
    os.utime(tmp_path / "to" / f"_partial-{killed.run}-1-y", ns=(0, 0))
    mine.write_json("run.json", {})
    began = mine.changed("run.json")
    assert mine.changed("none") is None
    (tmp_path / "to" / "y").write_bytes(b"of the killed run")
    elsewhere = f"_partial-{theirs.run}-3-z-1"  # a part that is not there: its worker may compute since long
    (tmp_path / "to" / elsewhere).write_bytes(b"half")
    os.utime(tmp_path / "to" / elsewhere, ns=(0, 0))
    (tmp_path / "to" / f"_partial-{mine.run}-2-y").write_bytes(b"of a killed worker")
    with theirs.writing("y") as stream:
        stream.write(b"half")
        mine.clear(None)
        assert len(mine.names()) == 5
        mine.clear(began)
        assert len(mine.names()) == 4
        stream.write(b" and half")
    assert mine.names() == {"run.json", "y", elsewhere}
    assert (tmp_path / "to" / "y").read_bytes() == b"half and half"


def test_a_part_that_another_run_has_answered_meanwhile_is_there(tmp_path):
    """And has cleared what this one was writing, which it took for a leftover."""
    from adtp_export.integrations.ray import storage

    mine, theirs = (storage.directory(tmp_path / "to") for _ in range(2))
    mine.write_json("run.json", {})
    with mine.writing("y") as stream:
        stream.write(b"mine")
        with theirs.writing("y") as other:
            other.write(b"same")
        theirs.clear(2**62)
        assert mine.names() == {"run.json", "y"}
    assert (tmp_path / "to" / "y").read_bytes() == b"same"
    with mine.writing("z") as stream:
        theirs.clear(2**62)
    assert mine.names() == {"run.json", "y", "z"}


@pytest.mark.parametrize(
    ("where", "message"),
    [
        ("answering", "x.parquet: rows 1 to 3 cannot be answered"),
        ("reading", "x.parquet: cannot be read"),
        ("writing", "to cannot be written"),
    ],
)
def test_an_error_is_of_what_it_came_from(tmp_path, monkeypatch, where, message):
    from pyarrow import parquet

    from adtp_export.integrations.ray import storage, worker

    (part,) = plan_of([write(tmp_path / "x.parquet", ids=range(3))]).parts
    to = storage.directory(tmp_path / "to")
    to.store.create_dir(to.path)

    def fail(*_):
        raise OSError(5, "Input/output error")

    class Answering:
        target = "x"

        def table(self, table, *_):
            return fail() if where == "answering" else table

    model = SimpleNamespace(asked=ScoringConfig())
    job = worker.Job(model=model, columns=["text"], stores=[to.store], to=to, attempts=None)
    if where == "reading":
        (tmp_path / "x.parquet").unlink()
    if where == "writing":
        monkeypatch.setattr(parquet.ParquetWriter, "write_table", fail)
    with pytest.raises(InputError, match=message) as caught:
        worker.write_answers(job, part, Answering())
    assert ("written" in str(caught.value)) == (where == "writing")
    assert to.names() == set()


def test_reports_and_times_make_no_other_model(exported, tmp_path):
    """So a run goes on after adtp-bench; any other file, or another verdict, is another export."""
    from adtp_export.integrations.ray.worker import digest_of

    out = shutil.copytree(exported, tmp_path / "out")
    digest = lambda: digest_of(SimpleNamespace(manifest=read_manifest(out)))  # noqa: E731
    first = digest()
    for name in ("report.html", measured.NAME, "report.md"):
        add_file(out, read_manifest(out), name, "{}")
    assert digest() == first
    add_file(out, read_manifest(out), "config.json", (out / "config.json").read_text() + "\n")
    second = digest()
    manifest = out / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"status": "verified"', '"status": "inconclusive"', 1))
    assert len({first, second, digest()}) == 3
