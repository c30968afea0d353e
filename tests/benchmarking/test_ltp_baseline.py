"""LTP as a peer: thresholds that keep a share, found in PyTorch and set in the exported file."""

import numpy as np
import pytest
from testbed import as_numpy, make_batch
from tolerances import assert_within_oracle, oracle_on

from adtp_export.benchmarking import ltp_baseline as thresholds
from adtp_export.benchmarking.contenders import Architecture
from adtp_export.errors import InputError
from adtp_export.graph.debug import debug_form
from adtp_export.model.flops import Shape, alive_tokens
from adtp_export.model.packed import PackedStudent
from adtp_export.runtimes.onnxruntime import OnnxRuntimeEngine

FOUR_LAYERS = Architecture(Shape(hidden=32, intermediate=64, heads=4, layers=4))


@pytest.fixture(scope="module")
def peer(tmp_path_factory):
    return thresholds.ltp_peer(FOUR_LAYERS, 24, tmp_path_factory.mktemp("ltp"))


@pytest.mark.parametrize("retention", [0.3, 0.5, 0.8, 1.0])
@pytest.mark.parametrize("lengths", [[24], [24, 13, 7, 18]], ids=str)
def test_rising_thresholds_hit_the_retention(peer, lengths, retention):
    batch = make_batch(lengths, 24, vocab_size=30000)
    found = thresholds.find_thresholds(peer.student, batch, retention)
    assert found == pytest.approx([found[-1] * (layer + 1) / 4 for layer in range(4)])
    thresholds.set_thresholds(peer.student, found)
    assert thresholds.mean_retention(PackedStudent(peer.student), batch) == pytest.approx(retention, abs=0.02)
    counts = [int(decision.count.sum()) for decision in peer.student(**batch).decisions]
    assert np.mean(counts) / sum(lengths) == pytest.approx(retention, abs=0.02)


def test_the_exported_file_takes_thresholds_from_outside(peer):
    """For two batches, each with thresholds of its own, the file keeps what the padded student keeps."""
    assert (peer.contender.name, peer.contender.sites) == ("ltp-4", ("0.ffn", "1.ffn", "2.ffn", "3.ffn"))
    with debug_form(peer.contender.path) as path:
        engine = OnnxRuntimeEngine(path)
    for lengths, retention in (([24, 13, 7, 18], 0.5), ([9, 20], 0.7)):
        inputs = make_batch(lengths, max(lengths), vocab_size=30000)
        settings = peer.settings(as_numpy(inputs), retention)
        assert engine.inputs[3:] == tuple(settings)
        answer = engine.run({**as_numpy(inputs), **settings})
        thresholds.set_thresholds(peer.student, [float(value) for value in settings.values()])
        expected = peer.student(**inputs)
        assert np.array_equal(answer["kept_site"], expected.kept_site)
        assert_within_oracle(oracle_on(peer.student, inputs), {"logits": answer["logits"]})
        alive = np.mean([n.sum() for n in alive_tokens(answer["kept_site"], 4)[1:]]) / sum(lengths)
        assert alive == pytest.approx(retention, abs=0.02)


def test_a_retention_below_cls_alone_is_refused(peer):
    with pytest.raises(InputError, match=r"a share of 0.1 of .* share is 0.250"):
        thresholds.find_thresholds(peer.student, make_batch([4, 4], 4, vocab_size=30000), 0.1)
