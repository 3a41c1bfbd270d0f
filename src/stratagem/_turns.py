"""Lets the threads of a program use a strategy one after the other.

Replicas take one call at a time. Threads that call at the same time wait for each other, in the order in which
they came; a thread may call again inside its own call.
"""

import contextlib
import threading
from collections import deque
from collections.abc import Iterator
from typing import final

from stratagem.errors import StrategyError


@final
class Turn:
    """A lock that threads get in the order in which they ask for it, and that knows who has it."""

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._waiting: deque[object] = deque()
        self._holder: threading.Thread | None = None
        self._depth = 0
        self._what = ""

    @contextlib.contextmanager
    def taken(self, what: str, *, refusal: str = "", timeout_s: float | None = None) -> Iterator[bool]:
        """A block that one thread at a time is in.

        Args:
            what: What it does, for an error of another thread.
            refusal: Why another thread is not waited for, if so, and what to do.
            timeout_s: After which time the block begins all the same.
        Yields:
            Whether no other thread is in such a block.
        Raises:
            StrategyError: Another thread is in such a block, and it is not to be waited for.
        """
        depth = self._depth if self._has_it else 0
        try:
            yield self._take(what, refusal, timeout_s)  # Ctrl-C may come when it has been taken
        finally:
            self._return_to(depth)

    def give_way(self) -> None:
        """Lets threads go first that wait; for the one that has the turn, and waits for something else."""
        if self._waiting:
            what, depth = self._what, self._depth
            self._return_to(0)
            try:
                self._take(what, depth=depth)
            except BaseException:  # Ctrl-C: what ends now ends in its turn
                if not self._has_it:
                    self._take(what, depth=depth)
                raise

    @property
    def _has_it(self) -> bool:
        return self._holder is threading.current_thread()

    def _take(self, what: str, refusal: str = "", timeout_s: float | None = None, depth: int = 1) -> bool:
        own = threading.current_thread()
        with self._condition:
            if self._holder is own:
                self._depth += 1
                return True
            if self._holder is None and not self._waiting:
                self._holder, self._depth, self._what = own, depth, what
                return True
            if self._holder is not None and refusal:
                raise StrategyError(
                    f"{what} was called in thread {own.name!r} while thread {self._holder.name!r} is in {self._what}; "
                    f"{refusal}"
                )
            place = object()
            self._waiting.append(place)
            try:
                if not self._condition.wait_for(
                    lambda: self._holder is None and self._waiting[0] is place, timeout=timeout_s
                ):
                    return False
                self._holder, self._depth, self._what = own, depth, what
                return True
            finally:  # also if Ctrl-C has ended the wait
                self._waiting.remove(place)
                self._condition.notify_all()

    def _return_to(self, depth: int) -> None:
        """Leaves blocks of this thread, down to as many as it was in; nothing if it does not have the turn."""
        with self._condition:
            if self._has_it:
                self._depth = depth
                if not depth:
                    self._holder = None
                    if self._waiting:
                        self._condition.notify_all()
