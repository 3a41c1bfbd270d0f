"""A task of a cluster with parameter servers: what the same program does in each job.

A ps task serves its shard and never comes to the rest of the program; chief and workers train, each at
its own pace on its part of the data; an evaluator computes on its own. Which variables there are is
`served_variables`' matter.
"""

import atexit
import contextlib
import signal
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import FrameType
from typing import Any, Final, NoReturn, Self, final

import torch

from stratagem._caller import calling_line, warn_caller
from stratagem._turns import Turn
from stratagem.cluster.resolvers.resolver import Resolver
from stratagem.cluster.spec import EVALUATOR, PS, TRAINING, ClusterSpec
from stratagem.collectives.one_replica import OneReplica
from stratagem.devices.device import LogicalDevice
from stratagem.devices.inventory import this_process
from stratagem.devices.lookup import DeviceLike
from stratagem.engine import context
from stratagem.engine.context import ReplicaContext
from stratagem.engine.lockstep import LocalReplicas
from stratagem.engine.random_numbers import seed_of
from stratagem.engine.recipe import Recipe
from stratagem.engine.served_variables import ServedVariables
from stratagem.errors import StratagemWarning, StrategyError
from stratagem.objects import per_replica
from stratagem.objects.step_arguments import StepArguments
from stratagem.objects.tracking import Tracker
from stratagem.parameters import staleness
from stratagem.parameters.network.client.parameter_client import ParameterClient
from stratagem.parameters.network.options import ClusterOptions
from stratagem.parameters.network.server.client_requests import chief_of, number_of
from stratagem.parameters.network.server.ps_server import ParameterServer
from stratagem.parameters.network.shard_states import StateOfAll
from stratagem.processes.allocator import keep_freed_memory, share_one_heap
from stratagem.strategies.replicated import choose_exchange, driven_here
from stratagem.strategies.strategy import Strategy
from stratagem.variables.aggregation import is_chosen

# So often threads of a ps task may take turns: the one for sockets must not wait for updates.
_SWITCH_S: Final = 5e-4


def has_servers(resolver: Resolver | None) -> bool:
    """Whether this process is a task of a cluster with parameter servers."""
    return resolver is not None and PS in resolver.cluster_spec().jobs


def task_of(
    resolver: Resolver | None, devices: Sequence[DeviceLike] | None, options: Mapping[str, Any]
) -> "ClusterTask":
    """The strategy in this task; a ps task serves until training is done, and then ends the program.

    Raises:
        StrategyError: This process is no task of a cluster with parameter servers, an option is wrong, or this task has
            several devices.
    """
    if resolver is None or not has_servers(resolver):
        spec = ClusterSpec({}) if resolver is None else resolver.cluster_spec()
        jobs = f", and this cluster has the jobs {', '.join(spec.jobs)}" if spec else ""
        raise StrategyError(
            f"ParameterServerStrategy needs num_workers= or devices=, the workers on this machine; both are left out "
            f"only in a task of a cluster with the job ps{jobs or ': stratagem run --workers 2 --ps 1, or TF_CONFIG'}"
        )
    checked = ClusterOptions.of(**options)
    # All steps need the same memory again; threads of sockets take what the program frees, and the other way round.
    keep_freed_memory()
    share_one_heap()
    if resolver.task_type == PS and resolver.task_id is not None:
        _serve(resolver.cluster_spec(), resolver.task_id, checked)
    return ClusterTask(resolver, checked, devices)


def _serve(spec: ClusterSpec, index: int, options: ClusterOptions) -> NoReturn:
    sys.setswitchinterval(_SWITCH_S)
    if _is_near_workers(spec, index):
        torch.set_num_threads(1)  # more would wait for cores that workers compute on
    with ParameterServer(spec, index, heartbeat_timeout_s=options.heartbeat_timeout_s) as server:

        def end(number: int, frame: FrameType | None) -> None:
            server.stop()

        in_main = threading.current_thread() is threading.main_thread()
        before = {each: signal.signal(each, end) for each in (signal.SIGTERM, signal.SIGINT)} if in_main else {}
        try:
            server.serve()
        finally:
            for each, handler in before.items():
                signal.signal(each, signal.SIG_DFL if handler is None else handler)
    sys.exit(0)


def _is_near_workers(spec: ClusterSpec, index: int) -> bool:
    """Whether tasks that train run on the machine of this server."""
    address = spec.task(PS, index).address
    hosts = [task.address.host for task in spec.tasks if task.job in TRAINING and task.address is not None]
    return address is not None and address.host in hosts


@final
class ClusterTask(Strategy):
    """The strategy in a chief, worker or evaluator.

    Args:
        resolver: Which task this is, and who else takes part.
        options: What all tasks agree on.
        devices: Where it computes, with a replica on each; by default on all of the best kind. All tasks have as many.
    Raises:
        ClusterJoinError: A parameter server has not come.
        HandshakeError: Who answers at the address of a parameter server is none, or has another token.
    """

    def __init__(
        self, resolver: Resolver, options: ClusterOptions, devices: Sequence[DeviceLike] | None = None
    ) -> None:
        self._options = options
        self._resolver = resolver
        self._spec = resolver.cluster_spec()
        self._job, self._index = resolver.task_type or "", resolver.task_id or 0
        found = this_process().select(devices)
        self._devices = found[:1] if self._job == EVALUATOR else found
        self._replicas = self._new_replicas() if len(self._devices) > 1 else None
        self._tracker = Tracker() if self._replicas is None else self._replicas.distribution.tracker
        self._turn = Turn()
        self._variables: ServedVariables | None = None
        self._restored: StateOfAll | None = None
        self._closed_at: str | None = None
        self._seed, self._num_epochs = torch.initial_seed(), 0
        self._training = [task.name for task in self._spec.tasks if task.job in TRAINING]
        self._pacing = options.pacing([number_of(task) for task in self._training])
        self._client: ParameterClient | None = None
        self._is_told = self._job == EVALUATOR or len(self._training) == 1  # whose metrics have everything
        self._has_run = False
        _open.add(self)
        context.readers.add(self)
        if self._job != EVALUATOR:
            self._client = ParameterClient(
                self._spec,
                self._job,
                self._index,
                join_timeout_s=options.join_timeout_s,
                heartbeat_timeout_s=options.heartbeat_timeout_s,
                compression=options.compression,
                shares_memory=options.shares_memory,
                num_devices=len(self._devices),
            ).connect()

    def _new_replicas(self) -> LocalReplicas:
        """Several devices: gradients are summed here, replica 0 pushes them, and all get the values that come back."""
        recipe = Recipe(
            len(self._devices),
            choose_exchange("auto", self._devices),
            on_nonfinite="apply",  # `ServedVariables` looks at them
            check_copies_every=0,  # all get what comes from the servers
            kept_on="cpu",
            by_servers=True,
        )
        # While a push waits for other tasks, replicas wait for it.
        return driven_here(self._devices, recipe, 2 * self._options.stall_timeout_s)(self)

    # What this task is

    @property
    def devices(self) -> tuple[LogicalDevice, ...]:
        return self._devices

    @property
    def device(self) -> torch.device:
        return self._devices[0].torch_device  # other replicas have a strategy of their own

    @property
    def global_rank(self) -> int:
        return self.replicas_here.start

    @property
    def task(self) -> str:
        """Which task this is, such as `worker/0`."""
        return f"{self._job}/{self._index}"

    @property
    def num_replicas_in_sync(self) -> int:
        return self.input_pipeline[0] * len(self._devices)

    @property
    def replicas_here(self) -> range:
        first = self.input_pipeline[1] * len(self._devices)
        return range(first, first + len(self._devices))

    @property
    def input_pipeline(self) -> tuple[int, int]:
        return (1, 0) if self._client is None else (len(self._training), self._training.index(self.task))

    @property
    def is_chief(self) -> bool:
        return self.task == chief_of(self._spec)

    @property
    def is_in_step(self) -> bool:
        return False

    @property
    def version(self) -> int:
        """How many pushes of all workers the values that this task has have seen."""
        return 0 if self._variables is None else self._variables.version

    def staleness(self) -> dict[int, dict[int, int]]:
        """How many pushes of this task had missed how many others, under its number among those that train."""
        if self._variables is None:
            return {}
        return {self.input_pipeline[1]: dict(sorted(self._variables.staleness.items()))}

    def write_staleness(self, writer: Any, global_step: int) -> None:
        """Adds the staleness of this task's pushes to TensorBoard: a histogram, and its mean.

        Args:
            writer: A `torch.utils.tensorboard.SummaryWriter`.
            global_step: At which step.
        """
        staleness.write(self.staleness(), writer, global_step)

    @property
    def num_dropped(self) -> int:
        """How many gradients of this task came when their step was complete without them."""
        return 0 if self._variables is None else self._variables.num_dropped

    @property
    def num_workers(self) -> int:
        """How many tasks train."""
        return len(self._training)

    @property
    def workers(self) -> NoReturn:
        """There are none that could be given steps."""
        raise StrategyError(
            "no code is sent between machines, so that a ClusterCoordinator has no workers here: each worker task runs "
            "the program itself, with strategy.run on its part of strategy.distribute(data). On one machine give "
            "ParameterServerStrategy num_workers="
        )

    def draw_alike(self) -> None:
        """All tasks draw the same from here on, each when it comes here: nobody waits."""
        self._num_epochs += 1
        torch.manual_seed(seed_of(self._seed, self._num_epochs) % 2**63)

    # Training

    @contextlib.contextmanager
    def _opened(self) -> Iterator[Self]:
        """What is made inside is kept by the parameter servers; the chief's first values count."""
        if self._replicas is not None:
            self._replicas.begin()
        placed = contextlib.nullcontext() if self._replicas is not None else torch.device(self.device)
        with self._in_scope(), self._tracker.watch(), placed:
            yield self
        self._bring_variables()

    def _run(self, fn: Callable[..., Any], arguments: StepArguments) -> list[Any]:
        """Calls `fn` in this task, with its part of distributed values: one step, which is weighed."""
        with self._turn.taken("strategy.run()"):
            return self._one_step(fn, arguments.first(1))

    def _one_step(self, fn: Callable[..., Any], arguments: StepArguments) -> list[Any]:
        self._begin()
        self._has_run = True
        (counts,) = arguments.counts()
        if self._variables is not None:
            self._variables.weight = sum(counts) if counts else 1
        if self._replicas is not None:
            return self._replicas.run(fn, arguments)
        arguments.under_way = 0
        args, kwargs = per_replica.load_deferred(arguments.part(0).of(0))
        share = 0.0 if counts is not None and not counts[0] else 1.0 / self.num_replicas_in_sync
        own = ReplicaContext(self.global_rank, OneReplica(), self, share=share)
        context.state.replicas.append(own)
        try:
            return [fn(*args, **kwargs)]
        finally:
            context.state.replicas.pop()

    def before_read(self, module: torch.nn.Module) -> None:
        """Says once that a metric of this task knows nothing of what others do."""
        is_metric = is_chosen(module) and next(module.parameters(), None) is None
        if self._is_told or not self._has_run or not is_metric or module not in self._tracker:
            return
        self._is_told = True
        name = getattr(module, "metric", type(module).__name__)
        warn_caller(
            f"{name} has what steps of {self.task} have updated, which is one of {len(self._training)} tasks that "
            f"train: with parameter servers in a cluster each task has metrics of its own. Evaluate on all data in one "
            f"task (the chief, or an evaluator), or take MultiWorkerMirroredStrategy, whose metrics are global",
            StratagemWarning,
        )

    def take(self, objects: Sequence[Any]) -> None:
        self._tracker.note(*objects)
        self._bring_variables()

    def _bring_variables(self) -> None:
        if self._replicas is not None:
            self._replicas.bring_variables()

    def state_dict(self) -> dict[str, Any]:
        """Everything that the parameter servers have, of one moment: what a checkpoint keeps.

        Raises:
            ParameterServerLostError: One of them is gone.
        """
        self.require_usable()
        self._begin()
        if self._client is None:
            raise StrategyError("an evaluator has no parameter servers to ask; it reads checkpoints")
        state = self._client.state()
        return {"version": state.version, "values": dict(state.values), "optimizers": list(state.optimizers)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Before the first run: what the servers begin with. The chief's word counts; others may say the same.

        In an evaluator: gives the values to the model.
        """
        whole = StateOfAll(int(state["version"]), state["values"], tuple(state["optimizers"]))
        if self._client is None:
            ServedVariables.load_values(self._made(), whole)
        elif self._variables is not None:
            raise StrategyError("load_state_dict() comes before the first run; start all tasks again to go back")
        else:
            self._restored = whole

    def pull(self) -> None:
        """Fetches the newest values of all variables into the model, for example to evaluate it."""
        self.require_usable()
        self._begin()
        if self._variables is not None:
            self._variables.pull_all()

    def _meet(self) -> None:
        """Waits for all other tasks that train; then this one has the newest values. An evaluator waits for nobody."""
        if self._client is not None:
            with self._turn.taken("strategy.barrier()"):
                self._begin()
                self._client.meet()
                self.pull()

    def close(self) -> None:
        """Leaves the parameter servers. When the chief does, and all others have, they end."""
        context.require_controller("strategy.close()")
        self._end(is_done=True)

    def tell_others(self, error: BaseException) -> None:
        """The servers go on without this task, and wait for its next life."""
        self._end(is_done=False)

    def revive(self) -> None:
        raise StrategyError("parameter servers come back only with all tasks: stratagem run --max-restarts")

    def call_in_children(self, function: Callable[..., Any], *arguments: Any) -> None:
        if self._replicas is not None and self._closed_at is None:
            self._replicas.start()
            self._replicas.ask_children(function, *arguments)

    def _begin(self) -> None:
        """Before the first run: agrees with all on the variables."""
        if self._client is None:
            return
        made = self._tracker.take()
        if self._replicas is not None:
            self._tracker.put_back(made)  # they are given all of it
        if self._variables is not None:
            self._variables.require_same(made)
            return
        try:
            variables = ServedVariables(
                self._client,
                made,
                rank=self.input_pipeline[1],
                partitioner=self._options.variable_partitioner,
                on_nonfinite=self._options.on_nonfinite,
            )
            has_replicas = self._replicas is not None
            if self._replicas is not None:  # before it is changed into what only this process can have
                own = self._replicas.start()
                self._replicas.distribution.bring_up_to_date(own)
                own.update_elsewhere = variables.update
            variables.define(
                is_chief=self.is_chief, state=self._restored, pacing=self._pacing, has_replicas=has_replicas
            )
        except BaseException:
            if self._replicas is None:
                self._tracker.put_back(made)
            raise
        self._variables, self._restored = variables, None

    def _made(self) -> list[Any]:
        made = self._tracker.take()
        self._tracker.put_back(made)
        return made

    def _end(self, *, is_done: bool) -> None:
        if self._closed_at is None:
            self._closed_at = calling_line()
            if self._options.verbose and self.staleness():
                print(staleness.described(self.staleness()))
            self._tracker.let_go()
            if self._variables is not None:
                self._variables.let_go()
            if self._client is not None:
                self._client.close(is_done=is_done)
            if self._replicas is not None:
                self._replicas.close() if is_done else self._replicas.end()

    def require_usable(self) -> None:
        if self._closed_at is not None:
            raise StrategyError(f"this strategy was closed at {self._closed_at}; make a new one")


_open: "weakref.WeakSet[ClusterTask]" = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    error = getattr(sys, "last_value", None)  # what has ended the program, if anything
    for task in list(_open):
        task._end(is_done=error is None)
