"""Reports at the end of a run what the tests cost, by folder and by file, beside the budget.

Processor time is what a busy machine does not change: that of the tests' own process, of its children
that have ended, and of those that still run (fork servers, with what they have forked).
"""

import os
import resource
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

# Minutes on two quiet cores: twice that in processor time.
_BUDGETS = {"contracts": 3.0, "foreign": 2.0, "all else": 3.0}
_CORES = 2
_MOST_FILES = 15
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def descendants(pid: int) -> Iterator[int]:
    """The processes that a process has started and that still run or wait to be reaped, theirs included."""
    for thread in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            children = thread.read_text().split()
        except OSError:
            continue  # the thread or its process has ended since it was listed
        for child in map(int, children):
            yield child
            yield from descendants(child)


def processor_s() -> float:
    """Seconds of processor time of this process and of all that it has started."""
    used = 0.0
    for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN):
        usage = resource.getrusage(who)
        used += usage.ru_utime + usage.ru_stime
    for pid in descendants(os.getpid()):
        try:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
        except OSError:
            continue
        used += sum(map(int, fields[11:15])) / _TICKS_PER_S  # its own, and that of its children that were reaped
    return used


class Timing:
    """Counts in the process that runs tests; reports in the one that the user sees."""

    def __init__(self) -> None:
        self.processor: Counter[str] = Counter()
        self.wall: Counter[str] = Counter()
        self._since: tuple[float, float] | None = None

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
        if self._since is None:
            self._since = processor_s(), time.monotonic()
        done = yield
        if nextitem is None or nextitem.path != item.path:
            file = item.nodeid.partition("::")[0]
            now = processor_s(), time.monotonic()
            self.processor[file] += now[0] - self._since[0]
            self.wall[file] += now[1] - self._since[1]
            self._since = None
        return done

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        output = getattr(session.config, "workeroutput", None)
        if output is not None:
            output["timing"] = [dict(self.processor), dict(self.wall)]

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        processor, wall = getattr(node, "workeroutput", {}).get("timing", ({}, {}))  # one that crashed has none
        self.processor.update(processor)
        self.wall.update(wall)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if not self.processor:
            return
        terminalreporter.section("seconds of processor and wall time")
        for line in self.lines():
            terminalreporter.write_line(line)

    def lines(self) -> list[str]:
        """The report."""
        folders: Counter[str] = Counter()
        walls: Counter[str] = Counter()
        parts: Counter[str] = Counter()
        for file, seconds in self.processor.items():
            folder = str(Path(file).parent)
            folders[folder] += seconds
            walls[folder] += self.wall[file]
            parts[_part_of(file)] += seconds
        found = [_line(folders[name], walls[name], f"{name}/") for name, _ in folders.most_common()]
        found += ["", f"of the {len(self.processor)} files, those that cost most:"]
        found += [_line(seconds, self.wall[file], file) for file, seconds in self.processor.most_common(_MOST_FILES)]
        found += ["", "budget, in seconds of processor time:"]
        found += [f"{parts[part]:8.1f} of {minutes * 60 * _CORES:.0f}  {part}" for part, minutes in _BUDGETS.items()]
        total = sum(_BUDGETS.values()) * 60 * _CORES
        return [*found, f"{parts.total():8.1f} of {total:.0f}  in all"]


def _part_of(file: str) -> str:
    """The row of the budget that pays for a file."""
    folder = Path(file).parts[1:2]
    return folder[0] if folder and folder[0] in _BUDGETS else "all else"


def _line(processor: float, wall: float, name: str) -> str:
    return f"{processor:8.1f} {wall:8.1f}  {name}"
