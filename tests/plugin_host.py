"""The C++ host of the plugin, compiled by g++ for the tests that want it, and an emulated GPU for it."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import kept_builds
import pytest

from adtp_export.errors import MissingDependencyError
from adtp_export.plugins import library
from benchmarks.gpu import emulated

HERE = Path(__file__).parent
WARNINGS = ("-std=c++17", "-Wall", "-Wextra", "-Werror")
_NAMES = (
    "plugin", "encoder_plugin", "grouped_plugin", "launch", "grouped", "encoder", "parts", "runner", "replay", "memory", "plan", "driver",
)  # fmt: skip
PLUGIN = tuple(f"{name}.cpp" for name in _NAMES)
"""The library's sources."""
SANITIZERS = ("-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")


class Host:
    """The host's sources, with one text of them replaced where a test plants a mistake."""

    def __init__(self, folder: Path, headers: Path | None = None) -> None:
        self.folder, self.headers, self.sources = folder, headers, folder / "cpp"
        shutil.copytree(library.SOURCES, self.sources)
        shutil.copy(HERE / "plugins" / "comparison.cpp", self.sources)

    def compile(self, name: str, *sources: str, flags=(), mistake=None) -> Path:
        """Compile a program, or a library where the name ends in .so; `mistake` is (file, old text, new text)."""
        place = self.sources if mistake is None else self._mistaken(name, *mistake)
        include = ["-isystem", self.headers, "-isystem", place / "shim"] if self.headers else []
        shared = ["-shared", "-fPIC", "-fvisibility=hidden"] if name.endswith(".so") else []
        given = [place / source for source in sources]
        table = [kept_builds.all_kernels()] if "launch.cpp" in sources else []
        self._run("-O1", *flags, *shared, f"-I{place}", *include, *given, *table, "-o", self.folder / name, "-ldl")
        return self.folder / name

    def _mistaken(self, name: str, file: str, old: str, new: str) -> Path:
        place = Path(shutil.copytree(self.sources, self.folder / f"mistaken-{name}"))
        text = (place / file).read_text()
        assert text.count(old) == 1, "the place of the planted mistake is gone"
        (place / file).write_text(text.replace(old, new))
        return place

    @staticmethod
    def _run(*arguments) -> None:
        done = subprocess.run(["g++", *WARNINGS, *map(str, arguments)], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr


@pytest.fixture(scope="session")
def compiler():
    if shutil.which("g++") is None:
        pytest.skip("CMake or a C++ compiler is missing")


@pytest.fixture(scope="session")
def host(tmp_path_factory, compiler):
    """What compiles without TensorRT's headers."""
    return Host(tmp_path_factory.mktemp("host"))


@pytest.fixture(scope="session")
def host_with_headers(tmp_path_factory, compiler):
    """What TensorRT's headers are needed for."""
    try:
        headers = library.find_headers()
    except MissingDependencyError as error:
        pytest.skip(str(error))
    return Host(tmp_path_factory.mktemp("host-with-headers"), headers)


@pytest.fixture(scope="session")
def emulator(tmp_path_factory):
    """Environment in which programs find an emulated GPU that takes PTX, the quickest to execute."""
    try:
        found = emulated.environment()
    except emulated.MissingError as error:
        pytest.skip(str(error))
    # a driver's libraries stay: loaded kernels are not the host's leaks
    options = tmp_path_factory.mktemp("emulator") / "suppressions"
    options.write_text("leak:libcuda.so.1\n")
    leaks = {"LSAN_OPTIONS": f"suppressions={options}:print_suppressions=0"}
    return {**os.environ, **leaks, **found}


def lines(command, environment, code=0) -> list[str]:
    """Lines that a program prints, and that it exits as it should."""
    done = subprocess.run(list(map(str, command)), env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == code, done.stdout + done.stderr
    assert not re.search("runtime error|AddressSanitizer", done.stderr), done.stderr
    return done.stdout.splitlines()
