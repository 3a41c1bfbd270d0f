"""Lets replicas of one machine wait for each other without using a core.

One semaphore for each ordered pair of replicas lies in shared memory; to arrive is to post to all
others, to wait is to take one post from each. Waits are cut into slices: after each, the caller's
`attend` looks after the world (the controller: whether every child still lives), so that no wait
outlives a peer. A replica that fails raises the abort flag, which ends the waits of all others.

Each meeting says what it is for (`Purpose`). Replicas that meet for different purposes would take each
other's numbers for what they are not; that is an error, which names both.
"""

import contextlib
import ctypes
import enum
import errno
import time
from collections.abc import Callable
from typing import final

import torch

from stratagem._caller import calling_line
from stratagem._clock import Clock
from stratagem.collectives.collective import MismatchError
from stratagem.errors import CollectiveError
from stratagem.processes.region import PAGE_BYTES, Region

# To be woken takes about the time of so many looks.
NUM_LOOKS = 200

_SEMAPHORE_BYTES = 64
_NOTE_BYTES = 512
_NUM_FLAGS = 18
_PURPOSE_FLAG = _NUM_FLAGS - 3  # and the next: by turns, since a replica may be one meeting ahead
_LEFT_FLAG = _NUM_FLAGS - 1
_SLICE_S = 0.1
_CLOCK_MONOTONIC = 1

_libc = ctypes.CDLL(None, use_errno=True)


class Purpose(enum.IntEnum):
    """What replicas meet for."""

    EXCHANGE = 0
    BACKWARD = 1
    UPDATE = 2
    SET_GRADIENTS = 3
    END = 4
    GRAPH = 5

    def told(self) -> str:
        """In words, with the line of the program."""
        if self is Purpose.END:
            return "at the end of its step"
        return f"in {_WORDS[self]} at {calling_line()}"


_WORDS = {
    Purpose.EXCHANGE: "a collective",
    Purpose.BACKWARD: "backward()",
    Purpose.GRAPH: "backward(create_graph=True), which every replica must call,",
    Purpose.UPDATE: "optimizer.step()",
    Purpose.SET_GRADIENTS: "the sum of gradients that the step has set,",
}
_ADVICE = (
    "every replica must call backward(), step() and collectives equally often and in the same order. One that has "
    "nothing to add to a backward pass calls sg.get_replica_context().no_contribution() in its place"
)


class PeerAborted(CollectiveError):  # noqa: N818  # not an error of its own
    """Another replica has failed, so that this one stops waiting for it. Never the first cause."""


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


@final
class Signals:
    """The meeting point of the replicas of one strategy on one machine.

    Args:
        region: Shared memory of at least `num_bytes(size)`.
        rank: Which replica this is.
        size: How many there are.
        attend: Called after each slice of waiting with the seconds waited so far and the ranks
            that are missing; may raise.
        num_looks: How often to look before sleeping: `NUM_LOOKS` for replicas that nobody shares a core
            with, once for others.
    """

    def __init__(
        self,
        region: Region,
        rank: int,
        size: int,
        attend: Callable[[float, list[int]], None] = lambda *_: None,
        *,
        num_looks: int = 1,
    ) -> None:
        self.rank = rank
        self.size = size
        self.attend = attend
        self._region = region
        self._num_looks = num_looks
        self._visit = 0
        self._num_meetings = 0
        self._purposes = [int(Purpose.EXCHANGE)]  # plain numbers: the last is compared in every meeting
        self._meetings = [_Meeting(self._purposes, purpose) for purpose in range(len(Purpose))]
        self.waited_s = 0.0
        start = region.shared(torch.uint8, 0, 1).data_ptr()
        self._semaphores = [
            [ctypes.c_void_p(start + (source * size + target) * _SEMAPHORE_BYTES) for target in range(size)]
            for source in range(size)
        ]
        others = [other for other in range(size) if other != rank]
        self._posted = [self._semaphores[rank][target] for target in others]
        self._awaited = [(source, self._semaphores[source][rank]) for source in others]
        offset = size * size * _SEMAPHORE_BYTES
        self._aborted = region.shared(torch.int32, offset, 1)
        self._flags = region.shared(torch.int64, offset + 64, size * _NUM_FLAGS).view(size, _NUM_FLAGS).numpy()
        offset += 64 + 8 * size * _NUM_FLAGS
        self._notes = region.shared(torch.uint8, offset, size * _NOTE_BYTES).view(size, _NOTE_BYTES).numpy()
        self._aborted_view = self._aborted.numpy()

    @staticmethod
    def num_bytes(size: int) -> int:
        """How much shared memory they need."""
        return size * size * _SEMAPHORE_BYTES + 64 + size * (8 * _NUM_FLAGS + _NOTE_BYTES) + PAGE_BYTES

    def reset(self) -> None:
        """Makes everything as new; only while nobody waits."""
        self._aborted_view[0] = 0
        self._num_meetings = 0
        for row in self._semaphores:
            for semaphore in row:
                _libc.sem_init(semaphore, 1, 0)

    def abort(self) -> None:
        """Ends the waits of all others, now and until the next `reset`."""
        self._aborted_view[0] = 1
        for semaphore in self._posted:
            _libc.sem_post(semaphore)

    @property
    def aborted(self) -> bool:
        return bool(self._aborted_view[0])

    def enter(self, visit: int) -> None:
        """Begins a time in which all meet equally often; numbered alike everywhere."""
        self._visit = visit
        self._num_meetings = 0
        del self._purposes[1:]

    def meeting_for(self, purpose: Purpose) -> contextlib.AbstractContextManager[None]:
        """A block whose meetings have a purpose."""
        return self._meetings[purpose]

    def leave(self) -> None:
        """Ends it: whoever still waits for this replica now waits in vain."""
        self._flags[self.rank, _LEFT_FLAG] = self._visit

    def barrier(self) -> None:
        """Returns when every replica has called it. What they wrote before, all can read after.

        Raises:
            MismatchError: They have come for different purposes.
        """
        flag, purpose = _PURPOSE_FLAG + self._num_meetings % 2, self._purposes[-1]
        self._num_meetings += 1
        self._flags[self.rank, flag] = purpose
        self._meet()
        if self._flags[:, flag].tolist().count(purpose) != self.size:
            self._tell_apart()

    def _meet(self) -> None:
        for semaphore in self._posted:
            _libc.sem_post(semaphore)
        for source, semaphore in self._awaited:
            for _ in range(self._num_looks):
                if _libc.sem_trywait(semaphore) == 0:
                    break
            else:
                self._wait(source, semaphore)
        if self._aborted_view[0]:
            raise PeerAborted("another replica has failed")

    def _tell_apart(self) -> None:
        """Raises the error of a meeting to which replicas came for different purposes: all of them come here."""
        self.put_note(Purpose(self._purposes[-1]).told())
        self._meet()
        told = self.notes()
        self._meet()  # nobody writes another note before all have read these
        other = next((rank for rank, each in enumerate(told) if each != told[0]), 0)  # the same in all replicas
        raise MismatchError(f"replica 0 is {told[0]} while replica {other} is {told[other]}; {_ADVICE}")

    def exchange_flag(self, number: int, value: int) -> list[int]:
        """Gives every replica the small number of every other: a barrier that carries news."""
        self._flags[self.rank, number] = value
        self.barrier()
        return self.flags(number)

    def put_flag(self, number: int, value: int) -> None:
        """Writes a small number that the others read after the next barrier."""
        self._flags[self.rank, number] = value

    def flags(self, number: int) -> list[int]:
        """The small numbers of all replicas, as of the last barrier."""
        return self._flags[:, number].tolist()  # type: ignore[no-any-return]

    def put_note(self, text: str) -> None:
        """Writes a short text that the others read after the next barrier."""
        data = text.encode()[: _NOTE_BYTES - 1]
        self._notes[self.rank, : len(data)] = memoryview(data)
        self._notes[self.rank, len(data)] = 0

    def notes(self) -> list[str]:
        """The texts of all replicas, as of the last barrier."""
        return [bytes(row[: int((row == 0).argmax())]).decode(errors="replace") for row in self._notes]

    def _wait(self, source: int, semaphore: ctypes.c_void_p) -> None:
        start = time.monotonic()
        try:
            self._sleep(source, semaphore)
        finally:
            self.waited_s += time.monotonic() - start

    def _sleep(self, source: int, semaphore: ctypes.c_void_p) -> None:
        clock = Clock(_SLICE_S)
        while True:
            has_left = self._visit and self._flags[source, _LEFT_FLAG] == self._visit
            deadline = time.monotonic() + _SLICE_S
            until = _Timespec(int(deadline), int(deadline % 1 * 1e9))
            if _libc.sem_clockwait(semaphore, _CLOCK_MONOTONIC, ctypes.byref(until)) == 0:
                return
            code = ctypes.get_errno()
            if code not in (errno.ETIMEDOUT, errno.EINTR):
                raise CollectiveError(f"waiting for replica {source} failed: {errno.errorcode.get(code, code)}")
            if self._aborted_view[0]:
                raise PeerAborted("another replica has failed")
            if has_left:
                raise CollectiveError(
                    f"replica {source} has finished this run while replica {self.rank} still waits for it "
                    f"{Purpose(self._purposes[-1]).told()}; {_ADVICE}"
                )
            self.attend(clock.now_s(), [source])


@final
class _Meeting:
    """The block of `Signals.meeting_for`; there are several in each step, and a generator would cost more.

    Args:
        purposes: Those of the blocks that its replica is in, the innermost last.
        purpose: That of this one.
    """

    __slots__ = ("_purpose", "_purposes")

    def __init__(self, purposes: list[int], purpose: int) -> None:
        self._purposes, self._purpose = purposes, purpose

    def __enter__(self) -> None:
        self._purposes.append(self._purpose)

    def __exit__(self, *_: object) -> None:
        self._purposes.pop()
