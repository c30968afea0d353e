"""`adtp-run`: answer texts with an exported student; one JSON object per line."""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Iterable
from pathlib import Path

from ..errors import InputError, printable
from .console import Parser, counting_rows, print_json, run_command

CHUNK = 1024


def make_parser() -> Parser:
    parser = Parser(
        prog="adtp-run",
        description="Classify text with an exported student, on the best target that runs here. JSON lines on stdout.",
    )
    parser.add_argument("out", metavar="OUT", type=Path, help="output directory of adtp-export")
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--text", metavar="T", action="append", help="a text; may be given several times")
    source.add_argument("--file", metavar="F", type=Path, help=".txt, .tsv, .csv or .jsonl, each also .gz")
    parser.add_argument("--text-pair", metavar="T", action="append", help="second sentence of each --text")
    parser.add_argument(
        "--text-column", metavar="C", help="text column of --file, or two with a comma for sentence pairs"
    )
    parser.add_argument("--kept", action="store_true", help="also print the tokens and which of them stayed")
    parser.add_argument("--target", metavar="NAME", help="a target of the manifest (default: the best that runs here)")
    parser.add_argument(
        "--prefer",
        metavar="WHAT",
        default="precision",
        help="how to choose the target. precision (the default): the highest precision. speed: the fastest, of any precision",
    )
    parser.add_argument(
        "--batch-size",
        metavar="B",
        type=int,
        default=32,
        help="texts run at once, at most (default: 32); their lengths decide how many",
    )
    parser.add_argument("--threads", metavar="N", type=int, default=0, help="CPU threads (default: the runtime's)")
    parser.add_argument(
        "--no-verify", action="store_true", help="do not compare the hashes of OUT's files with its manifest before use"
    )
    return parser


def main() -> None:
    options = make_parser().parse_args()
    run_command("adtp-run", lambda: command(options))


def command(options: argparse.Namespace) -> int:
    from ..engines.deployment import load
    from ..text import Text, read_texts

    texts: Iterable[Text]
    if options.file is not None:
        if options.text_pair:
            raise InputError("--text-pair goes with --text; for a file say --text-column FIRST,SECOND")
        texts = read_texts(options.file, options.text_column)
    elif options.text_pair:
        if len(options.text_pair) != len(options.text):
            raise InputError(
                f"--text-pair: got {len(options.text_pair)} for {len(options.text)} --text; give one for each"
            )
        texts = list(zip(options.text, options.text_pair))
    else:
        texts = options.text
    deployment = load(options.out, options.target, options.threads, options.prefer, not options.no_verify)
    print(printable(f"adtp-run: {deployment.target}: {deployment.reason}"), file=sys.stderr)
    iterator = iter(texts)
    with counting_rows() if options.file is not None else contextlib.nullcontext(lambda rows: None) as count:
        while chunk := [text for _, text in zip(range(CHUNK), iterator)]:
            answers = deployment(chunk, return_kept=options.kept, batch_size=options.batch_size)
            for text, answer in zip(chunk, answers):
                print_json({"text": text, **answer.to_json()}, indent=None)
            count(len(chunk))
    return 0
