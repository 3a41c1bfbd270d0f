"""Knows where the running code is: in which strategy's scope, in which replica's run.

Owns the stacks of open scopes and runs, and the public questions about them.
"""

import contextlib
import functools
import math
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol, final

import numpy as np
import torch

from stratagem import _torch, _tree
from stratagem.collectives import differentiable
from stratagem.collectives.collective import Collective
from stratagem.engine.sync import Syncing
from stratagem.errors import StrategyError
from stratagem.objects import per_replica
from stratagem.objects.per_replica import PerReplica
from stratagem.variables import aggregation
from stratagem.variables.aggregation import Aggregation
from stratagem.variables.participant import Updating
from stratagem.variables.store import OwnPart


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


class Contributing(Updating, Syncing, Protocol):
    """A replica whose gradients are summed with those of others."""

    def sum_set_gradients(self, parameters: Sequence[torch.Tensor]) -> None:
        """Sums gradients that the program has set."""

    @property
    def all_counts(self) -> tuple[int, ...] | None:
        """How many examples of this step each replica has, if that is known."""

    @property
    def loss_weight(self) -> float:
        """By which its losses count in what all replicas learn from the step."""

    def weigh(self, number: float) -> float | None:
        """Lets its losses count by a number over that of all; returns what to put back."""

    def put_back_weight(self, before: float | None) -> None:
        """Ends that."""

    @property
    def writes_once(self) -> bool:
        """Whether variables lie once: what one replica writes to them, all have when it is published."""

    def note_agreed(self, parameters: Sequence[torch.Tensor]) -> None:
        """Takes what all replicas have just written to parameters, each the same, as what they agree on."""

    def no_contribution(self) -> None:
        """Takes part in a backward pass of the others, and adds nothing to it."""

    def backward(
        self, original: Callable[..., None], tensors: Any, grad_tensors: Any, *args: Any, **options: Any
    ) -> None:
        """A backward pass of the program's, after which gradients are those of the global batch."""

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        """A block in which backward passes only add up this replica's own gradients."""


@final
class ReplicaContext:
    """What code inside `strategy.run` can ask and do; `sg.get_replica_context()` gives it.

    Args:
        rank: Which replica this is.
        collective: How it exchanges tensors with the others.
        strategy: The strategy, as this replica sees it.
        updating: Makes an update of variables that others update at the same time.
        replica: Whose gradients are summed with those of others; `None` if it trains alone.
        share: What part of the rows of a step one that trains alone has.
    """

    def __init__(
        self,
        rank: int,
        collective: Collective,
        strategy: Any,
        updating: Callable[[Callable[[], None]], None] = lambda update: update(),
        replica: Contributing | None = None,
        share: float = 1.0,
    ) -> None:
        self._rank = rank
        self._collective = collective
        self._updating = updating
        self._replica = replica
        self._share = share
        self.strategy = strategy

    @property
    def replica_id_in_sync_group(self) -> int:
        """The number of this replica, from 0."""
        return self._rank

    @property
    def num_replicas_in_sync(self) -> int:
        """How many replicas work together."""
        return self._collective.size

    @property
    def has_examples(self) -> bool:
        """Whether this replica has rows of the batch. If not, it has a copy of a row, which counts for nothing."""
        return self._counted[self._collective.rank] and self._share > 0

    @property
    def share(self) -> float:
        """This replica's part of the rows of the global batch; 0 if it has none."""
        return self._share if self._replica is None else self._replica.share

    @property
    def num_examples(self) -> int:
        """The number of rows of the global batch that this replica has; 1 without a batch, 0 if it trains alone."""
        return 0 if self._replica is None else int(self._replica.num_examples)

    @property
    def loss_weight(self) -> float:
        """The weight of this replica's losses: its share of the rows, unless `weight` set another one."""
        return self._share if self._replica is None else self._replica.loss_weight

    @property
    def _counted(self) -> list[bool]:
        counted = [] if self._replica is None else self._replica.all_counted
        return counted if any(counted) else [True] * self._collective.size

    def all_reduce(self, op: str, value: Any) -> Any:
        """Returns the sum, mean, max or min over all replicas, of a tensor or of each tensor in a nesting.

        Gradients flow through it, back to the replicas. Replicas without examples are left out.
        """
        op = per_replica.require_op(op)
        state.num_joint_values += 1
        reduce = functools.partial(differentiable.all_reduce, self._collective, op=op, counted=self._counted)
        return _tree.map(lambda each: reduce(_tensor("all_reduce", each)), value)

    def all_gather(self, value: Any, axis: int = 0) -> Any:
        """Joins the tensors of all replicas along an axis; single numbers become a vector.

        Gradients flow through it: a contrastive loss over the rows of all replicas trains as on one device. Tensors of
        replicas without examples are left out; these replicas get the result, too.
        """

        state.num_joint_values += 1

        def gathered(each: Any) -> torch.Tensor:
            own = per_replica.as_vector(_tensor("all_gather", each))
            per_replica.require_axis(axis, own)
            parts = differentiable.all_gather(self._collective, own, self._counted)
            return per_replica.joined("all_gather", parts, axis)

        return _tree.map(gathered, value)

    def weight(self, number: float) -> contextlib.AbstractContextManager[None]:
        """Weights the losses of this replica by a number, divided by the sum of the numbers of all replicas.

        Without it the weight of a replica is its number of rows, which is right for a mean over rows. For a mean over
        tokens (padding, an `ignore_index`) give the number of tokens:

            with sg.get_replica_context().weight((targets != -100).sum()):
                loss.backward()

        Every replica must call it. It holds for the backward passes in the block; without `with`, for all later ones
        of the step.

        Args:
            number: The number of things that this replica's loss is the mean of; 0 if it adds nothing.
        Raises:
            StrategyError: The number is negative or not finite.
        """
        is_number = isinstance(number, int | float | np.number) or (
            isinstance(number, torch.Tensor | np.ndarray) and math.prod(number.shape) == 1
        )
        value = float(number) if is_number else math.nan
        if not 0 <= value < math.inf:
            raise StrategyError(f"a weight is a number of rows or tokens, 0 or more, got {number!r}")
        if self._replica is None:
            return contextlib.nullcontext()
        return _Weight(self._replica, self._replica.weigh(value))

    def no_contribution(self) -> None:
        """Replaces a backward pass: this replica takes part in that of the others and adds nothing to their gradients.

        Call it in a replica whose loss cannot be used (it is not finite, there are no labels) while the others call
        `backward()`: all replicas must take part in each backward pass.
        """
        if self._replica is not None:
            self._replica.no_contribution()

    def update(self, function: Callable[[], None]) -> None:
        """Calls a function that updates variables without a torch optimizer.

        Workers of a parameter server, which update the same variables, call it one after the other, each with the
        newest values. Under other strategies it is simply called.
        """
        if not callable(function):
            raise StrategyError(f"update calls a function that changes variables, got {type(function).__name__}")
        self._updating(function)

    # What the library's own ways of training need

    @property
    def trains_alone(self) -> bool:
        """Whether nobody's gradients are summed with those of this replica."""
        return self._replica is None

    def sum_set_gradients(self, parameters: Sequence[torch.Tensor]) -> None:
        """Makes gradients that the program has set those of the global batch; every replica must come here."""
        if self._replica is not None:
            self._replica.sum_set_gradients(parameters)

    def may_update(self, parameters: Iterable[torch.Tensor], *, checked: bool) -> bool:
        """Whether gradients are fit to be applied, the same in every replica; `checked` if they are known to be."""
        return self._replica is None or self._replica.may_update(parameters, checked=checked)

    def split_update(
        self, parameters: Iterable[torch.Tensor], *, checked: bool
    ) -> contextlib.AbstractContextManager[bool]:
        """Around an update of which each replica does its own part; gives whether to make it."""
        if self._replica is None:
            return contextlib.nullcontext(True)
        return self._replica.split_update(parameters, checked=checked)

    def own_part(self, tensor: torch.Tensor) -> OwnPart | None:
        """What this replica updates of a tensor for all; `None` if each updates the whole of its own.

        Raises:
            KeyError: The tensor is not distributed yet.
        """
        return None if self._replica is None else self._replica.copies.own_part(tensor)

    def publish_written(self) -> None:
        """Makes parameters that the step wrote to itself, the same in every replica, everyone's; all must come here."""
        if self._replica is not None:
            self._replica.publish_written()

    def writes(self, tensor: torch.Tensor, *, adds_up: bool) -> bool:
        """Whether this replica gives a variable the value that all have agreed on.

        Args:
            tensor: The variable. A parameter that lies once for all is written by one replica of a machine.
            adds_up: Whether, of a buffer, what replicas change is added up at the end of the step.
        """
        if self._replica is None:
            return True
        if isinstance(tensor, torch.nn.Parameter):
            return self.is_in_main_program or not self._replica.writes_once
        return not adds_up or self._replica.global_rank == self._replica.first_with_examples

    def note_agreed(self, tensors: Sequence[torch.Tensor]) -> None:
        """Takes it that all replicas have the same values of tensors."""
        if self._replica is not None:
            self._replica.note_agreed(tensors)

    @property
    def is_in_main_program(self) -> bool:
        """Whether this replica is the main program's, on its machine."""
        return self._replica is None or self._replica.rank == 0

    def joined(self, how: Aggregation, before: torch.Tensor, now: torch.Tensor) -> torch.Tensor:
        """The value that all replicas have of a tensor; every one must come here.

        Args:
            how: How it is made of what each has.
            before: What all had.
            now: What this one has.
        """
        first = 0 if self._replica is None else self._replica.first_with_examples
        return aggregation.joined(self._collective, how, before, now, self.share, first)

    def merge_call(
        self, function: Callable[..., Any], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Calls `function(strategy, ...)` with the tensors of all replicas, when all have come here.

        Each process calls it, with the same values: the arguments are `PerReplica` in all of them, for `reduce`,
        `gather` and `local_results` of that strategy.

        Args:
            function: What is called.
            args: Its arguments after the strategy: tensors, in any nesting.
            kwargs: Its keyword arguments, likewise.
        Returns:
            What the function returns; of a `PerReplica` in it, the value of this replica.
        """
        if not callable(function) or not isinstance(args, tuple | list) or not isinstance(kwargs, dict | None):
            raise StrategyError(
                f"merge_call takes a function whose first argument is the strategy, a tuple of its other arguments "
                f"and a dict of its keyword arguments, got {function!r}, {args!r} and {kwargs!r}"
            )
        counts = None if self._replica is None else self._replica.all_counts

        def merged(each: Any) -> PerReplica:
            return PerReplica(self._collective.all_gather(_tensor("merge_call", each)), counts)

        given, named = _tree.map(merged, (tuple(args), kwargs or {}))
        state.merging.append(MergedStrategy(self.strategy))
        try:
            result = function(state.merging[-1], *given, **named)
        finally:
            state.merging.pop()
        return per_replica.select(result, self._collective.rank)


@final
class MergedStrategy:
    """A strategy in the function of `merge_call`, which has the values of all replicas: nobody needs to be asked.

    Args:
        strategy: The strategy, as its replica sees it.
    """

    def __init__(self, strategy: Any) -> None:
        self._strategy = strategy

    def reduce(self, op: str, value: Any, axis: int | None = None, *, weighted: bool = True) -> Any:
        """One value of the values of all replicas, along an axis if one is given; a mean counts by their examples."""
        per_replica.require_op(op)
        return _of_all(lambda each: per_replica.reduce(op, each, axis, weighted=weighted), value)

    def gather(self, value: Any, axis: int = 0, *, pad: float | None = None) -> Any:
        """The tensors of all replicas that have examples, one after the other along an axis."""
        return _of_all(lambda each: per_replica.gather(each, axis, pad), value)

    def local_results(self, value: Any) -> tuple[Any, ...]:
        """The values of all replicas that have examples, as a tuple."""
        return per_replica.local_results(value)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._strategy, name)


def _of_all(function: Callable[[PerReplica], Any], value: Any) -> Any:
    """A function on what is of all replicas in a nesting; other values are as they are."""
    return _tree.map_only(PerReplica, function, value)


@final
class _Weight:
    """A block in which losses have a weight; it holds from the call of `weight` on."""

    def __init__(self, replica: Contributing, before: float | None) -> None:
        self._replica = replica
        self._before = before

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        self._replica.put_back_weight(self._before)


def _tensor(what: str, value: Any) -> torch.Tensor:
    """What a replica exchanges with the others; refuses what is no tensor before any of them waits for it."""
    try:
        return torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise StrategyError(
            f"{what} exchanges tensors, arrays and numbers, also nested in lists and dicts, got "
            f"{type(value).__name__} {value!r}; "
            f"leave it out, or convert it to a tensor"
        ) from error


class Reader(Protocol):
    """Whose replicas may have something else than the main program."""

    def before_read(self, module: torch.nn.Module) -> None:
        """The main program is about to read a module."""


class _State(threading.local):
    def __init__(self) -> None:
        self.scopes: list[Any] = []  # strategies
        self.replicas: list[ReplicaContext] = []
        self.merging: list[MergedStrategy] = []  # the functions of `merge_call` that the code is in
        self.held_back: list[object] = []  # whose runs leave every replica its own gradients
        self.num_joint_values = 0  # that steps have made of those of all replicas


state = _State()

# What all open strategies have in this process, and the runs that it is in, innermost last.
open_runtimes: list[OpenRuntime] = []
current_runs: list[Contributing] = []

# Those who must be told before the main program reads what was made in a scope.
readers: "weakref.WeakSet[Reader]" = weakref.WeakSet()


def before_read(module: torch.nn.Module, *_: Any) -> None:
    """A hook of distributed modules: lets replicas agree before the main program reads what they have."""
    if not _replicas_here():
        for reader in list(readers):
            reader.before_read(module)


# Of the backward passes that this process is in: the replicas of the thread that called each.
_passes: list[list[ReplicaContext]] = []


@contextlib.contextmanager
def in_pass() -> Iterator[None]:
    """A block in which the threads of a backward pass, which are torch's on a GPU, are in the replica of this one."""
    _passes.append(list(state.replicas))
    try:
        yield
    finally:
        _passes.pop()


def _replicas_here() -> list[ReplicaContext]:
    if state.replicas or not _passes or not _torch.backward_passes.is_in_backward_pass():
        return state.replicas
    return _passes[-1]


def has_strategy() -> bool:
    """Returns whether the code runs in the scope of a strategy or in one of its replicas.

    Example:
        >>> has_strategy()
        False
    """
    return bool(state.scopes or _replicas_here())


def current_scope() -> Any | None:
    """The strategy whose scope the code is in, the innermost of several; `None` outside."""
    return state.scopes[-1] if state.scopes else None


def holders_of(obj: Any) -> list[Any]:
    """The open strategies whose replicas have been given an object."""
    return [each.strategy for each in open_runtimes if any(given is obj for given in each.distributed())]


def current_replica() -> ReplicaContext | None:
    """The replica that the code runs in, or `None` outside `strategy.run`."""
    here = _replicas_here()
    return here[-1] if here else None


def in_cross_replica_context() -> bool:
    """Returns whether the code sees all replicas: in a scope outside `strategy.run`, or in a function of `merge_call`.

    Example:
        >>> import stratagem as sg
        >>> with sg.OneDeviceStrategy("cpu:0").scope():
        ...     in_cross_replica_context()
        True
    """
    return bool(state.merging) or (bool(state.scopes) and not _replicas_here())


@contextlib.contextmanager
def outside_replicas() -> Iterator[None]:
    """A block in the function of a worker that may do what else only the main program does."""
    replicas, state.replicas = state.replicas, []
    try:
        yield
    finally:
        state.replicas = replicas


def require_controller(what: str) -> None:
    """Refuses what only the main program may do."""
    if here := _replicas_here():
        rank = here[-1].replica_id_in_sync_group
        raise StrategyError(f"{what} was called inside replica {rank}; call it in the main program, outside run()")
