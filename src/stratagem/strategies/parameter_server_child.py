"""What the main program calls in a worker: join a strategy, take an optimizer's state, run a step."""

import os
from typing import Any, cast

from stratagem.devices.device import LogicalDevice
from stratagem.devices.serving import serve_for_life
from stratagem.parameters.rounds import GradientSlots
from stratagem.parameters.states import StateMemory
from stratagem.parameters.variables import SharedMemoryOfShards
from stratagem.replicas import control
from stratagem.replicas.child import this_child
from stratagem.replicas.functions import ReceivedFunctions
from stratagem.replicas.heap import keep_freed_memory
from stratagem.strategies import in_child
from stratagem.strategies.parameter_server_worker import Answer, Call, WorkerRuntime, WorkerSettings
from stratagem.strategies.random_numbers import seed_of
from stratagem.strategies.replica_side import StrategyInReplica


def join(
    key: int,
    worker: int,
    device: LogicalDevice,
    settings: WorkerSettings,
    memory: SharedMemoryOfShards,
    strategy: StrategyInReplica,
) -> None:
    """Makes this child a worker of a strategy, on its device."""
    this_child().registry.add(0, strategy)  # type: ignore[union-attr]
    keep_freed_memory()
    serve_for_life(device)
    os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    in_child.enter(key, cast(Any, WorkerRuntime(worker, settings, memory, strategy)))


def take_state(key: int, name: int, memory: StateMemory, slots: GradientSlots | None) -> None:
    """Takes the shared state of an optimizer."""
    cast(Any, in_child.runtime_of(key)).take_state(name, memory, slots)


def run(key: int, call: Call, prepared: tuple[int, Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Answer:
    """Runs a step."""
    runtime: Any = in_child.runtime_of(key)
    function = _functions.take(prepared)
    control.apply(call.changes, this_child().registry.resolve)  # type: ignore[union-attr]
    if call.seed is not None:
        in_child.seed_everything(seed_of(call.seed, runtime.worker))
    with control.surrounded_by(control.restored(call.surroundings)):
        return cast(Answer, runtime.execute(call, function, args, kwargs))


_functions = ReceivedFunctions()
