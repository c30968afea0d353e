"""Whatever is broken in a file that is read: one clear message or the right answer, in little time and memory.

`make test` breaks some 600 files, `make test-all` more than 5,000.
"""

import gzip
import json
import shutil

import pytest
from testbed import ROOT, run_cli, shared_or_skip

LINES = [(f"number {i} is , \u00e9 good", i % 2) for i in range(60)]
TABLES = {
    "rows.jsonl": "".join(json.dumps({"text": text, "label": label}) + "\n" for text, label in LINES),
    "rows.tsv": "text\tlabel\n" + "".join(f"{text}\t{label}\n" for text, label in LINES),
    "rows.csv": "text,label\n" + "".join(f'"{text}",{label}\n' for text, label in LINES),
    "rows.txt": "".join(text + "\n" for text, _ in LINES),
}
CASES = {"out": 60, "checkpoint": 100, "plain checkpoint": 50, "recipe": 75, "settings": 50, "originals": 15} | {
    f"text {name}": 50 for name in (*TABLES, "rows.tsv.gz")
}
SYSTEMS = ("ltp", "top", "transkimmer", "lat", "power")


@pytest.fixture
def source(request, tmp_path, reader):
    """A good input of the reader; of "originals" several, each of which is broken."""
    kind, _, name = reader.partition(" ")
    if kind == "out":
        return request.getfixturevalue("packed_export") / "out"
    if kind == "checkpoint":
        return request.getfixturevalue("small")
    if kind == "plain":
        return request.getfixturevalue("plain_bert")
    if kind == "recipe":
        return ROOT / "calibration" / "recipes" / "ort-cpu.int8.toml"
    if kind == "settings":
        path = tmp_path / "settings.yaml"
        path.write_text("base: bert-base-uncased\ntrain: a.tsv\nepochs: 2\nretention: [0.6]\nlearning-rate: 1e-4\n")
        return path
    if kind == "originals":
        lengths = tmp_path / "log_file.txt"
        lengths.write_text("searched\nRetention Configuration :[40, 30, 24, 16, 11, 6]\ndone\n")
        folders = {name: shared_or_skip(f"originals/{name}") / "checkpoint" for name in SYSTEMS}
        return [lengths, *(shutil.copytree(folder, tmp_path / name) for name, folder in folders.items())]
    path = tmp_path / name
    text = TABLES[name.removesuffix(".gz")].encode()
    path.write_bytes(gzip.compress(text) if name.endswith(".gz") else text)
    return path


def break_files(reader, source, folder, cases, seed=0):
    name = reader.split()[-1] if reader.startswith("plain") else reader.split()[0]
    sources = source if isinstance(source, list) else [source]
    done = run_cli("corruption", name, folder, *sources, "--cases", cases, "--seed", seed)
    assert done.returncode == 0, f"at case {(folder / 'case').read_text()}\n{done.stderr[-2000:]}"
    found = json.loads(done.stdout)
    assert found["wrong"] == []
    assert found["refused"] > found["cases"] / 10  # what is broken matters
    assert found["grown_bytes"] < 2**31


@pytest.mark.parametrize("reader", [pytest.param(c, marks=pytest.mark.slow) if c == "originals" else c for c in CASES])
def test_broken_files_end_in_one_message_or_the_right_answer(reader, source, tmp_path):
    (tmp_path / "broken").mkdir()
    break_files(reader, source, tmp_path / "broken", CASES[reader])


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("reader", CASES)
def test_many_broken_files_end_so(reader, source, tmp_path):
    (tmp_path / "broken").mkdir()
    break_files(reader, source, tmp_path / "broken", 7 * CASES[reader], seed=1)
