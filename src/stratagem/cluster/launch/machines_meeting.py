"""Connects the launchers of several machines: authenticated, and listening at the named address only.

Owns nothing but the words: a launcher is a task of a small cluster of launchers, whose host is the
first machine (`membership`). One machine needs none of it.
"""

import contextlib
import dataclasses
import re
import time
from collections.abc import Callable, Iterator
from typing import Any

from stratagem.cluster import token as tokens
from stratagem.cluster.launch.ctrl_c import CtrlC
from stratagem.cluster.launch.failures import Failure
from stratagem.cluster.launch.plan import Order
from stratagem.cluster.membership.membership import Membership
from stratagem.cluster.membership.value_store import ClusterStore
from stratagem.cluster.spec import LOCAL
from stratagem.errors import ClusterError, LaunchError


@dataclasses.dataclass(frozen=True)
class MachineLink:
    """What a launcher has of the others.

    Args:
        store: Shared with them, as torch knows it.
        host: The address by which they reach the tasks of this machine.
        token_file: Where the secret is that all have.
        raise_if_lost: Raises a `TaskLostError` when one of them is gone.
        lost: Says which one, if any is.
    """

    store: Any
    host: str
    token_file: str
    raise_if_lost: Callable[[], None] = lambda: None
    lost: Callable[[], Failure | None] = lambda: None


@contextlib.contextmanager
def linked(order: Order, interrupts: CtrlC) -> Iterator[MachineLink]:
    """Joins the launchers of all machines, and leaves them at the end.

    Raises:
        LaunchError: They do not come together, or one is lost.
    """
    machine = order.machine
    with _in_words():
        membership = Membership(
            {LOCAL: [machine.endpoint] + [None] * (machine.count - 1)},
            LOCAL,
            machine.rank,
            signature={"--max-restarts": order.max_restarts},
            join_timeout_s=machine.join_timeout_s,
            heartbeat_timeout_s=order.heartbeat_timeout_s,
        )
        token_file = str(tokens.load().path)
        membership.join(waiting=interrupts.raising)
        try:
            host = machine.address or membership.own_host
            yield MachineLink(
                ClusterStore(membership), host, token_file, membership.raise_if_lost, lambda: _lost(membership)
            )
        except BaseException as error:
            membership.fail(str(error))
            raise
        membership.leave()


def _lost(membership: Membership) -> Failure | None:
    if membership.lost is None:
        return None
    name = _about_machines(str(membership.lost.member))
    return Failure(name, code=1, cause=f"was lost: {_about_machines(membership.lost.why)}", at=time.time())


def _about_machines(text: str) -> str:
    return re.sub(rf"\b{LOCAL}/([0-9]+)", r"machine \1", text).replace("heartbeat_timeout_s=", "--heartbeat-timeout ")


@contextlib.contextmanager
def _in_words() -> Iterator[None]:
    """Turns errors about tasks of the cluster of launchers into errors about machines and options."""
    try:
        yield
    except LaunchError:
        raise
    except ClusterError as error:
        text = (
            _about_machines(str(error))
            .replace("join_timeout_s=", "--join-timeout ")
            .replace("run the same program on both", "say the same")
        )
        raise LaunchError(text) from error
