"""The examples for Node and browsers: answers, and what became of each token, are those of Python."""

import functools
import http.server
import json
import shutil
import subprocess
import threading

import browser
import pytest
from testbed import ROOT

import adtp_export

EXAMPLES = ROOT / "examples"
TEXTS = [
    "a wonderful film",
    "The hotel was near the station, the room was small, and the breakfast was truly wonderful.",
    "",
    "na\u00efve caf\u00e9 \u00c0\u00c9, e\u0301, \u1e9e, \u0130stanbul, \u00bd \ufb01",
    "\u6f22\u5b57\u3068\u4eee\u540d word \U0001f389 \U0001f469\u200d\U0001f467 \u0938\u094d\u0924\u0947",
    "control \x07 \u200b tab\tline\n[SEP] [MASK] " + "x" * 150,
    "very " * 200 + "good",
]
TOLERANCE = 1e-6
"""Of probabilities: what is promised; fp32 in three builds of ONNX Runtime."""


def lock():
    return json.loads((EXAMPLES / "package-lock.json").read_text())


def test_the_lock_file_pins_every_package_and_names_no_other_registry():
    packages = {name: entry for name, entry in lock()["packages"].items() if name}
    assert all(entry["integrity"].startswith("sha512-") for entry in packages.values())
    resolved = [entry["resolved"] for entry in packages.values() if "resolved" in entry]
    assert [address for address in resolved if not address.startswith("https://registry.npmjs.org/")] == []
    asked = json.loads((EXAMPLES / "package.json").read_text())
    for name, version in {**asked["dependencies"], **asked["overrides"]}.items():
        assert packages[f"node_modules/{name}"]["version"] == version


@pytest.fixture(scope="module")
def folder(tmp_path_factory, demo):
    """The examples, installed from the lock file alone, with the demo student's export among them."""
    if shutil.which("npm") is None:
        pytest.skip("Node is not installed")
    folder = tmp_path_factory.mktemp("web") / "examples"
    shutil.copytree(EXAMPLES, folder, ignore=shutil.ignore_patterns("node_modules", "*-export"))
    command = ["npm", "ci", "--ignore-scripts", "--no-audit", "--no-fund"]
    installed = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if any(code in installed.stderr for code in ("ENOTFOUND", "ECONNREFUSED", "ETIMEDOUT", "EAI_AGAIN")):
        pytest.skip(f"the environment could not be made: {installed.stderr.strip()[-300:]}")
    assert installed.returncode == 0, installed.stderr
    adtp_export.export(demo, folder / "student-export", layout="hub", debug_outputs=True, skip_parity_check=True)
    return folder


@pytest.fixture(scope="module")
def expected(folder):
    return adtp_export.load(folder / "student-export")(TEXTS, return_kept=True)


@pytest.mark.slow
def test_node_answers_as_python(folder, expected):
    command = ["node", "node/classify.mjs", "student-export", *TEXTS]
    said = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True).stdout
    found = [json.loads(line) for line in said.splitlines()]
    assert [row["text"] for row in found] == TEXTS
    for row, answer in zip(found, expected, strict=True):
        assert (row["label"], row["tokens"], row["droppedAt"]) == (
            answer.label,
            list(answer.tokens),
            list(answer.dropped_at),
        )
        assert row["scores"] == pytest.approx(answer.scores, abs=TOLERANCE)
    assert any(site is not None for row in found for site in row["droppedAt"])


@pytest.fixture
def page(folder, tmp_path):
    """The page in a browser, before it has answered."""
    program = browser.find()
    if program is None:
        pytest.skip("neither chromium nor google-chrome is installed")
    handler = functools.partial(_Quiet, directory=folder)
    with (
        http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server,
        browser.Browser(program, tmp_path) as page,
    ):
        threading.Thread(target=server.serve_forever, daemon=True).start()
        page.address = f"http://127.0.0.1:{server.server_port}/browser/"
        yield page
        server.shutdown()


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_):
        pass


READ = """(() => {
  const tokens = [...document.querySelectorAll("#tokens li")];
  return {
    score: Number(document.getElementById("answer").dataset.score),
    label: document.getElementById("label").textContent,
    tokens: tokens.map((token) => token.textContent),
    droppedAt: tokens.map((token) => token.dataset.dropped ?? null),
  };
})()"""


@pytest.mark.slow
def test_the_page_answers_as_one_types(page, expected):
    page.call("Page.navigate", url=page.address)
    page.wait_for("document.getElementById('answer')?.dataset.score")
    typed = [(text, answer) for text, answer in zip(TEXTS, expected) if text and "\x07" not in text]
    assert len(typed) == len(TEXTS) - 2  # nothing cannot be typed, nor can control characters
    for text, answer in typed:
        page.value("delete document.getElementById('answer').dataset.score; document.getElementById('text').select()")
        page.call("Input.insertText", text=text)
        assert page.value("document.getElementById('text').value") == text
        page.wait_for("document.getElementById('answer').dataset.score")
        found = page.value(READ)
        assert (found["label"], found["tokens"], found["droppedAt"]) == (
            answer.label,
            list(answer.tokens),
            list(answer.dropped_at),
        )
        assert found["score"] == pytest.approx(answer.score, abs=TOLERANCE)
    assert page.value("document.getElementById('error').hidden")


@pytest.mark.slow
def test_the_page_says_what_is_missing(page):
    page.call("Page.navigate", url=page.address + "?model=none")
    said = page.wait_for("document.getElementById('error')?.textContent")
    assert said.startswith("The model none cannot be opened; README.md says how to make it.")
