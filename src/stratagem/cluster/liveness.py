"""Tells whether another task is still there: by its signs of life, and by what the system knows of its machine.

The one rule for all connections between tasks. One that ends is the end of its task, at once; that is noticed by
whoever reads it. A task that is silent while its machine still confirms what it is sent may be busy: Python holds
one lock for all threads, and a call into C may keep it for long. So it has `heartbeat_timeout_s`. If the machine
confirms nothing either, the network is cut or the machine gone, and a few missed signs of life are enough.
"""

import asyncio
import dataclasses
import socket
import struct
import time
from collections.abc import Callable
from typing import Final, final

from stratagem import _env
from stratagem._checks import require_seconds
from stratagem._clock import Clock
from stratagem.errors import ClusterSpecError

HEARTBEAT_TIMEOUT_S: Final = 30.0

_LOOKS_PER_BEAT: Final = 4
_SHORTEST_S: Final = 0.01
# Of `struct tcp_info` of Linux: retransmits, probes, last_ack_recv in milliseconds.
_TCP_INFO: Final = struct.Struct("=2x2B52xI")
# The first probe of a machine whose process does not read is without an answer for a moment.
_FEWEST_PROBES: Final = 2


def chosen_timeout_s(given: float | None = None) -> float:
    """How long a task may be silent: what the program says, or `stratagem run --heartbeat-timeout`, or 30 s.

    Raises:
        ClusterSpecError: What was said is no number of seconds.
    """
    name, value = "heartbeat_timeout_s", given
    if value is None:
        name, text = _env.HEARTBEAT_TIMEOUT, _env.heartbeat_timeout()
        try:
            value = HEARTBEAT_TIMEOUT_S if text is None else float(text)
        except ValueError:
            raise ClusterSpecError(f"{name} is a number of seconds above 0, got {text!r}") from None
    require_seconds(ClusterSpecError, or_zero=False, **{name: value})
    return value


@final
@dataclasses.dataclass(frozen=True)
class Rhythm:
    """How often tasks give signs of life, and how long they may give none.

    Args:
        heartbeat_s: After how long each sign of life follows the last, unless the timeout asks for more.
        num_missed: After how many missed ones a task is lost whose machine does not answer either.
        timeout_s: After how long without any a task is lost at all events.
    Raises:
        ClusterSpecError: One of them breaks a rule.
    """

    heartbeat_s: float
    num_missed: int
    timeout_s: float

    def __post_init__(self) -> None:
        if not _SHORTEST_S <= self.heartbeat_s <= 3600:
            raise ClusterSpecError(f"heartbeat_s is a number of seconds from 0.01 to 3600, got {self.heartbeat_s!r}")
        if type(self.num_missed) is not int or not 1 <= self.num_missed <= 1000:
            raise ClusterSpecError(f"num_missed is a whole number from 1 to 1000, got {self.num_missed!r}")

    @property
    def beat_s(self) -> float:
        """After how long each sign of life follows the last, so that some fit into the timeout."""
        return max(_SHORTEST_S, min(self.heartbeat_s, self.timeout_s / (self.num_missed + 1)))


@final
class Pulse:
    """How long another task has been silent, by a clock that stands still while this process does.

    A beat that is due is missed when the one after it is nearly due, so that what the network has to
    send again is not counted as missed.

    Args:
        rhythm: How long it may be.
        monotonic: The clock that never stands still.
    """

    def __init__(self, rhythm: Rhythm, monotonic: Callable[[], float] = time.monotonic) -> None:
        self.clock = Clock(rhythm.beat_s / _LOOKS_PER_BEAT, monotonic)
        self._timeout_s = rhythm.timeout_s
        self._cut_off_s = (rhythm.num_missed + 0.75) * rhythm.beat_s
        self._heard_at = self.clock.now_s()

    def heard(self) -> None:
        """The other gave a sign of life."""
        self._heard_at = self.clock.now_s()

    def why_lost(self, unconfirmed_s: float) -> str:
        """Why the other counts as lost, or nothing while it does not; is to be asked four times in a beat.

        Args:
            unconfirmed_s: For how long its machine has confirmed nothing, as the function of that name tells.
        """
        silent_s = self.clock.now_s() - self._heard_at
        if min(silent_s, unconfirmed_s) >= self._cut_off_s:
            reason = "its machine does not answer either, or the network to it is cut"
        elif silent_s >= self._timeout_s:
            reason = "its machine answers, so its process is stopped or busy; if it is only busy, raise "
            reason += f"heartbeat_timeout_s={self._timeout_s:g}"
        else:
            return ""
        return f"no sign of life for {silent_s:.1f} s; {reason}"


async def keep_looking(rhythm: Rhythm, beat: Callable[[], None], look: Callable[[], None]) -> None:
    """Gives a sign of life in every beat, and looks for those of others four times in it, until cancelled."""
    while True:
        beat()
        for _ in range(_LOOKS_PER_BEAT):
            await asyncio.sleep(rhythm.beat_s / _LOOKS_PER_BEAT)
            look()


def unconfirmed_s(connection: socket.socket) -> float:
    """For how long the other machine has confirmed nothing, though it was sent something again; 0 while it confirms.

    What is sent to a process that does not read is confirmed all the same.
    """
    try:
        state = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO.size)
    except OSError:  # its end is for whoever reads it
        return 0.0
    num_retransmits, num_probes, since_confirmed_ms = _TCP_INFO.unpack(state)
    return since_confirmed_ms / 1000 if num_retransmits or num_probes >= _FEWEST_PROBES else 0.0


def unconfirmed_by_descriptor_s(descriptor: int) -> float:
    """The same for a socket that belongs to a library; it is not touched. 0 for what is no socket (any more)."""
    try:
        borrowed = socket.socket(fileno=descriptor)
    except (OSError, ValueError):
        return 0.0
    try:
        return unconfirmed_s(borrowed)
    finally:
        borrowed.detach()
