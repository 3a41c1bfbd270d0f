"""Replicas that train alone for some steps and then agree on their weights: local SGD and DiLoCo."""

from collections.abc import Sequence
from typing import final

from stratagem._checks import require_seconds, require_seconds_if_given
from stratagem.cluster.resolvers.resolver import Resolver
from stratagem.devices.inventory import this_process
from stratagem.devices.lookup import DeviceLike
from stratagem.engine import context
from stratagem.engine.joining_machines import RUNS_ALONE, join_workers, note_member, require_resolver
from stratagem.engine.lockstep import LocalReplicas
from stratagem.engine.recipe import CHECK_COPIES_EVERY, Exchange, Recipe
from stratagem.engine.sync import AverageWeights, OuterOptimizer
from stratagem.errors import StrategyError
from stratagem.strategies.replicated import Replicated, driven_here


@final
class LocalSGDStrategy(Replicated[LocalReplicas]):
    """Lets every replica train alone, and averages their weights every `sync_every` steps.

    A step is a call of `run` with a backward pass. No tensor travels between two synchronisations. At a
    synchronisation all replicas get the mean of their weights and buffers; each replica counts by the number of
    examples that it saw since the last one. With `outer_optimizer`, the mean of the changes is the gradient of a second
    optimizer (DiLoCo). The state of the inner optimizers (momentum) is not exchanged.

    Between synchronisations the main program sees the weights of replica 0. Weights that it writes between two runs
    replace those of all replicas. `synchronize()` makes all replicas equal at once. The strategy calls it by itself at
    `close()`, and before the main program takes `model.state_dict()` or calls the model. With several workers, call
    `synchronize()` in each of them before one reads the model. Results of `run` and `reduce` are those of all replicas.
    After a run that failed, all replicas go on from replica 0.

    With `sync_every=1`, no outer optimizer and SGD without momentum it equals `MirroredStrategy`. If the environment
    names several workers (`TF_CONFIG`, torchrun, Slurm, Kubernetes), they train together, as in
    `MultiWorkerMirroredStrategy`.

    Args:
        sync_every: The number of steps between two synchronisations.
        outer_optimizer: A function that makes an optimizer for parameters, such as
            `lambda params: torch.optim.SGD(params, lr=0.7, momentum=0.9, nesterov=True)`.
        devices: The devices of this worker's replicas; by default all logical devices of the best kind.
        cluster_resolver: Says who the workers are; by default the environment does.
        on_nonfinite: What happens to a replica's step whose gradients are not finite: `skip`, `raise` or `apply`.
        check_copies_every: The number of steps after which replicas check, after a synchronisation, that their weights
            are equal; a `DriftError` names those that differ. 0 never checks.
        stall_timeout_s: How many seconds replicas of one machine wait for another one before they report it as
            stalled.
        join_timeout_s: How many seconds to wait until all workers have started.
        heartbeat_timeout_s: How many seconds a worker may give no sign of life, while its machine answers, before it
            is lost; by default the value of `stratagem run --heartbeat-timeout`, or 30.
        worker_timeout_s: How many seconds to wait for a worker that is alive but does not reach this step.
    Raises:
        DeviceError: `devices` is empty, has a device twice, or has one that does not exist.
        StrategyError: An option has a value that it does not take, or the call is inside a replica.
    Example:
        >>> import torch
        >>> strategy = LocalSGDStrategy(sync_every=4, devices=["cpu:0"])
        >>> with strategy.scope():
        ...     model = torch.nn.Linear(2, 1)
        >>> strategy.local_results(strategy.run(lambda x: tuple(model(x).shape), args=(torch.ones(3, 2),)))
        ((3, 1),)
        >>> strategy.close()
    """

    def __init__(
        self,
        sync_every: int = 100,
        outer_optimizer: OuterOptimizer | None = None,
        devices: Sequence[DeviceLike] | None = None,
        *,
        cluster_resolver: Resolver | None = None,
        on_nonfinite: str = "skip",
        check_copies_every: int = CHECK_COPIES_EVERY,
        stall_timeout_s: float = 60.0,
        join_timeout_s: float = 60.0,
        heartbeat_timeout_s: float | None = None,
        worker_timeout_s: float = 1800.0,
    ) -> None:
        context.require_controller("LocalSGDStrategy()")
        require_seconds(
            stall_timeout_s=stall_timeout_s, join_timeout_s=join_timeout_s, worker_timeout_s=worker_timeout_s
        )
        require_seconds_if_given(heartbeat_timeout_s=heartbeat_timeout_s)
        if isinstance(sync_every, bool) or not isinstance(sync_every, int) or sync_every < 1:
            raise StrategyError(f"sync_every is a whole number of steps from 1 up, got {sync_every!r}")
        if outer_optimizer is not None and not callable(outer_optimizer):
            raise StrategyError(
                f"outer_optimizer makes an optimizer of parameters, got {outer_optimizer!r}; write it as "
                f"lambda params: torch.optim.SGD(params, lr=0.7, momentum=0.9, nesterov=True)"
            )
        chosen = this_process().select(devices)
        plan = AverageWeights(sync_every, outer_optimizer)
        recipe = Recipe(
            len(chosen), Exchange.COLLECTIVE, plan, on_nonfinite=on_nonfinite, check_copies_every=check_copies_every
        )
        resolver = require_resolver(cluster_resolver)
        self._resolver = resolver or RUNS_ALONE
        workers = join_workers(
            type(self).__name__,
            resolver,
            len(chosen),
            {
                "sync_every": sync_every,
                "on_nonfinite": on_nonfinite,
                "check_copies_every": check_copies_every,
                "outer": outer_optimizer is not None,
            },
            join_timeout_s=join_timeout_s,
            heartbeat_timeout_s=heartbeat_timeout_s,
            worker_timeout_s=worker_timeout_s,
        )
        super().__init__(chosen, driven_here(chosen, recipe, stall_timeout_s, workers), workers)
        note_member(self, resolver)

    def synchronize(self) -> None:
        """Makes all replicas equal now, as after `sync_every` steps. With several workers, every worker calls it."""
        self.require_usable()
        context.require_controller("strategy.synchronize()")
        self._replicas.agree()
