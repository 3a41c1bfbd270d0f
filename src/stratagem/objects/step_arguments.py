"""What the steps of one call are given: what is the same for all of them, and the batches of each.

Does not draw batches (`inputs.drawing`), and does not run anything.
"""

from collections.abc import Sequence
from typing import Any, final

from stratagem import _tree
from stratagem.errors import StrategyError
from stratagem.objects import per_replica

_ONE_STEP = ((),)  # without batches of its own

Filled = tuple[tuple[Any, ...], dict[str, Any]]
"""The arguments and keyword arguments of one step."""


@final
class NextBatch:
    """Stands, among the arguments of a call, for a batch of which each step has its own.

    Args:
        place: Which of the batches of a step.
    """

    def __init__(self, place: int) -> None:
        self.place = place


@final
class StepArguments:
    """The arguments of a function that one call runs for some steps.

    Args:
        args: Its arguments, with a `NextBatch` where each step has another batch; or one for all arguments.
        kwargs: Its keyword arguments, likewise, if there are any.
        batches: For each step, the batches that the places stand for; by default one step without any.
    """

    def __init__(
        self, args: Any, kwargs: dict[str, Any] | None = None, batches: Sequence[tuple[Any, ...]] = _ONE_STEP
    ) -> None:
        self.args, self.kwargs, self.batches = args, kwargs or {}, tuple(batches)
        self.under_way: int | None = None  # which step has begun, in this process
        self._leaves: list[Any] | None = None

    def __len__(self) -> int:
        return len(self.batches)

    def of(self, step: int) -> Filled:
        """The arguments of one step."""
        args, kwargs = self.args, self.kwargs
        if batches := self.batches[step]:
            args, kwargs = _tree.map_only(NextBatch, lambda each: batches[each.place], (args, kwargs))
        if not isinstance(args, tuple | list):
            raise StrategyError(
                f"args=iterator is for batches that are tuples of arguments, got a batch that is a "
                f"{type(args).__name__}; write args=(iterator,)"
            )
        return tuple(args), kwargs

    def first(self, num_steps: int) -> "StepArguments":
        """Those of the first steps alone."""
        return self if num_steps == len(self) else StepArguments(self.args, self.kwargs, self.batches[:num_steps])

    def part(self, replica: int, *, sent: bool = False) -> "StepArguments":
        """What one replica gets of them; see `per_replica.select`."""
        if not self.kwargs and self.batches == _ONE_STEP:
            return StepArguments(per_replica.select(self.args, replica, sent=sent))
        return StepArguments(*per_replica.select((self.args, self.kwargs, self.batches), replica, sent=sent))

    def counts(self) -> list[tuple[int, ...] | None]:
        """How many examples each replica has in each step, where that is known."""
        if self.batches == _ONE_STEP:
            return [per_replica.counts_of(self.leaves())]
        return [per_replica.counts_of(_tree.leaves(self.of(step))) for step in range(len(self))]

    def leaves(self) -> list[Any]:
        """All values in them."""
        if self._leaves is None:
            plain = not self.kwargs and self.batches == _ONE_STEP
            self._leaves = _tree.leaves(self.args if plain else (self.args, self.kwargs, self.batches))
        return self._leaves

    def fields(self) -> tuple[Any, ...]:
        """What others are made of that are the same, in another process."""
        return self.args, self.kwargs or None, self.batches
