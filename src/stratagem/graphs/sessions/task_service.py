"""Runs parts of graphs for sessions of other processes: the side of the task.

Owns the conversation with one session: what it may ask for, what is kept for it (parts, runs), and that all of it ends
with the connection. Variables stay, for other sessions (`task_variables`). What a part may hold is checked by
`sent_parts`. Loads torch, so that `server` loads this file only when a session comes.
"""

import asyncio
import atexit
import contextlib
import dataclasses
import functools
import json
import threading
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Final, final

import torch

from stratagem import _clock
from stratagem.cluster import strict_json
from stratagem.cluster.channel import Channel
from stratagem.cluster.liveness import chosen_timeout_s
from stratagem.cluster.membership.member_messages import Body, MessageKind, shortened
from stratagem.cluster.spec import ClusterSpec, Task
from stratagem.errors import ProtocolError, SessionError
from stratagem.graphs.nodes import Node, NodeKind, NodeOutput, Size
from stratagem.graphs.sessions import sent_parts, sent_tensors
from stratagem.graphs.sessions.device_worker import Told
from stratagem.graphs.sessions.local_devices import LocalFleet
from stratagem.graphs.sessions.node_devices import NodePlace
from stratagem.graphs.sessions.partition import GraphPart
from stratagem.graphs.sessions.session_config import GPUOptions, SessionConfig
from stratagem.graphs.sessions.task_connection import receive_pieces, send_pieces
from stratagem.graphs.sessions.task_variables import TaskVariables, Update, update_part

_MOST_DESCRIPTION_BYTES: Final = 2**26
_MOST_RUNS: Final = 1024
_MOST_VARIABLES: Final = 10**6
_DECLARATION: Final = {"variable", "name", "container", "device", "value"}
_OPTIONS: Final = {"soft", "growth", "fraction", "visible", "counts", "threads", "isolated"}
_END_S: Final = 30.0


@final
class TaskService:
    """What a task does for sessions.

    Args:
        task: The task.
        spec: The cluster.
    """

    def __init__(self, task: Task, spec: ClusterSpec) -> None:
        self._task, self._spec = task, spec
        self._variables = TaskVariables()

    async def serve(self, channel: Channel, body: Body) -> None:
        """Answers the calls of one session until it ends."""
        conversation = _Conversation(self._task, self._spec, channel, self._variables)
        loop, ended = asyncio.get_running_loop(), threading.Event()
        _open[conversation] = (loop, ended)
        try:
            await conversation.follow(body)
        finally:
            conversation.end()
            del _open[conversation]
            ended.set()


_open: "dict[_Conversation, tuple[asyncio.AbstractEventLoop, threading.Event]]" = {}


@atexit.register
def _end_all() -> None:
    """A thread that is in torch when Python ends would take the process down."""
    for conversation, (loop, ended) in list(_open.items()):
        with contextlib.suppress(RuntimeError):  # the loop has ended meanwhile
            loop.call_soon_threadsafe(conversation.break_off)
            ended.wait(_END_S)


class _Run:
    """What a run has assigned here; nothing counts until it is committed."""

    def __init__(self) -> None:
        self.cancelled = False
        self.assigned: dict[Node, torch.Tensor] = {}
        self.updates: list[Update] = []


@final
@dataclasses.dataclass(frozen=True)
class _Part:
    """A part that a session has sent.

    Args:
        part: What it computes.
        sent: What goes in and comes out.
        update: What of it changes variables, and may have to be done once more.
        counts: The variables that get the value which this part assigns; others get that of a later one.
    """

    part: GraphPart
    sent: sent_parts.Sent
    update: GraphPart | None
    counts: frozenset[Node]


@final
class _Course:
    """One part of a run, as the thread of its device sees it."""

    def __init__(
        self, run: _Run, inputs: dict[NodeOutput, torch.Tensor], numbers: Sequence[Any], counts: frozenset[Node]
    ) -> None:
        self._run = run
        self._counts = counts
        self._numbers = numbers
        self._inputs = inputs
        self.results: dict[NodeOutput, torch.Tensor] = {}

    @property
    def cancelled(self) -> bool:
        return self._run.cancelled

    def size_of(self, size: Size) -> int | float:
        number: int | float = self._numbers[size.number]
        return number

    def take(self, output: NodeOutput) -> torch.Tensor:
        return self._inputs.pop(output)

    def publish(self, output: NodeOutput, value: torch.Tensor) -> None:
        self.results[output] = value

    def assign(self, variable: Node, value: torch.Tensor) -> None:
        if variable in self._counts:
            self._run.assigned[variable] = value

    def hold(self, value: torch.Tensor) -> None:
        """Nothing is handed out here: results are sent."""


@final
class _Conversation:
    """One session."""

    def __init__(self, task: Task, spec: ClusterSpec, channel: Channel, shared: TaskVariables) -> None:
        self._task, self._spec, self._channel = task, spec, channel
        self._kept = self._shared = shared
        self._sending = asyncio.Lock()
        self._jobs: set[asyncio.Task[None]] = set()
        self._fleet: LocalFleet | None = None
        self._parts: dict[int, _Part] = {}
        self._variables: dict[int, Node] = {}
        self._runs: dict[int, _Run] = {}

    async def follow(self, body: Body) -> None:
        """Takes one call after the other; what takes time goes on beside."""
        kind = MessageKind.CALL
        while True:
            if kind == MessageKind.CALL:
                await self._take(body)
            elif kind == MessageKind.BEAT:
                async with self._sending:
                    self._channel.send(MessageKind.BEAT)
            else:
                raise ProtocolError(f"{kind.name} came in the middle of a session")
            async with _clock.timeout(chosen_timeout_s()):
                kind, body = await self._channel.receive()

    def end(self) -> None:
        """Lets go of everything; operations that are under way end by themselves."""
        for run in self._runs.values():
            run.cancelled = True
        for job in self._jobs:
            job.cancel()
        if self._fleet is not None:
            self._fleet.close(wait=False)

    def break_off(self) -> None:
        """Ends the connection, and with it the conversation."""
        self._channel.abort()

    async def _take(self, body: Body) -> None:
        """Reads what comes with a call, then begins it; what breaks the rules of the wire ends the session."""
        about, sizes = body["about"], body["sizes"]
        if not all(type(about.get(name, 0)) is int for name in ("part", "run", "variable")):
            raise ProtocolError("a call of a session names something that is no number")
        match body["call"], self._fleet:
            case "open", None if about.keys() == _OPTIONS and not sizes:
                self._begin(body, self._open(about))
            case "part", LocalFleet() if about.keys() == {"part", "device", "counts"} and sizes:
                description, constants = await self._read_part(sizes)
                self._begin(body, self._add_part(about, description, constants))
            case "run", LocalFleet() if about.keys() == {"part", "run", "numbers"} and about["part"] in self._parts:
                part = self._parts[about["part"]]
                numbers = about["numbers"] if isinstance(about["numbers"], list) else [None]
                inputs = part.sent.empty_inputs(numbers)
                await self._read_into(inputs, sizes)
                if len(self._runs) >= _MOST_RUNS:
                    raise ProtocolError("a session has begun too many runs")
                run = self._runs.setdefault(about["run"], _Run())
                self._begin(body, self._compute(part, run, inputs, numbers))
            case "declare", LocalFleet() if about.keys() == _DECLARATION and not sizes:
                self._begin(body, self._declare(about, sent_parts.variable_node(about)))
            case "write", LocalFleet() if about.keys() == {"variable", "anew"} and about["variable"] in self._variables:
                variable = self._variables[about["variable"]]
                value = torch.empty_like(variable.outputs[0], device="cpu")
                await self._read_into([value], sizes)
                self._begin(body, self._write(variable, value, anew=about["anew"] is True))
            case "commit", LocalFleet() if about.keys() == {"run", "values"} and not sizes:
                self._begin(body, self._commit(about["run"], self._known_variables(about["values"])))
            case "drop", LocalFleet() if about.keys() == {"run"} and not sizes:
                self._begin(body, self._drop(about["run"]))
            case "reset", LocalFleet() if about.keys() == {"containers"} and not sizes:
                self._begin(body, self._reset(about["containers"]))
            case _:
                raise ProtocolError("a call of a session is not one that it may make")

    def _begin(self, body: Body, work: Coroutine[Any, Any, tuple[Body, Sequence[torch.Tensor]]]) -> None:
        job = asyncio.create_task(self._answer(body["id"], work))
        self._jobs.add(job)
        job.add_done_callback(self._jobs.discard)

    async def _answer(self, number: int, work: Coroutine[Any, Any, tuple[Body, Sequence[torch.Tensor]]]) -> None:
        reply: Body = {"id": number, "error": "", "message": "", "about": {}, "sizes": []}
        tensors: Sequence[torch.Tensor] = ()
        try:
            reply["about"], tensors = await work
        except Exception as error:  # the session hears of it, whatever it is
            reply |= {"error": type(error).__name__, "message": shortened(str(error))}
        pieces = [sent_tensors.bytes_of(each) for each in tensors]
        reply["sizes"] = [len(each) for each in pieces]
        async with self._sending:
            self._channel.send(MessageKind.RETURN, reply)
            for piece in pieces:
                await send_pieces(self._channel, piece, _nothing)

    # What a session may ask for

    async def _open(self, about: Body) -> tuple[Body, Sequence[torch.Tensor]]:
        config = _config_of(about)
        config.check()
        if config.isolate_session_state:
            self._kept = TaskVariables()
        self._fleet = LocalFleet(config, self._task.job, self._task.index, self._kept.on)
        devices = [[place.device_type, place.device_index] for place in self._fleet.devices()]
        cluster = json.loads(self._spec.to_json())
        return {"job": self._task.job, "index": self._task.index, "cluster": cluster, "devices": devices}, ()

    async def _add_part(
        self, about: Body, description: Any, constants: Sequence[torch.Tensor]
    ) -> tuple[Body, Sequence[torch.Tensor]]:
        place = self._place(about["device"])
        part, sent = sent_parts.decode_part(description, constants, place, self._variables)
        for node in part.nodes:
            variable = node if node.kind is NodeKind.VARIABLE else node.variable
            if variable is not None and self._kept.home(variable) != place:
                raise SessionError(f"variable {variable.name!r} has no value on {place.name}")
        counts = frozenset(self._known_variables(about["counts"]))
        self._parts[about["part"]] = _Part(part, sent, update_part(part), counts)
        return {}, ()

    async def _compute(
        self, computed: "_Part", run: _Run, inputs: Sequence[torch.Tensor], numbers: Sequence[Any]
    ) -> tuple[Body, Sequence[torch.Tensor]]:
        part, sent, update = computed.part, computed.sent, computed.update
        given = dict(zip(sent.inputs, inputs, strict=True))
        course = _Course(run, dict(given), numbers, computed.counts)
        changed = [] if update is None else [node for node in update.nodes if node.kind is NodeKind.VARIABLE]
        values = self._kept.on(part.place)
        seen = {variable: values.get(variable) for variable in changed}  # before the part reads them
        thread = self._known_fleet.thread(part.place)
        await _done(lambda told: thread.compute(part, course, told))
        if update is not None:
            needed = {each: given[each] if each in given else course.results[each] for each in update.inputs}
            run.updates.append(Update(update, needed, seen, course.size_of, computed.counts))
        return {}, [course.results[each] for each in sent.outputs]

    async def _declare(self, about: Body, declared: Node) -> tuple[Body, Sequence[torch.Tensor]]:
        if len(self._variables) >= _MOST_VARIABLES:
            raise SessionError(f"a session has at most {_MOST_VARIABLES} variables in a task")
        variable = self._kept.declare(declared, self._place(about["device"]))
        self._variables[about["variable"]] = variable
        return {"exists": self._kept.has_value(variable)}, ()

    async def _write(self, variable: Node, value: torch.Tensor, *, anew: bool) -> tuple[Body, Sequence[torch.Tensor]]:
        thread = self._known_fleet.thread(self._kept.home(variable))
        await _done(lambda told: thread.do(lambda: self._kept.begin(variable, value, thread.device, anew=anew), told))
        return {}, ()

    async def _commit(self, number: int, wanted: Sequence[Node]) -> tuple[Body, Sequence[torch.Tensor]]:
        run = self._runs.pop(number, _Run())
        run.cancelled = True
        if not run.assigned.keys() >= set(wanted):
            raise SessionError("a run was asked for variables that it has not assigned")
        now: dict[Node, torch.Tensor] = {}
        for place in dict.fromkeys(map(self._kept.home, run.assigned)):
            thread = self._known_fleet.thread(place)
            there = {variable: value for variable, value in run.assigned.items() if self._kept.home(variable) == place}
            updates = [each for each in run.updates if each.part.place == place]
            commit = functools.partial(self._kept.commit, thread.device, there, updates)
            await _done(lambda told, thread=thread, commit=commit: thread.do(lambda: now.update(commit()), told))  # type: ignore[misc]
        return {}, [now[each] for each in wanted]

    async def _drop(self, number: int) -> tuple[Body, Sequence[torch.Tensor]]:
        self._runs.pop(number, _Run()).cancelled = True
        return {}, ()

    async def _reset(self, containers: Any) -> tuple[Body, Sequence[torch.Tensor]]:
        if containers is not None and not (isinstance(containers, list) and all(map(_is_name, containers))):
            raise SessionError("containers are a list of names, or null")
        own = [""] if containers is not None and self._task.job in containers else []  # TensorFlow's name of it
        self._shared.reset(None if containers is None else [*containers, *own])
        return {}, ()

    # Parts of the above

    @property
    def _known_fleet(self) -> LocalFleet:
        if self._fleet is None:
            raise SessionError("the session was not opened")
        return self._fleet

    def _known_variables(self, numbers: Any) -> list[Node]:
        if not isinstance(numbers, list) or not all(type(each) is int and each in self._variables for each in numbers):
            raise ProtocolError("a session asks for variables that it does not have")
        return [self._variables[each] for each in numbers]

    def _place(self, device: Any) -> NodePlace:
        for place in self._known_fleet.devices():
            if place.device == device:
                return place
        raise SessionError(f"{self._task.name} has no device {str(device)[:64]!r}")

    async def _read_part(self, sizes: Sequence[int]) -> tuple[Any, list[torch.Tensor]]:
        if sizes[0] > _MOST_DESCRIPTION_BYTES:
            raise ProtocolError("the description of a part is too long")
        text = bytearray(sizes[0])
        await receive_pieces(self._channel, memoryview(text), _nothing)
        try:
            description = strict_json.read(text.decode())
            headers = description["constants"]
            constants = [sent_tensors.empty_of(each) for each in headers]
        except (UnicodeDecodeError, strict_json.NotJsonError, TypeError, KeyError):
            raise ProtocolError("the description of a part is not valid JSON") from None
        await self._read_into(constants, sizes[1:])
        return description, constants

    async def _read_into(self, tensors: Sequence[torch.Tensor], sizes: Sequence[int]) -> None:
        if [each.nbytes for each in tensors] != list(sizes):
            raise ProtocolError("tensors of other sizes were announced than are expected")
        for each in tensors:
            await receive_pieces(self._channel, sent_tensors.bytes_of(each), _nothing)


def _config_of(about: Body) -> SessionConfig:
    match about["threads"]:
        case [intra_op, inter_op]:
            pass
        case _:
            raise ProtocolError("the threads of a session are two numbers")
    options = GPUOptions(
        allow_growth=about["growth"],
        per_process_gpu_memory_fraction=about["fraction"],
        visible_device_list=about["visible"],
    )
    return SessionConfig(
        allow_soft_placement=about["soft"],
        gpu_options=options,
        device_count=about["counts"],
        intra_op_parallelism_threads=intra_op,
        inter_op_parallelism_threads=inter_op,
        isolate_session_state=about["isolated"],
    )


def _nothing() -> None:
    """The task itself notes no signs of life of a session but its beats."""


async def _done(begin: Callable[[Told], None]) -> None:
    """Waits for what a thread is given to do."""
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[BaseException | None] = loop.create_future()

    def told(error: BaseException | None) -> None:
        loop.call_soon_threadsafe(lambda: None if ended.done() else ended.set_result(error))

    begin(told)
    if (error := await ended) is not None:
        raise error


def _is_name(value: Any) -> bool:
    return isinstance(value, str)
