"""The workers of a parameter server on this machine, from the main program's side.

Owns their processes, the steps that wait and those that are under way, and what happens when a worker
is lost: its steps are given to others, and a new worker takes its place. Everything happens inside the
program's own calls; there is no thread.
"""

import select
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, final

from stratagem._clock import Clock
from stratagem.engine.queued.step import Step
from stratagem.errors import ReplicaDiedError
from stratagem.objects import per_replica
from stratagem.objects.functions import FunctionCache
from stratagem.processes.child import DONE, PRINTED
from stratagem.processes.launcher import ForkedChildren
from stratagem.processes.packing import pack_for
from stratagem.processes.registry import Registry

_DEPTH = 2  # steps that a worker has at a time: while it computes one, the next is there already
_SLICE_S = 0.1
_STOPPED_S = 2.0
_STATUS_WAIT_S = 2.0
_STOP_GRACE_S = 2.0
_MAX_ATTEMPTS = 3

Send = Callable[["Worker", Step], tuple[Callable[..., Any], tuple[Any, ...]]]


@final
class Worker:
    """One worker's process.

    Args:
        number: Its place: a new process in the place of a lost one has the same.
        registry: The names of distributed objects.
        timeout_s: How long to send something to one that does not take it.
    """

    def __init__(self, number: int, registry: Registry, timeout_s: float) -> None:
        self.number = number
        self.steps: deque[tuple[int, Step]] = deque()  # those that it has, with the number of the call
        self.num_calls = 0
        self.functions = FunctionCache(registry.__contains__)  # what it has been sent
        self.news: Any = None  # what it has not been told yet
        self.is_leaving, self.killed_because = False, ""
        self.stopped_since: float | None = None
        self.clock = Clock(_SLICE_S)
        self.last_news = self.clock.now_s()
        self._registry, self._timeout_s = registry, timeout_s
        self._children = ForkedChildren()
        self._children.begin(1)

    @property
    def is_started(self) -> bool:
        """Whether its process is there."""
        return hasattr(self, "wire")

    def start(self) -> None:
        """Waits for the process to be there."""
        ((self.process, self.wire),) = self._children.start(self._registry, self._timeout_s)
        self.last_news = self.clock.now_s()

    def send(self, function: Callable[..., Any], arguments: tuple[Any, ...], reference: Any = None) -> int:
        """Sends a call; its number comes back with the answer."""
        packed = pack_for("the workers", (function, arguments), reference or self._registry.reference)
        self.num_calls += 1
        self.wire.send_packed(packed)
        return self.num_calls

    def forget_functions(self) -> None:
        """Sends functions anew the next time."""
        self.functions = FunctionCache(self._registry.__contains__)

    def end(self, *, politely: bool) -> None:
        """Ends the process and gives back what it needed."""
        if self.is_started:
            if politely and not self.process.is_stopped:
                self.wire.shut()
                self.process.wait(_STOP_GRACE_S)
            if not self.process.wait(0.0):
                self.process.kill()
                self.process.wait(_STOP_GRACE_S)
            self.wire.close()
        self._children.release()

    def __str__(self) -> str:
        return f"worker {self.number} ({self.process})"


@final
class Crew:
    """All workers of one strategy.

    Args:
        registry: The names of distributed objects.
        stall_timeout_s: How long a step may take before its worker counts as stalled.
        max_restarts: How many workers may be replaced within `window_s`.
        window_s: In how many seconds.
        welcome: Gives a new worker all that it must know; it then waits for steps.
        mourn: Puts right what a lost worker left; returns which of its calls it was in, and how many pushes of
            that call it had made.
        message: What a worker is sent for a step.
    """

    def __init__(
        self,
        registry: Registry,
        *,
        stall_timeout_s: float,
        max_restarts: int,
        window_s: float,
        welcome: Callable[[Worker], None],
        mourn: Callable[[int], tuple[int, int]],
        message: Send,
    ) -> None:
        self.workers: dict[int, Worker] = {}
        self.queue: deque[Step] = deque()
        self.stall_timeout_s = stall_timeout_s
        self._registry = registry
        self._max_restarts, self._window_s = max_restarts, window_s
        self._welcome, self._mourn, self._message = welcome, mourn, message
        self._poll = select.poll()
        self._losses: list[tuple[float, str]] = []
        self._last_look = time.monotonic()

    # Workers

    def begin(self, numbers: Sequence[int]) -> None:
        """Orders processes, without waiting for them."""
        for number in numbers:
            self.workers[number] = Worker(number, self._registry, self.stall_timeout_s)

    def start(self) -> None:
        """Waits for workers that were ordered, and gives them all that they must know."""
        for worker in list(self.workers.values()):
            if not worker.is_started:
                worker.start()
                self._poll.register(worker.wire.fileno(), select.POLLIN)
                try:
                    self._welcome(worker)
                except (BrokenPipeError, ConnectionResetError):
                    self._lose(worker)

    def remove(self, numbers: Sequence[int]) -> None:
        """Lets workers finish what they have, then ends them."""
        leaving = [self.workers[number] for number in numbers]
        for worker in leaving:
            worker.is_leaving = True
        self.wait(lambda: not any(worker.steps for worker in leaving))
        for worker in leaving:
            if self.workers.get(worker.number) is worker:  # else it was lost meanwhile
                if worker.is_started:
                    self._poll.unregister(worker.wire.fileno())
                del self.workers[worker.number]
                worker.end(politely=True)

    def stop(self) -> None:
        """Ends all workers."""
        for worker in self.workers.values():
            if worker.is_started:
                worker.wire.shut()
        for worker in self.workers.values():
            worker.end(politely=not worker.steps)
        self.workers.clear()
        self.queue.clear()

    # Steps

    @property
    def num_under_way(self) -> int:
        return sum(len(worker.steps) for worker in self.workers.values())

    @property
    def has_room(self) -> bool:
        """Whether a step would be taken at once."""
        return not self.queue and any(len(worker.steps) < _DEPTH for worker in self.workers.values())

    def submit(self, step: Step) -> None:
        """Enters a step; a worker gets it as soon as one has room, with the arguments of this moment."""
        self.queue.append(step)
        self._hand_out()
        if not step.is_sent:
            step.args, step.kwargs = per_replica.copied((step.args, step.kwargs), self._registry.__contains__)

    def call(self, worker: Worker, function: Callable[..., Any], *arguments: Any, reference: Any = None) -> Step:
        """Calls a function of the library in a worker, without waiting."""
        step = Step(function, arguments, {}, is_own=True)
        number = worker.send(function, arguments, reference)
        if not worker.steps:
            worker.last_news = worker.clock.now_s()  # it was silent because it had nothing to do
        worker.steps.append((number, step))
        return step

    def ask_all(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """Calls a function of the library in every worker and waits."""
        steps = [self.call(worker, function, *arguments) for worker in list(self.workers.values())]
        self.wait(lambda: all(step.is_done for step in steps))
        for step in steps:
            step.raise_error()
        return [step.answer for step in steps]

    def wait(self, until: Callable[[], bool]) -> None:
        """Takes in what workers send until something is so."""
        self.attend(0.0)
        while not until():
            self.attend(_SLICE_S)

    def attend(self, timeout_s: float) -> None:
        """Takes in what workers have sent, hands out steps, and looks after workers that are silent."""
        self._hand_out()  # who waited for all steps has left some, and workers that have none send nothing
        events = self._poll.poll(1000 * timeout_s) if self.workers else []
        while events:
            ready = {descriptor for descriptor, _ in events}
            for worker in [each for each in self.workers.values() if each.wire.fileno() in ready]:
                if self.workers.get(worker.number) is worker:
                    self._take(worker)
            self._hand_out()
            events = self._poll.poll(0)
        now = time.monotonic()
        if now - self._last_look > _SLICE_S:
            self._last_look = now
            self._look_after(now)

    def _hand_out(self) -> None:
        """Gives steps to the workers that have the least."""
        for step in list(self.queue):
            if step.is_done:
                continue  # one before it has failed, which cancelled it
            staying = [each for each in self.workers.values() if not each.is_leaving]
            able = [each for each in staying if step.worker in (None, each.number)]
            worker = min(able, key=lambda each: len(each.steps), default=None)
            if worker is None or len(worker.steps) >= _DEPTH:
                if step.worker is None:
                    return
                continue
            self.queue.remove(step)
            news = worker.news
            try:
                number = worker.send(*self._message(worker, step))
            except (BrokenPipeError, ConnectionResetError, TimeoutError):
                self.queue.appendleft(step)
                self._lose(worker)
                return  # that has handed out what there is
            except BaseException as error:
                worker.news = news  # what it was not told, it is told next time
                worker.forget_functions()
                step.finish(error=error)
                if not isinstance(error, Exception):
                    raise
                continue
            if not worker.steps:
                worker.last_news = worker.clock.now_s()
            worker.steps.append((number, step))
            step.is_sent = True

    def _take(self, worker: Worker) -> None:
        worker.last_news = worker.clock.now_s()
        try:
            kind, *content = worker.wire.receive()
        except (EOFError, ConnectionResetError, TimeoutError):
            self._lose(worker)
            return
        if kind == PRINTED:
            show(worker.number, *content)
            return
        number, outcome = content
        for place, (own, step) in enumerate(worker.steps):
            if own == number:
                del worker.steps[place]
                step.done_by = worker.number
                step.finish(outcome) if kind == DONE else step.finish(failure=outcome)
                if step.is_own:
                    step.raise_error()
                if kind != DONE:
                    worker.forget_functions()  # perhaps it could not build what it was sent
                return

    def _look_after(self, now: float) -> None:
        for worker in list(self.workers.values()):
            if not worker.steps:
                worker.stopped_since = None
                continue
            if worker.process.has_ended():
                self._take_last(worker)
            elif worker.process.is_stopped:
                worker.stopped_since = worker.stopped_since or now
                if now - worker.stopped_since > _STOPPED_S:
                    self._lose(worker, f"was stopped for {_STOPPED_S:.1f} s")
            elif worker.clock.now_s() - worker.last_news > self.stall_timeout_s:
                worker.process.show_stack()
                self._lose(worker, f"did not answer for {self.stall_timeout_s:.1f} s; raise stall_timeout_s if it must")
            else:
                worker.stopped_since = None

    def look_after_holder(self, process: int, waited_s: float) -> None:
        """Ends a worker that keeps a lock for which the program has waited; it is lost when somebody attends."""
        for worker in self.workers.values() if waited_s > _STOPPED_S else ():
            if worker.is_started and worker.process.pid == process:
                is_stopped = worker.process.is_stopped
                if is_stopped or waited_s > self.stall_timeout_s:
                    worker.killed_because = f"{'was stopped' if is_stopped else 'kept a lock'} for {waited_s:.1f} s"
                    worker.process.kill()

    def _take_last(self, worker: Worker) -> None:
        """Takes in what a worker sent before its end; a process that it forked may keep its pipe open."""
        descriptor = worker.wire.fileno()
        only = select.poll()
        only.register(descriptor, select.POLLIN)
        while self.workers.get(worker.number) is worker and only.poll(0):
            self._take(worker)
        if self.workers.get(worker.number) is worker:
            self._lose(worker)

    def _lose(self, worker: Worker, why: str = "") -> None:
        """Gives the steps of a lost worker to others, and puts a new one in its place."""
        self._poll.unregister(worker.wire.fileno())
        why = why or worker.killed_because
        how, more = (why, "") if why else worker.process.how_it_ended(_STATUS_WAIT_S)
        worker.end(politely=False)
        cause = f"{worker} {how}{more}"
        call, num_pushed = self._mourn(worker.number)
        for number, step in reversed(worker.steps):
            if number == call:
                step.lost_with.append(cause)
                step.num_pushed += num_pushed
            if step.is_own:
                step.finish()  # a new worker is told everything
            elif len(step.lost_with) >= _MAX_ATTEMPTS:
                tried = "; ".join(step.lost_with)
                error = ReplicaDiedError(f"a step was given to {_MAX_ATTEMPTS} workers and each was lost: {tried}")
                step.finish(error=error)
            else:
                self.queue.appendleft(step)
        worker.steps.clear()
        del self.workers[worker.number]
        if not worker.is_leaving:
            self._replace(worker.number, cause)
        self._hand_out()

    def _replace(self, number: int, cause: str) -> None:
        now = time.monotonic()
        self._losses = [each for each in self._losses if now - each[0] <= self._window_s] + [(now, cause)]
        if len(self._losses) > self._max_restarts:
            causes = "; ".join(each for _, each in self._losses)
            raise ReplicaDiedError(
                f"gave up after {self._max_restarts} restarts in {self._window_s:.0f} s: {causes}. Raise max_restarts "
                f"if workers may be lost more often"
            )
        self.begin([number])
        self.start()


def show(worker: int, stream: str, text: str) -> None:
    """Shows what a worker has printed."""
    for line in text.split("\n"):
        print(f"[worker {worker}] {line}", file=sys.stderr if stream == "stderr" else sys.stdout)
