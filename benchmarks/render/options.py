"""Tables of the commands' options, made of their parsers: `python -m benchmarks.render` puts them into the documents.

A document marks the place with ``<!-- options: COMMAND -->`` and ``<!-- end of options -->``; ``COMMAND#GROUP`` is one group of them.
"""

from __future__ import annotations

import argparse
import html
import importlib
import keyword
import re

DOCUMENTS = ("docs/options.md", "docs/export.md")


def parser_of(command: str) -> argparse.ArgumentParser:
    """Return the parser of a command, or of a subcommand such as ``adtp-plugin build``."""
    name, *subcommand = command.split(" ")
    module = name.removeprefix("adtp-")
    parser = importlib.import_module(f"adtp_export.cli.{module}{'_' * keyword.iskeyword(module)}").make_parser()
    if not subcommand:
        return parser
    (commands,) = (action for action in parser._actions if isinstance(action, argparse._SubParsersAction))
    return commands.choices[subcommand[0]]


def render_options(command: str, only: str = "") -> str:
    """Return a table for each group of a command's options, or for one of them alone."""
    parser, parts = parser_of(command), []
    for group in parser._action_groups:
        rows = [row(parser, action) for action in group._group_actions if action.dest not in ("help", "version")]
        if not rows or only not in ("", group.title):
            continue
        title = [] if only or group.title in ("positional arguments", "options") else [f"**{group.title}**", ""]
        parts.append("\n".join([*title, "| option | what it does |", "| --- | --- |", *rows]))
    return "\n\n".join(parts)


def row(parser: argparse.ArgumentParser, action: argparse.Action) -> str:
    formatter = parser._get_formatter()
    value = formatter._format_args(action, action.metavar or action.dest)
    names = [f"`{f'{flag} {value}'.strip()}`" for flag in action.option_strings] or [f"`{value}`"]
    told = html.escape(formatter._expand_help(action), quote=False)
    return f"| {', '.join(names)} | {told} |"


def fill(document: str) -> str:
    """Return a document with every marked table rendered anew."""

    def replace(match: re.Match[str]) -> str:
        command, _, group = match[1].partition("#")
        return f"<!-- options: {match[1]} -->\n{render_options(command, group)}\n<!-- end of options -->"

    return re.sub(r"<!-- options: ([^\n]+?) -->\n.*?<!-- end of options -->", replace, document, flags=re.DOTALL)
