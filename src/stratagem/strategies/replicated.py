"""What strategies have in common whose replicas are processes of this machine, driven by the main program.

With `workers` the replicas of several machines train together: every machine runs the same program.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Generic, Self, TypeVar

from stratagem import _tree, inputs
from stratagem._caller import warn_caller
from stratagem._checks import require_seconds
from stratagem.cluster.resolvers.detection import found
from stratagem.cluster.spec import CHIEF, WORKER
from stratagem.devices.device import LogicalDevice
from stratagem.devices.inventory import this_process
from stratagem.devices.lookup import DeviceLike
from stratagem.engine import context
from stratagem.engine.lifecycle import Driver
from stratagem.engine.lockstep import LocalReplicas
from stratagem.engine.machines import Workers
from stratagem.engine.recipe import Exchange, Recipe
from stratagem.engine.sync import SumGradients
from stratagem.errors import StratagemError, StratagemWarning, StrategyError
from stratagem.objects.per_replica import PerReplica
from stratagem.objects.step_arguments import StepArguments
from stratagem.placement.home import at_home
from stratagem.processes.region import hidden_pages
from stratagem.strategies.strategy import Strategy

D = TypeVar("D", bound=Driver)


class Replicated(Strategy, Generic[D]):
    """A strategy with replicas on the devices of this machine.

    Args:
        devices: Where they compute.
        new_replicas: Makes what drives them for this strategy, now and after a failure.
        workers: What this program does together with those of other machines; `None` if there are none.
    """

    def __init__(
        self, devices: Sequence[LogicalDevice], new_replicas: Callable[[Any], D], workers: Workers | None = None
    ) -> None:
        self._devices = tuple(devices)
        self._workers = workers
        self._new_replicas = new_replicas
        self._replicas = new_replicas(self)

    @property
    def devices(self) -> tuple[LogicalDevice, ...]:
        return self._devices

    @property
    def is_open(self) -> bool:
        """Whether it can be used: neither closed nor ended by a failure."""
        return self._replicas.closed_at is None

    @property
    def num_replicas_in_sync(self) -> int:
        return self._workers.num_replicas if self._workers else len(self.devices)

    @property
    def replicas_here(self) -> range:
        first = self._workers.first_replica if self._workers else 0
        return range(first, first + len(self.devices))

    @property
    def input_pipeline(self) -> tuple[int, int]:
        return (self._workers.size, self._workers.rank) if self._workers else (1, 0)

    @property
    def is_chief(self) -> bool:
        return self._workers is None or self._workers.rank == 0

    def draw_alike(self) -> None:
        if self._workers:
            self._together(self._workers.draw_alike)

    def compare_data(self, told: inputs.Told) -> None:
        if self._workers:
            self._together(self._workers.compare_data, told)

    def is_any(self, has_data: bool) -> bool:
        return self._together(self._workers.is_any, has_data) if self._workers else has_data

    def _meet(self) -> None:
        self.is_any(True)

    @contextlib.contextmanager
    def _opened(self) -> Iterator[Self]:
        """The first time, the replicas are started."""
        with self._in_scope():
            with self._replicas.in_turn("strategy.scope()"):
                self._replicas.begin()
            home = self._variables_on()
            with (
                self._replicas.distribution.tracker.watch(),
                at_home(home, self._replicas.tenant) if home else contextlib.nullcontext(),
            ):
                yield self
                self._replicas.bring_variables()

    def _variables_on(self) -> LogicalDevice | None:
        """Where variables are in the main program; `None` for the memory of the host."""
        return self.devices[0]

    def _run(self, fn: Callable[..., Any], arguments: StepArguments) -> list[Any]:
        return self._replicas.run(fn, arguments)

    @property
    def _most_steps(self) -> int:
        return inputs.MOST_STEPS if isinstance(self._replicas, LocalReplicas) else 1

    def _hold_back(self) -> contextlib.AbstractContextManager[None]:
        self.require_usable()
        return self._replicas.no_sync()

    def take(self, objects: Sequence[Any]) -> None:
        self._replicas.distribution.tracker.note(*objects)
        self._replicas.bring_variables()

    def close(self) -> None:
        context.require_controller("strategy.close()")
        self._replicas.close()

    def revive(self) -> None:
        if self._workers is not None:
            self.require_usable()  # a worker comes back with its process: `stratagem run --max-restarts`
        elif self._replicas.closed_at is not None:
            self._replicas = self._new_replicas(self)

    def tell_others(self, error: BaseException) -> None:
        self._replicas.tell_others(error)

    def require_usable(self) -> None:
        self._replicas.require_usable()

    def call_in_children(self, function: Callable[..., Any], *arguments: Any) -> None:
        if self._replicas.closed_at is None:
            with self._replicas.in_turn("a call in all replicas"):
                self._replicas.start()
                self._replicas.ask_children(function, *arguments)

    def _map(self, function: Callable[[PerReplica], Any], value: Any) -> Any:
        """The function on the values of the replicas of all workers, each of which must come here."""
        if self._workers is None:
            return super()._map(function, value)
        self.require_usable()
        everyones = self._workers.everyones

        def joined(each: Any) -> Any:
            return function(self._together(everyones, each)) if isinstance(each, PerReplica) else each

        return _tree.map(joined, value, is_leaf=lambda each: isinstance(each, PerReplica))

    def _together(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Does something that all workers do at the same time; if it fails, nothing can be done any more."""
        self.require_usable()
        with self._replicas.with_workers():
            return function(*arguments)


def driven_here(
    devices: Sequence[LogicalDevice], recipe: Recipe, stall_timeout_s: float, workers: Workers | None = None
) -> Callable[[Any], LocalReplicas]:
    """Makes what drives the replicas of a strategy on these devices, by a recipe.

    Args:
        devices: Where they compute.
        recipe: What the strategy has chosen.
        stall_timeout_s: How long replicas wait for another before it counts as stalled.
        workers: Those of other machines.
    """
    require_seconds(stall_timeout_s=stall_timeout_s)
    if workers is not None:
        recipe = dataclasses.replace(recipe, sizes=workers.sizes, machine=workers.rank)
    return functools.partial(
        LocalReplicas, devices=devices, recipe=recipe, stall_timeout_s=stall_timeout_s, workers=workers
    )


def choose_devices(strategy: str, devices: Sequence[DeviceLike] | None) -> tuple[LogicalDevice, ...]:
    """The devices of a strategy that trains on this machine alone; warns if others train beside it."""
    context.require_controller(f"{strategy}()")
    chosen = this_process().select(devices)
    warn_of_others(strategy)
    return tuple(chosen)


def summed(gradients: str) -> SumGradients:
    """How gradients are summed: the mean over the global batch, or the sum."""
    if gradients not in ("mean", "sum"):
        raise StrategyError(f"gradients is one of 'mean', 'sum', got {gradients!r}")
    return SumGradients(mean=gradients == "mean")


_WAYS = ("auto", "shared_memory", "torch", "to_one")


def choose_exchange(cross_device_ops: str | None, devices: Sequence[LogicalDevice]) -> Exchange:
    """How gradients travel between devices."""
    if cross_device_ops is None:  # TensorFlow's default
        cross_device_ops = "auto"
    if cross_device_ops not in _WAYS:
        raise StrategyError(f"cross_device_ops is one of {', '.join(map(repr, _WAYS))}, got {cross_device_ops!r}")
    accelerators = [device.name for device in devices if device.torch_device.type != "cpu"]
    if cross_device_ops == "shared_memory" and accelerators:
        raise StrategyError(
            f"cross_device_ops='shared_memory' is for replicas that compute on the CPU, got {accelerators[0]!r}; "
            f"use 'torch'"
        )
    reason = "" if accelerators else hidden_pages()
    if cross_device_ops == "shared_memory" and reason:
        raise StrategyError(
            f"cross_device_ops='shared_memory' needs to see which pages a process has written, and {reason}; use "
            f"'torch', or allow this container to read that file"
        )
    if cross_device_ops != "auto":
        return Exchange(cross_device_ops)
    if reason:
        warn_caller(
            f"each of {len(devices)} replicas keeps its own copy of the variables, and torch.distributed sums the "
            f"gradients. That takes more memory and time than one shared copy. Sharing needs to see which pages a "
            f"process has written, and {reason}. Allow this container to read that file",
            StratagemWarning,
        )
    return Exchange.TORCH if accelerators or reason else Exchange.SHARED_MEMORY


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
                f"{number} workers: each of them trains its own model; use MultiWorkerMirroredStrategy to train one",
                StratagemWarning,
            )
