"""The tree reads in the order data flows: a module imports only from rooms above its own."""

import ast
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import tomllib

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "adtp_export"
TOP_LEVEL = {room: ROOT / room for room in ("calibration", "plugins")}  # rooms of the package that lie beside it
ROOMS = [
    "errors",
    "records",
    "text",
    "ops",
    "plugins",
    "model",
    "training",
    "export",
    "calibration",
    "engines",
    "verify",
    "latency",
    "report",
    "cli",
]


def modules():
    """Each module's path, with its place in the package."""
    for path in sorted(PACKAGE.rglob("*.py")):
        yield path, path.relative_to(PACKAGE).parts
    for room, directory in TOP_LEVEL.items():
        yield from ((path, (room, path.name)) for path in sorted(directory.glob("*.py")))


def room_of(parts):
    return parts[0].removesuffix(".py")


def imported_rooms(path, here):
    package = ["adtp_export", *here[:-1]]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            full = [*base, *(node.module or "").split(".")] if node.module else base
            if full[:1] == ["adtp_export"]:
                names = full[1:2] or [alias.name for alias in node.names]
                yield from (name for name in names if name in ROOMS)
        elif isinstance(node, ast.Import):
            yield from (a.name.split(".")[1] for a in node.names if a.name.startswith("adtp_export."))


def test_modules_import_only_from_rooms_above():
    wrong = []
    for path, parts in modules():
        if parts == ("__init__.py",):
            continue
        own = ROOMS.index(room_of(parts))
        wrong += [
            f"{'/'.join(parts)} imports {room}" for room in imported_rooms(path, parts) if ROOMS.index(room) > own
        ]
    assert not wrong


def test_every_module_has_a_room():
    assert {room_of(parts) for _, parts in modules()} - {"__init__"} == set(ROOMS)


def test_every_room_is_packaged():
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    expected = {".".join(("adtp_export", *parts[:-1])) for _, parts in modules() if parts[-1] == "__init__.py"}
    assert set(settings["packages"]) == expected


def test_the_wheel_has_every_module_and_the_compiled_kernels(tmp_path):
    ignored = shutil.ignore_patterns(".*", "build", "tests", "*-export", "lib", "*.egg-info", "__pycache__")
    shutil.copytree(ROOT, tmp_path / "source", ignore=ignored)
    arguments = ("--no-deps", "--no-build-isolation", "--quiet", "--wheel-dir", tmp_path)
    subprocess.run([sys.executable, "-m", "pip", "wheel", tmp_path / "source", *arguments], check=True)
    names = set(zipfile.ZipFile(next(tmp_path.glob("*.whl"))).namelist())
    assert {"/".join(("adtp_export", *parts)) for _, parts in modules()} <= names
    shipped = [p.relative_to(ROOT) for kind in ("kernels", "cpp") for p in (ROOT / "plugins" / kind).rglob("*.*")]
    assert {f"adtp_export/{path.as_posix()}" for path in shipped} <= names


def test_importing_the_package_is_light():
    code = "import adtp_export, sys; print(sorted({'torch', 'transformers', 'onnx', 'numpy'} & set(sys.modules)))"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "[]"
