"""Compares what a user waits for: `import stratagem` and `stratagem --help` against `import torch`."""

import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial

from benchmarks.measure import interleaved, report


def seconds_of(*arguments: str) -> float:
    """How long a fresh Python takes for this, from start to end."""
    start = time.perf_counter()
    subprocess.run([sys.executable, *arguments], check=True, capture_output=True)
    return time.perf_counter() - start


def main() -> None:
    """Prints the table."""
    contenders: dict[str, Callable[[], float]] = {
        "import torch": partial(seconds_of, "-c", "import torch"),
        "import stratagem": partial(seconds_of, "-c", "import stratagem"),
        "import stratagem; stratagem.config": partial(seconds_of, "-c", "import stratagem; stratagem.config"),
        "stratagem --help": partial(seconds_of, "-m", "stratagem", "--help"),
        "stratagem devices": partial(seconds_of, "-m", "stratagem", "devices"),
    }
    report("import time", interleaved(contenders, num_rounds=9), reference="import torch")


if __name__ == "__main__":
    main()
