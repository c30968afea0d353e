"""`adtp-run --explain` on a model that generates text: what a generated token rests on."""

import json
import shutil

import numpy as np
import pytest
import torch
from language_models import save_causal
from safetensors.torch import load_file
from test_generation import folder  # noqa: F401

from adtp_export.cli import run, run_prompts
from adtp_export.errors import InputError
from adtp_export.explain.prompt import prompt_flow
from adtp_export.model.decoder import load_decoder


def test_a_generated_token_is_explained(folder, tmp_path, capsys):  # noqa: F811
    """By the flow of the checkpoint, the tokens generated before it included; as a line of JSON, a table, and on the page."""
    ids, text, page = [1, 7, 20, 9, 30, 4, 8, 2, 11, 60], "w1 w7 w20 w9 w30 w4 w8 w2 w11 w60", tmp_path / "run.html"

    def typed(*more):
        own = [str(folder / "out"), "--max-new-tokens", "3", "--explain", str(folder / "model")]
        return run.command(run.make_parser().parse_args([*own, *more]))

    assert typed("--text", text, "--token", "2", "--json", "--report", str(page)) == 0
    told = json.loads(capsys.readouterr().out)
    words, found = told["generated"].split(), told["explanation"]
    expected = prompt_flow(load_decoder(folder / "model"), [*ids, *(int(word[1:]) for word in words[:2])])
    assert found == {
        "token": f" {words[2]}",
        "tokens": [f" {word}" for word in [*text.split(), *words[:2]]],
        "prompt_tokens": 10,
        "merge_layers": None,
        "flow": expected.tolist(),
    }
    assert typed("--text", text, "--token", "2") == 0
    printed = capsys.readouterr().out
    assert f"text: {text}\ngenerated: {told['generated']}\nexplained: {words[2]}\n" in printed
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in printed.splitlines() if "│" in line]
    order = np.argsort(-expected, kind="stable")[:10]
    cells = [
        [found["tokens"][i].strip(), str(i), "prompt" if i < 10 else "answer", f"{expected[i]:.3f}"] for i in order
    ]
    assert rows == cells
    html = page.read_text()
    assert f"<code>{words[2]}</code>" in html
    assert html.count("data-tip='flow ") == 12
    another, pickled = tmp_path / "another", tmp_path / "pickled"
    save_causal(another, "llama")
    shutil.copytree(another, pickled)
    torch.save(load_file(pickled / "model.safetensors"), pickled / "pytorch_model.bin")
    (pickled / "model.safetensors").unlink()
    for more, message in (
        (
            ("--text", text, "--token", "3"),
            "--token: got 3; accepted is an integer from 0 to 2",
        ),
        (("--text", "w1 " * 300), "Shorten it, or ask for fewer"),
        (("--text", "w1", "--merge-layers", "2"), "--merge-layers: got 2; accepted is an integer of at least 3"),
        (("--text", "w1", "--image", "photo.npy"), "leave --image or --explain out"),
        (("--text", "w1", "--explain", str(another)), "is not the checkpoint that"),
        (("--text", "w1", "--explain", str(pickled)), "add --allow-pickle if you trust"),
        (("--text", "w1", "--explain", str(pickled), "--allow-pickle"), "is not the checkpoint that"),
        (("--text", "w1", "--text", "w2", "--report", str(page)), "--report: got 2 texts; accepted is one"),
    ):
        with pytest.raises(InputError, match=message):
            typed(*more)
    assert capsys.readouterr().out == ""
    with pytest.raises(
        InputError, match="--token: got 2; the number of tokens generated after 'w1' is 1, so accepted are 0 to 0"
    ):
        run_prompts._chosen(2, 1, "w1")
    for flag in ("--json", "--token=1", "--allow-pickle", "--merge-layers=3"):
        with pytest.raises(InputError, match=f"{flag.partition('=')[0]} goes with --explain"):
            run.command(run.make_parser().parse_args([str(folder / "out"), "--text", "w1", flag]))
