"""`adtp-run` for models that generate text: prompts in, with pictures or without, and text out while it comes."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from ..errors import InputError, check_int, flag_name, printable, quoted
from ..explain.records import PromptExplained
from ..report.explained import FLOW_HEAD, largest, shown
from .console import check_place, make_table, print_json, table_console, watched, writing_place
from .parsing import Parser, is_given
from .run_texts import instead_of_pairs

TAKEN = (
    "out",
    "texts",
    "text",
    "file",
    "format",
    "text_column",
    "batch_size",
    "threads",
    "target",
    "explain",
    "json",
    "allow_pickle",
)
"""Options of adtp-run that also go with a model that generates text."""
OPTIONS = (
    "image",
    "chat",
    "max_new_tokens",
    "temperature",
    "top_p",
    "repetition_penalty",
    "seed",
    "report",
    "token",
    "merge_layers",
)


def add_generation(parser: Parser) -> None:
    group = parser.add_argument_group("generation")
    group.add_argument(
        "--image",
        metavar="F",
        action="append",
        help="picture of the prompt, once for each --text; it goes where the prompt has the model's image token. For a vision tower: "
        "a picture to encode",
    )
    group.add_argument(
        "--chat",
        action="store_true",
        default=None,
        help="the text is what a user says, with the picture before it; the model's chat template makes the prompt",
    )
    group.add_argument(
        "--max-new-tokens", metavar="N", type=int, help="maximum number of tokens to generate (default: 64)"
    )
    group.add_argument(
        "--temperature",
        metavar="X",
        type=float,
        help="0 takes the likeliest token; higher values draw more freely (default: 0)",
    )
    group.add_argument(
        "--top-p",
        metavar="P",
        type=float,
        help="draw from the likeliest tokens that have this share together (default: 1)",
    )
    group.add_argument(
        "--repetition-penalty",
        metavar="X",
        type=float,
        help="values above 1 make tokens less likely that already occur in prompt or answer (default: the checkpoint's own, mostly 1)",
    )
    group.add_argument("--seed", metavar="N", type=int, help="seed of the draws (default: 0)")
    group.add_argument(
        "--report",
        metavar="FILE",
        type=Path,
        help="also write a page (.html) about this run of one text: which patches of the picture stayed at each stage, caches, times",
    )
    group.add_argument(
        "--token",
        metavar="N",
        type=int,
        help="with --explain: which generated token is explained, counted from 0 (default: 0)",
    )
    group.add_argument(
        "--merge-layers",
        metavar="N",
        type=int,
        help="with --explain: merge the model's layers until N are left, 3 or more; faster for long prompts, and not exact "
        "(default: merge none)",
    )


def asked(options: argparse.Namespace) -> dict[str, Any]:
    """Return the options of generation that are given."""
    return {name: value for name in OPTIONS if (value := getattr(options, name)) is not None}


def command(options: argparse.Namespace, texts: list[Any], default: Callable[[str], Any]) -> int:
    """Print what follows each prompt; that of a single one while it comes.

    Args:
        default: of an option.
    """
    from ..inference.generation import Generator, Sampling, whole

    for name, value in vars(options).items():
        if name not in (*TAKEN, *OPTIONS, "text_pair") and value != default(name):
            typed = "--out" if name == "out_file" else flag_name(name)
            raise InputError(
                f"{typed} does not go with models that generate text, such as that of {options.out}; leave it out"
            )
    check_int("--batch-size", options.batch_size, 1)
    if pair := next((text for text in texts if not isinstance(text, str)), None):
        shown = ", ".join(map(quoted, pair))
        raise InputError(f"got the pair {shown}; accepted are prompts, so {instead_of_pairs(options)}")
    given = asked(options)
    images, chat, report = given.pop("image", None), given.pop("chat", False), given.pop("report", None)
    sampling = Sampling(**{name: value for name, value in given.items() if name not in ("token", "merge_layers")})
    _check_explanation(options, sampling.max_new_tokens)
    if images is not None and len(images) != len(texts):
        raise InputError(f"--image: got {len(images)} for {len(texts)} texts; accepted is one for each text, or none")
    prompts = [said(text, images is not None) for text in texts] if chat else texts
    if options.explain is not None:
        return _explained(options, prompts, texts, sampling)
    if report is not None:
        return _reported(options, images, prompts, sampling)
    generator = Generator(options.out, options.threads, options.target)
    if len(texts) == 1:
        _print_stream(generator.stream(images, prompts, sampling))
        return 0
    for begin in range(0, len(texts), options.batch_size):
        batch = slice(begin, begin + options.batch_size)
        own = None if images is None else images[batch]
        pieces = generator.stream(own, prompts[batch], sampling, first=begin)
        for text, found in zip(texts[batch], whole(pieces, len(texts[batch]))):
            print_json({"text": text, "generated": found}, indent=None)
    return 0


def _print_stream(pieces: Iterable[Sequence[str]]) -> str:
    """Print what one text goes on with, while it comes, and return it."""
    found = ""
    for (piece,) in pieces:
        sys.stdout.write(printable(piece))
        sys.stdout.flush()
        found += piece
    print()
    return found


def _reported(options: argparse.Namespace, images: Any, prompts: Sequence[Any], sampling: Any) -> int:
    """Print what follows a prompt, and write a page about the run.

    Raises:
        InputError: there are several prompts, or the page cannot be written.
    """
    from ..inference.traced import TracedGenerator
    from ..report.generated import render

    _check_page(options, prompts)
    generator = TracedGenerator(options.out, options.threads, options.target)
    answer = _print_stream(generator.stream(images, prompts, sampling))
    _write_page(options.report, render(generator.trace(prompts[0], answer)))
    return 0


def _check_page(options: argparse.Namespace, prompts: Sequence[Any]) -> None:
    path: Path = options.report
    if len(prompts) != 1:
        raise InputError(f"--report: got {len(prompts)} texts; accepted is one, which the page is about")
    check_place("--report", path, ".html")


def _write_page(path: Path, page: str) -> None:
    with writing_place("--report", path) as partial:
        partial.write_text(page, encoding="utf-8")
    print(printable(f"adtp-run: {path}"), file=sys.stderr)


def _check_explanation(options: argparse.Namespace, new_tokens: int) -> None:
    """new_tokens: the most that are generated."""
    if options.explain is None:
        for name in ("json", "allow_pickle", "token", "merge_layers"):
            if is_given(getattr(options, name)):
                raise InputError(f"{flag_name(name)} goes with --explain MODEL_DIR; add that, or leave it out")
        return
    if options.token is not None:
        check_int("--token", options.token, 0, new_tokens - 1)
    if options.merge_layers is not None:
        from ..explain.merged_layers import FEWEST

        check_int("--merge-layers", options.merge_layers, FEWEST)
    if options.image is not None:
        raise InputError(
            "--explain: attention flow is of prompts of text, and image tokens have no ids; leave --image or --explain out"
        )


def _explained(options: argparse.Namespace, prompts: Sequence[Any], texts: Sequence[str], sampling: Any) -> int:
    """Print what follows each prompt, and what one of the generated tokens rests on; also write the page, if it is asked for.

    Raises:
        InputError: MODEL_DIR is not what OUT was exported from, there is no such token, or the page cannot be written.
    """
    from ..artifacts.manifest import read_manifest
    from ..data.tokenize import readable
    from ..inference.traced import TracedGenerator
    from ..pipeline.explain import prompt_explainer
    from ..report.generated import render

    if options.report is not None:
        _check_page(options, prompts)
    out = Path(options.out)
    flow = prompt_explainer(
        options.explain,
        out,
        read_manifest(out),
        options.allow_pickle,
        merge_layers=options.merge_layers,
        watch=watched,
    )
    generator = TracedGenerator(out, options.threads, options.target)  # the models of OUT take longest to open
    tokenizer = generator.tokenizer
    for number, (text, prompt) in enumerate(zip(texts, prompts)):
        ids = generator.prompt(prompt, None, tokenizer)
        found = [token for (token,) in generator.tokens([ids], None, sampling, first=number) if token is not None]
        place = _chosen(options.token, len(found), text)
        read, answer = [*ids, *found[:place]], tokenizer.decode(found)
        explained = PromptExplained(
            tokens=tuple(readable(tokenizer, read)),
            prompt=len(ids),
            token=readable(tokenizer, found[place : place + 1])[0] if found else "",
            flow=tuple(flow(read).tolist()),
            merge_layers=options.merge_layers,
        )
        _print_explained(options, text, answer, explained)
        if options.report is not None:
            _write_page(options.report, render(generator.trace(prompt, answer), explained))
    return 0


def _chosen(token: int | None, generated: int, text: str) -> int:
    """Return which generated token is explained; 0 where none is, since what ends a text at once is read off its last token, too."""
    if token is None or 0 <= token < generated:
        return token or 0
    accepted = f"accepted are 0 to {generated - 1}" if generated else "leave it out"
    raise InputError(
        f"--token: got {token}; the number of tokens generated after {quoted(text)} is {generated}, so {accepted}"
    )


def _print_explained(options: argparse.Namespace, text: str, answer: str, explained: PromptExplained) -> None:
    """Print an answer and the tokens with the largest flow to one of its tokens; as a line of JSON all tokens."""
    if options.json:
        flow = {"token": explained.token, "tokens": explained.tokens, "prompt_tokens": explained.prompt}
        flow |= {"merge_layers": explained.merge_layers}
        print_json({"text": text, "generated": answer, "explanation": {**flow, "flow": explained.flow}}, indent=None)
        return
    from rich.text import Text as Cell

    for name, value in (
        ("text", text),
        ("generated", answer),
        ("explained", shown(explained.token) or "the end of the text"),
    ):
        print(printable(f"{name}: {value}"))
    table = make_table(*FLOW_HEAD)
    for row in largest(explained):
        table.add_row(*(Cell(printable(cell)) for cell in row))
    table_console().print(table)
    print()


def said(text: str, with_image: bool) -> list[dict[str, Any]]:
    """Return a text as the message of a user."""
    image = [{"type": "image"}] if with_image else []
    return [{"role": "user", "content": [*image, {"type": "text", "text": text}]}]


def refuse(options: argparse.Namespace) -> None:
    """Raises InputError where options of generation are given for a model that does not generate text."""
    for name in asked(options):
        raise InputError(
            f"{flag_name(name)} is for models that generate text, and {options.out} holds none; leave it out"
        )
