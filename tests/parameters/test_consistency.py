"""Consistencies: one class decides for workers of one machine and for those of several. A new one is a row here."""

import dataclasses
from typing import Any

import pytest
import torch

import stratagem as sg
from stratagem.errors import ParameterError, ProtocolError, StrategyError
from stratagem.parameters import consistency as consistencies
from stratagem.parameters.consistency import Consistency, Progress
from stratagem.parameters.local.board import Board
from stratagem.parameters.local.gate import Gate
from stratagem.parameters.local.locks import Locks
from stratagem.parameters.network import bodies
from stratagem.parameters.network.frames import FrameKind
from stratagem.parameters.network.server.client_requests import ClientRequest
from stratagem.parameters.network.server.pacing import Pace, Pacing
from stratagem.parameters.partitioning import make_plan
from stratagem.parameters.protocol import OptimizerSpec, Push, PushOutcome, Variable
from stratagem.parameters.shard import Shard
from stratagem.processes.region import PAGE_BYTES, Region

NUM_WORKERS = 4
PUBLIC = tuple(consistencies.KINDS.values())


@dataclasses.dataclass(frozen=True)
class AfterTheOthers(Consistency):
    """One of a program's own: a worker may be ahead, and begins only when nobody is in a step."""

    can_wait = True

    def may_begin(self, at: Progress) -> bool:
        return not at.pulled and at.num_ahead <= 1

    def may_push(self, at: Progress) -> bool:
        return True

    def num_gradients(self, num_workers: int) -> int | None:
        return None


RULES = [  # of 4 workers: how many are in a step at once; pushes that one makes alone; pushes that make an update
    (sg.Async(), 4, 4, 1),
    (sg.BoundedStaleness(0), 1, 0, 1),
    (sg.BoundedStaleness(2), 3, 2, 1),
    (sg.Synchronous(), 4, 0, 4),
    (sg.Synchronous(backup_workers=1), 4, 0, 3),
    (AfterTheOthers(), 1, 1, 1),
]


@pytest.mark.parametrize(("consistency", "num_in_step", "num_alone", "num_gradients"), RULES, ids=str)
def test_consistency_decides_on_one_machine_and_between_several(
    consistency: Consistency, num_in_step: int, num_alone: int, num_gradients: int
) -> None:
    gates = new_gates(consistency)
    for gate in gates[:num_in_step]:
        gate.enter()
    assert [consistency.may_begin(gate.progress) for gate in gates[num_in_step:]] == [False] * (
        NUM_WORKERS - num_in_step
    )
    assert consistency.can_wait == (num_in_step < NUM_WORKERS)

    shards = Servers(consistency)
    for _ in range(4):
        shards.push(0)
    assert len(shards.answered) == num_alone
    shards = Servers(consistency)
    for worker in range(num_gradients):
        assert shards.version == 0
        shards.push(worker)
    assert shards.version == 1


@pytest.mark.parametrize("consistency", [rule[0] for rule in RULES if isinstance(rule[0], PUBLIC)], ids=str)
def test_consistency_is_the_same_on_a_server(consistency: Consistency) -> None:
    sent = Pacing(consistency, (1, 2), 3.0)
    assert (
        Pacing.from_body(bodies.decode(FrameKind.DEFINE, bodies.encode(FrameKind.DEFINE, body(sent)))["pacing"]) == sent
    )


def test_oldest_worker_pushes_and_the_others_wait_for_it() -> None:
    consistency = sg.BoundedStaleness(1)
    gates = new_gates(consistency)
    board = gates[0]._board

    def push(worker: int) -> None:
        board.version += 1
        board.in_flight[worker] = board.version + 1

    gates[0].enter()
    gates[1].enter()
    assert board.in_flight[:3].tolist() == [1, 1, 0]
    gates[0].push(lambda: push(0))
    assert not consistency.may_push(gates[0].progress)  # worker 1 would then have missed two
    gates[1].push(lambda: push(1))
    assert consistency.may_push(gates[0].progress)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: sg.BoundedStaleness(-1), ParameterError, "max_staleness is a whole number from 0 up, got -1"),
        (lambda: sg.Synchronous(True), ParameterError, "backup_workers is a whole number from 0 up, got True"),
        (lambda: sg.Async(rate_of=0.5), ParameterError, r"rate_of is a function of the staleness.*got 0\.5"),
        (lambda: consistencies.chosen("async"), StrategyError, r"consistency is Async\(\).*got 'async'"),
        (
            lambda: consistencies.chosen(sg.Synchronous(2), 2),
            StrategyError,
            r"Synchronous\(backup_workers=2\) leaves none of 2 workers",
        ),
        (lambda: Pacing.from_body(["open", [], [], [], 1.0]), ProtocolError, "no consistency 'open'"),
        (lambda: Pacing.from_body(["Synchronous", [0], [1.0], [], 1.0]), ProtocolError, "no consistency 'Synchronous'"),
        (lambda: Pacing.from_body(["Async", [3], [], [], 1.0]), ProtocolError, r"no consistency 'Async' of \[3\]"),
    ],
)
def test_what_is_no_consistency_is_refused(make: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        make()


def body(pacing: Pacing) -> dict[str, Any]:
    plan = make_plan([Variable("a", (1,), torch.float32)], 1)
    rest = {"shard": 0, "optimizers": [], "has_values": True, "is_open": True}
    return {**bodies.plan_to_body(plan), **rest, "pacing": pacing.to_body()}


def new_gates(consistency: Consistency) -> list[Gate]:
    board, locks = Board.create(), Locks(Region.create(PAGE_BYTES))
    return [Gate(consistency, worker, board, locks, 0) for worker in range(NUM_WORKERS)]


class Servers:
    """A shard of one variable and its pace, without a network."""

    def __init__(self, consistency: Consistency) -> None:
        plan = make_plan([Variable("a", (1,), torch.float32)], 1)
        self._shard = Shard(plan, 0, [OptimizerSpec("SGD", ((("a",), {"lr": 1.0}),))], {"a": torch.zeros(1)})
        self._lives = [self._shard.admit(worker) for worker in range(NUM_WORKERS)]
        self._clocks = [0] * NUM_WORKERS
        self.answered: list[PushOutcome] = []
        pacing = Pacing(consistency, tuple(range(NUM_WORKERS)))
        self._pace = Pace(
            pacing,
            self._shard,
            lambda _, outcome: self.answered.append(outcome),
            lambda *_: pytest.fail("failed"),
            print,
        )
        for worker in range(NUM_WORKERS):
            self._pace.enter(worker)

    @property
    def version(self) -> int:
        return self._shard.version

    def push(self, worker: int) -> None:
        self._clocks[worker] += 1
        number, version = self._clocks[worker], self._shard.version
        request = ClientRequest(worker, FrameKind.PUSH, {"clock": number, "weight": 1}, (), lambda *_: None)
        self._pace.push(request, Push(worker, self._lives[worker], number, version, {"a": torch.ones(1)}))
