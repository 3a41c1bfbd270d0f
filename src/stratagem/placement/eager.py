"""Runs eager operations where they belong: copies inputs from elsewhere, marks results, obeys scopes.

A function mode of torch does it, above autograd, so that gradients flow back through the copies. When it is there is
`presence`'s.
"""

import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, final

import torch
from torch.overrides import TorchFunctionMode

from stratagem import _torch
from stratagem.devices.kind_table import CPU
from stratagem.errors import DeviceNotFoundError, PlacementError
from stratagem.placement import log, resolution, scopes
from stratagem.placement.arguments import Copies, goal_of, leaves_of, replaced, tensors_in
from stratagem.placement.names import NameCounter, type_of
from stratagem.placement.residence import Asked, Places, ResidencePlace, storage_of
from stratagem.placement.torch_functions import FunctionKind, changed_quietly, kind_of

_NOT_ASKED = object()


@final
class Placing(TorchFunctionMode):
    """Sees every torch function that a thread calls.

    Attributes:
        places: The devices that it places on.
        running: How many operations are under way in it; meanwhile it cannot be taken away.
    """

    places: Places
    _frame: scopes.Frame

    def __init__(self) -> None:
        super().__init__()
        self._names = NameCounter()
        self._asked: Any = _NOT_ASKED
        self._updates: list[Any] = []
        self.running = 0

    def begin(self, places: Places) -> None:
        """Goes on with these places, and asks the scopes anew."""
        self.places = places
        self._frame = scopes.frame()
        self._asked = _NOT_ASKED
        if not scopes.asks_functions():
            with contextlib.suppress(DeviceNotFoundError):  # it is the error of the first operation, if one comes
                self._asked = places.asked(scopes.spec_for(None), "")

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        kind = kind_of(func)
        self.running += 1
        try:
            if kind is FunctionKind.LOOK or scopes.state.recorders or not scopes.UNPLACED.isdisjoint(types):
                return func(*args, **kwargs)
            if kind is FunctionKind.BLOCK:
                return self._note_block(func, args, kwargs)
            return self._place(func, kind, args, kwargs)
        finally:
            self.running -= 1

    def _place(
        self, func: Callable[..., Any], kind: FunctionKind, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Any:
        match kind:
            case FunctionKind.COMPUTE:
                tensors = list(tensors_in(args))
                if kwargs:
                    tensors += tensors_in(kwargs.values())
                    if (out := kwargs.get("out")) is not None or kwargs.get("inplace") is True:
                        return self._change(func, args, kwargs, tensors, out)
                return self._compute(func, args, kwargs, tensors)
            case FunctionKind.VIEW:
                return self._view(func, args, kwargs)
            case FunctionKind.CHANGE | FunctionKind.OVERWRITE:
                return self._change(func, args, kwargs, [*tensors_in(args), *tensors_in(kwargs.values())], None)
            case FunctionKind.READ_GRADIENT:
                gradient = func(*args, **kwargs)
                if gradient is not None:
                    self.places.of(args[0]).settle(gradient, torch.Tensor.backward)
                return gradient
            case FunctionKind.MAKE | FunctionKind.MAKE_ON_HOST | FunctionKind.MAKE_LIKE:
                return self._make(func, kind, args, kwargs)
            case FunctionKind.EACH:
                return self._each(func, args, kwargs)
            case FunctionKind.CAST | FunctionKind.TO_HOST | FunctionKind.TO_ACCELERATOR:
                return self._cast(func, kind, args, kwargs)
        return self._backward(func, args, kwargs)

    def _note_block(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """torch marks the steps of optimizers for its profiler, also if they fail."""
        block = func(*args, **kwargs)
        if args and isinstance(args[0], str) and args[0].startswith("Optimizer.step#"):
            self._updates.append(block)
        elif args and self._updates and args[0] is self._updates[-1]:
            self._updates.pop()
        return block

    # Where an operation runs

    def _target(
        self, func: Callable[..., Any], tensors: Sequence[torch.Tensor], made: Callable[[], int | None] = lambda: None
    ) -> Asked | None:
        """What the scopes ask for; `None` if they leave it open.

        Args:
            func: The function.
            tensors: Its inputs.
            made: Tells how much memory its result takes, if it makes a tensor.
        """
        # An optimizer and its state are where the parameters are, whatever code around it asks for; its closure is not.
        if self._updates and not torch.is_grad_enabled():
            return None
        if scopes.frame() is not self._frame:  # another coroutine has its turn
            self.begin(self.places)
        if self._asked is not _NOT_ASKED:
            found: Asked | None = self._asked
            return found
        operation = type_of(func)
        if scopes.asks_functions():
            name = self._names.unique(operation)
            spec = scopes.spec_for(scopes.Operation(operation, name, tuple(tensors), made()))
            return self.places.asked(spec, operation)
        return self.places.asked(scopes.spec_for(None), operation)

    def _follow(self, tensors: Sequence[torch.Tensor]) -> tuple[ResidencePlace, str]:
        """Where an operation runs that no scope has placed: with its parameters, else with its first placed input."""
        first = home = self.places.home
        for tensor in tensors:
            place = self.places.of(tensor)
            if place is not home:
                if tensor.is_leaf and tensor.requires_grad:
                    return place, "follows its parameters"
                first = place if first is home else first
        return first, "follows its inputs" if tensors else "not placed"

    def _is_left_to_torch(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Whether nothing was placed and no scope is open: then two devices in one call are torch's to judge."""
        return not scopes.state.open and not self.places.has_placed(tensors)

    # What is done there

    def _compute(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], tensors: list[torch.Tensor]
    ) -> Any:
        if not tensors:
            return self._make(func, FunctionKind.MAKE_ON_HOST, args, kwargs)
        asked = self._target(func, tensors)
        place, why = (asked.place, asked.why) if asked is not None else self._follow(tensors)
        if asked is None and self._is_left_to_torch(tensors):
            results = func(*args, **kwargs)
            if place is self.places.home:
                self._settle(func, results, place, tensors)
            if log.collectors:
                log.note(func, tensors, results, None, place, why, [])
            return results
        if place.lacks and place is not self.places.home and getattr(func, "__name__", "") in place.lacks:
            return self._elsewhere(func, args, kwargs, tensors, asked, place, None)
        copies = self._bring(tensors, place, func)
        try:
            if copies:
                new_args, new_kwargs = replaced(args, kwargs, copies)
                results = func(*new_args, **new_kwargs)
            else:
                results = func(*args, **kwargs)
        except NotImplementedError as error:
            if place in (self.places.home, self.places.host):
                raise
            return self._elsewhere(func, args, kwargs, tensors, asked, place, error)
        self._settle(func, results, place, tensors)
        if copies:
            _carry_back(copies, changed_quietly(func, args, kwargs))
        if log.collectors:
            log.note(func, tensors, results, asked, place, why, copies)
        return results

    def _elsewhere(
        self,
        func: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        tensors: list[torch.Tensor],
        asked: Asked | None,
        place: ResidencePlace,
        error: Exception | None,
    ) -> Any:
        """Runs an operation on the host that its device has no kernel for, where that is allowed."""
        operation = type_of(func)
        if not resolution.is_soft():
            raise PlacementError(resolution.refusal_of_kernel(operation, place.device)) from error
        host = self.places.host
        resolution.tell_once(
            f"{place.device.name} has no kernel for {operation}; it runs on {host.device.name} (soft placement)"
        )
        copies = self._bring(tensors, host, func)
        new_args, new_kwargs = replaced(args, kwargs, copies)
        results = func(*new_args, **new_kwargs)
        self._settle(func, results, host, tensors)
        _carry_back(copies, changed_quietly(func, args, kwargs))
        if log.collectors:
            log.note(func, tensors, results, asked, host, "no kernel there", copies)
        return results

    def _view(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Views stay with their tensor: to move it is left to the first operation that computes."""
        tensors = [*tensors_in(args), *tensors_in(kwargs.values())]
        place = self.places.of(tensors[0]) if tensors else self.places.home
        is_torchs = self._is_left_to_torch(tensors)
        copies = [] if is_torchs else self._bring(tensors, place, func)
        new_args, new_kwargs = replaced(args, kwargs, copies)
        results = func(*new_args, **new_kwargs)
        if not is_torchs or place is self.places.home:
            self._settle(func, results, place, tensors)
        if log.collectors:
            log.note(func, tensors, results, None, place, "a view stays with its tensor", copies)
        return results

    def _change(
        self,
        func: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        tensors: list[torch.Tensor],
        out: Any,
    ) -> Any:
        """An in-place change happens where its tensor is, and only there."""
        changed = next(iter(tensors_in((out,))), None)
        subject = changed if changed is not None else (tensors[0] if tensors else None)
        if subject is None:
            return func(*args, **kwargs)
        place = self.places.of(subject)
        asked = self._target(func, tensors)
        # Updates by hand, and counters, are where their variables are.
        if asked is not None and asked.place is not place and torch.is_grad_enabled() and subject.is_floating_point():
            self._refuse_change(func, place, asked.place)
        is_torchs = asked is None and self._is_left_to_torch(tensors)
        copies = [] if is_torchs or kind_of(func) is FunctionKind.OVERWRITE else self._bring(tensors, place, func)
        new_args, new_kwargs = replaced(args, kwargs, copies)
        results = func(*new_args, **new_kwargs)
        if log.collectors:
            log.note(func, tensors, results, asked, place, "changes its tensor in place", copies)
        return results

    def _refuse_change(self, func: Callable[..., Any], place: ResidencePlace, asked: ResidencePlace) -> None:
        name = getattr(func, "__name__", type_of(func))
        if not resolution.is_soft():
            raise PlacementError(
                f"{name!r} changes a tensor on {place.device.name} in place, inside a scope for {asked.device.name}: a "
                f"change cannot move its tensor. Make a new tensor (x = x + y, not x += y), or do it outside the "
                f"scope, or in sg.device(None)"
            )
        resolution.tell_once(
            f"{name!r} changes a tensor in place, so it runs on {place.device.name}, where the tensor is, and not on "
            f"{asked.device.name} (soft placement)"
        )

    def _make(
        self, func: Callable[..., Any], kind: FunctionKind, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Any:
        made = func(*args, **kwargs) if kind is FunctionKind.MAKE_ON_HOST else None
        if kind is FunctionKind.MAKE_ON_HOST and not isinstance(made, torch.Tensor):
            return made
        tensors = [*tensors_in(args), *tensors_in(kwargs.values())]
        is_new = kind is FunctionKind.MAKE
        asked = self._target(func, tensors, lambda: _num_bytes_made(func, args, kwargs) if is_new else None)
        place, why = (asked.place, asked.why) if asked is not None else self._follow(tensors)
        copies: Copies = []
        if isinstance(made, torch.Tensor):
            copies = self._bring([made], place, func)
            results = copies[0][1] if copies else made
        else:
            given = kwargs.get("device")
            if given is None and place.torch_device.type != "cpu":
                kwargs = {**kwargs, "device": place.torch_device}
            results = func(*args, **kwargs)
            self._settle(func, results, place, tensors)
            place = place if given is None else self.places.of(results)
        if log.collectors:
            log.note(func, tensors, results, asked, place, why, copies)
        return results

    def _cast(
        self, func: Callable[..., Any], kind: FunctionKind, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Any:
        """A move that the program asks for by itself; torch's `cpu` is also the device of simulated ones."""
        subject = args[0]
        place = self.places.of(subject)
        is_home = place is self.places.home
        host = self.places.host
        if kind is FunctionKind.TO_HOST and place is not host and not (is_home and place.device.device_type == CPU):
            results = subject.clone() if subject.is_cpu else func(*args, **kwargs)
            target, why = host, "cpu()"
        elif kind is FunctionKind.TO_ACCELERATOR:
            results = func(*args, **kwargs)
            target, why = self.places.of(results), "to(device)"
        elif kind is FunctionKind.CAST and (goal := goal_of(args[1:], kwargs)) is not None:
            results = func(*args, **kwargs)
            if isinstance(goal, torch.Tensor) and self.places.of(goal) is not place:
                target, why = self.places.of(goal), "to(tensor)"
                results = results if results is not subject else subject.clone()
            else:
                target, why = (place if results.device == place.torch_device else self.places.of(results)), "to(device)"
        else:
            return self._compute(func, args, kwargs, [*tensors_in(args), *tensors_in(kwargs.values())])
        target.settle(results, func)
        if log.collectors:
            copies = [(subject, results, place)] if target is not place else []
            log.note(func, [subject], results, None, target, why, copies)
        return results

    def _each(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Every tensor of a list on its own device."""
        results = func(*args, **kwargs)
        subjects = list(tensors_in(args[:1]))
        if isinstance(results, tuple | list):
            for subject, result in zip(subjects, results, strict=False):
                self.places.of(subject).settle(result, func)
        if log.collectors and subjects:
            place = self.places.of(subjects[0])
            log.note(func, subjects, results, None, place, "each tensor where it is", [])
        return results

    def _backward(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Gradients come into being where their operations ran, and stay with their tensors."""
        tensors = list(tensors_in(args[:1]))
        gives = kind_of(func) is FunctionKind.GRADIENTS
        leaves = [] if gives else leaves_of(tensors)
        results = func(*args, **kwargs)
        found = zip(tensors_in(args[1:2]), results, strict=False) if gives else ((leaf, leaf.grad) for leaf in leaves)
        for tensor, gradient in found:
            if isinstance(gradient, torch.Tensor):
                self.places.of(tensor).settle(gradient, func)
        if log.collectors and tensors:
            log.note(func, tensors, results, None, self.places.of(tensors[0]), "gradients go the way back", [])
        return results

    # Parts of the above

    def _bring(self, tensors: Iterable[torch.Tensor], place: ResidencePlace, func: Callable[..., Any]) -> Copies:
        """Copies of those tensors that are elsewhere: original, copy, where the original is."""
        copies: Copies = []
        for tensor in tensors:
            source = self.places.of(tensor)
            if source is place or any(tensor is each for each, _, _ in copies):
                continue
            if tensor.device == place.torch_device:
                place.require_room(tensor, func)
                copied = tensor.clone()
            elif source.torch_device == tensor.device:
                copied = tensor.to(place.torch_device)
            else:
                continue  # on no device that stratagem knows, such as torch's "meta"
            place.settle(copied, func)
            copies.append((tensor, copied, source))
        return copies

    def _settle(
        self, func: Callable[..., Any], results: Any, place: ResidencePlace, tensors: Sequence[torch.Tensor]
    ) -> None:
        """Marks results."""
        if not place.tracked:
            return
        # At a home with a limit, what is not marked was made outside; its views and itself stay so.
        known = [storage_of(each) for each in tensors] if place is self.places.home else []
        for each in tensors_in((results,)):
            if not known or not any(storage_of(each) is other for other in known):
                place.settle(each, func)


def _num_bytes_made(func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int | None:
    """How much memory a new tensor takes, from one without memory; `None` where torch cannot make that."""
    with contextlib.suppress(Exception):
        made = func(*args, **{**kwargs, "device": "meta"})
        return int(made.numel() * made.element_size())
    return None


def _carry_back(copies: Copies, quietly: Sequence[Any]) -> None:
    """Gives originals what a function changed in their copies."""
    for tensor, copied, _ in copies:
        counted = not copied.is_inference() and _torch.tensors.version_of(copied)
        if counted or any(tensor is each for each in quietly):
            with torch.no_grad():
                tensor.copy_(copied)
