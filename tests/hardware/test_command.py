import subprocess
import sys

import pytest

from tests.hardware import target


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
