"""Makes `optimizer.step()` update each part of the parameters in one replica only.

Parameters of all replicas are the same memory, so an update done by all would be done many times.
Optimizers that treat every element alike are split: each replica runs the same optimizer on its own
chunk, with the state of that chunk. The state lies in memory that all share (`slots`), so that the
user's optimizer shows all of it. Any other optimizer runs whole in every replica, on that replica's
own copy of the pages.
"""

import dataclasses
import itertools
import weakref
from collections.abc import Iterator, Sequence
from typing import Any, final

import torch

from stratagem.errors import StrategyError
from stratagem.variables.flat_ranges import FlatRange, UpdatedPart, joined
from stratagem.variables.optimizer_slices import (
    StateMark,
    bare_step,
    copy_options,
    is_elementwise,
    over,
    parameters_of,
    step_with_hooks,
)
from stratagem.variables.participant import Located, Updating
from stratagem.variables.slots import Form, Layout, Part, Slots, blocks, forms_of
from stratagem.variables.store import Placement, Store, laid_out, piece

# What a gradient scaler gives a fused optimizer for the time of a step.
_SCALER_ATTRIBUTES = ("grad_scale", "found_inf")
# To which a row without a gradient is the same as one with zeros.
_TAKE_SPARSE = (torch.optim.SGD, torch.optim.Adagrad)


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
        size: How many replicas share the parameters.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, copies: Located, runtime: Updating, size: int) -> None:
        # Not kept alive: in the controller the optimizer is the program's.
        self._optimizer = weakref.ref(optimizer)
        self._copies = weakref.proxy(copies)
        self._runtime = weakref.proxy(runtime)
        self._size = size
        self._slots = Slots((), ())
        self._signature: Any = None
        self._parts: list[UpdatedPart] = []
        self._ranges: list[FlatRange] = []
        self._private: list[torch.Tensor] = []  # parts for whose state there is no shared memory yet
        self._unshared: list[tuple[torch.Tensor, Part]] = []  # parts that have made no state yet, and its place
        self._hidden: dict[int, int] = {}  # parameters whose state the user's optimizer does not show yet: their names
        self._inner: Any = None
        self._options: Any = None  # which of the optimizer's are on, and were when there was memory for its state
        self._options_of_slots: Any = None
        self._ids: list[list[int]] = []  # of the parameters that the parts are of, for each group
        self._mark = StateMark(optimizer, versions=False)  # the state that the user's optimizer had when it was shown
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
        optimizer = self.optimizer
        with self._runtime.split_update(parameters_of(optimizer)) as may_update:
            if may_update:
                self._update(optimizer)
        if may_update and self._hidden:
            parameters = parameters_of(optimizer)
            if any(parameters[number].grad is not None for number in self._hidden):
                self._show()  # now that all replicas have made theirs

    def _update(self, optimizer: torch.optim.Optimizer) -> None:
        parameters = parameters_of(optimizer)
        if self._ids != _ids(optimizer) or self._options != _options(optimizer):
            self._build()
        if self.is_state_changed():
            self._take_own_parts(parameters)
        copy_options(optimizer, self._inner)
        whole = [each for each in self._ranges if each.takes(parameters)]
        rest = [part for each in self._ranges if each not in whole for part in each.parts]
        alone = self._with_gradients(rest, parameters) if rest else []
        for number, group in enumerate(self._inner.param_groups):
            group["params"] = [each.tensor for each in whole if each.parts[0].group == number]
            group["params"] += [part.tensor for part in alone if part.group == number]
        for name in _SCALER_ATTRIBUTES:
            setattr(self._inner, name, getattr(optimizer, name, None))
        with torch.no_grad():
            self._bare_step(self._inner)
        for each in whole:
            each.note_update()
        for part in alone:
            part.tensor.grad = None  # it would keep the whole gradient alive, and the next pass would copy it
        if self._unshared:
            self._share()
        # Written through another view: autograd must still notice that the values it saved are gone.
        torch.autograd.graph.increment_version([each for each in parameters if each.grad is not None])

    def _with_gradients(self, parts: Sequence[UpdatedPart], parameters: Sequence[torch.Tensor]) -> list[UpdatedPart]:
        """Gives parts their pieces of the gradients; those that have one."""
        found = []
        gradients: dict[int, torch.Tensor] = {}
        for part in parts:
            gradient = parameters[part.number].grad
            if gradient is None:
                continue
            if part.number not in gradients:  # once for all blocks of a parameter
                gradients[part.number] = laid_out(self._dense(gradient), part.placement)
            part.tensor.grad = piece(gradients[part.number], part.first, part.last)
            found.append(part)
        return found

    def _dense(self, gradient: torch.Tensor) -> torch.Tensor:
        if gradient.is_sparse and not isinstance(self.optimizer, _TAKE_SPARSE):
            raise StrategyError(
                f"{type(self.optimizer).__name__} takes no sparse gradients, got one of shape "
                f"{tuple(gradient.shape)}; use SparseAdam, SGD or Adagrad, or sparse=False in the nn.Embedding"
            )
        return gradient.to_dense() if gradient.is_sparse else gradient

    def _build(self) -> None:
        """Makes the inner optimizer over this replica's chunk, with the state that there is."""
        state = self._inner.state if self._inner is not None else {}
        old = {part.data_ptr(): state.get(part) for part in self._private}
        places = {(part.name, part.first): part for part in self._slots.parts}
        names = {part.name for part in self._slots.parts if part.cells}
        self._parts, self._private, self._unshared, self._hidden = [], [], [], {}
        groups, numbers = [], itertools.count()
        known: dict[torch.Tensor, dict[str, Any]] = {}
        for group_number, group in enumerate(self.optimizer.param_groups):
            for parameter in group["params"]:
                number, (store, placement) = next(numbers), self._found(parameter)
                own = self._copies.own_part(parameter)
                for first, last in blocks(own.first, own.last):
                    part = own.values(first, last)
                    place = places.get((placement.name, first))
                    self._parts.append(UpdatedPart(group_number, number, part, store, placement, first, last, place))
                    if place is not None and place.cells and self._slots.cell(place.flag):
                        known[part] = {cell.key: self._slots.cell(cell) for cell in place.cells}
                        continue
                    if kept := old.get(part.data_ptr()):
                        known[part] = kept
                    if place is None or not place.cells:
                        self._private.append(part)
                    else:
                        self._unshared.append((part, place))
                if placement.name in names:
                    self._hidden[number] = placement.name
            groups.append({**group, "params": []})
        self._inner = over(self.optimizer, groups, known)
        self._ids, self._options = _ids(self.optimizer), _options(self.optimizer)
        self._join()

    def _found(self, parameter: torch.Tensor) -> tuple[Store, Placement]:
        try:
            found: tuple[Store, Placement] = self._copies.find(parameter)
        except KeyError:
            raise StrategyError(
                f"an optimizer holds a parameter of shape {tuple(parameter.shape)} that this strategy does not manage: "
                f"each replica would train its own copy; make it inside strategy.scope(), before the run"
            ) from None
        return found

    def _join(self) -> None:
        """Finds the parts that are updated at once; those without a state only as long as they will make none."""
        parts = self._parts
        if self._options != self._options_of_slots:
            parts = [part if part.has_state else dataclasses.replace(part, place=None) for part in parts]
        for each in self._ranges:
            self._inner.state.pop(each.tensor, None)
        self._ranges = joined(parts, self._slots, self._copies.sum_of)
        self._inner.state |= {each.tensor: each.state for each in self._ranges if len(each.parts) > 1}

    def _share(self) -> None:
        """Moves state that this replica has made into shared memory."""
        for part, place in self._unshared:
            if state := self._inner.state.get(part):
                for cell in place.cells:
                    if cell.key in state:
                        state[cell.key] = self._slots.cell(cell).copy_(state[cell.key])
                self._slots.cell(place.flag).fill_(1)
        left = [(part, place) for part, place in self._unshared if not self._inner.state.get(part)]
        if len(left) < len(self._unshared):
            self._unshared = left
            self._join()

    def _show(self) -> None:
        """Lets the user's optimizer have the state of whole parameters, where it lies."""
        parameters, views = parameters_of(self.optimizer), self._slots.views()
        for number, name in list(self._hidden.items()):
            if found := views.get(name):
                self.optimizer.state[parameters[number]].update(found)
                del self._hidden[number]
        self._mark = StateMark(self.optimizer, versions=False)

    def is_state_changed(self) -> bool:
        """Whether the program has changed the state of the optimizer, in place or by another."""
        return not self._mark.is_of(self.optimizer) or self._slots.is_written()

    def forget_changes(self) -> None:
        """In the controller, after a step that failed: shows the state of the last whole update again."""
        self._slots.drop_written()
        self.optimizer.state.clear()
        self._build()
        self._show()

    def _take_own_parts(self, parameters: Sequence[torch.Tensor]) -> None:
        """In a step: makes what the program did to the state that of this replica's parts; the others do theirs."""
        own = {(part.placement.name, part.first) for part in self._parts}
        parts = [part for part in self._slots.parts if (part.name, part.first) in own]
        given = {self._placement(each).name: state for each, state in self.optimizer.state.items() if state}
        for part in parts:
            part.require_fitting(given.get(part.name), type(self.optimizer).__name__)
        self._slots.write(given, parts)
        self._slots.drop_written()
        self._build()

    def new_slots(self, *, loaded: bool = False) -> Slots | None:
        """In the controller: memory for the state, if that which there is does not fit any more.

        Args:
            loaded: Whether the user's optimizer has been given another state.
        """
        optimizer = self.optimizer
        needs = [each.requires_grad for each in parameters_of(optimizer)]
        signature = _ids(optimizer), needs, _options(optimizer)
        if signature == self._signature and not loaded:
            return None
        layout, slots = self._layout(), self._slots
        if layout.parts != slots.parts:
            slots = layout.make()
        if slots is not self._slots or loaded:
            slots.write(
                {self._placement(each).name: optimizer.state.get(each, {}) for each in parameters_of(optimizer)}
            )
        self._signature = signature
        return slots if slots is not self._slots or loaded else None

    def take_slots(self, slots: Slots, *, loaded: bool = False) -> None:
        """Takes the memory of the state; what this replica has made elsewhere moves there.

        Args:
            slots: The memory.
            loaded: Whether its state is to be that of the memory, whatever it has.
        """
        if loaded:
            self._private = []
            if self._runtime.rank:
                self.optimizer.state.clear()
            self._slots.drop_written()
        self._slots, self._options_of_slots = slots, _options(self.optimizer)
        self._build()
        self._share()
        self._show()

    def _layout(self) -> Layout:
        optimizer, layout, numbers = self.optimizer, Layout(), itertools.count()
        for group in optimizer.param_groups:
            tried: dict[torch.dtype, list[Form]] = {}  # those that have no state yet will have one alike
            for parameter in group["params"]:
                number = next(numbers)
                if optimizer.state.get(parameter):
                    forms = forms_of(optimizer, group, parameter, is_flat=True)
                elif not parameter.requires_grad:
                    continue
                else:
                    if parameter.dtype not in tried:
                        tried[parameter.dtype] = forms_of(optimizer, group, parameter, is_flat=True)
                    forms = tried[parameter.dtype]
                layout.add(number, self._placement(parameter), forms, list(self._ranges_of(parameter)))
        return layout

    def _ranges_of(self, parameter: torch.Tensor) -> Iterator[tuple[int, int]]:
        """What all replicas update of a parameter at a time."""
        for rank in range(self._size):
            part = self._copies.part_of(rank, parameter)
            yield from blocks(part.first, part.last)

    def _placement(self, parameter: torch.Tensor) -> Placement:
        placement: Placement = self._copies.find(parameter)[1]
        return placement


def _ids(optimizer: torch.optim.Optimizer) -> list[list[int]]:
    return [list(map(id, group["params"])) for group in optimizer.param_groups]


def _options(optimizer: torch.optim.Optimizer) -> list[dict[str, bool]]:
    """Which options of each group are on: an optimizer makes other state where one is that was off."""
    return [
        {key: bool(value) for key, value in group.items() if key not in ("params", "lr", "initial_lr")}
        for group in optimizer.param_groups
    ]
