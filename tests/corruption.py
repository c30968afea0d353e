"""Corrupt what the readers read, and see that each case ends in one clear message or in the right answer: a script.

    python tests/corruption.py READER FOLDER SOURCE ... --cases N [--seed S]

SOURCE is a good input of the READER, a file or a directory; FOLDER is where copies are broken, N of each source. Prints one JSON
object: cases, how many were refused, what was wrong in any, and the peak of memory. A case that hangs for a minute ends the script.
"""

from __future__ import annotations

import argparse
import faulthandler
import itertools
import json
import os
import random
import resource
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from adtp_export.errors import AdtpError

TEXTS = ["a wonderful film", "the soup was terrible , and the sound is awful", ("one", "two"), ""]
TARGET = "onnxruntime-cpu-fp32"
MAX_SECONDS, MAX_BYTES = 60, 2**31
HUGE = "9" * 5000
TOKENIZER = Path(__file__).parents[1] / "demo" / "student" / "tokenizer.json"
NASTY = (
    None, True, -1, 0, 1, 2**31, 2**63, 10**400, 1e308, -0.5, float("nan"), "", "x", "x" * 100_000, "\ud800", "\x1b[2J", "../../x",
    [], [[]], {}, {"a": {}}, [None], ["x"] * 1000, {"0": "x", "1": "x"}, 1_000_000,
)  # fmt: skip


def flip(data: bytes, draw: random.Random) -> bytes:
    changed = bytearray(data)
    for _ in range(draw.choice([1, 1, 1, 8])):
        if changed:
            changed[draw.randrange(len(changed))] ^= 1 << draw.randrange(8)
    return bytes(changed)


def cut(data: bytes, draw: random.Random) -> bytes:
    return data[: draw.randrange(len(data) + 1)]


def leave_out(data: bytes, draw: random.Random) -> bytes:
    begin = draw.randrange(len(data) + 1)
    return data[:begin] + data[begin + draw.choice([1, 7, 1000]) :]


def repeat(data: bytes, draw: random.Random) -> bytes:
    begin = draw.randrange(len(data) + 1)
    return data[:begin] + data[begin : begin + draw.choice([1, 50, 5000])] + data[begin:]


def insert(data: bytes, draw: random.Random) -> bytes:
    begin = draw.randrange(len(data) + 1)
    what = [
        b"\0",
        b"\xff\xfe",
        draw.randbytes(9),
        b"[" * 5000,
        HUGE.encode(),
        b'"',
        b"\n",
        b"&a [*a,*a]",
        b"a." * 20_000 + b"a = 1\n",
        b"a" * 300_000,
        "\u4f60\u597d".encode() * 50_000,
        b"\x1b[2J",
        b",,\t\t",
    ]
    return data[:begin] + draw.choice(what) + data[begin:]


def blank(data: bytes, draw: random.Random) -> bytes:
    begin = draw.randrange(len(data) + 1)
    n = min(draw.choice([1, 16, 4096]), len(data) - begin)
    return data[:begin] + bytes(n) + data[begin + n :]


def edit_json(data: bytes, draw: random.Random) -> bytes:
    """Change one value of a JSON document, or take it away."""
    try:
        document = json.loads(data)
    except ValueError:
        return flip(data, draw)
    places: list[tuple[Any, Any]] = []

    def collect(value: Any) -> None:
        keys = list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
        for key in draw.sample(list(keys), min(len(keys), 40)):
            places.append((value, key))
            collect(value[key])

    collect(document)
    if places:
        inner, key = draw.choice(places)
        if draw.random() < 0.2:
            del inner[key]
        else:
            inner[key] = draw.choice(NASTY)
    text = json.dumps(document)
    return (text.replace("1000000", HUGE) if draw.random() < 0.02 else text).encode("utf-8", "surrogatepass")


def multiply(data: bytes, draw: random.Random) -> bytes:
    """Have the normalizer of a tokenizer make many characters of one, in several steps."""
    content = draw.choice("aeio") * draw.choice([2, 8, 100])
    step = {"type": "Replace", "pattern": {"String": content[0]}, "content": content}
    try:
        changed = {**json.loads(data), "normalizer": {"type": "Sequence", "normalizers": [step] * draw.choice([4, 12])}}
    except ValueError:
        return flip(data, draw)
    return json.dumps(changed).encode()


BYTES: tuple[Callable[[bytes, random.Random], bytes], ...] = (flip, cut, leave_out, repeat, insert, blank)


def corrupt(path: Path, draw: random.Random) -> str:
    """Break one file, or what stands in its place; return how."""
    how = draw.random()
    if how < 0.9:
        change = edit_json if path.suffix == ".json" and draw.random() < 0.6 else draw.choice(BYTES)
        if path.name == "tokenizer.json" and draw.random() < 0.2:
            change = multiply
        path.write_bytes(change(path.read_bytes(), draw))
        return f"{change.__name__} {path.name}"
    path.unlink()
    place = draw.choice(["nothing", "empty", "directory", "pipe", "loop", "device"])
    if place == "empty":
        path.touch()
    elif place == "directory":
        path.mkdir()
    elif place == "pipe":
        os.mkfifo(path)
    elif place in ("loop", "device"):
        path.symlink_to(path if place == "loop" else "/dev/zero")
    return f"{place} for {path.name}"


def read_checkpoint(source: Path) -> Any:
    from adtp_export.imports import ReadOptions, open_checkpoint

    open_checkpoint(source, ReadOptions(allow_pickle=True))


def read_original(source: Path) -> Any:
    """Read a checkpoint of another system, named after it, or a file of lengths."""
    from adtp_export.imports import ReadOptions, lengths, open_checkpoint

    if source.suffix == ".txt":
        lengths.read_lengths(source, 6)
        return
    stored = next((path for name in ("length_config.txt", "log_file.txt") if (path := source / name).exists()), None)
    padded = 16 if source.name == "ltp" else None
    open_checkpoint(source, ReadOptions(allow_pickle=True, padded_length=padded, length_config=stored))


def read_out(source: Path) -> Any:
    from adtp_export import load

    return [answer.scores for answer in load(source, TARGET, threads=1)(TEXTS)]


def read_text(source: Path) -> Any:
    from tokenizers import Tokenizer

    from adtp_export.data.readers import read_rows
    from adtp_export.data.tokenize import encode

    tokenizer = Tokenizer.from_file(str(TOKENIZER))
    for text, _ in read_rows(source, None, None if ".txt" in source.name else "label"):
        encode(tokenizer, [text], 16)


def read_recipe(source: Path) -> Any:
    from adtp_export.calibration.recipes import read

    read(source)


def read_settings(source: Path) -> Any:
    from adtp_export.training.settings import TrainOptions, read_settings

    TrainOptions(**read_settings(source))


READERS = {
    "checkpoint": read_checkpoint,
    "originals": read_original,
    "out": read_out,
    "text": read_text,
    "recipe": read_recipe,
    "settings": read_settings,
}


def run(reader: str, sources: list[Path], folder: Path, cases: int, seed: int) -> dict[str, Any]:
    read, wrong, refused = READERS[reader], [], 0
    expected = {source: read(source) for source in sources}
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    used = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    resource.setrlimit(resource.RLIMIT_AS, (used + MAX_BYTES, -1))
    for source, case in itertools.product(sources, range(cases)):
        draw = random.Random(f"{reader} {seed} {case}")
        broken = folder / source.name
        shutil.copytree(source, broken) if source.is_dir() else shutil.copyfile(source, broken)
        files = sorted(path for path in broken.rglob("*") if path.is_file()) if broken.is_dir() else [broken]
        how = corrupt(draw.choice(files), draw)
        (folder / "case").write_text(f"{case}: {how}")
        faulthandler.dump_traceback_later(MAX_SECONDS, exit=True)
        try:
            if (found := read(broken)) != expected[source]:
                wrong.append(f"case {case}, {how}: answered {str(found)[:200]}")
        except AdtpError as error:
            refused += 1
            if len(str(error)) > 1500 or "\x1b" in str(error):
                wrong.append(f"case {case}, {how}: {len(str(error))} characters: {str(error)[:300]!r}")
        except BaseException as error:
            wrong.append(f"case {case}, {how}: {type(error).__name__}: {str(error)[:300]}")
        faulthandler.cancel_dump_traceback_later()
        shutil.rmtree(broken) if broken.is_dir() and not broken.is_symlink() else broken.unlink(missing_ok=True)
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before
    return {"cases": cases * len(sources), "refused": refused, "wrong": wrong, "grown_bytes": grown}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("reader", choices=READERS)
    parser.add_argument("folder", type=Path)
    parser.add_argument("source", type=Path, nargs="+")
    parser.add_argument("--cases", type=int, required=True)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    print(json.dumps(run(options.reader, options.source, options.folder, options.cases, options.seed)))


if __name__ == "__main__":
    main()
