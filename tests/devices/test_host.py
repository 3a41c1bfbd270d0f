import os
from pathlib import Path

import pytest

from stratagem.devices.host import Host
from stratagem.errors import DeviceError
from tests.fakes import GIB, fake_host


def test_host_reads_this_machine() -> None:
    host = Host()
    assert host.cores() == tuple(sorted(os.sched_getaffinity(0)))
    assert GIB // 4 < host.total_memory_bytes() <= os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert 0 < host.used_memory_bytes() < host.total_memory_bytes()
    assert 0 < host.process_memory_bytes() <= host.process_peak_bytes()
    assert host.model_name()


def test_host_reads_memory_and_model(tmp_path: Path) -> None:
    host = fake_host(tmp_path)
    assert host.total_memory_bytes() == 47 * GIB
    assert host.used_memory_bytes() == 7 * GIB
    assert host.model_name() == "Fake CPU 9000"
    assert host.num_nvidia_gpus() is None
    assert host.cpu_quota() is None


@pytest.mark.parametrize(
    "files",
    [
        {
            "proc/self/cgroup": "0::/box/app",
            "sys/fs/cgroup/box/memory.max": str(2 * GIB),
            "sys/fs/cgroup/box/memory.current": str(GIB),
        },
        {"proc/self/cgroup": "0::/", "sys/fs/cgroup/memory.max": str(2 * GIB)},
        {
            "proc/self/cgroup": "4:memory:/box\n1:cpu,cpuacct:/",
            "sys/fs/cgroup/memory/box/memory.limit_in_bytes": str(2 * GIB),
            "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712",
        },
    ],
)
def test_host_respects_the_memory_of_its_control_group(tmp_path: Path, files: dict[str, str]) -> None:
    host = fake_host(tmp_path, files)
    assert host.total_memory_bytes() == 2 * GIB
    assert 0 <= host.used_memory_bytes() <= GIB


def test_host_ignores_a_control_group_without_limits(tmp_path: Path) -> None:
    files = {"proc/self/cgroup": "0::/", "sys/fs/cgroup/memory.max": "max", "sys/fs/cgroup/cpu.max": "max 100000"}
    host = fake_host(tmp_path, files)
    assert host.total_memory_bytes() == 47 * GIB
    assert host.cpu_quota() is None


@pytest.mark.parametrize(
    "files",
    [
        {"proc/self/cgroup": "0::/app", "sys/fs/cgroup/app/cpu.max": "150000 100000"},
        {
            "proc/self/cgroup": "1:cpu:/app",
            "sys/fs/cgroup/cpu/app/cpu.cfs_quota_us": "150000",
            "sys/fs/cgroup/cpu/app/cpu.cfs_period_us": "100000",
        },
    ],
)
def test_host_runs_no_more_threads_than_its_quota(tmp_path: Path, files: dict[str, str]) -> None:
    host = fake_host(tmp_path, files)
    assert host.cpu_quota() == 1.5
    assert host.num_threads(num_cores=2, total_cores=2) == 1
    assert host.num_threads(num_cores=8, total_cores=8) == 1
    assert host.num_threads(num_cores=1, total_cores=8) == 1


@pytest.mark.parametrize(
    "files",
    [
        {"proc/self/cgroup": "0::/app", "sys/fs/cgroup/app/memory.events": "low 0\noom 3\noom_kill 2\n"},
        {"proc/self/cgroup": "4:memory:/", "sys/fs/cgroup/memory/memory.oom_control": "under_oom 0\noom_kill 2"},
    ],
)
def test_host_counts_processes_killed_for_lack_of_memory(tmp_path: Path, files: dict[str, str]) -> None:
    assert fake_host(tmp_path, files).num_oom_kills() == 2


def test_host_counts_nvidia_gpus_through_their_driver(tmp_path: Path) -> None:
    assert fake_host(tmp_path, num_nvidia_gpus=3).num_nvidia_gpus() == 3


def test_host_says_so_where_memory_cannot_be_read(tmp_path: Path) -> None:
    host = Host(tmp_path)
    assert not host.reads_memory()
    assert host.used_memory_bytes() is None
    with pytest.raises(DeviceError, match="which has no VmRSS here"):
        host.process_memory_bytes()
    with pytest.raises(DeviceError, match="cannot be reset on this system"):
        host.reset_process_peak()
