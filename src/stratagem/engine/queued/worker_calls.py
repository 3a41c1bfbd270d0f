"""What the main program calls in a worker: join a strategy, take an optimizer's state, run a step."""

from collections.abc import Callable
from typing import Any

from stratagem.devices.device import LogicalDevice
from stratagem.devices.inventory import Configuration
from stratagem.engine import child_calls
from stratagem.engine.queued.worker import StepAnswer, StepCall, WorkerRuntime, WorkerSettings
from stratagem.engine.random_numbers import seed_of
from stratagem.objects import state_diff
from stratagem.objects.captured import Delivery
from stratagem.objects.surroundings import Surroundings
from stratagem.parameters.local.gradient_slots import GradientSlots
from stratagem.parameters.local.shared_variables import SharedMemoryOfShards
from stratagem.parameters.local.slot_memory import StateMemory
from stratagem.processes.child import this_child


def join(
    key: int,
    worker: int,
    device: LogicalDevice,
    settings: WorkerSettings,
    memory: SharedMemoryOfShards,
    strategy: Any,
    configuration: Configuration,
) -> None:
    """Makes this child a worker of a strategy, on its device."""
    this_child().registry.add(0, strategy)  # type: ignore[union-attr]
    child_calls.settle(device, worker, configuration)
    _workers[key] = WorkerRuntime(worker, settings, memory, strategy)
    child_calls.enter(key, _workers[key])


def number_of(key: int) -> int:
    """Which worker of a strategy this child is."""
    return _workers[key].worker


def take_state(key: int, name: int, memory: StateMemory, slots: GradientSlots | None) -> None:
    """Takes the shared state of an optimizer."""
    _workers[key].take_state(name, memory, slots)


def run(
    key: int,
    call: StepCall,
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    delivery: Delivery,
) -> StepAnswer:
    """Runs a step."""
    worker = _workers[key]
    child_calls.take(delivery, worker.worker)
    state_diff.apply(call.changes, this_child().registry.resolve)  # type: ignore[union-attr]
    if call.seed is not None:
        child_calls.seed_everything(seed_of(call.seed, worker.worker))
    with child_calls.surrounded_by(Surroundings(*call.surroundings)) as placed:
        answer = worker.execute(call, function, args, kwargs)
    return answer._replace(placed=tuple(placed))


_workers: dict[int, WorkerRuntime] = {}
