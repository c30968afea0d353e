"""Which variant a call takes: the same in both hosts, and by the record of a GPU no slower than by the mean length alone."""

import itertools
import json
import subprocess

import pytest
from testbed import ROOT

from adtp_export.plugins import choice
from adtp_export.plugins.variants import ALL, SYMBOLS, VARIANTS
from benchmarks.gpu.attention_kernel import HIDDEN, KERNEL, workloads

PROGRAM = """
#include "choice.h"
#include <cstdio>
struct Shape { int32_t blockM, blockN, meanLengthUpTo; };
int main()
{
    Shape shapes[8];
    int count, limit;
    long long tokens, sequences, heads, processors;
    while (std::scanf("%d", &count) == 1)
    {
        for (int i = 0; i < count; ++i)
            if (std::scanf("%d %d %d", &shapes[i].blockM, &shapes[i].blockN, &limit) == 3)
                shapes[i].meanLengthUpTo = limit;
        if (std::scanf("%lld %lld %lld %lld", &tokens, &sequences, &heads, &processors) == 4)
            std::printf("%d\\n",
                static_cast<int>(adtp::chosen(shapes, shapes + count, tokens, sequences, heads, processors) - shapes));
    }
}
"""


def groups():
    """All variants that a call chooses from, group by group."""
    keyed = itertools.groupby(ALL, key=lambda v: (v.kernel, v.dtype, v.head_size))
    return [list(group) for _, group in keyed]


def calls():
    """Tokens, sequences, heads and processors: mean lengths about all limits, few programs and many."""
    for mean, sequences in itertools.product(
        (1, 15, 16, 31, 32, 33, 63, 64, 65, 127, 128, 129, 160, 161, 512), (1, 7, 64)
    ):
        for more, heads, processors in itertools.product((0, sequences - 1), (1, 12), (1, 16, 28, 128, 170)):
            yield mean * sequences + more, sequences, heads, processors
    yield from ((0, 0, 12, 28), (0, 5, 12, 28))


@pytest.fixture
def in_cpp(host, tmp_path):
    """Compile the rule, with a mistake planted where a test wants one, and give its answers to cases."""

    def run(cases, mistake=None):
        (host.sources / "choose.cpp").write_text(PROGRAM)
        program = host.compile(f"choose-{mistake is None}", "choose.cpp", mistake=mistake)
        lines = []
        for shapes, call in cases:
            sizes = [(s.block_m, s.block_n, s.mean_length_up_to or 0) for s in shapes]
            lines.append(" ".join(map(str, (len(shapes), *itertools.chain(*sizes), *call))))
        done = subprocess.run([program], input="\n".join(lines), capture_output=True, text=True, check=True)
        return list(map(int, done.stdout.split()))

    return run


def test_both_hosts_choose_alike(in_cpp):
    cases = list(itertools.product([g for g in groups() if len(g) > 1], calls()))
    wanted = [choice.choose(shapes, *call) for shapes, call in cases]
    assert in_cpp(cases) == wanted
    other = in_cpp(cases, ("choice.h", "kFewPrograms = 2", "kFewPrograms = 3"))
    assert len(other) == len(wanted)
    assert other != wanted


def test_groups_are_whole():
    """Both hosts take the variants of a kernel, type and head size as one stretch of the table, the last one for any length."""
    assert len(groups()) == len(SYMBOLS) * 9
    assert all(g[-1].mean_length_up_to is None and None not in [v.mean_length_up_to for v in g[:-1]] for g in groups())


@pytest.fixture(scope="module")
def timed():
    """Device times of an H100 of 132 processors, by dtype, head size and workload."""
    record = json.loads((ROOT / "benchmarks/records/ragged-attention-nvidia-h100-80gb-hbm3.json").read_text())
    times = {}
    for row in record["results"]:
        place = row["dtype"], row["head_size"], row["workload"]
        times.setdefault(place, {})[row["contender"]] = row["device_us"]
    return times


def test_by_the_record_of_a_gpu_nothing_became_slower(timed):
    """Two of 72 calls take another variant than by the mean length alone, which the record says is faster."""
    lengths, changed = workloads(), {}
    for (dtype, size, workload), times in timed.items():
        shapes = [v for v in VARIANTS if (v.dtype, v.head_size) == (dtype, size)]
        call = sum(lengths[workload]), len(lengths[workload]), HIDDEN // size
        before = shapes[choice.choose(shapes, *call, processors=0)]
        now = shapes[choice.choose(shapes, *call, processors=132)]
        assert times[before.name] == pytest.approx(times[KERNEL], rel=0.07), "what the record's own rule took"
        if now is not before:
            changed[dtype, size, workload] = times[before.name] / times[now.name]
    assert changed.keys() == {("fp16", 64, "8x128"), ("bf16", 64, "8x128")}
    assert min(changed.values()) > 1.1
