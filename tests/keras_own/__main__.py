"""Runs Keras' own tests plain and in a scope of two replicas, and compares: `python -m tests.keras_own`.

What may differ is in `differences.toml`, with the reason. A test that differs without one is a failure, and so is a
reason that no test needs any more. Tests that fail plain, for want of a library, tell nothing and are counted apart.
"""

import argparse
import collections
import contextlib
import fnmatch
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

import pytest

_FOLDERS = ("trainers", "models", "callbacks", "optimizers", "metrics")
_REASONS = Path(__file__).with_name("differences.toml")
_TEST_TIMEOUT_S = 300
# The compiler is not what is tested, and takes a minute for each test that uses it.
_SETTINGS = {"KERAS_BACKEND": "torch", "OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1"}


class Outcome(NamedTuple):
    """What became of a test, and the last line of what it said."""

    passed: bool
    error: str


class Comparison(NamedTuple):
    """What two runs of the same tests tell.

    Args:
        plain: How many pass plain.
        same: How many of those pass in a scope, too.
        explained: How many of the others there are for each reason.
        unexplained: Those without a reason, and their errors.
        stale: Patterns that no test needs.
    """

    plain: int
    same: int
    explained: Mapping[str, int]
    unexplained: Mapping[str, str]
    stale: Sequence[str]


def compare(plain: Mapping[str, Outcome], scoped: Mapping[str, Outcome], reasons: Mapping[str, str]) -> Comparison:
    """Compares two runs.

    Args:
        plain: What became of each test without a strategy.
        scoped: What became of it in a scope.
        reasons: Why tests differ, by patterns of their names.
    """
    passed = [test for test, outcome in plain.items() if outcome.passed]
    unknown = Outcome(False, "it was not run in the scope")
    differing = {test: scoped.get(test, unknown) for test in passed if not scoped.get(test, unknown).passed}
    explained: collections.Counter[str] = collections.Counter()
    unexplained, used = {}, set()
    for test, outcome in differing.items():
        pattern = next((each for each in reasons if fnmatch.fnmatchcase(test, each)), None)
        if pattern is None:
            unexplained[test] = outcome.error
        else:
            used.add(pattern)
            explained[reasons[pattern]] += 1
    stale = [each for each in reasons if each not in used]
    return Comparison(len(passed), len(passed) - len(differing), explained, unexplained, stale)


def main() -> int:
    """Prints what was found; 1 if something differs without a reason."""
    parser = argparse.ArgumentParser(prog="python -m tests.keras_own", description=__doc__)
    parser.add_argument("--minutes", type=float, default=30.0, help="the longest that both runs may take")
    parser.add_argument("tests", nargs="*", default=_FOLDERS, help="folders or files of keras/src")
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        plain, scoped = _both(chosen.tests, Path(folder), chosen.minutes * 60)
    found = compare(plain, scoped, _reasons())
    whole = tuple(chosen.tests) == _FOLDERS
    print(f"Keras {version('keras')}: its own tests of {', '.join(chosen.tests)}")
    print(f"{found.plain:5} pass plain ({len(plain) - found.plain} others are skipped, or need what is not installed)")
    print(f"{found.same:5} of them pass in a scope of two replicas")
    print(f"{sum(found.explained.values()):5} differ, with a reason")
    for reason, number in found.explained.items():
        print(f"      {number:5}  {reason}")
    print(f"{len(found.unexplained):5} differ without a reason")
    for test, error in found.unexplained.items():
        print(f"       {test}\n           {error}")
    for pattern in found.stale if whole else ():
        print(f"{pattern!r} in {_REASONS.name} is of no test that differs; take it out")
    return int(bool(found.unexplained) or (whole and bool(found.stale)) or not found.plain)


def _reasons() -> dict[str, str]:
    """Why tests differ, by patterns of their names."""
    rows = tomllib.loads(_REASONS.read_text())["difference"]
    return {pattern: row["reason"] for row in rows for pattern in row["tests"]}


def _both(tests: Sequence[str], folder: Path, limit_s: float) -> tuple[dict[str, Outcome], dict[str, Outcome]]:
    """What becomes of the tests in two processes, side by side."""
    deadline = time.monotonic() + limit_s
    runs = {folder / "plain": (), folder / "scope": ("--scope",)}
    with contextlib.ExitStack() as stack:
        running = {path: stack.enter_context(_running(tests, path, *options)) for path, options in runs.items()}
        for path, process in running.items():
            try:
                code = process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                sys.exit(f"the tests were not done after {limit_s / 60:g} minutes; --minutes allows more")
            if code not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
                sys.exit(f"pytest ended with code {code}:\n{_log(path).read_text()[-3000:]}")
    plain, scoped = map(_outcomes, runs)
    return plain, scoped


@contextlib.contextmanager
def _running(tests: Sequence[str], outcomes: Path, *options: str) -> Iterator[subprocess.Popen[bytes]]:
    """A pytest of these tests, which is ended with the block."""
    keras = importlib.util.find_spec("keras")
    assert keras is not None
    assert keras.origin is not None
    source = Path(keras.origin).parent / "src"
    command = [
        *(sys.executable, "-m", "pytest", "-q", "-c", os.devnull, "--rootdir", str(source), "-p", "no:cacheprovider"),
        *("-p", "tests.keras_own.plugin", "--continue-on-collection-errors", "--timeout", str(_TEST_TIMEOUT_S)),
        *("--outcomes", str(outcomes), *options, *(str(source / each) for each in tests)),
    ]
    with _log(outcomes).open("w") as log:
        process = subprocess.Popen(command, env={**os.environ, **_SETTINGS}, stdout=log, stderr=subprocess.STDOUT)
    try:
        yield process
    finally:
        process.terminate()
        process.wait()


def _log(outcomes: Path) -> Path:
    return outcomes.with_suffix(".log")


def _outcomes(path: Path) -> dict[str, Outcome]:
    """What was written down; a test that failed in any of its phases has failed."""
    found: dict[str, Outcome] = {}
    for line in path.read_text().splitlines():
        row = json.loads(line)
        outcome = Outcome(row["outcome"] == "passed", row["error"])
        if row["test"] not in found or not outcome.passed:
            found[row["test"]] = outcome
    return found


if __name__ == "__main__":
    sys.exit(main())
