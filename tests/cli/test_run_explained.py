"""`adtp-run --explain`: what each answer rests on, as JSON lines and as a table."""

import json

import pytest
from testbed import run_cli

from adtp_export.artifacts.records import Manifest
from adtp_export.explain.records import FLOWED, HELD, ORDER, POSSIBLE
from adtp_export.imports import ReadOptions, options_for

TEXTS = ("The room was small, and the breakfast was truly wonderful.", "not again, please")
TYPED = [word for text in TEXTS for word in ("--text", text)]


@pytest.fixture(scope="module")
def explained(exported, demo):
    result = run_cli("adtp-run", exported, "--explain", demo, "--json", "--kept", *TYPED)
    assert result.returncode == 0, result.stderr
    return [json.loads(line) for line in result.stdout.splitlines()]


def test_lines_have_an_explanation_of_every_token(explained):
    assert [line["text"] for line in explained] == [*TEXTS]
    for line in explained:
        found = line["explanation"]
        assert found["tokens"] == line["tokens"]
        assert found["dropped_at"] == line["dropped_at"]  # as the target has it that answered
        assert sum(found["attribution"]) == pytest.approx(1)
        gone = [site is not None for site in found["dropped_at"]]
        assert (
            [value is not None for value in found["flow"]] == [value is not None for value in found["flowed"]] == gone
        )
    assert {HELD, POSSIBLE, ORDER, FLOWED} <= set(explained[0]["explanation"]["figures"])


def test_a_table_says_the_same(exported, demo, explained):
    result = run_cli("adtp-run", exported, "--explain", demo, *TYPED)
    assert result.returncode == 0, result.stderr
    for line in explained:
        assert f"text: {line['text']}\nlabel: {line['label']}\n" in result.stdout
        found = line["explanation"]
        for token, share, site, flow in zip(*(found[name] for name in ("tokens", "attribution", "dropped_at", "flow"))):
            fate = "kept" if site is None else f"dropped at {site}"
            rows = [row.replace(" ", "") for row in result.stdout.splitlines() if "│" in row]
            beginning = f"│{token}│{share:.1%}│{fate}│".replace(" ", "")
            assert any(row.startswith(beginning + ("│" if flow is None else f"{flow:.2f}│")) for row in rows)
    assert f"kept tokens hold {explained[0]['explanation']['figures'][HELD]:.0%} of the attribution" in result.stdout


def test_the_report_and_the_manifest_have_the_means(exported):
    manifest, document = Manifest.read(exported), (exported / "report.html").read_text()
    means = manifest.verification["explanation"]
    assert 0 < means[HELD] <= means[POSSIBLE] <= 1
    assert 0 < means[FLOWED] < 1
    told = f"kept tokens hold {means[HELD]:.0%} of the attribution"
    assert told in document
    assert told in (exported / "report.md").read_text()
    assert document.count("<div class='text rests'>") == document.count("<div class='text'>") == 12


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--explain", "{small}", "--text", "a"], "is not the checkpoint that"),
        (["--explain", "{small}/nowhere", "--text", "a"], "nowhere"),
        (["--explain", "{small}", "--text", "a", "--query", "b"], "--explain prints tokens, and --query has no place"),
        (["--allow-pickle", "--text", "a"], "--allow-pickle goes with --explain MODEL_DIR"),
        (["--json", "--text", "a"], "--json goes with --explain MODEL_DIR"),
    ],
)
def test_bad_input(exported, small, arguments, message):
    result = run_cli("adtp-run", exported, *(word.format(small=small) for word in arguments))
    assert result.returncode == 2, result.stderr
    assert message in result.stderr
    assert "Traceback" not in result.stderr
    assert result.stdout == ""


def test_a_checkpoint_is_read_as_it_was_exported(demo, tmp_path):
    """What its system needs is in the manifest; another system's options are not passed on."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "ltp"}))
    known = {"head": "sequence", "padded_length": 64}
    assert options_for(tmp_path, known, True) == ReadOptions(allow_pickle=True, padded_length=64, head="sequence")
    assert options_for(demo, known) == ReadOptions(head="sequence")
    lengths = {"head": "sequence", "length_config": [9, 5]}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "bert"}))
    assert options_for(tmp_path, lengths) == ReadOptions(length_config=[9, 5], head="sequence")
