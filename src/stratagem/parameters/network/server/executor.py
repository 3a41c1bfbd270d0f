"""Carries out what clients ask of a shard, in one thread of its own.

So updates run while the next frames come in, and no two of them at once. Owns what requests mean and
how a state is described; the memory for what comes is sized here, by what the shard itself has.
"""

import dataclasses
import functools
import queue
import threading
from collections.abc import Callable
from typing import Any, Final, final

import torch

from stratagem.errors import ParameterError, ProtocolError, StratagemError
from stratagem.parameters.network import bodies, compression
from stratagem.parameters.network.bodies import Body
from stratagem.parameters.network.frames import FrameKind
from stratagem.parameters.network.server.client_requests import ClientRequest
from stratagem.parameters.network.server.held_pushes import Holds
from stratagem.parameters.network.server.pacing import LOOK_S, Pace, Pacing
from stratagem.parameters.network.shard_states import described, room, state_of, state_rooms
from stratagem.parameters.protocol import OptimizerSpec, Piece, Push, PushOutcome, Rows, ShardPlan, Verdict
from stratagem.parameters.shard import Shard


@final
@dataclasses.dataclass(frozen=True)
class _Definition:
    plan: ShardPlan
    number: int
    optimizers: tuple[OptimizerSpec, ...]
    pacing: Pacing


@final
class Executor:
    """One shard, and the thread that works on it.

    Args:
        number: Which shard.
        ended: Is called in the thread when it has ended by an error, which is in `error` then.
    """

    def __init__(self, number: int, ended: Callable[[], None]) -> None:
        self._number = number
        self._ended = ended
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=f"stratagem-ps/{number}-desk", daemon=True)
        self._requests: queue.SimpleQueue[ClientRequest | Callable[[], None] | None] = queue.SimpleQueue()
        self._shard: Shard | None = None
        self._definition: _Definition | None = None
        self._pace: Pace | None = None
        self._is_open = False
        self._lives: dict[int, int] = {}
        self._applied: dict[int, int] = {}
        self._leaving: dict[int, bool] = {}
        self._departed: dict[int, bool] = {}
        self._holds = Holds(self._carry_out, functools.partial(self._try, handler=self._answer_state), self._is_missing)

    def start(self) -> None:
        """Begins to work."""
        self._thread.start()

    def stop(self) -> None:
        """Ends the work, if it has begun, after what it is at."""
        self._requests.put(None)
        if self._thread.ident is not None:
            self._thread.join()

    def put(self, request: ClientRequest) -> None:
        """Has something done."""
        self._requests.put(request)

    def fence(self, worker: int, *, is_done: bool) -> None:
        """Refuses what a worker still sends, after what has come whole; nobody waits for it any more."""
        self._requests.put(lambda: self._fence(worker, is_done))

    # Sizes, in the thread of the sockets

    def expected(self, kind: FrameKind, body: Body) -> list[torch.Tensor]:
        """Memory for the tensors that follow a request.

        Raises:
            ProtocolError: They are not what this shard has.
        """
        if kind not in self._HANDLERS:
            raise ProtocolError(f"a client does not send {kind.name}")
        if kind == FrameKind.DEFINE:
            plan = bodies.plan_from_body(body)
            if body["shard"] != self._number:
                raise ProtocolError(f"this is shard {self._number}, the request is for {body['shard']}")
            return [room(piece) for piece in plan.shards[self._number]] if body["has_values"] else []
        if kind == FrameKind.PULL:
            return [torch.empty(self._checked_count(name, count), dtype=torch.int64) for name, count in body["rows"]]
        if kind == FrameKind.PUSH and not body["is_shared"]:
            rooms = []
            for name, count, encoding in body["gradients"]:
                rooms += compression.rooms(self._piece(name), count, encoding)
            return rooms + [room(self._piece(name)) for name in body["assigned"]]
        if kind == FrameKind.LOAD:
            return state_rooms(self.all_pieces(), body["saved"])
        return []

    def _pieces(self) -> dict[str, Piece]:
        shard = self._shard
        if shard is None:
            raise ProtocolError("no variables have been defined yet")
        return shard.pieces

    def all_pieces(self) -> list[Piece]:
        """What the shard has."""
        return list(self._pieces().values())

    def _piece(self, name: str) -> Piece:
        try:
            return self._pieces()[name]
        except KeyError:
            raise ProtocolError(f"there is no variable {name!r} in this shard") from None

    def _checked_count(self, name: str, count: int) -> int:
        if count > self._piece(name).last - self._piece(name).first:
            raise ProtocolError(f"{name!r} does not have {count} rows here")
        return count

    # Work, in the thread of the desk

    def _run(self) -> None:
        try:
            self._work()
        except BaseException as error:
            self.error = error
            self._ended()

    def _work(self) -> None:
        while True:
            try:
                request = self._requests.get(timeout=self._patience_s())
            except queue.Empty:
                if self._pace is not None:
                    self._pace.look()
            else:
                if request is None:
                    return
                if isinstance(request, ClientRequest):
                    self._carry_out(request)
                else:
                    request()
            self._holds.look()
            for worker, is_done in list(self._leaving.items()):
                self._fence(worker, is_done)

    def _patience_s(self) -> float | None:
        if self._holds.is_any:
            return 0.05
        return LOOK_S if self._pace is not None and self._pace.is_anybody_waiting else None

    def _carry_out(self, request: ClientRequest) -> None:
        self._try(request, functools.partial(self._HANDLERS[request.kind], self))

    @staticmethod
    def _try(request: ClientRequest, handler: Callable[[ClientRequest], None]) -> None:
        """Whatever goes wrong with one request, the others are carried out."""
        try:
            handler(request)
        except Exception as error:
            _fail(request, error)

    def _attach(self, request: ClientRequest) -> None:
        if request.worker in self._leaving:  # it is back before what it sent could be applied
            self._holds.drop(request.worker)
            self._fence(request.worker, self._leaving[request.worker])
        if self._shard is not None:
            self._lives[request.worker] = self._shard.admit(request.worker)
        self._applied.pop(request.worker, None)
        self._departed.pop(request.worker, None)
        version = 0 if self._shard is None else self._shard.version
        request.answer(FrameKind.DONE, bodies.done(version=version), ())

    def _fence(self, worker: int, is_done: bool) -> None:
        self._holds.end(worker)
        if self._holds.has_deferred(worker):  # what has come whole is applied
            self._leaving[worker] = is_done
            return
        self._leaving.pop(worker, None)
        if self._shard is not None:
            self._shard.fence(worker)
        self._lives.pop(worker, None)
        self._departed[worker] = is_done
        if self._pace is not None:
            self._pace.leave(worker, is_done=is_done)

    def _define(self, request: ClientRequest) -> None:
        body = request.body
        wanted = _Definition(
            bodies.plan_from_body(body),
            body["shard"],
            tuple(map(bodies.optimizer_from_body, body["optimizers"])),
            Pacing.from_body(body["pacing"]),
        )
        if not body["has_values"] and not self._is_open:
            why = "the chief has not defined the variables yet"
            request.answer(FrameKind.FAILED, {"why": why, "retry": True}, ())
            return
        if self._definition is None or self._shard is None:
            pieces = wanted.plan.shards[self._number]
            values = {piece.name: each for piece, each in zip(pieces, request.tensors, strict=True)}
            rate_of = wanted.pacing.consistency.rate_of
            self._shard = Shard(wanted.plan, self._number, wanted.optimizers, values, rate_of=rate_of)
            self._definition, self._is_open = wanted, body["is_open"]
            self._pace = self._new_pace(wanted.pacing, self._shard)
        elif difference := _difference(self._definition, wanted):
            raise ParameterError(
                f"this task and the one that defined the variables have different models or clusters: {difference}; "
                f"run the same program in all tasks, with the same cluster"
            )
        if request.worker not in self._lives:
            self._lives[request.worker] = self._shard.admit(request.worker)
        clock = 0 if self._pace is None else self._pace.enter(request.worker)
        known = (self._definition or wanted).pacing.members
        said = f"{len(known)} tasks that train" if known != wanted.pacing.members else ""
        request.answer(FrameKind.DONE, bodies.done(version=self._shard.version, clock=clock, reason=said), ())

    def _new_pace(self, pacing: Pacing, shard: Shard) -> Pace:
        pace = Pace(pacing, shard, self._answer_push, _fail, self._answer_meeting)
        for worker, is_done in self._departed.items():
            pace.leave(worker, is_done=is_done)
        return pace

    def _pull(self, request: ClientRequest) -> None:
        shard = self._whole_shard()
        rows = {name: indices for (name, _), indices in zip(request.body["rows"], request.tensors, strict=True)}
        pulled = shard.pull(request.body["names"], rows)
        found = [each.values if isinstance(each, Rows) else each for each in pulled.values.values()]
        request.answer(FrameKind.DONE, bodies.done(version=pulled.version), found)

    def _push(self, request: ClientRequest) -> None:
        if self._holds.defer(request):
            return
        body, tensors = request.body, iter(request.tensors)
        if request.nearby is None:
            gradients = {
                name: compression.decoded(self._piece(name), count, encoding, tensors)
                for name, count, encoding in body["gradients"]
            }
        else:
            gradients = {self._piece(name).name: request.nearby.gradients[name] for name, _, _ in body["gradients"]}
        options = None if body["options"] is None else tuple(map(bodies.options_from_body, body["options"]))
        push = Push(
            request.worker,
            self._lives.get(request.worker, 0),
            body["number"],
            body["version"],
            gradients,
            body["optimizer"],
            options,
            dict(zip(body["assigned"], tensors, strict=True)),
        )
        if self._pace is None:
            raise ParameterError("no variables have been defined yet")
        outcome = self._pace.push(request, push)
        if outcome is not None:
            self._note(request, outcome)  # its answer may have to wait, a checkpoint has it already

    def _answer_push(self, request: ClientRequest, outcome: PushOutcome) -> None:
        self._try(request, functools.partial(self._tell, outcome))

    def _tell(self, outcome: PushOutcome, request: ClientRequest) -> None:
        shard, body = self._whole_shard(), request.body
        self._note(request, outcome)
        into = None if request.nearby is None else request.nearby.values
        pulled = shard.pull(into=into).values.values() if body["then_pull"] else ()
        values = pulled if into is None else ()  # they are where the worker will look
        said = bodies.done(
            version=shard.version,
            verdict=outcome.verdict.value,
            staleness=max(0, outcome.staleness),
            reason=bodies.shortened(outcome.reason),
        )
        request.answer(FrameKind.DONE, said, [each for each in values if isinstance(each, torch.Tensor)])

    def _note(self, request: ClientRequest, outcome: PushOutcome) -> None:
        if outcome.verdict in (Verdict.APPLIED, Verdict.DUPLICATE, Verdict.STALE):
            self._applied[request.worker] = max(request.body["number"], self._applied.get(request.worker, 0))

    def _meet(self, request: ClientRequest) -> None:
        self._whole_shard()
        if self._pace is not None:
            self._pace.meet(request)

    def _answer_meeting(self, request: ClientRequest, clock: int) -> None:
        request.answer(FrameKind.DONE, bodies.done(version=self._whole_shard().version, clock=clock), ())

    def _hold(self, request: ClientRequest) -> None:
        self._holds.begin(request.worker)
        lives = {str(worker): number for worker, number in self._applied.items()}
        request.answer(FrameKind.DONE, bodies.done(version=self._whole_shard().version, lives=lives), ())

    def _state(self, request: ClientRequest) -> None:
        self._whole_shard()
        try:
            up_to = {int(worker): number for worker, number in request.body["up_to"].items()}
        except ValueError:
            raise ProtocolError("workers are numbers") from None
        self._holds.save(request, up_to)

    def _is_missing(self, worker: int, number: int) -> bool:
        return worker in self._lives and self._applied.get(worker, 0) < number

    def _answer_state(self, request: ClientRequest) -> None:
        state = self._whole_shard().state_dict()
        saved, kept = described(self.all_pieces(), state["optimizers"])
        tensors = [*state["values"].values(), *kept]
        request.answer(FrameKind.DONE, bodies.done(version=state["version"], saved=saved), tensors)

    def _load(self, request: ClientRequest) -> None:
        if self._is_open:  # a chief that has come back: what is here is newer than its checkpoint
            request.answer(FrameKind.DONE, bodies.done(version=self._whole_shard().version), ())
            return
        shard, body = self._whole_shard(), request.body
        pieces, number = self.all_pieces(), self._num_optimizers()
        shard.load_state_dict(state_of(pieces, number, body["version"], body["saved"], request.tensors))
        self._lives = {worker: shard.admit(worker) for worker in self._lives}
        self._is_open = True
        if self._definition is not None:
            self._pace = self._new_pace(self._definition.pacing, shard)
            for worker in self._lives:
                self._pace.enter(worker)
        request.answer(FrameKind.DONE, bodies.done(version=shard.version), ())

    def _num_optimizers(self) -> int:
        return 0 if self._definition is None else len(self._definition.optimizers)

    def _whole_shard(self) -> Shard:
        if self._shard is None:
            raise ParameterError("no variables have been defined yet")
        return self._shard

    _HANDLERS: Final[dict[FrameKind, Callable[["Executor", ClientRequest], None]]] = {
        FrameKind.ATTACH: _attach,
        FrameKind.DEFINE: _define,
        FrameKind.PULL: _pull,
        FrameKind.PUSH: _push,
        FrameKind.HOLD: _hold,
        FrameKind.MEET: _meet,
        FrameKind.STATE: _state,
        FrameKind.LOAD: _load,
    }


def _fail(request: ClientRequest, error: Exception) -> None:
    why = str(error) if isinstance(error, StratagemError) else f"{type(error).__name__}: {error}"
    request.answer(FrameKind.FAILED, {"why": bodies.shortened(why), "retry": False}, ())


def _difference(one: _Definition, other: _Definition) -> str:
    """What differs first."""
    for place, (mine, theirs) in enumerate(zip(one.plan.variables, other.plan.variables, strict=False)):
        if mine != theirs:
            return f"variable {place} is {_shown(mine)} there and {_shown(theirs)} here"
    if len(one.plan.variables) != len(other.plan.variables):
        return f"{len(one.plan.variables)} variables there, {len(other.plan.variables)} here"
    if one.plan != other.plan:
        return "variables are spread over other parameter servers"
    if [each.kind for each in one.optimizers] != [each.kind for each in other.optimizers]:
        return f"optimizers {[each.kind for each in one.optimizers]} and {[each.kind for each in other.optimizers]}"
    there, here = one.pacing.consistency, other.pacing.consistency
    if there != here:
        return f"{there} there and {here} here" if str(there) != str(here) else "rate_of gives other rates"
    if there.shares_steps and one.pacing.members != other.pacing.members:
        return f"steps of {len(one.pacing.members)} workers there, of {len(other.pacing.members)} here"
    return ""


def _shown(variable: Any) -> str:
    return f"{variable.name!r} {variable.shape} {str(variable.dtype).removeprefix('torch.')}"
