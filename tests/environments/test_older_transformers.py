"""The older transformers line and optimum, in an environment of their own that this file makes (and reuses)."""

import fcntl
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from plain_models import export_unverified, write_pruned
from testbed import DEMO, ROOT

import adtp_export
from adtp_export.runtimes.onnxruntime import OnnxRuntimeEngine

HERE = Path(__file__).parent
CONSTRAINTS = HERE / "constraints-optimum.txt"
ENVIRONMENT = ROOT / ".venv-optimum"
TEXTS = ["a wonderful film", "the soup was cold , the waiter was rude and nobody cared", "not bad at all", "fine"]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def python():
    """Interpreter of the second environment, made by one worker while others wait."""
    lock = ROOT / "build" / "optimum.lock"
    lock.parent.mkdir(exist_ok=True)
    with lock.open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        return make_environment()


def make_environment():
    """Made on first use, made anew when the constraints change."""
    interpreter = ENVIRONMENT / "bin" / "python"
    stamp = ENVIRONMENT / "installed.txt"
    if not stamp.exists() or stamp.read_text() != CONSTRAINTS.read_text():
        subprocess.run([sys.executable, "-m", "venv", "--clear", ENVIRONMENT], check=True)
        packages = [
            "optimum-onnx",
            "sentence-transformers",
            "transformers",
            "onnxruntime",
            "onnxscript",
            "msgspec",
            "rich",
            "pytest",
            "pytest-timeout",
        ]
        install = [interpreter, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "-c", CONSTRAINTS]
        for arguments in (["torch"], packages):
            result = subprocess.run([*install, *arguments], capture_output=True, text=True, check=False)
            if result.returncode:
                pytest.skip(f"the environment for optimum could not be made: {result.stderr.strip()[-300:]}")
        stamp.write_text(CONSTRAINTS.read_text())
    return interpreter


@pytest.fixture(scope="module", autouse=True)
def package(tmp_path_factory):
    """The package with its top-level rooms in place, for an environment that it is not installed in."""
    global PACKAGE
    PACKAGE = tmp_path_factory.mktemp("as-installed")
    (PACKAGE / "adtp_export").mkdir()
    for child in (*(ROOT / "adtp_export").iterdir(), ROOT / "calibration", ROOT / "plugins"):
        (PACKAGE / "adtp_export" / child.name).symlink_to(child)


def run(python, code, *arguments, project=True):
    environment = {**os.environ, "PYTHONPATH": str(PACKAGE) if project else ""}
    command = [str(python), "-c", code, *map(str, arguments)]
    result = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, cwd=ENVIRONMENT)
    assert result.returncode == 0, result.stderr[-3000:]
    return result.stdout


def test_optimum_answers_the_same_without_us(python, exported):
    code = """
import json, sys
from optimum.onnxruntime import ORTModelForSequenceClassification
from transformers import AutoTokenizer, pipeline
model = ORTModelForSequenceClassification.from_pretrained(sys.argv[1])
answers = pipeline("text-classification", model=model, tokenizer=AutoTokenizer.from_pretrained(sys.argv[1]))(
    json.loads(sys.argv[2]), batch_size=3)
assert not any(name.startswith("adtp") for name in sys.modules)
print(json.dumps(answers))
"""
    answers = json.loads(run(python, code, exported, json.dumps(TEXTS), project=False).splitlines()[-1])
    for expected, answer in zip(adtp_export.load(exported)(TEXTS), answers):
        assert answer["label"] == expected.label
        assert answer["score"] == pytest.approx(expected.score, abs=1e-5)


def test_optimum_tags_finds_and_embeds_the_same_without_us(python, tagger, answerer, embedder):
    """What its classes read of three heads, against what our own engine gives for the same batch."""
    code = """
import json, sys
import numpy as np, torch
import optimum.onnxruntime as ort
names = {
    "ORTModelForTokenClassification": ["logits"],
    "ORTModelForQuestionAnswering": ["start_logits", "end_logits"],
    "ORTModelForFeatureExtraction": ["last_hidden_state"],
}
for (name, outputs), out in zip(names.items(), sys.argv[2:]):
    batch = {name: torch.tensor(rows) for name, rows in json.loads(sys.argv[1]).items()}
    found = getattr(ort, name).from_pretrained(out)(**batch)
    print(json.dumps([np.asarray(found[output]).tolist() for output in outputs]))
assert not any(name.startswith("adtp") for name in sys.modules)
"""
    ids = np.random.default_rng(0).integers(5, 1000, (3, 9))
    mask = (np.arange(9) < np.array([[9], [4], [1]])).astype(np.int64)
    batch = {"input_ids": ids * mask, "attention_mask": mask, "token_type_ids": 0 * ids}
    outs = [out for _, out in (tagger, answerer, embedder)]
    told = json.dumps({name: rows.tolist() for name, rows in batch.items()})
    lines = run(python, code, told, *outs, project=False).splitlines()[-3:]
    for out, line in zip(outs, lines, strict=True):
        engine = OnnxRuntimeEngine(out / "model.onnx")
        found, own = json.loads(line), engine.run(batch)
        wanted = [name for name in engine.outputs if name != "sentence_embedding"]
        for values, name in zip(found, wanted, strict=True):
            np.testing.assert_allclose(np.array(values), own[name], atol=1e-5)


def test_both_find_the_files_of_the_hub_layout(python, small, embedder, tmp_path):
    """By their own defaults: nobody names a file."""
    adtp_export.export(small, tmp_path / "labels", layout="hub", skip_parity_check=True)
    adtp_export.export(embedder[0], tmp_path / "vectors", layout="hub", skip_parity_check=True)
    code = """
import json, sys
from optimum.onnxruntime import ORTModelForSequenceClassification
from sentence_transformers import SentenceTransformer
from transformers import AutoTokenizer, pipeline
labels, vectors, texts = *sys.argv[1:3], json.loads(sys.argv[3])
classify = pipeline(
    "text-classification", ORTModelForSequenceClassification.from_pretrained(labels), tokenizer=AutoTokenizer.from_pretrained(labels))
embed = SentenceTransformer(vectors, backend="onnx", device="cpu")
print(json.dumps([[answer["score"] for answer in classify(texts)], embed.encode(texts).tolist()]))
"""
    told = run(python, code, tmp_path / "labels", tmp_path / "vectors", json.dumps(TEXTS), project=False)
    scores, vectors = json.loads(told.splitlines()[-1])
    expected = [answer.score for answer in adtp_export.load(tmp_path / "labels")(TEXTS)]
    assert scores == pytest.approx(expected, abs=1e-5)
    np.testing.assert_allclose(vectors, adtp_export.load(tmp_path / "vectors").encode(TEXTS), atol=1e-5)


def test_sentence_transformers_embeds_the_same_through_onnx_without_us(python, embedder):
    """Its backend "onnx" reads `last_hidden_state`, and pools, projects and normalizes by itself, after OUT's modules."""
    code = """
import json, sys
from sentence_transformers import SentenceTransformer
model = SentenceTransformer(sys.argv[1], backend="onnx", model_kwargs={"file_name": "model.onnx"}, device="cpu")
print(json.dumps(model.encode(json.loads(sys.argv[2]), batch_size=3).tolist()))
assert not any(name.startswith("adtp") for name in sys.modules)
"""
    out = embedder[1]
    found = json.loads(run(python, code, out, json.dumps(TEXTS), project=False).splitlines()[-1])
    np.testing.assert_allclose(found, adtp_export.load(out).encode(TEXTS), atol=1e-5)


def test_student_under_older_transformers(python, tmp_path):
    """The tests of the Auto classes, the round trip and the pipeline, as they are; and of configurations of both lines."""
    import transformers

    assert int(transformers.__version__.split(".")[0]) >= 5
    version = run(python, "import transformers; print(transformers.__version__)").strip()
    assert version.startswith("4.57")
    files = [ROOT / "tests" / "model" / f"test_{name}.py" for name in ("transformers", "versions")]
    tests = [*files, "-q", "-p", "no:cacheprovider", "-o", "pythonpath="]
    result = subprocess.run(
        [str(python), "-m", "pytest", *map(str, tests)],
        capture_output=True,
        text=True,
        check=False,
        cwd=ENVIRONMENT,
        env={**os.environ, "PYTHONPATH": f"{PACKAGE}{os.pathsep}{ROOT}"},
    )
    assert result.returncode == 0, result.stdout[-3000:]


def test_export_under_older_transformers(python, tmp_path):
    code = "import sys; sys.argv[0] = 'adtp-export'; from adtp_export.cli.export import main; main()"
    manifest = json.loads(run(python, code, DEMO, "--out", tmp_path / "out", "--json"))
    assert manifest["versions"]["transformers"].startswith("4.57")
    assert manifest["targets"]["onnxruntime-cpu-fp32"]["status"] == "verified"


def test_questions_are_answered_as_the_pipeline_of_older_transformers_does(python, answerer):
    """transformers 5 has that pipeline no more. The last context takes several windows: it adds what these say of equal texts, which is no
    probability. So it is asked for each window, and the best one counts."""
    model, out = answerer
    context = "Jane Austen wrote it , and nobody in London disagreed at all with her wonderfully dry humour . "
    pairs = [("who wrote it ?", context), ("where ?", context * 2), ("who ?", context * 12)]
    code = """
import json, sys
from transformers import pipeline
answer = pipeline("question-answering", sys.argv[1], device="cpu")
answer.tokenizer.model_max_length = 64
whole = answer.postprocess
answer.postprocess = lambda windows, **options: [whole([window], **options) for window in windows]
print(json.dumps([
    answer(question=question, context=context, top_k=500, handle_impossible_answer=none)
    for none in (False, True) for question, context in json.loads(sys.argv[2])
]))
"""
    expected = json.loads(run(python, code, model, json.dumps(pairs), project=False).splitlines()[-1])
    assert len(expected[0]) == 1 < len(expected[2])
    answer = adtp_export.load(out)
    found = [answer(pair, top_k=500, may_be_none=none)[0].answers[:3] for none in (False, True) for pair in pairs]
    for answers, windows in zip(found, expected, strict=True):
        own = of_all_windows([part for window in windows for part in window])
        parts = [(part.text, part.start, part.end) for part in answers]
        assert parts == [(part["answer"], part["start"], part["end"]) for part in own]
        assert [part.score for part in answers] == pytest.approx([part["score"] for part in own], abs=1e-5)


def of_all_windows(parts):
    """The best three texts: of each text the best part, but of no answer the worst."""
    best = {}
    for part in parts:
        key = part["answer"].lower()
        known = best.setdefault(key, part)
        if (part["score"] < known["score"]) if not key else (part["score"] > known["score"]):
            best[key] = part
    return sorted(best.values(), key=lambda part: -part["score"])[:3]


def test_a_student_answers_questions_in_the_windows_that_the_page_gives(python, tmp_path):
    """Its own are 40 tokens, of which they share 12; docs/deployment.md tells them to that pipeline."""
    windows = {"max_tokens": 40, "stride": 12, "max_answer_tokens": 4}
    out = export_unverified(write_pruned(tmp_path / "model", "spans", windows=windows), tmp_path / "MODEL-export")
    page = (ROOT / "docs" / "deployment.md").read_text(encoding="utf-8")
    (block,) = [
        block for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "ORTModelForQuestion" in block
    ]
    words = sorted(word for word in (DEMO / "vocab.txt").read_text().split() if word.isalpha() and len(word) > 3)
    context = " ".join(words[:160])  # each once: transformers adds the scores of equal answers, and this does not
    block = block.replace('"Jane Austen wrote it."', repr(context)).replace("MODEL-export", str(out))
    found = json.loads(run(python, block + "print(json.dumps(found))", project=False).splitlines()[-1])
    (own,) = adtp_export.load(out)([("who wrote it?", context)])
    assert (found["answer"], found["start"], found["end"]) == (own.answer, own.start, own.end)
    assert found["score"] == pytest.approx(own.score, abs=1e-5)
