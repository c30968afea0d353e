"""`adtp-plugin`: build the attention plugin's libraries, say what is built; with --kernels, compile its kernels anew."""

from __future__ import annotations

import argparse
from pathlib import Path

from ..errors import InputError, MissingDependencyError
from .console import Console, print_json, print_path, run_command
from .parsing import Parser, add_version


def make_parser() -> Parser:
    parser = Parser(
        prog="adtp-plugin",
        description="Build the libraries of the ragged-attention plugin: for C++ applications that load TensorRT engines, for ONNX "
        "Runtime on CPUs, and for whole encoders on NVIDIA GPUs.",
    )
    add_version(parser)
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    build = commands.add_parser(
        "build",
        help="compile libadtp_plugins.so, libadtp_cpu.so or libadtp_cuda.so",
        description="Compile libadtp_plugins.so with CMake and a C++17 compiler. It needs the TensorRT headers, from "
        "TENSORRT_ROOT or the system's paths. It needs neither CUDA nor TensorRT itself. After that, adtp-export --trt "
        "puts the library into OUT/plugins.",
    )
    what = build.add_mutually_exclusive_group()
    what.add_argument(
        "--cpu",
        action="store_true",
        help="compile libadtp_cpu.so instead, the attention operators for ONNX Runtime on CPUs, which needs no headers. It is used in "
        "place of the one in the package",
    )
    what.add_argument(
        "--cuda",
        action="store_true",
        help="compile libadtp_cuda.so instead, which needs no headers. load runs the files of adtp-export --cuda with it, and "
        "adtp-export puts it into OUT/plugins",
    )
    build.add_argument(
        "--all",
        action="store_true",
        help="with --cpu: compile the package's own libraries anew, for every system that it has one for; needs ziglang",
    )
    build.add_argument(
        "--out",
        metavar="DIR",
        type=Path,
        help="directory to write the library to (default: the installed package, where load and adtp-export look for it)",
    )
    what.add_argument(
        "--kernels", action="store_true", help="first recompile the kernels from source with Triton; needs no GPU"
    )
    build.add_argument("--json", action="store_true", help="print what was built on stdout")
    build.set_defaults(command=build_library)
    built = commands.add_parser(
        "list", help="list the libraries that are built", description="List the libraries that are built."
    )
    built.add_argument("--json", action="store_true", help="print them as one JSON object")
    built.set_defaults(command=list_libraries)
    path = commands.add_parser(
        "path",
        help="print where the attention operators for ONNX Runtime on CPUs are",
        description="Print the path of libadtp_cpu.so, which any application of ONNX Runtime can register: the one that was built here, "
        "or else the one in the package.",
    )
    path.set_defaults(command=operators_path)
    return parser


def main() -> None:
    run_command("adtp-plugin", lambda: command(make_parser().parse_args()))


def command(options: argparse.Namespace) -> int:
    return options.command(options)


def build_library(options: argparse.Namespace) -> int:
    console = Console()
    if options.all:
        return build_all(options, console)
    from ..plugins import binaries, library, operators, runner

    if options.kernels:
        from ..plugins import ahead_of_time
        from ..plugins.encoder import binaries as of_encoder

        with console.step("kernels_s", "compiling the kernels") as progress:
            ahead_of_time.build(binaries.DIRECTORY, binaries.table(), progress)
        with console.step("encoder_kernels_s", "compiling the kernels of a whole encoder") as progress:
            ahead_of_time.build(binaries.DIRECTORY, of_encoder.table(), progress)
        for cached in (binaries.manifest, binaries.binary, of_encoder.manifest, of_encoder.entry, of_encoder.binary):
            cached.cache_clear()
    made = operators if options.cpu else runner if options.cuda else library
    with console.step("library_s", f"compiling {made.FILE}"):
        path = made.build(options.out or library.BUILT)
    if options.json:
        document = {"library": str(path), "bytes": path.stat().st_size, "durations_s": console.durations_s}
        print_json(document, indent=None)
    else:
        print_path(path)
    return 0


def build_all(options: argparse.Namespace, console: Console) -> int:
    if not options.cpu:
        raise InputError("--all is about the attention operators for CPUs; type: adtp-plugin build --cpu --all")
    from ..plugins import operators, operators_ahead

    with console.step("libraries_s", f"compiling {', '.join(operators_ahead.SYSTEMS)}") as progress:
        written = operators_ahead.build(options.out or operators.COMPILED, progress)
    if options.json:
        print_json({"written": list(map(str, written)), "durations_s": console.durations_s}, indent=None)
    else:
        for path in written:
            print_path(path)
    return 0


def list_libraries(options: argparse.Namespace) -> int:
    from ..plugins import library, operators, runner

    built = {made.FILE: made.built() for made in (library, operators, runner)}
    why = {
        library.FILE: "is not built; type: adtp-plugin build",
        runner.FILE: "is not built; type: adtp-plugin build --cuda",
    }
    try:
        built[operators.FILE] = operators.library()
    except MissingDependencyError as error:
        built[operators.FILE], why[operators.FILE] = None, f"is not used: {error}"
    if options.json:
        print_json({name: path and str(path) for name, path in built.items()}, indent=None)
        return 0
    for name, path in built.items():
        print(path or f"{name} {why[name]}")
    return 0


def operators_path(options: argparse.Namespace) -> int:
    from ..plugins import operators

    print_path(operators.library())
    return 0
