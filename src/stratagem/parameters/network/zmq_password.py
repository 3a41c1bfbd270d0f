"""Lets ZeroMQ take messages only from those who have the cluster's token.

ZeroMQ keeps the parts of a message until the last one comes, however many there are: whoever it talks to can
fill the memory of a server. So it asks for a password before it takes anything (ZeroMQ's PLAIN and ZAP), one
that only somebody with the token can make. It travels in the open, and is good for nothing but to be
listened to: what is said is sealed (`encryption`).
"""

from hmac import compare_digest
from typing import Final, final

import zmq

from stratagem.cluster.token import Token

_ADDRESS: Final = "inproc://zeromq.zap.01"  # where ZeroMQ asks
_DOMAIN: Final = b"stratagem"  # without one it does not ask


def password(token: Token) -> bytes:
    """What opens the door of the servers of a cluster."""
    return token.sign(b"stratagem: the door of a parameter server").hex().encode()


def take_key(dealer: "zmq.Socket[bytes]", token: Token) -> None:
    """Lets a socket that will connect pass the door of a server."""
    dealer.set(zmq.PLAIN_USERNAME, _DOMAIN)
    dealer.set(zmq.PLAIN_PASSWORD, password(token))


@final
class Door:
    """Answers ZeroMQ who may come in.

    Args:
        context: Whose sockets ask; it has one door.
        token: The secret of the cluster.
    """

    def __init__(self, context: "zmq.Context[zmq.Socket[bytes]]", token: Token) -> None:
        self._expected = password(token)
        self.socket = context.socket(zmq.ROUTER)
        self.socket.set(zmq.LINGER, 0)
        self.socket.bind(_ADDRESS)

    def guard(self, router: "zmq.Socket[bytes]") -> None:
        """Lets a socket that will listen ask here."""
        router.set(zmq.PLAIN_SERVER, 1)
        router.set(zmq.ZAP_DOMAIN, _DOMAIN)

    def answer(self) -> int:
        """Answers all that has been asked; returns how many may not come in."""
        num_refused = 0
        while True:
            try:
                # Who asks, version, request, domain, address, routing id, mechanism, user, password.
                *way, version, request, _, _, _, _, _, given = self.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return num_refused
            is_known = compare_digest(given, self._expected)
            num_refused += not is_known
            self.socket.send_multipart([*way, version, request, b"200" if is_known else b"400", b"", b"", b""])

    def close(self) -> None:
        """Gives it back."""
        self.socket.close(linger=0)
