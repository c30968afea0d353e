"""`adtp-run`: answer texts with an exported model, in the form of its head; one JSON object per line, or vectors in a file."""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..contract import (
    DEFAULT_BATCH,
    DEFAULT_PICTURES,
    HEAD_EMBEDDING,
    HEAD_HYBRID,
    HEAD_IMAGES,
    HEAD_MASKED,
    HEAD_SEQUENCE,
    HEAD_SPANS,
    HEAD_SPARSE,
    HEAD_TEXT,
    HEAD_TOKENS,
    HEAD_VECTORS,
    VECTORS,
)
from ..errors import InputError, flag_name, printable
from ..explain.records import Explanation
from ..report.explained import HEAD, in_words, rows
from . import run_images, run_prompts, run_ray, run_texts
from .console import check_place, counting_rows, make_table, print_json, run_command, table_console, write_npy
from .parsing import Parser, add_version, is_given, named_as_typed

if TYPE_CHECKING:
    from ..data.readers import Text
    from ..inference.predictor import Predictor

_PROMPTED = (HEAD_SEQUENCE, HEAD_VECTORS, *VECTORS)
_FOR_HEADS = {
    "text_pair": (HEAD_SEQUENCE, HEAD_SPANS),
    "aggregation": (HEAD_TOKENS,),
    "may_be_none": (HEAD_SPANS,),
    **dict.fromkeys(run_ray.WINDOWS, (HEAD_SPANS,)),
    "top_k": (HEAD_SPANS, HEAD_SEQUENCE, HEAD_VECTORS, HEAD_MASKED),
    "query": (HEAD_SEQUENCE, HEAD_VECTORS),
    "out_file": (HEAD_EMBEDDING, HEAD_HYBRID),
    "explain": (*_PROMPTED, HEAD_TOKENS, HEAD_SPANS),
    **dict.fromkeys(("prompt_name", "prompt"), _PROMPTED),
    "truncate_dim": (HEAD_EMBEDDING, HEAD_HYBRID),
    "max_active_dims": (HEAD_SPARSE,),
    **dict.fromkeys(run_ray.ZERO_SHOT, (HEAD_SEQUENCE,)),
}
"""Options that are about some heads only."""
LISTS = ("tokens", "kept", "dropped_at", "vector", "vectors", "sparse", "indices", "values")
"""Fields of an answer that tables have in another form, or no place for."""


def make_parser() -> Parser:
    parser = run_texts.TextsParser(
        prog="adtp-run",
        description="Answer texts with an exported model, on the best target that runs on this machine. Prints JSON lines on stdout.",
    )
    parser.add_argument(
        "out", metavar="OUT", help="output directory of adtp-export, or a Hugging Face Hub repository such as user/repo"
    )
    run_texts.add_texts(parser)
    _add_answers(parser)
    parser.add_argument(
        "--kept",
        action="store_true",
        help="also print the tokens, and which of them the model kept; for a vision tower, the places of kept image tokens",
    )
    _add_explanation(parser)
    run_prompts.add_generation(parser)
    run_ray.add_ray_options(parser)
    parser.add_argument(
        "--target",
        metavar="NAME",
        help="name of a target in the manifest (default: the best that runs on this machine)",
    )
    parser.add_argument(
        "--prefer",
        metavar="WHAT",
        default="precision",
        help="how the target is chosen: precision takes the fastest of the highest precision, speed the fastest (default: precision)",
    )
    parser.add_argument(
        "--batch-size",
        metavar="B",
        type=int,
        help=f"maximum number of texts per batch (default: {DEFAULT_BATCH}, and {DEFAULT_PICTURES} pictures for a vision tower); on CPUs "
        "batches of long texts are smaller",
    )
    parser.add_argument(
        "--threads",
        metavar="N",
        type=int,
        default=0,
        help="number of CPU threads (default: one for each core that may be used; with --ray 1 per worker)",
    )
    parser.add_argument(
        "--skip-hash-check",
        action="store_true",
        help="do not compare the SHA-256 of each file in OUT with the manifest before it is opened",
    )
    add_version(parser)
    return parser


def _add_answers(parser: Parser) -> None:
    answers = parser.add_argument_group("answers")
    answers.add_argument(
        "--aggregation",
        metavar="HOW",
        help="how the labels of tokens are merged into entities: none, simple, first, average or max (default: simple if labels are "
        "B-X and I-X, otherwise none)",
    )
    answers.add_argument(
        "--top-k",
        metavar="N",
        type=int,
        help="maximum number of answers to a question, of tokens for a masked one, or of texts printed for --query",
    )
    answers.add_argument(
        "--may-be-none",
        action="store_true",
        help="allow questions that their context does not answer; their answer is then empty",
    )
    for name, what in (
        ("--max-tokens", "maximum number of tokens of a question with its context that are read at once"),
        ("--stride", "number of tokens by which windows of a long context overlap"),
        ("--max-answer-tokens", "maximum number of tokens of an answer to a question"),
    ):
        answers.add_argument(name, metavar="N", type=int, help=f"{what} (default: the model's own)")
    answers.add_argument(
        "--query",
        metavar="Q",
        help="rank the texts by how well they match this query, best first; for rerankers, and models with token vectors",
    )
    answers.add_argument(
        "--out",
        dest="out_file",
        metavar="FILE",
        type=run_texts.place,
        help="write the embeddings to this .npy file, one fp32 row per text or picture; with --ray, the directory or URI to write to",
    )
    answers.add_argument(
        "--prompt-name",
        metavar="NAME",
        help="name of one of the model's prompts, which is prepended to each text, or to the --query",
    )
    answers.add_argument("--prompt", metavar="TEXT", help="text that is prepended instead of --prompt-name")
    answers.add_argument(
        "--truncate-dim",
        metavar="N",
        type=int,
        help="take the first N numbers of each vector (default: the model's own, mostly all)",
    )
    answers.add_argument(
        "--max-active-dims",
        metavar="N",
        type=int,
        help="keep the N largest weights of each sparse vector (default: the model's own, mostly all)",
    )
    run_ray.add_labels(parser)


def _add_explanation(parser: Parser) -> None:
    explanation = parser.add_argument_group("explanation")
    explanation.add_argument(
        "--explain",
        metavar="MODEL_DIR",
        type=Path,
        help="also print a table for each text: the attribution of the answer to its tokens, beside the tokens that the model kept. "
        "Of models that generate text: the attention flow to a generated token. MODEL_DIR is the checkpoint from which OUT was "
        "exported. Needs the extra export",
    )
    explanation.add_argument("--json", action="store_true", help="with --explain: print JSON lines instead of tables")
    explanation.add_argument(
        "--allow-pickle",
        action="store_true",
        help="with --explain: also load weights of MODEL_DIR from pickle files, which can run arbitrary code",
    )


def main() -> None:
    run_command("adtp-run", lambda: named_as_typed(command, make_parser().parse_args()))


def command(options: argparse.Namespace) -> int:
    from ..inference.predictor import load

    head = run_texts.head_of(options)
    options.batch_size = run_texts.batch_size(options.batch_size, head)
    if head == HEAD_IMAGES:
        return run_images.command(options, make_parser().get_default)
    run_texts.settle(options)
    run_ray.check_ray_options(options)
    if options.ray:
        if head != HEAD_TEXT:
            run_prompts.refuse(options)
        return run_ray.command(options)
    texts = run_texts.read(options)
    if head == HEAD_TEXT:
        return run_prompts.command(options, list(texts), make_parser().get_default)
    run_prompts.refuse(options)
    deployment = load(options.out, options.target, options.threads, options.prefer, not options.skip_hash_check)
    print(printable(f"adtp-run: {deployment.target}: {deployment.reason}"), file=sys.stderr)
    _check(options, deployment)
    if options.query is not None:
        return _rank(options, deployment, list(texts))
    if options.out_file is not None:
        return _write_vectors(options, deployment, texts)
    explained = _explained(options, deployment)
    with counting_rows() if options.file is not None else contextlib.nullcontext(lambda rows: None) as count:
        for before, chunk in run_texts.chunks(texts):
            with run_texts.naming_rows(before, len(chunk)):
                answers = _answers(options, deployment, chunk)
            for text, answer, told in zip(chunk, answers, explained(chunk)):
                named = {"question": text[0], "context": text[1]} if deployment.head == HEAD_SPANS else {"text": text}
                if told is not None and not options.json:
                    _print_table({**named, **answer}, told, deployment.sites)
                    continue
                explanation = {} if told is None else {"explanation": _as_json(told, deployment.sites)}
                print_json({**named, **answer, **explanation}, indent=None)
            sys.stdout.flush()
            count(len(chunk))
    return 0


def _check(options: argparse.Namespace, deployment: Predictor) -> None:
    """Raises InputError for options that are about other heads, or contradict one another."""
    for name, heads in _FOR_HEADS.items():
        if is_given(getattr(options, name)) and deployment.head not in heads:
            typed = "--out" if name == "out_file" else flag_name(name)
            raise InputError(
                f"{typed} is for models with the head {' or '.join(heads)}, and {options.out} has {deployment.head}; leave it out"
            )
    if deployment.head == HEAD_SPANS and options.text and not options.text_pair:
        raise InputError("--question: got no --context; give one for each question")
    several = deployment.head in (HEAD_SPANS, HEAD_MASKED)
    if options.top_k is not None and not several and options.query is None:
        raise InputError(
            f"--top-k is for models with the head {HEAD_SPANS} or {HEAD_MASKED}, or goes with --query Q; {options.out} has "
            f"{deployment.head}; leave it out"
        )
    for name in ("query", "out_file", "labels"):
        for printing in ("kept", "explain"):
            if getattr(options, printing) and getattr(options, name) is not None:
                typed = "--out" if name == "out_file" else flag_name(name)
                raise InputError(f"--{printing} prints tokens, and {typed} has no place for them")
    prompted = any(value is not None for value in _prompt(options).values())
    if options.query is None and deployment.head == HEAD_SEQUENCE and prompted:
        raise InputError("--prompt and --prompt-name go with --query Q, or a model of vectors; leave them out")
    if options.query is not None and options.labels is not None:
        raise InputError("--labels: classifies texts, and --query ranks them; leave one of them out")
    run_ray.check_labels(options)
    _check_explanation(options)


def _check_explanation(options: argparse.Namespace) -> None:
    if options.explain is None:
        for name in ("allow_pickle", "json"):
            if getattr(options, name):
                raise InputError(f"{flag_name(name)} goes with --explain MODEL_DIR; add that, or leave it out")
    elif changed := [*(run_ray.windows(options) or ())]:
        raise InputError(
            f"{flag_name(changed[0])}: --explain is about answers in the model's own windows; leave one of them out"
        )


def _answers(options: argparse.Namespace, deployment: Predictor, chunk: list[Text]) -> Iterable[dict[str, Any]]:
    """Return the fields to print of each text."""
    if deployment.head in _PROMPTED and deployment.head != HEAD_SEQUENCE:
        return _encoded(options, deployment, chunk)
    if options.labels is not None:
        asked = {**run_ray.zero_shot(options), "batch_size": options.batch_size}
        return [answer.to_json() for answer in deployment.zero_shot(chunk, **asked)]  # type: ignore[arg-type]
    if deployment.head == HEAD_MASKED:
        asked = {"batch_size": options.batch_size, **({} if options.top_k is None else {"top_k": options.top_k})}
        kept = deployment.kept(chunk, batch_size=options.batch_size) if options.kept else [None] * len(chunk)
        found = deployment.fill_mask(chunk, **asked)  # type: ignore[arg-type]
        return [{**answer.to_json(), **(own.to_json() if own else {})} for answer, own in zip(found, kept)]
    return [
        answer.to_json()
        for answer in deployment(
            chunk,
            return_kept=options.kept,
            batch_size=options.batch_size,
            aggregation=options.aggregation,
            top_k=1 if options.top_k is None else options.top_k,
            may_be_none=options.may_be_none,
            windows=run_ray.windows(options),
        )
    ]


def _encoded(options: argparse.Namespace, deployment: Predictor, chunk: list[Text]) -> Iterable[dict[str, Any]]:
    """Return the vector of each text, its sparse vector, or the vectors of its tokens; of a hybrid model all three."""
    asked = {**_prompt(options), "batch_size": options.batch_size}
    kept = deployment.kept(chunk, **asked) if options.kept else None
    answers: list[dict[str, Any]]
    if deployment.head == HEAD_EMBEDDING:
        dense = deployment.encode(chunk, **asked, truncate_dim=options.truncate_dim)  # type: ignore[arg-type]
        answers = [{"vector": vector.tolist()} for vector in dense]
    elif deployment.head == HEAD_SPARSE:
        sparse = deployment.encode_sparse(chunk, **asked, max_active_dims=options.max_active_dims)  # type: ignore[arg-type]
        answers = [found.to_json() for found in sparse]
    elif deployment.head == HEAD_VECTORS:
        answers = [{"vectors": found.tolist()} for found in deployment.encode_document(chunk, **asked)]  # type: ignore[arg-type]
    else:
        hybrid = deployment.encode_hybrid(chunk, **asked, truncate_dim=options.truncate_dim)  # type: ignore[arg-type]
        answers = [{"vector": d.tolist(), "sparse": s.to_json(), "vectors": v.tolist()} for d, s, v in zip(*hybrid)]
    return [{**answer, **(kept[i].to_json() if kept else {})} for i, answer in enumerate(answers)]


def _prompt(options: argparse.Namespace) -> dict[str, Any]:
    return {"prompt_name": options.prompt_name, "prompt": options.prompt}


_Told = tuple[list[str], Explanation]
"""The tokens of a text, and the explanation of its answer."""


def _explained(options: argparse.Namespace, deployment: Predictor) -> Callable[[list[Text]], Iterable[_Told | None]]:
    """Return a function that explains the answers to texts, with None for each where nothing is to be explained."""
    if options.explain is None:
        return lambda chunk: [None] * len(chunk)
    from ..data.tokenize import strings
    from ..pipeline.explain import explainer

    explain = explainer(options.explain, options.out, deployment.manifest, options.allow_pickle)
    return lambda chunk: (
        (strings(deployment.tokenizer, placed.row.input_ids), explain(placed))
        for placed in deployment.placed(chunk, **_prompt(options))
    )


def _as_json(told: _Told, sites: Sequence[str]) -> dict[str, Any]:
    tokens, explanation = told
    return {
        "figures": explanation.figures,
        "tokens": tokens,
        "dropped_at": [sites[i] if i < len(sites) else None for i in explanation.kept_site],
        "attribution": explanation.attribution,
        "flow": explanation.flow,
        "flowed": explanation.flowed,
    }


def _print_table(answer: Mapping[str, Any], told: _Told, sites: Sequence[str]) -> None:
    """Print an answer, and a row for each token: what rests on it, and what became of it."""
    from rich.text import Text as Cell

    for name, value in answer.items():
        if name not in LISTS:
            print(printable(f"{name}: {value}"))
    table = make_table(*HEAD)
    for row in rows(*told, sites):
        table.add_row(*(Cell(printable(cell)) for cell in row))
    table_console().print(table)
    if figures := in_words(told[1].figures):
        print(figures)
    print()


def _rank(options: argparse.Namespace, deployment: Predictor, texts: list[Text]) -> int:
    """Print the texts in the order in which they fit the query."""
    if any(not isinstance(text, str) for text in texts):
        raise InputError(f"--query: got pairs; accepted are single texts, so {run_texts.instead_of_pairs(options)}")
    asked = {**_prompt(options), "top_k": options.top_k, "batch_size": options.batch_size}
    found = deployment.rank(options.query, texts, **asked)  # type: ignore[arg-type]
    for ranked in found:
        print_json({"text": ranked.text, "score": ranked.score, "index": ranked.index}, indent=None)
    return 0


def _write_vectors(options: argparse.Namespace, deployment: Predictor, texts: Iterable[Text]) -> int:
    """Write the vectors of all texts to one file; errors are those of `check_place` and `write_npy`."""
    import numpy as np

    check_place("--out", options.out_file, ".npy")
    with counting_rows() as count:
        parts = []
        for before, chunk in run_texts.chunks(texts):
            asked = {**_prompt(options), "batch_size": options.batch_size, "truncate_dim": options.truncate_dim}
            with run_texts.naming_rows(before, len(chunk)):
                parts.append(deployment.encode(chunk, **asked))  # type: ignore[arg-type]
            count(len(chunk))
    write_npy(options.out_file, np.concatenate(parts))
    return 0
