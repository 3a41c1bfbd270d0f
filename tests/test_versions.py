"""`make test-versions` says what it tries, and what it cannot try here. Its environments are not made in this file."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests import versions

_HERE = "{}.{}".format(*sys.version_info[:2])


def test_oldest_packages_are_the_lower_bounds_of_the_project() -> None:
    wanted = versions.requirements("oldest")
    bounds = [each for each in versions.PROJECT["dependencies"] if each.startswith("torch>=")]
    assert [each.replace(">=", "==") for each in bounds] == [each for each in wanted if each.startswith("torch=")]
    pinned = [each for each in wanted if "==" in each]
    assert {each.partition("=")[0] for each in pinned} >= {"torch", "numpy", "keras", "ray", "cloudpickle"}
    assert len({each.partition("=")[0].partition(">")[0] for each in wanted}) == len(wanted), "no package comes twice"


def test_tests_of_other_versions_exist() -> None:
    assert not [path for path in versions.TESTS if not (versions.ROOT / path).exists()]


def test_python_of_this_version_is_found() -> None:
    found = versions.find_python(_HERE)
    printed = subprocess.run([found, "--version"], capture_output=True, text=True, check=True).stdout
    assert printed.startswith(f"Python {_HERE}.")


def test_python_that_is_not_here_is_a_row_and_a_failure(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(versions, "COMBINATIONS", [versions.Combination("3.99", "newest")])
    assert versions.main([]) == 1
    row = capsys.readouterr().out.splitlines()[-1]
    assert row.startswith("3.99    newest ")
    assert row.endswith("not run: there is no Python 3.99 with venv; install it so that python3.99 is on PATH")


def test_disk_that_is_too_small_is_said_before_anything_is_made(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(versions, "_NEEDED_BYTES", 10**18)
    with pytest.raises(versions.NotHereError, match="GB are free; make room"):
        versions.make_environment(versions.Combination(_HERE, "newest"), tmp_path / "made" / "environment")
    assert not (tmp_path / "made" / "environment").exists()


def test_command_that_takes_too_long_is_ended_with_its_children() -> None:
    program = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import time; time.sleep(1000)'])"
    assert versions.run_bounded([sys.executable, "-c", program], 1, show=False).code is None


def test_summary_is_the_last_line_of_pytest() -> None:
    output = "1 failed, 2 passed in 1.00s\nmore\n=== 3 failed, 2135 passed, 12 skipped in 89.61s (0:01:29) ===\n"
    assert versions.summary_of(output) == "3 failed, 2135 passed, 12 skipped"
    assert versions.summary_of("Killed") == "pytest did not end with a summary"
