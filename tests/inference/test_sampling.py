"""How a next token is drawn."""

import numpy as np

from adtp_export.inference.sampling import Sampling


def test_draws_are_as_likely_as_they_should_be():
    """Of the tokens that have the share together, each as often as its share of these says."""
    probabilities = np.array([0.5, 0.3, 0.15, 0.05])
    many = np.log(np.tile(probabilities, (4000, 1)))
    drawn = Sampling(temperature=1.0, top_p=0.7).choose(many, [np.random.default_rng(0)] * len(many))
    shares = np.bincount(drawn, minlength=4) / len(drawn)
    wanted = np.array([0.5, 0.3, 0, 0]) / 0.8
    six_deviations = 6 * np.sqrt(wanted * (1 - wanted) / len(drawn))
    assert (np.abs(shares - wanted) <= six_deviations).all()
