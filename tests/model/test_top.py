"""The bins of ToP against its own arithmetic in fp32, rank by rank."""

import pytest
import torch

from adtp_export.model.pruners.top import TopPruner, TopSettings, bin_in_fp32

MANY = [*range(1, 520), 1000, 2047, 2048, 4096, 8000]


@pytest.mark.parametrize("bins", [1, 2, 7, 20, 25, 30, 50, 100, 150, 256, 999, 1000])
def test_bins_are_those_of_fp32(bins):
    """Every rank of up to 519 tokens and of some longer texts. Neighbouring bins have opposite answers, so one off is seen."""
    kept = "".join("10"[i % 2] for i in range(bins))
    pruner = TopPruner(TopSettings([kept]), "1.attention", 0, 8, 2)
    by_integers = 0
    for n in MANY:
        rank, others = torch.arange(n)[None], torch.tensor([[n]])
        expected = bin_in_fp32(rank, others, bins)
        assert torch.equal(pruner.keeps(others, rank), expected % 2 == 0)
        by_integers += int((rank * bins // n != expected).sum())
    assert (by_integers > 0) == (bins > 1)  # exact arithmetic would be wrong


def test_ranks_fall_into_bins():
    """Seven tokens in five bins, the best first: 0, 0, 1, 2, 2, 3, 4."""
    pruner = TopPruner(TopSettings(["10010"]), "1.attention", 0, 8, 2)
    assert pruner.keeps(torch.tensor([[7]]), torch.arange(7)[None]).int().tolist() == [[1, 1, 0, 0, 0, 1, 0]]
