"""The workers of a strategy that Ray has started: one program drives a replica on each.

Owns the room that Ray keeps for them, for as long as there is a strategy, and lets the replicas of
each start find one another. They share no memory: variables travel by value, and all that replicas
exchange goes over torch.distributed.
"""

import contextlib
import dataclasses
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, final

import torch

from stratagem import _env
from stratagem.cluster import token as tokens
from stratagem.cluster.launch.ports import Ports
from stratagem.cluster.membership.membership import Membership
from stratagem.cluster.ray.ray_cluster import RayCluster
from stratagem.cluster.ray.ray_placement import RayPlacement, Room
from stratagem.cluster.spec import WORKER
from stratagem.collectives.reconnecting import Meet
from stratagem.devices.device import LogicalDevice, PhysicalDevice
from stratagem.devices.inventory import this_process
from stratagem.devices.kind_table import CPU, GPU
from stratagem.engine.lockstep import LocalReplicas
from stratagem.engine.ray import ray_replica
from stratagem.engine.ray.ray_children import RayChildren
from stratagem.engine.ray.ray_replica import Invitation
from stratagem.engine.recipe import Recipe
from stratagem.errors import DeviceNotFoundError
from stratagem.processes.group import ChildGroup
from stratagem.processes.losses import raise_first


@final
class RayWorkers:
    """The workers of one strategy; the first is this program.

    Args:
        cluster: What was asked for.
        join_timeout_s: How long to wait for all to come.
        heartbeat_timeout_s: How long one whose machine answers may give no sign of life, from then on.

    Raises:
        ClusterResourcesError: Ray has no room for them.
        ClusterError: There is no Ray.
    """

    def __init__(self, cluster: RayCluster, *, join_timeout_s: float, heartbeat_timeout_s: float | None) -> None:
        self._cluster = cluster
        self._join_timeout_s, self._heartbeat_timeout_s = join_timeout_s, heartbeat_timeout_s
        self._placement: RayPlacement | None = RayPlacement(Room.of_cluster(cluster))
        self._replicas: LocalReplicas | None = None
        try:
            own = _own_device(cluster, self._placement)
        except BaseException:
            self.close()
            raise
        kind, type_ = (GPU if cluster.gpus_per_worker else CPU), own.torch_device.type
        place = torch.device(type_) if type_ == "cpu" else torch.device(type_, 0)
        elsewhere = LogicalDevice(kind, 0, PhysicalDevice(kind, 0), place)
        self.devices = (own, *[elsewhere] * (cluster.num_workers - 1))

    def new_replicas(self, owner: Any, *, recipe: Recipe, stall_timeout_s: float) -> LocalReplicas:
        """What drives the replicas for a strategy, with actors that are new."""
        self._placement = self._placement or RayPlacement(Room.of_cluster(self._cluster))
        start = RayStart(
            self._placement,
            num_threads=self._cluster.num_threads,
            join_timeout_s=self._join_timeout_s,
            heartbeat_timeout_s=self._heartbeat_timeout_s,
        )
        self._replicas = LocalReplicas(owner, self.devices, recipe, stall_timeout_s, elsewhere=start)
        return self._replicas

    def close(self) -> None:
        """Ends the replicas, then gives their room back."""
        try:
            if self._replicas is not None:
                self._replicas.close()
        finally:
            self._give_room_back()

    def drop(self) -> None:
        """The same for a strategy that nobody has any more, in whichever thread that is noticed: waits for no other."""
        try:
            if self._replicas is not None:
                self._replicas.drop()
        finally:
            self._give_room_back()

    def _give_room_back(self) -> None:
        if self._placement is not None:
            self._placement.close()
            self._placement = None


@final
class RayStart:
    """One start of the replicas of a strategy.

    Args:
        placement: Where there is room for them.
        num_threads: With how many threads each computes.
        join_timeout_s: How long to wait for all to come.
        heartbeat_timeout_s: How long one whose machine answers may give no sign of life, from then on.
    """

    def __init__(
        self, placement: RayPlacement, *, num_threads: int, join_timeout_s: float, heartbeat_timeout_s: float | None
    ) -> None:
        self.children = RayChildren(placement, start_timeout_s=join_timeout_s)
        self._host = placement.host
        self._num_threads = num_threads
        self._join_timeout_s, self._heartbeat_timeout_s = join_timeout_s, heartbeat_timeout_s
        self._meeting: Meet | None = None

    def meet(self, name: str) -> dict[str, Any]:
        """What a collective is told so that it finds the others."""
        return self._meeting(name) if self._meeting is not None else {}

    def join(self, group: ChildGroup, key: int, recipe: Recipe, devices: Sequence[LogicalDevice]) -> None:
        """Makes the children replicas of the strategy, and lets all find one another."""
        group.call_all(ray_replica.take_device, devices[-1].device_type, self._num_threads)
        found = [devices[0], *group.collect()]
        raise_first(None, group.failures())
        with (
            tempfile.TemporaryDirectory(prefix="stratagem-") as folder,  # has mode 0700
            contextlib.closing(Ports(self._host)) as ports,
        ):
            token_file = Path(folder) / "token"
            tokens.create(token_file)
            cluster = {WORKER: [ports.pick(), *[None] * (len(devices) - 1)]}
            invitation = Invitation(cluster, token_file.read_bytes(), self._join_timeout_s)
            membership = Membership(
                cluster,
                WORKER,
                0,
                join_timeout_s=self._join_timeout_s,
                heartbeat_timeout_s=self._heartbeat_timeout_s,
                token_file=token_file,
            )
            ranks = range(1, len(devices))
            group.call(ray_replica.join, [(key, rank, recipe, found, invitation) for rank in ranks])
            self.children.membership = membership.join()
        group.collect()
        raise_first(None, group.failures())
        self._meeting = ray_replica.meeting_of(membership)


def _own_device(cluster: RayCluster, placement: RayPlacement) -> LogicalDevice:
    """Where this program computes: on the CPU, or on the GPU that Ray keeps for it."""
    if not cluster.gpus_per_worker:
        return dataclasses.replace(this_process().resolve("cpu:0"), num_threads=cluster.num_threads)
    number = str(placement.own_gpus()[0])
    mask = _env.cuda_visible_devices()
    visible = [each.strip() for each in mask.split(",")] if mask else None
    if visible is not None and number not in visible:
        raise DeviceNotFoundError(
            f"Ray has reserved GPU {number} for this program, but {_env.CUDA_VISIBLE_DEVICES}={mask!r} hides it; "
            f"unset that variable, or set it for Ray too"
        )
    return this_process().resolve(f"gpu:{number if visible is None else visible.index(number)}")
