"""The pace that workers of several machines keep with each other: who waits for whom, and which pushes are one update.

Called in the executor's thread. Every shard decides for itself: all workers push to all shards, and say how far they
are, so that clocks and rounds are the same in each, and whoever is slowest waits nowhere.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, Final, final

from stratagem._clock import Clock
from stratagem.errors import ParameterError, ProtocolError, StratagemError, StrategyError
from stratagem.parameters.consistency import KINDS, Async, Consistency, Progress, RateOf
from stratagem.parameters.network.server.client_requests import ClientRequest, name_of
from stratagem.parameters.protocol import Push, PushOutcome, Verdict
from stratagem.parameters.rounds import mean_of
from stratagem.parameters.shard import Shard

LOOK_S: Final = 0.5
_NUM_RATES: Final = 128  # beyond that a rule for staleness gives what it gives for the last
_ROUNDS: Final = -1
"""The worker in whose name a shard applies what several have pushed."""


@final
@dataclasses.dataclass(frozen=True)
class RateTable:
    """A rule for the rate of a push as numbers, by its staleness: no code is sent to parameter servers.

    Args:
        rates: The factors of the learning rate; the last one holds for all beyond.
    """

    rates: tuple[float, ...]

    @classmethod
    def of(cls, rule: RateOf) -> "RateTable":
        """What a rule gives.

        Raises:
            StrategyError: It gives something else than a number from 0 up.
        """
        rates = tuple(float(rule(staleness)) for staleness in range(_NUM_RATES))
        for staleness, rate in enumerate(rates):
            if not (math.isfinite(rate) and rate >= 0):
                raise StrategyError(f"rate_of gives a number from 0 up, got {rate} for a staleness of {staleness}")
        return cls(rates)

    def __call__(self, staleness: int) -> float:
        return self.rates[min(staleness, len(self.rates) - 1)]


@final
@dataclasses.dataclass(frozen=True)
class Pacing:
    """How far workers may be apart.

    Args:
        consistency: What decides; its `rate_of`, if it has one, is a `RateTable`.
        members: The numbers of the workers that take part.
        stall_s: How long a worker waits for others before that is an error.
    """

    consistency: Consistency = dataclasses.field(default_factory=Async)
    members: tuple[int, ...] = ()
    stall_s: float = 60.0

    def to_body(self) -> list[Any]:
        """As a field of a body."""
        own = self.consistency
        rates = own.rate_of.rates if isinstance(own.rate_of, RateTable) else ()
        return [type(own).__name__, list(own.numbers().values()), list(rates), list(self.members), self.stall_s]

    @classmethod
    def from_body(cls, field: Sequence[Any]) -> "Pacing":
        """What a field of a body stands for.

        Raises:
            ProtocolError: There is no such consistency.
        """
        name, numbers, rates, members, stall_s = field
        given = {"rate_of": RateTable(tuple(rates))} if rates else {}
        try:
            consistency = KINDS[name](*numbers, **given)
        except (KeyError, TypeError, ParameterError):
            raise ProtocolError(f"there is no consistency {name!r} of {numbers}") from None
        return cls(consistency, tuple(members), stall_s)


@final
@dataclasses.dataclass(frozen=True)
class _Waiting:
    request: ClientRequest
    push: Push
    outcome: PushOutcome | None
    since: float


@final
class Pace:
    """Applies pushes to a shard and has them answered, each when it may go on.

    Args:
        pacing: How far workers may be apart.
        shard: What is updated.
        answer: Answers a push that has been judged.
        fail: Answers a request that cannot be.
        answer_met: Answers a worker that has met all others, with how far it is.
    """

    def __init__(
        self,
        pacing: Pacing,
        shard: Shard,
        answer: Callable[[ClientRequest, PushOutcome], None],
        fail: Callable[[ClientRequest, Exception], None],
        answer_met: Callable[[ClientRequest, int], None],
    ) -> None:
        self._pacing = pacing
        self._shares_steps = pacing.consistency.shares_steps
        self._shard = shard
        self._answer = answer
        self._fail = fail
        self._answer_met = answer_met
        self._clock = Clock(LOOK_S)
        self._clocks: dict[int, int] = {}
        self._left: set[int] = set()
        self._lost: set[int] = set()
        self._waiting: dict[int, _Waiting] = {}
        self._meeting: dict[int, ClientRequest] = {}
        self._moved_at = self._clock.now_s()  # when a worker last did something
        self._num_rounds = 0
        self._life = shard.admit(_ROUNDS) if self._shares_steps else 0

    @property
    def is_anybody_waiting(self) -> bool:
        """Whether `look` is to be called now and then."""
        return bool(self._waiting or self._meeting)

    def enter(self, worker: int) -> int:
        """A worker takes part from now on.

        Returns:
            How far it is: as far as the slowest of the others.
        """
        self._left.discard(worker)
        self._lost.discard(worker)
        self._moved_at = self._clock.now_s()
        self._clocks[worker] = min(self._clocks.values(), default=0)
        return self._clocks[worker]

    def leave(self, worker: int, *, is_done: bool) -> None:
        """A worker takes part no longer; nobody waits for it.

        Args:
            worker: Which.
            is_done: Whether it has done all that it had to.
        """
        self._clocks.pop(worker, None)
        self._waiting.pop(worker, None)
        self._meeting.pop(worker, None)
        self._moved_at = self._clock.now_s()
        self._left.discard(worker)
        self._lost.discard(worker)
        if worker in self._pacing.members:
            (self._left if is_done else self._lost).add(worker)
        self.look()

    def push(self, request: ClientRequest, push: Push) -> PushOutcome | None:
        """Takes an update; its answer comes when its worker may go on.

        Returns:
            What came of it, if that is known already.
        """
        outcome = None
        self._moved_at = self._clock.now_s()
        if not self._shares_steps:
            outcome = self._shard.push(push)
            if outcome.is_applied and push.worker in self._clocks:
                self._clocks[push.worker] = request.body["clock"]
            self._waiting[push.worker] = _Waiting(request, push, outcome, self._clock.now_s())
        elif not push.incarnation:
            self._answer(request, PushOutcome(Verdict.FENCED, self._shard.version, reason="it was declared lost"))
            return None
        elif push.version != self._shard.version:
            late = self._shard.version - push.version
            reason = f"step {push.version} was complete without it"
            self._answer(request, PushOutcome(Verdict.STALE, self._shard.version, max(0, late), reason))
            return None
        else:
            self._waiting[push.worker] = _Waiting(request, push, None, self._clock.now_s())
        self.look()
        return outcome

    def meet(self, request: ClientRequest) -> None:
        """Has a worker wait until all others have come here too, or have done all they had to.

        Nobody waits for it meanwhile. One that was lost is waited for: it may come back, and go on.
        """
        self._meeting[request.worker] = request
        self._moved_at = self._clock.now_s()
        self.look()

    def look(self) -> None:
        """Has answered who may go on, and who has waited too long."""
        if not self._shares_steps:
            slowest = min((clock for each, clock in self._clocks.items() if each not in self._meeting), default=0)
            for worker, each in list(self._waiting.items()):
                ahead = Progress(self._shard.version, num_ahead=self._clocks.get(worker, 0) - slowest)
                if each.outcome is not None and self._pacing.consistency.may_begin(ahead):
                    del self._waiting[worker]
                    self._answer(each.request, each.outcome)
        elif self._waiting:
            self._complete()
        self._let_go_who_have_met()
        now = self._clock.now_s()
        if any(now - each.since > self._pacing.stall_s for each in self._waiting.values()):
            self._fail_all(self._stalled())

    def _let_go_who_have_met(self) -> None:
        missing = [each for each in self._pacing.members if each not in self._left and each not in self._meeting]
        if not self._meeting or (missing and self._clock.now_s() - self._moved_at <= self._pacing.stall_s):
            return
        meeting, self._meeting = self._meeting, {}
        furthest = max(self._clocks.values(), default=0)
        for worker, request in meeting.items():
            if missing:
                self._fail(request, self._never_met(missing))
            else:
                self._clocks[worker] = furthest
                self._answer_met(request, furthest)

    def _never_met(self, missing: Sequence[int]) -> StratagemError:
        return ParameterError(
            f"strategy.barrier() waits for all training tasks, but {', '.join(map(name_of, missing))} has neither "
            f"called it nor pushed for {self._pacing.stall_s:g} s; call it in all tasks, or raise stall_timeout_s"
        )

    # Updates of several pushes

    def _complete(self) -> None:
        """Makes one update of what has come, if that is enough."""
        members = len(self._pacing.members)
        wanted = self._pacing.consistency.num_needed(members)
        if len(self._lost) > members - wanted:
            names = ", ".join(map(name_of, sorted(self._lost)))
            self._fail_all(
                ParameterError(
                    f"{names} is lost, and each step needs the gradients of {wanted} workers. Start all tasks again, "
                    f"or allow for losses with Synchronous(backup_workers=...) or Async()"
                )
            )
        elif len(self._waiting) >= min(wanted, members - len(self._left) - len(self._lost) - len(self._meeting)):
            waiting = [self._waiting[worker] for worker in sorted(self._waiting)]
            self._waiting.clear()
            try:
                outcome = self._shard.push(self._merged(waiting))
            except Exception as error:  # whatever it is, all who wait must hear of it
                for each in waiting:
                    self._fail(each.request, error)
                return
            self._num_rounds += outcome.is_applied
            for each in waiting:
                self._answer(each.request, outcome)

    def _merged(self, waiting: Sequence[_Waiting]) -> Push:
        """One push of all that wait, in the order of workers."""
        return dataclasses.replace(
            waiting[0].push,
            worker=_ROUNDS,
            incarnation=self._life,
            number=self._num_rounds + 1,
            gradients=mean_of([(each.push.gradients, each.request.body["weight"]) for each in waiting]),
            options=next((each.push.options for each in waiting if each.push.options is not None), None),
        )

    # Waits that end badly

    def _fail_all(self, error: StratagemError) -> None:
        waiting, self._waiting = self._waiting, {}
        for each in waiting.values():
            self._fail(each.request, error)

    def _stalled(self) -> StratagemError:
        slow = [worker for worker in self._clocks if worker not in self._waiting]
        names = ", ".join(map(name_of, sorted(slow))) or "workers that have not come"
        return ParameterError(
            f"waited {self._pacing.stall_s:g} s for {names}, which has not pushed; look at what it does, raise "
            f"stall_timeout_s, or use Async()"
        )
