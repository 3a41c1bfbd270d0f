"""Makes the sockets of ZeroMQ, each with its limits.

Frames are bounded, so are queues on both sides; who says nothing sensible is cut off within seconds.
What travels over them is sealed (`encryption`); ZeroMQ's own encryption is not used (decision 0019).
"""

import contextlib
import os
import socket
from collections.abc import Sequence
from typing import Final, final

import zmq

from stratagem.cluster.address import Address
from stratagem.errors import ClusterError
from stratagem.parameters.network.frames import MOST_FRAME_BYTES
from stratagem.parameters.network.zmq_password import Door

_FEWEST: Final = (4, 3, 5)  # older ones can be crashed by strangers
_QUEUED_FRAMES: Final = 32  # of data: 16 MiB
_HANDSHAKE_MS: Final = 5000
_PING_MS: Final = 1000
_MOST_MS: Final = 2**31 - 1
_BUFFER_BYTES: Final = 4 * 2**20


def new_context() -> "zmq.Context[zmq.Socket[bytes]]":
    """ZeroMQ for one server or client.

    Raises:
        ClusterError: It is too old to be safe.
    """
    if zmq.zmq_version_info() < _FEWEST:
        raise ClusterError(
            f"libzmq {'.'.join(map(str, _FEWEST))} or later is needed, this is {zmq.zmq_version()}; "
            f"install a newer pyzmq"
        )
    return zmq.Context()


def serving(
    context: "zmq.Context[zmq.Socket[bytes]]", listeners: Sequence[socket.socket], door: Door, timeout_s: float
) -> "zmq.Socket[bytes]":
    """A socket for many clients, on sockets of the system that listen already; they become its own.

    A connection over which nothing comes for the timeout is closed.
    """
    router = _limited(context.socket(zmq.ROUTER))
    door.guard(router)
    router.set(zmq.ROUTER_MANDATORY, 1)
    router.set(zmq.HEARTBEAT_IVL, _PING_MS)
    router.set(zmq.HEARTBEAT_TIMEOUT, max(_PING_MS, int(min(1000 * timeout_s, _MOST_MS))))
    router.set(zmq.IPV6, 1)
    for listener in listeners:
        host, port = listener.getsockname()[:2]
        listener.setblocking(False)
        router.set(zmq.USE_FD, listener.detach())
        router.bind(f"tcp://{Address(host, port)}")
    return router


def connecting(context: "zmq.Context[zmq.Socket[bytes]]") -> "zmq.Socket[bytes]":
    """A socket for one server; when the connection ends it does not make another."""
    dealer = _limited(context.socket(zmq.DEALER))
    dealer.set(zmq.RECONNECT_IVL, -1)
    dealer.set(zmq.IPV6, 1)
    return dealer


def descriptor_of(message: zmq.Frame) -> int:
    """The socket of the system over which a message came; it is ZeroMQ's, and may be closed at any time."""
    return int(message.get(zmq.SRCFD))


def _limited(made: "zmq.Socket[bytes]") -> "zmq.Socket[bytes]":
    made.set(zmq.LINGER, 0)
    made.set(zmq.MAXMSGSIZE, MOST_FRAME_BYTES)
    made.set(zmq.SNDHWM, _QUEUED_FRAMES)
    made.set(zmq.RCVHWM, _QUEUED_FRAMES)
    made.set(zmq.HANDSHAKE_IVL, _HANDSHAKE_MS)
    made.set(zmq.SNDBUF, _BUFFER_BYTES)
    made.set(zmq.RCVBUF, _BUFFER_BYTES)
    return made


@final
class Bell:
    """Lets one thread wake another that waits for sockets."""

    def __init__(self) -> None:
        self.descriptor = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def ring(self) -> None:
        """Wakes the other thread, if it waits, or will wait."""
        if self.descriptor >= 0:
            os.eventfd_write(self.descriptor, 1)

    def hear(self) -> None:
        """Is awake."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self.descriptor)

    def close(self) -> None:
        """Gives it back. A second time it does nothing."""
        descriptor, self.descriptor = self.descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)
