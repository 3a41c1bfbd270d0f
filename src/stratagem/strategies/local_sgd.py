"""Replicas that train alone for some steps and then agree on their weights: local SGD and DiLoCo."""

from collections.abc import Sequence
from typing import final

from stratagem._checks import require_seconds, require_seconds_if_given
from stratagem.cluster.resolvers.resolver import Resolver
from stratagem.devices.inventory import this_process
from stratagem.devices.lookup import DeviceLike
from stratagem.engine import context
from stratagem.engine.joining_machines import join_workers, note_member, require_resolver
from stratagem.engine.lockstep import LocalReplicas
from stratagem.engine.recipe import CHECK_COPIES_EVERY, Exchange, Recipe
from stratagem.engine.sync import AverageWeights, OuterOptimizer
from stratagem.errors import StrategyError
from stratagem.strategies.replicated import Replicated, driven_here


@final
class LocalSGDStrategy(Replicated[LocalReplicas]):
    """Lets every replica train alone, and brings their weights together every `sync_every` steps.

    A step is a call of `run` with a backward pass. Between two synchronisations no tensor travels. At one,
    all replicas get the mean of their weights, in which each counts by the examples that it has seen since the last;
    buffers too. With `outer_optimizer` the mean of their changes is the gradient of another optimizer (DiLoCo).
    Optimizers inside the replicas keep their state (momentum) to themselves.

    Between synchronisations the main program sees replica 0. What it writes to weights between two runs replaces
    them everywhere. `synchronize()` brings all together at once; the strategy does so by itself before the main
    program takes `model.state_dict()` or calls the model, and at `close()`; with several workers, where all have to
    come, call `synchronize()` in each of them before one reads the model. Results of `run` and `reduce` are those
    of all replicas, as ever. After a run that failed all replicas go on from replica 0.

    With `sync_every=1`, no outer optimizer and SGD without momentum it equals `MirroredStrategy`. Where several
    workers are found (`TF_CONFIG`, torchrun, Slurm, Kubernetes), they train together, as in
    `MultiWorkerMirroredStrategy`.

    Args:
        sync_every: After how many steps replicas agree.
        outer_optimizer: Makes an optimizer of parameters, such as
            `lambda params: torch.optim.SGD(params, lr=0.7, momentum=0.9, nesterov=True)`.
        devices: Where the replicas of this worker compute; by default all logical devices of the best kind.
        cluster_resolver: Who takes part; by default what the environment says.
        on_nonfinite: What a gradient that is not finite does to the step of its replica: `skip`, `raise` or `apply`.
        check_copies_every: After how many steps replicas that have just agreed make sure that they have the same
            weights; a `DriftError` says which differ. 0 for never.
        stall_timeout_s: How long replicas of one machine wait for another before it counts as stalled.
        join_timeout_s: How long to wait for all workers to come.
        heartbeat_timeout_s: How long a worker whose machine answers may give no sign of life before it is lost; by
            default what `stratagem run --heartbeat-timeout` says, or 30 s.
        worker_timeout_s: How long to wait for a worker that lives but does not come.
    Raises:
        DeviceError: `devices` is empty, names one twice or one that does not exist.
        StrategyError: An option is not one of its values, or the call is inside a replica.
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
        self._resolver = require_resolver(cluster_resolver)
        workers = join_workers(
            type(self).__name__,
            self._resolver,
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
        note_member(self, self._resolver)

    def synchronize(self) -> None:
        """Brings all replicas to one state now, as after `sync_every` steps; every worker calls it alike."""
        self.require_usable()
        context.require_controller("strategy.synchronize()")
        self._replicas.agree()
