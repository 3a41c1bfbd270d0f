"""A replica in a process of Ray's: an actor around the loop of a child.

The actor's methods run in threads of Ray's; the loop has a thread of its own, since much of torch's
state belongs to a thread. What the controller sends waits for the loop, what the loop sends waits
for the controller to ask for it.
"""

import dataclasses
import functools
import os
import queue
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, final

import torch.distributed

from stratagem.cluster.membership.membership import Membership
from stratagem.cluster.membership.value_store import ClusterStore
from stratagem.cluster.ray import ray_session
from stratagem.cluster.spec import WORKER
from stratagem.collectives.reconnecting import Meet
from stratagem.collectives.shared_memory import SharedMemory
from stratagem.collectives.signals import PeerAborted, Signals
from stratagem.devices.device import LogicalDevice
from stratagem.devices.inventory import this_process
from stratagem.devices.kind_table import CPU
from stratagem.engine import child_calls
from stratagem.engine.recipe import Recipe
from stratagem.engine.strategy_in_replica import StrategyInReplica
from stratagem.processes import child
from stratagem.processes.packing import pack, unpack
from stratagem.processes.region import Region
from stratagem.processes.registry import Registry

# What travels through Ray: the bytes of an object, and those of its tensors.
Message = tuple[bytes, list[bytes]]


@dataclasses.dataclass(frozen=True)
class Whereabouts:
    """Where an actor is.

    Args:
        pid: Its process.
        host: The address of its machine.
        node: Ray's name of that machine.
        is_guarded: Whether Ray asks for a token there.
    """

    pid: int
    host: str
    node: str
    is_guarded: bool


@dataclasses.dataclass(frozen=True)
class Invitation:
    """What a replica is told so that it finds the others.

    Args:
        cluster: All of them as tasks, of which the first, the controller, has an address.
        secret: Their token; it travels through Ray only.
        join_timeout_s: How long to wait for all.
    """

    cluster: dict[str, list[str | None]]
    secret: bytes
    join_timeout_s: float

    def __repr__(self) -> str:
        return f"<Invitation to {self.cluster}>"


@final
class RayReplica:
    """The actor."""

    def __init__(self) -> None:
        registry = Registry(keeps=True)
        self._pipe = ActorPipe(registry)
        self._loop = threading.Thread(target=child.serve, args=(self._pipe, registry), daemon=True)
        self._loop.start()

    def where(self) -> Whereabouts:
        """Says that it is there."""
        ray = ray_session.load()
        node = ray.get_runtime_context().get_node_id()
        return Whereabouts(os.getpid(), ray.util.get_node_ip_address(), node, ray_session.asks_for_token())

    def take(self, message: Message) -> None:
        """Takes in what the controller sends."""
        self._pipe.incoming.put(message)

    def next_messages(self) -> list[Message]:
        """What the loop has sent since the last time, after waiting for something; nothing once it has ended."""
        found = [self._pipe.outgoing.get()]
        while not self._pipe.outgoing.empty():
            found.append(self._pipe.outgoing.get())
        return [each for each in found if each is not None]

    def abort(self, run_number: int) -> None:
        """Another replica has failed in that run."""
        _now.aborted_run = run_number

    def stack(self) -> str:
        """Where the loop is."""
        frame = sys._current_frames().get(self._loop.ident or 0)
        return "".join(traceback.format_stack(frame)) if frame is not None else "it has ended\n"

    def leave(self) -> None:
        """Lets the loop end, and the process."""
        self._pipe.incoming.put(None)
        self._loop.join()
        self._pipe.outgoing.put(None)  # Ray waits for calls that are under way
        if _now.membership is not None:
            _now.membership.leave()
        ray_session.load().actor.exit_actor()


@final
class ActorPipe:
    """The loop's end of the way to the controller."""

    def __init__(self, registry: Registry) -> None:
        self.incoming: queue.SimpleQueue[Message | None] = queue.SimpleQueue()
        self.outgoing: queue.SimpleQueue[Message | None] = queue.SimpleQueue()
        self._registry = registry

    def send(self, message: object) -> None:
        self.outgoing.put(as_message(pack(message, self._registry.reference)))

    def receive(self) -> Any:
        message = self.incoming.get()
        if message is None:
            raise EOFError("nothing more will come")
        return read_message(message, self._registry.resolve)


def as_message(packed: Any) -> Message:
    """What `pack` made, for Ray; a copy, for what it was made of may change."""
    return packed.data, [bytes(buffer) for buffer in packed.buffers]


def read_message(message: Message, resolve: Callable[[Any], Any], *, keeps_classes: bool = False) -> Any:
    """The object in a message; tensors in it can be written to, unlike what Ray hands out."""
    data, buffers = message
    return unpack(data, [bytearray(buffer) for buffer in buffers], resolve, keeps_classes=keeps_classes)


def take_device(kind: str, num_threads: int) -> LogicalDevice:
    """Where this process is to compute: the device of a kind that Ray has left visible to it."""
    device = this_process().resolve(f"{kind}:0")
    return dataclasses.replace(device, num_threads=num_threads) if kind == CPU else device


def join(key: int, rank: int, recipe: Recipe, devices: Sequence[LogicalDevice], invitation: Invitation) -> None:
    """Makes this process a replica of a strategy."""
    membership = _now.membership = _enter(invitation, rank)
    child_calls.join(
        key,
        rank,
        devices[rank],
        recipe,
        Region.create(Signals.num_bytes(1)),
        Region.create(SharedMemory.num_bytes(1)),
        StrategyInReplica(rank, devices, recipe.first, recipe.total),
        meeting_of(membership),
    )
    runtime = child_calls.runtime_of(key)
    runtime.signals.reset()

    def attend(waited_s: float, missing: list[int]) -> None:
        if membership.lost is not None or runtime.run_number == _now.aborted_run:
            raise PeerAborted("another replica has failed")

    runtime.signals.attend = attend


def meeting_of(membership: Membership) -> Meet:
    """Where replicas meet that are tasks of one cluster."""
    return functools.partial(_meet, membership.own_host, ClusterStore(membership))


def _meet(host: str, store: ClusterStore, name: str) -> dict[str, Any]:
    c10d: Any = torch.distributed  # its stubs do not know the stores
    return {"store": c10d.PrefixStore(name, store), "address": host}


def _enter(invitation: Invitation, rank: int) -> Membership:
    with tempfile.TemporaryDirectory(prefix="stratagem-") as folder:  # has mode 0700
        token_file = Path(folder) / "token"
        token_file.touch(mode=0o600)
        token_file.write_bytes(invitation.secret)
        return Membership(
            invitation.cluster, WORKER, rank, join_timeout_s=invitation.join_timeout_s, token_file=token_file
        ).join()


class _Now:
    """What the threads of this process tell each other."""

    aborted_run = -1
    membership: Membership | None = None


_now = _Now()
