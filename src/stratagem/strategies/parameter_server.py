"""Asynchronous training: workers read and update shared variables, each at its own pace."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, final

from stratagem import _tree
from stratagem._checks import require_seconds
from stratagem.cluster.resolvers.detection import found
from stratagem.cluster.resolvers.resolver import Resolver
from stratagem.devices.device import LogicalDevice
from stratagem.devices.division import split_cores
from stratagem.devices.inventory import this_process
from stratagem.devices.kind_table import CPU
from stratagem.devices.lookup import DeviceLike
from stratagem.engine import context
from stratagem.engine.joining_machines import require_resolver
from stratagem.engine.lockstep import LocalReplicas
from stratagem.engine.queued.pending_results import is_pending, mapped, pending
from stratagem.engine.queued.worker import WorkerSettings
from stratagem.engine.queued.workers import ParameterWorkers
from stratagem.engine.recipe import Recipe
from stratagem.errors import StrategyError
from stratagem.objects import per_replica
from stratagem.parameters import consistency as consistencies
from stratagem.parameters import staleness
from stratagem.parameters.consistency import Consistency
from stratagem.parameters.local.board import MAX_SHARDS, MAX_WORKERS
from stratagem.parameters.network.options import OF_CLUSTERS
from stratagem.processes.region import hidden_pages
from stratagem.strategies.parameter_cluster import ClusterTask, has_servers, task_of
from stratagem.strategies.replicated import Replicated, choose_exchange, driven_here
from stratagem.strategies.strategy_in_worker import StrategyInWorker


@final
class ParameterServerStrategy(Replicated[LocalReplicas | ParameterWorkers]):
    """Keeps variables in memory that workers share; each worker updates them as soon as it has gradients.

    `run` gives a step to a free worker and returns at once; its result waits when it is read. A slow worker does not
    hold up the others. A worker that is lost is replaced, and another worker takes its step. The price is
    staleness: gradients may be computed from values that other workers have changed since. `consistency` says how much
    of that is allowed. For steps that equal one device use `MirroredStrategy`.

    In the main program, calling the model, `state_dict()` and `ExponentialMovingAverage` wait for the steps that run.
    A parameter that the program reads directly (`model.weight.clone()`, `copy.deepcopy(model)`, torch's
    `AveragedModel`) is shared memory, in which an update may be half done: call `model.state_dict()` first. Nothing
    changes from then until the next call of the strategy.

    Each worker computes on one device of this machine, accelerators before the CPU. Variables are in the memory of the
    host.

    Args:
        num_workers: The number of worker processes. Leave it out in a task of a cluster with the job ps: each
            worker task runs its own loop there, and ps tasks serve the variables. As in TensorFlow, it may be a
            cluster resolver there, and `variable_partitioner=` cuts large variables.
        num_ps: The number of shards of the variables. A push locks the shards that it changes.
        devices: The devices of the workers, one for each; by default the first of the best kind. If the CPU has too
            few logical devices, its cores are divided anew.
        consistency: `Async()`, `BoundedStaleness(k)` or `Synchronous(backup_workers=b)`.
        cluster_resolver: In a task of a cluster, says who takes part; see `num_workers`.
        variable_partitioner: In a task of a cluster, cuts large variables.
        on_nonfinite: What happens to a push whose gradients are not finite: `skip`, `raise` or `apply`.
        torn_reads: Whether workers compute with shared values that others may be changing at that moment, as
            in Hogwild. It saves a copy in every step.
        torn_pushes: Whether a push may stay half done when its worker is killed in the middle of it or its optimizer
            fails, as in Hogwild. It saves another copy in every step; by default such a push is undone.
        stall_timeout_s: How many seconds a step may take before its worker counts as stalled and is replaced.
        max_restarts: How many workers may be replaced within `restart_window_s` seconds before the strategy gives up.
        restart_window_s: The number of seconds for `max_restarts`.
        verbose: Whether to print the staleness of all pushes at the end.
    Raises:
        StrategyError: An option has a value that it does not take, or the call is inside a replica.
    Example:
        >>> import torch
        >>> strategy = ParameterServerStrategy(num_workers=1)
        >>> with strategy.scope():
        ...     model = torch.nn.Linear(2, 1)
        >>> strategy.local_results(strategy.run(lambda x: tuple(model(x).shape), args=(torch.ones(3, 2),)))
        ((3, 1),)
        >>> strategy.close()
    """

    def __new__(
        cls,
        num_workers: int | Resolver | None = None,
        *args: Any,
        cluster_resolver: Resolver | None = None,
        devices: Sequence[DeviceLike] | None = None,
        **options: Any,
    ) -> Any:
        """In a task of a cluster with the job ps, without `num_workers`: the strategy of that task."""
        context.require_controller("ParameterServerStrategy()")
        given = num_workers if isinstance(num_workers, Resolver) else cluster_resolver
        if given is not None:
            if num_workers not in (None, given):
                raise StrategyError(
                    f"num_workers= is for workers of this machine and cluster_resolver= for a task of a cluster; give "
                    f"one of them, got {num_workers!r} and {given!r}"
                )
            options |= dict(zip(("variable_partitioner",), args, strict=bool(args)))  # TensorFlow's second argument
            return task_of(require_resolver(given), devices, options)
        if num_workers is None and (devices is None or has_servers(found().resolver)):
            return task_of(found().resolver, devices, options)
        if wrong := next((name for name in options if name in OF_CLUSTERS and options[name] is not None), None):
            raise StrategyError(
                f"{wrong} is for tasks of a cluster; workers of this machine share one memory, so leave it out"
            )
        return super().__new__(cls)

    def __init__(
        self,
        num_workers: int | None = None,
        num_ps: int = 1,
        *,
        devices: Sequence[DeviceLike] | None = None,
        consistency: Consistency | None = None,
        cluster_resolver: None = None,
        variable_partitioner: None = None,
        on_nonfinite: str = "skip",
        torn_reads: bool = False,
        torn_pushes: bool = False,
        stall_timeout_s: float = 60.0,
        max_restarts: int = 3,
        restart_window_s: float = 600.0,
        verbose: bool = False,
    ) -> None:
        context.require_controller("ParameterServerStrategy()")
        chosen_devices = worker_devices(num_workers, devices)
        num_workers = len(chosen_devices)
        _require_count("num_ps", num_ps, MAX_SHARDS)
        require_seconds(stall_timeout_s=stall_timeout_s, restart_window_s=restart_window_s)
        if isinstance(max_restarts, bool) or not isinstance(max_restarts, int) or max_restarts < 0:
            raise StrategyError(f"max_restarts is a whole number from 0 up, got {max_restarts!r}")
        for name, given in (("torn_reads", torn_reads), ("torn_pushes", torn_pushes)):
            if not isinstance(given, bool):
                raise StrategyError(f"{name} is True or False, got {given!r}")
        chosen = consistencies.chosen(consistency, num_workers)
        if torn_pushes and chosen.shares_steps:
            raise StrategyError(
                "torn_pushes=True is for workers that push by themselves; with Synchronous() they push together, so "
                "leave it out"
            )
        recipe = Recipe(num_workers, on_nonfinite=on_nonfinite)
        self.consistency = chosen
        self._given_devices = devices
        self.num_workers = num_workers
        self.verbose = verbose
        # With all gradients of each step, workers are replicas that agree after every step: what is made for that is
        # equal to one device to the last bit, and faster than pushes that wait for each other.
        self._is_lockstep = chosen.needs_all(num_workers)
        new_replicas: Callable[[Any], LocalReplicas | ParameterWorkers]
        if self._is_lockstep:
            recipe = dataclasses.replace(recipe, exchange=choose_exchange("auto", chosen_devices))
            new_replicas = driven_here(chosen_devices, recipe, stall_timeout_s)
        else:
            _require_page_map()
            _require_host_for(torn_reads, chosen_devices)
            new_replicas = functools.partial(
                ParameterWorkers,
                devices=chosen_devices,
                num_shards=num_ps,
                settings=WorkerSettings(chosen, on_nonfinite, torn_reads, torn_pushes, stall_timeout_s),
                stall_timeout_s=stall_timeout_s,
                max_restarts=max_restarts,
                restart_window_s=restart_window_s,
                in_worker=StrategyInWorker,
            )
        super().__init__(chosen_devices if chosen.shares_steps else chosen_devices[:1], new_replicas)

    @property
    def workers(self) -> ParameterWorkers:
        """Those who push by themselves, for parts of the library that give them steps."""
        if isinstance(self._replicas, LocalReplicas):
            raise StrategyError(
                "with Synchronous() all workers are in the same step, so that none can be given one of its own; "
                "use Async() or BoundedStaleness(k)"
            )
        return self._replicas

    def reduce(self, op: str, value: Any, axis: int | None = None, *, weighted: bool = True) -> Any:
        """Reduces the values of a step to one value. If the step still runs, the result waits when it is read."""
        op = per_replica.require_op(op)
        return mapped(functools.partial(super().reduce, op, axis=axis, weighted=weighted), value)

    def gather(self, value: Any, axis: int = 0, *, pad: float | None = None) -> Any:
        """Joins the tensors of a step. If the step still runs, the result waits when it is read."""
        return mapped(functools.partial(super().gather, axis=axis, pad=pad), value)

    def local_results(self, value: Any) -> tuple[Any, ...]:
        """Returns the values of a step as a tuple. If the step still runs, the tuple waits when it is read."""
        return pending(per_replica.local_results, value) if is_pending(value) else per_replica.local_results(value)

    def is_ready(self, value: Any) -> bool:
        if not self._is_lockstep and is_pending(value):
            self.workers.attend()
        return all(each.is_done for each in _tree.leaves(value) if is_pending(each))

    def call_in_children(self, function: Callable[..., Any], *arguments: Any) -> None:
        """Calls a function in every worker of a step that all share; else the main program loads data for them."""
        if self._is_lockstep:
            super().call_in_children(function, *arguments)

    def _meet(self) -> None:
        if not self._is_lockstep:
            self.workers.finish_all()

    def resize(self, num_workers: int) -> None:
        """Adds workers, or ends some of them after their current step.

        Args:
            num_workers: The new number of workers.
        """
        context.require_controller("strategy.resize()")
        devices = worker_devices(num_workers, self._given_devices and self._given_devices[:num_workers])
        if self.consistency.shares_steps:
            raise StrategyError("with Synchronous() each worker has its part of every step; resize an asynchronous one")
        self.workers.require_usable()
        self.workers.resize(devices)
        self.num_workers = num_workers

    def staleness(self) -> dict[int, dict[int, int]]:
        """Returns a histogram of staleness for each worker.

        Number `s` of it counts the worker's pushes that had missed `s` pushes of others; the last number counts all
        above. It can be read after `close()`, too.
        """
        main = None if self._is_lockstep else self.workers.main
        if main is None:
            return {}
        histogram = main.variables.board.histogram
        return {
            worker: {staleness: int(count) for staleness, count in enumerate(histogram[worker]) if count}
            for worker in range(len(histogram))
            if histogram[worker].any()
        }

    def write_staleness(self, writer: Any, global_step: int) -> None:
        """Adds the staleness of each worker's pushes to TensorBoard: a histogram, and its mean.

        Args:
            writer: A `torch.utils.tensorboard.SummaryWriter`.
            global_step: The step under which TensorBoard shows it.
        """
        staleness.write(self.staleness(), writer, global_step)

    def close(self) -> None:
        """Waits for the steps that run and ends the workers. Afterwards the model is a plain model."""
        shown = self.verbose and not self._is_lockstep and self._replicas.closed_at is None
        if shown and self.workers.main is not None:
            self.workers.settle()
            print(staleness.described(self.staleness()))
        super().close()


ParameterServerStrategy.register(ClusterTask)  # what `isinstance` says in every task of a cluster


def worker_devices(num_workers: int | None, devices: Sequence[DeviceLike] | None = None) -> list[LogicalDevice]:
    """A device for each worker: those that are given, or the first of the best kind.

    If the CPU has too few logical devices, its cores are divided anew.

    Raises:
        StrategyError: There are fewer devices than workers, or others are given than there are workers.
    """
    chosen = this_process().select(devices)
    if num_workers is None:
        num_workers = len(chosen)
    _require_count("num_workers", num_workers, MAX_WORKERS)
    names = ", ".join(device.name for device in chosen)
    if devices is not None and len(chosen) != num_workers:
        raise StrategyError(
            f"each worker has a device of its own, got num_workers={num_workers} and {len(chosen)} devices: {names}; "
            f"give one of the two, or as many devices"
        )
    if len(chosen) >= num_workers:
        return list(chosen[:num_workers])
    if (kind := chosen[0].device_type) != CPU:
        raise StrategyError(
            f"each worker has a {kind} of its own, and there are {len(chosen)} for {num_workers} workers: {names}; ask "
            f"for fewer workers, or compute on the CPU: sg.config.set_visible_devices([], {kind!r})"
        )
    cores = tuple(sorted({core for cpu in chosen for core in cpu.cores}))
    return [
        dataclasses.replace(chosen[0], index=number, cores=own, num_threads=len(own))
        for number, own in enumerate(split_cores(cores, num_workers))
    ]


def _require_host_for(torn_reads: bool, devices: Sequence[LogicalDevice]) -> None:
    elsewhere = next((device.name for device in devices if device.torch_device.type != "cpu"), None)
    if torn_reads and elsewhere is not None:
        raise StrategyError(
            f"torn_reads=True lets workers compute with the memory that all share, which {elsewhere} does not see; "
            f"leave it out"
        )


def _require_page_map() -> None:
    if reason := hidden_pages():
        raise StrategyError(
            f"ParameterServerStrategy needs to see which pages of variables the program has written, and {reason}; use "
            f"consistency=Synchronous() or MirroredStrategy, or allow this container to read that file"
        )


def _require_count(name: str, count: int, most: int) -> None:
    if isinstance(count, bool) or not isinstance(count, int) or not 1 <= count <= most:
        raise StrategyError(f"{name} is a whole number from 1 to {most}, got {count!r}")
