"""How far an answer may be from fp64 in a test: as far as `verify` lets a target be, and never a number that is typed in."""

import copy

import numpy as np
import torch
from testbed import as_numpy

from adtp_export.verify.oracle import MULTIPLE, run_oracle
from adtp_export.verify.rounding import Answer, draws_for, errors


def oracle_on(model, *batches):
    """Run a padded student on batches of torch tensors, in fp32 and fp64. Few rows cost nine runs in fp32."""
    with torch.no_grad():
        return run_oracle(model, [as_numpy(batch) for batch in batches])


def assert_within_oracle(oracle, *answers):
    """Compare answers with the oracle's, one for each of its batches: arrays or tensors by the output's name."""
    for number, (batch, outputs) in enumerate(zip(oracle.batches, answers, strict=True)):
        assert outputs
        for name, found in outputs.items():
            off = np.abs(np.asarray(found) - batch.references[name])
            assert off.max() <= oracle.tolerances[name], f"{name} of batch {number}"  # a NaN is not within, either


def assert_within_network(network, batch, *found):
    """Compare logits with those of a network of transformers: it is no student, so no oracle runs it."""

    def run(module):
        return Answer({"logits": module(**batch).logits}, torch.zeros_like(batch["input_ids"]), ())

    with torch.no_grad():
        exact = run(copy.deepcopy(network).double())
        _, off = errors(lambda: run(network), network, exact, draws_for(len(batch["input_ids"])))
        for logits in found:
            assert (torch.as_tensor(logits) - exact.outputs["logits"]).abs().max() <= MULTIPLE * off.outputs["logits"]
