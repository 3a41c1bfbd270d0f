"""Where replicas meet, and the connections that gloo makes: found, to end them, since it cannot be told to stop."""

import contextlib
import os
import socket
import stat
from collections.abc import Iterable
from pathlib import Path

from stratagem.errors import CollectiveError


def connections_on(address: str) -> set[tuple[int, int]]:
    """The connections of this process that go out from an address, by file number and the file that it stands for."""
    own = {each[4][0] for each in socket.getaddrinfo(address, None)}
    found = set()
    for entry in Path("/proc/self/fd").glob("*"):
        with contextlib.suppress(OSError):  # closed meanwhile, or not connected
            if not os.readlink(entry).startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(entry.name))) as connection:
                connection.getpeername()
                if connection.family != socket.AF_UNIX and connection.getsockname()[0] in own:
                    found.add((int(entry.name), os.fstat(int(entry.name)).st_ino))
    return found


def hang_up(connections: Iterable[tuple[int, int]]) -> None:
    """Ends connections without closing their files, which belong to somebody else."""
    for number, file in connections:
        with contextlib.suppress(OSError):
            if os.fstat(number).st_ino == file:  # else the number stands for another by now
                with socket.socket(fileno=os.dup(number)) as connection:
                    connection.shutdown(socket.SHUT_RDWR)


def check_folder(folder: Path) -> None:
    """Refuses a folder to meet in that others can enter."""
    try:
        status = os.lstat(folder)
    except OSError as error:
        raise CollectiveError(f"the folder {str(folder)!r}, where replicas meet, cannot be used: {error}") from error
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise CollectiveError(
            f"replicas meet in a folder that only their user can enter; {str(folder)!r} has mode "
            f"{stat.filemode(status.st_mode)} and belongs to user {status.st_uid}. Use tempfile.mkdtemp(), or chmod 700"
        )
