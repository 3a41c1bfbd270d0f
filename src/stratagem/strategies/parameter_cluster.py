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
from typing import Any, Final, NoReturn, final

import torch

from stratagem._caller import calling_line
from stratagem.cluster.resolvers.resolver import Resolver
from stratagem.cluster.spec import EVALUATOR, PS, TRAINING, ClusterSpec
from stratagem.collectives.one_replica import OneReplica
from stratagem.devices.device import LogicalDevice
from stratagem.devices.inventory import this_process
from stratagem.engine import context
from stratagem.engine.context import ReplicaContext
from stratagem.engine.random_numbers import seed_of
from stratagem.engine.served_variables import ServedVariables
from stratagem.errors import StrategyError
from stratagem.objects import per_replica
from stratagem.objects.tracking import Tracker
from stratagem.parameters import staleness
from stratagem.parameters.network.client.parameter_client import ParameterClient
from stratagem.parameters.network.options import ClusterOptions
from stratagem.parameters.network.server.client_requests import chief_of, number_of
from stratagem.parameters.network.server.ps_server import ParameterServer
from stratagem.parameters.network.shard_states import StateOfAll
from stratagem.processes.allocator import keep_freed_memory, share_one_heap
from stratagem.strategies.strategy import Strategy, require_call

# So often threads of a ps task may take turns: the one for sockets must not wait for updates.
_SWITCH_S: Final = 5e-4


def task_of(resolver: Resolver | None, options: Mapping[str, Any]) -> "ClusterTask":
    """The strategy in this task; a ps task serves until training is done, and then ends the program.

    Raises:
        StrategyError: This process is no task of a cluster with parameter servers, or an option is wrong.
    """
    if resolver is None or PS not in resolver.cluster_spec().jobs:
        raise StrategyError(
            "ParameterServerStrategy needs num_workers=, the number of workers on this machine; it is left out only in "
            "a task of a cluster with the job ps: stratagem run --workers 2 --ps 1, or TF_CONFIG"
        )
    checked = ClusterOptions.of(**options)
    # All steps need the same memory again; threads of sockets take what the program frees, and the other way round.
    keep_freed_memory()
    share_one_heap()
    if resolver.task_type == PS and resolver.task_id is not None:
        _serve(resolver.cluster_spec(), resolver.task_id)
    return ClusterTask(resolver, checked)


def _serve(spec: ClusterSpec, index: int) -> NoReturn:
    sys.setswitchinterval(_SWITCH_S)
    if _is_near_workers(spec, index):
        torch.set_num_threads(1)  # more would wait for cores that workers compute on
    with ParameterServer(spec, index) as server:

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
    Raises:
        ClusterJoinError: A parameter server has not come.
        HandshakeError: Who answers at the address of a parameter server is none, or has another token.
    """

    def __init__(self, resolver: Resolver, options: ClusterOptions) -> None:
        self._options = options
        self._spec = resolver.cluster_spec()
        self._job, self._index = resolver.task_type or "", resolver.task_id or 0
        self._device = this_process().select()[:1]
        self._tracker = Tracker()
        self._variables: ServedVariables | None = None
        self._restored: StateOfAll | None = None
        self._closed_at: str | None = None
        self._seed, self._num_epochs = torch.initial_seed(), 0
        self._training = [task.name for task in self._spec.tasks if task.job in TRAINING]
        self._pacing = options.pacing([number_of(task) for task in self._training])
        self._client: ParameterClient | None = None
        _open.add(self)
        if self._job != EVALUATOR:
            self._client = ParameterClient(
                self._spec,
                self._job,
                self._index,
                join_timeout_s=options.join_timeout_s,
                compression=options.compression,
                shares_memory=options.shares_memory,
            ).connect()

    # What this task is

    @property
    def devices(self) -> tuple[LogicalDevice, ...]:
        return self._device

    @property
    def task(self) -> str:
        """Which task this is, such as `worker/0`."""
        return f"{self._job}/{self._index}"

    @property
    def num_replicas_in_sync(self) -> int:
        return 1 if self._client is None else len(self._training)

    @property
    def replicas_here(self) -> range:
        first = 0 if self._client is None else self._training.index(self.task)
        return range(first, first + 1)

    @property
    def input_pipeline(self) -> tuple[int, int]:
        return self.num_replicas_in_sync, self.replicas_here.start

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
        return {self.replicas_here.start: dict(sorted(self._variables.staleness.items()))}

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
    def scope(self) -> Iterator["ClusterTask"]:
        """What is made inside is kept by the parameter servers; the chief's first values count."""
        with self._in_scope(), self._tracker.watch(), torch.device(self._device[0].torch_device):
            yield self

    def run(self, fn: Callable[..., Any], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        """Calls `fn` in this task, with its part of distributed values; returns what it returns."""
        self._require_usable()
        context.require_controller("strategy.run()")
        require_call(fn, args, kwargs)
        self._begin()
        arguments, keywords = per_replica.load_deferred(
            (per_replica.select(tuple(args), 0), per_replica.select(dict(kwargs or {}), 0))
        )
        counts = per_replica.counts_of(args, kwargs)
        if self._variables is not None:
            self._variables.weight = counts[0] if counts else 1
        context.state.replicas.append(ReplicaContext(self.replicas_here.start, OneReplica(), self))
        try:
            return fn(*arguments, **keywords)
        finally:
            context.state.replicas.pop()

    def take(self, objects: Sequence[Any]) -> None:
        self._tracker.note(*objects)

    def state_dict(self) -> dict[str, Any]:
        """Everything that the parameter servers have, of one moment: what a checkpoint keeps.

        Raises:
            ParameterServerLostError: One of them is gone.
        """
        self._require_usable()
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
        self._require_usable()
        self._begin()
        if self._variables is not None:
            self._variables.pull_all()

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
        """There are none."""

    def _begin(self) -> None:
        """Before the first run: agrees with all on the variables."""
        if self._client is None:
            return
        if self._variables is not None:
            self._variables.require_same(self._tracker.take())
            return
        made = self._tracker.take()
        try:
            variables = ServedVariables(
                self._client,
                made,
                rank=self.replicas_here.start,
                partitioner=self._options.partitioner,
                on_nonfinite=self._options.on_nonfinite,
            )
            variables.define(is_chief=self.is_chief, state=self._restored, pacing=self._pacing)
        except BaseException:
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

    def _require_usable(self) -> None:
        if self._closed_at is not None:
            raise StrategyError(f"this strategy was closed at {self._closed_at}; make a new one")


_open: "weakref.WeakSet[ClusterTask]" = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    error = getattr(sys, "last_value", None)  # what has ended the program, if anything
    for task in list(_open):
        task._end(is_done=error is None)
