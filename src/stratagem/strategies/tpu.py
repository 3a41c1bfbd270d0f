"""All TPUs of this machine, in agreement after every step: as one program, or as a replica on each.

Which of the two follows from the library that lets torch see them. `docs/decisions/0030-tpu.md` says what a step means.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Self, cast, final

import torch

from stratagem._turns import Turn
from stratagem.cluster.resolvers.tpu_hosts import TPUResolver
from stratagem.collectives.one_replica import OneReplica
from stratagem.devices.device import LogicalDevice
from stratagem.devices.inventory import this_process
from stratagem.devices.kind_table import TPU
from stratagem.devices.vendors import torch_xla as xla
from stratagem.engine import context, one_program
from stratagem.engine.context import ReplicaContext
from stratagem.engine.lockstep import LocalReplicas
from stratagem.engine.random_numbers import RandomNumbers
from stratagem.engine.recipe import Recipe
from stratagem.errors import DeviceConfigurationError, StrategyError
from stratagem.objects.step_arguments import StepArguments
from stratagem.placement import scopes
from stratagem.placement.home import compute
from stratagem.strategies.one_device import SingleReplica
from stratagem.strategies.replicated import Replicated, choose_exchange, driven_here, summed
from stratagem.strategies.strategy import Strategy

_STALL_TIMEOUT_S = 60.0


class TPUStrategy(Strategy):
    """Keeps an equal copy of every variable on each TPU of this machine, and trains on all of them.

    With `torch_tpu` each TPU has a replica, as with `MirroredStrategy`: replica i receives slice i of the global batch.
    With `torch_xla` a step is one program that all TPUs compute together. It is called once and sees the global batch,
    as on one device: `num_replicas_in_sync` is 1, its loss is that of the global batch, and `len(strategy.devices)`
    says over how many TPUs the rows of a batch are spread. Steps are compiled once for each shape of a batch.

    Args:
        resolver: Where the TPUs are, as TensorFlow's programs say it; by default those of this machine.
    Raises:
        DeviceNotFoundError: There are none; says what was looked for.
        DeviceConfigurationError: `torch_xla` does not fit torch, or some of its devices are hidden.
        StrategyError: `resolver` is no `TPUResolver`, or the call is inside a replica.
    Example:
        >>> import stratagem as sg
        >>> devices = sg.config.simulate_devices("TPU", 2)
        >>> with sg.TPUStrategy() as strategy, strategy.scope():
        ...     model = torch.nn.Linear(2, 1)
        >>> strategy.num_replicas_in_sync
        2
    """

    def __new__(cls, resolver: TPUResolver | None = None) -> Self:
        context.require_controller("TPUStrategy()")
        if resolver is not None and not isinstance(resolver, TPUResolver):
            raise StrategyError(
                f"resolver is a sg.cluster.TPUResolver, or left out for the TPUs of this machine, got "
                f"{type(resolver).__name__} {resolver!r}"
            )
        own: type[TPUStrategy] = _OneProgram if xla.has(_tpus()[0].torch_device) else _OfReplicas
        return cast(Self, super().__new__(own))


def _tpus() -> tuple[LogicalDevice, ...]:
    devices = this_process()
    devices.resolve("tpu:0")  # which says why there is none
    return tuple(devices.logical(TPU))


@final
class _OneProgram(TPUStrategy, SingleReplica):
    """By torch_xla: a step sees the global batch, and all devices compute it together."""

    def __init__(self, resolver: TPUResolver | None = None) -> None:
        SingleReplica.__init__(self)
        self._resolver = resolver
        self._devices = _tpus()
        self._program = xla.one_program()
        if len(self._devices) < self._program.num_devices // self._program.num_processes:
            raise DeviceConfigurationError(
                f"TPUStrategy computes one program on all {self._program.num_devices} devices of torch_xla, and "
                f"{len(self._devices)} are visible; leave set_visible_devices out"
            )
        self._variables = one_program.DeviceVariables()
        self._inputs = one_program.Inputs(self._program)
        self._results = one_program.Results()
        self._random_numbers = RandomNumbers(0, apart=False, on_device=True)
        self._turn = Turn()
        self._in_use = contextlib.ExitStack()
        self._in_use.enter_context(this_process().in_use("sg.TPUStrategy()"))

    @property
    def devices(self) -> tuple[LogicalDevice, ...]:
        return self._devices

    @property
    def device(self) -> torch.device:
        return xla.DEVICE

    @property
    def is_chief(self) -> bool:
        return self._program.process == 0

    @contextlib.contextmanager
    def _opened(self) -> Iterator[Self]:
        """What is made inside is made on the host, and brought to the devices at the end."""
        with self._in_scope(), self._variables.tracker.watch():
            yield self
        self._variables.settle()

    def _run(self, fn: Callable[..., Any], arguments: StepArguments) -> list[Any]:
        results = []
        with self._turn.taken("strategy.run()"):
            for step, counts in enumerate(arguments.counts()):
                arguments.under_way = step
                self._variables.settle()
                if (seed := self._random_numbers.new_seed()) is not None:
                    self._program.seed(seed)
                results.append(self._step(fn, arguments.of(step), counts))
                self._random_numbers.note_run()
        return results

    def _step(self, fn: Callable[..., Any], filled: Any, counts: tuple[int, ...] | None) -> Any:
        args, kwargs = self._inputs.bring(filled)
        context.state.replicas.append(ReplicaContext(0, OneReplica(), self))
        try:
            with self._at_home(), scopes.recording(), one_program.step(self._program):
                kept = self._results.keep(compute(fn, args, kwargs, ()))
        finally:
            context.state.replicas.pop()
        self._inputs.note(sum(counts) if counts else None)
        return self._results.joined(kept, counts)

    def _meet(self) -> None:
        self._program.wait()

    def take(self, objects: Sequence[Any]) -> None:
        self._variables.tracker.note(*objects)

    def close(self) -> None:
        super().close()
        self._variables.tracker.let_go()
        self._in_use.close()


@final
class _OfReplicas(TPUStrategy, Replicated[LocalReplicas]):
    """By torch_tpu, or simulated: a replica on each, through the group of torch.distributed for them."""

    def __init__(self, resolver: TPUResolver | None = None) -> None:
        if resolver is not None and resolver.cluster_spec():
            raise StrategyError(
                f"with torch_tpu TPUStrategy trains on the TPUs of one host, and {resolver.describe()}; use "
                f"sg.MultiWorkerMirroredStrategy(cluster_resolver=resolver) for all hosts"
            )
        self._resolver = resolver
        chosen = _tpus()
        recipe = Recipe(len(chosen), choose_exchange("auto", chosen), summed("mean"), "zero", "skip")
        Replicated.__init__(self, chosen, driven_here(chosen, recipe, _STALL_TIMEOUT_S))


for _kind in (_OneProgram, _OfReplicas):
    _kind.__name__ = TPUStrategy.__name__  # as programs write it, in errors too
