"""Figures of the benchmarks of attention flow."""

import numpy as np
import pytest

from benchmarks.cpu.flow import compare
from benchmarks.students.dropped import auc, share


def test_figures():
    found = compare(np.array([0.5, 0.0, 1.0]), np.array([0.25, 0.0, 1.0]))
    assert (found["most"], found["relative"], found["agree"]) == (0.25, 0.5, 3)
    values, dropped = np.array([3.0, 1.0, 1.0, 7.0]), np.array([True, True, False, False])
    assert share(values, dropped) == pytest.approx(2 / 3)
    pairs = [(values[i] > values[j]) + (values[i] == values[j]) / 2 for i in (2, 3) for j in (0, 1)]
    assert auc(values, dropped) == pytest.approx(np.mean(pairs))
