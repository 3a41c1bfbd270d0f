"""Hands steps to the workers of a parameter server on this machine.

Owns the steps that wait and what each worker has been told; its processes are `processes.group`'s. The
steps of a lost worker are given to others. Everything happens inside the program's own calls; there is
no thread.
"""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, final

from stratagem.engine.queued.step import QueuedStep
from stratagem.errors import ReplicaDiedError
from stratagem.objects import per_replica, state_diff
from stratagem.objects.captured import Captured
from stratagem.objects.steady import Steady
from stratagem.processes.group import ChildGroup, GroupMember, PendingCall
from stratagem.processes.losses import SLICE_S, Replace
from stratagem.processes.registry import Registry

_DEPTH = 2  # steps that a worker has at a time: while it computes one, the next is there already
_MAX_ATTEMPTS = 3

Message = tuple[Callable[..., Any], tuple[Any, ...], Callable[[Any], Any] | None]


@final
class WorkerRecord:
    """What the main program knows of one worker.

    Args:
        registry: The names of distributed objects.
        steady: Those among them that seldom change.
    """

    def __init__(self, registry: Registry, steady: Steady) -> None:
        self._registry = registry
        self.captured = Captured(registry, steady)  # what it has of the objects that functions use
        self.changes: state_diff.Snapshot = {}  # in distributed objects, that it has not been sent
        self.seed: int | None = None  # of random numbers, likewise

    def tell(self, changes: state_diff.Snapshot, seed: int | None) -> None:
        """Adds to what the worker is sent with its next step."""
        for name, new in changes.items():
            old = self.changes.get(name)
            # Of a module only what has changed is told: what was told before and not sent yet must stay.
            self.changes[name] = new._make(map(_later, old, new)) if old is not None and hasattr(new, "_make") else new
        self.seed = self.seed if seed is None else seed

    def take(self) -> tuple[state_diff.Snapshot, int | None]:
        """What the worker is sent with the step that it now gets."""
        live = self._registry.live()
        taken = {name: each for name, each in self.changes.items() if name in live}, self.seed
        self.changes, self.seed = {}, None
        return taken


@final
class Scheduler:
    """Steps for the workers of one strategy.

    Args:
        registry: The names of distributed objects.
        steady: Those among them that seldom change.
        stall_timeout_s: How long a step may take before its worker counts as stalled.
        policy: How many workers may be replaced.
        introduce: Gives a new worker all that it must know; it then waits for steps.
        recover: Puts right what a lost worker left; returns which of its calls it was in, and how many pushes of
            that call it had made.
        message: What a worker is sent for a step.
    """

    def __init__(
        self,
        registry: Registry,
        steady: Steady,
        *,
        stall_timeout_s: float,
        policy: Replace,
        introduce: Callable[[GroupMember, WorkerRecord], None],
        recover: Callable[[int], tuple[int, int]],
        message: Callable[[GroupMember, WorkerRecord, QueuedStep], Message],
    ) -> None:
        self.group = ChildGroup(
            registry,
            noun="worker",
            depth=_DEPTH,
            policy=policy,
            stall_timeout_s=stall_timeout_s,
            on_start=self._introduce,
            on_loss=self._requeue,
        )
        self.group.on_failure = self._note_failure
        self.records: dict[int, WorkerRecord] = {}
        self._queue: deque[QueuedStep] = deque()
        self._registry, self._steady = registry, steady
        self._introduce_to, self._recover, self._message = introduce, recover, message

    # Workers

    @property
    def workers(self) -> list[GroupMember]:
        """Those whose processes are there."""
        return list(self.group.members.values())

    def remove(self, numbers: Sequence[int]) -> None:
        """Lets workers finish what they have, then ends them."""
        leaving = [self.group.members[number] for number in numbers if number in self.group.members]
        for worker in leaving:
            worker.is_leaving = True
        self.wait(lambda: not any(worker.calls for worker in leaving))
        for number in numbers:
            self.group.end(number)
            self.records.pop(number, None)

    def stop(self) -> None:
        """Ends all workers."""
        self.group.stop()
        self._queue.clear()

    # Steps

    @property
    def num_under_way(self) -> int:
        return sum(len(worker.calls) for worker in self.workers)

    @property
    def is_empty(self) -> bool:
        """Whether no step waits for a worker."""
        return not self._queue

    @property
    def has_room(self) -> bool:
        """Whether a step would be taken at once."""
        return not self._queue and any(map(self.group.has_room, self.workers))

    def submit(self, step: QueuedStep) -> None:
        """Enters a step; a worker gets it as soon as one has room, with the arguments of this moment."""
        self._queue.append(step)
        self._hand_out()
        if not step.is_sent:
            step.args, step.kwargs = per_replica.copied((step.args, step.kwargs), self._registry.__contains__)

    def call(
        self, worker: GroupMember, function: Callable[..., Any], *arguments: Any, reference: Any = None
    ) -> QueuedStep:
        """Calls a function of the library in a worker, without waiting."""
        step = QueuedStep(function, arguments, {}, is_own=True)
        self.group.submit(worker, self.group.pack(function, arguments, reference), step)
        return step

    def ask_all(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """Calls a function of the library in every worker and waits."""
        steps = [self.call(worker, function, *arguments) for worker in self.workers]
        self.wait(lambda: all(step.is_done for step in steps))
        for step in steps:
            step.raise_error()
        return [step.answer for step in steps]

    def wait(self, until: Callable[[], bool]) -> None:
        """Takes in what workers send until something is so; workers that do not answer are lost, and replaced."""
        self.poll(0.0)
        while not until():
            self.poll(SLICE_S)

    def poll(self, timeout_s: float) -> None:
        """Takes in what workers have sent, hands out steps, and looks after workers that are silent."""
        self._hand_out()  # who drained the workers has left some, and workers that have none send nothing
        self.group.poll(timeout_s, after_round=self._hand_out)
        self.group.reap()

    def drain(self) -> None:
        """Waits for all steps that workers have; of those that wait, none is handed out meanwhile."""
        waiting, self._queue = self._queue, deque()
        try:
            self.wait(lambda: not self.num_under_way and not self._queue)
        finally:
            self._queue.extend(step for step in waiting if not step.is_done)

    def under_way(self) -> set[QueuedStep]:
        """The steps that workers have."""
        return {step for worker in self.workers for step in _steps_of(worker)}

    def cancel(self, steps: Iterable[QueuedStep], error: Callable[[], BaseException]) -> None:
        """Gives steps up that are not done.

        Args:
            steps: Which.
            error: Makes what each is finished with.
        """
        for step in steps:
            if not step.is_done:
                step.finish(error=error())
        self._queue = deque(step for step in self._queue if not step.is_done)

    def cancel_all(self, error: Callable[[], BaseException]) -> None:
        """Gives all steps up, of which nobody need be told."""
        steps = [*self._queue, *self.under_way()]
        self.cancel(steps, error)
        for step in steps:
            step.is_reported = True

    def _hand_out(self) -> None:
        """Gives steps to the workers that have the least."""
        for step in list(self._queue):
            if step.is_done:
                continue  # one before it has failed, which cancelled it
            able = [each for each in self.workers if not each.is_leaving and step.worker in (None, each.number)]
            worker = min(able, key=lambda each: len(each.calls), default=None)
            if worker is None or not self.group.has_room(worker):
                if step.worker is None:
                    return
                continue
            self._queue.remove(step)
            if not self._send(worker, step):
                self._hand_out()  # steps came back with the lost worker
                return

    def _send(self, worker: GroupMember, step: QueuedStep) -> bool:
        """Sends a step, or finishes it with what is wrong with it; `False` if its worker was lost."""
        record = self.records[worker.number]
        changes, seed = record.changes, record.seed
        try:
            packed = self.group.pack(*self._message(worker, record, step))
        except BaseException as error:
            record.changes, record.seed = changes, seed  # what it was not told, it is told next time
            record.captured.forget()
            step.finish(error=error)
            if not isinstance(error, Exception):
                raise
            return True
        step.is_sent = self.group.submit(worker, packed, step)
        return step.is_sent

    # What the group tells

    def _introduce(self, worker: GroupMember) -> None:
        record = self.records[worker.number] = WorkerRecord(self._registry, self._steady)
        self._introduce_to(worker, record)

    def _note_failure(self, worker: GroupMember, call: PendingCall) -> None:
        if isinstance(call, QueuedStep) and call.is_own:
            call.raise_error()
        self.records[worker.number].captured.forget()  # perhaps it could not build what it was sent

    def _requeue(self, worker: GroupMember, cause: str) -> None:
        """Gives the steps of a lost worker to others."""
        del self.records[worker.number]
        number, num_pushed = self._recover(worker.number)
        for step in reversed(_steps_of(worker)):
            if step.number == number:
                step.lost_with.append(cause)
                step.num_pushed += num_pushed
            if step.is_own:
                step.finish()  # a new worker is told everything
            elif len(step.lost_with) >= _MAX_ATTEMPTS:
                tried = "; ".join(step.lost_with)
                error = ReplicaDiedError(f"a step was given to {_MAX_ATTEMPTS} workers and each was lost: {tried}")
                step.finish(error=error)
            else:
                self._queue.appendleft(step)


def _steps_of(worker: GroupMember) -> list[QueuedStep]:
    return [call for call in worker.calls if isinstance(call, QueuedStep)]


def _later(earlier: Any, later: Any) -> Any:
    return earlier if later is None else later
