"""Runs the tests that need a real accelerator: `make test-gpu`. Says so, and ends with code 3, where there is none."""

import subprocess
import sys

from stratagem.devices import absence
from stratagem.devices.host import Host
from tests.hardware import target

NO_ACCELERATOR = 3
_OPTIONS = (
    *("-m", "hardware", "-p", "no:xdist", "-ra"),
    *("-W", "default"),  # drivers and their libraries warn of what is no concern of ours
    *("-o", "faulthandler_timeout=1100"),  # all cases of a module run within its first test
)


def main(arguments: list[str]) -> int:
    """Runs pytest with the arguments; returns its exit code."""
    kind = target.kind_here()
    if kind is None:
        print(
            f"nothing was tested: this machine has no accelerator. {absence.why_none('GPU', Host())}\n"
            f"On strict devices the same cases run everywhere: .venv/bin/pytest tests/hardware",
            file=sys.stderr,
        )
        return NO_ACCELERATOR
    count = target.num_real(kind)
    print(f"testing on {count} {kind}(s)" + ("" if count > 1 else "; what needs two is left out"), flush=True)
    return subprocess.run(
        [sys.executable, "-m", "pytest", *_OPTIONS, "tests/hardware", *arguments], check=False
    ).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
