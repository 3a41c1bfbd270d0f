"""Compares workers on loopback with DDP, and variables that are kept once with copies; judges the targets."""

import argparse
import signal
import sys
from collections.abc import Iterator, Sequence

from rich.console import Console

from benchmarks.models import WORKLOADS
from benchmarks.tables import Target
from benchmarks.training import SINGLE, Program, Results, loopback_mb, pss_mb, run_and_report, speed

# Examples per second of 2 workers over those of DDP with as many replicas, by model and number of replicas.
_AGAINST_DDP = {
    **{(model, 2): 1.0 for model in WORKLOADS},
    **{("mlp", 4): 1.3, ("wide", 4): 1.3},
}
_MEMORY_AGAINST_DDP = {("wide", 2): 1.0}
_WITH_BF16 = ("wide",)
_CENTRAL_AGAINST_MIRRORED = 0.9
_NUM_CENTRAL = 4


class ClusterResults(Results):
    """Figures of workers, and of variables that are kept once."""

    name, title = "cluster", "Workers and central storage"

    def targets(self) -> list[Target]:
        return list(self._all_targets())

    def _all_targets(self) -> Iterator[Target]:
        for size in self.sizes:
            for model in self.plan:
                programs = Program("workers", size), Program("ddp", size)
                what = f"2 workers of {size // 2}: examples/s of DDP, {model}, {size} replicas"
                bound = _AGAINST_DDP.get((model, size))
                yield Target(
                    what, self.ratio(model, programs, speed), bound, False, self.spread(model, programs, speed)
                )
                what = f"2 workers of {size // 2}: memory (PSS) of DDP, {model}, {size} replicas"
                bound = _MEMORY_AGAINST_DDP.get((model, size))
                yield Target(
                    what, self.ratio(model, programs, pss_mb), bound, True, self.spread(model, programs, pss_mb)
                )
        for model in _WITH_BF16 if 2 in self.sizes else ():
            programs = Program("workers_bf16", 2), Program("workers", 2)
            for what, of in (("examples/s", speed), ("bytes", loopback_mb)):
                if model in self.plan:
                    ratio, spread = self.ratio(model, programs, of), self.spread(model, programs, of)
                    yield Target(
                        f"gradients as bf16: {what} of float32, {model}, 2 workers", ratio, None, False, spread
                    )
        for model in self.plan:
            programs = Program("central", _NUM_CENTRAL), Program("stratagem", _NUM_CENTRAL)
            for what, of, bound in (("examples/s", speed, _CENTRAL_AGAINST_MIRRORED), ("memory (PSS)", pss_mb, None)):
                ratio, spread = self.ratio(model, programs, of), self.spread(model, programs, of)
                yield Target(f"central storage: {what} of mirrored, {model}, 4 replicas", ratio, bound, False, spread)


def make_plan(models: Sequence[str], sizes: Sequence[int]) -> dict[str, list[Program]]:
    """What to run for each model."""
    pairs = [Program(contender, size) for size in sizes for contender in ("ddp", "workers")]
    kept = [Program(contender, _NUM_CENTRAL) for contender in ("stratagem", "central")]
    narrow = [Program("workers_bf16", 2)] if 2 in sizes else []
    return {model: [SINGLE, *pairs, *(narrow if model in _WITH_BF16 else ()), *kept] for model in models}


def main() -> None:
    """Measures, prints the tables, writes the files."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", default=",".join(("mlp", "cnn", "transformer", "wide")))
    parser.add_argument("--replicas", default="2,4")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))  # so that no run is left behind
    sizes = [int(size) for size in options.replicas.split(",")]
    results = ClusterResults(make_plan(options.models.split(","), sizes), sizes)
    run_and_report(results, options.rounds, Console(width=130))


if __name__ == "__main__":
    main()
