"""The tree reads in the order data flows: a module imports only from rooms above its own."""

import ast
import subprocess
import sys
from pathlib import Path

PACKAGE = Path(__file__).parent.parent / "adtp_export"
ROOMS = ["errors", "records", "text", "ops", "model", "export", "engines", "verify", "latency", "report", "cli"]


def room_of(parts):
    return parts[0].removesuffix(".py")


def imported_rooms(path):
    here = path.relative_to(PACKAGE).parts
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
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).parts
        if parts == ("__init__.py",):
            continue
        own = ROOMS.index(room_of(parts))
        wrong += [f"{'/'.join(parts)} imports {room}" for room in imported_rooms(path) if ROOMS.index(room) > own]
    assert not wrong


def test_every_module_has_a_room():
    rooms = {room_of(p.relative_to(PACKAGE).parts) for p in PACKAGE.rglob("*.py")} - {"__init__"}
    assert rooms == set(ROOMS)


def test_importing_the_package_is_light():
    code = "import adtp_export, sys; print(sorted({'torch', 'transformers', 'onnx', 'numpy'} & set(sys.modules)))"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "[]"
