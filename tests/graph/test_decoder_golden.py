"""The files of a LLaVA with Balanced Token Pruning, in ONNX Runtime, against what the authors' own file answered."""

import json

import numpy as np
import pytest
from conftest import shared_or_skip

from adtp_export.contract import PREFILL_MODEL, STEP_MODEL
from adtp_export.graph import program
from adtp_export.graph.decoder import EXPORTS
from adtp_export.inference.generation import after_prefill, after_step
from adtp_export.model.decoder import load_decoder
from adtp_export.runtimes.onnxruntime import OnnxRuntimeEngine
from adtp_export.verify.rounding import MULTIPLE


@pytest.fixture(scope="module")
def golden(tmp_path_factory):
    """What the original answered, and the two files that have to."""
    folder, out = shared_or_skip("originals/btp"), tmp_path_factory.mktemp("btp")
    stages = json.loads((folder / "golden.json").read_text())["stages"]
    decoder = load_decoder(folder / "checkpoint", {"method": "btp", "stages": stages})
    for name in (PREFILL_MODEL, STEP_MODEL):
        program.save(EXPORTS[name](decoder, {"version": "test"}), out / name)
    return (
        dict(np.load(folder / "golden.npz")),
        [OnnxRuntimeEngine(out / name) for name in (PREFILL_MODEL, STEP_MODEL)],
        decoder,
    )


def test_tokens_and_logits(golden):
    """Of all prompts in one batch: what enters each layer, doubles included, and six greedy tokens."""
    arrays, (prefill, step), decoder = golden
    lengths = arrays["attention_mask"].sum(1)
    answer = prefill.run({
        "inputs_embeds": np.concatenate([x[:n] for x, n in zip(arrays["inputs_embeds"], lengths)]),
        "cu_seqlens": np.array([0, *lengths.cumsum()], dtype=np.int32),
        "image": np.concatenate([ids[:n] == 318 for ids, n in zip(arrays["input_ids"], lengths)]),
    })  # fmt: skip
    for row, positions in enumerate(arrays["orig_positions"]):
        for layer, wanted in enumerate(positions):
            entered = max(at for at in decoder.first_layers if at <= layer)
            begin, end = answer[f"cu_seqlens.{entered}"][row : row + 2]
            assert answer[f"positions.{entered}"][begin:end].tolist() == wanted[wanted >= 0].tolist()
    past, logits = after_prefill(answer), [answer["logits"]]
    for _ in range(arrays["orig_tokens"].shape[1] - 1):
        answer = step.run({**past, "input_ids": logits[-1].argmax(1)})
        past = after_step(answer)
        logits.append(answer["logits"])
    assert np.array_equal(np.stack(logits, 1).argmax(2), arrays["orig_tokens"])
    # The reference rounds nothing, and the original in fp32 is one draw for each of 36 rows of logits.
    own_error = np.abs(arrays["orig_step_logits"] - arrays["ref_step_logits"]).max()
    assert np.abs(np.stack(logits, 1) - arrays["ref_step_logits"]).max() <= MULTIPLE * own_error
