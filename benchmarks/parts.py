"""Takes the time of the parts of a step in the main program: finding changes, sending, computing, exchanging and so on.

The parts are functions of the library, around which a clock is put; what one of them does inside another counts for the
inner one only, so that the parts of a step add up to its time.
"""

import functools
import importlib
import time
from collections.abc import Callable
from typing import Any

PARTS = {
    "finding changes": (
        "engine.distribution:Distribution.bring_up_to_date",
        "engine.lockstep:LocalReplicas._next_call",
        "engine.distribution:Distribution.note_state",
        "objects.captured:Captured.prepare",
        "objects.captured:Captured.note_run",
        "variables.shared:SharedCopies.note_state",
    ),
    "sending": ("engine.lockstep:LocalReplicas._send",),
    "computing": ("engine.replica:Replica._one_step",),
    "exchanging": ("variables.windows:Windows.begin", "variables.windows:Windows.sum"),
    "ordering gradients": (
        "variables.ledger:Ledger.begin_pass",
        "variables.ledger:Ledger.end_pass",
    ),
    "updating": ("variables.slices:SplitUpdate.step",),
    "settling": ("engine.sync:_Summing.end_step",),
    "waiting for others": ("collectives.signals:Signals._wait",),
    "collecting": ("engine.lockstep:LocalReplicas._collect", "engine.lockstep:LocalReplicas._joined"),
    "the rest of run": ("engine.lockstep:LocalReplicas.run",),
}


class Clock:
    """Adds up the time of each part."""

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(PARTS, 0.0)
        self._inside: list[str] = []
        self._since = 0.0

    def timed(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, with its time taken."""

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            self._turn()
            self._inside.append(part)
            try:
                return function(*args, **kwargs)
            finally:
                self._turn()
                self._inside.pop()

        return call

    def _turn(self) -> None:
        now = time.perf_counter()
        if self._inside:
            self.seconds[self._inside[-1]] += now - self._since
        self._since = now


def taken() -> Clock:
    """Puts clocks around the parts, for the life of this process."""
    clock = Clock()
    for part, places in PARTS.items():
        for place in places:
            module, _, path = place.partition(":")
            owner, name = path.split(".")
            kind = getattr(importlib.import_module(f"stratagem.{module}"), owner)
            setattr(kind, name, clock.timed(part, getattr(kind, name)))
    return clock
