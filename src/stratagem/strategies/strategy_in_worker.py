"""What a strategy is in a function that one worker of a parameter server runs by itself: one device."""

import functools
from collections.abc import Callable
from typing import Any, Final, NoReturn, final

from stratagem import _tensorflow_names
from stratagem.devices.device import LogicalDevice
from stratagem.engine import context
from stratagem.engine.strategy_in_replica import StrategyInReplica
from stratagem.inputs import Drawing, Pass
from stratagem.objects import per_replica
from stratagem.objects.step_arguments import StepArguments
from stratagem.strategies.one_device import get_strategy
from stratagem.strategies.strategy import run_steps

# What is about the data and the results of this worker alone; the rest is the main program's.
_OF_ONE_DEVICE: Final = (
    *("reduce", "gather", "local_results", "is_ready", "global_batch_size"),
    *("distribute", "distribute_from_function"),
)


@final
class StrategyInWorker:
    """The strategy, as a scheduled function sees it.

    Args:
        device: Where the worker computes.
    """

    def __init__(self, device: LogicalDevice) -> None:
        self._in_replica = StrategyInReplica(0, [device], 0, 1)

    def run(
        self,
        fn: Callable[..., Any],
        args: tuple[Any, ...] | Pass = (),
        kwargs: dict[str, Any] | None = None,
        *,
        num_steps: int | None = None,
    ) -> Any:
        """Calls `fn` here; returns what it returns."""
        _of_one_device("require_call", fn, args, kwargs, num_steps)
        if num_steps is None:
            return _run(fn, StepArguments(tuple(args), dict(kwargs or {})))[0]
        return run_steps(_run, fn, Drawing(args, dict(kwargs or {}), num_steps), 1)

    def __enter__(self) -> NoReturn:
        self._in_replica.__enter__()

    def __exit__(self, *_: object) -> None:
        """Nothing was entered."""

    def __getattr__(self, name: str) -> Any:
        name = _tensorflow_names.OF_STRATEGIES.get(name, name)
        if name == "run":
            return self.run
        if name in _OF_ONE_DEVICE:
            return functools.partial(_of_one_device, name)
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._in_replica, name)


def _run(fn: Callable[..., Any], arguments: StepArguments) -> list[Any]:
    arguments.under_way = 0
    args, kwargs = per_replica.load_deferred(arguments.part(0).of(0))
    return [fn(*args, **kwargs)]


def _of_one_device(name: str, *args: Any, **kwargs: Any) -> Any:
    """Asks the strategy of one device, which only the main program has elsewhere."""
    with context.outside_replicas():
        return getattr(get_strategy(), name)(*args, **kwargs)
