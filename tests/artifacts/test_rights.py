"""Who may read a result, and what is said where somebody may not."""

import os
import stat
from pathlib import Path

import pytest
from kill_points import NAMES, read, write

from adtp_export.artifacts.checks import checked_file
from adtp_export.artifacts.directory import OutputDirectory
from adtp_export.artifacts.manifest import read_manifest
from adtp_export.errors import InputError
from adtp_export.io import umask

OWNER, GROUP = 65534, 100


def mode(path):
    return stat.S_IMODE(path.stat().st_mode)


@pytest.fixture
def out(tmp_path):
    """A result that its owner alone may read."""
    write(tmp_path / "out", "old")
    for place in (tmp_path / "out").rglob("*"):
        place.chmod(0o700 if place.is_dir() else 0o600)
    (tmp_path / "out").chmod(0o700)
    return tmp_path / "out"


SAID = Path("/proc/self/status")


@pytest.mark.skipif(
    not SAID.exists() or "Umask:" not in SAID.read_text(), reason="this system does not say the mask of a process"
)
def test_the_mask_is_read_and_not_changed(monkeypatch):
    """Other threads would make files that everybody may write."""
    before = os.umask(0o027)
    try:
        with monkeypatch.context() as patch:
            patch.setattr(os, "umask", None)
            assert umask() == 0o027
    finally:
        os.umask(before)


def test_a_private_result_stays_private(out):
    with OutputDirectory(out, update=True) as directory:
        directory.carry_over(read_manifest(out), but=[])
        (directory.work / "manifest.json").write_text((out / "manifest.json").read_text())
        directory.publish()
    assert mode(out) == 0o700
    assert {mode(out / name) for name in NAMES} == {0o600}
    write(out, "new")
    assert mode(out) == 0o700
    assert read(out) == "new"


def test_a_result_that_its_owner_may_not_write_is_replaced(out):
    out.chmod(0o500)
    write(out, "new")
    assert mode(out) == 0o700


@pytest.fixture
def as_root():
    if not hasattr(os, "geteuid") or os.geteuid() != 0:
        pytest.skip("needs root")


def test_root_leaves_a_result_to_its_owner(out, as_root):
    for place in (out, *out.rglob("*")):
        os.chown(place, OWNER, GROUP)
    write(out, "new")
    assert {(place.stat().st_uid, place.stat().st_gid) for place in (out, *out.rglob("*"))} == {(OWNER, GROUP)}


def test_root_leaves_a_result_to_its_group(out, as_root):
    for place in (out, *out.rglob("*")):
        os.chown(place, 0, GROUP)
    out.chmod(0o2750)
    write(out, "new")
    assert (out.stat().st_gid, mode(out)) == (GROUP, 0o2750)


def test_owners_of_what_links_point_to_stay(out, tmp_path, as_root):
    (tmp_path / "elsewhere").write_text("")
    os.chown(out, OWNER, GROUP)
    with OutputDirectory(out, force=True) as directory:
        (directory.work / "link").symlink_to(tmp_path / "elsewhere")
        (directory.work / "manifest.json").write_text((out / "manifest.json").read_text())
        directory.publish()
    assert out.stat().st_uid == OWNER
    assert (tmp_path / "elsewhere").stat().st_uid == 0


def test_owners_of_files_that_other_directories_have_too_stay(out, tmp_path, as_root):
    """As weights of an export in a model repository of Triton, which the server's user may own."""
    (tmp_path / "elsewhere").write_text("weights")
    os.chown(out, OWNER, GROUP)
    with OutputDirectory(out, force=True) as directory:
        os.link(tmp_path / "elsewhere", directory.work / "weights")
        (directory.work / "manifest.json").write_text((out / "manifest.json").read_text())
        directory.publish()
    assert (out / "manifest.json").stat().st_uid == OWNER
    assert {path.stat().st_uid for path in (tmp_path / "elsewhere", out / "weights")} == {0}


def test_files_that_nobody_may_write_are_updated(out):
    (out / NAMES[0]).chmod(0o400)
    with OutputDirectory(out, update=True) as directory:
        directory.carry_over(read_manifest(out))
        assert mode(directory.work / NAMES[0]) == 0o600


@pytest.fixture
def closed(out):
    """The result, and its manifest, while this process may not read it; root gives up its rights for that time."""
    manifest, root = read_manifest(out), os.geteuid() == 0
    out.chmod(0)
    if root:
        os.seteuid(OWNER)
    try:
        yield out, manifest
    finally:
        if root:
            os.seteuid(0)
        out.chmod(0o700)


def test_a_result_that_may_not_be_read_is_not_called_damaged(closed):
    out, manifest = closed
    with pytest.raises(InputError, match=r"manifest.json may not be read \(Permission denied\); ask its owner"):
        read_manifest(out)
    with pytest.raises(InputError, match=rf"{NAMES[0]} may not be read \(Permission denied\); ask its owner"):
        checked_file(out, manifest, NAMES[0])
