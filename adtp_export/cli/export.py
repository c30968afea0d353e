"""`adtp-export`: a student checkpoint becomes a verified ONNX file and engines."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..artifacts.records import Manifest
from ..pipeline.export.options import ExportOptions
from ..report.names import statuses
from ..report.targets import ALLOWED, SIZE, groups
from .console import Console, make_table, print_json, print_path, run_command
from .parsing import Parser, parser_of, read


def make_parser() -> Parser:
    return parser_of(
        ExportOptions,
        prog="adtp-export",
        description="Turn a transformers encoder, token-pruned or plain, into a portable ONNX file that drops padding first. --trt "
        "adds TensorRT engines. Each file that runs on this machine is compared with the PyTorch model.",
        epilog="Exit codes: 0 built and verified; 1 verification failed; 2 bad input; 3 a dependency is missing; "
        "4 a runtime refused the model; 70 a bug. On 1 to 4 nothing is written to the output directory.",
        json="the manifest",
    )


def main() -> None:
    run_command("adtp-export", lambda: command(*read(make_parser())))


def command(as_json: bool, options: Mapping[str, Any]) -> int:
    from ..pipeline.export.export import export

    console = Console()
    manifest = export(**options, steps=console)
    if as_json:
        print_json(manifest.to_json())
    else:
        _summarize(manifest, ExportOptions(**options).directory, console)
    return 0


def _summarize(manifest: Manifest, out: Path, console: Console) -> None:
    divided = groups(manifest)
    for group in divided:
        rows = [{t: cell for t, cell in row.items() if t not in (ALLOWED, SIZE)} for row in group.columns(manifest)]
        table = make_table(*rows[0], title=group.told if len(divided) > 1 else None)
        for row in rows:
            table.add_row(*row.values())
        console.print(table)
    for note in manifest.notes:
        console.note(note.text)
    for status, meaning in statuses(manifest).items():
        console.note(f"{status}: {meaning}")
    total = sum(manifest.durations_s.values())
    console.print(
        f"{out}  {len(manifest.files)} files, {sum(f['bytes'] for f in manifest.files.values()) / 1e6:.1f} MB, {total:.1f} s"
    )
    print_path(out)
