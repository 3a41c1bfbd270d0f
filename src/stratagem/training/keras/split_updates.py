"""Lets each replica apply a Keras optimizer to its own part of the variables only, where they share memory.

As for torch's optimizers (`variables.slices`): optimizers that treat every element alike are split. For
the time of the update each variable and what the optimizer keeps for it are the replica's part alone.
"""

import contextlib
import dataclasses
import functools
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any, final

import keras
import torch
from keras.src.backend.torch.trainer import TorchTrainer

from stratagem.engine import context
from stratagem.training.keras.keras_objects import tensor_of
from stratagem.variables.optimizer_slices import is_elementwise
from stratagem.variables.store import Placement, laid_out, piece, shaped


def take_over(optimizer: Any, *, checks_gradients: bool = False) -> None:
    """Puts the replica's own update in the place of the optimizer's, once.

    Args:
        optimizer: A Keras optimizer.
        checks_gradients: Whether somebody else sees to gradients that are not finite.
    """
    if optimizer is None or "_backend_update_step" in optimizer.__dict__:
        return
    if not checks_gradients and "apply" not in optimizer.__dict__:
        optimizer.__dict__["apply"] = functools.partial(_apply, optimizer.apply)
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        take_over(optimizer.inner_optimizer, checks_gradients=True)
        return
    optimizer.__dict__["_backend_update_step"] = _Update(optimizer, checks_gradients)


def _apply(original: Callable[..., None], *args: Any, **kwargs: Any) -> None:
    """What `optimizer.apply` does in a replica: where others update the same variables, it waits for its turn."""
    replica = context.get_replica_context()
    if replica is None:
        original(*args, **kwargs)
    else:
        replica.update(functools.partial(original, *args, **kwargs))


@final
class _Update:
    """What an optimizer does with gradients in a replica.

    Args:
        optimizer: The optimizer.
        checks_gradients: Whether somebody else sees to gradients that are not finite.
    """

    def __init__(self, optimizer: Any, checks_gradients: bool) -> None:
        self._optimizer = optimizer
        self._whole = optimizer._backend_update_step
        self._checks_gradients = checks_gradients
        self._parts: _Parts | None = None

    def __call__(self, gradients: Sequence[torch.Tensor], variables: Sequence[Any], learning_rate: Any) -> None:
        run = context.current_runs[-1] if context.current_runs else None
        if run is None:
            self._whole(gradients, variables, learning_rate)
        elif (parts := self._parts_of(variables, run.copies)) is None:
            if run.may_update(map(tensor_of, variables), checked=self._checks_gradients):
                self._whole(gradients, variables, learning_rate)
        else:
            with run.split_update(map(tensor_of, variables), checked=self._checks_gradients) as may_update:
                if may_update:
                    with parts.in_place(gradients) as (own_gradients, own_variables):
                        if own_variables:
                            self._whole(own_gradients, own_variables, learning_rate)

    def _parts_of(self, variables: Sequence[Any], copies: Any) -> "_Parts | None":
        """This replica's part of the update; `None` if every replica makes the whole."""
        if self._parts is None or not self._parts.are_of(variables, copies):
            self._parts = None
            with contextlib.suppress(KeyError):  # what a step has just made is not distributed yet
                if is_elementwise(self._optimizer) and copies.own_part(tensor_of(variables[0])) is not None:
                    self._parts = _Parts(self._optimizer, variables, copies)
        return self._parts


def writes_to_weights(model: Any) -> bool:
    """Whether a training step writes to weights, or to what is kept for them, besides the split update."""
    optimizer = getattr(model.optimizer, "inner_optimizer", model.optimizer)
    return (
        type(model).train_step is not TorchTrainer.train_step
        or not is_elementwise(optimizer)
        or bool(optimizer.use_ema or optimizer.gradient_accumulation_steps)
        or any(variable.constraint is not None for variable in optimizer._trainable_variables)
    )


@final
class _Parts:
    """The replica's part of an optimizer's variables, and of all that it keeps for them.

    Args:
        optimizer: The optimizer.
        variables: Those that it updates.
        copies: Where they lie.
    """

    def __init__(self, optimizer: Any, variables: Sequence[Any], copies: Any) -> None:
        kept = _kept_by_variable(optimizer)
        self._copies = copies
        self._variables = list(variables)
        self._cuts: list[tuple[int, _Cut]] = []
        self._swaps: list[tuple[Any, torch.Tensor, Any, torch.Tensor, Any]] = []
        for number, variable in enumerate(variables):
            held = [variable, *kept.get(id(variable), ())]
            # Also where this replica has no part: all must find out alike whether everything is distributed.
            places = [copies.find(tensor_of(each)) for each in held]
            first, last = copies.own_part(tensor_of(variable))
            cut = _Cut.of([placement for _, placement in places], first, last)
            if cut.first < cut.last:
                self._cuts.append((number, cut))
                for each, (store, own) in zip(held, places, strict=True):
                    part = cut(shaped(store.shared, own))
                    self._swaps.append((each, tensor_of(each), each._shape, part, tuple(part.shape)))

    def are_of(self, variables: Sequence[Any], copies: Any) -> bool:
        """Whether they are still right, for an update of these variables."""
        return (
            copies is self._copies
            and len(variables) == len(self._variables)
            and all(map(operator.is_, variables, self._variables))
            and all(each._value is whole for each, whole, *_ in self._swaps)
        )

    @contextlib.contextmanager
    def in_place(self, gradients: Sequence[torch.Tensor]) -> Iterator[tuple[list[torch.Tensor], list[Any]]]:
        """The gradients and variables of the part."""
        for each, _, _, part, shape in self._swaps:
            each._value, each._shape = part, shape
        try:
            own = [cut(gradients[number]) for number, cut in self._cuts]
            yield own, [self._variables[number] for number, _ in self._cuts]
        finally:
            for each, whole, shape, _, _ in self._swaps:
                each._value, each._shape = whole, shape


@final
@dataclasses.dataclass(frozen=True)
class _Cut:
    """Cuts the replica's part out of a variable, its gradient and what the optimizer keeps for it.

    Args:
        placement: Of the variable.
        first: The first of its elements, in the order of memory, or the first of its rows.
        last: The one after the last.
        is_flat: Whether elements are counted, and the part is a flat vector.
    """

    placement: Placement
    first: int
    last: int
    is_flat: bool

    @classmethod
    def of(cls, places: Sequence[Placement], first: int, last: int) -> "_Cut":
        """The cut for a replica that updates these elements of a variable; its own place comes first."""
        placement = places[0]
        if all(each.stride == placement.stride for each in places):
            return cls(placement, first, last, is_flat=True)
        # Equal ranges of memory would hold unequal elements: Keras makes what it keeps row-major, whatever the
        # variable is. The ranges of all replicas join, and so do the rows that they stand for.
        num_rows, numel = placement.shape[0], max(1, placement.numel)
        return cls(placement, first * num_rows // numel, last * num_rows // numel, is_flat=False)

    def __call__(self, whole: torch.Tensor) -> torch.Tensor:
        """This part of a tensor of the variable's shape."""
        if self.is_flat:
            return piece(laid_out(whole, self.placement), self.first, self.last)
        return whole[self.first : self.last]


def _kept_by_variable(optimizer: Any) -> dict[int, list[Any]]:
    """What an optimizer keeps for each variable: it has lists as long as that of the variables."""
    variables = optimizer._trainable_variables
    kept: dict[int, list[Any]] = {id(variable): [] for variable in variables}
    seen = {id(variable) for variable in variables}
    for value in optimizer.__dict__.values():
        if isinstance(value, list) and len(value) == len(variables):
            for variable, each in zip(variables, value, strict=True):
                if isinstance(each, keras.Variable) and id(each) not in seen and each.shape == variable.shape:
                    kept[id(variable)].append(each)
                    seen.add(id(each))
    return kept
