"""Tests marked `soak` repeat a promise over many parameters: left out of a run, unless it asks for them."""

import datetime
import time
import zlib

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("soak")
    group.addoption("--soak", action="store_true", help="run the tests marked soak, and only those")
    group.addoption("--soak-share", default="1/1", metavar="K/N", help="run the K-th of N shares of them")
    group.addoption("--soak-minutes", type=float, metavar="M", help="begin none of them later than this")


class Soak:
    """Chooses between the tests marked `soak` and all others."""

    def __init__(self, config: pytest.Config) -> None:
        self._wanted: bool = config.getoption("--soak")
        self._share, self._shares = _share(config.getoption("--soak-share"))
        minutes: float | None = config.getoption("--soak-minutes")
        self._deadline = None if minutes is None else time.monotonic() + minutes * 60

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        chosen = [item for item in items if self._is_wanted(item)]
        left_out = [item for item in items if not self._is_wanted(item)]
        config.hook.pytest_deselected(items=left_out)
        if self._deadline is not None and chosen:
            # Where time may run out, it is not always the same tests that are left.
            first = datetime.date.today().toordinal() * 7 % len(chosen)
            chosen = chosen[first:] + chosen[:first]
        items[:] = chosen

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self._wanted and session.exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED:
            session.exitstatus = pytest.ExitCode.OK  # a share may be empty

    def pytest_runtest_setup(self) -> None:
        if self._deadline is not None and time.monotonic() > self._deadline:
            pytest.skip("the minutes of --soak-minutes are over")

    def _is_wanted(self, item: pytest.Item) -> bool:
        if item.get_closest_marker("soak") is None:
            return not self._wanted
        return self._wanted and zlib.crc32(item.nodeid.encode()) % self._shares == self._share - 1


def _share(text: str) -> tuple[int, int]:
    """Which share, of how many."""
    share, _, shares = text.partition("/")
    if not (share.isdigit() and shares.isdigit() and 1 <= int(share) <= int(shares)):
        raise pytest.UsageError(f"--soak-share must be K/N with K from 1 to N, for example 2/4, got {text!r}")
    return int(share), int(shares)
