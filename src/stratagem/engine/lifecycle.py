"""The life of the processes of one strategy, from the first scope to the close.

Owns what lockstep and queued processes have in common: the contract that strategies use, when a strategy
can be used, and the ways in which it ends: closed, failed, dropped by the program, at the program's exit.
"""

import atexit
import contextlib
import dataclasses
import itertools
import os
import sys
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar, final

import torch

from stratagem._caller import calling_line
from stratagem._checks import require_folder
from stratagem._turns import Turn
from stratagem.devices.inventory import this_process
from stratagem.engine import backward, child_calls
from stratagem.engine.distribution import Distribution, Receivers
from stratagem.engine.machines import Alone, Workers
from stratagem.engine.replica import Replica
from stratagem.errors import StrategyError, in_words
from stratagem.objects.step_arguments import StepArguments
from stratagem.objects.tracking import Tracker
from stratagem.placement.residence import Tenant
from stratagem.processes.group import ChildGroup
from stratagem.processes.losses import STOP_GRACE_S, Fatal, raise_first
from stratagem.processes.registry import Registry
from stratagem.variables.slices import SplitUpdate

_keys = itertools.count(1)


class Resources(ABC):
    """What the processes of one strategy hold until they end, and how it is given back.

    Nothing here leads to the strategy or to the program's objects: so a strategy that the program drops
    without closing it can go, and its processes go with it.
    """

    @abstractmethod
    def end(self) -> None:
        """Ends the processes at once; distributed objects become plain ones."""

    def bring_state_home(self) -> None:  # noqa: B027  # most have it at home
        """Gives the program's objects the state that processes have."""


class Driver(Receivers, ABC):
    """Drives the processes of one strategy.

    Args:
        owner: The strategy, whose name errors show; it is not kept alive.
    """

    def __init__(self, owner: Any) -> None:
        require_folder()
        self.distribution = Distribution(self)
        self.key = next(_keys)
        self.closed_at: str | None = None
        self._owner_ref = weakref.ref(owner)
        self._name = type(owner).__name__
        self._process = os.getpid()
        self._started = contextlib.ExitStack()  # what lasts until the end
        self.tenant = Tenant()
        self._started.callback(self.tenant.end)
        self.turn = Turn()
        _open.add(self)
        backward.install()

    def _hold(self, resources: Resources) -> None:
        """Takes what has to end, also if the program drops the strategy without closing it."""
        self._resources = resources
        self._started.enter_context(this_process().in_use(f"{self._name}()"))
        self._ending = weakref.finalize(self, _end_dropped, resources, self._process)
        self._ending.atexit = False  # `_close_all` is sooner

    @property
    def strategy(self) -> Any:
        """The strategy: alive in all that it does, and in results that wait to be fetched."""
        return self._owner_ref()

    @property
    def is_home(self) -> bool:
        """Whether this is the process that made the strategy, and not one that was forked from it."""
        return os.getpid() == self._process

    # What the strategy needs, besides what `distribution` does (`Receivers`)

    @abstractmethod
    def begin(self) -> object:
        """Takes what the processes need and orders them, the first time; waits for nothing."""

    @abstractmethod
    def start(self) -> object:
        """Waits for the processes, the first time: until then the program has built its model while torch loaded."""

    @abstractmethod
    def run(self, function: Callable[..., Any], arguments: StepArguments) -> list[Any]:
        """Runs a function of the program in the processes, for some steps; what came of each, of the first at least."""

    @abstractmethod
    def tell_others(self, error: BaseException) -> None:
        """The program has failed: whoever waits for it, or whom it waits for, is told."""

    @property
    def variables_on(self) -> torch.device:
        """Where the main program has its variables."""
        return torch.device("cpu")

    def bring_variables(self) -> None:
        """Brings what was made in a scope, and is not given out yet, to where the main program has its variables."""
        if self.variables_on.type != "cpu":
            with self.in_turn("strategy.scope()"):
                self.distribution.bring_pending(self.variables_on)

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        """A block around runs that leave every replica its own gradients."""
        raise StrategyError(
            f"no_sync() of {self._name} was entered in the main program, but each run goes to whichever worker is "
            f"free, so gradients of several runs would not be added up; add up gradients inside the function of one "
            f"run"
        )

    def with_workers(self) -> contextlib.AbstractContextManager[None]:
        """A block after whose failure other machines, if there are any, cannot go on."""
        return contextlib.nullcontext()

    def in_turn(
        self, what: str, *, refusal: str = "", timeout_s: float | None = None
    ) -> contextlib.AbstractContextManager[bool]:
        """A block in which no other thread uses the processes.

        Args:
            what: What is done in it.
            refusal: Why another thread is not waited for, if so, and what to do.
            timeout_s: After which time the block begins all the same.
        """
        # After a fork, whoever had the turn is not there any more; nothing can be done there but to refuse.
        if not self.is_home:
            return contextlib.nullcontext(True)
        return self.turn.taken(what, refusal=refusal, timeout_s=timeout_s)

    # How it ends

    def require_usable(self) -> None:
        """Refuses use after the end, and in a process that was forked from the main program."""
        if self.closed_at is not None:
            raise StrategyError(f"{self._name} was closed at {self.closed_at}; make a new one")
        if not self.is_home:
            raise StrategyError(
                f"{self._name} belongs to process {self._process} and cannot be used in {os.getpid()}, which was "
                f"forked from it; use it in the main program only"
            )

    def close(self) -> None:
        """Finishes what is under way and ends the processes; distributed objects become plain, with all their state."""
        if not self.is_home:
            return
        with self.in_turn("strategy.close()"):
            if self.closed_at is None:
                try:
                    self._finish()
                finally:
                    self.end()

    def drop(self) -> None:
        """Ends the processes of a strategy that nobody uses any more.

        The garbage collector may notice that in any thread, also in one that somebody waits for in a turn of theirs.
        """
        if self.is_home and self.closed_at is None:
            try:
                self._resources.bring_state_home()
            finally:
                self.end()

    def end(self, cause: BaseException | None = None) -> None:
        """Ends the processes at once; nothing can be run any more."""
        because = "" if cause is None else f" because {in_words(cause)}"
        if isinstance(cause, KeyboardInterrupt):
            because = " by Ctrl-C"
            if self.closed_at is None:
                cause.add_note(f"{self._name} was closed, since its replicas were not between two runs; make a new one")
        self.closed_at = self.closed_at or calling_line() + because
        _open.discard(self)
        self._ending.detach()
        self._give_up(cause)
        self.distribution.let_go()
        if self.is_home:
            self._resources.end()

    @abstractmethod
    def _finish(self) -> None:
        """Does what is left to do before a close."""

    @abstractmethod
    def _give_up(self, cause: BaseException | None) -> None:
        """Tells those who wait that nothing more will come."""

    def _or_end(self) -> "_OrEnd":
        """A block after whose failure the processes cannot go on."""
        return _OrEnd(self)


@final
class _OrEnd:
    """The block of `Driver._or_end`."""

    __slots__ = ("_driver",)

    def __init__(self, driver: Driver) -> None:
        self._driver = driver

    def __enter__(self) -> None:
        """Nothing has to be done before."""

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        if isinstance(error, Fatal):
            self._driver.end(error.error)
            raise error.error from None
        if error is not None:
            self._driver.end(error)


P = ParamSpec("P")
R = TypeVar("R")


def weak_method(method: Callable[P, R]) -> Callable[P, R]:
    """A method that does not keep its object alive, and is called only while that lives."""
    reference = weakref.WeakMethod(method)

    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if (found := reference()) is None:
            raise ReferenceError(f"the object of {method_name} is gone")
        return found(*args, **kwargs)

    method_name = method.__qualname__
    return call


def _end_dropped(resources: Resources, process: int) -> None:
    if os.getpid() == process:
        try:
            resources.bring_state_home()
        finally:
            resources.end()


_open: "weakref.WeakSet[Driver]" = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    error = getattr(sys, "last_value", None)  # what has ended the program, if anything
    for driver in list(_open):
        try:
            # A thread that nobody waits for may be in a run.
            with driver.in_turn("the end of the program", timeout_s=STOP_GRACE_S) as is_alone:
                if error is not None:
                    driver.tell_others(error)
                if is_alone:
                    driver.close()
                else:
                    driver.end(error)
        except Exception as failure:  # of a step that nobody has looked at
            sys.excepthook(type(failure), failure, failure.__traceback__)


@final
@dataclasses.dataclass
class ReplicaResources(Resources):
    """The children, the memory and the distributed objects of replicas in lockstep.

    Args:
        key: By which the children know the strategy.
        group: The children.
        registry: The names of the distributed objects.
        tracker: What waits to be distributed.
        workers: Those of other machines.
        started: What else lasts until the end.
        runtime: Replica 0, once there is one.
    """

    key: int
    group: ChildGroup
    registry: Registry
    tracker: Tracker
    workers: Workers | Alone
    started: contextlib.ExitStack
    runtime: Replica | None = None

    def bring_state_home(self) -> None:
        """Gives the program's optimizers what replicas have made outside of the memory that all share."""
        updates = self.runtime.updates if self.runtime is not None else {}
        with contextlib.suppress(Exception):  # what a dead child had is lost
            for name, update in updates.items():
                with contextlib.suppress(ReferenceError):  # the program has dropped the optimizer
                    self._bring_home(name, update)

    def _bring_home(self, name: int, update: SplitUpdate) -> None:
        slots = update.new_slots()
        if slots is not None:
            self.group.call_all(child_calls.take_slots, self.key, name, slots, False)
            self.group.collect(closing=True)
            raise_first(None, self.group.failures())
            update.take_slots(slots)

    def end(self) -> None:
        self.group.stop()
        if self.runtime is not None:
            self.runtime.close()
        self.tracker.let_go()
        for obj in self.registry.live().values():
            if isinstance(obj, torch.optim.Optimizer):
                for name in ("step", "state_dict", "load_state_dict"):
                    obj.__dict__.pop(name, None)
        self.workers.close()
        self.started.close()
