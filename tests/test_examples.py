import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"


@pytest.mark.slow
def test_one_device_trains_and_meets_its_limit() -> None:
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / "one_device.py")], capture_output=True, text=True, timeout=55, check=True
    )
    words = " ".join(done.stdout.split())
    accuracy = float(words.split("accuracy ")[1].split("%")[0])
    assert accuracy > 95
    assert "out of memory on /device:CPU:1: asked for 2 GiB" in words
    assert done.stderr == ""
