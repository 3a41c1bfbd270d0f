"""Fails every test that leaves something behind, or that changes the process for the next one."""

import contextlib
import ctypes
import os
import resource
import subprocess
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.hardware import target

_PR_SET_CHILD_SUBREAPER = 36
_GRACE_S = 10.0


_popens: "weakref.WeakSet[subprocess.Popen[Any]]" = weakref.WeakSet()


def adopt_orphans() -> None:
    """Makes processes whose parent has died children of this one, so that they are seen."""
    made: Any = subprocess.Popen.__init__

    def noting(self: Any, *args: Any, **kwargs: Any) -> None:
        self.pid = 0  # until it is started
        _popens.add(self)
        made(self, *args, **kwargs)

    if made.__name__ != "noting":
        subprocess.Popen.__init__ = noting  # type: ignore[method-assign]
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Iterator[None]:
    """Compares what exists after each test with what existed before it.

    Drivers of real accelerators, and NCCL, keep threads and sockets for the life of a process.
    """
    with guarded(*(("threads", "sockets") if target.IS_REAL else ())):
        yield


@contextlib.contextmanager
def guarded(*without: str) -> Iterator[None]:
    """Fails if the block leaves something behind; `without` are kinds of things that it may."""
    before = {what: look() for what, look in _LOOKS.items() if what not in without}
    yield
    deadline = time.monotonic() + _GRACE_S
    while (left := _left(before)) and time.monotonic() < deadline:
        time.sleep(0.01)  # something that is ending is given a moment
    if left:
        pytest.fail("the test left behind: " + "; ".join(left))


def _left(before: dict[str, frozenset[str]]) -> list[str]:
    found = []
    for what, then in before.items():
        now = _LOOKS[what]()
        if new := now - then:
            found.append(f"{what} {sorted(new)}")
        if what == "environment" and (gone := then - now):
            found.append(f"missing {what} {sorted(gone)}")
    return found


def _processes() -> frozenset[str]:
    children = []
    for pid in _children() | _children():  # the kernel may leave one out of a reading while its sibling ends
        with contextlib.suppress(OSError):  # it has ended, and somebody waited for it, since it was listed
            name, _, fields = Path(f"/proc/{pid}/stat").read_text().partition(" (")[2].rpartition(") ")
            if fields[0] != "Z":
                children.append(f"{pid} {name}")
            elif int(pid) not in {each.pid for each in _popens}:  # whose exit code its owner wants to have
                os.waitpid(int(pid), os.WNOHANG)  # the ones adopted have nobody else to reap them
    return frozenset(children)


def _children() -> set[str]:
    pids: set[str] = set()
    for thread in Path("/proc/self/task").glob("*/children"):
        with contextlib.suppress(OSError):  # the thread has ended since it was listed
            pids.update(thread.read_text().split())
    return pids


def _shared_memory() -> frozenset[str]:
    names = (path.name for path in Path("/dev/shm").iterdir())
    return frozenset(name for name in names if name.startswith(("stratagem", "torch", "psm_", "sem.")))


def _threads() -> frozenset[str]:
    return frozenset(f"{thread.name}#{thread.ident}" for thread in threading.enumerate())


def _sockets() -> frozenset[str]:
    links = []
    for descriptor in Path("/proc/self/fd").iterdir():
        try:
            links.append(os.readlink(descriptor))
        except OSError:
            continue  # the descriptor of this very listing
    return frozenset(link for link in links if link.startswith("socket:"))


def _environment() -> frozenset[str]:
    # pytest's own, one that Keras sets, and those that torch sets with the first optimizer and when it compiles.
    passing = (
        *("PYTEST_CURRENT_TEST", "TF_FORCE_GPU_ALLOW_GROWTH"),
        *("TORCHINDUCTOR_CACHE_DIR", "_TORCHINDUCTOR_PYOBJECT_TENSOR_DATA_PTR"),
    )
    return frozenset(f"{name}={value}" for name, value in os.environ.items() if name not in passing)


def _settings() -> frozenset[str]:
    """What a program may set for its whole process, and a test must put back."""
    return frozenset(
        [
            f"cores {sorted(os.sched_getaffinity(0))}",
            f"data limit {resource.getrlimit(resource.RLIMIT_DATA)}",
            f"torch threads {torch.get_num_threads()}",
            f"folder {os.getcwd()}",
        ]
    )


_LOOKS: dict[str, Callable[[], frozenset[str]]] = {
    "processes": _processes,
    "shared memory": _shared_memory,
    "threads": _threads,
    "sockets": _sockets,
    "environment": _environment,
    "settings": _settings,
}
