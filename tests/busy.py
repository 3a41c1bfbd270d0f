"""Runs a command, several times, while two processes burn two cores: `python -m tests.busy --repeat 5 -- pytest`."""

import argparse
import contextlib
import subprocess
import sys
from collections.abc import Iterator

_BURNERS = 2
# Ends with the process that has started it, however that one ends.
_BURN = """
import os
parent = os.getppid()
print(flush=True)
while os.getppid() == parent:
    for _ in range(10**6):
        pass
"""


@contextlib.contextmanager
def burning() -> Iterator[None]:
    """Inside the block the cores are busy."""
    burners = [subprocess.Popen([sys.executable, "-c", _BURN], stdout=subprocess.PIPE) for _ in range(_BURNERS)]
    try:
        for burner in burners:
            assert burner.stdout is not None
            assert burner.stdout.readline(), "a process that burns a core could not start"
        yield
    finally:
        for burner in burners:
            burner.kill()
            burner.communicate()


def main() -> int:
    """The number of runs that failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeat", type=int, default=5, help="how often the command runs")
    parser.add_argument("command", nargs="+")
    chosen = parser.parse_args()
    failed = 0
    with burning():
        for number in range(1, chosen.repeat + 1):
            print(f"run {number} of {chosen.repeat} on a busy machine", flush=True)
            failed += subprocess.run(chosen.command, check=False).returncode != 0
    print(f"{failed} of {chosen.repeat} runs failed")
    return failed


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        sys.exit(main())
    sys.exit(130)
