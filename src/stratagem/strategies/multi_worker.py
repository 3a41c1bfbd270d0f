"""An equal copy of every variable on each device of several machines, in agreement after every step."""

import atexit
import dataclasses
import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Any, final

from torch.utils import _pytree as pytree

from stratagem._caller import calling_line
from stratagem._checks import require_seconds
from stratagem.cluster.membership.membership import Membership
from stratagem.cluster.ray.ray_cluster import RayCluster
from stratagem.cluster.resolvers.detection import found
from stratagem.cluster.resolvers.resolver import Resolver
from stratagem.cluster.spec import CHIEF, EVALUATOR, WORKER
from stratagem.devices.inventory import this_process
from stratagem.devices.lookup import DeviceLike
from stratagem.engine import context
from stratagem.engine.lockstep import LocalReplicas
from stratagem.engine.machines import Workers
from stratagem.engine.ray.ray_workers import RayWorkers
from stratagem.engine.recipe import Settings
from stratagem.errors import StrategyError, TaskLostError
from stratagem.objects.per_replica import PerReplica
from stratagem.strategies.mirrored import choose_way
from stratagem.strategies.replicated import Replicated


@final
class MultiWorkerMirroredStrategy(Replicated[LocalReplicas]):
    """Keeps an equal copy of every variable on each device of every worker.

    Every worker runs the same program and drives the replicas of its own machine. Gradients are summed
    inside each machine first, and cross the network once per worker. Who the workers are is found in
    `TF_CONFIG`, or in what torchrun, Slurm or Kubernetes set; without any of them there is one worker,
    and all is as with `MirroredStrategy`.

    Random numbers of the main programs start from those of the first worker, so that all shuffle alike.
    A run that fails in one worker ends the strategy in all of them: each says why.

    Args:
        devices: Where the replicas of this worker compute; by default all of its logical devices.
        cluster_resolver: Who takes part; by default what the environment says.
        cluster: In place of it: workers that Ray starts. Then this program alone drives them all, as replicas
            on other machines; a run that fails in one of them raises here, and the strategy goes on.
        gradients: `mean` over the global batch, or `sum` if the program scales the loss itself.
        unused: What a parameter that only some replicas used means: `zero` gradients, or an `error`.
        on_nonfinite: What a gradient that is not finite does to its step: `skip`, `raise` or `apply`.
        cross_device_ops: How gradients travel inside a machine, as in `MirroredStrategy`.
        stall_timeout_s: How long replicas of one machine wait for another before it counts as stalled.
        join_timeout_s: How long to wait for all workers to come.
        worker_timeout_s: How long to wait for a worker that lives but does not come; every minute a
            warning tells that it is waited for.
        allow_all_interfaces: Whether the first worker may listen on all addresses of its machine, where its own
            cannot be had (a network that translates addresses).
    Raises:
        ClusterError: Workers did not come, or do not fit together.
        StrategyError: An option is not one of its values, or the call is inside a replica.
    """

    def __init__(
        self,
        devices: Sequence[DeviceLike] | None = None,
        *,
        cluster_resolver: Resolver | None = None,
        cluster: RayCluster | None = None,
        gradients: str = "mean",
        unused: str = "zero",
        on_nonfinite: str = "skip",
        cross_device_ops: str = "auto",
        stall_timeout_s: float = 60.0,
        join_timeout_s: float = 60.0,
        worker_timeout_s: float = 1800.0,
        allow_all_interfaces: bool = False,
    ) -> None:
        context.require_controller("MultiWorkerMirroredStrategy()")
        if cluster_resolver is not None and not isinstance(cluster_resolver, Resolver):
            raise StrategyError(f"cluster_resolver is one of sg.cluster's resolvers, got {cluster_resolver!r}")
        require_seconds(
            stall_timeout_s=stall_timeout_s, join_timeout_s=join_timeout_s, worker_timeout_s=worker_timeout_s
        )
        self._workers: Workers | None = None
        self._ray: RayWorkers | None = None
        if cluster is not None:
            self._resolver = None
            _check_with_ray(cluster, devices, cluster_resolver, cross_device_ops)
            settings = Settings(cluster.num_workers, gradients, unused, on_nonfinite, "torch")
            self._ray = RayWorkers(cluster, join_timeout_s=join_timeout_s)
            atexit.register(weakref.finalize(self, self._ray.close))  # now, and so before Ray itself takes leave
            new = functools.partial(self._ray.new_replicas, settings=settings, stall_timeout_s=stall_timeout_s)
            super().__init__(self._ray.devices, new)
            return
        self._resolver = cluster_resolver or found().resolver
        chosen = this_process().select(devices)
        way = choose_way(cross_device_ops, chosen)
        settings = Settings(len(chosen), gradients, unused, on_nonfinite, way)
        _check_first(self._resolver)
        everywhere = allow_all_interfaces
        membership = _join(self._resolver, settings, join_timeout_s, everywhere) if self._resolver is not None else None
        if membership is not None:
            self._workers = _meet(membership, len(chosen), worker_timeout_s)
            settings = dataclasses.replace(settings, sizes=self._workers.sizes, machine=self._workers.rank)
        super().__init__(
            chosen,
            functools.partial(
                LocalReplicas, devices=chosen, settings=settings, stall_timeout_s=stall_timeout_s, workers=self._workers
            ),
        )
        if self._workers is not None:
            _open[self] = calling_line()

    @property
    def cluster_resolver(self) -> Resolver | None:
        """What says who takes part; `None` if this program is alone."""
        return self._resolver

    @property
    def is_open(self) -> bool:
        """Whether it can be used: neither closed nor ended by a failure."""
        return self._replicas.closed_at is None

    @property
    def num_replicas_in_sync(self) -> int:
        return self._workers.num_replicas if self._workers else len(self.devices)

    @property
    def replicas_here(self) -> range:
        first = self._workers.first_replica if self._workers else 0
        return range(first, first + len(self.devices))

    @property
    def input_pipeline(self) -> tuple[int, int]:
        return (self._workers.size, self._workers.rank) if self._workers else (1, 0)

    @property
    def is_chief(self) -> bool:
        return self._workers is None or self._workers.rank == 0

    def draw_alike(self) -> None:
        if self._workers:
            self._together(self._workers.draw_alike)

    def is_any(self, has_data: bool) -> bool:
        return self._together(self._workers.is_any, has_data) if self._workers else has_data

    def revive(self) -> None:
        if self._workers is None:
            super().revive()
        else:
            self._require_usable()  # a worker comes back with its process: `stratagem run --max-restarts`

    def close(self) -> None:
        super().close()
        if self._ray is not None:
            self._ray.close()

    def _map(self, function: Callable[[PerReplica], Any], value: Any) -> Any:
        """The function on the values of the replicas of all workers, each of which must come here."""
        if self._workers is None:
            return super()._map(function, value)
        self._require_usable()
        everyones = self._workers.everyones

        def joined(each: Any) -> Any:
            return function(self._together(everyones, each)) if isinstance(each, PerReplica) else each

        return pytree.tree_map(joined, value, is_leaf=lambda each: isinstance(each, PerReplica))

    def _together(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Does something that all workers do at the same time; if it fails, nothing can be done any more."""
        self._require_usable()
        with self._replicas.with_workers():
            return function(*arguments)


def _check_first(resolver: Resolver | None) -> None:
    """Refuses a second strategy in the same cluster: it would be the same task a second time."""
    for other, made_at in _open.items():
        if resolver is None or not other.is_open or other.cluster_resolver is None:
            continue
        if other.cluster_resolver.cluster_spec() == resolver.cluster_spec():
            raise StrategyError(
                f"this program takes part in its cluster already, by the MultiWorkerMirroredStrategy of {made_at}; use "
                f"that one for all models, or close() it first"
            )


def _check_with_ray(cluster: Any, devices: Any, resolver: Any, cross_device_ops: str) -> None:
    if not isinstance(cluster, RayCluster):
        raise StrategyError(f"cluster is an sg.RayCluster, got {cluster!r}; a resolver is given as cluster_resolver")
    if devices is not None or resolver is not None:
        raise StrategyError(
            "cluster=RayCluster(...) says how many workers there are, and Ray where; leave devices and "
            "cluster_resolver out"
        )
    if cross_device_ops not in ("auto", "torch"):
        raise StrategyError(
            f"workers on Ray share no memory: cross_device_ops is 'torch', got {cross_device_ops!r}; leave it out"
        )


def _join(resolver: Resolver, settings: Settings, join_timeout_s: float, everywhere: bool) -> Membership | None:
    """Meets the other workers; `None` if there are no others."""
    spec, job, index = resolver.cluster_spec(), resolver.task_type, resolver.task_id
    jobs = [each for each in _JOBS if each in spec.jobs]
    if sum(spec.num_tasks(each) for each in jobs) < 2 or job == EVALUATOR:  # which evaluates on its own
        return None
    if job not in jobs or index is None:
        raise StrategyError(
            f"MultiWorkerMirroredStrategy is for tasks of the jobs {' and '.join(_JOBS)}, and this is "
            f"{job or 'no task'}; leave it out of this task's program, or give the task another job"
        )
    signature = {name: getattr(settings, name) for name in ("gradients", "unused", "on_nonfinite")}
    options: dict[str, Any] = {"join_timeout_s": join_timeout_s, "allow_all_interfaces": everywhere}
    return Membership(spec, job, index, jobs=jobs, signature=signature, **options).join()


def _meet(membership: Membership, num_replicas: int, worker_timeout_s: float) -> Workers:
    """Connects with the workers that have joined; leaves them if that fails."""
    try:
        return Workers(membership, num_replicas, stall_timeout_s=worker_timeout_s)
    except BaseException as error:
        lost = membership.lost
        membership.fail(f"{type(error).__name__}: {error}")
        if lost is not None:
            raise TaskLostError(str(lost)) from None
        raise


_JOBS = (CHIEF, WORKER)

# Those that take part in a cluster, and where they were made.
_open: "weakref.WeakKeyDictionary[MultiWorkerMirroredStrategy, str]" = weakref.WeakKeyDictionary()
