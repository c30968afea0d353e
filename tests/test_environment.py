"""Which machine this is: a name for people, a fingerprint for times."""

import json
import os
import platform
import shutil
import subprocess
import sys

import pytest

from adtp_export import environment as machine

CPUINFO = """processor\t: 0
vendor_id\t: AuthenticAMD
cpu family\t: {family}
model\t\t: 1
model name\t: AMD EPYC
stepping\t: 1
cpu MHz\t\t: {mhz}
microcode\t: {microcode}
flags\t\t: fpu {flags}
bogomips\t: {mhz}

processor\t: 1
model name\t: AMD EPYC
cpu MHz\t\t: 4000
"""
USUAL = {"family": 25, "mhz": 2600, "microcode": "0x1", "flags": "avx2 avx512f"}
LEVELS = {"Data": (1, "32K"), "Unified": (3, "32768K")}


@pytest.fixture
def elsewhere(tmp_path, monkeypatch):
    """Return a function that says which fingerprint a machine has that differs in some fields."""

    def fingerprint(caches=LEVELS, siblings=("0", "1"), cpuinfo=CPUINFO, **fields):
        shutil.rmtree(tmp_path / "cpu", ignore_errors=True)
        (tmp_path / "cpuinfo").write_text(cpuinfo.format(**{**USUAL, **fields}))
        for i, (kind, (level, size)) in enumerate(caches.items()):
            place = tmp_path / "cpu" / "cpu0" / "cache" / f"index{i}"
            place.mkdir(parents=True)
            for name, value in {"level": level, "type": kind, "size": size}.items():
                (place / name).write_text(f"{value}\n")
        for i, listed in enumerate(siblings):
            place = tmp_path / "cpu" / f"cpu{i}" / "topology"
            place.mkdir(parents=True)
            (place / "thread_siblings_list").write_text(listed)
        monkeypatch.setattr(machine, "_CPUINFO", tmp_path / "cpuinfo")
        monkeypatch.setattr(machine, "_CPUS", tmp_path / "cpu")
        monkeypatch.setattr(machine, "_GROUPS", tmp_path / "cgroup")
        monkeypatch.setattr(machine, "_OWN_GROUPS", tmp_path / "own-cgroup")
        for known in (machine._first_cpu, machine._caches, machine._siblings):
            known.cache_clear()
        assert machine.processor() == "AMD EPYC"
        return machine.fingerprint()

    yield fingerprint
    monkeypatch.undo()
    for known in (machine._first_cpu, machine._caches, machine._siblings):
        known.cache_clear()


@pytest.mark.parametrize(
    "change",
    [
        {"family": 26},
        {"flags": "avx2 avx512f amx_int8"},
        {"caches": {**LEVELS, "Unified": (3, "262144K")}},
        {"siblings": ("0-1", "0-1")},
    ],
    ids=str,
)
def test_machines_of_one_name_are_told_apart(elsewhere, change):
    assert elsewhere() != elsewhere(**change)


@pytest.mark.parametrize(
    "change", [{"mhz": 3700}, {"microcode": "0x2"}, {"flags": "avx512f avx2"}], ids=["clock", "microcode", "order"]
)
def test_what_changes_on_one_machine_does_not_count(elsewhere, change):
    assert elsewhere() == elsewhere(**change)


def test_the_cores_that_a_process_may_use_count(elsewhere, monkeypatch):
    before = elsewhere()
    monkeypatch.setattr(machine.os, "sched_getaffinity", lambda process: {0}, raising=False)
    monkeypatch.setattr(machine.os, "cpu_count", lambda: 7)
    assert machine.hardware()["cores"] == {"physical": 2, "logical": 7, "usable": 1}
    assert machine.fingerprint() != before


@pytest.mark.parametrize(
    ("usable", "cores"),
    [({0, 1, 2, 3}, 2), ({0, 1}, 1), ({0, 2}, 2), ({0, 1, 2}, 2), ({3}, 1), ({0, 1, 9}, 2)],
    ids=str,
)
def test_threads_of_one_core_count_once(elsewhere, monkeypatch, usable, cores):
    """Of two cores with two threads each; of one that the system does not describe, each thread counts."""
    elsewhere(siblings=("0-1", "0-1", "2-3", "2-3"))
    monkeypatch.setattr(machine.os, "sched_getaffinity", lambda process: usable, raising=False)
    assert machine.thread_count(0) == machine.usable_cores() == cores
    assert machine.thread_count(7) == 7


DOCKER, SERVICE = "docker/0123", "system.slice/answers.service"


@pytest.mark.parametrize(
    ("own", "files", "cores"),
    [
        ("0::/\n", {"cpu.max": "200000 100000\n"}, 2),
        ("0::/\n", {"cpu.max": "150000 100000\n"}, 1),
        ("0::/\n", {"cpu.max": "30000 100000\n"}, 1),
        ("0::/\n", {"cpu.max": "900000 100000\n"}, 4),
        ("0::/\n", {"cpu.max": "max 100000\n"}, 4),
        ("0::/\n", {}, 4),
        ("", {"cpu.max": "100000 100000\n"}, 4),
        (f"0::/{SERVICE}\n", {f"{SERVICE}/cpu.max": "300000 100000\n"}, 3),
        (f"0::/{SERVICE}\n", {f"{SERVICE}/cpu.max": "max 100000\n", "system.slice/cpu.max": "250000 50000\n"}, 4),
        (f"0::/{SERVICE}\n", {f"{SERVICE}/cpu.max": "max 100000\n", "system.slice/cpu.max": "100000 50000\n"}, 2),
        (
            "7:memory:/\n4:cpu,cpuacct:/\n0::/\n",
            {"cpu/cpu.cfs_quota_us": "50000\n", "cpu/cpu.cfs_period_us": "25000\n"},
            2,
        ),
        ("4:cpuacct,cpu:/\n", {"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, 4),
        (f"4:cpu:/{DOCKER}\n", {"cpu/cpu.cfs_quota_us": "300000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 3),
        ("4:cpuset:/\n", {"cpu/cpu.cfs_quota_us": "100000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 4),
        ("0::/\n", {"cpu.max": "200000 0\n"}, 4),
        ("0::/a:b\n", {"a:b/cpu.max": "200000 100000\n"}, 2),
        ("0::/\udcff\0\nnone\n1\n", {"cpu.max": "200000 100000\n"}, 2),
    ],
)
def test_a_limit_of_cpu_time_counts(elsewhere, monkeypatch, tmp_path, own, files, cores):
    """Of four cores; the places and spellings are those of both versions of control groups, in a container and outside."""
    elsewhere(siblings=("0", "1", "2", "3"))
    monkeypatch.setattr(machine.os, "sched_getaffinity", lambda process: {0, 1, 2, 3}, raising=False)
    whole = machine.fingerprint()
    (tmp_path / "own-cgroup").write_text(own, encoding="utf-8", errors="surrogateescape")
    for name, text in files.items():
        (tmp_path / "cgroup" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "cgroup" / name).write_text(text)
    assert machine.usable_cores() == cores
    assert machine.threads_to_ask_for(0) == (0 if cores == 4 else cores)
    assert (machine.fingerprint() == whole) is (cores == 4)  # what limits nothing does not count


@pytest.mark.parametrize(
    ("usable", "asked"),
    [({0, 1, 2, 3}, {0: 0, 1: 1, 2: 0, 4: 4}), ({0, 1}, {0: 1, 1: 1, 2: 2}), ({0, 2}, {0: 0, 1: 1, 2: 0, 3: 3})],
    ids=str,
)
def test_a_runtime_chooses_by_itself_where_it_has_all_cores(elsewhere, monkeypatch, usable, asked):
    """There, and only there, it binds threads to cores. Of two cores with two threads each."""
    elsewhere(siblings=("0-1", "0-1", "2-3", "2-3"))
    monkeypatch.setattr(machine.os, "sched_getaffinity", lambda process: usable, raising=False)
    assert {threads: machine.threads_to_ask_for(threads) for threads in asked} == asked


@pytest.mark.parametrize(("quota", "asked"), [(None, {0: 0, 3: 3, 8: 8}), (2.0, {0: 2, 3: 3, 8: 8})])
def test_where_no_cores_are_described_a_limit_counts_all_the_same(monkeypatch, on_cores, quota, asked):
    on_cores(8, quota, described=False)
    monkeypatch.setattr(machine.os, "cpu_count", lambda: 8)
    assert {threads: machine.threads_to_ask_for(threads) for threads in asked} == asked


def test_a_system_that_tells_nothing_has_a_fingerprint_too(monkeypatch, tmp_path, elsewhere):
    elsewhere()
    monkeypatch.setattr(machine, "_CPUINFO", tmp_path / "none")
    monkeypatch.setattr(machine, "_CPUS", tmp_path / "none")
    for known in (machine._first_cpu, machine._caches, machine._siblings):
        known.cache_clear()
    told = machine.hardware()
    assert (told["vendor"], told["caches"], told["cores"]["physical"]) == (None, [], None)
    assert json.loads(json.dumps(told)) == told
    assert len(machine.fingerprint()) == 12


HELD = """
import sys
import numpy as np
from adtp_export.environment import give_back_freed_memory, keep_freed_memory

def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1])

if sys.argv[1] != "free":
    keep_freed_memory()
before = resident()
np.ones(8 << 20)
if sys.argv[1] == "give back":
    give_back_freed_memory()
print(resident() - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries have no such settings")
def test_freed_memory_is_kept():
    """64 MB are asked for and freed: of their pages Linux gets all back, or none, or all when it is time for that."""
    usual = {
        name: value for name, value in os.environ.items() if not name.startswith(("MALLOC", "GLIBC", "LD_PRELOAD"))
    }
    pages = 64 * 2**20 // os.sysconf("SC_PAGE_SIZE")
    freed, kept, given_back = (
        int(subprocess.run([sys.executable, "-c", HELD, how], env=usual, check=True, capture_output=True).stdout)
        for how in ("free", "keep", "give back")
    )
    assert freed < pages / 4
    assert kept > pages / 2
    assert given_back < pages / 4
