"""Runs graphs: `sg.Session`.

Owns the life of a session and the steps of one run. Where nodes run is `node_devices`', how they are cut
`partition`'s, what computes them a fleet's: `local_devices` for this process, one of `cluster` for several tasks.
"""

import atexit
import contextlib
import os
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, Protocol, Self, TypeAlias, final

import torch

from stratagem import _torch
from stratagem._caller import calling_line, warn_caller
from stratagem._checks import StaysHere
from stratagem.devices.device_spec import DeviceSpec
from stratagem.errors import GraphTypeError, SessionError, StratagemWarning
from stratagem.graphs.graph import Graph, get_default_graph
from stratagem.graphs.nodes import Node, NodeKind, NodeOutput
from stratagem.graphs.sessions.fetches import Fetches, read_feeds, read_fetches
from stratagem.graphs.sessions.local_devices import LocalFleet
from stratagem.graphs.sessions.node_devices import NodePlace, Placer
from stratagem.graphs.sessions.partition import GraphPlan, make_plan
from stratagem.graphs.sessions.schedule import PATIENCE_S, PartRunner, Run
from stratagem.graphs.sessions.session_config import SessionConfig
from stratagem.graphs.sessions.session_log import SessionLog
from stratagem.placement import scopes
from stratagem.placement.log import is_printing


class SessionFleet(Protocol):
    """The devices of a session, and what computes on them.

    Attributes:
        shares_memory: Whether they see the tensors of the program; otherwise these are sent with each run.
    """

    shares_memory: bool

    def place(self, spec: DeviceSpec, operation: str) -> NodePlace | None: ...
    def default(self, spec: DeviceSpec, operation: str) -> NodePlace: ...
    def mapping(self) -> str: ...
    def worker(self, place: NodePlace) -> PartRunner: ...
    def prepare(self, variable: Node, place: NodePlace, *, anew: bool = False) -> None: ...
    def commit(self, run: Run, places: dict[Node, NodePlace]) -> None: ...
    def abandon(self, run: Run) -> None: ...
    def close(self) -> None: ...


class ClusterSessionFleet(SessionFleet, Protocol):
    """The devices of the tasks of a cluster, which keep variables for all sessions."""

    def reset(self, containers: Sequence[str] | None) -> None: ...


Connector: TypeAlias = Callable[[str, SessionConfig], ClusterSessionFleet]
_connectors: list[Connector] = []


def connect_with(connector: Connector) -> None:
    """Registers who reaches the tasks of a cluster, which lies in a layer above this one."""
    _connectors[:] = [connector]


@final
class Session(StaysHere):
    """Runs a graph. It cuts the graph by device, runs the parts at the same time, and copies tensors between them.

    Each device has a thread, which computes on the cores of that device. Only the operations that the fetches need are
    run. All operations of a run read the values that variables had when it began; changes take effect when the whole
    run has succeeded.

    Sessions on a cluster share variables of the same name in the same container (`sg.container`); this is between-graph
    replication. The variables stay in their tasks when sessions end, until `Session.reset` or the end of the server.
    An update (`w -= d`, `sg.assign(w, w - d)`, the step of an optimizer) is applied to the current value of the
    variable, so no update of another session is lost; any other assigned value replaces the current one. A session
    without a target has its own variables.

    Args:
        target: A graph; or the target of a server of a cluster (`server.target`), whose tasks then run the graph.
        graph: The graph, if a target is given; by default the graph of the current `with` block, or the default graph.
        config: The settings.

    Raises:
        HandshakeError: The target is not a task of a cluster with the same token.
    Example:
        >>> import stratagem as sg
        >>> with sg.Graph() as graph:
        ...     x = sg.placeholder(torch.float32, [2, 2])
        ...     y = x @ torch.ones(2, 2)
        >>> with Session(graph) as session:
        ...     session.run(y, {x: [[1.0, 2.0], [3.0, 4.0]]})
        tensor([[3., 3.],
                [7., 7.]])
    """

    def __init__(
        self, target: str | Graph = "", graph: Graph | None = None, *, config: SessionConfig | None = None
    ) -> None:
        if isinstance(target, Graph):
            graph, target = target, ""
        if not isinstance(target, str) or not isinstance(graph, Graph | None):
            raise GraphTypeError(
                f"a session is made for a graph, a target such as server.target, or both, got {target!r} and {graph!r}"
            )
        config = config or SessionConfig()
        if not isinstance(config, SessionConfig):
            raise GraphTypeError(f"the settings of a session are sg.SessionConfig(...), got {config!r}")
        config.check()
        self.graph = graph or get_default_graph()
        self._fleet: SessionFleet = _connect(target, config) if target else LocalFleet(config)
        self._process = os.getpid()
        self._forgotten = weakref.finalize(self, _close_beside, self._fleet, self._process)
        self._forgotten.atexit = False  # a thread could no longer be started then
        _open.add(self)
        self._placer = Placer(self._fleet)
        self._plans: dict[tuple[frozenset[NodeOutput], frozenset[NodeOutput]], GraphPlan] = {}
        self._numbers_seen: dict[tuple[GraphPlan, Any], Any] = {}
        self._log = SessionLog(
            self._placer,
            self._fleet.mapping,
            prints=config.log_device_placement or is_printing(),
            whole_names=not self._fleet.shares_memory,
        )
        self._closed_at: str | None = None
        self._running = threading.Lock()
        self._num_runs = 0

    def run(self, fetches: Any, feed_dict: Mapping[Any, Any] | None = None) -> Any:
        """Computes what is fetched.

        Args:
            fetches: A tensor of the graph, its name, what `sg.trace` or `sg.global_variables_initializer` returned, or
                lists, tuples and dicts of these, however deep.
            feed_dict: Values for placeholders, or in place of other tensors of the graph.

        Returns:
            The same structure, with tensors in the memory of the host; a text where a text was fetched.

        Raises:
            FeedError: A placeholder is not fed, or a fed value does not fit.
            GraphError: Something is not in the graph.
            DeviceNotFoundError: Something was placed on a device that does not exist.
            SessionError: An operation failed, or the session is closed.
            TaskLostError: A task of the cluster is gone.
        """
        if self._closed_at is not None:
            raise SessionError(f"the session was closed at {self._closed_at}; make a new one")
        if os.getpid() != self._process:
            raise SessionError(
                f"the session belongs to process {self._process}, from which this one was forked without its threads "
                f"and connections; run it there, or make a session in a process that was started by spawn"
            )
        # No scope and no graph that is open around the call concerns what is computed here.
        with scopes.recording(), _torch.modes.without_dispatch_modes(), self._running:
            return self._run(read_fetches(self.graph, fetches), read_feeds(self.graph, feed_dict))

    @staticmethod
    def reset(target: str, containers: Sequence[str] | None = None, config: SessionConfig | None = None) -> None:
        """Deletes variables that the tasks of a cluster keep. Sessions that use them must be made again.

        Args:
            target: The target of a server of the cluster (`server.target`).
            containers: The containers whose variables are deleted (`sg.container`); `""` or the name of the job stands
                for variables outside of all containers. By default all containers.
            config: The settings, with the place of the token.

        Raises:
            TaskLostError: A task cannot be reached; the other tasks have deleted their variables.
        """
        named = None if containers is None else list(containers)
        if not isinstance(target, str) or not target or isinstance(containers, str):
            raise GraphTypeError(f"reset takes a target and a list of containers, got {target!r} and {containers!r}")
        if named is not None and not all(isinstance(each, str) for each in named):
            raise GraphTypeError(f"containers are texts, got {containers!r}")
        fleet = _connect(target, config or SessionConfig())
        try:
            fleet.reset(named)
        finally:
            fleet.close()

    def close(self) -> None:
        """Ends the threads of the session and its connections. A second time it does nothing."""
        if self._closed_at is None:
            self._closed_at = calling_line()
            self._forgotten.detach()
            if os.getpid() == self._process:  # a fork has neither its threads nor its connections
                self._fleet.close()
                self._warn_of_steps_never_taken()

    def _warn_of_steps_never_taken(self) -> None:
        """Says that an optimizer's step was recorded, and nothing was trained; on a cluster others may do so."""
        recorded = self.graph.recorder.optimizer_steps
        if not (recorded and self._num_runs > 1 and self._fleet.shares_memory):
            return
        warn_caller(
            f"the graph has recorded {recorded[0]}, and none of the {self._num_runs} runs of this session has "
            f"fetched it, so nothing was trained; fetch it with session.run([loss, graph.updates])",
            StratagemWarning,
        )

    def close_idle(self) -> None:
        """Closes the session unless it is computing."""
        if self._running.acquire(blocking=False):
            try:
                self.close()
            finally:
                self._running.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _run(self, asked: Fetches, feeds: dict[NodeOutput, torch.Tensor]) -> Any:
        self._placer.place(self.graph.recorder.nodes)
        for variable in asked.initialized:
            self._fleet.prepare(variable, self._placer.where(variable), anew=True)
        if not self._fleet.shares_memory:
            own = {
                NodeOutput(node, 0): node.tensor.detach() for node in self.graph.variables if node.tensor is not None
            }
            feeds = own | feeds
        plan = self._plan(asked, feeds)
        places = {variable: self._placer.where(variable) for variable in plan.variables}
        for variable, place in places.items():
            self._fleet.prepare(variable, place)
        self._log.print([*asked.initialized, *plan.nodes])
        workers = {part.place: self._fleet.worker(part.place) for part in plan.parts}
        run = Run(plan, feeds, workers, self._fleet.abandon, self._numbers(plan, feeds))
        run.execute()
        self._fleet.commit(run, places)
        self._num_runs += bool(asked.returned)
        if any(node.kind is NodeKind.ASSIGN for node in plan.nodes):
            self.graph.recorder.optimizer_steps.clear()
        results = {output: _result(output, run.owned(run.values[output].cpu())) for output in asked.returned}
        self._log.record(plan, run.num_bytes)
        return asked.filled(results)

    def _numbers(self, plan: GraphPlan, feeds: Mapping[NodeOutput, torch.Tensor]) -> Any:
        """What unknown sizes are in a run; the first time with these numbers, whether the graph fits them."""
        sizes = self.graph.recorder.sizes
        if sizes is None:
            return None
        found = sizes.numbers(feeds)
        if (plan, found.key) not in self._numbers_seen:
            sizes.check([node for part in plan.parts for node in part.nodes], found)
            self._numbers_seen[plan, found.key] = found
        return self._numbers_seen[plan, found.key]

    def _plan(self, asked: Fetches, feeds: Mapping[NodeOutput, torch.Tensor]) -> GraphPlan:
        key = (frozenset(asked.outputs), frozenset(feeds))
        if key not in self._plans:
            self._plans[key] = make_plan(
                asked.outputs, feeds.keys(), self._placer.where, whole_updates=not self._fleet.shares_memory
            )
        return self._plans[key]


def _close_beside(fleet: SessionFleet, process: int) -> None:
    """Ends a session that nobody holds any more; that may be noticed in one of its own threads."""
    if os.getpid() != process:
        return
    thread = threading.Thread(target=fleet.close, name="stratagem-session-end", daemon=True)
    thread.start()
    _ending.add(thread)


_open: "weakref.WeakSet[Session]" = weakref.WeakSet()
_ending: "weakref.WeakSet[threading.Thread]" = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    """A thread that is in torch when Python ends would take the process down; one that still computes is left alone."""
    for session in list(_open):
        with contextlib.suppress(Exception):
            session.close_idle()
    for thread in list(_ending):
        thread.join(PATIENCE_S)


def _connect(target: str, config: SessionConfig) -> ClusterSessionFleet:
    if not _connectors:
        raise SessionError(f"sessions on {target!r} need stratagem.cluster; make them by sg.Session")
    return _connectors[0](target, config)


def _result(output: NodeOutput, value: torch.Tensor) -> Any:
    return bytes(value.tolist()).decode() if output.node.is_text else value
