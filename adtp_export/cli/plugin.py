"""`adtp-plugin`: build the attention plugin's C++ library; with --kernels, compile its kernels anew."""

from __future__ import annotations

import argparse
from pathlib import Path

from .. import __version__
from .console import Console, Parser, print_json, print_path, run_command


def make_parser() -> Parser:
    parser = Parser(
        prog="adtp-plugin",
        description="Build the ragged attention plugin that TensorRT applications load with an engine.",
    )
    parser.add_argument("--version", action="version", version=f"adtp-plugin {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    build = commands.add_parser(
        "build",
        help="compile libadtp_plugins.so",
        description="Compile libadtp_plugins.so with CMake and a C++17 compiler. It needs the TensorRT headers, from "
        "TENSORRT_ROOT or the system's paths. It needs neither CUDA nor TensorRT itself. After that, adtp-export --trt "
        "puts the library into OUT/plugins.",
    )
    build.add_argument("--out", metavar="DIR", type=Path, help="write it there instead of into the installed package")
    build.add_argument(
        "--kernels", action="store_true", help="first compile the kernels from their source, with Triton; needs no GPU"
    )
    build.add_argument("--json", action="store_true", help="print what was built on stdout")
    return parser


def main() -> None:
    options = make_parser().parse_args()
    run_command("adtp-plugin", lambda: command(options))


def command(options: argparse.Namespace) -> int:
    console = Console()
    from ..plugins import binaries, library

    if options.kernels:
        from ..plugins import ahead_of_time

        with console.step("kernels_s", "compiling the kernels") as progress:
            ahead_of_time.build(binaries.DIRECTORY, progress)
        binaries.manifest.cache_clear()
        binaries.binary.cache_clear()
    with console.step("library_s", f"compiling {library.FILE}"):
        path = library.build(options.out or library.BUILT)
    if options.json:
        document = {"library": str(path), "bytes": path.stat().st_size, "durations_s": console.durations_s}
        print_json(document, indent=None)
    else:
        print_path(path)
    return 0
