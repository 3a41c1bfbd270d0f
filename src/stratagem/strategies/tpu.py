"""All TPUs of this machine, in agreement after every step: as one program, or as a replica on each."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Self, final

import torch

from stratagem.cluster.resolvers.resolver import Resolver
from stratagem.collectives.one_replica import OneReplica
from stratagem.devices.device import LogicalDevice
from stratagem.devices.inventory import this_process
from stratagem.devices.kind_table import TPU
from stratagem.devices.vendors import torch_xla as xla
from stratagem.engine import context, one_program
from stratagem.engine.context import ReplicaContext
from stratagem.engine.random_numbers import RandomNumbers
from stratagem.objects.step_arguments import StepArguments
from stratagem.placement import scopes
from stratagem.placement.home import compute
from stratagem.strategies.one_device import Alone
from stratagem.strategies.strategy import Strategy


class TPUStrategy(Strategy):
    """Trains on all TPUs of this machine."""

    def __new__(cls, resolver: Resolver | None = None) -> Self:
        return super().__new__(_OneProgram)  # type: ignore[type-var]


@final
class _OneProgram(TPUStrategy, Alone):
    """By torch_xla: a step sees the global batch, and all devices compute it together."""

    def __init__(self, resolver: Resolver | None = None) -> None:
        context.require_controller("TPUStrategy()")
        super().__init__()
        self._devices = tuple(this_process().logical(TPU))
        self._program = xla.one_program()
        self._variables = one_program.DeviceVariables()
        self._inputs = one_program.Inputs(self._program)
        self._results = one_program.Results()
        self._random_numbers = RandomNumbers(0, apart=False, on_device=True)

    @property
    def devices(self) -> tuple[LogicalDevice, ...]:
        return self._devices

    @property
    def device(self) -> torch.device:
        return xla.DEVICE

    @contextlib.contextmanager
    def _opened(self) -> Iterator[Self]:
        """What is made inside is made on the host, and brought to the devices at the end."""
        with self._in_scope(), self._variables.tracker.watch():
            yield self
        self._variables.settle()

    def _run(self, fn: Callable[..., Any], arguments: StepArguments) -> list[Any]:
        results = []
        for step in range(len(arguments)):
            arguments.under_way = step
            self._variables.settle()
            if (seed := self._random_numbers.new_seed()) is not None:
                self._program.seed(seed)
            results.append(self._step(fn, arguments.of(step), arguments.counts()[step]))
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

    def take(self, objects: Sequence[Any]) -> None:
        self._variables.tracker.note(*objects)

    def close(self) -> None:
        super().close()
        self._variables.tracker.let_go()
