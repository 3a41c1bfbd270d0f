"""An equal copy of every variable on each device of several machines, in agreement after every step."""

import atexit
import functools
import weakref
from collections.abc import Sequence
from typing import Any, final

import torch

from stratagem._checks import require_seconds, require_seconds_if_given
from stratagem._dtypes import name_of
from stratagem.cluster.ray.ray_cluster import RayCluster
from stratagem.cluster.resolvers.resolver import Resolver
from stratagem.collectives.exchange_dtype import read_exchange_dtype
from stratagem.devices.inventory import this_process
from stratagem.devices.lookup import DeviceLike
from stratagem.engine import context
from stratagem.engine.joining_machines import RUNS_ALONE, join_workers, note_member, require_resolver
from stratagem.engine.lockstep import LocalReplicas
from stratagem.engine.ray.ray_workers import RayWorkers
from stratagem.engine.recipe import CHECK_COPIES_EVERY, Exchange, Recipe
from stratagem.errors import StrategyError
from stratagem.strategies.replicated import Replicated, choose_exchange, driven_here, summed


@final
class MultiWorkerMirroredStrategy(Replicated[LocalReplicas]):
    """Keeps an equal copy of every variable on each device of every worker.

    Every worker runs the same program and drives the replicas of its own machine. Gradients are summed
    inside each machine first, and cross the network once per worker. `TF_CONFIG`, torchrun, Slurm or Kubernetes
    say who the workers are; without any of them there is one worker, and the strategy works as `MirroredStrategy`.

    All main programs start with the random numbers of the first worker, so that all shuffle alike.
    A run that fails in one worker ends the strategy in all workers: each says why.

    Args:
        devices: The devices of this worker's replicas; by default all of its logical devices.
        cluster_resolver: Says who the workers are; by default the environment does.
        cluster: Workers that Ray starts, in place of `cluster_resolver`. This program then drives replicas on all
            machines alone. A run that fails in one of them raises here, and the strategy can be used on.
        gradients: `mean` or `sum`, as in `MirroredStrategy`.
        unused: `zero` or `error`, as in `MirroredStrategy`.
        on_nonfinite: `skip`, `raise` or `apply`, as in `MirroredStrategy`.
        cross_device_ops: How gradients travel inside a machine, as in `MirroredStrategy`.
        communication_options: Has no meaning here; TensorFlow's default, None, is taken.
        check_copies_every: The number of steps after which replicas check that their copies of the parameters are still
            equal; a `DriftError` names those that differ. 0 never checks.
        exchange_dtype: `"bf16"` or `None`, as in `MirroredStrategy`: in half the bytes between machines, too. The sums
            of the machines are rounded once more.
        stall_timeout_s: How many seconds replicas of one machine wait for another one before they report it as
            stalled.
        join_timeout_s: How many seconds to wait until all workers have started.
        heartbeat_timeout_s: How many seconds a worker may give no sign of life, while its machine answers, before it
            is lost; by default the value of `stratagem run --heartbeat-timeout`, or 30.
        worker_timeout_s: How many seconds to wait for a worker that is alive but does not reach this step. A warning
            names it every minute.
        allow_all_interfaces: Whether the first worker may listen on all addresses of its machine if it cannot listen
            on its own, as behind address translation.
    Raises:
        ClusterError: Workers did not start, or do not fit together.
        StrategyError: An option has a value that it does not take, or the call is inside a replica.
    Example:
        >>> strategy = MultiWorkerMirroredStrategy(["cpu:0"])  # no cluster is found: one worker
        >>> strategy.num_replicas_in_sync, strategy.is_chief
        (1, True)
        >>> strategy.close()
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
        cross_device_ops: str | None = "auto",
        communication_options: None = None,
        check_copies_every: int = CHECK_COPIES_EVERY,
        exchange_dtype: str | torch.dtype | None = None,
        stall_timeout_s: float = 60.0,
        join_timeout_s: float = 60.0,
        heartbeat_timeout_s: float | None = None,
        worker_timeout_s: float = 1800.0,
        allow_all_interfaces: bool = False,
    ) -> None:
        context.require_controller("MultiWorkerMirroredStrategy()")
        require_seconds(
            stall_timeout_s=stall_timeout_s, join_timeout_s=join_timeout_s, worker_timeout_s=worker_timeout_s
        )
        require_seconds_if_given(heartbeat_timeout_s=heartbeat_timeout_s)
        if isinstance(devices, Resolver):
            raise StrategyError(
                f"devices are the devices of this worker, got {devices!r}; give it as cluster_resolver=resolver"
            )
        if communication_options is not None:
            raise StrategyError(
                f"communication_options is for TensorFlow's programs, and None here, got {communication_options!r}; "
                f"leave it out: cross_device_ops says how gradients travel"
            )
        exchanged = read_exchange_dtype(exchange_dtype)
        options = summed(gradients), unused, on_nonfinite, check_copies_every, exchanged
        self._ray: RayWorkers | None = None
        self._resolver = RUNS_ALONE
        if cluster is not None:
            _check_with_ray(cluster, devices, cluster_resolver, cross_device_ops)
            recipe = Recipe(cluster.num_workers, Exchange.TORCH, *options)
            self._ray = RayWorkers(cluster, join_timeout_s=join_timeout_s, heartbeat_timeout_s=heartbeat_timeout_s)
            atexit.register(weakref.finalize(self, self._ray.drop))  # now, and so before Ray itself takes leave
            new = functools.partial(self._ray.new_replicas, recipe=recipe, stall_timeout_s=stall_timeout_s)
            super().__init__(self._ray.devices, new)
            return
        chosen = this_process().select(devices)
        exchange = choose_exchange(cross_device_ops, chosen)
        recipe = Recipe(len(chosen), exchange, *options)
        resolver = require_resolver(cluster_resolver)
        self._resolver = resolver or RUNS_ALONE
        workers = join_workers(
            type(self).__name__,
            resolver,
            len(chosen),
            {
                "gradients": gradients,
                "unused": unused,
                "on_nonfinite": on_nonfinite,
                "check_copies_every": check_copies_every,
                "exchange_dtype": None if exchanged is None else name_of(exchanged),
            },
            join_timeout_s=join_timeout_s,
            heartbeat_timeout_s=heartbeat_timeout_s,
            worker_timeout_s=worker_timeout_s,
            allow_all_interfaces=allow_all_interfaces,
        )
        super().__init__(chosen, driven_here(chosen, recipe, stall_timeout_s, workers), workers)
        note_member(self, resolver)

    def close(self) -> None:
        super().close()
        if self._ray is not None:
            self._ray.close()


def _check_with_ray(cluster: Any, devices: Any, resolver: Any, cross_device_ops: str | None) -> None:
    if not isinstance(cluster, RayCluster):
        raise StrategyError(f"cluster is an sg.RayCluster, got {cluster!r}; a resolver is given as cluster_resolver")
    if devices is not None or resolver is not None:
        raise StrategyError(
            "cluster=RayCluster(...) says how many workers there are, and Ray places them; leave out devices and "
            "cluster_resolver"
        )
    if cross_device_ops not in (None, "auto", "torch"):
        raise StrategyError(
            f"workers on Ray share no memory: cross_device_ops is 'torch', got {cross_device_ops!r}; leave it out"
        )
