"""Rows of files: read, tokenized, cut to what a model takes."""
