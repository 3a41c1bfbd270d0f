"""What the user is told about runs: updates that were skipped, a replica that is slow, the same rows in all replicas.

Nothing here changes what a run does.
"""

import statistics
import time
from collections.abc import Sequence
from typing import Any, final

import torch

from stratagem import _tree
from stratagem._caller import warn_caller
from stratagem.errors import NonFiniteGradientError, StratagemWarning
from stratagem.objects.per_replica import PerReplica
from stratagem.processes.packing import Raw

_MAX_IN_A_ROW = 10
_SLOW_RATIO = 2.0
_SLOW_LEAST_S = 0.02
_NUM_SLOW_RUNS = 20
_SLOW_PERIOD_S = 60.0
NUM_LOOKS = 20
_NUM_SAME_ROWS = 3
_DEPTH = 8
_MEAN = 1  # torch's number for reduction="mean"


@final
class NonFinite:
    """Counts the updates in a row that were skipped.

    Args:
        on_nonfinite: What the strategy was told: `raise` lets none pass.
    """

    def __init__(self, on_nonfinite: str) -> None:
        self._on_nonfinite = on_nonfinite
        self.num_in_a_row = 0

    def judge(self, skipped: Sequence[tuple[int, str]], *, updated: bool, run_number: int) -> None:
        """Warns of an update that was skipped in a run, or raises.

        Args:
            skipped: The replicas and parameters to blame; none if nothing was skipped.
            updated: Whether an update was made.
            run_number: Which run it was.
        """
        if not skipped:
            self.num_in_a_row = 0 if updated else self.num_in_a_row
            return
        self.num_in_a_row += 1
        where = "; ".join(f"replica {rank}, first in {label!r}" for rank, label in skipped)
        text = f"non-finite gradient in {where}, run {run_number}; update skipped"
        if is_too_many(self.num_in_a_row, self._on_nonfinite):
            raise NonFiniteGradientError(
                f"{text}. It was number {self.num_in_a_row} in a row; lower the learning rate, clip gradients, or "
                f"look at the data of that run"
            )
        warn_caller(f"{text} ({self.num_in_a_row} of {_MAX_IN_A_ROW} allowed in a row)", StratagemWarning)


def is_too_many(num_in_a_row: int, on_nonfinite: str) -> bool:
    """Whether training ends with so many updates in a row that were skipped."""
    return on_nonfinite == "raise" or num_in_a_row >= _MAX_IN_A_ROW


@final
class Stragglers:
    """Compares how long replicas compute, and warns, at most once a minute, if one is always far slower."""

    def __init__(self) -> None:
        self._slowest: int | None = None
        self._num_in_a_row = 0
        self._warned_at = -_SLOW_PERIOD_S

    def note(self, busy_s: Sequence[float], counts: Sequence[int] | None) -> None:
        """Takes in one run.

        Args:
            busy_s: How long each replica computed, without its waits for others.
            counts: How many examples each replica had; those without any are not compared.
        """
        compared = {rank: each for rank, each in enumerate(busy_s) if counts is None or counts[rank]}
        if len(compared) < 2:
            return
        slowest = max(compared, key=compared.__getitem__)
        del compared[slowest]
        others_s = statistics.median(compared.values())
        far = busy_s[slowest] > max(_SLOW_RATIO * others_s, others_s + _SLOW_LEAST_S)
        self._num_in_a_row = self._num_in_a_row + 1 if far and slowest == self._slowest else int(far)
        self._slowest = slowest
        if self._num_in_a_row >= _NUM_SLOW_RUNS and time.monotonic() - self._warned_at >= _SLOW_PERIOD_S:
            self._warned_at = time.monotonic()
            warn_caller(
                f"replica {slowest} is the slowest: it computes {busy_s[slowest] / max(others_s, 1e-9):.1f} times as "
                f"long as the others, which wait for it in every run; look for other programs on its cores, or for "
                f"work that only this replica does",
                StratagemWarning,
            )


@final
class SameRows:
    """Warns, once, of a program that trains all replicas on the same rows, because it does not distribute its batches.

    A program may mean it. So all of this must hold, in several runs in a row: no argument is of `distribute`; a tensor
    of several rows has other rows than in the run before; the step made an update; and all replicas returned the same.
    """

    def __init__(self) -> None:
        self._num_in_a_row = 0
        self._row_before: torch.Tensor | None = None

    def note(self, given: Sequence[Any], results: Sequence[Any], *, updated: bool) -> None:
        """Takes in one step.

        Args:
            given: All values among the arguments.
            results: What each replica returned.
            updated: Whether an update was made.
        """
        if self._num_in_a_row >= _NUM_SAME_ROWS or len(results) < 2 or not updated:
            return
        batch = next((each for each in given if _has_rows(each, len(results))), None)
        if batch is None or any(isinstance(each, PerReplica) for each in given) or not _are_same(results):
            self._num_in_a_row, self._row_before = 0, None
            return
        row, before = batch[0].detach().clone(), self._row_before
        is_new = (
            before is None or (row.shape, row.dtype) != (before.shape, before.dtype) or not torch.equal(row, before)
        )
        self._num_in_a_row, self._row_before = self._num_in_a_row + 1 if is_new else 1, row
        if self._num_in_a_row == _NUM_SAME_ROWS:
            warn_caller(
                f"all {len(results)} replicas computed the same in {_NUM_SAME_ROWS} runs: args had no batch of "
                f"strategy.distribute, so that every replica was given all {len(batch)} rows. To divide each batch "
                f"over the replicas, write `for batch in strategy.distribute(loader): strategy.run(step, args=batch)`",
                StratagemWarning,
            )


def _has_rows(value: Any, num_replicas: int) -> bool:
    if not isinstance(value, torch.Tensor) or value.layout != torch.strided or value.is_nested or not value.dim():
        return False
    return len(value) >= num_replicas


def _are_same(results: Sequence[Any]) -> bool:
    """Whether replicas returned numbers with a fraction, as a loss has, and all the same."""
    first, *others = [[_number(each) for each in _tree.leaves(result)] for result in results]
    return any(each is not None for each in first) and all(each == first for each in others)


def _number(value: Any) -> float | None:
    value = value.tensor if isinstance(value, Raw) else value
    if isinstance(value, torch.Tensor) and value.dim() == 0 and value.is_floating_point():
        return value.item()
    return value if isinstance(value, float) else None


def about_schedule(changed: str) -> None:
    """Warns that a step has changed a learning rate in one worker of several that do not take the same steps."""
    warn_caller(
        f"a step has changed {changed} in its worker; each worker has a copy of its own, which counts the steps of "
        f"that worker only, and the main program's is as before: the learning rate is not the one of the schedule. "
        f"Call scheduler.step() in the main program, after each strategy.run(); all workers then get the new rate",
        StratagemWarning,
    )


def about_tokens(losses: Sequence[torch.Tensor], num_looks: int) -> int:
    """Looks whether a loss that counts by its rows is a mean over targets of which some are left out.

    Args:
        losses: What a backward pass is about to start from.
        num_looks: How many looks are left.
    Returns:
        How many are left then.
    """
    nodes = [loss.grad_fn for loss in losses]
    for _ in range(_DEPTH):
        if any(_leaves_targets_out(node) for node in nodes):
            warn_caller(
                "a cross-entropy leaves out targets (ignore_index) and is the mean over the other targets, but "
                "replicas are weighted by their number of rows: the result differs from one device. Before "
                "backward() call "
                "sg.get_replica_context().weight((targets != ignore_index).sum())",
                StratagemWarning,
            )
            return 0
        nodes = [node for each in nodes if each is not None for node, _ in each.next_functions][:_DEPTH]
    return num_looks - 1


def _leaves_targets_out(node: Any) -> bool:
    if node is None or not node.name().startswith("NllLoss") or getattr(node, "_saved_reduction", None) != _MEAN:
        return False
    return bool((node._saved_target == node._saved_ignore_index).any())
