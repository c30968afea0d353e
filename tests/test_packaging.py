"""What is published: a source distribution that is whole, and a wheel made of it alone."""

import re
import tarfile
import tomllib
import zipfile
from email import message_from_bytes
from pathlib import PurePosixPath

from distributions import ROOT, tree

import adtp_export

ROOMS = {"adtp_export": "adtp_export", "calibration": "adtp_export/calibration", "plugins": "adtp_export/plugins"}
"""Folders of the source whose files are all shipped, and where the wheel has them."""


def test_the_source_distribution_is_whole(distributions):
    """Everything but dot files: tests, documents, the small student, records."""
    with tarfile.open(distributions[0]) as archive:
        names = {str(PurePosixPath(*PurePosixPath(name).parts[1:])) for name in archive.getnames()}
    assert {path.as_posix() for path in tree()} <= names
    assert not [name for name in names if "__pycache__" in name or name.startswith(("build/", ".venv"))]


def test_the_wheel_has_all_of_the_package_and_nothing_else(distributions):
    """Modules, py.typed, style sheet, recipes, compiled kernels, C++ sources, examples; the license."""
    with zipfile.ZipFile(distributions[1]) as archive:
        names = set(archive.namelist())
    info = f"adtp_export-{adtp_export.__version__}.dist-info"
    shipped = {f"{ROOMS[p.parts[0]]}/{'/'.join(p.parts[1:])}" for p in tree() if p.parts[0] in ROOMS}
    assert {name for name in names if not name.startswith(f"{info}/")} == shipped
    assert {f"{info}/licenses/LICENSE", f"{info}/entry_points.txt"} <= names
    assert {
        "adtp_export/py.typed",
        "adtp_export/report/report.css",
        "adtp_export/plugins/kernels/kernels.zip.xz",
    } <= names


def test_the_wheel_alone_asks_for_little(distributions):
    with zipfile.ZipFile(distributions[1]) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith("/METADATA"))
        metadata = message_from_bytes(archive.read(name))
    alone = [requirement for requirement in metadata.get_all("Requires-Dist") if "extra ==" not in requirement]
    assert [re.match(r"[\w-]+", requirement)[0] for requirement in alone] == ["msgspec", "numpy", "tokenizers"]
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["Version"] == adtp_export.__version__


def test_every_room_is_packaged():
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    folders = {path.parent for path in tree() if path.name == "__init__.py" and path.parts[0] in ROOMS}
    expected = {".".join((*ROOMS[f.parts[0]].split("/"), *f.parts[1:])) for f in folders}
    assert set(settings["packages"]) == expected


def test_the_changelog_begins_with_this_version():
    (version,) = re.findall(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)[:1]
    assert version == adtp_export.__version__
