"""What a new worker of a parameter server is told: everything that the others have."""

from typing import Any

import torch

from stratagem.engine import child_calls
from stratagem.engine.queued import worker_calls
from stratagem.engine.queued.main_program import MainProgram
from stratagem.engine.queued.scheduler import Scheduler
from stratagem.processes.group import Member
from stratagem.processes.registry import Registry


def introduce(
    worker: Member, scheduler: Scheduler, key: int, main: MainProgram, registry: Registry, strategy: Any
) -> None:
    """Gives a new worker the variables and objects that the others have, as they are now.

    Args:
        worker: The new one, which has joined.
        scheduler: Who calls it.
        key: By which workers know the strategy.
        main: Where variables lie.
        registry: The names of distributed objects.
        strategy: Which has a name, but is not given.
    """

    def reference(obj: Any) -> int | None:
        return registry.reference(obj) if isinstance(obj, torch.Tensor) or obj is strategy else None

    if main.placed:
        scheduler.call(worker, child_calls.adopt_variables, key, main.placed)
    objects = {name: obj for name, obj in registry.live().items() if name and not isinstance(obj, torch.Tensor)}
    if objects:
        scheduler.call(worker, child_calls.adopt_objects, key, objects, reference=reference)
    for name, (memory, slots) in main.states().items():
        scheduler.call(worker, worker_calls.take_state, key, name, memory, slots)
