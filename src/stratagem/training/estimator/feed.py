"""Brings the batches of an input function to the replicas, and knows how far it has come.

Owns the passes over the data, the position that a checkpoint keeps and the way back to it. How a
batch is divided is the strategy's.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, final

from stratagem import _tree
from stratagem.engine import random_state
from stratagem.errors import EstimatorError, StrategyError
from stratagem.objects import per_replica
from stratagem.strategies.strategy import Strategy
from stratagem.training.estimator.checks import accepted
from stratagem.training.estimator.specs import Input


@final
class Feed:
    """Global batches, one after the other, as tuples of features, labels and what else the model takes.

    Args:
        input_fn: The user's function.
        available: What it may take as arguments.
        strategy: Who divides the batches.
        seed: Decides, with its number, the order of each pass.
        max_parts: How many parts a batch has at most.
    """

    def __init__(
        self, input_fn: Callable[..., Any], available: Mapping[str, Any], strategy: Strategy, seed: int, max_parts: int
    ) -> None:
        made = input_fn(**accepted(input_fn, "input_fn", available))
        if made is None:
            raise EstimatorError("input_fn returned nothing; it returns the data, or sg.estimator.Input(data, ...)")
        self.spec = made if isinstance(made, Input) else Input(made)
        try:
            self._data = strategy.distribute(
                self.spec.data, global_batch_size=self.spec.global_batch_size, shuffle=self.spec.shuffle
            )
        except StrategyError as error:
            error.add_note(
                "this came from input_fn; for a dataset, tensors or arrays let it return "
                "sg.estimator.Input(data, global_batch_size=...)"
            )
            raise
        self._epoch: Iterator[Any] | None = None
        self._num_epochs = 0
        self._num_batches = 0
        self._seed = seed
        self._max_parts = max_parts

    def next(self) -> tuple[Any, ...] | None:
        """The next global batch; `None` when the input has ended."""
        batch = self._next()
        while batch is None and self._num_batches and self._num_epochs + 1 != self.spec.num_epochs:
            self._num_epochs += 1
            self._epoch = None
            batch = self._next()
        return None if batch is None else _parts(batch, self._max_parts)

    def position(self) -> dict[str, Any]:
        """Where the input is, for a checkpoint."""
        return {"num_epochs": self._num_epochs, "num_batches": self._num_batches, "seed": self._seed}

    def go_to(self, position: Mapping[str, Any]) -> bool:
        """Passes over what had been used when a checkpoint was written; whether there is so much."""
        for _ in range(position["num_epochs"]):
            while self._pass_over():
                pass
            if not self._num_batches:
                return False
            self._num_epochs += 1
            self._epoch = None
        return all(self._pass_over() for _ in range(position["num_batches"]))

    def close(self) -> None:
        """Ends what works for the input in all replicas."""
        self._close_epoch()
        self._data.close()

    def _next(self) -> Any:
        """The next batch of this pass; `None` after its last."""
        return self._taken(lambda epoch: next(epoch, None))

    def _pass_over(self) -> bool:
        """Leaves the next batch of this pass out; whether there was one."""
        return self._taken(_skipped) is not None

    def _taken(self, take: Callable[[Any], Any]) -> Any:
        if self._epoch is None:
            self._num_batches = 0
            # The order of a pass is drawn with its first batch. It does not depend on what the training draws.
            with random_state.kept():
                random_state.seed(self._seed + self._num_epochs)
                self._epoch = iter(self._data)
                batch = take(self._epoch)
        else:
            batch = take(self._epoch)
        if batch is not None:
            self._num_batches += 1
        return batch

    def _close_epoch(self) -> None:
        close = getattr(self._epoch, "close", None)
        if close is not None:
            close()
        self._epoch = None


def _skipped(epoch: Any) -> Any:
    """The next batch, or something in its place where it need not be loaded."""
    return (epoch.skip() or None) if hasattr(epoch, "skip") else next(epoch, None)


def example_of(batch: Any) -> Any:
    """The part of a batch that the first replica gets, as it is in that replica."""
    return per_replica.load_deferred(per_replica.select(batch, 0))


def num_examples_in(batch: Any, strategy: Strategy) -> int:
    """How many examples a global batch has, over all programs that share it."""
    counts = per_replica.counts_of(_tree.leaves(batch))
    return int(strategy.reduce("sum", per_replica.PerReplica(list(counts)))) if counts else 1


def _parts(batch: Any, max_parts: int) -> tuple[Any, ...]:
    """The parts of a batch, with nothing in the place of those that it does not have."""
    parts = tuple(batch) if isinstance(batch, tuple | list) else (batch,)
    if not 0 < len(parts) <= max_parts:
        allowed = "features or (features, labels)" + (" or (features, labels, weights)" if max_parts > 2 else "")
        raise EstimatorError(f"a batch is {allowed}, got {len(parts)} parts; join some in a dict")
    return (*parts, *[None] * (max_parts - len(parts)))
