"""What the workers of a parameter server are told: what changed since their last step; to a new one, everything."""

from typing import Any

import torch

from stratagem.engine import child_calls
from stratagem.engine.queued import worker_calls
from stratagem.engine.queued.crew import Crew, Worker
from stratagem.engine.queued.main_program import MainProgram
from stratagem.objects import state_diff
from stratagem.processes.registry import Registry


def tell(worker: Worker, changes: state_diff.Snapshot, seed: int | None) -> None:
    """Adds to what a worker is told with its next step; the seed of random numbers stands under `None`."""
    news = worker.news = worker.news or {}
    for name, new in changes.items():
        old = news.get(name)
        # Of a module only what has changed is told: what was told before and not sent yet must stay.
        news[name] = new._make(map(_later, old, new)) if old is not None and hasattr(new, "_make") else new
    if seed is not None:
        news[None] = seed


def introduce(worker: Worker, crew: Crew, key: int, main: MainProgram, registry: Registry, strategy: Any) -> None:
    """Gives a new worker the variables and objects that the others have, as they are now.

    Args:
        worker: The new one, which has joined.
        crew: All workers.
        key: By which they know the strategy.
        main: Where variables lie.
        registry: The names of distributed objects.
        strategy: Which has a name, but is not given.
    """

    def reference(obj: Any) -> int | None:
        return registry.reference(obj) if isinstance(obj, torch.Tensor) or obj is strategy else None

    worker.news = {None: torch.initial_seed() % 2**32}
    if main.placed:
        crew.call(worker, child_calls.adopt_variables, key, main.placed)
    objects = {name: obj for name, obj in registry.live().items() if name and not isinstance(obj, torch.Tensor)}
    if objects:
        crew.call(worker, child_calls.adopt_objects, key, objects, reference=reference)
    for name, (memory, slots) in main.states().items():
        crew.call(worker, worker_calls.take_state, key, name, memory, slots)


def _later(earlier: Any, later: Any) -> Any:
    return earlier if later is None else later
