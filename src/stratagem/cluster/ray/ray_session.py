"""Connects this program to Ray, or starts a Ray of this machine alone; takes leave of it at the end.

Owns the connection, who may end it, and what makes Ray safe: a Ray that is started here asks for a
token, listens on loopback only and has no dashboard. One that was there is left as it was.
"""

import contextlib
import functools
import importlib
import logging
import re
import shutil
import signal
import socket
import stat
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, final

from stratagem import _env
from stratagem._caller import warn_caller
from stratagem.cluster import token as tokens
from stratagem.cluster.address import Address
from stratagem.errors import ClusterError, ClusterWarning, RayMissingError

AUTO: Final = "auto"
_TOKEN: Final = "~/.ray/auth_token"  # noqa: S105  # a path, not the secret
_SHORT: Final = "/tmp"  # noqa: S108  # mkdtemp makes a folder of its own in it
_LOOK_S: Final = 5.0
_REST_S: Final = 0.05
_FIELD: Final = re.compile(r"(class_name|actor_id|pid|name|namespace|ip): ")
_MOST_CHARACTERS: Final = 300


@functools.cache
def load() -> Any:
    """Ray, if it is installed."""
    try:
        ray: Any = importlib.import_module("ray")
    except ImportError as error:
        raise RayMissingError(
            f"Ray cannot be loaded ({error}); run pip install 'stratagem[ray]', on all machines of its cluster"
        ) from error
    if not hasattr(importlib.import_module("ray._raylet"), "get_authentication_mode"):
        raise RayMissingError(
            f"Ray {ray.__version__} does not support tokens: anyone who can reach it can run programs here; "
            f"run pip install 'stratagem[ray]'"
        )
    return ray


def asks_for_token() -> bool:
    """Whether the Ray that this process belongs to takes only who has its token."""
    return bool(importlib.import_module("ray._private.authentication.authentication_utils").is_token_auth_enabled())


def warn_if_open(asking: bool, where: str) -> None:
    """Says loudly that a cluster lets everybody in."""
    if not asking:
        warn_caller(
            f"the Ray cluster at {where} does not ask for a token: anyone who can reach its ports can run programs "
            f"as you and take part in this training. Start it with {_env.RAY_AUTH_MODE}=token",
            ClusterWarning,
        )


def in_short(error: BaseException) -> str:
    """What Ray says of an error, in a line."""
    lines = [line.strip() for line in str(error).splitlines()]
    told = " ".join(line for line in lines if line and not _FIELD.match(line))
    return told if len(told) <= _MOST_CHARACTERS else told[:_MOST_CHARACTERS] + "..."


@final
class _Session:
    """The connection of this process to Ray.

    Args:
        leaving: What is to be done at its end; nothing where the program itself has connected.
    """

    def __init__(self) -> None:
        self.num_users = 0
        self.address = ""
        self.is_embedded = False
        self.leaving = contextlib.ExitStack()


_sessions: list[_Session] = []
_lock = threading.Lock()


def acquire(address: str | None) -> Any:
    """Ray, connected; give it back with `release`.

    Args:
        address: Where it is, or `auto`; by default `RAY_ADDRESS`, or else a new one on this machine.

    Raises:
        RayMissingError: It is not installed.
        ClusterError: There is none at that address, or it does not let this program in.
    """
    ray = load()
    with _lock:
        address = address or (None if ray.is_initialized() else _env.ray_address())
        if _sessions and not _is_current(ray, _sessions[-1]):
            _sessions.pop()  # the program has ended it
        if not _sessions:
            session = _Session()
            if not ray.is_initialized():
                with contextlib.ExitStack() as leaving:
                    leaving.enter_context(_env.without_what_ray_sets())
                    folder = leaving.enter_context(_folder()) if address is None else ""
                    leaving.callback(ray.shutdown)
                    if address is None:
                        _start(ray, folder)
                    else:
                        _attach(ray, address)
                    session.leaving, session.is_embedded = leaving.pop_all(), address is None
            session.address = ray.get_runtime_context().gcs_address
            _sessions.append(session)
        _require_same(_sessions[-1], address)
        _sessions[-1].num_users += 1
    return ray


def release() -> None:
    """Takes leave of Ray when its last user gives it back; a Ray that was started here ends then."""
    with _lock:
        if not _sessions:
            return
        _sessions[-1].num_users -= 1
        if not _sessions[-1].num_users:
            session = _sessions.pop()
            if _is_current(load(), session):
                session.leaving.close()


def is_connected() -> bool:
    """Whether Ray can still be asked for something: if not, it would start itself anew."""
    return bool(_sessions) and _is_current(load(), _sessions[-1])


def _is_current(ray: Any, session: _Session) -> bool:
    return bool(ray.is_initialized() and ray.get_runtime_context().gcs_address == session.address)


def is_embedded() -> bool:
    """Whether Ray was started here, so that it will not grow."""
    return bool(_sessions) and _sessions[-1].is_embedded


def _require_same(session: _Session, address: str | None) -> None:
    if address not in (None, AUTO) and _port(address) != _port(session.address):
        raise ClusterError(
            f"this program is connected to Ray at {session.address} already, and address={address!r} is another; "
            f"leave the address out, or call ray.shutdown() first"
        )


def _port(address: str) -> str:
    return address.rpartition(":")[2]


@contextlib.contextmanager
def _folder() -> Iterator[str]:
    """Where a Ray that is started here has its logs and sockets; only this user can enter it.

    Ray lets everybody into the folder that it is given, and into all that it makes there. So it gets one inside.
    """
    # The names of sockets must be short, and the folder for temporary files may have a long one.
    folder = tempfile.mkdtemp(prefix="stratagem-ray-", dir=_SHORT if Path(_SHORT).is_dir() else None)
    try:
        yield f"{folder}/r"
    finally:
        deadline = time.monotonic() + _LOOK_S
        while Path(folder).exists() and time.monotonic() < deadline:
            shutil.rmtree(folder, ignore_errors=True)  # processes that are ending may still write to it
            time.sleep(_REST_S if Path(folder).exists() else 0.0)


def _start(ray: Any, folder: str) -> None:
    if _env.ray_auth_mode() is None:
        _make_token()
    constants: Any = importlib.import_module("ray._private.ray_constants")
    # So Ray says that no other machine takes part; it does so by itself on systems where that cannot be.
    before, constants.ENABLE_RAY_CLUSTER = constants.ENABLE_RAY_CLUSTER, False
    try:
        # By default Ray's workers give way to all other processes, and so to the program that waits for them.
        changes = {_env.RAY_ON_NETWORK: "0", _env.RAY_NICENESS: _env.ray_niceness() or "0"}
        with _env.with_changes(changes), _without_ctrl_c(), _quiet():
            ray.init(address="local", include_dashboard=False, logging_level=logging.ERROR, _temp_dir=folder)
    finally:
        constants.ENABLE_RAY_CLUSTER = before
    warn_if_open(asks_for_token(), "this machine")


def _attach(ray: Any, address: str) -> None:
    if address != AUTO:
        place = Address.parse(address)
        try:
            socket.create_connection((place.host, place.port), timeout=_LOOK_S).close()
        except OSError as error:
            raise ClusterError(
                f"no Ray answers at {address!r}: {error.strerror or error}. Name the head of the cluster (host:port, "
                f"`ray status` shows it), or leave the address out to start one here"
            ) from error
    try:
        with _quiet():
            ray.init(address=address, logging_level=logging.ERROR)
    except ray.exceptions.AuthenticationError as error:
        raise ClusterError(
            f"the Ray cluster at {address!r} does not take this program's token; copy the file {_TOKEN} of its head "
            f"here, or name it in {_env.RAY_TOKEN[1]}"
        ) from error
    except (ConnectionError, RuntimeError) as error:
        raise ClusterError(f"this program cannot connect to Ray at {address!r}: {error}") from error


def _make_token() -> None:
    """Makes the token that Ray looks for, where there is none: Ray's own could be read by others."""
    path = Path(_TOKEN).expanduser()
    if _env.has_ray_token():
        return
    with contextlib.suppress(FileExistsError):
        tokens.create(path)
    mode = stat.S_IMODE(path.stat().st_mode)
    if mode & 0o077:
        warn_caller(
            f"Ray's token file {str(path)!r} has mode {mode:04o}: others can read it, and run programs as you; "
            f"run chmod 600 {path}",
            ClusterWarning,
        )


@contextlib.contextmanager
def _without_ctrl_c() -> Iterator[None]:
    """Lets processes that are started here not hear Ctrl-C, which is the main program's to handle."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keeps off the screen what Ray logs of its own start; errors it raises."""
    logger = logging.getLogger("ray")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)
