"""A run in the emulator notices what changes in a kernel; what it does not notice changes nothing."""

import collections

import emulation
import ptx_mutants
import pytest

VARIANTS = {entry["name"]: entry for entry in emulation.variants()}
FIRST = ptx_mutants.SAMPLED[0]


@pytest.fixture
def verdict(device):
    runner = emulation.Runner(device)
    return lambda variant, mutant: ptx_mutants.verdict(runner, mutant, VARIANTS[variant])


def check(verdict, variant, mutants):
    assert verdict(variant, None) == ptx_mutants.SURVIVED, "the unchanged code fails"
    found = {mutant: verdict(variant, mutant) for mutant in mutants}
    unexplained = [mutant for mutant in mutants if ptx_mutants.unexplained(mutant, found[mutant])]
    assert not unexplained, "\n".join(map(str, ["not noticed; add a case, or the reason to EQUIVALENT:", *unexplained]))
    return collections.Counter(found.values())


def test_synchronization_and_a_few_random_changes_are_noticed(verdict):
    mutants = [*ptx_mutants.synchronization(FIRST), *ptx_mutants.sample(FIRST)[-12:]]
    counts = check(verdict, FIRST, mutants)
    assert counts[ptx_mutants.FAULT] > 5
    assert counts[ptx_mutants.WRONG] > 2


@pytest.mark.slow
@pytest.mark.parametrize("variant", ptx_mutants.SAMPLED)
def test_all_sampled_changes_are_noticed(verdict, variant):
    counts = check(verdict, variant, ptx_mutants.sample(variant))
    assert counts[ptx_mutants.SURVIVED] < 0.15 * sum(counts.values())


def test_reasons_are_of_mutants_that_there_are():
    """A reason for what no longer exists would excuse something else."""
    there = {(m.variant, m.line) for variant in ptx_mutants.SAMPLED for m in ptx_mutants.sample(variant)}
    assert set(ptx_mutants.EQUIVALENT) <= there
