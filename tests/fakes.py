"""Stand-ins for hardware that this machine does not have."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

from stratagem.devices.host import Host

GIB = 2**30


class FakeTorchCuda:
    """The functions of `torch.cuda` that stratagem calls, for GPUs that are not there."""

    def __init__(self, count: int, total_memory: int = 16 * GIB) -> None:
        self.count = count
        self.total_memory = total_memory
        self.initialized = False
        self.fractions: dict[int, float] = {}
        self.allocated: dict[int, int] = {}
        self.peaks: dict[int, int] = {}
        self.current: int | None = None

    def device_count(self) -> int:
        return self.count

    def is_initialized(self) -> bool:
        return self.initialized

    def get_device_properties(self, index: int) -> SimpleNamespace:
        self.initialized = True
        return SimpleNamespace(
            name="Fake A100", total_memory=self.total_memory, multi_processor_count=108, major=8, minor=0
        )

    def memory_allocated(self, index: int) -> int:
        return self.allocated.get(index, 0)

    def max_memory_allocated(self, index: int) -> int:
        return self.peaks.get(index, 0)

    def reset_peak_memory_stats(self, index: int) -> None:
        if not self.initialized:
            raise RuntimeError("not initialized")
        self.peaks[index] = self.memory_allocated(index)

    def set_per_process_memory_fraction(self, fraction: float, index: int) -> None:
        self.fractions[index] = fraction

    def get_per_process_memory_fraction(self, index: int) -> float:
        return self.fractions.get(index, 1.0)

    def mem_get_info(self, index: int) -> tuple[int, int]:
        return self.total_memory, self.total_memory

    def device_memory_used(self, index: int) -> int:
        raise ModuleNotFoundError("pynvml")

    @contextlib.contextmanager
    def device(self, index: int) -> Iterator[None]:
        self.current, before = index, self.current
        try:
            yield
        finally:
            self.current = before


def fake_host(root: Path, files: dict[str, str] | None = None, *, num_nvidia_gpus: int | None = None) -> Host:
    """A machine whose `/proc` and `/sys` hold what the test says: 47 GiB, unless told otherwise."""
    written = {
        "proc/meminfo": f"MemTotal: {47 * GIB // 1024} kB\nMemAvailable: {40 * GIB // 1024} kB",
        "proc/cpuinfo": "processor : 0\nmodel name\t: Fake CPU 9000\n",
        **(files or {}),
    }
    for file, text in written.items():
        (root / file).parent.mkdir(parents=True, exist_ok=True)
        (root / file).write_text(text)
    for index in range(num_nvidia_gpus or 0):
        (root / f"proc/driver/nvidia/gpus/{index:04}").mkdir(parents=True)
    return Host(root)
