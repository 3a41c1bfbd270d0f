"""Connects the replicas of one machine by torch.distributed, from the controller's side."""

import contextlib
import tempfile

from stratagem.collectives.reconnecting import TorchLink
from stratagem.collectives.signals import PeerAborted
from stratagem.engine import child_calls
from stratagem.processes.group import ChildGroup
from stratagem.processes.losses import raise_first


def connect(group: ChildGroup, key: int, own: TorchLink, started: contextlib.ExitStack | None) -> None:
    """Connects replica 0 and the children, all at once.

    Args:
        group: The children.
        key: By which they know the strategy.
        own: The connection of replica 0.
        started: Where to leave the file in which they meet, if it has to last as long as the connection does.
    """
    with contextlib.ExitStack() as folders:
        path = folders.enter_context(tempfile.TemporaryDirectory(prefix="stratagem-")) + "/store"
        group.call_all(child_calls.connect, key, path)
        with contextlib.suppress(PeerAborted):  # then a child says why
            own.connect(path)
        group.collect()
        raise_first(None, group.failures(besides=PeerAborted))
        # Else it goes at once: a program that is killed must not leave it behind.
        if started is not None:
            started.push(folders.pop_all())
