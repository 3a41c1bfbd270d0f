"""Metrics that a step of one's own updates, and whose results between runs are those of the global data.

A metric is a module whose state is buffers that are joined over the replicas after each step (`sg.aggregate`), like all
others. What is Keras' in name is Keras' in meaning.
"""

import re
from abc import ABC, abstractmethod
from typing import Any, final

import torch

from stratagem.engine import context
from stratagem.engine.context import ReplicaContext
from stratagem.errors import StrategyError
from stratagem.variables.aggregation import aggregate

_EPSILON = 1e-12  # up to which weights count as none


def is_number(values: Any) -> bool:
    """Whether it is one number, not one for each row."""
    return not getattr(values, "shape", values if isinstance(values, list | tuple) else ())


def part_of_weight(weight: Any, replica: ReplicaContext) -> Any:
    """A replica's part of the weight of one number, such as a loss: together replicas count once, each by its rows.

    Args:
        weight: What the program gives; what it counted itself (its rows, a sum of masks) is its part already.
        replica: Which replica.
    """
    share, num_rows = replica.share, replica.num_examples
    if weight is None:
        return share
    if isinstance(weight, torch.Tensor) or (isinstance(weight, int) and num_rows and not weight % num_rows):
        return weight
    return weight * share


class Metric(torch.nn.Module, ABC):
    """A value that is measured over many steps, under any strategy.

    Make it in a scope, update it in the function of `run`, and read it in the main program. Inside a step, `result()`
    covers the earlier steps of all replicas and the current step of this replica. In the main program it waits for the
    steps of asynchronous workers. A metric is a module: a model saves it as one of its parts, and `state_dict()`
    has its state.

    Args:
        name: What to call it in logs.
    Example:
        >>> class Largest(Metric):
        ...     def __init__(self) -> None:
        ...         super().__init__()
        ...         self.add_state("value", float("-inf"), "max")
        ...     def update_state(self, values: torch.Tensor) -> None:
        ...         self.value.copy_(torch.maximum(self.value, values.detach().max()))
        ...     def compute(self) -> torch.Tensor:
        ...         return self.value
        >>> largest = Largest()
        >>> largest.update_state(torch.tensor([1.0, 3.0]))
        >>> float(largest.result())
        3.0
    """

    _defaults: dict[str, float]

    def __init__(self, name: str | None = None) -> None:
        super().__init__()
        self.__dict__["_is_of_step"] = context.current_replica() is not None
        self.name = name or re.sub(r"(?<!^)(?=[A-Z])", "_", type(self).__name__).lower()
        self._defaults = {}

    def add_state(self, name: str, default: float, how: str = "sum", shape: tuple[int, ...] = ()) -> None:
        """Adds a part of the state, as a buffer of float64.

        Args:
            name: The name of the attribute.
            default: Its value at the start and after `reset_state()`.
            how: How the values of replicas become one after each step, as in `sg.aggregate`.
            shape: The shape of the tensor.
        """
        super().register_buffer(name, torch.full(shape, default, dtype=torch.float64))
        aggregate(self, name, how)
        self._defaults[name] = default

    def register_buffer(self, name: str, tensor: torch.Tensor | None, persistent: bool = True) -> None:
        """Refuses what nobody knows how to join over the replicas."""
        if name in self._buffers:  # torch sets one so
            super().register_buffer(name, tensor, persistent)
            return
        raise StrategyError(
            f"{type(self).__name__} keeps {name!r} in a buffer, but does not say how the values of replicas are "
            f"joined; write self.add_state({name!r}, 0.0, 'sum')"
        )

    def __setattr__(self, name: str, value: Any) -> None:
        replica = context.current_replica()
        is_kept = (
            replica is not None and replica.num_replicas_in_sync > 1 and not self.__dict__.get("_is_of_step", True)
        )
        if is_kept and name != "training" and name not in self._buffers:
            raise StrategyError(
                f"{type(self).__name__} sets {name!r} in a step, but only this replica would have that value; "
                f"declare it in "
                f"__init__: self.add_state({name!r}, 0.0, 'sum')"
            )
        super().__setattr__(name, value)

    @abstractmethod
    def update_state(self, *args: Any, **kwargs: Any) -> None:
        """Updates the state with this replica's part of a batch."""

    @abstractmethod
    def compute(self) -> torch.Tensor:
        """Computes the result from the current state."""

    def result(self) -> torch.Tensor:
        """Returns the value over all updates, on all replicas, since the last `reset_state()`."""
        context.before_read(self)
        return self.compute()

    @torch.no_grad()
    def reset_state(self) -> None:
        """Sets the state back to its start, in all replicas.

        Raises:
            StrategyError: It was called inside a step, where each replica has only its own part.
        """
        context.require_controller(f"{type(self).__name__}.reset_state()")
        context.before_read(self)
        for name, default in self._defaults.items():
            self.get_buffer(name).fill_(default)

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Updates the metric and returns its result."""
        self.update_state(*args, **kwargs)
        return self.result()


class _Weighted(Metric):
    """A weighted sum of numbers, and the weights themselves."""

    _counts_once = True  # one number for the rows of a replica, such as a loss, is its part of one for all rows

    def __init__(self, name: str | None = None) -> None:
        super().__init__(name)
        self.add_state("total", 0.0)
        self.add_state("count", 0.0)

    @torch.no_grad()
    def _add(self, values: Any, sample_weight: Any) -> None:
        values = _numbers(values)
        replica = context.current_replica()
        if self._counts_once and not values.dim() and replica is not None:
            sample_weight = part_of_weight(sample_weight, replica)
        if sample_weight is not None:
            values, weights = _same_rank(values, _numbers(sample_weight, values.device))
        else:
            weights = torch.ones((), dtype=values.dtype, device=values.device)
        self.get_buffer("total").add_((values * weights).sum())
        self.get_buffer("count").add_(weights.expand_as(values).sum())

    def _mean(self) -> torch.Tensor:
        total, count = self.get_buffer("total"), self.get_buffer("count")
        return torch.where(count.abs() > _EPSILON, total / count, 0.0).to(torch.get_default_dtype())


@final
class Mean(_Weighted):
    """The mean of numbers.

    Args:
        name: What to call it in logs.
    Example:
        >>> mean = Mean()
        >>> mean.update_state([1.0, 3.0, 5.0, 7.0], sample_weight=[1, 1, 0, 0])
        >>> float(mean.result())
        2.0
    """

    def update_state(self, values: Any, sample_weight: Any = None) -> None:
        """Adds one number for each row, or one number for all rows, which counts once.

        Args:
            values: The numbers.
            sample_weight: A weight for each number, or for each row.
        """
        self._add(values, sample_weight)

    def compute(self) -> torch.Tensor:
        """Returns the mean, or 0 before the first update."""
        return self._mean()


@final
class Sum(_Weighted):
    """The sum of numbers.

    One number in a step counts for all rows of its replica: the number of words, or the sum of their losses.

    Args:
        name: What to call it in logs.
    Example:
        >>> total = Sum()
        >>> total.update_state([1.0, 3.0])
        >>> float(total.result())
        4.0
    """

    def update_state(self, values: Any, sample_weight: Any = None) -> None:
        """Adds one number for each row, or one number for all rows of this replica.

        Args:
            values: The numbers.
            sample_weight: A factor for each number, or for each row.
        """
        self._add(values, sample_weight)

    _counts_once = False

    def compute(self) -> torch.Tensor:
        """The sum."""
        return self.get_buffer("total").to(torch.get_default_dtype())


class _MeanOf(_Weighted):
    """The mean of a function of what was to be predicted and what was."""

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        """Takes rows.

        Args:
            y_true: What was to be predicted.
            y_pred: What was predicted.
            sample_weight: How much each row counts.
        """
        wanted, found = _tensor(y_true), _tensor(y_pred)
        try:
            values = self._of_rows(wanted.to(found.device), found)
        except (RuntimeError, IndexError) as error:
            raise StrategyError(
                f"{type(self).__name__} compares rows, got y_true of shape {tuple(wanted.shape)} and y_pred of shape "
                f"{tuple(found.shape)}: {error}"
            ) from error
        self._add(values, sample_weight)

    @abstractmethod
    def _of_rows(self, y_true: torch.Tensor, y_pred: torch.Tensor) -> torch.Tensor:
        """A number for each row, or for each element."""

    def compute(self) -> torch.Tensor:
        """Returns the mean, or 0 before the first update."""
        return self._mean()


@final
class Accuracy(_MeanOf):
    """How often the predicted label equals the true label.

    Example:
        >>> accuracy = Accuracy()
        >>> accuracy.update_state([1, 2, 3, 4], [0, 2, 3, 4])
        >>> float(accuracy.result())
        0.75
    """

    def _of_rows(self, y_true: torch.Tensor, y_pred: torch.Tensor) -> torch.Tensor:
        return _matching(y_true, y_pred) == y_pred


@final
class BinaryAccuracy(_MeanOf):
    """How often a probability is on the right side of a threshold.

    Args:
        name: What to call it in logs.
        threshold: Probabilities above it count as 1, the others as 0.
    """

    def __init__(self, name: str | None = None, threshold: float = 0.5) -> None:
        super().__init__(name)
        self._threshold = threshold

    def _of_rows(self, y_true: torch.Tensor, y_pred: torch.Tensor) -> torch.Tensor:
        return _matching(y_true, y_pred) == (y_pred > self._threshold)


@final
class CategoricalAccuracy(_MeanOf):
    """How often the largest prediction has the index of the largest target (one-hot labels)."""

    def _of_rows(self, y_true: torch.Tensor, y_pred: torch.Tensor) -> torch.Tensor:
        return _matching(y_true, y_pred).argmax(-1) == y_pred.argmax(-1)


@final
class SparseCategoricalAccuracy(_MeanOf):
    """How often the largest prediction has the index of the label.

    Example:
        >>> accuracy = SparseCategoricalAccuracy()
        >>> accuracy.update_state([2, 1], [[0.1, 0.6, 0.3], [0.05, 0.95, 0.0]])
        >>> float(accuracy.result())
        0.5
    """

    def _of_rows(self, y_true: torch.Tensor, y_pred: torch.Tensor) -> torch.Tensor:
        best = y_pred.argmax(-1)
        return _matching(y_true, best) == best


@final
class MeanSquaredError(_MeanOf):
    """The mean of squared differences.

    Example:
        >>> error = MeanSquaredError()
        >>> error.update_state([[0.0, 1.0], [0.0, 0.0]], [[1.0, 1.0], [0.0, 0.0]])
        >>> float(error.result())
        0.25
    """

    def _of_rows(self, y_true: torch.Tensor, y_pred: torch.Tensor) -> torch.Tensor:
        return _difference(y_true, y_pred).square()


@final
class MeanAbsoluteError(_MeanOf):
    """The mean of absolute differences."""

    def _of_rows(self, y_true: torch.Tensor, y_pred: torch.Tensor) -> torch.Tensor:
        return _difference(y_true, y_pred).abs()


@final
class RootMeanSquaredError(_MeanOf):
    """The root of the mean of squared differences."""

    def _of_rows(self, y_true: torch.Tensor, y_pred: torch.Tensor) -> torch.Tensor:
        return _difference(y_true, y_pred).square()

    def compute(self) -> torch.Tensor:
        """Returns the root, or 0 before the first update."""
        return self._mean().sqrt()


def _difference(y_true: torch.Tensor, y_pred: torch.Tensor) -> torch.Tensor:
    return _matching(y_true, y_pred).double() - y_pred.double()


def _tensor(value: Any) -> torch.Tensor:
    return torch.as_tensor(value).detach()


def _numbers(value: Any, device: torch.device | None = None) -> torch.Tensor:
    return _tensor(value).to(device, torch.float64)


def _matching(y_true: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Targets of the shape of predictions; `(n, 1)` and `(n,)` are the same rows, not a table of all pairs."""
    if [each for each in y_true.shape if each != 1] != [each for each in like.shape if each != 1]:
        raise StrategyError(
            f"y_true and y_pred, in this order, must have the same rows, got shapes {tuple(y_true.shape)} and "
            f"{tuple(like.shape)}"
        )
    return y_true.reshape(like.shape)


def _same_rank(values: torch.Tensor, weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Values and weights with one number for what has one weight."""
    given = weights.shape
    while weights.dim() > values.dim() and weights.shape[-1] == 1:
        weights = weights.squeeze(-1)
    if weights.dim() == values.dim() > 1 and weights.shape[1:].numel() == 1:
        weights = weights.reshape(-1)
    rows = values
    if 0 < weights.dim() < rows.dim():
        rows = rows.flatten(weights.dim()).mean(-1)
    if weights.dim() and weights.shape != rows.shape:
        raise StrategyError(
            f"sample_weight has a number for each row or each value, got shape {tuple(given)} for values of shape "
            f"{tuple(values.shape)}"
        )
    return rows, weights
