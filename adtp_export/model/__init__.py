"""The AD-TP student: configuration, checkpoint loading, padded form (the oracle), packed form (what is exported)."""
