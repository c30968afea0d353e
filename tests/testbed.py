"""What tests use: batches, students (the trained one of the repository, small random ones, real ones), and commands."""

from __future__ import annotations

import functools
import gc
import importlib
import json
import keyword
import multiprocessing
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from multiprocessing import forkserver
from pathlib import Path

import known_graphs
import numpy as np
import onnx_ir as ir
import pytest
import quick_traces  # noqa: F401 - makes them quick
import torch
from filelock import FileLock
from safetensors.torch import load_file, save_file
from tiny_models import HEAD_FIELDS, PRUNINGS, SITE_SETS, TINY_BACKBONES, TINY_BERT, make_encoder, make_student

from adtp_export.artifacts.records import file_entry
from benchmarks.serving import triton_server

# Tests import these from here.
__all__ = ["HEAD_FIELDS", "PRUNINGS", "SITE_SETS", "TINY_BACKBONES", "TINY_BERT", "make_encoder", "make_student"]

ROOT = Path(__file__).parent.parent
DEMO = ROOT / "demo" / "student"
SHARED = ROOT.parent / "shared"


def make_batch(lengths, padded, vocab_size=97, types=2, seed=0):
    """Random right-padded int64 inputs as torch tensors."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.as_tensor(lengths)
    mask = (torch.arange(padded) < lengths[:, None]).long()
    ids = torch.randint(1, vocab_size, mask.shape, generator=generator) * mask
    batch = {"input_ids": ids, "attention_mask": mask}
    if types > 1:
        batch["token_type_ids"] = torch.randint(0, types, mask.shape, generator=generator) * mask
    return batch


def replaced_during(monkeypatch, module, name, out):
    """Have another export take the place of `out` when a function of a module is called first; return a list that grows by each call."""
    real, calls = getattr(module, name), []

    def replace_meanwhile(*arguments):
        calls.append(1)
        if len(calls) == 1:
            document = json.loads((out / "manifest.json").read_text())
            document["notes"] = [{"about": "", "text": "another export"}]
            (out / "manifest.json").write_text(json.dumps(document))
        return real(*arguments)

    monkeypatch.setattr(module, name, replace_meanwhile)
    return calls


def relist(out: Path, targets=None) -> Path:
    """Have the manifest of an edited output directory list what is there now, as an export would have written it."""
    document = json.loads((out / "manifest.json").read_text())
    document["targets"] |= targets or {}
    files = [path for path in out.rglob("*") if path.is_file() and path.name != "manifest.json"]
    document["files"] = {path.relative_to(out).as_posix(): file_entry(path) for path in files}
    (out / "manifest.json").write_text(json.dumps(document))
    return out


def listing(directory: Path) -> dict[str, bytes]:
    """Return the content of every file below a directory, by its place in it."""
    return {p.relative_to(directory).as_posix(): p.read_bytes() for p in directory.rglob("*") if p.is_file()}


def exported_graph(*sites) -> bytes:
    """The file of `make_student(sites)`, as bytes: an export takes seconds, and many tests look at the same one."""
    metadata = {"version": "test", "precision": "fp32", "prune_sites": list(sites)}
    return ir.to_proto(known_graphs.known_graph(make_student(sites), metadata)).SerializeToString()


def as_numpy(batch):
    return {name: tensor.numpy() for name, tensor in batch.items()}


def as_ties(batch):
    """An oracle's answers to a batch, as if all decisions of its retainers had been ties, and any number of tokens could stay."""
    rules = [replace(d.rule, order=torch.zeros_like(d.rule.order), counts=None) for d in batch.exact.decisions]
    ties = tuple(replace(d, rule=rule) for d, rule in zip(batch.exact.decisions, rules))
    return replace(batch, margins=np.zeros_like(batch.margins), exact=replace(batch.exact, decisions=ties))


def one_thread():
    """Options of a session that stays on its worker's core: by itself ONNX Runtime binds a thread to every core of the machine, and these
    spin where other workers run."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    return options


@pytest.fixture
def on_cores(monkeypatch):
    """Return a function that sets how many cores there seem to be, and the CPU limit of this process."""
    from adtp_export import environment

    def pretend(cores: int, quota: float | None = None, described: bool = True) -> None:
        told = {"_physical_cores": cores if described else None, "_affine_cores": cores, "_quota": quota}
        for name, value in told.items():
            monkeypatch.setattr(environment, name, lambda value=value: value)

    return pretend


@pytest.fixture(scope="session")
def has_openvino():
    from adtp_export.runtimes import openvino

    if openvino.installed() is None:
        pytest.skip("OpenVINO is not installed")


@pytest.fixture(scope="session")
def has_rtx():
    from adtp_export.runtimes import tensorrt

    if tensorrt.RTX.installed() is None:
        pytest.skip("TensorRT-RTX is not installed")


@pytest.fixture(scope="session")
def has_ctranslate2():
    from adtp_export.runtimes import ctranslate2

    if ctranslate2.installed() is None:
        pytest.skip("CTranslate2 is not installed")


@pytest.fixture(scope="session")
def has_triton():
    if (why := triton_server.obstacle()) is not None:
        pytest.skip(why)


@pytest.fixture
def no_gpu():
    """For what is said and done where there is no GPU."""
    from adtp_export.runtimes import cuda

    if (gpu := cuda.local_gpu()) is not None:
        pytest.skip(f"this machine has a {gpu}")


@pytest.fixture(scope="session")
def demo() -> Path:
    return DEMO


@pytest.fixture(scope="session")
def small(tmp_path_factory, demo) -> Path:
    """The first two layers of the demo student: half the time to export, for tests that look at something else."""
    directory = Path(shutil.copytree(demo, tmp_path_factory.mktemp("small") / "student"))
    config = json.loads((directory / "config.json").read_text())
    config |= {"num_hidden_layers": 2, "prune_sites": ["1.attention"]}
    (directory / "config.json").write_text(json.dumps(config))
    weights = load_file(directory / "model.safetensors")
    gone = re.compile(r"layer\.[23]\.|retainers\.2_ffn")
    save_file(
        {k: v for k, v in weights.items() if not gone.search(k)}, directory / "model.safetensors", {"format": "pt"}
    )
    return directory


@pytest.fixture
def checkpoint_dir(tmp_path, demo) -> Path:
    """A copy of the demo student to break."""
    return Path(shutil.copytree(demo, tmp_path / "student"))


def write_plain_bert(demo: Path, directory: Path) -> Path:
    """Write the demo student's encoder as a plain transformers classifier: no retainers, transformers' own config."""
    from adtp_export.model.checkpoint import load_checkpoint

    dense = load_checkpoint(demo).student.dense
    dense.config.id2label, dense.config.label2id = {0: "bad", 1: "good"}, {"bad": 0, "good": 1}
    weights = {name: weight for name, weight in dense.state_dict().items() if ".retainers." not in name}
    dense.save_pretrained(directory, state_dict=weights)
    for name in ("tokenizer.json", "tokenizer_config.json", "vocab.txt"):
        shutil.copy(demo / name, directory)
    return directory


@pytest.fixture
def plain_bert(tmp_path, demo) -> Path:
    return write_plain_bert(demo, tmp_path / "plain")


@pytest.fixture
def edit_config(checkpoint_dir):
    def edit(**changes):
        path = checkpoint_dir / "config.json"
        config = json.loads(path.read_text())
        for name, value in changes.items():
            if value is None:
                config.pop(name)
            else:
                config[name] = value
        path.write_text(json.dumps(config))
        return checkpoint_dir

    return edit


FORKSERVER = multiprocessing.get_context("forkserver")
FORKSERVER.set_forkserver_preload(["preloaded", "testbed"])


@functools.cache
def start_forkserver() -> None:
    """Start it with this folder on its path, where `preloaded` is."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")]))
        forkserver.ensure_running()


class Command:
    """One of the commands, or a script of the tests, in a process of its own, forked from one that has imported torch and transformers.

    prelude: Python to run in that process first, such as what breaks something.
    """

    def __init__(self, command: str, *arguments, cwd=None, env=None, prelude: str = "") -> None:
        self.argv = [command, *map(str, arguments)]
        self._scratch = tempfile.TemporaryDirectory()
        self._streams = [Path(self._scratch.name, name) for name in ("stdout", "stderr")]
        settings = (
            self.argv,
            self._streams,
            self._scratch.name,
            cwd,
            {**(env or {}), "COLUMNS": "200"},
            known_graphs.prelude() + prelude,
        )
        start_forkserver()
        self.process = FORKSERVER.Process(target=_run_command, args=settings)
        self.process.start()

    def wait_for(self, seen) -> None:
        """Wait until `seen()` is true, or the command has ended."""
        deadline = time.monotonic() + 120
        while not seen() and self.process.is_alive():
            assert time.monotonic() < deadline
            time.sleep(0.01)

    def finish(self, kill: int = 0) -> subprocess.CompletedProcess:
        """Send the signal `kill`, if any, and wait for the end."""
        if kill:
            os.kill(self.process.pid, kill)
        self.process.join()
        said = (stream.read_text() if stream.exists() else "" for stream in self._streams)
        result = subprocess.CompletedProcess(self.argv, self.process.exitcode, *said)
        self._scratch.cleanup()
        return result


def run_cli(command: str, *arguments, **options) -> subprocess.CompletedProcess:
    return Command(command, *arguments, **options).finish()


def _run_command(argv, streams, scratch, cwd, env, prelude):
    gc.freeze()  # what was there before the fork is no garbage of the command
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job ignores it
    for number, stream in enumerate(streams, start=1):
        os.dup2(os.open(stream, os.O_WRONLY | os.O_CREAT), number)
    tempfile.tempdir = os.environ["TMPDIR"] = scratch  # what a command leaves that is killed goes with it
    os.environ.update(env)
    os.chdir(cwd or ".")
    sys.argv = argv
    exec(prelude, {})
    command_module(argv[0]).main()


def command_module(command: str):
    """The module of a command: "adtp-export" has `cli/export.py`; Python has no name `import`. A script of the tests is its own."""
    if not command.startswith("adtp-"):
        return importlib.import_module(command)
    name = command.removeprefix("adtp-")
    return importlib.import_module(f"adtp_export.cli.{name}{'_' * keyword.iskeyword(name)}")


def shared_folder(tmp_path_factory) -> Path:
    """A folder for all workers of a run."""
    base = tmp_path_factory.getbasetemp()
    return base.parent if "PYTEST_XDIST_WORKER" in os.environ else base


@pytest.fixture(scope="session")
def exported(tmp_path_factory, demo) -> Path:
    """The demo student, exported by the command, with an engine where TensorRT-RTX is installed. Copy it to change it: the
    first worker that asks makes it for all."""
    from adtp_export.runtimes import openvino, tensorrt

    base = shared_folder(tmp_path_factory)
    out = base / "exported" / "demo-export"
    with FileLock(base / "exported.lock"):
        if not out.exists():  # it is renamed into its place when it is whole
            asked = {"--trt": tensorrt.RTX.installed(), "--openvino": openvino.installed()}
            extra = [option for option, installed in asked.items() if installed]
            with known_graphs.taking_known_graphs():
                result = run_cli("adtp-export", demo, "--out", out, *extra)
            assert result.returncode == 0, result.stderr
    return out


def made_once(tmp_path_factory, name: str, make) -> Path:
    """Return a folder of this name, which `make` fills: the first worker that asks makes it for all."""
    folder = shared_folder(tmp_path_factory) / name
    with FileLock(f"{folder}.lock"):
        if not folder.exists():
            work = tmp_path_factory.mktemp(name)
            make(work)
            work.rename(folder)  # when it is whole
    return folder


@pytest.fixture(scope="session")
def packed_export(tmp_path_factory, small) -> Path:
    """A folder with the small student's export `out`, with packed inputs in fp32 and fp16, and its Triton `repository`."""
    import adtp_export

    def make(work):
        settings = {"precisions": ["fp32", "fp16"], "triton": work / "repository", "triton_name": "small"}
        with known_graphs.taking_known_graphs():
            adtp_export.export(small, work / "out", **settings)

    return made_once(tmp_path_factory, "packed-export", make)


def shared_or_skip(relative: str) -> Path:
    path = SHARED / relative
    if not path.exists():
        pytest.skip(f"needs {relative} of the material beside the repository, which is not here")
    return path


def flat_kept(rows, shape, num_sites):
    """kept_site from the packed student's rows, in plain numpy: what AddKeptSite must compute."""
    kept = np.full(shape, -1, np.int32).reshape(-1)
    origin = None
    for i, row in enumerate(rows):
        origin = row.numpy() if origin is None else origin[row.numpy()]
        kept[origin] = i
    return kept.reshape(shape)
