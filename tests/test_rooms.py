"""The tree reads in the order data flows: a module imports only from rooms above its own."""

import ast
import re
import subprocess
import sys
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "adtp_export"
TOP_LEVEL = {room: ROOT / room for room in ("calibration", "plugins")}  # rooms of the package that lie beside it
ROOMS = [
    "errors",
    "options",
    "contract",
    "environment",
    "io",
    "artifacts",
    "data",
    "ops",
    "plugins",
    "model",
    "imports",
    "graph",
    "calibration",
    "runtimes",
    "targets",
    "inference",
    "explain",
    "training",
    "verify",
    "benchmarking",
    "integrations",
    "report",
    "pipeline",
    "cli",
]

MAX_LINES, MAX_FUNCTION_LINES, MAX_PARAMETERS, MAX_POSITIONAL_FIELDS = 400, 60, 7, 4
LONG_FUNCTIONS = {
    "plugins/encoder/cut.py:choice",
    "plugins/encoder/cut.py:scores",
    "plugins/encoder/grouped.py:grouped_attention",
    "plugins/encoder/grouped.py:grouped_received",
    "plugins/encoder/prenorm.py:turn",
    "plugins/encoder/product.py:product",
    "plugins/kernel.py:ragged_attention",
}
"""Kernels: one loop that a compiler wants whole."""
WIDE_FUNCTIONS = {
    "plugins/encoder/anchor.py:anchor",
    "plugins/encoder/cut.py:above",
    "plugins/encoder/cut.py:choice",
    "plugins/encoder/cut.py:normalize",
    "plugins/encoder/cut.py:scores",
    "plugins/encoder/cut.py:share",
    "plugins/encoder/cut.py:skim",
    "plugins/encoder/grouped.py:grouped_attention",
    "plugins/encoder/grouped.py:grouped_received",
    "plugins/encoder/head.py:pool",
    "plugins/encoder/head.py:put_back",
    "plugins/encoder/head.py:spread",
    "plugins/encoder/ids.py:embed",
    "plugins/encoder/ids.py:unpad",
    "plugins/encoder/norm.py:add_norm",
    "plugins/encoder/prenorm.py:add_rms",
    "plugins/encoder/prenorm.py:gated",
    "plugins/encoder/prenorm.py:look_up",
    "plugins/encoder/prenorm.py:turn",
    "plugins/encoder/product.py:product",
    "plugins/kernel.py:ragged_attention",
    "plugins/kernel.py:received_attention",
    "plugins/pytorch.py:attend",
    "plugins/pytorch.py:attend_received",
}
"""Operators take what their definition says."""


def modules():
    """Each module's path, with its place in the package."""
    for path in sorted(PACKAGE.rglob("*.py")):
        yield path, path.relative_to(PACKAGE).parts
    for room, directory in TOP_LEVEL.items():
        found = sorted([*directory.glob("*.py"), *directory.glob("encoder/*.py")])
        yield from ((path, (room, *path.relative_to(directory).parts)) for path in found)


def room_of(parts):
    return parts[0].removesuffix(".py")


def module_name(parts):
    """A module's name in the package; that of a package is its `__init__`'s."""
    return ("adtp_export", *(part for part in (*parts[:-1], parts[-1].removesuffix(".py")) if part != "__init__"))


def imported_modules(path, here, known):
    """The modules of the package that one imports: at its top, inside functions, and for type checkers alone."""
    package = ["adtp_export", *here[:-1]]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            full = (*base, *(node.module or "").split(".")) if node.module else tuple(base)
            named = [(*full, alias.name) if (*full, alias.name) in known else full for alias in node.names]
        elif isinstance(node, ast.Import):
            named = [tuple(alias.name.split(".")) for alias in node.names]
        else:
            continue
        yield from (name for name in named if name in known)


def imports():
    """Each module's name, with those that it imports."""
    known = {module_name(parts) for _, parts in modules()}
    return {module_name(parts): set(imported_modules(path, parts, known)) for path, parts in modules()}


def test_modules_import_only_from_rooms_above():
    order = {("adtp_export",): len(ROOMS)} | {("adtp_export", room): number for number, room in enumerate(ROOMS)}
    below = [
        f"{'.'.join(name)} imports {'.'.join(other)}"
        for name, others in imports().items()
        for other in others - {("adtp_export",)}
        if order[other[:2]] > order[name[:2]]
    ]
    assert not below


def test_no_modules_import_each_other_in_a_circle():
    graph = {name: others - {name} for name, others in imports().items()}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(" imports ".join(".".join(name) for name in reversed(error.args[1])))


def test_every_module_has_a_room():
    assert {room_of(parts) for _, parts in modules()} - {"__init__"} == set(ROOMS)


def test_the_design_page_lists_the_rooms_in_order():
    page = (ROOT / "docs" / "design.md").read_text(encoding="utf-8")
    (section,) = re.findall(r"^## Rooms\n(.*?)^## ", page, re.MULTILINE | re.DOTALL)
    assert re.findall(r"^\| `(\w+)` \| .+ \|$", section, re.MULTILINE) == ROOMS


def functions():
    """Each function with its module's place and its node."""
    for path, parts in modules():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                yield f"{'/'.join(parts)}:{node.name}", node


def test_files_and_functions_are_short():
    scripts = [path for room in ("tests", "benchmarks", "demo") for path in (ROOT / room).rglob("*.py")]
    files = [*(path for path, _ in modules()), *scripts]
    assert [str(path) for path in files if len(path.read_text().splitlines()) > MAX_LINES] == []
    long = {name for name, node in functions() if node.end_lineno - node.lineno + 1 > MAX_FUNCTION_LINES}
    assert long == LONG_FUNCTIONS


def test_functions_have_few_parameters():
    def parameters(node):
        return [a for a in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs) if a.arg != "self"]

    operators = ("ops/", "plugins/examples/")
    wide = {n for n, node in functions() if len(parameters(node)) > MAX_PARAMETERS and not n.startswith(operators)}
    assert wide == WIDE_FUNCTIONS


def test_records_of_many_fields_are_made_by_keyword():
    positional = []
    for path, parts in modules():
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.ClassDef):
                continue
            marks = [ast.unparse(mark) for mark in node.decorator_list]
            fields = [field for field in node.body if isinstance(field, ast.AnnAssign)]
            if any("dataclass" in m and "kw_only" not in m for m in marks) and len(fields) > MAX_POSITIONAL_FIELDS:
                positional.append(f"{'/'.join(parts)}:{node.name}")
    assert not positional


@pytest.mark.parametrize(
    ("pattern", "home"),
    [
        (r"""["']bert\.|\.bert\.""", "model/backbones/bert.py"),
        (r"ratio_predictor", "model/pruners/adtp.py"),
    ],
)
def test_names_stay_in_their_house(pattern, home):
    """Weight names of a backbone or a pruner are known to its own file alone."""
    said = {"/".join(parts) for path, parts in modules() if re.search(pattern, path.read_text())}
    assert said == {home}


def test_no_namespace_leaves_the_commands():
    said = {"/".join(parts) for path, parts in modules() if "argparse" in path.read_text()}
    assert {name.split("/")[0] for name in said} == {"cli"}


def test_importing_the_package_is_light():
    code = "import adtp_export, sys; print(sorted({'torch', 'transformers', 'onnx', 'numpy'} & set(sys.modules)))"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "[]"
