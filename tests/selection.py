"""Leaves tests with certain marks out of a run, unless it asks for them: those of `soak`, and those of `docs`."""

import datetime
import time
import zlib

import pytest

_APART = ("soak", "docs")


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("selection")
    for mark in _APART:
        group.addoption(f"--{mark}", action="store_true", help=f"run the tests marked {mark}, and only those")
    group.addoption("--soak-share", default="1/1", metavar="K/N", help="run the K-th of N shares of soak")
    group.addoption("--soak-minutes", type=float, metavar="M", help="begin no test later than this")


class Selection:
    """Chooses between the tests of each mark and all others."""

    def __init__(self, config: pytest.Config) -> None:
        self._wanted = {mark for mark in _APART if config.getoption(f"--{mark}")}
        self._share, self._shares = _share(config.getoption("--soak-share"))
        minutes: float | None = config.getoption("--soak-minutes")
        self._deadline = None if minutes is None else time.monotonic() + minutes * 60

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        chosen = [item for item in items if self._is_wanted(item)]
        left_out = [item for item in items if not self._is_wanted(item)]
        config.hook.pytest_deselected(items=left_out)
        if self._deadline is not None and chosen:
            # Where time may run out, it is not always the same tests that are left. Those of a file stay together: they
            # share strategies, and with a second worker their order.
            files = list(dict.fromkeys(item.path for item in chosen))
            first = datetime.date.today().toordinal() * 7 % len(files)
            places = {path: place for place, path in enumerate(files[first:] + files[:first])}
            chosen.sort(key=lambda item: places[item.path])
        items[:] = chosen

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self._shares > 1 and session.exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED:
            session.exitstatus = pytest.ExitCode.OK  # a share may be empty

    def pytest_runtest_setup(self) -> None:
        if self._deadline is not None and time.monotonic() > self._deadline:
            pytest.skip("the minutes of --soak-minutes are over")

    def _is_wanted(self, item: pytest.Item) -> bool:
        marks = {mark for mark in _APART if item.get_closest_marker(mark)}
        if not marks:
            return not self._wanted
        if not marks <= self._wanted:
            return False
        return "soak" not in marks or zlib.crc32(item.nodeid.encode()) % self._shares == self._share - 1


def _share(text: str) -> tuple[int, int]:
    """Which share, of how many."""
    share, _, shares = text.partition("/")
    if not (share.isdigit() and shares.isdigit() and 1 <= int(share) <= int(shares)):
        raise pytest.UsageError(f"--soak-share must be K/N with K from 1 to N, for example 2/4, got {text!r}")
    return int(share), int(shares)
