"""How far an answer may be from fp64 in a test: as far as `verify` lets a target be, and never a number that is typed in."""

import numpy as np
from conftest import as_numpy

from adtp_export.verify.oracle import run_oracle


def oracle_on(model, *batches):
    """Run a padded student on batches of torch tensors, in fp32 and fp64. Few rows cost nine runs in fp32."""
    return run_oracle(model, [as_numpy(batch) for batch in batches])


def assert_within_oracle(oracle, *answers):
    """Compare answers with the oracle's, one for each of its batches: arrays or tensors by the output's name."""
    for number, (batch, outputs) in enumerate(zip(oracle.batches, answers, strict=True)):
        assert outputs
        for name, found in outputs.items():
            off = np.abs(np.asarray(found) - batch.references[name])
            assert off.max() <= oracle.tolerances[name], f"{name} of batch {number}"  # a NaN is not within, either
