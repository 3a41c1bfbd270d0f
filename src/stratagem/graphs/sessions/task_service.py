"""Runs parts of graphs for sessions of other processes: the side of the task.

Owns the conversation with one session: what it may ask for, what is kept for it (parts, variables), and that all of
it ends with the connection. What a part may hold is checked by `sent_parts`. Loads torch, so that `server`
loads this file only when a session comes.
"""

import asyncio
import atexit
import contextlib
import json
import threading
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Final, final

import torch

from stratagem import _clock
from stratagem.cluster import strict_json
from stratagem.cluster.channel import Channel
from stratagem.cluster.membership.member_messages import Body, MessageKind, shortened
from stratagem.cluster.spec import ClusterSpec, Task
from stratagem.errors import ProtocolError, SessionError
from stratagem.graphs.nodes import Node, NodeKind, NodeOutput, Size
from stratagem.graphs.sessions import sent_parts, sent_tensors
from stratagem.graphs.sessions.local_devices import LocalFleet
from stratagem.graphs.sessions.node_devices import NodePlace
from stratagem.graphs.sessions.partition import GraphPart
from stratagem.graphs.sessions.session_config import GPUOptions, SessionConfig
from stratagem.graphs.sessions.task_connection import SILENCE_S, receive_pieces, send_pieces

_MOST_DESCRIPTION_BYTES: Final = 2**26
_MOST_RUNS: Final = 1024


async def serve(task: Task, spec: ClusterSpec, channel: Channel, body: Body) -> None:
    """Answers the calls of one session until it ends."""
    conversation = _Conversation(task, spec, channel)
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
            ended.wait(SILENCE_S)


class _Run:
    """What a run has assigned here; nothing counts until it is committed."""

    def __init__(self) -> None:
        self.cancelled = False
        self.assigned: dict[Node, torch.Tensor] = {}


@final
class _Course:
    """One part of a run, as the thread of its device sees it."""

    def __init__(self, run: _Run, inputs: dict[NodeOutput, torch.Tensor], numbers: Sequence[Any]) -> None:
        self._run = run
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
        self._run.assigned[variable] = value

    def hold(self, value: torch.Tensor) -> None:
        """Nothing is handed out here: results are sent."""


@final
class _Conversation:
    """One session."""

    def __init__(self, task: Task, spec: ClusterSpec, channel: Channel) -> None:
        self._task, self._spec, self._channel = task, spec, channel
        self._sending = asyncio.Lock()
        self._jobs: set[asyncio.Task[None]] = set()
        self._fleet: LocalFleet | None = None
        self._parts: dict[int, tuple[GraphPart, sent_parts.Sent]] = {}
        self._variables: dict[int, Node] = {}
        self._homes: dict[Node, NodePlace] = {}
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
            async with _clock.timeout(SILENCE_S):
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
            case "open", None if about.keys() == {"soft", "growth", "fraction"} and not sizes:
                self._begin(body, self._open(about))
            case "part", LocalFleet() if about.keys() == {"part", "device"} and sizes:
                description, constants = await self._read_part(sizes)
                self._begin(body, self._add_part(about, description, constants))
            case "run", LocalFleet() if about.keys() == {"part", "run", "numbers"} and about["part"] in self._parts:
                part, sent = self._parts[about["part"]]
                numbers = about["numbers"] if isinstance(about["numbers"], list) else [None]
                inputs = sent.empty_inputs(numbers)
                await self._read_into(inputs, sizes)
                if len(self._runs) >= _MOST_RUNS:
                    raise ProtocolError("a session has begun too many runs")
                run = self._runs.setdefault(about["run"], _Run())
                self._begin(body, self._compute(part, sent, run, inputs, numbers))
            case "write", LocalFleet() if about.keys() == {"variable", "name", "device", "value"}:
                value = sent_tensors.empty_of(about["value"])
                await self._read_into([value], sizes)
                self._begin(body, self._write(about, value))
            case ("commit" | "drop") as call, LocalFleet() if about.keys() == {"run"} and not sizes:
                self._begin(body, self._finish(about["run"], keep=call == "commit"))
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
        options = GPUOptions(allow_growth=about["growth"], per_process_gpu_memory_fraction=about["fraction"])
        config = SessionConfig(allow_soft_placement=about["soft"], gpu_options=options)
        config.check()
        self._fleet = LocalFleet(config, self._task.job, self._task.index)
        devices = [[place.device_type, place.device_index] for place in self._fleet.devices()]
        cluster = json.loads(self._spec.to_json())
        return {"job": self._task.job, "index": self._task.index, "cluster": cluster, "devices": devices}, ()

    async def _add_part(
        self, about: Body, description: Any, constants: Sequence[torch.Tensor]
    ) -> tuple[Body, Sequence[torch.Tensor]]:
        place = self._place(about["device"])
        part, sent = sent_parts.decode_part(description, constants, place, self._variables)
        for node in part.nodes:
            if node.kind is NodeKind.VARIABLE and self._homes.get(node) != place:
                raise SessionError(f"variable {node.name!r} has no value on {place.name}")
        self._parts[about["part"]] = part, sent
        return {}, ()

    async def _compute(
        self, part: GraphPart, sent: sent_parts.Sent, run: _Run, inputs: Sequence[torch.Tensor], numbers: Sequence[Any]
    ) -> tuple[Body, Sequence[torch.Tensor]]:
        course = _Course(run, dict(zip(sent.inputs, inputs, strict=True)), numbers)
        loop = asyncio.get_running_loop()
        ended: asyncio.Future[BaseException | None] = loop.create_future()
        self._known_fleet.thread(part.place).compute(part, course, _told(loop, ended))
        error = await ended
        if error is not None:
            raise error
        return {}, [course.results[each] for each in sent.outputs]

    async def _write(self, about: Body, value: torch.Tensor) -> tuple[Body, Sequence[torch.Tensor]]:
        place = self._place(about["device"])
        node = sent_parts.variable_node(about["variable"], about["name"], value, self._variables)
        self._homes[node] = place
        self._known_fleet.thread(place).device.write(node, value)
        return {}, ()

    async def _finish(self, number: int, *, keep: bool) -> tuple[Body, Sequence[torch.Tensor]]:
        run = self._runs.pop(number, _Run())
        run.cancelled = True
        for variable, value in run.assigned.items() if keep else ():
            self._known_fleet.thread(self._homes[variable]).device.write(variable, value)
        return {}, ()

    # Parts of the above

    @property
    def _known_fleet(self) -> LocalFleet:
        if self._fleet is None:
            raise SessionError("the session was not opened")
        return self._fleet

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


def _nothing() -> None:
    """The task itself notes no signs of life of a session but its beats."""


def _told(
    loop: asyncio.AbstractEventLoop, ended: "asyncio.Future[BaseException | None]"
) -> Callable[[BaseException | None], None]:
    def told(error: BaseException | None) -> None:
        loop.call_soon_threadsafe(lambda: None if ended.done() else ended.set_result(error))

    return told
