"""Options of commands that open a checkpoint: fields of `imports.ReadOptions`."""

from __future__ import annotations

import argparse


def add_reading_options(parser: argparse.ArgumentParser) -> None:
    """Add what a checkpoint may need to be read."""
    parser.add_argument(
        "--allow-pickle",
        action="store_true",
        help="accept pickles such as pytorch_model.bin, which can run code when loaded",
    )
    parser.add_argument(
        "--padded-length",
        metavar="N",
        type=int,
        help="for LTP checkpoints: the length that LTP's evaluation padded texts to, usually 128",
    )
    parser.add_argument(
        "--length-config",
        metavar="LIST",
        help="for Length-Adaptive Transformer and PoWER-BERT: tokens that each layer keeps, such as 40,30,24, or a file with such a list",
    )
    parser.add_argument(
        "--head",
        metavar="NAME",
        help="what the model answers with, where its directory leaves that open: sequence, tokens, spans, embedding",
    )
