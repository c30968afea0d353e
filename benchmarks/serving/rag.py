"""Vectors of other people's clients, as docs/rag.md says to use them, against those of `load`.

    python -m benchmarks.serving.rag NAME=MODEL_DIR [NAME=MODEL_DIR ...]

It writes records/rag.json. Each MODEL_DIR is a directory of sentence-transformers, and is exported in both layouts. Each recipe of the
page runs as it is written, in an environment of its own with what its section installs, on top of the packages of this one. Versions
are those of tests/environments/constraints-rag.txt, and of examples/package-lock.json. Clients come from PyPI and npm.

Short texts are those that exports are verified on; long ones are more than the model reads. Nothing is timed.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import site
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness.records import RECORDS, ROOT, claim, told, write

PAGE = ROOT / "docs" / "rag.md"
CONSTRAINTS = ROOT / "tests" / "environments" / "constraints-rag.txt"
OUT, TEXTS = "MODEL-export", '["a wonderful film", "the soup was cold"]'
"""What each recipe calls the model and the texts."""
MISSING = ("No matching distribution", "ENOTFOUND", "ECONNREFUSED", "ETIMEDOUT", "EAI_AGAIN")
"""What installers say where there is no network."""


class NotInstalledError(Exception):
    """An environment could not be made."""


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A section of the page. packages: of PyPI, beside this project; for JavaScript there are those of `examples/`."""

    language: str
    code: str
    packages: tuple[str, ...]


def recipes() -> dict[str, Recipe]:
    """Return the recipes of the page by their headings: its code that makes vectors of MODEL-export."""
    found = {}
    for section in re.split(r"^##+ ", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]:
        installed = re.findall(r"^pip install (.*)$", section, re.MULTILINE)
        packages = tuple(word for line in installed for word in line.split() if "adtp-export" not in word)
        for language, code in re.findall(r"```(python|js)\n(.*?)```", section, re.DOTALL):
            if "MODEL-export" in code:
                found[section.partition("\n")[0]] = Recipe(language=language, code=code, packages=packages)
    return found


def environment(recipe: Recipe, folder: Path) -> Path:
    """Install what a recipe needs; return what runs it.

    Raises:
        NotInstalledError: Node is missing, or a network.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if recipe.language == "js":
        if shutil.which("npm") is None:
            raise NotInstalledError("Node is not installed")
        for name in ("package.json", "package-lock.json"):
            shutil.copy(ROOT / "examples" / name, folder)
        _install(["npm", "ci", "--ignore-scripts", "--no-audit", "--no-fund"], folder)
        return Path("node")
    venv = folder / "venv"
    subprocess.run([sys.executable, "-m", "venv", venv], check=True)
    python = venv / "bin" / "python"
    (packages,) = venv.glob("lib/python*/site-packages")
    outer = "".join(f"import site; site.addsitedir({folder!r})\n" for folder in site.getsitepackages())
    (packages / "outer.pth").write_text(outer, encoding="utf-8")  # torch is not installed again
    _install([python, "-m", "pip", "install", "-q", "-c", CONSTRAINTS, *recipe.packages], folder)
    return python


def _install(command: list[Any], folder: Path) -> None:
    result = subprocess.run([*map(str, command)], cwd=folder, capture_output=True, text=True, check=False)
    if any(word in result.stderr for word in MISSING):
        raise NotInstalledError(f"the environment could not be made: {result.stderr.strip()[-300:]}")
    if result.returncode:
        raise RuntimeError(result.stderr[-3000:])


def run(recipe: Recipe, program: Path, folder: Path, out: Path, texts: list[str]) -> np.ndarray:
    """Run a recipe on a model in a folder; return its vectors ``(texts, D)``."""
    link = folder / OUT
    link.unlink(missing_ok=True)
    link.symlink_to(out.resolve())
    assert recipe.code.count(TEXTS) == 1
    dimension = json.loads((out / "config.json").read_text(encoding="utf-8"))["adtp"]["dimension"]
    code = recipe.code.replace(TEXTS, json.dumps(texts, ensure_ascii=False))
    code = re.sub(r"\bdim=\d+", f"dim={dimension}", code)
    if recipe.language == "js":
        code += '\nimport { writeFileSync } from "node:fs";\nwriteFileSync("vectors.json", JSON.stringify(vectors));\n'
    else:
        code += "\nimport json\nimport numpy\n"
        code += "json.dump(numpy.array([*vectors], float).tolist(), open('vectors.json', 'w'))\n"
    script = folder / f"recipe.{'mjs' if recipe.language == 'js' else 'py'}"
    script.write_text(code, encoding="utf-8")
    settings = {**os.environ, "HF_HUB_OFFLINE": "1", "ANONYMIZED_TELEMETRY": "False"}
    result = subprocess.run(
        [program, script.name], cwd=folder, capture_output=True, text=True, check=False, env=settings
    )
    if result.returncode:
        raise RuntimeError(result.stderr[-3000:])
    return np.array(json.loads((folder / "vectors.json").read_text(encoding="utf-8")))


def cosines(found: np.ndarray, expected: np.ndarray) -> np.ndarray:
    """Return the cosine of each vector and the one that is expected."""
    if found.shape != expected.shape:
        raise RuntimeError(f"vectors are {found.shape} and not {expected.shape}")
    lengths = np.linalg.norm(found, axis=1) * np.linalg.norm(expected, axis=1)
    cosines: np.ndarray = (found * expected).sum(1) / lengths
    return cosines


def make_texts() -> dict[str, list[str]]:
    """Return short texts, and long ones."""
    from adtp_export.verify.samples import built_in_texts

    short = [str(text) for text in built_in_texts(pairs=False)]
    long = [" ".join(short[i:] * 8) for i in range(0, 18, 6)] + [short[-1] * 8, "Zürich 東京 naïve " * 200]
    return {"short": short[:-1], "long": long}


def measure(models: dict[str, Path], scratch: Path) -> list[dict[str, Any]]:
    """Export models, and run each recipe on each."""
    import adtp_export

    streams = make_texts()
    texts, limit = [*streams["short"], *streams["long"]], len(streams["short"])
    for name, model in models.items():
        for layout in ("plain", "hub"):
            adtp_export.export(model, scratch / f"{name}-{layout}", layout=layout, skip_parity_check=True)
    rows = []
    for number, (name, recipe) in enumerate(recipes().items()):
        folder = scratch / str(number)
        program = environment(recipe, folder)
        for model in models:
            out = scratch / f"{model}-{'hub' if recipe.language == 'js' else 'plain'}"
            reference = adtp_export.load(out)
            if not all(row.truncated for row in reference.kept(streams["long"])):
                raise RuntimeError(f"{model} reads a long text whole; make it longer")
            found = cosines(run(recipe, program, folder, out, texts), reference.encode(texts))
            row = {"client": name, "model": model}
            row |= {"short": round(float(found[:limit].min()), 6), "long": round(float(found[limit:].min()), 6)}
            rows.append(row | {"versions": _versions(recipe, program)})
            print(rows[-1], file=sys.stderr)
    return rows


def _versions(recipe: Recipe, program: Path) -> dict[str, str]:
    if recipe.language == "js":
        lock = json.loads((ROOT / "examples" / "package-lock.json").read_text(encoding="utf-8"))
        name = "@huggingface/transformers"
        return {name: lock["packages"][f"node_modules/{name}"]["version"]}
    code = "import importlib.metadata as m, sys; print(*map(m.version, sys.argv[1:]))"
    said = subprocess.run([program, "-c", code, *recipe.packages], capture_output=True, text=True, check=True).stdout
    return dict(zip(recipe.packages, said.split()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", metavar="NAME=MODEL_DIR", nargs="+")
    models = {name: Path(place) for name, _, place in (word.partition("=") for word in parser.parse_args().models)}
    out = claim(RECORDS / "rag.json")
    with tempfile.TemporaryDirectory() as scratch:
        rows = measure(models, Path(scratch))
    texts = {name: len(listed) for name, listed in make_texts().items()}
    write(out, {"results": rows, "texts": texts, **told()})


if __name__ == "__main__":
    main()
