"""Checkpoints of other systems beside the repository, made with their own code, and what a test asks of every one of them."""

import dataclasses
import json
import shutil
from functools import cached_property
from pathlib import Path

import numpy as np
import pytest
import torch
from known_graphs import known_graph
from testbed import as_numpy, shared_or_skip

from adtp_export.graph import program
from adtp_export.graph.debug import debug_form
from adtp_export.imports import ReadOptions, open_checkpoint
from adtp_export.model.packed import PackedStudent
from adtp_export.runtimes.onnxruntime import OnnxRuntimeEngine
from adtp_export.runtimes.openvino import OpenVinoEngine
from adtp_export.verify.oracle import MULTIPLE, run_oracle


@dataclasses.dataclass(frozen=True, kw_only=True)
class Original:
    """One system: its folder, how it is read, and a folder to write to.

    rows: of the reference's arrays, those of our sites; None: all.
    """

    folder: Path
    options: ReadOptions
    work: Path
    rows: tuple[int, ...] | None = None

    @classmethod
    def open(cls, system, tmp_path_factory, options=None, **fields):
        """Skips where the material is not there."""
        folder = shared_or_skip(f"originals/{system}")
        options = options or ReadOptions(allow_pickle=True)
        return cls(folder=folder, options=options, work=tmp_path_factory.mktemp(system), **fields)

    @property
    def directory(self):
        return self.folder / "checkpoint"

    @cached_property
    def told(self):
        return json.loads((self.folder / "golden.json").read_text())

    @cached_property
    def golden(self):
        """What the original and the reference answered; of what is known by site, our sites."""
        stored = dict(np.load(self.folder / "golden.npz"))
        by_site = ("kept", "score", "margin")
        return {
            n: a[list(self.rows)] if self.rows and n.rpartition("_")[2] in by_site else a for n, a in stored.items()
        }

    def read(self):
        return open_checkpoint(self.directory, self.options)

    @cached_property
    def checkpoint(self):
        return self.read()

    @cached_property
    def batch(self):
        return {name: torch.from_numpy(self.golden[name]) for name in self.checkpoint.student.input_names}

    @cached_property
    def tolerance(self):
        """What fp32 may be off: the multiple that targets are judged by, of what PyTorch in fp32 is off on these rows."""
        return MULTIPLE * run_oracle(self.checkpoint.student, [as_numpy(self.batch)]).output_errors["logits"]

    @cached_property
    def exported(self):
        path = self.work / "model.onnx"
        program.save(known_graph(self.checkpoint.student), path)
        return path

    def copy(self, place):
        """Return a copy of the checkpoint that can be edited."""
        directory = Path(shutil.copytree(self.directory, place))
        for path in directory.iterdir():
            path.chmod(0o644)
        return directory

    def kept(self):
        """Tokens after each site, as the student in its present state keeps them."""
        return np.stack([decision.kept for decision in self.checkpoint.student(**self.batch).decisions])

    def check_reference(self):
        """In fp64 the padded student is the reference: logits, and at every site scores, kept tokens and margins."""
        answer = self.read().student.double()(**self.batch)
        np.testing.assert_allclose(answer.logits, self.golden["ref_logits"], rtol=0, atol=1e-12)
        assert len(answer.decisions) == len(self.golden["ref_kept"]) > 0
        for i, decision in enumerate(answer.decisions):
            assert np.array_equal(decision.kept, self.golden["ref_kept"][i])
            asked = decision.live.numpy().copy()
            asked[:, 0] &= np.isfinite(self.golden["ref_score"][i][:, 0])
            found, expected = decision.rule.order[asked], self.golden["ref_score"][i][asked]
            np.testing.assert_allclose(found, expected, rtol=0, atol=1e-12)
            margin = decision.rule.margins(decision.live)[1].numpy()
            finite = np.isfinite(margin)
            assert finite.any()
            np.testing.assert_allclose(margin[finite], self.golden["ref_margin"][i][finite], rtol=0, atol=1e-12)

    def check_states(self):
        """In fp64 dropped tokens, too, end with the state that the reference gives them."""
        student = self.read().student.double()
        states = student.encode(*(self.batch[n] for n in ("input_ids", "attention_mask", "token_type_ids")))[0]
        live = self.batch["attention_mask"].bool().numpy()
        np.testing.assert_allclose(states[live], self.golden["ref_hidden"][live], rtol=0, atol=1e-12)

    def check_packed(self):
        (logits,), _ = PackedStudent(self.checkpoint.student)(**self.batch)
        assert np.abs(logits.numpy() - self.golden["ref_logits"]).max() <= self.tolerance

    def check_engine(self, load):
        """After every site the tokens of the reference, and its logits to fp32 rounding."""
        with debug_form(self.exported) as debug:
            answer = load(debug).run(as_numpy(self.batch))
        for site, kept in enumerate(self.golden["ref_kept"]):
            assert np.array_equal(answer["kept_site"] > site, kept)
        assert np.abs(answer["logits"] - self.golden["ref_logits"]).max() <= self.tolerance


class AgainstReference:
    """What is asked of every system; a test class derives from it, beside a fixture `original`."""

    def test_pytorch_in_fp64_is_the_reference(self, original):
        original.check_reference()

    def test_packed_pytorch(self, original):
        original.check_packed()

    def test_onnx_runtime(self, original):
        original.check_engine(OnnxRuntimeEngine)

    @pytest.mark.usefixtures("has_openvino")
    def test_openvino(self, original):
        original.check_engine(OpenVinoEngine)


def edit(directory, **changes):
    """Change fields of a directory's config.json; return the directory."""
    path = directory / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    return directory
