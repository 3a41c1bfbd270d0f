"""Compares workers on loopback with DDP, and variables that are kept once with copies; judges the targets."""

from collections.abc import Iterator

from benchmarks.models import WORKLOADS
from benchmarks.tables import Target
from benchmarks.training import Contest, Program, Results, loopback_mb, parse, pss_mb, ratio, run_and_report, speed

# Examples per second of 2 workers over those of DDP with as many replicas, by model and number of replicas.
_AGAINST_DDP = {
    **{(model, 2): 1.0 for model in WORKLOADS},
    **{("mlp", 2): 1.1, ("cnn", 2): 1.15, ("transformer", 2): 1.1, ("wide", 2): 1.4},
    **{("mlp", 4): 1.3, ("wide", 4): 1.3},
}
_MEMORY_AGAINST_DDP = 1.0
_WITH_BF16 = ("wide",)
_CENTRAL_AGAINST_MIRRORED = 0.9
_NUM_CENTRAL = 4


class ClusterResults(Results):
    """Figures of workers, and of variables that are kept once."""

    name, title = "cluster", "Workers and central storage"

    def contests(self) -> Iterator[Contest]:
        for model in self.models:
            for size in self.sizes:
                narrow = ("workers_bf16",) if size == 2 and model in self._models_with_bf16() else ()
                yield model, [Program(name, size) for name in ("ddp", "workers", *narrow)]
            yield model, [Program(name, _NUM_CENTRAL) for name in ("stratagem", "central")]

    def _models_with_bf16(self) -> list[str]:
        return [model for model in self.models if model in _WITH_BF16 and 2 in self.sizes]

    def programs_alone(self) -> list[tuple[str, Program]]:
        return [("wide", Program(name, 2)) for name in ("ddp", "workers")] if "wide" in self.models else []

    def targets(self) -> list[Target]:
        return list(self._all_targets())

    def _all_targets(self) -> Iterator[Target]:
        for size in self.sizes:
            for model in self.models:
                programs = Program("workers", size), Program("ddp", size)
                what = f"2 workers of {size // 2}: examples/s of DDP, {model}, {size} replicas"
                yield ratio(what, self.steps, model, programs, speed, _AGAINST_DDP.get((model, size)))
        for model in self._models_with_bf16():
            programs = Program("workers_bf16", 2), Program("workers", 2)
            for unit, of in (("examples/s", speed), ("bytes", loopback_mb)):
                what = f"gradients as bf16: {unit} of float32, {model}, 2 workers"
                yield ratio(what, self.steps, model, programs, of, at_most=of is loopback_mb)
        for model in self.models:
            programs = Program("central", _NUM_CENTRAL), Program("stratagem", _NUM_CENTRAL)
            what = f"central storage: examples/s of mirrored, {model}, {_NUM_CENTRAL} replicas"
            yield ratio(what, self.steps, model, programs, speed, _CENTRAL_AGAINST_MIRRORED)
        if self.alone:
            programs, what = (Program("workers", 2), Program("ddp", 2)), "2 workers of 1: memory (PSS) of DDP, wide"
            yield ratio(what, self.alone, "wide", programs, pss_mb, _MEMORY_AGAINST_DDP, at_most=True)


def main() -> None:
    """Measures, prints the tables, writes the files."""
    options = parse(__doc__ or "", ("mlp", "cnn", "transformer", "wide"), WORKLOADS)
    run_and_report(ClusterResults(options.models, options.replicas), options.rounds)


if __name__ == "__main__":
    main()
