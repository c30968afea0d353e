"""Answers from an exported directory: what `adtp_export.load` gives. Needs no torch."""
