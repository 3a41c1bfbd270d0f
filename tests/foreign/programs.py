"""Runs a program that a user could have written twice: with plain torch, and under a strategy.

A program is a function of a few lines. It gets a `Runner`: plain torch runs a step on the whole
batch in this process, a strategy divides the batch over its replicas. What both return is compared.
"""

import contextlib
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any, final

import pytest
import torch

import stratagem as sg
from stratagem import _tree
from stratagem.objects.per_replica import PerReplica
from stratagem.strategies.replicated import Replicated
from tests.contracts.strategies_under_test import CPU_ROWS, LOCAL, STRICT, STRICT_ROWS, WORKERS, MakeStrategy, alone

ROWS: dict[str, MakeStrategy] = {
    "one device": CPU_ROWS["one device"],
    "mirrored 2": CPU_ROWS["mirrored 2"],
    "mirrored 3": alone(lambda: sg.MirroredStrategy(["cpu:0", "cpu:1", "cpu:2"])),
    "mirrored 2 torch": CPU_ROWS["mirrored 2 torch"],
    "mirrored 3 torch": alone(lambda: sg.MirroredStrategy(["cpu:0", "cpu:1", "cpu:2"], cross_device_ops="torch")),
    "central storage 3": CPU_ROWS["central storage 3"],
    "parameter server 2": CPU_ROWS["parameter server 2"],
    "local sgd 2": CPU_ROWS["local sgd 2"],
    "2 workers of 1": CPU_ROWS["2 workers of 1"],
}
# In a program of their own (`tests/contracts/test_strict_devices.py`), each as another row: what that refuses, it does.
LIKE = {"strict mirrored 2": "mirrored 2 torch", "strict one device": "one device"}
if STRICT in os.environ:
    ROWS = {row: STRICT_ROWS[row] for row in LIKE if row == os.environ[STRICT]}
# Left out there: they need sparse kernels, which strict devices do not have.
SPARSE = {
    *("sparse_adam", "sparse_embedding", "sparse_features", "sparse_results"),
    *("sparse_buffer", "sparse_buffer_replaced_between_runs"),
}
# Rows that differ from another one in how many replicas there are or in where variables lie: left to long runs, for
# programs whose promise others have shown there.
SELDOM = ("mirrored 3", "mirrored 2 torch", "central storage 3", "parameter server 2")
# Every replica has variables of its own.
PRIVATE = ("mirrored 2 torch", "mirrored 3 torch", "local sgd 2")
# A failure ends the strategy in all workers: programs that are refused are left out there. One device refuses nothing.
END_WITH_A_FAILURE = WORKERS


class Runner(ABC):
    """What a program may ask for, with and without a strategy.

    Args:
        strategy: The strategy, `None` in plain torch.
    """

    strategy: sg.Strategy | None = None

    @abstractmethod
    def scope(self) -> contextlib.AbstractContextManager[Any]:
        """Around the making of models and optimizers."""

    @abstractmethod
    def __call__(self, step: Callable[..., Any], *batch: Any, **shared: Any) -> Any:
        """Calls a step on a global batch; keyword arguments are the same for all replicas."""

    @abstractmethod
    def mean(self, result: Any) -> Any:
        """The mean of a result over all rows."""

    @abstractmethod
    def sum(self, result: Any) -> Any:
        """The sum of a result over the replicas."""

    @abstractmethod
    def rows(self, result: Any) -> Any:
        """The rows of all replicas, one after the other."""

    @abstractmethod
    def first(self, result: Any) -> Any:
        """What is the same in all replicas; it is compared."""


@final
class Plain(Runner):
    """Plain torch: one process, the whole batch."""

    def scope(self) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext()

    def __call__(self, step: Callable[..., Any], *batch: Any, **shared: Any) -> Any:
        return step(*batch, **shared)

    def mean(self, result: Any) -> Any:
        return result

    def sum(self, result: Any) -> Any:
        return result

    def rows(self, result: Any) -> Any:
        return result

    def first(self, result: Any) -> Any:
        return result


@final
class Distributed(Runner):
    """A strategy."""

    def __init__(self, strategy: sg.Strategy) -> None:
        self.strategy = strategy

    def scope(self) -> contextlib.AbstractContextManager[Any]:
        return self.strategy.scope()

    def __call__(self, step: Callable[..., Any], *batch: Any, **shared: Any) -> Any:
        if not batch:
            return self.strategy.run(step, kwargs=shared)
        return self.strategy.run(step, args=next(iter(self.strategy.distribute([batch]))), kwargs=shared)

    def mean(self, result: Any) -> Any:
        return self.strategy.reduce("mean", result)

    def sum(self, result: Any) -> Any:
        return self.strategy.reduce("sum", result)

    def rows(self, result: Any) -> Any:
        return self.strategy.gather(result)

    def first(self, result: Any) -> Any:
        def same(each: Any) -> Any:
            if not isinstance(each, PerReplica):  # of one device
                return each
            for other in each.values[1:]:
                torch.testing.assert_close(other, each[0], rtol=0, atol=0, msg="replicas differ")
            return each[0]

        return _tree.map(same, result, is_leaf=lambda each: isinstance(each, PerReplica))


@final
class Program:
    """One program, and how near to plain torch it must come.

    Args:
        body: The program: takes a `Runner`, returns tensors and numbers.
        tolerance: The largest relative difference.
        refused: What the error says, if the true answer is that this cannot be had.
        known: What is wrong with it today, in plain words.
        known_in: In which rows; in all that can be tried, if none are named.
        without: Rows that it differs in by nature.
        linear: Whether each run makes one update that is linear in its gradients: equal under local SGD too.
        seldom: Rows that are left to long runs.
    """

    def __init__(
        self,
        body: Callable[[Runner], Any],
        *,
        tolerance: float = 2e-6,
        refused: str | None = None,
        known: str | None = None,
        known_in: Sequence[str] = (),
        without: Sequence[str] = (),
        linear: bool = False,
        seldom: Sequence[str] = (),
    ) -> None:
        self.body = body
        self.name = body.__name__
        self.tolerance = tolerance
        self.refused = refused
        self.known = dict.fromkeys(known_in or ROWS, known) if known else {}
        failing = (*END_WITH_A_FAILURE, "one device") if refused or (known and not known_in) else ()
        self.without = _with_strict((*without, *failing, *(() if linear else LOCAL)))
        self.seldom = seldom
        self._plain: Any = None

    def __repr__(self) -> str:
        return self.name

    def plain(self) -> Any:
        """What plain torch gives."""
        if self._plain is None:
            torch.manual_seed(0)
            self._plain = _tree.map(_kept, self.body(Plain()))
        return self._plain

    def check(self, strategy: sg.Strategy) -> None:
        """Runs it under a strategy and compares."""
        if isinstance(strategy, Replicated) and not strategy.is_open:  # a program before it has failed, as it should
            strategy.revive()
        torch.manual_seed(0)
        if self.refused is not None:
            with pytest.raises(sg.errors.StratagemError, match=self.refused):
                self.body(Distributed(strategy))
            return
        expected = self.plain()
        torch.manual_seed(0)
        found = _tree.map(_kept, self.body(Distributed(strategy)))
        torch.testing.assert_close(found, expected, rtol=self.tolerance, atol=self.tolerance, equal_nan=True)


@final
class Programs:
    """A table of programs. A program is added by a decorator; a test is parametrized with the table.

    Args:
        usual: Options of `Program`, unless a program has others.
    """

    def __init__(self, **usual: Any) -> None:
        self._usual = usual
        self._programs: list[Program] = []

    def __call__(self, **options: Any) -> Callable[[Callable[[Runner], Any]], Callable[[Runner], Any]]:
        """Adds the program below, with options of `Program`."""

        def add(body: Callable[[Runner], Any]) -> Callable[[Runner], Any]:
            self._programs.append(Program(body, **{**self._usual, **options}))
            return body

        return add

    def __iter__(self) -> Iterator[Program]:
        return iter(self._programs)


def _with_strict(rows: Sequence[str]) -> tuple[str, ...]:
    return (*rows, *(row for row, other in LIKE.items() if other in rows))


def _kept(value: Any) -> Any:
    return value.detach().cpu().clone() if isinstance(value, torch.Tensor) else value
