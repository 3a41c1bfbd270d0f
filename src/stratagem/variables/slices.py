"""Makes `optimizer.step()` update each part of the parameters in one replica only.

Parameters of all replicas are the same memory, so an update done by all would be done many times.
Optimizers that treat every element alike are split: each replica runs the same
optimizer on its own chunk, and keeps the optimizer's state for that chunk only. Any other optimizer
runs whole in every replica, on that replica's own copy of the pages.
"""

import itertools
import weakref
from typing import Any, final

import torch

from stratagem.variables.optimizer_slices import (
    BLOCK,
    bare_step,
    copy_options,
    is_elementwise,
    over,
    parameters_of,
    step_with_hooks,
)
from stratagem.variables.participant import Located, Updating
from stratagem.variables.store import Placement, laid_out, piece


def can_be_split(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the optimizer does the same to every element, whatever its neighbours."""
    different = any(group.get("differentiable") for group in optimizer.param_groups)
    return is_elementwise(optimizer) and not different


@final
class SplitUpdate:
    """One replica's part of an optimizer that is split.

    Args:
        optimizer: The optimizer that the user made, over whole parameters.
        copies: Where the parameters lie.
        runtime: The replica.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, copies: Located, runtime: Updating) -> None:
        # Not kept alive: in the controller the optimizer is the program's.
        self._optimizer = weakref.ref(optimizer)
        self._copies = weakref.proxy(copies)
        self._runtime = weakref.proxy(runtime)
        self._parts: list[tuple[int, torch.Tensor, int, int]] = []
        self.inner: Any = None
        self._num_parameters = -1
        self._bare_step = bare_step(type(optimizer))

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The optimizer that the user made."""
        optimizer = self._optimizer()
        if optimizer is None:
            raise ReferenceError("the optimizer has been dropped")
        return optimizer

    def step(self, closure: Any = None) -> Any:
        """What `optimizer.step()` does in a replica."""
        return step_with_hooks(self.optimizer, self._update_if_allowed, closure)

    def _update_if_allowed(self) -> None:
        with self._runtime.split_update(parameters_of(self.optimizer)) as may_update:
            if may_update:
                self._update()

    def _update(self) -> None:
        if self._num_parameters != sum(len(group["params"]) for group in self.optimizer.param_groups):
            self._build()
        copy_options(self.optimizer, self.inner)
        parameters = parameters_of(self.optimizer)
        gradients: dict[int, torch.Tensor] = {}
        for number, part, first, last in self._parts:
            parameter = parameters[number]
            if parameter.grad is None:
                part.grad = None
                continue
            if number not in gradients:  # once for all blocks of a parameter
                gradients[number] = laid_out(parameter.grad, self._placement(parameter))
            part.grad = piece(gradients[number], first, last)
        with torch.no_grad():
            self._bare_step(self.inner)
        for _, part, _, _ in self._parts:
            part.grad = None  # it would keep the whole gradient alive, and the next pass would copy it
        # Written through another view: autograd must still notice that the values it saved are gone.
        torch.autograd.graph.increment_version([each for each in parameters if each.grad is not None])

    def _build(self) -> None:
        """Makes the inner optimizer over this replica's chunk, keeping the state that it has."""
        state = self.inner.state if self.inner is not None else {}
        old = {(number, first): state.get(part) for number, part, first, _ in self._parts}
        self._parts, groups, numbers = [], [], itertools.count()
        for group in self.optimizer.param_groups:
            parts = []
            for parameter in group["params"]:
                number = next(numbers)
                begin, stop = self._copies.own_part(parameter)
                for first in range(begin, stop, BLOCK):
                    last = min(first + BLOCK, stop)
                    part = self._copies.shared_part(parameter, first, last)
                    self._parts.append((number, part, first, last))
                    parts.append(part)
            groups.append({**group, "params": parts})
        self.inner = over(self.optimizer, groups)
        for number, part, first, _ in self._parts:
            if kept := old.get((number, first)):
                self.inner.state[part] = kept
        self._num_parameters = sum(len(group["params"]) for group in self.optimizer.param_groups)

    def _placement(self, parameter: torch.Tensor) -> Placement:
        placement: Placement = self._copies.find(parameter)[1]
        return placement

    def state(self) -> list[tuple[int, int, int, dict[str, Any]]]:
        """This chunk's state: for each part the number of its parameter, its range, and its values."""
        if self.inner is None:
            return []
        return [
            (number, first, last, {key: _own(value) for key, value in self.inner.state[part].items()})
            for number, part, first, last in self._parts
            if self.inner.state.get(part)
        ]

    def take_whole_state(self) -> dict[int, dict[str, Any]]:
        """Takes this chunk's share of the state that the user's optimizer has; returns all of it."""
        parameters = parameters_of(self.optimizer)
        states = {
            number: dict(self.optimizer.state[each])
            for number, each in enumerate(parameters)
            if each in self.optimizer.state
        }
        self.optimizer.state.clear()
        self.load(states)
        return states

    def load(self, states: dict[int, dict[str, Any]]) -> None:
        """Takes this chunk's share of the state of whole parameters."""
        self.inner = None
        self._build()
        for number, parameter in enumerate(parameters_of(self.optimizer)):
            parts = [each for each in self._parts if each[0] == number]
            for key, value in states.get(number, {}).items():
                whole = isinstance(value, torch.Tensor) and value.shape == parameter.shape and value.dim() > 0
                ordered = laid_out(value, self._placement(parameter)) if whole and parts else value
                for _, part, first, last in parts:
                    self.inner.state[part][key] = _own(piece(ordered, first, last) if whole else value)


def whole_state(
    optimizer: torch.optim.Optimizer, chunks: list[list[tuple[int, int, int, dict[str, Any]]]]
) -> dict[torch.Tensor, dict[str, Any]]:
    """Puts the state of whole parameters together from all replicas' chunks."""
    parameters = parameters_of(optimizer)
    whole: dict[torch.Tensor, dict[str, Any]] = {}
    for number, first, last, values in (part for chunk in chunks for part in chunk):
        parameter = parameters[number]
        own = whole.setdefault(parameter, {})
        for key, value in values.items():
            if isinstance(value, torch.Tensor) and value.dim() == 1 and len(value) == last - first:
                form = torch.empty_like(parameter, memory_format=torch.preserve_format)
                full = own.setdefault(key, torch.empty_strided(form.shape, form.stride(), dtype=value.dtype))
                piece(full, first, last).copy_(value)
            else:
                own[key] = value
    return whole


def _own(value: Any) -> Any:
    """The value, not shared with whoever has it now: optimizers change their state in place."""
    return value.clone() if isinstance(value, torch.Tensor) else value
