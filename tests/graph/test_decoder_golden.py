"""The files of a LLaVA with Balanced Token Pruning, in ONNX Runtime, against what the authors' own file answered."""

import json

import numpy as np
import pytest
from testbed import shared_or_skip

from adtp_export.contract import PREFILL_MODEL, STEP_MODEL
from adtp_export.graph import program
from adtp_export.graph.decoder import EXPORTS
from adtp_export.inference.generation import after_prefill, after_step
from adtp_export.model.decoder import load_decoder
from adtp_export.runtimes.onnxruntime import OnnxRuntimeEngine
from adtp_export.verify.rounding import MULTIPLE

pytestmark = (
    pytest.mark.slow
)  # every export compares its files with the oracle, and PyTorch's are the golden's in test_prefill.py


@pytest.fixture(scope="module")
def golden(tmp_path_factory):
    """What the original answered, and what runs a file that has to."""
    folder, out = shared_or_skip("originals/btp"), tmp_path_factory.mktemp("btp")
    stages = json.loads((folder / "golden.json").read_text())["stages"]
    decoder = load_decoder(folder / "checkpoint", {"method": "btp", "stages": stages})

    def engine(name):
        program.save(EXPORTS[name](decoder, {"version": "test"}), out / name)
        return OnnxRuntimeEngine(out / name)

    arrays = dict(np.load(folder / "golden.npz"))
    return arrays, engine, decoder, answered(engine(PREFILL_MODEL), arrays)


def answered(prefill, arrays):
    """Read all prompts in one batch."""
    lengths = arrays["attention_mask"].sum(1)
    return prefill.run({
        "inputs_embeds": np.concatenate([x[:n] for x, n in zip(arrays["inputs_embeds"], lengths)]),
        "cu_seqlens": np.array([0, *lengths.cumsum()], dtype=np.int32),
        "image": np.concatenate([ids[:n] == 318 for ids, n in zip(arrays["input_ids"], lengths)]),
    })  # fmt: skip


def off(arrays, logits):
    """Return by how much ``logits (prompts, steps, V)`` differ from a reference that rounds nothing, over what they may."""
    # The original in fp32 is one draw for each of 36 rows of logits.
    own_error = np.abs(arrays["orig_step_logits"] - arrays["ref_step_logits"]).max()
    return np.abs(logits - arrays["ref_step_logits"][:, : logits.shape[1]]).max() / (MULTIPLE * own_error)


def test_tokens_and_logits(golden):
    """What enters each layer, doubles included, and the first token."""
    arrays, _, decoder, answer = golden
    for row, positions in enumerate(arrays["orig_positions"]):
        for layer, wanted in enumerate(positions):
            entered = max(at for at in decoder.first_layers if at <= layer)
            begin, end = answer[f"cu_seqlens.{entered}"][row : row + 2]
            assert answer[f"positions.{entered}"][begin:end].tolist() == wanted[wanted >= 0].tolist()
    assert np.array_equal(answer["logits"].argmax(1), arrays["orig_tokens"][:, 0])
    assert off(arrays, answer["logits"][:, None]) <= 1


def test_tokens_that_follow(golden):
    """Six greedy tokens."""
    arrays, engine, _, answer = golden
    step, past, logits = engine(STEP_MODEL), after_prefill(answer), [answer["logits"]]
    for _ in range(arrays["orig_tokens"].shape[1] - 1):
        answer = step.run({**past, "input_ids": logits[-1].argmax(1)})
        past = after_step(answer)
        logits.append(answer["logits"])
    assert np.array_equal(np.stack(logits, 1).argmax(2), arrays["orig_tokens"])
    assert off(arrays, np.stack(logits, 1)) <= 1
