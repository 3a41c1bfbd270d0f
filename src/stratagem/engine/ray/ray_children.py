"""Children that are actors of Ray: starts them, carries what is said, knows when one is gone.

The controller's side of `ray_replica`. That a replica is gone is learned from Ray, which notices the
end of a process, and from the membership of the replicas, which notices that of a machine.
"""

import collections
import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, Final, final

from stratagem.cluster.membership.membership import Membership
from stratagem.cluster.ray import ray_session
from stratagem.cluster.ray.ray_placement import RayPlacement
from stratagem.cluster.spec import WORKER
from stratagem.engine.ray.ray_replica import Message, RayReplica, Whereabouts, as_message, read_message
from stratagem.errors import ReplicaError
from stratagem.processes.packing import Packed
from stratagem.processes.registry import Registry

_CALLS, _MESSAGES, _WATCH = "calls", "messages", "watch"
_STACK_S: Final = 2.0
_MOST_STARTS: Final = 3
_LARGE_BYTES: Final = 2**20  # of a message that Ray keeps once for all who get it


@final
class RayChildren:
    """The actors of one group.

    Args:
        placement: Where there is room for them.
        start_timeout_s: How long to wait for each to be there.
    """

    def __init__(self, placement: RayPlacement, *, start_timeout_s: float) -> None:
        self._placement = placement
        self._ray = placement.ray
        self._start_timeout_s = start_timeout_s
        self._actors: list[Any] = []
        self._last: tuple[Packed, Any] | None = None
        self.membership: Membership | None = None

    def begin(self, count: int) -> None:
        self._placement.wait()
        self._actors = [self._new_actor(number) for number in range(1, count + 1)]

    def start(self, registry: Registry, timeout_s: float) -> "Iterator[tuple[RayProcess, RayChannel]]":
        for number in range(1, len(self._actors) + 1):
            where = self._whereabouts(number)
            ray_session.warn_if_open(where.is_guarded, where.host)
            actor = self._actors[number - 1]
            channel = RayChannel(actor, registry, self._prepared)
            yield RayProcess(number, actor, where, channel, self._why_lost), channel

    def abort(self, run_number: int) -> None:
        if ray_session.is_connected():
            for actor in self._actors:
                actor.abort.options(concurrency_group=_WATCH).remote(run_number)

    def release(self) -> None:
        if ray_session.is_connected():
            for actor in self._actors:
                self._ray.kill(actor)  # most have ended by themselves
        self._actors.clear()
        self._last = None
        if self.membership is not None:
            self.membership.leave(linger_s=0.0)

    def _new_actor(self, number: int) -> Any:
        # Threads of its own for each kind of call: none waits for another.
        actor = self._ray.remote(concurrency_groups={_CALLS: 1, _MESSAGES: 1, _WATCH: 2})(RayReplica)
        return actor.options(**self._placement.options(number)).remote()

    def _whereabouts(self, number: int) -> Whereabouts:
        """Waits for an actor; one whose machine proves to be gone is started anew on another."""
        errors = self._ray.exceptions
        deadline = time.monotonic() + self._start_timeout_s
        for num_left in reversed(range(_MOST_STARTS)):
            asked = self._actors[number - 1].where.options(concurrency_group=_WATCH).remote()
            try:
                where: Whereabouts = self._ray.get(asked, timeout=max(0.0, deadline - time.monotonic()))
                return where
            except errors.GetTimeoutError:
                break
            except errors.RayError as error:
                if not num_left or getattr(error, "actor_init_failed", True):
                    why = ray_session.in_short(error)
                    raise ReplicaError(f"Ray could not start replica {number}: {why}") from error
            self._placement.wait()
            self._actors[number - 1] = self._new_actor(number)
        raise ReplicaError(
            f"Ray has not started replica {number} within {self._start_timeout_s:g} s, though it has room for it; "
            f"`ray status` and its logs say more. Raise join_timeout_s if it only needs more time"
        )

    def _prepared(self, packed: Packed) -> Any:
        """A message for Ray; one that goes to all is made once."""
        if self._last is None or self._last[0] is not packed:
            message = as_message(packed)
            is_large = sum(map(len, message[1])) > _LARGE_BYTES
            self._last = packed, self._ray.put(message) if is_large else message
        return self._last[1]

    def _why_lost(self, number: int) -> str:
        """Why the others say that a replica is gone; empty if they do not."""
        losses = self.membership.losses if self.membership is not None else ()
        return next((lost.why for lost in losses if lost.member.task == f"{WORKER}/{number}"), "")


@final
class RayProcess:
    """The process of an actor, from outside.

    Args:
        number: Which replica it is.
        actor: The actor.
        where: Its process and machine.
        channel: Which hears from Ray that it is gone.
        why_lost: Says whether the other replicas have lost it.
    """

    def __init__(
        self, number: int, actor: Any, where: Whereabouts, channel: "RayChannel", why_lost: Callable[[int], str]
    ) -> None:
        self._number = number
        self._actor = actor
        self._where = where
        self._channel = channel
        self._why_lost = why_lost
        self.pid = where.pid
        self.is_stopped = False

    def __str__(self) -> str:
        return f"pid {self.pid} on {self._where.host}, node {self._where.node[:8]}"

    @property
    def state(self) -> str:
        return "gone" if self.has_ended() else "alive"

    def has_ended(self) -> bool:
        return self._channel.over.is_set() or bool(self._why_lost(self._number))

    def wait(self, timeout_s: float) -> bool:
        return self._channel.over.wait(timeout_s)

    def how_it_ended(self, timeout_s: float) -> tuple[str, str]:
        self.wait(timeout_s)
        others, ray = self._why_lost(self._number), self._channel.cause
        return "was lost", (f": {others}" if others else "") + (f"; Ray says: {ray}" if ray else "")

    def show_stack(self) -> None:
        if not ray_session.is_connected():
            return
        ray = ray_session.load()
        with contextlib.suppress(ray.exceptions.RayError):  # one that is stopped cannot tell
            stack = ray.get(self._actor.stack.options(concurrency_group=_WATCH).remote(), timeout=_STACK_S)
            print(f"[replica {self._number}] the stack of {self}:\n{stack}", file=sys.stderr, end="")

    def kill(self) -> None:
        if ray_session.is_connected():
            ray_session.load().kill(self._actor)


@final
class RayChannel:
    """The controller's end of the way to an actor.

    Args:
        actor: The actor.
        registry: The names of distributed objects, on their way.
        prepare: Makes a message for Ray of what is to be sent.
    """

    def __init__(self, actor: Any, registry: Registry, prepare: Callable[[Packed], Any]) -> None:
        self._actor = actor
        self._registry = registry
        self._prepare = prepare
        self._arrived: collections.deque[Message | None] = collections.deque()
        # Counts what has arrived, so that it can be waited for together with other descriptors.
        self._counter = os.eventfd(0, os.EFD_SEMAPHORE | os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._lock = threading.Lock()
        self._is_closed = False
        self.over = threading.Event()
        self.cause = ""
        self._ask()

    def fileno(self) -> int:
        return self._counter

    def send_packed(self, packed: Packed) -> None:
        if self.over.is_set() or not ray_session.is_connected():
            raise BrokenPipeError("the actor is gone")
        self._actor.take.options(concurrency_group=_CALLS).remote(self._prepare(packed))

    def receive(self) -> Any:
        os.eventfd_read(self._counter)
        message = self._arrived.popleft()
        if message is None:
            raise EOFError("the actor is gone")
        if not self._arrived and not self.over.is_set() and ray_session.is_connected():
            self._ask()
        return read_message(message, self._registry.resolve, keeps_classes=True)

    def shut(self) -> None:
        if not self.over.is_set() and ray_session.is_connected():
            leaving = self._actor.leave.options(concurrency_group=_WATCH).remote().future()
            leaving.add_done_callback(lambda _: self.over.set())

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            os.close(self._counter)

    def _ask(self) -> None:
        """Asks for what the actor sends next, of which Ray tells in a thread of its own."""
        future = self._actor.next_messages.options(concurrency_group=_MESSAGES).remote().future()
        future.add_done_callback(self._note)

    def _note(self, future: Any) -> None:
        error = future.exception()
        messages: list[Message | None] = [None] if error is not None else future.result()
        if error is not None:
            self.cause = ray_session.in_short(error)
            self.over.set()
        with self._lock:
            if not self._is_closed:
                self._arrived.extend(messages)
                os.eventfd_write(self._counter, len(messages))
