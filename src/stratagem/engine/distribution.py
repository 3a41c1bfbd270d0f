"""Gives the replicas what is made in a scope, and keeps them up to date with it.

Where tensors lie is up to `copies`; modules, optimizers, schedulers and scalers are sent once and
from then on travel as references. Between runs the controller's objects are ordinary ones: what it
changes in them is found and passed on at the next run.
"""

import contextlib
import gc
import itertools
import weakref
from abc import abstractmethod
from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, final

import torch

from stratagem import _torch, _tree
from stratagem._parallel_wrappers import refuse_wrapper
from stratagem.engine import child_calls, context, foreign_metrics
from stratagem.engine.recipe import Recipe
from stratagem.errors import StrategyError
from stratagem.objects import new_parts, state_diff
from stratagem.objects.steady import Steady
from stratagem.objects.tracking import Tracker
from stratagem.processes.packing import can_be_packed, pack, refusal
from stratagem.processes.registry import Registry
from stratagem.variables import aggregation
from stratagem.variables.agreement import settings_of
from stratagem.variables.optimizer_slices import StateMark, parameters_of
from stratagem.variables.private import bring
from stratagem.variables.slices import SplitUpdate

_MANY_DROPPED = 1000
_AS_IT_IS = contextlib.nullcontext()


class Receivers(Protocol):
    """Who distributed objects are given to."""

    key: int  # by which children know the strategy

    @abstractmethod
    def ask_children(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """Calls a function of the library in every child, and waits for all answers."""

    @property
    @abstractmethod
    def are_at_work(self) -> bool:
        """Whether children would have to finish what the program has given them before they answer."""

    @abstractmethod
    def make_equal(self, tensors: Sequence[torch.Tensor], labels: Mapping[int, str], settings: Sequence[str]) -> None:
        """Lets tensors that are about to be distributed have the same values everywhere."""


class VariablePlacing(Protocol):
    """Decides where the main program's tensors lie."""

    def place(self, named: Sequence[tuple[int, torch.Tensor]], labels: Mapping[int, str]) -> Sequence[Any]:
        """Makes tensors ready to be given out; returns what children are sent."""

    def add(self, placed: Any, tensors: Mapping[int, torch.Tensor]) -> None:
        """Takes tensors that have been given out."""

    def forget_state(self) -> None:
        """After a run that failed: children are told everything."""


class MainSide(Protocol):
    """What the main program itself does with distributed objects: as replica 0, or as the one that only looks on."""

    @property
    def recipe(self) -> Recipe:
        """What all replicas have in common."""

    @property
    def updates(self) -> Mapping[int, SplitUpdate]:
        """Optimizers whose state is spread over the replicas, by name."""

    @property
    def copies(self) -> VariablePlacing:
        """Where its tensors lie."""

    def add_objects(self, objects: dict[int, Any]) -> None:
        """Takes objects that have been given out."""

    def drop(self, names: Sequence[int]) -> None:
        """Lets go of what the program has dropped."""


class GivenTensors(NamedTuple):
    """The tensors that are arguments of a function, by `id`: they are its inputs.

    Attributes:
        all: All of them.
        parts: Those that are parts of a batch.
    """

    all: Container[int]
    parts: Container[int]


@final
class Distribution:
    """The distributed objects of one strategy, in the controller.

    Args:
        replicas: Who they are given to.
    """

    def __init__(self, replicas: Receivers) -> None:
        self.registry = Registry(keeps=False)
        self.tracker = Tracker()
        self._replicas = weakref.proxy(replicas)
        self._names = itertools.count(1)
        self._reloaded: set[int] = set()  # optimizers whose state the others must take
        self._marks: dict[int, StateMark] = {}  # of optimizers that run whole: their state when all had the same
        self.steady = Steady(self.registry)
        self._state: state_diff.Snapshot = {}

    def bring_up_to_date(self, own: MainSide) -> None:
        """Distributes new objects, and the state of optimizers that the controller gave them."""
        # Tensors that are placed now are trained later.
        with torch.inference_mode(mode=False) if torch.is_inference_mode_enabled() else _AS_IT_IS:
            self._bring_up_to_date(own)

    def _bring_up_to_date(self, own: MainSide) -> None:
        num_dropped = self.registry.num_dropped
        # Nobody waits for what is under way, which may itself wait for the program, in order to free some memory.
        if num_dropped > _MANY_DROPPED or (num_dropped and not self._replicas.are_at_work):
            dropped = self.registry.take_dropped()
            self._replicas.ask_children(child_calls.drop, self._replicas.key, dropped)
            own.drop(dropped)
        self.steady.look()
        # What a distributed module holds is distributed too, wherever it was made.
        live = self.steady.rest()
        self.tracker.note(*state_diff.unknown_parts(live.values(), self.registry))
        if own.recipe.num_machines > 1 and self.tracker.has_news:
            live = {}
            gc.collect()  # what is garbage must be so on all machines, whenever their collectors come round
            live = self.steady.rest()
        made = self.tracker.take()
        if made:
            try:
                foreign_metrics.adapt(made)
                self._check(made)
                self._distribute(made, own)
            except BaseException:
                self.tracker.put_back([obj for obj in made if obj not in self.registry])
                raise
            live = self.steady.rest()
        for obj in live.values():
            if isinstance(obj, torch.optim.Optimizer):
                self._check_optimizer(obj, set())  # groups may have been added
        for name, update in own.updates.items():
            if name in live:
                self._give_slots(update, name, loaded=name in self._reloaded or update.is_state_changed())
        # What is kept once, the others do not need.
        changed = {name for name, mark in self._marks.items() if name in live and not mark.is_of(live[name])}
        reloaded, self._reloaded = (set() if own.recipe.kept_on else self._reloaded | changed), set()
        for name in (reloaded & live.keys()) - own.updates.keys():
            optimizer = live[name]
            state = _tree.map_only(torch.Tensor, torch.Tensor.cpu, _whole_state(optimizer))
            self._give_groups(name, optimizer)
            self._replicas.ask_children(child_calls.load_whole_state, self._replicas.key, name, state)

    @torch.inference_mode(mode=False)
    def bring_pending(self, device: torch.device) -> None:
        """Moves variables that have been made, and are not given out yet, to the device that they will be on.

        What has no memory yet, lazy parameters and tensors on the meta device, stays; so do sparse tensors. The state
        of optimizers follows when it is given out.
        """
        pending = self.tracker.pending()
        tensors: list[Any] = [each for each in pending if isinstance(each, torch.Tensor)]
        for module in (each for top in pending if isinstance(top, torch.nn.Module) for each in top.modules()):
            # Not by `parameters()`: layers of Keras, which may be half built, would take that for the end of it.
            tensors += _torch.module_parts.own_tensors(module)
        for tensor in tensors:
            if tensor is not None and _can_be_moved(tensor):
                bring(tensor, device)

    def changes(self) -> state_diff.Snapshot:
        """What the controller changed in distributed objects since the last run, besides tensors."""
        return state_diff.difference(self._state, self._described(self.steady.rest()))

    def note_state(self) -> None:
        """Takes the state at the look after a run, which is the same in all replicas, as the one to compare with."""
        was_so = self.steady.is_so
        rest = self.steady.rest()
        self._state = (self._state if was_so else {}) | self._described(rest)
        self._marks = {name: StateMark(rest[name], versions=True) for name in self._marks if name in rest}
        if not was_so:
            self.steady.note()

    def look_after_run(self, *, several: bool) -> StrategyError | None:
        """Looks at all objects; what is wrong if a step has given a module parameters that several replicas made."""
        self.steady.look()
        objects = self.steady.rest().values()
        if several and state_diff.unknown_parts(objects, self.registry):
            try:
                new_parts.refuse_new(objects, self.registry.live().values())
            except StrategyError as error:
                return error
        return None

    def let_go(self) -> None:
        """Keeps nothing of the program's alive any more; no run follows."""
        self._marks.clear()
        self._state.clear()
        self.steady.forget()

    def forget_state(self, own: MainSide) -> None:
        """After a run that failed replicas may be in different states: the next run sends everything."""
        self._state = {}
        self.steady.forget()
        live = self.registry.live()
        self._reloaded = {name for name, obj in live.items() if isinstance(obj, torch.optim.Optimizer)}
        for update in [each for name, each in own.updates.items() if name in live]:
            with contextlib.suppress(StrategyError):  # the next run refuses what its optimizer holds
                update.forget_changes()
        own.copies.forget_state()

    def _described(self, objects: Mapping[int, Any]) -> state_diff.Snapshot:
        return state_diff.snapshot({name: obj for name, obj in objects.items() if name}, self.registry.names_by_id)

    def reference_in_run(self, obj: Any, given: Callable[[], GivenTensors]) -> int | None:
        """The name of an object that a function mentions; refuses what was made elsewhere and can be trained.

        Args:
            obj: The object.
            given: Tells which tensors are arguments of the function.
        """
        name = self.registry.reference(obj)
        if name is None and isinstance(obj, torch.nn.Module | torch.optim.Optimizer | torch.Tensor):
            if _torch.compiling.is_compiled_module(obj) and not any(_torch.module_parts.hooks_in(vars(obj))):
                if (inside := _torch.compiling.uncompiled(obj)) in self.registry:
                    return None  # it is made again around the one that replicas have
                obj = inside
            self._refuse(obj, given)
        return name

    def _refuse(self, obj: Any, given: Callable[[], GivenTensors]) -> None:
        if isinstance(obj, torch.Tensor) and not isinstance(obj, torch.nn.Parameter):
            if obj.grad_fn is not None and id(obj) not in given().parts:
                raise StrategyError(
                    f"a tensor of shape {tuple(obj.shape)} with a graph ({obj.grad_fn.name()}) cannot be sent to the "
                    f"replicas: gradients would not come back through it; compute it inside the function, or send "
                    f"tensor.detach()"
                )
            if obj.requires_grad and id(obj) not in given().all:
                raise StrategyError(
                    f"the function uses a tensor of shape {tuple(obj.shape)} with requires_grad=True that is not a "
                    f"parameter: each replica would train its own copy; make it torch.nn.Parameter(...) inside "
                    f"strategy.scope(), or pass it as an argument, or pass tensor.detach()"
                )
            return
        self.tracker.refuse_if_elsewhere(obj)
        refuse_wrapper(obj)
        where = "created outside strategy.scope(); create it inside `with strategy.scope():`, or call strategy.adopt"
        if isinstance(obj, torch.nn.Module):
            number = len(list(obj.parameters()))
            # Buffers that no step changes are constants, such as the weights of classes.
            has_statistics = any(getattr(each, "running_mean", None) is not None for each in obj.modules())
            is_metric = aggregation.is_chosen(obj) or any(map(foreign_metrics.is_one, obj.modules()))
            if number or has_statistics or is_metric:
                raise StrategyError(f"model {type(obj).__name__} ({number} parameters) was {where}(model)")
        elif isinstance(obj, torch.optim.Optimizer):
            raise StrategyError(f"optimizer {type(obj).__name__} was {where}(optimizer), after the model")
        else:
            raise StrategyError(f"a parameter of shape {tuple(obj.shape)} was {where}(its module)")

    def _distribute(self, made: Sequence[Any], own: MainSide) -> None:
        modules = [each for each in made if isinstance(each, torch.nn.Module)]
        tensors: dict[int, torch.Tensor] = {id(each): each for each in made if isinstance(each, torch.Tensor)}
        for module in modules:
            for tensor in [*module.parameters(recurse=False), *module.buffers(recurse=False)]:
                tensors.setdefault(id(tensor), tensor)
        new = [each for each in tensors.values() if each not in self.registry]
        # Sparse tensors have no place next to others; they travel as objects do.
        apart = [each for each in new if each.layout != torch.strided]
        loose = [each for each in made if not isinstance(each, torch.Tensor)]
        others: dict[int, Any] = {next(self._names): each for each in (*apart, *loose)}
        labels = _labels(modules)
        named = [(next(self._names), each) for each in new if each.layout == torch.strided]
        self._require_sendable(others, {id(tensor): name for name, tensor in named})
        settings = [settings_of(each) for each in others.values() if isinstance(each, torch.optim.Optimizer)]
        self._replicas.make_equal([tensor for _, tensor in named], labels, settings)
        variables = own.copies.place(named, labels)
        self._replicas.ask_children(child_calls.adopt_variables, self._replicas.key, variables)
        for name, tensor in named:
            self.registry.add(name, tensor)
        for placed in variables:
            own.copies.add(placed, dict(named))
        self._state |= state_diff.sent_with_tensors(dict(named))
        self._replicas.ask_children(child_calls.adopt_objects, self._replicas.key, others)
        for name, obj in others.items():
            self.registry.add(name, obj)
        own.add_objects(others)
        for name, obj in others.items():
            if name in own.updates:
                self._show_whole_state(own.updates[name], name)
            elif isinstance(obj, torch.optim.Optimizer) and not own.recipe.kept_on:
                self._marks[name] = StateMark(obj, versions=True)
        # Of the new ones only: what was changed in others has not been sent yet.
        self._state |= self._described(others)

    def _require_sendable(self, objects: dict[int, Any], names: dict[int, int]) -> None:
        """Refuses objects that cannot travel, before anything is placed.

        Args:
            objects: What is to be sent.
            names: Those that tensors in them will have, by `id`.
        """

        def reference(obj: Any) -> int | None:
            return names.get(id(obj)) or self.registry.reference(obj)

        try:
            pack(objects, reference)
        except Exception as error:
            refused = [each for each in objects.values() if not can_be_packed(each, reference)]
            inner = [each for each in refused if not _holds_one_of(each, refused)]
            instead = "Make it where it is used, or leave it out"
            raise refusal("the replicas", (inner or [objects])[0], reference, error, instead) from error

    def _check(self, made: Sequence[Any]) -> None:
        """Refuses what cannot be distributed, before anything is."""
        new = {id(each) for each in made}
        for obj in made:
            if isinstance(obj, torch.jit.ScriptModule):
                raise StrategyError(
                    f"a scripted {obj.original_name} cannot be copied to the replicas; make the module itself in the "
                    f"scope, and call torch.jit.script after the training, or torch.compile"
                )
            if isinstance(obj, torch.nn.Module):
                new |= {id(each) for each in obj.parameters(recurse=False)}
                if any(map(torch.nn.parameter.is_lazy, obj.parameters(recurse=False))):
                    raise StrategyError(
                        "a lazy module has no shape yet; call it once on an example inside the scope, before the "
                        "first run"
                    )
        for obj in made:
            if isinstance(obj, torch.optim.Optimizer):
                self._check_optimizer(obj, new)

    def _check_optimizer(self, optimizer: torch.optim.Optimizer, new: set[int]) -> None:
        _torch.compiling.refuse_compiled_step(vars(optimizer).get("step"))
        parameters = parameters_of(optimizer)
        foreign = [each for each in self.registry.without_name(parameters) if id(each) not in new]
        if foreign and not isinstance(foreign[0], torch.nn.Parameter):
            raise StrategyError(
                f"optimizer {type(optimizer).__name__} holds a tensor of shape {tuple(foreign[0].shape)} that is not "
                f"a parameter: each replica would train its own copy; make it torch.nn.Parameter(...) inside "
                f"strategy.scope()"
            )
        if foreign:
            self.tracker.refuse_if_elsewhere(foreign[0])
            raise StrategyError(
                f"optimizer {type(optimizer).__name__} holds {len(foreign)} parameter(s) that this strategy does not "
                f"manage (first: shape {tuple(foreign[0].shape)}): their model was made outside strategy.scope(). Make "
                f"it inside, before the optimizer, or call strategy.adopt(model)"
            )

    def _give_slots(self, update: SplitUpdate, name: int, *, loaded: bool = False) -> None:
        """Gives all replicas memory for the state of an optimizer, where they need other than they have."""
        slots = update.new_slots(loaded=loaded)
        if slots is not None:
            self._give_groups(name, update.optimizer)
            self._replicas.ask_children(child_calls.take_slots, self._replicas.key, name, slots, loaded)
            update.take_slots(slots, loaded=loaded)

    def _give_groups(self, name: int, optimizer: torch.optim.Optimizer) -> None:
        """Gives all replicas the parameters and options that an optimizer has now, before its state comes."""
        changes = state_diff.difference(self._state, self._described({name: optimizer}))
        if changes:
            self._replicas.ask_children(child_calls.take_changes, changes)

    def _show_whole_state(self, update: SplitUpdate, name: int) -> None:
        """Lets the controller's optimizer show the state that all replicas share."""
        kind, distribution = type(update.optimizer), weakref.proxy(self)

        def state_dict() -> dict[str, Any]:
            if not context.current_runs:
                distribution._give_slots(update, name)  # a run may have added parameters
            return kind.state_dict(update.optimizer)

        update.optimizer.state_dict = state_dict  # type: ignore[method-assign]


def _whole_state(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The state of an optimizer, without what it still has of parameters that have left its groups."""
    own, state = set(map(id, parameters_of(optimizer))), optimizer.state
    left = [each for each in state if isinstance(each, torch.Tensor) and id(each) not in own]
    apart = [(each, state.pop(each)) for each in left]
    try:
        return type(optimizer).state_dict(optimizer)
    finally:
        state.update(apart)


def _can_be_moved(tensor: torch.Tensor) -> bool:
    return not torch.nn.parameter.is_lazy(tensor) and not tensor.is_meta and tensor.layout == torch.strided


def _holds_one_of(obj: Any, others: Sequence[Any]) -> bool:
    inside = {id(each) for each in obj.modules() if each is not obj} if isinstance(obj, torch.nn.Module) else set()
    return any(id(each) in inside for each in others)


def _labels(modules: Sequence[torch.nn.Module]) -> dict[int, str]:
    """The full name of each tensor, as its outermost module has it."""
    inner = {id(child) for module in modules for child in module.children()}
    labels: dict[int, str] = {}
    for module in modules:
        if id(module) not in inner:
            for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
                labels.setdefault(id(tensor), name)
    return labels
