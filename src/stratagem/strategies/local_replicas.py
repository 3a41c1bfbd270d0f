"""Drives the replicas of one machine: this process as replica 0 and its children as the others.

Owns their life from the first scope to the close, and the course of one run: bring the children up
to date, call the function everywhere, collect, and choose the error that is shown. Where variables
live is decided by `distribution`; strategies only choose how these parts are put together.
"""

import atexit
import contextlib
import itertools
import os
import tempfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, final

import torch
from torch.utils import _pytree as pytree

from stratagem._caller import calling_line, warn_caller
from stratagem.collectives.shared_memory import SharedMemory
from stratagem.collectives.signals import PeerAborted, Signals
from stratagem.devices.device import LogicalDevice
from stratagem.devices.inventory import this_process
from stratagem.errors import NonFiniteGradientError, ReplicaError, StratagemError, StratagemWarning, StrategyError
from stratagem.replicas import values
from stratagem.replicas.functions import FunctionCache
from stratagem.replicas.group import Failure, Replica, ReplicaGroup, raise_first
from stratagem.replicas.heap import freed_memory_kept
from stratagem.replicas.interrupts import Interrupts
from stratagem.replicas.memory import Region
from stratagem.replicas.seat import seated
from stratagem.strategies import in_child
from stratagem.strategies.distribution import Distribution
from stratagem.strategies.replica_side import StrategyInReplica
from stratagem.strategies.runtime import Run, Runtime, Settings
from stratagem.strategies.stragglers import Stragglers

_MAX_NONFINITE_IN_A_ROW = 10
_keys = itertools.count(1)


@final
class LocalReplicas:
    """The replicas of one strategy on this machine.

    Args:
        owner: The strategy, whose name errors show.
        devices: Where the replicas compute.
        settings: What all replicas have in common.
        stall_timeout_s: How long replicas wait for another before it counts as stalled.
    """

    def __init__(
        self, owner: Any, devices: Sequence[LogicalDevice], settings: Settings, stall_timeout_s: float
    ) -> None:
        self.distribution = Distribution(self)
        self.key = next(_keys)
        self._owner = owner
        self._devices = tuple(devices)
        self._settings = settings
        self._group = ReplicaGroup(
            len(devices) - 1, registry=self.distribution.registry, stall_timeout_s=stall_timeout_s
        )
        self._functions = FunctionCache(self.distribution.registry.__contains__)
        self._started = contextlib.ExitStack()
        self._process = os.getpid()
        self._random_state: torch.Tensor | None = None
        self._stragglers = Stragglers()
        self._num_runs = 0
        self._num_nonfinite = 0
        self._unwanted: list[tuple[int, int]] = []
        self._join: tuple[Region, Region] | None = None  # what children are given, until they have it
        self.closed_at: str | None = None
        self.runtime: Runtime | None = None

    def begin(self) -> Runtime:
        """Takes what the replicas need and lets the fork server start, the first time; waits for nothing."""
        self.require_usable()
        if self.runtime is not None:
            return self.runtime
        size = len(self._devices)
        self._started.enter_context(this_process().in_use(f"{type(self._owner).__name__}()"))
        if self._devices[0].memory_limit_bytes is None:
            self._started.enter_context(freed_memory_kept())
        meeting = Region.create(Signals.num_bytes(size))
        scratch = Region.create(SharedMemory.num_bytes(size))
        self.runtime = Runtime(0, self._settings, meeting, scratch, self._owner)
        self.runtime.signals.reset()
        self.runtime.signals.attend = self._attend
        self.distribution.registry.add(0, self._owner)
        self._join = meeting, scratch
        _open.add(self)
        if size > 1:
            self._group.begin()
        return self.runtime

    def start(self) -> Runtime:
        """Starts the children, the first time: until then the program has built its model while torch loaded."""
        own = self.begin()
        if self._join is None:
            return own
        (meeting, scratch), self._join = self._join, None
        if len(self._devices) > 1:
            with self._or_end():
                self._group.start()
                self._group.call(
                    in_child.join,
                    [
                        (
                            self.key,
                            rank,
                            device,
                            self._settings,
                            meeting,
                            scratch,
                            StrategyInReplica(rank, self._devices),
                        )
                        for rank, device in enumerate(self._devices)
                        if rank
                    ],
                )
                self._group.collect()
                raise_first(None, self._group.failures())
        self._connect(own)
        return own

    def run(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Calls the function in every replica and joins what they return."""
        own = self.start()
        self._connect(own)
        self.distribution.bring_up_to_date(own)
        self._num_runs += 1
        counts = values.counts_of(args, kwargs)
        call = Run(self._num_runs, counts, self._new_seed(), self.distribution.changes(), own.copies.take_written())
        self._group.run_number = self._num_runs
        with Interrupts() as interrupts:
            self._send(call, function, args, kwargs)
            # A child that fails before it has begun to run cannot end the waits of the others itself.
            self._group.on_failure = own.signals.abort
            try:
                error, result = self._run_here(own, interrupts, call, function, args, kwargs)
                if error is None:
                    # While the others finish: the state is the same in all, and after a failure it is forgotten.
                    self.distribution.note_state()
                    own.copies.note_state()
                    self._random_state = torch.get_rng_state()
                answers = self._collect(interrupts)
            finally:
                self._group.on_failure = _nothing
            failures = self._causes()
            if error is not None or failures or own.signals.aborted:
                self._forget_results(answers)
                self.forget_functions()
                own.signals.reset()
                self._disconnect(own)
                self.distribution.forget_state(own)
                raise_first(error, failures)
            if own.unsettled or any(answer.unsettled for answer in answers):
                self._publish_written(own)
        try:
            self._judge_gradients(own)
            self._stragglers.note([own.busy_s, *(answer.busy_s for answer in answers)], counts)
            results = [result, *(answer.result for answer in answers)]
            return values.join_results(results, counts, self._fetch, self._forget)
        except BaseException:
            self._forget_results(answers)
            raise

    def _forget_results(self, answers: Sequence[Any]) -> None:
        """Lets replicas drop what they keep for results that nobody will get."""
        for rank, answer in enumerate(answers, start=1):
            for leaf in pytree.tree_leaves(answer.result if isinstance(answer, in_child.Answer) else None):
                if isinstance(leaf, values.Remote):
                    self._forget(rank, leaf.number)

    def _publish_written(self, own: Runtime) -> None:
        """Lets all replicas make known what they wrote to after their last update."""
        with self._or_end():
            self._group.call_all(in_child.publish_written, self.key)
            own.publish_written()
            self._group.collect()
            raise_first(None, self._causes())

    @contextlib.contextmanager
    def _or_end(self) -> Iterator[None]:
        """A block after whose failure the replicas cannot go on."""
        try:
            yield
        except _Fatal as fatal:
            self.end(fatal.error)
            raise fatal.error from None
        except BaseException as error:
            self.end(error)
            raise

    def _send(self, call: Run, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Sends every child its part of a run; what cannot be sent is an error before anything runs."""
        prepared = self._functions.prepare(function)
        unwanted, self._unwanted = self._unwanted, []
        try:
            self._group.call(
                in_child.run,
                [
                    (
                        *(
                            self.key,
                            call,
                            prepared,
                            values.select(args, rank, sent=True),
                            values.select(kwargs, rank, sent=True),
                        ),
                        [number for owner, number in unwanted if owner == rank],
                    )
                    for rank in range(1, len(self._devices))
                ],
                self.distribution.reference_in_run,
            )
        except BaseException as error:
            if any(each.busy for each in self._group.replicas):  # some have it, or a half of it
                self.end(error)
            self.forget_functions()
            self._unwanted += unwanted
            raise

    def forget_functions(self) -> None:
        """Sends functions anew the next time: something that they used is gone."""
        self._functions = FunctionCache(self.distribution.registry.__contains__)

    def ask_children(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """Calls a function of the library in every child."""
        if len(self._devices) == 1:
            return []
        self._group.call_all(function, *arguments)
        answers = self._collect()
        raise_first(None, self._group.failures())
        return answers

    def close(self) -> None:
        """Ends the children; distributed objects become plain ones, with all of their state."""
        if self.closed_at is None and os.getpid() == self._process:
            if self.runtime is not None:
                with contextlib.suppress(Exception):  # what a dead child had is lost
                    self.distribution.bring_state_home(self.runtime)
            self.end()

    def end(self, cause: BaseException | None = None) -> None:
        """Ends the children at once; nothing can be run any more."""
        because = f" because {type(cause).__name__}: {cause}" if isinstance(cause, StratagemError) else ""
        self.closed_at = self.closed_at or calling_line() + because
        _open.discard(self)
        self._group.stop()
        if self.runtime is not None:
            self.runtime.close()
            self.distribution.let_go()
        self._started.close()

    def require_usable(self) -> None:
        """Refuses use after the end, and in a process that was forked from the controller."""
        name = type(self._owner).__name__
        if self.closed_at is not None:
            raise StrategyError(f"{name} was closed at {self.closed_at}; make a new one")
        if os.getpid() != self._process:
            raise StrategyError(
                f"{name} belongs to process {self._process} and cannot be used in {os.getpid()}, which was forked "
                f"from it; use it in the main program only"
            )

    def _connect(self, own: Runtime) -> None:
        """Connects the replicas, where they do not share all memory and are not connected yet."""
        link = own.copies.link
        if link is None or link.connected:
            return
        with self._or_end(), contextlib.ExitStack() as folders:
            path = folders.enter_context(tempfile.TemporaryDirectory(prefix="stratagem-")) + "/store"
            self._group.call_all(in_child.connect, self.key, path)
            with contextlib.suppress(PeerAborted):  # then a child says why
                link.connect(path)
            self._group.collect()
            raise_first(None, self._causes())
            if own.device.type != "cpu":
                # NCCL looks into the file as long as it lives. Else it goes at once: a program
                # that is killed must not leave it behind.
                self._started.push(folders.pop_all())

    def _disconnect(self, own: Runtime) -> None:
        """Ends sums that some replicas have begun and others never will, after a run that failed."""
        link = own.copies.link
        if link is not None and link.connected:
            with contextlib.suppress(ReplicaError):  # the error of the run was the first
                self._group.call_all(in_child.disconnect, self.key)
                link.disconnect()
                self._collect()

    def _causes(self) -> list[tuple[Replica, Failure]]:
        """What went wrong in the children, without those that only ended because another failed."""
        return [each for each in self._group.failures() if not isinstance(each[1][0], PeerAborted)]

    def _run_here(
        self,
        own: Runtime,
        interrupts: Interrupts,
        call: Run,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> tuple[BaseException | None, Any]:
        try:
            with interrupts.allowed(), seated(self._devices[0]) if len(self._devices) > 1 else contextlib.nullcontext():
                return None, own.execute(call, function, values.select(args, 0), values.select(kwargs, 0))
        except PeerAborted:
            return None, None
        except _Fatal as fatal:
            self.end(fatal.error)
            raise fatal.error from None
        except BaseException as error:
            own.signals.abort()  # also if it came before the function began
            return error, None

    def _collect(self, interrupts: Interrupts | None = None) -> list[Any]:
        with self._or_end(), interrupts.allowed() if interrupts is not None else contextlib.nullcontext():
            return self._group.collect()

    def _attend(self, waited_s: float, missing: list[int]) -> None:
        """While replica 0 waits: take in news, and see to it that those who are missing still live."""
        try:
            self._group.attend()
            if waited_s > self._group.stall_timeout_s:
                self._group.report_stall([self._group.replicas[rank - 1] for rank in missing])
        except StrategyError:
            raise
        except Exception as error:
            raise _Fatal(error) from error

    def _new_seed(self) -> int | None:
        """A seed for the other replicas whenever the program has drawn or seeded random numbers."""
        state = torch.get_rng_state()
        if self._random_state is not None and torch.equal(state, self._random_state):
            return None
        return zlib.crc32(state.numpy().tobytes())

    def _forget(self, rank: int, number: int) -> None:
        self._unwanted.append((rank, number))

    def _fetch(self, rank: int, number: int) -> Any:
        self.require_usable()
        try:
            return self._group.ask(self._group.replicas[rank - 1], in_child.fetch, number)
        except (KeyboardInterrupt, ReplicaError) as error:
            self.end(error)
            raise

    def _judge_gradients(self, own: Runtime) -> None:
        skipped = own.take_skipped()
        if not skipped:
            self._num_nonfinite = 0 if own.updated else self._num_nonfinite
            return
        self._num_nonfinite += 1
        where = "; ".join(f"replica {rank}, first in {label!r}" for rank, label in skipped)
        text = f"non-finite gradient in {where}, run {self._num_runs}; update skipped"
        if self._settings.on_nonfinite == "raise" or self._num_nonfinite >= _MAX_NONFINITE_IN_A_ROW:
            raise NonFiniteGradientError(
                f"{text}. It was number {self._num_nonfinite} in a row; lower the learning rate, clip gradients, or "
                f"look at the data of that run"
            )
        warn_caller(f"{text} ({self._num_nonfinite} of {_MAX_NONFINITE_IN_A_ROW} allowed in a row)", StratagemWarning)


def _nothing() -> None:
    """Outside runs nobody waits for a child but the one who asked it."""


class _Fatal(BaseException):
    """Carries the news of a dead or stalled replica past the user's `except Exception`."""

    def __init__(self, error: Exception) -> None:
        self.error = error


_open: set[LocalReplicas] = set()


@atexit.register
def _close_all() -> None:
    for replicas in list(_open):
        replicas.close()
