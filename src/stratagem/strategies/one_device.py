"""One device, no replicas to agree with: the reference that every other strategy must equal."""

import contextlib
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Self, final

import torch

from stratagem._caller import calling_line
from stratagem.collectives.one_replica import OneReplica
from stratagem.devices.device import LogicalDevice
from stratagem.devices.inventory import this_process
from stratagem.devices.lookup import DeviceLike
from stratagem.devices.serving import hosting
from stratagem.engine import context
from stratagem.engine.context import ReplicaContext
from stratagem.engine.replica import follow_parameters
from stratagem.errors import StrategyError
from stratagem.objects import per_replica
from stratagem.objects.step_arguments import StepArguments
from stratagem.placement import scopes
from stratagem.placement.home import at_home, compute
from stratagem.placement.residence import Tenant
from stratagem.strategies.strategy import Strategy


class SingleReplica(Strategy):
    """What strategies with a single replica in this process have in common."""

    def __init__(self) -> None:
        self._closed_at: str | None = None
        self._tenant = Tenant()

    @property
    def num_replicas_in_sync(self) -> int:
        return 1

    @property
    def replicas_here(self) -> range:
        return range(1)

    def _run(self, fn: Callable[..., Any], arguments: StepArguments) -> list[Any]:
        """Calls `fn` here; returns what it returns."""
        part, results = arguments.part(0), []
        for step in range(len(arguments)):
            arguments.under_way = step
            args, kwargs = per_replica.load_deferred(part.of(step))
            context.state.replicas.append(ReplicaContext(0, OneReplica(), self))
            try:
                with self._at_home(), scopes.recording():
                    results.append(self._compute(fn, args, kwargs))
            finally:
                context.state.replicas.pop()
        return results

    def _compute(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return compute(function, args, kwargs, ())

    def _at_home(self) -> contextlib.AbstractContextManager[None]:
        """A block of the replica, whose tensors are on the device."""
        return at_home(self.devices[0], self._tenant, replica=0)

    def take(self, objects: Sequence[Any]) -> None:
        """Nothing needs to be distributed."""

    def close(self) -> None:
        context.require_controller("strategy.close()")
        self._closed_at = self._closed_at or calling_line()

    def require_usable(self) -> None:
        if self._closed_at is not None:
            raise StrategyError(f"{type(self).__name__} was closed at {self._closed_at}; make a new one")

    def call_in_children(self, function: Callable[..., Any], *arguments: Any) -> None:
        """There are none."""


@final
class OneDeviceStrategy(SingleReplica):
    """Puts all variables and all computation on one device.

    A program that runs with it runs with every other strategy, with equal results.

    Args:
        device: The logical device.
    Raises:
        DeviceError: There is no such device.
    Example:
        >>> strategy = OneDeviceStrategy("cpu:0")
        >>> with strategy.scope():
        ...     model = torch.nn.Linear(2, 1)
        >>> strategy.run(lambda x: model(x).shape, args=(torch.ones(3, 2),))
        torch.Size([3, 1])
    """

    def __init__(self, device: DeviceLike = "cpu:0") -> None:
        context.require_controller("OneDeviceStrategy()")
        super().__init__()
        (self._device,) = this_process().select([device])
        self._started = contextlib.ExitStack()
        self._started.enter_context(hosting(self._device))
        self._started.callback(self._tenant.end)
        weakref.finalize(self, self._started.close)

    def close(self) -> None:
        super().close()
        self._started.close()

    @property
    def devices(self) -> tuple[LogicalDevice, ...]:
        return (self._device,)

    def take(self, objects: Sequence[Any]) -> None:
        """What was made elsewhere comes to the device: outside the scope, or by Keras, which has rules of its own."""
        device = self._device.torch_device
        for each in objects:
            if isinstance(each, torch.nn.Module):
                each.to(device)
            elif isinstance(each, torch.optim.Optimizer):
                follow_parameters(each)
            elif isinstance(each, torch.Tensor) and each.device != device:
                each.data = each.data.to(device)

    def _compute(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """As in any replica: what a step takes comes to its device, what it gives to the program."""
        device = self._device.torch_device
        args, kwargs = per_replica.brought((args, kwargs), device, computes_on=device)
        result = compute(function, args, kwargs, ())
        return per_replica.brought(result, torch.device("cpu"), computes_on=device)

    @contextlib.contextmanager
    def _opened(self) -> Iterator[Self]:
        """What is made inside is made on the device."""
        with (
            this_process().in_use("OneDeviceStrategy()"),
            self._in_scope(),
            torch.device(self._device.torch_device),
            at_home(self._device, self._tenant),
        ):
            yield self


@final
class DefaultStrategy(SingleReplica):
    """The strategy outside any scope: everything is as without one."""

    @property
    def devices(self) -> tuple[LogicalDevice, ...]:
        return this_process().best()[:1]

    @contextlib.contextmanager
    def _opened(self) -> Iterator[Self]:
        """Changes nothing."""
        yield self

    def _at_home(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def close(self) -> None:
        """Changes nothing: there is one for the whole program, and it has nothing to end."""
        context.require_controller("strategy.close()")


_default = DefaultStrategy()


def get_strategy() -> Any:
    """Returns the strategy of the current scope or replica; outside both, the default strategy.

    Example:
        >>> strategy = OneDeviceStrategy("cpu:0")
        >>> with strategy.scope():
        ...     get_strategy() is strategy
        True
    """
    if context.state.merging:
        return context.state.merging[-1]
    if context.state.replicas:
        return context.state.replicas[-1].strategy
    return context.current_scope() or _default


def get_replica_context() -> ReplicaContext | None:
    """Returns the context of the replica that runs this code, or `None` in a scope and in the function of `merge_call`.

    Outside all strategies the program is its own only replica: `all_reduce`, `merge_call` and the others work there.

    Example:
        >>> get_replica_context().all_reduce("sum", torch.tensor(2.0))
        tensor(2.)
    """
    if context.in_cross_replica_context():
        return None
    return context.current_replica() or _alone


_alone = ReplicaContext(0, OneReplica(), _default)
