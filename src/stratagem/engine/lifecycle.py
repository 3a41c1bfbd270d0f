"""What the replicas of one strategy hold until they end, and how it is given back.

Nothing here leads to the strategy or to the program's objects: so a strategy that the program drops
without closing it can go, and its children go with it.
"""

import contextlib
import dataclasses
import os
from typing import final

import torch

from stratagem.engine import child_calls
from stratagem.engine.machines import Alone, Workers
from stratagem.engine.replica import Runtime
from stratagem.objects.tracking import Tracker
from stratagem.processes.group import ReplicaGroup, raise_first
from stratagem.processes.registry import Registry
from stratagem.variables.slices import SplitUpdate


@final
@dataclasses.dataclass(frozen=True)
class Holdings:
    """The children, the memory and the distributed objects of one strategy.

    Args:
        key: By which the children know the strategy.
        group: The children.
        runtime: Replica 0, once there is one.
        registry: The names of the distributed objects.
        tracker: What waits to be distributed.
        workers: Those of other machines.
        started: What else lasts until the end.
    """

    key: int
    group: ReplicaGroup
    runtime: Runtime | None
    registry: Registry
    tracker: Tracker
    workers: Workers | Alone
    started: contextlib.ExitStack
    process: int = dataclasses.field(default_factory=os.getpid)

    def close(self) -> None:
        """Ends the children; distributed objects become plain ones, with all of their state."""
        if os.getpid() == self.process:
            try:
                self.bring_state_home()
            finally:
                self.end()

    def bring_state_home(self) -> None:
        """Gives the program's optimizers what replicas have made outside of the memory that all share."""
        updates = self.runtime.updates if self.runtime is not None else {}
        with contextlib.suppress(Exception):  # what a dead child had is lost
            for name, update in updates.items():
                with contextlib.suppress(ReferenceError):  # the program has dropped the optimizer
                    self._bring_home(name, update)

    def _bring_home(self, name: int, update: SplitUpdate) -> None:
        slots = update.new_slots()
        if slots is not None:
            self.group.call_all(child_calls.take_slots, self.key, name, slots, False)
            self.group.collect(closing=True)
            raise_first(None, self.group.failures())
            update.take_slots(slots)

    def end(self) -> None:
        """Ends the children at once; distributed objects become plain ones."""
        self.group.stop()
        if self.runtime is not None:
            self.runtime.close()
        self.tracker.let_go()
        for obj in self.registry.live().values():
            if isinstance(obj, torch.optim.Optimizer):
                for name in ("step", "state_dict", "load_state_dict"):
                    obj.__dict__.pop(name, None)
        self.workers.close()
        self.started.close()
