"""Drives the workers of a parameter server on this machine: what they are given, and the course of a step.

Variables lie in shared memory, where workers update
them; the main program's tensors are views of the same memory.
"""

import contextlib
import dataclasses
import functools
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, final

import torch
from torch.nn.modules.module import register_module_forward_pre_hook

from stratagem import _tree
from stratagem.devices.device import LogicalDevice
from stratagem.devices.inventory import this_process
from stratagem.engine import child_calls, context
from stratagem.engine.distribution import GivenTensors
from stratagem.engine.lifecycle import Driver, Resources, weak_method
from stratagem.engine.notices import NonFinite, about_schedule
from stratagem.engine.queued import worker_calls
from stratagem.engine.queued.main_program import MainProgram
from stratagem.engine.queued.pending_results import PendingResult, joined
from stratagem.engine.queued.scheduler import Message, Scheduler, WorkerRecord
from stratagem.engine.queued.step import QueuedStep
from stratagem.engine.queued.worker import StepAnswer, StepCall, WorkerSettings
from stratagem.engine.random_numbers import RandomNumbers
from stratagem.errors import StratagemError, StrategyError
from stratagem.objects import per_replica
from stratagem.objects.step_arguments import StepArguments
from stratagem.objects.surroundings import surroundings
from stratagem.objects.tracking import Tracker
from stratagem.parameters.local.gradient_slots import PER_RUN, Round
from stratagem.parameters.local.shared_variables import SharedMemoryOfShards
from stratagem.placement import scopes
from stratagem.processes.group import GroupMember
from stratagem.processes.losses import SLICE_S, Replace


@final
class ParameterWorkers(Driver):
    """The workers of one strategy, and the variables that they share.

    Args:
        owner: The strategy, whose name errors show.
        devices: Where the workers compute, one for each.
        num_shards: Over how many shards variables are spread.
        settings: What all workers have in common.
        stall_timeout_s: How long a step may take before its worker counts as stalled.
        max_restarts: How many workers may be replaced within `restart_window_s`.
        restart_window_s: In how many seconds.
        in_worker: Makes what the strategy is in a worker, given its device.
    """

    def __init__(
        self,
        owner: Any,
        devices: Sequence[LogicalDevice],
        num_shards: int,
        settings: WorkerSettings,
        stall_timeout_s: float,
        max_restarts: int,
        restart_window_s: float,
        in_worker: Callable[[LogicalDevice], Any],
    ) -> None:
        super().__init__(owner)
        self._in_worker = in_worker
        self.main: MainProgram | None = None
        self._devices = list(devices)
        self._num_shards = num_shards
        self._settings = settings
        self._random_numbers = RandomNumbers(0, apart=False)
        self._nonfinite = NonFinite(settings.on_nonfinite)
        self._is_told_of_schedule = False
        self.num_runs = 0
        self._steps: list[QueuedStep] = []  # whose failures have not been looked for
        self._num_parts: dict[Any, int] = {}  # how many values a function returned, by its code
        # Calls that new workers get as well, with how many there are then.
        self.given: list[tuple[Callable[..., Any], tuple[Any, ...]]] = []
        self._is_started = False
        self.scheduler = Scheduler(
            self.distribution.registry,
            self.distribution.steady,
            stall_timeout_s=stall_timeout_s,
            policy=Replace(max_restarts, restart_window_s),
            # So that a strategy that the program drops can go.
            introduce=weak_method(self._introduce),
            recover=weak_method(self._recover),
            message=weak_method(self._message),
        )
        self._hold(WorkerResources(self.scheduler, self.distribution.tracker, self._started))

    @property
    def board(self) -> Any:
        """The numbers that all workers see."""
        return self.begin().variables.board

    # Life

    def begin(self) -> MainProgram:
        self.require_usable()
        if self.main is None:
            memory = SharedMemoryOfShards.create(self._num_shards, torn_pushes=self._settings.torn_pushes)
            memory.locks.while_waiting = self.scheduler.group.kill_holder
            slots = len(self._devices) if self._settings.consistency.shares_steps else 0
            self.main = MainProgram(memory, self.distribution, self, num_slots=slots)
            self._started.callback(self.main.close)
            context.readers.add(self)
            hook = register_module_forward_pre_hook(functools.partial(_settle_before, weakref.ref(self)))
            self._started.callback(hook.remove)
            self.distribution.registry.add(0, self.strategy)
            self.scheduler.group.begin(range(len(self._devices)))
        return self.main

    def start(self) -> MainProgram:
        main = self.begin()
        if not self._is_started:
            self._is_started = True
            with self._or_end():
                self.scheduler.group.start()
        return main

    def resize(self, devices: Sequence[LogicalDevice]) -> None:
        """Adds workers, or lets some go when they have done what they have.

        Args:
            devices: One for each worker that there shall be; those that stay keep theirs.
        """
        before = len(self._devices)
        self._devices += devices[before:]
        with self.attending():
            if self.main is not None:
                self.scheduler.group.begin(range(before, len(devices)))
                self.scheduler.group.start() if self._is_started else None
                self.scheduler.remove(range(len(devices), before))
        del self._devices[len(devices) :]

    def tell_others(self, error: BaseException) -> None:
        """The program has failed: what is under way is not waited for, and nobody is told what else went wrong."""
        if self.is_home:  # a fork may fail by itself
            self.scheduler.stop()
            self._steps.clear()

    def _finish(self) -> None:
        if self._is_started:
            self.settle()
        self.raise_failures()

    def _give_up(self, _: BaseException | None) -> None:
        self.scheduler.cancel_all(
            lambda: StrategyError(f"{self._name} was closed at {self.closed_at} before this step was done")
        )
        for record in list(self.scheduler.records.values()):
            record.captured.forget()

    # What `distribution` needs

    def make_equal(self, *_: Any) -> None:
        """Values lie once: they are equal."""

    @property
    def are_at_work(self) -> bool:
        return bool(self.scheduler.num_under_way)

    def ask_children(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """Calls a function of the library in every worker, when none has a step; waits for the answers."""
        with self._or_end():
            self.start()
            self.settle()
            return self.scheduler.ask_all(function, *arguments)

    # Steps

    def run(self, function: Callable[..., Any], arguments: StepArguments) -> list[Any]:
        """Gives each step to a worker with room, or to all where they share a step; waits for room only."""
        with self.in_turn("strategy.run()"), scopes.recording():
            return [self._run(function, *arguments.of(step)) for step in range(len(arguments))]

    def _run(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.raise_failures()
        self.prepare()
        counts = per_replica.counts_of(_tree.leaves((args, kwargs)))
        if self._settings.consistency.shares_steps:
            return self._run_round(function, args, kwargs, counts)
        step = self.new_step(function, per_replica.select(args, 0, sent=True), per_replica.select(kwargs, 0, sent=True))
        with self.attending():
            self._wait_giving_way(lambda: self.scheduler.has_room)
            self.enter(step)
        self.raise_failures()
        code = None if hasattr(function, "__wrapped__") else getattr(function, "__code__", None)  # a decorator's own

        def result() -> Any:
            made = joined([self.wait_for(step)], counts)
            if code is not None and isinstance(made, tuple):  # a list may be as long as the batch
                self._num_parts[code] = len(made)
            return made

        return PendingResult(result, [step], gives_parts=True, num_parts=self._num_parts.get(code))

    def _run_round(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        counts: tuple[int, ...] | None,
    ) -> Any:
        """Gives each worker its part of a step that all share, and returns when enough are done.

        Args:
            function: What is called.
            args: Its arguments, with a part for each worker.
            kwargs: Its keyword arguments, likewise.
            counts: How many examples each worker has.
        Returns:
            The results of those that were in time.
        """
        group = self.scheduler.group
        with_data = {
            place: number for place, number in enumerate(sorted(group.members)) if counts is None or counts[place] > 0
        }
        needed = self._settings.consistency.num_needed(len(with_data))
        first = self.num_runs * PER_RUN

        def has_room(number: int) -> bool:
            return group.has_room(group.members[number])

        with self.attending():
            # One that is late by two steps would be late again: its part is dropped now.
            self.scheduler.wait(lambda: sum(map(has_room, with_data.values())) >= needed)
            steps = {}
            for place, number in with_data.items():
                if not has_room(number):
                    self.board.num_dropped[number] += 1
                else:
                    weight = counts[place] if counts else 1
                    own = Round(first, needed, weight, weight / (sum(counts) if counts else len(with_data)))
                    parts = per_replica.load_deferred(per_replica.select((args, kwargs), place, sent=True))
                    steps[place] = self.new_step(function, *parts, own_round=own, worker=number)
                    self.enter(steps[place])
            every = list(steps.values())
            self.scheduler.wait(
                lambda: sum(each.is_done for each in every) >= needed or any(each.has_failed for each in every)
            )
        if any(each.has_failed for each in every):
            self.board.closed_round = first + PER_RUN - 1  # those who wait for it go on
        done = {place: step for place, step in steps.items() if step.is_done}
        for step in done.values():
            if step.has_failed:
                step.raise_error()
        self.raise_failures()
        own_counts = tuple(counts[place] for place in done) if counts else None
        return joined([self.result_of(step) for step in done.values()], own_counts)

    def prepare(self) -> None:
        """Brings workers up to date with what the program has made and changed since the last step."""
        main = self.start()
        main.note_pending()
        self.distribution.bring_up_to_date(main)
        main.bring_up_to_date()
        main.variables.publish_written()
        self.num_runs += 1
        seed, changes = self._random_numbers.new_seed(), self.distribution.changes()
        self._random_numbers.note_run()
        if changes or not self.distribution.steady.is_so:
            self.distribution.look_after_run(several=False)
            self.distribution.note_state()
        for record in self.scheduler.records.values() if changes or seed is not None else ():
            record.tell(changes, seed)

    def enter(self, step: QueuedStep) -> None:
        """Enters a step into the queue; what cannot be sent is an error now."""
        self.scheduler.submit(step)
        if step.is_done and not step.is_sent:
            step.raise_error()
        self._steps.append(step)

    def new_step(
        self, function: Any, args: Any, kwargs: Any, *, own_round: Round | None = None, worker: int | None = None
    ) -> QueuedStep:
        """A step that can be entered, at the settings of this moment."""
        told = tuple(surroundings()), own_round
        return QueuedStep(function, args, kwargs, told=told, worker=worker, run_number=self.num_runs)

    def attend(self, *, wait: bool = False) -> None:
        """Takes in what workers have sent; waits a moment for something if told to."""
        with self.attending():
            self.scheduler.poll(SLICE_S if wait else 0.0)

    def wait_for(self, step: QueuedStep) -> Any:
        """The result of a step; its error, if it has failed."""
        if not step.is_done:  # else it can be read after the end as well
            with self.attending():
                self._wait_giving_way(lambda: step.is_done)
        if step.has_failed:
            self._raise(step)
        return self.result_of(step)

    def _wait_giving_way(self, until: Callable[[], bool]) -> None:
        """Waits until something is so; other threads may use the workers meanwhile, and close them."""

        def is_so() -> bool:
            if until():
                return True
            self.turn.give_way()
            if not until():
                self.require_usable()
            return until()

        self.scheduler.wait(is_so)

    def before_read(self, module: torch.nn.Module) -> None:
        """Waits for the steps that change a distributed module."""
        if self.scheduler.num_under_way and module in self.distribution.registry and self.is_home:
            self.settle()

    def settle(self) -> None:
        """Waits for all steps that workers have; none is handed out meanwhile."""
        with self.attending():
            self.scheduler.drain()

    def finish_all(self) -> None:
        """Waits for all steps, also for those that no worker has been given yet; raises what one of them raised."""
        if self._is_started:
            with self.attending():
                self._wait_giving_way(lambda: not self.scheduler.num_under_way and self.scheduler.is_empty)
        self.raise_failures()

    def result_of(self, step: QueuedStep) -> Any:
        return step.answer.result

    @contextlib.contextmanager
    def attending(self) -> Iterator[None]:
        """A block that waits for workers; errors of the library in it end the strategy."""
        with self.in_turn("a wait for workers"), scopes.recording():
            self.require_usable()
            try:
                yield
            except StrategyError:
                raise
            except (StratagemError, KeyboardInterrupt) as error:
                self.end(error)
                raise

    def raise_failures(self) -> None:
        """Raises the first failure of a step that nobody has been told of, and judges gradients that were skipped."""
        finished = [step for step in self._steps if step.is_done]
        if not finished:
            return
        self._steps = [step for step in self._steps if not step.is_done]
        failed = [step for step in finished if step.has_failed and not step.is_reported]
        for step in failed[1:]:
            step.is_reported = True  # one failure is told once, and is most often that of all
        if failed:
            self._raise(failed[0])
        self.judge(finished)

    def judge(self, finished: Sequence[QueuedStep]) -> None:
        """Warns of steps whose gradients were not finite, or raises; warns of schedules that are a worker's own."""
        for step in finished:
            if isinstance(step.answer, StepAnswer):
                if step.answer.scheduled and not self._is_told_of_schedule and len(self.scheduler.workers) > 1:
                    self._is_told_of_schedule = True
                    about_schedule(step.answer.scheduled)
                skipped = [(step.done_by, step.answer.skipped)] if step.answer.skipped else []
                self._nonfinite.judge(skipped, updated=step.answer.updated, run_number=step.run_number)

    def _raise(self, step: QueuedStep) -> None:
        # What its worker did of what it was told is not known: all are told everything.
        if self.main is not None:
            self.distribution.forget_state(self.main)
        step.raise_error()

    # What the scheduler asks

    def _message(self, worker: GroupMember, record: WorkerRecord, step: QueuedStep) -> Message:
        surroundings, own_round = step.told
        changes, seed = record.take()
        call = StepCall(
            worker.num_calls + 1, seed, changes, surroundings, self.board.version, step.num_pushed, own_round
        )
        delivery = record.captured.prepare(step.function, step.args, tuple(step.kwargs.values()), changes)
        arguments = self.key, call, step.function, step.args, step.kwargs, delivery
        given = {id(each) for each in _tree.leaves((step.args, step.kwargs)) if isinstance(each, torch.Tensor)}
        reference = functools.partial(self.distribution.reference_in_run, given=lambda: GivenTensors(given, given))
        return worker_calls.run, arguments, record.captured.referring(reference)

    def _recover(self, worker: int) -> tuple[int, int]:
        return self.begin().recover(worker)

    def _introduce(self, worker: GroupMember, record: WorkerRecord) -> None:
        """Gives a new worker all that the others have."""
        record.seed = torch.initial_seed() % 2**32
        device = self._devices[worker.number % len(self._devices)]
        main, registry = self.begin(), self.distribution.registry
        main.variables.board.call[worker.number] = 0  # who had its place before counted its own
        arguments = self.key, worker.number, device, self._settings, main.variables.memory
        strategy = self._in_worker(device)
        self.scheduler.call(worker, worker_calls.join, *arguments, strategy, this_process().configured())
        self._give_everything(worker, main)
        for function, given in self.given:
            self.scheduler.call(worker, function, len(self._devices), *given, reference=registry.reference)

    def _give_everything(self, worker: GroupMember, main: MainProgram) -> None:
        """Gives a new worker the variables and objects that the others have, as they are now."""
        registry, strategy, key = self.distribution.registry, self.strategy, self.key

        def reference(obj: Any) -> int | None:
            return registry.reference(obj) if isinstance(obj, torch.Tensor) or obj is strategy else None

        if main.copies.placed:
            self.scheduler.call(worker, child_calls.adopt_variables, key, main.copies.placed)
        objects = {name: obj for name, obj in registry.live().items() if name and not isinstance(obj, torch.Tensor)}
        if objects:
            self.scheduler.call(worker, child_calls.adopt_objects, key, objects, reference=reference)
        for name, (memory, slots) in main.states().items():
            self.scheduler.call(worker, worker_calls.take_state, key, name, memory, slots)


@final
@dataclasses.dataclass
class WorkerResources(Resources):
    """The workers, and what their main program holds.

    Args:
        scheduler: The workers.
        tracker: What waits to be distributed.
        started: What else lasts until the end: memory, and the main program's optimizers, which get their state back.
    """

    scheduler: Scheduler
    tracker: Tracker
    started: contextlib.ExitStack

    def end(self) -> None:
        self.scheduler.stop()
        self.started.close()
        self.tracker.let_go()


def _settle_before(reference: "weakref.ref[ParameterWorkers]", module: torch.nn.Module, _: Any) -> None:
    """Before the main program calls a distributed model, it waits for the steps that change it."""
    workers = reference()
    if workers is not None and not context.state.replicas:
        workers.before_read(module)
