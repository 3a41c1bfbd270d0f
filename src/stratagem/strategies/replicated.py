"""What strategies have in common whose replicas are processes of this machine, driven by the main program."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Generic, TypeVar

from stratagem._caller import warn_caller
from stratagem.cluster.resolvers.detection import found
from stratagem.cluster.spec import CHIEF, WORKER
from stratagem.devices.device import LogicalDevice
from stratagem.engine import context
from stratagem.engine.lifecycle import Driver
from stratagem.errors import StratagemError, StratagemWarning
from stratagem.strategies.strategy import Strategy, require_call

D = TypeVar("D", bound=Driver)


class Replicated(Strategy, Generic[D]):
    """A strategy with replicas on the devices of this machine.

    Args:
        devices: Where they compute.
        new_replicas: Makes what drives them for this strategy, now and after a failure.
    """

    def __init__(self, devices: Sequence[LogicalDevice], new_replicas: Callable[[Any], D]) -> None:
        self._devices = tuple(devices)
        self._new_replicas = new_replicas
        self._replicas = new_replicas(self)

    @property
    def devices(self) -> tuple[LogicalDevice, ...]:
        return self._devices

    @contextlib.contextmanager
    def scope(self) -> Iterator["Replicated[D]"]:
        """What is made inside is distributed; the first time, the replicas are started."""
        with self._in_scope():
            self._replicas.begin()
            with self._replicas.distribution.tracker.watch():
                yield self

    def run(self, fn: Callable[..., Any], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        context.require_controller("strategy.run()")
        require_call(fn, args, kwargs)
        return self._replicas.run(fn, tuple(args), dict(kwargs or {}))

    def take(self, objects: Sequence[Any]) -> None:
        self._replicas.distribution.tracker.note(*objects)

    def close(self) -> None:
        context.require_controller("strategy.close()")
        self._replicas.close()

    def revive(self) -> None:
        if self._replicas.closed_at is not None:
            self._replicas = self._new_replicas(self)

    def tell_others(self, error: BaseException) -> None:
        self._replicas.tell_others(error)

    def _require_usable(self) -> None:
        self._replicas.require_usable()

    def call_in_children(self, function: Callable[..., Any], *arguments: Any) -> None:
        if self._replicas.closed_at is None:
            self._replicas.start()
            self._replicas.ask_children(function, *arguments)


def warn_of_others(strategy: str) -> None:
    """Warns if this process is one of several that train, of which this strategy knows nothing."""
    with contextlib.suppress(StratagemError):  # whoever needs the cluster says what is wrong with it
        resolver = found().resolver
        if resolver is None or resolver.task_type not in (CHIEF, WORKER):
            return
        spec = resolver.cluster_spec()
        number = sum(spec.num_tasks(job) for job in (CHIEF, WORKER) if job in spec.jobs)
        if number > 1:
            warn_caller(
                f"{strategy} trains on this machine alone, and this is {resolver.task_type}/{resolver.task_id} of "
                f"{number} workers: each trains a model of its own; MultiWorkerMirroredStrategy trains one",
                StratagemWarning,
            )
