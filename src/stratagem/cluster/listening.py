"""Listens at the address of a task, and at no other; says who is in the way if that fails."""

import contextlib
import errno
import os
import socket
from pathlib import Path
from typing import Final

from stratagem._caller import warn_caller
from stratagem.cluster.address import Address
from stratagem.cluster.spec import Task
from stratagem.errors import AddressError, AddressInUseError, ClusterWarning

_BACKLOG: Final = 256
_LISTENING: Final = "0A"


def listen(task: Task, address: Address, *, everywhere: bool = False) -> list[socket.socket]:
    """Sockets that listen at each address of this machine that the host of a task has.

    Args:
        task: Whose address it is, for messages.
        address: Where.
        everywhere: Whether to listen on all addresses of this machine in its place.

    Raises:
        AddressInUseError: Another program listens there.
        AddressError: It is no address of this machine, or may not be used.
    """
    if everywhere:
        warn_caller(
            f"{task.name} listens on all addresses of this machine at port {address.port}, not only on {address.host}; "
            f"any program that can reach it can try to guess the token",
            ClusterWarning,
        )
    listeners: list[socket.socket] = []
    elsewhere = False
    try:
        for family, place in _places(task, address, everywhere):
            try:
                listeners.append(_bound(family, place))
            except OSError as error:
                if error.errno != errno.EADDRNOTAVAIL:
                    raise _explained(error, task, address) from None
                elsewhere = True
    except BaseException:
        for listener in listeners:
            listener.close()
        raise
    if elsewhere and not listeners:
        raise AddressError(
            f"{task.name} cannot listen at {address}: that is not an address of this machine, which has "
            f"{' and '.join(_own_addresses()) or 'none'}. Check job_name and task_index; if the network translates "
            f"addresses, pass allow_all_interfaces=True"
        )
    return listeners


def holder_of(port: int) -> str | None:
    """The program that listens at a port of this machine, as `pid 77 python3`; None if it cannot be told."""
    sockets = _listening(port)
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended, or is another user's
            for descriptor in (process / "fd").iterdir():
                with contextlib.suppress(OSError):
                    if os.readlink(descriptor) in sockets:
                        return f"pid {process.name} {(process / 'comm').read_text().strip()}"
    return None


def _places(task: Task, address: Address, everywhere: bool) -> list[tuple[socket.AddressFamily, tuple[object, ...]]]:
    if everywhere:
        wide = socket.has_dualstack_ipv6()
        return [(socket.AF_INET6, ("::", address.port)) if wide else (socket.AF_INET, ("", address.port))]
    try:
        found = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise AddressError(
            f"{task.name} cannot listen at {address}: the name {address.host!r} is not known here ({error.strerror})"
        ) from None
    return list(dict.fromkeys((family, place) for family, _, _, _, place in found))


def _bound(family: socket.AddressFamily, place: tuple[object, ...]) -> socket.socket:
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, int(place[0] != "::"))
        listener.bind(place)
        listener.listen(_BACKLOG)
    except BaseException:
        listener.close()
        raise
    return listener


def _explained(error: OSError, task: Task, address: Address) -> OSError:
    if error.errno == errno.EADDRINUSE:
        holder = holder_of(address.port) or "by a program that this user may not see"
        return AddressInUseError(
            f"{address} is taken ({holder}); end that program, or give {task.name} another port; "
            f"if it is a {task.name} itself, give this task another index"
        )
    return AddressError(f"{task.name} cannot listen at {address}: {error.strerror}")


def _own_addresses() -> list[str]:
    """The addresses of this machine that connections to other machines would use."""
    found: list[str] = []
    for family, elsewhere in ((socket.AF_INET, "192.0.2.1"), (socket.AF_INET6, "2001:db8::1")):
        with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as asking:
            asking.connect((elsewhere, 9))  # of a datagram socket: nothing is sent
            found.append(str(asking.getsockname()[0]))
    return found


def _listening(port: int) -> set[str]:
    found = set()
    for table in ("tcp", "tcp6"):
        with contextlib.suppress(OSError):
            for line in Path("/proc/self/net", table).read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == _LISTENING and int(fields[1].rpartition(":")[2], 16) == port:
                    found.add(f"socket:[{fields[9]}]")
    return found
