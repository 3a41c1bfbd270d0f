"""Sessions on the tasks of a cluster: `sg.Session(server.target)`.

Owns which task a device name means and what each task holds for the session. The session itself is `placement`'s,
which lies below; this file connects the two, and is where `sg.Session` is found.
"""

import concurrent.futures
import itertools
import json
import os
from collections.abc import Coroutine, Mapping, Sequence
from typing import Any, final

import torch

from stratagem.cluster import token as tokens
from stratagem.cluster.address import SCHEME, Address
from stratagem.cluster.io_thread import IoThread
from stratagem.cluster.spec import ClusterSpec, Task
from stratagem.devices import kind_table
from stratagem.devices.device_spec import DeviceSpec
from stratagem.devices.kind_table import CPU
from stratagem.errors import ClusterSpecError, DeviceNotFoundError, TaskLostError
from stratagem.graphs.nodes import Node, NodeKind, NodeOutput
from stratagem.graphs.sessions import sent_parts, sent_tensors
from stratagem.graphs.sessions.local_devices import first_value
from stratagem.graphs.sessions.node_devices import NodePlace
from stratagem.graphs.sessions.partition import GraphPart
from stratagem.graphs.sessions.schedule import PATIENCE_S, Run
from stratagem.graphs.sessions.session import Session, connect_with
from stratagem.graphs.sessions.session_config import SessionConfig
from stratagem.graphs.sessions.task_connection import TaskConnection
from stratagem.placement import resolution

__all__ = ["Session"]


@final
class ClusterFleet:
    """The devices of the tasks of a cluster, reached through one of them.

    A task is connected to when something is first placed on it. What no scope places runs on the task of the target.

    Args:
        target: `server.target`.
        config: The settings of the session.
    """

    shares_memory = False

    def __init__(self, target: str, config: SessionConfig) -> None:
        if not target.startswith(SCHEME):
            raise ClusterSpecError(f"the target of a session is such as '{SCHEME}10.0.0.1:2222', got {target!r}")
        address = Address.parse(target.removeprefix(SCHEME))
        self._token = tokens.load(None if config.token_file is None else os.fspath(config.token_file))
        self._soft = resolution.is_soft() if config.allow_soft_placement is None else config.allow_soft_placement
        options = config.gpu_options
        self._options = {
            "soft": self._soft,
            "growth": options.allow_growth,
            "fraction": options.per_process_gpu_memory_fraction,
            "visible": options.visible_device_list,
            "counts": dict(config.device_count),
            "threads": [config.intra_op_parallelism_threads, config.inter_op_parallelism_threads],
            "isolated": config.isolate_session_state,
        }
        self._connections: dict[str, TaskConnection] = {}
        self._devices: dict[str, list[NodePlace]] = {}
        self._variables: dict[Node, int] = {}
        self._written: set[Node] = set()
        self._numbers = itertools.count()
        self._sent: dict[GraphPart, tuple[int, sent_parts.Sent]] = {}
        self._thread = IoThread("stratagem-session")
        self._thread.start()
        try:
            about = self._open(target, address)
            self.spec = ClusterSpec(about["cluster"])
            self.home = self.spec.task(about["job"], about["index"])
        except BaseException:
            self.close()
            raise
        self._connections[self.home.name] = self._connections.pop(target)
        self._connections[self.home.name].name = f"task {self.home}"
        self._note_devices(self.home, about)

    # Which device

    def place(self, spec: DeviceSpec, operation: str) -> NodePlace | None:
        if spec.device_type is None and spec.device_index is None:
            return None
        devices = self._devices_of(self._task(spec, operation))
        fitting = [each for each in devices if spec.device_type in (None, each.device_type)]
        for each in fitting:
            if each.device_index == (spec.device_index or 0):
                return each
        names = ", ".join(each.device for each in devices)
        if not self._soft:
            raise DeviceNotFoundError(
                f"{operation} was placed on {str(spec)!r}, which does not exist; that task has {names}. Name one of "
                f"these, or set allow_soft_placement=True in sg.SessionConfig"
            )
        nearest = min(
            fitting or devices, key=lambda each: abs(each.device_index - (spec.device_index or 0)) if fitting else 0
        )
        resolution.tell_once(
            f"{str(spec)!r} does not exist; what is placed there runs on {nearest.name} (soft placement)"
        )
        return nearest

    def default(self, spec: DeviceSpec, operation: str) -> NodePlace:
        devices = self._devices_of(self._task(spec, operation))
        order = kind_table.by_preference()
        return min(devices, key=lambda each: (order.index(each.device_type), each.device_index))

    def mapping(self) -> str:
        """The accelerators of the tasks that are connected."""
        found = [each for devices in self._devices.values() for each in devices if each.device_type != CPU]
        lines = [f"{each.name} -> device: {each.device_index}" for each in found]
        return "\n".join(("Device mapping:", *lines)) if lines else "Device mapping: no known devices."

    def _task(self, spec: DeviceSpec, operation: str) -> Task:
        if spec.replica:
            raise DeviceNotFoundError(f"{operation} was placed on {str(spec)!r}; tasks have one replica, number 0")
        job = spec.job or self.home.job
        index = spec.task if spec.task is not None else self.home.index if job == self.home.job else 0
        try:
            return self.spec.task(job, index)
        except ClusterSpecError as error:
            raise DeviceNotFoundError(f"{operation} was placed on {str(spec)!r}: {error}") from None

    def _devices_of(self, task: Task) -> list[NodePlace]:
        if task.name not in self._devices:
            if task.address is None:
                raise DeviceNotFoundError(f"{task.name} has no address, so that no session can reach it")
            self._note_devices(task, self._open(task.name, task.address))
        return self._devices[task.name]

    def _note_devices(self, task: Task, about: Mapping[str, Any]) -> None:
        self._devices[task.name] = [NodePlace(task.job, task.index, kind, index) for kind, index in about["devices"]]

    def _open(self, name: str, address: Address) -> dict[str, Any]:
        async def connect() -> dict[str, Any]:
            shown = name if name.startswith(SCHEME) else f"task {name}"
            connection = await TaskConnection.connect(shown, address, self._token)
            try:
                about = await connection.open(self._options)
            except BaseException:
                await connection.close()
                raise
            self._connections[name] = connection
            return about

        return self._thread.run(connect())

    # What runs there

    def worker(self, place: NodePlace) -> "ClusterFleet":
        """This fleet itself: it hands each part to the task of its place."""
        return self

    def submit(self, run: Run, part: GraphPart) -> None:
        inputs = [run.take(each) for each in part.inputs]
        first = part not in self._sent
        if first:
            numbers = {node: self._number(node) for node in _variables_of(part)}
            late = {NodeOutput(node, 0) for node in self._last_assignments(run).values()} - run.plan.users.keys()
            self._sent[part] = next(self._numbers), sent_parts.encode_part(part, numbers, run.size_for, without=late)
        self._thread.submit(self._compute(run, part, inputs, first=first))

    async def _compute(self, run: Run, part: GraphPart, inputs: list[torch.Tensor], *, first: bool) -> None:
        try:
            connection = self._connection(part.place)
            number, sent = self._sent[part]
            if first:
                text = memoryview(json.dumps(sent.about, separators=(",", ":"), allow_nan=False).encode())
                pieces = [text, *map(sent_tensors.bytes_of, sent.constants)]
                counts = [
                    self._number(each) for each, node in self._last_assignments(run).items() if node in part.nodes
                ]
                about = {"part": number, "device": part.place.device, "counts": counts}
                await connection.call_with_bytes("part", about, pieces)
            results = [torch.empty(run.shape_of(each), dtype=each.meta.dtype) for each in sent.outputs]
            about = {"part": number, "run": run.number, "numbers": [run.size_of(each) for each in sent.sizes]}
            await connection.call("run", about, inputs, expected=results)
        except BaseException as error:  # whoever waits for the run hears of it
            if first:
                self._sent.pop(part, None)
            run.fail(part, error)
            return
        for output, value in zip(sent.outputs, results, strict=True):
            variable = output.node.variable
            if output.node.kind is NodeKind.ASSIGN and variable is not None and variable.tensor is not None:
                run.assign(variable, value)
            run.publish(output, value)
        run.finish(part)

    def prepare(self, variable: Node, place: NodePlace, *, anew: bool = False) -> None:
        """Gives a variable its first value, in the task that it lives in, unless another session has done so."""
        if variable.initializer is None or (variable in self._written and not anew):
            return
        connection = self._connection(place)
        number = self._number(variable)
        about = {
            "variable": number,
            "name": variable.name,
            "container": variable.container,
            "device": place.device,
            "value": sent_tensors.header_of(variable.outputs[0]),
        }
        (found,) = self._finish([connection.call("declare", about)])
        if anew or not found["exists"]:
            value = first_value(variable)
            self._finish([connection.call("write", {"variable": number, "anew": anew}, [value])])
        self._written.add(variable)

    def commit(self, run: Run, places: dict[Node, NodePlace]) -> None:
        """Gives variables their new values; each task those that live in it."""
        for variable, value in run.assigned.items():
            if variable.tensor is not None:
                with torch.no_grad():
                    variable.tensor.copy_(value)
        kept: dict[TaskConnection, list[Node]] = {}
        for variable, node in self._last_assignments(run).items():
            asked = kept.setdefault(self._connection(places[variable]), [])
            if NodeOutput(node, 0) in run.plan.fetched:
                asked.append(node)
        calls = []
        for connection, nodes in kept.items():
            about = {"run": run.number, "values": [self._number(node.variable) for node in nodes if node.variable]}
            values = [torch.empty(run.shape_of(output), dtype=output.meta.dtype) for output in _first_outputs(nodes)]
            run.values |= dict(zip(_first_outputs(nodes), values, strict=True))
            calls.append(connection.call("commit", about, expected=values))
        self._finish(calls)
        self._drop(run, without=list(kept))

    def abandon(self, run: Run) -> None:
        """Tells all tasks of a run that it was given up."""
        self._drop(run, without=[])

    def reset(self, containers: Sequence[str] | None) -> None:
        """Ends variables in all tasks of the cluster; raises the error of one that is gone when all others are told."""
        lost: list[TaskLostError] = []
        for task in self.spec.tasks:
            if task.address is not None:
                try:
                    self._devices_of(task)
                    self._finish([self._connections[task.name].call("reset", {"containers": containers})])
                except TaskLostError as error:
                    lost.append(error)
        if lost:
            raise lost[0]

    def close(self) -> None:
        """Ends all connections and the thread."""
        try:
            for connection in self._connections.values():
                self._thread.run(connection.close())
        finally:
            self._thread.stop()

    # Parts of the above

    def _finish(self, calls: Sequence[Coroutine[Any, Any, Any]]) -> list[Any]:
        """Makes calls and waits for all; Ctrl-C breaks none off in the middle, which would end the connection."""
        futures = [self._thread.submit(each) for each in calls]
        try:
            concurrent.futures.wait(futures)
        except BaseException:
            concurrent.futures.wait(futures, PATIENCE_S)
            raise
        return [each.result() for each in futures]

    def _last_assignments(self, run: Run) -> dict[Node, Node]:
        """For each variable that a task keeps and a run assigns, the assignment that counts."""
        nodes = (node for part in run.plan.parts for node in part.nodes if node.kind is NodeKind.ASSIGN)
        return {node.variable: node for node in nodes if node.variable in self._written}

    def _drop(self, run: Run, *, without: list[TaskConnection]) -> None:
        for connection in dict.fromkeys(self._connection(part.place) for part in run.plan.parts):
            if connection not in without:
                self._thread.submit(connection.call("drop", {"run": run.number})).add_done_callback(_forget)

    def _connection(self, place: NodePlace) -> TaskConnection:
        return self._connections[f"{place.job}/{place.task}"]

    def _number(self, variable: Node) -> int:
        return self._variables.setdefault(variable, len(self._variables))


def _variables_of(part: GraphPart) -> list[Node]:
    """The variables of a part that live in its task."""
    found = (node if node.kind is NodeKind.VARIABLE else node.variable for node in part.nodes)
    return [node for node in found if node is not None and node.tensor is None]


def _first_outputs(nodes: Sequence[Node]) -> list[NodeOutput]:
    return [NodeOutput(node, 0) for node in nodes]


def _forget(future: "concurrent.futures.Future[Any]") -> None:
    """Whether a task has heard that a run is over does not matter: it hears of the next one, or is gone."""
    if not future.cancelled():
        future.exception()


connect_with(ClusterFleet)
