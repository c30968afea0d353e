"""Jetson's processors and Windows, as far as cross-compilers and QEMU go. Neither has run the plugin beside a GPU."""

import os
import shutil
import subprocess

import pytest
from cpu_operators import COMPILED_FOR
from plugin_host import PLUGIN, SANITIZERS, WARNINGS, lines
from testbed import ROOT

from adtp_export.plugins import library, operators, shipped

AARCH64, QEMU = "aarch64-linux-gnu-g++", ("qemu-aarch64", "-L", "/usr/aarch64-linux-gnu")
PROCESSORS = {
    "max": ["neon_dotprod", "neon", "portable"],
    "cortex-a76": ["neon_dotprod", "neon", "portable"],
    "a64fx": ["neon", "portable"],
    "cortex-a53": ["neon", "portable"],
}
"""The levels of products that each runs. What it has not, QEMU does not execute. a64fx has almost all that is as old as dot products."""
MINGW = "x86_64-w64-mingw32-g++-posix"
WINE = "/usr/lib/wine/wine64"
CPU = ROOT / "plugins" / "cpu"
LINEAR = ("linear.cpp", "linear_portable.cpp", "linear_neon.cpp", "linear_neon_dotprod.cpp", "chain.cpp")
OF_OPERATORS = ("operators.cpp", "linear_operators.cpp", "chain_operators.cpp")
OPERATORS = (*OF_OPERATORS, "ragged.cpp", "refusal.cpp", "level.cpp", "portable.cpp", "neon.cpp", *LINEAR)
RUNNER = (
    "operators.cpp",
    "encoder.cpp",
    "parts.cpp",
    "runner.cpp",
    "replay.cpp",
    "memory.cpp",
    "plan.cpp",
    "driver.cpp",
)
pytestmark = pytest.mark.slow


def tool(name: str, package: str) -> str:
    if shutil.which(name) is None:
        pytest.skip(f"the cross compiler is missing: type: apt install {package}")
    return name


@pytest.fixture(scope="module")
def aarch64():
    tool(QEMU[0], "qemu-user")
    return tool(AARCH64, "g++-aarch64-linux-gnu")


@pytest.fixture(scope="module")
def mingw():
    return tool(MINGW, "g++-mingw-w64-x86-64-posix")


@pytest.fixture(scope="module")
def wine(tmp_path_factory):
    """How to run a program for Windows."""
    command = shutil.which("wine64") or shutil.which("wine64-stable") or WINE
    if not os.path.exists(command):
        pytest.skip("Wine is not installed; type: apt install wine64")
    home = tmp_path_factory.mktemp("wine")
    return ["env", f"WINEPREFIX={home}", "WINEDEBUG=-all", command]


def compile_with(compiler, *arguments):
    command = [compiler, *WARNINGS, "-O2", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def attention_check(aarch64, tmp_path_factory):
    built = tmp_path_factory.mktemp("attention") / "check"
    sources = [CPU / name for name in OPERATORS]
    check = ROOT / "tests" / "plugins" / "operators_check.cpp"
    compile_with(aarch64, '-DADTP_SOURCES="x"', f"-I{CPU}", *sources, check, "-o", built, "-ldl")
    return built


def make_linear_check(aarch64, built, *flags):
    """The check of products, with what it checks."""
    check = ROOT / "tests" / "plugins" / "linear_check.cpp"
    compile_with(aarch64, *flags, f"-I{CPU}", *(CPU / name for name in LINEAR), check, "-o", built, "-ldl")
    return built


@pytest.mark.parametrize("of_the_package", [False, True], ids=["compiled here", "of the package"])
def test_the_cpu_operators_on_aarch64(attention_check, of_the_package):
    """NEON's code and the portable one, in all forms; where compilers fuse multiply-adds, they are the same to the bit."""
    library = [operators.COMPILED / "linux-aarch64" / "libadtp_cpu.so"] if of_the_package else []
    said = lines([*QEMU, attention_check, "40", *library], None)
    assert [line.split(":")[0] for line in said] == ["ok    neon", "ok    portable"]
    assert "; 40 like portable to the bit; " in said[0]


@pytest.fixture(scope="module")
def linear_check(aarch64, tmp_path_factory):
    return make_linear_check(aarch64, tmp_path_factory.mktemp("linear") / "check")


@pytest.mark.parametrize(("processor", "levels"), PROCESSORS.items(), ids=PROCESSORS)
def test_products_in_lower_precision_on_aarch64(linear_check, processor, levels):
    """The fastest level that a processor runs is found, and others are not run."""
    assert lines([*QEMU, "-cpu", processor, linear_check], None) == [f"best: {levels[0]}", *levels]


def test_products_under_sanitizers_on_aarch64(aarch64, tmp_path):
    built = make_linear_check(aarch64, tmp_path / "check", *SANITIZERS)
    environment = {**os.environ, "ASAN_OPTIONS": "detect_leaks=0"}  # QEMU does not let a process trace another
    assert lines([*QEMU, "-cpu", "max", built], environment)[1:] == PROCESSORS["max"]


@pytest.mark.parametrize(("processor", "levels"), PROCESSORS.items(), ids=PROCESSORS)
def test_products_of_the_package_on_aarch64(linear_check, processor, levels):
    """As zig compiles them."""
    compiled = operators.COMPILED / "linux-aarch64" / "libadtp_cpu.so"
    assert lines([*QEMU, "-cpu", processor, linear_check, compiled], None) == levels


def test_no_code_for_some_of_arms_processors_is_shared(aarch64, tmp_path):
    """A weak function could be run on all of them, as the linker found it here."""
    made = tmp_path / "made.o"
    compile_with(aarch64, "-c", CPU / "linear_neon_dotprod.cpp", "-o", made)
    listed = subprocess.run([f"{AARCH64[:-3]}nm", "--defined-only", made], capture_output=True, text=True, check=True)
    kinds = {line.split()[-2] for line in listed.stdout.splitlines()}
    assert "R" in kinds or "D" in kinds
    assert not kinds & set("WVu")


def test_the_host_on_aarch64(aarch64, host_with_headers, tmp_path):
    """The library loads, and does what TensorRT asks of it; launching says that there is no driver."""
    place, table = host_with_headers.sources, tmp_path / "kernels.cpp"
    table.write_text(library.kernels_cpp(), encoding="ascii")
    include = (f"-I{place}", "-isystem", host_with_headers.headers, "-isystem", place / "shim")
    sources = (*(place / name for name in PLUGIN), table)
    built = tmp_path / library.FILE
    compile_with(aarch64, "-shared", "-fPIC", "-fvisibility=hidden", *include, *sources, "-o", built, "-ldl")
    compile_with(aarch64, *include, place / "harness.cpp", "-o", tmp_path / "harness", "-ldl")
    said = lines([*QEMU, tmp_path / "harness", built], None)
    assert sum(line.startswith("ok  ") for line in said) > 70
    assert not any(line.startswith("FAIL") for line in said)
    assert "the CUDA driver (R525 or newer) is missing" in "".join(said)


def test_windows_compiles_the_cpu_operators(mingw, tmp_path):
    defines = ('-DADTP_SOURCES="x"', "-DADTP_X86")
    own = {name: flags for name, flags in COMPILED_FOR.items() if not name.endswith("amx")}
    for name, flags in own.items():
        compile_with(mingw, *defines, *flags, "-c", CPU / f"{name}.cpp", "-o", tmp_path / f"{name}.o")
    sources = [CPU / name for name in OPERATORS]
    objects = [tmp_path / f"{name}.o" for name in own]
    compile_with(mingw, *defines, "-shared", "-static", *sources, *objects, "-o", tmp_path / "adtp_cpu.dll")


def test_the_library_for_windows_runs(mingw, wine, tmp_path):
    """As zig compiles it: attention and products at every level that this processor has, called by programs of another compiler."""
    library = operators.COMPILED / "windows-x86_64" / "adtp_cpu.dll"
    portable = [CPU / name for name in OPERATORS if "neon" not in name]
    said = {}
    for name, calls in (("operators_check", ["60"]), ("linear_check", [])):
        check, built = ROOT / "tests" / "plugins" / f"{name}.cpp", tmp_path / f"{name}.exe"
        compile_with(mingw, '-DADTP_SOURCES="x"', "-static", f"-I{CPU}", *portable, check, "-o", built)
        said[name] = lines([*wine, built, *calls, f"Z:{library}"], None)
    assert all(line.startswith("ok    ") for line in said["operators_check"])
    assert said["operators_check"][-1].startswith("ok    portable: 60 calls")
    assert said["linear_check"][-1] == "portable"


def test_windows_compiles_the_host(mingw, host_with_headers, tmp_path):
    place, table = host_with_headers.sources, tmp_path / "kernels.cpp"
    table.write_text(library.kernels_cpp(), encoding="ascii")
    include = (f"-I{place}", "-isystem", host_with_headers.headers, "-isystem", place / "shim")
    sources = (*(place / name for name in PLUGIN), table)
    compile_with(mingw, "-shared", "-static", *include, *sources, "-o", tmp_path / "adtp_plugins.dll")
    exported = subprocess.run(["strings", tmp_path / "adtp_plugins.dll"], capture_output=True, text=True, check=True)
    assert {"getCreators", "setLoggerFinder"} <= set(exported.stdout.split())


@pytest.mark.parametrize("compiler", ["aarch64", "mingw"])
def test_the_runner_compiles(compiler, request, tmp_path):
    table = tmp_path / "embedded.cpp"
    table.write_text(shipped.kernels_cpp(shipped.names()[:1]), encoding="ascii")
    sources = [library.SOURCES / name for name in RUNNER]
    end = ["-static"] if compiler == "mingw" else ["-fPIC", "-ldl"]
    name = request.getfixturevalue(compiler)
    compile_with(name, "-shared", f"-I{library.SOURCES}", *sources, table, *end, "-o", tmp_path / "built")
