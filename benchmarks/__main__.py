"""Measures everything, keeps the ratios of this version, and writes them into the documents.

`python -m benchmarks` runs all benchmarks, one after the other; with names, only those.
"""

import argparse
import os
import sys
import time

import stratagem
from benchmarks import documents, history
from benchmarks.processes import CommandFailed, run

BENCHMARKS = (
    *("import_time", "memory_limit", "all_reduce", "training", "run_cost", "cluster", "local_sgd", "estimator"),
    *("keras_fit", "loader", "parameter_server", "parameter_network", "sessions", "placement", "strict_devices"),
)

_TIMEOUT_S = 1200.0


def main() -> None:
    """Runs the benchmarks; one that fails does not stop the others."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", choices=BENCHMARKS, default=BENCHMARKS)
    options = parser.parse_args()
    failed, start = [], time.monotonic()
    for name in options.names:
        begin = time.monotonic()
        try:
            command = [sys.executable, "-m", f"benchmarks.{name}"]
            print(run(command, environment=os.environ, timeout_s=_TIMEOUT_S))
        except CommandFailed as error:
            failed.append(name)
            print(f"{name}: {error}")
        print(f"{name} took {time.monotonic() - begin:.0f} s, {(time.monotonic() - start) / 60:.1f} minutes in all\n")
    history.record(stratagem.__version__)
    documents.main()
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
