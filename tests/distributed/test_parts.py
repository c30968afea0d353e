"""Rows of Parquet files in parts, and files that are written whole."""

import os

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from adtp_export.distributed.asked import Asked
from adtp_export.errors import InputError

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

    from adtp_export.distributed import parts, storage

    paths = []
    for n, rows in enumerate(files):
        ids = range(sum(files[:n]), sum(files[:n]) + rows)
        texts = [f"text {i}" for i in ids]
        columns = {"id": pyarrow.array(ids, pyarrow.int64()), "text": pyarrow.array(texts, pyarrow.string())}
        paths.append(write(scratch / f"{n}.parquet", group=group, **columns))
    asked = Asked(rows_per_part=rows_per_part, keep=keep)
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
    from adtp_export.distributed import parts, storage

    return parts.plan(storage.find(places), Asked(**fields), names)


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
    from adtp_export.distributed import storage

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

    from adtp_export.distributed import storage

    stores = {"one": fs.LocalFileSystem(), "two": fs.LocalFileSystem(use_mmap=True)}
    monkeypatch.setattr(storage, "_named", lambda place: [storage.File(stores[place], "bucket/x.parquet", 1, 1)])
    assert [file.store for file in storage.find(["two", "one", "two"])] == [stores["two"], stores["one"]]


def test_names_of_parts_are_no_longer_than_file_systems_take(tmp_path):
    from adtp_export.distributed import storage

    (part,) = plan_of([write(tmp_path / f"{chr(0x6F22) * 80}.parquet", ids=range(3))]).parts
    storage.directory(tmp_path / "to").write_json(part.name, {})


def test_another_file_in_its_place_is_another_part(tmp_path):
    first = plan_of([write(tmp_path / "x.parquet", ids=range(3))]).parts
    assert plan_of([tmp_path / "x.parquet"]).parts == first
    write(tmp_path / "x.parquet", ids=range(4))
    assert plan_of([tmp_path / "x.parquet"]).parts[0].name != first[0].name
    from adtp_export.distributed import parts, storage

    (part,) = first
    os.truncate(tmp_path / "x.parquet", 100)
    with pytest.raises(InputError, match="cannot be read"):
        list(parts.read(storage.directory(tmp_path).store, part, ["text"], None, 10))
    write(tmp_path / "x.parquet", ids=range(2))
    with pytest.raises(InputError, match="has 2 rows, and had 3 or more"):
        list(parts.read(storage.directory(tmp_path).store, part, ["text"], None, 10))


def test_a_file_is_there_whole_or_not_at_all(tmp_path):
    from adtp_export.distributed import storage

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
    (tmp_path / "to" / "_partial-left").write_bytes(b"half")
    to.clear()
    assert to.names() == {"x.json"}
    with pytest.raises(InputError, match="is a file"):
        storage.directory(tmp_path / "to" / "x.json").names()
    with pytest.raises(InputError, match="cannot be written"):
        storage.directory(tmp_path / "to" / "x.json" / "z").write_json("w", 1)
