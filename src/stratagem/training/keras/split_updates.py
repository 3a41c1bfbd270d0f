"""Lets each replica apply a Keras optimizer to its own part of the variables only, where they share memory.

As for torch's optimizers (`variables.slices`): optimizers that treat every element alike are split. For
the time of the update each variable and what the optimizer keeps for it are the replica's part alone.

Optimizers that a step of the program's own applies are treated alike: the gradients that they are given become those
of the global batch, and what the first step makes for them is distributed before the next.
"""

import contextlib
import dataclasses
import functools
import operator
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, final

import keras
import torch
from keras.src.backend.torch.trainer import TorchTrainer
from keras.src.optimizers.base_optimizer import BaseOptimizer

from stratagem.engine import context
from stratagem.engine.context import ReplicaContext
from stratagem.engine.strategy_in_replica import StrategyInReplica
from stratagem.errors import StrategyError
from stratagem.strategies.strategy_in_worker import StrategyInWorker
from stratagem.training.keras import changes
from stratagem.training.keras.keras_objects import blank, tensor_of
from stratagem.variables.optimizer_slices import is_elementwise
from stratagem.variables.store import Placement, laid_out, piece, shaped

# Of an optimizer: what is of this side, and what is by variable.
_OF_THIS_SIDE = frozenset({"_backend_update_step", "apply"})
_BY_VARIABLE = ("_trainable_variables_indices", "_var_to_optimizer_idx")
# Of optimizers that steps of the program's own apply.
_updates: "weakref.WeakKeyDictionary[Any, _Update]" = weakref.WeakKeyDictionary()


def reduce(obj: Any) -> Any:
    """The way of an optimizer to the replicas, for `packing.reducers`; `NotImplemented` for all else."""
    if not isinstance(obj, BaseOptimizer):
        return NotImplemented
    state = {key: value for key, value in obj.__dict__.items() if key not in _OF_THIS_SIDE}
    return blank, (type(obj),), state, None, None, _fill


def _fill(obj: Any, state: dict[str, Any]) -> None:
    install()
    obj.__dict__.update(state)
    for name in _BY_VARIABLE:
        if name in state:
            pairs = zip(obj._trainable_variables, state[name].values(), strict=True)
            obj.__dict__[name] = {obj._var_key(variable): number for variable, number in pairs}


@functools.cache
def install() -> None:
    """Sees to optimizers that steps of the program's own apply, once for the process."""
    original = BaseOptimizer.apply

    @functools.wraps(original)
    def apply(self: Any, grads: Any, trainable_variables: Any = None) -> None:
        replica = context.current_replica()
        if replica is None or "_backend_update_step" in self.__dict__:
            original(self, grads, trainable_variables)
        else:
            _apply_in_step(replica, original, self, grads, trainable_variables)

    BaseOptimizer.apply = apply


def _apply_in_step(
    replica: ReplicaContext, original: Callable[..., None], optimizer: Any, grads: Any, trainable_variables: Any
) -> None:
    """What `optimizer.apply` does in a step of the program's own."""
    variables = optimizer._trainable_variables if trainable_variables is None else list(trainable_variables)
    if replica.trains_alone:
        _require_built(optimizer, replica)
        _apply(functools.partial(original, optimizer), grads, variables)
        return
    tensors = list(map(tensor_of, variables))
    for tensor, gradient in zip(tensors, grads, strict=True):
        if gradient is not None and gradient is not tensor.grad:
            tensor.grad = gradient.detach()
    replica.sum_set_gradients(tensors)
    update = _updates.setdefault(optimizer, _Update(optimizer, checks_gradients=False))
    optimizer._backend_update_step = update
    try:
        _apply(functools.partial(original, optimizer), [each.grad for each in tensors], variables)
    finally:
        del optimizer._backend_update_step
    if not isinstance(replica.strategy, StrategyInReplica):
        replica.strategy.take(list(map(tensor_of, changes.kept_by(optimizer))))


def _require_built(optimizer: Any, replica: ReplicaContext) -> None:
    if isinstance(replica.strategy, StrategyInWorker) and not optimizer.built:
        kind = type(optimizer).__name__
        raise StrategyError(
            f"workers share the state of {kind}, but it was not built before the first step, and each worker would "
            f"make its own; build it in the scope: optimizer.build(model.trainable_variables)"
        )


def take_over(optimizer: Any) -> None:
    """Puts the replica's own update in the place of the optimizer's, once; not where parameter servers make it.

    Args:
        optimizer: A Keras optimizer.
    """
    if optimizer is None or "apply" in optimizer.__dict__ or "_backend_update_step" in optimizer.__dict__:
        return
    optimizer.__dict__["apply"] = functools.partial(_apply, optimizer.apply)
    # One that scales losses sees to gradients that are not finite itself.
    checks_gradients = isinstance(optimizer, keras.optimizers.LossScaleOptimizer)
    for each in changes.innermost(optimizer):
        each.__dict__["_backend_update_step"] = _Update(each, checks_gradients)


def _apply(original: Callable[..., None], grads: Sequence[Any], trainable_variables: Any = None) -> None:
    """What `optimizer.apply` does in a replica: where others update the same variables, it waits for its turn."""
    replica = context.current_replica()
    if replica is None:
        original(grads, trainable_variables)
        return
    if not replica.has_examples and trainable_variables is not None:
        # One that trains alone has no gradients then, which Keras refuses. Nothing will be updated.
        pairs = zip(grads, trainable_variables, strict=True)
        grads = [torch.zeros_like(tensor_of(each)) if grad is None else grad for grad, each in pairs]
    replica.update(functools.partial(original, grads, trainable_variables))


@final
class _Update:
    """What an optimizer does with gradients in a replica.

    Args:
        optimizer: The optimizer.
        checks_gradients: Whether somebody else sees to gradients that are not finite.
    """

    def __init__(self, optimizer: Any, checks_gradients: bool) -> None:
        self._optimizer: Any = weakref.ref(optimizer)
        self._checks_gradients = checks_gradients
        self._parts: _Parts | None = None

    def __call__(self, gradients: Sequence[torch.Tensor], variables: Sequence[Any], learning_rate: Any) -> None:
        replica = context.current_replica()
        if replica is None:
            self._whole(gradients, variables, learning_rate)
        elif (parts := self._parts_of(variables, replica)) is None:
            if replica.may_update(map(tensor_of, variables), checked=self._checks_gradients):
                self._whole(gradients, variables, learning_rate)
        else:
            with replica.split_update(map(tensor_of, variables), checked=self._checks_gradients) as may_update:
                if may_update:
                    with parts.in_place(gradients) as (own_gradients, own_variables):
                        if own_variables:
                            self._whole(own_gradients, own_variables, learning_rate)

    def _parts_of(self, variables: Sequence[Any], replica: ReplicaContext) -> "_Parts | None":
        """This replica's part of the update; `None` if every replica makes the whole."""
        if self._parts is None or not self._parts.are_of(variables, replica.strategy):
            self._parts = None
            with contextlib.suppress(KeyError):  # what a step has just made is not distributed yet
                if is_elementwise(self._optimizer()) and replica.own_part(tensor_of(variables[0])) is not None:
                    self._parts = _Parts(self._optimizer(), variables, replica)
        return self._parts

    def _whole(self, gradients: Sequence[torch.Tensor], variables: Sequence[Any], learning_rate: Any) -> None:
        optimizer = self._optimizer()
        type(optimizer)._backend_update_step(optimizer, gradients, variables, learning_rate)


def writes_to_weights(model: Any) -> bool:
    """Whether a training step writes to weights, or to what is kept for them, besides the split update."""
    return type(model).train_step is not TorchTrainer.train_step or any(
        not is_elementwise(optimizer)
        or bool(optimizer.use_ema or optimizer.gradient_accumulation_steps)
        or any(variable.constraint is not None for variable in optimizer._trainable_variables)
        for optimizer in changes.innermost(model.optimizer)
    )


@final
class _Parts:
    """The replica's part of an optimizer's variables, and of all that it keeps for them.

    Args:
        optimizer: The optimizer.
        variables: Those that it updates.
        replica: Whose part.
    """

    def __init__(self, optimizer: Any, variables: Sequence[Any], replica: ReplicaContext) -> None:
        kept = _kept_by_variable(optimizer)
        self._strategy = weakref.ref(replica.strategy)  # under another one they lie elsewhere
        self._variables = list(variables)
        self._cuts: list[tuple[int, _Cut]] = []
        self._swaps: list[tuple[Any, torch.Tensor, Any, torch.Tensor, Any]] = []
        for number, variable in enumerate(variables):
            held = [variable, *kept.get(id(variable), ())]
            # Also where this replica has no part: all must find out alike whether everything is distributed.
            places = [found for each in held if (found := replica.own_part(tensor_of(each))) is not None]
            cut = _Cut.of([each.placement for each in places], places[0].first, places[0].last)
            if cut.first < cut.last:
                self._cuts.append((number, cut))
                for each, place in zip(held, places, strict=True):
                    part = cut(shaped(place.shared, place.placement))
                    self._swaps.append((each, tensor_of(each), each._shape, part, tuple(part.shape)))

    def are_of(self, variables: Sequence[Any], strategy: Any) -> bool:
        """Whether they are still right, for an update of these variables."""
        return (
            strategy is self._strategy()
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
