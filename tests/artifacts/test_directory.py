"""An output directory is old or new at every moment, and what is not ours is not deleted."""

import dataclasses
import errno
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest
from kill_points import NAMES, read, write
from safetensors import SafetensorError
from testbed import ROOT

from adtp_export import io as disk
from adtp_export.artifacts import directory as room
from adtp_export.artifacts.checks import checked_file
from adtp_export.artifacts.directory import OutputDirectory, clear_leftovers, recover
from adtp_export.artifacts.manifest import read_manifest
from adtp_export.artifacts.records import file_entry
from adtp_export.errors import InputError
from adtp_export.io import flush, hold, telling_full_disk

KILLS = ROOT / "tests" / "kill_points.py"


@pytest.mark.parametrize("mode", ["exchange", "two-steps"])
def test_killed_at_every_call_to_the_file_system(tmp_path, mode):
    """SIGKILL, SIGTERM and SIGINT at each point of a replacement: old or new, whole, and the next run clears the rest."""
    found = json.loads(subprocess.check_output([sys.executable, KILLS, tmp_path, mode], text=True))
    assert found["wrong"] == []
    assert found["kills"] > 50
    assert found["results"] == ["new", "old"]


WRITER = """
import os, sys
from pathlib import Path
sys.path.insert(0, "tests")
from kill_points import write
os.fsync = lambda file: None
for i in range(150):
    write(Path(sys.argv[1]), str(i))
"""


def test_a_reader_beside_a_writer_never_misses_the_directory(tmp_path):
    out = tmp_path / "out"
    write(out, "first")
    writer = subprocess.Popen([sys.executable, "-c", WRITER, out], cwd=ROOT)
    seen = set()
    while writer.poll() is None:
        assert out.exists()
        seen.add(read_manifest(out).versions["adtp-export"])
    assert writer.returncode == 0
    assert len(seen) > 10


HOLDER = """
import sys
from pathlib import Path
from adtp_export.artifacts.directory import OutputDirectory
with OutputDirectory(Path(sys.argv[1])) as directory:
    print(directory.work, flush=True)
    sys.stdin.readline()
"""


def test_the_folder_of_a_run_that_lives_is_left_alone(tmp_path):
    """Whatever its process number: the other run may be in a container of its own."""
    out = tmp_path / "out"
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", HOLDER, out], **pipes) as other:
        work = Path(other.stdout.readline().strip())
        write(out, "mine")
        assert work.is_dir()
        other.kill()
    assert work.is_dir()
    write(out, "mine again")
    assert list(tmp_path.iterdir()) == [out]


def test_a_reader_brings_back_what_was_moved_aside(tmp_path):
    write(tmp_path / "out", "old")
    (tmp_path / "out").rename(tmp_path / ".out.adtp-old-x")
    assert read(tmp_path / "out") == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_nothing_is_brought_back_where_there_is_nothing(tmp_path):
    recover(tmp_path / "nowhere" / "out")
    recover(tmp_path / "out")
    with pytest.raises(InputError, match="not an exported directory"):
        read_manifest(tmp_path / "out")


@pytest.mark.parametrize("name", ["notes.txt", ".git/config", "engines/mine.engine", "empty/"])
def test_files_that_are_not_listed_are_not_deleted(tmp_path, name):
    out = tmp_path / "out"
    write(out, "old")
    if name.endswith("/"):
        (out / name).mkdir()
    else:
        (out / name).parent.mkdir(exist_ok=True)
        (out / name).write_text("mine")
    with pytest.raises(InputError, match=rf"does not list.*{name.split('/')[0]}"):
        write(out, "new")
    assert (out / name).exists()
    with pytest.raises(InputError, match="does not list"):
        OutputDirectory(out, update=True)


def test_many_files_that_are_not_listed_are_not_all_named(tmp_path):
    out = tmp_path / "out"
    write(out, "old")
    for i in range(30):
        (out / f"note-{i:02}").touch()
    with pytest.raises(InputError, match="and more; move") as error:
        OutputDirectory(out, force=True)
    assert str(error.value).count("note-") == 3


def test_weights_that_the_model_directory_links_to_are_kept(tmp_path):
    """A model directory whose weights are links into OUT: replacing OUT would leave them dangling."""
    out, model = tmp_path / "out", tmp_path / "model"
    write(out, "old")
    model.mkdir()
    (model / "model.safetensors").symlink_to(out / "model.onnx")
    with pytest.raises(InputError, match=r"links to: .*model\.safetensors; give another place"):
        OutputDirectory(out, force=True, protected=model)
    (model / "model.safetensors").unlink()
    (model / "model.safetensors").symlink_to(tmp_path / "elsewhere")
    OutputDirectory(out, force=True, protected=model)


def test_the_model_directory_may_hold_the_export(tmp_path):
    """`cd MODEL_DIR; adtp-export .` writes into it, and may replace that."""
    out = tmp_path / "model" / "model-export"
    out.parent.mkdir()
    write(out, "old")
    OutputDirectory(out, force=True, protected=out.parent)
    with pytest.raises(InputError, match="is or holds the model directory"):
        OutputDirectory(out, force=True, protected=out)


def test_what_is_carried_over_is_compared_first(tmp_path):
    out = tmp_path / "out"
    write(out, "old")
    manifest = read_manifest(out)
    with OutputDirectory(out, update=True) as directory:
        directory.carry_over(manifest, but=["config.json"])
        copied = [path.relative_to(directory.work).as_posix() for path in directory.work.rglob("*") if path.is_file()]
        assert sorted(copied) == sorted(set(NAMES) - {"config.json"})
    (out / NAMES[2]).write_text("odd")
    with (
        pytest.raises(InputError, match="engine is damaged: its SHA-256"),
        OutputDirectory(out, update=True) as directory,
    ):
        directory.carry_over(manifest)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def update(out, text):
    """Begin an update; yields once everything is written, and publishes after that."""
    manifest = read_manifest(out)
    with OutputDirectory(out, update=True) as directory:
        directory.carry_over(manifest)
        files = {**manifest.files}
        (directory.work / text).write_text(text)
        files[text] = file_entry(directory.work / text)
        document = dataclasses.replace(manifest, files=files).to_json()
        (directory.work / "manifest.json").write_text(json.dumps(document))
        yield
        directory.publish()


def no_locks(*_):
    raise OSError(errno.EBADF, "no locks on this file system")


def test_an_old_result_is_no_leftover_before_the_new_one_is_known_to_be_right(tmp_path, monkeypatch):
    """Another run begins in the instant after the exchange, when the old result has the name of a folder to work in."""
    out = tmp_path / "out"
    write(out, "old")
    mine, real, seen = update(out, "mine"), room.exchange, []
    next(mine)

    def exchange(work, path):
        assert real(work, path)
        clear_leftovers(out)
        seen.extend(read_manifest(work).files)
        return True

    monkeypatch.setattr(room, "exchange", exchange)
    next(mine, None)
    assert seen
    assert "mine" in read_manifest(out).files
    assert list(tmp_path.iterdir()) == [out]


@pytest.mark.parametrize("late", [False, True])
def test_what_another_run_has_added_meanwhile_is_not_lost(tmp_path, monkeypatch, late):
    """`late`: it is added in the instant before the exchange, on a file system without locks."""
    out = tmp_path / "out"
    write(out, "old")
    mine, theirs = update(out, "mine"), update(out, "theirs")
    next(mine)
    next(theirs)
    if late:
        monkeypatch.setattr(disk.fcntl, "flock", no_locks)
        real = room.exchange

        def exchange(*places):
            monkeypatch.setattr(room, "exchange", real)
            next(theirs, None)
            return real(*places)

        monkeypatch.setattr(room, "exchange", exchange)
    else:
        next(theirs, None)
    with pytest.raises(InputError, match="was replaced by another run meanwhile"):
        next(mine)
    assert "theirs" in read_manifest(out).files
    assert (out / "theirs").read_text() == "theirs"
    assert list(tmp_path.iterdir()) == [out]


def test_a_folder_that_another_run_holds_is_not_worked_in(tmp_path, monkeypatch):
    """It is about to be cleared as a leftover."""
    made, held = [], []
    real = room.tempfile.mkdtemp

    def mkdtemp(**arguments):
        made.append(Path(real(**arguments)))
        if len(made) == 1:
            held.append(hold(made[0]))
        return str(made[-1])

    monkeypatch.setattr(room.tempfile, "mkdtemp", mkdtemp)
    with OutputDirectory(tmp_path / "out") as directory:
        assert directory.work == made[1]
    os.close(held[0])


def test_a_result_comes_back_where_nothing_can_be_locked(tmp_path, monkeypatch):
    monkeypatch.setattr(disk.fcntl, "flock", no_locks)
    write(tmp_path / "out", "old")
    (tmp_path / "out").rename(tmp_path / ".out.adtp-old-x")
    assert read(tmp_path / "out") == "old"
    write(tmp_path / "out", "new")
    assert read(tmp_path / "out") == "new"


@pytest.mark.parametrize("mode", ["exchange", "two-steps"])
def test_a_power_cut_loses_nothing(tmp_path, monkeypatch, mode):
    """Every file is on the disk before it takes its place, and its place is before the old result is removed."""
    out, seen = tmp_path / "out", []

    def recorded(module, name, told):
        real = getattr(module, name)

        def record(*arguments, **options):
            seen.append(told(*arguments))
            return real(*arguments, **options)

        monkeypatch.setattr(module, name, record)

    def place(path):
        name = Path(path).relative_to(tmp_path).as_posix()
        return re.sub(r"^\.out\.adtp-(work|old)-\w+", r"\1", name)

    write(out, "old")
    if mode == "two-steps":
        monkeypatch.setattr(room, "exchange", lambda *_: False)
        recorded(Path, "rename", lambda path, other: f"{place(path)} becomes {place(other)}")
        moves = ["out becomes old", "work becomes out"]
    else:
        recorded(room, "exchange", lambda *_: "exchange")
        moves = ["exchange"]
    recorded(os, "fsync", lambda file: f"flush {place(os.readlink(f'/proc/self/fd/{file}'))}")
    recorded(room.shutil, "rmtree", lambda path, *_: f"remove {place(path)}")
    write(out, "new")
    names = [*NAMES, "manifest.json", "engines"]
    assert sorted(seen[: len(names)]) == sorted(f"flush work/{name}" for name in names)
    rest = seen[len(names) :]
    assert rest[:-3] == ["flush work", *moves, "flush ."]
    assert [told.split()[0] for told in rest[-3:]] == ["remove"] * 3
    assert seen.index("flush work/engines") > seen.index("flush work/engines/a.engine")


def test_links_are_not_flushed_and_a_file_system_may_flush_no_directories(tmp_path, monkeypatch):
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    (tmp_path / "file").write_text("x")
    real = os.fsync

    def fsync(file):
        if os.path.isdir(f"/proc/self/fd/{file}"):
            raise OSError(errno.EINVAL, "Invalid argument")
        real(file)

    monkeypatch.setattr(os, "fsync", fsync)
    flush(tmp_path)

    def full(file):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(InputError, match="the disk is full"):
        write(tmp_path / "out", "new")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), True),
        (SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)"), True),
        (SafetensorError("Error while serializing: I/O error: Permission denied (os error 13)"), False),
        (RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 9664 vs 9556"), True),
        (OSError(errno.EACCES, "Permission denied"), False),
        (InputError("the disk is full of birds"), False),
    ],
    ids=str,
)
def test_a_full_disk_is_told_whoever_writes(error, told, tmp_path):
    with pytest.raises(InputError if told else type(error)) as caught, telling_full_disk(tmp_path, "add --resume"):
        raise error
    if told:
        assert re.search(r": the disk is full; free some space.*, then add --resume$", str(caught.value))
    else:
        assert caught.value is error


def test_of_a_full_disk_for_temporary_files_the_message_names_another(tmp_path, monkeypatch):
    room = {tmp_path: 10, Path(tempfile.gettempdir()): 5}
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=room[path]))
    for place, way in ((tempfile.gettempdir(), ", or type TMPDIR=DIR before the command, .*"), (str(tmp_path), "")):
        with (
            pytest.raises(InputError, match=f"^{re.escape(place)}: the disk is full; free some space{way}$"),
            telling_full_disk(tmp_path),
        ):
            raise OSError(errno.ENOSPC, "No space left on device")
        room[tmp_path] = 1


def test_odd_places_are_one_message(tmp_path, monkeypatch):
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    OutputDirectory(tmp_path / "out")  # from a directory that is no more
    (tmp_path / "in" / "deep").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "in" / "deep")
    with pytest.raises(InputError, match="is or holds the current directory"):
        OutputDirectory(tmp_path / "in", force=True)
    with pytest.raises(InputError, match="is no path"):
        OutputDirectory(Path("a\0b"))
    for name in ("x" * 300, "a\0b"):
        with pytest.raises(InputError, match="not an exported directory"):
            read_manifest(Path(name))
    with pytest.raises(InputError, match=r"is a mount point, .*give a place in it, such as /proc/model"):
        OutputDirectory(Path("/proc"), force=True)


def test_a_file_is_the_one_that_is_listed(tmp_path):
    out = tmp_path / "out"
    write(out, "old")
    manifest, path = read_manifest(out), out / "model.onnx"
    assert checked_file(out, manifest, "model.onnx") == path
    path.write_text("odd")
    checked_file(out, manifest, "model.onnx", check_hashes=False)
    with pytest.raises(InputError, match="its SHA-256 begins with"):
        checked_file(out, manifest, "model.onnx")
    path.write_text("longer")
    with pytest.raises(InputError, match=r"has 6 bytes, and manifest\.json says 3"):
        checked_file(out, manifest, "model.onnx", check_hashes=False)
    path.unlink()
    with pytest.raises(InputError, match="cannot be read"):
        checked_file(out, manifest, "model.onnx")
    path.mkdir()
    with pytest.raises(InputError, match="not a regular file"):
        checked_file(out, manifest, "model.onnx")
    with pytest.raises(InputError, match="does not list 'other'"):
        checked_file(out, manifest, "other")


def test_links_of_a_download_cache_are_followed(tmp_path):
    out, blobs = tmp_path / "out", tmp_path / "blobs"
    write(out, "old")
    shutil.copytree(out, blobs)
    for name in NAMES:
        (out / name).unlink()
        (out / name).symlink_to(blobs / name)
    assert read(out) == "old"
