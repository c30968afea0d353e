"""The files of the source, and what users install of them. Used as a plugin by `conftest.py`."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def tree() -> list[Path]:
    """Files of the source, relative to it, as git lists them; without git no dot files, and nothing that was built."""
    if (ROOT / ".git").exists():
        listed = subprocess.check_output(["git", "-C", ROOT, "ls-files"], text=True).splitlines()
        return [
            path
            for path in map(Path, listed)
            if not any(part.startswith(".") for part in path.parts) and (ROOT / path).is_file()
        ]
    ignored = re.compile(r"(build|dist|lib|__pycache__|node_modules|.*-export|.*\.egg-info|\..*)")
    found = []
    for folder, folders, files in os.walk(ROOT):
        folders[:] = [name for name in folders if not ignored.fullmatch(name)]
        found += [Path(folder, name).relative_to(ROOT) for name in files if not ignored.fullmatch(name)]
    return found


@pytest.fixture(scope="session")
def distributions(tmp_path_factory) -> tuple[Path, Path]:
    """A source distribution of a copy of the source, and the wheel that is made of it, unpacked elsewhere."""
    folder = tmp_path_factory.mktemp("distributions")
    for path in tree():
        (folder / "copy" / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / path, folder / "copy" / path)

    def build(kind: str, source: Path) -> Path:
        code = f"import sys; from setuptools import build_meta; print(build_meta.build_{kind}(sys.argv[1]))"
        command = [sys.executable, "-c", code, str(folder)]
        said = subprocess.run(command, cwd=source, check=True, capture_output=True, text=True).stdout
        return folder / said.splitlines()[-1]

    sdist = build("sdist", folder / "copy")
    shutil.unpack_archive(sdist, folder / "unpacked", filter="data")
    (source,) = (folder / "unpacked").iterdir()
    return sdist, build("wheel", source)
