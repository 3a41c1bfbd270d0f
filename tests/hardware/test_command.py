import subprocess
import sys
from pathlib import Path

import pytest

from tests.hardware import gpu_cases, in_turn, replica_cases, target


@pytest.mark.slow
@pytest.mark.skipif(target.kind_here() is not None, reason="this machine has an accelerator")
def test_command_says_that_there_is_no_accelerator() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.hardware"], capture_output=True, text=True, timeout=50, check=False
    )
    assert done.returncode == 3
    assert not done.stdout
    assert done.stderr.startswith("nothing was tested: this machine has no accelerator. ")
    assert "pytest tests/hardware" in done.stderr


def test_every_case_is_in_the_documents() -> None:
    said = (Path(__file__).parents[2] / "docs" / "accelerators.md").read_text()
    cases = [case for module in (gpu_cases, replica_cases) for case in in_turn.cases_of(module)]
    assert not [case for case in cases if f"`{case.removeprefix('case_')}`" not in said]
