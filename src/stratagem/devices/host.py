"""Reads what this machine is and what this process holds: cores, memory, NVIDIA GPUs, TPUs.

Respects what the process may use, not what the box has: its core affinity and the limits of its
control groups (containers, Slurm, Kubernetes). Does not change anything.
"""

import dataclasses
import os
import platform
import re
from pathlib import Path

from stratagem.errors import DeviceError

_GOOGLE = "0x1ae0"
_TPUS = ("0x0027", "0x005e", "0x0063", "0x006f", "0x0076")  # v2 and v3, v4, v5e and v5p, v6e, v7


@dataclasses.dataclass(frozen=True)
class Host:
    """This machine, read through its `/proc` and `/sys`.

    Args:
        root: Where those are; another folder in tests.
    """

    root: Path = Path("/")

    def cores(self) -> tuple[int, ...]:
        """The cores that this process may run on."""
        if hasattr(os, "sched_getaffinity"):
            return tuple(sorted(os.sched_getaffinity(0)))
        return tuple(range(os.cpu_count() or 1))

    def cpu_quota(self) -> float | None:
        """How many cores' worth of time the control group grants; `None` without a quota."""
        quotas = []
        for folder in self._control_groups("cpu"):
            if match := re.match(r"(\d+) (\d+)", _text(folder / "cpu.max")):
                quotas.append(int(match[1]) / int(match[2]))
            granted, period = _text(folder / "cpu.cfs_quota_us"), _text(folder / "cpu.cfs_period_us")
            if granted.isdigit() and period.isdigit():
                quotas.append(int(granted) / int(period))
        return min(quotas, default=None)

    def num_threads(self, num_cores: int, total_cores: int) -> int:
        """How many threads are worth running on so many of all cores, given the quota."""
        quota = self.cpu_quota()
        if quota is None:
            return num_cores
        return max(1, min(num_cores, int(quota * num_cores / total_cores)))

    def total_memory_bytes(self) -> int:
        """The memory of the machine, or what the control group grants if that is less."""
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        if found := self._read_kib("proc/meminfo", "MemTotal"):
            total = found
        return min([total, *(granted for granted, _ in self._granted_memory())])

    def available_memory_bytes(self) -> int | None:
        """What this process may still take, by the account of the machine and of its control groups."""
        available = self._read_kib("proc/meminfo", "MemAvailable")
        if available is None:
            return None
        return max(0, min([available, *(granted - used for granted, used in self._granted_memory())]))

    def used_memory_bytes(self) -> int | None:
        """What is not available any more; `None` where `/proc` is missing."""
        available = self.available_memory_bytes()
        return None if available is None else self.total_memory_bytes() - available

    def num_oom_kills(self) -> int:
        """How many processes of its control groups the kernel has killed for lack of memory."""
        texts = [
            _text(folder / file)
            for folder in self._control_groups("memory")
            for file in ("memory.events", "memory.oom_control")
        ]
        return sum(int(match[1]) for text in texts if (match := re.search(r"^oom_kill (\d+)$", text, re.MULTILINE)))

    def model_name(self) -> str:
        """What the CPU's maker calls it."""
        match = re.search(r"^model name\s*:\s*(.+)$", _text(self.root / "proc/cpuinfo"), re.MULTILINE)
        return match[1].strip() if match else platform.processor() or platform.machine()

    def num_tpu_chips(self) -> int:
        """TPU chips on the PCI bus, whatever torch finds of them."""
        folders = (self.root / "sys/bus/pci/devices").glob("*")
        return sum(
            _text(each / "vendor").strip() == _GOOGLE and _text(each / "device").strip() in _TPUS for each in folders
        )

    def num_nvidia_gpus(self) -> int | None:
        """GPUs that the NVIDIA driver serves, hidden ones too; `None` without that driver."""
        folder = self.root / "proc/driver/nvidia/gpus"
        return len(list(folder.iterdir())) if folder.is_dir() else None

    def reads_memory(self) -> bool:
        """Whether the readings of this process' own memory below exist here."""
        return self._read_kib("proc/self/status", "VmData") is not None

    def process_memory_bytes(self) -> int:
        """What this process holds in memory now."""
        return self._own_reading("VmRSS")

    def process_peak_bytes(self) -> int:
        """The most that this process held since `reset_process_peak`."""
        return self._own_reading("VmHWM")

    def memory_of(self, pid: int) -> tuple[int, int] | None:
        """What another process holds in memory now, and the most that it held; `None` if it is gone."""
        current, peak = (self._read_kib(f"proc/{pid}/status", field) for field in ("VmRSS", "VmHWM"))
        return None if current is None or peak is None else (current, peak)

    def command_of(self, pid: int) -> str:
        """What another process runs."""
        return _text(self.root / f"proc/{pid}/comm") or "?"

    def process_data_bytes(self) -> int:
        """What this process has reserved for itself: the figure that `RLIMIT_DATA` bounds."""
        return self._own_reading("VmData")

    def reset_process_peak(self) -> None:
        """Lets `process_peak_bytes` start again from what is held now."""
        try:
            (self.root / "proc/self/clear_refs").write_text("5")
        except OSError as error:
            raise DeviceError(f"the peak of a CPU's memory cannot be reset on this system: {error}") from error

    def _own_reading(self, field: str) -> int:
        value = self._read_kib("proc/self/status", field)
        if value is None:
            raise DeviceError(f"the memory of a CPU device is read from /proc/self/status, which has no {field} here")
        return value

    def _read_kib(self, file: str, field: str) -> int | None:
        match = re.search(rf"^{field}:\s*(\d+) kB", _text(self.root / file), re.MULTILINE)
        return int(match[1]) * 1024 if match else None

    def _granted_memory(self) -> list[tuple[int, int]]:
        """What each control group grants its processes, and what they have of it."""
        accounts = [
            (_text(folder / granted), _text(folder / used))
            for folder in self._control_groups("memory")
            for granted, used in (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes"))
        ]
        return [(int(granted), int(used or 0)) for granted, used in accounts if granted.isdigit()]

    def _control_groups(self, controller: str) -> list[Path]:
        """The groups of this process, innermost first: version 2 and, where it is mounted, version 1."""
        folders = []
        for line in _text(self.root / "proc/self/cgroup").splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers and controller not in controllers.split(","):
                continue
            mount = self.root / "sys/fs/cgroup" / (controller if controllers else "")
            group = Path(path.lstrip("/"))
            folders += [mount / parent for parent in (group, *group.parents)]
        return folders


def _text(path: Path) -> str:
    """The content of a file of the kernel, or nothing where there is no such file."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""
