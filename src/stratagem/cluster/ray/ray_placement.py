"""Reserves room for workers on the machines of a Ray cluster, and says what is missing where there is none.

Owns the placement group. Where the program itself is the first worker, a bundle on its own machine
is for it, so that Ray gives nobody else the CPUs and the GPU that it computes with.
"""

import contextlib
import dataclasses
import os
import time
from collections.abc import Mapping
from typing import Any, Final, final

from stratagem.cluster.ray import ray_session
from stratagem.cluster.ray.ray_cluster import RayCluster
from stratagem.errors import ClusterResourcesError

_LOOK_S: Final = 0.05
_READY: Final = "CREATED"
_SOMETHING: Final = 0.001


@dataclasses.dataclass(frozen=True)
class Room:
    """What to reserve.

    Args:
        bundles: For each worker what it needs of each resource.
        address: Where Ray is.
        placement: How the workers are spread over machines, in Ray's word.
        runtime_env: What they need besides.
        timeout_s: How long to wait for room.
        has_driver: Whether the first is this program itself.
        advice: What a user can do if there is no room.
    """

    bundles: tuple[Mapping[str, float], ...]
    address: str | None
    placement: str = "PACK"
    runtime_env: Mapping[str, Any] | None = None
    timeout_s: float = 60.0
    has_driver: bool = False
    advice: str = ""

    @classmethod
    def of_cluster(cls, cluster: RayCluster) -> "Room":
        """For this program and the workers that it drives."""
        return cls(
            (cluster.worker_resources,) * cluster.num_workers,
            cluster.address,
            cluster.placement,
            cluster.runtime_env,
            cluster.placement_timeout_s,
            has_driver=True,
            advice="ask for fewer num_workers or less of cpus_per_worker and gpus_per_worker, or raise "
            "placement_timeout_s",
        )


@final
class RayPlacement:
    """Room on Ray's machines, from the start until `close`.

    Args:
        room: What to reserve.

    Raises:
        ClusterResourcesError: There is no such room.
        ClusterError: There is no Ray.
    """

    def __init__(self, room: Room) -> None:
        self._room = room
        self._process = os.getpid()
        self.ray = ray_session.acquire(room.address)
        self._group: Any = None
        try:
            self.host: str = self.ray.util.get_node_ip_address()
            self._require_feasible()
            # Ray takes no empty ones; those that need nothing can be anywhere.
            bundles = [dict(each) or {"CPU": _SOMETHING} for each in room.bundles]
            where: list[dict[str, str]] = [{} for _ in bundles]
            if room.has_driver:
                bundles[0], where[0] = self._own_bundle(), {"ray.io/node-id": self._own_node()["NodeID"]}
            self._group = self.ray.util.placement_group(bundles, strategy=room.placement, bundle_label_selector=where)
            self.wait()
        except BaseException:
            self.close()
            raise

    def wait(self) -> None:
        """Waits until there is room for all, also anew after a machine was lost.

        Raises:
            ClusterResourcesError: There is none in time.
        """
        deadline = time.monotonic() + self._room.timeout_s
        while self.ray.util.placement_group_table(self._group)["state"] != _READY:
            if time.monotonic() > deadline:
                raise self._no_room(f" within {self._room.timeout_s:g} s")
            time.sleep(_LOOK_S)

    def options(self, number: int) -> dict[str, Any]:
        """What Ray must be told so that an actor takes the place of a worker."""
        strategies = self.ray.util.scheduling_strategies
        runtime_env, bundle = self._room.runtime_env, self._room.bundles[number]
        return {
            "num_cpus": bundle.get("CPU", 0),
            "num_gpus": bundle.get("GPU", 0),
            "scheduling_strategy": strategies.PlacementGroupSchedulingStrategy(
                self._group, placement_group_bundle_index=number
            ),
            "runtime_env": dict(runtime_env) if runtime_env is not None else None,
        }

    def own_gpus(self) -> list[int]:
        """The numbers of the GPUs that Ray keeps for this program."""
        ask = self.ray.remote(max_retries=0)(_gpus_here)
        numbers = self.ray.get(ask.options(**self.options(0)).remote())
        return [int(each) for each in numbers]

    def close(self) -> None:
        """Gives the room back; a second time it does nothing."""
        if self._process != os.getpid():
            return
        self._process = 0
        if self._group is not None and ray_session.is_connected():
            with contextlib.suppress(self.ray.exceptions.RayError):  # it is gone with its cluster
                self.ray.util.remove_placement_group(self._group)
        ray_session.release()

    def _own_bundle(self) -> dict[str, float]:
        """What is kept for this program: no CPU on a head that Ray was told to leave alone."""
        has_cpu = self._own_node()["Resources"].get("CPU")
        wanted = {kind: amount for kind, amount in self._room.bundles[0].items() if kind != "CPU" or has_cpu}
        return {**wanted, f"node:{self.host}": _SOMETHING}

    def _own_node(self) -> Any:
        own = self.ray.get_runtime_context().get_node_id()
        return next(node for node in self.ray.nodes() if node["NodeID"] == own)

    def _require_feasible(self) -> None:
        """Refuses at once what can never be: a Ray of this machine alone does not grow."""
        if ray_session.is_embedded():
            has = self._own_node()["Resources"]
            for kind in ("CPU", "GPU"):
                if sum(each.get(kind, 0) for each in self._room.bundles) > has.get(kind, 0):
                    raise self._no_room("")

    def _no_room(self, when: str) -> ClusterResourcesError:
        nodes = [node for node in self.ray.nodes() if node["Alive"]]
        have = "; ".join(f"{_node_name(node)} has {_words(node['Resources'])}" for node in nodes)
        wanted = [_words(each) for each in self._room.bundles]
        asked = " and ".join(f"{wanted.count(each)} of {each} each" for each in dict.fromkeys(wanted))
        return ClusterResourcesError(
            f"Ray has no room for {len(wanted)} workers, {asked} ({self._room.placement}){when}: {have}; of all that "
            f"{_words(self.ray.available_resources())} is free. Wait until other programs have ended or add machines, "
            f"{self._room.advice}"
        )


def num_nodes_and_least(ray: Any) -> tuple[int, dict[str, float]]:
    """How many machines there are, and what the one with the least has."""
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    return len(nodes), {kind: min(node.get(kind, 0) for node in nodes) for kind in ("CPU", "GPU")}


def _gpus_here() -> list[int]:
    gpus: list[int] = ray_session.load().get_gpu_ids()
    return gpus


def _node_name(node: Any) -> str:
    return f"{node['NodeManagerAddress']} (node {node['NodeID'][:8]})"


def _words(resources: Mapping[str, float]) -> str:
    """CPUs and GPUs in words: `2 CPU, 1 GPU`."""
    counted = [f"{resources[kind]:g} {kind}" for kind in ("CPU", "GPU") if resources.get(kind)]
    return ", ".join(counted) or "no CPU"
