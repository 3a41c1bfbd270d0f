"""Knows where the running code is: in which strategy's scope, in which replica's run.

Owns the stacks of open scopes and runs, and the public questions about them.
"""

import threading
import weakref
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Protocol, final

import torch

from stratagem import _tree
from stratagem.collectives.collective import Collective
from stratagem.errors import StrategyError
from stratagem.objects.per_replica import PerReplica

if TYPE_CHECKING:
    from stratagem.engine.replica import Replica


class HasParameters(Protocol):
    """Where the tensors of an open strategy lie in this process."""

    def parameters(self) -> Iterable[torch.Tensor]:
        """The parameters that still exist."""


class OpenRuntime(Protocol):
    """What this process has of an open strategy."""

    @property
    def copies(self) -> HasParameters:
        """Where its tensors lie."""

    @property
    def strategy(self) -> Any:
        """The strategy, for objects that distribute what they make."""

    def distributed(self) -> Iterable[Any]:
        """The modules and other objects that have been given out."""


@final
class ReplicaContext:
    """What code inside `strategy.run` can ask and do; `sg.get_replica_context()` gives it.

    Args:
        rank: Which replica this is.
        collective: How it exchanges tensors with the others.
        strategy: The strategy, as this replica sees it.
        updating: Makes an update of variables that others update at the same time.
    """

    def __init__(
        self,
        rank: int,
        collective: Collective,
        strategy: Any,
        updating: Callable[[Callable[[], None]], None] = lambda update: update(),
    ) -> None:
        self._rank = rank
        self._collective = collective
        self._updating = updating
        self.strategy = strategy

    @property
    def replica_id_in_sync_group(self) -> int:
        """The number of this replica, from 0."""
        return self._rank

    @property
    def num_replicas_in_sync(self) -> int:
        """How many replicas work together."""
        return self._collective.size

    def all_reduce(self, op: str, value: Any) -> Any:
        """The sum, mean, max or min over all replicas of a tensor, or of each in a nesting."""
        return _tree.map(lambda each: self._collective.all_reduce(torch.as_tensor(each), op), value)

    def all_gather(self, value: Any, axis: int = 0) -> Any:
        """The tensors of all replicas, one after the other along an axis."""
        return _tree.map(lambda each: torch.cat(self._collective.all_gather(torch.as_tensor(each)), dim=axis), value)

    def update(self, function: Callable[[], None]) -> None:
        """Calls a function that updates variables without an optimizer of torch's.

        Workers of a parameter server, who update the same variables, do it one after the other, each to the newest
        values. Elsewhere it is just called.
        """
        self._updating(function)

    def merge_call(self, function: Callable[..., Any], args: tuple[Any, ...] = ()) -> Any:
        """Calls `function(strategy, ...)` with the tensors of all replicas, when all have come here.

        Each process calls it, with the same values: the arguments are `PerReplica` in all of them.
        """
        merged = _tree.map(lambda each: PerReplica(self._collective.all_gather(torch.as_tensor(each))), args)
        return function(self.strategy, *merged)


class Reader(Protocol):
    """Whose replicas may have something else than the main program."""

    def before_read(self, module: torch.nn.Module) -> None:
        """The main program is about to read a module."""


class _State(threading.local):
    def __init__(self) -> None:
        self.scopes: list[Any] = []  # strategies
        self.replicas: list[ReplicaContext] = []


state = _State()

# What all open strategies have in this process, and the runs that it is in, innermost last.
open_runtimes: list[OpenRuntime] = []
current_runs: "list[Replica]" = []

# Those who must be told before the main program reads what was made in a scope.
readers: "weakref.WeakSet[Reader]" = weakref.WeakSet()


def before_read(module: torch.nn.Module, *_: Any) -> None:
    """A hook of distributed modules: lets replicas agree before the main program reads what they have."""
    if not state.replicas:
        for reader in list(readers):
            reader.before_read(module)


def has_strategy() -> bool:
    """Whether the code runs inside the scope of a strategy, or in one of its replicas."""
    return bool(state.scopes or state.replicas)


def get_replica_context() -> ReplicaContext | None:
    """The replica that the code runs in, or `None` outside `strategy.run`."""
    return state.replicas[-1] if state.replicas else None


def in_cross_replica_context() -> bool:
    """Whether the code runs in the controller, outside any replica."""
    return not state.replicas


def require_controller(what: str) -> None:
    """Refuses what only the main program may do."""
    if state.replicas:
        rank = state.replicas[-1].replica_id_in_sync_group
        raise StrategyError(f"{what} was called inside replica {rank}; call it in the main program, outside run()")
