"""What `run` returns where it does not wait: a value that is there when somebody reads it."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NoReturn, final

from torch.utils import _pytree as pytree

from stratagem.replicas import values

if TYPE_CHECKING:
    from stratagem.strategies.parameter_server_crew import Step
    from stratagem.strategies.parameter_server_engine import ParameterWorkers


@final
class StepResult:
    """The result of a step that a worker may not have done yet.

    Whatever is asked of it waits: `strategy.reduce`, `gather` and `local_results`, its parts, `wait()`. If the step has
    failed, its error is raised there.

    Args:
        workers: Who has the step.
        step: The step.
        counts: How many examples it has.
    """

    def __init__(self, workers: "ParameterWorkers", step: "Step", counts: tuple[int, ...] | None) -> None:
        self._workers: ParameterWorkers | None = workers
        self._step = step
        self._counts = counts
        self._joined: Any = None

    @property
    def is_done(self) -> bool:
        """Whether it can be read without waiting."""
        return self._step.is_done

    def wait(self) -> Any:
        """The result, with a `PerReplica` in the place of each value, as other strategies return it."""
        if self._workers is not None:
            self._joined = joined([self._workers.wait_for(self._step)], self._counts)
            self._workers = None
        return self._joined

    def __getitem__(self, key: Any) -> Any:
        return self.wait()[key]

    def __iter__(self) -> Iterator[Any]:
        return iter(self.wait())

    def __len__(self) -> int:
        return len(self.wait())

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)  # whoever asks only looks whether there is one
        return getattr(self.wait(), name)

    def __repr__(self) -> str:
        return repr(self.wait()) if self._step.is_done and not self._step.has_failed else "StepResult(...)"


def joined(results: Sequence[Any], counts: tuple[int, ...] | None) -> Any:
    """The results of workers, of equal structure, as one structure of per-replica values."""
    return values.join_results(list(results), counts, _nothing_stays)


def waited_for(value: Any) -> Any:
    """A nesting with everything in it that other workers still compute."""
    return pytree.tree_map(lambda each: each.wait() if isinstance(each, StepResult) else each, value)


def _nothing_stays(rank: int, number: int) -> NoReturn:
    raise LookupError(f"value {number} of worker {rank} has been sent")
