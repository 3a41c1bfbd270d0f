"""Picks free ports for tasks, and keeps others from them until the tasks have come and gone.

A port is held by a socket that is bound and never listens. Servers that allow their address to be
reused (as Python's, torch's and ZeroMQ's do) can listen there; the system gives it to nobody else.
"""

import socket
from typing import final

from stratagem.cluster.address import Address
from stratagem.errors import LaunchError


@final
class Ports:
    """Ports of one address of this machine, held until `close`."""

    def __init__(self, host: str) -> None:
        self._host = host
        self._held: list[socket.socket] = []

    def pick(self) -> str:
        """Another free address, as `host:port`."""
        try:
            family, _, _, _, place = socket.getaddrinfo(self._host, 0, type=socket.SOCK_STREAM)[0]
            self._held.append(socket.socket(family, socket.SOCK_STREAM))
            self._held[-1].setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._held[-1].bind(place)
        except OSError as error:
            raise LaunchError(
                f"tasks cannot listen at {self._host!r}: {error.strerror or error}; "
                f"name an address of this machine with --local-addr"
            ) from error
        return str(Address(self._host, self._held[-1].getsockname()[1]))

    def close(self) -> None:
        """Gives all of them back."""
        for each in self._held:
            each.close()
