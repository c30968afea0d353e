"""Proof that an engine equals the oracle: rows to try, the oracle's answers and error bounds, and the verdict."""
