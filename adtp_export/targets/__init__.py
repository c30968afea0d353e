"""Targets: their names, what runs them, and which of them a machine should take."""
