"""Shows which processes of this machine use which devices, and how much of their memory.

Each process that serves a device, or counts what is on one, says so in a piece of memory without a name that other
processes of the same user can read through `/proc`; it goes with the process, however that ends. Of NVIDIA's GPUs its
management library tells, where `nvidia-ml-py` is installed.
"""

import contextlib
import dataclasses
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from stratagem import _env
from stratagem.devices import masks
from stratagem.devices.host import Host
from stratagem.devices.vendors import cuda

_NAME = "stratagem-devices"
_LINK = f"/memfd:{_NAME} (deleted)"


@dataclasses.dataclass(frozen=True)
class Usage:
    """What one process has on one device.

    Args:
        device: The name of the logical device; of a GPU that NVIDIA's library tells of, of the physical one.
        pid: The process.
        program: The process of the main program that it belongs to.
        command: What was started.
        memory_bytes: What it holds there; `None` where the system does not tell.
        peak_bytes: The most that it held there.
        limit_bytes: How much it may hold.
    """

    device: str
    pid: int
    program: int
    command: str
    memory_bytes: int | None
    peak_bytes: int | None = None
    limit_bytes: int | None = None


@dataclasses.dataclass
class _Told:
    """What this process says of itself."""

    program: int | None = None
    pid: int = 0
    descriptor: int = -1
    rows: dict[str, dict[str, Any]] = dataclasses.field(default_factory=dict)


_this = _Told()


def program() -> int:
    """The process of the main program that this one belongs to."""
    return os.getpid() if _this.program is None else _this.program


def belong_to(pid: int) -> None:
    """Makes this process one of a program's."""
    _this.program = pid


@contextlib.contextmanager
def shown(device: str, limit_bytes: int | None, baseline_bytes: int) -> Iterator[None]:
    """Shows in the block that this process uses a device, with all memory above a baseline."""
    _tell(device, limit=limit_bytes, baseline=baseline_bytes)
    try:
        yield
    finally:
        _this.rows.pop(device, None)
        _write()


def count(device: str, limit_bytes: int | None, memory_bytes: int, peak_bytes: int) -> None:
    """Shows what this process has counted on a device."""
    _tell(device, limit=limit_bytes, memory=memory_bytes, peak=peak_bytes)


def of_this_machine(root: Path = Path("/")) -> list[Usage]:
    """What all processes that this one may look at have on devices."""
    found = [usage for folder in _processes(root) for usage in _of_process(folder)]
    return sorted([*found, *_of_nvidia()], key=lambda each: (each.device, each.pid))


def of_this_program(device: str) -> dict[str, int] | None:
    """What the processes of this program hold on a device together; `None` if none uses it."""
    found = [each for each in of_this_machine() if each.device == device and each.program == program()]
    if not found:
        return None
    return {
        "current": sum(each.memory_bytes or 0 for each in found),
        "peak": sum(each.peak_bytes or 0 for each in found),
    }


def _tell(device: str, **told: int | None) -> None:
    if not hasattr(os, "memfd_create"):  # only Linux has it, and `/proc`
        return
    if _this.pid != os.getpid():  # a fork has what it inherited, and is not what that tells of
        _this.pid, _this.rows = os.getpid(), {}
        _this.descriptor = os.memfd_create(_NAME, os.MFD_CLOEXEC)
    row = _this.rows.setdefault(device, {})
    if any(row.get(name, _this) != value for name, value in told.items()):
        row.update(told)
        _write()


def _write() -> None:
    if _this.pid == os.getpid():
        text = json.dumps({"pid": _this.pid, "program": program(), "command": _command(), "devices": _this.rows})
        data = text.encode()
        os.pwrite(_this.descriptor, data, 0)
        os.ftruncate(_this.descriptor, len(data))


def _command() -> str:
    return Path(sys.argv[0]).name if sys.argv and sys.argv[0] not in ("", "-c") else "python"


def _processes(root: Path) -> Iterator[Path]:
    with contextlib.suppress(OSError):
        yield from (each for each in (root / "proc").iterdir() if each.name.isdigit())


def _of_process(folder: Path) -> Iterator[Usage]:
    # It may be another user's, or end at any moment.
    with contextlib.suppress(OSError, ValueError, KeyError):
        for entry in (folder / "fd").iterdir():
            if _link_of(entry) == _LINK:
                said = json.loads(entry.read_bytes())
                if said["pid"] == int(folder.name):  # not what a fork has of the process that it comes from
                    held = Host().memory_of(said["pid"])
                    for device, row in said["devices"].items():
                        yield _usage(device, row, said, held)


def _link_of(entry: Path) -> str | None:
    """Where a descriptor leads; `None` if it is closed, as the one that listed a process' own is by now."""
    try:
        return os.readlink(entry)
    except OSError:
        return None


def _usage(device: str, row: dict[str, int | None], said: dict[str, Any], held: tuple[int, int] | None) -> Usage:
    memory_bytes, peak_bytes = row.get("memory"), row.get("peak")
    if memory_bytes is None and held is not None:
        memory_bytes, peak_bytes = (max(0, each - (row.get("baseline") or 0)) for each in held)
    return Usage(device, said["pid"], said["program"], said["command"], memory_bytes, peak_bytes, row.get("limit"))


def _of_nvidia() -> list[Usage]:
    return [
        Usage(f"/physical_device:GPU:{gpu}", pid, pid, Host().command_of(pid), memory_bytes)
        for gpu, pid, memory_bytes in cuda.processes(
            lambda count: masks.apply(_env.cuda_visible_devices(), count).indices
        )
    ]
