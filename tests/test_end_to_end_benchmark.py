"""`benchmarks/cpu/end_to_end.py`: what it concludes from known times, and in `make test-all` a whole run on tiny models."""

import json
import subprocess
import sys

import pytest
from testbed import DEMO, ROOT

from benchmarks.cpu import end_to_end
from benchmarks.render import cpu

OURS = end_to_end.OURS


def taken(answer, model):
    each = [{"seconds": s, "cpu_seconds": 2 * s} for s in (answer, model)]
    return {"batch": 32, "answer": each[:1] * 6, "model": each[1:] * 6, "ms": [1.0, 2.0, 3.0]}


def test_what_is_left_of_the_speedup_of_the_model_alone():
    """Ours takes 1.1 s, of which the model is 1.0; the peer 2.1 and 2.0. So 21/11 is left of 2."""
    ours, peer = end_to_end.rows("sst2", {OURS: taken(1.1, 1.0), "openvino-12": taken(2.1, 2.0)}, texts=100)
    assert (ours["left"], ours["left_low"], ours["left_high"], ours["times_ours"]) == (1.0, 1.0, 1.0, 1.0)
    assert (peer["times_ours"], peer["model_times_ours"], peer["left"]) == (1.909, 2.0, 0.955)
    assert (ours["texts_per_s"], ours["texts_per_cpu_s"], ours["model_texts_per_s"]) == (90.91, 45.45, 100.0)
    assert (peer["p50_ms"], peer["p99_ms"], peer["requests"]) == (2.0, 2.98, 3)


@pytest.mark.parametrize(("seconds", "pairs"), [(0, 2), (50, 4)])
def test_neither_measure_comes_first_more_often(seconds, pairs):
    """Every run takes longer than the one before it, so the mean of the one that came second more often would be larger."""
    asked = []

    class Slower:
        def ask(self, **command):
            asked.append(command["what"])
            return {"seconds": len(asked), "cpu_seconds": 0}

    found = end_to_end.turn(Slower(), "sst2", 32, seconds)
    assert asked == ["answer", "model", *["answer", "model", "model", "answer"] * (pairs // 2)]
    assert found["answer"]["seconds"] == found["model"]["seconds"]


def test_the_table_says_what_is_shown_to_be_left():
    found = {OURS: taken(1.1, 1.0), "openvino-12": taken(2.1, 2.0), "ctranslate2-6": taken(1.5, 1.5)}
    found["ctranslate2-6"]["answer"] = [{"seconds": s, "cpu_seconds": s} for s in (1.4, 1.5, 1.5, 1.5, 1.5, 1.6)]
    record = {
        "results": end_to_end.rows("sst2", found, texts=100),
        "left_out": {"optimum-6": "No module named 'optimum'"},
        "student": {"target": "onnxruntime-cpu-fp32"},
        "texts": {"sst2": 100},
        "rounds": 6,
        "device": {"model": "a CPU", "cores": 2},
        "versions": {"onnxruntime": "1"},
        "optimum": {},
    }
    told = cpu.render_end_to_end(record)
    assert "| sst2 | adtp-export | 32 | 90.9 | 45.5 | 2.0 / 3.0 |  |  |  |" in told
    assert (
        "| sst2 | ctranslate2-6 | 32 | 66.7 | 66.7 | 2.0 / 3.0 | 1.36 ± 0.09 | 1.50 ± 0.00 | 0.91 (0.85 to 0.97) |"
        in told
    )
    assert "1 of 2 lines are shown to keep at least 0.95 of the speedup, and 0 to keep less." in told
    assert "Not measured: optimum-6 (No module named 'optimum')." in told


@pytest.mark.slow
def test_a_run_on_tiny_models(tmp_path, has_openvino, has_ctranslate2):
    """Peers of one depth answer the same; optimum is not in this environment, and is named."""
    (tmp_path / "short.txt").write_text("\n".join(f"a film that is {'so ' * (i % 7)}good" for i in range(12)))
    (tmp_path / "long.txt").write_text("\n".join("the soup was cold and the bill was not " * (i + 1) for i in range(4)))
    words = {
        "shape": ["bert-mini"],
        "layers": [1],
        "full": [2],
        "rounds": [6],
        "seconds": [0],
        "texts": [12, 4],
        "requests": [2, 2],
    }
    typed = [str(word) for name, values in words.items() for word in (f"--{name}", *values)]
    files = ["--sst2", tmp_path / "short.txt", "--news", tmp_path / "long.txt", "--out", tmp_path / "record.json"]
    command = [sys.executable, "-m", "benchmarks.cpu.end_to_end", DEMO, *typed, *files]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    record = json.loads((tmp_path / "record.json").read_text())
    kinds = [f"{kind}-{depth}" for kind in ("transformers", "openvino", "ctranslate2") for depth in (2, 1)]
    assert [row["contender"] for row in record["results"]] == 2 * [OURS, *kinds]
    assert all("optimum" in why for why in record["left_out"].values())
    assert list(record["left_out"]) == ["optimum-2", "optimum-1"]
    assert record["student"]["target"].startswith("onnxruntime-cpu-fp32")
