"""The checks of the encoder's kernels notice changes of single instructions."""

import collections

import encoder_mutants
import pytest
from ptx_mutants import FAULT, SURVIVED, WRONG, synchronization

FIRST = "product-fp16-32x64-gelu"
MOST_SURVIVORS = 0.3
"""Of changes: what rests on no result, such as a barrier beside another, or a row of zeros, nobody can notice."""


def counts_of(device, variant, mutants):
    assert encoder_mutants.verdict(device, variant, None) == SURVIVED, "the unchanged code fails"
    return collections.Counter(encoder_mutants.verdict(device, variant, mutant) for mutant in mutants)


def test_a_few_changes_of_a_product_are_noticed(device):
    mutants = [m for m in synchronization(FIRST) if m.kind == "a group less waited for"]
    assert counts_of(device, FIRST, mutants) == {FAULT: len(mutants)}
    counts = counts_of(device, FIRST, encoder_mutants.sample(FIRST)[-8:])
    assert counts[FAULT] + counts[WRONG] >= 6


@pytest.mark.slow
@pytest.mark.parametrize("variant", encoder_mutants.SAMPLED)
def test_sampled_changes_are_noticed(device, variant):
    counts = counts_of(device, variant, encoder_mutants.sample(variant))
    assert counts[FAULT] > 0
    assert counts[WRONG] > 0
    assert counts[SURVIVED] <= MOST_SURVIVORS * sum(counts.values())
